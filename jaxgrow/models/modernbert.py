"""ModernBERT (Warner et al., 2024): an encoder that predicts masked tokens, with Llama's layers.

See `jaxgrow.models.llama`. Shape suffixes: B batch, T positions, D embed, V vocab, C classes, L
layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxgrow.axes.names import BELOW, READ, named
from jaxgrow.layerdrop.execution import KeepMask
from jaxgrow.models.config import Cost
from jaxgrow.models.encoder import INIT, EncoderConfig, check_inputs, predicted, transformed
from jaxgrow.models.llama import LlamaConfig, layer_and_blocks, norm, rows_of
from jaxgrow.models.loss import class_logits
from jaxgrow.models.stack import KeptTokens, Observe, run_parts


@dataclass(frozen=True)
class ModernBERTConfig(EncoderConfig, LlamaConfig):
    """Config of a ModernBERT. The defaults are ModernBERT-base.

    In two of three layers, a token sees only 64 tokens before and after itself. MLPs are gated, and
    the model has no biases. All other settings are described in `LlamaConfig`.

    The norm of the embeddings is also the norm before the first layer's attention, which has no
    separate norm. The scale at this place in the stack of layers is unused, until growth copies the
    first layer upwards.
    """

    vocab: int = 50368
    context: int = 8192
    layers: int = 22
    kv_heads: int = 12
    mlp: int = 1152
    eps: float = 1e-5
    tied: bool = True
    layer_norm: bool = True
    activation: Literal["silu", "gelu", "gelu_tanh"] = "gelu"
    rope_theta: float = 160000.0
    kinds: str = "fss"
    window: int = 65
    local_theta: float = 10000.0
    # The value of the published model's training.
    masked: float = 0.3
    # The input of the head of classes: the first token, or the mean of the visible tokens.
    pooling: Literal["cls", "mean"] = "cls"

    causal: ClassVar = False
    first_norm: ClassVar = False
    tied_parts: ClassVar = ("token_embedding", "head_norm")

    @property
    def module(self) -> nn.Module:
        return ModernBERT(self)

    @property
    def idle(self) -> int:
        return self.embed  # the unused norm scale of the first layer's attention

    def cost(self, length: int) -> Cost:
        """Return the FLOPs per position.

        A layer is counted as in `LlamaConfig.cost`, with all T keys. The head takes ``2 D D`` and
        ``2 D V``, or ``2 D C``, at each position that it reads.

        Args:
          length: positions of a sample, T.
        """
        each = 2 * self.embed * self.predicted_positions(length) / length
        out = each * (self.vocab if self.head == "tokens" else self.classes)
        return Cost(
            super().cost(length).layer, each * self.embed + out, embedding=out if self.ties else 0
        )


class ModernBERT(nn.Module):
    """A ModernBERT: ``apply({"params": p}, inputs) -> logits`` in float32.

    Inputs (except ``types``) and keyword arguments are described in `jaxgrow.models.bert.BERT`.

    The head is ``norm(gelu(x W))``, followed for tokens by the tied embedding or a separate kernel,
    with a bias for every token of the vocabulary, [.., vocab]. For classes, the head reads the
    first token or the mean of the visible tokens, and ``W' + b'`` follows, [B, classes]. For spans
    and token classes, it reads every token, [B, T, classes]. ``head="states"`` returns the last
    hidden states [B, T, D].
    """

    config: ModernBERTConfig

    @nn.compact
    def __call__(
        self,
        inputs: Mapping[str, jax.Array],
        *,
        observe: Observe | None = None,
        targets: jax.Array | None = None,
        each: bool = False,
        keep_mask: KeepMask | None = None,
        kept_tokens: KeptTokens | None = None,
        frozen: int = 0,
    ):
        c = self.config
        check_inputs(c, inputs, keep_mask, kept_tokens, frozen)
        dtype, tokens_BT = jnp.dtype(c.dtype), inputs["tokens"]
        mask_BT = inputs["mask"].astype(bool) if "mask" in inputs else None
        embedding_VD = self.param(
            "token_embedding", named(INIT, "vocab", "embed" + BELOW), (c.vocab, c.embed)
        )
        layer, blocks = layer_and_blocks(self, c, tokens_BT.shape[1], mask_BT)
        x_BTD = norm(c, "embedding_norm", dtype, "embed" + BELOW)(
            rows_of(c, embedding_VD, tokens_BT)
        )
        if frozen:
            embedding_VD, x_BTD = jax.lax.stop_gradient((embedding_VD, x_BTD))
        x_BTD, seen_L = run_parts(
            layer,
            blocks,
            x_BTD,
            kept_tokens=kept_tokens,
            apply_kept_tokens=kept_tokens and partial(layer, positions=kept_tokens.positions_BS),
            frozen=frozen,
            remat=c.remat,
            scan=c.scan_layers,
            observe=observe,
            keep_mask=keep_mask,
        )
        if "positions" in inputs:
            x_BTD = jnp.take_along_axis(x_BTD, inputs["positions"][..., None], axis=1)
        x_BTD = norm(c, "final_norm", dtype)(x_BTD)
        if c.head == "states":
            x_BTD = x_BTD.astype(jnp.promote_types(dtype, jnp.float32))
            return (x_BTD, seen_L) if observe else x_BTD
        if c.head == "classes":
            x_BTD = x_BTD[:, 0] if c.pooling == "cls" else _mean(x_BTD, mask_BT)
        head_norm = norm(c, "head_norm", dtype, "embed" + READ if c.ties else "embed")
        x_BTD = transformed(c, x_BTD, head_norm, bias=c.bias)
        if c.head != "tokens":
            said = class_logits(x_BTD, c.classes, INIT)
        else:
            said = predicted(self, c, x_BTD, embedding_VD, targets, dtype, each, c.logit_cap)
        return (said, seen_L) if observe else said


def _mean(x_BTD: jax.Array, mask_BT: jax.Array | None) -> jax.Array:
    """Return the mean of the visible tokens, [B, D]; without a mask, of all tokens."""
    if mask_BT is None:
        return x_BTD.mean(1)
    return (x_BTD * mask_BT[..., None]).sum(1) / mask_BT.sum(1, keepdims=True).astype(x_BTD.dtype)

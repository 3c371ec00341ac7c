"""ModernBERT (Warner et al., 2024): an encoder that predicts masked tokens, of Llama's layers (`jaxgrow.models.llama`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxgrow.axes.names import BELOW, READ, named
from jaxgrow.layerdrop.execution import Kept
from jaxgrow.models.config import Cost
from jaxgrow.models.encoder import INIT, EncoderConfig, check_inputs, predicted, transformed
from jaxgrow.models.layers import KeptTokens, Observe, class_logits, run_parts
from jaxgrow.models.llama import LlamaConfig, layer_and_blocks, norm, rows_of


@dataclass(frozen=True)
class ModernBERTConfig(EncoderConfig, LlamaConfig):
    """ModernBERT-base, as it is: two of three layers see 64 tokens before and after their own, gated MLPs, no biases.

    All other settings are `LlamaConfig`'s. The norm of the embeddings is that of the first layer's
    attention, too, which has none of its own: the scale that stands there in the stack of layers
    does nothing, until the layer is copied upwards.
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
    masked: float = 0.3  # as it was trained
    pooling: Literal["cls", "mean"] = (
        "cls"  # what classes are of: the first token, or the mean of those that are seen
    )

    causal: ClassVar = False
    first_norm: ClassVar = False
    tied_parts: ClassVar = ("token_embedding", "head_norm")

    @property
    def module(self) -> nn.Module:
        return ModernBERT(self)

    @property
    def idle(self) -> int:
        return self.embed  # the scale of the norm that the first attention does not have

    def cost(self, length: int) -> Cost:
        """A layer as `LlamaConfig.cost`'s, with all T keys; ``2 D D`` and ``2 D V``, or ``2 D C``,
        at each place that the head reads.
        """
        each = 2 * self.embed * self.head_places(length) / length
        out = each * (self.vocab if self.head == "tokens" else self.classes)
        return Cost(
            super().cost(length).layer, each * self.embed + out, table=out if self.ties else 0
        )


class ModernBERT(nn.Module):
    """``apply({"params": p}, inputs) -> logits`` in float32; inputs, but for types, and keyword
    arguments as of `jaxgrow.models.bert.BERT`.

    The head is ``norm(gelu(x W))``, and then the table or a kernel of its own, with a bias for
    every word, [.., vocab]. For classes it is of the first token, or of the mean of those that are
    seen, and then ``W' + b'``, [B, classes]; for spans and for classes of tokens, of every token,
    [B, T, classes]. ``head="states"`` returns the last hidden states [B, T, D].
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
        kept: Kept | None = None,
        kept_tokens: KeptTokens | None = None,
        frozen: int = 0,
    ):
        c = self.config
        check_inputs(c, inputs, kept, kept_tokens, frozen)
        dtype, tokens_BT = jnp.dtype(c.dtype), inputs["tokens"]
        mask_BT = inputs["mask"].astype(bool) if "mask" in inputs else None
        table_VD = self.param(
            "token_embedding", named(INIT, "vocab", "embed" + BELOW), (c.vocab, c.embed)
        )
        layer, blocks = layer_and_blocks(self, c, tokens_BT.shape[1], mask_BT)
        x_BTD = norm(c, "embedding_norm", dtype, "embed" + BELOW)(rows_of(c, table_VD, tokens_BT))
        if frozen:
            table_VD, x_BTD = jax.lax.stop_gradient((table_VD, x_BTD))
        x_BTD, seen_L = run_parts(
            layer,
            blocks,
            x_BTD,
            kept_tokens=kept_tokens,
            apply_kept_tokens=kept_tokens and partial(layer, places=kept_tokens.places_BS),
            frozen=frozen,
            remat=c.remat,
            scan=c.scan_layers,
            observe=observe,
            kept=kept,
        )
        if "places" in inputs:
            x_BTD = jnp.take_along_axis(x_BTD, inputs["places"][..., None], axis=1)
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
            said = predicted(self, c, x_BTD, table_VD, targets, dtype, each, c.logit_cap)
        return (said, seen_L) if observe else said


def _mean(x_BTD: jax.Array, mask_BT: jax.Array | None) -> jax.Array:
    """Of the tokens that are seen, [B, D]; all, if there is no mask."""
    if mask_BT is None:
        return x_BTD.mean(1)
    return (x_BTD * mask_BT[..., None]).sum(1) / mask_BT.sum(1, keepdims=True).astype(x_BTD.dtype)

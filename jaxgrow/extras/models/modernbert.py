"""ModernBERT (Warner et al., 2024): an encoder that predicts masked tokens, with Llama's layers.

See `jaxgrow.models.llama`. Shape suffixes: B batch, T positions, D embed, V vocab, C classes, L
layers.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
from flax import linen as nn

from jaxgrow.axes.names import BELOW, READ, Tree
from jaxgrow.models.config import Cost
from jaxgrow.models.encoder import Encoder, EncoderConfig, mask_of
from jaxgrow.models.llama import LlamaConfig, embed_tokens, layer_and_blocks, norm
from jaxgrow.models.loss import class_logits
from jaxgrow.models.model import INIT, Call, Stack


@dataclass(frozen=True)
class ModernBERTConfig(EncoderConfig, LlamaConfig):
    """Config of a ModernBERT. The defaults are ModernBERT-base.

    In two of three layers, a token sees only 64 tokens before and after itself. MLPs are gated, and
    the model has no biases. All other settings are described in `LlamaConfig`.

    The norm of the embeddings is also the norm before the attention of the first layer, which has
    no separate norm. The stacked parameters contain a scale for this norm nevertheless. It is
    unused, unless a growth copies the first layer to a higher position.
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
    loops = False
    tied_parts: ClassVar = ("token_embedding", "head_norm")

    # The choices that use a field (`train.extras.effect` checks them for a training).
    used_with = {
        "masked": {"head": ("tokens",)},
        "pooling": {"head": ("classes",)},
        "logit_cap": (),
        "logit_divisor": (),
    }

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


class ModernBERT(Encoder):
    """A ModernBERT: an `Encoder` without token types.

    The head is ``norm(gelu(x W))``, followed for tokens by the tied embedding or a separate kernel,
    with a bias for every token of the vocabulary, [.., vocab]. For classes, the head reads the
    first token or the mean of the visible tokens, and ``W' + b'`` follows, [B, classes]. For spans
    and token classes, it reads every token, [B, T, classes]. ``head="states"`` returns the last
    hidden states [B, T, D].
    """

    config: ModernBERTConfig

    def embeddings(self) -> dict[str, jax.Array]:
        return {"token_embedding": self.embedding("token_embedding", "vocab", self.config.vocab)}

    def stack(self, embeddings: dict[str, jax.Array], call: Call) -> Stack:
        length = call.inputs["tokens"].shape[1]
        segments_BT = call.named("segments")
        return layer_and_blocks(self, self.config, length, mask_of(call), segments_BT)

    def embed(self, embeddings: dict[str, jax.Array], call: Call) -> jax.Array:
        x_BTD = embed_tokens(self.config, embeddings["token_embedding"], call.inputs["tokens"])
        return norm(self.config, "embedding_norm", self.dtype, "embed" + BELOW)(x_BTD)

    def answer(self, x_BTD: jax.Array, embedding_VD: jax.Array, call: Call) -> Tree:
        c = self.config
        x_BTD = norm(c, "final_norm", self.dtype)(x_BTD)
        if c.head == "states":
            return self.wide(x_BTD)
        if c.head == "classes":
            x_BTD = x_BTD[:, 0] if c.pooling == "cls" else _visible_mean(x_BTD, mask_of(call))
        head_norm = norm(c, "head_norm", self.dtype, "embed" + READ if c.ties else "embed")
        x_BTD = self.transformed(x_BTD, head_norm, bias=c.bias)
        if c.head == "tokens":
            return self.predicted(x_BTD, embedding_VD, call)
        return class_logits(x_BTD, c.classes, INIT)


def _visible_mean(x_BTD: jax.Array, mask_BT: jax.Array | None) -> jax.Array:
    """Return the mean of the visible tokens, [B, D]; without a mask, of all tokens."""
    if mask_BT is None:
        return x_BTD.mean(1)
    return (x_BTD * mask_BT[..., None]).sum(1) / mask_BT.sum(1, keepdims=True).astype(x_BTD.dtype)

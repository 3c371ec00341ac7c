"""BERT (Devlin et al., 2019) and RoBERTa (Liu et al., 2019): encoders that predict masked tokens.

Shape suffixes: B batch, T positions, S positions of the head or keys, D embed, H heads, K head_dim,
F mlp, V vocab, C classes, P rows of the position embedding, Y token types, L layers.
"""

import dataclasses
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike

from jaxgrow.axes.names import BELOW, READ, Tree
from jaxgrow.layerdrop.execution import rescaled
from jaxgrow.models.attention import segment_positions
from jaxgrow.models.bottleneck import add_adapter
from jaxgrow.models.config import Cost, Head
from jaxgrow.models.encoder import Encoder, EncoderConfig, mask_of
from jaxgrow.models.loss import class_logits
from jaxgrow.models.model import INIT, Call, Stack
from jaxgrow.models.modules import ACTIVATIONS, MLP, Linear, SelfAttention
from jaxgrow.models.norms import LayerNorm


@dataclass(frozen=True)
class BERTConfig(EncoderConfig):
    """Config of a BERT. The defaults are BERT as published.

    RoBERTa is ``vocab=50265, context=514, types=1, first_position=2, eps=1e-5``. A DistilBERT has
    no token types (``types=0``) and ``pooling="relu"``.

    ``norm="pre"`` is the BERT of Progressive Layer Dropping (Zhang & He, 2020): norms come before
    the sublayers, a final norm follows the layers, and the norm of the embeddings stays.
    """

    eps: float = 1e-12
    vocab: int = 30522
    # The number of rows of the position embedding.
    context: int = 512
    # The number of token types, for the first and the second of two texts. 0: the model
    # has no type embedding.
    types: int = 2
    norm: Literal["post", "pre"] = "post"
    # The row of the position embedding for the first token. In RoBERTa, the row before it belongs
    # to padding.
    first_position: int = 0
    # The fraction of the positions that is predicted. It determines the cost of the head in training.
    masked: float = 0.15
    # Few models use the following fields, so repr hides them.
    # The activation between the two kernels of the head of classes.
    pooling: Literal["tanh", "relu", "gelu"] = dataclasses.field(default="tanh", repr=False)
    # Whether a model without a head (``head="states"``) has the first of these two kernels.
    pooler: bool = dataclasses.field(default=False, repr=False)

    segments: ClassVar = True
    no_axes: ClassVar = ("first_position",)
    optional: ClassVar = ("first_position", "types")
    tied_parts: ClassVar = ("token_embedding", "position_embedding", "type_embedding", "head_norm")

    # The choices that use a field (`train.extras.effect` checks them for a training).
    used_with = {
        "masked": {"head": ("tokens",)},
        "pooling": ({"head": ("classes",)}, {"pooler": (True,)}),
        "pooler": {"head": ("states",)},
    }

    @property
    def pre_norm(self) -> bool:
        return self.norm == "pre"

    @property
    def depth_scaled(self) -> bool:
        return self.norm == "pre"

    @property
    def module(self) -> nn.Module:
        return BERT(self)

    def with_head(self, head: Head, classes: int = 2) -> Self:
        return replace(super().with_head(head, classes), pooler=self.pooler and head == "states")

    def cost(self, length: int) -> Cost:
        """Return the FLOPs per position.

        A layer takes ``2 * (4 D HK + 2 D F) + 4 T HK``. The head takes ``2 D D + 2 D V`` at the
        masked positions only, ``2 D D + 2 D C`` per text for classes, or ``2 D C`` for spans and
        token classes.

        Args:
          length: positions of a sample, T.
        """
        width = self.heads * self.head_dim
        kernels = 2 * (4 * self.embed * width + 2 * self.embed * self.mlp)
        positions = self.predicted_positions(length)
        out = self.vocab if self.head == "tokens" else self.classes
        transforms = {"tokens": positions, "classes": positions, "states": int(self.pooler)}.get(
            self.head, 0
        )
        transform = 2 * self.embed * self.embed * transforms / length
        decoder = 2 * self.embed * out * positions / length
        return Cost(
            kernels + 4 * length * width, transform + decoder, embedding=decoder if self.ties else 0
        )


class BERTBlock(nn.Module):
    """A post-LN block: ``x = norm(x + attention(x)); x = norm(x + mlp(x))``.

    With ``norm="pre"`` in the config, norms come before the sublayers.
    """

    config: BERTConfig
    dtype: DTypeLike

    def attention_layer(self, out_init: Initializer) -> nn.Module:
        """Return the attention sublayer."""
        return SelfAttention(self.config, INIT, out_init, self.dtype, name="attention")

    @nn.compact
    def __call__(self, x_BTD, scale=None, mask_BS=None, *positions, segments_BT=None):
        """Apply the block.

        Args:
          x_BTD: the residual stream.
          scale: factor of each sublayer's output, before a norm that follows; None: 1.
          mask_BS: True for the keys that are visible; None: all.
          positions: further arguments of the attention.
          segments_BT: segment ids of the tokens; None: all tokens are in one segment.
        """
        c = self.config
        # Both initialisers are as published. In a pre-LN model, the residual stream is the sum of
        # 2 L of these outputs, without a norm between them.
        out_init = nn.initializers.normal(0.02 / (2 * c.layers) ** 0.5) if c.norm == "pre" else INIT
        attention_norm, mlp_norm = (
            LayerNorm("embed", c.eps, self.dtype, name=name)
            for name in ("attention_norm", "mlp_norm")
        )
        attend = self.attention_layer(out_init)

        def attention(x_BTD):
            y_BTD = attend(x_BTD, mask_BS, *positions, segments_BT=segments_BT)
            return add_adapter(self, "attention", y_BTD)

        mlp = MLP(c.embed, c.mlp, INIT, out_init, self.dtype, ACTIVATIONS["gelu"], name="mlp")
        if c.norm == "pre":
            x_BTD = x_BTD + rescaled(attention(attention_norm(x_BTD)), scale, "attention")
            return x_BTD + rescaled(add_adapter(self, "mlp", mlp(mlp_norm(x_BTD))), scale, "mlp")
        x_BTD = attention_norm(x_BTD + rescaled(attention(x_BTD), scale, "attention"))
        return mlp_norm(x_BTD + rescaled(add_adapter(self, "mlp", mlp(x_BTD)), scale, "mlp"))


class BERT(Encoder):
    """A BERT: an `Encoder`. With ``norm="post"``, a dropped layer also skips its norms.

    The head depends on ``head``:

    - "tokens": ``head_norm(gelu(x W + b))``, then the tied embedding or a separate kernel, and a
      bias for every token of the vocabulary. A tied embedding has ``embed`` as an output axis, and
      the norm before the head is declared with ``embed`` as an *input axis*, as in GPT-2.
    - "classes": ``tanh(x_0 W + b) W' + b'``, [B, classes].
    - "token_classes": ``x W + b``, [B, T, classes].
    - "spans": ``x W + b``, [B, T, 2]. The first logit is for a span that begins at the position,
      and the second is for a span that ends there.
    - "states": the last hidden states, [B, T, D]. If the model has a pooler, ``tanh(x_0 W + b)`` is
      sown as ``pooled`` into the collection ``intermediates``.

    Deviation(BERT): dropout and the prediction of the next sentence are not implemented, so
    pre-training has no pooler. `lemon` widens a pre-LN model exactly to any size. It widens this
    model exactly only to multiples of the old size: for other sizes, the norm of the embeddings
    sets the remaining units of the residual stream to zeros instead of means.
    """

    config: BERTConfig

    def norm(self, name: str, axis: str = "embed") -> nn.Module:
        """Return a norm over ``axis``."""
        return LayerNorm(axis, self.config.eps, self.dtype, name=name)

    def embeddings(self) -> dict[str, jax.Array]:
        c = self.config
        return {
            "token_embedding": self.embedding("token_embedding", "vocab", c.vocab),
            "position_embedding": self.embedding("position_embedding", "context", c.context),
        }

    def stack(self, embeddings: dict[str, jax.Array], call: Call) -> Stack:
        block = BERTBlock(self.config, self.dtype, parent=None)
        return self.stack_of(block, call.named("segments"), mask_BS=mask_of(call))

    def embed(self, embeddings: dict[str, jax.Array], call: Call) -> jax.Array:
        c = self.config
        tokens_BT = call.inputs["tokens"]
        at_BTD = _position_rows(c, embeddings["position_embedding"], call)
        x_BTD = jnp.take(embeddings["token_embedding"], tokens_BT, axis=0) + at_BTD
        if c.types:
            types_YD = self.embedding("type_embedding", "types", c.types)
            if "types" in call.inputs:
                x_BTD = x_BTD + jnp.take(types_YD, call.inputs["types"], axis=0)
            else:
                x_BTD = x_BTD + types_YD[None, :1]
        return self.norm("embedding_norm", "embed" + BELOW)(x_BTD)

    def answer(self, x_BTD: jax.Array, embedding_VD: jax.Array, call: Call) -> Tree:
        c = self.config
        if c.norm == "pre":
            x_BTD = self.norm("final_norm")(x_BTD)
        if c.head == "tokens":
            head_norm = self.norm("head_norm", "embed" + READ if c.ties else "embed")
            return self.predicted(self.transformed(x_BTD, head_norm), embedding_VD, call)
        if c.head == "states":
            if c.pooler:
                self.sow("intermediates", "pooled", self.pooled(x_BTD))
            return self.wide(x_BTD)
        read = self.pooled(x_BTD) if c.head == "classes" else x_BTD
        return class_logits(read, c.classes, INIT)

    def pooled(self, x_BTD: jax.Array) -> jax.Array:
        """Return the output of the pooler for the first state, [B, D]."""
        c = self.config
        axes = ("embed" + READ, "embed")
        shape = (c.embed, c.embed)
        y_BD = Linear(axes, shape, 1, INIT, x_BTD.dtype, name="pooler")(x_BTD[:, 0])
        return ACTIVATIONS[c.pooling](y_BD)


def _position_rows(config: BERTConfig, position_embedding_PD, call: Call):
    """Return the position embeddings of the tokens, [B or 1, T, D]."""
    first = config.first_position
    length = call.inputs["tokens"].shape[1]
    mask_BT = mask_of(call)
    segments_BT = call.named("segments")
    if segments_BT is not None:
        return jnp.take(position_embedding_PD, first + segment_positions(segments_BT), axis=0)
    # BERT also counts hidden tokens.
    if mask_BT is None or first == 0:
        return position_embedding_PD[None, first : first + length]
    return jnp.take(position_embedding_PD, jnp.cumsum(mask_BT, 1) * mask_BT + first - 1, axis=0)

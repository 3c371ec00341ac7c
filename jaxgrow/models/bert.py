"""BERT (Devlin et al., 2019) and RoBERTa (Liu et al., 2019): encoders that predict masked tokens.

Shape suffixes: B batch, T positions, S positions of the head or keys, D embed, H heads, K head_dim,
F mlp, V vocab, C classes, P rows of the position embedding, Y token types, L layers.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike

from jaxgrow.axes.names import BELOW, READ, named
from jaxgrow.layerdrop.execution import KeepMask, rescaled
from jaxgrow.models.bottleneck import adapted
from jaxgrow.models.config import Cost
from jaxgrow.models.encoder import INIT, EncoderConfig, check_inputs, gelu, predicted, transformed
from jaxgrow.models.loss import class_logits
from jaxgrow.models.modules import MLP, Linear, SelfAttention
from jaxgrow.models.norms import LayerNorm
from jaxgrow.models.stack import KeptTokens, Observe, run_parts, stacked


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
    # The part of a sample's positions that is predicted. It sets the cost of the head in training.
    masked: float = 0.15
    # Few models use the following fields, so repr hides them.
    # The activation between the two kernels of the head of classes.
    pooling: Literal["tanh", "relu", "gelu"] = dataclasses.field(default="tanh", repr=False)
    # Whether a model without a head (``head="states"``) has the first of these kernels.
    pooler: bool = dataclasses.field(default=False, repr=False)

    no_axes: ClassVar = ("first_position",)
    later: ClassVar = ("pooling", "pooler")
    tied_parts: ClassVar = ("token_embedding", "position_embedding", "type_embedding", "head_norm")

    def __post_init__(self):
        super().__post_init__()
        if self.length < 1:
            raise ValueError(
                f"context={self.context} leaves no position after "
                f"first_position={self.first_position}: set a larger context"
            )

    @classmethod
    def least(cls, field: str) -> int:
        return 0 if field in ("first_position", "types") else 1

    def integers(self) -> dict[str, int]:
        return {name: n for name, n in super().integers().items() if n or name != "types"}

    @property
    def pre_norm(self) -> bool:
        return self.norm == "pre"

    @property
    def depth_scaled(self) -> bool:
        return self.norm == "pre"

    @property
    def module(self) -> nn.Module:
        return BERT(self)

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


class Block(nn.Module):
    """A post-LN block: ``x = norm(x + attention(x)); x = norm(x + mlp(x))``.

    With ``norm="pre"`` in the config, norms come before the sublayers.
    """

    config: BERTConfig
    dtype: DTypeLike

    def attention_layer(self, out_init: Initializer) -> nn.Module:
        """Return the attention sublayer."""
        c = self.config
        return SelfAttention(
            c.embed,
            c.heads,
            c.head_dim,
            False,
            INIT,
            out_init,
            self.dtype,
            c.attention,
            name="attention",
        )

    @nn.compact
    def __call__(self, x_BTD, scale=None, mask_BS=None, *positions):
        """Apply the block.

        Args:
          x_BTD: the residual stream.
          scale: factor of each sublayer's output, before a norm that follows; None: 1.
          mask_BS: True for the keys that are visible; None: all.
          positions: further arguments of the attention.
        """
        c = self.config
        # Both as published. In a pre-LN model, the residual stream is the sum of 2 L of these
        # outputs, without a norm between them.
        out_init = nn.initializers.normal(0.02 / (2 * c.layers) ** 0.5) if c.norm == "pre" else INIT
        attention_norm, mlp_norm = (
            LayerNorm("embed", c.eps, self.dtype, name=name)
            for name in ("attention_norm", "mlp_norm")
        )
        attend = self.attention_layer(out_init)

        def attention(x_BTD):
            return adapted(self, "attention", attend(x_BTD, mask_BS, *positions))

        mlp = MLP(c.embed, c.mlp, INIT, out_init, self.dtype, gelu, name="mlp")
        if c.norm == "pre":
            x_BTD = x_BTD + rescaled(attention(attention_norm(x_BTD)), scale, "attention")
            return x_BTD + rescaled(adapted(self, "mlp", mlp(mlp_norm(x_BTD))), scale, "mlp")
        x_BTD = attention_norm(x_BTD + rescaled(attention(x_BTD), scale, "attention"))
        return mlp_norm(x_BTD + rescaled(adapted(self, "mlp", mlp(x_BTD)), scale, "mlp"))


class BERT(nn.Module):
    """A BERT: ``apply({"params": p}, inputs) -> logits`` in float32.

    ========== =================== =================================================================
    inputs
    ========== =================== =================================================================
    tokens     int [B, T]
    types      int [B, T]          the type of each token; zeros if left out
    mask       bool [B, T]         the visible tokens; all if left out. RoBERTa's positions
                                   count only visible tokens
    positions     int [B, S]          the positions for which logits [B, S, vocab] are returned;
                                   all if left out
    ========== =================== =================================================================

    Keyword arguments are described in `jaxgrow.models.gpt2.GPT2`. ``frozen`` also freezes the norm
    of the embeddings. With ``norm="post"``, a dropped layer also skips its norms.

    The head depends on ``head``:

    - "tokens": ``head_norm(gelu(x W + b))``, then the tied embedding or a separate kernel, and a
      bias for every token of the vocabulary. A tied embedding writes to the residual stream, and
      the norm before the head is declared as a *reader* of ``embed``, as in GPT-2.
    - "classes": ``tanh(x_0 W + b) W' + b'``, [B, classes].
    - "token_classes": ``x W + b``, [B, T, classes].
    - "spans": ``x W + b``, [B, T, 2]. The first logit is for a span that begins at the position,
      and the second is for a span that ends there.
    - "states": the last hidden states, [B, T, D]. If the model has a pooler, ``tanh(x_0 W + b)`` is
      sown as ``pooled`` into the collection ``intermediates``.

    Deviation(BERT): dropout and the prediction of the next sentence are not implemented, so
    pre-training has no pooler. `lemon` widens a pre-LN model exactly. It does not widen this model
    exactly to sizes that are not multiples of the old ones, because the norm of the embeddings sets
    the spare units to zeros, not means.
    """

    config: BERTConfig

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
        embedding_VD = self.param(
            "token_embedding", named(INIT, "vocab", "embed" + BELOW), (c.vocab, c.embed)
        )
        position_embedding_PD = self.param(
            "position_embedding", named(INIT, "context", "embed" + BELOW), (c.context, c.embed)
        )
        # The block is detached: only its init and apply are used.
        block = Block(c, dtype, parent=None)
        blocks = stacked(self, "blocks", block, c.layers, jnp.zeros((1, 1, c.embed), dtype))

        mask_BT = inputs["mask"].astype(bool) if "mask" in inputs else None
        x_BTD = jnp.take(embedding_VD, tokens_BT, axis=0) + _positions(
            c, position_embedding_PD, tokens_BT.shape[1], mask_BT
        )
        if c.types:
            types_YD = self.param(
                "type_embedding", named(INIT, "types", "embed" + BELOW), (c.types, c.embed)
            )
            x_BTD = x_BTD + (
                jnp.take(types_YD, inputs["types"], axis=0)
                if "types" in inputs
                else types_YD[None, :1]
            )
        x_BTD = LayerNorm("embed" + BELOW, c.eps, dtype, name="embedding_norm")(x_BTD)
        if frozen:
            embedding_VD, x_BTD = jax.lax.stop_gradient((embedding_VD, x_BTD))
        x_BTD, seen_L = run_parts(
            lambda w, x, scale=None: block.apply({"params": w}, x, scale, mask_BT),
            blocks,
            x_BTD,
            kept_tokens=kept_tokens,
            frozen=frozen,
            remat=c.remat,
            scan=c.scan_layers,
            observe=observe,
            keep_mask=keep_mask,
        )
        said = answered(self, c, x_BTD, inputs, embedding_VD, targets, each)
        return (said, seen_L) if observe else said


def answered(
    module: nn.Module,
    config: BERTConfig,
    x_BTD: jax.Array,
    inputs: Mapping[str, jax.Array],
    embedding_VD: jax.Array,
    targets: jax.Array | None,
    each: bool,
):
    """Return the outputs of the head for the output of the layers.

    Call it inside the compact ``module``. The other arguments are those of `BERT`.
    """
    c, dtype = config, x_BTD.dtype
    if "positions" in inputs:
        x_BTD = jnp.take_along_axis(x_BTD, inputs["positions"][..., None], axis=1)
    if c.norm == "pre":
        x_BTD = LayerNorm("embed", c.eps, dtype, name="final_norm")(x_BTD)
    if c.head != "tokens":
        return _classes_or_states(module, c, x_BTD)
    head_norm = LayerNorm("embed" + READ if c.ties else "embed", c.eps, dtype, name="head_norm")
    x_BTD = transformed(c, x_BTD, head_norm)
    return predicted(module, c, x_BTD, embedding_VD, targets, dtype, each)


_POOLINGS = {"tanh": jnp.tanh, "relu": jax.nn.relu, "gelu": gelu}


def _classes_or_states(module: nn.Module, config: BERTConfig, x_BTD: jax.Array) -> jax.Array:
    """Return the outputs of a model that does not predict tokens, in float32 or better.

    Call it inside the compact ``module``.
    """

    def pooled() -> jax.Array:
        axes, shape = ("embed" + READ, "embed"), (config.embed, config.embed)
        y_BD = Linear(axes, shape, 1, INIT, x_BTD.dtype, name="pooler")(x_BTD[:, 0])
        return _POOLINGS[config.pooling](y_BD)

    if config.head == "states":
        if config.pooler:
            module.sow("intermediates", "pooled", pooled())
        return x_BTD.astype(jnp.promote_types(x_BTD.dtype, jnp.float32))
    return class_logits(pooled() if config.head == "classes" else x_BTD, config.classes, INIT)


def _positions(config: BERTConfig, position_embedding_PD, length: int, mask_BT):
    """Return the position embeddings of the tokens, [B or 1, T, D]."""
    first = config.first_position
    # BERT also counts hidden tokens.
    if mask_BT is None or first == 0:
        return position_embedding_PD[None, first : first + length]
    return jnp.take(position_embedding_PD, jnp.cumsum(mask_BT, 1) * mask_BT + first - 1, axis=0)

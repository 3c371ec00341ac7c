"""BERT and RoBERTa (Devlin et al., 2019; Liu et al., 2019): encoders that predict masked tokens."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from jaxgrow.axes.names import BELOW, READ, named
from jaxgrow.layerdrop.execution import Kept, rescaled
from jaxgrow.models.bottleneck import adapted
from jaxgrow.models.config import Cost
from jaxgrow.models.encoder import INIT, EncoderConfig, check_inputs, gelu, predicted, transformed
from jaxgrow.models.layers import (
    MLP,
    KeptTokens,
    LayerNorm,
    Linear,
    Observe,
    SelfAttention,
    class_logits,
    run_parts,
    stacked,
)


@dataclass(frozen=True)
class BERTConfig(EncoderConfig):
    """BERT as published; RoBERTa is ``vocab=50265, context=514, types=1, first_position=2, eps=1e-5``.

    A DistilBERT has no types of tokens (``types=0``), and ``pooling="relu"``.

    ``norm="pre"`` is the BERT of Progressive Layer Dropping (Zhang & He, 2020): norms before the
    sublayers, a final one after the layers, and that of the embeddings still in its place.
    """

    eps: float = 1e-12
    vocab: int = 30522
    context: int = 512  # rows of the position table
    types: int = 2  # of tokens: the first and the second of two texts; 0: there is no table of them
    norm: Literal["post", "pre"] = "post"
    first_position: int = (
        0  # the row of the first token; RoBERTa's padding sits in the one before it
    )
    masked: float = (
        0.15  # the part of a sample's places that is predicted: what the head costs in training
    )
    # Fields of few models, which are not shown: the activation between the two kernels of a head of
    # classes, and whether a model without a head (``head="states"``) has the first of these
    # kernels.
    pooling: Literal["tanh", "relu"] = dataclasses.field(default="tanh", repr=False)
    pooler: bool = dataclasses.field(default=False, repr=False)

    no_axes: ClassVar = ("first_position",)
    later: ClassVar = ("pooling", "pooler")
    tied_parts: ClassVar = ("token_embedding", "position_embedding", "type_embedding", "head_norm")

    def __post_init__(self):
        super().__post_init__()
        if self.length < 1:
            raise ValueError(
                f"a context of {self.context} has no row for a first position of {self.first_position}"
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
        """``2 * (4 D HK + 2 D F) + 4 T HK`` in a layer; ``2 D D + 2 D V`` in the head, at the
        masked places alone, ``2 D D + 2 D C`` once a text, or ``2 D C`` for spans and classes of
        tokens.
        """
        width = self.heads * self.head_dim
        kernels = 2 * (4 * self.embed * width + 2 * self.embed * self.mlp)
        places = self.head_places(length)
        out = self.vocab if self.head == "tokens" else self.classes
        transforms = {"tokens": places, "classes": places, "states": int(self.pooler)}.get(
            self.head, 0
        )
        transform = 2 * self.embed * self.embed * transforms / length
        decoder = 2 * self.embed * out * places / length
        return Cost(
            kernels + 4 * length * width, transform + decoder, table=decoder if self.ties else 0
        )


class Block(nn.Module):
    """``x = norm(x + attention(x)); x = norm(x + mlp(x))`` as published, or with the norms before, as the config says."""

    config: BERTConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x_BTD, scale=None, mask_BS=None):
        """Apply the block; ``scale`` multiplies the output of each sublayer, before a norm that follows."""
        c = self.config
        # As published, each: the residual stream of a pre-LN model adds 2 L of these, and no norm
        # comes between.
        out_init = nn.initializers.normal(0.02 / (2 * c.layers) ** 0.5) if c.norm == "pre" else INIT
        attention_norm, mlp_norm = (
            LayerNorm("embed", c.eps, self.dtype, name=name)
            for name in ("attention_norm", "mlp_norm")
        )
        attention = SelfAttention(
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
        mlp = MLP(c.embed, c.mlp, INIT, out_init, self.dtype, gelu, name="mlp")
        if c.norm == "pre":
            y_BTD = adapted(self, "attention", attention(attention_norm(x_BTD), mask_BS))
            x_BTD = x_BTD + rescaled(y_BTD, scale, "attention")
            return x_BTD + rescaled(adapted(self, "mlp", mlp(mlp_norm(x_BTD))), scale, "mlp")
        x_BTD = attention_norm(
            x_BTD
            + rescaled(adapted(self, "attention", attention(x_BTD, mask_BS)), scale, "attention")
        )
        return mlp_norm(x_BTD + rescaled(adapted(self, "mlp", mlp(x_BTD)), scale, "mlp"))


class BERT(nn.Module):
    """``apply({"params": p}, inputs) -> logits`` in float32 of what stands at each place; ``observe`` as of `GPT2`.

    ========== =================== =======================================================================================
    inputs
    ========== =================== =======================================================================================
    tokens     int [B, T]
    types      int [B, T]          of each token; zeros if left out
    mask       bool [B, T]         the tokens that are seen; all if left out. RoBERTa's positions count these alone
    places     int [B, S]          where logits are wanted: they are [B, S, vocab] then, else [B, T, vocab]
    ========== =================== =======================================================================================

    ``kept``, ``kept_tokens`` and ``frozen`` are `jaxgrow.models.gpt2.GPT2`'s; the norm of the
    embeddings freezes with them. Under ``norm="post"``, a dropped layer leaves its norms out, too.

    The head is ``head_norm(gelu(x W + b))``, then the table or a kernel of its own, and a bias for
    every word. Where the table is used both ways, it is a writer, and the norm before it is
    declared as a *reader* of ``embed``, as in GPT-2. With ``head="classes"`` it is
    ``tanh(x_0 W + b) W' + b'``, [B, classes]; with ``"token_classes"``, ``x W + b`` [B, T,
    classes]; with ``"spans"``, ``x W + b`` [B, T, 2], of which the first is that a span begins at a
    place, and the second that it ends there. ``head="states"`` returns the last hidden states [B,
    T, D], and sows ``tanh(x_0 W + b)`` as ``pooled`` into the collection ``intermediates`` if the
    model has a pooler.

    Deviation(BERT): no dropout, no prediction of the next sentence, and so no pooler. `lemon`
    widens a pre-LN model exactly, but not this one to sizes that are no multiple: its first norm
    gives the spare units zeros, not means.
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
        kept: Kept | None = None,
        kept_tokens: KeptTokens | None = None,
        frozen: int = 0,
    ):
        c = self.config
        check_inputs(c, inputs, kept, kept_tokens, frozen)
        dtype, tokens_BT = jnp.dtype(c.dtype), inputs["tokens"]
        table_VD = self.param(
            "token_embedding", named(INIT, "vocab", "embed" + BELOW), (c.vocab, c.embed)
        )
        places_PD = self.param(
            "position_embedding", named(INIT, "context", "embed" + BELOW), (c.context, c.embed)
        )
        block = Block(c, dtype, parent=None)  # detached: only its init and apply are used
        blocks = stacked(self, "blocks", block, c.layers, jnp.zeros((1, 1, c.embed), dtype))

        mask_BT = inputs["mask"].astype(bool) if "mask" in inputs else None
        x_BTD = jnp.take(table_VD, tokens_BT, axis=0) + _positions(
            c, places_PD, tokens_BT.shape[1], mask_BT
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
            table_VD, x_BTD = jax.lax.stop_gradient((table_VD, x_BTD))
        x_BTD, seen_L = run_parts(
            lambda w, x, scale=None: block.apply({"params": w}, x, scale, mask_BT),
            blocks,
            x_BTD,
            kept_tokens=kept_tokens,
            frozen=frozen,
            remat=c.remat,
            scan=c.scan_layers,
            observe=observe,
            kept=kept,
        )
        if "places" in inputs:
            x_BTD = jnp.take_along_axis(x_BTD, inputs["places"][..., None], axis=1)
        if c.norm == "pre":
            x_BTD = LayerNorm("embed", c.eps, dtype, name="final_norm")(x_BTD)
        if c.head != "tokens":
            said = _classes_or_states(self, c, x_BTD)
            return (said, seen_L) if observe else said
        head_norm = LayerNorm("embed" + READ if c.ties else "embed", c.eps, dtype, name="head_norm")
        said = predicted(self, c, transformed(c, x_BTD, head_norm), table_VD, targets, dtype, each)
        return (said, seen_L) if observe else said


def _classes_or_states(module: nn.Module, config: BERTConfig, x_BTD: jax.Array) -> jax.Array:
    """The outputs of a model that predicts no tokens, in float32 or better. Inside of the compact ``module``."""

    def pooled() -> jax.Array:
        axes, shape = ("embed" + READ, "embed"), (config.embed, config.embed)
        y_BD = Linear(axes, shape, 1, INIT, x_BTD.dtype, name="pooler")(x_BTD[:, 0])
        return jnp.tanh(y_BD) if config.pooling == "tanh" else jax.nn.relu(y_BD)

    if config.head == "states":
        if config.pooler:
            module.sow("intermediates", "pooled", pooled())
        return x_BTD.astype(jnp.promote_types(x_BTD.dtype, jnp.float32))
    return class_logits(pooled() if config.head == "classes" else x_BTD, config.classes, INIT)


def _positions(config: BERTConfig, places_PD, length: int, mask_BT):
    """The rows of the position table, [B or 1, T, D]."""
    first = config.first_position
    if mask_BT is None or first == 0:  # BERT numbers what is hidden, too
        return places_PD[None, first : first + length]
    return jnp.take(places_PD, jnp.cumsum(mask_BT, 1) * mask_BT + first - 1, axis=0)

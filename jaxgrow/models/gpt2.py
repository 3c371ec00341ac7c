"""GPT-2 (Radford et al., 2019) and OPT (Zhang et al., 2022): pre-LN decoders with learned positions."""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from jaxgrow.axes.names import BELOW, READ, named
from jaxgrow.layerdrop.execution import Kept, rescaled
from jaxgrow.models.attention import mean_keys
from jaxgrow.models.bottleneck import adapted
from jaxgrow.models.config import Cost, TextConfig, head_cost
from jaxgrow.models.layers import (
    MLP,
    KeptTokens,
    LayerNorm,
    Observe,
    Past,
    SelfAttention,
    class_logits,
    last_tokens,
    run_after,
    run_parts,
    stacked,
    token_head,
    vocabulary_logits,
)


@dataclass(frozen=True)
class GPT2Config(TextConfig):
    """Sizes are named as their axes are, so that a growth's new sizes are the grown model's config (`resized`)."""

    vocab: int = 50304  # GPT-2's 50257, padded to a multiple of 128
    activation: Literal["gelu_tanh", "gelu", "relu"] = (
        "gelu_tanh"  # of the MLP; Cerebras-GPT has the exact form, OPT ReLU
    )
    # The row of the first token in the table of positions; OPT's is 2. Few models have another than
    # 0, so it is not shown.
    first_position: int = dataclasses.field(default=0, repr=False)

    no_axes: ClassVar = ("first_position",)
    causal: ClassVar = True
    tied_parts: ClassVar = ("token_embedding", "position_embedding", "final_norm")
    later: ClassVar = ("activation", "first_position")

    def __post_init__(self):
        super().__post_init__()
        if self.length < 1:
            raise ValueError(
                f"a context of {self.context} has no row for a first position of {self.first_position}"
            )

    @classmethod
    def least(cls, field: str) -> int:
        return 0 if field == "first_position" else 1

    def integers(self) -> dict[str, int]:
        return {name: n for name, n in super().integers().items() if n or name != "first_position"}

    @property
    def module(self) -> nn.Module:
        return GPT2(self)

    @property
    def example(self) -> jax.Array:
        return jnp.zeros((1, 1), jnp.int32)  # tokens [B, T]

    @property
    def depth_scaled(self) -> bool:
        return True

    @property
    def length(self) -> int:
        return self.context - self.first_position

    def cost(self, length: int) -> Cost:
        """``2 * (4 D HK + 2 D F)`` in the kernels of a layer, ``4 * S HK`` in scores and their
        weighted sum, with S the mean number of keys that are computed for a query, of which the
        mask hides some; ``2 D V`` in the head, or ``2 D C`` a text.
        """
        width, head = self.heads * self.head_dim, head_cost(self, length)
        kernels = 2 * (4 * self.embed * width + 2 * self.embed * self.mlp)
        return Cost(kernels + 4 * mean_keys(length) * width, head, table=head if self.ties else 0)


class Block(nn.Module):
    """``x += attention(norm(x)); x += mlp(norm(x))``."""

    config: GPT2Config
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x_BTD, scale=None, past=None):
        """``scale`` multiplies what each sublayer adds (`jaxgrow.layerdrop.Kept`); ``past`` as of `run_after`."""
        c = self.config
        init = nn.initializers.normal(0.02)
        out_init = nn.initializers.normal(
            0.02 / (2 * c.layers) ** 0.5
        )  # the residual stream adds 2 L of these
        h_BTD = LayerNorm("embed", c.eps, self.dtype, name="attention_norm")(x_BTD)
        attention = SelfAttention(
            c.embed,
            c.heads,
            c.head_dim,
            True,
            init,
            out_init,
            self.dtype,
            c.attention,
            name="attention",
        )
        x_BTD = x_BTD + rescaled(
            adapted(self, "attention", attention(h_BTD, past=past)), scale, "attention"
        )
        h_BTD = LayerNorm("embed", c.eps, self.dtype, name="mlp_norm")(x_BTD)
        activation = (
            jax.nn.relu
            if c.activation == "relu"
            else partial(jax.nn.gelu, approximate=c.activation != "gelu")
        )
        mlp = MLP(c.embed, c.mlp, init, out_init, self.dtype, activation, name="mlp")
        return x_BTD + rescaled(adapted(self, "mlp", mlp(h_BTD)), scale, "mlp")


class GPT2(nn.Module):
    """``apply({"params": p}, tokens [B, T]) -> logits [B, T, vocab]`` in float32; with ``observe``,
    what that makes of each layer's input and output, too, stacked [L, ..]:
    ``observe=jaxgrow.growth.report.rms``.

    With ``targets``, int [B, T], ``(mean cross-entropy, accuracy)`` instead, without all logits at
    once (`vocabulary_loss`); with ``each``, that of every place, [B, T]. With ``head="classes"``,
    ``-> logits [B, classes]`` of the text up to its last token, which is that before
    ``inputs["lengths"]``, int [B], where inputs are ``{"tokens": .., "lengths": ..}``.

    With a `Past`, tokens are those that come next, and what is returned is
    ``(logits of the last token [B, vocab], the Past of these tokens alone)``; ``inputs["lengths"]``
    as above.

    ``kept`` says which layers run (`jaxgrow.layerdrop.Kept`); without it all do, unscaled.
    ``kept_tokens`` says which tokens pass which layers, the others going around them
    (`KeptTokens`). The bottom ``frozen`` layers, if any, and the embeddings have no gradient, and
    no backward pass is run for them; a tied head has none either.

    A tied head uses the table both ways, as a writer into the residual stream and as a reader of
    the final norm's output. The table is declared as a writer, so growing copies it; the final norm
    is declared as a *reader* of ``embed``, so it takes the missing 1/k. This keeps the function,
    and coalescing still inverts it. (`GPT2Config.paper_axes` is the other way.)
    """

    config: GPT2Config

    @nn.compact
    def __call__(
        self,
        inputs,
        *,
        observe: Observe | None = None,
        targets: jax.Array | None = None,
        each: bool = False,
        kept: Kept | None = None,
        kept_tokens: KeptTokens | None = None,
        frozen: int = 0,
        past: Past | None = None,
    ):
        c = self.config
        if kept is not None and (kept_tokens is not None or frozen):
            raise ValueError(
                "layers are dropped from a whole stack: not together with token dropping or frozen layers"
            )
        if past is not None and (
            observe or frozen or not all(x is None for x in (targets, kept, kept_tokens))
        ):
            raise ValueError(
                "what reads on from a past gives logits of its last tokens, from all layers: give past alone"
            )
        dtype, (tokens_BT, last_B) = jnp.dtype(c.dtype), last_tokens(inputs)
        if tokens_BT.shape[1] > c.length:
            raise ValueError(
                f"a sequence of {tokens_BT.shape[1]} tokens is longer than the context of {c.length}"
            )
        init = nn.initializers.normal(0.02)
        table_VD = self.param(
            "token_embedding", named(init, "vocab", "embed" + BELOW), (c.vocab, c.embed)
        )
        places_TD = self.param(
            "position_embedding", named(init, "context", "embed" + BELOW), (c.context, c.embed)
        )
        block = Block(c, dtype, parent=None)  # detached: only its init and apply are used
        blocks = stacked(self, "blocks", block, c.layers, jnp.zeros((1, 1, c.embed), dtype))

        if frozen:
            table_VD, places_TD = jax.lax.stop_gradient((table_VD, places_TD))
        first, length, x_BTD = (
            c.first_position,
            tokens_BT.shape[1],
            jnp.take(table_VD, tokens_BT, axis=0),
        )
        at_BTD = (
            places_TD[None, first : first + length]
            if past is None
            else places_TD[first + past.places_BT(length)]
        )
        x_BTD = (x_BTD + at_BTD).astype(dtype)

        def layer(w, x, *scale, **reading):
            return block.apply({"params": w}, x, *scale, **reading)

        if past is not None:
            x_BTD, more = run_after(layer, blocks, x_BTD, past, last_B, scan=c.scan_layers)
        else:
            x_BTD, more = run_parts(
                layer,
                blocks,
                x_BTD,
                kept_tokens=kept_tokens,
                frozen=frozen,
                remat=c.remat,
                scan=c.scan_layers,
                observe=observe,
                kept=kept,
            )
        x_BTD = LayerNorm("embed" + READ if c.ties else "embed", c.eps, dtype, name="final_norm")(
            x_BTD
        )
        if c.head == "classes":
            logits_BC = class_logits(
                x_BTD[jnp.arange(len(x_BTD)), last_B], c.classes, init, bias=False
            )
            return (logits_BC, more) if observe else logits_BC
        head_axes, head_shape = ("embed" + READ, "vocab"), (c.embed, c.vocab)
        head_DV = (
            table_VD.T if c.tied else self.param("head_kernel", named(init, *head_axes), head_shape)
        )
        if past is not None:
            return vocabulary_logits(x_BTD, head_DV, dtype)[:, 0], more
        said = token_head(x_BTD, head_DV, targets, dtype, each=each, positions=c.head_positions)
        return (said, more) if observe else said

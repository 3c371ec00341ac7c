"""GPT-2 (Radford et al., 2019): a pre-LN decoder with learned positions."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxgrow.axes import READ, Tree, axis, is_names, named, reads, split
from jaxgrow.drop.execution import Kept
from jaxgrow.maps import Growth, Rules, new_sizes
from jaxgrow.models.layers import MLP, LayerNorm, SelfAttention, Some, run_parts, stacked_init


@dataclass(frozen=True)
class GPT2Config:
    """Sizes are named as their axes are, so that a growth's new sizes are the grown model's config (`resized`)."""

    vocab: int = 50304  # GPT-2's 50257, padded to a multiple of 128
    context: int = 1024
    layers: int = 12
    embed: int = 768
    heads: int = 12
    head_dim: int = 64
    mlp: int = 3072
    tied: bool = True
    eps: float = 1e-5  # of the norms
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"  # of activations; parameters are float32 or better
    remat: bool = False

    def __post_init__(self):
        wrong = [n for n in ("vocab", "context", "layers", "embed", "heads", "head_dim", "mlp") if getattr(self, n) < 1]
        if wrong:
            raise ValueError("a GPT-2 needs at least 1 of " + ", ".join(f"{n} (is {getattr(self, n)})" for n in wrong))
        if self.dtype not in ("float32", "bfloat16", "float64"):
            raise ValueError(f"dtype is 'float32', 'bfloat16' or 'float64', not {self.dtype!r}")


class Block(nn.Module):
    config: GPT2Config
    dtype: Any

    @nn.compact
    def __call__(self, x_BTD, scale=None):
        """``scale`` multiplies what each sublayer adds (`jaxgrow.drop.Kept`)."""
        c = self.config
        scale = 1 if scale is None else scale.astype(self.dtype)
        init = nn.initializers.normal(0.02)
        out_init = nn.initializers.normal(0.02 / (2 * c.layers) ** 0.5)  # the residual stream adds 2 L of these
        h_BTD = LayerNorm("embed", c.eps, self.dtype, name="attention_norm")(x_BTD)
        attention = SelfAttention(c.embed, c.heads, c.head_dim, True, init, out_init, self.dtype, name="attention")
        x_BTD = x_BTD + scale * attention(h_BTD)
        h_BTD = LayerNorm("embed", c.eps, self.dtype, name="mlp_norm")(x_BTD)
        return x_BTD + scale * MLP(c.embed, c.mlp, init, out_init, self.dtype, name="mlp")(h_BTD)


class GPT2(nn.Module):
    """``apply({"params": p}, tokens [B, T]) -> logits [B, T, vocab]`` in float32; ``rms=True`` adds each layer's RMS [L].

    ``kept`` says which layers run (`jaxgrow.drop.Kept`); without it all do, unscaled. ``some`` says which tokens pass which
    layers, the others going around them (`Some`). The bottom ``frozen`` layers, if any, and the embeddings have no gradient,
    and no backward pass is run for them; a tied head has none either.

    A tied head uses the table both ways, as a writer into the residual stream and as a reader of the final norm's output.
    The table is declared as a writer, so growing copies it; the final norm is declared as a *reader* of ``embed``, so it
    takes the missing 1/k. This keeps the function, and coalescing still inverts it. (`paper_tied_axes` is the other way.)
    """

    config: GPT2Config

    @nn.compact
    def __call__(
        self, tokens_BT, *, rms: bool = False, kept: Kept | None = None, some: Some | None = None, frozen: int = 0
    ):
        c = self.config
        if kept is not None and (some is not None or frozen):
            raise ValueError("layers are dropped from a whole stack: not together with token dropping or frozen layers")
        dtype = jnp.dtype(c.dtype)
        if tokens_BT.shape[1] > c.context:
            raise ValueError(f"a sequence of {tokens_BT.shape[1]} tokens is longer than the context of {c.context}")
        init = nn.initializers.normal(0.02)
        table_VD = self.param("token_embedding", named(init, "vocab", "embed"), (c.vocab, c.embed))
        places_TD = self.param("position_embedding", named(init, "context", "embed"), (c.context, c.embed))
        block = Block(c, dtype, parent=None)  # detached: only its init and apply are used
        blocks = self.param("blocks", lambda key: stacked_init(block, key, c.layers, jnp.zeros((1, 1, c.embed), dtype)))

        if frozen:
            table_VD, places_TD = jax.lax.stop_gradient((table_VD, places_TD))
        x_BTD = (jnp.take(table_VD, tokens_BT, axis=0) + places_TD[None, : tokens_BT.shape[1]]).astype(dtype)
        x_BTD, rms_L = run_parts(
            lambda w, x, *scale: block.apply({"params": w}, x, *scale),
            blocks,
            x_BTD,
            some=some,
            frozen=frozen,
            remat=c.remat,
            rms=rms,
            kept=kept,
        )
        x_BTD = LayerNorm("embed" + READ if c.tied else "embed", c.eps, dtype, name="final_norm")(x_BTD)
        head_axes, head_shape = ("embed" + READ, "vocab"), (c.embed, c.vocab)
        head_DV = table_VD.T if c.tied else self.param("head_kernel", named(init, *head_axes), head_shape)
        logits_NV = jnp.matmul(  # N = B T
            x_BTD.reshape(-1, c.embed),
            head_DV.astype(dtype),
            preferred_element_type=jnp.promote_types(dtype, jnp.float32),
        )
        logits_BTV = logits_NV.reshape(*tokens_BT.shape, c.vocab)
        return (logits_BTV, rms_L) if rms else logits_BTV


def init(config: GPT2Config, key: jax.Array) -> Tree:
    """Fresh parameters: a plain nested dict of arrays. Pure; jit it."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    return split(GPT2(config).init(key, tokens)["params"])[0]


def axes(config: GPT2Config) -> Tree:
    """The axis names of the parameters, without making any."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    return split(jax.eval_shape(GPT2(config).init, jax.random.key(0), tokens)["params"])[1]


def resized(config: GPT2Config, growth: Growth) -> GPT2Config:
    """The config of the grown model."""
    eps = config.eps * growth.eps if isinstance(growth, Rules) else config.eps
    return replace(config, **new_sizes(growth), eps=eps)


def paper_tied_axes(axes: Tree) -> Tree:
    """The axes tree under which a tied model grows as in the published GPT-2 code (``tied="paper"``).

    There the tables *read* ``embed``: coalescing sums them, de-coalescing divides them by the group size; the final norm
    is copied. This does not keep the function (Zou et al.'s repository documents an error of 9e-2; see
    ``tests/test_laws.py``): the residual stream is scaled where it begins, but not where the blocks add to it.
    """

    def other(names):
        return tuple(n if axis(n) != "embed" else "embed" if reads(n) else "embed" + READ for n in names)

    tied = ("token_embedding", "position_embedding", "final_norm")
    return {k: jax.tree.map(other, v, is_leaf=is_names) if k in tied else v for k, v in axes.items()}

"""Llama (Touvron et al., 2023) and related decoders with rotary positions and GQA.

The families differ only in their config. `jaxgrow.extras.families.llama_like` has the settings of
Qwen3, Mistral, Gemma 2 and 3, OLMo 2, Phi-3, SmolLM 3 and Pythia.

Shape suffixes: B batch, T positions, S keys, D embed, H heads, G key/value heads, K head_dim, F
mlp, V vocab, C classes, R rotated dimensions of a head, I pairs of them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike

from jaxgrow.axes.names import LAYERS, POST, READ, VALUE, Params, Tree, named_init
from jaxgrow.axes.size_error import SizeError
from jaxgrow.growth.maps import Growth, Rules, by_axes
from jaxgrow.growth.matrices import dense
from jaxgrow.layerdrop.execution import rescaled
from jaxgrow.models.attention import (
    CONTINUING,
    KEPT,
    ScoreForm,
    attention,
    mean_keys,
    segment_positions,
)
from jaxgrow.models.bottleneck import add_adapter
from jaxgrow.models.config import (
    EXPERTS,
    FLOATS,
    SHARED,
    Cost,
    OperatorTraits,
    TextConfig,
    head_cost,
)
from jaxgrow.models.decoder import Decoder
from jaxgrow.models.loss import last_tokens
from jaxgrow.models.model import Call, Stack, tokens_at
from jaxgrow.models.modules import ACTIVATIONS, MLP, Linear, merge_heads, project_together
from jaxgrow.models.norms import LayerNorm, RMSNorm
from jaxgrow.models.stack import loop_blocks, stacked_blocks
from jaxgrow.registry import Registry

# The module ``Experts`` of a mixture, and ``expert_rows``, the number of rows that it computes.
MIXTURES: Registry[Callable[..., Any]] = Registry("mixture of experts")


# Other scalings of rotary positions than "llama3" and "linear": functions of the config and of the
# number of positions. They return the frequencies [R/2], and a factor of queries and keys.
SCALINGS: Registry[Callable[..., tuple[np.ndarray, float]]] = Registry("rotary scaling")
# Those of them that depend on the length of each segment. They return the rotations of each kind of
# layer, and the row of each token in them [B, T].
SEGMENTS: Registry[Callable[..., tuple[list, jax.Array]]] = Registry("scaling of segments")


class LayerKind(NamedTuple):
    """The properties in which the layers of a model may differ.

    Attributes:
      window: whether a position sees only `LlamaConfig.window` tokens.
      positions: the frequencies of the rotary positions.
    """

    window: bool
    positions: Literal["global", "local", "none"]


_ROTARY = {"kinds": ("f", "s")}
_SCALED = _ROTARY | {"rope_factor": "changed"}
KINDS = {
    "f": LayerKind(False, "global"),
    "s": LayerKind(True, "local"),
    "n": LayerKind(False, "none"),
}


@dataclass(frozen=True)
class LlamaConfig(TextConfig):
    """Config of a Llama and of related decoders.

    Query head i uses key/value head ``i // (heads / kv_heads)`` (GQA, Ainslie et al., 2023), so
    these two axes grow together. ``head_dim`` should not change when a model grows, because rotary
    positions give each pair of its dimensions a frequency. The same holds for ``embed_scale`` and
    ``score_dim``, which other implementations derive from sizes.
    """

    eps: float = 1e-6
    vocab: int = 32000
    context: int = 2048
    kv_heads: int = 4
    tied: bool = False
    # Biases of queries, keys and values (Qwen2).
    qkv_bias: bool = False
    # A bias of attention's output only.
    out_bias: bool = False
    rope_theta: float = 10000.0
    # Scaling of the rotary positions for a longer context. "linear": all frequencies are divided by
    # ``rope_factor``. "llama3" (Dubey et al., 2024): frequencies with fewer than ``rope_low`` turns
    # in ``rope_context`` positions are divided by ``rope_factor``, and frequencies with more than
    # ``rope_high`` turns stay unchanged.
    rope_factor: float = 1.0
    rope_low: float = 1.0
    rope_high: float = 4.0
    rope_context: int = 8192
    # "longrope" (Ding et al., 2024): each frequency has its own divisor, from ``rope_short`` in
    # sequences of up to ``rope_context`` tokens and from ``rope_long`` in longer sequences. Queries
    # and keys are multiplied by ``rope_scale``. "yarn" (Peng et al., 2023): like "llama3", but the
    # weight of the division grows linearly with the index of the pair of dimensions, between the
    # pairs with ``rope_high`` and ``rope_low`` turns (their indices are rounded to integers if
    # ``rope_truncated``). It also uses ``rope_scale``. "dynamic": the base is greater in sequences
    # longer than ``context``, up to ``rope_factor * context`` tokens.
    rope_by: Literal["llama3", "linear", "longrope", "yarn", "dynamic"] = "llama3"
    rope_truncated: bool = True
    rope_short: FLOATS = ()
    rope_long: FLOATS = ()
    rope_scale: float = 1.0
    # The fraction of each head's dimensions that rotary positions rotate.
    rotary: float = 1.0
    # A letter of `KINDS` for each layer; the string repeats if there are more layers. "f": the
    # layer sees all tokens. "s": it sees the last ``window`` tokens, with ``local_theta``. "n": it
    # sees all tokens, without positions.
    kinds: str = "f"
    # In an encoder, a position sees the tokens fewer than ``window`` positions away on both sides.
    window: int = 4096
    # The base of rotary positions in layers with a window; 0: ``rope_theta`` with its scaling.
    local_theta: float = 0.0
    # LayerNorm instead of RMSNorm.
    layer_norm: bool = False
    # Whether norms come "before" the sublayers; "after" them, but before the sum with the residual
    # stream (OLMo 2); or "both" (Gemma 2).
    norms: Literal["before", "after", "both"] = "before"
    # Whether both sublayers read the same residual stream (GPT-J, Pythia).
    parallel: bool = False
    # RMSNorm of queries and keys: over each head (Qwen3), or over all heads together.
    query_norm: Literal["none", "head", "all"] = "none"
    # The eps of these norms; 0: ``eps``.
    query_eps: float = 0.0
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    # Whether the MLP is gated.
    gated: bool = True
    # Biases of attention's output, the MLP and LayerNorms.
    bias: bool = False
    # The number of experts of a mixture that replaces the MLP; 0: no mixture. Each token passes
    # through ``active`` of them (`jaxgrow.extras.models.mixture`).
    experts: int = 0
    active: int = 2
    gates_normed: bool = True
    balance: float = 0.01
    # The capacity of an expert, relative to its mean share of the assignments; 0: no token is
    # dropped.
    capacity: float = 0.0
    # The factor of the router's z-loss.
    z_loss: float = 0.0
    # The factor of the embeddings: in Gemma, the square root of the initial ``embed``.
    embed_scale: float = 1.0
    # Scores are divided by the square root of this number; 0: ``head_dim``.
    score_dim: float = 0.0
    # Soft cap of the scores, ``c tanh(score / c)``; 0: none.
    score_cap: float = 0.0
    # Soft cap of the logits; 0: none.
    logit_cap: float = 0.0
    # Few models use the following fields, so repr hides them.
    # Whether norms have a learned scale (not in OLMo 1).
    norm_scale: bool = dataclasses.field(default=True, repr=False)
    # The factor of each sublayer's output (Granite).
    residual_scale: float = dataclasses.field(default=1.0, repr=False)
    # The divisor of the logits (Granite).
    logit_divisor: float = dataclasses.field(default=1.0, repr=False)
    # The MLP units of a gated expert that processes every token (Qwen2-MoE); 0: none.
    shared: int = dataclasses.field(default=0, repr=False)
    # Whether each head has an additional score in the softmax, without a value (gpt-oss).
    sinks: bool = dataclasses.field(default=False, repr=False)
    # The bound at which experts clamp gates and units; such experts have biases (gpt-oss). 0: none.
    clamp: float = dataclasses.field(default=0.0, repr=False)
    # Biases of the MLP only.
    mlp_bias: bool = dataclasses.field(default=False, repr=False)

    causal: ClassVar = True
    segments: ClassVar = True
    # Whether the first layer has a norm before its attention.
    first_norm: ClassVar[bool] = True
    run_by: ClassVar = (*TextConfig.run_by, "capacity", "z_loss")
    no_axes: ClassVar = ("context", "rope_context", "window")
    tied_parts: ClassVar = ("token_embedding", "final_norm")
    optional: ClassVar = (EXPERTS, SHARED)
    depth_scaled = True
    loops = True

    # The choices that use a field (`train.extras.effect` checks them for a training).
    used_with = {
        **{
            key: {"experts": "changed"}
            for key in (
                "active",
                "gates_normed",
                "balance",
                "capacity",
                "z_loss",
                "shared",
                "clamp",
            )
        },
        **{key: {"kinds": ("s",)} for key in ("window", "local_theta")},
        **dict.fromkeys(("rope_theta", "rotary"), _ROTARY),
        **dict.fromkeys(("rope_low", "rope_high"), {"rope_by": ("llama3", "yarn")} | _SCALED),
        "rope_by": tuple(
            _ROTARY | {name: "changed"} for name in ("rope_factor", "rope_short", "rope_scale")
        ),
        "rope_factor": _ROTARY | {"rope_by": ("llama3", "linear", "yarn", "dynamic")},
        "rope_context": (
            _ROTARY | {"rope_by": ("longrope",)},
            {"rope_by": ("llama3", "yarn")} | _SCALED,
        ),
        "rope_truncated": {"rope_by": ("yarn",)} | _SCALED,
        **dict.fromkeys(("rope_short", "rope_long"), _ROTARY | {"rope_by": ("longrope",)}),
        "rope_scale": _ROTARY | {"rope_by": ("longrope", "yarn")},
        "query_eps": {"query_norm": ("head", "all")},
        "out_bias": {"bias": (False,)},
        "mlp_bias": {"bias": (False,)},
    }

    def __post_init__(self):
        super().__post_init__()
        if self.heads % self.kv_heads:
            raise ValueError(
                f"LlamaConfig: {self.heads} query heads are not divisible by {self.kv_heads} "
                "key/value heads"
            )
        self._check_positions()
        self._check_experts()
        if not self.norm_scale and (not self.layer_norm or self.bias):
            raise ValueError("LlamaConfig: norm_scale=False needs layer_norm=True and bias=False")
        if not self.kinds or set(self.kinds) - KINDS.keys():
            raise ValueError(
                f"LlamaConfig: kinds is {self.kinds!r}, but must have one of the letters "
                f"{', '.join(KINDS)} for each layer"
            )

    def _check_positions(self) -> None:
        """Check the settings of the rotary positions."""
        if not 0 < self.rotary <= 1 or self.rotary_dims % 2:
            raise ValueError(
                "LlamaConfig: rotary positions need an even number of dimensions, but "
                f"rotary={self.rotary:g} of head_dim={self.head_dim} is "
                f"{self.rotary * self.head_dim:g}"
            )
        for name in ("rope_short", "rope_long"):
            factors = getattr(self, name)
            if self.rope_by == "longrope" and not (
                2 * len(factors) == self.rotary_dims and min(factors) > 0
            ):
                raise ValueError(
                    f"LlamaConfig: {name} must have a number above 0 for each of the "
                    f"{self.rotary_dims // 2} pairs of rotated dimensions, but is {factors}"
                )

    def _check_experts(self) -> None:
        """Check the settings of the experts. A model without experts has none of them."""
        plain = self.gated and not (self.bias or self.mlp_bias)
        if self.experts and not (plain and 0 < self.active <= self.experts):
            raise ValueError(
                f"LlamaConfig: experts={self.experts} needs gated=True, bias=False and active between 1 "
                f"and experts, and mlp_bias=False, but gated={self.gated}, bias={self.bias}, mlp_bias={self.mlp_bias} and "
                f"active={self.active}"
            )
        wrong = [n for n in ("capacity", "z_loss", SHARED, "clamp") if getattr(self, n)]
        if wrong and not self.experts:
            raise ValueError(
                f"LlamaConfig: only experts use {', '.join(wrong)}, but experts is 0: set experts"
            )

    @property
    def module(self) -> nn.Module:
        return Llama(self)

    @property
    def longest(self) -> int:
        """The maximum number of tokens of a sequence that the model can read."""
        return int(self.context * self.rope_factor) if self.rope_by == "dynamic" else self.context

    @property
    def traits(self) -> OperatorTraits:
        norm = "layer" if self.layer_norm else "rms"
        norm = norm if self.norm_scale else "unscaled"
        return {
            **super().traits,
            "norm": norm,
            "post_norm": self.norms != "before",
            "period": len(repeated_kinds(self.kinds)),
        }

    @property
    def normed(self) -> tuple[str, ...]:
        return ("embed", "heads", "kv_heads") if self.query_norm == "all" else ("embed",)

    def integers(self) -> dict[str, int]:
        return {name: n for name, n in super().integers().items() if name != "active"}

    def sizes(self) -> dict[str, int]:
        return super().sizes() | ({"gates": 1} if self.shared else {})

    def active_sizes(self, at_once: int | None = None) -> dict[str, float]:
        if not self.experts:
            return super().active_sizes()
        tokens = at_once or 2**15 * self.experts  # enough to fill all blocks
        computed = MIXTURES["expert_rows"](tokens * self.active, self.experts, self.capacity)
        return super().active_sizes() | {EXPERTS: computed / tokens}

    @property
    def rotary_dims(self) -> int:
        """The number of dimensions of a head that rotary positions rotate, R."""
        return round(self.rotary * self.head_dim)

    @property
    def layer_kinds(self) -> str:
        """A letter of `KINDS` for each layer."""
        return "".join(self.kinds[i % len(self.kinds)] for i in range(self.layers))

    def resized(self, growth: Growth) -> Self:
        """Return the config of the grown model.

        A new layer has the kind of the layers that it consists of. Norms of queries and keys keep
        their eps, because the width of the residual stream does not affect them.

        Raises:
          ValueError: a new layer consists in equal parts of layers of different kinds.
        """
        new = super().resized(growth)
        if new.eps != self.eps and self.query_norm != "none":
            new = replace(new, query_eps=self.query_eps or self.eps)
        kinds = self.layer_kinds
        index = layer_sources(growth, kinds) if len(set(kinds)) > 1 else None
        return (
            new
            if index is None
            else replace(new, kinds=repeated_kinds("".join(kinds[i] for i in index)))
        )

    @property
    def narrow_kernels(self) -> bool:
        # The router of experts is computed in float32.
        return not self.experts

    def as_mixture(self) -> Self:
        if self.experts:
            raise ValueError(
                f"this model has {self.experts} experts already: give a model without experts"
            )
        if not self.gated or self.bias or self.mlp_bias:
            raise ValueError(
                "experts can only be made from gated MLPs without biases, as in Llama or Qwen, but this "
                "model has other MLPs"
            )
        return replace(self, experts=1, active=1)

    def cost(self, length: int) -> Cost:
        """Return the FLOPs per position.

        The kernels of a layer take ``2 * (2 D HK + 2 D GK + 3 D F)``, with G key/value heads. An
        MLP without gate takes ``2 D F`` instead of ``3 D F``. A mixture counts the active experts,
        the shared expert, and ``2 D E`` for the router. Scores and head are counted as in GPT-2. A
        window reduces nothing.

        Args:
          length: positions of a sample.
        """
        width = self.heads * self.head_dim
        keys = self.kv_heads * self.head_dim
        head = head_cost(self, length)
        mlp = (3 if self.gated else 2) * self.mlp
        if self.experts:
            mlp = self.active * mlp + self.experts + (3 * self.shared + 1 if self.shared else 0)
        kernels = 2 * self.embed * (2 * width + 2 * keys + mlp)
        seen = mean_keys(length) if self.causal else length
        return Cost(kernels + 4 * seen * width, head, embedding=head if self.ties else 0)

    def empty(self, at_once: int | None = None) -> float:
        computed = self.active_sizes(at_once).get(EXPERTS, self.active)
        return 2 * 3 * self.embed * self.mlp * (computed - self.active)


def repeated_kinds(kinds: str) -> str:
    """Return the shortest prefix of ``kinds`` that gives all of it by repetition.

    Example:
      >>> repeated_kinds("ssfssfs")
      'ssf'
    """
    prefixes = (kinds[:n] for n in range(1, len(kinds) + 1))
    return next(p for p in prefixes if (p * len(kinds)).startswith(kinds))


def layer_sources(growth: Growth, kinds: str) -> list[int] | None:
    """Return for each new layer the source layer that contributes most to it.

    Args:
      growth: the growth.
      kinds: the kind of each source layer.

    Returns:
      The index of a source layer of the same kind, for each new layer; None if the growth does not
      change the layers.

    Raises:
      ValueError: layers of different kinds contribute equally to a new layer.
    """
    maps = by_axes(growth.rules[-1].terms[0] if isinstance(growth, Rules) else growth)
    if (LAYERS,) not in maps:
        return None
    rows = np.abs(dense(maps[LAYERS,].write))
    for new, row in enumerate(rows):
        most = np.flatnonzero(row == row.max())
        if len({kinds[i] for i in most}) > 1 and row.max() > 0:
            these = ", ".join(f"{i} ({kinds[i]})" for i in most)
            raise SizeError(
                f"new layer {new} would consist in equal parts of the layers {these}, which are of "
                "different kinds; to coalesce layers of one kind, use {} or your own groups",
                ("layers", "alike"),
            )
    return [int(row.argmax()) if row.max() > 0 else i % len(kinds) for i, row in enumerate(rows)]


def rotary_angles(c: LlamaConfig, length: int, kind: str = "f") -> tuple[np.ndarray, np.ndarray]:
    """Return cosine and sine of the rotary angles (Su et al., 2021), float64 [T, R/2].

    Position t rotates pair i of the R rotated dimensions by the angle ``t theta^(-2i/R)``. The
    values are constants. If the program computed them, XLA would fuse them differently inside a
    conditional, and a layer would not be bitwise identical with and without the conditional.

    Args:
      c: the config.
      length: the number of positions of the sequence, T.
      kind: the kind of the layer, a letter of `KINDS`.
    """
    positions = KINDS[kind].positions
    scale = 1.0
    if positions == "none":
        frequency = np.zeros(c.rotary_dims // 2)
    elif positions == "local" and c.local_theta > 0:
        frequency = frequencies(c, c.local_theta)
    elif c.rope_by in ("llama3", "linear"):
        frequency = frequencies(c, c.rope_theta)
        share = _undivided_share(c, frequency) if c.rope_by == "llama3" else 0.0
        frequency = frequency * (share + (1 - share) / c.rope_factor)
    else:
        frequency, scale = SCALINGS[c.rope_by](c, length)
    angle = np.arange(length)[:, None] * frequency
    return scale * np.cos(angle), scale * np.sin(angle)


def frequencies(c: LlamaConfig, theta: float) -> np.ndarray:
    """Return the frequency of each pair of rotated dimensions for the base ``theta``, [R/2]."""
    return theta ** -(np.arange(0, c.rotary_dims, 2) / c.rotary_dims)


def _undivided_share(c: LlamaConfig, frequency: np.ndarray) -> np.ndarray:
    """Return the weight of each undivided frequency, [R/2].

    It is linear in the number of turns in ``rope_context`` positions.
    """
    turns = c.rope_context * frequency / (2 * np.pi)
    return np.clip((turns - c.rope_low) / (c.rope_high - c.rope_low), 0, 1)


def rotate_heads(x_BTHK, cos_BTI, sin_BTI):
    """Rotate each pair of dimensions, i and i + R/2, by its angle, in float32 or better.

    Dimensions from R on stay unchanged.

    Args:
      x_BTHK: queries or keys.
      cos_BTI: cosine of the angles, with I = R/2.
      sin_BTI: sine of the angles.
    """
    wide = jnp.promote_types(x_BTHK.dtype, jnp.float32)
    rotated = 2 * cos_BTI.shape[-1]
    cos, sin = (a[:, :, None].astype(wide) for a in (cos_BTI, sin_BTI))
    a, b = jnp.split(x_BTHK[..., :rotated].astype(wide), 2, -1)
    y = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BTHK.dtype)
    return y if rotated == x_BTHK.shape[-1] else jnp.concatenate([y, x_BTHK[..., rotated:]], -1)


def norm(c: LlamaConfig, name: str, dtype: DTypeLike, axis: str = "embed") -> nn.Module:
    """Return the norm of the config's kind, over ``axis``."""
    if c.layer_norm:
        return LayerNorm(axis, c.eps, dtype, bias=c.bias, scale=c.norm_scale, name=name)
    return RMSNorm(axis, c.eps, dtype, name=name)


class Reading(NamedTuple):
    """The settings of a layer that depend on its kind and on the positions of its input.

    Attributes:
      rotation: cosine and sine [1 or B, T, R/2] of the positions.
      window: the number of keys that a query sees; None: all.
      mask_BS: True for the keys that are visible; None: all.
      past: the KV cache of the layer, as in `run_after`.
      positions_BT: positions of the tokens, if they are only some tokens of a sequence.
      normed: whether the layer has a norm before its attention.
      segments_BT: segment ids of the tokens; None: all tokens are in one segment.
    """

    rotation: Sequence[jax.Array | np.ndarray]
    window: jax.Array | None = None
    mask_BS: jax.Array | None = None
    past: Tree = None
    positions_BT: jax.Array | None = None
    normed: jax.Array | bool = True
    segments_BT: jax.Array | None = None


class RotaryAttention(nn.Module):
    """Self-attention with rotary positions; keys and values have ``kv_heads`` heads."""

    config: LlamaConfig
    kernel_init: Initializer
    out_init: Initializer
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x_BTD, reading: Reading):
        c = self.config
        query = self.projection("query", c.heads, "heads", "head_dim")
        key = self.projection("key", c.kv_heads, "kv_heads", "head_dim" + READ)
        value = self.projection("value", c.kv_heads, "kv_heads", "head_dim" + VALUE)
        q_BTHK, k_BTGK, v_BTGK = project_together((query, key, value), x_BTD)
        q_BTHK = self.positioned(q_BTHK, reading, "query", "heads", "head_dim")
        k_BTGK = self.positioned(k_BTGK, reading, "key", "kv_heads", "head_dim" + READ)
        self.sow(*KEPT, (k_BTGK, v_BTGK))
        y_BTHK = self.attended(q_BTHK, k_BTGK, v_BTGK, reading)
        return merge_heads(c, self.out_init, self.dtype, c.bias or c.out_bias)(y_BTHK)

    def projection(self, name: str, heads: int, *outputs: str) -> Linear:
        """Return the kernel from ``embed`` to ``heads`` heads with the axes ``outputs``."""
        c = self.config
        axes = ("embed" + READ, *outputs)
        shape = (c.embed, heads, c.head_dim)
        return Linear(axes, shape, 1, self.kernel_init, self.dtype, bias=c.qkv_bias, name=name)

    def positioned(self, y_BTHK, reading: Reading, name: str, *axes: str) -> jax.Array:
        """Return queries or keys with their norm, rotated by their positions."""
        c = self.config
        if c.query_norm != "none":
            *before, last = axes if c.query_norm == "all" else axes[1:]
            eps = c.query_eps or c.eps
            name = f"{name}_norm"
            y_BTHK = RMSNorm(last, eps, self.dtype, tuple(before), name=name)(y_BTHK)
        return rotate_heads(y_BTHK, *reading.rotation)

    def attended(self, q_BTHK, k_BTGK, v_BTGK, reading: Reading) -> jax.Array:
        """Return the weighted sum of the values for each query, [B, T, H, K]."""
        c = self.config
        sinks_H = None
        if c.sinks:
            sinks_H = self.param(
                "sinks", named_init(self.kernel_init, "heads", role="bias"), (c.heads,)
            )
        scale = c.score_dim**-0.5 if c.score_dim else None
        form = ScoreForm(
            scale,
            c.score_cap,
            reading.window,
            reading.positions_BT,
            sinks_H,
            segments_BT=reading.segments_BT,
        )
        if reading.past is not None:
            return CONTINUING["attention"](reading.past, q_BTHK, k_BTGK, v_BTGK, form)
        return attention(
            q_BTHK,
            k_BTGK,
            v_BTGK,
            causal=c.causal,
            mask_BS=reading.mask_BS,
            by=c.attention,
            form=form,
        )


def layer_mlp(
    c: LlamaConfig, kernel_init: Initializer, out_init: Initializer, dtype: DTypeLike, name: str
) -> nn.Module:
    """Return the MLP of a layer, or the mixture of experts that replaces it."""
    activation = ACTIVATIONS[c.activation]
    if not c.experts:
        own = (c.embed, c.mlp, kernel_init, out_init, dtype, activation)
        return MLP(*own, gated=c.gated, bias=c.bias or c.mlp_bias, name=name)
    return MIXTURES["Experts"](
        experts=c.experts,
        active=c.active,
        normed=c.gates_normed,
        balance=c.balance,
        embed=c.embed,
        mlp=c.mlp,
        kernel_init=kernel_init,
        out_init=out_init,
        dtype=dtype,
        activation=activation,
        capacity=c.capacity,
        z_loss=c.z_loss,
        shared=c.shared,
        clamp=c.clamp,
        name=name,
    )


class LlamaBlock(nn.Module):
    """Attention and an MLP or experts, with the norms that the config sets.

    The sublayers run one after the other, or side by side with ``parallel``.
    """

    config: LlamaConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x_BTD, reading: Reading, scale=None):
        """Apply the block.

        Args:
          x_BTD: the residual stream.
          reading: the settings of the layer.
          scale: factor of each sublayer's output (`jaxgrow.layerdrop.KeepMask`); None: 1.
        """
        c = self.config
        inits = nn.initializers.normal(0.02), nn.initializers.normal(0.02 / (2 * c.layers) ** 0.5)

        def added(name, sublayer, x_BTD, *more):
            h_BTD = x_BTD if c.norms == "after" else norm(c, f"{name}_norm", self.dtype)(x_BTD)
            if name == "attention" and not c.first_norm:
                h_BTD = jnp.where(reading.normed, h_BTD, x_BTD)
            y_BTD = sublayer(c, *inits, self.dtype, name=name)(h_BTD, *more)
            if c.norms != "before":
                y_BTD = norm(c, f"{name}_post_norm", self.dtype, "embed" + POST)(y_BTD)
            y_BTD = add_adapter(self, name, y_BTD)
            return rescaled(
                y_BTD if c.residual_scale == 1 else c.residual_scale * y_BTD, scale, name
            )

        y_BTD = x_BTD + added("attention", RotaryAttention, x_BTD, reading)
        return y_BTD + added("mlp", layer_mlp, x_BTD if c.parallel else y_BTD)


class Llama(Decoder):
    """A Llama: a `Decoder` with rotary positions.

    ``mask_BS`` marks the visible tokens; padding on the left does not change relative positions.
    """

    config: LlamaConfig

    supports: ClassVar = (*Decoder.supports, "mask_BS")

    def norm(self, name: str, axis: str) -> nn.Module:
        return norm(self.config, name, self.dtype, axis)

    def embeddings(self) -> dict[str, jax.Array]:
        return {"token_embedding": self.embedding("token_embedding", "vocab", self.config.vocab)}

    def stack(self, embeddings: dict[str, jax.Array], call: Call) -> Stack:
        positions = last_tokens(call.inputs)[0].shape[1]
        if call.past is not None:
            positions += call.past.positions
        segments_BT = call.named("segments")
        return layer_and_blocks(self, self.config, positions, call.mask_BS, segments_BT)

    def embed(self, embeddings: dict[str, jax.Array], call: Call) -> jax.Array:
        return embed_tokens(self.config, embeddings["token_embedding"], last_tokens(call.inputs)[0])


def embed_tokens(c: LlamaConfig, embedding_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Return the embeddings of tokens."""
    x_BTD = jnp.take(embedding_VD, tokens_BT, axis=0).astype(c.dtype)
    return x_BTD if c.embed_scale == 1 else x_BTD * jnp.asarray(c.embed_scale, c.dtype)


def layer_and_blocks(
    module: nn.Module,
    c: LlamaConfig,
    positions: int,
    mask_BS: jax.Array | None = None,
    segments_BT: jax.Array | None = None,
) -> Stack:
    """Return the layers of a compact ``module``.

    Args:
      module: the calling module.
      c: the config.
      positions: the number of positions of a sequence.
      mask_BS: True for the keys that are visible; None: all.
      segments_BT: segment ids of the tokens; None: all tokens are in one segment.
    """
    every = [(kind, c.first_norm or i > 0) for i, kind in enumerate(c.layer_kinds)]
    kinds = sorted(set(every))
    by_kind = [rotary_angles(c, positions, kind) for kind, _ in kinds]
    at_BT = None
    if segments_BT is not None:
        at_BT = segment_positions(segments_BT)
        if c.rope_by in SEGMENTS:
            by_kind, at_BT = SEGMENTS[c.rope_by](c, at_BT, segments_BT, kinds, by_kind)
    rotation_NTI = [np.stack(a) for a in zip(*by_kind, strict=True)]
    windows_N = np.array(
        [c.window if KINDS[kind].window else positions for kind, _ in kinds], np.int32
    )
    bounded = windows_N.min() < positions
    normed_N = np.array([normed for _, normed in kinds])
    # The block is detached: only its init and apply are used.
    block = LlamaBlock(c, jnp.dtype(c.dtype), parent=None)
    first = Reading([a[:1, :1] for a in rotation_NTI])
    blocks = stacked_blocks(
        module, "blocks", block, c.layers, jnp.zeros((1, 1, c.embed), c.dtype), first
    )
    # If all layers are of one kind, its settings are constants and need no index.
    if len(kinds) > 1:
        blocks = blocks, np.array([kinds.index(kind) for kind in every], np.int32)
    blocks = loop_blocks(blocks, c.loop)

    def layer(w, x, *scale, positions=None, past=None, **reading):
        w, rotation, window, normed = _of_kind(w, rotation_NTI, windows_N, normed_N)
        at = positions if at_BT is None else tokens_at(at_BT, positions)
        rotation = [a[None] if at is None else jnp.asarray(a)[at] for a in rotation]
        window = window if bounded else None
        segments = tokens_at(segments_BT, positions)
        read = Reading(rotation, window, mask_BS, past, positions, normed, segments)
        return block.apply({"params": w}, x, read, *scale, **reading)

    return Stack(layer, blocks)


def _of_kind(w: Params, *tables: Tree) -> tuple:
    """Return a layer's parameters, and the entry of each table [kinds, ..] for its kind."""
    if not isinstance(w, tuple):
        return w, *(jax.tree.map(lambda a: a[0], table) for table in tables)
    w, kind = w
    chosen = jax.tree.map(lambda a: jnp.asarray(a)[kind], tables)
    return w, *chosen

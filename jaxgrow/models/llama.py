"""Llama (Touvron et al., 2023) and Qwen2 (Yang et al., 2024): pre-norm decoders with rotary positions and grouped queries."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike

from jaxgrow.axes import BELOW, READ, VALUE, named
from jaxgrow.drop.execution import Kept, rescaled
from jaxgrow.models.adapters import adapted
from jaxgrow.models.attention import attention, attention_after, mean_keys
from jaxgrow.models.config import Cost, TextConfig, head_cost
from jaxgrow.models.layers import (
    KEPT,
    KeptTokens,
    Linear,
    Observe,
    Past,
    RMSNorm,
    class_logits,
    last_tokens,
    run_after,
    run_parts,
    stacked,
    token_head,
    vocabulary_logits,
)


@dataclass(frozen=True)
class LlamaConfig(TextConfig):
    """Query head i reads key head ``i // (heads / kv_heads)`` (Ainslie et al., 2023), so these two axes grow together.

    ``head_dim`` should stay as it is when a model grows: rotary positions give each of its pairs a frequency of its own.
    """

    eps: float = 1e-6
    vocab: int = 32000
    context: int = 2048
    kv_heads: int = 4
    tied: bool = False
    qkv_bias: bool = False  # Qwen2's
    rope_theta: float = 10000.0
    # Llama 3's longer context (Dubey et al., 2024): frequencies of less than ``rope_low`` turns in ``rope_context`` positions
    # are divided by ``rope_factor``, those of more than ``rope_high`` stay.
    rope_factor: float = 1.0
    rope_low: float = 1.0
    rope_high: float = 4.0
    rope_context: int = 8192

    causal: ClassVar = True
    normalisation: ClassVar = "rms"
    no_axes: ClassVar = ("context", "rope_context")
    tied_parts: ClassVar = ("token_embedding", "final_norm")

    def __post_init__(self):
        super().__post_init__()
        if self.heads % self.kv_heads:
            raise ValueError(f"LlamaConfig: {self.heads} query heads do not divide among {self.kv_heads} key heads")
        if self.head_dim % 2:
            raise ValueError(f"LlamaConfig: rotary positions turn pairs, but head_dim is {self.head_dim}, odd")

    @property
    def module(self) -> nn.Module:
        return Llama(self)

    @property
    def example(self) -> jax.Array:
        return jnp.zeros((1, 1), jnp.int32)  # tokens [B, T]

    @property
    def length(self) -> int:
        return self.context

    def cost(self, length: int) -> Cost:
        """``2 * (2 D HK + 2 D GK + 3 D F)`` in the kernels of a layer, with G key heads; scores and head as of a GPT-2."""
        width, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        head = head_cost(self, length)
        kernels = 2 * self.embed * (2 * width + 2 * keys + 3 * self.mlp)
        return Cost(kernels + 4 * mean_keys(length) * width, head, table=head if self.ties else 0)


def rotations(c: LlamaConfig, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine of ``t theta^(-2i/K)``, float64 [T, K/2]: how far position t turns pair i (Su et al., 2021).

    Constants: computed in the program, XLA would fuse them otherwise inside a conditional, and a layer give other bits.
    """
    frequency = c.rope_theta ** -(np.arange(0, c.head_dim, 2) / c.head_dim)
    turns = c.rope_context * frequency / (2 * np.pi)
    stay = np.clip((turns - c.rope_low) / (c.rope_high - c.rope_low), 0, 1)
    angle = np.arange(length)[:, None] * (frequency * (stay + (1 - stay) / c.rope_factor))
    return np.cos(angle), np.sin(angle)


def rotated(x_BTHK, cos_BTI, sin_BTI):
    """Dimension i and i + K/2 are a pair, turned by its angle, in float32 or better."""
    wide = jnp.promote_types(x_BTHK.dtype, jnp.float32)
    cos, sin = (a[:, :, None].astype(wide) for a in (cos_BTI, sin_BTI))
    a, b = jnp.split(x_BTHK.astype(wide), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BTHK.dtype)


class Attention(nn.Module):
    """Causal self-attention over rotated queries and keys; keys and values have ``kv_heads``."""

    config: LlamaConfig
    kernel_init: Initializer
    out_init: Initializer
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x_BTD, rotation, mask_BS=None, past=None):
        c = self.config

        def project(name, heads, *outputs):
            shape = (c.embed, heads, c.head_dim)
            return Linear(
                ("embed" + READ, *outputs), shape, 1, self.kernel_init, self.dtype, bias=c.qkv_bias, name=name
            )(x_BTD)

        q_BTHK = rotated(project("query", c.heads, "heads", "head_dim"), *rotation)
        k_BTGK = rotated(project("key", c.kv_heads, "kv_heads", "head_dim" + READ), *rotation)
        v_BTGK = project("value", c.kv_heads, "kv_heads", "head_dim" + VALUE)
        self.sow(*KEPT, (k_BTGK, v_BTGK))
        if past is None:
            y_BTHK = attention(q_BTHK, k_BTGK, v_BTGK, causal=True, mask_BS=mask_BS, by=c.attention)
        else:
            y_BTHK = attention_after(past, q_BTHK, k_BTGK, v_BTGK)
        axes, shape = ("heads" + READ, "head_dim" + READ, "embed"), (c.heads, c.head_dim, c.embed)
        return Linear(axes, shape, 2, self.out_init, self.dtype, bias=False, name="out")(y_BTHK)


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))`` (Shazeer, 2020)."""

    config: LlamaConfig
    kernel_init: Initializer
    out_init: Initializer
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x_BTD):
        c = self.config

        def kernel(name, out, into, init):
            axes, shape = (out + READ, into), (getattr(c, out), getattr(c, into))
            return Linear(axes, shape, 1, init, self.dtype, bias=False, name=name)

        gate_BTF = kernel("gate", "embed", "mlp", self.kernel_init)(x_BTD)
        up_BTF = kernel("up", "embed", "mlp", self.kernel_init)(x_BTD)
        return kernel("down", "mlp", "embed", self.out_init)(jax.nn.silu(gate_BTF) * up_BTF)


class Block(nn.Module):
    config: LlamaConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x_BTD, rotation, scale=None, mask_BS=None, past=None):
        """``rotation``: cosine and sine [1 or B, T, K/2] of the positions; ``scale`` multiplies what each sublayer adds;
        ``past`` as of `run_after`."""
        c = self.config
        inits = nn.initializers.normal(0.02), nn.initializers.normal(0.02 / (2 * c.layers) ** 0.5)
        h_BTD = RMSNorm("embed", c.eps, self.dtype, name="attention_norm")(x_BTD)
        sublayer = Attention(c, *inits, self.dtype, name="attention")
        x_BTD = x_BTD + rescaled(adapted(self, "attention", sublayer(h_BTD, rotation, mask_BS, past)), scale)
        h_BTD = RMSNorm("embed", c.eps, self.dtype, name="mlp_norm")(x_BTD)
        return x_BTD + rescaled(adapted(self, "mlp", SwiGLU(c, *inits, self.dtype, name="mlp")(h_BTD)), scale)


class Llama(nn.Module):
    """``apply({"params": p}, tokens [B, T]) -> logits [B, T, vocab]`` in float32; keyword arguments as of `GPT2`.

    ``mask_BS``: the tokens that are seen, bool [B, T]; padding on the left turns no relative position. A tied head is declared
    as GPT-2's: the final norm reads ``embed``.
    """

    config: LlamaConfig

    @nn.compact
    def __call__(
        self,
        inputs,
        mask_BS=None,
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
            raise ValueError("layers are dropped from a whole stack: not together with token dropping or frozen layers")
        if mask_BS is not None and (kept is not None or kept_tokens is not None):
            raise ValueError(
                "a mask is for whole sequences through all layers: not together with dropped layers or tokens"
            )
        if past is not None and (
            observe or frozen or not all(x is None for x in (targets, kept, kept_tokens, mask_BS))
        ):
            raise ValueError(
                "what reads on from a past gives logits of its last tokens, from all layers: give past alone"
            )
        dtype, (tokens_BT, last_B) = jnp.dtype(c.dtype), last_tokens(inputs)
        length = tokens_BT.shape[1]
        if length > c.context:
            raise ValueError(f"a sequence of {length} tokens is longer than the context of {c.context}")
        init = nn.initializers.normal(0.02)
        table_VD = self.param("token_embedding", named(init, "vocab", "embed" + BELOW), (c.vocab, c.embed))
        rotation = tuple(a[None] for a in rotations(c, length + (0 if past is None else past.places)))
        block = Block(c, dtype, parent=None)  # detached: only its init and apply are used
        first = tuple(a[:, :1] for a in rotation)
        blocks = stacked(self, "blocks", block, c.layers, jnp.zeros((1, 1, c.embed), dtype), first)

        def layer(w, x, *scale, rotation=rotation, **reading):
            return block.apply({"params": w}, x, rotation, *scale, mask_BS=mask_BS, **reading)

        def at(places):
            return [jnp.asarray(a[0])[places] for a in rotation]

        def layer_of_kept_tokens(w, x):  # these keep the positions that they have in the sequence
            return layer(w, x, rotation=at(kept_tokens.places_BS))  # type: ignore[union-attr]

        if frozen:
            table_VD = jax.lax.stop_gradient(table_VD)
        x_BTD = jnp.take(table_VD, tokens_BT, axis=0).astype(dtype)
        if past is not None:
            next_layer = partial(layer, rotation=at(past.places_BT(length)))
            x_BTD, more = run_after(next_layer, blocks, x_BTD, past, last_B, scan=c.scan_layers)
        else:
            x_BTD, more = run_parts(
                layer,
                blocks,
                x_BTD,
                kept_tokens=kept_tokens,
                apply_kept_tokens=layer_of_kept_tokens,
                frozen=frozen,
                remat=c.remat,
                scan=c.scan_layers,
                observe=observe,
                kept=kept,
            )
        x_BTD = RMSNorm("embed" + READ if c.ties else "embed", c.eps, dtype, name="final_norm")(x_BTD)
        if c.head == "classes":
            logits_BC = class_logits(x_BTD[jnp.arange(len(x_BTD)), last_B], c.classes, init, bias=False)
            return (logits_BC, more) if observe else logits_BC
        head_axes, head_shape = ("embed" + READ, "vocab"), (c.embed, c.vocab)
        head_DV = table_VD.T if c.tied else self.param("head_kernel", named(init, *head_axes), head_shape)
        if past is not None:
            return vocabulary_logits(x_BTD, head_DV, dtype)[:, 0], more
        said = token_head(x_BTD, head_DV, targets, dtype, each=each)
        return (said, more) if observe else said

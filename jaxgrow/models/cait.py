"""CaiT (Touvron et al., ICCV 2021): patches alone in the layers, then a class token that looks at them.

Its heads talk to each other (Shazeer et al., 2020), and every sublayer has a learned size for each
unit, LayerScale.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from jaxgrow.axes.names import BELOW, READ, VALUE, named
from jaxgrow.layerdrop.execution import Kept, rescaled
from jaxgrow.models.bottleneck import adapted
from jaxgrow.models.config import Cost
from jaxgrow.models.layers import (
    MLP,
    KeptTokens,
    LayerNorm,
    Linear,
    Observe,
    layer_scaled,
    run_parts,
    run_stack,
    stacked,
)
from jaxgrow.models.patches import INIT, PatchConfig, classified, embedded


@dataclass(frozen=True)
class CaiTConfig(PatchConfig):
    """CaiT-S24, as it is."""

    layers: int = 24
    embed: int = 384
    heads: int = 8
    head_dim: int = 48
    mlp: int = 1536
    eps: float = 1e-6
    class_layers: int = 2

    def __post_init__(self):
        super().__post_init__()
        if self.attention not in ("auto", "xla"):
            raise ValueError(
                f"a CaiT's heads talk, which no kernel does: set attention=auto, not {self.attention}"
            )

    @property
    def module(self) -> nn.Module:
        return CaiT(self)

    @property
    def positions(self) -> int:
        return self.patches

    @property
    def length(self) -> int:
        return self.patches

    @property
    def means_stay(self) -> bool:
        return False

    @property
    def layer_scale(self) -> float:
        """What a sublayer's size begins with: less in deeper models (section 2 of the paper)."""
        return 0.1 if self.layers <= 18 else 1e-5 if self.layers <= 24 else 1e-6

    def cost(self, length: int) -> Cost:
        """A layer has ``2 * (4 D HK + 2 D F)`` in its kernels, ``4 T HK`` in scores and their
        weighted sum, and ``4 T HH`` in heads that talk. An image has ``2 PPC D`` for each of its
        patches, ``4 (T + 1) D HK`` for keys and values of each class layer, ``4 (T + 1) HK`` in its
        scores and sum, ``4 D HK + 4 D F`` for its class token, and the head; a position its share
        of it.
        """
        width = self.heads * self.head_dim
        kernels = 2 * (4 * self.embed * width + 2 * self.embed * self.mlp)
        layer = kernels + 4 * length * width + 4 * length * self.heads**2
        patches = self.patches * 2 * self.patch**2 * self.channels * self.embed / length
        looks = 4 * (length + 1) * width * (self.embed + 1) + 4 * self.embed * (width + self.mlp)
        return Cost(
            layer,
            patches + (self.class_layers * looks + 2 * self.embed * self.classes) / length,
            first=patches,
        )


class Attention(nn.Module):
    """Of ``u`` [B, T, D] to ``x`` [B, S, D]: ``softmax(q k / sqrt(K)) v``, all keys seen.

    With ``talking``, the heads' scores are mixed before the softmax and their weights after it:
    ``S_g = sum_h S_h W_hg``, ``A_g = sum_h softmax(S_h) W'_hg + b'_g``. The kernels between heads
    read and write them, so heads that are copies hear and say the same. A bias before the softmax,
    as in the authors' code, would cancel in it.
    """

    config: CaiTConfig
    dtype: DTypeLike
    talking: bool

    @nn.compact
    def __call__(self, u_BTD, x_BSD):
        c, wide = self.config, jnp.promote_types(self.dtype, jnp.float32)

        def project(name, x, *outputs):
            axes, shape = ("embed" + READ, *outputs), (c.embed, c.heads, c.head_dim)
            return Linear(axes, shape, 1, INIT, self.dtype, name=name)(x)

        def talk(name, x_BTSH, bias):
            if not self.talking:
                return x_BTSH
            axes, shape = ("heads" + READ, "heads"), (c.heads, c.heads)
            return Linear(axes, shape, 1, INIT, wide, bias, name=name)(x_BTSH)

        q_BTHK = project("query", u_BTD, "heads", "head_dim")
        k_BSHK = project("key", x_BSD, "heads", "head_dim" + READ)
        v_BSHK = project("value", x_BSD, "heads", "head_dim" + VALUE)
        scores_BTSH = (
            jnp.einsum("bthk,bshk->btsh", q_BTHK, k_BSHK, preferred_element_type=wide)
            / c.head_dim**0.5
        )
        weights_BTSH = jax.nn.softmax(talk("talk_before", scores_BTSH, False), axis=2)
        weights_BTSH = talk("talk_after", weights_BTSH, True).astype(self.dtype)
        y_BTHK = jnp.einsum("btsh,bshk->bthk", weights_BTSH, v_BSHK)
        axes, shape = ("heads" + READ, "head_dim" + READ, "embed"), (c.heads, c.head_dim, c.embed)
        return Linear(axes, shape, 2, INIT, self.dtype, name="out")(y_BTHK)


class Block(nn.Module):
    """``u += diag(a) attention(norm([u; x])); u += diag(m) mlp(norm(u))``: a class layer; without ``x``, a layer of patches."""

    config: CaiTConfig
    dtype: DTypeLike
    talking: bool

    @nn.compact
    def __call__(self, u_BTD, x_BSD=None, scale=None):
        """``scale`` multiplies what each sublayer adds (`jaxgrow.layerdrop.Kept`)."""
        c = self.config

        def sized(name, y_BTD):
            return rescaled(
                adapted(self, name, layer_scaled(self, f"{name}_scale", y_BTD, c.layer_scale)),
                scale,
                name,
            )

        z_BSD = u_BTD if x_BSD is None else jnp.concatenate([u_BTD, x_BSD], 1)
        z_BSD = LayerNorm("embed", c.eps, self.dtype, name="attention_norm")(z_BSD)
        attention = Attention(c, self.dtype, self.talking, name="attention")
        u_BTD = u_BTD + sized("attention", attention(z_BSD[:, : u_BTD.shape[1]], z_BSD))
        h_BTD = LayerNorm("embed", c.eps, self.dtype, name="mlp_norm")(u_BTD)
        gelu = partial(jax.nn.gelu, approximate=False)
        mlp = MLP(c.embed, c.mlp, INIT, INIT, self.dtype, gelu, name="mlp")
        return u_BTD + sized("mlp", mlp(h_BTD))


class CaiT(nn.Module):
    """``apply({"params": p}, images [B, rows, columns, C]) -> logits [B, classes]`` in float32; images are normalised floats.

    ``observe``, ``kept``, ``kept_tokens`` and ``frozen`` as of `jaxgrow.models.gpt2.GPT2`, of the
    layers of patches: the class token comes after them, so that patches may go around layers. What
    is frozen with the bottom layers are patches and positions.
    """

    config: CaiTConfig

    @nn.compact
    def __call__(
        self,
        images,
        *,
        observe: Observe | None = None,
        kept: Kept | None = None,
        kept_tokens: KeptTokens | None = None,
        frozen: int = 0,
    ):
        c = self.config
        if kept is not None and (kept_tokens is not None or frozen):
            raise ValueError(
                "layers are dropped from a whole stack: not together with token dropping or frozen layers"
            )
        dtype = jnp.dtype(c.dtype)
        places_TD = self.param(
            "position_embedding", named(INIT, "positions", "embed" + BELOW), (c.positions, c.embed)
        )
        x_BTD = embedded(c, images, dtype) + places_TD[None].astype(dtype)
        if frozen:
            x_BTD = jax.lax.stop_gradient(x_BTD)

        one = jnp.zeros((1, 1, c.embed), dtype)
        layer = Block(
            c, dtype, talking=True, parent=None
        )  # detached: only its init and apply are used
        blocks = stacked(self, "blocks", layer, c.layers, one)
        x_BTD, seen_L = run_parts(
            lambda w, x, *scale: layer.apply({"params": w}, x, None, *scale),
            blocks,
            x_BTD,
            kept_tokens=kept_tokens,
            frozen=frozen,
            remat=c.remat,
            scan=c.scan_layers,
            observe=observe,
            kept=kept,
        )
        look = Block(replace(c, adapter=None), dtype, talking=False, parent=None)
        looks = stacked(self, "class_blocks", look, c.class_layers, one, one, axis="class_layers")
        token_D = self.param("class_embedding", named(INIT, "embed", role="table"), (c.embed,))
        u_B1D = jnp.broadcast_to(token_D.astype(dtype).reshape(1, 1, -1), (len(x_BTD), 1, c.embed))
        u_B1D, _ = run_stack(
            lambda w, u: look.apply({"params": w}, u, x_BTD),
            looks,
            u_B1D,
            remat=c.remat,
            scan=c.scan_layers,
        )
        logits = classified(c, LayerNorm("embed", c.eps, dtype, name="final_norm")(u_B1D)[:, 0])
        return (logits, seen_L) if observe else logits

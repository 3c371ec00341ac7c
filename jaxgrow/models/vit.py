"""ViT (Dosovitskiy et al., ICLR 2021), DeiT (Touvron et al., ICML 2021) and DINOv2 (Oquab et al., 2023): a pre-LN encoder of
the patches of an image."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from jaxgrow.axes import BELOW, named
from jaxgrow.drop.execution import Kept, rescaled
from jaxgrow.models.adapters import adapted
from jaxgrow.models.config import Cost
from jaxgrow.models.layers import MLP, KeptTokens, LayerNorm, Observe, SelfAttention, layer_scaled, run_parts, stacked
from jaxgrow.models.patches import INIT, PatchConfig, classified, embedded


@dataclass(frozen=True)
class ViTConfig(PatchConfig):
    """ViT-B/16 for ImageNet, as it is.

    ``distillation`` is DeiT's: "token" has a distillation token beside the class token, "head" a head of its own for it, too.
    A DINOv2 has sizes of what sublayers write, its head reads the mean of the patches, too, and its giant gates its MLPs.
    """

    eps: float = 1e-12
    distillation: Literal["none", "token", "head"] = "none"
    layer_scale: float = 0.0  # where learned sizes of each unit that a sublayer writes begin; 0: there are none
    gated: bool = False  # the MLP, by SiLU
    mean_head: bool = False  # the mean of the patches has a head, too, whose logits are added

    later: ClassVar = ("layer_scale", "gated", "mean_head")

    def __post_init__(self):
        super().__post_init__()
        if self.mean_head and self.distillation != "none":
            raise ValueError("a head of the patches' mean stands beside that of a class token alone: distillation=none")

    @property
    def module(self) -> nn.Module:
        return ViT(self)

    @property
    def means_stay(self) -> bool:
        return not self.layer_scale

    @property
    def positions(self) -> int:
        return self.patches + (1 if self.distillation == "none" else 2)

    @property
    def length(self) -> int:
        return self.positions

    def cost(self, length: int) -> Cost:
        """A layer has ``2 * (4 D HK + 2 D F)`` in its kernels, gated ``3 D F``, ``4 T HK`` in scores and their weighted sum. An
        image has ``2 PPC D`` for each of its patches, and ``2 D classes`` in each head; a position its share of it."""
        width, mlp = self.heads * self.head_dim, (3 if self.gated else 2) * self.mlp
        layer = 2 * self.embed * (4 * width + mlp) + 4 * length * width
        patches = self.patches * 2 * self.patch**2 * self.channels * self.embed / length
        heads = (2 if self.distillation == "head" or self.mean_head else 1) * 2 * self.embed * self.classes / length
        return Cost(layer, patches + heads, first=patches)


class Block(nn.Module):
    """``x += attention(norm(x)); x += mlp(norm(x))``; with LayerScale, ``x += diag(a) attention(norm(x))``."""

    config: ViTConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x_BTD, scale=None):
        """``scale`` multiplies what each sublayer adds (`jaxgrow.drop.Kept`)."""
        c = self.config

        def sized(name, y_BTD):
            y_BTD = layer_scaled(self, f"{name}_scale", y_BTD, c.layer_scale) if c.layer_scale else y_BTD
            return rescaled(adapted(self, name, y_BTD), scale, name)

        h_BTD = LayerNorm("embed", c.eps, self.dtype, name="attention_norm")(x_BTD)
        attention = SelfAttention(
            c.embed, c.heads, c.head_dim, False, INIT, INIT, self.dtype, c.attention, name="attention"
        )
        x_BTD = x_BTD + sized("attention", attention(h_BTD))
        h_BTD = LayerNorm("embed", c.eps, self.dtype, name="mlp_norm")(x_BTD)
        activation = jax.nn.silu if c.gated else partial(jax.nn.gelu, approximate=False)
        mlp = MLP(c.embed, c.mlp, INIT, INIT, self.dtype, activation, gated=c.gated, name="mlp")
        return x_BTD + sized("mlp", mlp(h_BTD))


class ViT(nn.Module):
    """``apply({"params": p}, images [B, rows, columns, C]) -> logits [B, classes]`` in float32; images are normalised floats.

    ::

        x = [class; distillation; patches W + b] + positions;  x += attention(norm(x));  x += mlp(norm(x));  norm(x_0) head

    With ``distillation="head"`` the mean of both heads' logits; with ``mean_head``, their sum. ``observe``, ``kept`` and
    ``frozen`` as of `jaxgrow.models.gpt2.GPT2`; what is frozen with the bottom layers are patches, tokens and positions.
    """

    config: ViTConfig

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
        if kept_tokens is not None:
            raise ValueError("a ViT drops no tokens: its class token is one of them, and has to pass every layer")
        if kept is not None and frozen:
            raise ValueError("layers are dropped from a whole stack: not together with frozen layers")
        dtype = jnp.dtype(c.dtype)
        special = ["class_embedding"] if c.distillation == "none" else ["class_embedding", "distillation_embedding"]
        token_init = named(INIT, "embed" + BELOW, role="table")
        tokens_SD = jnp.stack([self.param(name, token_init, (c.embed,)) for name in special])
        places_TD = self.param("position_embedding", named(INIT, "positions", "embed" + BELOW), (c.positions, c.embed))
        x_BTD = embedded(c, images, dtype)
        tokens_BSD = jnp.broadcast_to(tokens_SD.astype(dtype)[None], (len(x_BTD), *tokens_SD.shape))
        x_BTD = jnp.concatenate([tokens_BSD, x_BTD], 1) + places_TD[None].astype(dtype)
        if frozen:
            x_BTD = jax.lax.stop_gradient(x_BTD)

        block = Block(c, dtype, parent=None)  # detached: only its init and apply are used
        blocks = stacked(self, "blocks", block, c.layers, jnp.zeros((1, 1, c.embed), dtype))
        x_BTD, seen_L = run_parts(
            lambda w, x, *scale: block.apply({"params": w}, x, *scale),
            blocks,
            x_BTD,
            frozen=frozen,
            remat=c.remat,
            scan=c.scan_layers,
            observe=observe,
            kept=kept,
        )
        read_BSD = x_BTD if c.mean_head else x_BTD[:, : len(special)]
        x_BSD = LayerNorm("embed", c.eps, dtype, name="final_norm")(read_BSD)
        logits = classified(c, x_BSD[:, 0])
        if c.mean_head:
            logits = logits + classified(c, x_BSD[:, 1:].mean(1), "mean_head", bias=False)
        if c.distillation == "head":
            logits = (logits + classified(c, x_BSD[:, 1], "distillation_head")) / 2
        return (logits, seen_L) if observe else logits

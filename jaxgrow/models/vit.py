"""ViT (Dosovitskiy et al., ICLR 2021), DeiT (Touvron et al., ICML 2021), DINOv2 (Oquab et al.,
2023), and the vision towers of CLIP (Radford et al., 2021) and SigLIP (Zhai et al., 2023): a pre-LN
encoder of the patches of an image.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from jaxgrow.axes.names import BELOW, READ, named
from jaxgrow.layerdrop.execution import Kept, rescaled
from jaxgrow.models.bottleneck import adapted
from jaxgrow.models.config import Cost, Head
from jaxgrow.models.layers import (
    MLP,
    KeptTokens,
    LayerNorm,
    Linear,
    Observe,
    SelfAttention,
    layer_scaled,
    quick_gelu,
    run_parts,
    stacked,
)
from jaxgrow.models.patches import INIT, PatchConfig, classified, embedded


@dataclass(frozen=True)
class ViTConfig(PatchConfig):
    """ViT-B/16 for ImageNet, as it is.

    ``distillation`` is DeiT's: "token" has a distillation token beside the class token, "head" a
    head of its own for it, too. A DINOv2 has sizes of what sublayers write, its head reads the mean
    of the patches, too, and its giant gates its MLPs.

    ``head="states"`` is a model without a head: its outputs are the normalised last hidden states.
    CLIP normalises the embeddings, too (``embedding_norm``), and its head, the projection, has no
    bias. A SigLIP has no class token.
    """

    eps: float = 1e-12
    distillation: Literal["none", "token", "head"] = "none"
    layer_scale: float = (
        0.0  # where learned sizes of each unit that a sublayer writes begin; 0: there are none
    )
    gated: bool = False  # the MLP, by SiLU
    mean_head: bool = False  # the mean of the patches has a head, too, whose logits are added

    # Fields of few models, which are not shown. ``pooler`` belongs to a model without a head:
    # ``tanh(x_0 W + b)``, or attention of a learned query over all states, and an MLP (SigLIP).
    # ``activation`` is that of MLPs that are not gated.
    head: Literal["classes", "states"] = field(default="classes", repr=False)
    pooler: Literal["none", "tanh", "attention"] = field(default="none", repr=False)
    class_token: bool = field(default=True, repr=False)
    patch_bias: bool = field(default=True, repr=False)
    head_bias: bool = field(default=True, repr=False)
    embedding_norm: bool = field(default=False, repr=False)
    activation: Literal["gelu", "gelu_tanh", "quick_gelu"] = field(default="gelu", repr=False)

    later: ClassVar = (
        *(
            "layer_scale",
            "gated",
            "mean_head",
            "head",
            "pooler",
            "class_token",
            "patch_bias",
            "head_bias",
        ),
        *("embedding_norm", "activation"),
    )

    def __post_init__(self):
        super().__post_init__()
        if self.head == "classes" and not self.class_token:
            raise ValueError(
                "a head of classes reads the class token: class_token=False needs head='states'"
            )
        if self.mean_head and self.distillation != "none":
            raise ValueError(
                "a head of the patches' mean stands beside that of a class token alone: distillation=none"
            )

    @property
    def module(self) -> nn.Module:
        return ViT(self)

    @property
    def means_stay(self) -> bool:
        return not self.layer_scale

    @property
    def predicts(self) -> Head:
        return self.head

    @property
    def special(self) -> tuple[str, ...]:
        """The names of the learned tokens that come before the patches."""
        if not self.class_token:
            return ()
        return (
            ("class_embedding",)
            if self.distillation == "none"
            else ("class_embedding", "distillation_embedding")
        )

    @property
    def positions(self) -> int:
        return self.patches + len(self.special)

    def sizes(self) -> dict[str, int]:
        return {
            name: n
            for name, n in super().sizes().items()
            if name != "classes" or self.head == "classes"
        }

    @property
    def length(self) -> int:
        return self.positions

    def cost(self, length: int) -> Cost:
        """A layer has ``2 * (4 D HK + 2 D F)`` in its kernels, gated ``3 D F``, ``4 T HK`` in
        scores and their weighted sum. An image has ``2 PPC D`` for each of its patches, and
        ``2 D classes`` in each head; a position its share of it.
        """
        width, mlp = self.heads * self.head_dim, (3 if self.gated else 2) * self.mlp
        layer = 2 * self.embed * (4 * width + mlp) + 4 * length * width
        patches = self.patches * 2 * self.patch**2 * self.channels * self.embed / length
        count = 2 if self.distillation == "head" or self.mean_head else int(self.head == "classes")
        heads = count * 2 * self.embed * self.classes / length + self._pooler_cost(length)
        return Cost(layer, patches + heads, first=patches)

    def _pooler_cost(self, length: int) -> float:
        """FLOPs of the pooler for each position."""
        width = self.heads * self.head_dim
        if self.pooler == "tanh":
            return 2 * self.embed**2 / length
        if self.pooler == "none":
            return 0.0
        keys = (
            2 * 2 * self.embed * width + 4 * width
        )  # for each position; all else is computed once for an image
        return keys + 2 * (2 * self.embed * width + 2 * self.embed * self.mlp) / length


ACTIVATIONS: dict[str, Callable] = {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "quick_gelu": quick_gelu,
}


class Block(nn.Module):
    """``x += attention(norm(x)); x += mlp(norm(x))``; with LayerScale, ``x += diag(a) attention(norm(x))``."""

    config: ViTConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x_BTD, scale=None):
        """``scale`` multiplies what each sublayer adds (`jaxgrow.layerdrop.Kept`)."""
        c = self.config

        def sized(name, y_BTD):
            y_BTD = (
                layer_scaled(self, f"{name}_scale", y_BTD, c.layer_scale)
                if c.layer_scale
                else y_BTD
            )
            return rescaled(adapted(self, name, y_BTD), scale, name)

        h_BTD = LayerNorm("embed", c.eps, self.dtype, name="attention_norm")(x_BTD)
        attention = SelfAttention(
            c.embed,
            c.heads,
            c.head_dim,
            False,
            INIT,
            INIT,
            self.dtype,
            c.attention,
            name="attention",
        )
        x_BTD = x_BTD + sized("attention", attention(h_BTD))
        h_BTD = LayerNorm("embed", c.eps, self.dtype, name="mlp_norm")(x_BTD)
        activation = jax.nn.silu if c.gated else ACTIVATIONS[c.activation]
        mlp = MLP(c.embed, c.mlp, INIT, INIT, self.dtype, activation, gated=c.gated, name="mlp")
        return x_BTD + sized("mlp", mlp(h_BTD))


def pooled(c: ViTConfig, x_BTD: jax.Array) -> jax.Array:
    """The output of the pooler, [B, D]. Inside of a compact module, which gets its parameters under ``pooler``."""
    if c.pooler == "attention":
        return AttentionPooler(c, x_BTD.dtype, name="pooler")(x_BTD)
    axes, shape = ("embed" + READ, "embed"), (c.embed, c.embed)
    return jnp.tanh(Linear(axes, shape, 1, INIT, x_BTD.dtype, name="pooler")(x_BTD[:, 0]))


class AttentionPooler(nn.Module):
    """``y = attention of a learned query over x; y + mlp(norm(y))``, the pooler of SigLIP."""

    config: ViTConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x_BTD):
        c = self.config
        probe_D = self.param("probe", named(INIT, "embed" + BELOW, role="table"), (c.embed,))
        probe_B1D = jnp.broadcast_to(probe_D.astype(self.dtype), (len(x_BTD), 1, c.embed))
        attention = SelfAttention(
            c.embed,
            c.heads,
            c.head_dim,
            False,
            INIT,
            INIT,
            self.dtype,
            c.attention,
            name="attention",
        )
        y_B1D = attention(x_BTD, asking_BTD=probe_B1D)
        h_B1D = LayerNorm("embed", c.eps, self.dtype, name="mlp_norm")(y_B1D)
        mlp = MLP(c.embed, c.mlp, INIT, INIT, self.dtype, ACTIVATIONS[c.activation], name="mlp")
        return (y_B1D + mlp(h_B1D))[:, 0]


class ViT(nn.Module):
    """``apply({"params": p}, images [B, rows, columns, C]) -> logits [B, classes]`` in float32; images are normalised floats.

    ::

        x = [class; distillation; patches W + b] + positions;  x += attention(norm(x));  x += mlp(norm(x));  norm(x_0) head

    With ``distillation="head"`` the mean of both heads' logits; with ``mean_head``, their sum. With
    ``head="states"`` the normalised last hidden states [B, T, D]; the output of a pooler [B, D] is
    sown as ``pooled`` into the collection ``intermediates``. ``observe``, ``kept`` and ``frozen``
    as of `jaxgrow.models.gpt2.GPT2`; what is frozen with the bottom layers are patches, tokens and
    positions.
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
            raise ValueError(
                "a ViT drops no tokens: its class token is one of them, and has to pass every layer"
            )
        if kept is not None and frozen:
            raise ValueError(
                "layers are dropped from a whole stack: not together with frozen layers"
            )
        dtype = jnp.dtype(c.dtype)
        token_init = named(INIT, "embed" + BELOW, role="table")
        tokens_D = [self.param(name, token_init, (c.embed,)) for name in c.special]
        places_TD = self.param(
            "position_embedding", named(INIT, "positions", "embed" + BELOW), (c.positions, c.embed)
        )
        x_BTD = embedded(c, images, dtype, bias=c.patch_bias)
        tokens_B1D = [
            jnp.broadcast_to(token_D.astype(dtype), (len(x_BTD), 1, c.embed))
            for token_D in tokens_D
        ]
        x_BTD = jnp.concatenate([*tokens_B1D, x_BTD], 1) + places_TD[None].astype(dtype)
        if c.embedding_norm:
            x_BTD = LayerNorm("embed" + BELOW, c.eps, dtype, name="embedding_norm")(x_BTD)
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
        read_BSD = x_BTD if c.mean_head or c.head == "states" else x_BTD[:, : len(c.special)]
        x_BSD = LayerNorm("embed", c.eps, dtype, name="final_norm")(read_BSD)
        if c.head == "states":
            if c.pooler != "none":
                self.sow("intermediates", "pooled", pooled(c, x_BSD))
            x_BSD = x_BSD.astype(jnp.promote_types(dtype, jnp.float32))
            return (x_BSD, seen_L) if observe else x_BSD
        logits = classified(c, x_BSD[:, 0], bias=c.head_bias)
        if c.mean_head:
            logits = logits + classified(c, x_BSD[:, 1:].mean(1), "mean_head", bias=False)
        if c.distillation == "head":
            logits = (logits + classified(c, x_BSD[:, 1], "distillation_head")) / 2
        return (logits, seen_L) if observe else logits

"""CaiT (Touvron et al., ICCV 2021): layers of patches, followed by class layers.

In the class layers, a class token attends to the patches. Attention heads are mixed (talking heads,
Shazeer et al., 2020), and every sublayer has LayerScale.

Shape suffixes: B batch, T positions of queries, S positions of keys, D embed, H heads, K head_dim,
F mlp, P pixels on a side of a patch, C channels, L layers.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from jaxgrow.axes.names import READ, VALUE, named_init
from jaxgrow.layerdrop.execution import rescaled
from jaxgrow.models.bottleneck import add_adapter
from jaxgrow.models.config import Cost
from jaxgrow.models.loss import class_logits
from jaxgrow.models.model import INIT, Call, Model, Stack
from jaxgrow.models.modules import MLP, Linear, layer_scaled, merge_heads, split_heads
from jaxgrow.models.norms import LayerNorm
from jaxgrow.models.patches import PatchConfig, embed_patches
from jaxgrow.models.stack import run_stack, stacked_blocks


@dataclass(frozen=True)
class CaiTConfig(PatchConfig):
    """Config of a CaiT. The defaults are CaiT-S24."""

    layers: int = 24
    embed: int = 384
    heads: int = 8
    head_dim: int = 48
    mlp: int = 1536
    eps: float = 1e-6
    class_layers: int = 2

    means_stay = False

    def __post_init__(self):
        super().__post_init__()
        if self.attention not in ("auto", "xla"):
            raise ValueError(
                "a CaiT mixes its attention heads, which no kernel supports: set attention=auto, "
                f"not {self.attention}"
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
    def layer_scale(self) -> float:
        """The initial value of LayerScale: smaller in deeper models (section 2 of the paper)."""
        return 0.1 if self.layers <= 18 else 1e-5 if self.layers <= 24 else 1e-6

    def cost(self, length: int) -> Cost:
        """Return the FLOPs per position.

        The kernels of a layer take ``2 * (4 D HK + 2 D F)``, scores and their weighted sum take
        ``4 T HK``, and talking heads take ``4 T HH``. The following costs per image are divided by
        the number of positions: ``2 PPC D`` for each patch; for each class layer ``4 (T + 1) D HK``
        for keys and values, ``4 (T + 1) HK`` for scores and their sum, and ``4 D HK + 4 D F`` for
        the class token; and the head.

        Args:
          length: positions of a sample, T.
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


class TalkingHeads(nn.Module):
    """Attention of ``u`` [B, T, D] over ``x`` [B, S, D], without a mask.

    ``softmax(q k / sqrt(K)) v``

    With ``talking``, the scores of the heads are mixed before the softmax, and their weights are
    mixed after it: ``S_g = sum_h S_h W_hg``, ``A_g = sum_h softmax(S_h) W'_hg + b'_g``. These
    kernels read and write ``heads``, so copies of a head get equal inputs and give equal outputs. A
    bias before the softmax, as in the authors' code, would cancel in the softmax.
    """

    config: CaiTConfig
    dtype: DTypeLike
    talking: bool

    @nn.compact
    def __call__(self, u_BTD, x_BSD):
        c = self.config
        wide = jnp.promote_types(self.dtype, jnp.float32)

        project = partial(split_heads, c, INIT, self.dtype)

        def talk(name, x_BTSH, bias):
            if not self.talking:
                return x_BTSH
            axes = ("heads" + READ, "heads")
            shape = (c.heads, c.heads)
            return Linear(axes, shape, 1, INIT, wide, bias, name=name)(x_BTSH)

        q_BTHK = project("query", "heads", "head_dim")(u_BTD)
        k_BSHK = project("key", "heads", "head_dim" + READ)(x_BSD)
        v_BSHK = project("value", "heads", "head_dim" + VALUE)(x_BSD)
        scores_BTSH = (
            jnp.einsum("bthk,bshk->btsh", q_BTHK, k_BSHK, preferred_element_type=wide)
            / c.head_dim**0.5
        )
        weights_BTSH = jax.nn.softmax(talk("talk_before", scores_BTSH, False), axis=2)
        weights_BTSH = talk("talk_after", weights_BTSH, True).astype(self.dtype)
        y_BTHK = jnp.einsum("btsh,bshk->bthk", weights_BTSH, v_BSHK)
        return merge_heads(c, INIT, self.dtype)(y_BTHK)


class CaiTBlock(nn.Module):
    """A class layer: ``u += diag(a) attention(norm([u; x])); u += diag(m) mlp(norm(u))``.

    Without ``x``, it is a layer of patches.
    """

    config: CaiTConfig
    dtype: DTypeLike
    talking: bool

    @nn.compact
    def __call__(self, u_BTD, scale=None, x_BSD=None):
        """Apply the block.

        Args:
          u_BTD: the residual stream.
          scale: factor of each sublayer's output (`jaxgrow.layerdrop.KeepMask`); None: 1.
          x_BSD: further keys and values; None: none.
        """
        c = self.config

        def sized(name, y_BTD):
            return rescaled(
                add_adapter(self, name, layer_scaled(self, f"{name}_scale", y_BTD, c.layer_scale)),
                scale,
                name,
            )

        z_BSD = u_BTD if x_BSD is None else jnp.concatenate([u_BTD, x_BSD], 1)
        z_BSD = LayerNorm("embed", c.eps, self.dtype, name="attention_norm")(z_BSD)
        attention = TalkingHeads(c, self.dtype, self.talking, name="attention")
        u_BTD = u_BTD + sized("attention", attention(z_BSD[:, : u_BTD.shape[1]], z_BSD))
        h_BTD = LayerNorm("embed", c.eps, self.dtype, name="mlp_norm")(u_BTD)
        gelu = partial(jax.nn.gelu, approximate=False)
        mlp = MLP(c.embed, c.mlp, INIT, INIT, self.dtype, gelu, name="mlp")
        return u_BTD + sized("mlp", mlp(h_BTD))


class CaiT(Model):
    """A CaiT: ``apply({"params": p}, images [B, rows, columns, C]) -> logits [B, classes]``.

    Images are normalised floats, and logits are float32.

    The keyword arguments are described in `jaxgrow.models.model.Model`. They apply only to the
    layers of patches. The class token is added after these layers, so token dropping may let any
    patch bypass them. ``frozen`` also freezes the patch embedding and the position embedding.
    """

    config: CaiTConfig

    supports: ClassVar = ("kept_tokens",)

    def embeddings(self) -> dict[str, jax.Array]:
        position_embedding_TD = self.embedding(
            "position_embedding", "positions", self.config.positions
        )
        return {"position_embedding": position_embedding_TD}

    def stack(self, embeddings: dict[str, jax.Array], call: Call) -> Stack:
        return self.stack_of(CaiTBlock(self.config, self.dtype, talking=True, parent=None))

    def embed(self, embeddings: dict[str, jax.Array], call: Call) -> jax.Array:
        position_embedding_1TD = embeddings["position_embedding"][None].astype(self.dtype)
        return embed_patches(self.config, call.inputs, self.dtype) + position_embedding_1TD

    def output(self, x_BTD: jax.Array, embeddings: dict[str, jax.Array], call: Call) -> jax.Array:
        c = self.config
        dtype = self.dtype
        # The block is detached: only its init and apply are used.
        look = CaiTBlock(replace(c, adapter=None), dtype, talking=False, parent=None)
        one = jnp.zeros((1, 1, c.embed), dtype)
        looks = stacked_blocks(
            self, "class_blocks", look, c.class_layers, one, None, one, axis="class_layers"
        )
        token_D = self.param(
            "class_embedding", named_init(INIT, "embed", role="embedding"), (c.embed,)
        )
        u_B1D = jnp.broadcast_to(token_D.astype(dtype).reshape(1, 1, -1), (len(x_BTD), 1, c.embed))
        u_B1D, _ = run_stack(
            lambda w, u: look.apply({"params": w}, u, x_BSD=x_BTD),
            looks,
            u_B1D,
            remat=c.remat,
            scan=c.scan_layers,
        )
        x_BD = LayerNorm("embed", c.eps, dtype, name="final_norm")(u_B1D)[:, 0]
        return class_logits(x_BD, c.classes, INIT, "head")

"""Vision transformers: pre-LN encoders of the patches of an image.

The families are ViT (Dosovitskiy et al., ICLR 2021), DeiT (Touvron et al., ICML 2021), DINOv2
(Oquab et al., 2023), and the vision towers of CLIP (Radford et al., 2021) and SigLIP (Zhai et al.,
2023).

Shape suffixes: B batch, T positions, S positions of the head, R registers, D embed, H heads,
K head_dim, F mlp, P pixels on a side of a patch, C channels, L layers.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Self

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from jaxgrow.axes.names import BELOW, READ, Tree, named_init
from jaxgrow.layerdrop.execution import rescaled
from jaxgrow.models.bottleneck import add_adapter
from jaxgrow.models.config import Cost, Head
from jaxgrow.models.loss import class_logits
from jaxgrow.models.model import INIT, Call, Model, Stack
from jaxgrow.models.modules import ACTIVATIONS, MLP, Linear, SelfAttention, layer_scaled
from jaxgrow.models.norms import LayerNorm
from jaxgrow.models.patches import PatchConfig, embed_patches
from jaxgrow.registry import Registry


@dataclass(frozen=True)
class ViTConfig(PatchConfig):
    """Config of a ViT. The defaults are ViT-B/16 for ImageNet.

    ``distillation`` is for DeiT: "token" adds a distillation token, and "head" also adds a separate
    head for it. DINOv2 has LayerScale, and its head also reads the mean of the patches. The giant
    DINOv2 gates its MLPs.

    ``head="states"`` is a model without a head: it returns its normalised last hidden states. CLIP
    also normalises the embeddings (``embedding_norm``), and its head, the projection, has no bias.
    A SigLIP has no class token. Registers (Darcet et al., ICLR 2024) are learned tokens without
    positions between the class token and the patches, which no head reads.
    """

    eps: float = 1e-12
    distillation: Literal["none", "token", "head"] = "none"
    # The initial value of LayerScale; 0: no LayerScale.
    layer_scale: float = 0.0
    # Whether the MLPs are gated, with SiLU.
    gated: bool = False
    # Whether a second head reads the mean of the patches. The logits of both heads are added.
    mean_head: bool = False

    # Few models use the following fields, so repr hides them.
    head: Literal["classes", "states"] = field(default="classes", repr=False)
    # The pooler of a model without a head: ``tanh(x_0 W + b)``, or attention of a learned query
    # over all states, followed by an MLP (SigLIP).
    pooler: Literal["none", "tanh", "attention"] = field(default="none", repr=False)
    class_token: bool = field(default=True, repr=False)
    registers: int = field(default=0, repr=False)
    # Whether the parameters include the token that replaces hidden patches in the pre-training of
    # DINOv2. The model does not read it.
    mask_token: bool = field(default=False, repr=False)
    patch_bias: bool = field(default=True, repr=False)
    head_bias: bool = field(default=True, repr=False)
    embedding_norm: bool = field(default=False, repr=False)
    # The activation of MLPs that are not gated.
    activation: Literal["gelu", "gelu_tanh", "quick_gelu"] = field(default="gelu", repr=False)

    optional: ClassVar = ("registers",)
    # The choices that use a field (`train.extras.effect` checks them for a training).
    used_with = {
        **{key: {"head": ("classes",)} for key in ("mean_head", "head_bias", "classes")},
        "pooler": {"head": ("states",)},
        "activation": {"gated": (False,)},
    }

    def __post_init__(self):
        super().__post_init__()
        if self.head == "classes" and not self.class_token:
            raise ValueError(
                "head='classes' reads the class token, but class_token is False, as in a SigLIP: for "
                "classes, take a model with a class token, such as a CLIP; for the states, set head='states'"
            )
        if self.mean_head and self.distillation != "none":
            raise ValueError(
                "mean_head does not support a distillation token, but distillation is "
                f"{self.distillation!r}: set distillation='none'"
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
        """The names of the learned tokens before the patches."""
        if not self.class_token:
            return ()
        if self.distillation == "none":
            return ("class_embedding",)
        return ("class_embedding", "distillation_embedding")

    @property
    def positions(self) -> int:
        return self.patches + len(self.special)

    @property
    def length(self) -> int:
        return self.positions + self.registers

    def for_task(self, head: Head, classes: int, inputs: Tree) -> Self:
        return replace(super().for_task(head, classes, inputs), head=head, pooler="none")

    def cost(self, length: int) -> Cost:
        """Return the FLOPs per position.

        The kernels of a layer take ``2 * (4 D HK + 2 D F)``, with ``3 D F`` if the MLP is gated.
        Scores and their weighted sum take ``4 T HK``. The following costs per image are divided by
        the number of positions: ``2 PPC D`` for each patch, and ``2 D classes`` for each head.

        Args:
          length: positions of a sample, T.
        """
        width = self.heads * self.head_dim
        mlp = (3 if self.gated else 2) * self.mlp
        layer = 2 * self.embed * (4 * width + mlp) + 4 * length * width
        patches = self.patches * 2 * self.patch**2 * self.channels * self.embed / length
        # Either heads or a pooler run, also if the config has settings of both.
        count = 2 if self.distillation == "head" or self.mean_head else 1
        heads = (
            count * 2 * self.embed * self.classes / length
            if self.head == "classes"
            else self._pooler_cost(length)
        )
        return Cost(layer, patches + heads, first=patches)

    def _pooler_cost(self, length: int) -> float:
        """Return the FLOPs of the pooler per position."""
        width = self.heads * self.head_dim
        if self.pooler == "tanh":
            return 2 * self.embed**2 / length
        if self.pooler == "none":
            return 0.0
        # The cost of keys and scores is per position. The rest is computed once per image.
        keys = 2 * 2 * self.embed * width + 4 * width
        return keys + 2 * (2 * self.embed * width + 2 * self.embed * self.mlp) / length


# The module of the pooler of SigLIP.
POOLERS: Registry[Callable[..., nn.Module]] = Registry("pooler")


class ViTBlock(nn.Module):
    """A pre-LN block: ``x += attention(norm(x)); x += mlp(norm(x))``.

    With LayerScale, each sublayer's output is scaled: ``x += diag(a) attention(norm(x))``.
    """

    config: ViTConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x_BTD, scale=None):
        """Apply the block.

        Args:
          x_BTD: the residual stream.
          scale: factor of each sublayer's output (`jaxgrow.layerdrop.KeepMask`); None: 1.
        """
        c = self.config

        def sized(name, y_BTD):
            y_BTD = (
                layer_scaled(self, f"{name}_scale", y_BTD, c.layer_scale)
                if c.layer_scale
                else y_BTD
            )
            return rescaled(add_adapter(self, name, y_BTD), scale, name)

        h_BTD = LayerNorm("embed", c.eps, self.dtype, name="attention_norm")(x_BTD)
        attention = SelfAttention(c, INIT, INIT, self.dtype, name="attention")
        x_BTD = x_BTD + sized("attention", attention(h_BTD))
        h_BTD = LayerNorm("embed", c.eps, self.dtype, name="mlp_norm")(x_BTD)
        activation = jax.nn.silu if c.gated else ACTIVATIONS[c.activation]
        mlp = MLP(c.embed, c.mlp, INIT, INIT, self.dtype, activation, gated=c.gated, name="mlp")
        return x_BTD + sized("mlp", mlp(h_BTD))


def pooler_output(c: ViTConfig, x_BTD: jax.Array) -> jax.Array:
    """Return the output of the pooler, [B, D].

    Call it inside a compact module, which gets the pooler's parameters as ``pooler``.
    """
    if c.pooler == "attention":
        return POOLERS["attention"](c, x_BTD.dtype, name="pooler")(x_BTD)
    axes = ("embed" + READ, "embed")
    shape = (c.embed, c.embed)
    return jnp.tanh(Linear(axes, shape, 1, INIT, x_BTD.dtype, name="pooler")(x_BTD[:, 0]))


class ViT(Model):
    """A ViT: ``apply({"params": p}, images [B, rows, columns, C]) -> logits [B, classes]``.

    Images are normalised floats, and logits are float32.

    ::

        x = [class; distillation; patches W + b] + positions, with registers before the patches
        x += attention(norm(x));  x += mlp(norm(x))
        norm(x_0) head

    With ``distillation="head"``, the output is the mean of both heads' logits; with ``mean_head``,
    it is their sum. With ``head="states"``, it is the normalised last hidden states [B, T, D], and
    the output of a pooler [B, D] is sown as ``pooled`` into the collection ``intermediates``.
    The keyword arguments are described in `jaxgrow.models.model.Model`. ``frozen`` also freezes the
    patch embedding, the learned tokens and the position embedding.
    """

    config: ViTConfig

    reasons: ClassVar = {"kept_tokens": "its class token must pass every layer"}

    def embeddings(self) -> dict[str, jax.Array]:
        c = self.config
        token_init = named_init(INIT, "embed" + BELOW, role="embedding")
        names = (*c.special, *(["mask_embedding"] if c.mask_token else []))
        tokens_D = {name: self.param(name, token_init, (c.embed,)) for name in names}
        position_embedding_TD = self.embedding("position_embedding", "positions", c.positions)
        found = {**tokens_D, "position_embedding": position_embedding_TD}
        if c.registers:
            found["register_embedding"] = self.embedding(
                "register_embedding", "registers", c.registers
            )
        return found

    def stack(self, embeddings: dict[str, jax.Array], call: Call) -> Stack:
        return self.stack_of(ViTBlock(self.config, self.dtype, parent=None))

    def embed(self, embeddings: dict[str, jax.Array], call: Call) -> jax.Array:
        c = self.config
        x_BTD = embed_patches(c, call.inputs, self.dtype, bias=c.patch_bias)
        tokens_B1D = [
            jnp.broadcast_to(embeddings[name].astype(self.dtype), (len(x_BTD), 1, c.embed))
            for name in c.special
        ]
        position_embedding_1TD = embeddings["position_embedding"][None].astype(self.dtype)
        x_BTD = jnp.concatenate([*tokens_B1D, x_BTD], 1) + position_embedding_1TD
        if c.registers:
            registers_RD = embeddings["register_embedding"].astype(self.dtype)
            registers_BRD = jnp.broadcast_to(registers_RD, (len(x_BTD), *registers_RD.shape))
            first = len(c.special)
            x_BTD = jnp.concatenate([x_BTD[:, :first], registers_BRD, x_BTD[:, first:]], 1)
        if c.embedding_norm:
            x_BTD = LayerNorm("embed" + BELOW, c.eps, self.dtype, name="embedding_norm")(x_BTD)
        return x_BTD

    def output(self, x_BTD: jax.Array, embeddings: dict[str, jax.Array], call: Call) -> jax.Array:
        c = self.config
        read_BSD = x_BTD if c.mean_head or c.head == "states" else x_BTD[:, : len(c.special)]
        x_BSD = LayerNorm("embed", c.eps, self.dtype, name="final_norm")(read_BSD)
        if c.head == "states":
            if c.pooler != "none":
                self.sow("intermediates", "pooled", pooler_output(c, x_BSD))
            return self.wide(x_BSD)
        logits = class_logits(x_BSD[:, 0], c.classes, INIT, "head", c.head_bias)
        if c.mean_head:
            patches_BTD = x_BSD[:, 1 + c.registers :]
            logits = logits + class_logits(
                patches_BTD.mean(1), c.classes, INIT, "mean_head", bias=False
            )
        if c.distillation == "head":
            logits = (logits + class_logits(x_BSD[:, 1], c.classes, INIT, "distillation_head")) / 2
        return logits

"""What the vision families share: an image is divided into patches, each one position. P pixels a side, C channels."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import linen as nn
from jax.typing import DTypeLike

from jaxgrow.axes.names import BELOW, READ
from jaxgrow.models.config import Config
from jaxgrow.models.layers import Linear, class_logits

INIT = nn.initializers.normal(0.02)
_AXES = ("patch_rows", "patch_columns", "channels")


@dataclass(frozen=True)
class PatchConfig(Config):
    """A classifier of square images."""

    image: int = 224  # pixels a side
    patch: int = 16
    channels: int = 3
    classes: int = 1000

    no_axes: ClassVar = ("image", "patch")

    def __post_init__(self):
        if self.patch < 1 or self.image % self.patch:
            raise ValueError(
                f"{type(self).__name__}: an image of {self.image} pixels a side has no whole number of patches of {self.patch}"
            )
        super().__post_init__()

    @property
    def patches(self) -> int:
        """Of an image."""
        return (self.image // self.patch) ** 2

    @property
    def positions(self) -> int:
        """That have an embedding: none, if the family says no other."""
        return 0

    def for_images(self, image: int, classes: int) -> Self:
        """The same model for images of another size, and other classes."""
        return replace(self, image=image, classes=classes)

    @property
    def example(self) -> jax.Array:
        return jnp.zeros((1, self.image, self.image, self.channels))  # [B, rows, columns, C]

    def integers(self) -> dict[str, int]:
        positions = {"positions": self.positions} if self.positions else {}
        return {
            **super().integers(),
            "patch_rows": self.patch,
            "patch_columns": self.patch,
            **positions,
        }


def embedded(
    config: PatchConfig, images: jax.Array, dtype: DTypeLike, axis: str = "embed", bias: bool = True
) -> jax.Array:
    """``[B, T, D]``: the patches of ``images`` [B, rows, columns, C], row by row, each through one
    kernel that writes ``axis``. Inside of a compact module, which gets the kernel as
    ``patch_embedding``.

    Raises:
      ValueError: images of another shape, or of integers.
    """
    side, size, channels = config.image, config.patch, config.channels
    if images.shape[1:] != (side, side, channels) or not jnp.issubdtype(images.dtype, jnp.floating):
        raise ValueError(
            f"the model takes images of floats [batch, {side}, {side}, {channels}], normalised, but was given "
            f"{images.dtype} {list(images.shape)}"
        )
    patches_BTPPC = rearrange(
        images.astype(dtype), "b (h p) (w q) c -> b (h w) p q c", p=size, q=size
    )
    axes, shape = (
        (*(name + READ for name in _AXES), axis + BELOW),
        (size, size, channels, config.sizes()[axis]),
    )
    return Linear(axes, shape, 3, INIT, dtype, bias, name="patch_embedding")(patches_BTPPC)


def resized_positions(places_TD: jax.Array, old: PatchConfig, new: PatchConfig) -> jax.Array:
    """The embeddings of the positions of ``old``, for images of ``new``'s size: those of patches
    lie on a grid, which is interpolated (bicubic, as for DeiT, Touvron et al., 2021, section 3);
    those of tokens are copied. [T, D] -> [T', D].
    """
    if old.patches == new.patches:
        return places_TD
    tokens = old.positions - old.patches
    before, after = (math.isqrt(c.patches) for c in (old, new))
    grid = rearrange(places_TD[tokens:], "(h w) d -> h w d", h=before)
    grid = jax.image.resize(grid, (after, after, grid.shape[-1]), "cubic")
    return jnp.concatenate(
        [places_TD[:tokens], rearrange(grid, "h w d -> (h w) d").astype(places_TD.dtype)]
    )


def classified(
    config: PatchConfig, x_BD: jax.Array, name: str = "head", axis: str = "embed", bias: bool = True
) -> jax.Array:
    """Logits ``[B, classes]``, in float32 or better. Inside of a compact module, which gets the kernel as ``name``."""
    return class_logits(x_BD, config.classes, INIT, name, bias, axis)

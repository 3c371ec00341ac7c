"""The parts that the vision families share.

An image is divided into patches, and each patch is one position.

Shape suffixes: B batch, T positions, P pixels on a side of a patch, C channels, D embed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.typing import DTypeLike

from jaxgrow.axes.names import BELOW, READ, Params, Tree
from jaxgrow.models.config import Config, Head, Shapes
from jaxgrow.models.model import INIT
from jaxgrow.models.modules import Linear
from jaxgrow.registry import Registry

_AXES = ("patch_rows", "patch_columns", "channels")
# How position embeddings fit another image size (`jaxgrow.extras.models.image_sizes`).
RESIZING: Registry[Callable[..., jax.Array]] = Registry("image size")


@dataclass(frozen=True)
class PatchConfig(Config):
    """The base of the configs of classifiers of square images."""

    image: int = 224  # pixels on a side
    patch: int = 16
    channels: int = 3
    classes: int = 1000

    modality: ClassVar = "images"
    no_axes: ClassVar = ("image", "patch")

    def __post_init__(self):
        if self.patch < 1 or self.image % self.patch:
            raise ValueError(
                f"{type(self).__name__}: image={self.image} must be a multiple of "
                f"patch={self.patch}, and patch at least 1"
            )
        super().__post_init__()

    @property
    def patches(self) -> int:
        """The number of patches of an image."""
        return (self.image // self.patch) ** 2

    @property
    def positions(self) -> int:
        """The number of position embeddings: 0, unless a family overrides it."""
        return 0

    def for_images(self, image: int, classes: int) -> Self:
        """Return the config of the same model for another image size and other classes."""
        return replace(self, image=image, classes=classes)

    def for_task(self, head: Head, classes: int, inputs: Tree) -> Self:
        return self.for_images(len(inputs), classes)

    def body_from(self, params: Params, old: Config) -> Params:
        if not self.positions or not isinstance(old, PatchConfig):
            return params
        name = "position_embedding"
        return params | {name: RESIZING["positions"](params[name], old, self)}

    def batch_shapes(self, samples: int) -> Shapes:
        images = (samples, self.image, self.image, self.channels)
        return (
            jax.ShapeDtypeStruct(images, jnp.float32),
            jax.ShapeDtypeStruct((samples,), jnp.int32),
        )

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


def embed_patches(
    config: PatchConfig, images: jax.Array, dtype: DTypeLike, axis: str = "embed", bias: bool = True
) -> jax.Array:
    """Return the patch embeddings, [B, T, D]. Patches are in row order.

    Call it inside a compact module, which gets the kernel as ``patch_embedding``.

    Args:
      config: the config.
      images: [B, rows, columns, C].
      dtype: dtype of activations.
      axis: the name of the output axis.
      bias: whether there is a bias.

    Raises:
      ValueError: the images have a wrong shape or contain integers.
    """
    side = config.image
    size = config.patch
    channels = config.channels
    if images.shape[1:] != (side, side, channels) or not jnp.issubdtype(images.dtype, jnp.floating):
        raise ValueError(
            f"the model takes normalised images of floats [batch, {side}, {side}, {channels}], "
            f"but got {images.dtype} {list(images.shape)}"
        )
    patches_BTPPC = rearrange(
        images.astype(dtype), "b (h p) (w q) c -> b (h w) p q c", p=size, q=size
    )
    axes = (*(name + READ for name in _AXES), axis + BELOW)
    shape = (size, size, channels, config.sizes()[axis])
    return Linear(axes, shape, 3, INIT, dtype, bias, name="patch_embedding")(patches_BTPPC)

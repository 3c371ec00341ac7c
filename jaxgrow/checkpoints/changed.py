"""How can a model get another dtype or noise while it is read?"""

import jax.numpy as jnp
import numpy as np

from jaxgrow.axes.names import axis_of, is_layers
from jaxgrow.checkpoints.io.files import CheckpointError
from jaxgrow.checkpoints.source import (
    Leaf,
    Source,
    leaves_by_path,
    tree_from_paths,
)
from jaxgrow.growth.maps import Maps
from jaxgrow.growth.symmetry import break_symmetry


class Cast(Source):
    """Convert a model to another dtype.

    Args:
      source: the model.
      dtype: the name of the new dtype.
      at_least: whether to promote each leaf to a dtype that represents both its own dtype and
        ``dtype``, so that wider leaves keep theirs.

    Raises:
      CheckpointError: by `read`, if a finite value is infinite in the new dtype.
    """

    def __init__(self, source: Source, dtype: str, *, at_least: bool = False):
        self._source = source
        self.sources = (source,)
        self.config = source.config
        self.leaves = {}
        for path, leaf in source.leaves.items():
            new = np.dtype(jnp.promote_types(leaf.dtype, dtype) if at_least else jnp.dtype(dtype))
            self.leaves[path] = Leaf(leaf.names, leaf.shape, new)

    def read(self, path: str, layer: int | None = None) -> np.ndarray:
        x = self._source.read(path, layer)
        dtype = self.leaves[path].dtype
        if dtype == x.dtype:
            return x
        with np.errstate(over="ignore"):
            cast = x.astype(dtype)
        infinite = np.isinf(cast)
        if infinite.any() and (lost := infinite & np.isfinite(x)).any():
            where = path if layer is None else f"layer {layer} of {path}"
            raise CheckpointError(
                f"{where} has values up to {np.abs(x[lost]).max():g}, but the largest number of "
                f"{dtype.name} is {float(jnp.finfo(dtype).max):g}. Choose the dtype "
                "bfloat16 or float32"
            )
        return cast

    def origin(self, path: str, layer: int | None) -> tuple[Source, int | None] | None:
        return self._source.origin(path, layer)


class Noisy(Source):
    """Add the noise of `break_symmetry` to a grown model.

    Args:
      source: the grown model.
      growth: the growth that made it. It determines which units are copies.
      seed: random seed of the noise.
      snr: signal-to-noise ratio of each layer of a leaf in decibels.
    """

    def __init__(self, source: Source, growth: Maps, seed: int, snr: float):
        self._source = source
        self.sources = (source,)
        self.config = source.config
        self.leaves = source.leaves
        self._noise = {"growth": growth, "seed": seed, "snr": snr}

    def read(self, path: str, layer: int | None = None) -> np.ndarray:
        x = self._source.read(path, layer)
        names = tuple(
            n for n in self.leaves[path].names if layer is None or not is_layers(axis_of(n))
        )
        # The noise depends on the path, so every layer gets different noise.
        where = path if layer is None else f"{path}/{layer}"
        noisy = break_symmetry(
            tree_from_paths({where: x}), axes=tree_from_paths({where: names}), **self._noise
        )
        return np.asarray(leaves_by_path(noisy)[where])

    def origin(self, path: str, layer: int | None) -> None:
        return None

"""Models whose numbers are changed while they are read: their dtype, or by noise that keeps the function."""

import jax.numpy as jnp
import numpy as np

from jaxgrow.axes.names import axis, is_layers
from jaxgrow.checkpoints.source import Leaf, Source, flat, nested
from jaxgrow.growth.maps import Maps
from jaxgrow.growth.symmetry import break_symmetry


class Cast(Source):
    """A model in another dtype; ``at_least``: only the leaves that this one holds with room to spare."""

    def __init__(self, source: Source, dtype: str, *, at_least: bool = False):
        self._source, self.config = source, source.config
        self.leaves = {}
        for path, leaf in source.leaves.items():
            new = np.dtype(jnp.promote_types(leaf.dtype, dtype) if at_least else jnp.dtype(dtype))
            self.leaves[path] = Leaf(leaf.names, leaf.shape, new)

    def read(self, path: str, layer: int | None = None) -> np.ndarray:
        return self._source.read(path, layer).astype(self.leaves[path].dtype, copy=False)

    def origin(self, path: str, layer: int | None) -> tuple[Source, int | None] | None:
        return self._source.origin(path, layer)


class Noisy(Source):
    """A grown model with `break_symmetry`'s noise, ``snr`` decibels below each layer of a leaf."""

    def __init__(self, source: Source, growth: Maps, seed: int, snr: float):
        self._source, self.config, self.leaves = source, source.config, source.leaves
        self._noise = {"growth": growth, "seed": seed, "snr": snr}

    def read(self, path: str, layer: int | None = None) -> np.ndarray:
        x = self._source.read(path, layer)
        names = tuple(n for n in self.leaves[path].names if layer is None or not is_layers(axis(n)))
        where = path if layer is None else f"{path}/{layer}"  # what the noise is drawn by
        noisy = break_symmetry(nested({where: x}), axes=nested({where: names}), **self._noise)
        return np.asarray(flat(noisy)[where])

    def origin(self, path: str, layer: int | None) -> None:
        return None

"""How does a grown model get noise while it is read, by which its copies of units differ?"""

import numpy as np

from jaxgrow.axes.names import axis_of, is_layers
from jaxgrow.checkpoints.io.files import CheckpointError
from jaxgrow.checkpoints.source import Source, leaves_by_path, tree_from_paths
from jaxgrow.checkpoints.writing import CONVERSIONS
from jaxgrow.growth.maps import Growth, Maps, Rules
from jaxgrow.growth.symmetry import break_symmetry


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


def add_noise(source: Source, growth: Growth, seed: int, snr: float) -> Noisy:
    """Add noise to a grown model, as `Noisy`.

    Raises:
      CheckpointError: the growth has no copies that noise makes different.
    """
    if isinstance(growth, Rules):
        raise CheckpointError("noise requires a growth by copies of units: omit the noise")
    return Noisy(source, growth, seed, snr)


CONVERSIONS.add("noise", add_noise)

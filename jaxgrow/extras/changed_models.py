"""How can a model get noise, colours, another head or other settings while it is read?"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from jaxgrow.axes.names import axis_of, is_layers
from jaxgrow.checkpoints.io.files import PROCESSOR, CheckpointError
from jaxgrow.checkpoints.source import (
    Checkpoint,
    Leaf,
    Source,
    initial_layout,
    leaves_by_path,
    tree_from_paths,
)
from jaxgrow.checkpoints.writing import CONVERSIONS, NOISES, Output
from jaxgrow.growth.maps import Growth, Maps, Rules
from jaxgrow.growth.symmetry import break_symmetry


class Reconfigured(Source):
    """A model with another config, in which some leaves are computed from others.

    Args:
      source: the model.
      computed: functions that return leaves, by path.
      **settings: the settings of the config that change.
    """

    def __init__(
        self,
        source: Source,
        computed: Mapping[str, Callable[[], np.ndarray]],
        **settings: object,
    ):
        self._source = source
        self.sources = (source,)
        self._computed = computed
        self.config = replace(source.config, **settings)
        like = source.leaves.get("token_embedding")
        self.leaves = {}
        for path, (names, shape) in initial_layout(self.config).items():
            leaf = source.leaves.get(path, like)
            assert leaf is not None
            self.leaves[path] = Leaf(names, shape, leaf.dtype)

    def read(self, path: str, layer: int | None = None) -> np.ndarray:
        return self._computed[path]() if path in self._computed else self._source.read(path, layer)

    def origin(self, path: str, layer: int | None) -> None:
        return None


class InColour(Source):
    """Convert a model of gray images to a model of colour images with the same outputs.

    The three channels of the images are then equal, and the kernel of each channel is a third of the
    kernel for gray images.

    Args:
      source: the model, whose axis ``channels`` has size 1.
    """

    def __init__(self, source: Source):
        self._source = source
        self.sources = (source,)
        self.config = source.config.with_sizes({"channels": 3})
        self.leaves = {}
        for path, leaf in source.leaves.items():
            sizes = zip(leaf.names, leaf.shape, strict=True)
            shape = tuple(3 if axis_of(name) == "channels" else size for name, size in sizes)
            self.leaves[path] = Leaf(leaf.names, shape, leaf.dtype)

    def read(self, path: str, layer: int | None = None) -> np.ndarray:
        x = self._source.read(path, layer)
        names = [n for n in self.leaves[path].names if layer is None or not is_layers(axis_of(n))]
        for i, name in enumerate(names):
            if axis_of(name) == "channels":
                x = np.repeat(x / 3, 3, i)
        return x


def for_images(source: Source, roots: Sequence[Checkpoint], output: Output) -> Source:
    """Convert a model of gray images to colours if `transformers` will convert its images."""
    beside = roots[0].files_beside if roots else None
    if beside is None or roots[0].hf_config is not None or not output.is_hf(roots):
        return source
    gray = source.config.sizes().get("channels") == 1
    return InColour(source) if gray and (beside / PROCESSOR).is_file() else source


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


CONVERSIONS.add("images", for_images)
NOISES.add("copies", add_noise)

"""How does a model of gray images become a model of images with colours while it is read?"""

import numpy as np

from jaxgrow.axes.names import axis_of, is_layers
from jaxgrow.checkpoints.source import Leaf, Source
from jaxgrow.checkpoints.writing import CONVERSIONS


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


CONVERSIONS.add("colours", InColour)

"""How can a model get another head, or other settings, while it is read?"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from jaxgrow.checkpoints.source import Leaf, Source, initial_layout


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

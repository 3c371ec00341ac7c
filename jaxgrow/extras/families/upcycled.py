"""How is a dense model read as a mixture of experts?"""

from dataclasses import replace

import numpy as np

from jaxgrow.checkpoints.io.files import CheckpointError
from jaxgrow.checkpoints.source import (
    Grown,
    Leaf,
    Source,
    initial_layout,
    leaves_by_path,
    tree_from_paths,
)
from jaxgrow.extras.models.upcycling import add_router_noise
from jaxgrow.growth.maps import Growth

ROUTER = "blocks/mlp/router/kernel"


class Single(Source):
    """A dense model as a mixture of one expert, as `as_mixture` returns it.

    Args:
      source: the dense model.

    Raises:
      CheckpointError: the model already has experts, or its MLP cannot become an expert.
    """

    def __init__(self, source: Source):
        try:
            self.config = source.config.as_mixture()
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        self._source = source
        self.sources = (source,)
        like = source.leaves["blocks/mlp/up/kernel"].dtype
        dtypes = {path: leaf.dtype for path, leaf in source.leaves.items()} | {ROUTER: like}
        self.leaves = {
            path: Leaf(names, shape, dtypes[path])
            for path, (names, shape) in initial_layout(self.config).items()
        }

    def read(self, path: str, layer: int | None = None) -> np.ndarray:
        leaf = self.leaves[path]
        shape = leaf.shape if layer is None else leaf.shape[1:]
        return (
            np.zeros(shape, leaf.dtype)
            if path == ROUTER
            else self._source.read(path, layer).reshape(shape)
        )

    def origin(self, path: str, layer: int | None) -> tuple[Source, int | None] | None:
        return None if path.startswith("blocks/mlp/") else self._source.origin(path, layer)


class Upcycled(Grown):
    """A mixture that is made from a dense model or from a smaller mixture, with noise in its routers.

    The noise comes from `jaxgrow.extras.models.upcycling.add_router_noise`.

    Args:
      source: the dense model, or the smaller mixture.
      growth: the growth of the mixture of one expert (`jaxgrow.operators.upcycle`), or of the smaller
        mixture (`jaxgrow.operators.expert_copies`).
      active: the number of experts that each token uses.
      seed: random seed of the noise.

    Raises:
      CheckpointError: as `Single` and `Grown`, or the mixture has fewer than ``active`` experts.
    """

    def __init__(self, source: Source, growth: Growth, active: int, seed: int = 0):
        super().__init__(source if source.sizes().get("experts") else Single(source), growth)
        settings: dict[str, object] = {"active": active}
        try:
            self.config = replace(self.config, **settings)
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        routers = self.leaves[ROUTER]
        names = tree_from_paths({ROUTER: self.leaves[ROUTER].names})
        zeros = tree_from_paths({ROUTER: np.zeros(routers.shape, routers.dtype)})
        # The number of parts into which an expert was split.
        parts = source.sizes()["mlp"] // self.config.mlp
        self._noise = np.asarray(
            leaves_by_path(add_router_noise(zeros, names, seed, group=parts))[ROUTER]
        )

    def read(self, path: str, layer: int | None = None) -> np.ndarray:
        x = super().read(path, layer)
        return x + (self._noise if layer is None else self._noise[layer]) if path == ROUTER else x

    def origin(self, path: str, layer: int | None) -> tuple[Source, int | None] | None:
        return None if path == ROUTER else super().origin(path, layer)

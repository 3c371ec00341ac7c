"""How can a model get another dtype while it is read?"""

import jax.numpy as jnp
import numpy as np

from jaxgrow.checkpoints.io.files import CheckpointError
from jaxgrow.checkpoints.source import Leaf, Source


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

"""How does a part of a model compute on the shards of each device?"""

from collections.abc import Callable

import jax
from jax.sharding import AxisType

from jaxgrow.axes.names import Tree
from jaxgrow.sharding import BATCH, axes_of_type


def map_devices(each: Callable, in_specs: Tree, out_specs: Tree) -> Callable:
    """Map a function over the devices of the mesh, so that each device computes on its own shards.

    For traced code. Without automatic mesh axes, the function is returned unchanged.

    Args:
      each: the function of the local shards.
      in_specs: the partition specs of its arguments, as for `jax.shard_map`.
      out_specs: the partition specs of its results.
    """
    if not axes_of_type(AxisType.Auto):
        return each
    return jax.shard_map(each, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def mean_of_devices(x: jax.Array) -> jax.Array:
    """Average a value over the devices that have different samples.

    For code that is mapped over `BATCH` axes by `jax.pmap` or `jax.shard_map`. In other code, a
    value already covers all samples, and it is returned unchanged.
    """
    over = tuple(a for a in BATCH if a in axes_of_type(AxisType.Manual))
    return jax.lax.pmean(x, over) if over else x

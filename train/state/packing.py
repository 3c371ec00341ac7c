"""A model with its scalar leaves in one array.

The optimizer state has a few scalars for each parameter. As separate leaves, each of them would be
an argument and a result of every step, and would occupy a separate buffer.
"""

import jax
import jax.numpy as jnp
from flax import struct

from train.state.model import TrainState


@struct.dataclass
class Packed:
    """A model between the steps of a phase, with one array in place of many scalar leaves.

    Attributes:
      arrays: leaves of the model that have at least one axis, in the order of the model's leaves.
      scalars: the other leaves, one array [scalars] for each dtype, by the name of the dtype.
      dtypes: for each leaf of the model, the key of its array in ``scalars``, or None.
      structure: tree structure of the model.
    """

    arrays: list[jax.Array]
    scalars: dict[str, jax.Array]
    dtypes: tuple[str | None, ...] = struct.field(pytree_node=False)
    structure: jax.tree_util.PyTreeDef = struct.field(pytree_node=False)

    @property
    def model(self) -> TrainState:
        """The model as it was before `packed`, with the same arrays."""
        arrays = iter(self.arrays)
        scalars = {name: iter(values) for name, values in _split(self.scalars).items()}
        leaves = [next(scalars[name] if name else arrays) for name in self.dtypes]
        return jax.tree.unflatten(self.structure, leaves)


def packed(model: TrainState) -> Packed:
    """Put the scalar leaves of ``model`` into one array for each dtype.

    Args:
      model: model with its optimizer state. Its arrays are not copied.
    """
    leaves, structure = jax.tree.flatten(model)
    dtypes = tuple(None if jnp.ndim(x) else jnp.result_type(x).name for x in leaves)
    arrays = [x for x, name in zip(leaves, dtypes, strict=True) if name is None]
    scalars: dict[str, list[jax.Array]] = {}
    for x, name in zip(leaves, dtypes, strict=True):
        if name is not None:
            scalars.setdefault(name, []).append(x)
    return Packed(arrays, _stack_scalars(scalars), dtypes, structure)


@jax.jit
def _stack_scalars(scalars: dict[str, list[jax.Array]]) -> dict[str, jax.Array]:
    return jax.tree.map(jnp.stack, scalars, is_leaf=lambda x: isinstance(x, list))


@jax.jit
def _split(scalars: dict[str, jax.Array]) -> dict[str, list[jax.Array]]:
    return jax.tree.map(list, scalars)

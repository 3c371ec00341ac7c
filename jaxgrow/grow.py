"""`grow`: the one function that applies a growth to a parameter tree."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrow import maps
from jaxgrow.axes import Names, Tree, axis, is_names, leaves, reads, sizes


def grow(growth: maps.Growth, params: Tree, axes: Tree) -> Tree:
    """Contracts every named axis of every leaf with that axis's map.

    For a kernel ``W[i, o]`` that reads ``a`` and writes ``b``: ``W'= read_a @ W @ write_b.T``.

    Args:
      growth: ``{axis name: AxisMap}``; other axes stay as they are.
      params: a pytree of arrays. NumPy leaves stay NumPy, so that a checkpoint can be transformed on the host.
      axes: a tree of the same structure, of tuples of axis names (see `jaxgrow.axes`).

    Returns:
      A tree of the same structure and dtypes. Linear in ``params``; exact where the maps only copy; otherwise computed
      in float32 or better and cast back. A leaf that no map touches is returned as it is, not copied. Pure: works under
      ``jit``, ``grad`` and ``eval_shape``, and under ``jit`` with ``out_shardings`` on a mesh.

    Raises:
      ValueError: a map whose old size is not the size of its axis, or an axis that no leaf has; all in one message.
    """
    _check(growth, params, axes)
    return jax.tree.map(lambda names, x: grow_leaf(growth, names, x), axes, params, is_leaf=is_names)


def grow_leaf(growth: maps.Growth, names: Names, x: Any) -> Any:
    """`grow` for one leaf, whose shape is taken to fit."""
    steps = [(dim, growth[axis(n)], reads(n)) for dim, n in enumerate(names) if axis(n) in growth]
    if not steps:
        return x
    dtype = x.dtype
    x = x.astype(jnp.promote_types(dtype, jnp.float32))
    for dim, m, read in sorted(steps, key=lambda s: s[1].new / s[1].old):  # shrink first: less to move
        x = maps.apply(m.read if read else m.write, x, dim)
    return x.astype(dtype)


def _check(growth: maps.Growth, params: Tree, axes: Tree) -> None:
    known = sizes(params, axes)
    wrong = [
        f"axis {name!r}: the model has no such axis, only {', '.join(map(repr, sorted(known)))}"
        for name in growth
        if name not in known
    ]
    for path, x, names in leaves(params, axes):
        wrong += [
            f"{path}: axis {axis(n)!r} has size {size}, but its map takes {growth[axis(n)].old} to {growth[axis(n)].new}"
            for n, size in zip(names, np.shape(x), strict=True)
            if axis(n) in growth and growth[axis(n)].old != size
        ]
    if wrong:
        raise ValueError(
            "the growth does not fit the parameters; build it from their sizes():\n  " + "\n  ".join(wrong)
        )

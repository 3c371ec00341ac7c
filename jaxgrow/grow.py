"""`grow`: the one function that applies a growth to a parameter tree."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxgrow import maps
from jaxgrow.axes import Names, Tree, axis, is_names, leaves, reads, sizes

_PART = 2 << 20  # bytes of a result that are worked on at a time: small enough for a cache, large enough for Python


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
    along = [growth.get(axis(n)) for n in names]
    if not any(along):
        return x
    matrices = [m and (m.read if reads(n) else m.write) for m, n in zip(along, names, strict=True)]
    if isinstance(x, np.ndarray) and not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(matrices)):
        out = np.empty([size if m is None else m.shape[0] for m, size in zip(matrices, x.shape, strict=True)], x.dtype)
        _fill(out, matrices, x)
        return out
    return _contract(matrices, x).astype(x.dtype)


def _contract(matrices: Sequence[maps.Matrix | None], x: Any, out: np.ndarray | None = None) -> Any:
    """The result, which may be ``out``, an array that it may be written to."""
    steps = [(dim, m) for dim, m in enumerate(matrices) if m is not None]
    steps.sort(key=lambda s: s[1].shape[0] / s[1].shape[1])  # shrink first: less to move
    for i, (dim, m) in enumerate(steps):
        x = maps.apply(m, x, dim, out if i == len(steps) - 1 else None)
    return x


def _fill(out: np.ndarray, matrices: Sequence[maps.Matrix | None], x: np.ndarray) -> None:
    """``out = x`` contracted, in parts that fit a cache: then only source and result travel through memory."""
    first, *rest = matrices
    rows = _PART // max(1, out[:1].nbytes)
    if rows >= len(out) or not (first is None or isinstance(first, maps.Rows)):
        return _put(out, matrices, x)
    for i in range(0, len(out), max(1, rows)):
        j = i + max(1, rows)
        part = x[i:j] if first is None else maps.apply(first.rows(i, j), x, 0)
        if rows <= 1 and out.ndim > 1:
            _fill(out[i], rest, part[0])
        else:
            _put(out[i:j], [None, *rest], part)


def _put(out: np.ndarray, matrices: Sequence[maps.Matrix | None], x: np.ndarray) -> None:
    result = _contract(matrices, x, out)
    if result is not out:
        out[...] = result


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

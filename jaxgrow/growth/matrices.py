"""Matrices of maps: how are they stored, and how is an array contracted with them?

Sparse matrices (`SparseMap`) copy, average or sum units. Dense matrices are arrays. Most of the run
time of a growth is spent here.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from typing import Any, TypeAlias, TypeGuard, overload

import flax.struct as struct
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxgrow.sharding import whole_along

# Bytes of a result that are computed at a time. This is small enough for a CPU cache, and large
# enough that the overhead of Python does not matter.
_PART = 2 << 20


@struct.dataclass
class SparseMap:
    """A sparse matrix ``[new, old]`` with a few terms per row.

    ``(R x)[i] = sum_k weight[i, k] * x[index[i, k]]``

    Copies, means and sums have this form, with one or a few terms per row. The matrix is applied by
    gathering, never by a matrix product. Therefore a copy is bitwise identical on every device, and
    its speed is limited only by the memory bandwidth.

    Args:
      index: column of each term, int ``[new, terms]``.
      weight: value of each term, float ``[new, terms]``.
      old: number of columns.

    Example:
      >>> mean = SparseMap(np.array([[0, 1]]), np.array([[0.5, 0.5]]), old=3)
      >>> dense(mean).tolist()
      [[0.5, 0.5, 0.0]]
    """

    index: np.ndarray
    weight: np.ndarray
    old: int = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, int]:
        return (self.index.shape[0], self.old)

    def __repr__(self) -> str:
        """Show sizes and kind, but no entries: ``SparseMap(24 -> 48, copies)``."""
        # JAX's tree functions also build this class with leaves that are not arrays.
        if not all(hasattr(x, "shape") for x in (self.index, self.weight)):
            return f"SparseMap(index={self.index!r}, weight={self.weight!r}, old={self.old!r})"
        return f"SparseMap({self.old} -> {self.shape[0]}, {describe_matrix(self)})"

    def rows(self, start: int, stop: int) -> "SparseMap":
        return SparseMap(self.index[start:stop], self.weight[start:stop], self.old)


Array: TypeAlias = np.ndarray | jax.Array
Matrix: TypeAlias = SparseMap | Array


def is_numpy(x: object) -> TypeGuard[np.ndarray]:
    """Whether this is a NumPy array. The arrays of a map that is traced or learned are not."""
    return isinstance(x, np.ndarray)


def is_traced(x: object) -> TypeGuard[jax.Array]:
    """Whether this is an array in a function that JAX traces, whose values are unknown."""
    return isinstance(x, jax.core.Tracer)


def can_scale(dtype: DTypeLike) -> bool:
    """Whether values of this dtype can be scaled and summed, with one rounding.

    Fractions of integers and truth values would be truncated, and JAX does not convert floats of
    less than 16 bits to wider ones.
    """
    return jnp.issubdtype(dtype, jnp.inexact) and np.dtype(dtype).itemsize > 1


def only_copies(m: Matrix) -> bool:
    """Whether `apply` copies units without any arithmetic, which is exact for every dtype."""
    return (
        isinstance(m, SparseMap)
        and is_numpy(m.weight)
        and m.weight.shape[1] == 1
        and bool((m.weight == 1).all())
    )


def contract(matrices: Sequence[Matrix | None], x: Array) -> Array:
    """Contract every dimension of an array with its matrix.

    Args:
      matrices: one matrix ``[new, old]`` for each dimension of ``x``, or None if the dimension is
        unchanged.
      x: the array. The result is a NumPy array if ``x`` and all matrices are NumPy arrays.

    Returns:
      The result in the dtype of ``x``. Sums and products are computed in float32 or a wider type.

    Example:
      >>> twice = SparseMap(np.array([[0], [1], [0], [1]]), np.ones((4, 1)), old=2)
      >>> contract([None, twice], np.array([[1.0, 2.0]])).tolist()
      [[1.0, 2.0, 1.0, 2.0]]
    """
    if isinstance(x, np.ndarray) and not any(
        isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(matrices)
    ):
        out = np.empty(
            [size if m is None else m.shape[0] for m, size in zip(matrices, x.shape, strict=True)],
            x.dtype,
        )
        _fill(out, matrices, x)
        return out
    found = _contract(matrices, jnp.asarray(x))
    return found if found.dtype == x.dtype else found.astype(x.dtype)  # PRNG keys are not cast


def product_flops(matrices: Sequence[Matrix | None], shape: Sequence[int]) -> list[float]:
    """Return the FLOPs (2 per multiply-add) of each matrix product of `contract`, in order.

    Args:
      matrices: one matrix for each dimension, or None, as in `contract`.
      shape: shape of the array.
    """
    now = list(shape)
    out: list[float] = []
    for dim, m in _in_order(matrices):
        now[dim] = m.shape[0]
        if not isinstance(m, SparseMap):
            out.append(2.0 * math.prod(now) * m.shape[1])
    return out


# --- operations on matrices ---


def dense(m: Matrix) -> np.ndarray:
    """Return the matrix as an array ``[new, old]``."""
    if not isinstance(m, SparseMap):
        return np.asarray(m)
    out = np.zeros(m.shape)
    np.add.at(out, (np.arange(m.shape[0])[:, None], m.index), m.weight)
    return out


def describe_matrix(m: Matrix) -> str:
    """Describe in one to three words how the matrix computes new units from the old ones.

    Example:
      >>> describe_matrix(SparseMap(np.array([[0], [1], [0]]), np.array([[1.0], [1.0], [0.0]]), old=2))
      'copies and zeros'
    """
    if not isinstance(m, SparseMap):
        return "dense"
    # The values of traced matrices are unknown.
    if not is_numpy(m.weight) or not is_numpy(m.index):
        return "sparse"
    if is_identity(m):
        return "identity"
    m = sparse(m)
    used = m.weight != 0
    zero = ~used.any(1)
    own = m.weight[used]
    if zero.all():
        return "zeros"
    if used.sum(1).max() == 1:
        kind = "copies" if (own == 1).all() else "scaled copies"
    else:
        kind = "means" if np.allclose(m.weight.sum(1)[~zero], 1) else "sums"
    return f"{kind} and zeros" if zero.any() else kind


@overload
def transpose(m: SparseMap) -> SparseMap: ...
@overload
def transpose(m: Matrix) -> Matrix: ...
def transpose(m: Matrix) -> Matrix:
    """Return the transposed matrix, which is sparse if ``m`` is."""
    return _from_entries(m, transposed=True) if isinstance(m, SparseMap) else m.T


def absolute_weights(m: Matrix) -> Matrix:
    """Return the matrix with the absolute values of its weights."""
    return replace(m, weight=abs(m.weight)) if isinstance(m, SparseMap) else abs(m)


def matmul(a: Matrix, b: Matrix) -> Matrix:
    """Return the product ``a @ b``, which is sparse if both are."""
    if not (isinstance(a, SparseMap) and isinstance(b, SparseMap)):
        a, b = (dense(m) if isinstance(m, SparseMap) else m for m in (a, b))
        return a @ b
    index = b.index[a.index].reshape(a.shape[0], -1)
    weight = (a.weight[..., None] * b.weight[a.index]).reshape(a.shape[0], -1)
    return _from_entries(SparseMap(index, weight, b.old))


def kron(m: Matrix, size: int) -> SparseMap:
    """Return ``m (x) I``: it moves blocks of ``size`` units as ``m`` moves single units.

    Args:
      m: a sparse matrix.
      size: number of units in a block.

    Raises:
      TypeError: the matrix is dense.
    """
    if not isinstance(m, SparseMap):
        raise TypeError(
            "blocks() supports only maps made of SparseMaps. For a dense map over blocks of units, use "
            "np.kron(map, identity)."
        )
    index = (m.index[:, None, :] * size + np.arange(size)[None, :, None]).reshape(
        -1, m.index.shape[1]
    )
    return SparseMap(index.astype(np.int32), np.repeat(m.weight, size, 0), m.old * size)


def sparse(m: Matrix) -> SparseMap:
    """Return the same matrix as `SparseMap`, where each entry is a single term."""
    if isinstance(m, SparseMap):
        return _from_entries(m)
    return SparseMap(np.broadcast_to(np.arange(m.shape[1]), m.shape), np.asarray(m), m.shape[1])


def is_identity(m: Matrix) -> bool:
    """Whether the matrix is the identity, with an absolute tolerance of 1e-6."""
    if m.shape[0] != m.shape[1]:
        return False
    m = sparse(m)
    own = m.index == np.arange(len(m.index))[:, None]
    wrong = np.append((m.weight * own).sum(1) - 1, m.weight[~own])
    return np.allclose(wrong, 0, rtol=0, atol=1e-6)


def _from_entries(m: SparseMap, transposed: bool = False) -> SparseMap:
    """Return the matrix, or its transpose, with as few terms per row as possible.

    Shorter rows are padded with terms of weight 0.
    """
    i = np.repeat(np.arange(m.shape[0]), m.index.shape[1])
    j = m.index.reshape(-1)
    new, old = m.shape
    if transposed:
        i, j, new, old = j, i, old, new
    flat, where = np.unique(i.astype(np.int64) * old + j, return_inverse=True)
    weight = np.zeros(len(flat))
    np.add.at(weight, where.reshape(-1), m.weight.reshape(-1))
    flat = flat[weight != 0]
    weight = weight[weight != 0]
    i, j = np.divmod(flat, old)
    count = np.bincount(i, minlength=new)
    k = np.arange(len(i)) - (np.cumsum(count) - count)[i]
    shape = (new, max(1, int(count.max(initial=0))))
    out = SparseMap(np.zeros(shape, np.int32), np.zeros(shape), old)
    out.index[i, k] = j
    out.weight[i, k] = weight
    return out


# --- contraction of all dimensions ---


def _in_order(matrices: Sequence[Matrix | None]) -> list[tuple[int, Matrix]]:
    """List ``[(dim, matrix), ...]``. Shrinking matrices come first to move less data."""
    steps = [(dim, m) for dim, m in enumerate(matrices) if m is not None]
    return sorted(steps, key=lambda s: s[1].shape[0] / s[1].shape[1])


def _contract(matrices: Sequence[Matrix | None], x: Array, out: np.ndarray | None = None) -> Array:
    """Return the result. It may be written to the array ``out``."""
    steps = _in_order(matrices)
    for i, (dim, m) in enumerate(steps):
        x = whole_along(x, dim) if is_traced(x) else x
        x = apply(m, x, dim, out if i == len(steps) - 1 else None)
    return x


def _fill(out: np.ndarray, matrices: Sequence[Matrix | None], x: Array) -> None:
    """Write the contracted ``x`` to ``out``, in parts that fit a cache.

    Only the source and the result then pass through main memory, not the intermediate arrays.
    """
    first, *rest = matrices
    rows = _PART // max(1, out[:1].nbytes)
    if rows >= len(out) or not (first is None or isinstance(first, SparseMap)):
        return _write_part(out, matrices, x)
    for i in range(0, len(out), max(1, rows)):
        j = i + max(1, rows)
        part = x[i:j] if first is None else apply(first.rows(i, j), x, 0)
        if rows <= 1 and out.ndim > 1:
            _fill(out[i], rest, part[0])
        else:
            _write_part(out[i:j], [None, *rest], part)


def _write_part(out: np.ndarray, matrices: Sequence[Matrix | None], x: Array) -> None:
    result = _contract(matrices, x, out)
    if result is not out:
        out[...] = result


# --- contraction of one dimension ---


def apply(m: Matrix, x: Array, dim: int, out: np.ndarray | None = None) -> Array:
    """Contract axis ``dim`` of ``x`` with ``m``.

    Args:
      m: matrix ``[new, old]``.
      x: the array.
      dim: the axis to contract.
      out: NumPy array to which the result may be written.

    Returns:
      A NumPy array if ``x`` and ``m`` are NumPy arrays, else a JAX array. Plain copies keep their
      dtype, sums and products have float32 or a wider type. The result may be a view of ``x``, or
      ``out``.
    """
    stay = _leading_copies(m)
    if isinstance(m, SparseMap) and stay == m.shape[0]:
        return _take(x, m.index[:, 0], dim, out)
    if isinstance(m, SparseMap) and isinstance(x, np.ndarray) and stay and m.index.shape[1] > 1:
        # Old units that stay need one term, and their copies are bitwise identical.
        kept, new = m.rows(0, stay), m.rows(stay, m.shape[0])
        return np.concatenate([apply(kept, x, dim), apply(new, x, dim)], dim)
    xp: Any = np if isinstance(x, np.ndarray) and not isinstance(m, jax.Array) else jnp
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    if not isinstance(m, SparseMap):
        m = xp.asarray(m, dtype)
        x = x.astype(dtype)
        # Accelerators use a lower precision for matrix products by default.
        precision = {} if xp is np else {"precision": "highest"}
        return xp.moveaxis(xp.tensordot(m, x, (1, dim), **precision), 0, dim)
    first = (
        m.weight.flat[0] if is_numpy(m.weight) and (m.weight == m.weight.flat[0]).all() else None
    )
    terms = [
        _take(x, m.index[:, k], dim).astype(dtype, copy=False) for k in range(m.index.shape[1])
    ]
    if first is not None:
        scale = xp.asarray(first, dtype)
        if xp is jnp:
            return reduce(add, terms) * scale
        total = np.empty(terms[0].shape, dtype) if out is None or out.dtype != dtype else out
        if len(terms) == 1:
            return np.multiply(terms[0], scale, out=total)
        np.add(terms[0], terms[1], out=total)
        for term in terms[2:]:
            total += term
        return np.multiply(total, scale, out=total)
    others = tuple(d for d in range(x.ndim) if d != dim)
    terms = [
        term * xp.expand_dims(xp.asarray(m.weight[:, k], dtype), others)
        for k, term in enumerate(terms)
    ]
    return reduce(add, terms)


def _leading_copies(m: Matrix) -> int:
    """The number of first rows that copy a unit; 0 if the values are not known."""
    if not isinstance(m, SparseMap) or not is_numpy(m.weight):
        return 0
    return int(np.append((m.weight[:, 0] == 1) & ~m.weight[:, 1:].any(1), False).argmin())


def _take(x: Array, index: Array, dim: int, out: np.ndarray | None = None) -> Array:
    if not is_numpy(index):
        return jnp.take(x, index, dim, mode="clip")
    # Adjacent units mostly remain adjacent, so blocks of them are moved together.
    cuts = np.flatnonzero(np.diff(index) != 1) + 1
    if len(cuts) == 0:
        return x[(slice(None),) * dim + (slice(index[0], index[-1] + 1),)]
    step = index[1] - index[0]
    # A constant step, such as every second unit, is a view.
    if is_numpy(x) and step > 0 and (np.diff(index) == step).all():
        return x[(slice(None),) * dim + (slice(index[0], index[-1] + 1, step),)]
    size = int(np.gcd.reduce(np.array([*cuts, *index[cuts], index[0], len(index), x.shape[dim]])))
    before = x.shape[:dim]
    after = x.shape[dim + 1 :]
    # An array without elements does not determine a size of -1.
    x = x.reshape(*before, x.shape[dim] // size, size, *after)
    index = index[::size] // size
    if is_numpy(x):
        if out is not None and out.dtype == x.dtype and out.flags.c_contiguous:
            # The mode "raise" would make a copy first.
            np.take(x, index, dim, out.reshape(*before, len(index), size, *after), "clip")
            return out
        x = np.take(x, index, dim)
    elif is_traced(x):
        x = _slices(x, index, dim)
    else:
        x = jnp.take(x, jnp.asarray(index), dim, mode="clip")
    return x.reshape(*before, len(index) * size, *after)


def _slices(x: jax.Array, index: np.ndarray, dim: int) -> jax.Array:
    """Gather with slices and broadcasts, for an index that is known while tracing.

    XLA fuses these operations and compiles them to plain copies. It does not do so for a gather.
    """
    times = int((index == index[0]).sum())
    if times > 1 and np.array_equal(index, np.repeat(index[::times], times)):
        return jnp.repeat(_slices(x, index[::times], dim), times, dim)
    step = np.diff(index)
    if len(index) > 1 and step[0] > 0 and (step == step[0]).all():
        return jax.lax.slice_in_dim(x, index[0], index[-1] + 1, step[0], axis=dim)
    runs = np.split(index, np.flatnonzero(step != 1) + 1)
    if len(runs) <= 64:
        return jnp.concatenate(
            [jax.lax.slice_in_dim(x, r[0], r[-1] + 1, axis=dim) for r in runs], dim
        )
    return jnp.take(x, jnp.asarray(index), dim, mode="clip")

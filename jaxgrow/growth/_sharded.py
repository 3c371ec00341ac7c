"""Contract an array that is sharded over a mesh: each device computes its own part of the result.

A device needs source rows that other devices hold. It never gathers the whole source: it computes a
few rows of its result at a time, along one dimension, and fetches only what these rows need. So the
temporary memory of a device is about the size of its own part of the source.

Maps are arguments of the compiled program, not constants: one program serves every leaf of the same
shapes and sharding.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import PartitionSpec as P

from jaxgrow.growth import matrices
from jaxgrow.growth.matrices import Matrix, Rows

MOST_TERMS = 64  # rows that add more terms than this are computed by a matrix product
LEAST_BUDGET = (
    1 << 20
)  # bytes that a device may always use for what it fetches and computes at a time


@struct.dataclass
class Part:
    """What acts on one dimension: ``y[i] = sum_k weight[i, k] x[index[i, k]]``, or the product of a matrix with ``x``."""

    index: Any  # int32 [new, terms]; None: ``weight`` is a matrix [new, old]
    weight: Any  # float [new, terms], or one number for all terms; None: all are one

    @property
    def terms(self) -> int:
        return 1 if self.index is None else self.index.shape[1]

    @property
    def copies(self) -> bool:
        return self.weight is None and self.terms == 1


Parts: TypeAlias = tuple[
    Part | None, ...
]  # one for each dimension; None: that dimension stays as it is


def part(m: Matrix | None, dtype: Any) -> Part | None:
    """A matrix in the form that devices compute with, in a wide ``dtype``."""
    if m is None:
        return None
    if isinstance(m, np.ndarray) and m.shape[1] <= MOST_TERMS:
        m = matrices.sparse(m)
    if not isinstance(m, Rows):
        return Part(None, m.astype(dtype))
    if m.index.shape[1] > MOST_TERMS:
        return Part(None, matrices.dense(m).astype(dtype))
    index, weight = m.index.astype(np.int32), m.weight.astype(dtype)
    if isinstance(weight, np.ndarray) and (weight == weight.flat[0]).all():
        weight = None if weight.flat[0] == 1 else weight.reshape(-1)[0]
    return Part(index, weight)


@dataclass(frozen=True)
class Layout:
    """How an array and its result are sharded, and which rows of the result a device computes at a time."""

    over: tuple[tuple[str, ...], ...]  # the mesh axes that shard each dimension
    counts: tuple[int, ...]  # how many devices these are
    new: tuple[int, ...]  # the shape of a device's part of the result
    dim: int  # the dimension along which the result is computed in pieces
    rows: int  # .. and how many rows of it at a time

    @property
    def pieces(self) -> int:
        return -(-self.new[self.dim] // self.rows)

    @property
    def spec(self) -> P:
        return P(*(over or None for over in self.over))

    def specs(self, parts: Parts) -> tuple[Any, ...]:
        """How the maps are sharded: each device has the rows of its own part of the result."""
        return tuple(
            None
            if p is None
            else Part(
                None if p.index is None else P(over or None),
                P(over or None)
                if p.weight is not None and p.weight.ndim == 2
                else None
                if p.weight is None
                else P(),
            )
            for p, over in zip(parts, self.over, strict=True)
        )


def layout(
    terms: Sequence[Parts], shape: Sequence[int], new: Sequence[int], spec: P, dtype: Any
) -> Layout:
    """Choose the pieces: as few as fit the memory of the source's part, without an exchange of single rows if possible.

    Args:
      terms: the maps whose sum acts on the array.
      shape: of the array.
      new: the shape of the result.
      spec: how both are sharded on the mesh that is set.
      dtype: of the array.

    Returns:
      The layout. If not even one row fits the memory, the rows are those that need the least.
    """
    mesh = jax.sharding.get_abstract_mesh()
    over = tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec)
    counts = tuple(math.prod(mesh.shape[a] for a in axes) for axes in over)
    source = [size // n for size, n in zip(shape, counts, strict=True)]
    result = tuple(size // n for size, n in zip(new, counts, strict=True))
    copies = len(terms) == 1 and all(p is None or p.copies for p in terms[0])
    itemsize = dtype.itemsize if copies else _wide(dtype).itemsize
    budget = max(math.prod(source) * dtype.itemsize, LEAST_BUDGET)

    def choice(dim: int) -> tuple[Any, ...]:
        row = itemsize * sum(_numbers(parts, source, result, counts, dim) for parts in terms)
        rows = min(result[dim], budget // row)
        sharded = [p for parts in terms if (p := parts[dim]) is not None and counts[dim] > 1]
        whole = any(p.index is None for p in sharded)  # a product needs all of the dimension
        pieces = -(-result[dim] // max(1, rows))
        last = dim == len(shape) - 1  # a few of its numbers lie far from the next ones
        return (whole, rows == 0, (last, bool(sharded)) if rows else row, pieces, dim)

    *_, pieces, dim = min(choice(dim) for dim in range(len(shape)))
    return Layout(over, counts, result, dim, -(-result[dim] // pieces))


def _numbers(
    parts: Parts, source: Sequence[int], new: Sequence[int], counts: Sequence[int], dim: int
) -> int:
    """How many numbers a device holds, at most, while it computes one row of its result along ``dim``."""
    shape = [*source]
    shape[dim] = 1
    exchanged = 3 * counts[dim] if parts[dim] is not None and counts[dim] > 1 else 0
    total = (1 + exchanged + _sums(parts[dim])) * math.prod(shape)
    for other, p in _others(parts, dim, source, new):
        if counts[other] > 1:
            shape[other] *= counts[other]
            total += 2 * math.prod(shape)  # twice: XLA may reorder dimensions
        shape[other] = new[other]
        total += (2 + _sums(p)) * math.prod(shape)
    return total


def _sums(p: Part | None) -> bool:
    return p is not None and p.terms > 1


def _others(
    parts: Parts, dim: int, source: Sequence[int], new: Sequence[int]
) -> list[tuple[int, Part]]:
    """The other dimensions that have a map. Those that shrink come first: then there is less to move."""
    found = [(d, p) for d, p in enumerate(parts) if p is not None and d != dim]
    return sorted(found, key=lambda item: new[item[0]] / source[item[0]])


def contract(terms: Sequence[Parts], x: jax.Array, lay: Layout) -> jax.Array:
    """The sum of ``terms``, contracted with ``x``, both sharded by ``lay.spec`` on the mesh of the context; for traced code.

    Args:
      terms: of each term, the maps of all dimensions.
      x: the array.
      lay: of `layout`.

    Returns:
      The result in the dtype of ``x``.
    """
    specs = lay.spec, [lay.specs(parts) for parts in terms]
    own = jax.shard_map(partial(_own, lay), in_specs=specs, out_specs=lay.spec, check_vma=False)
    return own(x, list(terms))


def _own(lay: Layout, x: jax.Array, terms: Sequence[Parts]) -> jax.Array:
    """A device's part of the result."""

    def piece(start: Any) -> jax.Array:
        found = [_piece(lay, x, parts, start, wide=len(terms) > 1) for parts in terms]
        return sum(found[1:], found[0]).astype(x.dtype)

    if lay.pieces == 1:
        return piece(0)

    def step(i: jax.Array, out: jax.Array) -> jax.Array:
        start = jnp.minimum(
            i * lay.rows, lay.new[lay.dim] - lay.rows
        )  # the last piece overlaps the one before it
        return jax.lax.dynamic_update_slice_in_dim(out, piece(start), start, lay.dim)

    return jax.lax.fori_loop(0, lay.pieces, step, jnp.zeros(lay.new, x.dtype))


def _piece(lay: Layout, x: jax.Array, parts: Parts, start: Any, wide: bool) -> jax.Array:
    """``lay.rows`` rows of a device's part of one term."""
    dim, p = lay.dim, parts[lay.dim]
    if p is None:
        y = jax.lax.dynamic_slice_in_dim(x, start, lay.rows, dim)
    else:
        some = jax.tree.map(
            lambda a: jax.lax.dynamic_slice_in_dim(a, start, lay.rows) if a.ndim else a, p
        )
        if p.index is None and lay.over[dim]:
            x = _gathered(x, lay.over[dim], dim)
        exchanged = p.index is not None and lay.over[dim]
        y = _rows(some, partial(_fetched, lay, x) if exchanged else partial(_taken, x, dim), x, dim)
    y = y.astype(_wide(x.dtype)) if wide else y
    for other, p in _others(parts, dim, x.shape, lay.new):
        if lay.over[other]:
            y = _gathered(y, lay.over[other], other)
        y = _rows(p, partial(_taken, y, other), y, other)
    return y


def _rows(p: Part, take: Callable[[jax.Array], jax.Array], x: jax.Array, dim: int) -> jax.Array:
    """``p`` contracted with dimension ``dim`` of ``x``, of which ``take`` gets rows."""
    if p.index is None:
        product = jnp.tensordot(p.weight, x.astype(p.weight.dtype), (1, dim), precision="highest")
        return jnp.moveaxis(product, 0, dim)
    if p.copies:
        return take(p.index[:, 0])
    others = tuple(d for d in range(x.ndim) if d != dim)
    each = p.weight is not None and p.weight.ndim == 2

    def term(k: Any) -> jax.Array:
        rows = take(p.index[:, k]).astype(_wide(x.dtype))
        return rows * jnp.expand_dims(p.weight[:, k], others) if each else rows

    # A loop: no more than one term is in memory at a time.
    total = jax.lax.fori_loop(1, p.terms, lambda k, total: total + term(k), term(0))
    return total if each or p.weight is None else total * p.weight


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def _taken(x: jax.Array, dim: int, index: jax.Array) -> jax.Array:
    return jnp.take(x, index, dim, mode="clip")


# Devices exchange parts along a new first dimension. Otherwise XLA would lay out the whole source,
# and the whole result, with the sharded dimension first, and copy both.


def _gathered(x: jax.Array, over: tuple[str, ...], dim: int) -> jax.Array:
    """The parts of all devices, joined along ``dim``."""
    parts = jnp.moveaxis(jax.lax.all_gather(x, over), 0, dim)
    return parts.reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])


def _fetched(lay: Layout, x: jax.Array, index: jax.Array) -> jax.Array:
    """Rows of a sharded dimension: every device sends the rows that each other one asks for, if it has them."""
    over, dim, size = lay.over[lay.dim], lay.dim, x.shape[lay.dim]
    asked = jax.lax.all_gather(index, over) - jax.lax.axis_index(over) * size
    sent = jnp.moveaxis(_taken(x, dim, asked), dim, 0)
    got = jax.lax.all_to_all(sent, over, 0, 0, tiled=True)
    owner = jnp.expand_dims(index // size, (0, *(d + 1 for d in range(x.ndim) if d != dim)))
    return jnp.take_along_axis(got, owner, 0, mode="clip")[0]

"""How is a sharded array contracted, without gathering it on one device?

Each device computes its own part of the result. For this it needs source rows that other devices
hold. It computes a few rows of its result at a time, along one dimension, and fetches only the
source rows that these need. So the temporary memory of a device is about the size of its own part
of the source.

The maps are arguments of the compiled program, not constants. So one program is used for every leaf
of the same shapes and sharding.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import flax.struct as struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxgrow.axes.names import Tree
from jaxgrow.growth import matrices
from jaxgrow.growth.matrices import Matrix, SparseMap

MOST_TERMS = 64  # maps with more terms per row are applied by a matrix product
# Bytes that a device may always use for fetched and intermediate values, even if its part of the
# source is smaller.
LEAST_BUDGET = 1 << 20

# JAX does not annotate these functions.
Step: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]
_fori_loop: Callable[[int, int, Step, jax.Array], jax.Array] = jax.lax.fori_loop  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
_all_gather: Callable[..., jax.Array] = jax.lax.all_gather  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
_all_to_all: Callable[..., jax.Array] = jax.lax.all_to_all  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


@struct.dataclass
class DimMap:
    """The map of one dimension, in the form that devices compute with.

    It computes ``y[i] = sum_k weight[i, k] x[index[i, k]]``, or the product of a matrix with ``x``.

    Args:
      index: int32 ``[new, terms]``, or None if ``weight`` is a matrix ``[new, old]``.
      weight: float ``[new, terms]``, one number for all terms, or None if all weights are one.
    """

    index: Tree  # Array | None
    weight: Tree  # Array | None

    @property
    def terms(self) -> int:
        return 1 if self.index is None else self.index.shape[1]

    @property
    def copies(self) -> bool:
        return self.weight is None and self.terms == 1


# One map for each dimension, or None if the dimension is unchanged.
DimMaps: TypeAlias = tuple[DimMap | None, ...]


def dim_map(m: Matrix | None, dtype: np.dtype) -> DimMap | None:
    """Convert a matrix to a `DimMap`, with weights of a wide ``dtype``."""
    if m is None:
        return None
    if matrices.is_numpy(m) and m.shape[1] <= MOST_TERMS:
        m = matrices.sparse(m)
    if not isinstance(m, SparseMap):
        return DimMap(None, m.astype(dtype))
    if m.index.shape[1] > MOST_TERMS:
        return DimMap(None, matrices.dense(m).astype(dtype))
    index = m.index.astype(np.int32)
    weight = m.weight.astype(dtype)
    if matrices.is_numpy(weight) and (weight == weight.flat[0]).all():
        weight = None if weight.flat[0] == 1 else weight.reshape(-1)[0]
    return DimMap(index, weight)


@dataclass(frozen=True)
class ShardLayout:
    """The sharding of an array and its result, and the rows that a device computes at a time.

    Args:
      over: mesh axes that shard each dimension.
      counts: number of devices along these mesh axes, for each dimension.
      new: shape of the part of the result on one device.
      dim: dimension along which the result is computed in pieces.
      rows: number of rows along ``dim`` in a piece.
    """

    over: tuple[tuple[str, ...], ...]
    counts: tuple[int, ...]
    new: tuple[int, ...]
    dim: int
    rows: int

    @property
    def pieces(self) -> int:
        return -(-self.new[self.dim] // self.rows)

    @property
    def spec(self) -> P:
        return P(*(over or None for over in self.over))

    def specs(self, maps: DimMaps) -> tuple[DimMap | None, ...]:
        """Return the sharding of the maps: each device holds the rows for its part of the result."""
        return tuple(map(_map_specs, maps, self.over))


def _map_specs(m: DimMap | None, over: tuple[str, ...]) -> DimMap | None:
    """Return the sharding of one map: rows are sharded, a single weight is replicated."""
    if m is None:
        return None
    rows = P(over or None)
    index = None if m.index is None else rows
    if m.weight is None:
        return DimMap(index, None)
    return DimMap(index, rows if m.weight.ndim == 2 else P())


def shard_layout(
    terms: Sequence[DimMaps], shape: Sequence[int], new: Sequence[int], spec: P, dtype: np.dtype
) -> ShardLayout:
    """Choose the pieces in which a device computes its part of the result.

    The function chooses a dimension, and the smallest number of pieces along it that keeps the
    temporary memory within a budget. The budget is the size of the device's part of the source, but
    at least `LEAST_BUDGET`. If possible, it is a dimension along which no device needs rows of
    another device.

    Args:
      terms: the maps whose sum acts on the array.
      shape: shape of the array.
      new: shape of the result.
      spec: sharding of both on the current mesh.
      dtype: dtype of the array.

    Returns:
      The layout. If not even one row fits into the budget, the pieces are single rows along the
      dimension that needs the least memory.
    """
    mesh = jax.sharding.get_abstract_mesh()

    def devices(axes: tuple[str, ...]) -> int:
        return math.prod(mesh.shape[a] for a in axes)

    over = tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec)
    counts = tuple(map(devices, over))
    source = [size // n for size, n in zip(shape, counts, strict=True)]
    result = tuple(size // n for size, n in zip(new, counts, strict=True))
    copies = len(terms) == 1 and all(m is None or m.copies for m in terms[0])
    itemsize = dtype.itemsize if copies else _wide_dtype(dtype).itemsize
    budget = max(math.prod(source) * dtype.itemsize, LEAST_BUDGET)

    def choice(dim: int) -> tuple[bool, int, bool, bool, int, int]:
        row = itemsize * sum(_stored_numbers(maps, source, result, counts, dim) for maps in terms)
        row = max(1, row)  # an array without elements
        rows = min(result[dim], budget // row)
        sharded = [m for maps in terms if (m := maps[dim]) is not None and counts[dim] > 1]
        full = any(m.index is None for m in sharded)  # a product needs the full dimension
        pieces = -(-result[dim] // max(1, rows))
        # Pieces of the last dimension are not contiguous in memory.
        last = dim == len(shape) - 1
        fits = rows > 0
        # The costs, the most important one first.
        return (full, 0 if fits else row, fits and last, fits and bool(sharded), pieces, dim)

    *_, pieces, dim = min(map(choice, range(len(shape))))
    return ShardLayout(over, counts, result, dim, max(1, -(-result[dim] // max(1, pieces))))


def _stored_numbers(
    maps: DimMaps, source: Sequence[int], new: Sequence[int], counts: Sequence[int], dim: int
) -> int:
    """Return an upper bound for the array elements that a device stores while it computes one row."""
    shape = [*source]
    shape[dim] = 1
    exchanged = 3 * counts[dim] if maps[dim] is not None and counts[dim] > 1 else 0
    total = (1 + exchanged + _has_sums(maps[dim])) * math.prod(shape)
    for other, m in _other_maps(maps, dim, source, new):
        if counts[other] > 1:
            shape[other] *= counts[other]
            total += 2 * math.prod(shape)  # twice, because XLA may reorder dimensions
        shape[other] = new[other]
        total += (2 + _has_sums(m)) * math.prod(shape)
    return total


def _has_sums(m: DimMap | None) -> bool:
    return m is not None and m.terms > 1


def _other_maps(
    maps: DimMaps, dim: int, source: Sequence[int], new: Sequence[int]
) -> list[tuple[int, DimMap]]:
    """Return the other dimensions that have a map. Shrinking ones come first to move less data."""
    found = [(d, m) for d, m in enumerate(maps) if m is not None and d != dim]
    return sorted(found, key=lambda item: new[item[0]] / source[item[0]])


def contract_sharded(terms: Sequence[DimMaps], x: jax.Array, lay: ShardLayout) -> jax.Array:
    """Contract ``x`` with the sum of ``terms``, in traced code.

    The array and the result are sharded by ``lay.spec`` on the current mesh.

    Args:
      terms: the maps of all dimensions, for each term.
      x: the array.
      lay: the layout, from `shard_layout`.

    Returns:
      The result in the dtype of ``x``.
    """
    specs = lay.spec, [lay.specs(maps) for maps in terms]
    own = jax.shard_map(
        partial(_own_part, lay), in_specs=specs, out_specs=lay.spec, check_vma=False
    )
    return own(x, list(terms))


def _own_part(lay: ShardLayout, x: jax.Array, terms: Sequence[DimMaps]) -> jax.Array:
    """Compute the part of the result that belongs to this device."""

    def piece(start: jax.Array | int) -> jax.Array:
        found = [_piece(lay, x, maps, start, wide=len(terms) > 1) for maps in terms]
        return sum(found[1:], found[0]).astype(x.dtype)

    if lay.pieces == 1:
        return piece(0)

    def step(i: jax.Array, out: jax.Array) -> jax.Array:
        # The last piece overlaps the one before it.
        start = jnp.minimum(i * lay.rows, lay.new[lay.dim] - lay.rows)
        return jax.lax.dynamic_update_slice_in_dim(out, piece(start), start, lay.dim)

    return _fori_loop(0, lay.pieces, step, jnp.zeros(lay.new, x.dtype))


def _piece(
    lay: ShardLayout, x: jax.Array, maps: DimMaps, start: jax.Array | int, wide: bool
) -> jax.Array:
    """Compute ``lay.rows`` rows of the part of one term that belongs to this device."""
    dim = lay.dim
    m = maps[lay.dim]
    if m is None:
        y = jax.lax.dynamic_slice_in_dim(x, start, lay.rows, dim)
    else:

        def sliced(a: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(a, start, lay.rows) if a.ndim else a

        some: DimMap = jax.tree.map(sliced, m)
        if m.index is None and lay.over[dim]:
            x = _gather_shards(x, lay.over[dim], dim)
        exchanged = m.index is not None and lay.over[dim]
        y = _contract_dim(
            some, partial(_fetch_rows, lay, x) if exchanged else partial(_take_rows, x, dim), x, dim
        )
    y = y.astype(_wide_dtype(x.dtype)) if wide else y
    for other, m in _other_maps(maps, dim, x.shape, lay.new):
        if lay.over[other]:
            y = _gather_shards(y, lay.over[other], other)
        y = _contract_dim(m, partial(_take_rows, y, other), y, other)
    return y


def _contract_dim(
    m: DimMap, take: Callable[[jax.Array], jax.Array], x: jax.Array, dim: int
) -> jax.Array:
    """Contract dimension ``dim`` of ``x`` with ``m``, where ``take`` returns rows of ``x``."""
    if m.index is None:
        product = jnp.tensordot(m.weight, x.astype(m.weight.dtype), (1, dim), precision="highest")
        return jnp.moveaxis(product, 0, dim)
    if m.copies:
        return take(m.index[:, 0])
    others = tuple(d for d in range(x.ndim) if d != dim)
    each = m.weight is not None and m.weight.ndim == 2

    def term(k: jax.Array | int) -> jax.Array:
        rows = take(m.index[:, k]).astype(_wide_dtype(x.dtype))
        return rows * jnp.expand_dims(m.weight[:, k], others) if each else rows

    def added(k: jax.Array, total: jax.Array) -> jax.Array:
        return total + term(k)

    # In a loop, only one term is in memory at a time.
    total = _fori_loop(1, m.terms, added, term(0))
    return total if each or m.weight is None else total * m.weight


def _wide_dtype(dtype: np.dtype) -> np.dtype:
    return jnp.promote_types(dtype, jnp.float32)


def _take_rows(x: jax.Array, dim: int, index: jax.Array) -> jax.Array:
    return jnp.take(x, index, dim, mode="clip")


# Devices exchange their shards along a new first dimension. Otherwise XLA would copy the full source
# and the full result to a memory layout in which the sharded dimension comes first.


def _gather_shards(x: jax.Array, over: tuple[str, ...], dim: int) -> jax.Array:
    """Gather the shards of all devices and join them along ``dim``."""
    shards = jnp.moveaxis(_all_gather(x, over), 0, dim)
    return shards.reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])


def _fetch_rows(lay: ShardLayout, x: jax.Array, index: jax.Array) -> jax.Array:
    """Fetch rows of a sharded dimension from the devices that hold them.

    Every device sends the requested rows to each other device. It sends arbitrary rows in place of
    rows that it does not hold. The receiver keeps each row only from the device that holds it.
    """
    over = lay.over[lay.dim]
    dim = lay.dim
    size = x.shape[lay.dim]
    asked = _all_gather(index, over) - jax.lax.axis_index(over) * size
    sent = jnp.moveaxis(_take_rows(x, dim, asked), dim, 0)
    got = _all_to_all(sent, over, 0, 0, tiled=True)
    owner = jnp.expand_dims(index // size, (0, *(d + 1 for d in range(x.ndim) if d != dim)))
    return jnp.take_along_axis(got, owner, 0, mode="clip")[0]

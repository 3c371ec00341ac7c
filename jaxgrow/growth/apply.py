"""`grow`: how is a growth applied to the parameters of a model?

For each axis of each parameter, `grow` looks up the map by the name of the axis and multiplies the
axis by it: by the read map if the parameter contracts the axis, otherwise by the write map. All
operators use this one function. It also works on sharded parameters and under ``jit``.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxgrow.axes.names import Axes, KeyPath, Names, Params, axis_of, is_names, leaves, path, sizes
from jaxgrow.growth import _sharded, maps, matrices
from jaxgrow.growth.matrices import Array, Matrix
from jaxgrow.sharding import shared_spec


class Part(NamedTuple):
    """A map of a leaf, or None, and the range of dimensions on which it acts: begin included, end not."""

    map: maps.AxisMap | None
    begin: int
    end: int


# JAX does not annotate these functions.
_auto_axes: Callable[..., Any] = jax.sharding.auto_axes  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
_constrained: Callable[[jax.Array, P], jax.Array] = jax.lax.with_sharding_constraint  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def grow(growth: maps.Growth, params: Params, axes: Axes) -> Params:
    """Apply a growth: contract every named axis of every parameter with the map of that axis.

    For a kernel ``W`` with input axis ``a`` and output axis ``b``: ``W' = read_a @ W @ write_b.T``.
    With `maps.Rules`, the first rule that matches the parameter applies, and the result is the sum
    of its terms.

    Args:
      growth: ``{axis name: AxisMap}``, where other axes are unchanged; or `maps.Rules`.
      params: a pytree of arrays. NumPy arrays remain NumPy arrays, so that a checkpoint can be
        transformed on the host.
      axes: a tree of the same structure with a tuple of axis names for each array (`jaxgrow.axes`).

    Returns:
      A tree of the same structure and dtypes. A leaf that no map touches is returned as it is,
      without a copy. The result is linear in ``params`` and exact where the maps only copy.
      Otherwise it is computed in float32 or a wider type and cast back. `grow` is pure and works
      under ``jit``, ``grad`` and ``eval_shape``. It is also differentiable with respect to the
      maps.

      A sharded leaf keeps its sharding. Each device computes its own part of the result, in about
      as much temporary memory as its part of the source takes; no device gathers the full leaf.
      JAX compiles one program for all leaves of the same shapes, sharding and number of terms; the
      maps are its arguments. Copies, means and sums are bitwise identical to a single-device run.
      Products with dense maps may be summed in another order.

      Under ``jit``, JAX reports the sharding of a leaf only on meshes with explicit axes. On other
      meshes, leaves are assumed to be sharded by `jaxgrow.sharding.RULES`; if they are not, pass
      ``out_shardings`` to ``jit``.

    Raises:
      ValueError: the growth does not fit the parameters: the old size of a map is not the size of
        its axis, no leaf has an axis, leaves get different sizes for one axis, a rule matches no
        leaf, the role of a leaf is ambiguous but a rule asks for it, a new size is not divisible by
        the number of devices along which the axis is sharded, or maps scale or sum the units of a
        leaf of integers, truth values or floats of 8 bits. One message lists all problems.
        Another message lists the maps whose matrices are inconsistent.

    Example:
      The two units of an MLP become four. The kernel before them is copied, and the weights of the
      kernel after them are divided by the number of copies.

      >>> params = {"up": np.array([[1.0, 2.0]]), "down": np.array([[3.0], [4.0]])}
      >>> axes = {"up": ("embed.in", "mlp"), "down": ("mlp.in", "embed")}
      >>> grown = grow({"mlp": maps.tile(2, times=2)}, params, axes)
      >>> grown["up"].tolist(), grown["down"].tolist()
      ([[1.0, 2.0, 1.0, 2.0]], [[1.5], [2.0], [1.5], [2.0]])
    """
    check(growth, params, axes)

    def leaf(key_path: KeyPath, names: Names, x: Array) -> Array:
        return grow_leaf(maps.terms(growth, path(key_path), names), names, x)

    return jax.tree_util.tree_map_with_path(leaf, axes, params, is_leaf=is_names)


def grow_leaf(terms: Sequence[maps.Term], names: Names, x: Array) -> Array:
    """Apply the sum of ``terms`` to one leaf. If no term touches the leaf, return it unchanged.

    Args:
      terms: growths whose results are summed, as `maps.terms` returns them.
      names: axis names of the leaf.
      x: the leaf. Its shape must fit the terms; this is not checked.
    """
    found = itertools.chain.from_iterable(parts(term, names) for term in terms)
    if not any(part.map for part in found):
        return x
    traced = matrices.is_traced(x)
    learned = any(matrices.is_traced(m) for m in jax.tree.leaves(terms))
    sharding = _on_mesh(x)
    if sharding is None:
        # The sharding of a traced leaf is assumed to follow `jaxgrow.sharding.RULES`.
        spec = (
            shared_spec(names, x.shape, _new_shape(parts(terms[0], names), x.shape))
            if traced and not learned
            else P()
        )
        return _divided_sum(terms, names, x, spec) if any(spec) else _sum(terms, names, x)
    if not traced:
        assert isinstance(sharding.mesh, Mesh)  # arrays always have a concrete mesh
        with jax.set_mesh(sharding.mesh):
            return _divided_sum(terms, names, x, sharding.spec)
    if not learned:
        return _divided_sum(terms, names, x, sharding.spec)

    # XLA partitions products with learned maps and their gradients well.
    def learn(x: jax.Array, terms: Sequence[maps.Term]) -> Array:
        return _sum(terms, names, x)

    run: Callable[..., Array] = _auto_axes(learn, out_sharding=sharding)
    return run(x, terms)


@dataclass(frozen=True)
class _Shapes:
    """Shapes of a leaf and its result.

    In the joined shapes, adjacent axes with one common map are flattened into one.
    """

    joined: tuple[int, ...]
    new_joined: tuple[int, ...]
    new: tuple[int, ...]
    spec: P  # sharding of the leaf and of the result
    joined_spec: P


def _divided_sum(terms: Sequence[maps.Term], names: Names, x: Array, spec: P) -> jax.Array:
    """Compute `_sum` in parallel: every device of the current mesh computes its own part.

    ``spec`` is the sharding of the leaf and of its result.
    """
    found = [parts(term, names) for term in terms]
    groups = [[(begin, end) for _, begin, end in each] for each in found]
    # Values that cannot be scaled are only copied. Some of their dtypes cannot be promoted.
    scaled = matrices.can_scale(x.dtype)
    wide = jnp.promote_types(x.dtype if scaled else jnp.float32, jnp.float32)
    if any(each != groups[0] for each in groups):  # the terms flatten different axes
        each = [_divided_sum([term], names, x.astype(wide), spec) for term in terms]
        return reduce(add, each).astype(x.dtype)
    new = _new_shape(found[0], x.shape)
    entries = [*spec, *[None] * (x.ndim - len(spec))]
    shapes = _Shapes(
        joined=tuple(_joined(found[0], x.shape)),
        new_joined=tuple(_joined(found[0], new)),
        new=tuple(new),
        spec=P(*entries),
        # further axes of a group are gathered
        joined_spec=P(*[entries[begin] for begin, _ in groups[0]]),
    )
    dim_maps: list[_sharded.DimMaps] = []
    for one in found:
        dim_maps.append(tuple(_sharded.dim_map(m, wide) for m in _matrices(one, names)))
    return _program(shapes, x, dim_maps)  # pyright: ignore[reportUnknownVariableType]


@partial(jax.jit, static_argnums=0)  # pyright: ignore[reportUnknownMemberType]
def _program(shapes: _Shapes, x: Array, terms: Sequence[_sharded.DimMaps]) -> jax.Array:
    """Apply the terms to a leaf, as one program for all leaves of these shapes."""

    def contracted(x: jax.Array, terms: Sequence[_sharded.DimMaps]) -> jax.Array:
        lay = _sharded.shard_layout(
            terms, shapes.joined, shapes.new_joined, shapes.joined_spec, x.dtype
        )
        y = _sharded.contract_sharded(terms, x.reshape(shapes.joined), lay).reshape(shapes.new)
        return y if explicit else _constrained(y, shapes.spec)

    mesh = jax.typeof(x).sharding.mesh
    explicit = AxisType.Explicit in mesh.axis_types
    run: Callable[..., jax.Array] = contracted
    # On explicit axes, JAX requires the sharding of each result.
    if explicit:
        run = _auto_axes(contracted, out_sharding=NamedSharding(mesh, shapes.spec))
    return run(x, terms)


def _new_shape(parts: Sequence[Part], shape: Sequence[int]) -> list[int]:
    new: list[int] = []
    for m, begin, end in parts:
        new += shape[begin:end] if m is None else m.shapes[0]
    return new


def _on_mesh(x: Any) -> NamedSharding | None:
    """Return the sharding that a leaf must keep, or None if it is not known or not on a mesh.

    The type of a traced leaf shows its sharding only on meshes with explicit axes.
    """
    if matrices.is_traced(x):
        sharding = jax.typeof(x).sharding
        return sharding if AxisType.Explicit in sharding.mesh.axis_types else None
    sharding = x.sharding if isinstance(x, jax.Array) else None
    return sharding if isinstance(sharding, NamedSharding) else None


def _sum(terms: Sequence[maps.Term], names: Names, x: Array) -> Array:
    found = [parts(term, names) for term in terms]
    if len(found) == 1:
        return _grow_one(found[0], names, x)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32), copy=False)
    total = _grow_one(found[0], names, wide)
    for part in found[1:]:
        total = total + _grow_one(part, names, wide)
    return total.astype(x.dtype)


def parts(term: maps.Term, names: Names) -> list[Part]:
    """Return the map of each axis of a leaf, or of adjacent axes with one common map.

    Args:
      term: maps by tuples of axis names.
      names: axis names of the leaf.
    """
    out: list[Part] = []
    i = 0
    plain = tuple(axis_of(n) for n in names)
    joint = [axes for axes in term if len(axes) > 1]
    while i < len(names):
        key = next((axes for axes in joint if plain[i : i + len(axes)] == axes), plain[i : i + 1])
        out.append(Part(term.get(key), i, i + len(key)))
        i += len(key)
    return out


def _grow_one(parts: Sequence[Part], names: Names, x: Array) -> Array:
    """Apply one term, with adjacent axes of one map flattened into one."""
    shape = _new_shape(parts, x.shape)
    x = x.reshape(_joined(parts, x.shape))
    return matrices.contract(_matrices(parts, names), x).reshape(shape)


def _joined(parts: Sequence[Part], shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[begin:end]) for _, begin, end in parts]


def _matrices(parts: Sequence[Part], names: Names) -> list[Matrix | None]:
    return [None if m is None else m.of(names[begin]) for m, begin, _ in parts]


def products(term: maps.Term, names: Names, shape: Sequence[int]) -> list[float]:
    """Return the FLOPs (2 per multiply-add) of each matrix product of a term for a leaf, in order.

    Args:
      term: maps by tuples of axis names.
      names: axis names of the leaf.
      shape: shape of the leaf.
    """
    found = parts(term, names)
    return matrices.product_flops(_matrices(found, names), _joined(found, shape))


def check(growth: maps.Growth, params: Params, axes: Axes) -> None:
    """Check that the growth fits the parameters, using only their shapes and shardings.

    Args:
      growth: as in `grow`.
      params: as in `grow`, or a pytree of objects with a shape and a dtype.
      axes: as in `grow`.

    Raises:
      ValueError: as in `grow`.
    """
    known = sizes(params, axes)
    maps.check_matrices(growth)
    wrong = [
        f"axis {name!r}: the model has no such axis, only {', '.join(map(repr, sorted(known)))}"
        for name in maps.new_sizes(growth)
        if name not in known
    ]
    wrong = wrong + _misfits(growth, params, axes)
    if wrong:
        raise ValueError(
            "the growth does not fit the parameters; build it from sizes(params, axes):\n  "
            + "\n  ".join(wrong)
        )


def _misfits(growth: maps.Growth, params: Params, axes: Axes) -> list[str]:
    """List the leaves that the maps do not fit, and the rules that match no leaf."""
    became: dict[str, tuple[int, str]] = {}
    wrong: list[str] = []
    undeclared: list[str] = []
    rules = growth.rules if isinstance(growth, maps.Rules) else ()
    conditions = itertools.chain.from_iterable(rule.conditions for rule in rules)
    unmatched = list(dict.fromkeys(conditions))
    for leaf, x, names in leaves(params, axes):
        try:
            unmatched = [rule for rule in unmatched if not rule.matches(leaf, names)]
            found = maps.terms(growth, leaf, names)
        except ValueError as error:
            undeclared.append(str(error))
            continue
        wrong += _truncated(leaf, x, names, found)
        # Each term is checked separately, because results of different sizes might broadcast in the
        # sum.
        for term in found or ({},):
            resized, unfit = _resized(term, leaf, names, np.shape(x))
            wrong += unfit + _undivided(leaf, x, names, resized)
            for dim, new in resized.items():
                before = became.setdefault(axis_of(names[dim]), (new, leaf))
                if before[0] != new and not wrong:
                    wrong.append(
                        f"axis {axis_of(names[dim])!r} becomes {before[0]} in {before[1]}, "
                        f"but {new} in {leaf}"
                    )
    return wrong + (undeclared or [f"{rule} matches no leaf of this model" for rule in unmatched])


def _truncated(leaf: str, x: Any, names: Names, terms: Sequence[maps.Term]) -> list[str]:
    """List the leaf if its dtype cannot hold the results of its maps, such as half an integer."""
    used = [m for term in terms for m in _matrices(parts(term, names), names) if m is not None]
    copied = len(terms) == 1 and all(map(matrices.only_copies, used))
    if not used or copied or matrices.can_scale(x.dtype):
        return []
    return [
        f"{leaf}: has dtype {x.dtype}, which cannot hold the results of "
        f"{', '.join(map(repr, used))}. Dequantize the leaf, leave it out of the parameters, or give "
        "maps that copy it: a SparseMap of NumPy arrays, one weight of 1 in each row"
    ]


def _resized(
    term: maps.Term, leaf: str, names: Names, shape: Sequence[int]
) -> tuple[dict[int, int], list[str]]:
    """Return the new size of each dimension of a leaf, and the maps that start from another size."""
    resized = dict(enumerate(shape))
    wrong: list[str] = []
    for m, begin, end in parts(term, names):
        if m is None:
            continue
        for dim, new, old in zip(range(begin, end), *m.shapes, strict=True):
            resized[dim] = new
            if old != shape[dim]:
                wrong.append(
                    f"{leaf}: axis {axis_of(names[dim])!r} has size {shape[dim]}, "
                    f"but its map takes {old} to {new}"
                )
    return resized, wrong


def _undivided(leaf: str, x: Any, names: Names, new: Mapping[int, int]) -> list[str]:
    """List the new sizes that are not divisible by the number of devices of their mesh axes."""
    sharding = _on_mesh(x)
    if sharding is None:
        return []
    wrong: list[str] = []
    for dim, over in enumerate(sharding.spec):
        mesh_axes = () if over is None else (over,) if isinstance(over, str) else over
        devices = math.prod(sharding.mesh.shape[a] for a in mesh_axes)
        if new[dim] != x.shape[dim] and new[dim] % devices:
            wrong.append(
                f"{leaf}: axis {axis_of(names[dim])!r} becomes {new[dim]}, which is not divisible by "
                f"the {devices} devices of its mesh axes {', '.join(mesh_axes)}. Replicate the "
                "leaf along them first, with jax.device_put."
            )
    return wrong

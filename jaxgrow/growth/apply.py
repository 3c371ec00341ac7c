"""`grow`: the one function that applies a growth to a parameter tree."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from typing import Any, TypeAlias

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxgrow.axes.names import Axes, Names, Params, axis, is_names, leaves, path, sizes
from jaxgrow.growth import _sharded, maps, matrices
from jaxgrow.growth.matrices import Array, Matrix
from jaxgrow.sharding import shared_spec

Part: TypeAlias = tuple[
    maps.AxisMap | None, int, int
]  # what acts on the axes from .. to of a leaf, the second one excluded


def grow(growth: maps.Growth, params: Params, axes: Axes) -> Params:
    """Contracts every named axis of every leaf with that axis's map.

    For a kernel ``W[i, o]`` that reads ``a`` and writes ``b``: ``W'= read_a @ W @ write_b.T``; with
    `maps.Rules`, the sum of such terms that the first matching rule has for the leaf.

    Args:
      growth: ``{axis name: AxisMap}``, other axes stay as they are; or `maps.Rules`.
      params: a pytree of arrays. NumPy leaves stay NumPy, so that a checkpoint can be transformed
        on the host.
      axes: a tree of the same structure, of tuples of axis names (see `jaxgrow.axes`).

    Returns:
      A tree of the same structure and dtypes. Linear in ``params``; exact where the maps only copy;
      otherwise computed in float32 or better and cast back. A leaf that no map touches is returned
      as it is, not copied. Pure: works under ``jit``, ``grad`` and ``eval_shape``. Differentiable
      in the maps, too.

      A sharded leaf keeps its sharding. Each device computes its own part of the result, in about
      as much temporary memory as its part of the source takes; no device gathers the whole leaf.
      The program is compiled once for all leaves of the same shapes, sharding and number of terms,
      whatever their maps. Copies, means and sums are bitwise identical to those of one device;
      products with dense maps may be summed in another order. Under ``jit``, JAX reports the
      sharding of a leaf only on meshes with explicit axes. On others, leaves are taken to be
      sharded by `jaxgrow.sharding.RULES`; for leaves that are not, ask for ``out_shardings``.

    Raises:
      ValueError: a map whose old size is not the size of its axis, an axis that no leaf has, leaves
        that come out with two sizes for one axis, a rule that matches no leaf, a leaf that does not
        say the role that a rule asks for, or a new size that does not divide among the devices that
        share the axis; all in one message.

    Example:
      Two units of an MLP become four: what writes them is copied, what reads them is shared.

      >>> params = {"up": np.array([[1.0, 2.0]]), "down": np.array([[3.0], [4.0]])}
      >>> axes = {"up": ("embed.in", "mlp"), "down": ("mlp.in", "embed")}
      >>> grown = grow({"mlp": maps.tile(2, times=2)}, params, axes)
      >>> grown["up"].tolist(), grown["down"].tolist()
      ([[1.0, 2.0, 1.0, 2.0]], [[1.5], [2.0], [1.5], [2.0]])
    """
    check(growth, params, axes)

    def leaf(key_path, names, x):
        return grow_leaf(maps.terms(growth, path(key_path), names), names, x)

    return jax.tree_util.tree_map_with_path(leaf, axes, params, is_leaf=is_names)


def grow_leaf(terms: Sequence[maps.Term], names: Names, x: Array) -> Array:
    """The sum of ``terms`` for one leaf, whose shape is taken to fit; the leaf itself, if no term touches it."""
    if not any(m for term in terms for m, _, _ in parts(term, names)):
        return x
    traced = isinstance(x, jax.core.Tracer)
    learned = any(isinstance(m, jax.core.Tracer) for m in jax.tree.leaves(terms))
    sharding = _on_mesh(x)
    if sharding is None:
        spec = _by_rules(terms, names, x) if traced and not learned else P()
        return _divided_sum(terms, names, x, spec) if any(spec) else _sum(terms, names, x)
    if not traced:
        assert isinstance(sharding.mesh, Mesh)  # that of an array
        with jax.set_mesh(sharding.mesh):
            return _divided_sum(terms, names, x, sharding.spec)
    if not learned:
        return _divided_sum(terms, names, x, sharding.spec)
    # XLA divides products with learned maps well, and their gradients.
    run: Any = jax.sharding.auto_axes(lambda terms, x: _sum(terms, names, x), out_sharding=sharding)
    return run(terms, x)


def _by_rules(terms: Sequence[maps.Term], names: Names, x: Any) -> P:
    """How a traced leaf and its result are sharded by `jaxgrow.sharding.RULES`, where XLA divides the work."""
    return shared_spec(names, x.shape, _new_shape(parts(terms[0], names), x.shape))


@dataclass(frozen=True)
class _Shapes:
    """Of a leaf and its result: with axes that go together as one, and as they are."""

    joined: tuple[int, ...]
    new_joined: tuple[int, ...]
    new: tuple[int, ...]
    spec: P  # how both are sharded
    joined_spec: P


def _divided_sum(terms: Sequence[maps.Term], names: Names, x: Any, spec: P) -> jax.Array:
    """`_sum`, of which each device of the mesh that is set computes its own part; ``spec``: of the leaf and its result."""
    found = [parts(term, names) for term in terms]
    groups = [[(begin, end) for _, begin, end in each] for each in found]
    wide = jnp.promote_types(x.dtype, jnp.float32)
    if any(each != groups[0] for each in groups):  # they join different axes
        return reduce(
            add, [_divided_sum([term], names, x.astype(wide), spec) for term in terms]
        ).astype(x.dtype)
    new = _new_shape(found[0], x.shape)
    entries = [*spec, *[None] * (x.ndim - len(spec))]
    shapes = _Shapes(
        joined=tuple(_joined(found[0], x.shape)),
        new_joined=tuple(_joined(found[0], new)),
        new=tuple(new),
        spec=P(*entries),
        joined_spec=P(*[entries[begin] for begin, _ in groups[0]]),  # the others are gathered
    )
    return _program(
        shapes, x, [tuple(_sharded.part(m, wide) for m in _matrices(each, names)) for each in found]
    )


@partial(jax.jit, static_argnums=0)
def _program(shapes: _Shapes, x: jax.Array, terms: Sequence[_sharded.Parts]) -> jax.Array:
    """One program for all leaves of these shapes: their maps are arguments."""

    def contracted(x, terms):
        lay = _sharded.layout(terms, shapes.joined, shapes.new_joined, shapes.joined_spec, x.dtype)
        y = _sharded.contract(terms, x.reshape(shapes.joined), lay).reshape(shapes.new)
        return y if explicit else jax.lax.with_sharding_constraint(y, shapes.spec)

    mesh = jax.typeof(x).sharding.mesh
    explicit = AxisType.Explicit in mesh.axis_types
    run: Any = contracted
    if explicit:  # whose operations want to be told where each result is
        run = jax.sharding.auto_axes(contracted, out_sharding=NamedSharding(mesh, shapes.spec))
    return run(x, terms)


def _new_shape(parts: Sequence[Part], shape: Sequence[int]) -> list[int]:
    return [n for m, begin, end in parts for n in (shape[begin:end] if m is None else m.shapes[0])]


def _on_mesh(x: Any) -> NamedSharding | None:
    """The sharding that a leaf has to keep. While tracing it is in the types of explicit meshes alone."""
    if isinstance(x, jax.core.Tracer):
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
    """What acts on each axis of a leaf, or on a key's adjacent ones."""
    out, i, plain = [], 0, tuple(axis(n) for n in names)
    joint = [axes for axes in term if len(axes) > 1]
    while i < len(names):
        key = next((axes for axes in joint if plain[i : i + len(axes)] == axes), plain[i : i + 1])
        out.append((term.get(key), i, i + len(key)))
        i += len(key)
    return out


def _grow_one(parts: Sequence[Part], names: Names, x: Array) -> Array:
    """One term: axes that go together are one axis meanwhile."""
    shape = _new_shape(parts, x.shape)
    x = x.reshape(_joined(parts, x.shape))
    return matrices.contract(_matrices(parts, names), x).reshape(shape)


def _joined(parts: Sequence[Part], shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[begin:end]) for _, begin, end in parts]


def _matrices(parts: Sequence[Part], names: Names) -> list[Matrix | None]:
    return [None if m is None else m.of(names[begin]) for m, begin, _ in parts]


def products(term: maps.Term, names: Names, shape: Sequence[int]) -> list[float]:
    """2 x multiply-adds of each matrix product that a term does for a leaf, in order."""
    found = parts(term, names)
    return matrices.products(_matrices(found, names), _joined(found, shape))


def check(growth: maps.Growth, params: Params, axes: Axes) -> None:
    """Whether the growth fits the parameters, of which only the shapes count.

    Raises:
      ValueError: as `grow`.
    """
    known = sizes(params, axes)
    became: dict[str, tuple[int, str]] = {}
    wrong, undeclared = [], []
    rules = growth.rules if isinstance(growth, maps.Rules) else ()
    unmatched = list(dict.fromkeys(condition for rule in rules for condition in rule.conditions))
    for leaf, x, names in leaves(params, axes):
        try:
            unmatched = [rule for rule in unmatched if not rule.matches(leaf, names)]
            found = maps.terms(growth, leaf, names)
        except ValueError as error:
            undeclared.append(str(error))
            continue
        for term in found or ({},):  # each by itself: sizes that differ may broadcast
            sizes_ = dict(enumerate(np.shape(x)))
            for m, begin, end in parts(term, names):
                if m is None:
                    continue
                for dim, new, old in zip(range(begin, end), *m.shapes, strict=True):
                    name, size = axis(names[dim]), np.shape(x)[dim]
                    sizes_[dim] = new
                    if old != size:
                        wrong.append(
                            f"{leaf}: axis {name!r} has size {size}, but its map takes {old} to {new}"
                        )
            wrong += _undivided(leaf, x, names, sizes_)
            for dim, new in sizes_.items():
                before = became.setdefault(axis(names[dim]), (new, leaf))
                if before[0] != new and not wrong:
                    wrong.append(
                        f"axis {axis(names[dim])!r} becomes {before[0]} in {before[1]}, but {new} in {leaf}"
                    )
    wrong += undeclared or [f"{rule} matches none of this model" for rule in unmatched]
    absent = [name for name in maps.new_sizes(growth) if name not in known]
    wrong = [
        f"axis {name!r}: the model has no such axis, only {', '.join(map(repr, sorted(known)))}"
        for name in absent
    ] + wrong
    if wrong:
        raise ValueError(
            "the growth does not fit the parameters; build it from their sizes():\n  "
            + "\n  ".join(wrong)
        )


def _undivided(leaf: str, x: Any, names: Names, new: Mapping[int, int]) -> list[str]:
    """What is wrong with the new size of each dimension, if the leaf is to lie on its mesh as before."""
    sharding = _on_mesh(x)
    if sharding is None:
        return []
    wrong = []
    for dim, over in enumerate(sharding.spec):
        mesh_axes = (over,) if isinstance(over, str) else over if isinstance(over, tuple) else ()
        devices = math.prod(sharding.mesh.shape[a] for a in mesh_axes)
        if new[dim] != x.shape[dim] and new[dim] % devices:
            wrong.append(
                f"{leaf}: axis {axis(names[dim])!r} becomes {new[dim]}, which does not divide among the {devices} devices of "
                f"its mesh axes {', '.join(mesh_axes)}; jax.device_put the leaf without them first"
            )
    return wrong

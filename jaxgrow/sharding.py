"""Where leaves lie on a mesh of devices: read off the names of their axes, the same for every family and its optimizer state.

A mesh has axes of its own. `RULES` says which axis of a model is divided among which axis of the
mesh; samples are divided among those of `BATCH`. So there is no table of paths: a new model, and
what grows out of one, need nothing here.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxgrow.axes.names import Axes, Names, Params, Tree, axis, is_names, kind, leaves, owner, path

RULES: Mapping[str, str] = {
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "experts": "expert",
}
BATCH = ("data", "fsdp", "expert")
CONTEXT = "context"  # the axis of the mesh that divides the positions of each sample

AnyMesh: TypeAlias = Mesh | AbstractMesh


def spec(
    names: Names, shape: tuple[int, ...], mesh: AnyMesh, rules: Mapping[str, str] = RULES
) -> P:
    """How one leaf is divided: its axes in order, as far as they divide among the devices; each axis of the mesh serves once.

    Args:
      names: of the leaf's axes.
      shape: their sizes.
      mesh: the devices, or the sizes of their axes.
      rules: axis of the model to axis of the mesh; one that the mesh does not have divides nothing.

    Returns:
      A `jax.sharding.PartitionSpec`.

    Example:
      >>> mesh = AbstractMesh((4, 2), ("fsdp", "tensor"))
      >>> spec(("layers", "embed.in", "mlp"), (12, 768, 3072), mesh)
      P(None, 'fsdp', 'tensor')
    """
    out: list[str | None] = []
    for name, size in zip(names, shape, strict=True):
        over = rules.get(kind(axis(name)))
        devices = mesh.shape.get(over, 1) if over else 1
        out.append(over if devices > 1 and over not in out and size % devices == 0 else None)
    return P(*out)


def specs(params: Params, axes: Axes, mesh: AnyMesh, rules: Mapping[str, str] = RULES) -> Tree:
    """`spec` of every leaf.

    Args:
      params: a pytree of arrays, or of their shapes.
      axes: their axis names.
      mesh: as of `spec`.
      rules: as of `spec`.

    Returns:
      A tree of the structure of ``params``.
    """
    return jax.tree.map(
        lambda names, x: spec(names, x.shape, mesh, rules), axes, params, is_leaf=is_names
    )


def optimizer_specs(
    state: Tree, params: Params, axes: Axes, mesh: AnyMesh, rules: Mapping[str, str] = RULES
) -> Tree:
    """How an optimizer state is divided: a moment as its parameter, anything else not at all.

    Args:
      state: of any optax optimizer, or its shapes; a leaf belongs to the parameter whose path ends
        its own (`jaxgrow.axes.owner`).
      params: the parameters that it is the state of.
      axes: their axis names.
      mesh: as of `spec`.
      rules: as of `spec`.

    Returns:
      A tree of the structure of ``state``.
    """
    names = {p: (n, x.shape) for p, x, n in leaves(params, axes)}

    def leaf(key_path, x):
        mine = owner(path(key_path), names)
        return (
            spec(*names[mine], mesh, rules)
            if mine is not None and x.shape == names[mine][1]
            else P()
        )

    return jax.tree_util.tree_map_with_path(leaf, state)


def whole(sizes: Mapping[str, int], mesh: AnyMesh, rules: Mapping[str, str] = RULES) -> list[str]:
    """A line for each axis of a model that its mesh axis cannot divide equally, so that every device holds all of it.

    Args:
      sizes: of the model's axes, as of `jaxgrow.sizes`.
      mesh: as of `spec`.
      rules: as of `spec`.

    Returns:
      The lines, in the order of ``sizes``.

    Example:
      >>> whole({"embed": 896, "mlp": 4864}, AbstractMesh((6, 4), ("fsdp", "tensor")))
      ["axis 'embed' of 896 does not divide among the 6 devices of fsdp: each holds all of it"]
    """
    return [
        f"axis {name!r} of {size} does not divide among the {mesh.shape[over]} devices of {over}: each holds all of it"
        for name, size in sizes.items()
        if (over := rules.get(kind(name))) in mesh.shape and size % mesh.shape[over]
    ]


def shard(params: Params, axes: Axes, mesh: Mesh, rules: Mapping[str, str] = RULES) -> Params:
    """The parameters, put where `specs` says; what `jaxgrow.grow` makes of them lies there, too.

    Args:
      params: a pytree of arrays.
      axes: their axis names.
      mesh: the devices.
      rules: as of `spec`.

    Returns:
      A tree of `jax.Array`.
    """
    return jax.tree.map(
        lambda x, s: jax.device_put(x, NamedSharding(mesh, s)),
        params,
        specs(params, axes, mesh, rules),
    )


def constrained(tree: Tree, specs: Tree) -> Tree:
    """``tree``, which lies under ``specs`` on the mesh of `jax.set_mesh`; for traced code. Without
    a mesh that XLA divides work over, ``tree``. Axes of the mesh that traced code is mapped over
    divide nothing here.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Auto not in mesh.axis_types:
        return tree
    if AxisType.Manual in mesh.axis_types:
        specs = jax.tree.map(lambda s: only(s, _automatic(mesh)), specs)
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, specs)


def only(spec: P, axes: Sequence[str]) -> P:
    """``spec``, without what other axes of the mesh than these divide.

    Example:
      >>> only(P("fsdp", None, "tensor"), ["tensor"])
      P(None, None, 'tensor')
    """
    return P(*[over if over in axes else None for over in spec])


def split_batch(x: jax.Array) -> jax.Array:
    """``x``, with samples, its first axis, divided among the `BATCH` axes of the mesh and all else whole; for traced code.

    Weights are then gathered, layer by layer, and not activations summed. Itself, where there is
    nothing to divide.
    """
    over = batch_axes(len(x))
    return jax.lax.with_sharding_constraint(x, P(over)) if over else x


def split_sequences(x: jax.Array) -> jax.Array:
    """Shard the batch axis as `split_batch` does, and the second axis, the positions, over `CONTEXT`; for traced code.

    An array without a second axis, or with a number of positions that is not divisible, is sharded
    over its batch axis only.
    """
    if x.ndim < 2 or sequence_parts(x.shape[1]) == 1:
        return split_batch(x)
    return jax.lax.with_sharding_constraint(x, P(batch_axes(len(x)) or None, CONTEXT))


def split_groups(x: jax.Array) -> jax.Array:
    """An array with a part for each device that has samples or positions of its own on the first axis; for traced code."""
    mesh = jax.sharding.get_abstract_mesh()
    over = tuple(a for a in (*BATCH, CONTEXT) if a in _automatic(mesh))
    parts = math.prod(mesh.shape[a] for a in over)
    return jax.lax.with_sharding_constraint(x, P(over)) if over and len(x) % parts == 0 else x


def sequence_parts(positions: int) -> int:
    """Among how many devices so many positions are divided: 1, where they do not divide; for traced code."""
    mesh = jax.sharding.get_abstract_mesh()
    devices = mesh.shape[CONTEXT] if CONTEXT in _automatic(mesh) else 1
    return 1 if positions % devices else devices


def gathered(x: jax.Array, names: Names) -> jax.Array:
    """A leaf, with what samples share whole on each device, where a loop would gather it each time; for traced code."""
    mesh = jax.sharding.get_abstract_mesh()
    return (
        constrained(x, undivided_by_samples(names, x.shape))
        if set(BATCH) & set(_automatic(mesh))
        else x
    )


def undivided_by_samples(names: Names, shape: tuple[int, ...]) -> P:
    """`spec` of a leaf that devices with different samples all have, as each needs it for its own; for traced code."""
    mesh = jax.sharding.get_abstract_mesh()
    rules = {
        axis: over for axis, over in RULES.items() if over not in BATCH and over in _automatic(mesh)
    }
    return spec(names, shape, mesh, rules)


def shared_spec(names: Names, shape: tuple[int, ...], new: Sequence[int]) -> P:
    """What `spec` says alike of a leaf of ``shape`` and of one of ``new``, where XLA divides work; for traced code."""
    mesh = jax.sharding.get_abstract_mesh()
    rules = {axis: over for axis, over in RULES.items() if over in _automatic(mesh)}
    before, after = spec(names, shape, mesh, rules), spec(names, tuple(new), mesh, rules)
    return P(*[a if a == b else None for a, b in zip(before, after, strict=True)])


def divided(each: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """``each`` on every device, of its parts alone, where XLA divides the work of traced code; else itself."""
    if not _automatic(jax.sharding.get_abstract_mesh()):
        return each
    return jax.shard_map(each, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def mean_of_devices(x: jax.Array) -> jax.Array:
    """The mean over devices of what each has computed of its own samples; for code that is mapped
    over `BATCH` axes (by `jax.pmap` or `jax.shard_map`). Elsewhere ``x`` is of all samples.
    """
    over = tuple(
        a for a in BATCH if a in _of_type(jax.sharding.get_abstract_mesh(), AxisType.Manual)
    )
    return jax.lax.pmean(x, over) if over else x


def whole_along(x: jax.Array, dim: int) -> jax.Array:
    """A leaf that is to be contracted along ``dim``, which no device has a part of alone; for traced code.

    What divided it divides the largest other axis that it can: devices exchange their parts, and
    none ever has all of the leaf.
    """
    mesh = jax.sharding.get_abstract_mesh()
    over = tuple(a for a in _automatic(mesh) if a != BATCH[0])
    parts = math.prod(mesh.shape[a] for a in over)
    others = [d for d in range(x.ndim) if d != dim and x.shape[d] % parts == 0]
    if not over or not others:
        return x
    other = max(others, key=lambda d: x.shape[d])
    return jax.lax.with_sharding_constraint(
        x, P(*[over if d == other else None for d in range(x.ndim)])
    )


def apart(x: jax.Array) -> jax.Array:
    """A leaf whose first axis is one of things that are independent, each whole on some device; for traced code.

    All devices have their share of them, unequally if it must be.
    """
    over = _automatic(jax.sharding.get_abstract_mesh())
    return jax.lax.with_sharding_constraint(x, P(over)) if over else x


def batch_axes(samples: int) -> tuple[str, ...]:
    """The axes of the mesh among which `split_batch` divides so many samples: none, where it leaves them; for traced code."""
    mesh = jax.sharding.get_abstract_mesh()
    over = tuple(a for a in BATCH if a in _automatic(mesh))
    return () if samples % math.prod(mesh.shape[a] for a in over) else over


def batch_parts(samples: int) -> int:
    """Among how many devices that is."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[a] for a in batch_axes(samples))


def parts(name: str) -> int:
    """Among how many devices XLA divides an axis of a model by `RULES`, if it can; for traced code."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[RULES[name]] if RULES[name] in _automatic(mesh) else 1


def _automatic(mesh: AnyMesh) -> tuple[str, ...]:
    """The axes over which XLA divides the work."""
    return _of_type(mesh, AxisType.Auto)


def _of_type(mesh: AnyMesh, kind: AxisType) -> tuple[str, ...]:
    return tuple(
        a
        for a, k in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if mesh.shape[a] > 1 and k == kind
    )


def platform() -> str:
    """Of the devices that traced code is for, ``cpu``, ``gpu`` or ``tpu``: those of the mesh that is set, else this host's."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device is not None else jax.default_backend()

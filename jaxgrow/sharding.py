"""How are parameters, optimizer state and samples sharded over a mesh of devices?

The axis names of a parameter determine its sharding, in the same way for every model family.
`RULES` maps each axis of a model to an axis of the mesh, and samples are sharded along the mesh
axes `BATCH`. There is no table of parameter paths, so new models and grown models need no
additional rules.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxgrow.axes.names import (
    Axes,
    Names,
    Params,
    Tree,
    axis_kind,
    axis_of,
    is_names,
    leaves,
    path,
    state_owners,
)

#: The mesh axis along which each kind of model axis is sharded. Axes that are not listed, such as
#: ``layers`` and ``head_dim``, are replicated. Functions of this module accept other ``rules``.
RULES: Mapping[str, str] = {
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "experts": "expert",
}
#: The mesh axes along which samples are sharded.
BATCH = ("data", "fsdp", "expert")
#: The mesh axis along which the positions of each sample are sharded (context parallelism).
CONTEXT = "context"

AnyMesh: TypeAlias = Mesh | AbstractMesh


def partition_spec(
    names: Names, shape: tuple[int, ...], mesh: AnyMesh, rules: Mapping[str, str] = RULES
) -> P:
    """Determine along which mesh axis each axis of a parameter is sharded.

    The axes are considered in order. An axis is sharded if its size is divisible by the size of its
    mesh axis and no earlier axis of the same parameter uses that mesh axis. Otherwise, it is
    replicated.

    Args:
      names: the axis names of the parameter.
      shape: the shape of the parameter.
      mesh: the device mesh, or an abstract mesh with the sizes of its axes.
      rules: the mesh axis for each kind of model axis. Mesh axes that the mesh does not have are
        ignored.

    Returns:
      A `jax.sharding.PartitionSpec`.

    Example:
      >>> mesh = AbstractMesh((4, 2), ("fsdp", "tensor"))
      >>> partition_spec(("layers", "embed.in", "mlp"), (12, 768, 3072), mesh)
      P(None, 'fsdp', 'tensor')
    """
    out: list[str | None] = []
    for name, size in zip(names, shape, strict=True):
        over = rules.get(axis_kind(axis_of(name)))
        devices = mesh.shape.get(over, 1) if over else 1
        out.append(over if devices > 1 and over not in out and size % devices == 0 else None)
    return P(*out)


def partition_specs(
    params: Params, axes: Axes, mesh: AnyMesh, rules: Mapping[str, str] = RULES
) -> Tree:
    """Determine the `partition_spec` of every parameter.

    Args:
      params: a pytree of arrays, or of their shapes.
      axes: the axis names of each parameter.
      mesh: the device mesh, as for `partition_spec`.
      rules: the mesh axis for each kind of model axis, as for `partition_spec`.

    Returns:
      A tree of `jax.sharding.PartitionSpec` with the structure of ``params``.
    """
    return jax.tree.map(
        lambda names, x: partition_spec(names, x.shape, mesh, rules), axes, params, is_leaf=is_names
    )


def optimizer_specs(
    state: Tree, params: Params, axes: Axes, mesh: AnyMesh, rules: Mapping[str, str] = RULES
) -> Tree:
    """Determine how an optimizer state is sharded: moments like parameters, the rest replicated.

    Args:
      state: the state of any optax optimizer, or its shapes. A leaf belongs to the parameter whose
        path its own path ends with (`jaxgrow.axes.state_owners`).
      params: the parameters of the optimizer state.
      axes: the axis names of each parameter.
      mesh: the device mesh, as for `partition_spec`.
      rules: the mesh axis for each kind of model axis, as for `partition_spec`.

    Returns:
      A tree of `jax.sharding.PartitionSpec` with the structure of ``state``.
    """
    names = {p: (n, x.shape) for p, x, n in leaves(params, axes)}
    owned = state_owners(state, names)

    def leaf(key_path, x):
        mine = owned.get(path(key_path))
        if mine is not None and x.shape == names[mine][1]:
            return partition_spec(*names[mine], mesh, rules)
        return P()

    return jax.tree_util.tree_map_with_path(leaf, state)


def replicated_axes(
    sizes: Mapping[str, int], mesh: AnyMesh, rules: Mapping[str, str] = RULES
) -> list[str]:
    """List the axes of a model that are replicated because their size is not divisible.

    Args:
      sizes: the size of each axis of the model, as `jaxgrow.sizes` returns them.
      mesh: the device mesh, as for `partition_spec`.
      rules: the mesh axis for each kind of model axis, as for `partition_spec`.

    Returns:
      One message per axis, in the order of ``sizes``.

    Example:
      >>> replicated_axes({"embed": 896, "mlp": 4864}, AbstractMesh((6, 4), ("fsdp", "tensor")))
      ["axis 'embed' of size 896 is not divisible by the 6 devices of mesh axis fsdp, so it is replicated"]
    """
    return [
        f"axis {name!r} of size {size} is not divisible by the {mesh.shape[over]} devices of mesh "
        f"axis {over}, so it is replicated"
        for name, size in sizes.items()
        if (over := rules.get(axis_kind(name))) in mesh.shape and size % mesh.shape[over]
    ]


def shard_params(
    params: Params, axes: Axes, mesh: Mesh, rules: Mapping[str, str] = RULES
) -> Params:
    """Put parameters on the devices of a mesh, as `partition_specs` determines.

    `jaxgrow.grow` keeps this sharding in its result.

    Args:
      params: a pytree of arrays.
      axes: the axis names of each parameter.
      mesh: the device mesh.
      rules: the mesh axis for each kind of model axis, as for `partition_spec`.

    Returns:
      A tree of `jax.Array` with the structure of ``params``.
    """
    return jax.tree.map(
        lambda x, s: jax.device_put(x, NamedSharding(mesh, s)),
        params,
        partition_specs(params, axes, mesh, rules),
    )


def constrain_sharding(tree: Tree, specs: Tree) -> Tree:
    """Constrain the sharding of traced arrays on the mesh of `jax.set_mesh`.

    Without a mesh that has automatic axes, ``tree`` is returned unchanged. Mesh axes over which the
    traced code is mapped manually are removed from the specs.

    Args:
      tree: a pytree of traced arrays.
      specs: the `jax.sharding.PartitionSpec` of each array.

    Returns:
      The tree with sharding constraints.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Auto not in mesh.axis_types:
        return tree
    if AxisType.Manual in mesh.axis_types:
        specs = jax.tree.map(lambda s: only_mesh_axes(s, tuple(_automatic())), specs)
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, specs)


def only_mesh_axes(spec: P, axes: Sequence[str]) -> P:
    """Remove all mesh axes except ``axes`` from a partition spec.

    Example:
      >>> only_mesh_axes(P("fsdp", None, "tensor"), ["tensor"])
      P(None, None, 'tensor')
    """
    return P(*[over if over in axes else None for over in spec])


def split_batch(x: jax.Array) -> jax.Array:
    """Shard the first axis of a traced array, the samples, along the `BATCH` axes of the mesh.

    All other axes are replicated. With this constraint, XLA gathers the weights of one layer at a
    time and does not sum activations over devices. The array is returned unchanged if there is no
    such mesh axis, or if the number of samples is not divisible.
    """
    over = batch_axes(len(x))
    return jax.lax.with_sharding_constraint(x, P(over)) if over else x


def split_sequences(x: jax.Array) -> jax.Array:
    """Shard samples as `split_batch` does, and positions (the second axis) along `CONTEXT`.

    For traced arrays. An array without a second axis, or with a number of positions that is not
    divisible, is sharded along its first axis only.
    """
    if x.ndim < 2 or sequence_parts(x.shape[1]) == 1:
        return split_batch(x)
    return jax.lax.with_sharding_constraint(x, P(batch_axes(len(x)) or None, CONTEXT))


def split_groups(x: jax.Array) -> jax.Array:
    """Shard the first axis of a traced array along the mesh axes of samples and of positions.

    The first axis has one entry for each device that has different samples or positions.
    """
    devices = _automatic()
    over = tuple(a for a in (*BATCH, CONTEXT) if a in devices)
    parts = math.prod(devices[a] for a in over)
    return jax.lax.with_sharding_constraint(x, P(over)) if over and len(x) % parts == 0 else x


def group_samples(x_BTV: jax.Array) -> jax.Array:
    """Reshape to [G, N, V], so that each device with other samples or positions has one row.

    For traced code. G is the number of these devices.
    """
    samples, positions, width = x_BTV.shape
    groups = batch_parts(samples)
    parts = sequence_parts(positions)
    if parts == 1:
        return x_BTV.reshape(groups, -1, width)
    x = x_BTV.reshape(groups, samples // groups, parts, positions // parts, width)
    return split_groups(x.swapaxes(1, 2).reshape(groups * parts, -1, width))


def ungroup_samples(x_GNV: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Invert `group_samples`: ``shape`` is [B, T, V]."""
    samples, positions, width = shape
    groups = batch_parts(samples)
    parts = sequence_parts(positions)
    if parts == 1:
        return x_GNV.reshape(shape)
    x = x_GNV.reshape(groups, parts, samples // groups, positions // parts, width)
    return split_sequences(x.swapaxes(1, 2).reshape(shape))


def sequence_parts(positions: int) -> int:
    """The number of devices that this number of positions is sharded over, in traced code.

    It is 1 if the number of positions is not divisible.
    """
    devices = _automatic().get(CONTEXT, 1)
    return 1 if positions % devices else devices


def flatten_features(x: jax.Array, features: int = 1) -> jax.Array:
    """Reshape to [N, F] for a product of two matrices, in traced code.

    XLA then makes no transposed copies of activations in the backward pass, which saves 6 % of a
    training step on a CPU. An array whose positions (the second axis) are sharded keeps its other
    axes: [B, T, F]. XLA cannot shard the product of samples and positions by position, and would
    gather all activations.

    Args:
      x: an array [B, .., T, ..] whose last axes are features.
      features: the number of axes of features. F is the product of their sizes.
    """
    others = x.shape[: x.ndim - features]
    width = math.prod(x.shape[x.ndim - features :])
    sharded = len(others) > 1 and sequence_parts(others[1]) > 1
    return x.reshape(*others, width) if sharded else x.reshape(-1, width)


def gather_samples(x: jax.Array, names: Names) -> jax.Array:
    """Gather a traced parameter over the mesh axes of samples before a loop uses it repeatedly.

    Without this, the loop would gather it in every iteration. The sharding along other mesh axes is
    kept.
    """
    if _automatic().keys().isdisjoint(BATCH):
        return x
    return constrain_sharding(x, undivided_by_samples(names, x.shape))


def undivided_by_samples(names: Names, shape: tuple[int, ...]) -> P:
    """The `partition_spec` of a parameter without the mesh axes of samples, in traced code.

    Devices with different samples then have the same part of the parameter.
    """
    mesh = jax.sharding.get_abstract_mesh()
    devices = _automatic()
    rules = {axis: over for axis, over in RULES.items() if over in devices and over not in BATCH}
    return partition_spec(names, shape, mesh, rules)


def shared_spec(names: Names, shape: tuple[int, ...], new: Sequence[int]) -> P:
    """The part of `partition_spec` that is valid for a parameter of ``shape`` and for one of shape ``new``.

    For traced code; only automatic mesh axes are considered.
    """
    mesh = jax.sharding.get_abstract_mesh()
    rules = {axis: over for axis, over in RULES.items() if over in _automatic()}
    before = partition_spec(names, shape, mesh, rules)
    after = partition_spec(names, tuple(new), mesh, rules)
    return P(*[a if a == b else None for a, b in zip(before, after, strict=True)])


def whole_along(x: jax.Array, dim: int) -> jax.Array:
    """Replicate a traced parameter along one dimension, which is contracted next.

    The mesh axes then shard the largest other dimension that is divisible by them. Devices exchange
    their shards, and no device ever has the complete parameter.

    Args:
      x: the parameter.
      dim: the dimension that must not be sharded.
    """
    devices = _automatic()
    over = tuple(a for a in devices if a != BATCH[0])
    parts = math.prod(devices[a] for a in over)
    others = [d for d in range(x.ndim) if d != dim and x.shape[d] % parts == 0]
    if not over or not others:
        return x
    other = max(others, key=lambda d: x.shape[d])
    return jax.lax.with_sharding_constraint(
        x, P(*[over if d == other else None for d in range(x.ndim)])
    )


def spread_entries(x: jax.Array) -> jax.Array:
    """Distribute the independent entries on the first axis of a traced array over all devices.

    Each entry is complete on one device. The number of entries does not have to be divisible by the
    number of devices.
    """
    over = tuple(_automatic())
    return jax.lax.with_sharding_constraint(x, P(over)) if over else x


def batch_axes(samples: int) -> tuple[str, ...]:
    """The mesh axes along which `split_batch` shards this number of samples, in traced code.

    It is empty if the samples are not sharded.
    """
    devices = _automatic()
    over = tuple(a for a in BATCH if a in devices)
    return () if samples % math.prod(devices[a] for a in over) else over


def batch_parts(samples: int) -> int:
    """The number of devices over which `split_batch` shards this number of samples."""
    devices = _automatic()
    return math.prod(devices[a] for a in batch_axes(samples))


def axis_parts(name: str) -> int:
    """The number of devices over which XLA shards an axis of a model by `RULES`, in traced code.

    It is 1 if the mesh has no such automatic axis.
    """
    return _automatic().get(RULES[name], 1)


def _automatic() -> dict[str, int]:
    """The sizes of the mesh axes over which XLA shards the traced computation automatically."""
    return axes_of_type(AxisType.Auto)


def axes_of_type(kind: AxisType) -> dict[str, int]:
    """The sizes of the axes of the current mesh that have this type and several devices."""
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return {a: n for a, n in mesh.shape.items() if n > 1 and types[a] == kind}


def current_platform() -> str:
    """The platform that traced code is compiled for: ``cpu``, ``gpu`` or ``tpu``.

    It is the platform of the current mesh; without a mesh, the default backend of this host.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device is not None else jax.default_backend()

"""The devices of a run, and how its programs get onto them: by ``jit`` over a mesh of any size, or by ``pmap`` on one host."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxgrow.sharding import BATCH

AXIS = "data"
How = Literal["mesh", "pmap"]


@dataclass(frozen=True)
class Mesh:
    """How many devices share what: ``data x fsdp x tensor`` of them, and the batch is divided among the first two.

    ``fsdp`` divides parameters and optimizer state by the width of the residual stream, and gathers them layer by layer;
    ``tensor`` divides heads, units of MLPs and the vocabulary (`jaxgrow.sharding`).
    """

    data: int = 0  # 0: as many as are left
    fsdp: int = 1
    tensor: int = 1

    def __post_init__(self):
        for name, least in (("data", 0), ("fsdp", 1), ("tensor", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"mesh.{name} must be at least {least}, but is {getattr(self, name)}")

    def over(self, devices: list[Any], how: How = "mesh") -> jax.sharding.Mesh:
        """The mesh of ``devices``. That of ``pmap`` has one axis, as its results do: else its step would be compiled twice.

        Raises:
          ValueError: they are another number.
        """
        data = self.data or max(1, len(devices) // (self.fsdp * self.tensor))
        shape = (data, self.fsdp, self.tensor)
        if math.prod(shape) != len(devices):
            raise ValueError(
                f"a mesh of data={self.data or 'any'} x fsdp={self.fsdp} x tensor={self.tensor} does not take {len(devices)} "
                "devices: set mesh.data, mesh.fsdp and mesh.tensor so that their product is that"
            )
        if how == "pmap":
            return jax.sharding.Mesh(np.array(devices), (AXIS,))
        kinds = (AxisType.Auto,) * 3
        return jax.sharding.Mesh(np.array(devices).reshape(shape), (AXIS, "fsdp", "tensor"), axis_types=kinds)


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def divided(mesh: jax.sharding.Mesh, dim: int = 0) -> NamedSharding:
    """Of batches: samples, their axis ``dim``, are divided among the devices."""
    return NamedSharding(mesh, P(*[None] * dim, tuple(a for a in BATCH if a in mesh.axis_names)))


def mapped(make: Callable[..., Callable], how: How, mesh: jax.sharding.Mesh, *, donate: bool = False) -> Callable:
    """``function(state, batch, *rest)`` on every device of the mesh, where ``function = make(axis=..)``.

    By ``jit``, where parameters are divided, the function is that of the whole batch and ``axis`` is None; XLA divides the
    work as the state and the batch lie. Where they are not, and by ``pmap``, it is that of one device's part, and takes its
    means over ``axis``. All give the same numbers, to the rounding of sums in another order.

    The batch is a pytree of NumPy arrays of this process's `rows`, [rows, ...]. ``donate`` lets the result take the place of
    the state.
    """
    donated = (0,) if donate else ()
    if how == "mesh":
        run = over_mesh(make, mesh, donate=donate)

        def call(state, batch, *rest):
            with jax.set_mesh(mesh):
                return run(state, put(batch, mesh), *rest)

        return call
    function = make(axis=AXIS)
    spread = jax.pmap(
        lambda state, batch, rest: function(state, batch, *rest),
        axis_name=AXIS,
        in_axes=(None, 0, None),
        out_axes=None,
        donate_argnums=donated,
    )

    def part(x):
        return x.reshape(mesh.devices.size, -1, *x.shape[1:])

    return lambda state, batch, *rest: spread(state, jax.tree.map(part, batch), rest)


def over_mesh(make: Callable[..., Callable], mesh: jax.sharding.Mesh, *, donate: bool = False) -> jax.stages.Wrapped:
    """The program behind `mapped` on a mesh: to be called, or lowered, with that mesh set."""
    return jax.jit(_of_the_batch(make, mesh), donate_argnums=(0,) if donate else ())


def _of_the_batch(make: Callable[..., Callable], mesh: jax.sharding.Mesh) -> Callable:
    if mesh.shape[AXIS] == 1 or math.prod(mesh.shape.values()) > mesh.shape[AXIS]:
        return make(axis=None)
    # Where all devices hold all of the model, each takes the gradient of its part, and they are added once a step, in float32:
    # left to XLA, they would be once a layer and micro-batch, in the dtype of activations. With check_vma, once more.
    function = make(axis=AXIS)

    def spread(state, batch, *rest):
        specs = (P(), P(AXIS), *[P()] * len(rest))
        return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)(state, batch, *rest)

    return spread


def rows(batch: int, mesh: jax.sharding.Mesh) -> np.ndarray:
    """Of a batch, those that lie on devices of this process. Where ``tensor`` spans processes, others have the same.

    Raises:
      ValueError: the batch cannot be divided equally among the devices.
    """
    devices = math.prod(mesh.shape.get(a, 1) for a in BATCH)
    if batch % devices:
        raise ValueError(f"a batch of {batch} cannot be divided among {devices} devices; use a multiple of {devices}")
    parts = divided(mesh).addressable_devices_indices_map((batch,))
    return np.unique([np.arange(batch)[part] for part in parts.values()])


def put(batch: Any, mesh: jax.sharding.Mesh, dim: int = 0) -> Any:
    """A batch of which every process has its `rows`, on the devices; samples are axis ``dim``."""
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(divided(mesh, dim), x), batch)

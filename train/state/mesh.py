"""The devices of a run, and what of it lies where on them."""

import math
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
    """How many devices share what: ``data x fsdp x tensor x expert`` of them; the batch is divided among all but ``tensor``.

    ``fsdp`` divides parameters and optimizer state by the width of the residual stream, and gathers them layer by layer;
    ``tensor`` divides heads, units of MLPs and the vocabulary (`jaxgrow.sharding`); ``expert`` divides the experts of a
    mixture, whose devices exchange tokens (`jaxgrow.models.experts.Experts`).
    """

    data: int = 0  # 0: as many as are left
    fsdp: int = 1
    tensor: int = 1
    expert: int = 1

    def __post_init__(self):
        for name, least in (("data", 0), ("fsdp", 1), ("tensor", 1), ("expert", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"mesh.{name} must be at least {least}, but is {getattr(self, name)}")

    def over(self, devices: list[Any], how: How = "mesh") -> jax.sharding.Mesh:
        """The mesh of ``devices``. That of ``pmap`` has one axis, as its results do: else its step would be compiled twice.

        Raises:
          ValueError: they are another number.
        """
        data = self.data or max(1, len(devices) // (self.fsdp * self.tensor * self.expert))
        names, shape = (AXIS, "fsdp", "tensor"), (data, self.fsdp, self.tensor)
        if self.expert > 1:  # other meshes have no such axis
            names, shape = (*names, "expert"), (*shape, self.expert)
        if math.prod(shape) != len(devices):
            expert = f" x expert={self.expert}" if self.expert > 1 else ""
            raise ValueError(
                f"a mesh of data={self.data or 'any'} x fsdp={self.fsdp} x tensor={self.tensor}{expert} does not take "
                f"{len(devices)} devices: set mesh.data, mesh.fsdp and mesh.tensor so that their product is that"
            )
        if how == "pmap":
            return jax.sharding.Mesh(np.array(devices), (AXIS,))
        kinds = (AxisType.Auto,) * len(shape)
        return jax.sharding.Mesh(np.array(devices).reshape(shape), names, axis_types=kinds)


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def divided(mesh: jax.sharding.Mesh, dim: int = 0) -> NamedSharding:
    """Of batches: samples, their axis ``dim``, are divided among the devices."""
    return NamedSharding(mesh, P(*[None] * dim, tuple(a for a in BATCH if a in mesh.axis_names)))


def batch_devices(mesh: jax.sharding.Mesh) -> int:
    """Among how many devices a batch is divided."""
    return math.prod(mesh.shape.get(axis, 1) for axis in BATCH)


def rows(batch: int, mesh: jax.sharding.Mesh) -> np.ndarray:
    """Of a batch, those that lie on devices of this process. Where ``tensor`` spans processes, others have the same.

    Raises:
      ValueError: the batch cannot be divided equally among the devices.
    """
    devices = batch_devices(mesh)
    if batch % devices:
        raise ValueError(f"a batch of {batch} cannot be divided among {devices} devices; use a multiple of {devices}")
    parts = divided(mesh).addressable_devices_indices_map((batch,))
    return np.unique([np.arange(batch)[part] for part in parts.values()])


def put(batch: Any, mesh: jax.sharding.Mesh, dim: int = 0) -> Any:
    """A batch of which every process has its `rows`, on the devices; samples are axis ``dim``."""
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(divided(mesh, dim), x), batch)

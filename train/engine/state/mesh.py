"""The devices of a run, and what of it lies where on them."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxgrow.sharding import BATCH, CONTEXT
from train.config.overrides import LATER

AXIS, FSDP = "data", "fsdp"
How = Literal["mesh", "pmap"]


@dataclass(frozen=True)
class Mesh:
    """How many devices share what: ``replica x data x fsdp x context x tensor x expert`` of them.

    The batch is divided among all but ``context`` and ``tensor``. Over ``replica`` and ``data``,
    gradients are added once a step, in float32. ``replica`` counts the groups of hosts, or the
    slices, between which the network is slow: the devices of each group are on hosts of its own.
    ``context`` divides the positions of each sequence, whose attention is ring attention. ``fsdp``
    divides parameters and optimizer state by the width of the residual stream, and gathers them
    layer by layer; ``tensor`` divides heads, units of MLPs and the vocabulary (`jaxgrow.sharding`);
    ``expert`` divides the experts of a mixture, whose devices exchange tokens
    (`jaxgrow.models.mixture.Experts`).
    """

    data: int = 0  # 0: as many as are left
    fsdp: int = 1
    tensor: int = 1
    expert: int = 1
    replica: int = field(default=1, metadata=LATER)
    context: int = field(default=1, metadata=LATER)
    # When ``fsdp`` adds gradients: "layer", for each layer of each micro-batch, in the dtype of
    # activations; "step", once, in float32, for which each device holds all weights and gradients
    # during the step. "auto": the one of the lower bound, of those whose compiled step fits the
    # memory (`train.aot.estimate.settled`).
    gradients: Literal["auto", "layer", "step"] = field(default="auto", metadata=LATER)

    def __post_init__(self):
        sizes = (
            ("data", 0),
            ("fsdp", 1),
            ("tensor", 1),
            ("expert", 1),
            ("replica", 1),
            ("context", 1),
        )
        for name, least in sizes:
            if getattr(self, name) < least:
                raise ValueError(
                    f"mesh.{name} must be at least {least}, but is {getattr(self, name)}"
                )
        if self.gradients == "step" and self.tensor * self.context * self.expert > 1:
            raise ValueError(
                "mesh.gradients=step divides by data and fsdp alone: set mesh.gradients=layer"
            )

    @property
    def once(self) -> bool:
        """Whether ``fsdp`` adds gradients once a step."""
        return self.gradients == "step" and self.fsdp > 1

    def over(self, devices: list[Any], how: How = "mesh") -> jax.sharding.Mesh:
        """The mesh of ``devices``. That of ``pmap`` has one axis, as its results do: else its step would be compiled twice.

        Raises:
          ValueError: they are another number.
        """
        inner = self.fsdp * self.context * self.tensor * self.expert
        data = self.data or max(1, len(devices) // (self.replica * inner))
        sizes = {
            AXIS: self.replica * data,
            FSDP: self.fsdp,
            CONTEXT: self.context,
            "tensor": self.tensor,
        }
        sizes["expert"] = self.expert
        # Most meshes have neither of these axes.
        sizes = {
            name: size
            for name, size in sizes.items()
            if size > 1 or name not in (CONTEXT, "expert")
        }
        names, shape = tuple(sizes), tuple(sizes.values())
        if math.prod(shape) != len(devices):
            raise ValueError(
                f"a mesh of {self._spelled()} does not take {len(devices)} devices: set mesh.data, mesh.fsdp and mesh.tensor "
                "so that their product is that"
            )
        if how == "pmap":
            return jax.sharding.Mesh(np.array(devices), (AXIS,))
        if self.replica > 1:
            devices = _by_hosts(devices, self.replica)
        kinds = (AxisType.Auto,) * len(names)
        return jax.sharding.Mesh(np.array(devices).reshape(shape), names, axis_types=kinds)

    def _spelled(self) -> str:
        sizes = {
            "replica": self.replica,
            "data": self.data or "any",
            "fsdp": self.fsdp,
            "context": self.context,
        }
        shown = {
            name: size for name, size in sizes.items() if name in ("data", "fsdp") or size != 1
        }
        shown |= {"tensor": self.tensor} | ({"expert": self.expert} if self.expert > 1 else {})
        return " x ".join(f"{name}={size}" for name, size in shown.items())


def _by_hosts(devices: list[Any], replicas: int) -> list[Any]:
    """The devices, those of each replica together.

    Raises:
      ValueError: the devices of a host or slice would belong to several replicas.
    """
    devices = sorted(
        devices, key=lambda d: (getattr(d, "slice_index", 0) or 0, d.process_index, d.id)
    )
    groups = np.array(devices).reshape(replicas, -1)
    hosts = [
        {(getattr(d, "slice_index", 0) or 0, d.process_index) for d in group} for group in groups
    ]
    every = set.union(*hosts)
    if len(every) > 1 and sum(map(len, hosts)) > len(every):
        raise ValueError(
            f"mesh.replica={replicas} divides the devices of a host: {len(every)} hosts must be a multiple of it"
        )
    return devices


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
        raise ValueError(
            f"a batch of {batch} cannot be divided among {devices} devices; use a multiple of {devices}"
        )
    parts = divided(mesh).addressable_devices_indices_map((batch,))
    return np.unique([np.arange(batch)[part] for part in parts.values()])


def put(batch: Any, mesh: jax.sharding.Mesh, dim: int = 0) -> Any:
    """A batch of which every process has its `rows`, on the devices; samples are axis ``dim``."""
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(divided(mesh, dim), x), batch
    )

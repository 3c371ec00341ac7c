"""The device mesh of a run, and the sharding of batches over it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import jax
import numpy as np
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxgrow.axes import Tree
from jaxgrow.sharding import BATCH, CONTEXT
from train.common.fields import CHANGED, GIVEN

AXIS = "data"
FSDP = "fsdp"
How = Literal["mesh", "pmap"]


class MeshDevice(Protocol):
    """A device of JAX, also one that is only described."""

    @property
    def id(self) -> int: ...
    @property
    def process_index(self) -> int: ...
    @property
    def platform(self) -> str: ...


@dataclass(frozen=True)
class Mesh:
    """Shape of the device mesh: ``replica x data x fsdp x context x tensor x expert`` devices.

    The batch is sharded along all axes except ``context`` and ``tensor``. Gradients are reduced
    over ``replica`` and ``data`` once per step, in float32. On TPUs, each axis follows the links
    between the chips of a slice as far as the sizes permit.

    Attributes:
      data: number of data-parallel groups; 0 uses all remaining devices.
      fsdp: number of devices that parameters and optimizer state are sharded over, along the width
        of the residual stream. They are gathered layer by layer.
      tensor: number of devices that heads, MLP units and the vocabulary are sharded over
        (`jaxgrow.sharding`).
      expert: number of devices that the experts of a mixture are sharded over. These devices
        exchange tokens (`jaxgrow.extras.models.mixture.Experts`).
      replica: number of groups of hosts, or of slices, with a slow network between them. No host
        belongs to two groups.
      context: number of devices that the positions of each sequence are sharded over. Their
        attention is ring attention.
      gradients: how often ``fsdp`` reduces gradients. "layer" reduces them for each layer of each
        micro-batch, in the dtype of activations. "step" reduces them once per step, in float32;
        each device then holds all weights and gradients during the step. "auto" takes the one with
        the lower bound of the step time, among those whose compiled step fits the memory
        (`train.extras.aot.estimate.resolve_auto`).
    """

    data: int = 0
    fsdp: int = 1
    tensor: int = 1
    expert: int = 1
    replica: int = 1
    context: int = 1
    gradients: Literal["auto", "layer", "step"] = "auto"

    # The choices that use a field (`train.extras.effect`).
    used_with = {
        "expert": {"/model.experts": GIVEN},
        "replica": {"/parallel": ("mesh",)},
        "gradients": {"fsdp": CHANGED},
    }

    def __post_init__(self):
        for name in ("data", "fsdp", "tensor", "expert", "replica", "context"):
            least = int(name != "data")
            if getattr(self, name) < least:
                raise ValueError(
                    f"mesh.{name} must be at least {least}, but is {getattr(self, name)}"
                )
        if self.gradients == "step" and self.tensor * self.context * self.expert > 1:
            raise ValueError(
                "mesh.gradients=step supports only the axes replica, data and fsdp: set mesh.gradients=layer"
            )

    @property
    def once(self) -> bool:
        """Whether ``fsdp`` reduces gradients once per step."""
        return self.gradients == "step" and self.fsdp > 1

    def over(self, devices: Sequence[MeshDevice], how: How = "mesh") -> jax.sharding.Mesh:
        """Return the mesh of ``devices``.

        With ``pmap`` the mesh has one axis, like the results of ``pmap``. With another mesh the
        step would be compiled twice.

        Args:
          devices: devices of the run.
          how: "mesh" or "pmap".

        Raises:
          ValueError: the number of devices does not fit the sizes of the axes, or ``replica``
            divides the devices of a host.
        """
        inner = self.fsdp * self.context * self.tensor * self.expert
        data = self.data or max(1, len(devices) // (self.replica * inner))
        sizes = {
            AXIS: self.replica * data,
            FSDP: self.fsdp,
            CONTEXT: self.context,
            "tensor": self.tensor,
            "expert": self.expert,
        }
        # Most runs do not use these two axes, so the mesh omits them if their size is 1.
        sizes = {
            name: size
            for name, size in sizes.items()
            if size > 1 or name not in (CONTEXT, "expert")
        }
        shape = tuple(sizes.values())
        if math.prod(shape) != len(devices):
            raise ValueError(
                f"a mesh of {self._spelled()} does not fit {len(devices)} devices: set mesh.data, mesh.fsdp and mesh.tensor "
                "so that the product of all axes is the number of devices"
            )
        if how == "pmap":
            return jax.sharding.Mesh(np.array(devices), (AXIS,))
        if self.replica > 1:
            devices = _by_hosts(devices, self.replica)
        kinds = (AxisType.Auto,) * len(sizes)
        return jax.sharding.Mesh(_placed(devices, shape), tuple(sizes), axis_types=kinds)

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


def _slice(device: MeshDevice) -> int:
    return getattr(device, "slice_index", 0) or 0


def _placed(devices: Sequence[MeshDevice], shape: tuple[int, ...]) -> np.ndarray:
    """Return the devices as an array of ``shape``, whose later axes communicate more.

    The chips of a TPU slice form a grid, or a torus if the ends of its rows are linked. Devices that
    communicate, such as the parts of a tensor-parallel layer, should be a row or a plane of it. The
    order of `jax.devices()` does not ensure this. If several slices divide the first axis, none of
    the other axes crosses the slow network between slices.
    """
    slices = sorted({_slice(d) for d in devices})
    if devices[0].platform != "tpu" or shape[0] % len(slices):
        return np.array(devices).reshape(shape)
    each = (shape[0] // len(slices), *shape[1:])
    groups = [[d for d in devices if _slice(d) == number] for number in slices]
    # `jax.make_mesh` refuses several slices and, on most TPUs, an axis that is smaller than a side of
    # the grid.
    return np.concatenate(
        [create_device_mesh(each, group, allow_split_physical_axes=True) for group in groups]
    )


def _by_hosts(devices: Sequence[MeshDevice], replicas: int) -> Sequence[MeshDevice]:
    """Sort the devices so that the devices of each replica are adjacent.

    Raises:
      ValueError: the devices of a host or slice would belong to several replicas.
    """

    def host(device: MeshDevice) -> tuple[int, int]:
        return _slice(device), device.process_index

    devices = sorted(devices, key=lambda d: (*host(d), d.id))
    groups = np.array(devices).reshape(replicas, -1)
    hosts = [set(map(host, group)) for group in groups]
    every = set.union(*hosts)
    if len(every) > 1 and sum(map(len, hosts)) > len(every):
        raise ValueError(
            f"mesh.replica={replicas} would split the devices of a host: the number of hosts ({len(every)}) must be a multiple"
        )
    return devices


def replicated_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def batch_sharding(mesh: jax.sharding.Mesh, dim: int = 0) -> NamedSharding:
    """Return the sharding of batches, whose samples (axis ``dim``) are split over the devices."""
    return NamedSharding(mesh, P(*[None] * dim, tuple(a for a in BATCH if a in mesh.axis_names)))


def batch_devices(mesh: jax.sharding.Mesh) -> int:
    """Return the number of devices that a batch is sharded over."""
    return math.prod(mesh.shape.get(axis, 1) for axis in BATCH)


def token_devices(mesh: jax.sharding.Mesh) -> int:
    """Return the number of devices that the tokens of a batch are sharded over."""
    return batch_devices(mesh) * mesh.shape.get(CONTEXT, 1)


def rows(batch: int, mesh: jax.sharding.Mesh) -> np.ndarray:
    """Return the indices of the samples of a batch that this process reads, int [rows].

    They are the samples on devices of this process. If ``tensor`` spans several processes, these
    processes read the same samples.

    Args:
      batch: number of samples of the whole batch.
      mesh: mesh of the run.

    Raises:
      ValueError: the batch size is not divisible by the number of devices.
    """
    devices = batch_devices(mesh)
    if batch % devices:
        raise ValueError(
            f"a batch of {batch} is not divisible by {devices} devices; use a multiple of {devices}"
        )
    parts = batch_sharding(mesh).addressable_devices_indices_map((batch,))
    return np.unique([np.arange(batch)[part] for part in parts.values()])


def put(batch: Tree, mesh: jax.sharding.Mesh, dim: int = 0) -> Tree:
    """Put a batch on the devices; every process passes its own `rows`.

    Args:
      batch: pytree of NumPy arrays with the samples of this process.
      mesh: mesh of the run.
      dim: axis of the samples.
    """
    # One call for all arrays. Each call takes some of the time of the host in every step.
    return jax.make_array_from_process_local_data(batch_sharding(mesh, dim), batch)

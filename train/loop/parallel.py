"""One per-device function, mapped over all devices: by ``pmap`` on one host, by ``jit`` over a mesh on any number."""

import inspect
from collections.abc import Callable
from typing import Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXIS = "data"
How = Literal["pmap", "mesh"]


def mapped(function: Callable, how: How, *, donate: bool = False) -> Callable:
    """``function(state, batch, *scalars)`` on every device, which gets all of ``state`` and its part of ``batch``.

    Both ways take the state unstacked and replicated, return it so, and give the same numbers. The batch of this process
    is a pytree of NumPy arrays [local batch, ...]. ``donate`` lets the result take the place of the state.
    """
    donated = (0,) if donate else ()
    scalars = len(inspect.signature(function).parameters) - 2
    if how == "pmap":
        devices = jax.local_device_count()
        axes = (None, 0, *[None] * scalars)
        run = jax.pmap(function, axis_name=AXIS, in_axes=axes, out_axes=None, donate_argnums=donated)

        def part(x):
            return x.reshape(devices, -1, *x.shape[1:])

        return lambda state, batch, *rest: run(state, jax.tree.map(part, batch), *rest)
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    # With check_vma the gradients would be summed over the devices once more, on top of our own mean.
    specs = (P(), P(AXIS), *[P()] * scalars)
    run = jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False), donate_argnums=donated
    )
    parts = NamedSharding(mesh, P(AXIS))

    def placed(x):
        return jax.make_array_from_process_local_data(parts, x)

    return lambda state, batch, *rest: run(state, jax.tree.map(placed, batch), *rest)


def replicated() -> NamedSharding | jax.sharding.SingleDeviceSharding:
    """Where a state lives before its first step: on every device."""
    if jax.device_count() == 1:
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return NamedSharding(Mesh(np.array(jax.devices()), (AXIS,)), P())


def local_batch(batch: int) -> int:
    """This process's part of a global batch.

    Raises:
      ValueError: the batch cannot be divided equally among the devices.
    """
    devices = jax.device_count()
    if batch % devices:
        raise ValueError(f"a batch of {batch} cannot be divided among {devices} devices; use a multiple of {devices}")
    return batch // jax.process_count()

"""How the programs of a run get onto its devices: by ``jit`` over a mesh of any size, or by ``pmap`` on one host."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from train.engine import xla
from train.engine.state.mesh import AXIS, How, put


def mapped(
    make: Callable[..., Callable], how: How, mesh: jax.sharding.Mesh, *, donate: bool = False
) -> Callable:
    """``function(state, batch, *rest)`` on every device of the mesh, where ``function = make(axis=..)``.

    By ``jit``, where parameters are divided, the function is that of the whole batch and ``axis``
    is None; XLA divides the work as the state and the batch lie. Where they are not, and by
    ``pmap``, it is that of one device's part, and takes its means over ``axis``. All give the same
    numbers, to the rounding of sums in another order.

    The batch is a pytree of NumPy arrays of this process's `rows`, [rows, ...]. ``donate`` lets the
    result take the place of the state.
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


def over_mesh(
    make: Callable[..., Callable], mesh: jax.sharding.Mesh, *, donate: bool = False
) -> jax.stages.Wrapped:
    """The program behind `mapped` on a mesh: to be called, or lowered, with that mesh set."""
    return jax.jit(
        _of_the_batch(make, mesh),
        donate_argnums=(0,) if donate else (),
        compiler_options=xla.options(mesh) or None,
    )


def _of_the_batch(make: Callable[..., Callable], mesh: jax.sharding.Mesh) -> Callable:
    if mesh.shape[AXIS] == 1:
        return make(axis=None)
    # Devices that hold the same of the model take the gradients of their parts of the batch, which
    # are added once a step, in float32: left to XLA, they would be once a layer and micro-batch, in
    # the dtype of activations. With check_vma, once more. What the other axes divide is XLA's.
    function = make(axis=AXIS)

    def spread(state, batch, *rest):
        specs = (P(), P(AXIS), *[P()] * len(rest))
        how: dict[str, Any] = (
            {"axis_names": {AXIS}} if math.prod(mesh.shape.values()) > mesh.shape[AXIS] else {}
        )
        of_its_part = jax.shard_map(
            function, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False, **how
        )
        return of_its_part(state, batch, *rest)

    return spread

"""How do programs run on several devices: by ``jit`` over a mesh, or by ``pmap`` on one host?"""

import math
from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec as P

from train.state.mesh import AXIS, How, put
from train.step import xla


def mapped(
    make: Callable[..., Callable], how: How, mesh: jax.sharding.Mesh, *, donate: bool = False
) -> Callable:
    """Map ``function(state, batch, *rest)`` over the devices of the mesh.

    With ``jit``, the function is mapped over the data axis if this axis has several devices. It then
    gets its part of the batch and averages over ``axis``. Otherwise it gets the full batch, and
    ``axis`` is None. XLA divides the work along the other mesh axes by the shardings of state and
    batch. With ``pmap``, the function gets the part of the batch of one device, and averages over
    ``axis``. All these variants give the same numbers, up to the rounding of sums in a different
    order.

    Args:
      make: function that returns ``function`` for an ``axis``: ``function = make(axis=...)``.
      how: "mesh" for ``jit`` over a mesh, or "pmap".
      mesh: mesh of the devices.
      donate: whether the result may reuse the memory of the state.

    Returns:
      A function of the state, a batch, and further arguments. The batch is a pytree of NumPy arrays
      with this process's `rows`, [rows, ...].
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
    """Return the jitted program that `mapped` uses for "mesh".

    Call or lower it while the mesh is set (`jax.set_mesh`).
    """
    return jax.jit(
        _of_the_batch(make, mesh),
        donate_argnums=(0,) if donate else (),
        compiler_options=xla.options(mesh) or None,
    )


def _of_the_batch(make: Callable[..., Callable], mesh: jax.sharding.Mesh) -> Callable:
    if mesh.shape[AXIS] == 1:
        return make(axis=None)
    # Along the data axis the model is replicated. Each device computes the gradients of its part of
    # the batch, and they are reduced once per step, in float32. XLA alone would reduce them for
    # each layer and micro-batch, in the dtype of activations. check_vma would add one more
    # reduction. XLA handles the other axes.
    function = make(axis=AXIS)

    def spread(state, batch, *rest):
        specs = (P(), P(AXIS), *[P()] * len(rest))
        how: dict[str, set[str]] = (
            {"axis_names": {AXIS}} if math.prod(mesh.shape.values()) > mesh.shape[AXIS] else {}
        )
        of_its_part = jax.shard_map(
            function, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False, **how
        )
        return of_its_part(state, batch, *rest)

    return spread

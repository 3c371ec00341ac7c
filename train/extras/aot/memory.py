"""Does a run fit the memory of its devices? This is checked before any array is created."""

from dataclasses import replace

import jax
import numpy as np
import optax

from jaxgrow.axes import Tree
from train.common.errors import UserError
from train.plan.lifetimes import Plan, states
from train.plan.training import Train
from train.run.trainer import MEMORY_CHECKS
from train.state.mesh import FSDP, Mesh
from train.state.model import shardings

GB = 1e9


def memory_limit() -> float | None:
    """Return the bytes of a device that XLA may use, or None if they are unknown (CPU)."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def held_bytes(plan: Plan, tx: optax.GradientTransformation, mesh: jax.sharding.Mesh) -> float:
    """Return the bytes that one device holds between steps, the maximum over the phases.

    They are the models of a phase with their optimizer states, and the gradients of the trained
    model.

    Args:
      plan: phases of the run.
      tx: optimizer of the run.
      mesh: mesh that the models are sharded over.
    """
    most = 0.0
    for phase, models in zip(plan, states(plan, tx), strict=True):
        lies = {name: shardings(model, mesh) for name, model in models.items()}
        held = bytes_on_each(models, lies)
        if isinstance(phase, Train):
            held += bytes_on_each(models[phase.writes].params, lies[phase.writes].params)
        most = max(most, held)
    return most


def bytes_on_each(tree: Tree, lies: Tree) -> float:
    """Return the bytes that one device holds of a tree.

    Args:
      tree: arrays or shapes.
      lies: sharding of each leaf.
    """
    leaves = zip(jax.tree.leaves(tree), jax.tree.leaves(lies), strict=True)
    return float(
        sum(np.prod(s.shard_shape(x.shape), dtype=float) * x.dtype.itemsize for x, s in leaves)
    )


def check_memory(
    name: str,
    plan: Plan,
    tx: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    shape: Mesh,
) -> None:
    """Check that the models and gradients of a run fit the memory of a device.

    Args:
      name: name of the run.
      plan: phases of the run.
      tx: optimizer of the run.
      mesh: mesh of the devices.
      shape: settings of the mesh, for which other ones are suggested.

    Raises:
      UserError: the models and gradients that are held between steps exceed the memory of a device.
    """
    has = memory_limit()
    if has is None or (needs := held_bytes(plan, tx, mesh)) <= has:
        return
    devices = list(mesh.devices.flat)
    way = "use more devices or a smaller model"
    others = shape.replica * shape.context * shape.tensor * shape.expert
    other = replace(shape, data=1, fsdp=len(devices) // others)
    if (least := held_bytes(plan, tx, other.over(devices))) <= has:
        # pmap has a mesh of one axis, and replicates the model also on more devices.
        way = (
            f"with {'' if FSDP in mesh.shape else '--set parallel=mesh '}--set mesh.data=1 --set mesh.fsdp={other.fsdp} "
            f"it needs {least / GB:.3g} GB"
        )
    raise UserError(
        f"{name} needs {needs / GB:.3g} GB for models, optimizer state and gradients on each device, which has "
        f"{has / GB:.3g} GB, and activations are not yet counted: {way}. python -m train.preflight finds settings that fit"
    )


MEMORY_CHECKS.add("memory", check_memory)

"""Does a run fit the memory of its devices? This is checked before any array is created."""

from dataclasses import replace

import jax
import numpy as np

from jaxgrow.axes import Tree
from train.common.errors import UserError
from train.config.experiment import Experiment
from train.plan.lifetimes import states
from train.plan.training import Train
from train.state.model import shardings

GB = 1e9


def limit() -> float | None:
    """Return the bytes of a device that XLA may use, or None if they are unknown (CPU)."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def state(experiment: Experiment, mesh: jax.sharding.Mesh) -> float:
    """Return the bytes that one device holds between steps, the maximum over the phases.

    They are the models of a phase with their optimizer states, and the gradients of the trained
    model.

    Args:
      experiment: experiment with the plan and the optimizer.
      mesh: mesh that the models are sharded over.
    """
    plan = experiment.plan
    most = 0.0
    for phase, models in zip(plan, states(plan, experiment.tx), strict=True):
        lies = {name: shardings(model, mesh) for name, model in models.items()}
        held = on_each(models, lies)
        if isinstance(phase, Train):
            held += on_each(models[phase.writes].params, lies[phase.writes].params)
        most = max(most, held)
    return most


def on_each(tree: Tree, lies: Tree) -> float:
    """Return the bytes that one device holds of a tree.

    Args:
      tree: arrays or shapes.
      lies: sharding of each leaf.
    """
    leaves = zip(jax.tree.leaves(tree), jax.tree.leaves(lies), strict=True)
    return float(
        sum(np.prod(s.shard_shape(x.shape), dtype=float) * x.dtype.itemsize for x, s in leaves)
    )


def check(experiment: Experiment, mesh: jax.sharding.Mesh) -> None:
    """Check that the models and gradients of ``experiment`` fit the memory of a device.

    Raises:
      UserError: the models and gradients that are held between steps exceed the memory of a device.
    """
    has = limit()
    if has is None or (needs := state(experiment, mesh)) <= has:
        return
    devices = list(mesh.devices.flat)
    own = experiment.mesh
    other = replace(
        own, data=1, fsdp=len(devices) // (own.replica * own.context * own.tensor * own.expert)
    )
    way = "use more devices or a smaller model"
    if (
        experiment.parallel == "mesh"
        and (least := state(replace(experiment, mesh=other), other.over(devices))) <= has
    ):
        way = f"with --set mesh.data=1 --set mesh.fsdp={other.fsdp} it needs {least / GB:.3g} GB"
    raise UserError(
        f"{experiment.name} needs {needs / GB:.3g} GB for models, optimizer state and gradients on each device, which has "
        f"{has / GB:.3g} GB, and activations are not yet counted: {way}. python -m train.preflight finds settings that fit"
    )

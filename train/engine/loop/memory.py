"""What a run keeps on every device, known before anything is made: what cannot fit is said then, with what would."""

from dataclasses import replace

import jax
import numpy as np

from jaxgrow.axes import Tree
from train.common.errors import UserError
from train.config.experiment import Experiment
from train.engine.state.model import shardings
from train.plan.lifetimes import states
from train.plan.training import Train

GB = 1e9


def limit() -> float | None:
    """Bytes that a device of this process has for XLA; None where nobody says, as of a CPU."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def state(experiment: Experiment, mesh: jax.sharding.Mesh) -> float:
    """Bytes on one device, at most over the plan: the models that are held, and the gradients of the one that trains."""
    plan, most = experiment.plan, 0.0
    for phase, models in zip(plan, states(plan, experiment.tx), strict=True):
        lies = {name: shardings(model, mesh) for name, model in models.items()}
        held = on_each(models, lies)
        if isinstance(phase, Train):
            held += on_each(models[phase.writes].params, lies[phase.writes].params)
        most = max(most, held)
    return most


def on_each(tree: Tree, lies: Tree) -> float:
    """Bytes of shapes on one device, under these shardings."""
    leaves = zip(jax.tree.leaves(tree), jax.tree.leaves(lies), strict=True)
    return float(
        sum(np.prod(s.shard_shape(x.shape), dtype=float) * x.dtype.itemsize for x, s in leaves)
    )


def check(experiment: Experiment, mesh: jax.sharding.Mesh) -> None:
    """Raises:
    UserError: what is kept between the steps alone is more than a device has.
    """
    has = limit()
    if has is None or (needs := state(experiment, mesh)) <= has:
        return
    devices = list(mesh.devices.flat)
    own = experiment.mesh
    other = replace(
        own, data=1, fsdp=len(devices) // (own.replica * own.context * own.tensor * own.expert)
    )
    way = "take more devices, or a smaller model"
    if (
        experiment.parallel == "mesh"
        and (least := state(replace(experiment, mesh=other), other.over(devices))) <= has
    ):
        way = f"with --set mesh.data=1 --set mesh.fsdp={other.fsdp} it is {least / GB:.3g} GB"
    raise UserError(
        f"{experiment.name} keeps {needs / GB:.3g} GB of models, moments and gradients on each device, which has "
        f"{has / GB:.3g} GB, before any activation: {way} (python -m train.preflight says what fits)"
    )

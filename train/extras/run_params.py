"""How does a program read the parameters of a run as NumPy arrays?"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from jaxgrow.axes import Tree
from train.common.errors import UserError
from train.plan.methods import LARGE
from train.store import intact
from train.store.checkpoint import reading_checkpoint, saved_models
from train.store.workdir import Workdir


def load_params(folder: str | Path, name: str | None = None, step: int | None = None) -> Tree:
    """Load parameters of a run, as NumPy arrays.

    Without ``name`` and ``step``, they are the final parameters of a finished run, or the
    parameters in the newest checkpoint of an unfinished one.

    Args:
      folder: folder of the run.
      name: name of the model in the checkpoint; None takes the model that the run trains.
      step: step of the checkpoint; None takes the newest one.

    Raises:
      UserError: the model or the checkpoint does not exist or is damaged.
    """
    run = Workdir(folder)
    if run.finished and name is None and step is None:
        return run.params()
    return checkpoint_params(run.checkpoints, name or LARGE, step)


def checkpoint_params(folder: Path, name: str, step: int | None = None) -> Tree:
    """Load the parameters of one model from a checkpoint, as NumPy arrays.

    Args:
      folder: folder of the checkpoints.
      name: name of the model.
      step: step of the checkpoint; None uses the newest intact one.

    Raises:
      UserError: the checkpoint or the model does not exist, or the checkpoint is damaged.
    """
    found, _ = intact.newest_intact(
        folder, [s for s in intact.checkpoint_steps(folder) if step in (None, s)]
    )
    if found is None:
        raise UserError(
            f"there is no checkpoint in {folder}"
            + (
                ""
                if step is None
                else f" of step {step}, only of {intact.checkpoint_steps(folder)}"
            )
        )
    where = str(folder / str(found))
    models = saved_models(folder / str(found))
    if name not in models:
        raise UserError(
            f"checkpoint {found} in {folder} has no model {name!r}, only {', '.join(models)}; "
            "continue the run until it has made this model"
        )
    partial = ocp.Context()
    partial.pytree.loading.partial_load = True
    with reading_checkpoint(folder / str(found)), partial:
        abstract = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), models[name]["params"])
        loaded: Any = ocp.load_checkpointables(where, {"models": {name: {"params": abstract}}})
    return loaded["models"][name]["params"]

"""What a fine-tuned model scores on the data that judge its task."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxgrow.axes import Params
from jaxgrow.interop import CheckpointError, open_checkpoint
from jaxgrow.models import Config
from train.data.labelled.encoding import Examples
from train.data.labelled.task import Labelled, task
from train.errors import UserError
from train.state.mesh import Mesh, put, rows

POSITIONS = 1 << 14  # of a batch, at most


def score(folder: Path, data: Labelled) -> dict[str, dict[str, float]]:
    """Split -> metric -> value, of the model in ``folder``, the task's own metric first.

    Raises:
      UserError: there is no such model, or it is not one of this task.
    """
    try:
        source = open_checkpoint(folder)
    except CheckpointError as error:
        raise UserError(str(error)) from error
    config: Any = source.config
    prepared = task(data, config)
    if (config.predicts, config.classes) != (prepared.head, prepared.classes):
        raise UserError(
            f"{data.task} has {prepared.head}, {prepared.classes} of them, but the model in {folder} predicts {config.predicts}"
            f"{'' if config.predicts == 'tokens' else f', {config.classes} of them'}: fine-tune it first"
        )
    mesh = Mesh().over(jax.devices())
    params = source.shard(mesh)
    return {
        name: prepared.score(name, outputs(config, params, examples, mesh)) for name, examples in prepared.valid.items()
    }


def outputs(config: Config, params: Params, examples: Examples, mesh: jax.sharding.Mesh) -> np.ndarray:
    """Of all examples, in order; the last batch is filled up with the last example."""
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    size = min(len(examples), max(1, POSITIONS // examples.length))
    size = -(-size // parts) * parts
    mine, out = rows(size, mesh), []
    with jax.set_mesh(mesh):
        for first in range(0, len(examples), size):
            chosen = np.minimum(np.arange(first, first + size), len(examples) - 1)
            inputs = [examples.sample(int(i), np.random.default_rng(0))[0] for i in chosen[mine]]
            batch = put(jax.tree.map(lambda *of: np.stack(of), *inputs), mesh)
            out.append(np.asarray(jax.device_get(_outputs(config, params, batch)))[: len(examples) - first])
    return np.concatenate(out)


@partial(jax.jit, static_argnums=0)
def _outputs(config: Config, params: Params, inputs: Any) -> Any:
    return config.module.apply({"params": params}, inputs)

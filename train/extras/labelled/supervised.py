"""The scores of a fine-tuned model on the validation data of its task."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxgrow.axes import Params
from jaxgrow.checkpoints import CheckpointError, open_checkpoint
from jaxgrow.models import Config
from jaxgrow.sharding import constrained
from train.common.errors import UserError
from train.common.output import say
from train.data.batches import Source
from train.extras.images.images import Images, images
from train.extras.labelled.metrics import accuracy
from train.extras.labelled.task import Labelled, Prepared, task
from train.state.heads import learned, order, say_notes
from train.state.mesh import Mesh, batch_devices, put, rows
from train.state.pretrained import anywhere

POSITIONS = 1 << 14  # maximum positions of a batch


def check_reads(model: Config, data: Labelled | Images) -> None:
    """Check that a model reads the kind of data of a task.

    Raises:
      UserError: the data are images and the model reads text, or the reverse.
    """
    if data.modality != model.modality:
        raise UserError(
            f"a {type(model).__name__} cannot be trained on {type(data).__name__}: give text to a text "
            "model, and images to a vision model"
        )


def prepared(data: Labelled | Images, model: Config) -> Prepared:
    """Prepare the task of labelled text or images for a model with any head.

    Raises:
      UserError: the data are missing or damaged, or the model cannot take them.
    """
    check_reads(model, data)
    if isinstance(data, Labelled):
        return task(data, model)  # type: ignore[arg-type]
    split = images(data)
    labels = np.array([split.valid.label(i) for i in range(len(split.valid))])

    def scores(outputs: np.ndarray) -> dict[str, float]:
        return {"accuracy": accuracy(outputs.argmax(-1), labels)}

    classes = split.classes
    return Prepared(
        split.train,
        {"valid": split.valid},
        "classes",
        len(classes),
        classes,
        0,
        split.identity,
        {"valid": scores},
        ("accuracy",),
    )


def score(folder: Path, data: Labelled | Images) -> dict[str, dict[str, float]]:
    """Evaluate the model in ``folder``: split -> metric -> value, the main metric first.

    Raises:
      UserError: the model does not exist, or was not trained on this task.
    """
    try:
        source = open_checkpoint(folder)
        say_notes(source)
    except CheckpointError as error:
        raise UserError(str(error)) from error
    config: Any = source.config
    wanted = prepared(data, config)
    there = learned(Path(folder))
    if (config.predicts, config.classes) != (wanted.head, wanted.classes):
        raise UserError(
            f"the task has {wanted.classes} {wanted.head}, but the model in {folder} predicts {config.predicts}"
            f"{'' if config.predicts == 'tokens' else f' ({config.classes})'}: fine-tune it first"
        )
    columns = order(there, wanted.of_head, Path(folder))
    if columns is None and wanted.labels and there.task is None:
        said = f"the classes of the model in {folder} have no names: the order {', '.join(wanted.labels)} is assumed"
        say(said, file=sys.stderr)
    mesh = Mesh().over(jax.devices())
    params = source.shard(mesh)

    def ordered(examples: Source) -> np.ndarray:
        found = outputs(config, params, examples, mesh)
        return found if columns is None else found[:, columns]

    return {name: wanted.score(name, ordered(examples)) for name, examples in wanted.valid.items()}


def validated(
    data: Labelled | Images, config: Config, params: Params, mesh: jax.sharding.Mesh
) -> dict[str, float]:
    """Score a model on the split that is used for validation during its training.

    Args:
      data: the task.
      config: the config of the model, with the head of the task.
      params: its parameters.
      mesh: the mesh that they are placed on.

    Returns:
      The metrics, the main one first.
    """
    wanted = prepared(data, config)
    name, examples = next(iter(wanted.valid.items()))
    return wanted.score(name, outputs(config, params, examples, mesh))


def outputs(
    config: Config, params: Params, examples: Source, mesh: jax.sharding.Mesh
) -> np.ndarray:
    """The outputs for all examples, in order.

    The last batch is padded with copies of the last example.
    """
    config = anywhere(config)
    parts = batch_devices(mesh)
    size = min(len(examples), max(1, POSITIONS // config.length))
    size = -(-size // parts) * parts
    mine = rows(size, mesh)
    out = []
    with jax.set_mesh(mesh):
        for first in range(0, len(examples), size):
            chosen = np.minimum(np.arange(first, first + size), len(examples) - 1)
            inputs = [examples.sample(int(i), np.random.default_rng(0))[0] for i in chosen[mine]]
            batch = put(jax.tree.map(lambda *of: np.stack(of), *inputs), mesh)
            out.append(
                np.asarray(jax.device_get(_outputs(config, params, batch)))[: len(examples) - first]
            )
    return np.concatenate(out)


@partial(jax.jit, static_argnums=0)
def _outputs(config: Config, params: Params, inputs: Any) -> Any:
    found = config.module.apply({"params": params}, inputs)
    return constrained(found, P())  # each process reads all outputs

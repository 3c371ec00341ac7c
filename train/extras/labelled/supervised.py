"""Data with a task: what a model learns from them, and its scores on the validation data."""

import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxgrow.axes import Params
from jaxgrow.checkpoints.hf.labels import label_keys
from jaxgrow.extras.head_labels import Head, read_head
from jaxgrow.models import Config
from jaxgrow.sharding import constrain_sharding
from jaxgrow.typed import Json
from train.common.errors import UserError
from train.common.output import say
from train.data.dataset import Dataset, Source
from train.extras.labelled.heads import class_order
from train.extras.pretrained import opened_model, portable_config
from train.state.mesh import Mesh, batch_devices, put, rows

POSITIONS = 1 << 14  # maximum positions of a batch


Score = Callable[[np.ndarray], dict[str, float]]


@dataclass(frozen=True)
class Prepared:
    """A task prepared for a model: ``model.with_head(head, classes)`` learns it."""

    train: Source
    valid: Mapping[str, Source]  # the first split is used for validation during training
    head: Literal["classes", "spans"]
    classes: int  # 1: the target is a number
    labels: tuple[str, ...]  # names of the classes; empty for a number or spans
    pad: int  # the padding token; no text of a decoder ends with it
    identity: Json  # JSON; identifies the data by content, not by path
    scores: Mapping[str, Score]
    metrics: tuple[str, ...]  # names of the metrics, the main one first
    task: str | None = None  # the name of a published task
    own_pad: bool = True  # whether the model has a padding token of its own, or needs none

    @property
    def of_head(self) -> Head:
        """The description of the head that learns the task."""
        return Head(self.task, self.labels)

    @property
    def settings(self) -> Json:
        """The ``config.json`` entries of a model that learned the task.

        `jaxgrow.checkpoints.save` writes them.
        """
        pad = {} if self.own_pad else {"pad_token_id": self.pad}
        return label_keys(self.labels, self.task) | pad

    def score(self, split: str, outputs: np.ndarray) -> dict[str, float]:
        """Score the outputs of a model for all examples of ``valid[split]``, in order.

        Args:
          split: a key of ``valid``.
          outputs: logits [N, classes], numbers [N, 1], or logits of starts and ends [N, length, 2].

        Returns:
          The metrics, the main one of the task first. They are from 0 to 1; correlations are from
          -1 to 1.

        Raises:
          ValueError: the outputs have another shape.
        """
        examples: Any = self.valid[split]
        shape = (len(examples), *((examples.length,) if self.head == "spans" else ()), self.classes)
        if outputs.shape != shape:
            raise ValueError(f"outputs for {split} are {outputs.shape}, but should be {shape}")
        return self.scores[split](outputs)


class Supervised(Dataset):
    """Data with a task for the head of a model."""

    @abstractmethod
    def prepared(self, model: Config) -> Prepared:
        """Prepare the task for a model with any head.

        Raises:
          UserError: the data are missing or damaged, or the model cannot take them.
        """

    def sources(self, model: Config) -> tuple[Source, dict[str, Source]]:
        prepared = self.prepared(model)
        config: Any = model
        if (config.predicts, config.classes) != (prepared.head, prepared.classes):
            raise UserError(
                f"{type(self).__name__} needs a model with head={prepared.head} and classes={prepared.classes}, but it has "
                f"head={config.predicts} and classes={config.classes}"
            )
        return prepared.train, {"": next(iter(prepared.valid.values()))}

    def identity(self, model: Config) -> Json:
        return self.prepared(model).identity

    def head(self, model: Config) -> Json:
        return self.prepared(model).settings

    def scores(self, config: Config, params: Params, mesh: jax.sharding.Mesh) -> dict[str, float]:
        """The metrics on the split that is used for validation during the training."""
        prepared = self.prepared(config)
        name, examples = next(iter(prepared.valid.items()))
        return prepared.score(name, model_outputs(config, params, examples, mesh))


def score_model(folder: Path, data: Supervised) -> dict[str, dict[str, float]]:
    """Evaluate the model in ``folder``: split -> metric -> value, the main metric first.

    Raises:
      UserError: the model does not exist, or was not trained on this task.
    """
    source = opened_model(folder)
    config: Any = source.config
    wanted = data.prepared(config)
    there = read_head(source.head)
    if (config.predicts, config.classes) != (wanted.head, wanted.classes):
        raise UserError(
            f"the task has {wanted.classes} {wanted.head}, but the model in {folder} predicts {config.predicts}"
            f"{'' if config.predicts == 'tokens' else f' ({config.classes})'}: fine-tune it first"
        )
    columns = class_order(there, wanted.of_head, Path(folder))
    if columns is None and wanted.labels and there.task is None:
        said = f"the classes of the model in {folder} have no names: the order {', '.join(wanted.labels)} is assumed"
        say(said, file=sys.stderr)
    mesh = Mesh().over(jax.devices())
    params = source.shard(mesh)

    def ordered(examples: Source) -> np.ndarray:
        found = model_outputs(config, params, examples, mesh)
        return found if columns is None else found[:, columns]

    return {name: wanted.score(name, ordered(examples)) for name, examples in wanted.valid.items()}


def model_outputs(
    config: Config, params: Params, examples: Source, mesh: jax.sharding.Mesh
) -> np.ndarray:
    """The outputs for all examples, in order.

    The last batch is padded with copies of the last example.
    """
    config = portable_config(config)
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
                np.asarray(jax.device_get(_batch_outputs(config, params, batch)))[
                    : len(examples) - first
                ]
            )
    return np.concatenate(out)


@partial(jax.jit, static_argnums=0)
def _batch_outputs(config: Config, params: Params, inputs: Any) -> Any:
    found = config.module.apply({"params": params}, inputs)
    return constrain_sharding(found, P())  # each process reads all outputs

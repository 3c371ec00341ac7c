"""What is a fine-tuning? A task, and the settings with which any model is trained on it."""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxgrow.extras.freeze import Freeze
from jaxgrow.extras.peft.lora import LoRA
from jaxgrow.layerdrop import LayerDrop
from jaxgrow.models import Adapter, Config
from train.common.errors import UserError
from train.config.experiment import UNUSED, Experiment, check_experiment, settings_errors
from train.extras.adapting import adapter_for
from train.extras.fine_tune import LOSS, METRIC, Best, FineTune
from train.extras.images.images import Images, read_images
from train.extras.images.processor import normal_in
from train.extras.labelled.heads import keeps_head, learned_head
from train.extras.labelled.supervised import Prepared
from train.extras.labelled.task import Labelled
from train.extras.pretrained import config_of
from train.extras.tokenizers.loading import name_of
from train.state.optim import Optim


@dataclass(frozen=True)
class FineTuning:
    """A task and the settings of a paper for training on it.

    The tokenizer of ``data`` is replaced by the tokenizer of the model, and its length is limited
    to the context length of the model. A model that was fine-tuned on the same task keeps its head,
    also if it was grown in between. Any other model gets a freshly initialised head.
    """

    name: str
    data: Labelled | Images
    epochs: float = 3.0
    batch: int = 32
    # Peak values. The report marks the one with the best mean over the seeds.
    learning_rates: tuple[float, ...] = (2e-5,)
    seeds: tuple[int, ...] = (0,)  # random seeds of the new head and of the order of the examples
    warmup: float = 0.1  # fraction of the steps
    optim: Optim = field(
        default_factory=lambda: Optim(schedule="linear", b2=0.999, weight_decay=0.01)
    )
    drop: LayerDrop | None = None
    freeze: Freeze | None = None
    lora: LoRA | None = None
    adapter: Adapter | None = None
    # Adapter file of an earlier run to continue from, in place of lora and adapter.
    saved: str | None = None
    accumulate: int = 1
    dropout: float = (
        0.0  # rate for the outputs of attention and MLPs (`train.extras.modifiers.DropUnits`)
    )
    # keep the best evaluation, and optionally stop early; None: keep the last one
    best: Best | None = None

    def __post_init__(self):
        for name in ("batch", "accumulate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, but is {getattr(self, name)}")
        if not 0 < self.epochs < math.inf or not 0 <= self.warmup < 1:
            raise ValueError(
                f"epochs must be positive and finite, and warmup a fraction of the steps (0 <= warmup < 1), but they are "
                f"{self.epochs} and {self.warmup}"
            )
        if (
            not self.learning_rates
            or not all(0 < rate < math.inf for rate in self.learning_rates)
            or not self.seeds
        ):
            raise ValueError(
                f"learning_rates must be positive, and there must be seeds, but they are {self.learning_rates} and {self.seeds}"
            )
        for name in ("learning_rates", "seeds"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ValueError(
                    f"{name} must be different, because a repeated run is not a replication, but they are {values}"
                )
        for name, own in (("peak_lr", "learning_rates"), ("warmup", "warmup")):
            if getattr(self.optim, name) != getattr(Optim, name):
                raise ValueError(
                    f"optim.{name}={getattr(self.optim, name)} has no effect on a fine-tuning: set {own}, and leave out "
                    f"optim.{name}"
                )
        if self.lora is not None and self.adapter is not None:
            raise ValueError(
                "a fine-tuning trains a LoRA or an adapter, not both: leave out lora or adapter"
            )
        if self.saved is not None and (self.lora or self.adapter):
            raise ValueError(
                "a saved file contains the settings of its adapter: give only saved, and leave out lora and adapter"
            )

    def of(self, folder: Path, learning_rate: float, seed: int) -> Experiment:
        """Return the run that fine-tunes the model in ``folder``.

        Args:
          folder: folder of the model.
          learning_rate: peak learning rate.
          seed: random seed of the new head and of the order of the examples.

        Raises:
          UserError: the model does not exist, it cannot learn the task, or the settings do not fit
            together or do not fit the model.
        """
        config = config_of(folder)
        data = self.data
        length = None
        data.check_modality(config)
        if isinstance(data, Labelled):
            length = min(data.length, config.length)
            data = replace(data, tokenizer=name_of(folder), length=length)
        else:
            data = _as_before(data, folder, config)
        task = data.prepared(config)
        saved = None if self.saved is None else str(Path(self.saved).expanduser().resolve())
        adapter = self.lora or self.adapter if saved is None else adapter_for(saved, config)[0]
        own: Any = {"dropout": self.dropout, "best": self._best(task)}
        own |= {"lora" if isinstance(adapter, LoRA) else "adapter": adapter, "saved": saved}
        inputs, _ = task.train.sample(0, np.random.default_rng(0))
        examples = len(next(iter(task.valid.values())))
        each = len(task.train) / self.batch
        with settings_errors(f"{self.name} with the model in {folder}"):
            model = config.for_task(task.head, task.classes, inputs)
            new = model != config or not keeps_head(learned_head(folder), task.of_head, task.head)
            steps = max(1, round(self.epochs * each))
            experiment = Experiment(
                name=f"{self.name}-{folder.name}-lr{learning_rate:g}",
                model=model,
                steps=steps,
                batch=self.batch,
                data=data,
                optim=replace(self.optim, peak_lr=learning_rate, warmup=round(self.warmup * steps)),
                method=FineTune(str(folder), new, length, self.drop, self.freeze, **own),
                accumulate=self.accumulate,
                seed=seed,
                eval_every=max(1, round(each)),
                eval_batches=max(1, (examples - self._probed) // self.batch),
                checkpoint_every=max(1, round(each)),
            )
            check_experiment(experiment)
            # Only its own settings: the model has those of the checkpoint, such as a tied head.
            UNUSED["settings"](self, experiment.plan, {"optim.decay"})
        return experiment

    @property
    def _probed(self) -> int:
        """The number of validation examples that measure sensitivities, and are not evaluated."""
        s = self.drop and self.drop.sensitivity
        return s.batches * (self.batch // self.accumulate) if s else 0

    def _best(self, task: Prepared) -> Best | None:
        """Return ``best`` with its number of evaluations, after a check of its metric."""
        best = self.best
        if best is None:
            return None
        if best.by not in (LOSS, METRIC, *task.metrics):
            raise UserError(
                f"best.by is {best.by!r}, but the metrics of {self.name} are {', '.join(task.metrics)}; "
                f"choose one of them, {METRIC} (the first one), or {LOSS}"
            )
        return replace(best, evaluations=best.evaluations or max(1, round(self.epochs)))


def _as_before(data: Images, folder: Path, config: Config) -> Images:
    """Return the images with the channels and the normalisation of the training of the model."""
    channels = config.integers()["channels"]
    if read_images(data).shape[2] != channels:
        data = replace(data, channels=channels)
    normal = normal_in(folder)
    return data if data.mean or normal is None else replace(data, mean=normal.mean, std=normal.std)

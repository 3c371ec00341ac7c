"""What a fine-tuning is: a task, and how any model is trained on it."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from jaxgrow.drop import LayerDrop
from jaxgrow.freeze import Freeze
from jaxgrow.lora import LoRA
from jaxgrow.models import TextConfig
from train.data.labelled.task import Labelled, task
from train.data.text import name_of
from train.errors import UserError
from train.experiment import Experiment
from train.plan.methods import FineTune
from train.state.opened import config_of
from train.state.optim import Optim


@dataclass(frozen=True)
class FineTuning:
    """A task, and a paper's way of training on it. The tokenizer of ``data`` is the model's, its length at most the model's."""

    name: str
    data: Labelled
    epochs: float = 3.0
    batch: int = 32
    rates: tuple[float, ...] = (2e-5,)  # peak rates: the one whose mean over the seeds is best is told
    seeds: tuple[int, ...] = (0,)  # of the new head, and of the order of the examples
    warmup: float = 0.1  # of the steps
    optim: Optim = field(default_factory=lambda: Optim(schedule="linear", b2=0.999, weight_decay=0.01))
    drop: LayerDrop | None = None
    freeze: Freeze | None = None
    lora: LoRA | None = None
    accumulate: int = 1

    def __post_init__(self):
        if not self.epochs > 0 or not 0 <= self.warmup < 1:
            raise ValueError(
                f"epochs are positive and warmup a part of the steps, but they are {self.epochs}, {self.warmup}"
            )
        if not self.rates or not all(rate > 0 for rate in self.rates) or not self.seeds:
            raise ValueError(f"there must be positive rates, and seeds, but they are {self.rates} and {self.seeds}")

    def of(self, folder: Path, rate: float, seed: int) -> Experiment:
        """The run of the model in ``folder`` with one rate and seed.

        Raises:
          UserError: there is no such model, or it cannot learn the task.
        """
        config = config_of(folder)
        if not isinstance(config, TextConfig):
            raise UserError(f"{folder} is a {type(config).__name__}, but {self.data.task} is a task of text")
        data = replace(self.data, tokenizer=name_of(folder), length=min(self.data.length, config.length))
        prepared = task(data, config)
        each = len(prepared.train) / self.batch
        steps = max(1, round(self.epochs * each))
        return Experiment(
            name=f"{self.name}-{folder.name}-lr{rate:g}",
            model=config.with_head(prepared.head, prepared.classes),
            steps=steps,
            batch=self.batch,
            data=data,
            optim=replace(self.optim, peak_lr=rate, warmup=round(self.warmup * steps)),
            method=FineTune(str(folder), data.length, self.drop, self.freeze, self.lora),
            accumulate=self.accumulate,
            seed=seed,
            eval_every=max(1, round(each)),
            eval_batches=max(1, len(next(iter(prepared.valid.values()))) // self.batch),
            checkpoint_every=max(1, round(each)),
        )

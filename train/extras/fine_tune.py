"""The method that trains an existing model on a task, and keeps its best evaluation."""

import itertools
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import optax

from jaxgrow.extras.freeze import Freeze
from jaxgrow.extras.peft.lora import LoRA
from jaxgrow.layerdrop import LayerDrop
from jaxgrow.models import Adapter, Config
from train.common.fields import GIVEN
from train.extras.adapting import Adapt
from train.extras.modifiers import DropUnits, FreezeParts
from train.plan.lifetimes import Plan
from train.plan.methods import LARGE, METHODS, Method
from train.plan.modifiers import DropLayers, train_phases
from train.plan.phase import Context, Models, Phase
from train.plan.training import Modifier, Train, keep_trained
from train.plan.transforms import Apply, LoadCheckpoint
from train.state.model import TrainState, placed
from train.state.optim import Optim

KEPT = "best"  # name of the copy in the plan
METRIC = "metric"
LOSS = "val_loss"


@dataclass(frozen=True)
class Best:
    """When to keep the parameters, and when to stop.

    Attributes:
      by: number that decides. ``metric`` is the main metric of the task, such as the Matthews
        correlation for CoLA. The name of another metric of the task, such as ``macro_f1``, is also
        possible; the greatest value is the best one. For ``val_loss``, the smallest value is the
        best one.
      patience: number of evaluations in a row without improvement after which training stops; None:
        training never stops early.
      evaluations: number of evaluations, evenly spaced; None: one for each epoch.
    """

    by: str = METRIC
    patience: int | None = None
    evaluations: int | None = None

    def __post_init__(self):
        for name in ("patience", "evaluations"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"best.{name} must be at least 1, but is {value}")

    def better(self, new: float, old: float) -> bool:
        return new < old if self.by == LOSS else new > old


@dataclass(frozen=True)
class KeepBest(Phase):
    """Keeps a copy of the model ``name`` if its last evaluation is the best one so far."""

    judges = True

    name: str
    best: Best

    @property
    def reads(self) -> tuple[str, ...]:
        return (KEPT,)

    @property
    def looks_at(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def writes(self) -> str:
        return KEPT

    def shapes(self, models: Models, tx: optax.GradientTransformation) -> TrainState:
        return replace(models[self.name], opt=None)

    def run(self, context: Context) -> TrainState:
        value = self._value(context)
        before = context.best
        if not before or self.best.better(value, before["value"]):
            found = {"value": value, "validation": dict(context.validation)}
            context.best = found | {"waited": 0}
            return context.compute(self, _copied, replace(context.models[self.name], opt=None))[0]
        context.best = before | {"waited": before["waited"] + 1}
        return context.models[KEPT]

    def _value(self, context: Context) -> float:
        """Return the number that decides."""
        if self.best.by == LOSS:
            return context.validation[LOSS]
        scores = context.scores(context.models[self.name])
        return next(iter(scores.values())) if self.best.by == METRIC else scores[self.best.by]

    def stops(self, context: Context) -> bool:
        return self.best.patience is not None and context.best["waited"] >= self.best.patience


@dataclass(frozen=True)
class TakeBest(Phase, writes="name"):
    """Replaces the model ``name`` by the copy that `KeepBest` kept."""

    name: str
    after_early_stop = True

    @property
    def reads(self) -> tuple[str, ...]:
        return (KEPT,)

    def shapes(self, models: Models, tx: optax.GradientTransformation) -> TrainState:
        return models[KEPT]

    def run(self, context: Context) -> TrainState:
        model, _ = context.compute(self, _copied, context.models[KEPT])
        context.validation = context.best["validation"]
        keep_trained(context, model)
        return model


def _copied(phase: Phase, tx: optax.GradientTransformation, model: TrainState) -> TrainState:
    return placed(jax.tree.map(jnp.copy, model))


@dataclass(frozen=True)
class FineTune(Method):
    """Train an existing model on a task."""

    source: str  # folder of the model, as in `train.plan.transforms.LoadCheckpoint`
    # Whether to initialise a new head. False: the model already has the head of the task from an
    # earlier fine-tuning, perhaps grown in between.
    new_head: bool = True
    length: int | None = None  # positions of a sample; None: the context length of the model
    drop: LayerDrop | None = None
    freeze: Freeze | None = None
    # Trained with the head while the body is frozen, and merged into the body at the end.
    lora: LoRA | None = None
    # Trained with the head while the body is frozen, and then part of the model.
    adapter: Adapter | None = None
    saved: str | None = None  # adapter file of an earlier run to continue from
    dropout: float = 0.0  # rate, as in `train.extras.modifiers.DropUnits`
    # Keep the best evaluation; None: keep the last one.
    best: Best | None = None

    # The choices that use a field (`train.extras.effect`).
    used_with = {"saved": ({"lora": GIVEN}, {"adapter": GIVEN})}

    def __post_init__(self):
        if self.best is not None and self.drop is not None and self.drop.sensitivity is not None:
            raise ValueError(
                "best is not supported together with sensitivities, because both divide the training into "
                "phases: leave out best or the sensitivities"
            )
        given = [name for name in ("lora", "adapter", "freeze") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(
                f"a LoRA or an adapter freezes the rest of the body: leave out {', or '.join(reversed(given))}"
            )

    def plan(self, model: Config, optim: Optim, steps: int) -> Plan:
        if optim.base is not None:
            raise ValueError(
                "optim.base is for pre-training, and does not apply to a new head or an adapter: leave optim.base out"
            )
        modifiers: list[Modifier] = []
        if self.freeze is not None:
            modifiers.append(FreezeParts(self.freeze))
        if self.dropout:
            modifiers.append(DropUnits(self.dropout))
        if self.drop is not None:
            modifiers.append(DropLayers(self.drop))
        source = LoadCheckpoint(LARGE, model, self.source, self.new_head)
        adapter = self.lora or self.adapter
        kind = Train if adapter is None else partial(Adapt, adapter=adapter, saved=self.saved)
        trained = train_phases(LARGE, steps, optim, model, tuple(modifiers), self.length, kind)
        phases = (source, *(trained if self.best is None else _with_best(trained, self.best)))
        return phases if adapter is None else (*phases, Apply(LARGE, LARGE))


def _with_best(trained: tuple[Phase, ...], best: Best) -> tuple[Phase, ...]:
    """Split one training at its evaluations."""
    (phase,) = trained
    assert isinstance(phase, Train)
    parts = min(best.evaluations or 1, max(1, phase.steps))
    cuts = [round(i * phase.steps / parts) for i in range(parts + 1)]
    phases: list[Phase] = []
    for begin, until in itertools.pairwise(cuts):
        phases += [replace(phase, begin=begin, until=until), KeepBest(LARGE, best)]
    return (*phases, TakeBest(LARGE))


METHODS.add("FineTune", FineTune)

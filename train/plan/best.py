"""How does a training keep the parameters of its best evaluation, and stop early?"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import optax

from train.extras.adapting import keep_adapter
from train.plan.phase import Context, Models, Phase
from train.state.model import TrainState

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
        if model.made is not None:
            keep_adapter(context, model)
        return model


def _copied(phase: Phase, tx: optax.GradientTransformation, model: TrainState) -> TrainState:
    return jax.tree.map(jnp.copy, model)

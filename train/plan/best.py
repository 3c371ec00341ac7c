"""How does a training keep the parameters of its best evaluation, and stop early?"""

from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from train.engine.state.model import Model
from train.plan.adapting import keep_adapter
from train.plan.phase import Context, Models, Phase

KEPT = "best"  # name of the copy in the plan


@dataclass(frozen=True)
class Best:
    """When to keep the parameters, and when to stop.

    Attributes:
      by: metric that decides: the smallest ``val_loss``, or the greatest ``val_accuracy``.
      patience: number of evaluations in a row without improvement after which training stops; None:
        training never stops early.
      evaluations: number of evaluations, evenly spaced; None: one for each epoch.
    """

    by: Literal["val_loss", "val_accuracy"] = "val_loss"
    patience: int | None = None
    evaluations: int | None = None

    def __post_init__(self):
        for name in ("patience", "evaluations"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"best.{name} must be at least 1, but is {value}")

    def better(self, new: float, old: float) -> bool:
        return new < old if self.by == "val_loss" else new > old


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

    def shapes(self, models: Models, tx: optax.GradientTransformation) -> Model:
        return replace(models[self.name], opt=None)

    def run(self, context: Context) -> Model:
        value, before = context.validation[self.best.by], context.best
        if not before or self.best.better(value, before["validation"][self.best.by]):
            context.best = {"validation": dict(context.validation), "waited": 0}
            return context.compute(self, _copied, replace(context.models[self.name], opt=None))[0]
        context.best = before | {"waited": before["waited"] + 1}
        return context.models[KEPT]

    def stops(self, context: Context) -> bool:
        return self.best.patience is not None and context.best["waited"] >= self.best.patience


@dataclass(frozen=True)
class TakeBest(Phase):
    """Replaces the model ``name`` by the copy that `KeepBest` kept."""

    name: str
    after_early_stop = True

    @property
    def reads(self) -> tuple[str, ...]:
        return (KEPT,)

    @property
    def writes(self) -> str:
        return self.name

    def shapes(self, models: Models, tx: optax.GradientTransformation) -> Model:
        return models[KEPT]

    def run(self, context: Context) -> Model:
        model, _ = context.compute(self, _copied, context.models[KEPT])
        context.validation = context.best["validation"]
        if model.made is not None:
            keep_adapter(context, model)
        return model


def _copied(phase: Phase, tx: optax.GradientTransformation, model: Model) -> Model:
    return jax.tree.map(jnp.copy, model)

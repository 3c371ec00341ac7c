"""Which models are still needed after each phase of a plan? A plan is a tuple of phases."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeAlias

import jax
import optax

from train.plan.phase import Phase
from train.state.model import TrainState

Plan: TypeAlias = tuple[Phase, ...]


def live(plan: Plan, done: int) -> set[str]:
    """Return the final model, and the models that the phases after the first ``done`` read."""
    names = {plan[-1].writes}
    for phase in reversed(plan[done:]):
        names.discard(phase.writes)
        names |= {*phase.reads, *phase.looks_at}
    return names


def after(
    plan: Plan, i: int, models: dict[str, TrainState], result: TrainState
) -> dict[str, TrainState]:
    """Return the models that are still needed after phase ``i``, including its ``result``.

    A phase consumes the optimizer state of the models that it reads. If such a model is kept, only
    its parameters, and perhaps their average, take memory. The models that a phase needs until its end are kept as well, so
    that the returned models are also the content of a checkpoint in the middle of the phase.
    """
    phase = plan[i]
    kept = live(plan, i + 1) | set(phase.needs)
    out = {
        **models,
        **{name: replace(models[name], opt=None) for name in phase.reads if name in models},
    }
    out[phase.writes] = result
    return {name: model for name, model in out.items() if name in kept}


def states(plan: Plan, tx: optax.GradientTransformation) -> Iterator[dict[str, TrainState]]:
    """Yield the models after each phase, as shapes. A checkpoint at this moment contains them."""
    models: dict[str, TrainState] = {}
    for i, phase in enumerate(plan):
        result = jax.eval_shape(lambda models, phase=phase: phase.shapes(models, tx), models)
        models = after(plan, i, models, result)
        yield models


def shapes(plan: Plan, done: int, tx: optax.GradientTransformation) -> dict[str, TrainState]:
    """Return the models after the first ``done`` phases, as shapes."""
    return next(itertools.islice(states(plan, tx), done - 1, None)) if done else {}

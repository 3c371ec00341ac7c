"""A plan is a tuple of phases. What is still needed after each of them, whatever they do."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeAlias

import jax
import optax

from train.engine.state.model import Model
from train.plan.phase import Phase

Plan: TypeAlias = tuple[Phase, ...]


def live(plan: Plan, done: int) -> set[str]:
    """The models that phases after the first ``done`` still read, and the one that the plan is for."""
    names = {plan[-1].writes}
    for phase in reversed(plan[done:]):
        names.discard(phase.writes)
        names |= {*phase.reads, *phase.looks_at}
    return names


def after(plan: Plan, i: int, models: dict[str, Model], result: Model) -> dict[str, Model]:
    """The models after phase ``i``, which gave ``result``: those that are still needed.

    A phase uses up the optimizer state of what it reads, so that a model that is kept costs its
    parameters only. What it needs until its end is kept, too: this is also what a checkpoint in its
    middle holds.
    """
    phase = plan[i]
    kept = live(plan, i + 1) | set(phase.needs)
    out = {
        **models,
        **{name: replace(models[name], opt=None) for name in phase.reads if name in models},
    }
    out[phase.writes] = result
    return {name: model for name, model in out.items() if name in kept}


def states(plan: Plan, tx: optax.GradientTransformation) -> Iterator[dict[str, Model]]:
    """The models after each phase in turn, as shapes: what a checkpoint of that moment holds."""
    models: dict[str, Model] = {}
    for i, phase in enumerate(plan):
        made = jax.eval_shape(lambda models, phase=phase: phase.shapes(models, tx), models)
        models = after(plan, i, models, made)
        yield models


def shapes(plan: Plan, done: int, tx: optax.GradientTransformation) -> dict[str, Model]:
    """Those after the first ``done`` phases."""
    return next(itertools.islice(states(plan, tx), done - 1, None)) if done else {}

"""The programs that runs are made of, each compiled once in a process for all runs that do the same.

What decides a program is an argument here; what differs between runs that share it (seed, learning rate, number of steps) is
an argument of the program.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from train.optim import Optim
from train.parallel import AXIS, How, mapped
from train.plan import Train, Transform
from train.step import Model, Passes, eval_step, train_step
from train.transforms import Models


@cache
def step(tx: optax.GradientTransformation, accumulate: int, passes: Passes, parallel: How) -> Callable:
    """The mapped train step; it takes the place of the model that it is given."""
    return mapped(train_step(tx, accumulate, AXIS, passes), parallel, donate=True)


@cache
def evaluation(parallel: How) -> Callable:
    return mapped(eval_step(AXIS), parallel)


def start(phase: Train, tx: optax.GradientTransformation, models: Models, key: jax.Array) -> jax.stages.Lowered:
    """``(models, key) -> model``: what ``phase`` begins with, sharing no memory with ``models``, for it will be donated."""
    rest = {name: None for name in ("until", "drop", "tokens", "freeze", "teacher", "rewarm")}
    same = replace(phase, steps=0, begin=0, optim=Optim(), **rest)  # what its steps are is no matter at its start
    return _start.lower(same, tx, models, key)


@partial(jax.jit, static_argnums=(0, 1))
def _start(phase: Train, tx: optax.GradientTransformation, models: Models, key: jax.Array) -> Model:
    return jax.tree.map(jnp.copy, phase.start(models, tx, key))


@partial(jax.jit, static_argnums=(0, 1))
def transformed(phase: Transform, tx: optax.GradientTransformation, models: Models, held_out: Any) -> Model:
    return phase.run(models, tx, held_out)  # type: ignore[operator]  # an Import is read, not run


norm = jax.jit(optax.tree.norm)


def forget() -> None:
    """Drops every program: for those who change what compiling means in between."""
    for made in (step, evaluation):
        made.cache_clear()
    for jitted in (_start, transformed, norm):
        jitted.clear_cache()  # type: ignore[attr-defined]

"""The programs that runs are made of, each compiled once in a process for all runs that do the same.

What decides a program is an argument here; what differs between runs that share it (seed, learning
rate, number of steps) is an argument of the program.
"""

from collections.abc import Callable
from functools import cache, partial

import jax
import optax
from jax.sharding import Mesh

from train.engine.loop.parallel import mapped
from train.engine.loop.step import eval_step, train_step
from train.engine.state.mesh import How
from train.engine.state.model import Model, placed
from train.plan.modifiers import Modifier
from train.plan.phase import Phase


@cache
def step(
    tx: optax.GradientTransformation,
    accumulate: int,
    modifiers: tuple[Modifier, ...],
    how: How,
    mesh: Mesh,
    once: bool = False,
) -> Callable:
    """The mapped train step; it takes the place of the model that it is given."""
    return mapped(partial(train_step, tx, accumulate, modifiers, once=once), how, mesh, donate=True)


@cache
def evaluation(accumulate: int, how: How, mesh: Mesh) -> Callable:
    return mapped(partial(eval_step, accumulate), how, mesh)


@cache
def made(
    function: Callable[..., Model], phase: Phase, tx: optax.GradientTransformation
) -> jax.stages.Wrapped:
    """``function(phase, tx, ...)``: what a phase makes of models, where it belongs on the mesh."""
    return jax.jit(lambda *arguments: placed(function(phase, tx, *arguments)))


norm = jax.jit(optax.tree.norm)

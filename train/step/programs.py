"""The compiled programs of runs. Each one is compiled once per process and shared between runs.

The arguments of these functions decide which program is compiled. Values that differ between runs
that share a program (seed, learning rate, number of steps) are arguments of the program itself.
"""

from collections.abc import Callable
from functools import cache, partial

import jax
import optax
from jax.sharding import Mesh

from train.plan.phase import Phase
from train.plan.training import Modifier
from train.state.mesh import How
from train.state.model import TrainState, placed
from train.step import xla
from train.step.parallel import mapped
from train.step.step import eval_step, packed_step


@cache
def step(
    tx: optax.GradientTransformation,
    accumulate: int,
    modifiers: tuple[Modifier, ...],
    how: How,
    mesh: Mesh,
    once: bool = False,
    skip: bool = False,
) -> Callable:
    """Return the mapped train step of a `Packed` model. It donates the model that it gets."""
    make = partial(packed_step, tx, accumulate, modifiers, once=once, skip=skip)
    return mapped(make, how, mesh, donate=True)


@cache
def evaluation(accumulate: int, how: How, mesh: Mesh) -> Callable:
    return mapped(partial(eval_step, accumulate), how, mesh)


# Settings of a training -> the run that first used them in this process, and the seconds that it
# spent on compiling them.
_USED: dict[tuple[object, ...], tuple[object, float]] = {}


def unused(*about: object) -> bool:
    """Return whether this process has not yet trained with these settings, so that it compiles.

    The answer is only for the screen.
    """
    return about not in _USED


def shared_seconds(run: object, seconds: float, *about: object) -> float:
    """Return the seconds that another run of this process spent on compiling these settings.

    Args:
      run: identity of this run.
      seconds: seconds that this run spent on compiling them.
      *about: the settings, as for `unused`.
    """
    first, spent = _USED.setdefault(about, (run, seconds))
    return 0.0 if first == run else spent


@cache
def made(
    function: Callable[..., TrainState],
    phase: Phase,
    tx: optax.GradientTransformation,
    donate: bool = False,
) -> jax.stages.Wrapped:
    """Return the jitted ``function(phase, tx, ...)``, which makes the model of a phase.

    With ``donate``, the model may reuse the memory of the first argument.
    """
    return jax.jit(
        lambda *arguments: function(phase, tx, *arguments),
        donate_argnums=(0,) if donate else (),
        compiler_options=xla.options_once() or None,
    )


norm = jax.jit(optax.tree.norm)
# Moves the arrays of a model to the devices that its sizes determine.
reshard = jax.jit(placed)

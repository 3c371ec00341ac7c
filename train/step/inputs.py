"""What changes from step to step: the inputs of the step, its cost, and its values in the log."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from train.plan.phase import LogValue
from train.plan.training import PhaseStart, Train
from train.state.model import TrainState
from train.state.optim import learning_rate
from train.step.step import StepInputs


@dataclass(frozen=True)
class StepPlan:
    """Inputs, cost and log values of one step, known to the host before it dispatches the step."""

    inputs: StepInputs
    flops: float
    layers: float  # number of layers that the step runs
    log: dict[str, LogValue]  # logged values besides the loss


def step_plans(
    phase: Train, model: TrainState, setting: PhaseStart
) -> Callable[[int, int], StepPlan]:
    """Return a function ``(step of the phase, step of the run) -> StepPlan``.

    Args:
      phase: phase of training, with its modifiers.
      model: model at the beginning of the phase; modifiers may read its values.
      setting: settings of the run that modifiers depend on.
    """
    sources = [modifier.step_inputs(phase, model, setting) for modifier in phase.modifiers]
    tokens = setting.samples * phase.length
    fixed = phase.fixed_flops(setting.accumulate)

    # Every step needs the cost, but only a few numbers of layers occur.
    @cache
    def cost(layers: float) -> float:
        return phase.flops(tokens, layers, setting.at_once(tokens))

    def at(step: int, number: int) -> StepPlan:
        lr = learning_rate(phase.optim, phase.steps, step)
        given = [source(step) for source in sources]
        layers = next((g.layers for g in given if g.layers is not None), phase.config.depth)
        flops = cost(layers) + fixed + sum(g.flops for g in given)
        log = {"lr": lr, "layers": layers}
        for g in given:
            log |= g.log
        inputs = StepInputs(
            np.float32(lr),
            np.uint32(number),
            np.uint32(setting.seed),
            tuple(g.inputs for g in given),
            np.float32(phase.optim.ema) if phase.optim.ema else None,
        )
        return StepPlan(inputs, flops, layers, log)

    return at

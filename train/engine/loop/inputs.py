"""What changes each step, as one value: its arguments, what it costs, what its line in the log says."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from train.engine.loop.step import StepInputs
from train.engine.state.model import Model
from train.engine.state.optim import learning_rate
from train.plan.modifiers import Setting
from train.plan.training import Train


@dataclass(frozen=True)
class StepPlan:
    """One step, as the host knows it before it is sent."""

    inputs: StepInputs
    flops: float
    layers: float  # that it runs
    log: dict[str, Any]  # beside the loss


def step_plans(phase: Train, model: Model, setting: Setting) -> Callable[[int, int], StepPlan]:
    """``(step of the phase, step of the run) -> StepPlan``."""
    sources = [modifier.begin(phase, model, setting) for modifier in phase.modifiers]
    tokens = setting.samples * phase.length

    def at(step: int, number: int) -> StepPlan:
        lr = learning_rate(phase.optim, phase.steps, step)
        given = [source(step) for source in sources]
        layers = next((g.layers for g in given if g.layers is not None), phase.config.depth)
        flops = (
            phase.flops(tokens, layers, setting.at_once(tokens))
            + phase.fixed_flops
            + sum(g.flops for g in given)
        )
        log = {"lr": lr, "layers": layers} | {name: x for g in given for name, x in g.log.items()}
        inputs = StepInputs(
            np.float32(lr),
            np.uint32(number),
            np.uint32(setting.seed),
            tuple(g.inputs for g in given),
        )
        return StepPlan(inputs, flops, layers, log)

    return at

"""Residual branches whose scale increases during training.

The scales are right, the growth is function-preserving if new layers start at zero, and the plain
program runs after the ramp.
"""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
import runs
import tiny

from jaxgrow import grow, operators
from jaxgrow.layerdrop import LayerDrop, TokenDrop
from train.data.windows import next_tokens
from train.extras.modifiers import DropUnits, Ramp
from train.plan.modifiers import DropLayers, DropTokens
from train.plan.training import NOTHING, PhaseStart, Train
from train.state.model import TrainState
from train.state.optim import Optim
from train.step.step import gradients

OPTIM = Optim(warmup=1)
SETTING = PhaseStart({}, 0, 8, 1, 0)


def given(steps, at):
    config = replace(runs.MODEL, layers=len(steps))
    phase = Train("large", 100, OPTIM, config, (Ramp(steps),))
    return phase.modifiers[0].step_inputs(phase, TrainState(None, None, config), SETTING)(at)


def test_the_branches_of_each_layer_by_hand():
    """ProRes uses ``min(1, t / (T l))``; a layer with 0 steps has scale 1 from the start."""
    at = given((4, 8, 12, 0), 6)
    np.testing.assert_allclose(at.inputs.scale, [1, 6 / 8, 6 / 12, 1])
    assert (
        at.inputs.layers is None
        and at.inputs.scaling == "sublayer"
        and at.layers is None
        and at.flops == 0
    )
    np.testing.assert_allclose(given((4, 8, 12, 0), 0).inputs.scale, [0, 0, 0, 1])
    assert given((4, 8, 12, 0), 12) is NOTHING  # the plain step without scales


def test_a_ramped_growth_starts_as_the_old_model():
    small, batch = (
        runs.MODEL,
        next_tokens(np.random.default_rng(0).integers(0, 256, (8, 9)).astype(np.int32)),
    )
    growth = operators.mslt(small.sizes(), {"layers": 4})
    params, large = runs.fresh(small), small.resized(growth)
    grown = grow(growth, params, small.axes())

    @partial(jax.jit, static_argnums=(0, 2))
    def loss(config, params, modifier=None, inputs=None):
        pairs = [(modifier, inputs)] if modifier else []
        return gradients(
            TrainState(params, None, config), batch, np.arange(8), np.uint32(0), 1, pairs
        )

    ramp = Ramp((0, 0, 5, 5))
    at = ramp.step_inputs(
        Train("large", 100, OPTIM, large, (ramp,)), TrainState(None, None, large), SETTING
    )
    before, _ = loss(small, params)
    after, _ = loss(large, grown, ramp, at(0).inputs)
    whole, _ = loss(large, grown)
    np.testing.assert_allclose(after, before, rtol=1e-6)
    assert abs(whole - before) > 1e-5  # control: copies without a ramp change the loss
    _, moved = loss(large, grown, ramp, at(1).inputs)
    for name, g, _ in tiny.pairs(moved, moved):
        # the gradient of the key bias is always zero
        if "blocks" in name and "key/bias" not in name:
            assert all(np.abs(g[layer]).max() > 0 for layer in range(4)), name


@pytest.mark.parametrize(
    ("modifiers", "says"),
    [
        ((Ramp((1,)),), r"a number of steps, 0 or more, for each of 2 layers, but is \(1,\)"),
        ((Ramp((1, -1)),), "a number of steps, 0 or more, for each of 2 layers"),
        ((Ramp((1, 2)), DropLayers(LayerDrop())), "not supported together with dropped layers"),
        (
            (Ramp((1, 2)), DropTokens(TokenDrop(0.5, 1, 0))),
            "not supported together with dropped layers or tokens",
        ),
        ((DropUnits(0.1), Ramp((1, 2))), "dropout is not supported together with"),
    ],
)
def test_what_does_not_fit_is_refused(modifiers, says):
    with pytest.raises(ValueError, match=says):
        Train("large", 8, OPTIM, runs.MODEL, modifiers)

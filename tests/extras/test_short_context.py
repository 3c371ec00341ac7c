"""Samples split into windows train and cost the same as separate short samples."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
import runs

from jaxgrow import flops
from jaxgrow.layerdrop import TokenDrop
from train.data.windows import next_tokens
from train.extras.modifiers import ShortContext
from train.plan.methods import Growing, GrowTo, TrainStage
from train.plan.modifiers import DropTokens
from train.plan.training import PhaseStart, Train
from train.state.model import TrainState
from train.state.optim import Optim
from train.step.inputs import step_plans
from train.step.step import gradients

OPTIM = Optim(warmup=1)


def test_a_step_is_that_of_the_windows_as_samples():
    tokens = np.random.default_rng(0).integers(0, 256, (4, runs.MODEL.context + 1)).astype(np.int32)
    inputs, targets = next_tokens(tokens)
    model = TrainState(runs.fresh(runs.MODEL), None, runs.MODEL)
    # the order differs
    shorter = tuple(np.concatenate(np.split(x, 4, axis=1)) for x in (inputs, targets))

    def of(batch, *modifiers):
        pairs, rows = [(m, None) for m in modifiers], np.arange(len(batch[0]))
        return jax.jit(lambda model, batch: gradients(model, batch, rows, np.uint32(0), 1, pairs))(
            model, batch
        )

    found, moved = of((inputs, targets), ShortContext(4))
    expected, by = of(shorter)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), moved, by)
    assert abs(found - of((inputs, targets))[0]) > 1e-5  # control: complete samples differ


def test_a_run_costs_what_its_windows_do(tmp_path):
    to = GrowTo((TrainStage(0.5, warmup=0),), by=("interleave",), moments="copy")
    method = Growing(runs.MODEL, TrainStage(0.5, modifiers=(ShortContext(2),)), (to,))
    e = runs.experiment(tmp_path, method=method)
    each = e.batch * runs.MODEL.context
    short, whole = (
        flops.train_flops(runs.MODEL, each, runs.MODEL.context // parts) for parts in (2, 1)
    )
    trained = [p for p in e.plan if isinstance(p, Train)]
    assert [p.cost(e.batch) for p in trained] == [
        short * e.steps / 2,
        whole * e.steps / 2,
    ] and short < whole
    counted = step_plans(
        trained[0], TrainState(None, None, runs.MODEL), PhaseStart({}, 0, e.batch, 1, 0)
    )(0, 0)
    assert counted.flops == short


@pytest.mark.parametrize(
    ("config", "modifiers", "says"),
    [
        (runs.MODEL, (ShortContext(3),), "cannot be cut into 3 equal windows"),
        (
            replace(runs.MODEL, head="classes"),
            (ShortContext(2),),
            "not for a GPT2Config that predicts classes",
        ),
        (
            runs.LARGE,
            (DropTokens(TokenDrop(0.5)), ShortContext(2)),
            "token dropping is not supported together with a short context",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(config, modifiers, says):
    with pytest.raises(ValueError, match=says):
        Train("large", 8, OPTIM, config, modifiers)

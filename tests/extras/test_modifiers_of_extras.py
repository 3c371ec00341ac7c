"""Ramped residual branches, short contexts, and the re-warm-up of new entries."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import chex
import jax
import numpy as np
import pytest
import runs
import tiny

from jaxgrow import flops, grow, operators
from jaxgrow.extras.token_dropping import TokenDrop
from jaxgrow.growth.moments import clock
from jaxgrow.layerdrop import LayerDrop
from train import pretrain
from train.config.experiment import check_experiment
from train.data.windows import next_tokens
from train.extras.modifiers import DropTokens, DropUnits, Ramp, Rewarm, ShortContext
from train.plan.methods import Growing, GrowTo, Scratch, TrainStage, VCycle
from train.plan.modifiers import DropLayers
from train.plan.training import NOTHING, PhaseStart, Train
from train.plan.transforms import Grow
from train.state.mesh import replicated_sharding
from train.state.model import TrainState
from train.state.optim import Optim, learning_rate, transformation
from train.state.packing import packed
from train.step import programs
from train.step.inputs import step_plans
from train.step.parallel import mapped
from train.step.step import StepInputs, gradients, train_step

OPTIM = Optim(warmup=1)
SETTING = PhaseStart({}, 0, 8, 1, 0)
TOKENS = np.random.default_rng(0).integers(0, 256, (8, runs.MODEL.context + 1)).astype(np.int32)
BATCH = next_tokens(TOKENS)
TX = transformation(Optim())
REWARM = TrainStage(0.5, warmup=0, modifiers=(Rewarm(peak=2.0, steps=2),))


@partial(jax.jit, static_argnums=(0, 3))
def loss_and_gradients(config, params, batch, modifier=None, inputs=None):
    pairs, rows = [(modifier, inputs)] if modifier else [], np.arange(len(batch[0]))
    return gradients(TrainState(params, None, config), batch, rows, np.uint32(0), 1, pairs)


def given(steps, at):
    config = replace(runs.MODEL, layers=len(steps))
    phase = Train("large", 100, OPTIM, config, (Ramp(steps),))
    return phase.modifiers[0].step_inputs(phase, TrainState(None, None, config), SETTING)(at)


def test_the_branches_of_each_layer_by_hand():
    """ProRes uses ``min(1, t / (T l))``; a layer with 0 steps has scale 1 from the start."""
    at = given((4, 8, 12, 0), 6)
    np.testing.assert_allclose(at.inputs.scale, [1, 6 / 8, 6 / 12, 1])
    assert (at.inputs.layers, at.inputs.scaling) == (None, "sublayer")
    assert (at.layers, at.flops) == (None, 0)
    np.testing.assert_allclose(given((4, 8, 12, 0), 0).inputs.scale, [0, 0, 0, 1])
    assert given((4, 8, 12, 0), 12) is NOTHING  # the plain step without scales


def test_a_ramped_growth_starts_as_the_old_model():
    small = runs.MODEL
    growth = operators.mslt(small.sizes(), {"layers": 4})
    params, large, ramp = runs.fresh(small), small.resized(growth), Ramp((0, 0, 5, 5))
    grown = grow(growth, params, small.axes())
    phase = Train("large", 100, OPTIM, large, (ramp,))
    at = ramp.step_inputs(phase, TrainState(None, None, large), SETTING)
    before, _ = loss_and_gradients(small, params, BATCH)
    after, _ = loss_and_gradients(large, grown, BATCH, ramp, at(0).inputs)
    whole, _ = loss_and_gradients(large, grown, BATCH)
    np.testing.assert_allclose(after, before, rtol=1e-6)
    assert abs(whole - before) > 1e-5  # control: copies without a ramp change the loss
    _, moved = loss_and_gradients(large, grown, BATCH, ramp, at(1).inputs)
    for name, g, _ in tiny.pairs(moved, moved):
        # the gradient of the key bias is always zero
        if "blocks" in name and "key/bias" not in name:
            assert all(np.abs(g[layer]).max() > 0 for layer in range(4)), name


@pytest.mark.parametrize(("modifiers", "says"), [
    ((Ramp((1,)),), r"a number of steps, 0 or more, for each of 2 layers, but is \(1,\)"),
    ((Ramp((1, -1)),), "a number of steps, 0 or more, for each of 2 layers"),
    ((Ramp((1, 2)), DropLayers(LayerDrop())), "not supported together with dropped layers"),
    ((Ramp((1, 2)), DropTokens(TokenDrop(0.5, 1, 0))), "not supported together with dropped layers or tokens"),
    ((DropUnits(0.1), Ramp((1, 2))), "dropout is not supported together with"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(modifiers, says):
    with pytest.raises(ValueError, match=says):
        Train("large", 8, OPTIM, runs.MODEL, modifiers)


def test_a_step_is_that_of_the_windows_as_samples():
    params = runs.fresh(runs.MODEL)
    # the order differs
    shorter = tuple(np.concatenate(np.split(x, 4, axis=1)) for x in BATCH)
    found, moved = loss_and_gradients(runs.MODEL, params, BATCH, ShortContext(4))
    expected, by = loss_and_gradients(runs.MODEL, params, shorter)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), moved, by)
    whole, _ = loss_and_gradients(runs.MODEL, params, BATCH)
    assert abs(found - whole) > 1e-5  # control: complete samples differ


def test_a_run_costs_what_its_windows_do(tmp_path):
    to = GrowTo((TrainStage(0.5, warmup=0),), by=("interleave",), moments="copy")
    method = Growing(runs.MODEL, TrainStage(0.5, modifiers=(ShortContext(2),)), (to,))
    e = runs.experiment(tmp_path, method=method)
    tokens, length = e.batch * runs.MODEL.context, runs.MODEL.context
    short, whole = (flops.train_flops(runs.MODEL, tokens, n) for n in (length // 2, length))
    first, second = (p for p in e.plan if isinstance(p, Train))
    found = [first.cost(e.batch), second.cost(e.batch)]
    assert found == [short * e.steps / 2, whole * e.steps / 2] and short < whole
    counted = step_plans(first, TrainState(None, None, runs.MODEL), SETTING)
    assert counted(0, 0).flops == short


@pytest.mark.parametrize(("config", "modifiers", "says"), [
    (runs.MODEL, (ShortContext(3),), "cannot be cut into 3 equal windows"),
    (replace(runs.MODEL, head="classes"), (ShortContext(2),), "not for a GPT2Config that predicts classes"),
    (runs.LARGE, (DropTokens(TokenDrop(0.5)), ShortContext(2)),
     "token dropping is not supported together with a short context"),
])  # fmt: skip
def test_what_cannot_be_cut_is_refused(config, modifiers, says):
    with pytest.raises(ValueError, match=says):
        Train("large", 8, OPTIM, config, modifiers)


def test_the_rate_by_hand():
    optim = Optim(peak_lr=4.0, warmup=0, floor=0.25, schedule="linear")
    rates = [Rewarm(peak=1.5, steps=4).learning_rate(optim, 12, i) for i in range(13)]
    # from 1.5 times the first learning rate to the floor, in 8 steps
    cosine = 1 + 5 * (1 + np.cos(np.pi * np.arange(9) / 8)) / 2
    np.testing.assert_allclose(rates, [4.5, 5, 5.5, 6, *cosine], atol=1e-12)


RATES = [(1.3, 25, 0.0), (1.0, 1, 0.1), (2.0, 99, 1.0), (3.0, 0, 0.5)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize(("peak", "steps", "floor"), RATES)
def test_the_learning_rate_peaks_and_ends_at_the_floor(schedule, peak, steps, floor):
    optim = Optim(peak_lr=2.0, warmup=0, floor=floor, schedule=schedule)
    rates = [Rewarm(peak, steps).learning_rate(optim, 100, i) for i in range(101)]
    assert all(learning_rate(optim, 100, 0) <= a <= b for a, b in pairwise(rates[:steps]))
    assert all(a >= b for a, b in pairwise(rates[steps:]))
    assert max(rates) == pytest.approx(peak * 2.0) == rates[steps]
    assert rates[-1] == pytest.approx(floor * 2.0)


@pytest.mark.parametrize("moments", ["drop", "copy", "exact"])
def test_moments_that_do_not_mark_new_entries_are_refused(moments):
    says = f"rewarm finds new entries by their step counts.* not '{moments}', or leave out rewarm"
    with pytest.raises(ValueError, match=says):
        GrowTo((REWARM,), runs.DOUBLED, moments=moments)
    with pytest.raises(ValueError, match=f"set moments_up to 'asymmetric', not '{moments}'"):
        VCycle((TrainStage(0.1),), (TrainStage(0.4), REWARM), moments_up=moments)


@pytest.mark.parametrize(("method", "of"), [
    (Scratch((Rewarm(),)), "large"),
    (Growing(runs.SMALL, REWARM, (GrowTo(by=runs.DOUBLED),)), "small"),
    (Growing(runs.SMALL, to=(GrowTo((TrainStage(0.2), REWARM), runs.DOUBLED, moments="asymmetric"),)), "large"),
    (VCycle((REWARM,)), "large"),
    (VCycle(up=(REWARM, TrainStage(0.5))), "coarse1"),
])  # fmt: skip
def test_only_the_stage_after_a_growth_has_new_entries(tmp_path, method, of):
    e = runs.experiment(tmp_path, method=method, optim=Optim(warmup=0), ramp=(0.01,))
    with pytest.raises(ValueError, match=f"train {of} has rewarm, .* but no growth comes directly"):
        check_experiment(e)


@pytest.mark.parametrize("correction", [True, False])
def test_the_stages_up_have_new_entries(tmp_path, correction):
    up = TrainStage(0.4), REWARM
    method = VCycle((TrainStage(0.1),), up, moments_up="asymmetric", correction=correction)
    check_experiment(runs.experiment(tmp_path, method=method, optim=Optim(warmup=0), ramp=(0.75,)))


def grown() -> TrainState:
    """Return a large model whose second copies got separate moments in a growth at step 5."""
    small, of = runs.trained(runs.SMALL, TX), ("small", "large", runs.SMALL, runs.LARGE)
    phase = Grow(*of, runs.DOUBLED, noise=10.0, moments="asymmetric")
    return jax.device_get(jax.jit(lambda m: phase.apply({"small": m}, TX))(small))


def test_new_entries_use_the_second_learning_rate():
    start, run = grown(), mapped(partial(train_step, TX, 1, (Rewarm(),)), "mesh", runs.mesh())
    starts = clock(start.opt).start_count
    assert {int(x) for b in jax.tree.leaves(starts) for x in np.unique(b)} == {0, 5}
    at = jax.device_put(start, replicated_sharding(runs.mesh()))

    def after(lr, new, birth):
        inputs = StepInputs(np.float32(lr), given=((np.float32(new), np.int32(birth)),))
        return jax.device_get(run(at, BATCH, inputs)[0].params)

    slow, fast, both = after(0.25, 0.25, 5), after(0.5, 0.5, 5), after(0.25, 0.5, 5)
    expected = jax.tree.map(lambda b, f, s: np.where(b == 5, f, s), starts, fast, slow)
    chex.assert_trees_all_equal(both, expected)
    chex.assert_trees_all_equal(after(0.25, 0.5, 6), slow)  # all entries are older
    chex.assert_trees_all_equal(after(0.25, 0.5, 0), fast)  # all entries are new
    # Twice the learning rate gives twice the update, up to rounding of values of order one.
    moved, twice = (jax.tree.map(np.subtract, x, start.params) for x in (slow, fast))
    for name, once, double in tiny.pairs(moved, twice):
        np.testing.assert_allclose(double, 2 * once, rtol=1e-4, atol=1e-6, err_msg=name)
        assert once.any(), name


def test_new_entries_are_those_that_the_growth_added(tmp_path, monkeypatch):
    """A schedule that is split to measure the sensitivity of layers keeps the age of entries."""
    seen = []

    def counting(state, batch, inputs):
        """Advance the step counters without an update."""
        if inputs.given:
            seen.append((float(inputs.given[0][0]), int(inputs.given[0][1])))
        opt = [
            s._replace(count=s.count + 1) if "count" in getattr(s, "_fields", ()) else s
            for s in state.model.opt
        ]
        values = dict.fromkeys(("loss", "grad_norm"), np.float32(1))
        return packed(replace(state.model, opt=tuple(opt))), values

    def mapped(function, how, mesh, *, donate=False):
        evaluated = dict.fromkeys(("val_loss", "val_accuracy"), np.float32(1))
        return counting if donate else lambda *_: evaluated

    e = runs.experiment(tmp_path, model=runs.MODEL, checkpoint_every=8)
    optim, rewarm = Optim(peak_lr=1.0, warmup=0), Rewarm(2.0, 2)
    large = Train("large", 4, optim, runs.MODEL, (rewarm,), until=1)
    plan = (
        Train("small", 2, optim, runs.SMALL),
        Grow("small", "large", runs.SMALL, runs.MODEL, ("hypercloning",), moments="asymmetric"),
        large,
        replace(large, begin=1, until=4),
    )
    monkeypatch.setattr(type(e), "plan", plan)
    monkeypatch.setattr(programs, "mapped", mapped)
    with runs.compiling("step", "evaluation"):
        pretrain.run_experiment(e, tmp_path / "run")
    rates = [1.5, 2, 2, 1]
    assert rates == [rewarm.learning_rate(optim, 4, i) for i in range(4)]
    assert seen == [(rate, 2) for rate in rates]


@pytest.mark.parametrize(("modifier", "fits", "says"), [
    (Rewarm(steps=9), 9, "large has 8 steps, but rewarm has 9: its learning rate never reaches the peak"),
    (Ramp((0, 8)), 9, "large has 8 steps, but ramp has 8: a layer never has its full strength"),
])  # fmt: skip
def test_a_modifier_longer_than_its_phase_is_said(modifier, fits, says):
    phase = Train("large", 8, Optim(warmup=0), replace(runs.MODEL, layers=2), (modifier,))
    assert phase.warnings() == [f"train {says}"]
    assert replace(phase, steps=fits).warnings() == replace(phase, steps=0).warnings() == []

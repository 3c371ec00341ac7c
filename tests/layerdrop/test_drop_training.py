"""Layer dropping in training: the sharded step, the phases of a plan, resuming and the ledger."""

import json
import re
from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs

from jaxgrow import flops
from jaxgrow.layerdrop import (
    KeepMask,
    LayerDrop,
    Sensitivity,
    Variance,
    keep_masks,
    layer_sensitivity,
    program_counts,
)
from train import pretrain, variance
from train.common.errors import UserError
from train.config import experiment as config
from train.config.experiment import experiment_json
from train.data.batches import probe_batches, validation_batches
from train.data.windows import Windows, next_tokens
from train.extras.modifiers import ShortContext
from train.extras.run_params import checkpoint_params
from train.plan import modifiers
from train.plan.lifetimes import live
from train.plan.methods import Scratch, TrainStage, VCycle
from train.plan.modifiers import CHUNK, DropLayers, KeepMasks
from train.plan.training import Measure, Train
from train.state.mesh import replicated_sharding
from train.state.model import TrainState, loss
from train.state.optim import Optim, transformation
from train.state.packing import packed
from train.step import programs
from train.step.parallel import mapped
from train.step.step import StepInputs, eval_step, train_step

LAYERS = 4
MODEL = replace(runs.MODEL, layers=LAYERS)
TOKENS = np.random.default_rng(0).integers(0, 256, (8, 9)).astype(np.int32)
BATCH = next_tokens(TOKENS)
LR = np.float32(0.1)
# These are the keep masks of two micro-steps. Layer 3 is dropped in both.
GATES = np.array([[True, False, True, False], [True, True, False, False]])
SCALE = np.broadcast_to(np.array([1.0, 1.25, 1.5, 2.0], np.float32), GATES.shape)
DROP = LayerDrop(time="constant", theta=0.5)
DROPPING = (DropLayers(LayerDrop()),)
FREEZING = (DropLayers(LayerDrop(dropped="freeze")),)
# Without a gradient, a parameter still moves by momentum.
OPTIM = Optim(peak_lr=1e-2, warmup=2, weight_decay=0.0)
TX = transformation(OPTIM)
SBLD = LayerDrop(sensitivity=Sensitivity(after=0.25, every=0.5, batches=2), gamma=4.0)


def by_indices(keep_mask: KeepMask) -> KeepMask:
    assert keep_mask.layers is not None
    indices = np.stack([np.flatnonzero(g) for g in np.asarray(keep_mask.layers)]).astype(np.int32)
    return replace(keep_mask, layers=indices)


# --- the step ---


@pytest.mark.parametrize("how", ["mesh", pytest.param("pmap", marks=pytest.mark.slow)])
def test_sharded_step_averages_each_micro_batch_gradient(how):
    tx, keep_mask = optax.identity(), KeepMask(GATES, SCALE)
    start, before = runs.model(MODEL, tx), runs.fresh(MODEL)
    # This reference runs on one device without the train step. Micro-batch m contains every
    # second sample, starting at m, and uses keep mask m.
    gradient = jax.jit(jax.grad(lambda p, *given: loss(replace(start, params=p), *given)))
    grads = jax.device_get(
        [gradient(before, next_tokens(TOKENS[m::2]), kept_at(keep_mask, m)) for m in range(2)]
    )
    expected = jax.tree.map(lambda p, *g: p - LR * sum(g) / 2, before, *grads)
    run = mapped(partial(train_step, tx, 2, DROPPING), how, runs.mesh())
    after = jax.device_get(run(start, BATCH, StepInputs(LR, given=(keep_mask,)))[0].params)
    chex.assert_trees_all_close(after, expected, rtol=1e-5, atol=1e-6)
    # Layer 3 has no gradient, and this optimizer has no momentum.
    last = (jax.tree.map(lambda x: x[3], params["blocks"]) for params in (after, before))
    chex.assert_trees_all_equal(*last)


def kept_at(keep_mask: KeepMask, m: int) -> KeepMask:
    return jax.tree.map(lambda x: x[m], keep_mask)


# `test_drop_execution` checks a step in vmap.
@pytest.mark.parametrize("how", [pytest.param("pmap", marks=pytest.mark.slow), "mesh"])
def test_the_compiled_step_has_conditionals(how, monkeypatch):
    tx, compiled = optax.identity(), []
    keep_mask = KeepMask(GATES[:1], SCALE[:1])

    def watched(transform):
        def wrapped(function, **options):
            run = transform(function, **options)

            return lambda *arguments: compiled.append(run.lower(*arguments).compile().as_text())

        return wrapped

    start, name = runs.model(MODEL, tx), {"pmap": "pmap", "mesh": "jit"}[how]
    monkeypatch.setattr(jax, name, watched(getattr(jax, name)))
    run = mapped(partial(train_step, tx, 1, DROPPING), how, runs.mesh())
    run(start, BATCH, StepInputs(LR, given=(keep_mask,)))
    assert compiled[-1].count(" conditional(") >= 2  # forward and backward
    dense = jax.make_jaxpr(eval_step())(replace(start, opt=None), next_tokens(TOKENS[:4]))
    assert "cond" not in str(dense)


@pytest.mark.parametrize("indices", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_dropped_layers_move_by_momentum_or_are_frozen(indices):
    dense, start = programs.step(TX, 2, (), "mesh", runs.mesh()), runs.model(MODEL, TX)
    # This dense step gives every layer a momentum.
    before = jax.device_get(dense(packed(start), BATCH, StepInputs(LR))[0].model)
    keep_mask = KeepMask(GATES, SCALE)
    keep_mask = by_indices(keep_mask) if indices else keep_mask

    def parts(model):
        of = {"params": model.params, "mu": model.opt[1].mu, "nu": model.opt[1].nu}
        return {name: jax.tree.leaves(tree["blocks"]) for name, tree in of.items()}

    def moved(dropping):
        start = packed(jax.device_put(before, replicated_sharding(runs.mesh())))
        run = programs.step(TX, 2, dropping, "mesh", runs.mesh())
        after = jax.device_get(run(start, BATCH, StepInputs(LR, given=(keep_mask,)))[0].model)
        assert after.opt[1].count == before.opt[1].count + 1
        was, now = parts(before), parts(after)
        return {
            name: [
                any((x[i] != y[i]).any() for x, y in zip(was[name], now[name], strict=True))
                for i in range(LAYERS)
            ]
            for name in was
        }

    assert moved(DROPPING) == {name: [True] * 4 for name in ("params", "mu", "nu")}
    assert moved(FREEZING) == {name: [True, True, True, False] for name in ("params", "mu", "nu")}


# --- keep masks on the host ---


EXECUTIONS = [pytest.param("cond", marks=pytest.mark.slow), "gather"]
EXECUTIONS += [pytest.param("gather_independent", marks=pytest.mark.extra)]


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_the_host_knows_what_the_library_draws(execution):
    drop = replace(DROP, execution=execution)
    drawn = KeepMasks(drop, 6, 2 * CHUNK, 2, 7, None)
    counts = program_counts(drop, 6, 2 * CHUNK).ravel()
    library = jax.jit(lambda t: keep_masks(drop, 6, 2 * CHUNK, t, seed=7, micro=2))
    for step in (0, 5, CHUNK - 1, CHUNK, 3):
        probs, keep_mask, ran = drawn(step)
        p, g = jax.device_get(library(step + 1))
        np.testing.assert_allclose(probs, p, rtol=1e-6)
        scale = np.broadcast_to(1 / probs, (2, 6))
        if execution == "cond":
            np.testing.assert_array_equal(keep_mask.layers, g)
            np.testing.assert_allclose(keep_mask.scale, scale, rtol=1e-6)
            assert ran == g.sum() / 2
            continue
        number = counts[counts >= g[0].sum()].min()
        assert keep_mask.layers.shape == (2, number) and ran == number
        for row, mask in zip(keep_mask.layers, g, strict=True):
            assert set(np.flatnonzero(mask)) <= set(row.tolist())
        np.testing.assert_allclose(keep_mask.scale, np.where(g, scale, 0), rtol=1e-6)


def test_a_run_compiles_as_many_programs_as_asked_for():
    drop = LayerDrop(execution="gather_independent", programs=3)
    drawn = KeepMasks(drop, 12, 2 * CHUNK, 1, 0, None)
    numbers = [drawn(step)[1].layers.shape[1] for step in range(2 * CHUNK)]
    assert sorted(set(numbers)) == program_counts(drop, 12, 2 * CHUNK).ravel().tolist()
    expected = DropLayers(drop).layers(Train("large", 2 * CHUNK, OPTIM, replace(MODEL, layers=12)))
    assert np.mean(numbers) == pytest.approx(expected, rel=0.01)


@pytest.mark.extra
@pytest.mark.parametrize("execution", ["gather", "gather_independent"])
def test_padding_layers_do_not_count_as_run_for_the_optimizer(execution):
    # The two programs run all layers in every step or fewer.
    drop = replace(DROP, execution=execution, programs=2)
    drawn, padding = KeepMasks(drop, LAYERS, CHUNK, 2, 0, None), 0
    masks = jax.vmap(lambda t: keep_masks(drop, LAYERS, CHUNK, t, seed=0, micro=2)[1])
    ran = jax.jit(lambda keep_mask: modifiers._ran(keep_mask, (LAYERS,)))
    for step, mask in enumerate(np.asarray(jax.jit(masks)(jnp.arange(1, 33)))):
        _, keep_mask, _ = drawn(step)
        padding += keep_mask.layers.size - mask.sum()
        np.testing.assert_array_equal(ran(keep_mask), mask.any(0))
    assert padding > 0


def test_where_every_layer_is_certain_the_step_is_the_dense_one():
    drawn = KeepMasks(replace(DROP, recovery=0.5), 4, 10, 1, 0, None)
    assert [drawn(step)[1] is None for step in range(10)] == [False] * 5 + [True] * 5
    assert KeepMasks(replace(DROP, scale="none"), 4, 10, 1, 0, None)(0)[1].scale is None


@pytest.mark.parametrize("execution", ["cond", "gather"])
def test_the_published_sampling_reaches_the_step(execution):
    drop = LayerDrop(theta=0.5, time="constant", keep="published", execution=execution)
    probs, keep_mask, _ = KeepMasks(drop, 4, 8, 1, 0, None)(0)
    np.testing.assert_allclose(probs, [1, 0.875, 0.75, 0.625], rtol=1e-6)
    scale = keep_mask.scale[keep_mask.scale > 0]
    expected = 1 / np.array([0.875, 0.75, 0.625, 0.5])
    assert np.isclose(scale[:, None], expected, rtol=1e-6).any(1).all() and len(scale) > 1


@pytest.mark.parametrize("execution", ["cond", pytest.param("gather", marks=pytest.mark.slow)])
def test_a_prefix_trains_the_model_of_the_bottom_layers(execution):
    drop = LayerDrop(theta=0.5, time="constant", depth="prefix", scale="none", execution=execution)
    _, keep_mask, ran = KeepMasks(drop, LAYERS, 8, 1, 0, None)(0)
    assert ran == 2 and (keep_mask.scale is None or (keep_mask.scale[0] == [1, 1, 0, 0]).all())
    small = replace(MODEL, layers=2)

    @jax.jit
    def both(params):
        def part(params):
            bottom = params | {"blocks": jax.tree.map(lambda x: x[:2], params["blocks"])}
            return loss(TrainState(bottom, None, small), BATCH)

        def whole(params):
            return loss(TrainState(params, None, MODEL), BATCH, kept_at(keep_mask, 0))

        return [jax.value_and_grad(f)(params) for f in (whole, part)]

    (value, grads), (expected, wanted) = jax.device_get(both(runs.fresh(MODEL)))
    # The other program differs by float32 rounding.
    assert float(value) == pytest.approx(float(expected), rel=1e-6)
    chex.assert_trees_all_close(grads, wanted, rtol=1e-4, atol=1e-7)
    for x in jax.tree.leaves(grads["blocks"]):
        assert x[:2].any() and not x[2:].any()


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_no_layer_at_all_trains_what_is_around_them(execution):
    drop = LayerDrop(0.0, "constant", "prefix", scale="none", execution=execution, dropped="freeze")
    _, keep_mask, ran = KeepMasks(drop, LAYERS, 8, 1, 0, None)(0)
    assert ran == 0

    def value(params):
        return loss(TrainState(params, None, MODEL), BATCH, kept_at(keep_mask, 0))

    grads = jax.jit(jax.grad(value))(runs.fresh(MODEL))
    assert not any(x.any() for x in jax.tree.leaves(grads.pop("blocks")))
    assert all(x.any() for x in jax.tree.leaves(grads))


@pytest.mark.extra
def test_a_run_without_layers_leaves_them_as_at_birth(tmp_path):
    """Check that Muon's weight decay and momentum do not change layers that never run.

    The parameters around the layers train.
    """
    drop = LayerDrop(0.0, "constant", "prefix", scale="none", dropped="freeze")
    optim = Optim(name="muon", peak_lr=1e-2, warmup=1, weight_decay=0.1)
    changes = {"method": Scratch((DropLayers(drop),)), "steps": 4, "checkpoint_every": 2}
    e = runs.experiment(tmp_path, model=MODEL, optim=optim, **changes)
    pretrain.run_experiment(e, tmp_path / "run")
    saved = tmp_path / "run" / "checkpoints"
    before, after = (checkpoint_params(saved, "large", step) for step in (2, 4))
    chex.assert_trees_all_equal(before.pop("blocks"), after.pop("blocks"))
    assert all(jax.tree.leaves(jax.tree.map(lambda x, y: (x != y).any(), before, after)))


# --- sensitivities ---


def test_loss_delta_is_the_loss_without_a_layer_less_the_loss():
    at = TrainState(jax.tree.map(lambda x: 5 * x, runs.fresh(MODEL)), None, MODEL)
    batches = next_tokens(TOKENS.reshape(2, 4, 9))

    def value(keep_mask, tokens):
        return loss(at, tokens, keep_mask)

    found = jax.jit(lambda b: layer_sensitivity(value, LAYERS, b))(batches)
    one, expected = jax.jit(loss), []
    for i in range(LAYERS):
        blocks = jax.tree.map(lambda x, i=i: np.delete(x, i, 0), at.params["blocks"])
        less = TrainState(at.params | {"blocks": blocks}, None, replace(MODEL, layers=LAYERS - 1))
        deltas = [float(one(less, b)) - float(one(at, b)) for b in zip(*batches, strict=True)]
        expected.append(np.mean(deltas))
    np.testing.assert_allclose(found, np.maximum(expected, 0), rtol=1e-3, atol=1e-6)
    assert found.dtype == jnp.float32 and len(set(np.asarray(found).tolist())) > 1


def test_taylor_is_the_slope_at_each_layers_gate():
    at = TrainState(jax.tree.map(lambda x: 5 * x, runs.fresh(MODEL)), None, MODEL)
    one = jax.jit(lambda keep_mask, tokens: loss(at, tokens, keep_mask))
    taylor = jax.jit(lambda b: layer_sensitivity(one, LAYERS, b, "taylor"))
    found, h = taylor(next_tokens(TOKENS[None])), 1e-2
    for i, gate in enumerate(np.eye(LAYERS, dtype=np.float32)):
        up, down = (one(KeepMask(None, 1 + d * gate), BATCH) for d in (h, -h))
        assert float(found[i]) == pytest.approx(abs(float(up - down)) / (2 * h), rel=2e-2, abs=1e-5)


def test_measuring_leaves_the_model_as_it_was():
    before = runs.model(MODEL, transformation(Optim()))
    after = Measure("large", Sensitivity()).measure(before, next_tokens(TOKENS[None]))
    assert after.params is before.params and after.opt is before.opt
    assert after.sensitivity.shape == (LAYERS,)


def test_what_measures_is_not_what_judges():
    source = Windows(np.arange(16 * 8 + 1), 8)
    judged = np.concatenate([inputs for inputs, _ in validation_batches(source, 2, 3)])
    inputs, targets = probe_batches({"": source}, 2, 3, 2, 5)
    assert inputs.shape == targets.shape == (5, 2, 8)
    firsts = set(inputs[..., 0].ravel().tolist())
    assert len(firsts) == 10 and not firsts & set(judged[:, 0].tolist())
    assert probe_batches({"": source}, 2, 8, 2, 0) is None
    says = r"needs 6 micro-batches of 2 windows .* has 10 left: lower eval_batches"
    with pytest.raises(UserError, match=says):
        probe_batches({"": source}, 2, 3, 2, 6)


# --- plans and runs ---


def names(plan):
    def dropped(p):
        return p.name, p.begin, p.end, any(isinstance(m, DropLayers) for m in p.modifiers)

    return [dropped(p) if isinstance(p, Train) else type(p).__name__.lower() for p in plan]


def test_sbld_trains_measures_drops_and_measures_again():
    plan = Scratch((DropLayers(SBLD),)).plan(MODEL, Optim(), 16)
    first, *later = ("large", 0, 4, False), ("large", 4, 12, True), ("large", 12, 16, True)
    assert names(plan) == [first, "measure", later[0], "measure", later[1]]
    assert {p.steps for p in plan if isinstance(p, Train)} == {16}  # All phases use one schedule.
    assert live(plan, 1) == {"large"}
    once = Scratch((DropLayers(replace(SBLD, sensitivity=Sensitivity())),))
    expected = [("large", 0, 5, False), "measure", ("large", 5, 100, True)]
    assert names(once.plan(MODEL, Optim(), 100)) == expected


def test_dropping_composes_with_a_v_cycle():
    up = (TrainStage(0.5, modifiers=(DropLayers(drop),)) for drop in (DROP, SBLD))
    assert names(VCycle(up=(*up,)).plan(MODEL, Optim(), 16)) == [
        *(("large", 0, 1, False), "coalesce", ("coarse1", 0, 8, True), "decoalesce", "interpolate"),
        *(("large", 0, 2, False), "measure", ("large", 2, 6, True), "measure"),
        ("large", 6, 8, True),
    ]


def experiment(folder, drop, **changes):
    """Return an experiment with two micro-steps; all tests of this file share its programs."""
    values = {"model": MODEL, "steps": 12, "accumulate": 2, "optim": OPTIM}
    values["method"] = Scratch((DropLayers(drop),))
    return runs.experiment(folder, **values | changes)


@pytest.fixture(scope="module")
def sbld(tmp_path_factory):
    """Return an experiment, its run folder and the result of the run."""
    folder = tmp_path_factory.mktemp("sbld")
    e = experiment(folder, SBLD, checkpoint_every=2, log_every=1)
    return e, folder / "run", pretrain.run_experiment(e, folder / "run")


@pytest.mark.slow
def test_a_run_with_measurements_resumes_bitwise(tmp_path, sbld):
    e, whole, _ = sbld
    runs.stopped(e, tmp_path, 2, 4, 8, 10)
    runs.assert_same_end(tmp_path, whole)


@pytest.mark.slow
@pytest.mark.parametrize("execution", ["gather", "gather_independent"])
def test_a_run_with_gathered_and_frozen_layers_resumes_bitwise(tmp_path, execution):
    drop = replace(DROP, execution=execution, programs=3, dropped="freeze", time="pld", gamma=4.0)
    e = experiment(tmp_path, drop, checkpoint_every=3)
    pretrain.run_experiment(e, tmp_path / "whole")
    runs.stopped(e, tmp_path / "stopped", 3, 9)
    runs.assert_same_end(tmp_path / "stopped", tmp_path / "whole")


def test_the_ledger_counts_executed_layers_and_measurements(sbld):
    e, folder, result = sbld
    first, measured, second, again, third = result["phases"]
    tokens = e.batch * MODEL.context
    assert [p["steps"] for p in result["phases"]] == [3, 0, 6, 0, 3]
    assert first["flops"] == 3 * flops.train_flops(MODEL, tokens)
    assert first["layers"] == 3 * LAYERS
    # The probe has 2 micro-batches, divided among the devices.
    probe = 2 * (e.batch // e.accumulate) * MODEL.context
    less = flops.forward_flops(MODEL, probe, layers=LAYERS - 1)
    assert measured["flops"] == again["flops"] == flops.forward_flops(MODEL, probe) + LAYERS * less
    for phase in (second, third):
        steps, layers = phase["steps"], phase["layers"]
        assert 0 < layers < steps * LAYERS
        cost = flops.train_flops(MODEL, tokens * steps, layers=layers / steps)
        assert phase["flops"] == pytest.approx(cost)
    measurements = [line["sensitivity"] for line in runs.log(folder) if "sensitivity" in line]
    assert len(measurements) == 2 and all(len(m) == LAYERS and min(m) >= 0 for m in measurements)
    lines = [line for line in runs.log(folder) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert all("keep" not in line for line in lines[:3])
    assert all(len(line["keep"]) == LAYERS and line["keep"][0] == 1.0 for line in lines[3:])
    ran = [line["layers"] for line in lines]
    assert sum(ran[3:9]) == second["layers"]
    jump = lines[5]["flops"] - lines[4]["flops"]
    assert jump == pytest.approx(flops.train_flops(MODEL, tokens, layers=ran[5]))


def test_expected_cost_is_that_of_the_mean_schedule():
    prefix = LayerDrop(theta=0.75, time="constant", depth="prefix", scale="none")
    for drop, layers in ((DROP, 4 - 0.5 * 5 / 2), (prefix, 3)):
        plan = Scratch((DropLayers(drop),)).plan(MODEL, Optim(), 100)
        assert plan[0].token_cost == pytest.approx(flops.train_flops(MODEL, 1, layers=layers))
    assert Scratch().plan(MODEL, Optim(), 100)[0].token_cost == flops.train_flops(MODEL, 1)


@pytest.mark.parametrize("execution", ["cond", "gather", "gather_independent"])
@pytest.mark.parametrize("sensitivity", [None, Sensitivity()])
def test_a_phase_without_steps_costs_nothing(execution, sensitivity):
    drop = LayerDrop(execution=execution, sensitivity=sensitivity)
    plan = Scratch((DropLayers(drop),)).plan(MODEL, OPTIM, 0)
    assert [phase.cost(8) for phase in plan] == [0.0] * len(plan)
    # A run asks for the masks of a phase before it knows that there are no steps.
    KeepMasks(drop, MODEL.layers, 0, 1, 0, None if sensitivity is None else np.ones(MODEL.layers))


def test_the_taylor_sensitivity_costs_two_passes():
    phase = Measure("large", Sensitivity(kind="taylor"))
    assert phase.flops(MODEL, len(TOKENS)) == 2 * flops.forward_flops(MODEL, TOKENS[:, 1:].size)


def test_layer_drop_fields_are_set_and_checked_from_overrides(tmp_path):
    path = runs.script(tmp_path, experiment(tmp_path, SBLD))
    settings = ["method.drop.theta=0.7", "method.drop.sensitivity.kind=taylor"]
    drop = replace(SBLD, theta=0.7, sensitivity=replace(SBLD.sensitivity, kind="taylor"))
    assert config.load_experiment(path, settings).method == Scratch((DropLayers(drop),))
    says = re.escape("lists name the layers [4], but the model has only 4 layers")
    with pytest.raises(UserError, match=says):
        config.load_experiment(path, ["method.drop.sensitivity.block=(0, 4)"])


def test_a_variance_is_fitted_to_two_runs_and_schedules_a_third(tmp_path):
    """Fit a variance curve to logs that are written by hand with the losses of a known curve.

    A third run then keeps all layers until its peak.
    """
    curve, steps, after = Variance(peak=0.25, shape=3.0), 40, 0.25
    drop = LayerDrop(sensitivity=Sensitivity(after=after, batches=2))

    def finished(name, drop, loss, *modifiers, **changes):
        folder = tmp_path / name
        folder.mkdir()
        e = replace(experiment(tmp_path, drop, **changes), steps=steps)
        e = replace(e, method=Scratch((*([DropLayers(drop)] if drop else []), *modifiers)))
        (folder / "config.json").write_text(json.dumps(experiment_json(e)))
        lines = [
            {"phase": "train large", "step": t, "val_loss": loss(t)} for t in range(2, steps + 1, 2)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "result.json").write_text("{}")
        return folder

    def disturbed(t):
        u = (t - after * steps) / ((1 - after) * steps)
        # The loss before dropping starts does not depend on dropping.
        return 2 + (0.1 * float(curve(u)) ** 0.5 if u > 0 else 0.7)

    def flat(t):
        return 2.0

    base, dropped = finished("base", None, flat), finished("dropped", drop, disturbed)
    found = variance.fit_from_runs(base, dropped)
    assert (found.peak, found.shape) == (pytest.approx(0.25, rel=1e-3), pytest.approx(3, rel=1e-3))
    # Other modifiers must be equal, too.
    cut = finished("cut", None, flat, ShortContext(2))
    both = finished("both", drop, disturbed, ShortContext(2))
    for control, other, says in (
        (dropped, base, "must be a run from scratch"),
        (
            *(base, finished("other", drop, disturbed, batch=4)),
            "must differ only in layer dropping, but they also differ in: batch: 8 and 4",
        ),
        (base, tmp_path, "there is no finished run"),
        (base, finished("flat", drop, flat), "at least three points"),
        (base, both, r"differ in: method\.Scratch\.windows: None and 2"),
    ):
        with pytest.raises(UserError, match=says):
            variance.fit_from_runs(control, other)
    assert variance.fit_from_runs(cut, both) == found
    timed = replace(drop, time="variance", variance=found)
    third = KeepMasks(timed, LAYERS, steps, 1, 0, jnp.arange(4.0))
    # Around the peak, u is 7 / 30 and 8 / 30.
    assert [third(step)[1] is None for step in range(10, 20)] == [True] * 7 + [False] * 3

"""Methods build the right plans, phases do their work, and checkpoints list the run's parts."""

from dataclasses import replace

import chex
import jax
import numpy as np
import optax
import pytest
import runs
import tiny

from jaxgrow import correct, grow, grow_optimizer, sizes
from jaxgrow.models import GPT2Config, LlamaConfig
from jaxgrow.operators import coalesce, decoalesce
from train.extras.pruning import Pruning
from train.plan.lifetimes import after, live, shapes
from train.plan.methods import Growing, GrowTo, Learned, Scratch, TrainStage, VCycle
from train.plan.training import Train
from train.plan.transforms import (
    Coalesce,
    Correct,
    Decoalesce,
    Grouping,
    Interpolate,
    Transform,
    smaller,
)
from train.state.model import TrainState
from train.state.optim import Optim, transformation

BASE = Optim(peak_lr=0.5, warmup=7)
DEEP = GPT2Config(vocab=11, context=7, layers=4, embed=8, heads=4, head_dim=3, mlp=12)
THREE = VCycle(
    down=(TrainStage(0.1), TrainStage(0.2, lr=3.0)),
    up=(TrainStage(0.3, lr=4.0), TrainStage(0.4, warmup=2), TrainStage(0.5)),
)


def spelled(method, steps=100):
    return runs.spelled_plan(method.plan(DEEP, BASE, steps))


# --- plans of methods ---


def test_scratch_and_a_v_cycle_of_two_levels():
    assert spelled(Scratch()) == "train large 100"
    assert spelled(VCycle()) == (
        "train large 5; coalesce large > coarse1; train coarse1 50; "
        "decoalesce coarse1 large > up; interpolate large up > large; train large 50"
    )


def test_a_v_cycle_of_three_levels():
    assert spelled(THREE) == (
        "train large 10; coalesce large > coarse1; train coarse1 20; coalesce coarse1 > coarse2; "
        "train coarse2 30; decoalesce coarse2 coarse1 > up; interpolate coarse1 up > coarse1; "
        "train coarse1 40; decoalesce coarse1 large > up; interpolate large up > large; "
        "train large 50"
    )


def test_a_v_cycle_by_correction():
    found = spelled(replace(THREE, correction=True)).split("; ")
    assert "; ".join(found[5:]) == (
        "correct coarse1 coarse2 > coarse1; train coarse1 40; correct large coarse1 > large; "
        "train large 50"
    )


def test_without_training_the_initial_model_is_coalesced():
    three = spelled(replace(THREE, down=(TrainStage(0.0), TrainStage(0.0))))
    assert three.startswith(
        "train large 0; coalesce large > coarse1; coalesce coarse1 > coarse2; train coarse2 30"
    )


def test_every_level_has_its_own_size_learning_rate_and_warmup():
    trained = [p for p in THREE.plan(DEEP, BASE, 100) if isinstance(p, Train)]
    assert [(p.config.layers, p.config.heads, p.config.embed, p.config.mlp) for p in trained] == [
        (4, 4, 8, 12), (2, 2, 4, 6), (1, 1, 2, 3), (2, 2, 4, 6), (4, 4, 8, 12),
    ]  # fmt: skip
    optims = [(p.optim.peak_lr, p.optim.warmup) for p in trained]
    assert optims == [(0.5, 7), (1.5, 7), (2.0, 7), (0.5, 2), (0.5, 7)]
    own = TrainStage(1.0, floor=0.5, schedule="wsd").optim(BASE)
    assert own == replace(BASE, floor=0.5, schedule="wsd")


def test_every_level_may_have_its_own_groups():
    depth, width = Grouping(heads=None), Grouping(heads="adjacent", layers=None)
    plan = replace(THREE, groupings=(depth, width)).plan(DEEP, BASE, 100)
    groupings = [p.grouping for p in plan if isinstance(p, Coalesce | Decoalesce)]
    assert groupings == [depth, width, width, depth]
    trained = [(p.config.layers, p.config.heads) for p in plan if isinstance(p, Train)]
    assert trained[:3] == [(4, 4), (2, 4), (2, 2)]


def test_unfitting_stages_and_groups_are_refused():
    for made, says in (
        (lambda: VCycle(down=(TrainStage(0.1),) * 2), "a V-cycle of 3 levels needs 3 stages up, but has 2"),
        (lambda: VCycle(groupings=(Grouping(),) * 2), "one for each of the 1 levels down, not 2"),
        (lambda: Pruning(3, kept=(0, 1)), r"layers is 3, but kept names the layers \(0, 1\)"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=says):
            made()


def test_models_of_another_family_are_no_source():
    sizes = dict(vocab=11, context=7, layers=2, embed=8, heads=4, kv_heads=2, head_dim=4, mlp=12)
    for by in (("stack",), Learned()):
        with pytest.raises(ValueError, match="a LlamaConfig cannot become a GPT2Config: both"):
            plan = Growing(LlamaConfig(**sizes), to=(GrowTo(by=by),)).plan(DEEP, BASE, 100)
            _ = [p.cost(1) for p in plan]
    assert Growing(replace(DEEP, layers=2)).plan(DEEP, BASE, 100)  # the control


# --- effects of phases ---

TX = transformation(BASE)
GROUPING = Grouping()


def trained(config, seed: int) -> TrainState:
    """Return a model with nonzero moments, as after some steps."""
    params = tiny.params(config, seed, "float32")
    grads = jax.tree.map(np.cos, params)
    opt = jax.jit(lambda: TX.update(grads, TX.init(params), params, axes=config.axes())[1])()
    return TrainState(params, opt, config)


@pytest.fixture(scope="module")
def models():
    return {
        "large": trained(DEEP, 1),
        "coarse1": trained(smaller(GROUPING, DEEP), 2),
        "up": trained(DEEP, 3),
    }


def run(phase, models):
    return jax.jit(lambda models: phase.apply(models, TX))(models)


@pytest.mark.parametrize("policy", ["exact", pytest.param("drop", marks=pytest.mark.slow)])
def test_coalescing_and_decoalescing_with_their_moments(models, policy):
    axes, large, small = DEEP.axes(), models["large"], models["coarse1"]
    of = sizes(large.params, axes)
    for phase, source, operator in (
        (Coalesce("large", "coarse1", GROUPING, policy), large, coalesce),
        (Decoalesce("coarse1", "up", "large", GROUPING, policy), small, decoalesce),
    ):
        growth = operator(of, heads="far", layers="adjacent")

        def expected(params, opt, growth=growth):
            moved = (growth, params, axes)
            kept = None if policy == "drop" else grow_optimizer(TX, opt, *moved, policy)
            return grow(*moved), kept

        found, expected = run(phase, models), jax.jit(expected)(source.params, source.opt)
        chex.assert_trees_all_close((found.params, found.opt), expected, rtol=1e-6)
        assert found.config == source.config.resized(growth)


def test_dropped_moments_restart_and_kept_ones_do_not(models):
    large, phase = models["large"], Train("large", 1, BASE, DEEP)
    start = jax.jit(lambda m: phase.start(m, TX, jax.random.key(0)))
    fresh = TrainState(large.params, TX.init(large.params), DEEP)
    chex.assert_trees_all_equal(start({"large": replace(large, opt=None)}), fresh)
    chex.assert_trees_all_equal(start(models), large)


def test_interpolation_at_its_ends_and_its_middle(models):
    large, up = models["large"], models["up"]
    ends = [run(Interpolate("large", "up", alpha), models) for alpha in (0.0, 1.0, 0.25)]
    chex.assert_trees_all_equal(ends[0].params, large.params)
    chex.assert_trees_all_equal(ends[1].params, up.params)
    mix = jax.tree.map(lambda a, b: 0.75 * a + 0.25 * b, large.params, up.params)
    chex.assert_trees_all_close(ends[2].params, mix, atol=1e-6)
    for found in ends:
        chex.assert_trees_all_equal(found.opt, up.opt)


def test_correction_is_the_correction_of_the_core(models):
    large, small = models["large"], models["coarse1"]
    growth, axes = GROUPING.up(DEEP), DEEP.axes()
    found = run(Correct("large", "coarse1", GROUPING, 0.5, "exact"), models)
    expected = jax.jit(lambda a, b: correct(a, b, growth, axes, 0.5))(large.params, small.params)
    chex.assert_trees_all_close(found.params, expected, atol=1e-6)
    chex.assert_trees_all_equal_shapes(found.opt, large.opt)


def test_the_published_tied_head_is_another_growth(models):
    phases = (Decoalesce("coarse1", "up", "large", Grouping(tied=t)) for t in ("norm", "paper"))
    norm, paper = (run(phase, models).params for phase in phases)
    chex.assert_trees_all_equal(norm["blocks"], paper["blocks"])
    chex.assert_trees_all_close(norm["token_embedding"], 2 * paper["token_embedding"])
    chex.assert_trees_all_close(2 * norm["final_norm"]["scale"], paper["final_norm"]["scale"])


def test_asymmetric_moments_need_a_growth_and_a_clock(models):
    down = Coalesce("large", "coarse1", GROUPING, "asymmetric")
    with pytest.raises(
        ValueError, match="needs a growth that copies units, but the map from 4 to 2"
    ):
        jax.eval_shape(lambda m: down.apply(m, TX), models)
    adam, up = optax.scale_by_adam(), Decoalesce("coarse1", "up", "large", GROUPING, "asymmetric")
    with pytest.raises(ValueError, match=r"Chain jaxgrow\.growth\.moments\.rebias"):
        small = replace(models["coarse1"], opt=jax.eval_shape(adam.init, models["coarse1"].params))
        jax.eval_shape(lambda m: up.apply(m, adam), models | {"coarse1": small})
    # head i of the small model is heads i and i + 2 of the large one
    mu = run(up, models).opt[1].mu["token_embedding"]
    chex.assert_trees_all_equal(mu[:, :4], models["coarse1"].opt[1].mu["token_embedding"])
    assert not mu[:, 4:].any()


# --- contents of checkpoints ---


def test_live_models_by_hand():
    plan = THREE.plan(DEEP, BASE, 100)
    held = [" ".join(sorted(live(plan, done))) for done in range(len(plan) + 1)]
    assert held == [
        *("large", "large", "coarse1 large", "coarse1 large"),
        *("coarse1 coarse2 large", "coarse1 coarse2 large", "coarse1 large up"),
        *("coarse1 large", "coarse1 large", "large up", "large", "large"),
    ]


METHODS = {
    "scratch": Scratch(),
    "three": replace(THREE, moments_down="exact", moments_up="asymmetric"),
    "corrected": VCycle(correction=True, moments_up="copy"),
    "pruned": VCycle(groupings=(Pruning(2),), correction=True, moments_down="exact"),
    "unborn": VCycle(down=(TrainStage(0.0),), moments_down="copy"),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_shapes_tell_what_a_run_holds_after_every_phase(method):
    def structure(models):
        return jax.tree.map(lambda x: (x.shape, x.dtype), models)

    plan, held = method.plan(DEEP, BASE, 100), {}
    for i, phase in enumerate(plan):
        if isinstance(phase, Train):
            result = jax.eval_shape(lambda m, p=phase: p.start(m, TX, jax.random.key(0)), held)
        else:
            made = phase.apply if isinstance(phase, Transform) else phase.shapes
            result = jax.eval_shape(lambda m, made=made: made(m, TX), held)
        held = after(plan, i, held, result)
        told = shapes(plan, i + 1, TX)
        assert jax.tree.structure(told) == jax.tree.structure(held)
        assert structure(told) == structure(held)
        assert held.keys() == live(plan, i + 1) & (held.keys() | {phase.writes})
        trained = {p.name for p in plan[i + 1 :][:1] if isinstance(p, Train)} | {phase.writes}
        assert all(model.opt is None for name, model in held.items() if name not in trained)
    assert held.keys() == {"large"} and held["large"].opt is not None

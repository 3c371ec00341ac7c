"""Growing and LiGO build the right plans, and their runs work from end to end.

Losses of one model from two programs differ by rounding, below 1e-6 here. The tolerance 1e-4 is for
float32 programs of models of different sizes.
"""

import json
import re
from dataclasses import replace

import chex
import jax
import numpy as np
import pytest
import runs
from counting import products

from jaxgrow import checkpoints, grow, grow_optimizer, operators
from jaxgrow.growth.maps import new_sizes
from jaxgrow.growth.symmetry import break_symmetry
from jaxgrow.layerdrop import LayerDrop, Sensitivity
from jaxgrow.models import LlamaConfig, Loop
from jaxgrow.operators.ligo import LiGO
from train import pretrain
from train.common.errors import UserError
from train.config import experiment as config
from train.data.batches import training_batches
from train.extras.inherit import Inherit
from train.extras.learned_maps import load_maps
from train.extras.run_params import load_params
from train.plan.learning import Learn
from train.plan.lifetimes import after, live, shapes
from train.plan.methods import Growing, GrowTo, Learned, Scratch, TrainStage, VCycle
from train.plan.modifiers import DropLayers
from train.plan.training import PhaseStart, Train
from train.plan.transforms import Apply, Grow, LoadCheckpoint, Transform
from train.state.model import TrainState
from train.state.optim import Optim, transformation
from train.step.inputs import step_plans
from train.step.step import train_step
from train.store.checkpoint import Checkpoints
from train.store.workdir import imported_model

BASE = Optim(peak_lr=0.5, warmup=7)
TX = transformation(BASE)
SMALL, LARGE = runs.SMALL, runs.LARGE
DEEPER, WIDER = replace(SMALL, layers=4), replace(SMALL, embed=6, heads=2, mlp=12)
SIZES = {"layers": 2, "embed": 4, "heads": 1, "mlp": 8, "head_dim": 4, "vocab": 256, "context": 8}
WIDTHS = {"embed": 8, "heads": 2, "mlp": 16}
LIGO = Growing(
    SMALL, "other-seed{seed}", (GrowTo(by=Learned(LiGO("interleave"), 9, lr=3.0, warmup=2)),)
)


# --- plans of methods ---


def spelled(method, model=LARGE, steps=100):
    return runs.spelled_plan(method.plan(model, BASE, steps))


def test_a_small_model_trains_here_and_grows():
    method = Growing(
        SMALL,
        TrainStage(0.25, lr=2.0),
        (GrowTo((TrainStage(0.5), TrainStage(0.1)), runs.DOUBLED, None, 3, 10.0, "copy"),),
    )
    assert spelled(method) == "train small 25; grow small > large; train large 50; train large 10"
    small, grown, first, second = method.plan(LARGE, BASE, 100)
    assert (small.config, first.config, second.config) == (SMALL, LARGE, LARGE)
    assert (small.optim.peak_lr, first.optim.peak_lr) == (1.0, 0.5)
    assert grown == Grow("small", "large", SMALL, LARGE, runs.DOUBLED, 3, 10.0, "copy")


def test_a_small_model_comes_from_another_run():
    method = Growing(SMALL, "other-seed{seed}", (GrowTo(by=runs.DOUBLED),))
    assert spelled(method) == "import small > small; grow small > large; train large 50"
    assert method.plan(LARGE, BASE, 100)[0] == LoadCheckpoint("small", SMALL, "other-seed{seed}")
    # A race or a fine-tuning imports from the folder that the user gives, whatever its name.
    assert LoadCheckpoint("small", SMALL, "a {x}/{}-seed{seed}").folder_of(7) == "a {x}/{}-seed7"


def test_one_layer_becomes_two_and_four():
    one, two, four = (replace(LARGE, layers=n) for n in (1, 2, 4))
    method = Growing(
        one,
        TrainStage(0.1),
        (GrowTo((TrainStage(0.2),), config=two, moments="exact"), GrowTo((TrainStage(0.3),))),
    )
    assert spelled(method, four) == (
        "train small 10; grow small > grown1; train grown1 20; grow grown1 > large; train large 30"
    )
    plan = method.plan(four, BASE, 100)
    assert [p.config.layers for p in plan] == [1, 2, 2, 4, 4]
    assert [p.moments for p in plan if isinstance(p, Grow)] == ["exact", "drop"]
    held = [" ".join(live(plan, i)) for i in range(6)]
    assert held == ["small", "small", "grown1", "grown1", "large", "large"]


def test_ligo_learns_maps_applies_them_and_trains():
    assert spelled(LIGO) == "import small > small; learn maps 9; apply maps > large; train large 50"
    _, learn, applied, large = LIGO.plan(LARGE, BASE, 100)
    assert isinstance(learn, Learn) and applied == Apply("maps", "large")
    assert learn.optim == replace(BASE, peak_lr=1.5, warmup=2) and large.optim == BASE
    found = (learn.source, learn.small, learn.config, learn.ligo)
    assert found == ("small", SMALL, LARGE, LiGO("interleave"))
    assert learn.target == {"layers": 4, **WIDTHS}


def test_ways_to_grow_may_follow_each_other():
    method = Growing(
        SMALL,
        TrainStage(0.1),
        (GrowTo((), Learned(steps=9), WIDER), GrowTo((TrainStage(0.3),), Learned(steps=8))),
    )
    assert spelled(method) == (
        "train small 10; learn maps 9; apply maps > grown1; learn maps 8; apply maps > large; "
        "train large 30"
    )
    plan = method.plan(LARGE, BASE, 100)
    assert (plan[3].source, plan[3].small) == ("grown1", WIDER)
    held = [" ".join(live(plan, i)) for i in range(1, 6)]
    assert held == ["small", "maps", "grown1", "maps", "large"]


def test_a_checkpoint_while_learning_holds_maps_and_base():
    plan = LIGO.plan(LARGE, BASE, 100)
    held = shapes(plan, 2, TX)
    assert held.keys() == {"maps"}
    found, small = held["maps"], jax.eval_shape(lambda: SMALL.init(jax.random.key(0)))
    chex.assert_trees_all_equal_shapes_and_dtypes(found.base, small)
    assert (found.parametrisation.small, found.config) == (SMALL, LARGE)
    assert found.params["width"]["embed"]["write"].shape == (8, 4)
    assert found.params["depth"]["blocks/mlp/up"].shape == (4, 2)
    chex.assert_trees_all_equal_shapes(found.opt[1].mu, found.params)
    held = shapes(plan, 3, TX)
    assert held.keys() == {"large"} and held["large"].base is None and held["large"].opt is None
    chex.assert_trees_all_equal_shapes(
        held["large"].params, jax.eval_shape(lambda: LARGE.init(jax.random.key(0)))
    )


def test_after_a_phase_only_what_is_still_read_is_kept():
    plan = LIGO.plan(LARGE, BASE, 100)
    model, other = TrainState({}, {}, SMALL), TrainState({}, None, LARGE)
    assert after(plan, 0, {}, model) == {"small": model}
    assert after(plan, 1, {"small": model}, other) == {"maps": other}


# --- operators in turn ---


@pytest.mark.parametrize(("by", "takes"), [
    (("fpi", "stack"), [WIDTHS, {"layers": 4}]),
    (("interleave", "lemon"), [{"layers": 4}, WIDTHS]),
    (("aki",), [{"layers": 4, **WIDTHS}]),
    (("aki", "stack"), [WIDTHS, {"layers": 4}]),
], ids=str)  # fmt: skip
def test_operators_in_turn_share_the_target(by, takes):
    def changed(growth, before):
        return {axis: size for axis, size in new_sizes(growth).items() if size != before[axis]}

    found, sizes = [], dict(SIZES)
    for growth in Grow("small", "large", SMALL, LARGE, by).growths:
        found.append(changed(growth, sizes))
        sizes |= found[-1]
    assert found == takes


def test_the_seed_is_that_of_random_operators():
    def index(seed):
        growth, _ = Grow("small", "large", SMALL, LARGE, ("fpi", "stack"), seed).growths
        return growth["mlp"].write.index[:, 0].tolist()

    expected = {
        seed: operators.fpi(SIZES, WIDTHS, seed)["mlp"].write.index[:, 0].tolist()
        for seed in (0, 1)
    }
    assert index(0) == expected[0] != expected[1] == index(1)


@pytest.mark.parametrize(("by", "small", "says"), [
    (("fpi", "stck"), SMALL, "there is no operator 'stck'; the operators are aki, .*, stack, "),
    (("fpi",), SMALL, "axis 'layers': fpi grows embed, heads, mlp"),
    (("stack", "fpi"), replace(SMALL, vocab=128), "axis 'vocab': fpi grows embed, heads, mlp"),
    (("fpi", "g_stack"), replace(SMALL, layers=3), "axis 'layers': g_stack needs a multiple of 3, not 4"),
    (("fpi", "stack"), replace(SMALL, mlp=32), "axis 'mlp': fpi cannot reduce the size from 32 to 16"),
    ((), DEEPER, "do not reach the sizes {'embed': 8, 'heads': 2, 'mlp': 16}"),
])  # fmt: skip
def test_what_operators_cannot_reach_is_refused_by_name(by, small, says):
    with pytest.raises(ValueError, match=says):
        Growing(small, TrainStage(0.5), (GrowTo(by=by),)).plan(LARGE, BASE, 100)


def test_noise_without_effect_is_refused():
    to = (GrowTo(by=("llama_pro",), noise=5.0),)
    with pytest.raises(ValueError, match="noise does not apply to llama_pro"):
        Growing(replace(LARGE, layers=2), TrainStage(0.5), to).plan(LARGE, BASE, 100)


def test_models_that_differ_in_what_is_no_axis_are_refused():
    small = LlamaConfig(
        layers=2, embed=4, heads=2, kv_heads=1, head_dim=2, mlp=8, vocab=256, context=8
    )
    with pytest.raises(ValueError, match="axis 'context': stack grows layers"):
        Grow("small", "large", small, replace(small, layers=4, context=16), ("stack",)).growths  # noqa: B018


def test_an_unknown_operator_is_refused_in_one_line(tmp_path):
    path = runs.script(tmp_path, runs.growing(tmp_path, GrowTo(by=("stck",)), name="typo"))
    with pytest.raises(UserError, match=f"config {re.escape(path)}: there is no operator 'stck'"):
        config.load_experiment(path)
    to = GrowTo(by=("hypercloning",), noise=10.0, config=runs.MODEL), GrowTo(by=Learned())
    fine = runs.growing(tmp_path, *to, name="fine")
    assert config.load_experiment(runs.script(tmp_path, fine)) == fine


def test_the_eps_of_lemon_stays_with_the_model():
    """Only one tile of 4 slots fits into 6, so variances and eps are multiplied by 4 / 6."""
    shrunk = pytest.approx(1e-5 * 4 / 6)
    once = Growing(
        SMALL,
        TrainStage(0.5),
        (GrowTo((TrainStage(0.2), TrainStage(0.3)), ("lemon", "llama_pro")),),
    )
    plan = once.plan(replace(WIDER, layers=4), BASE, 100)
    assert [p.config.eps for p in plan[2:]] == [shrunk, shrunk]
    four = replace(WIDER, layers=4)
    to = (
        GrowTo(by=("lemon",), config=WIDER),
        GrowTo(by=("llama_pro",), config=four),
        GrowTo(by=Learned()),
    )
    plan = Growing(SMALL, TrainStage(0.5), to).plan(replace(WIDER, layers=8), BASE, 100)
    assert [p.config.eps for p in plan if isinstance(p, Train)] == [1e-5, *[shrunk] * 4]
    assert isinstance(plan[5], Learn) and plan[5].small.eps == shrunk


def test_growths_that_do_not_fit_a_plan_are_refused():
    for to in ((GrowTo(), GrowTo()), (GrowTo(config=DEEPER),), ()):
        with pytest.raises(
            ValueError,
            match="every growth except the last one must have a config; the last one grows to the model",
        ):
            Growing(SMALL, to=to)
    with pytest.raises(
        ValueError,
        match="an imported model has no optimizer state, so moments must be 'drop', not 'exact'",
    ):
        Growing(SMALL, "other", (GrowTo(moments="exact"),))
    with pytest.raises(
        ValueError, match="noise, moments and fresh apply to operators, not to learned maps"
    ):
        GrowTo(by=Learned(), noise=10.0)
    # moments from the training in between
    Growing(SMALL, "other", (GrowTo(config=DEEPER), GrowTo(moments="exact")))


# --- effects of a growth ---


@pytest.mark.parametrize(
    "moments", ["asymmetric", *(pytest.param(p, marks=pytest.mark.slow) for p in ("copy", "exact"))]
)
def test_growths_go_on_from_each_other_with_noise_and_moments(moments):
    small, axes = runs.trained(SMALL, TX, scale=1.0), SMALL.axes()
    phase = Grow("small", "large", SMALL, LARGE, runs.DOUBLED, 3, 10.0, moments)
    wide, deep = operators.hypercloning(SIZES, WIDTHS), operators.stack(SIZES, {"layers": 4})

    @jax.jit
    def both(small):
        once = break_symmetry(grow(wide, small.params, axes), wide, axes, 3, 10.0)
        opt = grow_optimizer(TX, small.opt, wide, small.params, axes, moments)
        opt = grow_optimizer(TX, opt, deep, once, axes, moments)
        return phase.apply({"small": small}, TX), TrainState(grow(deep, once, axes), opt, LARGE)

    found, expected = both(small)
    chex.assert_trees_all_equal(found, expected)
    chex.assert_trees_all_equal_shapes(found.opt[1].mu, found.params)
    assert found.opt[1].count == 5


@pytest.mark.parametrize("moments", ["copy", "exact"])
def test_a_loop_keeps_weights_and_state_and_unloop_copies_them(moments):
    looped = replace(LARGE, loop=Loop(1, 3))
    deep = replace(LARGE, layers=6)
    model = runs.trained(LARGE, TX, scale=1.0)
    found = Grow("small", "large", LARGE, looped, ("loop",), moments=moments).apply(
        {"small": model}, TX
    )
    chex.assert_trees_all_equal((found.params, found.opt), (model.params, model.opt))
    assert found.config == looped
    growth = operators.unloop(LARGE.sizes(), {}, (0, 1, 2, 1, 2, 3))
    last = Grow("small", "large", looped, deep, ("unloop",), moments=moments).apply(
        {"small": found}, TX
    )
    axes = LARGE.axes()
    expected = grow_optimizer(TX, model.opt, growth, model.params, axes, moments)
    chex.assert_trees_all_equal(last, TrainState(grow(growth, model.params, axes), expected, deep))


def test_a_new_loop_needs_its_operator():
    looped = replace(LARGE, loop=Loop(1, 3))
    for small, large, by in (
        (LARGE, looped, ()),
        (LARGE, LARGE, ("loop",)),
        (looped, LARGE, ("loop",)),
    ):
        with pytest.raises(ValueError, match="use the operator loop for a new loop, and unloop"):
            _ = Grow("small", "large", small, replace(large, mlp=small.mlp), by).growths


@pytest.mark.slow
def test_a_run_with_a_loop_counts_the_flops_of_every_pass(tmp_path):
    """The loop begins after half of the steps; the run continues from its checkpoint."""
    looped = replace(runs.MODEL, loop=Loop(0, 2))
    stage = TrainStage(0.5, warmup=0)
    loop = GrowTo((stage,), ("loop",), moments="copy")
    e = runs.experiment(tmp_path, model=looped, method=Growing(runs.MODEL, stage, (loop,)))
    result = pretrain.run_experiment(e, tmp_path / "run")
    small, _, large = result["phases"]
    positions = small["tokens"]
    assert small["layers"] == 2 * small["steps"] and large["layers"] == 4 * large["steps"]
    outside = runs.MODEL.cost(8).outside
    assert (large["flops"] - 3 * positions * outside) == pytest.approx(
        2 * (small["flops"] - 3 * positions * outside)
    )
    before, after = validations(tmp_path / "run"), checkpoints.load(tmp_path / "run")[0]
    assert after == looped and before["train large"][-1] < before["train small"][0]


def test_dropped_moments_are_left_behind():
    small = runs.trained(SMALL, TX, scale=1.0)
    found = Grow("small", "large", SMALL, LARGE, ("aki",)).apply({"small": small}, TX)
    growth = operators.aki(SIZES, {"layers": 4, **WIDTHS})
    chex.assert_trees_all_equal(
        found, TrainState(grow(growth, small.params, SMALL.axes()), None, LARGE)
    )


# --- runs ---


def validations(folder):
    """Read ``{phase: [loss, ..]}`` from the log."""
    found = {}
    for line in runs.log(folder):
        if "val_loss" in line:
            found.setdefault(line["phase"], []).append(line["val_loss"])
    return found


@pytest.mark.slow
def test_after_lemon_the_loss_is_the_small_models(small_run):
    model = replace(WIDER, layers=4)
    e = runs.growing(
        small_run.parent,
        GrowTo((TrainStage(0.0),), ("lemon", "llama_pro")),
        model=model,
        name="lemon",
    )
    pretrain.run_experiment(e, small_run.parent / "lemon")
    found = validations(small_run.parent / "lemon")
    before, after = found["import small"][0], found["grow small"][0]
    assert before < 5  # an untrained model has log(256) = 5.5
    assert before == pytest.approx(validations(small_run)["train large"][-1], abs=1e-6)
    assert after == pytest.approx(before, abs=1e-4)


@pytest.mark.slow
def test_two_growths_carry_training_on(small_run):
    """Clone with noise, then stack; Adam's step count shows that both growths kept the moments."""
    to = (
        GrowTo((TrainStage(0.0),), ("hypercloning",), runs.MODEL, 0, 10.0, "exact"),
        GrowTo((TrainStage(0.25),), moments="copy"),
    )
    e = runs.growing(
        small_run.parent,
        *to,
        source=TrainStage(0.25),
        name="carried",
        optim=Optim(peak_lr=0.1, warmup=0),
    )
    result, found = (
        pretrain.run_experiment(e, small_run.parent / "carried"),
        validations(small_run.parent / "carried"),
    )
    phases = ["train small", "grow small", "train grown1", "grow grown1", "train large"]
    assert [p["phase"] for p in result["phases"]] == phases and list(found) == [
        *phases[:2],
        *phases[3:],
    ]
    (small,), (cloned,), (stacked,), (end,) = found.values()
    assert cloned == pytest.approx(small, abs=1e-4)
    assert abs(stacked - cloned) > 1e-2  # a copied layer changes the function
    assert end < stacked
    large = restored(e, small_run.parent / "carried")["large"]
    assert int(large.opt[1].count) == 4 and large.config == LARGE


def restored(experiment, folder):
    data = training_batches(experiment.data.sources(experiment.model)[0], 8, 0)
    tx = experiment.tx
    with Checkpoints(folder / "checkpoints") as checkpoints:
        return checkpoints.restore(
            lambda r: shapes(experiment.plan, r.phase + 1, tx), data, runs.mesh()
        )[0]


LEARNED = GrowTo((TrainStage(0.25),), Learned(steps=8, warmup=2))


@pytest.fixture(scope="module")
def learned(small_run):
    """Return a LiGO run, its folder and result, and the parameters from each transformation."""
    experiment = runs.growing(
        small_run.parent, LEARNED, name="ligo", log_every=3, checkpoint_every=3
    )
    made = {}

    def noting(run):
        def noted(self, context):
            model = run(self, context)
            made[self.label] = jax.device_get(model.params)
            return model

        return noted

    with pytest.MonkeyPatch.context() as patch:
        for phase in (LoadCheckpoint, Transform):
            patch.setattr(phase, "run", noting(phase.run))
        result = pretrain.run_experiment(experiment, small_run.parent / "ligo")
    return experiment, small_run.parent / "ligo", result, made


def test_learning_the_maps_lowers_the_loss_of_the_grown_model(learned):
    _, folder, result, _ = learned
    found = validations(folder)
    start, middle, end = found["learn maps"]  # at steps 0, 4 and 8
    assert end < middle < start
    assert start - end > 0.03  # nats; random letters allow only a small gain
    assert found["apply maps"] == [pytest.approx(end, abs=1e-6)]
    assert [p["steps"] for p in result["phases"]] == [8, 8, 0, 2]


def test_learning_costs_large_steps_and_growing(learned):
    experiment, _, result, _ = learned
    learn, tokens = experiment.plan[1], experiment.batch * LARGE.context
    assert result["phases"][1]["flops"] == pytest.approx(
        8 * (learn.fixed_flops() + experiment.plan[3].flops(tokens))
    )
    assert learn.fixed_flops() > 0 and result["phases"][1]["tokens"] == 8 * tokens


@pytest.mark.parametrize("accumulate", [1, 4])
def test_every_micro_batch_grows_the_model(accumulate):
    """The cost is an upper bound, but not far above the operations of the traced step."""
    large = replace(runs.LARGE, embed=64, heads=8, head_dim=8, mlp=256)
    small = replace(large, layers=2, embed=32, heads=4, mlp=128)
    optim = Optim()
    learn = Learn("maps", 8, optim, large, source="small", small=small)
    tx = transformation(optim)
    model = jax.eval_shape(
        lambda key: learn.start({"small": TrainState(small.init(key), None, small)}, tx, key),
        jax.random.key(0),
    )
    plan = step_plans(learn, model, PhaseStart({}, 0, 8, accumulate, 0))(0, 0)
    tokens = jax.ShapeDtypeStruct((8, large.context), np.int32)
    step = jax.make_jaxpr(train_step(tx, accumulate))(model, (tokens, tokens), plan.inputs)
    assert 0.95 < products(step.jaxpr) / plan.flops <= 1
    assert learn.cost(8, accumulate) == pytest.approx(8 * plan.flops)


def test_learned_maps_are_saved_and_grow_the_same_model(learned, small_run):
    _, folder, _, made = learned
    found = load_maps(folder / "maps.npz")
    assert (found.small, found.large, found.ligo) == (SMALL, LARGE, LiGO())
    chex.assert_trees_all_equal(made["import small"], load_params(small_run))
    # NumPy and XLA add the same float32 numbers, at most 16, in another order.
    chex.assert_trees_all_close(
        found.apply(load_params(small_run)), made["apply maps"], rtol=1e-5, atol=1e-6
    )
    with pytest.raises(ValueError, match="size"):
        found.apply(load_params(folder))


def test_the_control_starts_as_learning_does(learned, small_run):
    to = replace(LEARNED, stages=(TrainStage(0.0),), by=replace(LEARNED.by, steps=0))
    e = runs.growing(small_run.parent, to, name="control")
    result = pretrain.run_experiment(e, small_run.parent / "control")
    found = validations(small_run.parent / "control")
    assert found["learn maps"] == validations(learned[1])["learn maps"][:1]
    assert found["apply maps"] == [pytest.approx(found["learn maps"][0], abs=1e-6)]
    assert [
        p["flops"] for p in result["phases"] if p["phase"] in ("learn maps", "train large")
    ] == [0, 0]
    at, after = (
        load_maps(small_run.parent / name / "maps.npz").coefficients for name in ("control", "ligo")
    )
    np.testing.assert_array_equal(at["width"]["embed"]["write"][:4], np.eye(4))
    assert all(
        (np.asarray(a) != b).any()
        for a, b in zip(jax.tree.leaves(at), jax.tree.leaves(after), strict=True)
    )


def test_killed_ligo_runs_end_bitwise_identical(learned, small_run):
    experiment, whole, _, _ = learned
    again = small_run.parent / "killed"
    # the small model takes 8 steps; learning the maps ends at 8 + 8
    runs.stopped(experiment, again, 8 + 3, 8 + 8)
    runs.assert_same_end(again, whole)
    assert (again / "maps.npz").read_bytes() == (whole / "maps.npz").read_bytes()


# --- a small model from another run ---


def test_an_imported_model_is_charged_all_that_its_run_cost(learned, small_run):
    cost = json.loads((small_run / "result.json").read_text())
    imported, *rest = learned[2]["phases"]
    assert {k: imported[k] for k in ("flops", "tokens", "steps")} == {
        k: cost[k] for k in ("flops", "tokens", "steps")
    }
    assert cost["seconds"] <= imported["seconds"] < cost["seconds"] + 60
    assert imported["layers"] == cost["steps"] * SMALL.layers
    assert imported["parameters"] == cost["phases"][0]["parameters"]
    for unit in ("flops", "tokens", "seconds"):
        assert learned[2][unit] == pytest.approx(imported[unit] + sum(p[unit] for p in rest))
    first = json.loads((learned[1] / "metrics.jsonl").read_text().splitlines()[0])
    found = (first["phase"], first["flops"], first["tokens"])
    assert found == ("import small", cost["flops"], cost["tokens"])
    assert first["seconds"] >= cost["seconds"]


def test_a_run_that_cannot_be_imported_is_refused_by_name(small_run, tmp_path):
    e = runs.growing(small_run.parent, GrowTo(by=runs.DOUBLED), name="refused", seed=3)
    missing = small_run.parent / "small-seed3"
    with pytest.raises(
        UserError,
        match=rf"there is neither a finished run nor another model in {missing}; run its config first",
    ):
        pretrain.run_experiment(e, small_run.parent / "refused")
    (tmp_path / "checkpoints").symlink_to(small_run / "checkpoints")
    with pytest.raises(
        UserError, match=f"there is neither a finished run nor another model in {tmp_path}"
    ):
        imported_model(tmp_path, SMALL, runs.mesh())
    says = f"the model in {small_run} does not have the expected config "
    says += "(values there and here: eps: 1e-05 and 0.01; mlp: 8 and 16)"
    with pytest.raises(UserError, match=re.escape(says)):
        imported_model(small_run, replace(SMALL, mlp=16, eps=0.01), runs.mesh())
    run_otherwise = replace(SMALL, remat="projections", dtype="bfloat16")
    assert imported_model(small_run, run_otherwise, runs.mesh())[0].config == run_otherwise


# --- very few steps ---

SHALLOW = replace(LARGE, layers=2)
DROPPING = Scratch((DropLayers(LayerDrop(sensitivity=Sensitivity(after=0.05, every=0.1))),))


@pytest.mark.parametrize(("method", "says"), [
    (VCycle(down=(TrainStage(0.05),)), "method.down.0.steps=0.05 of 5 steps is less than one step"),
    (Growing(SHALLOW, TrainStage(0.1), (GrowTo((TrainStage(0.9),)),)), "method.source.steps=0.1 of 5"),
    (Growing(SHALLOW, TrainStage(0.9), (GrowTo((TrainStage(0.06),)),)), "method.to.0.stages.0.steps=0.06"),
    (Inherit(SMALL, TrainStage(0.1)), "method.source.steps=0.1 of 5 steps"),
    (Inherit(SMALL, TrainStage(0.9), fraction=0.02), "the fraction with a teacher=0.02 of 5 steps"),
    (DROPPING, "sensitivity.after=0.05 of 5 steps is less than one step"),
    (DROPPING, "sensitivity.every=0.1 of 5 steps"),
])  # fmt: skip
def test_a_part_of_very_few_steps_has_one_step_and_is_said(method, says, capsys):
    """A stage or pre-analysis that rounds to no step would leave out a part of the method."""
    few = config.Experiment("few", LARGE, steps=5, batch=4, optim=Optim(warmup=0), method=method)
    lengths = [p.end - p.begin for p in few.plan if isinstance(p, Train)]
    assert min(lengths) >= 1
    config.print_warnings(few)
    said = capsys.readouterr().err
    assert says in said
    least = int(re.search(rf"{re.escape(says)}.*at least (\d+) steps", said)[1])
    for steps, is_said in ((least - 1, True), (least, False)):
        config.print_warnings(replace(few, steps=steps))
        assert (says.partition(" of ")[0] in capsys.readouterr().err) == is_said


def test_a_stage_that_is_left_out_stays_left_out(capsys):
    """A fraction of 0 is intended."""
    method = VCycle(down=(TrainStage(0.0),), up=(TrainStage(0.5), TrainStage(0.5)))
    few = config.Experiment("few", LARGE, steps=5, batch=4, optim=Optim(warmup=0), method=method)
    assert [p.steps for p in few.plan if isinstance(p, Train)] == [0, 2, 2]
    config.print_warnings(few)
    assert capsys.readouterr().err == ""


def test_a_run_too_short_for_its_pre_analysis_is_refused():
    for steps, fits in ((1, False), (2, True)):
        short = config.Experiment("short", LARGE, steps=steps, batch=4, method=DROPPING)
        if fits:
            assert [p.end - p.begin for p in short.plan if isinstance(p, Train)] == [1, 1]
        else:
            with pytest.raises(ValueError, match=r"takes 1 of 1 steps, .* at least 2 steps"):
                _ = short.plan

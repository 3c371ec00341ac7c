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
from jaxgrow.models import Loop
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
    to = GrowTo((TrainStage(0.5), TrainStage(0.1)), runs.DOUBLED, None, 3, 10.0, "copy")
    method = Growing(SMALL, TrainStage(0.25, lr=2.0), (to,))
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
    to = GrowTo((TrainStage(0.2),), config=two, moments="exact"), GrowTo((TrainStage(0.3),))
    method = Growing(one, TrainStage(0.1), to)
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
    to = GrowTo((), Learned(steps=9), WIDER), GrowTo((TrainStage(0.3),), Learned(steps=8))
    method = Growing(SMALL, TrainStage(0.1), to)
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
    found, sizes = [], dict(SIZES)
    for growth in Grow("small", "large", SMALL, LARGE, by).growths:
        found.append({axis: n for axis, n in new_sizes(growth).items() if n != sizes[axis]})
        sizes |= found[-1]
    assert found == takes


@pytest.mark.parametrize("form", [{"tied": False}, {"loop": Loop(1, 3)}], ids=str)
def test_an_operator_of_the_form_leaves_the_sizes_to_the_others(form):
    small, large = replace(LARGE, layers=2), replace(LARGE, **form)
    change = "untie" if "tied" in form else "loop"
    for by in ((change, "stack"), ("stack", change)):
        found = Grow("small", "large", small, large, by)
        assert [new_sizes(growth) for growth in found.growths if growth] == [{"layers": 4}]
        assert found.config == large


def test_the_seed_is_that_of_random_operators():
    def index(growth):
        return growth["mlp"].write.index[:, 0].tolist()

    expected = [index(operators.fpi(SIZES, WIDTHS, seed)) for seed in (0, 1)]
    by = ("fpi", "stack")
    found = [index(Grow("small", "large", SMALL, LARGE, by, s).growths[0]) for s in (0, 1)]
    assert found == expected and found[0] != found[1]


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


def test_the_eps_of_lemon_stays_with_the_model():
    """Only one tile of 4 slots fits into 6, so variances and eps are multiplied by 4 / 6."""
    shrunk, four = pytest.approx(1e-5 * 4 / 6), replace(WIDER, layers=4)
    once = GrowTo((TrainStage(0.2), TrainStage(0.3)), ("lemon", "llama_pro"))
    plan = Growing(SMALL, TrainStage(0.5), (once,)).plan(four, BASE, 100)
    assert [p.config.eps for p in plan[2:]] == [shrunk, shrunk]
    to = GrowTo(by=("lemon",), config=WIDER), GrowTo(by=("llama_pro",), config=four)
    method = Growing(SMALL, TrainStage(0.5), (*to, GrowTo(by=Learned())))
    plan = method.plan(replace(WIDER, layers=8), BASE, 100)
    assert [p.config.eps for p in plan if isinstance(p, Train)] == [1e-5, *[shrunk] * 4]
    assert isinstance(plan[5], Learn) and plan[5].small.eps == shrunk


def test_growths_that_do_not_fit_a_plan_are_refused():
    says = "every growth except the last one must have a config; the last one grows to the model"
    for to in ((GrowTo(), GrowTo()), (GrowTo(config=DEEPER),), ()):
        with pytest.raises(ValueError, match=says):
            Growing(SMALL, to=to)
    says = "an imported model has no optimizer state, so moments must be 'drop', not 'exact'"
    with pytest.raises(ValueError, match=says):
        Growing(SMALL, "other", (GrowTo(moments="exact"),))
    says = "noise, moments and fresh apply to operators, not to learned maps"
    with pytest.raises(ValueError, match=says):
        GrowTo(by=Learned(), noise=10.0)
    # moments from the training in between
    Growing(SMALL, "other", (GrowTo(config=DEEPER), GrowTo(moments="exact")))


# --- effects of a growth ---


def test_growths_go_on_from_each_other_with_noise_and_moments():
    small, axes, moments = runs.trained(SMALL, TX, scale=1.0), SMALL.axes(), "asymmetric"
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
    looped, deep = replace(LARGE, loop=Loop(1, 3)), replace(LARGE, layers=6)
    model, axes = runs.trained(LARGE, TX, scale=1.0), LARGE.axes()

    def grown(model, config, by):
        phase = Grow("small", "large", model.config, config, (by,), moments=moments)
        return phase.apply({"small": model}, TX)

    found = grown(model, looped, "loop")
    chex.assert_trees_all_equal((found.params, found.opt), (model.params, model.opt))
    assert found.config == looped
    growth = operators.unloop(LARGE.sizes(), {}, (0, 1, 2, 1, 2, 3))
    opt = grow_optimizer(TX, model.opt, growth, model.params, axes, moments)
    expected = TrainState(grow(growth, model.params, axes), opt, deep)
    chex.assert_trees_all_equal(grown(found, deep, "unloop"), expected)


def test_a_new_loop_needs_its_operator():
    looped = replace(LARGE, loop=Loop(1, 3))
    for small, large, by in (
        (LARGE, looped, ()),
        (LARGE, LARGE, ("loop",)),
        (looped, LARGE, ("loop",)),
    ):
        with pytest.raises(ValueError, match="use the operator loop for a new loop, and unloop"):
            _ = Grow("small", "large", small, large, by).growths


@pytest.mark.slow
def test_a_run_with_a_loop_counts_the_flops_of_every_pass(tmp_path):
    """The loop begins after half of the steps; the run continues from its checkpoint."""
    looped, stage = replace(runs.MODEL, loop=Loop(0, 2)), TrainStage(0.5, warmup=0)
    method = Growing(runs.MODEL, stage, (GrowTo((stage,), ("loop",), moments="copy"),))
    e = runs.experiment(tmp_path, model=looped, method=method)
    small, _, large = pretrain.run_experiment(e, tmp_path / "run")["phases"]
    assert small["layers"] == 2 * small["steps"] and large["layers"] == 4 * large["steps"]
    outside = 3 * small["tokens"] * runs.MODEL.cost(8).outside
    assert large["flops"] - outside == pytest.approx(2 * (small["flops"] - outside))
    before, after = validations(tmp_path / "run"), checkpoints.load(tmp_path / "run")[0]
    assert after == looped and before["train large"][-1] < before["train small"][0]


def test_dropped_moments_are_left_behind():
    small = runs.trained(SMALL, TX, scale=1.0)
    found = Grow("small", "large", SMALL, LARGE, ("aki",)).apply({"small": small}, TX)
    params = grow(operators.aki(SIZES, {"layers": 4, **WIDTHS}), small.params, SMALL.axes())
    chex.assert_trees_all_equal(found, TrainState(params, None, LARGE))


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
    to = GrowTo((TrainStage(0.0),), ("lemon", "llama_pro"))
    e = runs.growing(small_run.parent, to, model=replace(WIDER, layers=4), name="lemon")
    pretrain.run_experiment(e, small_run.parent / "lemon")
    found = validations(small_run.parent / "lemon")
    before, after = found["import small"][0], found["grow small"][0]
    assert before < 5  # an untrained model has log(256) = 5.5
    assert before == pytest.approx(validations(small_run)["train large"][-1], abs=1e-6)
    assert after == pytest.approx(before, abs=1e-4)


@pytest.mark.slow
def test_two_growths_carry_training_on(small_run):
    """Clone with noise, then stack; Adam's step count shows that both growths kept the moments."""
    folder = small_run.parent / "carried"
    cloning = GrowTo((TrainStage(0.0),), ("hypercloning",), runs.MODEL, 0, 10.0, "exact")
    to = cloning, GrowTo((TrainStage(0.25),), moments="copy")
    changes = {"source": TrainStage(0.25), "optim": Optim(peak_lr=0.1, warmup=0)}
    e = runs.growing(small_run.parent, *to, name="carried", **changes)
    result, found = pretrain.run_experiment(e, folder), validations(folder)
    phases = ["train small", "grow small", "train grown1", "grow grown1", "train large"]
    assert [p["phase"] for p in result["phases"]] == phases
    assert list(found) == [*phases[:2], *phases[3:]]
    (small,), (cloned,), (stacked,), (end,) = found.values()
    assert cloned == pytest.approx(small, abs=1e-4)
    assert abs(stacked - cloned) > 1e-2  # a copied layer changes the function
    assert end < stacked
    data = training_batches(e.data.sources(e.model)[0], 8, 0)
    with Checkpoints(folder / "checkpoints") as saved:
        models, _ = saved.restore(lambda r: shapes(e.plan, r.phase + 1, e.tx), data, runs.mesh())
    assert int(models["large"].opt[1].count) == 4 and models["large"].config == LARGE


LEARNED = GrowTo((TrainStage(0.25),), Learned(steps=8, warmup=2))


@pytest.fixture(scope="module")
def learned(small_run):
    """Return a LiGO run, its folder and result, and the parameters from each transformation."""
    folder, made = small_run.parent / "ligo", {}
    e = runs.growing(small_run.parent, LEARNED, name="ligo", log_every=3, checkpoint_every=3)

    def noting(run):
        def noted(self, context):
            model = run(self, context)
            made[self.label] = jax.device_get(model.params)
            return model

        return noted

    with pytest.MonkeyPatch.context() as patch:
        for phase in (LoadCheckpoint, Transform):
            patch.setattr(phase, "run", noting(phase.run))
        return e, folder, pretrain.run_experiment(e, folder), made


def test_learning_the_maps_lowers_the_loss_of_the_grown_model(learned):
    e, folder, result, _ = learned
    found = validations(folder)
    start, middle, end = found["learn maps"]  # at steps 0, 4 and 8
    assert end < middle < start
    assert start - end > 0.03  # nats; random letters allow only a small gain
    assert found["apply maps"] == [pytest.approx(end, abs=1e-6)]
    assert [p["steps"] for p in result["phases"]] == [8, 8, 0, 2]
    # Learning costs steps of the large model and growing.
    learn, tokens, cost = e.plan[1], e.batch * LARGE.context, result["phases"][1]
    step = learn.fixed_flops() + e.plan[3].flops(tokens)
    assert cost["flops"] == pytest.approx(8 * step)
    assert learn.fixed_flops() > 0 and cost["tokens"] == 8 * tokens


def test_every_micro_batch_grows_the_model():
    """The cost is an upper bound, but not far above the operations of the traced step."""
    large = replace(runs.LARGE, embed=64, heads=8, head_dim=8, mlp=256)
    small = replace(large, layers=2, embed=32, heads=4, mlp=128)
    learn = Learn("maps", 8, Optim(), large, source="small", small=small)
    tx = transformation(Optim())

    def start(key):
        return learn.start({"small": TrainState(small.init(key), None, small)}, tx, key)

    model = jax.eval_shape(start, jax.random.key(0))
    plan = step_plans(learn, model, PhaseStart({}, 0, 8, 4, 0))(0, 0)
    tokens = jax.ShapeDtypeStruct((8, large.context), np.int32)
    step = jax.make_jaxpr(train_step(tx, 4))(model, (tokens, tokens), plan.inputs)
    assert 0.95 < products(step.jaxpr) / plan.flops <= 1
    assert learn.cost(8, 4) == pytest.approx(8 * plan.flops)


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
    folder = small_run.parent / "control"
    result = pretrain.run_experiment(runs.growing(small_run.parent, to, name="control"), folder)
    found = validations(folder)
    assert found["learn maps"] == validations(learned[1])["learn maps"][:1]
    assert found["apply maps"] == [pytest.approx(found["learn maps"][0], abs=1e-6)]
    costs = {p["phase"]: p["flops"] for p in result["phases"]}
    assert costs["learn maps"] == costs["train large"] == 0
    at, after = (load_maps(run / "maps.npz").coefficients for run in (folder, learned[1]))
    np.testing.assert_array_equal(at["width"]["embed"]["write"][:4], np.eye(4))
    changed = jax.tree.map(lambda a, b: (np.asarray(a) != b).any(), at, after)
    assert all(jax.tree.leaves(changed))


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
    assert all(imported[k] == cost[k] for k in ("flops", "tokens", "steps"))
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
    neither = "there is neither a finished run nor another model in"
    says = rf"{neither} {small_run.parent / 'small-seed3'}; run its config first"
    with pytest.raises(UserError, match=says):
        pretrain.run_experiment(e, small_run.parent / "refused")
    (tmp_path / "checkpoints").symlink_to(small_run / "checkpoints")
    with pytest.raises(UserError, match=f"{neither} {tmp_path}"):
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
    two = config.Experiment("short", LARGE, steps=2, batch=4, method=DROPPING)
    assert [p.end - p.begin for p in two.plan if isinstance(p, Train)] == [1, 1]
    with pytest.raises(ValueError, match=r"takes 1 of 1 steps, .* at least 2 steps"):
        _ = replace(two, steps=1).plan

"""Knowledge inheritance: weight, loss and cost of a teacher, and resuming in its phase."""

import itertools
from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
import tiny
from counting import products

from jaxgrow import flops
from jaxgrow.models import BERTConfig, LlamaConfig, ViTConfig
from train import pretrain
from train.data.windows import next_tokens
from train.extras.inherit import Inherit, Teacher, divergence
from train.plan.lifetimes import after, live, shapes
from train.plan.methods import TrainStage
from train.plan.training import PhaseStart, Train
from train.state.mesh import replicated_sharding
from train.state.model import TrainState
from train.state.optim import Optim, transformation
from train.step.parallel import mapped
from train.step.step import StepInputs, train_step

STUDENT, TEACHER = replace(runs.MODEL, layers=1), runs.SMALL
TOKENS = np.random.default_rng(0).integers(0, 256, (8, 9)).astype(np.int32)
BATCH = next_tokens(TOKENS)
BERT = BERTConfig(vocab=256, context=8, layers=1, embed=8, heads=1, head_dim=8, mlp=8)
VIT = ViTConfig(image=8, patch=4, layers=1, embed=8, heads=2, head_dim=4, mlp=16, classes=3)
METHOD = Inherit(runs.SMALL, "small-seed{seed}", TrainStage(0.5), temperature=3.0, fraction=0.5)


# --- the plan ---


def test_a_teacher_is_trained_or_imported_and_then_teaches():
    def spelled(method):
        return runs.spelled_plan(method.plan(runs.LARGE, Optim(), 100))

    assert spelled(METHOD) == "import small > small; train large 50"
    trained = replace(METHOD, source=TrainStage(0.25))
    assert spelled(trained) == "train small 25; train large 50"
    small, large = trained.plan(runs.LARGE, Optim(), 100)
    assert (small.config, small.modifiers) == (runs.SMALL, ())
    assert large.config == runs.LARGE
    assert large.modifiers == (Teacher("small", 3.0, 0.5, runs.SMALL),)


def test_a_checkpoint_holds_the_teacher_without_moments():
    plan = replace(METHOD, source=TrainStage(0.25)).plan(runs.LARGE, Optim(), 100)
    assert live(plan, 1) == {"small", "large"}
    small = TrainState({"w": 1}, {"m": 2}, runs.SMALL)
    large = TrainState({"w": 3}, {"m": 4}, runs.LARGE)
    kept = {"small": replace(small, opt=None), "large": large}
    assert after(plan, 1, {"small": small}, large) == kept
    held = shapes(plan, 2, transformation(Optim()))
    without = {name: model.opt is None for name, model in held.items()}
    assert without == {"small": True, "large": False}


def test_the_weight_falls_from_one_to_zero_in_a_straight_line():
    weights = [Teacher("x", fraction=0.5).weight(i, 8) for i in range(8)]
    assert weights == [1, 0.75, 0.5, 0.25, 0, 0, 0, 0]
    assert [Teacher("x", fraction=1.0).weight(i, 4) for i in range(5)] == [1, 0.75, 0.5, 0.25, 0]
    # The paper uses 55 of 125 thousand steps.
    assert Teacher("x").weight(55, 125) == 0 < Teacher("x").weight(54, 125)
    # Without lessons, no step has a teacher, not even the first one.
    assert [Teacher("x", fraction=0.0).weight(i, 8) for i in range(2)] == [0, 0]


# --- the distillation loss ---


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_the_lesson_is_the_divergence_of_softened_distributions(temperature):
    rng = np.random.default_rng(0)
    student, teacher = rng.normal(size=(2, 2, 3, 7)).astype(np.float32)

    def softened(logits):
        p = np.exp(logits.astype(np.float64) / temperature)
        return p / p.sum(-1, keepdims=True)

    p, q = softened(teacher), softened(student)
    expected = temperature**2 * (p * np.log(p / q)).sum(-1).mean()
    # float32 precision
    assert float(divergence(student, teacher, temperature)) == pytest.approx(expected, rel=1e-5)
    assert float(divergence(teacher, teacher, temperature)) == 0


def model(config, seed, tx) -> TrainState:
    """Return a model with large weights, since fresh models predict nearly the same."""
    shapes = jax.eval_shape(config.init, jax.random.key(0))
    rng = np.random.default_rng(seed)
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32) / 2, shapes)
    return TrainState(params, tx.init(params), config)


@pytest.fixture(scope="module")
def oracle():
    """Return both losses and gradients over the full batch, without the training step, and the models."""
    student, teacher = model(STUDENT, 1, optax.identity()), model(TEACHER, 2, optax.identity())

    def log_p(config, params, temperature):
        logits = config.module.apply({"params": params}, TOKENS[:, :-1])
        return jax.nn.log_softmax(logits / temperature)

    def cross_entropy(params):
        return -jnp.take_along_axis(log_p(STUDENT, params, 1.0), TOKENS[:, 1:, None], -1).mean()

    def divergence(params):
        said, says = log_p(TEACHER, teacher.params, 3.0), log_p(STUDENT, params, 3.0)
        return 9.0 * (jnp.exp(said) * (said - says)).sum(-1).mean()

    both = [jax.jit(jax.value_and_grad(f))(student.params) for f in (cross_entropy, divergence)]
    return student, teacher, *jax.device_get(both)


@pytest.fixture(scope="module")
def step():
    modifiers = (Teacher("", 3.0),)
    return mapped(partial(train_step, optax.identity(), 1, modifiers), "mesh", runs.mesh())


@pytest.mark.parametrize("lesson", [1.0, 0.25, 0.0])
def test_a_step_uses_the_weighted_gradient(oracle, step, lesson):
    student, teacher, (loss, plain), (_, taught) = oracle
    student, teacher = jax.device_put((student, teacher), replicated_sharding(runs.mesh()))
    now = StepInputs(np.float32(0.5), given=((teacher, np.float32(lesson)),))
    found, metrics = step(student, BATCH, now)
    expected = jax.tree.map(
        lambda p, a, b: p - 0.5 * ((1 - lesson) * a + lesson * b), student.params, plain, taught
    )
    # The order of summation differs.
    chex.assert_trees_all_close(jax.device_get(found.params), expected, rtol=1e-4, atol=1e-5)
    assert tiny.distance(plain, taught) > 0.1  # This is ten thousand times the tolerance.
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-5)


def test_nothing_is_computed_backwards_through_the_teacher():
    tx = optax.identity()
    student, teacher = model(STUDENT, 1, tx), model(TEACHER, 2, tx)
    now = StepInputs(np.float32(0.5), given=((teacher, np.float32(0.5)),))
    program = jax.make_jaxpr(train_step(tx, 1, (Teacher("", 1.0),)))(student, BATCH, now)
    counted = products(program.jaxpr)
    assert counted == flops.train_flops(STUDENT, 8 * 8) + flops.forward_flops(TEACHER, 8 * 8)


SHORT = "a context of 4 tokens, but the samples of the model have 8"
TEXTS, CLASSES = STUDENT.with_head("classes", 1), BERT.with_head("classes")


@pytest.mark.parametrize(
    ("teacher", "student", "says"),
    [
        (replace(TEACHER, vocab=300), STUDENT, "predicts tokens of 300, but .* tokens of 256"),
        (replace(TEACHER, context=4), STUDENT, SHORT),
        (BERT, STUDENT, "a BERTConfig, cannot read the inputs of the model, a GPT2Config"),
        (replace(VIT, image=4), VIT, "must read images of the same size"),
        (TEACHER.with_head("classes"), CLASSES, "cannot read the inputs of the model"),
        (replace(BERT, context=4).with_head("classes"), CLASSES, SHORT),
        (TEXTS, TEXTS, "the model predicts a number"),
        (BERT.with_head("spans"), BERT.with_head("spans"), "the model predicts spans"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(teacher, student, says):
    with pytest.raises(ValueError, match=says):
        Inherit(teacher, "small").plan(student, Optim(), 100)


@pytest.mark.parametrize(
    "config", [STUDENT, BERT, VIT, STUDENT.with_head("classes"), BERT.with_head("classes")]
)
def test_a_teacher_of_the_same_inputs_and_outputs_is_accepted(config):
    assert Inherit(replace(config, layers=1), "small").plan(config, Optim(), 100)


@pytest.mark.parametrize("wrong", [{"temperature": 0.0}, {"fraction": -1.0}])
def test_impossible_settings_of_a_teacher_are_refused(wrong):
    with pytest.raises(ValueError, match="temperature must be positive, and fraction at least 0"):
        Inherit(TEACHER, "small", **wrong).plan(STUDENT, Optim(), 100)


def test_a_teacher_is_trained_on_the_samples_of_the_experiment():
    longer = replace(TEACHER, context=16)
    assert Inherit(longer, "small").plan(STUDENT, Optim(), 100)
    with pytest.raises(ValueError, match=r"a context of 16 tokens, .* which have 8"):
        Inherit(longer).plan(STUDENT, Optim(), 100)


def test_the_cost_of_a_teacher_is_that_of_its_own_positions_and_experts():
    setting = PhaseStart({"small": None}, 0, 8, 2, 0)

    def cost(teacher, student):
        phase = Train("large", 8, Optim(), student, (Teacher("small", config=teacher),))
        models = {"small": TrainState(None, None, teacher)}
        return phase.modifiers[0].step_inputs(phase, None, setting._replace(models=models))(0).flops

    experts = LlamaConfig(
        **dict(vocab=256, context=8, layers=2, embed=8, heads=2, kv_heads=2, head_dim=4, mlp=16),
        **dict(experts=5, active=2),
    )
    assert cost(experts, STUDENT) == flops.forward_flops(experts, 64, at_once=32)
    assert cost(experts, STUDENT) != flops.forward_flops(experts, 64)
    # Its head computes the positions that are masked in the samples of the student.
    half = replace(BERT, masked=0.5)
    assert cost(BERT, half) == flops.forward_flops(half, 64) > flops.forward_flops(BERT, 64)
    longer = replace(BERT, context=16).with_head("classes")
    assert cost(longer, BERT.with_head("classes")) == flops.forward_flops(longer, 64, 8)
    whole = replace(VIT, patch=8)
    assert cost(VIT, whole) == flops.forward_flops(VIT, 8 * VIT.length)
    assert cost(whole, VIT) == flops.forward_flops(whole, 8 * whole.length)


# --- a run ---


def test_a_teacher_is_charged_while_it_speaks(small_run):
    """It is active in two of four steps."""
    about = {"name": "taught", "model": runs.LARGE, "method": METHOD}
    e = runs.experiment(small_run.parent, **about, log_every=1, eval_every=4)
    pretrain.run_experiment(e, small_run.parent / "taught")
    lines = [line for line in runs.log(small_run.parent / "taught") if "val_loss" not in line]
    start = runs.log(small_run.parent / "taught")[0]["flops"]  # the cost of the imported teacher
    spent = [b - a for a, b in itertools.pairwise([start, *(line["flops"] for line in lines)])]
    alone, teacher = flops.train_flops(runs.LARGE, 64), flops.forward_flops(runs.SMALL, 64)
    assert spent == pytest.approx([alone + teacher, alone + teacher, alone, alone])
    assert sum(spent) == pytest.approx(e.plan[-1].cost(e.batch))

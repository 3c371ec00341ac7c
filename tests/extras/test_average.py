"""The average of the weights: by hand, across growths, and in checkpoints, logs and results."""

import json
from dataclasses import replace
from functools import partial

import chex
import jax
import numpy as np
import optax
import pytest
import runs

from jaxgrow import checkpoints
from jaxgrow.cli.program import main
from train import pretrain
from train.data.windows import next_tokens
from train.plan.lifetimes import states
from train.plan.methods import Growing, GrowTo, TrainStage
from train.plan.transforms import Correct, Grouping, Grow, Interpolate, Transform, smaller
from train.state.model import TrainState
from train.state.optim import Optim
from train.step.step import StepInputs, train_step

BATCH = next_tokens(np.arange(36, dtype=np.int32).reshape(4, 9))
OPTIM = Optim(peak_lr=1e-2, warmup=2, ema=0.75)
TX = optax.identity()
GROWN = Growing(
    runs.SMALL, TrainStage(0.5), (GrowTo((TrainStage(0.5),), runs.DOUBLED, moments="copy"),)
)


def model(config, seed, distance=1.0):
    """Return a model without optimizer state whose average differs from its weights."""
    params = runs.fresh(config, seed)
    average = jax.tree.map(lambda x: x + np.float32(distance) * np.cos(x), params)
    return TrainState(params, TX.init(params), config, average=average)


def test_a_step_moves_the_average_towards_the_new_weights():
    """``a' = d a + (1 - d) p'``, with the weights p' after the step."""
    before = model(runs.MODEL, 0)
    step = jax.jit(partial(train_step(TX, 1), inputs=StepInputs(np.float32(0.5), ema=0.75)))
    after, _ = step(before, BATCH)
    expected = jax.tree.map(lambda a, p: 0.75 * a + 0.25 * p, before.average, after.params)
    chex.assert_trees_all_close(after.average, expected, rtol=1e-6)
    assert np.abs(after.params["token_embedding"] - before.params["token_embedding"]).max() > 0


GROUPING = Grouping()
COARSE = smaller(GROUPING, runs.LARGE)
TRANSFORMS: list[Transform] = [
    Grow("small", "large", runs.SMALL, runs.LARGE, runs.DOUBLED, 3, noise=10.0),
    Interpolate("large", "up", 0.25),
    Correct("large", "coarse1", GROUPING, 0.5),
]


def applied(phase, models):
    def shapes(m):
        return phase.shapes(m, TX)

    return jax.eval_shape(shapes, models), jax.jit(shapes)(models)


@pytest.mark.parametrize("phase", TRANSFORMS, ids=lambda phase: phase.kind)
def test_a_transition_changes_the_average_as_the_weights(phase):
    configs = {"small": runs.SMALL, "large": runs.LARGE, "up": runs.LARGE, "coarse1": COARSE}
    models = {name: model(config, seed) for seed, (name, config) in enumerate(configs.items())}
    shapes, found = applied(phase, models)
    assert jax.tree.structure(shapes) == jax.tree.structure(found)
    swapped = {n: replace(m, params=m.average, opt=None, average=None) for n, m in models.items()}
    chex.assert_trees_all_equal(found.average, applied(phase, swapped)[1].params)
    equal = {name: replace(m, average=m.params) for name, m in models.items()}
    chex.assert_trees_all_equal(applied(phase, equal)[1].average, found.params)
    without = {name: replace(m, average=None) for name, m in models.items()}
    assert applied(phase, without)[1].average is None


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("average")
    often = dict(checkpoint_every=1, eval_every=1)
    e = runs.experiment(folder, method=GROWN, model=runs.LARGE, optim=OPTIM, **often)
    pretrain.run_experiment(e, folder / "run")
    return e, folder / "run"


def test_the_loss_of_the_average_is_logged_and_in_the_result(whole):
    experiment, run = whole
    result = json.loads((run / "result.json").read_text())
    lines = [line for line in runs.log(run) if "val_loss" in line]
    assert lines[-1]["val_loss_ema"] == result["val_loss_ema"] != result["val_loss"]
    # After the first step the average still holds three quarters of the initial weights.
    assert len(lines) == 9 and lines[0]["val_loss_ema"] != lines[0]["val_loss"]
    config, average = checkpoints.load(run / "ema")
    _, last = checkpoints.load(run)
    assert config == runs.LARGE
    assert 0 < np.abs(average["token_embedding"] - last["token_embedding"]).max() < 0.1
    # Without the average, the weights and their losses are the same.
    plain = replace(experiment, optim=replace(OPTIM, ema=0.0))
    pretrain.run_experiment(plain, run.parent / "plain")
    chex.assert_trees_all_equal(last, checkpoints.load(run.parent / "plain")[1])
    alike = [{k: v for k, v in line.items() if not k.endswith("_ema")} for line in runs.log(run)]
    assert alike == [
        {**line, "flops": mine["flops"]}  # of growing, which also grows the average
        for line, mine in zip(runs.log(run.parent / "plain"), alike, strict=True)
    ]
    assert not (run.parent / "plain" / "ema").exists()
    # The same command converts both, with the same files for `transformers`.
    for folder in (run, run / "ema"):
        assert main(["convert", str(folder), str(run.parent / "hf" / folder.name)]) == 0
    hf = run.parent / "hf"
    files, same = ({path.name for path in (hf / n).iterdir()} for n in ("run", "ema"))
    assert files == same >= {"tokenizer.json", "README.md", "model.safetensors"}
    card = (hf / "ema" / "README.md").read_text()
    assert f"* loss: {result['val_loss_ema']:.4f}" in card


def test_a_run_that_was_killed_ends_with_the_same_average(tmp_path, whole):
    experiment, run = whole
    runs.stopped(experiment, tmp_path, 2, 5)
    runs.assert_same_end(tmp_path, run)
    both = [checkpoints.load(folder / "ema")[1] for folder in (tmp_path, run)]
    chex.assert_trees_all_equal(*both)


def test_every_model_of_a_v_cycle_has_an_average(tmp_path):
    """The large model keeps its average while the small one trains, for the interpolation."""
    e = runs.experiment(tmp_path, method=runs.VCYCLE, optim=OPTIM)
    held = [*states(e.plan, e.tx)]
    assert max(map(len, held)) == 2
    for models in held:
        for found in models.values():
            chex.assert_trees_all_equal_shapes(found.average, found.params)

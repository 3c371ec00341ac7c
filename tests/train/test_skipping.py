"""With ``on_nan=skip``, a step whose loss or gradients are not finite leaves the model as it was."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from train import pretrain
from train.common.errors import Diverged
from train.state.mesh import Mesh
from train.step import inputs, programs, step
from train.store.workdir import Workdir, load_params

BAD = (3, 4, 6)  # steps whose gradients are not finite


@pytest.fixture
def poisoned(monkeypatch):
    """Make the gradients of the given steps NaN, or one entry of one leaf."""

    def poison(*steps, value=np.nan, entry=False):
        real = step.gradients

        def gradients(model, batch, rows, key, accumulate, pairs):
            loss, grads = real(model, batch, rows, key, accumulate, pairs)
            leaf = grads["final_norm"]["scale"]
            bad = leaf.at[1].set(value) if entry else leaf * value
            # the key of a step says which step it is
            number = jnp.stack(
                [jax.random.key_data(jax.random.fold_in(jax.random.key(0), n - 1)) for n in steps]
            )
            hit = (number == jax.random.key_data(key)[None]).all(-1).any()
            grads["final_norm"]["scale"] = jnp.where(hit, bad, leaf)
            return loss, grads

        monkeypatch.setattr(step, "gradients", gradients)

    with runs.compiling("step"):
        yield poison


def experiment(folder, **changes):
    return runs.experiment(folder, **{"on_nan": "skip", "log_every": 1} | changes)


def test_a_skipped_step_is_a_step_without_its_update(tmp_path, monkeypatch, poisoned):
    poisoned(*BAD)
    result = pretrain.run_experiment(experiment(tmp_path), tmp_path / "run")
    assert [phase["skipped"] for phase in result["phases"]] == [len(BAD)]
    assert result["steps"] == 8
    lines = [line for line in runs.log(tmp_path / "run") if "lr" in line]
    assert [line["step"] for line in lines if "loss" not in line] == list(BAD)
    assert [line["skipped"] for line in lines] == [0, 0, 1, 2, 2, 3, 3, 3]
    # the control does not skip, but its host keeps the model of before these steps
    monkeypatch.undo()
    real = programs.step.__wrapped__

    def holding(*given):
        run, count = real(*given), iter(range(1, 9))

        def call(held, batch, inputs):
            before = jax.tree.map(jnp.copy, held)
            after, metrics = run(held, batch, inputs)
            return (before if next(count) in BAD else after), metrics

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "step", holding)
        pretrain.run_experiment(experiment(tmp_path, on_nan="stop"), tmp_path / "control")
    chex.assert_trees_all_equal(load_params(tmp_path / "run"), load_params(tmp_path / "control"))
    other = [line for line in runs.log(tmp_path / "control") if "lr" in line]
    for mine, its in zip(lines, other, strict=True):
        assert mine.get("loss", its["loss"]) == its["loss"]


def test_without_bad_steps_nothing_changes(tmp_path):
    pretrain.run_experiment(experiment(tmp_path), tmp_path / "run")
    pretrain.run_experiment(experiment(tmp_path, on_nan="stop"), tmp_path / "plain")
    chex.assert_trees_all_equal(load_params(tmp_path / "run"), load_params(tmp_path / "plain"))


@pytest.mark.parametrize("value, entry", [(np.inf, False), (-np.inf, True), (np.nan, True)])
def test_one_entry_that_is_not_finite_is_enough(tmp_path, poisoned, value, entry):
    poisoned(2, value=value, entry=entry)
    result = pretrain.run_experiment(experiment(tmp_path, steps=2), tmp_path / "run")
    assert result["phases"][0]["skipped"] == 1


def test_too_many_in_a_row_end_the_run_even_between_log_lines(tmp_path, poisoned):
    poisoned(2, 4, 5, 6)
    few = experiment(tmp_path, most_skipped=2, log_every=8, checkpoint_every=3)
    with pytest.raises(
        Diverged, match=r"3 steps in a row, up to step 6 of train large.*--from .*@3"
    ):
        pretrain.run_experiment(few, tmp_path / "run")
    enough = replace(few, most_skipped=3)
    assert pretrain.run_experiment(enough, tmp_path / "run")["phases"][0]["skipped"] == 4


def test_a_resumed_run_counts_on(tmp_path, poisoned):
    poisoned(*BAD)
    runs.killed(experiment(tmp_path, checkpoint_every=1), tmp_path / "run", 3)
    pretrain.run_experiment(experiment(tmp_path, checkpoint_every=1), tmp_path / "run")
    pretrain.run_experiment(experiment(tmp_path), tmp_path / "whole")
    runs.assert_same_end(tmp_path / "run", tmp_path / "whole")
    few = experiment(tmp_path, checkpoint_every=1, most_skipped=1)
    runs.killed(few, tmp_path / "few", 3)
    with pytest.raises(Diverged, match="2 steps in a row, up to step 4"):
        pretrain.run_experiment(few, tmp_path / "few")


@pytest.mark.parametrize(
    "changes", [{"parallel": "pmap"}, {"accumulate": 2}, {"mesh": Mesh(fsdp=2), "accumulate": 2}]
)
def test_every_way_of_running_skips_the_same_steps(tmp_path, poisoned, changes):
    poisoned(*BAD)
    pretrain.run_experiment(experiment(tmp_path), tmp_path / "one")
    pretrain.run_experiment(experiment(tmp_path, **changes), tmp_path / "other")
    runs.assert_close(tmp_path / "one", tmp_path / "other")


def test_the_program_has_no_callback_and_its_choice_is_in_the_graph(tmp_path):
    tx, skips = experiment(tmp_path).tx, jnp.zeros(3, jnp.int32)
    model = runs.model(runs.MODEL, tx)
    tokens = np.zeros((8, 8), np.int32)
    given = step.StepInputs(np.float32(0.1), skips=skips)
    text = (
        jax.jit(step.train_step(tx, 1, skip=True)).lower(model, (tokens, tokens), given).as_text()
    )
    assert "callback" not in text and "is_finite" in text
    assert inputs.StepInputs is step.StepInputs


def test_keep_every_keeps_every_kth_checkpoint(tmp_path):
    kept = runs.experiment(tmp_path, checkpoint_every=1, keep_every=3)
    runs.killed(kept, tmp_path / "run", 4)
    pretrain.run_experiment(kept, tmp_path / "run")
    folder = Workdir(tmp_path / "run").checkpoints
    assert sorted(int(path.name) for path in folder.iterdir()) == [3, 6, 7, 8]

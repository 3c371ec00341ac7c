"""With ``on_nan=skip``, a step whose loss or gradients are not finite leaves the model as it was."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from train import pretrain
from train.extras.run_params import load_params
from train.step import programs, step
from train.store.workdir import Workdir

BAD = (3, 4, 6)  # steps whose gradients are not finite


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


def test_the_program_has_no_callback_and_its_choice_is_in_the_graph(tmp_path):
    tx, tokens = experiment(tmp_path).tx, np.zeros((8, 8), np.int32)
    given = step.StepInputs(np.float32(0.1), skips=jnp.zeros(3, jnp.int32))
    run = jax.jit(step.train_step(tx, 1, skip=True))
    text = run.lower(runs.model(runs.MODEL, tx), (tokens, tokens), given).as_text()
    assert "callback" not in text and "is_finite" in text


def test_keep_every_keeps_every_kth_checkpoint(tmp_path):
    kept = runs.experiment(tmp_path, checkpoint_every=1, keep_every=3)
    runs.killed(kept, tmp_path / "run", 4)
    pretrain.run_experiment(kept, tmp_path / "run")
    folder = Workdir(tmp_path / "run").checkpoints
    assert sorted(int(path.name) for path in folder.iterdir()) == [3, 6, 7, 8]

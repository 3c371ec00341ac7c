"""The best evaluation is kept, training stops early, and dropout drops."""

from dataclasses import replace

import chex
import jax
import numpy as np
import pytest
import runs
from finetunings import FAMILIES, checkpoint, cola, tuning

from jaxgrow.extras.peft.lora import LoRA
from jaxgrow.layerdrop import KeepMask
from jaxgrow.layerdrop.execution import Dropout
from train.common.errors import UserError
from train.config.overrides import with_overrides
from train.extras.fine_tune import Best, FineTune
from train.extras.labelled.supervised import score_model
from train.extras.labelled.task import Labelled
from train.extras.run_params import load_params
from train.run.trainer import run_experiment
from train.store.workdir import Workdir


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    checkpoint(home / "gpt2", FAMILIES["gpt2"])
    cola(home / "shuffled", shuffled=True)
    return home


def experiment(home, best=None, rate=1.0, **changes):
    """Return an experiment that learns nothing, so that an early evaluation is the best one."""
    own = tuning(home / "shuffled", **{"best": best, **changes})
    return replace(own.of(home / "gpt2", rate, 0), steps=12, checkpoint_every=2, eval_every=2)


def evaluations(folder):
    lines = Workdir(folder).lines()
    return [line["val_loss"] for line in lines if "val_loss" in line and line["step"]]


def test_the_best_evaluation_is_the_result(home, tmp_path):
    # At a rate of 1, the order of the losses depends on rounding.
    best = experiment(home, Best("val_loss", evaluations=6), 0.1)
    result = run_experiment(best, tmp_path / "best")
    losses = evaluations(tmp_path / "best")
    assert len(losses) == 6 and result["val_loss"] == min(losses) < losses[-1]
    again = run_experiment(experiment(home, rate=0.1), tmp_path / "last")
    assert again["val_loss"] == losses[-1]  # Stopping early does not change the training.


def scored(folder, metric):
    """Return the metric of each evaluation that selected the model."""
    return [line[metric] for line in Workdir(folder).lines() if metric in line]


@pytest.mark.parametrize(("changes", "by"), [({}, "macro_f1"), ({"lora": LoRA(rank=2)}, "metric")])
def test_the_metric_selects_the_result(home, tmp_path, monkeypatch, capsys, changes, by):
    """The metrics are given, so that the best evaluation is in the middle of the run."""
    accuracy, f1 = [0.1, 0.3, 0.5, 0.5, 0.2, 0.4], [0.6, 0.9, 0.6, 0.7, 0.6, 0.6]
    seen = []

    def scores(data, config, params, mesh):
        seen.append(jax.device_get(params))
        return {"accuracy": accuracy[len(seen) - 1], "macro_f1": f1[len(seen) - 1]}

    monkeypatch.setattr(Labelled, "scores", scores)
    data = Labelled("table", str(table(tmp_path / "rows.tsv")), length=14)
    tuned = experiment(home, Best(by, evaluations=6), 1e-2, data=data, **changes)
    run_experiment(tuned, tmp_path / "run")
    assert len(seen) == 6
    best = seen[{"metric": 2, "macro_f1": 1}[by]]
    chex.assert_trees_all_close(load_params(tmp_path / "run"), best, rtol=1e-6)
    assert "step 4: accuracy 0.3000, macro_f1 0.9000\n" in capsys.readouterr().err
    assert scored(tmp_path / "run", "accuracy") == accuracy
    steps = [line["step"] for line in Workdir(tmp_path / "run").lines() if "accuracy" in line]
    assert steps == [2, 4, 6, 8, 10, 12]


def table(file):
    rows = [f"{'ab'[i % 2]}{'cd'[i // 7 % 2]}\t{'xyz'[i * i % 3]}" for i in range(320)]
    file.write_text("\n".join(["text\tlabel", *rows]))
    return file


def test_the_score_of_the_result_is_the_best_one_of_the_run(home, tmp_path):
    tuned = replace(tuning(cola(home / "cola")).of(home / "gpt2", 1e-2, 0), steps=24)
    method = replace(tuned.method, best=Best(evaluations=4))
    run_experiment(replace(tuned, method=method), tmp_path / "run")
    found = scored(tmp_path / "run", "matthews")
    [scores] = score_model(tmp_path / "run", tuned.data).values()
    assert len(found) == 4 and scores["matthews"] == max(found) > 0.5


def test_a_metric_that_the_task_does_not_have_is_refused(home):
    says = "best.by is 'f1', but the metrics of cola are matthews; choose"
    with pytest.raises(UserError, match=says):
        tuning(home / "shuffled", best=Best("f1")).of(home / "gpt2", 1e-2, 0)


def test_training_stops_early_and_goes_on_after_a_kill(home, tmp_path, capsys):
    early = experiment(home, Best("val_loss", evaluations=6, patience=2))
    result = run_experiment(early, tmp_path / "early")
    losses = evaluations(tmp_path / "early")
    assert len(losses) == int(np.argmin(losses)) + 3 < 6
    assert result["val_loss"] == min(losses)
    said = f"stopped early: no evaluation was better than {min(losses):.4f} in the last 2"
    assert said in capsys.readouterr().err
    runs.killed(early, tmp_path / "killed", at=4)
    run_experiment(early, tmp_path / "killed")
    runs.assert_same_end(tmp_path / "killed", tmp_path / "early")


def test_settings_from_the_command_line(home):
    words = ["best.patience=2", "best.by=val_loss", "dropout=0.1"]
    tuned = with_overrides(tuning(home / "shuffled"), words)
    assert (tuned.best, tuned.dropout) == (Best("val_loss", 2), 0.1)
    assert tuned.of(home / "gpt2", 1e-3, 0).method.best.evaluations == 1  # evaluated once per epoch
    with pytest.raises(ValueError, match=r"best\.patience must be at least 1, but is 0"):
        Best(patience=0)
    with pytest.raises(ValueError, match="dropout must be between 0 and 1, but is 2"):
        _ = FineTune("x", dropout=2.0).plan(FAMILIES["gpt2"], tuning(home).optim, 4)


# --- dropout ---


def test_dropout_is_part_of_training_alone(home, tmp_path):
    dropped, plain = experiment(home, dropout=0.3, rate=1e-2), experiment(home, rate=1e-2)
    first, last = [], []
    for e, folder in ((dropped, tmp_path / "dropped"), (plain, tmp_path / "plain")):
        last.append(run_experiment(e, folder)["val_loss"])
        first.append(next(x["val_loss"] for x in Workdir(folder).lines() if "val_loss" in x))
    assert first[0] == first[1] and last[0] != last[1]
    runs.killed(dropped, tmp_path / "killed", at=4)
    run_experiment(dropped, tmp_path / "killed")
    runs.assert_same_end(tmp_path / "killed", tmp_path / "dropped")


def test_dropout_differs_by_layer_sublayer_and_sample():
    config = FAMILIES["gpt2"]
    params, example = jax.tree.map(lambda x: x + 0.01, runs.fresh(config)), config.example
    many = jax.tree.map(lambda x: np.repeat(np.asarray(x), 2, 0), example)
    keys = jax.random.split(jax.random.key(0), (config.depth, 2))

    run = jax.jit(lambda p, mask: config.module.apply({"params": p}, many, keep_mask=mask))

    def out(rate):
        return np.asarray(run(params, KeepMask(None, Dropout(keys, rate), "sublayer")))

    plain = np.asarray(run(params, None))
    np.testing.assert_allclose(out(0.0), plain, atol=1e-5)
    assert not np.allclose(out(0.5)[0], out(0.5)[1])


def test_dropout_keeps_the_mean_and_differs_by_sublayer():
    drop = Dropout(jax.random.split(jax.random.key(0), 4), 0.25)
    y = np.ones((4, 500, 8), np.float32)
    a, b = drop(y, "attention"), drop(y, "mlp")
    assert np.unique(np.round(np.asarray(a), 4)).tolist() == pytest.approx([0.0, 4 / 3], abs=1e-3)
    assert np.mean(a) == pytest.approx(1.0, abs=0.02)
    assert np.mean((a > 0) == (b > 0)) == pytest.approx(0.75**2 + 0.25**2, abs=0.02)

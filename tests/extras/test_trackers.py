"""Trackers record the numbers of the log, run names, groups and seeds."""

import json
import logging
from dataclasses import replace

import pytest
import runs

from train.common.errors import UserError
from train.config.experiment import experiment_json
from train.config.resuming import resume_conflicts
from train.extras import trackers
from train.run.trainer import run_experiment
from train.store.recorder import Recorder


class Kept:
    """A tracker that stores its input, and may fail at a step or when it is closed."""

    def __init__(self, fails_at=None):
        self.points, self.closed, self._fails_at = [], 0, fails_at

    def _fail(self, at):
        if at == self._fails_at:
            raise ConnectionError("no\nroute")

    def write(self, step, values):
        self._fail(step)
        self.points.append((step, dict(values)))

    def close(self):
        self._fail("end")
        self.closed += 1


@pytest.fixture
def experiment(tmp_path):
    return runs.experiment(tmp_path, seed=3, steps=4, eval_every=2)


def test_a_tracker_gets_what_the_log_has(tmp_path, monkeypatch, experiment):
    kept, seen = Kept(), []
    monkeypatch.setitem(trackers.SERVICES, "wandb", lambda *about: seen.extend(about) or kept)
    monkeypatch.setattr(trackers, "find_spec", lambda name: True)
    kept.id = "abc"
    folder = tmp_path / "demo-seed3"
    run_experiment(replace(experiment, loggers=("wandb",)), folder)
    given, where, known = seen
    assert (given.name, given.seed, where.name) == ("tiny", 3, "demo-seed3")
    assert (known, kept.closed) == (None, 1)
    assert json.loads((folder / trackers.IDS).read_text()) == {"wandb": "abc"}
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [values["large/loss"] for _, values in kept.points if "large/loss" in values]
    assert losses == [line["loss"] for line in logged if "loss" in line] and losses
    assert [values["flops"] for _, values in kept.points] == [line["flops"] for line in logged]
    assert [step for step, _ in kept.points] == sorted(line["step"] for line in logged)


def test_loggers_may_change_in_a_resumed_run(experiment):
    for before, after in (((), ("mlflow",)), (("wandb",), ("mlflow",)), (("wandb",), ())):
        both = (experiment_json(replace(experiment, loggers=of)) for of in (before, after))
        assert resume_conflicts(*both) == []


@pytest.mark.parametrize(("at", "points"), [(1, 0), ("end", 2)])
def test_a_tracker_that_fails_ends_no_run(tmp_path, capsys, monkeypatch, at, points):
    monkeypatch.setattr("train.plan.ledger.Ledger.totals", lambda self: {"steps": 1, "flops": 0.0})
    fails, kept = Kept(fails_at=at), Kept()
    (tmp_path / "checkpoints").mkdir()
    recorder = Recorder(tmp_path, trackers=(fails, kept))
    recorder.ledger.begin("train large", "Train", "large", 1)
    for step in (1, 2):
        recorder.log(step, loss=1 / step, keep=[0.5, 1.0])
    recorder.close()
    said = "Kept failed (no route) and does not get any more numbers; the log contains all of them"
    assert said in capsys.readouterr().err
    assert (len(fails.points), len(kept.points), kept.closed) == (points, 2, 1)


def test_services_that_cannot_be_opened_are_named(tmp_path, experiment, monkeypatch):
    def refuses(*_):
        raise ConnectionError("api_key\nnot configured")

    monkeypatch.setitem(trackers.SERVICES, "wandb", refuses)
    monkeypatch.setattr(trackers, "find_spec", lambda name: name == "wandb" or None)
    refused = r"cannot be opened \(ConnectionError: api_key not configured\)"
    missing = r"needs the package mlflow: run pip install -e '.\[mlflow\]'"
    for name, says in (("wandb", refused), ("mlflow", missing)):
        with pytest.raises(UserError, match=f"loggers={name} {says}"):
            trackers.opened_trackers(replace(experiment, loggers=(name,)), tmp_path)


@pytest.mark.third_party
@pytest.mark.slow
def test_wandb_offline_has_name_group_seed_and_numbers(tmp_path, experiment, monkeypatch):
    wandb = pytest.importorskip("wandb")
    where = dict.fromkeys(("DATA_DIR", "CACHE_DIR"), str(tmp_path))
    for name, value in {"MODE": "offline", "SILENT": "true", **where}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    made, real = [], wandb.init
    monkeypatch.setattr(wandb, "init", lambda **options: made.append(real(**options)) or made[-1])
    folder = tmp_path / "demo-seed3"
    folder.mkdir()
    named = replace(experiment, loggers=("wandb",))
    for last in (1.5, 2.5):  # the second time, the run is resumed
        [tracker] = trackers.opened_trackers(named, folder)
        tracker.write(2, {"large/loss": last})
        # W&B writes the points of a step when the next step arrives
        tracker.write(4, {"large/lr": 0.0})
        assert made[-1].summary["large/loss"] == last
        tracker.close()
    first, again = made
    assert first.id == again.id == tracker.id
    assert (again.name, again.group, again.project) == ("demo-seed3", "tiny", "jaxgrow")
    assert again.config["seed"] == 3
    assert again.config["optim"]["peak_lr"] == 1e-2
    [*files] = (folder / "wandb").glob(f"offline-run-*/run-{tracker.id}.wandb")
    assert files and all(file.stat().st_size > 500 for file in files)


@pytest.mark.third_party
def test_mlflow_offline_has_name_group_seed_and_numbers(tmp_path, experiment, monkeypatch):
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    logging.getLogger("mlflow").setLevel(logging.ERROR)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # files need no database
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'mlruns'}")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "growing")
    folder = tmp_path / "demo-seed3"
    folder.mkdir()
    named = replace(experiment, loggers=("mlflow",))
    for steps in ((2, 4), (2, 4, 6)):  # the second time, the run is resumed at its beginning
        [tracker] = trackers.opened_trackers(named, folder)
        for step in steps:
            tracker.write(step, {"large/loss": 1 / step, "flops": 10.0 * step})
        tracker.close()
    client = MlflowClient()
    [found] = client.search_runs([client.get_experiment_by_name("growing").experiment_id])
    assert found.info.run_id == tracker.id
    assert (found.info.run_name, found.info.status) == ("demo-seed3", "FINISHED")
    assert (found.data.tags["group"], found.data.tags["seed"]) == ("tiny", "3")
    assert (found.data.params["seed"], found.data.params["optim.peak_lr"]) == ("3", "0.01")
    points = client.get_metric_history(tracker.id, "large/loss")
    assert {(p.step, p.value) for p in points} == {(2, 0.5), (4, 0.25), (6, 1 / 6)}

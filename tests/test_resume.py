"""A run that was stopped, however, continues with the same command and ends as if it had never been stopped."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import runs

from train import pretrain
from train.data.batches import sources, training
from train.errors import UserError
from train.loop import inputs, programs
from train.plan.plan import shapes
from train.run.checkpoint import Checkpoints

METHOD = replace(runs.VCYCLE, moments_up="exact")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An experiment, and the folder of its run that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    # Lines, validations and checkpoints fall on different steps, so that a checkpoint has lines half way.
    experiment = runs.experiment(folder, method=METHOD, log_every=3, eval_every=4, checkpoint_every=1)
    pretrain.run(experiment, folder / "run")
    return experiment, folder / "run"


def test_the_same_run_again_ends_with_the_same_bits(tmp_path, whole):
    pretrain.run(replace(whole[0], checkpoint_every=100), tmp_path)  # how often it saves decides nothing
    runs.assert_same_end(tmp_path, whole[1])


def test_a_run_stopped_at_each_end_of_every_phase_ends_with_the_same_bits(tmp_path, monkeypatch, whole):
    """Before a checkpoint or after it, on each side of every phase, until nothing is left to stop."""
    stops = {1: "before", 2: "after", 3: "before", 6: "after", 7: "before", 10: "after"}
    save, reached = Checkpoints.save, []

    def stopping(self, step, models, data, record):
        stop = None if step in reached else stops.get(step)
        if stop == "before":
            reached.append(step)
            raise runs.Killed
        save(self, step, models, data, record)
        if stop == "after":
            reached.append(step)
            self.wait()
            raise runs.Killed

    monkeypatch.setattr(Checkpoints, "save", stopping)
    for _ in stops:
        with pytest.raises(runs.Killed):
            pretrain.run(whole[0], tmp_path)
    pretrain.run(whole[0], tmp_path)
    assert reached == list(stops)
    runs.assert_same_end(tmp_path, whole[1])


def test_a_finished_run_is_not_run_again_and_says_so(monkeypatch, capsys, whole):
    monkeypatch.setattr(programs, "step", None)
    assert pretrain.run(*whole)["steps"] == 10
    assert capsys.readouterr().err == f"the run in {whole[1]} has finished: nothing is left to do\n"


def test_two_processes_do_not_share_a_folder(tmp_path, monkeypatch):
    """A job that is started again while the one before still saves."""
    experiment, inner = runs.experiment(tmp_path, checkpoint_every=4), []
    save = Checkpoints.save

    def again(self, step, *rest):
        save(self, step, *rest)
        with pytest.raises(UserError, match=r"another process runs in .*run; wait until it has saved, or give another"):
            pretrain.run(experiment, tmp_path / "run")
        inner.append(step)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", again)
        assert pretrain.run(experiment, tmp_path / "run")["steps"] == 8
    assert inner == [4, 8]


# --- signals ---

COMMAND = [sys.executable, "-m", "train.pretrain"]
# Killed from within as soon as the 2nd checkpoint is being written, of whatever: it is never read.
MID_SAVE = """
import os, signal, sys
from pathlib import Path
from types import SimpleNamespace
import jax.numpy as jnp
from train.run.checkpoint import Checkpoints
from train.state.model import Model
model = Model({"x": jnp.ones((1000, 1000))}, None, None)
Checkpoints(Path(sys.argv[1])).save(2, {"large": model}, SimpleNamespace(get_state=dict), {})
os.kill(os.getpid(), signal.SIGKILL)
"""


def spawn(command: list[str], folder: Path) -> subprocess.Popen:
    root = Path(pretrain.__file__).parent.parent
    environment = os.environ | {
        "PYTHONPATH": str(root),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_NUMPY_RANK_PROMOTION": "raise",
    }  # fmt: skip
    return subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)


def until(process: subprocess.Popen, reached) -> None:
    for _ in range(1200):
        if reached():
            return
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    raise TimeoutError


def test_kill_9_in_a_save(tmp_path, whole):
    run = tmp_path / "run"
    runs.killed(whole[0], run, 1)
    process = spawn([sys.executable, "-c", MID_SAVE, str(run / "checkpoints")], tmp_path)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert [p.name for p in (run / "checkpoints").glob("[0-9]")] == ["1"]  # it was in the middle of the next
    pretrain.run(whole[0], run)
    runs.assert_same_end(run, whole[1])


@pytest.mark.slow
def test_kill_9_between_phases_and_at_random(tmp_path, whole):
    run = tmp_path / "run"
    process = spawn([*COMMAND, runs.script(tmp_path, whole[0]), "--workdir", str(run)], tmp_path)
    until(process, lambda: '"decoalesce' in (run / "metrics.jsonl").read_text())
    time.sleep(random.random())
    process.kill()
    process.communicate()

    pretrain.run(whole[0], run)
    runs.assert_same_end(run, whole[1])


def test_sigterm_saves_says_so_and_exits_as_what_is_to_be_started_again(tmp_path, monkeypatch, capsys, whole):
    rate, calls, before = inputs.learning_rate, count(1), signal.getsignal(signal.SIGTERM)

    def interrupted(*arguments):
        if next(calls) == 4:  # the second step of the second phase: no step that is logged
            signal.raise_signal(signal.SIGTERM)
        return rate(*arguments)

    experiment = replace(whole[0], checkpoint_every=100)
    with monkeypatch.context() as patch:
        patch.setattr(inputs, "learning_rate", interrupted)
        patch.setattr(sys, "argv", ["pretrain", runs.script(tmp_path, experiment), "--workdir", str(tmp_path / "run")])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            pretrain.exits_cleanly(pretrain.main)
    assert exit.value.code == 75  # EX_TEMPFAIL of sysexits.h, which wrong input never gives
    assert signal.getsignal(signal.SIGTERM) == before
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said == "stopped by SIGTERM, saved at step 2 of train coarse1; the same command continues"
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["2", "4"]
    pretrain.run(experiment, tmp_path / "run")
    runs.assert_same_end(tmp_path / "run", whole[1])


# --- damage ---


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, whole):
    """The folder of a run that was stopped after its 5th checkpoint."""
    folder = tmp_path_factory.mktemp("stopped")
    save = Checkpoints.save

    def stopping(self, step, *rest):
        save(self, step, *rest)
        if step == 5:
            self.wait()
            raise runs.Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "save", stopping)
        with pytest.raises(runs.Killed):
            pretrain.run(whole[0], folder / "run")
    return folder / "run"


def files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    "damage", [cut, pytest.param(Path.unlink, marks=pytest.mark.slow)], ids=["truncated", "deleted"]
)
def test_with_a_damaged_checkpoint_the_newest_whole_one_is_used(tmp_path, capsys, whole, stopped, damage):
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    for path in files(run / "checkpoints" / "5"):
        damage(path)
    capsys.readouterr()
    # What decides nothing may change: how often a line is written is seen in the log alone, the rest nowhere.
    changed = {"log_every": 1} if damage is cut else {"parallel": "mesh", "checkpoint_every": 7}
    pretrain.run(replace(whole[0], **changed), run)
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("checkpoint 5 is damaged") and said[0].endswith("; using 4")
    assert said[1] == "resuming at step 2 of train coarse1"
    if damage is cut:
        finer, coarser = ([(line["phase"], line["step"]) for line in runs.log(folder)] for folder in (run, whole[1]))
        assert set(finer) > set(coarser) and runs.log(run)[-1] == runs.log(whole[1])[-1]  # the same loss in the end
    else:
        runs.assert_same_end(run, whole[1])
    assert json.loads((run / "config.json").read_text()).items() >= changed.items()
    assert (run / "checkpoints" / "damaged-5.0").is_dir()  # set aside, not lost


def restored(experiment, folder: Path):
    data = training(sources(experiment.data, experiment.model)[0], 8, 0)
    tx = experiment.tx
    with Checkpoints(folder) as checkpoints:
        models, record = checkpoints.restore(lambda r: shapes(experiment.plan, r["phase"] + 1, tx), data, runs.mesh())
    return models, record | {"data": data.get_state()}


def test_a_checkpoint_damaged_twice_is_set_aside_twice(tmp_path, whole, stopped):
    for _ in range(2):
        shutil.copytree(stopped / "checkpoints", tmp_path, dirs_exist_ok=True)
        for path in files(tmp_path / "5"):
            cut(path)
        assert restored(whole[0], tmp_path)[1]["ledger"]["steps"] == 4
    assert len(list(tmp_path.glob("damaged-5.*"))) == 2


def test_without_a_whole_checkpoint_the_run_stops_with_one_line(tmp_path, whole, stopped):
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    for path in files(run / "checkpoints"):
        cut(path)
    before = runs.log(run)
    with pytest.raises(UserError, match=r"no checkpoint in .* is whole \(5: .*; 4: .*\); move the folder away"):
        pretrain.run(whole[0], run)
    assert runs.log(run) == before

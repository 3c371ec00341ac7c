"""A stopped run continues with the same command and ends like an uninterrupted run."""

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
from types import SimpleNamespace

import pytest
import runs
from handlers import python_handlers, started_process

from train import pretrain
from train.common.errors import Preempted, UserError
from train.run import trainer
from train.run.stop import Stop
from train.step import inputs, programs
from train.store.checkpoint import Checkpoints

METHOD = replace(runs.VCYCLE, moments_up="exact")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return an experiment and the folder of its uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    # Log lines, validations and checkpoints fall on different steps, so that a checkpoint is saved
    # between two log lines.
    experiment = runs.experiment(
        folder, method=METHOD, log_every=3, eval_every=4, checkpoint_every=1
    )
    pretrain.run_experiment(experiment, folder / "run")
    return experiment, folder / "run"


def test_runs_stopped_between_phases_end_bitwise_identical(tmp_path, monkeypatch, whole):
    """Stop before and after checkpoints, on each side of every phase, until the run ends."""
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
            pretrain.run_experiment(whole[0], tmp_path)
    pretrain.run_experiment(whole[0], tmp_path)
    assert reached == list(stops)
    runs.assert_same_end(tmp_path, whole[1])


def test_a_finished_run_is_not_run_again_and_says_so(monkeypatch, capsys, whole):
    monkeypatch.setattr(programs, "step", None)
    assert pretrain.run_experiment(*whole)["steps"] == 10
    says = f"the run in {whole[1]} has already finished: there is nothing to do\n"
    assert capsys.readouterr().err == says


# --- signals ---

# The process is killed between the last write of Orbax and the checksums of the second checkpoint,
# so this checkpoint is never read.
MID_SAVE = """
import os, signal, sys
from pathlib import Path
from types import SimpleNamespace
import jax.numpy as jnp
from train.store import checkpoint
from train.plan.record import RunRecord
from train.state.model import TrainState
checkpoint.seal = lambda folder: os.kill(os.getpid(), signal.SIGKILL)
checkpoints = checkpoint.Checkpoints(Path(sys.argv[1]))
checkpoints.save(2, {"large": TrainState({"x": jnp.ones(9)}, None, None)}, SimpleNamespace(get_state=dict), RunRecord())
checkpoints.wait()
"""


def until(process: subprocess.Popen, reached) -> None:
    for _ in range(1200):
        if reached():
            return
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    raise TimeoutError


def test_kill_9_in_a_save(tmp_path, capsys, whole):
    run = tmp_path / "run"
    runs.killed(whole[0], run, 1)
    process = started_process([sys.executable, "-c", MID_SAVE, str(run / "checkpoints")], tmp_path)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == [".saving-2", "1"]
    capsys.readouterr()
    pretrain.run_experiment(whole[0], run)
    says = "checkpoint 2 is incomplete: its save was interrupted; deleted it\n"
    assert capsys.readouterr().err.startswith(says)
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["10", "9"]
    runs.assert_same_end(run, whole[1])


@pytest.mark.slow
def test_kill_9_between_phases_and_at_random(tmp_path, whole):
    run = tmp_path / "run"
    command = [sys.executable, "-m", "train.pretrain", runs.script(tmp_path, whole[0])]
    process = started_process([*command, "--workdir", str(run)], tmp_path)
    log = run / "metrics.jsonl"
    until(process, lambda: log.exists() and '"decoalesce' in log.read_text())
    time.sleep(random.random())
    process.kill()
    process.communicate()

    pretrain.run_experiment(whole[0], run)
    runs.assert_same_end(run, whole[1])


@pytest.mark.parametrize(
    ("number", "name", "code"),
    [(signal.SIGTERM, "SIGTERM", 75), (signal.SIGINT, "Ctrl-C", 130)],
    ids=["sigterm", "ctrl-c"],
)
def test_a_signal_saves_says_so_and_exits_with_its_code(
    tmp_path, monkeypatch, capsys, whole, number, name, code
):
    """The exit code 75 (EX_TEMPFAIL of sysexits.h) means: start the run again.

    Wrong input never gives this code.
    """
    rate, calls, run = inputs.learning_rate, count(1), tmp_path / "run"

    def interrupted(*arguments):
        if next(calls) == 4:  # the second step of the second phase, which is not logged
            signal.raise_signal(number)
        return rate(*arguments)

    experiment = replace(whole[0], checkpoint_every=100)
    with monkeypatch.context() as patch:
        patch.setattr(inputs, "learning_rate", interrupted)
        command = ["pretrain", runs.script(tmp_path, experiment), "--workdir", str(run)]
        patch.setattr(sys, "argv", command)
        capsys.readouterr()
        with python_handlers(), pytest.raises(SystemExit) as exit:
            pretrain.exits_cleanly(pretrain.main)
    assert exit.value.code == code
    says = f"stopped by {name}; saved a checkpoint at step 2 of train coarse1; run the same command to continue"
    assert capsys.readouterr().err.strip().splitlines()[-1] == says
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["2", "4"]
    pretrain.run_experiment(experiment, run)
    runs.assert_same_end(run, whole[1])


def test_ctrl_c_after_the_last_step_ends_the_command(tmp_path, monkeypatch):
    """`train.compare`, for example, must not start its next run."""
    validate = trainer.Trainer.validate

    def interrupted(self, step, model):
        validate(self, step, model)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(trainer.Trainer, "validate", interrupted)
    experiment = runs.experiment(tmp_path, steps=2)
    with python_handlers(), pytest.raises(Preempted, match="by Ctrl-C after the last") as stopped:
        trainer.run_experiment(experiment, tmp_path / "run")
    assert stopped.value.code == 130
    assert trainer.run_experiment(experiment, tmp_path / "run")["steps"] == 2  # has finished


def test_a_second_ctrl_c_ends_at_once(monkeypatch, capfd):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    with python_handlers(), Stop() as stop:
        assert not stop.asked()
        signal.raise_signal(signal.SIGINT)
        assert stop.asked() and codes == []
        assert "press Ctrl-C again to exit at once" in capfd.readouterr().err
        signal.raise_signal(signal.SIGINT)
        assert codes == [130] and "exited without saving" in capfd.readouterr().err
    # as shells do for processes in the background
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Stop() as stop:
            signal.raise_signal(signal.SIGINT)
            assert not stop.asked()
    finally:
        signal.signal(signal.SIGINT, before)


def test_checkpoints_by_time(tmp_path, monkeypatch):
    """Each reading of the fake clock takes one minute, and each save begins with a reading."""
    experiment = runs.experiment(tmp_path, checkpoint_every=100, checkpoint_minutes=2.0)
    save, minutes, saved = Checkpoints.save, count(), []
    clock = SimpleNamespace(monotonic=lambda: 60.0 * next(minutes))
    monkeypatch.setattr(trainer, "time", clock)
    monkeypatch.setattr(Checkpoints, "save", lambda *of: (saved.append(of[1]), save(*of)))
    pretrain.run_experiment(experiment, tmp_path / "run")
    assert saved == [2, 4, 6, 8]
    says = "checkpoint_minutes must be 0 or a number of minutes, but is -1"
    with pytest.raises(ValueError, match=says):
        replace(experiment, checkpoint_minutes=-1.0)


# --- damage ---


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, whole):
    """Return the folder of a run that was stopped after its fifth checkpoint."""
    folder = tmp_path_factory.mktemp("stopped")
    runs.killed(whole[0], folder / "run", 5)
    return folder / "run"


def files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def test_with_a_damaged_checkpoint_the_newest_whole_one_is_used(tmp_path, capsys, whole, stopped):
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    for path in files(run / "checkpoints" / "5"):
        if path.name != "SHA256SUMS":  # without it, the checkpoint would be incomplete
            cut(path)
    capsys.readouterr()
    # Settings that do not affect the result may change. Of these, only the log interval is visible,
    # and only in the log.
    changed = {"log_every": 1, "parallel": "mesh", "checkpoint_every": 7}
    pretrain.run_experiment(replace(whole[0], **changed), run)
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("checkpoint 5 is damaged") and said[0].endswith("; using 4")
    assert said[1] == "resuming at step 2 of coarse model"
    finer, coarser = (
        {(line["phase"], line["step"]) for line in runs.log(folder)} for folder in (run, whole[1])
    )
    # the same loss in the end
    assert finer > coarser and runs.log(run)[-1] == runs.log(whole[1])[-1]
    assert json.loads((run / "config.json").read_text()).items() >= changed.items()
    assert (run / "checkpoints" / "damaged-5").is_dir()  # kept


def test_without_a_whole_checkpoint_the_run_stops_with_one_line(tmp_path, whole, stopped):
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    for path in files(run / "checkpoints"):
        cut(path)
    before = runs.log(run)
    says = r"no checkpoint in .* is intact \(5: .*; 4: .*\); move the folder away"
    with pytest.raises(UserError, match=says):
        pretrain.run_experiment(whole[0], run)
    assert runs.log(run) == before

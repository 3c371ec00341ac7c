"""A command ends in the documented way, whenever it is asked to: see docs/howto/resume.md."""

import os
import signal
import subprocess
import sys
import time

import pytest
import runs
from handlers import ended_process, started_process, wait_for_handlers

from train import pretrain

STATUS = {signal.SIGTERM: 75, signal.SIGHUP: 75, signal.SIGINT: 130}
LATER = dict(zip(STATUS, (0.0, 0.2, 1.0), strict=True))


@pytest.mark.parametrize(("number", "later"), [
    pytest.param(number, later, marks=[pytest.mark.slow] * (LATER[number] != later))
    for number in STATUS for later in LATER.values()
])  # fmt: skip
def test_a_signal_during_the_imports_of_a_command(tmp_path, number, later):
    """The first import takes place after the handlers are installed, and the last one never ends."""
    config = tmp_path / "endless.py"
    config.write_text("import time\ntime.sleep(600)\n")
    command = [sys.executable, "-m", "train.pretrain", f"{config}:experiment", "--show"]
    process = started_process(command, tmp_path, stdout=subprocess.DEVNULL)
    wait_for_handlers(process)
    time.sleep(later)
    process.send_signal(number)
    status, line = ended_process(process)
    assert status == STATUS[number] and line.startswith("stopped by "), line


@pytest.mark.parametrize("what", ["stdout", pytest.param("stderr", marks=pytest.mark.slow)])
def test_a_closed_output_saves_and_ends(tmp_path, what):
    """As with `| head`: the reader ends before the run."""
    experiment = runs.experiment(tmp_path, steps=4000, checkpoint_every=4000, eval_every=2)
    read, write = os.pipe()
    command = [sys.executable, "-m", "train.pretrain", runs.script(tmp_path, experiment)]
    command += ["--workdir", "run"]
    process = started_process(command, tmp_path, stderr=write, stdout=subprocess.PIPE)
    os.close(write)
    with os.fdopen(read) as output:
        while "step=2/" not in output.readline():
            assert process.poll() is None
    process.communicate(timeout=300)
    assert process.returncode == 75
    (saved,) = (p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert 2 <= int(saved) < 4000


def test_outputs_that_are_closed_from_the_start(tmp_path):
    """No file of the run may become stdout or stderr."""
    experiment = runs.experiment(tmp_path, steps=2)
    config = runs.script(tmp_path, experiment)
    command = f"exec {sys.executable} -m train.pretrain {config} --workdir run >&- 2>&- <&-"
    process = started_process(["sh", "-c", command], tmp_path)
    process.communicate(timeout=300)
    assert process.returncode == 0
    assert pretrain.run_experiment(experiment, tmp_path / "run")["steps"] == 2


def test_a_table_whose_reader_has_ended(tmp_path):
    read, write = os.pipe()
    os.close(read)
    config = runs.script(tmp_path, runs.experiment(tmp_path))
    command = [sys.executable, "-m", "train.pretrain", config, "--show"]
    process = started_process(command, tmp_path, stdout=write)
    os.close(write)
    status, line = ended_process(process)
    assert status == 128 + signal.SIGPIPE
    assert line == "error: the output was closed before the command had finished"


# The process sends itself a signal at a moment of the run, or in a callback of the garbage collector,
# where Python ignores exceptions.
AT = """
import gc, os, signal, sys
from train.common import endings
endings.prepare_command()
number, collecting = getattr(signal, sys.argv.pop(1)), sys.argv.pop(1)
module, path = sys.argv.pop(1).split(":")
*parts, name = path.split(".")
import importlib
owner = importlib.import_module(module)
for part in parts:
    owner = getattr(owner, part)
before = getattr(owner, name)
def send(*_):
    gc.callbacks.clear()
    signal.raise_signal(number)
def act(*arguments, **more):
    if collecting:
        gc.callbacks.append(send)
        gc.collect()
    else:
        send()
    return before(*arguments, **more)
setattr(owner, name, act)
from train import pretrain
from train.common.errors import exits_cleanly
exits_cleanly(pretrain.main)
"""


@pytest.mark.parametrize(
    ("at", "number", "says"),
    [
        ("data.text:Data.sources", "SIGTERM", "SIGTERM; the same command continues"),
        pytest.param(
            *("run.trainer:Checkpoints.restore", "SIGHUP", "SIGHUP; the same command continues"),
            marks=pytest.mark.slow,
        ),
        ("run.trainer:Trainer.validate", "SIGHUP", "SIGHUP; saved a checkpoint at step 5"),
        pytest.param(
            *("run.trainer:Workdir.finish", "SIGTERM", "SIGTERM after the last step: the run in"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_signal_at_any_moment_has_the_documented_status(tmp_path, at, number, says):
    experiment = runs.experiment(tmp_path, steps=10, checkpoint_every=5)
    config = runs.script(tmp_path, experiment)
    command = [sys.executable, "-c", AT, number, "", f"train.{at}", config, "--workdir", "run"]
    status, line = ended_process(started_process(command, tmp_path))
    assert status == 75 and line.startswith(f"stopped by {says}"), line
    assert pretrain.run_experiment(experiment, tmp_path / "run")["steps"] == 10


@pytest.mark.parametrize("at", ["config.experiment:load_experiment", "data.text:Data.sources"])
def test_an_interrupt_in_a_callback_is_not_lost(tmp_path, at):
    experiment = runs.experiment(tmp_path, steps=10)
    command = [sys.executable, "-c", AT, "SIGINT", "collecting", f"train.{at}"]
    command += [runs.script(tmp_path, experiment), "--workdir", "run"]
    status, line = ended_process(started_process(command, tmp_path))
    assert status == 130 and line.startswith("stopped by Ctrl-C"), line
    assert not list(tmp_path.glob("run/checkpoints/*"))

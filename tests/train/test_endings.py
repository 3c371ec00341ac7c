"""A command ends in the documented way, whenever it is asked to: see docs/howto/resume.md."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import runs

from train import pretrain

ROOT = Path(__file__).parents[2]
# The process sends itself a signal at a moment of the run.
AT = """
import os, signal, sys
from train.common import endings
endings.prepare_command()
number = getattr(signal, sys.argv.pop(1))
module, path = sys.argv.pop(1).split(":")
*parts, name = path.split(".")
import importlib
owner = importlib.import_module(module)
for part in parts:
    owner = getattr(owner, part)
before = getattr(owner, name)
def act(*arguments, **more):
    signal.raise_signal(number)
    return before(*arguments, **more)
setattr(owner, name, act)
from train import pretrain
from train.common.errors import exits_cleanly
exits_cleanly(pretrain.main)
"""


def started(command: list[str], folder: Path, **options) -> subprocess.Popen:
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    options = {"stderr": subprocess.PIPE, "text": True} | options
    # A shell may have started the tests in the background, where processes ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(command, cwd=folder, env=environment, **options)
    finally:
        signal.signal(signal.SIGINT, before)


def ended(process: subprocess.Popen) -> tuple[int, str]:
    """Return the exit status, and the last line on stderr."""
    _, said = process.communicate(timeout=300)
    assert "Traceback" not in said
    return process.returncode, said.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("at", "number", "says"),
    [
        (
            "train.data.text:Data.sources",
            "SIGTERM",
            "stopped by SIGTERM; the same command continues",
        ),
        (
            "train.run.trainer:Checkpoints.restore",
            "SIGHUP",
            "stopped by SIGHUP; the same command continues",
        ),
        (
            "train.run.trainer:Trainer.validate",
            "SIGHUP",
            "stopped by SIGHUP; saved a checkpoint at step 5",
        ),
        (
            "train.run.trainer:Workdir.finish",
            "SIGTERM",
            "stopped by SIGTERM after the last step: the run in",
        ),
    ],
)
def test_a_signal_at_any_moment_has_the_documented_status(tmp_path, at, number, says):
    experiment = runs.experiment(tmp_path, steps=10, checkpoint_every=5)
    config = runs.script(tmp_path, experiment)
    command = [sys.executable, "-c", AT, number, at, config, "--workdir", "run"]
    status, line = ended(started(command, tmp_path))
    assert status == 75 and line.startswith(says), line
    assert pretrain.run_experiment(experiment, tmp_path / "run")["steps"] == 10


@pytest.mark.parametrize("later", [0.0, 0.2, 1.0])
def test_a_signal_during_the_imports_of_a_command(tmp_path, later):
    """The first import takes place after the handlers are installed."""
    command = [sys.executable, "-m", "train.pretrain", str(ROOT / "configs/demo.py:muon"), "--show"]
    for number, expected in {signal.SIGTERM: 75, signal.SIGHUP: 75, signal.SIGINT: 130}.items():
        process = started(command, tmp_path, stdout=subprocess.DEVNULL)
        where = Path(f"/proc/{process.pid}/status")
        # Python itself handles SIGINT earlier, so the test waits for SIGTERM, which comes with it.
        bit = 1 << ((signal.SIGTERM if number == signal.SIGINT else number) - 1)
        while not bit & int(re.search(r"SigCgt:\s*(\w+)", where.read_text())[1], 16):
            assert process.poll() is None
            time.sleep(0.001)
        time.sleep(later)
        process.send_signal(number)
        status, line = ended(process)
        assert status == expected and line.startswith("stopped by "), line


# The process gets Ctrl-C while XLA compiles a program that takes much longer than the test.
COMPILING = """
import os, signal, sys, threading
from train.common import endings
endings.prepare_command()
sys.argv.pop(1)
import jax, jax.numpy as jnp
from train.run.stop import Stop
from train.common.errors import exits_cleanly

def long(x):
    for i in range(4000):
        x = jnp.sin(x @ x) + i
    return x

lowered = jax.jit(long).lower(jnp.ones((8, 8)))

def main():
    with Stop() as stop:
        if "step" in sys.argv:
            stop.asked()
        for at in (0.3, 1.5)[: 1 + ("step" in sys.argv)]:
            threading.Timer(at, os.kill, (os.getpid(), signal.SIGINT)).start()
        # On CPUs, the compilation may go on in other threads until the program runs.
        lowered.compile()(jnp.ones((8, 8))).block_until_ready()
        print("compiled", file=sys.stderr)

exits_cleanly(main)
"""


@pytest.mark.parametrize(
    ("when", "lines"),
    [
        ("start", ["stopped by Ctrl-C; the same command continues"]),
        ("step", ["Ctrl-C: saving a checkpoint after this step", "interrupted again: exited"]),
    ],
)
def test_ctrl_c_does_not_wait_for_a_compilation(tmp_path, when, lines):
    process = started([sys.executable, "-c", COMPILING, "x", when], tmp_path)
    _, said = process.communicate(timeout=300)
    found = [line for line in said.splitlines() if "xla" not in line.lower()]
    assert process.returncode == 130 and len(found) == len(lines), said
    assert all(line.startswith(start) for line, start in zip(found, lines, strict=True)), said


@pytest.mark.parametrize("what", ["stdout", "stderr"])
def test_a_closed_output_saves_and_ends(tmp_path, what):
    """As with `| head`: the reader ends before the run."""
    experiment = runs.experiment(tmp_path, steps=4000, checkpoint_every=4000, eval_every=2)
    read, write = os.pipe()
    process = started(
        [
            sys.executable,
            "-m",
            "train.pretrain",
            runs.script(tmp_path, experiment),
            "--workdir",
            "run",
        ],
        tmp_path,
        stderr=write,
        stdout=subprocess.PIPE,
    )
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
    process = started(["sh", "-c", command], tmp_path)
    process.communicate(timeout=300)
    assert process.returncode == 0
    assert pretrain.run_experiment(experiment, tmp_path / "run")["steps"] == 2


def test_a_table_whose_reader_has_ended(tmp_path):
    read, write = os.pipe()
    os.close(read)
    config = runs.script(tmp_path, runs.experiment(tmp_path))
    command = [sys.executable, "-m", "train.pretrain", config, "--show"]
    process = started(command, tmp_path, stdout=write)
    os.close(write)
    status, line = ended(process)
    assert status == 128 + signal.SIGPIPE
    assert line == "error: the output was closed before the command had finished"


def test_a_jump_of_the_clock_ends_no_save(tmp_path, monkeypatch):
    now, jumps = time.time, [0.0]

    def jumping():
        jumps[0] += 3600.0
        return now() + jumps[0]

    experiment = runs.experiment(tmp_path, steps=4, checkpoint_every=2)
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", jumping)
        assert pretrain.run_experiment(experiment, tmp_path / "run")["steps"] == 4

"""A command ends in the documented way, whenever it is asked to: see docs/howto/resume.md."""

import sys
import time

import pytest
import runs
from handlers import ended_process, started_process

from train import pretrain

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


@pytest.mark.parametrize(
    ("at", "number", "says"),
    [
        ("run.trainer:Trainer.validate", "SIGHUP", "SIGHUP; saved a checkpoint at step 5"),
        *(
            pytest.param(*case, marks=pytest.mark.extra)
            for case in (
                ("data.text:Data.sources", "SIGTERM", "SIGTERM; the same command continues"),
                ("run.trainer:Checkpoints.restore", "SIGHUP", "SIGHUP; the same command continues"),
                (
                    "run.trainer:Workdir.finish",
                    "SIGTERM",
                    "SIGTERM after the last step: the run in",
                ),
            )
        ),
    ],
)
def test_a_signal_at_any_moment_has_the_documented_status(tmp_path, at, number, says):
    experiment = runs.experiment(tmp_path, steps=10, checkpoint_every=5)
    config = runs.script(tmp_path, experiment)
    command = [sys.executable, "-c", AT, number, f"train.{at}", config, "--workdir", "run"]
    status, line = ended_process(started_process(command, tmp_path))
    assert status == 75 and line.startswith(f"stopped by {says}"), line
    assert pretrain.run_experiment(experiment, tmp_path / "run")["steps"] == 10


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
        pytest.param(
            "start", ["stopped by Ctrl-C; the same command continues"], marks=pytest.mark.extra
        ),
        ("step", ["Ctrl-C: saving a checkpoint after this step", "interrupted again: exited"]),
    ],
)
def test_ctrl_c_does_not_wait_for_a_compilation(tmp_path, when, lines):
    process = started_process([sys.executable, "-c", COMPILING, "x", when], tmp_path)
    _, said = process.communicate(timeout=300)
    found = [line for line in said.splitlines() if "xla" not in line.lower()]
    assert process.returncode == 130 and len(found) == len(lines), said
    assert all(line.startswith(start) for line, start in zip(found, lines, strict=True)), said


def test_a_jump_of_the_clock_ends_no_save(tmp_path, monkeypatch):
    now, jumps = time.time, [0.0]

    def jumping():
        jumps[0] += 3600.0
        return now() + jumps[0]

    experiment = runs.experiment(tmp_path, steps=4, checkpoint_every=2)
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", jumping)
        assert pretrain.run_experiment(experiment, tmp_path / "run")["steps"] == 4

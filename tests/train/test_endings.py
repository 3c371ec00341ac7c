"""A command ends in the documented way, whenever it is asked to: see docs/howto/resume.md."""

import sys
import time

import pytest
import runs
from handlers import started_process

from train import pretrain

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


@pytest.mark.parametrize(("when", "lines"), [
    pytest.param("start", ["stopped by Ctrl-C; the same command continues"], marks=pytest.mark.extra),
    ("step", ["Ctrl-C: saving a checkpoint after this step", "interrupted again: exited"]),
])  # fmt: skip
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

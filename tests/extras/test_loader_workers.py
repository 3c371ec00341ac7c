"""Batches of windows contain every sample once per epoch, in every process layout, and resume."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import grain
import numpy as np
import pytest

from train.data.batches import training_batches
from train.data.windows import Windows

NUMBERS = np.arange(101)


def calls_a_sample(batch: int) -> float:
    """Count the Python calls per sample, in the consumer and in the threads that read ahead."""
    calls, made = [0], [0]

    class Counted(Windows):
        def sample(self, i, rng):
            made[0] += 1
            return super().sample(i, rng)

    def count(frame, event, arg):
        calls[0] += event == "call"

    stream = training_batches(Counted(np.arange(4 * 1000 + 1), 4), batch, seed=1)
    threading.setprofile(count)
    sys.setprofile(count)
    try:
        for taken in range(1, 5):
            next(stream)
            while made[0] < (taken + 4) * batch:
                time.sleep(0.01)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        stream.close()
    return calls[0] / made[0]


def test_a_sample_costs_no_more_in_a_large_batch():
    """The loader reads batches ahead. A buffer of samples cost a pass over it for each sample."""
    assert calls_a_sample(128) < calls_a_sample(8)


@pytest.mark.parametrize("batch", [5, 48])  # read in chunks of 1 and of 16
def test_batches_are_what_grain_makes_one_by_one(batch):
    """Earlier versions read single samples ahead, and their runs can resume."""
    source = Windows(np.arange(4 * 50 + 1), 4)
    samples = grain.MapDataset.range(50).seed(1).shuffle().repeat().random_map(source.sample)
    ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=8)
    plain = iter(samples.to_iter_dataset(ahead).batch(batch))
    stream = training_batches(source, batch, seed=1)
    for _ in range(4):
        for mine, theirs in zip(next(stream), next(plain), strict=True):
            np.testing.assert_array_equal(mine, theirs, strict=True)
        assert stream.get_state() == plain.get_state()


def drawing(workers: int) -> Windows:
    """Return samples together with their random draws."""

    class Drawing(Windows):
        def sample(self, i, rng):
            inputs, targets = super().sample(i, rng)
            return inputs, targets + rng.integers(1 << 20)

    source = Drawing(NUMBERS, 4)
    source.workers = workers
    return source


def test_workers_change_no_sample_and_no_state():
    """A stream resumes with another number of workers; an epoch has 2 1/2 batches."""
    thread, processes = (training_batches(drawing(n), 10, seed=1) for n in (0, 2))
    next(thread)
    processes.set_state(json.loads(json.dumps(thread.get_state())))
    for _ in range(4):
        for one, two in zip(next(thread), next(processes), strict=True):
            np.testing.assert_array_equal(one, two, strict=True)
    assert len(multiprocessing.active_children()) == 2
    thread.set_state(processes.get_state())
    np.testing.assert_array_equal(next(thread), next(processes))
    processes.close()
    assert multiprocessing.active_children() == []


SCRIPT = """
import multiprocessing, time, numpy as np
from train.data.batches import training_batches
from train.data.windows import Windows
if __name__ == "__main__":
    source = Windows(np.arange(101), 4)
    source.workers = 1
    stream = training_batches(source, 5, seed=1)
    next(stream)
    print(multiprocessing.active_children()[0].pid, flush=True)
    time.sleep(600)
"""


def test_no_worker_outlives_a_run_that_is_killed(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    how = {"env": os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}, "text": True}
    command = [sys.executable, tmp_path / "script.py"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, **how) as run:
        assert run.stdout is not None
        worker = int(run.stdout.readline())
        # Ctrl-C must not reach the child before the parent.
        assert os.getpgid(worker) != os.getpgid(run.pid)
        run.send_signal(signal.SIGKILL)
    state = Path(f"/proc/{worker}/status")
    for _ in range(600):
        if not state.exists() or "\nState:\tZ" in state.read_text():
            return
        time.sleep(0.1)
    raise AssertionError(f"worker {worker} is still there a minute later")

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

from train.common.errors import UserError
from train.data.batches import training_batches, validation_batches
from train.data.windows import Windows

NUMBERS = np.arange(101)
WINDOWS = Windows(NUMBERS, 4)  # 25 windows
RNG = np.random.default_rng(0)


def test_windows_predict_every_token_once():
    windows = Windows(NUMBERS, 4)
    assert len(windows) == 25
    samples = [windows.sample(i, RNG) for i in range(25)]
    assert [x.tolist() for x in samples[24]] == [[96, 97, 98, 99], [97, 98, 99, 100]]
    assert np.concatenate([targets for _, targets in samples]).tolist() == list(range(1, 101))
    assert [len(Windows(np.arange(n), 4)) for n in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]


def firsts(stream, count: int) -> list[int]:
    return [int(row[0]) for _ in range(count) for row in next(stream)[0]]


def test_every_window_once_an_epoch_in_another_order_each_time():
    seen = np.reshape(firsts(training_batches(WINDOWS, 5, seed=1), 15), (3, 25))
    for epoch in seen:
        assert sorted(epoch) == list(range(0, 100, 4))
    assert len({tuple(epoch) for epoch in seen}) == 3


def test_the_seed_decides_the_order():
    first, again, other = (firsts(training_batches(WINDOWS, 5, seed=s), 5) for s in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("processes", [2, 5])
def test_processes_share_out_the_batches_of_one(processes):
    whole = np.reshape(firsts(training_batches(WINDOWS, 10, seed=1), 5), (5, 10))
    shares = np.split(np.arange(10), processes)
    parts = [
        np.reshape(firsts(training_batches(WINDOWS, 10, 1, rows), 5), (5, -1)) for rows in shares
    ]
    np.testing.assert_array_equal(np.concatenate(parts, 1), whole)


@pytest.mark.parametrize("done", [0, 1, 4, 7])  # number of batches; an epoch has 5
def test_a_stream_goes_on_where_its_state_was_taken(done):
    stream, again = (training_batches(WINDOWS, 5, seed=1) for _ in range(2))
    firsts(stream, done)
    again.set_state(json.loads(json.dumps(stream.get_state())))
    assert firsts(stream, 8) == firsts(again, 8)


@pytest.mark.parametrize(
    "before, after", [(1, 2), *(pytest.param(*n, marks=pytest.mark.slow) for n in ((2, 5), (5, 1)))]
)
def test_any_number_of_processes_can_resume(before, after):
    """The state describes the global batch and is identical in all processes."""

    def shares(processes):
        return [
            training_batches(WINDOWS, 10, 1, rows) for rows in np.split(np.arange(10), processes)
        ]

    whole = firsts(training_batches(WINDOWS, 10, seed=1), 7)
    began, on = shares(before), shares(after)
    for stream in began:
        firsts(stream, 3)
    (state,) = {json.dumps(stream.get_state()) for stream in began}
    for stream in on:
        stream.set_state(json.loads(state))
    parts = [np.reshape(firsts(stream, 4), (4, -1)) for stream in on]
    assert np.concatenate(parts, 1).ravel().tolist() == whole[30:]


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
    """The loader prefetches batches, so the cost per sample does not grow with the batch size.

    A buffer of samples cost one pass over the buffer per sample.
    """
    small, large = calls_a_sample(8), calls_a_sample(128)
    assert large < small


@pytest.mark.parametrize("batch", [5, 48])  # read in chunks of 1 and of 16
def test_batches_are_what_grain_makes_one_by_one(batch):
    """The order and the state of the samples are the same as with prefetching of single samples.

    Earlier versions prefetched single samples, and their runs can resume.
    """
    source = Windows(np.arange(4 * 50 + 1), 4)
    samples = grain.MapDataset.range(50).seed(1).shuffle().repeat().random_map(source.sample)
    plain = iter(
        samples.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=8)).batch(
            batch
        )
    )
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
    thread, processes = (
        training_batches(drawing(0), 10, seed=1),
        training_batches(drawing(2), 10, seed=1),
    )
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
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.Popen(
        [sys.executable, tmp_path / "script.py"], stdout=subprocess.PIPE, text=True, env=env
    )
    with run:
        assert run.stdout is not None
        worker = int(run.stdout.readline())
        # Ctrl-C must not reach the child before the parent.
        assert os.getpgid(worker) != os.getpgid(run.pid)
        run.send_signal(signal.SIGKILL)
    for _ in range(600):
        if (
            not Path(f"/proc/{worker}").exists()
            or "\nState:\tZ" in Path(f"/proc/{worker}/status").read_text()
        ):
            return
        time.sleep(0.1)
    raise AssertionError(f"worker {worker} is still there a minute later")


def test_a_training_text_smaller_than_a_batch_is_refused():
    with pytest.raises(UserError, match="25 windows of 4 tokens, less than one batch of 26"):
        training_batches(WINDOWS, 26, seed=1)


def test_validation_is_the_same_batches_spread_over_the_text():
    first, again = (validation_batches(WINDOWS, batch=3, count=4) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    starts = np.ravel([inputs for inputs, _ in first])[::4]
    assert len(first) == 4 and len(set(starts)) == 12 and starts[0] == 0 and starts[-1] == 96
    assert len(validation_batches(WINDOWS, batch=3, count=100)) == 8  # all samples of the split


def test_processes_share_out_validation():
    parts = [validation_batches(WINDOWS, 6, 3, rows) for rows in np.split(np.arange(6), 2)]
    np.testing.assert_array_equal(
        validation_batches(WINDOWS, batch=6, count=3), np.concatenate(parts, axis=2)
    )


def test_a_validation_text_below_one_batch_is_an_error():
    with pytest.raises(
        UserError, match=r"less than one batch of 26: lower batch, or give more validation data"
    ):
        validation_batches(WINDOWS, batch=26, count=1)


@pytest.mark.parametrize("seed", [0, 2**32 - 1])
def test_grain_takes_every_seed_that_an_experiment_may_have(seed):
    assert isinstance(training_batches(WINDOWS, 5, seed), grain.DatasetIterator)

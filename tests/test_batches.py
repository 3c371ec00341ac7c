"""Batches of windows: every sample once an epoch, the same in every process layout, resumable."""

import json

import grain
import jax
import numpy as np
import pytest

from train.batches import Windows, training, validation
from train.errors import UserError

NUMBERS = np.arange(101)
WINDOWS = Windows(NUMBERS, 4)  # 25 of them
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
    seen = np.reshape(firsts(training(WINDOWS, 5, seed=1), 15), (3, 25))
    for epoch in seen:
        assert sorted(epoch) == list(range(0, 100, 4))
    assert len({tuple(epoch) for epoch in seen}) == 3


def test_the_seed_decides_the_order():
    first, again, other = (firsts(training(WINDOWS, 5, seed=s), 5) for s in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("processes", [2, 5])
def test_processes_share_out_the_batches_of_one(monkeypatch, processes):
    whole = np.reshape(firsts(training(WINDOWS, 10, seed=1), 5), (5, 10))
    parts = []
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    for index in range(processes):
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        parts.append(np.reshape(firsts(training(WINDOWS, 10 // processes, seed=1), 5), (5, -1)))
    for step in range(5):
        assert sorted(np.concatenate([p[step] for p in parts])) == sorted(whole[step])


@pytest.mark.parametrize("done", [0, 1, 4, 7])  # batches; an epoch is 5
def test_a_stream_goes_on_where_its_state_was_taken(done):
    stream, again = (training(WINDOWS, 5, seed=1) for _ in range(2))
    firsts(stream, done)
    again.set_state(json.loads(json.dumps(stream.get_state())))
    assert firsts(stream, 8) == firsts(again, 8)


def test_a_training_text_smaller_than_a_batch_is_refused():
    with pytest.raises(UserError, match="25 windows of 4 tokens, less than one batch of 26"):
        training(WINDOWS, 26, seed=1)


def test_validation_is_the_same_batches_spread_over_the_text():
    first, again = (validation(WINDOWS, batch=3, count=4) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    starts = np.ravel([inputs for inputs, _ in first])[::4]
    assert len(first) == 4 and len(set(starts)) == 12 and starts[0] == 0 and starts[-1] == 96
    assert len(validation(WINDOWS, batch=3, count=100)) == 8  # as many as there are


def test_processes_share_out_validation(monkeypatch):
    whole = validation(WINDOWS, batch=6, count=3)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    parts = []
    for index in range(2):
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        parts.append(validation(WINDOWS, batch=6, count=3))
    np.testing.assert_array_equal(whole, np.concatenate(parts, axis=2))


def test_a_validation_text_smaller_than_a_batch_is_refused_with_the_way_out():
    with pytest.raises(UserError, match=r"less than one batch of 26; raise data.valid_fraction, or lower batch"):
        validation(WINDOWS, batch=26, count=1)


@pytest.mark.parametrize("seed", [0, 2**32 - 1])
def test_grain_takes_every_seed_that_an_experiment_may_have(seed):
    assert isinstance(training(WINDOWS, 5, seed), grain.DatasetIterator)

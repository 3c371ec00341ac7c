"""Batches of windows contain every sample once per epoch, in every process layout, and resume."""

import json

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
    samples = [WINDOWS.sample(i, RNG) for i in range(len(WINDOWS))]
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


@pytest.mark.parametrize(("done", "before", "after"), [(0, 1, 1), (3, 1, 2), (7, 2, 5)])
def test_any_number_of_processes_can_resume(done, before, after):
    """The state describes the global batch and is identical in all processes."""

    def shares(processes):
        of = np.split(np.arange(10), processes)
        return [training_batches(WINDOWS, 10, 1, rows) for rows in of]

    whole = firsts(training_batches(WINDOWS, 10, seed=1), done + 4)
    began, on = shares(before), shares(after)
    for stream in began:
        firsts(stream, done)
    (state,) = {json.dumps(stream.get_state()) for stream in began}
    for stream in on:
        stream.set_state(json.loads(state))
    parts = [np.reshape(firsts(stream, 4), (4, -1)) for stream in on]
    assert np.concatenate(parts, 1).ravel().tolist() == whole[10 * done :]


def test_a_text_smaller_than_a_batch_is_refused():
    with pytest.raises(UserError, match="25 windows of 4 tokens, less than one batch of 26"):
        training_batches(WINDOWS, 26, seed=1)
    says = r"less than one batch of 26: lower batch, or give more validation data"
    with pytest.raises(UserError, match=says):
        validation_batches(WINDOWS, batch=26, count=1)


def test_validation_is_the_same_batches_spread_over_the_text():
    first, again = (validation_batches(WINDOWS, batch=3, count=4) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    starts = np.ravel([inputs for inputs, _ in first])[::4]
    assert len(first) == 4 and len(set(starts)) == 12 and starts[0] == 0 and starts[-1] == 96
    assert len(validation_batches(WINDOWS, batch=3, count=100)) == 8  # all samples of the split


def test_processes_share_out_validation():
    parts = [validation_batches(WINDOWS, 6, 3, rows) for rows in np.split(np.arange(6), 2)]
    np.testing.assert_array_equal(validation_batches(WINDOWS, 6, 3), np.concatenate(parts, axis=2))


@pytest.mark.parametrize("seed", [0, 2**32 - 1])
def test_grain_takes_every_seed_that_an_experiment_may_have(seed):
    assert isinstance(training_batches(WINDOWS, 5, seed), grain.DatasetIterator)

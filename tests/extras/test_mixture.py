"""A mixture has the shares of its weights, and each of its sources keeps its order."""

import json
import random
import shutil
from dataclasses import replace
from fractions import Fraction

import mixtures
import numpy as np
import pytest
import runs
from mixtures import MIXED, mixed_data

from train import pretrain
from train.common.errors import UserError
from train.config.experiment import load_experiment
from train.data.batches import seed_of, training_batches
from train.data.windows import Windows
from train.extras.text.mixing import read_corpora
from train.extras.text.mixture import Mixture, as_shares
from train.extras.text.reading import read_tokens
from train.run import trainer

SIZES = (25, 7, 50)  # windows of each source


def windows(number: int, size: int) -> Windows:
    """A source whose tokens name the source (the thousands) and the window."""
    return Windows(1000 * number + np.arange(4 * size + 1) // 4, 4)


def mixture(weights=(5.0, 2.0, 3.0), sizes=SIZES) -> Mixture:
    parts = {f"s{i}": windows(i, size) for i, size in enumerate(sizes)}
    return Mixture(parts, as_shares(weights))


def drawn(stream, batches: int) -> np.ndarray:
    """The source and the window of each sample."""
    firsts = np.concatenate([next(stream)[0][:, 0] for _ in range(batches)])
    return np.stack([firsts // 1000, firsts % 1000], 1)


def of_source(found: np.ndarray, number: int) -> list[int]:
    return found[found[:, 0] == number, 1].tolist()


def random_weights(seed: int) -> list[float]:
    rng = random.Random(seed)
    return [round(10 ** rng.uniform(-2, 2), 3) for _ in range(rng.randint(2, 7))]


@pytest.mark.parametrize("seed", range(20))
def test_the_shares_of_every_window_are_those_of_the_weights(seed):
    """No window of samples has four samples more or fewer of a source than its share."""
    shares = as_shares(random_weights(seed))
    mixed = Mixture({str(i): windows(i, 3) for i in range(len(shares))}, shares)
    assert sum(shares) == 1
    chosen = np.array([mixed.place(n)[0] for n in range(5000)])
    for number, share in enumerate(shares):
        counts = np.concatenate([[0], np.cumsum(chosen == number)])
        difference = counts - float(share) * np.arange(5001)
        # The largest difference of a window is that between two of its ends.
        assert np.ptp(difference) < 3.36, (share, shares)


@pytest.mark.parametrize("seed", range(5))
def test_places_and_counts_agree_at_any_position(seed):
    mixed = Mixture({}, as_shares(random_weights(seed)))
    for position in (0, 1, 17, 10**6, 10**15 + 3):
        number, own = mixed.place(position)
        before, after = mixed.counts(position), mixed.counts(position + 1)
        assert sum(before) == position and before[number] == own
        assert np.flatnonzero(np.subtract(after, before)).tolist() == [number]
        assert sum(after) == position + 1


def test_weights_are_exact_and_divided_by_their_sum():
    assert as_shares([0.7, 0.3]) == [Fraction(7, 10), Fraction(3, 10)]
    assert as_shares([7, 3]) == as_shares([0.7, 0.3]) == as_shares([1.4, 0.6])
    assert as_shares([1e-9, 1]) == [Fraction(1, 10**9 + 1), Fraction(10**9, 10**9 + 1)]


@pytest.mark.parametrize("seed", [1, 2**32 - 1])
def test_each_source_has_the_order_and_the_epochs_that_it_has_alone(seed):
    mixed = mixture()
    found = drawn(training_batches(mixed, 10, seed), 20)
    for number, part in enumerate(mixed.parts.values()):
        alone = drawn(training_batches(part, 1, seed_of(seed, number)), 100)
        mine = of_source(found, number)
        assert mine == of_source(alone, number)[: len(mine)]
        epochs = np.array(mine[: len(mine) // SIZES[number] * SIZES[number]])
        for epoch in epochs.reshape(-1, SIZES[number]):
            assert sorted(epoch) == list(range(SIZES[number]))


def test_another_source_changes_neither_the_order_nor_the_places_of_the_first_one():
    one, two = (drawn(training_batches(mixture(sizes=s), 10, 3), 20) for s in (SIZES, (25, 9, 13)))
    np.testing.assert_array_equal(one[one[:, 0] == 0], two[two[:, 0] == 0])
    np.testing.assert_array_equal(one[:, 0], two[:, 0])
    three = drawn(training_batches(mixture(weights=(1.0, 1.0, 8.0)), 10, 3), 20)
    shorter = of_source(three, 0)
    assert shorter and shorter == of_source(one, 0)[: len(shorter)]


@pytest.mark.parametrize(("processes", "done"), [(2, 0), (5, 3)])
def test_a_mixture_resumes_with_any_number_of_processes(processes, done):
    whole = drawn(training_batches(mixture(), 10, 1), 12).reshape(12, 10, 2)
    before = training_batches(mixture(), 10, 1)
    drawn(before, done) if done else None
    parts = []
    for rows in np.split(np.arange(10), processes):
        stream = training_batches(mixture(), 10, 1, rows)
        stream.set_state(json.loads(json.dumps(before.get_state())))
        parts.append(drawn(stream, 12 - done).reshape(12 - done, -1, 2))
    np.testing.assert_array_equal(np.concatenate(parts, 1), whole[done:])


def test_a_source_goes_on_after_samples_that_were_read_before():
    orders = [(4, 30), (5, 0), (6, 7)]
    found = drawn(training_batches(mixture(), 10, 1, orders=orders), 20)
    for number, (seed, first) in enumerate(orders):
        alone = drawn(training_batches(windows(number, SIZES[number]), 1, seed, first=first), 100)
        mine = of_source(found, number)
        assert mine == of_source(alone, number)[: len(mine)]


@pytest.fixture
def home(tmp_path):
    return mixtures.two_corpora(tmp_path)


def test_a_mixture_is_counted_by_source_and_resumes_exactly(home, capsys):
    trainer._say_once.cache_clear()  # another test may have printed the same line
    experiment = runs.experiment(home, data=mixed_data(home, MIXED), checkpoint_every=1)
    result = pretrain.run_experiment(experiment, home / "whole")
    assert result["source_tokens"] == {"low": 44 * 8, "high": 20 * 8}
    assert result["phases"][0]["source_tokens"] == result["source_tokens"]
    assert sum(result["source_tokens"].values()) == result["tokens"]
    assert result["source_epochs"] == {"low": 44 / 225, "high": 20 / 112}
    last = runs.log(home / "whole")[-1]
    assert (last["tokens/low"], last["tokens/high"]) == (44 * 8, 20 * 8)
    said = capsys.readouterr().err
    assert "a mixture of samples: 70.0% low (weight 0.7), 30.0% high (weight 0.3)" in said
    assert "data: low: 8 files, 8 documents" in said
    assert "the sources have been read: low 0.20 times, high 0.18 times" in said
    runs.killed(experiment, home / "killed", 3)
    # The weights belong to the data of a run.
    other = replace(experiment, data=mixed_data(home, {"low": 1.0, "high": 1.0}))
    says = r"other data: 70.000% low \+ 30.000% high .* there, 50.000"
    with pytest.raises(UserError, match=says):
        pretrain.run_experiment(other, home / "killed")
    runs.stopped(experiment, home / "killed", 5)
    runs.assert_same_end(home / "killed", home / "whole")


def test_without_validation_text_each_source_holds_out_a_part(home):
    found = read_corpora(mixed_data(home, MIXED))
    assert {name: len(part) for name, part in found.valid.items()} == {"low": 602, "high": 301}
    for name, part in found.valid.items():
        alone = read_tokens(mixed_data(home, name))
        np.testing.assert_array_equal(part, alone.valid)
        np.testing.assert_array_equal(found.train[name], alone.train)


def test_a_single_source_is_no_mixture_and_the_weights_are_by_default_the_tokens(home):
    plain = mixed_data(home, "low")
    assert mixed_data(home, {"low": 3.0}) == mixed_data(home, ["low"]) == plain
    found = read_corpora(mixed_data(home, ["low", "high"]))
    assert found.shares == as_shares([1806, 903])
    says = "data: a mixture of samples: 66.7% low (1,806 tokens), 33.3% high (903 tokens)"
    assert found.report[0] == says


WRONG = {
    "a weight of zero": ("{low: 0, high: 1}", r"weight of .*low is 0.0, .* leave out a path"),
    "a negative weight": ("{low: -1, high: 1}", r"weight of .*low is -1.0"),
    "no number": ("{low: much, high: 1}", r"cannot be read at 'low: much': write it as {wiki: 0.7"),
    "no weight": ("{low, high: 1}", "cannot be read at 'low': write it as"),
    "not closed": ("{low: 1, high: 1", "write it as {wiki: 0.7, code: 0.3}"),
    "nothing": ("{}", "data.path is empty: name at least one"),
    "twice": ("{low: 1, ./low: 2}", "names low and ./low, which are the same: give it once"),
    "infinite": ("{low: inf, high: 1}", "weight of low is inf"),
    "equal paths": ("{low: 1, low: 2}", "names low and low, which are the same"),
    "unknown": ("{low: 1, lower: 1}", "there is no corpus at lower"),
    "no match": ("{low: 1, low/*.json: 1}", r"no file matches low/\*.json; correct the pattern"),
    "overlap": ("[low, low/1*.txt]", r"reads .*low/1.txt twice, in low and in low/1\*.txt"),
    "a copy": ("[low, copy]", "names the same text twice, in low and in copy: leave out one"),
    "empty": ("[low, empty]", "the train text of the corpus is empty: .*empty"),
    "short": ("[low, short]", "training text of short in data.path is less than one sample of 8"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_mixture_is_one_line(home, monkeypatch, case):
    given, says = WRONG[case]
    monkeypatch.chdir(home)
    shutil.copytree(home / "low", home / "copy")
    for name, content in (("empty", ""), ("short", "a")):
        (home / name).mkdir()
        for i in range(4):
            (home / name / f"{i}.txt").write_text(content)
    config = runs.script(home, runs.experiment(home))
    with pytest.raises(UserError, match=says) as found:
        experiment = load_experiment(config, [f"data.path={given}"])
        experiment.data.sources(experiment.model)
    assert "\n" not in str(found.value)

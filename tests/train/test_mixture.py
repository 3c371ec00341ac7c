"""A mixture has the shares of its weights, and each of its sources keeps its order."""

import json
import random
import re
import shutil
from dataclasses import replace
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import runs

from jaxgrow.models import BERTConfig
from train import pretrain
from train.analysis.comparing import set_losses
from train.analysis.runs import Run
from train.common.errors import UserError
from train.config.experiment import experiment_json, load_experiment, with_steps
from train.data import text
from train.data.batches import training_batches
from train.data.mixture import Mixture, as_shares, seed_of
from train.data.text import Data, read_corpora, read_tokens
from train.data.windows import Windows
from train.extras.images.images import Images
from train.extras.labelled.task import Labelled
from train.extras.text.mixed_paths import source_names
from train.extras.text.mixing import training_text
from train.plan.methods import Continue
from train.store.origin import Origin
from train.store.workdir import Workdir

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
        assert [b - a for a, b in zip(before, after, strict=True)] == [
            int(i == number) for i in range(len(before))
        ]


def test_weights_are_exact_and_divided_by_their_sum():
    assert as_shares([0.7, 0.3]) == [Fraction(7, 10), Fraction(3, 10)]
    assert as_shares([7, 3]) == as_shares([0.7, 0.3]) == as_shares([1.4, 0.6])
    assert as_shares([1e-9, 1]) == [Fraction(1, 10**9 + 1), Fraction(10**9, 10**9 + 1)]


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_each_source_has_the_order_and_the_epochs_that_it_has_alone(seed):
    mixed = mixture()
    found = drawn(training_batches(mixed, 10, seed), 40)
    for number, part in enumerate(mixed.parts.values()):
        alone = drawn(training_batches(part, 1, seed_of(seed, number)), 250)
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


@pytest.mark.parametrize("processes", [2, 5])
@pytest.mark.parametrize("done", [0, 3])
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


def test_names_are_as_short_as_they_can_be():
    assert source_names(["wiki", "code"]) == ["wiki", "code"]
    assert source_names(["/data/wiki", "/data/code/"]) == ["wiki", "code"]
    assert source_names(["a/train", "b/train"]) == ["a/train", "b/train"]
    assert source_names(["a/*.jsonl.gz", "b/**/*.txt"]) == ["a/_.jsonl.gz", "b/__/_.txt"]
    assert source_names(["*.txt", "*.md"]) == ["_.txt", "_.md"]
    assert source_names(["a?", "a*"]) == ["0", "1"]


@pytest.fixture
def home(tmp_path):
    """Two corpora, of lower-case and of upper-case letters, and two validation files."""
    runs.corpus(tmp_path).rename(tmp_path / "low")
    runs.corpus(tmp_path, 4).rename(tmp_path / "high")
    for file in (tmp_path / "high").iterdir():
        file.write_text(file.read_text().upper())
    (tmp_path / "v.txt").write_text("hello world " * 50)
    (tmp_path / "w.txt").write_text("more of the world " * 60)
    return tmp_path


def settings(home, path, valid_path=None, **changes) -> Data:
    """Data in ``home``; names of files there become paths."""
    data = Data("text", "x", valid_fraction=0.25, cache=str(home / "cache"))
    return replace(data, path=_in(home, path), valid_path=_in(home, valid_path), **changes)


def _in(home, given):
    if isinstance(given, dict):
        if all(isinstance(value, str) for value in given.values()):
            return {name: str(home / path) for name, path in given.items()}
        return {str(home / path): weight for path, weight in given.items()}
    if isinstance(given, list):
        return [str(home / path) for path in given]
    return given if given is None else str(home / given)


MIXED = {"low": 0.7, "high": 0.3}


def test_a_mixture_is_counted_by_source_and_resumes_exactly(home, capsys):
    experiment = runs.experiment(home, data=settings(home, MIXED), checkpoint_every=1)
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
    runs.stopped(experiment, home / "killed", 3, 5)
    runs.assert_same_end(home / "killed", home / "whole")
    runs.killed(experiment, home / "other", 3)
    pretrain.run_experiment(replace(experiment, accumulate=2), home / "other")
    assert (
        json.loads((home / "other" / "result.json").read_text())["source_tokens"]
        == (result["source_tokens"])
    )
    # The weights belong to the data of a run.
    runs.killed(experiment, home / "weights", 3)
    with pytest.raises(
        UserError, match=r"other data: 70.000% low \+ 30.000% high .* there, 50.000"
    ):
        pretrain.run_experiment(
            replace(experiment, data=settings(home, {"low": 1.0, "high": 1.0})), home / "weights"
        )


def test_each_validation_set_has_a_loss_and_their_mean_is_the_loss(home, capsys):
    sets = {"prose": "v.txt", "more": "w.txt"}
    experiment = runs.experiment(home, data=settings(home, MIXED, sets))
    result = pretrain.run_experiment(experiment, home / "run")
    one, two = result["val_loss/prose"], result["val_loss/more"]
    assert one != two and result["val_loss"] == pytest.approx((one + two) / 2)
    assert result["corpus"]["evaluated"] == 32
    assert json.loads((home / "run" / "metrics.jsonl").read_text().splitlines()[-1])[
        "val_loss/more"
    ] == pytest.approx(two)
    assert "val_loss/prose=" in (said := capsys.readouterr().err)
    assert "data: validation sets: prose 601 tokens, more 1,081 tokens" in said
    # The text of the sources is complete.
    assert "low: 8 files, 8 documents, 2,400 bytes, 2,408 training tokens\n" in said
    # The same sets of a single source, and a set without a name.
    alone = replace(experiment, data=settings(home, "low", sets))
    assert pretrain.run_experiment(alone, home / "alone").keys() >= {
        "val_loss/prose",
        "val_loss/more",
    }
    named = replace(experiment, data=settings(home, MIXED, "v.txt"))
    result = pretrain.run_experiment(named, home / "unnamed")
    assert not [key for key in result if key.startswith("val_loss/")] and result["val_loss"]


def test_without_validation_text_each_source_holds_out_a_part(home):
    found = read_corpora(settings(home, MIXED))
    assert {name: len(part) for name, part in found.valid.items()} == {"low": 602, "high": 301}
    for name, part in found.valid.items():
        alone = read_tokens(settings(home, name))
        np.testing.assert_array_equal(part, alone.valid)
        np.testing.assert_array_equal(found.train[name], alone.train)


def test_a_single_source_is_not_a_mixture(home):
    plain = settings(home, "low")
    assert settings(home, {"low": 3.0}) == settings(home, ["low"]) == plain


def test_another_mixture_tokenises_nothing_again(home, monkeypatch):
    sets = {"prose": "v.txt"}
    read_corpora(settings(home, MIXED))
    read_corpora(settings(home, MIXED, sets))
    made = []
    real = text._make
    monkeypatch.setattr(text, "_make", lambda *given: made.append(given[1].path) or real(*given))
    other = read_corpora(settings(home, {"high": 1.0, "low": 9.0}))
    assert other.shares == [Fraction(1, 10), Fraction(9, 10)]
    read_corpora(settings(home, ["low", "high"], sets))
    assert made == []
    read_corpora(settings(home, MIXED, sets | {"more": "w.txt"}))
    assert made == [str(home / "w.txt")]


def test_without_weights_each_source_has_the_share_of_its_tokens(home):
    found = read_corpora(settings(home, ["low", "high"]))
    assert found.shares == as_shares([1806, 903])
    assert found.report[0] == (
        "data: a mixture of samples: 66.7% low (1,806 tokens), 33.3% high (903 tokens)"
    )


def test_a_run_on_another_mixture_goes_on_in_each_source(home, capsys):
    first = runs.experiment(home, data=settings(home, MIXED))
    pretrain.run_experiment(first, home / "first")
    other = settings(home, {"high": 1.0, "low": 1.0})
    second = replace(first, data=other, method=Continue("first"), seed=9)
    result = pretrain.run_experiment(second, home / "second")
    said = capsys.readouterr().err
    assert "low: the data go on at sample 44 in the order of seed 0, where" in said
    assert "high: the data go on at sample 20 in the order of seed" in said
    ends = [(part["first"], part["last"]) for part in result["order"]["parts"].values()]
    assert ends == [(20, 52), (44, 76)]
    assert result["source_tokens"] == {"low": 76 * 8, "high": 52 * 8}
    # A run on one of the sources continues as well.
    alone = replace(first, data=settings(home, "high"), method=Continue("second"))
    assert pretrain.run_experiment(alone, home / "third")["order"]["first"] == 52
    # The same command, after the result was lost, has the same order.
    (home / "second" / "result.json").unlink()
    assert pretrain.run_experiment(second, home / "second")["order"] == result["order"]


def test_a_branch_of_a_mixture_goes_on_bitwise(home):
    experiment = runs.experiment(home, data=settings(home, MIXED), checkpoint_every=4)
    pretrain.run_experiment(experiment, home / "whole")
    pretrain.run_experiment(
        experiment, home / "new", start=Origin(Workdir(home / "whole").folder, 4)
    )
    runs.assert_same_end(home / "new", home / "whole")


def test_a_branch_with_other_weights_goes_on_in_each_source(home, capsys):
    first = runs.experiment(home, data=settings(home, MIXED), checkpoint_every=4)
    pretrain.run_experiment(first, home / "first")
    data = settings(home, {"high": 1.0, "low": 1.0})
    start = Origin(Workdir(home / "first").folder, 4)
    other = replace(first, data=data)
    result = pretrain.run_experiment(other, home / "new", start=start)
    said = capsys.readouterr().err
    assert "low: the data go on at sample 22 in the order of seed 0, where" in said
    assert "start from the beginning" not in said
    ends = [(part["first"], part["last"]) for part in result["order"]["parts"].values()]
    assert ends == [(10, 26), (22, 38)]
    # A run on one source branches into a mixture, also after it was killed and its source is gone.
    alone = runs.experiment(home, data=settings(home, "low"))
    pretrain.run_experiment(alone, home / "alone")
    longer = replace(alone, data=settings(home, MIXED), steps=12, checkpoint_every=2)
    start = Origin(Workdir(home / "alone").folder, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain, "run_experiment", partial(pretrain.run_experiment, start=start))
        runs.killed(longer, home / "longer", 10)
    (home / "alone").rename(home / "gone")
    result = pretrain.run_experiment(longer, home / "longer")
    firsts = [part["first"] for part in result["order"]["parts"].values()]
    assert firsts == [64, 0] and result["source_tokens"] == {"low": 22 * 8, "high": 10 * 8}


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


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("data.path={wiki: 0.7, code/*.gz: 0.3}", {"wiki": 0.7, "code/*.gz": 0.3}),
        ("data.path={'wiki': 7, 'code': 3,}", {"wiki": 7.0, "code": 3.0}),
        ('data.path={"a, b": 1, "c": 2}', {"a, b": 1.0, "c": 2.0}),
        ("data.path={*.txt: 1e-3, 2023:1}", {"*.txt": 0.001, "2023": 1.0}),
        ("data.path=[wiki, code]", ("wiki", "code")),
        ("data.path=[*.txt, 2023, no]", ("*.txt", "2023", "no")),
        ("data.path=['wiki', 'code']", ("wiki", "code")),
        ("data.path=[ab]*.txt", "[ab]*.txt"),
        ("data.valid_path={wiki: c:/w.txt, code: d.txt}", {"wiki": "c:/w.txt", "code": "d.txt"}),
    ],
)
def test_the_command_line_and_config_json_have_mixtures(home, given, expected):
    defaults = runs.experiment(home, data=settings(home, "low", valid_fraction=0.02))
    experiment = load_experiment(runs.script(home, defaults), [given])
    name = given.partition("=")[0].removeprefix("data.")
    assert getattr(experiment.data, name) == expected
    # The config in Python, and pairs of a path and a weight, give the same.
    assert load_experiment(runs.script(home, experiment)) == experiment
    plain = list(expected) if isinstance(expected, tuple) else expected
    assert experiment_json(experiment)["data"]["Data"][name] == plain
    if isinstance(expected, dict):
        other = replace(experiment.data, **{name: list(expected.items())})
        assert other == experiment.data


@pytest.mark.parametrize("given", ["{a b: c.txt}", "{a: b, a: c}", "{a}"])
def test_a_wrong_validation_path_is_one_line(home, given):
    with pytest.raises(UserError, match=r"data\.valid_path") as found:
        load_experiment(runs.script(home, runs.experiment(home)), [f"data.valid_path={given}"])
    assert "\n" not in str(found.value)


def test_other_sources_and_kinds_of_data_refuse_a_mixture():
    for make in (
        lambda: Data(path={"a": 1, "b": 1}),
        lambda: Data("tfds", name="wiki40b/en", path=["a", "b"]),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=r"only for data\.source=text and data\.source=tokens"):
            make()
    for make in (
        lambda: Images("folder", path="{a: 0.7, b: 0.3}"),
        lambda: Images("folder", path=["a", "b"]),  # type: ignore[arg-type]
        lambda: Labelled("sst2", path={"a": 0.7, "b": 0.3}),  # type: ignore[arg-type]
        lambda: Labelled("table", path="a.csv", valid_path="{b: c}"),
    ):
        with pytest.raises(ValueError, match=r"only text and token ids .* can be a mixture"):
            make()


def test_a_source_that_holds_out_too_little_says_how_to_get_more(home):
    data = settings(home, MIXED)
    with pytest.raises(
        UserError, match=r"raise data.valid_fraction=0.25 .* or set data.valid_path"
    ):
        pretrain.run_experiment(runs.experiment(home, data=data, batch=64), home / "run")
    sets = {"prose": "v.txt", "more": "w.txt"}
    data = settings(home, MIXED, sets)
    with pytest.raises(UserError, match=r"data.valid_path=.*v.txt, the set prose"):
        pretrain.run_experiment(runs.experiment(home, data=data, batch=80), home / "run")


def documents(folder, **files: str):
    """Write JSON Lines with one document each."""
    folder.mkdir(parents=True)
    for name, letter in files.items():
        (folder / f"{name.replace('_', '-')}.jsonl").write_text(json.dumps({"text": letter * 9}))
    return folder


def read(data) -> tuple[str, str]:
    """The letters of the training text and of the validation text."""
    found = read_tokens(data)
    return tuple("".join(sorted({chr(i) for i in p if i})) for p in (found.train, found.valid))  # type: ignore[return-value]


def test_files_that_match_a_pattern_are_held_out_by_their_names(home):
    hub = documents(home / "hub/data", train_0="a", train_1="b", validation_0="v", test_0="t")
    documents(home / "hub/.hidden", train_0="h")
    documents(home / "hub/data/more", train_2="c")
    (hub / "README.md").write_text("r" * 9)
    for pattern, expected in (
        ("hub/data/*.jsonl", ("ab", "v")),
        ("hub/*", ("abc", "v")),
        ("hub/**/*.jsonl", ("abc", "v")),
        ("hub/**/*", ("abc", "v")),
    ):
        assert read(settings(home, pattern)) == expected, pattern
    train = settings(home, "hub/data/train-*.jsonl", "hub/data/validation-*")
    assert read(train) == ("ab", "v")
    assert read(settings(home, "hub/data/*.md", "hub/data/test-0.jsonl")) == ("r", "t")
    wrong = settings(home, "hub/data/[vt]*-0.jsonl", splits="auto")
    assert read(wrong) == ("a", "v")
    wrong = settings(home, "hub/data/validation-*")
    with pytest.raises(UserError, match=r"no training file.*set data\.splits=ignore"):
        read_tokens(wrong)
    out = replace(wrong, splits="ignore", valid_path=str(hub / "test-0.jsonl"))
    assert read(out) == ("v", "t")


def test_each_source_has_its_own_splits_and_files_of_validation_sets_are_not_trained_on(home):
    documents(home / "hub", train_0="a", validation_0="v", test_0="t")
    found = read_corpora(settings(home, ["low", "hub"]))
    assert {chr(i) for i in found.valid["hub"] if i} == {"v"}
    assert len(found.valid["low"]) == 602
    assert any("hub: by their names, there are 1 training file" in line for line in found.report)
    sets = {"prose": "v.txt", "part": "low/0.txt"}
    with_sets = read_corpora(settings(home, ["low", "hub"], sets))
    assert len(with_sets.train["low"]) == 7 * 301 and [*with_sets.valid] == [*sets]
    assert {chr(i) for i in with_sets.train["hub"] if i} == {"a"}


def test_folders_of_token_ids_are_mixed(home):
    pq = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    for folder, low in (("one", 0), ("two", 300)):
        (home / folder).mkdir()
        for split, size in (("train", 200), ("val", 40)):
            ids = low + np.arange(size, dtype=np.uint16)
            ids.tofile(home / folder / f"{split}.bin")
    (home / "table").mkdir()
    for split in ("train", "validation"):
        rows = [[700, 701, 702]] * 30
        pq.write_table(pa.table({"input_ids": rows}), home / "table" / f"{split}-0.parquet")
    data = settings(home, {"one": 1, "two": 2, "table": 1}, source="tokens", tokenizer="none")
    found = read_corpora(data)
    assert found.vocab == 703
    assert {name: len(part) for name, part in found.train.items()} == {
        "one": 200, "two": 200, "table": 90,
    }  # fmt: skip
    assert {name: int(part.min()) for name, part in found.valid.items()} == {
        "one": 0, "two": 300, "table": 700,
    }  # fmt: skip
    with pytest.raises(UserError, match=r"largest id of the tokens is 702, .* raise model\.vocab"):
        data.sources(runs.MODEL)


def test_masked_models_epochs_and_tokenizers_read_mixtures(home):
    data = settings(home, MIXED)
    bert = BERTConfig(vocab=256, context=8, layers=2, embed=8, heads=2, head_dim=4, mlp=16)
    mixed, valid = data.sources(bert)
    inputs, _ = next(training_batches(mixed, 4, 0))
    assert inputs["tokens"].shape == (4, 8) and [*valid] == ["low", "high"]
    experiment = runs.experiment(home, data=data, steps=0, epochs=2.0)
    assert with_steps(experiment).steps == round(2 * (225 + 112) / 8)
    letters = set("".join(training_text(data)))
    assert letters == set("abcd efgh\nABCD EFGH\n")


def test_the_losses_of_validation_sets_are_compared(home):
    folders = []
    for name, seed in (("one", 0), ("two", 1)):
        experiment = runs.experiment(home, data=settings(home, MIXED), seed=seed)
        pretrain.run_experiment(experiment, home / name)
        folders.append(Run(name, seed, home / name))
    found = set_losses([[run] for run in folders])
    assert found == {
        f"val_loss/{source}": [[run.result[f"val_loss/{source}"]] for run in folders]
        for source in ("low", "high")
    }
    plain = runs.experiment(home, data=settings(home, "low"))
    pretrain.run_experiment(plain, home / "plain")
    assert set_losses([[folders[0]], [Run("plain", 0, home / "plain")]]) == {}


def test_the_files_of_a_mixture_may_move_and_its_weights_may_not_change(home):
    experiment = runs.experiment(home, data=settings(home, MIXED))
    pretrain.run_experiment(experiment, home / "run")
    (home / "moved").mkdir()
    for name in MIXED:
        (home / name).rename(home / "moved" / name)
    moved = replace(experiment, data=settings(home / "moved", MIXED, cache=str(home / "cache")))
    assert pretrain.run_experiment(moved, home / "run")["steps"] == 8
    # Another order gives other batches, and the message says so. Its advice is followed here.
    turned = settings(home / "moved", {"high": 0.3, "low": 0.7}, cache=str(home / "cache"))
    with pytest.raises(UserError, match=r"order in data\.path, which decides the batches") as said:
        pretrain.run_experiment(replace(experiment, data=turned), home / "run")
    names = str(said.value).partition("in the order ")[2].partition(", or give")[0].split(", ")
    again = {name: MIXED[name] for name in names}
    data = settings(home / "moved", again, cache=str(home / "cache"))
    assert pretrain.run_experiment(replace(experiment, data=data), home / "run")["steps"] == 8
    other = settings(home / "moved", {"low": 0.6, "high": 0.4}, cache=str(home / "cache"))
    with pytest.raises(UserError, match=r"60\.000% low"):
        pretrain.run_experiment(replace(experiment, data=other), home / "run")


def test_a_source_that_is_the_validation_text_is_named(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(name * 3000)
    paths = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    with pytest.raises(UserError, match=rf"file of data\.valid_path={re.escape(paths[1])}; name"):
        read_corpora(
            Data(path=paths, valid_path=paths[1], source="text", cache=str(tmp_path / "cache"))
        )

"""Runs on mixtures: validation sets, continued runs, settings and splits."""

import json
import re
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path

import mixtures
import numpy as np
import pytest
import runs
from mixtures import MIXED, mixed_data

from jaxgrow.models import BERTConfig
from train import pretrain
from train.analysis.comparing import set_losses
from train.analysis.runs import Run
from train.common.errors import UserError
from train.config.experiment import experiment_json, load_experiment, with_steps
from train.data.batches import training_batches
from train.data.text import Data
from train.extras.images.images import Images
from train.extras.labelled.task import Labelled
from train.extras.text import reading
from train.extras.text.mixed_paths import source_names
from train.extras.text.mixing import read_corpora, training_text
from train.extras.text.reading import read_tokens
from train.plan.methods import Continue


def test_names_are_as_short_as_they_can_be():
    assert source_names(["wiki", "code"]) == ["wiki", "code"]
    assert source_names(["/data/wiki", "/data/code/"]) == ["wiki", "code"]
    assert source_names(["a/train", "b/train"]) == ["a/train", "b/train"]
    assert source_names(["a/*.jsonl.gz", "b/**/*.txt"]) == ["a/_.jsonl.gz", "b/__/_.txt"]
    assert source_names(["*.txt", "*.md"]) == ["_.txt", "_.md"]
    assert source_names(["a?", "a*"]) == ["0", "1"]


@pytest.fixture
def home(tmp_path):
    return mixtures.two_corpora(tmp_path)


def test_each_validation_set_has_a_loss_and_their_mean_is_the_loss(home, capsys):
    sets = {"prose": "v.txt", "more": "w.txt"}
    experiment = runs.experiment(home, data=mixed_data(home, MIXED, sets))
    result = pretrain.run_experiment(experiment, home / "run")
    one, two = result["val_loss/prose"], result["val_loss/more"]
    assert one != two and result["val_loss"] == pytest.approx((one + two) / 2)
    assert result["corpus"]["evaluated"] == 32
    last = runs.log(home / "run")[-1]
    assert last["val_loss/more"] == pytest.approx(two)
    assert "val_loss/prose=" in (said := capsys.readouterr().err)
    assert "data: validation sets: prose 601 tokens, more 1,081 tokens" in said
    # The text of the sources is complete.
    assert "low: 8 files, 8 documents, 2,400 bytes, 2,408 training tokens\n" in said
    # The same sets of a single source, and a set without a name.
    alone = replace(experiment, data=mixed_data(home, "low", sets))
    result = pretrain.run_experiment(alone, home / "alone")
    assert result.keys() >= {"val_loss/prose", "val_loss/more"}
    named = replace(experiment, data=mixed_data(home, MIXED, "v.txt"))
    result = pretrain.run_experiment(named, home / "unnamed")
    assert not [key for key in result if key.startswith("val_loss/")] and result["val_loss"]


def test_another_mixture_tokenises_nothing_again(home, monkeypatch):
    sets = {"prose": "v.txt"}
    read_corpora(mixed_data(home, MIXED))
    read_corpora(mixed_data(home, MIXED, sets))
    made = []
    real = reading._make
    monkeypatch.setattr(reading, "_make", lambda *given: made.append(given[1].path) or real(*given))
    other = read_corpora(mixed_data(home, {"high": 1.0, "low": 9.0}))
    assert other.shares == [Fraction(1, 10), Fraction(9, 10)]
    read_corpora(mixed_data(home, ["low", "high"], sets))
    assert made == []
    read_corpora(mixed_data(home, MIXED, sets | {"more": "w.txt"}))
    assert made == [str(home / "w.txt")]


def test_a_run_on_another_mixture_goes_on_in_each_source(home, capsys):
    first = runs.experiment(home, data=mixed_data(home, MIXED))
    pretrain.run_experiment(first, home / "first")
    other = mixed_data(home, {"high": 1.0, "low": 1.0})
    second = replace(first, data=other, method=Continue("first"), seed=9)
    result = pretrain.run_experiment(second, home / "second")
    said = capsys.readouterr().err
    assert "low: the data go on at sample 44 in the order of seed 0, where" in said
    assert "high: the data go on at sample 20 in the order of seed" in said
    ends = [(part["first"], part["last"]) for part in result["order"]["parts"].values()]
    assert ends == [(20, 52), (44, 76)]
    assert result["source_tokens"] == {"low": 76 * 8, "high": 52 * 8}
    # A run on one of the sources continues as well.
    alone = replace(first, data=mixed_data(home, "high"), method=Continue("second"))
    assert pretrain.run_experiment(alone, home / "third")["order"]["first"] == 52
    # The same command, after the result was lost, has the same order.
    (home / "second" / "result.json").unlink()
    assert pretrain.run_experiment(second, home / "second")["order"] == result["order"]


def test_a_run_counts_its_sources_alike_if_it_resumes_with_micro_batches(home):
    experiment = runs.experiment(home, data=mixed_data(home, MIXED), checkpoint_every=1)
    runs.killed(experiment, home / "run", 3)
    result = pretrain.run_experiment(replace(experiment, accumulate=2), home / "run")
    assert result["source_tokens"] == {"low": 44 * 8, "high": 20 * 8}


def test_a_branch_goes_on_in_each_source_also_with_other_weights(home, capsys):
    first = runs.experiment(home, data=mixed_data(home, MIXED), checkpoint_every=4)
    pretrain.run_experiment(first, home / "first")
    start = f"{home}/first@4"
    pretrain.run_experiment(first, home / "same", start=start)
    runs.assert_same_end(home / "same", home / "first")
    capsys.readouterr()
    data = mixed_data(home, {"high": 1.0, "low": 1.0})
    other = replace(first, data=data)
    result = pretrain.run_experiment(other, home / "new", start=start)
    said = capsys.readouterr().err
    assert "low: the data go on at sample 22 in the order of seed 0, where" in said
    assert "start from the beginning" not in said
    ends = [(part["first"], part["last"]) for part in result["order"]["parts"].values()]
    assert ends == [(10, 26), (22, 38)]
    # A run on one source branches into a mixture, also after it was killed and its source is gone.
    alone = runs.experiment(home, data=mixed_data(home, "low"))
    pretrain.run_experiment(alone, home / "alone")
    longer = replace(alone, data=mixed_data(home, MIXED), steps=12, checkpoint_every=2)
    start = f"{home}/alone@8"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain, "run_experiment", partial(pretrain.run_experiment, start=start))
        runs.killed(longer, home / "longer", 10)
    (home / "alone").rename(home / "gone")
    result = pretrain.run_experiment(longer, home / "longer")
    firsts = [part["first"] for part in result["order"]["parts"].values()]
    assert firsts == [64, 0] and result["source_tokens"] == {"low": 22 * 8, "high": 10 * 8}


@pytest.mark.parametrize(("given", "expected"), [
    ("data.path={wiki: 0.7, code/*.gz: 0.3}", {"wiki": 0.7, "code/*.gz": 0.3}),
    ("data.path={'wiki': 7, 'code': 3,}", {"wiki": 7.0, "code": 3.0}),
    ('data.path={"a, b": 1, "c": 2}', {"a, b": 1.0, "c": 2.0}),
    ("data.path={*.txt: 1e-3, 2023:1}", {"*.txt": 0.001, "2023": 1.0}),
    ("data.path=[*.txt, 2023, no]", ("*.txt", "2023", "no")),
    ("data.path=['wiki', 'code']", ("wiki", "code")),
    ("data.path=[ab]*.txt", "[ab]*.txt"),
    ("data.valid_path={wiki: c:/w.txt, code: d.txt}", {"wiki": "c:/w.txt", "code": "d.txt"}),
])  # fmt: skip
def test_the_command_line_and_config_json_have_mixtures(home, given, expected):
    defaults = runs.experiment(home, data=mixed_data(home, "low", valid_fraction=0.02))
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


@pytest.mark.parametrize(("make", "says"), [
    *((make, r"only for data\.source=text and data\.source=tokens") for make in (
        lambda: Data(path={"a": 1, "b": 1}), lambda: Data("tfds", name="wiki40b/en", path=["a", "b"]))),
    *((make, r"only text and token ids .* can be a mixture") for make in (
        lambda: Images("folder", path="{a: 0.7, b: 0.3}"), lambda: Images("folder", path=["a", "b"]),
        lambda: Labelled("sst2", path={"a": 0.7, "b": 0.3}), lambda: Labelled("table", path="a.csv", valid_path="{b: c}"))),
])  # fmt: skip
def test_other_sources_and_kinds_of_data_refuse_a_mixture(make, says):
    with pytest.raises(ValueError, match=says):
        make()


@pytest.mark.parametrize(("sets", "batch", "says"), [
    (None, 64, r"raise data.valid_fraction=0.25 .* or set data.valid_path"),
    ({"prose": "v.txt", "more": "w.txt"}, 80, r"data.valid_path=.*v.txt, the set prose"),
])  # fmt: skip
def test_a_source_that_holds_out_too_little_says_how_to_get_more(home, sets, batch, says):
    data = mixed_data(home, MIXED, sets)
    with pytest.raises(UserError, match=says):
        pretrain.run_experiment(runs.experiment(home, data=data, batch=batch), home / "run")


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
        assert read(mixed_data(home, pattern)) == expected, pattern
    train = mixed_data(home, "hub/data/train-*.jsonl", "hub/data/validation-*")
    assert read(train) == ("ab", "v")
    assert read(mixed_data(home, "hub/data/*.md", "hub/data/test-0.jsonl")) == ("r", "t")
    assert read(mixed_data(home, "hub/data/[vt]*-0.jsonl", splits="auto")) == ("a", "v")
    wrong = mixed_data(home, "hub/data/validation-*")
    with pytest.raises(UserError, match=r"no training file.*set data\.splits=ignore"):
        read_tokens(wrong)
    out = replace(wrong, splits="ignore", valid_path=str(hub / "test-0.jsonl"))
    assert read(out) == ("v", "t")


def test_each_source_has_its_own_splits_and_files_of_validation_sets_are_not_trained_on(home):
    documents(home / "hub", train_0="a", validation_0="v", test_0="t")
    found = read_corpora(mixed_data(home, ["low", "hub"]))
    assert {chr(i) for i in found.valid["hub"] if i} == {"v"}
    assert len(found.valid["low"]) == 602
    assert any("hub: by their names, there are 1 training file" in line for line in found.report)
    sets = {"prose": "v.txt", "part": "low/0.txt"}
    with_sets = read_corpora(mixed_data(home, ["low", "hub"], sets))
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
    data = mixed_data(home, {"one": 1, "two": 2, "table": 1}, source="tokens", tokenizer="none")
    found = read_corpora(data)
    assert found.vocab == 703
    sizes = {name: len(part) for name, part in found.train.items()}
    assert sizes == {"one": 200, "two": 200, "table": 90}
    firsts = {name: int(part.min()) for name, part in found.valid.items()}
    assert firsts == {"one": 0, "two": 300, "table": 700}
    with pytest.raises(UserError, match=r"largest id of the tokens is 702, .* raise model\.vocab"):
        data.sources(runs.MODEL)


def test_masked_models_epochs_and_tokenizers_read_mixtures(home):
    data = mixed_data(home, MIXED)
    bert = BERTConfig(vocab=256, context=8, layers=2, embed=8, heads=2, head_dim=4, mlp=16)
    mixed, valid = data.sources(bert)
    inputs, _ = next(training_batches(mixed, 4, 0))
    assert inputs["tokens"].shape == (4, 8) and [*valid] == ["low", "high"]
    experiment = runs.experiment(home, data=data, steps=0, epochs=2.0)
    assert with_steps(experiment).steps == round(2 * (225 + 112) / 8)
    letters = set("".join(training_text(data)))
    assert letters == set("abcd efgh\nABCD EFGH\n")


def test_the_losses_of_validation_sets_are_compared():
    """Only the sets that all runs have."""

    def run(**losses):
        made = Run("run", 0, Path())
        vars(made).update(result={"val_loss": 1.0, **losses})
        return made

    both = [[run(**{"val_loss/low": n, "val_loss/high": n + 1})] for n in (2.0, 3.0)]
    found = {"val_loss/low": [[2.0], [3.0]], "val_loss/high": [[3.0], [4.0]]}
    assert set_losses(both) == found
    assert set_losses([both[0], [run()]]) == {}


def test_the_files_of_a_mixture_may_move_and_its_weights_may_not_change(home):
    experiment = runs.experiment(home, data=mixed_data(home, MIXED))
    pretrain.run_experiment(experiment, home / "run")
    (home / "moved").mkdir()
    for name in MIXED:
        (home / name).rename(home / "moved" / name)
    moved = replace(experiment, data=mixed_data(home / "moved", MIXED, cache=str(home / "cache")))
    assert pretrain.run_experiment(moved, home / "run")["steps"] == 8
    # Another order gives other batches, and the message says so. Its advice is followed here.
    turned = mixed_data(home / "moved", {"high": 0.3, "low": 0.7}, cache=str(home / "cache"))
    with pytest.raises(UserError, match=r"order in data\.path, which decides the batches") as said:
        pretrain.run_experiment(replace(experiment, data=turned), home / "run")
    names = str(said.value).partition("in the order ")[2].partition(", or give")[0].split(", ")
    assert names == [*MIXED]
    other = mixed_data(home / "moved", {"low": 0.6, "high": 0.4}, cache=str(home / "cache"))
    with pytest.raises(UserError, match=r"60\.000% low"):
        pretrain.run_experiment(replace(experiment, data=other), home / "run")


def test_a_source_that_is_the_validation_text_is_named(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(name * 3000)
    paths = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    data = Data(path=paths, valid_path=paths[1], source="text", cache=str(tmp_path / "cache"))
    with pytest.raises(UserError, match=rf"file of data\.valid_path={re.escape(paths[1])}; name"):
        read_corpora(data)

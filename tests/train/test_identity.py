"""Resuming with different training data is an error; moving the files is fine."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import runs
from tokenizers import Tokenizer, models

from train import pretrain
from train.common.errors import UserError
from train.data.text import Data


def write(path: Path, offset: int = 0) -> str:
    vocabulary = {chr(i): (i + offset) % 256 for i in range(256)}
    Tokenizer(models.BPE(vocab=vocabulary, merges=[])).save(str(path))
    return str(path)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Return an experiment, and the folder of its run, which was killed after two steps."""
    folder = tmp_path_factory.mktemp("stopped")
    e = runs.experiment(folder, checkpoint_every=2)
    e = replace(e, data=replace(e.data, tokenizer=write(folder / "some.json")))
    runs.killed(e, folder / "run", 2)
    return e, folder


@pytest.fixture
def run(tmp_path, stopped):
    """Return a copy of the experiment and of the folder of its run."""
    shutil.copytree(stopped[1], tmp_path / "all")
    data = replace(stopped[0].data, **{
        name: getattr(stopped[0].data, name).replace(str(stopped[1]), str(tmp_path / "all"))
        for name in ("path", "cache", "tokenizer")
    })  # fmt: skip
    return replace(stopped[0], data=data), tmp_path / "all" / "run"


def contents(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def texts(data: Data) -> list[str]:
    return [Path(f"{data.path}/{i}.txt").read_text() for i in range(8)]


def written(data: Data, new: dict[int, str]) -> Data:
    for i, text in new.items():
        Path(f"{data.path}/{i}.txt").write_text(text)
    return data


CHANGES = {
    "a file": lambda data, p: written(data, {0: texts(data)[0][::-1]}),
    "one more file": lambda data, p: written(data, {8: "another"}),
    "two swapped files": lambda data, p: written(data, dict(enumerate(texts(data)[1::-1]))),
    "the held-out part": lambda data, p: written(data, {3: "a" * 300}),
    "the tokenizer": lambda data, p: replace(data, tokenizer=write(p / "other.json", offset=1)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_other_data_are_refused_and_both_named(run, tmp_path, change):
    experiment, folder = run
    began = json.loads((folder / "config.json").read_text())["corpus"]
    data = change(experiment.data, tmp_path)
    here, before = data.identity(runs.MODEL), contents(folder)
    says = r"was started with other data: .* there, .* here; restore the original data"
    with pytest.raises(UserError, match=says) as refused:
        pretrain.run_experiment(replace(experiment, data=data), folder)
    changed = [key for key in ("train", "valid", "tokenizer") if began[key] != here[key]]
    named = [corpus[key][:12] for corpus in (began, here) for key in changed]
    assert changed and all(name in str(refused.value) for name in named)
    assert contents(folder) == before


def test_the_same_data_elsewhere_and_touched_are_the_same(run, tmp_path):
    """A new folder, name, file time or cache does not change the identity of the data.

    The run is moved, finished and moved again.
    """
    (experiment, folder), data = run, run[0].data
    elsewhere = Path(shutil.copytree(data.path, tmp_path / "else" / "where"))
    for file in elsewhere.iterdir():
        os.utime(file, ns=(0, 0))
    moved = {"path": str(elsewhere), "cache": str(tmp_path / "another")}
    moved["tokenizer"] = str(shutil.copy(data.tokenizer, tmp_path / "moved.json"))
    shutil.rmtree(data.path)
    moved = replace(data, **moved)
    result = pretrain.run_experiment(replace(experiment, data=moved), folder)
    assert result["corpus"] == moved.identity(runs.MODEL) | {"evaluated": 16}
    assert result["steps"] == 8
    again = replace(moved, path=str(shutil.copytree(elsewhere, tmp_path / "again")))
    assert pretrain.run_experiment(replace(experiment, data=again), folder) == result
    written(again, {0: texts(again)[0][::-1]})
    with pytest.raises(UserError, match="was started with other data"):
        pretrain.run_experiment(replace(experiment, data=again), folder)

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


def write(path: Path, offset: int = 0) -> str:
    Tokenizer(models.BPE(vocab={chr(i): (i + offset) % 256 for i in range(256)}, merges=[])).save(
        str(path)
    )
    return str(path)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Return an experiment, and the folder of its run, which was killed after two steps."""
    folder = tmp_path_factory.mktemp("stopped")
    experiment = runs.experiment(folder, checkpoint_every=2)
    experiment = replace(
        experiment, data=replace(experiment.data, tokenizer=write(folder / "some.json"))
    )
    runs.killed(experiment, folder / "run", 2)
    return experiment, folder


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


def reverse_lines(data, tmp_path):
    file = Path(data.path) / "0.txt"
    file.write_text(file.read_text()[::-1])
    return {}


def add_a_file(data, tmp_path):
    (Path(data.path) / "8.txt").write_text("another")
    return {}


def swap_two(data, tmp_path):
    one, two = Path(data.path) / "0.txt", Path(data.path) / "1.txt"
    one.rename(tmp_path / "x")
    two.rename(one)
    (tmp_path / "x").rename(two)
    return {}


def change_the_held_out(data, tmp_path):
    (Path(data.path) / "3.txt").write_text("a" * 300)
    return {}


def another_tokenizer(data, tmp_path):
    return {"tokenizer": write(tmp_path / "other.json", offset=1)}


def another_corpus(data, tmp_path):
    shutil.copytree(data.path, tmp_path / "other")
    (tmp_path / "other" / "0.txt").write_text("another")
    return {"path": str(tmp_path / "other")}


@pytest.mark.parametrize(
    "change",
    [reverse_lines, add_a_file, swap_two, change_the_held_out, another_tokenizer, another_corpus],
)
def test_other_data_are_refused_and_both_named(run, tmp_path, change):
    experiment, folder = run
    began = json.loads((folder / "config.json").read_text())["corpus"]
    data = replace(experiment.data, **change(experiment.data, tmp_path))
    here = data.identity(runs.MODEL)
    before = contents(folder)
    with pytest.raises(
        UserError,
        match=r"was started with other data: .* there, .* here; restore the original data",
    ) as refused:
        pretrain.run_experiment(replace(experiment, data=data), folder)
    changed = [key for key in ("train", "valid", "tokenizer") if began[key] != here[key]]
    assert changed and all(
        c[key][:12] in str(refused.value) for c in (began, here) for key in changed
    )
    assert contents(folder) == before


def test_the_same_data_elsewhere_and_touched_are_the_same(run, tmp_path):
    """A new folder, name, file time or cache does not change the identity of the data.

    The run is moved, finished and moved again.
    """
    experiment, folder = run
    elsewhere = Path(shutil.copytree(experiment.data.path, tmp_path / "else" / "where"))
    for file in elsewhere.iterdir():
        os.utime(file, ns=(0, 0))
    tokenizer = str(shutil.copy(experiment.data.tokenizer, tmp_path / "moved.json"))
    shutil.rmtree(experiment.data.path)
    moved = replace(
        experiment.data, path=str(elsewhere), tokenizer=tokenizer, cache=str(tmp_path / "another")
    )
    result = pretrain.run_experiment(replace(experiment, data=moved), folder)
    assert result["corpus"] == moved.identity(runs.MODEL) | {"evaluated": 16}
    assert result["steps"] == 8
    again = replace(moved, path=str(shutil.copytree(elsewhere, tmp_path / "again")))
    assert pretrain.run_experiment(replace(experiment, data=again), folder) == result
    reverse_lines(again, tmp_path)
    with pytest.raises(UserError, match="was started with other data"):
        pretrain.run_experiment(replace(experiment, data=again), folder)

"""Resuming with different training data is an error; moving the files is fine."""

import platform
import shutil
from dataclasses import replace
from pathlib import Path

import runs
from pictures import picture, tree

from train.extras.images.images import Images, read_images


def test_the_embedded_corpus_says_of_which_python_it_is(tmp_path, monkeypatch):
    for i in range(4):
        (tmp_path / f"{i}.py").write_text("pass\n" * (i + 1))
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    data = replace(runs.experiment(tmp_path).data, source="stdlib", valid_fraction=0.5)
    found = data.identity(runs.MODEL)
    assert (found["name"], found["tokenizer"]) == ("stdlib", "bytes")
    assert found["python"] == platform.python_version()
    (tmp_path / "3.py").write_text("another patch")
    other = data.identity(runs.MODEL)
    assert other["valid"] != found["valid"] and other["train"] == found["train"]


def test_images_are_known_by_their_pixels_classes_and_split(tmp_path):
    folder = tree(tmp_path / "tree")
    data = Images("folder", str(folder), valid_fraction=0.25, cache=str(tmp_path / "c"))

    def known(**other):
        identity = read_images(replace(data, **other)).identity
        return identity["train"], identity["valid"]

    first = known()
    assert read_images(data).identity["name"] == "tree"
    moved = Path(shutil.copytree(folder, tmp_path / "moved"))
    assert known(path=str(moved)) == first
    assert known(workers=3, cache=str(tmp_path / "d")) == first
    assert known(valid_fraction=0.5) != first != known(size=10)
    (moved / "ant").rename(moved / "zebra")
    assert known(path=str(moved)) != first
    (moved / "zebra").rename(moved / "ant")
    picture(77).save(moved / "ant" / "0.png")
    assert known(path=str(moved)) != first
    assert first != known(source="digits") != known(source="digits", valid_fraction=0.5)

"""Resuming with different training data is an error; moving the files is fine."""

import platform
import shutil
from dataclasses import replace
from pathlib import Path

import runs
from pictures import picture, tree

from train.extras.images.images import Images, read_images


def test_the_embedded_corpus_says_of_which_python_it_is(tmp_path, monkeypatch):
    library = tmp_path / "lib"
    library.mkdir()
    for i in range(4):
        (library / f"{i}.py").write_text("pass\n" * (i + 1))
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(library))
    data = replace(runs.experiment(tmp_path).data, source="stdlib", valid_fraction=0.5)
    found = data.identity(runs.MODEL)
    assert (found["name"], found["tokenizer"], found["python"]) == (
        "stdlib",
        "bytes",
        platform.python_version(),
    )
    (library / "3.py").write_text("another patch")
    other = data.identity(runs.MODEL)
    assert other["valid"] != found["valid"] and other["train"] == found["train"]


def test_images_are_known_by_their_pixels_classes_and_split(tmp_path):
    def known(path: str, **other):
        settings = {"valid_fraction": 0.25, "cache": str(tmp_path / "c")} | other
        return read_images(Images("folder", path, **settings)).identity

    def what(identity):
        return identity["train"], identity["valid"]

    folder = str(tree(tmp_path / "tree"))
    first = known(folder)
    moved = Path(shutil.copytree(folder, tmp_path / "moved"))
    assert first["name"] == "tree" and what(known(str(moved))) == what(first)
    assert what(known(folder, workers=3, cache=str(tmp_path / "d"))) == what(first)
    assert what(known(folder, valid_fraction=0.5)) != what(first)
    assert what(known(folder, size=10)) != what(first)
    (moved / "ant").rename(moved / "zebra")
    assert what(known(str(moved))) != what(first)
    (moved / "zebra").rename(moved / "ant")
    picture(77).save(moved / "ant" / "0.png")
    assert what(known(str(moved))) != what(first)
    digits = what(read_images(Images()).identity)
    other = what(read_images(Images(valid_fraction=0.5)).identity)
    assert digits != other and digits != what(first)

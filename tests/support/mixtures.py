"""Two small corpora, and the data settings of their mixtures."""

from dataclasses import replace
from pathlib import Path

import runs

from train.data.text import Data

MIXED = {"low": 0.7, "high": 0.3}


def two_corpora(folder: Path) -> Path:
    """Write two corpora, of lower-case and of upper-case letters, and two validation files."""
    runs.corpus(folder).rename(folder / "low")
    runs.corpus(folder, 4).rename(folder / "high")
    for file in (folder / "high").iterdir():
        file.write_text(file.read_text().upper())
    (folder / "v.txt").write_text("hello world " * 50)
    (folder / "w.txt").write_text("more of the world " * 60)
    return folder


def mixed_data(home: Path, path, valid_path=None, **changes) -> Data:
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

"""Which files of a folder are held out by their names, as the Hugging Face Hub understands them?

A file belongs to a split if a folder below the corpus, or else its own name, has the name of a
split as a word: ``data/validation-00000-of-00001.parquet``, ``dev/a.txt``. The outermost folder
decides. Other files are training files. The entry ``configs`` of a ``README.md`` takes precedence:
it lists the files of each split, and files that it does not list are left out.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import translate
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

from jaxgrow.untrusted import UntrustedError, checked_path, file_limits
from train.common.errors import UserError
from train.extras.bounded import child

TRAIN = "train"
VALIDATION = "validation"
TEST = "test"
OTHER = "other"  # a file that the README does not list
_WORDS = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("validation", "valid", "val", "dev"), VALIDATION),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), TEST),
}
_CORRECT = "correct it, or set data.splits=ignore"
_LARGEST_README = 1 << 20  # bytes of a README that are read


# Pairs of a split and a pattern of file names, in the order of the README. If empty, words decide.
Listed: TypeAlias = tuple[tuple[str, str], ...]


def listed_splits(folder: Path) -> Listed:
    """The patterns of the files of each split, from the README of a folder if it lists them.

    Raises:
      UserError: the README lists the files of splits, but cannot be read.
      UntrustedError: the list is too long.
    """
    listed: dict[tuple[str, str], None] = {}
    for n, pair in enumerate(_listed_patterns(folder) if folder.is_dir() else (), 1):
        # With aliases, a small README can list any number of patterns.
        file_limits().check(str(folder / "README.md"), entries=n)
        listed[pair] = None
    return tuple(listed)


def split_of(file: Path, folder: Path, listed: Listed = ()) -> str:
    """The split of a file below a folder: `TRAIN`, `VALIDATION`, `TEST` or `OTHER`."""
    if file == folder:  # the user named the file itself
        return TRAIN
    parts = file.relative_to(folder).parts
    if not listed:
        return next(filter(None, map(_split_of_words, parts)), TRAIN)
    found = {split for split, pattern in listed if _matches(parts, _pattern_steps(pattern))}
    # A file of several splits must not be trained on.
    return next((split for split in (TEST, VALIDATION, TRAIN) if split in found), OTHER)


def described_splits(counts: Mapping[str, int]) -> str:
    """The number of files of each split in words: "2 training files, 1 test file"."""
    names = {TRAIN: "training", OTHER: "unlisted"}
    return ", ".join(
        f"{counts[split]:,} {names.get(split, split)} file{'s' * (counts[split] != 1)}"
        for split in (TRAIN, VALIDATION, TEST, OTHER)
        if counts.get(split)
    )


def _split_of_words(part: str) -> str | None:
    """The split that the first word of a folder or file name with a meaning stands for."""
    words = re.split(r"[-._ 0-9]+", part.lower())
    return next((_WORDS[word] for word in words if word in _WORDS), None)


@lru_cache(1 << 17)
def _pattern_steps(pattern: str) -> list[re.Pattern[str] | None]:
    """The expressions for the parts of a path; None stands for any number of folders."""
    parts = pattern.split("/")
    return [None if part == "**" else re.compile(translate(part)) for part in parts]


def _matches(parts: Sequence[str], pattern: Sequence[re.Pattern[str] | None]) -> bool:
    """Whether a path has the pattern of `_pattern_steps`."""
    # The rows are the parts of the path, so a pattern cannot take exponential time.
    reached = {0}
    for part in parts:
        reached = _after_any_folders(reached, pattern)
        reached = {
            i + (step is not None)
            for i in reached
            if i < len(pattern) and ((step := pattern[i]) is None or step.match(part))
        }
        if len(pattern) in reached:  # a pattern may name a folder
            return True
    return len(pattern) in _after_any_folders(reached, pattern)


def _after_any_folders(reached: set[int], pattern: Sequence[re.Pattern[str] | None]) -> set[int]:
    found = set(reached)
    for i, part in enumerate(pattern):
        if i in found and part is None:
            found.add(i + 1)
    return found


def _listed_patterns(folder: Path) -> Iterator[tuple[str, str]]:
    """The pairs of split and pattern in the front matter of ``README.md``."""
    front = _readme_front_matter(folder)
    configs = front.get("configs") if isinstance(front, Mapping) else None
    for config in configs if isinstance(configs, list) else []:
        if not isinstance(config, Mapping):
            continue
        inside = config.get("data_dir")
        before = f"{inside.strip('/')}/" if isinstance(inside, str) and inside.strip("/.") else ""
        for split, patterns in _split_patterns(config.get("data_files")):
            for pattern in patterns if isinstance(patterns, list) else [patterns]:
                if isinstance(pattern, str):
                    yield _split_of_words(split) or OTHER, before + pattern.removeprefix("./")


def _split_patterns(given: object) -> list[tuple[str, object]]:
    """``data_files`` as pairs of a split and one or several patterns."""
    if isinstance(given, Mapping):
        found = list(given.items())
    else:
        entries = given if isinstance(given, list) else [given]
        found = [
            (entry.get("split", TRAIN), entry.get("path"))
            if isinstance(entry, Mapping)
            else (TRAIN, entry)
            for entry in entries
        ]
    return [(split, patterns) for split, patterns in found if isinstance(split, str)]


def _readme_front_matter(folder: Path) -> object:
    """The YAML between two lines ``---`` at the start of ``README.md``; None without it."""
    readme = folder / "README.md"
    if not os.path.lexists(readme):
        return None
    try:
        with checked_path(folder, readme.name).open() as file:
            content = file.read(_LARGEST_README).decode("utf-8", "replace").removeprefix("\ufeff")
    except UntrustedError as error:
        raise UserError(f"{error}; or set data.splits=ignore") from error
    found = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", content, re.DOTALL)
    if found is None and re.match(r"---\s*\n(.*\n)?configs:", content, re.DOTALL):
        raise UserError(f"{readme} lists the files of splits, but its list has no end; {_CORRECT}")
    if found is None or "configs" not in found[1]:
        return None
    try:
        return json.loads(child.ask("YAML", job="yaml", text=found[1])[0])
    except UntrustedError as error:
        raise UserError(
            f"{readme}: the YAML at its start cannot be read ({error}), although it lists the files of "
            f"splits; {_CORRECT}"
        ) from error

"""The files of a corpus of text: which files of a folder are read, and which are held out?

Not all file names have to fit into memory.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from jaxgrow.untrusted import UntrustedError, checked_path, file_limits
from train.common.errors import UserError
from train.extras.decoding import in_folder, json_object, readable_file
from train.extras.text.corpus import Corpus, Counts, counted_documents, files_key
from train.extras.text.formats import TEXT, Formats, read_documents
from train.extras.text.mixed_paths import fixed_part, is_pattern, matching_paths
from train.extras.text.named_splits import (
    TRAIN,
    VALIDATION,
    Listed,
    described_splits,
    listed_splits,
    split_of,
)
from train.extras.text.reading import CORPORA

# Validation splits; the first one that exists is used.
VALIDATIONS = ("validation", "test")
LEADS_OUT = "link out of the folder"


def text_corpus(
    path: str,
    valid_path: str | Mapping[str, str] | None,
    field: str,
    by_name: Literal["auto", "ignore"] = "auto",
    formats: Formats = TEXT,
) -> Corpus:
    """A corpus of text files, given as a file, a folder or a pattern (`train.extras.text.formats`).

    In a `DatasetDict` of Hugging Face `datasets`, the split "train" is the training text. Without
    ``valid_path``, its split "validation" or "test" is the validation text. In other folders, the
    names of files and folders decide (`train.extras.text.named_splits`).

    Args:
      path: the file or the folder, or a pattern such as ``data/*.jsonl.gz``.
      valid_path: the file or the folder of the validation text; None: hold out a part. A dict
        names the paths of separate validation sets, whose files do not belong to this corpus.
      field: the field that holds the documents, in formats with fields.
      by_name: "ignore" reads all files below ``path`` as training text.
      formats: the formats of the files.

    Raises:
      UserError: no file was found, or the files do not contain text.
    """
    train = _existing(path, formats)
    several = isinstance(valid_path, Mapping)
    apart = [_existing(name, formats) for name in valid_path.values()] if several else []
    valid = None if several or valid_path is None else _existing(str(valid_path), formats)
    if found := dataset_splits(train):
        if "train" not in found:
            raise UserError(
                f"{train} has no split 'train', only {', '.join(found)}; name the folder of one in data.path"
            )
        other = next(
            (_existing(str(train / name), formats) for name in VALIDATIONS if name in found), None
        )
        train = _existing(str(train / "train"), formats)
        valid = valid if several else valid or other
    listed: Listed = ()
    counted: Counter[str] = Counter()
    if by_name == "auto" and (valid is None or valid.resolve() != train.resolve()):
        listed = listed_splits(fixed_part(train))
        counted = _count_splits(train, listed, formats)
    parts = [train] if valid is None else [train, valid]
    # Files below ``path`` may also be validation files. They are not trained on, unless both paths
    # are the same.
    if valid is not None and valid.resolve() != train.resolve():
        apart = [valid]
    held = {file.resolve() for other in apart for file in corpus_files(other, formats)}

    def named(path: Path, split: str) -> Iterator[Path]:
        # ``path`` is the folder of the training text, or the folder that it resolves to.
        root, files = fixed_part(path), corpus_files(path, formats)
        return (file for file in files if not counted or split_of(file, root, listed) == split)

    def mine(path: Path) -> Iterator[Path]:
        return (file for file in named(path, TRAIN) if not held or file.resolve() not in held)

    if held and not any(True for _ in mine(train)):
        raise UserError(
            f"every file of data.path={path} is also a validation file of data.valid_path={', '.join(map(str, apart))}; "
            "name other text in one of them"
        )
    # Only files that are read belong to the key, so a cache that also has the validation files in
    # its training text is not used.
    key = [field, files_key(mine(train.resolve()))]
    key += [files_key(corpus_files(part.resolve(), formats)) for part in parts[1:]]
    key += ["no validation text"] * several
    counts = Counts()
    skipped = defaultdict(list)
    read = [mine(train), *(corpus_files(part, formats) for part in parts[1:])]
    if not several and valid is None and counted[VALIDATION]:
        key.append(files_key(named(train.resolve(), VALIDATION)))
        read.append(named(train, VALIDATION))
    reader = partial(read_documents, field=field, formats=formats)
    documents = [counted_documents(files, counts, reader) for files in read]
    for part in parts:
        for file, why in _entries(part, formats):
            if why:
                skipped[why].append(file)
    judged = documents[1] if len(documents) > 1 else iter(()) if several else None
    report = _link_warnings(skipped)
    if counted:
        report = [_held_out_by_name(counted, valid_path), *report]
    left_out = {why: len(files) for why, files in skipped.items()}
    return Corpus(key, documents[0], judged, counts, report=tuple(report), skipped=left_out)


def _held_out_by_name(counts: Mapping[str, int], valid_path: object) -> str:
    validated = counts.get(VALIDATION) and valid_path is None
    return (
        f"data: by their names, there are {described_splits(counts)}; training files are trained on, "
        + ("validation files are the validation set, " if validated else "")
        + "and the others are left out; data.splits=ignore reads all of them as training text"
    )


def _link_warnings(skipped: Mapping[str, list[Path]]) -> list[str]:
    ways_out = {
        "symlinked folder": ("symlinked folders", "copy or bind-mount their targets"),
        LEADS_OUT: ("links out of the folder", "replace them by their files"),
    }
    return [
        f"WARNING: {what} are not read, such as {skipped[why][0]}; {way_out}"
        for why, (what, way_out) in ways_out.items()
        if skipped.get(why)
    ]


def training_files(path: str, formats: Formats) -> Iterator[Path]:
    """The real paths of the files of a corpus, without other splits of a `DatasetDict`."""
    root = _existing(path, formats)
    return (
        file.resolve()
        for file in corpus_files(root / "train" if dataset_splits(root) else root, formats)
    )


def _count_splits(folder: Path, listed: Listed, formats: Formats) -> Counter[str]:
    """The number of files of each split below a folder; empty if there are training files only.

    Raises:
      UserError: all files are held out.
    """
    counted: Counter[str] = Counter()
    with readable_file(folder):
        for n, file in enumerate(corpus_files(folder, formats), 1):
            what = f"{folder}: the list of splits in README.md, for all files,"
            file_limits().check(what, entries=n * len(listed))
            counted[split_of(file, fixed_part(folder), listed)] += 1
    if not counted.keys() - {TRAIN}:
        return Counter()
    if not counted[TRAIN]:
        raise UserError(
            f"{folder} has no training file, because all files have names of validation or test files "
            f"({described_splits(counted)}); name the files or the folder of one split, or set data.splits=ignore"
        )
    return counted


def _existing(name: str, formats: Formats) -> Path:
    """The path of an existing file or folder with readable files."""
    path = Path(name).expanduser()
    with readable_file(path):
        if is_pattern(path) and not matching_paths(path):
            raise UserError(
                f"no file matches {path}; correct the pattern in data.path or data.valid_path, in which * stands for any part "
                "of a name and ** for folders"
            )
    if not (path.exists() or is_pattern(path)):
        raise UserError(
            f"there is no corpus at {path}; set data.path to a file or a folder of text"
        )
    if path.is_file() and formats.reader(path) is None:
        raise UserError(
            f"{path} does not have a supported format: {formats.names} files are read"
            + (f", and {', '.join(formats.named)} files" if formats.named else "")
            + "; rename a .json with one object per line to .jsonl"
        )
    if not dataset_splits(path) and not any(True for _ in corpus_files(path, formats)):
        below = [p for found in matching_paths(path) for p in (found, *found.rglob("*"))]
        there = [p for p in below if p.is_file()]
        found = [suffix for suffix in formats.named if any(p.suffix == suffix for p in there)]
        others = sorted({"".join(p.suffixes[-2:]) or p.name for p in there})[:8]
        raise UserError(
            f"no {formats.what} in {name}: there are no {formats.names} files"
            + (f", only {', '.join(others)}" if others else "")
            + (
                f"; {', '.join(found)} files are read if data.path names the file itself"
                if found
                else ""
            )
        )
    return path


def corpus_files(path: Path, formats: Formats = TEXT) -> Iterator[Path]:
    """Yield the files that hold documents, sorted by name. A list of them may be too large."""
    return (file for file, why in _entries(path, formats) if why is None)


def _entries(path: Path, formats: Formats) -> Iterator[tuple[Path, str | None]]:
    """Files and skipped folders, sorted by name, each with the reason for skipping it, or None."""
    with readable_file(path):
        for n, entry in enumerate(_walked_entries(path, path, formats), 1):
            file_limits().check(str(path), entries=n)
            yield entry


def _walked_entries(path: Path, root: Path, formats: Formats) -> Iterator[tuple[Path, str | None]]:
    if path.is_file():
        yield path, None
    elif is_pattern(path):
        yield from _matched_entries(path, formats)
    elif saved := dataset_shards(path):
        yield from ((shard, None) for shard in saved)
    elif several := dataset_splits(path):
        raise UserError(f"{path} holds the splits {', '.join(several)}; name the folder of one")
    else:
        with os.scandir(path) as entries:
            found = sorted(
                (e.name, e.is_dir(follow_symlinks=False), e.is_dir(), e.is_file()) for e in entries
            )
        for name, is_folder, leads_to_folder, is_file in found:
            if name.startswith("."):  # such as ._a.txt, which macOS writes next to a.txt
                yield path / name, "hidden"
            elif is_folder:
                yield from _walked_entries(path / name, root, formats)
            elif leads_to_folder:
                yield path / name, "symlinked folder"
            elif not is_file:
                yield path / name, "broken link or not a file"
            else:
                yield path / name, _unread(path / name, root, formats)


def _matched_entries(pattern: Path, formats: Formats) -> Iterator[tuple[Path, str | None]]:
    """The files that match a pattern, and the files in folders that match it, once each."""
    root = fixed_part(pattern)
    walked: Path | None = None
    for found in matching_paths(pattern):
        if walked is not None and found.is_relative_to(walked):
            continue
        below = [above for above in found.parents if above.is_relative_to(root)][:-1]
        if any(part.startswith(".") for part in found.relative_to(root).parts):
            yield found, "hidden"
        elif any(above.is_symlink() for above in below):
            yield found, "symlinked folder"
        elif found.is_file():
            yield found, _unread(found, root, formats, pattern.suffix)
        elif found.is_symlink() or not found.is_dir():
            yield found, "symlinked folder" if found.is_dir() else "broken link or not a file"
        else:
            walked = found
            yield from _walked_entries(found, root, formats)


def _unread(file: Path, root: Path, formats: Formats, named: str = "") -> str | None:
    """Why a file in a folder is not read, or None; ``named`` is a suffix that the user gave."""
    if not (formats.in_folders(file) or (file.suffix == named and formats.reader(file))):
        return "of another format"
    if not file.is_symlink():
        return None
    try:
        in_folder(root, file)
    except UntrustedError:
        return LEADS_OUT
    return None


# --- folders that Hugging Face `datasets` saved ---


def dataset_splits(path: Path) -> list[str]:
    """The splits of a saved `DatasetDict`; empty if the folder does not hold one."""
    file = path / "dataset_dict.json"
    if not file.exists():
        return []
    with readable_file(file, _SAVED):
        return [name for name in _json_list(file, "splits") if checked_path(path, name, new=True)]


def dataset_shards(path: Path) -> list[Path]:
    """The Arrow files of a saved `Dataset`; empty if the folder does not hold one.

    Other ``.arrow`` files in the folder are caches of `datasets` and are ignored.
    """
    file = path / "state.json"
    if not (file.exists() and (path / "dataset_info.json").exists()):
        return []
    with readable_file(file, _SAVED):
        names = [str(shard["filename"]) for shard in _json_list(file, "_data_files")]
        if missing := [
            name for name in names if not checked_path(path, name, new=True).path.exists()
        ]:
            raise UserError(
                f"{path} lacks {len(missing)} of {len(names)} files that its state.json names, such as {missing[0]}; "
                f"{_SAVED}"
            )
        for name in names:
            checked_path(path, name)
        return [path / name for name in names]


_SAVED = "save the dataset again with save_to_disk of Hugging Face datasets"


def _json_list(file: Path, name: str) -> list[Any]:
    about = json_object(in_folder(file.parent, file), _SAVED)
    if not isinstance(about.get(name), list):
        raise UserError(f"{file} has no list {name!r}; {_SAVED}")
    return about[name]


CORPORA.add(
    "text",
    lambda data: text_corpus(str(data.path), data.valid_path, data.field, data.splits),
)

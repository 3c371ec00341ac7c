"""Corpora: documents in an order, read one by one, so that neither they nor their names need fit into memory."""

import hashlib
import json
import os
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from train.common.errors import UserError
from train.data import formats
from train.data.formats import Document

_HELD_OUT = ("validation", "test")  # splits that judge, the first that is there


@dataclass
class Counts:
    """What was read of a corpus so far; documents that are empty do not count."""

    files: int = 0
    documents: int = 0
    bytes: int = 0  # of the text as UTF-8
    replaced: int = 0  # characters that are U+FFFD, because they were not UTF-8 or NUL
    first_replaced: str = ""  # the file with the first one of them
    file: str = ""  # that is being read

    def add(self, piece: str) -> None:
        self.bytes += len(piece.encode())
        if replaced := piece.count("\N{REPLACEMENT CHARACTER}"):
            self.first_replaced = self.first_replaced or self.file
            self.replaced += replaced


@dataclass(frozen=True)
class Corpus:
    key: Any  # JSON; changes when the text may have
    train: Iterator[Document]
    valid: Iterator[Document] | None  # None: hold some of ``train`` out
    counts: Counts = field(default_factory=Counts)
    skipped: dict[str, list[Path]] = field(
        default_factory=dict
    )  # files and folders that are not read, by the reason


def stdlib() -> Corpus:
    """The source text of Python's standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"site-packages", "test", "tests", "idle_test", "__pycache__"}
    files = sorted(p for p in root.rglob("*.py") if not skip & set(p.relative_to(root).parts))
    if not files:
        raise UserError(f"there is no Python file in the standard library under {root}")
    counts = Counts()
    return Corpus(
        _key(files),
        _documents(files, "", counts, lambda file, _: iter([formats.text(file)])),
        None,
        counts,
    )


def text(path: str, valid_path: str | None, field: str) -> Corpus:
    """Files of text, or those in folders (`train.data.formats`), of which ``field`` holds the documents where they have fields.

    Of a `DatasetDict` of Hugging Face `datasets`, "train"; without ``valid_path`` its "validation"
    or "test" judges.

    Raises:
      UserError: there are none, or they are no text.
    """
    train, valid = _existing(path), None if valid_path is None else _existing(valid_path)
    if found := splits(train):
        if "train" not in found:
            raise UserError(
                f"{train} has no split 'train', only {', '.join(found)}; name the folder of one in data.path"
            )
        held = next((_existing(str(train / name)) for name in _HELD_OUT if name in found), None)
        train, valid = _existing(str(train / "train")), valid or held
    parts = [train] if valid is None else [train, valid]
    key = [field, *(_key(_files(part.resolve())) for part in parts)]
    counts, skipped = Counts(), defaultdict(list)
    documents = [_documents(_files(part), field, counts) for part in parts]
    for part in parts:
        for file, why in _entries(part):
            if why:
                skipped[why].append(file)
    return Corpus(key, documents[0], documents[1] if valid else None, counts, skipped)


def _documents(
    files: Iterable[Path],
    field: str,
    counts: Counts,
    read: Callable[[Path, str], Iterator[Document]] = formats.documents,
) -> Iterator[Document]:
    for file in files:
        counts.files += 1
        counts.file = str(file)
        yield from read(file, field)


def tfds(name: str, path: str | None, field: str) -> Corpus:
    """A corpus of tensorflow-datasets, of which ``field`` holds the documents."""
    builder = prepared(name, path)

    def documents(split: str) -> Iterator[Document]:
        for example in builder.as_data_source(split):
            if field not in example:
                raise UserError(
                    f"{name} has no feature {field!r}, only {', '.join(example)}; set data.field"
                )
            document = example[field]
            if not isinstance(document, bytes):
                raise UserError(
                    f"feature {field!r} of {name} is no text, but {type(document).__name__}; set data.field"
                )
            yield formats.pieces(document.decode("utf-8", errors="replace"))

    split = next((s for s in _HELD_OUT if s in builder.info.splits), None)
    key = [
        builder.info.full_name,
        field,
        {k: s.num_examples for k, s in builder.info.splits.items()},
    ]
    return Corpus(key, documents("train"), documents(split) if split else None)


def prepared(name: str, path: str | None) -> Any:
    """The builder of the tensorflow-datasets set ``name``, prepared under ``path``.

    Raises:
      UserError: it cannot be.
    """
    import tensorflow_datasets as tfds

    # registers the text corpora, which the line above does only with TensorFlow
    import tensorflow_datasets.text

    folder = None if path is None else Path(path).expanduser()
    try:
        builder = tfds.builder(name, data_dir=folder, file_format="array_record")
        builder.download_and_prepare()
    except Exception as error:
        raise UserError(
            f"tensorflow-datasets cannot prepare {name!r} ({type(error).__name__}: {error}); some sets need TensorFlow "
            f"for this: run tfds.builder({name!r}, file_format='array_record').download_and_prepare() once where it is "
            "installed, and name the folder in data.path"
        ) from error
    return builder


def _existing(name: str) -> Path:
    """The file or folder of that name, which can be read."""
    path = Path(name).expanduser()
    if not path.exists():
        raise UserError(f"there is no corpus at {path}")
    if path.is_file() and formats.reader(path) is None:
        raise UserError(
            f"{path} cannot be trained on, but {formats.NAMES} files can, and {', '.join(formats.NAMED)} files; "
            "a .json with one object a line is a .jsonl"
        )
    if not splits(path) and not any(True for _ in _files(path)):
        found = [suffix for suffix in formats.NAMED if any(path.rglob(f"*{suffix}"))]
        others = sorted(
            {"".join(p.suffixes[-2:]) or p.name for p in path.rglob("*") if p.is_file()}
        )[:8]
        raise UserError(
            f"no text in {name}: there are no {formats.NAMES} files"
            + (f", only {', '.join(others)}" if others else "")
            + (
                f"; {', '.join(found)} files are read if data.path names the file itself"
                if found
                else ""
            )
        )
    return path


def _files(path: Path) -> Iterator[Path]:
    """Those that hold documents, in the order of their names; a list of all would grow with the corpus."""
    return (file for file, why in _entries(path) if why is None)


def _entries(path: Path) -> Iterator[tuple[Path, str | None]]:
    """Files, and folders that are not read, in the order of their names, and why one is skipped; None: it is not."""
    if path.is_file():
        yield path, None
    elif saved := shards(path):
        yield from ((shard, None) for shard in saved)
    elif several := splits(path):
        raise UserError(f"{path} holds the splits {', '.join(several)}; name the folder of one")
    else:
        with os.scandir(path) as entries:
            found = sorted(
                (e.name, e.is_dir(follow_symlinks=False), e.is_dir(), e.is_file()) for e in entries
            )
        for name, is_folder, leads_to_folder, is_file in found:
            if name.startswith("."):  # such as ._a.txt, which macOS writes beside a.txt
                yield path / name, "hidden"
            elif is_folder:
                yield from _entries(path / name)
            elif leads_to_folder:
                yield path / name, "symlinked folder"
            elif not is_file:
                yield path / name, "broken link or no file"
            else:
                yield path / name, None if formats.in_folders(path / name) else "of another format"


def _key(files: Iterable[Path]) -> str:
    """Another, when a file was changed."""
    key = hashlib.sha256()
    for file in files:
        about = file.stat()
        key.update(json.dumps([str(file), about.st_size, about.st_mtime_ns]).encode())
    return key.hexdigest()


# --- folders that Hugging Face `datasets` saved ---


def splits(path: Path) -> list[str]:
    """Of a `DatasetDict`; none: it is none."""
    file = path / "dataset_dict.json"
    return _entry(file, "splits") if file.exists() else []


def shards(path: Path) -> list[Path]:
    """Of a `Dataset`; other ``.arrow`` files may lie beside them, which are what `datasets` remembers of its own work."""
    file = path / "state.json"
    if not (file.exists() and (path / "dataset_info.json").exists()):
        return []
    found = [path / shard["filename"] for shard in _entry(file, "_data_files")]
    if missing := [shard.name for shard in found if not shard.exists()]:
        raise UserError(
            f"{path} lacks {len(missing)} of {len(found)} files that its state.json names: {missing[0]} .."
        )
    return found


def _entry(file: Path, name: str) -> list[Any]:
    try:
        return json.loads(file.read_text())[name]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"cannot read {file}, as Hugging Face datasets writes it: {error!r}"
        ) from error

"""Corpora: documents in an order, read piece by piece, so that none need fit into memory."""

import gzip
import io
import lzma
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from train.errors import UserError

PIECE = 1 << 16  # characters; long documents are tokenised and held out in pieces of this size
Document: TypeAlias = Iterable[str]  # pieces: all of PIECE characters but the last, and none empty

_OPEN = {".txt": open, ".xz": lzma.open, ".gz": gzip.open}
_WITHIN = {".jsonl", ".json", ".parquet", ".arrow", ".tar", ".zip"}  # that no .xz or .gz of text is of


@dataclass(frozen=True)
class Corpus:
    key: Any  # JSON; changes when the text may have
    train: Iterator[Document]
    valid: Iterator[Document] | None  # None: hold some of ``train`` out


def stdlib() -> Corpus:
    """The source text of Python's standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"site-packages", "test", "tests", "idle_test", "__pycache__"}
    files = sorted(p for p in root.rglob("*.py") if not skip & set(p.relative_to(root).parts))
    if not files:
        raise UserError(f"there is no Python file in the standard library under {root}")
    return Corpus(_key(files), map(read, files), None)


def text(path: str, valid_path: str | None) -> Corpus:
    """Files of text, or those in folders.

    Raises:
      UserError: there are none, or they are no text.
    """
    train = _found(path)
    if valid_path is None:
        return Corpus(_key(train), map(read, train), None)
    valid = _found(valid_path)
    return Corpus([_key(train), _key(valid)], map(read, train), map(read, valid))


def tfds(name: str, path: str | None, field: str) -> Corpus:
    """A corpus of tensorflow-datasets, of which ``field`` holds the documents."""
    builder = prepared(name, path)

    def documents(split: str) -> Iterator[Document]:
        for example in builder.as_data_source(split):
            if field not in example:
                raise UserError(f"{name} has no feature {field!r}, only {', '.join(example)}; set data.field")
            whole = example[field].decode("utf-8", errors="replace")
            yield [whole[i : i + PIECE] for i in range(0, len(whole), PIECE)]

    split = next((s for s in ("validation", "test") if s in builder.info.splits), None)
    key = [builder.info.full_name, field, {k: s.num_examples for k, s in builder.info.splits.items()}]
    return Corpus(key, documents("train"), documents(split) if split else None)


def prepared(name: str, path: str | None) -> Any:
    """The builder of the tensorflow-datasets set ``name``, prepared under ``path``.

    Raises:
      UserError: it cannot be.
    """
    import tensorflow_datasets as tfds
    import tensorflow_datasets.text  # registers the text corpora, which the line above does only with TensorFlow

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


def _found(name: str) -> list[Path]:
    path = Path(name).expanduser()
    known = f"{', '.join(list(_OPEN)[:-1])} and {list(_OPEN)[-1]}"
    if not path.exists():
        raise UserError(f"there is no corpus at {path}")
    if path.is_file():
        if not _is_text(path):
            raise UserError(
                f"{path} is no text that can be trained on: {known} files are, compressed text among them; "
                "write its text to one of these"
            )
        return [path]
    files = sorted(p for p in path.rglob("*") if p.is_file())
    if not (texts := [p for p in files if _is_text(p)]):
        others = sorted({"".join(p.suffixes[-2:]) or p.name for p in files})[:8]
        raise UserError(
            f"no text in {name}: there is no .txt, .xz or .gz file" + (f", only {', '.join(others)}" if others else "")
        )
    return texts


def _is_text(path: Path) -> bool:
    return path.suffix in _OPEN and (path.suffix == ".txt" or Path(path.stem).suffix not in _WITHIN)


def _key(files: list[Path]) -> list[Any]:
    return [(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in files]


def read(path: Path) -> Document:
    opened = _OPEN.get(path.suffix, open)
    try:
        with opened(path, "rb") as f, io.TextIOWrapper(f, "utf-8", "replace", newline="\n") as decoded:
            while piece := decoded.read(PIECE):
                yield piece
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise UserError(f"cannot read {path}: {error}") from error

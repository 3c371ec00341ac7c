"""Corpora: ordered documents that are read one after another, without all of them in memory.

The source text of Python's standard library needs no files. `train.extras.text` reads other corpora.
"""

import hashlib
import io
import json
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np

from train.common.errors import UserError
from train.extras.tokenizers.tokenizer import Tokenizer

# Characters of a piece: long documents are tokenised and held out in pieces of about this size.
PIECE = 1 << 16
# The pieces of a document: text, or token ids. No piece is empty, and all except the last have PIECE
# characters or ids.
Document: TypeAlias = Iterable[Any]


@dataclass
class Counts:
    """Statistics of the part of a corpus that was read so far. Empty documents are not counted."""

    files: int = 0
    documents: int = 0
    bytes: int = 0  # the size of the text in UTF-8, or of the token ids as they were read
    replaced: int = 0  # characters replaced by U+FFFD, because they were not UTF-8 or were NUL
    first_replaced: str = ""  # the file with the first replaced character
    file: str = ""  # the file that is being read
    mode: int = 0o777  # the permissions that all files have

    def add(self, piece: str | np.ndarray) -> None:
        if isinstance(piece, np.ndarray):
            self.bytes += piece.nbytes
            return
        self.bytes += len(piece.encode())
        if replaced := piece.count("\N{REPLACEMENT CHARACTER}"):
            self.first_replaced = self.first_replaced or self.file
            self.replaced += replaced


@dataclass(frozen=True)
class Corpus:
    """Documents, and what a run records about them.

    Attributes:
      key: JSON value that differs if the text may have changed.
      train: the training documents.
      valid: the validation documents; None: hold out a part of ``train``.
      counts: statistics, which reading fills in.
      tokenizer: how its documents become tokens, if they are not text.
      report: lines about files that are left out or held out, and warnings.
      skipped: a reason -> the number of files that are not read.
    """

    key: object
    train: Iterator[Document]
    valid: Iterator[Document] | None
    counts: Counts = field(default_factory=Counts)
    tokenizer: Tokenizer | None = None
    report: tuple[str, ...] = ()
    skipped: dict[str, int] = field(default_factory=dict)


def stdlib_corpus() -> Corpus:
    """The source text of Python's standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"site-packages", "test", "tests", "idle_test", "__pycache__"}
    files = sorted(p for p in root.rglob("*.py") if not skip & set(p.relative_to(root).parts))
    if not files:
        raise UserError(
            f"no Python file in the standard library under {root}; set data.source=text and "
            "data.path to use another text"
        )
    counts = Counts()
    read = counted_documents(files, counts, lambda file: iter([decoded_pieces(file.open("rb"))]))
    return Corpus(files_key(files), read, None, counts)


def counted_documents(
    files: Iterable[Path], counts: Counts, read: Callable[[Path], Iterator[Document]]
) -> Iterator[Document]:
    """The documents of files one after another, while ``counts`` names the file that is read."""
    for file in files:
        counts.files += 1
        counts.file = str(file)
        counts.mode &= file.stat().st_mode
        yield from read(file)


def decoded_pieces(file: IO[bytes]) -> Document:
    """The text of an open file, in pieces. Bytes that are not UTF-8 become U+FFFD."""
    with io.TextIOWrapper(file, "utf-8", "replace", newline="\n") as decoded:
        while piece := decoded.read(PIECE):
            yield piece


def files_key(files: Iterable[Path]) -> str:
    """A hash that changes when a file changes."""
    key = hashlib.sha256()
    for file in files:
        about = file.stat()
        key.update(json.dumps([str(file), about.st_size, about.st_mtime_ns]).encode())
    return key.hexdigest()

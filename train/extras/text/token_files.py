"""Files of token ids, which another program made: NumPy arrays, raw files, and columns of tables.

=========== =====================================================================================
``.npy``    an array of integers; the rows of several axes follow each other
``.bin``    raw integers of `train.data.text.Data.ids`, as nanoGPT writes them; or the format of
            llm.c, whose header names the type
tables      ``.parquet``, ``.arrow``, ``.jsonl`` and folders of `datasets` with lists of integers
            in a column, usually ``input_ids``
=========== =====================================================================================
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from jaxgrow.untrusted import open_regular
from train.common.errors import UserError
from train.data.text import Data
from train.extras.decoding import readable_file
from train.extras.text import formats
from train.extras.text.corpora import text_corpus
from train.extras.text.corpus import Corpus, Document
from train.extras.text.formats import Formats, Reader
from train.extras.text.reading import CORPORA
from train.extras.tokenizers.loading import folder_of, load_tokenizer, named_tokenizer
from train.extras.tokenizers.special import document_marks
from train.extras.tokenizers.tokenizer import (
    BYTE_TOKENIZER,
    UNMARKED,
    DocumentFrame,
    Tokenizer,
)

FIELD = "input_ids"  # the usual name of a column of token ids
# The magic number and the size of the header of llm.c, in numbers of 4 bytes.
_MAGIC = {20240520: np.uint16, 20240801: np.uint32}
_HEADER = 256


def token_formats(kind: str) -> Formats:
    """The formats of token ids; ``kind`` is the type of the numbers in raw files."""

    def reader(path: Path) -> Reader | None:
        if path.suffix == ".npy":
            return _npy
        if path.suffix == ".bin":
            return partial(_raw, kind=np.dtype(kind).newbyteorder("<"))
        tables = path.suffix in (".parquet", ".arrow") or formats.is_lines(path)
        return _id_rows if tables else None

    return Formats("token ids", ".npy, .bin, .parquet, .arrow and .jsonl", reader)


def _npy(path: Path, field: str) -> Iterator[Document]:
    with readable_file(path, "save it again with numpy.save"):
        open_regular(path.resolve()).close()
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(ids, np.ndarray) or ids.dtype.kind not in "iu":
        raise UserError(
            f"{path} has no integers, but {getattr(ids, 'dtype', type(ids).__name__)}; save token ids"
        )
    end = getattr(ids, "offset", 0) + ids.nbytes
    if end != (size := path.stat().st_size):
        raise UserError(
            f"{path} has {size:,} bytes, but its array ends after {end:,}; save one array in each file"
        )
    yield formats.cut_pieces(ids.reshape(-1))


def _raw(path: Path, field: str, kind: np.dtype) -> Iterator[Document]:
    with readable_file(path):
        open_regular(path.resolve()).close()
    size = path.stat().st_size
    start = 0
    if size >= 4 * _HEADER:
        head = np.memmap(path, "<i4", "r", shape=(_HEADER,))
        if int(head[0]) in _MAGIC and head[1] == 1:
            start = 4 * _HEADER
            kind = np.dtype(_MAGIC[int(head[0])]).newbyteorder("<")
            if (size - start) != int(head[2]) * kind.itemsize:
                raise UserError(
                    f"the header of {path} names {head[2]:,} token ids, but the file has "
                    f"{(size - start) / kind.itemsize:,.10g}; copy or download it again"
                )
    if (size - start) % kind.itemsize:
        raise UserError(
            f"{path} has {size:,} bytes, which is not a multiple of the {kind.itemsize} bytes of {kind.name}; "
            "set data.ids to the type of its numbers"
        )
    if size > start:
        yield formats.cut_pieces(np.memmap(path, kind, "r", offset=start))


def _id_rows(path: Path, field: str) -> Iterator[Document]:
    for where, record in formats.table_records(path, field):
        if field not in record:
            raise UserError(
                f"{where} has no field {field!r}, only {', '.join(record)[:200] or 'none'}; set data.field"
            )
        try:
            ids = np.array(record[field] or np.zeros(0, np.int64))
        except ValueError:  # lists of several lengths
            ids = np.zeros((0, 0))
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise UserError(f"{where}: field {field!r} is not a list of token ids; set data.field")
        yield formats.cut_pieces(ids)


def token_corpus(data: Data) -> Corpus:
    """A corpus of token ids, which are used as they are."""
    field = FIELD if data.field == "text" else data.field
    formats = token_formats(data.ids)
    found = text_corpus(str(data.path), data.valid_path, field, data.splits, formats)
    return replace(found, tokenizer=id_tokenizer(data))


def id_tokenizer(data: Data) -> Tokenizer:
    """The tokenizer that made token ids, which checks them in place of encoding text."""
    if data.tokenizer == "none":
        known = replace(BYTE_TOKENIZER, vocab=1 << 32, files=["none"], identity="none")
        rule, marks = ["begins of token ids", data.ids], UNMARKED
    else:
        known = named_tokenizer(data.tokenizer)
        loaded = load_tokenizer(data.tokenizer)
        marks = document_marks(loaded, folder_of(data.tokenizer))
        rule = ["begins of token ids", data.ids, marks]
    check = partial(_checked_pieces, known.vocab, data.tokenizer)
    return Tokenizer(
        known.vocab,
        known.files,
        known.identity,
        rule,
        lambda threads: check,
        known.masking,
        marks=marks,
    )


def _checked_pieces(
    vocab: int, name: str, pieces: list[np.ndarray], begins: list[bool]
) -> tuple[list[np.ndarray], DocumentFrame]:
    return [checked_ids(ids, vocab, name) for ids in pieces], UNMARKED


def checked_ids(ids: np.ndarray, vocab: int, name: str) -> np.ndarray:
    """The ids, if a vocabulary has all of them.

    Args:
      ids: token ids.
      vocab: one more than the largest id of the tokenizer.
      name: the tokenizer, for the message.

    Raises:
      UserError: an id is negative, or above the largest one.
    """
    if len(ids) and not (ids.min() >= 0 and ids.max() < vocab):
        wrong = int(ids.min()) if ids.min() < 0 else int(ids.max())
        raise UserError(
            f"the corpus has the token id {wrong}, but the ids of data.tokenizer={name} are from 0 to {vocab - 1}: name "
            "the tokenizer that made the tokens, or set data.tokenizer=none; for a raw file, data.ids is the type of "
            "its numbers"
        )
    return ids


CORPORA.add("tokens", token_corpus)

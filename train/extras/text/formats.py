"""Formats: the documents of one file, read piece by piece and row by row to save memory.

A text file is one document. JSON Lines have one in each line; Parquet, Arrow and CSV have one in
each row, in a named field. A document that is null or empty has no tokens and is left out. Bytes
that are not UTF-8 become U+FFFD, and UTF-16 is an error. The same documents give the same pieces in
every format.
"""

import codecs
import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from jaxgrow.typed import Json
from jaxgrow.untrusted import file_limits
from train.common.errors import UserError
from train.extras.decoding import ENDINGS, limited_lines, open_data, read_all, readable_file
from train.extras.text import corpus
from train.extras.text.corpus import Document
from train.extras.text.tables import table_rows

Reader: TypeAlias = Callable[[Path, str], Iterator[Document]]  # a file and a field -> documents

NAMES = ".txt, .jsonl (both also .gz, .xz or .zst), .json.gz, .parquet and .arrow"
# Files that are often in the folder of a corpus without being part of it.
NAMED = (".md", ".py", ".csv")
_HALF = re.compile("[\ud800-\udfff]")


class Formats(NamedTuple):
    """The formats that a source of data reads.

    Attributes:
      what: what the files contain.
      names: the formats in words.
      reader: the function that reads a file with this name; None if the format is not supported.
      named: suffixes of files that are read only if the path is the file itself.
    """

    what: str
    names: str
    reader: Callable[[Path], Reader | None]
    named: tuple[str, ...] = ()

    def in_folders(self, path: Path) -> bool:
        """Whether a file with this name is read when only its folder is given."""
        return self.reader(path) is not None and path.suffix not in self.named


def text_reader(path: Path) -> Reader | None:
    """The function that reads a file with this name; None if the format is not supported."""
    compressed = path.suffix in ENDINGS[1:]
    inner = inner_suffix(path)
    if inner == ".csv" or is_lines(path) or path.suffix in (".parquet", ".arrow"):
        return _field_documents
    if inner in (".txt", *NAMED) or (compressed and inner not in _NO_TEXT):
        return lambda path, field: iter([text_pieces(path)])
    return None


def is_lines(path: Path) -> bool:
    """Whether a file with this name has JSON Lines."""
    inner = inner_suffix(path)
    # C4's compressed files end with .json.gz. An uncompressed .json is rarely a corpus.
    return inner == ".jsonl" or (inner == ".json" and path.suffix != ".json")


TEXT = Formats("text", NAMES, text_reader, NAMED)


def read_documents(path: Path, field: str, formats: Formats = TEXT) -> Iterator[Document]:
    """The documents of a file that has a reader.

    Args:
      path: the file.
      field: the field that holds the documents, in formats with fields.
      formats: the formats of the source.

    Raises:
      UserError: the file is damaged, has no such field, or the field has other values; the message
        names the file, the line and the value.
    """
    read = formats.reader(path)
    assert read is not None
    return read(path, field)


def cut_pieces(document: str | np.ndarray) -> Document:
    return (document[i : i + corpus.PIECE] for i in range(0, len(document), corpus.PIECE))


def text_pieces(path: Path) -> Document:
    """The document in a text file, in pieces."""
    with readable_file(path), open_data(path) as file:
        yield from corpus.decoded_pieces(file)


def read_text(path: Path) -> str:
    """The text of a file that must be UTF-8.

    If a file in another encoding were read, labels and answers would change silently.

    Raises:
      UserError: the file cannot be read, or has another encoding; the message names the file and
        the line.
    """
    content = read_all(path).removeprefix(codecs.BOM_UTF8)
    if b"\0" in content:  # UTF-16 without a byte-order mark
        line = content.count(b"\n", 0, content.index(b"\0")) + 1
        raise UserError(
            f"{path}, line {line} has a NUL character; the file may be UTF-16: convert it, for example with "
            "iconv -f UTF-16LE -t UTF-8"
        )
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{path}, line {line} is not UTF-8 (byte 0x{content[error.start]:02x}); the file may be latin-1: convert it, for "
            "example with iconv -f LATIN1 -t UTF-8"
        ) from None


def table_records(path: Path, field: str = "", strict: bool = False) -> Iterator[tuple[str, Json]]:
    """Yield the place, in words, and the fields of each line or row of a table.

    Args:
      path: a ``.jsonl``, ``.csv`` or ``.tsv``, each perhaps compressed, a ``.parquet`` or an
        ``.arrow``.
      field: the field that is needed; other columns of a ``.parquet`` or ``.arrow`` are not read.
      strict: refuse text that is not UTF-8. By default, wrong bytes become U+FFFD.

    Raises:
      UserError: as for `read_documents`.
    """
    kind = inner_suffix(path)
    with readable_file(path):
        if kind in (".parquet", ".arrow"):
            yield from table_rows(path, field)
        elif kind in (".csv", ".tsv"):
            yield from _csv_rows(path, kind, strict)
        else:
            for where, line in _lines(path, strict, "\n"):
                if line.strip():
                    yield where, _object(line, where)


def _lines(path: Path, strict: bool, newline: str) -> Iterator[tuple[str, str]]:
    """The place and the content of each line, without byte-order mark."""
    if strict:
        yield from limited_lines(io.StringIO(read_text(path), newline=newline), path)
        return
    with (
        open_data(path) as file,
        io.TextIOWrapper(file, "utf-8-sig", "replace", newline=newline) as decoded,
    ):
        yield from limited_lines(decoded, path)


def _object(line: str, where: str) -> Json:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        # The full text of the error counts lines within this line, so it would always name line 1.
        what = getattr(error, "msg", error)
        raise UserError(f"{where} is not JSON ({what}); correct or delete the line") from error
    if not isinstance(record, dict):
        raise UserError(f"{where} is a {type(record).__name__}, but should be a JSON object")
    return record


def _csv_rows(path: Path, kind: str, strict: bool) -> Iterator[tuple[str, Json]]:
    """The rows below a line of column names.

    Quoted cells of a CSV file may contain commas and line breaks; a TSV file has no quotes, like the
    files of GLUE.
    """
    how: Json = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if kind == ".tsv" else {}
    csv.field_size_limit(min(file_limits().record, 2**31 - 1))  # a cell may be a whole book
    # Without ``strict``, a quote that is not closed takes all further rows into its cell.
    rows = csv.reader((line for _, line in _lines(path, strict, "")), strict=True, **how)
    head: list[str] = []
    first = 1  # the first line of the row
    try:
        for row in rows:
            where = f"{path}, line {rows.line_num}"
            head = head or row
            if row and len(row) != len(head):
                raise UserError(
                    f"{where} has {len(row)} cells, but the first line names {len(head)} columns"
                )
            if row and row is not head:
                yield where, dict(zip(head, row, strict=True))
            first = rows.line_num + 1
    except csv.Error as error:
        more = f", or use --limits record={2 * file_limits().record}" * ("limit" in str(error))
        raise UserError(
            f"{path}, line {first}: {error}; correct the quotes of the row{more}"
        ) from error


def _field_documents(path: Path, field: str) -> Iterator[Document]:
    """The documents in a field of each row, which may lead into nested fields: ``meta.text``."""
    made = 0
    size = path.stat().st_size
    for where, record in table_records(path, field):
        root = field if field in record else field.partition(".")[0]
        if root not in record:
            names = ", ".join(record)[:200] or "none"
            raise UserError(f"{where} has no field {field!r}, only {names}; set data.field")
        text = _nested_text(record, [field])
        if text is None:
            known = ", ".join(_text_fields(record))[:200]
            other = f" to a field of text: {known}" if known else ""
            raise UserError(
                f"{where}: field {field!r} is not text, but {record[root]!r:.40}; set data.field{other}, or "
                "data.source=tokens if it has token ids"
            )
        # A dictionary may repeat a value in each row.
        made += len(text)
        file_limits().check_expansion(str(path), made, size)
        # A lone escape of JSON such as \ud83d is half a character.
        yield cut_pieces(text if text.isascii() else _HALF.sub("\N{REPLACEMENT CHARACTER}", text))


def _nested_text(value: Any, steps: list[str]) -> str | None:
    """The text in a nested value. Lists are one document, with a line for each of their texts.

    Returns:
      None if there is something else than text, or no such key.
    """
    if value is None:
        return ""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, str):
        return None if steps else value
    if isinstance(value, list):
        parts = [_nested_text(part, steps) for part in value]
        return None if None in parts else "\n".join(filter(None, parts))
    if isinstance(value, Mapping) and steps:
        field = ".".join(steps)
        first, _, rest = (field, "", "") if field in value else field.partition(".")
        return (
            _nested_text(value[first], rest.split(".") if rest else []) if first in value else None
        )
    return None


def _text_fields(value: object, name: str = "") -> Iterator[str]:
    """The names of all texts in a nested value."""
    if isinstance(value, str | bytes):
        yield name
    elif isinstance(value, list):
        yield from dict.fromkeys(found for part in value for found in _text_fields(part, name))
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _text_fields(part, f"{name}.{key}" if name else key)


def inner_suffix(path: Path) -> str:
    """The suffix of a file's name without that of its compression."""
    return Path(path.stem).suffix if path.suffix in ENDINGS else path.suffix


_NO_TEXT = {".parquet", ".arrow", ".tar", ".zip"}  # inner suffixes that are not text

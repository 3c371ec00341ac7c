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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from jaxgrow.untrusted import file_limits
from train.common.errors import UserError
from train.data import arrow
from train.data.columns import column_texts, nested_text, text_column
from train.data.decoding import lines, opened, read_all, readable
from train.data.tfds import checked_info

# Characters of a piece: long documents are tokenised and held out in pieces of about this size.
PIECE = 1 << 16
# The pieces of a document: text, or token ids. No piece is empty, and all except the last have PIECE
# characters or ids.
Document: TypeAlias = Iterable[Any]
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


def reader(path: Path) -> Reader | None:
    """The function that reads a file with this name; None if the format is not supported."""
    compressed = path.suffix in _SUFFIXES
    inner = Path(path.stem).suffix if compressed else path.suffix
    if inner == ".csv":
        return _csv
    if is_lines(path):
        return _json_lines
    if inner in (".txt", *NAMED) or (compressed and inner not in _NO_TEXT):
        return lambda path, field: iter([text(path)])
    return _of_columns if path.suffix in (".parquet", ".arrow") else None


def is_lines(path: Path) -> bool:
    """Whether a file with this name has JSON Lines."""
    compressed = path.suffix in _SUFFIXES
    inner = Path(path.stem).suffix if compressed else path.suffix
    # C4's compressed files end with .json.gz. An uncompressed .json is rarely a corpus.
    return inner == ".jsonl" or (compressed and inner == ".json")


TEXT = Formats("text", NAMES, reader, NAMED)


def documents(path: Path, field: str, formats: Formats = TEXT) -> Iterator[Document]:
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


def pieces(text: str) -> Document:
    return [text[i : i + PIECE] for i in range(0, len(text), PIECE)]


def text(path: Path) -> Document:
    """The document in a text file, in pieces."""
    with (
        readable(path),
        opened(path) as file,
        io.TextIOWrapper(file, "utf-8", "replace", newline="\n") as decoded,
    ):
        while piece := decoded.read(PIECE):
            yield piece


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


def records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place, in words, and all fields of each line or row of a table.

    The file is a ``.jsonl``, which may be compressed, or a ``.parquet``. An ``.array_record`` file
    is the first file of a split of tensorflow-datasets; the split is read without TensorFlow.

    Raises:
      UserError: as for `documents`.
    """
    if ".array_record" in path.name:
        yield from _of_tfds(path)
        return
    if path.suffix == ".parquet":
        with readable(path):
            yield from arrow.rows_of(path, arrow.parquet_batches(path))
        return
    with readable(path), opened(path) as file:
        for where, line in _lines(file, path):
            yield where, _object(line, where)


def _of_tfds(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import tensorflow_datasets as tfds

    split = path.name.partition(".")[0].rpartition("-")[2]
    with readable(path, "prepare it again"):
        checked_info(path.parent)
        rows: Any = tfds.builder_from_directory(path.parent).as_data_source(split)  # type: ignore[call-arg]
        for n, row in enumerate(rows):
            fields = {name: _plain(value) for name, value in row.items()}
            yield f"{path.parent}, {split}, row {n}", fields


def _plain(value: Any) -> Any:
    """The value with JSON types only."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, dict):
        return {name: _plain(v) for name, v in value.items()}
    if isinstance(value, list | tuple) or getattr(value, "ndim", 0):
        return [_plain(v) for v in value]
    return value.item() if hasattr(value, "item") else value


# --- JSON Lines ---


def _json_lines(path: Path, field: str) -> Iterator[Document]:
    with readable(path), opened(path) as file:
        for where, line in _lines(file, path):
            yield pieces(_field(line, field, where))


def _lines(file: Any, path: Path) -> Iterator[tuple[str, bytes]]:
    """The place and the content of each line, without byte-order mark and empty lines."""
    for n, (where, line) in enumerate(lines(file, path)):
        content = line.removeprefix(codecs.BOM_UTF8) if n == 0 else line
        if content.strip():
            yield where, content


def _object(line: bytes, where: str, wanted: str = "") -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        # The full text of the error counts lines within this line, so it would always name line 1.
        what = getattr(error, "msg", error)
        raise UserError(f"{where} is not JSON ({what}); correct or delete the line") from error
    if not isinstance(record, dict):
        raise UserError(f"{where} is not a JSON object{wanted}, but a {type(record).__name__}")
    return record


def _field(line: bytes, field: str, where: str) -> str:
    record = _object(line, where, f" with a field {field!r}")
    root = field if field in record else field.partition(".")[0]
    if root not in record:
        raise UserError(
            f"{where} has no field {field!r}, only {', '.join(record) or 'none'}; set data.field"
        )
    text = nested_text(record, [field])
    if text is None:
        raise UserError(
            f"{where}: field {field!r} is not text, but {json.dumps(record[root])[:40]}; set data.field"
        )
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone escape such as \ud83d is half a character
        text = _HALF.sub("\N{REPLACEMENT CHARACTER}", text)
    return text


# --- CSV ---


def _csv(path: Path, field: str) -> Iterator[Document]:
    """The rows below a line of column names. Quoted cells may contain commas and line breaks."""
    with (
        readable(path),
        opened(path) as file,
        io.TextIOWrapper(file, "utf-8-sig", "replace", newline="") as f,
    ):
        rows = cells((line for _, line in lines(f, path)), path)
        _, head = next(rows, ("", []))
        if field not in head:
            raise UserError(
                f"{path} has no column {field!r}, only {', '.join(head) or 'none'}; set data.field"
            )
        column = head.index(field)
        for where, row in rows:
            if len(row) != len(head):
                raise UserError(f"{where} has {len(row)} cells, but the header names {len(head)}")
            yield pieces(row[column])


def cells(file: Iterable[str], path: Path, **how: Any) -> Iterator[tuple[str, list[str]]]:
    """Yield the place, in words, and the cells of each row of a CSV file, without empty rows.

    Args:
      file: the lines.
      path: the path of the file, for messages.
      **how: settings of `csv.reader`.

    Raises:
      UserError: a quote is not closed, or text follows a closed quote.
    """
    csv.field_size_limit(min(file_limits().record, 2**31 - 1))  # a cell may be a whole book
    # Without ``strict``, a quote that is not closed takes all further rows into its cell.
    rows = csv.reader(file, strict=True, **how)
    first = 1  # the first line of the row
    try:
        for row in rows:
            if row:
                yield f"{path}, line {rows.line_num}", row
            first = rows.line_num + 1
    except csv.Error as error:
        out = f"correct the quotes of the row, or use --limits record={2 * file_limits().record}"
        if "limit" not in str(error):
            out = "correct the quotes of the row"
        raise UserError(f"{path}, line {first}: {error}; {out}") from error


# --- Parquet and Arrow ---


def _of_columns(path: Path, field: str) -> Iterator[Document]:
    way: list[str] = []

    def chosen(schema: Any) -> str:
        root, way[:] = text_column(schema, field, path)
        return root

    made = 0
    size = path.stat().st_size
    with readable(path):
        for column in arrow.columns_of(path, chosen):
            for document in column_texts(column, way):
                # A dictionary may repeat a value in each row.
                made += len(document)
                file_limits().check_expansion(str(path), made, size)
                yield pieces(document)


_SUFFIXES = (".gz", ".xz", ".zst")  # of compressed files
_NO_TEXT = {".parquet", ".arrow", ".tar", ".zip"}  # inner suffixes that are not text

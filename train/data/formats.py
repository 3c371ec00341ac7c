"""Formats: the documents of one file, read piece by piece and row by row to save memory.

A text file is one document. JSON Lines have one in each line; Parquet, Arrow and CSV have one in
each row, in a named field. A document that is null or empty has no tokens and is left out. Bytes
that are not UTF-8 become U+FFFD, and UTF-16 is an error. The same documents give the same pieces in
every format.
"""

import codecs
import csv
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from train.common.errors import UserError

# Characters of a piece: long documents are tokenised and held out in pieces of about this size.
PIECE = 1 << 16
# The pieces of a document. No piece is empty, and all except the last have PIECE characters.
Document: TypeAlias = Iterable[str]
Reader: TypeAlias = Callable[[Path, str], Iterator[Document]]  # a file and a field -> documents

NAMES = ".txt, .jsonl (both also .gz, .xz or .zst), .json.gz, .parquet and .arrow"
# Files that are often in the folder of a corpus without being part of it.
NAMED = (".md", ".py", ".csv")
_ROWS = 64  # rows of Parquet that are in memory at once
# Bytes of Parquet. Without a buffer size, the column of an entire row group is read at once.
BUFFER = 1 << 20
_HALF = re.compile("[\ud800-\udfff]")


def reader(path: Path) -> Reader | None:
    """The function that reads a file with this name; None if the format is not supported."""
    compressed = path.suffix in _COMPRESSED
    inner = Path(path.stem).suffix if compressed else path.suffix
    if inner == ".csv":
        return _csv
    # C4's compressed files end with .json.gz. An uncompressed .json is rarely a corpus.
    if inner == ".jsonl" or (compressed and inner == ".json"):
        return _json_lines
    if inner in (".txt", *NAMED) or (compressed and inner not in _NO_TEXT):
        return lambda path, field: iter([text(path)])
    return {".parquet": _parquet, ".arrow": _arrow}.get(path.suffix)


def in_folders(path: Path) -> bool:
    """Whether a file with this name is read when only its folder is given."""
    return reader(path) is not None and path.suffix not in NAMED


def documents(path: Path, field: str) -> Iterator[Document]:
    """The documents of a file that has a `reader`.

    Args:
      path: the file.
      field: the field that holds the documents, in formats with fields.

    Raises:
      UserError: the file is damaged, has no such field, or the field is not text; the message names
        the file, the line and the value.
    """
    read = reader(path)
    assert read is not None
    return read(path, field)


def pieces(text: str) -> Document:
    return [text[i : i + PIECE] for i in range(0, len(text), PIECE)]


def text(path: Path) -> Document:
    """The document in a text file, in pieces."""
    with (
        _readable(path),
        _opened(path) as file,
        io.TextIOWrapper(file, "utf-8", "replace", newline="\n") as decoded,
    ):
        while piece := decoded.read(PIECE):
            yield piece


def read_bytes(path: Path) -> bytes:
    """The bytes of a file, decompressed.

    Raises:
      UserError: the file cannot be read or decompressed.
    """
    with _readable(path), _opened(path) as file:
        return file.read()


def read_text(path: Path) -> str:
    """The text of a file that must be UTF-8.

    If a file in another encoding were read, labels and answers would change silently.

    Raises:
      UserError: the file cannot be read, or has another encoding; the message names the file and
        the line.
    """
    content = read_bytes(path).removeprefix(codecs.BOM_UTF8)
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
        from pyarrow import ArrowException, parquet

        with _readable(path, ArrowException), parquet.ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches(_ROWS) for row in batch.to_pylist())
            yield from ((f"{path}, row {n}", row) for n, row in enumerate(rows, 1))
        return
    with _readable(path), _opened(path) as file:
        for where, line in _lines(file, path):
            yield where, _object(line, where)


def _of_tfds(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import tensorflow_datasets as tfds

    split = path.name.partition(".")[0].rpartition("-")[2]
    try:
        rows: Any = tfds.builder_from_directory(path.parent).as_data_source(split)  # type: ignore[call-arg]
    except Exception as error:
        raise UserError(
            f"cannot read {path}: {type(error).__name__}: {error}; prepare it again"
        ) from error
    for n, row in enumerate(rows):
        yield (
            f"{path.parent}, {split}, row {n}",
            {name: _plain(value) for name, value in row.items()},
        )


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
    with _readable(path), _opened(path) as file:
        for where, line in _lines(file, path):
            yield pieces(_field(line, field, where))


def _lines(file: Iterable[bytes], path: Path) -> Iterator[tuple[str, bytes]]:
    """The place and the content of each line, without byte-order mark and empty lines."""
    for n, line in enumerate(file, 1):
        content = line.removeprefix(codecs.BOM_UTF8) if n == 1 else line
        if content.strip():
            yield f"{path}, line {n}", content


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
    if field not in record:
        raise UserError(
            f"{where} has no field {field!r}, only {', '.join(record) or 'none'}; set data.field"
        )
    text = "" if record[field] is None else record[field]
    if not isinstance(text, str):
        raise UserError(
            f"{where}: field {field!r} is not text, but {json.dumps(text)[:40]}; set data.field"
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
        _readable(path),
        _opened(path) as file,
        io.TextIOWrapper(file, "utf-8-sig", "replace", newline="") as f,
    ):
        rows = cells(f, path)
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
    csv.field_size_limit(2**31 - 1)  # a cell may be a whole book
    # Without ``strict``, a quote that is not closed takes all further rows into its cell.
    rows = csv.reader(file, strict=True, **how)
    first = 1  # the first line of the row
    try:
        for row in rows:
            if row:
                yield f"{path}, line {rows.line_num}", row
            first = rows.line_num + 1
    except csv.Error as error:
        raise UserError(f"{path}, line {first}: {error}; correct the quotes of the row") from error


# --- Parquet and Arrow ---


def _parquet(path: Path, field: str) -> Iterator[Document]:
    from pyarrow import ArrowException, parquet

    with (
        _readable(path, ArrowException),
        parquet.ParquetFile(path, buffer_size=BUFFER, pre_buffer=False) as file,
    ):
        _check(file.schema_arrow, field, path)
        for batch in file.iter_batches(_ROWS, columns=[field], use_threads=False):
            yield from _rows(batch.column(0))


def _arrow(path: Path, field: str) -> Iterator[Document]:
    """Documents of the stream format.

    The writer chooses the batch size: Hugging Face `datasets` takes 1000 rows.
    """
    import pyarrow as pa

    with (
        _readable(path, pa.ArrowException),
        pa.OSFile(str(path)) as file,
        pa.ipc.open_stream(file) as stream,
    ):
        _check(stream.schema, field, path)
        for batch in stream:
            yield from _rows(batch.column(field))


def _check(schema: Any, field: str, path: Path) -> None:
    from pyarrow import types

    if field not in schema.names:
        raise UserError(
            f"{path} has no column {field!r}, only {', '.join(schema.names) or 'none'}; set data.field"
        )
    kind = schema.field(field).type
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        raise UserError(f"column {field!r} of {path} is not text, but {kind}; set data.field")


def _rows(column: Any) -> Iterator[Document]:
    # The bytes of a string column are not always UTF-8.
    for value in column.cast("large_binary"):
        yield pieces((value.as_py() or b"").decode("utf-8", "replace"))


# --- files ---


def _zstd(path: Path, mode: str) -> BinaryIO:
    import pyarrow as pa

    return io.BufferedReader(pa.input_stream(str(path), compression="zstd"))


_COMPRESSED: dict[str, Callable[[Path, str], Any]] = {
    ".gz": gzip.open,
    ".xz": lzma.open,
    ".zst": _zstd,
}
_NO_TEXT = {".parquet", ".arrow", ".tar", ".zip"}  # inner suffixes that are not text


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    with _COMPRESSED.get(path.suffix, open)(path, "rb") as file:
        if file.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise UserError(
                f"{path} is UTF-16, not UTF-8; convert it, for example with iconv -f UTF-16 -t UTF-8"
            )
        yield file


@contextmanager
def _readable(path: Path, *others: type[Exception]) -> Iterator[None]:
    """Name the file in errors of a damaged file; ``others`` are exceptions of its format."""
    try:
        yield
    except (OSError, EOFError, lzma.LZMAError, zlib.error, *others) as error:
        raise UserError(f"cannot read {path}: {error}") from error

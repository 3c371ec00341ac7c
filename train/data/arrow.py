"""How are Parquet and Arrow files read within the limits?

A library decompresses a whole part of a file at once, and its size is only declared. Parquet is
therefore read by a child process with limited memory. The parts of Arrow declare their sizes in a
place that is easy to find, so these are checked before.
"""

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from jaxgrow.untrusted import file_limits, open_regular
from train.data.bounded import BoundedChild
from train.data.decoding import readable

_ROWS = 64  # rows of Parquet that are in memory at once
_AT_ONCE = 128 << 20  # bytes of these rows, if all of them have the longest value
# Bytes of Parquet. Without a buffer size, the column of an entire row group is read at once.
_BUFFER = 1 << 20
# Messages of Arrow that have columns, and the place of the columns in a dictionary.
_DICTIONARY, _RECORDS = 2, 3


def columns_of(path: Path, chosen: Callable[[Any], str]) -> Iterator[Any]:
    """Yield one column of a Parquet or Arrow file, some rows at a time.

    Args:
      path: the file.
      chosen: returns the name of the column, for the schema.

    Raises:
      Exception: the file is damaged; use it within `train.data.decoding.readable`.
    """
    if path.suffix == ".parquet":
        for batch in parquet_batches(path, chosen):
            yield batch.column(0)
        return
    # The writer chooses the batch size: Hugging Face `datasets` takes 1000 rows.
    with _stream(path) as stream:
        name = chosen(stream.schema)
        for batch in _arrow_batches(path, stream):
            yield batch.column(name)


def parquet_batches(path: Path, chosen: Callable[[Any], str] | None = None) -> Iterator[Any]:
    """Yield the rows of a Parquet file, of all columns or of one, as Arrow's batches."""
    import pyarrow as pa

    open_regular(path.resolve()).close()
    size = path.stat().st_size
    child, what = BoundedChild(), f"cannot read {path}"
    try:
        real = str(path.resolve())
        parts, about = child.ask(what, job="parquet", path=real, buffer=_BUFFER)
        name = None if chosen is None else chosen(pa.ipc.read_schema(pa.py_buffer(about)))
        mine = [n for part, n in parts if name is None or f"{part}.".startswith(f"{name}.")]
        largest = max(mine, default=0)
        file_limits().check_expansion(str(path), largest, size)
        # A dictionary may repeat a value of this size in each row.
        rows = max(1, min(_ROWS, _AT_ONCE // max(1, largest)))
        columns = None if name is None else [name]
        child.ask(what, job="rows", rows=rows, columns=columns)
        made = 0
        while content := child.ask(what, job="batches")[1]:
            for batch in pa.ipc.open_stream(content):
                made += batch.nbytes + batch.num_rows
                file_limits().check_expansion(str(path), made, size)
                yield batch
    finally:
        child.close()


def arrow_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield all fields of each row of an Arrow file.

    Raises:
      UserError: the file is damaged or too large.
    """
    with readable(path), _stream(path) as stream:
        for _, row in rows_of(path, _arrow_batches(path, stream)):
            yield row


@contextmanager
def _stream(path: Path) -> Iterator[Any]:
    import pyarrow as pa

    with open_regular(path.resolve(), 1 << 16) as file:
        for made in _decompressed(file):
            file_limits().check_expansion(str(path), made, path.stat().st_size)
    with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as stream:
        yield stream


def _arrow_batches(path: Path, stream: Any) -> Iterator[Any]:
    made = 0
    size = path.stat().st_size
    for batch in stream:
        batch.validate()  # `nbytes` is a difference of two offsets
        made += batch.nbytes + batch.num_rows
        file_limits().check_expansion(str(path), made, size)
        yield batch


def _decompressed(file: BinaryIO) -> Iterator[int]:
    """Yield the size of a stream of Arrow after each of its messages, as they declare it.

    Raises:
      Exception: the stream is damaged.
    """
    made = 0
    while head := file.read(4):
        (size,) = struct.unpack("<i", head)
        if size == -1:  # since version 0.15
            (size,) = struct.unpack("<i", file.read(4))
        if size == 0:
            return
        message = file.read(size)
        body = file.tell()
        made += sum(_buffers(message, body, file))
        yield made
        (length,) = _field(message, _root(message, 0), 3, "<q")
        if length < 0:
            raise ValueError("a message has a negative length")
        file.seek(body + length)


def _buffers(message: bytes, body: int, file: BinaryIO) -> Iterator[int]:
    """Yield the declared size of each compressed buffer of a message, which is a FlatBuffer."""
    table = _root(message, 0)
    (kind,) = _field(message, table, 1, "<B")
    if kind not in (_DICTIONARY, _RECORDS):
        return
    table = _root(message, _place(message, table, 2))
    if kind == _DICTIONARY:
        table = _root(message, _place(message, table, 1))
    if not _place(message, table, 3) or not (buffers := _place(message, table, 2)):
        return  # it is not compressed, or has no columns
    first = _root(message, buffers)
    (count,) = struct.unpack_from("<I", message, first)
    for n in range(count):
        offset, length = struct.unpack_from("<qq", message, first + 4 + 16 * n)
        if length > 0:
            file.seek(body + offset)
            (declared,) = struct.unpack("<q", file.read(8))
            yield length if declared == -1 else declared


def _root(message: bytes, at: int) -> int:
    """The place that an offset leads to."""
    return at + struct.unpack_from("<I", message, at)[0]


def _place(message: bytes, table: int, field: int) -> int:
    """The place of a field of a table; 0 if the table does not have it."""
    fields = table - struct.unpack_from("<i", message, table)[0]
    (size,) = struct.unpack_from("<H", message, fields)
    at = 4 + 2 * field
    offset = struct.unpack_from("<H", message, fields + at)[0] if at < size else 0
    return table + offset if offset else 0


def _field(message: bytes, table: int, field: int, kind: str) -> tuple[int, ...]:
    at = _place(message, table, field)
    return struct.unpack_from(kind, message, at) if at else (0,)


def rows_of(path: Path, batches: Iterator[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place, in words, and all fields of each row."""
    n = 0
    size = path.stat().st_size
    for batch in batches:
        # Offsets of a damaged file may lead to other memory of the process.
        batch.validate(full=True)
        # A Python object for each cell needs far more memory than its bytes in a small file.
        if (cells := (n + batch.num_rows) * max(1, batch.num_columns)) > size:
            file_limits().check(str(path), entries=cells)
        for row in batch.to_pylist():
            n += 1
            yield f"{path}, row {n}", row

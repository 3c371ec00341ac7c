"""How are Parquet and Arrow files read within the limits?

A library decompresses a whole part of a file at once, and its size is only declared. A child
process with limited memory therefore reads these files.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxgrow.typed import Json
from jaxgrow.untrusted import file_limits, open_regular
from train.extras.bounded import BoundedChild

_ROWS = 64  # rows that are in memory at once
_AT_ONCE = 128 << 20  # bytes of these rows, if all of them have the longest value
# Bytes of Parquet. Without a buffer size, the column of an entire row group is read at once.
_BUFFER = 1 << 20


def table_rows(path: Path, field: str = "") -> Iterator[tuple[str, Json]]:
    """Yield the place, in words, and the fields of each row of a Parquet or Arrow file.

    Args:
      path: the file.
      field: the column to read, or the way into it, such as ``meta.text``; its texts are bytes,
        because they are not always UTF-8. All columns are read if there is no such column.

    Raises:
      Exception: the file is damaged; use it within `train.extras.decoding.readable_file`.
    """
    import pyarrow as pa

    open_regular(path.resolve()).close()
    size = path.stat().st_size
    child, what = BoundedChild(), f"cannot read {path}"
    try:
        about = child.ask(what, job="table", path=str(path.resolve()), buffer=_BUFFER)[0]
        roots = [name for name in (field, field.partition(".")[0]) if name in about["names"]][:1]
        own = [
            n for part, n in about["parts"] if not roots or f"{part}.".startswith(f"{roots[0]}.")
        ]
        largest = max(own, default=0)
        file_limits().check_expansion(str(path), largest, size)
        # A dictionary may repeat a value of this size in each row.
        rows = max(1, min(_ROWS, _AT_ONCE // max(1, largest)))
        child.ask(what, job="rows", rows=rows, columns=roots or about["names"])
        made = count = 0
        while content := child.ask(what, job="batches")[1]:
            for batch in pa.ipc.open_stream(content):
                made += batch.nbytes + batch.num_rows
                file_limits().check_expansion(str(path), made, size)
                if roots:
                    columns = [column.view(_with_bytes(column.type)) for column in batch.columns]
                    batch = pa.record_batch(columns, names=roots)
                # Offsets of a damaged file may lead to other memory of the process.
                batch.validate(full=True)
                # A Python object for each cell needs far more memory than its bytes in a small file.
                if (cells := (count + batch.num_rows) * max(1, batch.num_columns)) > size:
                    file_limits().check(str(path), entries=cells)
                for row in batch.to_pylist():
                    count += 1
                    yield f"{path}, row {count}", row
    finally:
        child.close()


def _with_bytes(kind: Any) -> Any:
    """The type of a column with bytes in place of strings."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _with_bytes(kind.value_type), kind.ordered)
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_with_bytes(kind.value_type), kind.list_size)
    if pa.types.is_large_list(kind):
        return pa.large_list(_with_bytes(kind.value_type))
    if pa.types.is_list(kind):
        return pa.list_(_with_bytes(kind.value_type))
    if pa.types.is_struct(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        return pa.struct([field.with_type(_with_bytes(field.type)) for field in fields])
    same = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}
    return same.get(kind, pa.binary_view() if pa.types.is_string_view(kind) else kind)

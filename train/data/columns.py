"""Which column of a table has the texts or the token ids, and what are they in each row?

A field may lead into a nested column: ``meta.text``, or ``messages.content`` for a list of records.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxgrow.untrusted import escape_text
from train.common.errors import UserError

_ROWS = 64  # rows that are in memory at once, without the dictionary that they refer to
_BETWEEN = "\n"  # between the texts of a list, which are one document


def text_column(schema: Any, field: str, path: Path) -> tuple[str, list[str]]:
    """The column of a schema that has the texts ``field``, and the way into it.

    Args:
      schema: a `pyarrow.Schema`.
      field: the name of a column, or of a nested one.
      path: the file, for messages.

    Raises:
      UserError: there is no such column, or it has no text.
    """
    root, steps = _root(schema.names, field)
    if root not in schema.names:
        raise UserError(
            f"{path} has no column {field!r}, only {_listed(schema.names)}; set data.field"
        )
    kind = _leaf(schema.field(root).type, steps)
    if kind is None or not _is_text(kind):
        what = schema.field(root).type if kind is None else kind
        raise UserError(
            f"column {field!r} of {path} is not text, but {escape_text(str(what))[:200]}; {_way_out(schema)}"
        )
    return root, steps


def column_texts(column: Any, steps: list[str]) -> Iterator[str]:
    """The text of each row of a column; bytes that are not UTF-8 become U+FFFD.

    The bytes of a string column are not always UTF-8, so they are checked as bytes. Offsets of a
    damaged file may lead to other memory of the process.
    """
    content = column.view(_as_bytes(column.type))
    content.validate(full=True)
    decoded = _as_bytes(column.type, decode=True)
    for begin in range(0, len(content), _ROWS):
        for value in content.slice(begin, _ROWS).cast(decoded):
            yield nested_text(value.as_py(), steps) or ""


def nested_text(value: Any, steps: list[str]) -> str | None:
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
        parts = [nested_text(part, steps) for part in value]
        return None if None in parts else _BETWEEN.join(filter(None, parts))
    if isinstance(value, Mapping) and steps:
        found, rest = _root([*value], ".".join(steps))
        return nested_text(value[found], rest) if found in value else None
    return None


def _root(names: list[str], field: str) -> tuple[str, list[str]]:
    """The name that ``field`` begins with, and the names after it."""
    if field in names:
        return field, []
    first, _, rest = field.partition(".")
    return first, rest.split(".") if rest else []


def _leaf(kind: Any, steps: list[str]) -> Any:
    """The type of the values that ``steps`` lead to; None: they lead nowhere."""
    from pyarrow import types

    if types.is_dictionary(kind) or _is_list(kind):
        return _leaf(kind.value_type, steps)
    if not steps:
        return kind
    if types.is_struct(kind):
        names = [kind.field(i).name for i in range(kind.num_fields)]
        found, rest = _root(names, ".".join(steps))
        return _leaf(kind.field(names.index(found)).type, rest) if found in names else None
    return None


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    is_string = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    is_bytes = types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)
    return is_string or is_bytes


def _is_list(kind: Any) -> bool:
    from pyarrow import types

    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _as_bytes(kind: Any, decode: bool = False) -> Any:
    """The type with bytes in place of strings; ``decode``: also values in place of dictionaries."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        value = _as_bytes(kind.value_type, decode)
        return value if decode else pa.dictionary(kind.index_type, value, kind.ordered)
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_as_bytes(kind.value_type, decode), kind.list_size)
    if pa.types.is_large_list(kind):
        return pa.large_list(_as_bytes(kind.value_type, decode))
    if pa.types.is_list(kind):
        return pa.list_(_as_bytes(kind.value_type, decode))
    if pa.types.is_struct(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        return pa.struct([field.with_type(_as_bytes(field.type, decode)) for field in fields])
    if decode and _is_text(kind):
        return pa.large_binary()
    same = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}
    return same.get(kind, pa.binary_view() if pa.types.is_string_view(kind) else kind)


def _way_out(schema: Any) -> str:
    """The columns that can be read instead."""
    found = [name for column in schema for name in _paths(column.name, column.type, _is_text)]
    if found:
        return f"set data.field to a column of text: {_listed(found)}"
    if ids := [column.name for column in schema if is_ids(column.type)]:
        return f"set data.field; if {_listed(ids)} has token ids, set data.source=tokens, too"
    return "set data.field; no column has text"


def is_ids(kind: Any) -> bool:
    """Whether a column has lists of integers."""
    from pyarrow import types

    return _is_list(kind) and types.is_integer(kind.value_type)


def _paths(name: str, kind: Any, fits: Any) -> list[str]:
    """The names of all columns below one whose type fits."""
    from pyarrow import types

    if types.is_dictionary(kind) or _is_list(kind):
        return _paths(name, kind.value_type, fits)
    if types.is_struct(kind):
        inner = [kind.field(i) for i in range(kind.num_fields)]
        return [p for field in inner for p in _paths(f"{name}.{field.name}", field.type, fits)]
    return [name] if fits(kind) else []


def _listed(names: list[str]) -> str:
    return escape_text(", ".join(names[:20])) or "none"

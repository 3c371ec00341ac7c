"""The cases of a test from a table: in the core suite, the extra suite, or the slow suite."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest


def cases(
    table: Mapping[str, Any] | Iterable[str],
    core: Collection[str],
    extra: Collection[str] | None = None,
) -> list[Any]:
    """Return one case for each row, with its name as id.

    Args:
      table: the value of each name, or only names, which are then the values.
      core: names of the rows that the default suite runs.
      extra: names of the rows of the extra suite. All others are in the slow suite. By default,
        there are no others.
    """
    rows = table if isinstance(table, Mapping) else {name: name for name in table}
    assert {*core, *(extra or ())} <= rows.keys()

    def marks(name: str) -> list[pytest.MarkDecorator]:
        if name in core:
            return []
        return [pytest.mark.extra if extra is None or name in extra else pytest.mark.slow]

    return [
        pytest.param(*(v if type(v) is tuple else (v,)), id=name, marks=marks(name))
        for name, v in rows.items()
    ]

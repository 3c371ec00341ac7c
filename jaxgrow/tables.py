"""Tables as plain text: aligned columns for a terminal, and Markdown for a page."""

import io
from collections.abc import Collection, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

# The console is wider than any table, so that cells are neither wrapped nor cut.
_WIDTH = 100_000


def align_columns(
    head: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int] = ()
) -> str:
    """Format rows in columns that are separated by two spaces.

    Args:
      head: the titles of the columns; empty for a table without titles.
      rows: the cells of each row.
      right: the indices of the columns that are aligned to the right, such as those of numbers.

    Returns:
      The lines of the table, without spaces at their ends.

    Example:
      >>> print(align_columns(("METHOD", "GB"), [("stack", "1.5"), ("lemon", "10.25")], right=[1]))
      METHOD     GB
      stack     1.5
      lemon   10.25
    """
    table = Table(
        box=None, show_header=bool(head), show_edge=False, pad_edge=False, padding=(0, 2, 0, 0)
    )
    return _table_text(table, head, rows, right)


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format rows as a Markdown table with aligned source text.

    Args:
      head: the titles of the columns.
      rows: the cells of each row.

    Returns:
      The lines of the table.

    Example:
      >>> print(markdown_table(("method", "GB"), [("stack", "1.5")]))
      | method | GB  |
      |--------|-----|
      | stack  | 1.5 |
    """
    return _table_text(Table(box=box.MARKDOWN), head, rows)


def short_count(count: float) -> str:
    """Write a number with its unit, such as ``"94 K"``."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        value = count / size
        if value >= 0.9995:  # a smaller value rounds to at most 999 of the next unit
            # From 99.5 on, two digits would be written as 1e+02.
            return f"{value:.2g} {unit}" if value < 99.5 else f"{value:.0f} {unit}"
    return f"{count:.3g}"


def _table_text(
    table: Table,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Collection[int] = (),
) -> str:
    columns = len(head) or max(map(len, rows), default=0)
    for i in range(columns):
        title = Text(head[i]) if head else ""
        table.add_column(title, justify="right" if i in right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    # Styles and the detection of terminals are off: the text is the same in files and on screens.
    console = Console(file=io.StringIO(), width=_WIDTH, color_system=None, legacy_windows=False)
    with console.capture() as found:
        console.print(table)
    return "\n".join(line.rstrip() for line in found.get().splitlines() if line.strip())

"""Writes the tables of the site that are made from data: ``python docs/tables.py``."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from jaxgrow.operators import OPERATORS, WIDTH
from train.analysis.evidence import summary

DOCS = Path(__file__).parent
PLACE = re.compile(
    r"(?<=<!-- The table is written by `python docs/tables.py`)(.*?-->\n\n).*?(?=\n\n)", re.DOTALL
)
COLUMNS = (
    "operator",
    "effect",
    "grows",
    "preserves the function of a pre-LN model",
    "source",
    "optimizer state",
)


def operators() -> str:
    """Return the table of the registered growth operators, as Markdown."""
    rows = [COLUMNS, ["---"] * len(COLUMNS)]
    for first, found in OPERATORS.items():
        if first != found.name:  # another name of an operator
            continue
        names = [name for name, other in OPERATORS.items() if other is found]
        widths = ["width", *(axis for axis in found.axes if axis == "layers")]
        axes = ", ".join(widths if first in WIDTH else found.axes)
        rows.append(
            (
                ", ".join(f"`{name}`" for name in names),
                found.summary.replace("``", "`"),
                f"{axes}: {found.sizes}" if found.sizes else axes,
                found.preserves,
                found.source,
                re.sub(r"\b(copy|exact|asymmetric|drop)\b", r"`\1`", found.state),
            )
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


TABLES = {"results/index.md": lambda: summary("docs/results"), "concepts/operators.md": operators}


def written(text: str, table: str) -> str:
    """Return the page with the table of today."""
    return PLACE.sub(lambda found: found[1] + table, text, count=1)


if __name__ == "__main__":
    for name, table in TABLES.items():
        page = DOCS / name
        page.write_text(written(page.read_text(), table()))

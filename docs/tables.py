"""Writes the tables of the site and `jaxgrow/cli/methods.py`: ``python docs/tables.py``."""

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import gpu_tables, run_tables
from jaxgrow.cli.arguments import described_methods
from jaxgrow.extras.integrations.formats import FORMATS
from jaxgrow.extras.integrations.torch_optimizer import Policy
from jaxgrow.operators import EXPERTS, OPERATORS, WIDTH
from train.extras.advice.evidence import summary_table

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
        axes = ", ".join(widths if first in WIDTH else found.axes) or "nothing"
        rows.append(
            (
                ", ".join(f"`{name}`" for name in names),
                found.summary.replace("``", "`"),
                f"{axes}: {found.sizes}" if found.sizes else axes,
                found.preserves,
                found.source,
                ", ".join(f"`{policy}`" for policy in found.policies),
            )
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def methods() -> str:
    """Return the module with what the arguments of ``jaxgrow`` need to know without JAX."""
    lines = [
        f"    {name!r}: {row!r},".replace("'", '"') for name, row in described_methods().items()
    ]
    return "\n".join(
        (
            '"""The names of methods and formats, written by `python docs/tables.py`."""\n',
            "# For each method: the axes that it grows, and whether it preserves the function of a",
            "# pre-LN model.",
            "METHODS = {",
            *lines,
            "}",
            f"EXPERTS = {tuple(EXPERTS)!r}".replace("'", '"'),
            f"FORMATS = {tuple(sorted(FORMATS))!r}".replace("'", '"'),
            f"OPTIMIZER_POLICIES = {get_args(Policy)!r}".replace("'", '"'),
            "",
        )
    )


# Pages, and the functions that return their tables, in the order of the page.
TABLES = {
    "results/index.md": (lambda: summary_table("docs/results"),),
    "results/baselines.md": run_tables.BASELINES,
    "results/forms.md": run_tables.FORMS,
    "results/gpu.md": gpu_tables.TABLES,
    "concepts/operators.md": (operators,),
}


def written(text: str, tables: Iterable[str]) -> str:
    """Return the page with the tables of today."""
    left = iter(tables)
    return PLACE.sub(lambda found: found[1] + next(left), text)


if __name__ == "__main__":
    module = DOCS.parent / "jaxgrow/cli/methods.py"
    module.write_text(methods())
    subprocess.run(["ruff", "format", "--quiet", str(module)], check=True)
    for name, tables in TABLES.items():
        page = DOCS / name
        page.write_text(written(page.read_text(), (table() for table in tables)))

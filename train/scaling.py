"""Does a saving carry over to other sizes? Fit the savings of one recipe at several sizes and budgets:

``python -m train.scaling RUN=runs/k47/compare.json RUN=runs/k163/compare.json ... [--at PARAMETERS:TOKENS]``

Each file is a result of `train.compare`, and RUN is the name of the recipe in this file. The command
fits the saving against the frontier, by least squares over all seeds, with

    a + b log2(parameters) + c log2(tokens per parameter)

A term is omitted if its variable is the same in all files. The command prints the measurements; b
and c, the percentage points that each doubling adds; and the expected saving at ``--at``, such as
``1e9:20``. The intervals are 95 % intervals (Student's t) of the mean over seeds; a single seed
varies more. They assume that the linear relation also holds at the extrapolated size, and that the
comparisons differ only by this relation and by the seeds.
"""

import json
import math
from pathlib import Path

from jaxgrow.tables import markdown_table
from jaxgrow.typed import Json, convert_json
from jaxgrow.untrusted import one_line
from train.arguments import command_parser
from train.common.errors import UserError, exits_cleanly
from train.common.files import read_own
from train.common.output import say
from train.extras.advice.fits import AXES, SAME, Measured, fit_savings


def read_savings(text: str) -> Measured:
    """Read the savings of ``RUN=compare.json``.

    Raises:
      UserError: the file is missing or is not a ``compare.json``, it does not contain the run, or a
        seed of the run has no saving against the frontier.
    """
    name, found, path = text.partition("=")
    if not found or not Path(path).is_file():
        raise UserError(
            f"{text!r} is not RUN=FILE with an existing file compare.json of python -m train.compare"
        )
    # The user named the file, so it may be a link.
    with one_line(UserError, f"{path} is not a compare.json of python -m train.compare"):
        content = json.loads(read_own(Path(path).resolve(), "compare again"))
        return _of_run(name, path, {row["run"]: row for row in content["rows"]})


def _of_run(name: str, path: str, rows: dict[str, Json]) -> Measured:
    if name not in rows:
        raise UserError(f"{path} has no run {name!r}; its runs are {', '.join(rows)}")
    baseline = next(iter(rows.values()))
    row = rows[name]
    if row.get("diverged"):
        raise UserError(
            f"{name} in {path} diverged with seed {', '.join(map(str, row['diverged']))}, so "
            "it has no saving to fit; leave it out, or compare it with other seeds"
        )
    if row["saved_frontier"] is None or None in row["saved_frontier"]:
        raise UserError(
            f"{name} in {path} does not have a saving against the frontier for each seed; compare with --frontier, and with "
            "fractions that are small enough to reach its loss"
        )
    # The number of parameters, and the tokens per parameter of the baseline.
    at = convert_json([row["parameters"], baseline["tokens_per_parameter"]], tuple[float, ...])
    if not all(0 < x < math.inf for x in at):
        raise ValueError(f"its sizes are {at}")
    saved = convert_json(row["saved_frontier"], tuple[float, ...])
    return Measured(at, saved, sum(convert_json(row["below_frontier"], tuple[bool, ...])))


def scaling_report(points: list[Measured], at: tuple[float, float] | None) -> str:
    """Return the measurements, the slopes and the expected saving at ``at`` as Markdown.

    Raises:
      UserError: the points do not determine the fit, or ``at`` differs from all points in a
        variable that is the same for all of them.
    """
    found = fit_savings(points)

    def percent(value: float, half: float) -> str:
        return f"{100 * value:.1f} % ± {100 * half:.1f}"

    body = []
    for p in sorted(points, key=lambda p: p.at):
        saved = ", ".join(f"{100 * s:.1f} %" for s in p.saved)
        body.append([f"{p.at[0]:,.0f}", f"{p.at[1]:.1f}", saved, str(p.bounds or "")])
    lines = [
        markdown_table([*AXES, "FLOPs saved, each seed", "lower bounds"], body),
        "",
        *(f"A doubling of {axis} adds {percent(*found.slope(axis))}." for axis in found.slopes),
    ]
    if bounds := sum(p.bounds for p in points):
        lines.append(
            f"The fit uses the lower bounds as if they were values ({bounds} of {sum(len(p.saved) for p in points)} seeds)."
        )
    if at is not None:
        for axis, value in zip(AXES, at, strict=True):
            if axis not in found.slopes and abs(math.log2(value) - found.centre[axis]) > SAME:
                raise UserError(
                    f"--at asks for {value:.3g} {axis}, but all comparisons have {2 ** found.centre[axis]:.3g}, so "
                    f"the effect of a change is unknown; give that value, or add a comparison with another number of {axis}"
                )
        lines.append(
            f"Expected at {at[0]:.3g} parameters, {at[1]:.3g} tokens per parameter: {percent(*found.expected(at))}."
        )
    return "\n".join(lines)


def main() -> None:
    arguments = command_parser("scaling").parse_args()
    say(
        scaling_report(
            [read_savings(text) for text in arguments.comparisons],
            arguments.at,
        )
    )


if __name__ == "__main__":
    exits_cleanly(main)

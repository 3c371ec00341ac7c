"""Does a saving carry over? Fits what one recipe saved at several sizes and budgets, each compared by `train.compare`:

``python -m train.scaling RUN=runs/k47/compare.json RUN=runs/k163/compare.json ... [--at PARAMETERS:TOKENS]``

RUN is the recipe's name there. By least squares over all seeds, a saving against the frontier is

    a + b log2(parameters) + c log2(tokens per parameter)

where what does not differ is left out. Prints what was measured; b and c, so the points that a
doubling adds; and the saving that is expected at ``--at``, such as ``1e9:20``. Intervals are of 95
% (Student's t), and of the mean over seeds, if the line holds so far.
"""

import json
from pathlib import Path

from train.analysis.fits import AXES, Measured, fit
from train.analysis.runs import markdown
from train.common.commands import Parser
from train.common.errors import UserError, exits_cleanly


def measured(text: str) -> Measured:
    """What ``RUN=compare.json`` says.

    Raises:
      UserError: no such file or run, another file, or no saving of one of its seeds against a
        frontier.
    """
    name, found, path = text.partition("=")
    if not found or not Path(path).is_file():
        raise UserError(f"{text!r} is no RUN=compare.json of python -m train.compare")
    try:
        rows = {row["run"]: row for row in json.loads(Path(path).read_text())["rows"]}
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{path} is no compare.json of python -m train.compare: {error!r}"
        ) from None
    if name not in rows:
        raise UserError(f"{path} has no run {name!r}, only {', '.join(rows)}")
    baseline, row = next(iter(rows.values())), rows[name]
    if row.get("diverged"):
        raise UserError(
            f"{name} in {path} diverged with seed {', '.join(map(str, row['diverged']))}: it has no saving to fit"
        )
    if row["saved_frontier"] is None or None in row["saved_frontier"]:
        raise UserError(
            f"{name} in {path} has no saving against the frontier for each seed: compare with --frontier, and with budgets low "
            "enough for its loss"
        )
    at = row["parameters"], baseline["tokens_per_parameter"]  # that it saves of
    return Measured(at, tuple(row["saved_frontier"]), sum(row["below_frontier"]))


def told(points: list[Measured], at: tuple[float, float] | None) -> str:
    found = fit(points)

    def percent(value: float, half: float) -> str:
        return f"{100 * value:.1f} % ± {100 * half:.1f}"

    body = [
        [
            f"{p.at[0]:,.0f}",
            f"{p.at[1]:.1f}",
            ", ".join(f"{100 * s:.1f} %" for s in p.saved),
            str(p.bounds or ""),
        ]
        for p in sorted(points, key=lambda p: p.at)
    ]
    lines = [markdown([*AXES, "saved, each seed", "of these bounds"], body), ""]
    lines += [f"A doubling of {axis} adds {percent(*found.slope(axis))}." for axis in found.slopes]
    if at is not None:
        lines.append(
            f"Expected at {at[0]:.3g} parameters, {at[1]:.3g} tokens each: {percent(*found.expected(at))}."
        )
    return "\n".join(lines)


def main() -> None:
    parser = Parser("scaling", __doc__)
    parser.add_argument(
        "comparisons",
        nargs="+",
        metavar="RUN=compare.json",
        help="a recipe, and where it was compared",
    )
    parser.add_argument(
        "--at", metavar="PARAMETERS:TOKENS", help="size to extrapolate to (default: none)"
    )
    arguments = parser.parse_args()
    if len(set(arguments.comparisons)) < len(arguments.comparisons):
        raise UserError("a comparison is given twice: its seeds would count as twice as many")
    try:
        parameters, tokens = map(float, arguments.at.split(":")) if arguments.at else (1.0, 1.0)
    except ValueError:
        parameters = tokens = 0.0
    if min(parameters, tokens) <= 0:
        raise UserError(
            f"--at takes parameters and tokens of each, such as 1e9:20, not {arguments.at}"
        )
    print(
        told(
            [measured(text) for text in arguments.comparisons],
            (parameters, tokens) if arguments.at else None,
        )
    )


if __name__ == "__main__":
    exits_cleanly(main)

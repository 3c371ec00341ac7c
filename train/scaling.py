"""Does a saving carry over? Fits what one recipe saved at several sizes and budgets, each compared by `train.compare`:

``python -m train.scaling RUN=runs/k47/compare.json RUN=runs/k163/compare.json ... [--at PARAMETERS:TOKENS]``

RUN is the recipe's name there. By least squares over all seeds, a saving against the frontier is

    a + b log2(parameters) + c log2(tokens a parameter)

where what does not differ is left out. Prints what was measured; b and c, so the points that a doubling adds; and the saving
that is expected at ``--at``, such as ``1e9:20``. Intervals are of 95 % (Student's t), and of the mean over seeds, if the line
holds so far.
"""

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.stats import t

from train.errors import UserError, exits_cleanly
from train.results.runs import markdown

AXES: tuple[str, ...] = ("parameters", "tokens a parameter")


@dataclass(frozen=True)
class Measured:
    """What one recipe saved at one size and budget, by seed."""

    at: tuple[float, float]  # parameters, and tokens of each
    saved: tuple[float, ...]
    bounds: int  # so many of them are lower bounds: their runs ended below the whole frontier


def measured(text: str) -> Measured:
    """What ``RUN=compare.json`` says.

    Raises:
      UserError: no such file or run, another file, or no saving of one of its seeds against a frontier.
    """
    name, found, path = text.partition("=")
    if not found or not Path(path).is_file():
        raise UserError(f"{text!r} is no RUN=compare.json of python -m train.compare")
    try:
        rows = {row["run"]: row for row in json.loads(Path(path).read_text())["rows"]}
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} is no compare.json of python -m train.compare: {error!r}") from None
    if name not in rows:
        raise UserError(f"{path} has no run {name!r}, only {', '.join(rows)}")
    baseline, row = next(iter(rows.values())), rows[name]
    if row["saved_frontier"] is None or None in row["saved_frontier"]:
        raise UserError(
            f"{name} in {path} has no saving against the frontier for each seed: compare with --frontier, and with budgets low "
            "enough for its loss"
        )
    at = row["parameters"], baseline["tokens_per_parameter"]  # that it saves of
    return Measured(at, tuple(row["saved_frontier"]), sum(row["below_frontier"]))


@dataclass(frozen=True)
class Fit:
    """``mean + slopes (x - centre)``, x in doublings."""

    mean: float
    slopes: dict[str, float]  # of the axes that differ
    centre: dict[str, float]
    covariance: np.ndarray  # of (mean, *slopes)
    freedom: int

    def half_width(self, weights: np.ndarray) -> float:
        """Of the 95 % interval of a sum of mean and slopes with these weights."""
        return float(t.ppf(0.975, self.freedom) * math.sqrt(weights @ self.covariance @ weights))

    def slope(self, axis: str) -> tuple[float, float]:
        weights = np.array([0.0, *(float(name == axis) for name in self.slopes)])
        return self.slopes[axis], self.half_width(weights)

    def expected(self, at: tuple[float, float]) -> tuple[float, float]:
        x = dict(zip(AXES, np.log2(at), strict=True))
        off = np.array([x[axis] - self.centre[axis] for axis in self.slopes])
        return float(self.mean + off @ [*self.slopes.values()]), self.half_width(np.array([1.0, *off]))


def fit(points: list[Measured]) -> Fit:
    """
    Raises:
      UserError: all are of one size and budget; or sizes and budgets go together, or there is no seed more than unknowns.
    """
    x = np.log2([p.at for p in points for _ in p.saved])
    y = np.array([s for p in points for s in p.saved])
    # Steps are whole numbers, so that budgets that are meant to be one part a little.
    axes = [i for i in range(len(AXES)) if np.ptp(x[:, i]) > 0.1]
    centre = x.mean(0)
    design = np.concatenate([np.ones((len(x), 1)), (x - centre)[:, axes]], 1)
    freedom = len(y) - design.shape[1]
    if not axes or np.linalg.matrix_rank(design, tol=0.1) < design.shape[1] or freedom < 1:
        raise UserError(
            f"{len(points)} comparisons of {len(y)} seeds do not tell how a saving changes: compare at two sizes at least, and "
            "budgets that are not other wherever sizes are, with several seeds"
        )
    found, *_ = np.linalg.lstsq(design, y, rcond=None)
    variance = np.square(y - design @ found).sum() / freedom
    names = [AXES[i] for i in axes]
    return Fit(
        float(found[0]),
        dict(zip(names, found[1:].tolist(), strict=True)),
        {AXES[i]: float(centre[i]) for i in axes},
        variance * np.linalg.inv(design.T @ design),
        freedom,
    )


def told(points: list[Measured], at: tuple[float, float] | None) -> str:
    found = fit(points)

    def percent(value: float, half: float) -> str:
        return f"{100 * value:.1f} % ± {100 * half:.1f}"

    body = [
        [f"{p.at[0]:,.0f}", f"{p.at[1]:.1f}", ", ".join(f"{100 * s:.1f} %" for s in p.saved), str(p.bounds or "")]
        for p in sorted(points, key=lambda p: p.at)
    ]
    lines = [markdown([*AXES, "saved, each seed", "of these bounds"], body), ""]
    lines += [f"A doubling of {axis} adds {percent(*found.slope(axis))}." for axis in found.slopes]
    if at is not None:
        lines.append(f"Expected at {at[0]:.3g} parameters, {at[1]:.3g} tokens each: {percent(*found.expected(at))}.")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m train.scaling", description=__doc__)
    parser.add_argument(
        "comparisons", nargs="+", metavar="RUN=compare.json", help="a recipe, and where it was compared"
    )
    parser.add_argument("--at", metavar="PARAMETERS:TOKENS", help="where to extrapolate to")
    arguments = parser.parse_args()
    if len(set(arguments.comparisons)) < len(arguments.comparisons):
        raise UserError("a comparison is given twice: its seeds would count as twice as many")
    try:
        parameters, tokens = map(float, arguments.at.split(":")) if arguments.at else (1.0, 1.0)
    except ValueError:
        parameters = tokens = 0.0
    if min(parameters, tokens) <= 0:
        raise UserError(f"--at takes parameters and tokens of each, such as 1e9:20, not {arguments.at}")
    print(told([measured(text) for text in arguments.comparisons], (parameters, tokens) if arguments.at else None))


if __name__ == "__main__":
    exits_cleanly(main)

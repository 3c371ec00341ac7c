"""How a saving changes with model size and budget: a least-squares fit over several comparisons."""

import math
from dataclasses import dataclass

import numpy as np
from scipy.stats import t

from train.common.errors import UserError

AXES: tuple[str, ...] = ("parameters", "tokens per parameter")
# Two values are the same if they differ by less than this number of doublings. Nominally equal
# budgets differ slightly, because the number of steps is an integer.
SAME = 0.1


@dataclass(frozen=True)
class Measured:
    """The savings of one method at one size and budget, for each seed."""

    at: tuple[float, float]  # parameters, tokens per parameter
    saved: tuple[float, ...]  # the saving of each seed
    # Number of seeds whose saving is a lower bound, because the run ended below the frontier.
    bounds: int


@dataclass(frozen=True)
class Fit:
    """A linear fit ``mean + slopes (x - centre)``, where x is in doublings."""

    mean: float
    slopes: dict[str, float]  # slope of each axis along which the comparisons differ
    centre: dict[str, float]  # mean of x for every axis, also for those without a slope
    covariance: np.ndarray  # covariance of (mean, *slopes)
    freedom: int  # degrees of freedom

    def half_width(self, weights: np.ndarray) -> float:
        """Half of the 95 % interval of a weighted sum of the mean and the slopes."""
        variance = weights @ self.covariance @ weights
        return float(t.ppf(0.975, self.freedom) * math.sqrt(variance))

    def slope(self, axis: str) -> tuple[float, float]:
        """The slope along ``axis`` and half of its 95 % interval."""
        weights = np.array([0.0, *(float(name == axis) for name in self.slopes)])
        return self.slopes[axis], self.half_width(weights)

    def expected(self, at: tuple[float, float]) -> tuple[float, float]:
        """The saving of the line at ``(parameters, tokens per parameter)``, and half of its 95 % interval."""
        x = dict(zip(AXES, np.log2(at), strict=True))
        off = np.array([x[axis] - self.centre[axis] for axis in self.slopes])
        expected = float(self.mean + off @ [*self.slopes.values()])
        return expected, self.half_width(np.array([1.0, *off]))


def fit_savings(points: list[Measured]) -> Fit:
    """Fit ``a + b log2(parameters) + c log2(tokens per parameter)`` by least squares.

    Axes along which all points agree are left out. All seeds count as independent observations with
    the same variance, and lower bounds count as values.

    Raises:
      UserError: all points have one size and budget, sizes and budgets change together, or there
        are too few seeds.
    """
    # One row per seed.
    at: list[tuple[float, float]] = []
    saved: list[float] = []
    for p in points:
        at += [p.at] * len(p.saved)
        saved += p.saved
    x = np.log2(at)
    y = np.array(saved)
    if not points:
        raise UserError(
            "no comparison has several seeds, so nothing can be fitted: repeat the comparisons with "
            "train.compare --seeds 0,1,2"
        )
    axes = [i for i in range(len(AXES)) if np.ptp(x[:, i]) > SAME]
    centre = x.mean(0)
    design = np.concatenate([np.ones((len(x), 1)), (x - centre)[:, axes]], 1)
    freedom = len(y) - design.shape[1]
    if not axes or np.linalg.matrix_rank(design, tol=0.1) < design.shape[1] or freedom < 1:
        raise UserError(
            f"{len(points)} comparisons of {len(y)} seeds do not show how a saving changes: compare at least two sizes, "
            "with several seeds, and with budgets per parameter that do not change together with the size"
        )
    found, *_ = np.linalg.lstsq(design, y, rcond=None)
    variance = np.square(y - design @ found).sum() / freedom
    names = [AXES[i] for i in axes]
    return Fit(
        float(found[0]),
        dict(zip(names, found[1:].tolist(), strict=True)),
        dict(zip(AXES, centre.tolist(), strict=True)),
        variance * np.linalg.inv(design.T @ design),
        freedom,
    )

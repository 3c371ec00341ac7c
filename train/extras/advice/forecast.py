"""The forecast of a saving for any model and budget, from all measurements of its methods.

Let ``cost`` be the FLOPs of a run that grows, relative to the run from scratch with all steps. If a
run from scratch with the fraction ``exp(-reach * lag)`` of the steps ends at the same loss, then::

    saving = 1 - cost * exp(reach * lag)

``reach`` makes the lags of recipes with different fractions tau comparable (`Case.reach`). The lag
is a Gaussian process (Rasmussen and Williams, 2006, equations 2.22 to 2.24). Its covariance between
two settings, with places ``x = (log4(parameters) / 2, log2(tokens per parameter))``, is::

    LEVEL^2 (1 + [same method]) + SLOPE^2 x x' + spread^2 exp(-distance)

with `Setting.distance`. ``spread`` is chosen by maximum likelihood. Far from all measurements, the
last two terms make the interval wide. A pilot is one more measurement. The pilots of measured
models give its bias and its variance.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

import numpy as np
from scipy.stats import t

from train.extras.advice.evidence import Case, Evidence, PilotRow, all_evidence, all_pilots

METHODS = ("deepen", "halves", "vcycle")  # methods with a forecast
LEVEL = 0.5  # prior standard deviation of the mean lag, and of the difference between methods
SLOPE = 0.1  # prior standard deviation of the change of the lag along each coordinate of a place
SPREADS = np.geomspace(0.02, 0.5, 15)
HALF = 1.645  # half of a 90 % interval, in standard deviations


@dataclass(frozen=True)
class Forecast:
    """The saving of one run at an equal loss; ``log(1 - saving)`` has a normal distribution."""

    mean: float  # of log(1 - saving)
    deviation: float  # standard deviation of log(1 - saving)

    @property
    def saved(self) -> float:
        """The median of the saving, a fraction."""
        return -math.expm1(self.mean)

    @property
    def interval(self) -> tuple[float, float]:
        """The 90 % interval of the saving."""
        half = HALF * self.deviation
        return -math.expm1(self.mean + half), -math.expm1(self.mean - half)

    def in_seconds(self, case: Case, slowdown: tuple[float, float]) -> "Forecast":
        """The saving of seconds of training, without compilation.

        Args:
          case: the model, the budget and the recipe.
          slowdown: seconds per FLOP of the small model, relative to the large one: mean and standard
            deviation. With zeros, the small model costs nothing, in FLOPs and in seconds.
        """
        pace = case.pace(slowdown[0])
        deviation = slowdown[1] * case.small / case.flops / pace
        return Forecast(self.mean + math.log(pace), math.hypot(self.deviation, deviation))


def forecast_rows() -> list[Evidence]:
    """The measurements that a forecast uses: all savings of `METHODS` in this project."""
    return [e for e in all_evidence() if e.method in METHODS and e.outcome is not None]


def held_out_forecasts() -> list[tuple[Evidence, Forecast]]:
    """Each measurement, with its forecast from the other comparisons.

    A forecast uses no run that it is judged by, not even a run from scratch.
    """
    return [(row, forecast_saving(row, _others(row), row.seeds)) for row in forecast_rows()]


def held_out_seconds() -> list[tuple[Evidence, Forecast]]:
    """The same for the seconds, if the logs have the times of steps."""
    return [
        (row, found.in_seconds(row, small_slowdown(_others(row), row.method)))
        for row, found in held_out_forecasts()
        if row.slowdown is not None
    ]


def _others(row: Evidence) -> list[Evidence]:
    return [e for e in forecast_rows() if e.comparison != row.comparison]


def seed_variance(rows: Sequence[Evidence], optimizer: str) -> float:
    """The variance of ``log(1 - saving)`` between seeds, pooled over the rows of the optimizer.

    If no row of the optimizer has several seeds, it is the largest one of the other optimizers.
    """
    several = [e for e in rows if len(e.each) > 1]
    pools = {e.optimizer: [x for x in several if x.optimizer == e.optimizer] for e in several}
    logs = {o: [np.log1p(-np.array(e.each) / 100) for e in pool] for o, pool in pools.items()}
    variances = {
        o: sum(len(x) * x.var() for x in each) / sum(len(x) - 1 for x in each)
        for o, each in logs.items()
    }
    return float(variances.get(optimizer, max(variances.values())))


def pilot_error(rows: Sequence[Evidence]) -> tuple[float, float]:
    """The mean of ``lag at the end - lag of a pilot``, and the variance of this error of a new pilot.

    Only pilots of settings and methods in ``rows`` are used.
    """
    errors = []
    for p in all_pilots():
        lags = [e.lag for e in rows if e.key == p.key and e.method == p.method]
        errors += [mean(lags) - p.lag] if lags else []
    return mean(errors), stdev(errors) ** 2 * (1 + 1 / len(errors))


def forecast_saving(
    case: Case, rows: Sequence[Evidence], seeds: int = 1, pilot: PilotRow | None = None
) -> Forecast:
    """Forecast the saving of FLOPs.

    Args:
      case: the model, the budget and the recipe.
      rows: the measurements.
      seeds: the forecast is for the mean of a comparison with this number of seeds.
      pilot: the result of a pilot of the same model, or None.
    """
    cases: list[Case] = [*rows]
    lags = [e.lag for e in rows]
    noise = [seed_variance(rows, e.optimizer) / e.seeds / e.reach**2 for e in rows]
    if pilot is not None:
        bias, variance = pilot_error(rows)
        cases, lags, noise = [*cases, pilot], [*lags, pilot.lag + bias], [*noise, variance]
    cases.append(case)
    places = np.array([c.place for c in cases])
    same = np.array([[a.method == b.method for b in cases] for a in cases])
    near = np.exp([[-a.distance(b) for b in cases] for a in cases])
    fixed = LEVEL**2 * (1.0 + same) + SLOPE**2 * places @ places.T

    def unlikely(spread: float) -> float:
        measured = (fixed + spread**2 * near)[:-1, :-1] + np.diag(noise)
        return float(lags @ np.linalg.solve(measured, lags) + np.linalg.slogdet(measured)[1])

    covariance = fixed + min(SPREADS, key=unlikely) ** 2 * near
    to_case = covariance[:-1, -1]
    weights = np.linalg.solve(covariance[:-1, :-1] + np.diag(noise), to_case)
    variance = covariance[-1, -1] - weights @ to_case
    deviation = math.sqrt(variance * case.reach**2 + seed_variance(rows, case.optimizer) / seeds)
    return Forecast(math.log(case.flops) + case.reach * float(weights @ lags), deviation)


def small_slowdown(rows: Sequence[Evidence], method: str) -> tuple[float, float]:
    """The seconds per FLOP of a small model, relative to the large one: mean and standard deviation.

    The standard deviation includes the uncertainty of the mean, and Student's t of the 90 % interval,
    because few slowdowns are known.
    """
    known = [e.slowdown for e in rows if e.method == method and e.slowdown is not None]
    few = float(t.ppf(0.95, len(known) - 1)) / HALF
    return mean(known), few * stdev(known) * math.sqrt(1 + 1 / len(known))

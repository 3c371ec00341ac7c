"""The savings of runs relative to a baseline, over seeds. `train.extras.comparison_report` shows them.

The main measure compares with the frontier; other measures compare along the training curves.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, stdev
from typing import TypeAlias

from jaxgrow.typed import Json
from train.analysis.runs import (
    Run,
    Unit,
    frontier_budget,
    half_width,
    mean_cost,
    mean_loss,
    p_value,
    refuse_unlike,
)

UNITS: tuple[Unit, ...] = ("flops", "run_seconds", "seconds")
# A frontier is flat if the noise floor corresponds to more than this multiple of a budget.
FLAT = 10.0
Row: TypeAlias = Json  # one config in compare.json
# Unit of a saving against the frontier -> its name in a row.
SAVED: dict[Unit, str] = {"flops": "saved_frontier", "run_seconds": "saved_frontier_seconds"}


def _saved_at_baseline(pairs: Sequence[tuple[Run, Run]]) -> Row:
    """Return the savings of one row at the baseline's final loss, in each unit.

    Args:
      pairs: each run, with the baseline of its seed.
    """
    row: Row = {}
    for unit in UNITS:
        for given, suffix in ((False, ""), (True, "_given")):
            saved: list[float | None] = []
            for r, b in pairs:
                own = r.cost_to(b.loss, unit)
                whole = b.cost_to(b.loss, unit)
                assert whole is not None  # a run ends at its own loss
                spent = None if own is None else own - given * r.source(unit)
                saved.append(None if spent is None else 1 - spent / whole)
            row[f"saved_{unit}{suffix}"] = saved
            row[f"saved_{unit}{suffix}_interval"] = half_width(saved)
    return row


@dataclass(frozen=True)
class Comparison:
    """Runs of several configs, each with the same seeds. ``runs[0]`` is the baseline.

    Raises:
      UserError: the runs are not evaluated in the same way.
    """

    runs: list[list[Run]]
    frontier: list[list[Run]]  # shorter runs of the baseline, one list per budget below 1
    # Metric -> scores of all runs, in the same order as ``runs`` and then ``frontier``.
    scores: Mapping[str, list[list[float]]] = field(default_factory=dict)
    # Config -> seeds that diverged and are therefore not among the runs.
    diverged: Mapping[str, list[int]] = field(default_factory=dict)
    # Sentences about settings of the command line, for the report.
    notes: Sequence[str] = ()

    def __post_init__(self):
        every = itertools.chain(*self.runs, *self.frontier)
        refuse_unlike([(r.name, r.config) for r in every])

    @property
    def scratch(self) -> list[list[Run]]:
        """The complete frontier: the baseline and its shorter runs."""
        return [self.runs[0], *self.frontier]

    def rows(self) -> list[Row]:
        """One row per config, with one saving per seed.

        Each seed is compared with the same seed of the baseline. A saving is one minus a ratio of
        costs:

        - ``saved_frontier``: the cost of the run relative to the budget with which a run from
          scratch with a complete learning rate schedule ends at the same loss. The saving of a seed
          is a lower bound if its loss is below the frontier (``below_frontier``), and None if its
          loss is above the frontier. Without a frontier, there is no list of seeds, only None.
        - ``saved_frontier_seconds``: the same for seconds of training without compilation.
        - ``cheaper_than_frontier``: for each seed, whether the run costs less than every run from
          scratch. Such a run has no known saving if it ends above them.
        - ``saved_{unit}``: the cost from which on the run stays at or below the baseline's final
          loss, relative to the same cost of the baseline. None if the run ends above this loss.
        - ``.._given``: the same if the small model that a growth starts from costs nothing.
        - ``.._interval``: half of the 95 % confidence interval of the mean (Student's t over
          seeds), if it exists.
        - ``.._p``: the p-value of a paired t-test over at least five seeds, if it exists.
        """
        baseline = {r.seed: r for r in self.runs[0]}
        budgets: dict[int, list[Run]] = {}  # the runs from scratch of each seed
        for r in itertools.chain(*self.scratch):
            budgets.setdefault(r.seed, []).append(r)
        rows = []
        for i, runs in enumerate([*self.runs, *self.frontier]):
            pairs = [(r, baseline[r.seed]) for r in runs]
            row: Row = {
                "run": runs[0].name,
                "seeds": [r.seed for r in runs],
                "diverged": self.diverged.get(runs[0].name, []),
                "parameters": runs[0].parameters,
                "tokens_per_parameter": mean(r.result["tokens"] / r.parameters for r in runs),
                "loss": [r.loss for r in runs],
                "accuracy": [r.result["val_accuracy"] for r in runs],
                "scores": {name: scores[i] for name, scores in self.scores.items()},
                **{unit: mean(r.cost(unit) / b.cost(unit) for r, b in pairs) for unit in UNITS},
                "source": mean(r.source("flops") / b.cost("flops") for r, b in pairs),
            }
            rows.append(row | self._saved_frontier(pairs, budgets) | _saved_at_baseline(pairs))
        return rows

    def _saved_frontier(
        self, pairs: Sequence[tuple[Run, Run]], budgets: Mapping[int, Sequence[Run]]
    ) -> Row:
        """Return the savings against the frontier of one row.

        Args:
          pairs: each run, with the baseline of its seed.
          budgets: the runs from scratch of each seed.
        """
        if not self.frontier:
            suffixes = ("", "_interval", "_p", "_given", "_given_interval", "_given_p")
            names = [f"{name}{suffix}" for name in SAVED.values() for suffix in suffixes]
            return dict.fromkeys(["below_frontier", "cheaper_than_frontier", *names])
        row: Row = {}
        row["below_frontier"] = [r.loss < min(b.loss for b in budgets[r.seed]) for r, _ in pairs]
        row["cheaper_than_frontier"] = [
            r.cost("flops") < min(b.cost("flops") for b in budgets[r.seed]) for r, _ in pairs
        ]
        for (unit, name), given in itertools.product(SAVED.items(), (False, True)):
            equal = [frontier_budget(budgets[r.seed], r.loss, unit) for r, _ in pairs]
            saved = []
            for budget, (r, b) in zip(equal, pairs, strict=True):
                own = r.cost(unit) - given * r.source(unit)
                saved.append(budget and 1 - own / min(budget, b.cost(unit)))
            name += "_given" * given
            row[name] = saved
            bounded = math.inf in equal
            row[f"{name}_interval"] = None if bounded else half_width(saved)
            row[f"{name}_p"] = None if bounded else p_value(saved)
        return row

    def noise(self) -> dict[str, float | None]:
        """The noise floor: the standard deviation of the baseline's final loss over seeds.

        ``budget`` is the change of the baseline's budget, as a fraction, that would change the loss
        by this standard deviation. It follows from the slope of the frontier at the baseline: loss
        against log FLOPs between the two largest budgets. It is None if this slope is flat.
        """
        losses = [r.loss for r in self.runs[0]]
        deviation = stdev(losses) if len(losses) > 1 else None
        budget = None
        if deviation is not None and self.frontier:
            largest = sorted(self.scratch, key=lambda runs: mean_cost(runs, "flops"))[-2:]
            # If a shorter run diverged with some seeds, the other seeds alone show the slope.
            both = set.intersection(*({r.seed for r in runs} for runs in largest))
            pairs = [[r for r in runs if r.seed in both] for runs in largest]
            x0, x1 = (math.log(mean_cost(runs, "flops")) for runs in pairs)
            y0, y1 = map(mean_loss, pairs)
            exponent = deviation * (x1 - x0) / (y0 - y1) if y1 < y0 else math.inf
            budget = math.expm1(exponent) if exponent < math.log1p(FLAT) else None
        return {"loss": deviation, "budget": budget}

"""How a comparison reports a saving that is known, in simulations of a scaling law with noise.

docs/concepts/comparison.md states the limits that these tests measure.
"""

from pathlib import Path

import numpy as np
import pytest

from jaxgrow.models import GPT2Config
from train.analysis.runs import Run
from train.analysis.savings import Comparison
from train.config.experiment import Experiment, experiment_json

CONFIG = experiment_json(Experiment("simulated", GPT2Config(), steps=1, batch=1))
MUON, ADAMW = 0.004, 0.012  # noise of a single run


def law(cost: float) -> float:
    """Return the final loss from scratch; its slope is that of the frontier on muon.md."""
    return 1.5 + 0.4 * cost**-0.5


def finished(name: str, seed: int, cost: float, loss: float) -> Run:
    """Create a finished run without a folder."""
    spent = {"flops": cost, "seconds": cost, "compile_seconds": 0.0}
    line = {"phase": "train", "step": 1, "lr": 0.0, "loss": loss, "val_loss": loss} | spent
    result = {"phases": [spent | {"parameters": 1}], "tokens": 1, "val_accuracy": 0.0}
    run = Run(name, seed, Path())
    vars(run).update(config=CONFIG, log=[line], result=result | spent | {"val_loss": loss})
    return run


def reported(shorter: tuple[float, ...], saving, cost, noise=0.0, seeds=3, rng=None) -> dict:
    """Return the row of a run with a known saving; costs are relative to the baseline.

    ``shorter`` are the costs of the shorter runs from scratch. ``noise`` is the standard deviation of
    the noise of each run and of the noise that the runs of a seed share.
    """
    rng = rng or np.random.default_rng(0)
    shared = noise * rng.standard_normal(seeds)

    def runs(name: str, cost: float, loss: float) -> list[Run]:
        ends = loss + shared + noise * rng.standard_normal(seeds)
        return [finished(name, seed, cost, end) for seed, end in enumerate(ends.tolist())]

    baseline = runs("baseline", 1.0, law(1.0))
    method = runs("method", cost, law(cost / (1 - saving)))
    frontier = [runs(f"x{c:g}", c, law(c)) for c in shorter]
    return Comparison([baseline, method], frontier).rows()[1]


@pytest.mark.parametrize(("shorter", "largest"), [
    ((0.4,), 0.043),
    ((0.55,), 0.019),
    ((0.75,), 0.004),
    ((0.55, 0.75), 0.005),
    ((0.4, 0.55, 0.75, 0.85), 0.005),
])  # fmt: skip
def test_lines_between_few_runs_make_savings_larger(shorter, largest):
    """The law is convex, so a line between two runs from scratch lies above it."""
    errors = []
    for budget in np.linspace(shorter[0] + 1e-3, 0.999, 40):
        (saved,) = reported(shorter, 0.15, 0.85 * budget, seeds=1)["saved_frontier"]
        errors.append(saved - 0.15)
    assert min(errors) > -1e-6 and max(errors) == pytest.approx(largest, abs=0.001)


def covered(shorter: tuple[float, ...], noise: float, trials: int = 100) -> float:
    """Return the fraction of the printed intervals that contain a true saving of 18 %."""
    rng = np.random.default_rng(0)
    hits = []
    for _ in range(trials):
        row = reported(shorter, 0.18, 0.65, noise, rng=rng)
        half = row["saved_frontier_interval"]
        if half is not None:
            hits.append(abs(np.mean(row["saved_frontier"]) - 0.18) <= half)
    assert len(hits) > 0.9 * trials
    return float(np.mean(hits))


def test_intervals_of_three_seeds_cover_95_percent_but_not_the_error_of_a_frontier_of_two_runs():
    for noise in (MUON, ADAMW):
        assert covered((0.55, 0.75), noise) == pytest.approx(0.95, abs=0.05)
    assert covered((0.55,), MUON) == pytest.approx(0.83, abs=0.06)


def test_a_lower_bound_is_one_of_the_sample_and_not_of_the_true_saving():
    rng = np.random.default_rng(0)
    rows = [reported((0.55, 0.75), 0.22, 0.76, ADAMW, rng=rng) for _ in range(100)]
    bounds = [np.mean(row["saved_frontier"]) for row in rows if any(row["below_frontier"])]
    assert len(bounds) > 60
    assert np.mean(np.array(bounds) > 0.22) == pytest.approx(0.4, abs=0.1)

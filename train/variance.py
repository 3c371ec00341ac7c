"""Fit the schedule "variance" of layer dropping to two runs: ``python -m train.variance BASELINE DROPPED``.

BASELINE and DROPPED are the work directories of two finished runs from scratch that differ only in
layer dropping: the second run drops layers. The command prints the field ``variance`` for the
`LayerDrop` of a third run. v(t) = (validation loss with dropping - without)^2, at the steps where
both runs were evaluated. [reconstructed] The two runs are the pre-analysis of this schedule. The
result of the third run does not include their cost. Add it, as for any sweep, to compare the third
run at equal cost.
"""

from pathlib import Path

import numpy as np

from jaxgrow.extras.variance import fit_variance
from jaxgrow.layerdrop import Variance
from jaxgrow.layerdrop.schedules import whole_steps
from jaxgrow.typed import Json
from train.analysis.runs import Run
from train.arguments import command_parser
from train.common.errors import UserError, exits_cleanly
from train.common.output import say
from train.config.experiment import described_differences
from train.store.workdir import Workdir


def fit_from_runs(baseline: Path, dropped: Path) -> Variance:
    """Fit the variance schedule to two finished runs.

    Args:
      baseline: work directory of the run without layer dropping.
      dropped: work directory of the run with layer dropping.

    Raises:
      UserError: a run has not finished, the runs differ in more than layer dropping, or their
        losses do not give such a curve.
    """
    for folder in (baseline, dropped):
        if not Workdir(folder).finished:
            raise UserError(f"there is no finished run in {folder}; run its config first")
    base, config = (Workdir(folder).config for folder in (baseline, dropped))
    wrong = described_differences(_compared(base), _compared(config))
    if wrong:
        raise UserError(
            f"{baseline} and {dropped} must differ only in layer dropping, but they also differ in: {'; '.join(wrong)}"
        )
    before, drop = (c["method"].get("Scratch", {"drop": None})["drop"] for c in (base, config))
    if before is not None or drop is None:
        raise UserError(
            f"{baseline} must be a run from scratch without layer dropping, Scratch(), and {dropped} one with it, Scratch(drop)"
        )
    first = whole_steps((drop["sensitivity"] or {"after": 0})["after"], config["steps"])
    last = (1 - drop["recovery"]) * config["steps"]
    losses = [_losses(baseline), _losses(dropped)]
    steps = sorted(t for t in losses[0].keys() & losses[1].keys() if first < t <= last)
    try:
        times = np.array([(t - first) / (last - first) for t in steps])
        return fit_variance(times, np.array([(losses[1][t] - losses[0][t]) ** 2 for t in steps]))
    except ValueError as error:
        raise UserError(
            f"{error} ({len(steps)} common evaluations of {baseline} and {dropped})"
        ) from error


def _compared(config: Json) -> Json:
    """The settings that must be equal in both runs."""
    method = {kind: {**of, "drop": None} for kind, of in config["method"].items()}
    return {k: v for k, v in config.items() if k != "name"} | {"method": method}


def _losses(run: Path) -> dict[int, float]:
    """The validation loss at each step with an evaluation."""
    return {line["step"]: line["val_loss"] for line in Run("", 0, run).curve}


def main() -> None:
    arguments = command_parser("variance").parse_args()
    say(fit_from_runs(arguments.baseline, arguments.dropped))


if __name__ == "__main__":
    exits_cleanly(main)

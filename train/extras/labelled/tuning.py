"""Train a model on a task with several learning rates and seeds."""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import TypeAlias

from jaxgrow.models import from_json
from train.common.errors import Diverged, UserError
from train.common.files import write_record
from train.common.hosts import on_process_zero
from train.common.output import say
from train.config.experiment import print_warnings
from train.extras.labelled.downstream import FineTuning
from train.extras.labelled.supervised import score_model
from train.run.trainer import run_experiment
from train.store.workdir import CARDS, Workdir

Scores: TypeAlias = Mapping[str, Mapping[str, float]]  # split -> metric -> value


def tune_model(tuning: FineTuning, model: Path, workdir: Path) -> dict[float, list[Scores]]:
    """Run every learning rate with every seed, or read the results of finished runs.

    Args:
      tuning: the task and its settings.
      model: folder of the model.
      workdir: folder of all runs.

    Returns:
      For each learning rate that did not diverge, the scores of each seed.

    Raises:
      UserError: every learning rate diverged.
    """
    model = model.expanduser().resolve()
    found = {}
    for rate in tuning.learning_rates:
        try:
            found[rate] = [_one(tuning, model, rate, seed, workdir) for seed in tuning.seeds]
        except Diverged as error:
            say(f"{tuning.name} with learning rate {rate:g} diverged: {error}", file=sys.stderr)
    if not found:
        raise UserError(f"{tuning.name} diverged with every learning rate: lower --lr")
    return found


def _one(tuning: FineTuning, model: Path, rate: float, seed: int, workdir: Path) -> Scores:
    experiment = tuning.of(model, rate, seed)
    print_warnings(experiment)
    folder = workdir / f"{experiment.name}-seed{seed}"
    run_experiment(experiment, folder)
    kept = Workdir(folder)
    if (scores := kept.scores) is None:
        scores = score_model(folder, experiment.data)  # type: ignore[arg-type]
        on_process_zero(partial(keep_scores, kept, scores))
    return scores


def keep_scores(run: Workdir, scores: Scores) -> None:
    """Write the scores of the last model of a run, also into the card of the model."""
    write_record(run.score_file, scores)
    result = run.result
    CARDS["transformers"](run.folder, run.config, result, from_json(result["model"]), scores)


def best_rate(found: Mapping[float, Sequence[Scores]]) -> float:
    """Return the learning rate with the greatest mean of the main metric of the task."""
    return max(found, key=lambda rate: mean(main_metric(scores) for scores in found[rate]))


def main_metric(scores: Scores) -> float:
    """Return the main metric of the task."""
    return next(iter(next(iter(scores.values())).values()))

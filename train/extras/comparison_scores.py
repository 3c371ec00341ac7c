"""The scores that ``--evaluate`` and ``--finetune`` add to the runs of a comparison."""

import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean

from jaxgrow.checkpoints.io.checksums import sha256
from jaxgrow.typed import Json
from train.analysis.comparing import SCORERS, Scores
from train.analysis.runs import Run
from train.common.errors import UserError
from train.common.files import read_record, write_record
from train.config.experiment import load_as
from train.extras.evaluation.benchmarks import Benchmarks
from train.extras.evaluation.perplexity import files_of, is_text
from train.extras.evaluation.tasks import evaluate_tasks
from train.extras.labelled.downstream import FineTuning
from train.extras.labelled.task import NAMES
from train.extras.labelled.tuning import best_rate, main_metric, tune_model
from train.store.workdir import COMPUTED_AGAIN, Workdir

# The file of a run with its scores.
EVALUATED = "evaluated.json"


def _evaluate(arguments: Namespace) -> Callable[[Sequence[Sequence[Run]]], Scores]:
    data = arguments.data or Path(".")
    if learned := [task for task in arguments.evaluate if task in NAMES]:
        raise UserError(
            f"--evaluate {learned[0]} needs models that were fine-tuned on it, which these runs are not: give "
            f"--finetune configs/finetune.py:{learned[0]} instead"
        )
    file_keys(arguments.evaluate, data)  # reports missing files
    return lambda runs: task_scores(runs, arguments.evaluate, data)


def _finetune(arguments: Namespace) -> Callable[[Sequence[Sequence[Run]]], Scores]:
    tunings = [load_as(FineTuning, config)[1] for config in arguments.finetune]
    names = [tuning.name for tuning in tunings]
    if len(set(names)) < len(names):
        raise UserError(
            f"two fine-tunings have the same name: {', '.join(names)}; set different names, such as CONFIG:name=again"
        )
    folder = arguments.workdir / "finetune"
    return lambda runs: {k: v for t in tunings for k, v in tuned_scores(runs, t, folder).items()}


SCORERS.add("evaluate", _evaluate)
SCORERS.add("finetune", _finetune)


def kept_evaluations(workdir: Workdir) -> dict[str, Json]:
    """Return the scores of the last model of a run without further training, by evaluation."""
    file = workdir.folder / EVALUATED
    return read_record(file, COMPUTED_AGAIN) if os.path.lexists(file) else {}


def task_scores(runs: Sequence[Sequence[Run]], tasks: Sequence[str], data: Path) -> Scores:
    """Return the score of every run on each task: bits per byte, accuracy, or the first metric."""
    key_of = file_keys(tasks, data)

    def one(run: Run) -> dict[str, Json]:
        """Return the results by task. Each task is evaluated once for a run."""
        workdir = Workdir(run.folder)
        kept = kept_evaluations(workdir)
        if new := [task for task, key in key_of.items() if key not in kept]:
            results = evaluate_tasks(run.folder, new, data)
            kept |= {key_of[task]: result for task, result in results.items()}
            write_record(workdir.folder / EVALUATED, kept)
        return {task: kept[key] for task, key in key_of.items()}

    results = [list(map(one, same)) for same in runs]
    metrics = {task: _metric(results[0][0][task]) for task in tasks}
    return {
        f"{task}, {metric.replace('_', ' ')}": [[r[task][metric] for r in same] for same in results]
        for task, metric in metrics.items()
    }


def file_keys(tasks: Sequence[str], data: Path) -> dict[str, str]:
    """Return a key for the result of each task, from the task and the content of its files.

    Raises:
      UserError: a task does not exist, or its files are missing.
    """
    texts = {task: files_of(task, data) for task in tasks if is_text(task)}
    others = [task for task in tasks if task not in texts]
    found = Benchmarks(data).files(others) if others else {}
    return {task: " ".join([task, *map(sha256, files)]) for task, files in texts.items()} | {
        task: " ".join(["lm-eval", task, *map(sha256, _with_siblings(files))])
        for task, files in found.items()
    }


def _metric(result: Json) -> str:
    """Return the name of the metric that is compared."""
    return next((name for name in ("bits_per_byte", "acc") if name in result), next(iter(result)))


def _with_siblings(files: Sequence[Path]) -> list[Path]:
    """Return ``files`` and the files that are read with them: labels, other parts of a dataset."""
    found: set[Path] = set()
    for file in files:
        stem = file.name.partition(".")[0]
        found |= {f for f in file.parent.glob(f"{stem}*") if f.is_file()}
    return sorted(found)


def tuned_scores(runs: Sequence[Sequence[Run]], tuning: FineTuning, workdir: Path) -> Scores:
    """Return the score of every run after fine-tuning.

    The score is the main metric of the task at the best learning rate, averaged over the seeds of
    the fine-tuning.
    """

    def one(run: Run) -> tuple[str, float]:
        rates = tune_model(tuning, run.folder, workdir)
        at = rates[best_rate(rates)]
        return next(iter(next(iter(at[0].values())))), mean(main_metric(scores) for scores in at)

    scores = [list(map(one, same)) for same in runs]
    metric, _ = scores[0][0]
    return {f"{tuning.name}, {metric}": [[value for _, value in same] for same in scores]}

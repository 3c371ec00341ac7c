"""Compare training runs at equal loss: run the configs that have not run yet, and report the FLOPs that each saved.

``python -m train.compare BASELINE CONFIG ... [--seeds 0,1,2] [--frontier 0.4,0.75] [--workdir DIR] [--set a.b=c ...]``

A config is ``FILE.py:NAME``, such as ``configs/demo.py:scratch``, or ``FILE.py``. The first one is
the baseline. A config can have individual settings after more colons, such as
``configs/demo.py:ligo:optim.peak_lr=2e-2``. They are applied after the settings of ``--set``, which
apply to all configs: ``--set steps=N`` sets the steps of the baseline, and all other configs keep
their fraction of them. The report says if relative costs change nevertheless. Use `train.sweep` to
tune each config first.

``--frontier`` also runs the baseline with these fractions of its steps. The learning rate of each
of these runs decays fully. Savings are measured against the line through them. A fraction can have
individual settings in addition to the settings of the baseline:
``--frontier 0.4:optim.peak_lr=2e-2:optim.warmup=50,0.75``. A run without them whose first steps are
those of the baseline starts from a checkpoint of the baseline, so with ``optim.schedule=wsd`` it
trains only its decay. Its cost includes the shared steps.

``--evaluate wikitext2,piqa [--data DIR]`` adds the scores of `train.evaluate` to each run, on the
local files in DIR.
``--finetune configs/finetune.py:sst2`` adds the scores after fine-tuning (`train.finetune`) with
the best learning rate. These options show whether an equal loss means an equal score.

The command writes these files into the work directory: ``compare.md`` (the report),
``compare.json`` (all numbers, for each seed), ``compare.png`` (loss against FLOPs),
``compare_seconds.png`` (loss against wall-clock time without compilation) and, if layers are
dropped, ``compare_keep.png``.

It is an error if runs were not evaluated on the same data (corpus, tokenizer, split, context,
evaluation batches). A run whose loss becomes infinite or NaN is marked as diverged, and the other
runs continue.
"""

import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from jaxgrow.checkpoints.io.checksums import sha256
from train.analysis import plots
from train.analysis.runs import Run, refuse_unlike
from train.analysis.savings import Comparison
from train.analysis.upcoming import Upcoming
from train.arguments import command_parser
from train.common.errors import Diverged, UserError, exits_cleanly
from train.common.files import write_json, write_text
from train.common.hosts import is_first, once
from train.common.output import note, say
from train.config.experiment import Experiment, as_json, differences, load, load_as, warn
from train.config.lengths import load_alike
from train.config.overrides import refuse_seeds
from train.evaluate import evaluate
from train.extras.evaluation.benchmarks import Benchmarks
from train.extras.evaluation.perplexity import files_of, is_text
from train.extras.labelled.downstream import FineTuning
from train.finetune import best, finetune, own
from train.plan.training import Train
from train.plan.transforms import LoadCheckpoint
from train.run.trainer import run
from train.state.optim import learning_rate
from train.store.workdir import Workdir


def compare(
    configs: list[Experiment], shorter: list[Experiment], seeds: list[int], workdir: Path
) -> Comparison:
    """Run every config with every seed, or read the finished runs, also for the frontier.

    A run that diverges is recorded, and the other runs continue. No config runs with a seed with
    which the baseline diverged.

    Args:
      configs: the configs to compare; the first one is the baseline.
      shorter: shorter baselines, which form the frontier.
      seeds: random seeds of each config.
      workdir: folder of all runs.

    Raises:
      UserError: before any run starts, if two configs have the same name or are not evaluated on
        the same data; or if every run of the baseline diverged.
    """
    every = [*configs, *shorter]
    if len({e.name for e in every}) < len(every):
        raise UserError(
            f"two runs have the same name: {', '.join(e.name for e in every)}; set different names, such as CONFIG:name=again"
        )
    refuse_unlike([(e.name, as_json(e)) for e in every])
    refuse_seeds(every)
    diverged: dict[str, list[int]] = {}

    for experiment in shorter:
        warn(experiment)
    shared = [shared_steps(configs[0], e) for e in shorter]
    upcoming = Upcoming(configs, shorter, shared, seeds)
    _announce(upcoming.first_line(workdir))

    def finished(experiment: Experiment, seeds: list[int], keep: Collection[int] = ()) -> list[Run]:
        found = []
        for seed in seeds:
            _announce(upcoming.line(experiment, seed))
            if (run := attempt(experiment, seed, workdir, diverged, keep)) is not None:
                found.append(run)
        return found

    baseline = finished(configs[0], seeds, shared)
    if not baseline:
        raise UserError(
            f"every run of the baseline {configs[0].name} diverged: lower its optim.peak_lr"
        )
    left = [run.seed for run in baseline]
    for experiment, step in zip(shorter, shared, strict=True):
        for of in baseline:
            once(partial(_branch, experiment, of, step, workdir))
    others = [finished(e, left) for e in configs[1:]]
    frontier = [finished(e, left) for e in shorter]
    return Comparison(
        [baseline, *filter(None, others)], [*filter(None, frontier)], diverged=diverged
    )


def _announce(line: str) -> None:
    if is_first():
        note(line)


def shared_steps(experiment: Experiment, shorter: Experiment) -> int:
    """Return the number of first steps that two runs have in common.

    If the experiments differ only in their numbers of steps, these are the steps with equal
    learning rates. With ``optim.schedule=wsd``, they end where the shorter run begins to decay.
    Runs with other differences, several phases or modifiers have 0 steps in common.
    """
    changed = {d.partition(": ")[0] for d in differences(as_json(experiment), as_json(shorter))}
    (long, *later), short = experiment.plan, shorter.plan[0]
    if not (changed <= {"name", "steps"} and isinstance(long, Train) and isinstance(short, Train)):
        return 0
    if later or long.modifiers:
        return 0

    def same(step: int) -> bool:
        rates = [learning_rate(phase.optim, phase.steps, step) for phase in (long, short)]
        return rates[0] == rates[1]

    last = short.steps - 1  # every run computes its last step itself, because it is validated there
    return next((step for step in range(last) if not same(step)), last)


def _branch(shorter: Experiment, baseline: Run, step: int, workdir: Path) -> None:
    """Let a shorter run begin at the checkpoint that the baseline has kept for it."""
    new = Workdir(workdir / f"{shorter.name}-seed{baseline.seed}")
    if new.branch(Workdir(baseline.folder), step, replace(shorter, seed=baseline.seed)):
        say(
            f"{new.folder.name} shares its first {step} steps with {baseline.folder.name}",
            file=sys.stderr,
        )


def attempt(
    experiment: Experiment,
    seed: int,
    workdir: Path,
    diverged: dict[str, list[int]],
    keep: Collection[int] = (),
) -> Run | None:
    """Return the finished run, or None if it or its source diverged (recorded in ``diverged``)."""
    lost: set[str] = set()
    for name, seeds in diverged.items():
        lost |= {f"{name}-seed{s}" for s in seeds}
    sources = {
        phase.folder_of(seed) for phase in experiment.plan if isinstance(phase, LoadCheckpoint)
    }
    folder = workdir / f"{experiment.name}-seed{seed}"
    try:
        if gone := sources & lost:
            raise Diverged(f"the run {min(gone)} that it grows from diverged")
        run(replace(experiment, seed=seed), folder, keep=keep)
    except Diverged as error:
        say(f"{folder.name} diverged: {error}", file=sys.stderr)
        diverged.setdefault(experiment.name, []).append(seed)
        return None
    return Run(experiment.name, seed, folder)


def shortened(experiment: Experiment, fraction: float) -> Experiment:
    """Return the experiment with a fraction of its steps, which its name records."""
    return replace(
        experiment,
        name=f"{experiment.name}-x{fraction:g}",
        steps=max(1, round(fraction * experiment.steps)),
    )


def evaluated(runs: list[list[Run]], tasks: list[str], data: Path) -> dict[str, list[list[float]]]:
    """Return the score of every run on each task: bits per byte, accuracy, or the first metric."""
    if not tasks:
        return {}
    key_of = keys(tasks, data)

    def one(run: Run) -> dict[str, dict[str, Any]]:
        """Return the results by task. Each task is evaluated once for a run."""
        workdir = Workdir(run.folder)
        if new := [task for task, key in key_of.items() if key not in workdir.evaluated]:
            results = evaluate(run.folder, new, data)
            workdir.keep_evaluated({key_of[task]: result for task, result in results.items()})
        kept = workdir.evaluated
        return {task: kept[key] for task, key in key_of.items()}

    results = [list(map(one, same)) for same in runs]
    scores: dict[str, list[list[float]]] = {}
    for task in tasks:
        metric = _metric(results[0][0][task])
        label = f"{task}, {metric.replace('_', ' ')}"
        scores[label] = []
        for same in results:
            scores[label].append([result[task][metric] for result in same])
    return scores


def keys(tasks: list[str], data: Path) -> dict[str, str]:
    """Return a key for the result of each task, from the task and the content of its files.

    Raises:
      UserError: a task does not exist, or its files are missing.
    """
    texts = {task: files_of(task, data) for task in tasks if is_text(task)}
    others = [task for task in tasks if task not in texts]
    found = Benchmarks(data).files(others) if others else {}
    return {task: " ".join([task, *map(sha256, files)]) for task, files in texts.items()} | {
        task: " ".join(["lm-eval", task, *map(sha256, _beside(files))])
        for task, files in found.items()
    }


def _metric(result: dict[str, Any]) -> str:
    """Return the name of the metric that is compared."""
    return next((name for name in ("bits_per_byte", "acc") if name in result), next(iter(result)))


def _beside(files: list[Path]) -> list[Path]:
    """Return ``files`` and the files that are read with them: labels, other parts of a dataset."""
    found: set[Path] = set()
    for file in files:
        stem = file.name.partition(".")[0]
        found |= {f for f in file.parent.glob(f"{stem}*") if f.is_file()}
    return sorted(found)


def tuned(runs: list[list[Run]], tuning: FineTuning, workdir: Path) -> dict[str, list[list[float]]]:
    """Return the score of every run after fine-tuning.

    The score is the main metric of the task at the best learning rate, averaged over the seeds of
    the fine-tuning.
    """

    def one(run: Run) -> tuple[str, float]:
        rates = finetune(tuning, run.folder, workdir)
        at = rates[best(rates)]
        return next(iter(next(iter(at[0].values())))), mean(own(scores) for scores in at)

    scores = [list(map(one, same)) for same in runs]
    metric, _ = scores[0][0]
    values: list[list[float]] = []
    for same in scores:
        values.append([value for _, value in same])
    return {f"{tuning.name}, {metric}": values}


def set_losses(runs: Sequence[Sequence[Run]]) -> dict[str, list[list[float]]]:
    """The final losses of all runs on each named validation set, by ``val_loss/NAME``."""
    results = [[run.result for run in same] for same in runs]
    names = [
        name
        for name in results[0][0]
        if name.startswith("val_loss/") and all(name in r for same in results for r in same)
    ]
    return {name: [[result[name] for result in same] for same in results] for name in names}


def main() -> None:
    arguments = command_parser("compare").parse_args()
    folder = arguments.workdir
    configs, notes = load_alike(arguments.configs, arguments.set)
    shorter = _frontier(arguments)
    data = arguments.data or Path(".")
    tasks = [task for task in arguments.evaluate.split(",") if task]
    tunings = [load_as(FineTuning, config)[1] for config in arguments.finetune]
    names = [tuning.name for tuning in tunings]
    if len(set(names)) < len(names):
        raise UserError(
            f"two fine-tunings have the same name: {', '.join(names)}; set different names, such as CONFIG:name=again"
        )
    if tasks:
        keys(tasks, data)  # reports missing files before the first run
    comparison = replace(compare(configs, shorter, arguments.seeds, folder), notes=tuple(notes))
    every = [*comparison.runs, *comparison.frontier]
    scores = set_losses(every)
    comparison = replace(comparison, scores=scores)
    try:
        scores |= evaluated(every, tasks, data)
        for tuning in tunings:
            scores |= tuned(every, tuning, folder / "finetune")
    except UserError:
        # All runs have finished, so their comparison does not depend on the scores.
        _write(comparison, folder)
        raise
    _write(replace(comparison, scores=scores), folder)


def _frontier(arguments: Any) -> list[Experiment]:
    """Return the shorter runs of the baseline that ``--frontier`` names."""
    shorter = []
    for fraction, settings in arguments.frontier:
        baseline = load(":".join([arguments.configs[0], *settings]), arguments.set)
        shorter.append(shortened(baseline, fraction))
    return shorter


def _write(comparison: Comparison, folder: Path) -> None:
    """Print the report, and write the report, all numbers and the plots to a folder."""
    report = comparison.report()
    write_text(folder / "compare.md", report)
    summary = {
        "rows": comparison.rows(),
        "noise": comparison.noise(),
        "doubts": comparison.doubts(),
        "diverged": comparison.diverged,
    }
    write_json(folder / "compare.json", summary)
    figures = [folder / "compare.png", folder / "compare_seconds.png"]
    for path, unit in zip(figures, ("flops", "run_seconds"), strict=True):
        plots.losses(comparison, path, unit)
    if plots.keep(comparison, folder / "compare_keep.png"):
        figures.append(folder / "compare_keep.png")
    say(
        f"\n{report}\nall numbers: {folder / 'compare.json'}\nplots: {', '.join(map(str, figures))}"
    )


if __name__ == "__main__":
    exits_cleanly(main)

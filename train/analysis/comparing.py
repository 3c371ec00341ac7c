"""Run the experiments of a comparison, or read the finished runs."""

import sys
from argparse import Namespace
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

import jax

from jaxgrow.registry import Registry
from train.analysis.runs import Run, refuse_unlike
from train.analysis.savings import Comparison
from train.common.errors import Diverged, UserError
from train.common.hosts import on_process_zero, print_note
from train.common.output import say
from train.config.experiment import (
    Experiment,
    experiment_json,
    print_warnings,
)
from train.config.overrides import refuse_seeds
from train.plan.transforms import LoadCheckpoint
from train.run.run_data import fitting_mesh
from train.run.trainer import run_experiment
from train.store.workdir import Workdir

# Name of a score -> its value for each config and seed.
Scores: TypeAlias = dict[str, list[list[float]]]
# Option of `train.compare` -> function that checks the arguments before the first run, and returns
# a function that scores the finished runs of each config.
SCORERS: Registry[Callable[[Namespace], Callable[[Sequence[Sequence[Run]]], Scores]]] = Registry(
    "comparison score", "train.extras"
)
# "alike" loads the configs of a comparison with the settings of the command line, and returns a
# sentence about each change of relative lengths.
LENGTHS: Registry[Callable[[Sequence[str], Sequence[str]], tuple[list[Experiment], list[str]]]] = (
    Registry("lengths", "train.extras")
)
# What prints a comparison, and writes it to a folder.
REPORTS: Registry[Callable[[Comparison, Path], None]] = Registry(
    "comparison report", "train.extras"
)


class Sharing(NamedTuple):
    """How shorter runs take their first steps from the baseline.

    Attributes:
      shared: function from the baseline and a shorter baseline to the number of first steps that
        they have in common.
      begin: function from the shorter baseline, a run of the baseline, this number and the folder of
        all runs; it lets a run begin at the checkpoint that the baseline has kept for it.
    """

    shared: Callable[[Experiment, Experiment], int]
    begin: Callable[[Experiment, Run, int, Path], None]


SHARING: Registry[Sharing] = Registry("sharing", "train.extras")


class Announcer(Protocol):
    """Describes the runs of a comparison before they run."""

    def first_line(self, workdir: Path) -> str:
        """Return one line with the number of runs, their names, and about how long they take."""
        ...

    def line(self, experiment: Experiment, seed: int) -> str:
        """Return the line before one run."""
        ...


# "runs" takes the configs, the shorter baselines, the number of first steps that each of them takes
# from the baseline, and the seeds.
ANNOUNCERS: Registry[
    Callable[[Sequence[Experiment], Sequence[Experiment], Sequence[int], Sequence[int]], Announcer]
] = Registry("announcer", "train.extras")


def run_comparison(
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
        the same data, or do not fit the devices; or if every run of the baseline diverged.
    """
    every = [*configs, *shorter]
    if len({e.name for e in every}) < len(every):
        raise UserError(
            f"two runs have the same name: {', '.join(e.name for e in every)}; set different names, such as CONFIG:name=again"
        )
    refuse_unlike([(e.name, experiment_json(e)) for e in every])
    refuse_seeds(every)
    check_devices(every, seeds, workdir)
    diverged: dict[str, list[int]] = {}

    for experiment in shorter:
        print_warnings(experiment)
    shared = [SHARING["steps"].shared(configs[0], e) for e in shorter]
    upcoming = ANNOUNCERS["runs"](configs, shorter, shared, seeds)
    print_note(upcoming.first_line(workdir))

    def finished(experiment: Experiment, seeds: list[int], keep: Collection[int] = ()) -> list[Run]:
        found = []
        for seed in seeds:
            print_note(upcoming.line(experiment, seed))
            if (run := attempt_run(experiment, seed, workdir, diverged, keep)) is not None:
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
            on_process_zero(partial(SHARING["steps"].begin, experiment, of, step, workdir))
    others = [finished(e, left) for e in configs[1:]]
    frontier = [finished(e, left) for e in shorter]
    return Comparison(
        [baseline, *filter(None, others)], [*filter(None, frontier)], diverged=diverged
    )


def check_devices(experiments: Iterable[Experiment], seeds: Sequence[int], workdir: Path) -> None:
    """Check that this machine has devices for all unfinished runs, before the first one takes hours.

    Raises:
      UserError: the mesh or the batch of one does not fit.
    """
    for e in experiments:
        if not all(Workdir(workdir / f"{e.name}-seed{seed}").finished for seed in seeds):
            fitting_mesh(e, jax.devices(), e.parallel, f"{e.name}: ")


def attempt_run(
    experiment: Experiment,
    seed: int,
    workdir: Path,
    diverged: dict[str, list[int]],
    keep: Collection[int] = (),
) -> Run | None:
    """Return the finished run, or None if it or its source diverged (recorded in ``diverged``)."""
    lost = {f"{name}-seed{s}" for name, seeds in diverged.items() for s in seeds}
    sources = {
        phase.folder_of(seed) for phase in experiment.plan if isinstance(phase, LoadCheckpoint)
    }
    folder = workdir / f"{experiment.name}-seed{seed}"
    try:
        if gone := sources & lost:
            raise Diverged(f"the run {min(gone)} that it grows from diverged")
        run_experiment(replace(experiment, seed=seed), folder, keep=keep)
    except Diverged as error:
        say(f"{folder.name} diverged: {error}", file=sys.stderr)
        diverged.setdefault(experiment.name, []).append(seed)
        return None
    return Run(experiment.name, seed, folder)


def shortened_experiment(experiment: Experiment, fraction: float) -> Experiment:
    """Return the experiment with a fraction of its steps or seconds, which its name records."""
    name = f"{experiment.name}-x{fraction:g}"
    if experiment.seconds is not None:
        return replace(experiment, name=name, seconds=fraction * experiment.seconds)
    return replace(experiment, name=name, steps=max(1, round(fraction * experiment.steps)))


def set_losses(runs: Sequence[Sequence[Run]]) -> Scores:
    """The final losses of all runs on each named validation set, by ``val_loss/NAME``."""
    results = [[run.result for run in same] for same in runs]
    names = [
        name
        for name in results[0][0]
        if name.startswith("val_loss/") and all(name in r for same in results for r in same)
    ]
    return {name: [[result[name] for result in same] for same in results] for name in names}

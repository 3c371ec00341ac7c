"""What will a comparison run, and about how long does that take?"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jaxgrow.axes import axis_kind
from train.analysis.comparing import ANNOUNCERS
from train.config.experiment import Experiment
from train.data.workers import core_count
from train.extras.aot.estimate import published_speed
from train.plan.methods import Growing, Scratch, VCycle
from train.plan.training import Train
from train.store.workdir import Workdir

SAME_COST = 0.03  # two runs have the same cost if it differs by less than this fraction
# A small model on a CPU reaches this many FLOPs per second and core, and a large one on an accelerator
# this part of the published speed.
CORE = 2e10
REACHED = 0.3
# Seconds of a CPU to compile the programs of one model, and to start.
PROGRAMS = 12.0
START = 10.0
WORDS = {0.5: "half", 0.25: "a quarter", 0.75: "three quarters"}


@dataclass(frozen=True)
class Upcoming:
    """The runs of a comparison, in the order in which they run.

    Attributes:
      configs: configs to compare; the first one is the baseline.
      shorter: shorter baselines, which form the frontier.
      shared: for each of them, the number of first steps that it takes from the baseline.
      seeds: random seeds of each config.
    """

    configs: Sequence[Experiment]
    shorter: Sequence[Experiment]
    shared: Sequence[int]
    seeds: Sequence[int]

    @property
    def experiments(self) -> list[Experiment]:
        return [*self.configs, *self.shorter]

    def titles(self) -> dict[str, str]:
        """Return the name of each config for people, by its own name."""
        found = {e.name: _short_title(e) for e in self.configs}
        whole = self.configs[0]
        for e in self.shorter:
            alike = any(abs(other.cost / e.cost - 1) < SAME_COST for other in self.configs[1:])
            how = "at the same cost" if alike else f"with {e.steps / whole.steps:.0%} of the steps"
            found[e.name] = f"{_short_title(whole)} {how}"
        twice = [text for text in found.values() if [*found.values()].count(text) > 1]
        return {name: name if text in twice else text for name, text in found.items()}

    def line(self, experiment: Experiment, seed: int) -> str:
        """Return the line before one run: its number among all runs, its name, and its seed."""
        names = [e.name for e in self.experiments]
        count = len(self.seeds)
        number = 1 + names.index(experiment.name) * count + [*self.seeds].index(seed)
        with_seed = f", seed {seed}" if count > 1 else ""
        return f"run {number} of {count * len(names)}: {self.titles()[experiment.name]}{with_seed}"

    def first_line(self, workdir: Path) -> str:
        """Return one line with the number of runs, their names, and about how long they take."""
        count = len(self.experiments) * len(self.seeds)
        several = f" ({len(self.seeds)} seeds each)" if len(self.seeds) > 1 else ""
        left = [
            replace(e, seed=seed)
            for e in self.experiments
            for seed in self.seeds
            if not Workdir(workdir / f"{e.name}-seed{seed}").finished
        ]
        names = "; ".join(self.titles().values())
        return f"{count} run{'s' * (count > 1)}{several}, {_duration(self._seconds(left))}: {names}"

    def _seconds(self, left: Sequence[Experiment]) -> float:
        begun = {e.name: 1 - n / e.steps for e, n in zip(self.shorter, self.shared, strict=True)}
        cost = sum(e.cost * begun.get(e.name, 1.0) for e in left)
        models = {str(phase.config) for e in left for phase in e.plan if isinstance(phase, Train)}
        published = published_speed()
        speed = REACHED * published if published else CORE * core_count()
        return cost / speed + PROGRAMS * len(models) + START


def _short_title(e: Experiment) -> str:
    method = e.method
    if method == Scratch():
        return "from scratch"
    if isinstance(method, VCycle):
        return "V-cycle"
    if isinstance(method, Growing) and not isinstance(method.small, str):
        sizes, small = e.model.sizes(), method.small.sizes()
        parts = {
            axis_kind(axis): small[axis] / n for axis, n in sizes.items() if small.get(axis) != n
        }
        if [*parts] == ["layers"]:
            part = parts["layers"]
            return f"{WORDS.get(part, f'{part:.0%}')} of the layers first"
    return e.name


def _duration(seconds: float) -> str:
    minutes = math.ceil(seconds / 60 - 0.5)
    if minutes < 1:
        return "less than a minute"
    if minutes < 90:
        return f"about {minutes} minute{'s' * (minutes > 1)}"
    return f"about {round(minutes / 60)} hours"


ANNOUNCERS.add("runs", Upcoming)

"""What will a comparison run?"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxgrow.axes import axis_kind
from train.config.experiment import Experiment
from train.plan.methods import Growing, Scratch, VCycle

SAME_COST = 0.03  # two runs have the same cost if it differs by less than this fraction
WORDS = {0.5: "half", 0.25: "a quarter", 0.75: "three quarters"}


@dataclass(frozen=True)
class Upcoming:
    """The runs of a comparison, in the order in which they run.

    Attributes:
      configs: configs to compare; the first one is the baseline.
      shorter: shorter baselines, which form the frontier.
      seeds: random seeds of each config.
    """

    configs: Sequence[Experiment]
    shorter: Sequence[Experiment]
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

    def first_line(self) -> str:
        """Return one line with the number of runs and their names."""
        count = len(self.experiments) * len(self.seeds)
        several = f" ({len(self.seeds)} seeds each)" if len(self.seeds) > 1 else ""
        return f"{count} run{'s' * (count > 1)}{several}: {'; '.join(self.titles().values())}"


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

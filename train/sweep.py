"""Runs a config with every combination of settings, for a comparison is worth what its tuning is:

``python -m train.sweep CONFIG --set optim.peak_lr=5e-3,1e-2,2e-2 [--set optim.warmup=50,100] [--frontier 0.75] [--seeds 0]``

With ``--frontier``, the config with this fraction of its steps, to tune a point of the frontier. A setting with one value holds
for all. Each run has its own folder in ``--workdir`` (default: runs/sweep), so that the same command goes on where it was
stopped; runs that a config imports must lie there, too. Writes ``<name>.md`` and ``<name>.json``, the best settings first, and
warns where the best lies at the edge of what was tried.
"""

import argparse
import itertools
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from train.compare import numbers, shortened
from train.errors import Diverged, UserError, exits_cleanly
from train.experiment import load
from train.loop.trainer import run
from train.results.runs import Run, markdown, spread


@dataclass(frozen=True)
class Tried:
    """One combination of settings, and its runs, one a seed; None for one whose loss ceased to be a number."""

    settings: dict[str, str]
    runs: list[Run | None]

    @property
    def loss(self) -> float:
        return mean(math.inf if r is None else r.loss for r in self.runs)


def edges(best: dict[str, str], swept: dict[str, list[str]]) -> list[str]:
    """A warning for every number of ``best`` that is the least or the greatest of those tried."""
    warnings = []
    for name, texts in swept.items():
        try:
            values, value = [float(t) for t in texts], float(best[name])
        except ValueError:
            continue  # no number, so no edge
        if len(values) > 1 and value in (min(values), max(values)):
            which, beyond = ("lowest", "below") if value == min(values) else ("highest", "above")
            warnings.append(f"WARNING: the best {name}, {best[name]}, is the {which} tried: sweep {beyond} it, too")
    return warnings


def table(tried: list[Tried], swept: dict[str, list[str]]) -> str:
    """Markdown of what was tried, best first."""
    body = []
    for i, t in enumerate(tried):
        known = [r for r in t.runs if r is not None]
        cost = [f"{sum(r.cost('flops') for r in known):.3g}", f"{sum(r.cost('seconds') for r in known):.0f}"]
        loss = spread([r.loss for r in known], "{:.4f}") if len(known) == len(t.runs) else "diverged"
        body.append([*t.settings.values(), loss, *cost, "best" if i == 0 and t.loss < math.inf else ""])
    every = [r for t in tried for r in t.runs if r is not None]
    text = markdown([*swept, "final loss", "FLOPs", "seconds", ""], body)
    text += (
        f"\n\nAll {len(every)} runs that ended: {sum(r.cost('flops') for r in every):.3g} FLOPs, "
        f"{sum(r.cost('seconds') for r in every):.0f} s, {sum(r.result['compile_seconds'] for r in every):.0f} s of them "
        "compiling.\n"
    )
    warnings = edges(tried[0].settings, swept) if tried[0].loss < math.inf else ["WARNING: every run diverged"]
    return text + "".join(f"{line}\n" for line in warnings)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m train.sweep", description=__doc__)
    parser.add_argument(
        "config", help="FILE.py:NAME, as configs/demo.py:scratch; or FILE.py, with config() -> Experiment"
    )
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c,d,..", help="values of a field to try")
    parser.add_argument("--frontier", type=float, help="fraction of the config's steps")
    parser.add_argument("--seeds", default="0", help="such as 0,1,2")
    parser.add_argument("--workdir", type=Path, default=Path("runs/sweep"))
    arguments = parser.parse_args()
    seeds = numbers(arguments.seeds, int, "--seeds")
    swept = {}
    for text in arguments.set:
        name, _, values = text.partition("=")
        swept[name] = list(dict.fromkeys(v for v in values.split(",") if v))
    if not seeds or not swept or not all(swept.values()):
        raise UserError(
            "a sweep needs --set with a field and values, such as optim.peak_lr=5e-3,1e-2, and a seed in --seeds"
        )
    experiments = []
    for values in itertools.product(*swept.values()):
        settings = dict(zip(swept, values, strict=True))
        base = load(arguments.config, [f"{name}={value}" for name, value in settings.items()])
        base = base if arguments.frontier is None else shortened(base, arguments.frontier)
        marks = [f"{name}={value}".replace("/", "_") for name, value in settings.items()]
        experiments.append((settings, base.name, replace(base, name="-".join([base.name, *marks]))))
    tried = []
    for settings, _, experiment in experiments:  # not before all of them are known to be valid
        runs: list[Run | None] = []
        for seed in seeds:
            folder = arguments.workdir / f"{experiment.name}-seed{seed}"
            try:
                run(replace(experiment, seed=seed), folder)
                runs.append(Run(experiment.name, seed, folder))
            except Diverged:
                runs.append(None)
        tried.append(Tried(settings, runs))
    tried.sort(key=lambda t: t.loss)
    text, name = table(tried, swept), experiments[0][1]
    (arguments.workdir / f"{name}.md").write_text(text)
    results = [{"settings": t.settings, "loss": [None if r is None else r.loss for r in t.runs]} for t in tried]
    (arguments.workdir / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    print(f"\n{text}")


if __name__ == "__main__":
    exits_cleanly(main)

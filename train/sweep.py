"""Runs a config with every combination of settings, for a comparison is worth what its tuning is:

``python -m train.sweep CONFIG --set optim.peak_lr=5e-3,1e-2,2e-2 [--set optim.warmup=50,100] [--frontier 0.75] [--seeds 0]
[--halving 0.25,0.5]``

With ``--frontier``, the config with this fraction of its steps, to tune a point of the frontier. With ``--halving``, every
combination is first tried with each of these fractions of the steps, fully decayed, and the better half goes on (successive
halving; Jamieson & Talwalkar, 2016); what that cost is told, too. A setting with one value holds for all. Each run has its own
folder in ``--workdir`` (default: runs/sweep), so that the same command goes on where it was stopped; runs that a config imports
must lie there, too. Writes ``<name>.md`` and ``<name>.json``, the best settings first, and
warns where the best lies at the edge of what was tried.
"""

import argparse
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from train.compare import shortened
from train.errors import Diverged, UserError, exits_cleanly
from train.experiment import Experiment, load
from train.loop.trainer import run
from train.overrides import numbers
from train.results.runs import Run
from train.results.sweeping import Tried, table


def values(settings: Sequence[str]) -> dict[str, list[str]]:
    """``{"optim.peak_lr": ["5e-3", "1e-2"]}`` of ``["optim.peak_lr=5e-3,1e-2"]``.

    Raises:
      UserError: one of them, or all, are missing.
    """
    pairs = [text.partition("=") for text in settings]
    swept = {name: list(dict.fromkeys(v for v in listed.split(",") if v)) for name, _, listed in pairs}
    if not swept or not all(swept.values()):
        raise UserError("a sweep needs --set with a field and values, such as optim.peak_lr=5e-3,1e-2")
    return swept


def combinations(
    config: str, swept: dict[str, list[str]], fraction: float | None
) -> list[tuple[dict[str, str], Experiment]]:
    """The experiment of every combination; all are valid, or the sweep does not begin."""
    out = []
    for combination in itertools.product(*swept.values()):
        settings = dict(zip(swept, combination, strict=True))
        base = load(config, [f"{name}={value}" for name, value in settings.items()])
        out.append((settings, base if fraction is None else shortened(base, fraction)))
    return out


def attempt(settings: dict[str, str], experiment: Experiment, seed: int, workdir: Path) -> Run | None:
    """The finished run, which is named by its settings; None, if its loss ceased to be a number."""
    marks = [f"{name}={value}".replace("/", "_") for name, value in settings.items()]
    name = "-".join([experiment.name, *marks])
    folder = workdir / f"{name}-seed{seed}"
    try:
        run(replace(experiment, name=name, seed=seed), folder)
    except Diverged:
        return None
    return Run(name, seed, folder)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m train.sweep", description=__doc__)
    parser.add_argument(
        "config", help="FILE.py:NAME, as configs/demo.py:scratch; or FILE.py, with config() -> Experiment"
    )
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c,d,..", help="values of a field to try")
    parser.add_argument("--frontier", type=float, help="fraction of the config's steps")
    parser.add_argument("--seeds", default="0", help="such as 0,1,2")
    parser.add_argument(
        "--halving", default="", help="fractions of the steps, after each of which the better half goes on"
    )
    parser.add_argument("--workdir", type=Path, default=Path("runs/sweep"))
    arguments = parser.parse_args()
    seeds = numbers(arguments.seeds, int, "--seeds")
    if not seeds:
        raise UserError("a sweep needs a seed in --seeds")
    swept = values(arguments.set)
    experiments = combinations(arguments.config, swept, arguments.frontier)
    fractions = numbers(arguments.halving, float, "--halving")
    if fractions != sorted(set(fractions)):
        raise UserError(f"--halving takes fractions that rise, not {arguments.halving}")
    for fraction in fractions:
        shortened(experiments[0][1], fraction)  # all are valid, or the sweep does not begin
    tried, left = [], experiments
    for fraction in [*fractions, None]:
        rung = []
        for settings, whole in left:
            experiment = whole if fraction is None else shortened(whole, fraction)
            runs = [attempt(settings, experiment, seed, arguments.workdir) for seed in seeds]
            rung.append((Tried(settings, runs, fraction), whole))
        rung.sort(key=lambda pair: pair[0].loss)
        tried = [t for t, _ in rung] + tried
        left = [(t.settings, whole) for t, whole in rung[: -(-len(rung) // 2)] if t.loss < math.inf]
    text, name = table(tried, swept), experiments[0][1].name
    (arguments.workdir / f"{name}.md").write_text(text)
    results = [
        {"settings": t.settings, "loss": [None if r is None else r.loss for r in t.runs]}
        | ({"of the steps": t.fraction} if t.fraction else {})
        for t in tried
    ]
    (arguments.workdir / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    print(f"\n{text}")


if __name__ == "__main__":
    exits_cleanly(main)

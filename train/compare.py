"""Runs configs that have not been run yet, and says what each saved against the first:

``python -m train.compare BASELINE CONFIG ... [--seeds 0,1] [--frontier 0.4,0.6,0.8] [--workdir DIR] [--set a.b=c ...]``

Writes ``compare.md``, ``compare.png``, ``compare.json`` and, where layers are dropped, ``compare_keep.png`` into the work
directory. ``--frontier`` also runs the baseline with these fractions of its budget, each fully decayed: what one gets from
scratch for less.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from train.config import Experiment, load, say_long_warmups
from train.errors import UserError, exits_cleanly
from train.pretrain import run
from train.report import Comparison, Run


def compare(configs: list[Experiment], seeds: list[int], fractions: list[float], workdir: Path) -> Comparison:
    """Runs, or reads, every config with every seed, and the baseline ``configs[0]`` at every fraction of its steps."""

    def one(experiment: Experiment, seed: int) -> Run:
        folder = workdir / f"{experiment.name}-seed{seed}"
        run(replace(experiment, seed=seed), folder)
        return Run(experiment.name, seed, folder)

    first = configs[0]
    shorter = [replace(first, name=f"{first.name}-x{f:g}", steps=max(1, round(f * first.steps))) for f in fractions]
    for experiment in shorter:
        say_long_warmups(experiment)
    return Comparison(
        [[one(e, seed) for seed in seeds] for e in configs], [[one(e, seed) for seed in seeds] for e in shorter]
    )


def numbers(text: str, kind: type, what: str) -> list:
    try:
        return [kind(part) for part in text.split(",") if part]
    except ValueError as error:
        raise UserError(f"{what} takes numbers divided by commas, not {text!r}") from error


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m train.compare", description=__doc__)
    parser.add_argument("configs", nargs="+", help="config files; the first is the baseline")
    parser.add_argument("--seeds", default="0", help="such as 0,1,2")
    parser.add_argument("--frontier", default="", help="fractions of the baseline's budget, such as 0.4,0.6,0.8")
    parser.add_argument("--workdir", type=Path, default=Path("runs"))
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override a field of every config")
    arguments = parser.parse_args()
    configs = [load(path, arguments.set) for path in arguments.configs]
    if len({e.name for e in configs}) < len(configs):
        raise UserError(f"two configs have one name: {', '.join(e.name for e in configs)}; give each its own")
    seeds = numbers(arguments.seeds, int, "--seeds")
    fractions = numbers(arguments.frontier, float, "--frontier")
    if not seeds or any(not 0 < f < 1 for f in fractions):
        raise UserError(f"--seeds needs at least one seed, and --frontier fractions between 0 and 1, not {fractions}")
    comparison = compare(configs, seeds, fractions, arguments.workdir)
    table = comparison.table()
    (arguments.workdir / "compare.md").write_text(table)
    (arguments.workdir / "compare.json").write_text(json.dumps(comparison.rows(), indent=1) + "\n")
    comparison.plot(arguments.workdir / "compare.png")
    plots = [arguments.workdir / "compare.png"]
    if comparison.plot_keep(arguments.workdir / "compare_keep.png"):
        plots.append(arguments.workdir / "compare_keep.png")
    print(f"\n{table}\nplots: {', '.join(map(str, plots))}")


if __name__ == "__main__":
    exits_cleanly(main)

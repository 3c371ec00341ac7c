"""Runs configs that have not been run yet, and says what each saved against the first:

``python -m train.compare BASELINE CONFIG ... [--seeds 0,1,2] [--frontier 0.4,0.75] [--workdir DIR] [--set a.b=c ...]``

A config is ``FILE.py:NAME``, such as ``configs/demo.py:scratch``, or ``FILE.py``. ``--frontier`` also runs the baseline with
these fractions of its budget, each fully decayed: what one gets from scratch for less, and what savings are read against. A
config or fraction may have settings of its own, after more colons, on top of those of ``--set`` for all:
``configs/demo.py:ligo:optim.peak_lr=2e-2``, ``--frontier 0.4:optim.peak_lr=2e-2:optim.warmup=50,0.75``; a fraction has the
baseline's, too. What each side needs, `train.sweep` finds.

Writes ``compare.md``, ``compare.png``, ``compare.json`` and, where layers are dropped, ``compare_keep.png`` into the work
directory. Runs that are not judged alike (corpus, tokenizer, split, context, evaluation batches) are refused.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from train.errors import UserError, exits_cleanly
from train.experiment import Experiment, as_json, load, warn
from train.loop.trainer import run
from train.results import plots
from train.results.comparison import Comparison
from train.results.runs import Run, refuse_unlike


def compare(configs: list[Experiment], shorter: list[Experiment], seeds: list[int], workdir: Path) -> Comparison:
    """Runs, or reads, every config with every seed, and so those of the frontier; ``configs[0]`` is the baseline.

    Raises:
      UserError: before anything runs, where two have one name, or are not judged alike.
    """
    every = [*configs, *shorter]
    if len({e.name for e in every}) < len(every):
        raise UserError(
            f"two runs have one name: {', '.join(e.name for e in every)}; give each its own, such as CONFIG:name=again"
        )
    refuse_unlike([(e.name, as_json(e)) for e in every])

    def one(experiment: Experiment, seed: int) -> Run:
        folder = workdir / f"{experiment.name}-seed{seed}"
        run(replace(experiment, seed=seed), folder)
        return Run(experiment.name, seed, folder)

    for experiment in shorter:
        warn(experiment)
    return Comparison([[one(e, s) for s in seeds] for e in configs], [[one(e, s) for s in seeds] for e in shorter])


def shortened(experiment: Experiment, fraction: float) -> Experiment:
    """The same with a fraction of its steps, named after it."""
    if not 0 < fraction < 1:
        raise UserError(f"--frontier takes fractions between 0 and 1, not {fraction:g}")
    return replace(
        experiment, name=f"{experiment.name}-x{fraction:g}", steps=max(1, round(fraction * experiment.steps))
    )


def numbers(text: str, kind: type, what: str) -> list:
    try:
        return [kind(part) for part in text.split(",") if part]
    except ValueError as error:
        raise UserError(f"{what} takes numbers divided by commas, not {text!r}") from error


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m train.compare", description=__doc__)
    parser.add_argument(
        "configs", nargs="+", help="FILE.py[:NAME], each with :a.b=c ... of its own; the first is the baseline"
    )
    parser.add_argument("--seeds", default="0", help="such as 0,1,2")
    parser.add_argument("--frontier", default="", help="fractions of the baseline's budget, such as 0.4,0.75:a.b=c")
    parser.add_argument("--workdir", type=Path, default=Path("runs"))
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override a field of every config")
    arguments = parser.parse_args()
    seeds = numbers(arguments.seeds, int, "--seeds")
    if not seeds:
        raise UserError("--seeds needs at least one seed")
    configs, shorter = [load(text, arguments.set) for text in arguments.configs], []
    for fraction, *own in (text.split(":") for text in arguments.frontier.split(",") if text):
        baseline = load(":".join([arguments.configs[0], *own]), arguments.set)
        shorter.append(shortened(baseline, *numbers(fraction, float, "--frontier")))
    comparison, folder = compare(configs, shorter, seeds, arguments.workdir), arguments.workdir
    table = comparison.table()
    (folder / "compare.md").write_text(table)
    summary = {"rows": comparison.rows(), "noise": comparison.noise(), "doubts": comparison.doubts()}
    (folder / "compare.json").write_text(json.dumps(summary, indent=1) + "\n")
    plots.losses(comparison, folder / "compare.png")
    drawn = [folder / "compare.png"]
    if plots.keep(comparison, folder / "compare_keep.png"):
        drawn.append(folder / "compare_keep.png")
    print(f"\n{table}\nplots: {', '.join(map(str, drawn))}")


if __name__ == "__main__":
    exits_cleanly(main)

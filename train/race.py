"""Grows one checkpoint by several operators and trains each for some steps: the loss right after growing predicts little.

``python -m train.race CONFIG RUN [--by stack,fpi+stack,ligo] [--steps 200] [--seeds 0,1] [--workdir DIR] [--set a.b=c ...]``

CONFIG is that of the large model, RUN a finished run of the small one. A plus joins operators, in turn; ``ligo`` learns its
maps first, in 100 steps that are counted. The rate stays at its peak after the warm-up, so that no schedule favours an end,
and losses are read at equal FLOPs: those that the cheapest entrant has spent at its end. Writes ``race.md``, ``race.json`` and
``race.png``.
"""

import argparse
import itertools
import json
from dataclasses import replace
from pathlib import Path

from jaxgrow import operators
from jaxgrow.axes import is_layers
from jaxgrow.models import from_json
from jaxgrow.operators.targets import width
from train.errors import UserError, exits_cleanly
from train.experiment import Experiment, load
from train.loop.trainer import run
from train.overrides import numbers
from train.plan.methods import Growing, GrowTo, Learned, Stage
from train.plan.plan import shapes
from train.plan.transforms import differing
from train.results import plots
from train.results.racing import after_growing, rows, table
from train.results.runs import Run
from train.run.workdir import Workdir

DEFAULTS = {"depth": ("stack", "interleave"), "width": ("fpi", "aki")}  # where each is what grows; else pairs of them


def defaults(base: Experiment, source: Path) -> list[str]:
    """Operators for the axes in which the small model of the run ``source`` and that of ``base`` differ."""
    small = _small(source)
    axes = differing(small, base.model)
    deeper = DEFAULTS["depth"] if any(map(is_layers, axes)) else ("",)
    wider = DEFAULTS["width"] if axes.keys() & width(small.sizes()) else ("",)
    return [by for pair in itertools.product(wider, deeper) if (by := "+".join(filter(None, pair)))]


def _small(source: Path):
    run = Workdir(source)
    if not run.finished:
        raise UserError(f"there is no finished run in {source}: give the work directory of the small model's run")
    return from_json(run.result["model"])


def entrant(base: Experiment, source: Path, by: str, steps: int) -> Experiment:
    """The run of one operator.

    Raises:
      UserError: there is no such run or operator.
      ValueError: it cannot reach the sizes.
    """
    known = operators.DEPTH | operators.WIDTH
    if by != "ligo" and (unknown := [name for name in by.split("+") if name not in known]):
        raise UserError(f"race: there is no operator {unknown[0]!r}, only {', '.join(sorted(known))}, ligo")
    how = Learned() if by == "ligo" else tuple(by.split("+"))
    stage = Stage(1.0, warmup=min(base.optim.warmup, steps // 10), floor=1.0)
    method = Growing(_small(source), str(source.resolve()), (GrowTo((stage,), by=how),))
    made = replace(base, name=f"race_{by}", steps=steps, method=method, eval_every=max(1, steps // 20))
    shapes(made.plan, len(made.plan), made.tx)
    return made


def entrants(
    base: Experiment, source: Path, chosen: list[str], steps: int
) -> tuple[dict[str, Experiment], dict[str, str]]:
    """The runs of the operators that can reach the sizes, and why the others cannot.

    Raises:
      UserError: none can.
    """
    fit: dict[str, Experiment] = {}
    impossible: dict[str, str] = {}
    for by in chosen:
        try:
            fit[by] = entrant(base, source, by, steps)
        except ValueError as error:
            impossible[by] = " ".join(str(error).split())
    if not fit:
        raise UserError(f"race: no operator fits: {'; '.join(f'{by}: {why}' for by, why in impossible.items())}")
    return fit, impossible


def race(fit: dict[str, Experiment], seeds: list[int], workdir: Path) -> dict[str, list[Run]]:
    """The finished runs of every operator, one a seed."""
    finished: dict[str, list[Run]] = {}
    for by, experiment in fit.items():
        for seed in seeds:
            folder = workdir / f"{experiment.name}-seed{seed}"
            run(replace(experiment, seed=seed), folder)
            finished.setdefault(by, []).append(Run(experiment.name, seed, folder))
    return finished


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m train.race", description=__doc__)
    parser.add_argument("config", help="of the large model: FILE.py:NAME, or FILE.py")
    parser.add_argument("run", type=Path, help="work directory of the small model's run")
    names = ", ".join(sorted(operators.DEPTH | operators.WIDTH))
    parser.add_argument("--by", help=f"of {names}, ligo (default: some that fit the sizes)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", default="0", help="such as 0,1,2")
    parser.add_argument("--workdir", type=Path, default=Path("runs/race"))
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override a field of the config")
    arguments = parser.parse_args()
    if arguments.steps < 20:
        raise UserError(f"--steps must be at least 20, but is {arguments.steps}")
    base = load(arguments.config, arguments.set)
    seeds = numbers(arguments.seeds, int, "--seeds")
    chosen = defaults(base, arguments.run) if arguments.by is None else [by for by in arguments.by.split(",") if by]
    if not chosen or not seeds:
        raise UserError("a race needs at least one operator in --by, and one seed in --seeds")
    fit, impossible = entrants(base, arguments.run, chosen, arguments.steps)
    finished = race(fit, seeds, arguments.workdir)
    ranked = rows(finished)
    text, plot = table(ranked, impossible, seeds), arguments.workdir / "race.png"
    (arguments.workdir / "race.md").write_text(text)
    everything = {"ranked": ranked, "impossible": impossible, "seeds": seeds}
    (arguments.workdir / "race.json").write_text(json.dumps(everything, indent=1) + "\n")
    plots.race({by: [(r, after_growing(r)) for r in runs] for by, runs in finished.items()}, plot)
    print(f"\n{text}\nplot: {plot}")


if __name__ == "__main__":
    exits_cleanly(main)

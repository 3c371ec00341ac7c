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
from statistics import mean
from typing import Any

import numpy as np

from jaxgrow import operators
from jaxgrow.models import from_json
from jaxgrow.operators.targets import width
from train.compare import numbers
from train.errors import UserError, exits_cleanly
from train.experiment import Experiment, load
from train.loop.trainer import run
from train.plan.methods import Growing, GrowTo, Learned, Stage
from train.plan.plan import shapes
from train.plan.transforms import differing
from train.results import plots
from train.results.runs import Run, markdown, spread
from train.run.workdir import Workdir
from train.state.optim import transformation

MOMENTS = (0.25, 0.5, 1.0)  # of the FLOPs of the race, at which the table looks besides its start
DEFAULTS = {"depth": ("stack", "interleave"), "width": ("fpi", "aki")}  # where each is what grows; else pairs of them

Curve = list[tuple[float, float]]  # (FLOPs since the small model, validation loss)


def defaults(base: Experiment, source: Path) -> list[str]:
    """Operators for the axes in which the small model of the run ``source`` and that of ``base`` differ."""
    small = _small(source)
    axes = differing(small, base.model)
    deeper = DEFAULTS["depth"] if "layers" in axes else ("",)
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
    shapes(made.plan, len(made.plan), transformation(made.optim))
    return made


def after_growing(finished: Run) -> Curve:
    """From the grown model on: right after growing, then of its training."""
    *_, before, last = finished.segments
    small = finished.source("flops")
    return [(line["flops"] - small, line["val_loss"]) for line in [before[-1], *last]]


def rows(finished: dict[str, list[Run]]) -> list[dict[str, Any]]:
    """One row an operator, the best at the end first: for each moment the losses, one a seed.

    A loss is None where an operator had not yet grown at those FLOPs: learning its maps took longer.
    """
    curves = {by: [after_growing(r) for r in runs] for by, runs in finished.items()}
    budget = min(curve[-1][0] for some in curves.values() for curve in some)
    out = []
    for by, some in curves.items():
        grown = [[curve[0][1] for curve in some]]
        later = [[_at(curve, moment * budget) for curve in some] for moment in MOMENTS]
        out.append({"by": by, "flops": [moment * budget for moment in MOMENTS], "loss": grown + later})
    return sorted(out, key=lambda row: mean(np.inf if x is None else x for x in row["loss"][-1]))


def _at(curve: Curve, flops: float) -> float | None:
    return None if flops < curve[0][0] else float(np.interp(flops, *np.transpose(curve)))


def rank_correlation(x: list[float], y: list[float]) -> float:
    """Spearman's, of two lists without ties."""
    a, b = (np.argsort(np.argsort(v)) for v in (x, y))
    return float(np.corrcoef(a, b)[0, 1])


def table(ranked: list[dict[str, Any]], impossible: dict[str, str], seeds: list[int]) -> str:
    """Markdown; ``impossible`` are operators that cannot reach the sizes, and why."""
    head = ["operators", "loss right after growing", *(f"at {flops:.3g} FLOPs" for flops in ranked[0]["flops"])]
    body = [[r["by"], *("not yet grown" if None in x else spread(x, "{:.4f}") for x in r["loss"])] for r in ranked]
    body += [[by, f"impossible: {why}", *[""] * (len(head) - 2)] for by, why in impossible.items()]
    text = (
        f"{markdown(head, body)}\n\nFLOPs are those after the small model, the same for all. "
        f"Seeds: {', '.join(map(str, seeds))}; with several, the mean and in brackets each.\n"
    )
    ends = [r for r in ranked if None not in r["loss"][-1]]
    if len(ends) > 2:
        correlation = rank_correlation(*([mean(r["loss"][i]) for r in ends] for i in (0, -1)))
        text += f"Rank correlation of the losses right after growing and at the end: {correlation:.2f}\n"
    return text


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
    entrants: dict[str, Experiment] = {}
    impossible: dict[str, str] = {}
    for by in chosen:
        try:
            entrants[by] = entrant(base, arguments.run, by, arguments.steps)
        except ValueError as error:
            impossible[by] = " ".join(str(error).split())
    if not chosen or not seeds:
        raise UserError("a race needs at least one operator in --by, and one seed in --seeds")
    if not entrants:
        raise UserError(f"race: no operator fits: {'; '.join(f'{by}: {why}' for by, why in impossible.items())}")
    finished: dict[str, list[Run]] = {}
    for by, experiment in entrants.items():
        for seed in seeds:
            folder = arguments.workdir / f"{experiment.name}-seed{seed}"
            run(replace(experiment, seed=seed), folder)
            finished.setdefault(by, []).append(Run(experiment.name, seed, folder))
    ranked = rows(finished)
    text = table(ranked, impossible, seeds)
    (arguments.workdir / "race.md").write_text(text)
    everything = {"ranked": ranked, "impossible": impossible, "seeds": seeds}
    (arguments.workdir / "race.json").write_text(json.dumps(everything, indent=1) + "\n")
    plots.race(
        {by: [(r, after_growing(r)) for r in runs] for by, runs in finished.items()}, arguments.workdir / "race.png"
    )
    print(f"\n{text}\nplot: {arguments.workdir / 'race.png'}")


if __name__ == "__main__":
    exits_cleanly(main)

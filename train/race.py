"""Grows one checkpoint by several operators and trains each for some steps: the loss right after growing predicts little.

``python -m train.race CONFIG RUN [--by stack,fpi+stack,ligo] [--steps 200] [--seeds 0,1] [--workdir DIR] [--set a.b=c ...]``

CONFIG is that of the large model, RUN a finished run of the small one. A plus joins operators, in turn; ``ligo`` learns its
maps first, in 100 steps that are counted. The rate stays at its peak after the warm-up, so that no schedule favours an end.
Writes ``race.md``, ``race.json`` and ``race.png``.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from jaxgrow import operators
from jaxgrow.models import from_json
from train.compare import numbers
from train.config import Experiment, load
from train.errors import UserError, exits_cleanly
from train.methods import Growing, Learned, Stage, To
from train.optim import transformation
from train.plan import shapes
from train.pretrain import run
from train.report import Run, markdown, spread

MOMENTS = (0.0, 0.25, 0.5, 1.0)  # of the race, at which the table looks


def entrant(base: Experiment, source: Path, by: str, steps: int) -> Experiment:
    """The run of one operator.

    Raises:
      UserError: there is no such run or operator, or it cannot reach the sizes.
    """
    if not (source / "result.json").exists():
        raise UserError(f"there is no finished run in {source}: give the work directory of the small model's run")
    small = from_json(json.loads((source / "result.json").read_text())["model"])
    how = Learned() if by == "ligo" else tuple(by.split("+"))
    stage = Stage(1.0, warmup=min(base.optim.warmup, steps // 10), floor=1.0)
    every = max(1, steps // 20)
    method = Growing(small, str(source.resolve()), (To((stage,), by=how),))
    made = replace(base, name=f"race_{by}", steps=steps, method=method, eval_every=every)
    try:
        shapes(made.plan, len(made.plan), transformation(made.optim))
    except ValueError as error:
        raise UserError(f"race: {by}: {error}") from error
    return made


def after_growing(finished: Run) -> list[dict[str, Any]]:
    """The validation losses from the grown model on: right after growing, then of its training."""
    last = finished.curve[-1]["phase"]
    first = next(i for i, line in enumerate(finished.curve) if line["phase"] == last)
    return finished.curve[first - 1 :]


def rows(finished: dict[str, list[Run]], steps: int) -> list[dict[str, Any]]:
    """For each operator the losses at `MOMENTS` of the race, each seed's, in the order in which they ended."""
    out = []
    for by, runs in finished.items():
        curves = [{line["step"] if i else 0: line["val_loss"] for i, line in enumerate(after_growing(r))} for r in runs]
        looks = [min(curves[0], key=lambda s, at=at: abs(s - at * steps)) for at in MOMENTS]
        losses = [[curve[step] for curve in curves] for step in looks]
        flops = mean(r.result["flops"] - r.source("flops") for r in runs)
        out.append({"by": by, "steps": looks, "loss": losses, "flops": flops})
    return sorted(out, key=lambda row: mean(row["loss"][-1]))


def rank_correlation(x: list[float], y: list[float]) -> float:
    """Spearman's, of two lists without ties."""
    a, b = (np.argsort(np.argsort(v)) for v in (x, y))
    return float(np.corrcoef(a, b)[0, 1])


def table(found: list[dict[str, Any]], seeds: list[int]) -> str:
    head = ["operators", *(f"loss at step {step}" for step in found[0]["steps"]), "FLOPs after the small model"]
    body = [[r["by"], *(spread(x, "{:.4f}") for x in r["loss"]), f"{r['flops']:.3g}"] for r in found]
    text = (
        f"{markdown(head, body)}\n\nSeeds: {', '.join(map(str, seeds))}; with several, the mean and in brackets each.\n"
    )
    if len(found) > 2:
        start, end = ([mean(r["loss"][i]) for r in found] for i in (0, -1))
        text += (
            f"Rank correlation of the losses right after growing and at the end: {rank_correlation(start, end):.2f}\n"
        )
    return text


def plot(finished: dict[str, list[Run]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for i, (by, runs) in enumerate(finished.items()):
        for r in runs:
            points = after_growing(r)
            axes.plot(
                [line["step"] if j else 0 for j, line in enumerate(points)],
                [line["val_loss"] for line in points],
                color=f"C{i}",
                label=by if r is runs[0] else None,
                alpha=1 if r is runs[0] else 0.4,
            )
    axes.set_xlabel("steps after growing")
    axes.set_ylabel("validation loss (nats a token)")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m train.race", description=__doc__)
    parser.add_argument("config", help="the large model's config file")
    parser.add_argument("run", type=Path, help="work directory of the small model's run")
    parser.add_argument(
        "--by", default="stack,interleave", help=f"of {', '.join(sorted(operators.DEPTH | operators.WIDTH))}, ligo"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", default="0", help="such as 0,1,2")
    parser.add_argument("--workdir", type=Path, default=Path("runs/race"))
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override a field of the config")
    arguments = parser.parse_args()
    if arguments.steps < 20:
        raise UserError(f"--steps must be at least 20, but is {arguments.steps}")
    base = load(arguments.config, arguments.set)
    seeds = numbers(arguments.seeds, int, "--seeds")
    entrants = {by: entrant(base, arguments.run, by, arguments.steps) for by in arguments.by.split(",") if by}
    if not entrants or not seeds:
        raise UserError("a race needs at least one operator in --by, and one seed in --seeds")
    finished: dict[str, list[Run]] = {}
    for by, experiment in entrants.items():
        for seed in seeds:
            folder = arguments.workdir / f"{experiment.name}-seed{seed}"
            run(replace(experiment, seed=seed), folder)
            finished.setdefault(by, []).append(Run(experiment.name, seed, folder))
    found = rows(finished, arguments.steps)
    text = table(found, seeds)
    (arguments.workdir / "race.md").write_text(text)
    (arguments.workdir / "race.json").write_text(json.dumps(found, indent=1) + "\n")
    plot(finished, arguments.workdir / "race.png")
    print(f"\n{text}\nplot: {arguments.workdir / 'race.png'}")


if __name__ == "__main__":
    exits_cleanly(main)

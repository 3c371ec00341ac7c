"""Synthetic runs, whose costs and losses are chosen by hand, and the tables of their comparison."""

import json
from pathlib import Path
from typing import Any

from jaxgrow.models import GPT2Config
from train.analysis.runs import Run
from train.analysis.savings import Comparison
from train.config.experiment import Experiment, experiment_json

COMPILING = 3.0  # seconds of compilation before the first validation of a synthetic run
CONFIG = experiment_json(Experiment("synthetic", GPT2Config(), steps=4, batch=4))


def made(
    folder: Path,
    name: str,
    curve: list[tuple],
    seed: int = 0,
    config: dict[str, Any] = CONFIG,
    rates: tuple[float, ...] = (1.0, 0.0),
    **result,
) -> Run:
    """Create a finished run from ``(phase, step, cost, loss)`` tuples and learning rates.

    Its FLOPs are 10 times its running time in seconds. Its total time also includes
    compilation.
    """

    def times(c: float) -> dict[str, float]:
        return {"flops": 10.0 * c, "seconds": c + COMPILING, "compile_seconds": COMPILING}

    folder = folder / f"{name}-{seed}"
    folder.mkdir()
    lines = [{"phase": p, "step": s, **times(c), "val_loss": v} for p, s, c, v in curve]
    # lines without a validation loss
    other = {
        "phase": curve[0][0],
        "flops": 0.0,
        "seconds": 0.0,
        "compile_seconds": 0.0,
        "loss": -1.0,
    }
    lines[1:1] = [
        other | {"step": i, "tokens": i, "lr": rate} for i, rate in enumerate(rates, 2 - len(rates))
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, _, cost, loss = curve[-1]
    phase = {"phase": "train large", "parameters": 50, "steps": 4, "tokens": 100, "layers": 14.0}
    values = {"tokens": 100, "val_loss": loss, "phases": [phase | times(cost)], **times(cost)}
    values |= {"val_accuracy": 0.25, "model": GPT2Config().as_json()}
    (folder / "result.json").write_text(json.dumps(values | result))
    (folder / "config.json").write_text(json.dumps(config))
    return Run(name, seed, folder)


SCRATCH = [
    ("train large", s, float(10 * s), v) for s, v in ((1, 6.0), (2, 5.0), (3, 4.0), (4, 3.0))
]
# The first phase has the same name as the last one, and it reached the loss earlier.
CYCLE = [("train large", 1, 2.0, 5.0), ("train large", 2, 4.0, 2.0), ("train coarse1", 1, 6.0, 1.0)]
CYCLE += [("train large", 1, 20.0, 4.0), ("train large", 2, 24.0, 3.5)]
CYCLE += [("train large", 3, 28.0, 2.5), ("train large", 4, 32.0, 2.0)]
GROWN = [("train small", 1, 5.0, 4.0), ("grow small", 0, 6.0, 3.9)]
GROWN += [("train large", 1, 16.0, 3.5), ("train large", 2, 26.0, 3.0)]


def two_seeds(folder: Path) -> Comparison:
    """Compare a V-cycle with training from scratch, each with two seeds and a shorter run."""
    slow = [(p, s, 2 * c, v) for p, s, c, v in SCRATCH]
    short = [("train large", 1, 10.0, 6.0), ("train large", 2, 20.0, 4.0)]
    return Comparison(
        [
            [made(folder, "scratch", SCRATCH), made(folder, "scratch", slow, seed=1)],
            [made(folder, "cycle", CYCLE), made(folder, "cycle", CYCLE, seed=1)],
        ],
        [[made(folder, "scratch-x0.5", short), made(folder, "scratch-x0.5", short, seed=1)]],
    )


def tables(text: str) -> list[dict[str, dict[str, str]]]:
    """Return the cells of each table in a Markdown text, by run and column."""
    blocks = [[]]
    for line in text.splitlines():
        if line.startswith("|"):
            blocks[-1].append([c.strip() for c in line.split("|")[1:-1]])
        else:
            blocks.append([])
    return [{row[0]: dict(zip(b[0], row, strict=True)) for row in b[2:]} for b in blocks if b]


def at(folder: Path, name: str, ends: list[tuple[float, float]]) -> list[Run]:
    """Create a run of each seed from its cost and final loss."""
    return [
        made(folder, name, [("train large", 1, cost, loss)], seed)
        for seed, (cost, loss) in enumerate(ends)
    ]


def dropping(folder: Path, seed: int, seconds: float) -> Run:
    """Create a run of two phases of 4 and 20 steps, in which the second phase drops layers.

    The second phase takes ``seconds`` per step after a slow first log line.
    """
    run = made(folder, "drop", SCRATCH, seed)
    phases = [
        {"phase": "train large", "steps": 4, "tokens": 40, "layers": 16.0},
        {"phase": "measure large", "steps": 0, "tokens": 0, "layers": 0.0},
        {"phase": "train large", "steps": 20, "tokens": 200, "layers": 55.0},
    ]
    common = {"parameters": 50, "flops": 9.0, "seconds": 5.0, "compile_seconds": 2.0}
    result = run.result | {"tokens": 240, "phases": [p | common for p in phases]}
    (run.folder / "result.json").write_text(json.dumps(result))
    steps = {4: 3.0, 8: 9.0, 12: 9 + 4 * seconds, 16: 9 + 8 * seconds, 24: 80.0}
    with (run.folder / "metrics.jsonl").open("a") as log:
        for step, at in steps.items():
            keep = {"keep": [1.0, 0.75, 0.5, 0.5]} if step > 4 else {}
            line = {"phase": "train large", "step": step, "tokens": 10 * step, "seconds": at}
            line |= {"flops": 1.0, "loss": 2.0, "compile_seconds": 0.0}
            log.write(json.dumps(line | keep) + "\n")
    return Run("drop", seed, run.folder)

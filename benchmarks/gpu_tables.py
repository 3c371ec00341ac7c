"""The tables of docs/results/gpu.md, from the files in ``benchmarks/results/one_gpu``."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.gpu_plan import EXPERIMENTS, RESULTS, Training
from jaxgrow.tables import markdown_table, short_count
from jaxgrow.typed import build_dataclass
from train.analysis.runs import Run, frontier_budget
from train.analysis.savings import SAVED, Comparison
from train.extras.advice.evidence import method_names

NOTHING = "not measured yet"
# They were written before the first run, and stay.
FORECASTS = RESULTS / "forecasts.json"
# The experiments whose runs are compared with runs from scratch of the same size.
MODELS = {"m10": ("E1", "E2", "E6"), "m20": ("E4", "E7")}


@dataclass(frozen=True)
class Forecast:
    """A saving that was expected before its runs, in per cent."""

    experiment: str
    method: str  # as in evidence.toml
    parameters: int
    tokens_per_parameter: float
    seeds: tuple[int, ...]
    saved: float
    line: float  # half of the 95 % interval of the fitted line
    interval: float  # half of the 95 % interval of the mean over these seeds

    @property
    def rows(self) -> tuple[str, ...]:
        model = "m20" if self.parameters > 15e6 else "m10"
        return (model, f"{model}_{self.method}")


def finished(results: Path) -> dict[str, dict[str, Run]]:
    """The finished runs of each card, by ``experiment/name``; runs that diverged are left out."""
    found: dict[str, dict[str, Run]] = {}
    for name, trainings in EXPERIMENTS.items():
        for training in trainings:
            for folder in sorted(results.glob(f"*/{name}/{training.name}")):
                if (folder / "about.json").exists() and (folder / "result.json").exists():
                    runs = found.setdefault(folder.parents[1].name, {})
                    runs[f"{name}/{training.name}"] = Run(training.label, training.seed, folder)
    return found


def comparison(runs: dict[str, Run], model: str) -> list[dict[str, Any]]:
    """The rows of a comparison of all runs of one size on one card, one row for each run.

    A seed without a run from scratch is left out.
    """
    rows: list[dict[str, Any]] = []
    trainings = [(f"{n}/{t.name}", t) for n in MODELS[model] for t in EXPERIMENTS[n]]
    there = [(t, runs[key]) for key, t in trainings if key in runs and t.rate is None]
    for seed in sorted({t.seed for t, _ in there}):
        of = [(t, run) for t, run in there if t.seed == seed]
        base = [run for t, run in of if t.label == model]
        frontier = [[run] for t, run in of if t.row == model and t.fraction < 1]
        others = [[run] for t, run in of if t.row != model]
        if base:
            ordered = [base, *others, *frontier]
            found = Comparison([base, *others], frontier).rows()
            rows += [row | {"of": run[0]} for row, run in zip(found, ordered, strict=True)]
    return rows


def saved(row: dict[str, Any], name: str) -> str:
    """The saving of one run as text."""
    if row[name] is None:
        return ""
    (value,), (below,) = row[name], row["below_frontier"]
    # the added 0.0 makes 0.0 of -0.0
    if value is None:
        return "above the frontier"
    return "> " * below + f"{round(100 * value, 1) + 0.0:.1f} %"


def saved_seconds(run: Run, scratch: Sequence[Run]) -> float | None:
    """The saving of seconds with compilation; ``scratch[0]`` is the full run.

    A shorter run also counts the compilation of the full run that it continues, so every run from
    scratch gets the compilation of the full one. A run below the frontier is compared with the full run.
    """
    equal = frontier_budget(scratch, run.loss, "run_seconds")
    if equal is None:
        return None
    once = scratch[0].result["compile_seconds"]
    compiling = once if run in scratch else run.result["compile_seconds"]
    equal = min(equal, scratch[0].cost("run_seconds"))
    return 1 - (run.cost("run_seconds") + compiling) / (equal + once)


def about(run: Run) -> dict[str, Any]:
    return json.loads((run.folder / "about.json").read_text())


def forecast_table(results: Path = RESULTS) -> str:
    """The forecast of each saving, and its result."""
    heads = ["experiment", "parameters", "trained first", "seeds", "forecast", "95 % interval"]
    heads += ["FLOPs saved", "within the interval"]
    body = []
    for forecast in (build_dataclass(Forecast, row) for row in json.loads(FORECASTS.read_text())):
        low, high = (forecast.saved + sign * forecast.interval for sign in (-1, 1))
        cells = [
            forecast.experiment,
            short_count(forecast.parameters),
            method_names()[forecast.method],
        ]
        cells += [", ".join(map(str, forecast.seeds)), f"{forecast.saved:.1f} %"]
        cells += [f"{low:.1f} to {high:.1f} %", *_outcome(forecast, results)]
        body.append(cells)
    return markdown_table(heads, body)


def _outcome(forecast: Forecast, results: Path) -> tuple[str, str]:
    """The measured saving of a forecast, and whether its interval contains it."""
    model, name = forecast.rows
    for runs in finished(results).values():
        rows = comparison(runs, model)
        found = [r for r in rows if r["run"] == name and r["seeds"][0] in forecast.seeds]
        if len(found) < len(forecast.seeds) or any(r["saved_frontier"] is None for r in found):
            continue
        values = [r["saved_frontier"][0] for r in found]
        if None in values:
            return "above the frontier", "no"
        value = 100 * mean(values)
        bound = any(r["below_frontier"][0] for r in found)
        inside = abs(value - forecast.saved) <= forecast.interval
        if bound and value < forecast.saved:  # a lower bound can be anywhere above it
            inside = True
        text = "> " * bound + f"{value:.1f} %"
        if len(values) > 1:
            text += f" [{', '.join(f'{100 * v:.1f}' for v in values)}]"
        return text, "yes" if inside else "no"
    return NOTHING, ""


def run_table(results: Path = RESULTS) -> str:
    """FLOPs, losses and seconds of the runs whose savings are measured."""
    heads = ["card", "run", "seed", "learning rate", "epochs", "FLOPs", "relative FLOPs"]
    heads += ["final loss", "FLOPs saved", "seconds", "of them compilation", "time of steps saved"]
    heads += ["growth, seconds", "loss after growth"]
    body: list[list[str]] = []
    for card, runs in finished(results).items():
        for model in MODELS:
            for row in comparison(runs, model):
                body.append([card, *_cells(row["of"], row)])
    return markdown_table(heads, body or [_empty(heads)])


def _cells(run: Run, row: dict[str, Any]) -> list[str]:
    result = run.result
    seconds, after = growth(run)
    return [
        run.name,
        str(run.seed),
        f"{run.config['optim']['peak_lr']:g}",
        f"{about(run)['epochs']:.2f}",
        f"{result['flops']:.3g}",
        f"{row['flops']:.3f}",
        f"{run.loss:.4f}",
        saved(row, SAVED["flops"]),
        f"{result['seconds']:.0f}",
        f"{result['compile_seconds']:.0f}",
        saved(row, SAVED["run_seconds"]),
        seconds,
        after,
    ]


def growth(run: Run) -> tuple[str, str]:
    """The seconds of a growth with the recompilation after it, and the loss directly after it."""
    phases = run.result["phases"]
    kinds = [p["kind"] for p in phases]
    at = next((i for i, kind in enumerate(kinds) if kind in ("grow", "correct", "apply")), None)
    if at is None:
        return "", ""
    seconds = phases[at]["seconds"] + sum(p["compile_seconds"] for p in phases[at + 1 :])
    losses = [x["val_loss"] for x in run.curve if x["phase"] == phases[at]["phase"]]
    return f"{seconds:.1f}", f"{losses[-1]:.4f}" if losses else ""


def sweep_table(results: Path = RESULTS) -> str:
    """The final losses of the sweep of the learning rates."""
    return _simple(results, "E1", lambda t: t.rate is not None, _swept)


def _swept(training: Training, run: Run) -> list[str]:
    return [training.row, f"{training.rate:g}", f"{run.loss:.4f}"]


def time_table(results: Path = RESULTS) -> str:
    """The losses at equal time."""
    return _simple(results, "E5", lambda t: True, _equal)


def _equal(training: Training, run: Run) -> list[str]:
    result = run.result
    cells = [training.row, f"{result['seconds']:.0f}", f"{result['compile_seconds']:.0f}"]
    cells += [f"{result['steps']:,}", f"{result['flops']:.3g}", f"{run.loss:.4f}"]
    return [*cells, f"{run.loss / math.log(2):.4f}"]


HEADS = {
    "E1": ("card", "run with 0.3 of the steps", "learning rate", "final loss"),
    "E5": (
        *("card", "run", "seconds", "of them compilation", "steps", "FLOPs", "final loss"),
        "validation bits per byte",
    ),
}


def _simple(results: Path, name: str, which: Any, cells: Any) -> str:
    """A table with a row for each run of one experiment."""
    heads = HEADS[name]
    body = []
    for card, runs in finished(results).items():
        for training in EXPERIMENTS[name]:
            run = runs.get(f"{name}/{training.name}")
            if run is not None and which(training):
                body.append([card, *cells(training, run)])
    return markdown_table(heads, body or [_empty(heads)])


def measured_table(results: Path = RESULTS) -> str:
    """The measurements of E3."""
    heads = ["card", "measurement", "result"]
    body = []
    for file in sorted(results.glob("*/E3/*/about.json")):
        row = json.loads(file.read_text())["row"]
        body.append([file.parents[2].name, file.parent.name, _figures(row)])
    return markdown_table(heads, body or [_empty(heads)])


def _figures(row: Any) -> str:
    """The medians and numbers of a measurement in one cell."""
    if not isinstance(row, dict):
        return f"{row:,.4g}" if isinstance(row, int | float) else str(row)
    if "median" in row:
        return f"{row['median']:,.4g}"
    hidden = ("xla", "device", "card", "first_losses", "torch")
    return "; ".join(
        f"{k.replace('_', ' ')} {_figures(v)}" for k, v in row.items() if k not in hidden
    )


def _empty(heads: Sequence[str]) -> list[str]:
    return [NOTHING, *[""] * (len(heads) - 1)]


TABLES = (forecast_table, run_table, sweep_table, time_table, measured_table)


def summary(results: Path) -> str:
    """All tables."""
    return "\n\n".join(table(results) for table in TABLES)

"""What runs saved against a baseline: numbers from their logs, a table, a plot. Nothing here trains."""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from train.plan import SOURCE


@dataclass(frozen=True)
class Run:
    """A finished run, read from its work directory."""

    name: str
    seed: int
    folder: Path

    @cached_property
    def result(self) -> dict[str, Any]:
        return json.loads((self.folder / "result.json").read_text())

    @cached_property
    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @cached_property
    def curve(self) -> list[dict[str, Any]]:
        """The lines of the log that hold a validation loss."""
        return [line for line in self.log if "val_loss" in line]

    @cached_property
    def keep(self) -> list[dict[str, Any]]:
        """The lines that hold keep probabilities: those of steps that dropped layers."""
        return [line for line in self.log if "keep" in line]

    def step_seconds(self, i: int) -> float | None:
        """The median time of a step of phase ``i``, between lines of the log; None if it has fewer than two lines.

        Without compilation, which falls into the first interval, and without validation.
        """
        phases = self.result["phases"]
        before = sum(p["tokens"] for p in phases[:i])
        after = before + phases[i]["tokens"]
        lines = [line for line in self.log if "loss" in line and before < line["tokens"] <= after]
        times = [(b["seconds"] - a["seconds"]) / (b["step"] - a["step"]) for a, b in itertools.pairwise(lines)]
        return median(times) if times else None

    @property
    def loss(self) -> float:
        return self.result["val_loss"]

    @property
    def classifies(self) -> bool:
        return "classes" in self.result["model"]

    @property
    def parameters(self) -> int:
        return self.result["phases"][-1]["parameters"]

    def source(self, unit: str) -> float:
        """What the small model cost that a growth began from, which one may have already; 0 if there is none."""
        names = (f"train {SOURCE}", f"measure {SOURCE}", f"import {SOURCE}")
        return sum(p[unit] for p in self.result["phases"] if p["phase"] in names)

    def cost_to(self, loss: float, unit: str) -> float | None:
        """FLOPs or seconds (``unit``) at which the last phase first reached ``loss``; None if it never did.

        Between two validations the loss is taken to fall in a straight line.
        """
        last = [line for line in self.curve if line["phase"] == self.curve[-1]["phase"]]
        first = max((i for i in range(1, len(last)) if last[i]["step"] <= last[i - 1]["step"]), default=0)
        points = [(line[unit], line["val_loss"]) for line in last[first:]]
        for (x0, y0), (x1, y1) in zip([points[0], *points[:-1]], points, strict=True):
            if y1 <= loss:
                return x1 if y0 <= loss or y0 == y1 else x0 + (x1 - x0) * (y0 - loss) / (y0 - y1)
        return None


def frontier_budget(frontier: Sequence[Run], loss: float) -> float | None:
    """The FLOPs that a run from scratch, fully decayed over its own budget, needs to end at ``loss``.

    Interpolates loss against log FLOPs between neighbouring runs. Infinite below all of them: more than the longest one's.
    None above.
    """
    points = sorted((math.log(r.result["flops"]), r.loss) for r in frontier)
    if loss < min(y for _, y in points):
        return math.inf
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if min(y0, y1) <= loss <= max(y0, y1) and y0 != y1:
            return math.exp(x0 + (x1 - x0) * (y0 - loss) / (y0 - y1))
    return None


@dataclass(frozen=True)
class Comparison:
    """Runs of several configs, each with the same seeds. ``runs[0]`` are the baseline's."""

    runs: list[list[Run]]
    frontier: list[list[Run]]  # of the baseline, one list a budget below 1

    def rows(self) -> list[dict[str, Any]]:
        """One row a config; a saving is one minus a ratio of costs, the mean over seeds and each seed's own."""
        baseline = {r.seed: r for r in self.runs[0]}
        budgets = {s: [b, *(r for runs in self.frontier for r in runs if r.seed == s)] for s, b in baseline.items()}
        rows = []
        for runs in [*self.runs, *self.frontier]:
            base = [baseline[r.seed] for r in runs]

            def saved(unit: str, given: bool = False, runs=runs, base=base) -> list[float | None]:
                """With ``given``, the small model that a growth begins from costs nothing."""
                costs = [r.cost_to(b.loss, unit) for r, b in zip(runs, base, strict=True)]
                costs = [c and c - given * r.source(unit) for c, r in zip(costs, runs, strict=True)]
                return [None if c is None else 1 - c / b.result[unit] for c, b in zip(costs, base, strict=True)]

            def against(given: bool, runs=runs, base=base) -> list[float | None]:
                equal = [frontier_budget(budgets[r.seed], r.loss) for r in runs]
                own = [r.result["flops"] - given * r.source("flops") for r in runs]
                longest = [b.result["flops"] for b in base]
                return [e and 1 - o / min(e, most) for o, e, most in zip(own, equal, longest, strict=True)]

            rows.append(
                {
                    "run": runs[0].name,
                    "seeds": [r.seed for r in runs],
                    "parameters": runs[0].parameters,
                    "tokens_per_parameter": mean(r.result["tokens"] / r.parameters for r in runs),
                    "flops": mean(r.result["flops"] / b.result["flops"] for r, b in zip(runs, base, strict=True)),
                    "seconds": mean(r.result["seconds"] / b.result["seconds"] for r, b in zip(runs, base, strict=True)),
                    "loss": [r.loss for r in runs],
                    "accuracy": [r.result["val_accuracy"] for r in runs],
                    "saved_flops": saved("flops"),
                    "saved_seconds": saved("seconds"),
                    "saved_frontier": against(False),
                    "below_frontier": [frontier_budget(budgets[r.seed], r.loss) == math.inf for r in runs],
                    "source": mean(r.source("flops") / b.result["flops"] for r, b in zip(runs, base, strict=True)),
                    "saved_flops_given": saved("flops", given=True),
                    "saved_seconds_given": saved("seconds", given=True),
                    "saved_frontier_given": against(True),
                }
            )
        return rows

    def table(self) -> str:
        """Markdown: the runs against the baseline, then what each phase cost."""
        head = ["run", "parameters", "tokens a parameter", "FLOPs", "wall-clock", "final loss",
                "FLOPs saved to the baseline's final loss", "wall-clock saved to it"]  # fmt: skip
        columns = ["saved_frontier"] if self.frontier else []
        head += ["FLOPs saved against the frontier"] if self.frontier else []
        if any(r.source("flops") for runs in self.runs for r in runs):
            given = ["saved_flops_given", "saved_seconds_given", *["saved_frontier_given"] * bool(self.frontier)]
            head += [f"{h}, small model given" for h in head[6:]]
            columns += given
        body = []
        for row in self.rows():
            cells = [row["run"], f"{row['parameters']:,}", f"{row['tokens_per_parameter']:.1f}", f"{row['flops']:.3f}",
                     f"{row['seconds']:.3f}", spread(row["loss"], "{:.4f}"), _percent(row["saved_flops"]),
                     _percent(row["saved_seconds"])]  # fmt: skip
            over = any(row["below_frontier"])  # from scratch, more than the whole budget would be needed
            body.append(cells + [_percent(row[column], over and "frontier" in column) for column in columns])
        if self.runs[0][0].classifies:
            head.insert(6, "final accuracy")
            for cells, row in zip(body, self.rows(), strict=True):
                cells.insert(6, _percent(row["accuracy"]))
        seeds = ", ".join(str(r.seed) for r in self.runs[0])
        first = self.runs[0][0]
        text = f"{markdown(head, body)}\n\nRatios are to {first.name}: {first.result['flops']:.3g} FLOPs, "
        text += f"{mean(r.result['seconds'] for r in self.runs[0]):.0f} s. Seeds: {seeds}; "
        text += "with several, the mean and in brackets each. Validation is not counted, everything else is.\n"
        phases = [
            [runs[0].name, p["phase"], f"{p['parameters']:,}", f"{p['steps']:,}", f"{p['tokens']:,}",
             f"{p['layers'] / p['steps']:.2f}" if p["steps"] else "", _milliseconds(runs, i),
             f"{p['flops'] / runs[0].result['flops']:.1%}", f"{p['seconds']:.1f}"]
            for runs in self.runs
            for i, p in enumerate(runs[0].result["phases"])
        ]  # fmt: skip
        head = ["run", "phase", "parameters", "steps", "tokens", "layers run", "ms a step", "FLOPs", "seconds"]
        return f"{text}\n{markdown(head, phases)}\n"

    def plot(self, path: Path) -> None:
        """Validation loss against FLOPs; small models dotted, the frontier as crosses."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        for i, runs in enumerate(self.runs):
            for run in runs:
                parts = _segments(run)
                for points in parts:
                    full = points[0]["phase"] == run.curve[-1]["phase"]
                    axes.plot(
                        [p["flops"] for p in points],
                        [p["val_loss"] for p in points],
                        color=f"C{i}",
                        linestyle="-" if full else ":",
                        alpha=1 if run is runs[0] else 0.4,
                        label=run.name if run is runs[0] and points is parts[-1] else None,
                    )
        if self.frontier:
            ends = sorted(
                (mean(r.result["flops"] for r in rs), mean(r.loss for r in rs)) for rs in [self.runs[0], *self.frontier]
            )
            axes.plot(*np.transpose(ends), "kx--", label="frontier: scratch, each fully decayed")
        finals = [r.loss for runs in [*self.runs, *self.frontier] for r in runs]
        highest = max(p["val_loss"] for runs in self.runs for r in runs for p in r.curve)
        axes.set_ylim(min(finals) - 0.05, min(highest, min(finals) * 1.6))
        axes.set_xlabel("FLOPs, all phases counted")
        axes.set_ylabel(f"validation loss (nats {'an image' if self.runs[0][0].classifies else 'a token'})")
        axes.legend()
        figure.savefig(path, dpi=120)

    def plot_keep(self, path: Path) -> bool:
        """Keep probability over depth and time, of each config that drops layers; False, and no plot, if none does."""
        from matplotlib.figure import Figure

        runs = [runs[0] for runs in self.runs if runs[0].keep]
        if not runs:
            return False
        figure = Figure(figsize=(8, 1 + 2 * len(runs)), layout="constrained")
        for axes, run in zip(figure.subplots(len(runs), 1, squeeze=False)[:, 0], runs, strict=True):
            steps, probs = [line["step"] for line in run.keep], np.transpose([line["keep"] for line in run.keep])
            image = axes.pcolormesh(steps, range(1, len(probs) + 1), probs, vmin=0, vmax=1, shading="nearest")
            axes.set_title(run.name)
            axes.set_xlabel("step")
            axes.set_ylabel("layer")
            figure.colorbar(image, ax=axes, label="keep probability")
        figure.savefig(path, dpi=120)
        return True


def _milliseconds(runs: Sequence[Run], i: int) -> str:
    times = [t for r in runs if (t := r.step_seconds(i)) is not None]
    return spread([1000 * t for t in times], "{:.1f}") if times else ""


def _segments(run: Run) -> list[list[dict[str, Any]]]:
    """The curve, cut where the phase changes."""
    parts: list[list[dict[str, Any]]] = []
    for line in run.curve:
        if not parts or parts[-1][-1]["phase"] != line["phase"] or parts[-1][-1]["step"] >= line["step"]:
            parts.append([])
        parts[-1].append(line)
    return parts


def spread(values: Sequence[float], form: str) -> str:
    text = form.format(mean(values))
    return text if len(values) == 1 else f"{text} [{', '.join(form.format(v) for v in values)}]"


def _percent(values: Sequence[float | None], at_least: bool = False) -> str:
    known = [v for v in values if v is not None]
    if len(known) < len(values):
        return "not reached" if not known else f"not reached by {len(values) - len(known)} of {len(values)} seeds"
    return "> " * at_least + spread([100 * v for v in known], "{:.1f} %").replace("-0.0 %", "0.0 %")


def markdown(head: list[str], body: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in [head, *body]) for i in range(len(head))]
    rows = [head, ["-" * w for w in widths], *body]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in rows)

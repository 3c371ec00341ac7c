"""Finished runs, read from their logs: what a loss cost, and whether two were judged alike. Nothing here trains."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from scipy import stats

from train.common.errors import UserError
from train.config.experiment import differences
from train.engine.run.workdir import Workdir
from train.plan.methods import SOURCE

Unit: TypeAlias = Literal[
    "flops", "seconds", "run_seconds"
]  # the last: seconds without those that compiling took


@dataclass(frozen=True)
class Run:
    """A finished run, read from its work directory."""

    name: str
    seed: int
    folder: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        return Workdir(self.folder).config

    @cached_property
    def result(self) -> dict[str, Any]:
        result = Workdir(self.folder).result
        if "compile_seconds" not in result:
            raise UserError(
                f"{self.folder} is of before compiling was counted; run it again in another --workdir"
            )
        return result

    @cached_property
    def log(self) -> list[dict[str, Any]]:
        return Workdir(self.folder).lines()

    @cached_property
    def curve(self) -> list[dict[str, Any]]:
        """The lines of the log that hold a validation loss."""
        return [line for line in self.log if "val_loss" in line]

    @cached_property
    def segments(self) -> list[list[dict[str, Any]]]:
        """The curve, cut where the phase changes; the last one is of the model that the run is for."""
        parts: list[list[dict[str, Any]]] = []
        for line in self.curve:
            if (
                not parts
                or parts[-1][-1]["phase"] != line["phase"]
                or parts[-1][-1]["step"] >= line["step"]
            ):
                parts.append([])
            parts[-1].append(line)
        return parts

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
        times = [
            (b["seconds"] - a["seconds"]) / (b["step"] - a["step"])
            for a, b in itertools.pairwise(lines)
        ]
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

    @property
    def last_rate(self) -> float:
        """The last learning rate as a fraction of the highest one."""
        rates = [line["lr"] for line in self.log if "lr" in line]
        return rates[-1] / max(rates)

    def cost(self, unit: Unit) -> float:
        return spent(self.result, unit)

    def source(self, unit: Unit) -> float:
        """What the small model cost that a growth began from, which one may have already; 0 if there is none."""
        return sum(spent(p, unit) for p in self.result["phases"] if p.get("model") == SOURCE)

    def cost_to(self, loss: float, unit: Unit) -> float | None:
        """What it had cost when the last phase reached ``loss`` and stayed there to its end; None if it never did.

        Between two validations the loss is taken to fall in a straight line.
        """
        points = [(spent(line, unit), line["val_loss"]) for line in self.segments[-1]]
        above = [i for i, (_, y) in enumerate(points) if y > loss]
        if not above:
            return points[0][0]
        if above[-1] == len(points) - 1:
            return None
        (x0, y0), (x1, y1) = points[above[-1] : above[-1] + 2]
        return x0 + (x1 - x0) * (y0 - loss) / (y0 - y1)


def spent(record: Mapping[str, Any], unit: Unit) -> float:
    """Of a line of a log, a phase, or a result."""
    return record["seconds"] - record["compile_seconds"] if unit == "run_seconds" else record[unit]


class Curve(NamedTuple):
    """A segment of a config's runs, over seeds: at each validation that all of them have."""

    phase: str
    cost: np.ndarray  # mean
    loss: np.ndarray  # mean
    half: np.ndarray  # half of the 95 % interval of that mean; 0 of one seed


def curves(runs: Sequence[Run], unit: Unit) -> list[Curve]:
    """The `Run.segments` of runs that differ by their seeds alone."""
    found = []
    for parts in zip(*(run.segments for run in runs), strict=True):
        at = [{line["step"]: line for line in part} for part in parts]
        lines = [
            [by_step[step] for by_step in at]
            for step in at[0]
            if all(step in by_step for by_step in at)
        ]
        losses = [[line["val_loss"] for line in same] for same in lines]
        cost = [mean(spent(line, unit) for line in same) for same in lines]
        half = [half_width(values) or 0.0 for values in losses]
        found.append(
            Curve(parts[0][0]["phase"], np.array(cost), np.mean(losses, 1), np.array(half))
        )
    return found


def frontier_budget(frontier: Sequence[Run], loss: float) -> float | None:
    """The FLOPs that a run from scratch, fully decayed over its own budget, needs to end at ``loss``.

    Interpolates loss against log FLOPs between neighbouring runs. Infinite below all of them: more
    than the longest one's. None above.
    """
    points = sorted((math.log(r.result["flops"]), r.loss) for r in frontier)
    if loss < min(y for _, y in points):
        return math.inf
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if min(y0, y1) <= loss <= max(y0, y1) and y0 != y1:
            return math.exp(x0 + (x1 - x0) * (y0 - loss) / (y0 - y1))
    return None


def half_width(values: Sequence[float | None]) -> float | None:
    """Of the 95 % confidence interval of the mean, by Student's t; None with fewer than two values, or one missing."""
    known = [v for v in values if v is not None]
    if len(known) < max(2, len(values)):
        return None
    return float(stats.t.ppf(0.975, len(known) - 1)) * stdev(known) / math.sqrt(len(known))


def evaluation_setup(config: Mapping[str, Any], known: bool) -> dict[str, Any]:
    """What decides how a run's loss is judged, of its ``config.json``: corpus, tokenizer, split, context, evaluation.

    With ``known``, the data are those whose hashes it holds as ``corpus``, wherever they lie.
    """
    ((kind, data),) = config["data"].items()
    left_out = {"cache", "workers", "augment"}  # how it is read; what training alone does to it
    left_out |= {"path", "valid_path", "tokenizer"} if known else set()
    setup: dict[str, Any] = {
        "data": {"kind": kind} | {k: v for k, v in data.items() if k not in left_out}
    }
    if known:
        setup["corpus"] = {k: config["corpus"].get(k) for k in ("train", "valid", "tokenizer")}
    shape = ("context", "masked", "image", "channels", "classes")
    setup["model"] = {k: v for k, v in config["model"].items() if k in shape}
    # So many samples, spread over the validation data, however they are divided into batches.
    return setup | {"eval_batches * batch": config["eval_batches"] * config["batch"]}


def refuse_unlike(configs: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """``configs`` are names and contents of ``config.json``.

    Raises:
      UserError: one of them is judged otherwise than the first, so that their losses say nothing of
        each other.
    """
    (first, reference), *others = configs
    for name, config in others:
        known = "corpus" in reference and "corpus" in config
        if wrong := differences(
            evaluation_setup(reference, known), evaluation_setup(config, known)
        ):
            raise UserError(
                f"{first} and {name} are not judged alike: {'; '.join(wrong)}; compare runs that agree in these"
            )


def spread(values: Sequence[float], form: str) -> str:
    """The mean and, of several, each in brackets."""
    text = form.format(mean(values))
    return text if len(values) == 1 else f"{text} [{', '.join(form.format(v) for v in values)}]"


def markdown(head: list[str], body: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in [head, *body]) for i in range(len(head))]
    rows = [head, ["-" * w for w in widths], *body]
    return "\n".join(
        "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
        for row in rows
    )

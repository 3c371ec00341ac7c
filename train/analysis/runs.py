"""Finished runs, read from their logs: the cost of a loss, and whether two runs are comparable."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean, stdev
from typing import Literal, TypeAlias

from scipy import stats

from jaxgrow.models import Config
from jaxgrow.models.config import from_json
from jaxgrow.typed import Json
from train.common.errors import UserError
from train.config.experiment import described_differences
from train.plan.methods import SOURCE
from train.store.workdir import Workdir

# "run_seconds" are seconds without compilation.
Unit: TypeAlias = Literal["flops", "seconds", "run_seconds"]


@dataclass(frozen=True)
class Run:
    """A finished run, read from its work directory."""

    name: str
    seed: int
    folder: Path

    @cached_property
    def config(self) -> Json:
        return Workdir(self.folder).config

    @cached_property
    def result(self) -> Json:
        return Workdir(self.folder).result

    @cached_property
    def log(self) -> list[Json]:
        return Workdir(self.folder).lines()

    @cached_property
    def curve(self) -> list[Json]:
        """The log lines with a validation loss."""
        return [line for line in self.log if "val_loss" in line]

    @cached_property
    def segments(self) -> list[list[Json]]:
        """The curve, split where the phase changes; the last segment belongs to the final model."""
        return phase_segments(self.curve)

    @property
    def loss(self) -> float:
        return self.result["val_loss"]

    @cached_property
    def model(self) -> Config:
        return from_json(self.result["model"])

    @property
    def parameters(self) -> int:
        return self.result["phases"][-1]["parameters"]

    @property
    def last_rate(self) -> float:
        """The last learning rate as a fraction of the highest one."""
        rates = [line["lr"] for line in self.log if "lr" in line]
        return rates[-1] / max(rates)

    def cost(self, unit: Unit) -> float:
        return spent_cost(self.result, unit)

    def source(self, unit: Unit) -> float:
        """The cost of the small source model that the run grew from; 0 if there is none.

        A user may already have this model.
        """
        return sum(spent_cost(p, unit) for p in self.result["phases"] if p.get("model") == SOURCE)

    def cost_to(self, loss: float, unit: Unit) -> float | None:
        """The cost from which on the loss of the last phase stays at or below ``loss``.

        The cost is interpolated linearly between two validations. It is None if the run ends above
        ``loss``.
        """
        points = [(spent_cost(line, unit), line["val_loss"]) for line in self.segments[-1]]
        above = [i for i, (_, y) in enumerate(points) if y > loss]
        if not above:
            return points[0][0]
        if above[-1] == len(points) - 1:
            # A run that keeps its best evaluation may end with the model of an earlier one.
            return self.cost(unit) if self.loss <= loss else None
        (x0, y0), (x1, y1) = points[above[-1] : above[-1] + 2]
        return x0 + (x1 - x0) * (y0 - loss) / (y0 - y1)


def phase_segments(lines: Sequence[Json]) -> list[list[Json]]:
    """Split log lines where the phase changes."""
    parts: list[list[Json]] = []
    for line in lines:
        last = parts[-1][-1] if parts else {"phase": None}
        if last["phase"] != line["phase"] or last["step"] >= line["step"]:
            parts.append([])
        parts[-1].append(line)
    return parts


def mean_cost(runs: Sequence[Run], unit: Unit) -> float:
    """The mean cost of several runs."""
    return mean(r.cost(unit) for r in runs)


def mean_loss(runs: Sequence[Run]) -> float:
    """The mean final loss of several runs."""
    return mean(r.loss for r in runs)


def spent_cost(record: Json, unit: Unit) -> float:
    """The cost of a log line, a phase or a result."""
    return record["seconds"] - record["compile_seconds"] if unit == "run_seconds" else record[unit]


def frontier_budget(frontier: Sequence[Run], loss: float, unit: Unit = "flops") -> float | None:
    """The cost with which a fully decayed run from scratch ends at ``loss``.

    The loss is interpolated over the logarithm of the cost between neighbouring runs of the frontier, each of which
    has a complete learning rate schedule. If a longer run ends above a shorter one, several budgets
    give the same loss, and the smallest of them is returned. The result is infinite if ``loss`` is
    below all runs, because the longest run does not suffice, and None if it is above all of them.
    """
    points = sorted((math.log(r.cost(unit)), r.loss) for r in frontier)
    if loss < min(y for _, y in points):
        return math.inf
    # The first run is its own neighbour: it is alone if the shorter runs of its seed diverged.
    for (x0, y0), (x1, y1) in itertools.pairwise([points[0], *points]):
        if min(y0, y1) <= loss <= max(y0, y1):
            part = (y0 - loss) / (y0 - y1) if y0 != y1 else 0.0
            return math.exp(x0 + (x1 - x0) * part)
    return None


def half_width(values: Sequence[float | None]) -> float | None:
    """Half of the 95 % confidence interval of the mean, by Student's t.

    None if there are fewer than two values, or if one is missing.
    """
    known = [v for v in values if v is not None]
    if len(known) < max(2, len(values)):
        return None
    return float(stats.t.ppf(0.975, len(known) - 1)) * stdev(known) / math.sqrt(len(known))


def p_value(values: Sequence[float | None]) -> float | None:
    """The two-sided p-value of a t-test that the mean of savings is zero.

    Each saving compares a run with the baseline of its seed, so the test is a paired one.

    Returns:
      None with fewer than five values, with which the test says little, if one is missing, or if
      all are equal.
    """
    known = [v for v in values if v is not None]
    if len(known) < max(5, len(values)) or not stdev(known):
        return None
    t = mean(known) * math.sqrt(len(known)) / stdev(known)
    return 2 * float(stats.t.sf(abs(t), len(known) - 1))


def evaluation_setup(config: Json, known: bool) -> Json:
    """The settings that determine how a run is evaluated, from its ``config.json``.

    These are the corpus, tokenizer, split, context and evaluation.

    Args:
      config: the content of ``config.json``.
      known: identify the data by the hashes in ``corpus``, not by their paths.
    """
    ((kind, data),) = config["data"].items()
    # These settings change how data are read, or training data only.
    left_out = {"cache", "workers", "augment"}
    left_out |= {"path", "valid_path", "tokenizer"} if known else set()
    setup: Json = {"data": {"kind": kind} | {k: v for k, v in data.items() if k not in left_out}}
    if known:
        setup["corpus"] = {k: config["corpus"].get(k) for k in ("train", "valid", "tokenizer")}
    shape = ("context", "masked", "image", "channels", "classes")
    setup["model"] = {k: v for k, v in config["model"].items() if k in shape}
    # If the validation set is large enough, the evaluated samples depend on this product, and not on
    # how it is divided into batches.
    return setup | {"eval_batches * batch": config["eval_batches"] * config["batch"]}


def refuse_unlike(configs: Sequence[tuple[str, Json]]) -> None:
    """Check that runs are evaluated in the same way.

    Args:
      configs: names and contents of ``config.json``.

    Raises:
      UserError: a run is evaluated differently from the first one, so that their losses are not
        comparable.
    """
    (first, reference), *others = configs
    for name, config in others:
        known = "corpus" in reference and "corpus" in config
        setups = (evaluation_setup(reference, known), evaluation_setup(config, known))
        wrong = described_differences(*setups)
        if known:
            mine, other = (c["corpus"].get("evaluated") for c in (reference, config))
            if None not in (mine, other) and mine != other:  # old runs did not record it
                wrong.append(f"evaluated samples: {mine} and {other}")
        for which, c in ((first, reference), (name, config)):
            changed = [x for x in c.get("changes", []) if x["setting"] == "eval_batches"]
            wrong += [f"eval_batches of {which} changed at step {x['step']}" for x in changed]
        if wrong:
            hint = ""
            if any("batch" in w for w in wrong):
                hint = (
                    ", such as CONFIG:batch=8:eval_batches=4 and CONFIG:batch=16:eval_batches=2; a sweep takes one batch, "
                    "so sweep the settings of each batch in another --workdir"
                )
            raise UserError(
                f"{first} and {name} are not evaluated in the same way: {'; '.join(wrong)}; "
                f"compare runs that agree in these{hint}"
            )

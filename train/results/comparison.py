"""What runs saved against a baseline, over seeds: the frontier first, the curves beside it; rows, tables, what to doubt."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, stdev
from typing import Any

from train.results.runs import Run, Unit, frontier_budget, half_width, markdown, refuse_unlike, spread

UNITS: tuple[Unit, ...] = ("flops", "run_seconds", "seconds")
ALIKE = 0.03  # two costs are alike if they differ by less than this part
DECAYED = 0.05  # a last learning rate below this part of the peak


@dataclass(frozen=True)
class Comparison:
    """Runs of several configs, each with the same seeds. ``runs[0]`` are the baseline's.

    Raises:
      UserError: they are not judged alike.
    """

    runs: list[list[Run]]
    frontier: list[list[Run]]  # of the baseline, one list a budget below 1
    scores: Mapping[str, list[list[float]]] = field(
        default_factory=dict
    )  # by what they are of: those of all runs, so listed
    diverged: Mapping[str, list[int]] = field(default_factory=dict)  # seeds by config; not among the runs

    def __post_init__(self):
        refuse_unlike([(r.name, r.config) for runs in [*self.runs, *self.frontier] for r in runs])

    @property
    def scratch(self) -> list[list[Run]]:
        """The whole frontier: the baseline, and its shorter runs."""
        return [self.runs[0], *self.frontier]

    def rows(self) -> list[dict[str, Any]]:
        """One row a config. A saving is one minus a ratio of costs, one number a seed, in pairs with the baseline's.

        ``saved_frontier``: of the budget from which scratch, fully decayed, ends at the run's own loss; a lower bound where
        that is below the whole frontier (``below_frontier``), None where it is above, null for all without a frontier.
        ``saved_{unit}``: of what the baseline had spent when its curve reached its final loss to stay, the same of the run's
        curve; None if it never did. ``.._given``: the small model that a growth begins from costs nothing. ``.._interval``:
        half the width of the 95 % confidence interval of the mean (Student's t over seeds), where there is one.
        """
        baseline = {r.seed: r for r in self.runs[0]}
        budgets = {s: [r for runs in self.scratch for r in runs if r.seed == s] for s in baseline}
        rows = []
        for i, runs in enumerate([*self.runs, *self.frontier]):
            base = [baseline[r.seed] for r in runs]
            pairs = list(zip(runs, base, strict=True))
            row: dict[str, Any] = {
                "run": runs[0].name,
                "seeds": [r.seed for r in runs],
                "diverged": self.diverged.get(runs[0].name, []),
                "parameters": runs[0].parameters,
                "tokens_per_parameter": mean(r.result["tokens"] / r.parameters for r in runs),
                "loss": [r.loss for r in runs],
                "accuracy": [r.result["val_accuracy"] for r in runs],
                "scores": {name: scores[i] for name, scores in self.scores.items()},
                **{unit: mean(r.cost(unit) / b.cost(unit) for r, b in pairs) for unit in UNITS},
                "source": mean(r.source("flops") / b.cost("flops") for r, b in pairs),
            }
            equal = [frontier_budget(budgets[r.seed], r.loss) if self.frontier else None for r in runs]
            row["below_frontier"] = [e == math.inf for e in equal] if self.frontier else None
            for given, suffix in ((False, ""), (True, "_given")):
                saved: list[float | None] = [
                    e and 1 - (r.cost("flops") - given * r.source("flops")) / min(e, b.cost("flops"))
                    for e, (r, b) in zip(equal, pairs, strict=True)
                ]
                row[f"saved_frontier{suffix}"] = saved if self.frontier else None
                row[f"saved_frontier{suffix}_interval"] = None if math.inf in equal else half_width(saved)
            for unit in UNITS:
                for given, suffix in ((False, ""), (True, "_given")):
                    saved = []
                    for r, b in pairs:
                        own, whole = r.cost_to(b.loss, unit), b.cost_to(b.loss, unit)
                        assert whole is not None  # a run ends at its own loss
                        saved.append(None if own is None else 1 - (own - given * r.source(unit)) / whole)
                    row[f"saved_{unit}{suffix}"] = saved
                    row[f"saved_{unit}{suffix}_interval"] = half_width(saved)
            rows.append(row)
        return rows

    def noise(self) -> dict[str, float | None]:
        """The standard deviation of the baseline's final loss over seeds, and the part of its budget that buys as much.

        The latter by the frontier's slope at the baseline: loss against log FLOPs, between its two longest budgets.
        """
        losses = [r.loss for r in self.runs[0]]
        deviation, budget = stdev(losses) if len(losses) > 1 else None, None
        points = sorted((math.log(mean(r.cost("flops") for r in rs)), mean(r.loss for r in rs)) for rs in self.scratch)
        if deviation is not None and len(points) > 1:
            (x0, y0), (x1, y1) = points[-2:]
            budget = math.expm1(deviation * (x1 - x0) / (y0 - y1)) if y1 < y0 else None
        return {"loss": deviation, "budget": budget}

    def doubts(self) -> list[str]:
        """What a reader must know before believing a saving, a sentence each."""
        first, seeds, noise = self.runs[0][0], len(self.runs[0]), self.noise()
        doubts = [
            f"{name} diverged with seed {', '.join(map(str, seeds))}: no saving of it is given."
            for name, seeds in self.diverged.items()
        ]
        if not self.frontier:
            doubts.append(
                "No frontier: savings against runs from scratch that decay over less need --frontier, such as 0.75."
            )
        if seeds == 1:
            doubts.append("One seed: no noise floor and no confidence interval is known.")
        else:
            floor = f"Noise floor: over {seeds} seeds the final loss of {first.name} deviates by {noise['loss']:.4f}"
            if noise["budget"] is not None:
                floor += f", by the frontier's slope {noise['budget']:.1%} of its budget"
            elif self.frontier:
                floor += "; its longest shorter run ends no higher, so no budget can be told"
            doubts.append(
                f"{floor}. ± is half of a 95 % interval: Student's t over the seeds, each against its own baseline."
            )
        for runs in self.scratch:
            if (rate := max(r.last_rate for r in runs)) > DECAYED:
                doubts.append(
                    f"{runs[0].name} is not decayed: it ends at {rate:.0%} of its peak rate; savings against it flatter."
                )
        return doubts

    def results(self) -> list[str]:
        """The result in words: a line for each config besides the baseline and its shorter runs."""
        base, *rows = self.rows()
        count = len(self.runs) - 1
        return [_told(row, base, rows[count:]) for row in rows[:count]]

    def brief(self) -> str:
        """Markdown: one row for each config, what to doubt, scores, and the result in words."""
        parts = [self._against_baseline(), self._about(), "\n".join(self.doubts()), *self._scores(), *self.results()]
        return "\n\n".join(parts) + "\n"

    def table(self) -> str:
        """Markdown: `brief`, and the costs along the curves and of each phase."""
        parts = [self._against_baseline(), self._about(), "\n".join(self.doubts()), self._along()]
        return "\n\n".join([*parts, *self._scores(), self._phases(), *self.results()]) + "\n"

    @property
    def _given(self) -> bool:
        return any(r.source("flops") for runs in self.runs for r in runs)

    def _against_baseline(self) -> str:
        rows = self.rows()
        columns: dict[str, Any] = {
            "run": lambda r: r["run"],
            "parameters": lambda r: f"{r['parameters']:,}",
            "tokens a parameter": lambda r: f"{r['tokens_per_parameter']:.1f}",
            "FLOPs": lambda r: f"{r['flops']:.3f}",
            "final loss": _loss,
        }
        if self.runs[0][0].classifies:
            columns["final accuracy"] = lambda r: _percent(r["accuracy"])
        if self.frontier:
            columns["FLOPs saved against the frontier"] = lambda r: _frontier(r, "saved_frontier")
            if self._given:
                columns[".. small model given"] = lambda r: _frontier(r, "saved_frontier_given")
        columns["wall-clock"] = lambda r: f"{r['run_seconds']:.3f}"
        columns["with compiling"] = lambda r: f"{r['seconds']:.3f}"
        lost = [name for name in self.diverged if name not in {row["run"] for row in rows}]
        return _lines(columns, [*rows, *({"run": name, "loss": [], "diverged": self.diverged[name]} for name in lost)])

    def _about(self) -> str:
        first = self.runs[0][0]
        return (
            f"Ratios are to {first.name}: {first.cost('flops'):.3g} FLOPs, "
            f"{mean(r.cost('run_seconds') for r in self.runs[0]):.0f} s, "
            f"with compiling {mean(r.cost('seconds') for r in self.runs[0]):.0f} s. "
            f"Seeds: {', '.join(str(r.seed) for r in self.runs[0])}; with several, the mean and in brackets each. "
            "Validation is not counted, everything else is. What is compiled already, by an earlier run or in JAX's cache, "
            "is not compiled again: wall-clock with compiling depends on the order of the runs."
        )

    def _along(self) -> str:
        names = {"flops": "FLOPs", "run_seconds": "wall-clock", "seconds": "wall-clock with compiling"}
        along: dict[str, Any] = {"run": lambda r: r["run"]}
        for unit, name in names.items():
            along[f"{name} saved"] = lambda r, unit=unit: _percent(r[f"saved_{unit}"], r[f"saved_{unit}_interval"])
            if self._given:
                along[f"{name} saved, small model given"] = lambda r, unit=unit: _percent(
                    r[f"saved_{unit}_given"], r[f"saved_{unit}_given_interval"]
                )
        said = "Along the curves: what each had spent when it came down to the baseline's final loss to stay."
        return f"{said}\n\n{_lines(along, self.rows())}"

    def _scores(self) -> list[str]:
        if not self.scores:
            return []
        can: dict[str, Any] = {"run": lambda r: r["run"], "final loss": _loss}
        can |= {name: lambda r, name=name: spread(r["scores"][name], "{:.4f}") for name in self.scores}
        return [f"What the models can do: each seed's, after the mean.\n\n{_lines(can, self.rows())}"]

    def _phases(self) -> str:
        body = [
            [runs[0].name, p["phase"], f"{p['parameters']:,}", f"{p['steps']:,}", f"{p['tokens']:,}",
             f"{p['layers'] / p['steps']:.2f}" if p["steps"] else "", _milliseconds(runs, i),
             f"{p['flops'] / runs[0].cost('flops'):.1%}", f"{p['seconds']:.1f}", f"{p['compile_seconds']:.1f}"]
            for runs in self.runs
            for i, p in enumerate(runs[0].result["phases"])
        ]  # fmt: skip
        head = ["run", "phase", "parameters", "steps", "tokens", "layers run", "ms a step", "FLOPs", "seconds",
                "of these compiling"]  # fmt: skip
        return markdown(head, body)


def _lines(columns: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    return markdown(list(columns), [[_cell(name, cell, row) for name, cell in columns.items()] for row in rows])


def _cell(name: str, cell: Callable[[dict[str, Any]], str], row: dict[str, Any]) -> str:
    """Savings of a config that diverged with some seeds would be those of its luckier ones: they are not told."""
    if row["diverged"] and ("saved" in name or "given" in name):
        return f"diverged: {len(row['diverged'])} of {len(row['diverged']) + len(row['loss'])} seeds"
    return cell(row) if row["loss"] or name in ("run", "final loss") else ""


def _loss(row: dict[str, Any]) -> str:
    """The mean and each seed's, then the seeds that diverged."""
    seeds = ", ".join(map(str, row["diverged"]))
    parts = [spread(row["loss"], "{:.4f}")] if row["loss"] else []
    return ", ".join([*parts, f"diverged: seed {seeds}"] if seeds else parts)


def _told(row: dict[str, Any], base: dict[str, Any], shorter: list[dict[str, Any]]) -> str:
    """One line: what a run cost and reached, a run from scratch of the same cost, and what is saved at an equal loss."""
    text = (
        f"{row['run']} ends at a loss of {mean(row['loss']):.4f} for {row['flops']:.0%} of the FLOPs of {base['run']}, which "
        f"ends at {mean(base['loss']):.4f}"
    )
    alike = [r for r in shorter if abs(r["flops"] / row["flops"] - 1) < ALIKE]
    text += "".join(f"; {r['run']}, from scratch at the same cost, ends at {mean(r['loss']):.4f}" for r in alike[:1])
    return f"Result: {text}. {_saved(row)}"


def _saved(row: dict[str, Any]) -> str:
    if row["diverged"]:
        return "Some of its seeds diverged: no saving is told."
    saved = row["saved_frontier"]
    if saved is None:
        return "Without --frontier no saving is told."
    if None in saved:
        return "It ends above every run from scratch: nothing is saved."
    value = mean(saved)
    half = row["saved_frontier_interval"]
    interval = "" if half is None else f" ± {100 * half:.1f}"
    seeds = "one seed" if len(saved) == 1 else f"{len(saved)} seeds"
    if value < 0:
        return f"At an equal loss it costs {-100 * value:.1f} %{interval} more FLOPs than from scratch ({seeds})."
    bound = "more than " * any(row["below_frontier"])
    return f"At an equal loss it saves {bound}{100 * value:.1f} %{interval} of the FLOPs ({seeds})."


def _milliseconds(runs: Sequence[Run], i: int) -> str:
    times = [t for r in runs if (t := r.step_seconds(i)) is not None]
    return spread([1000 * t for t in times], "{:.1f}") if times else ""


def _frontier(row: dict[str, Any], name: str) -> str:
    """From scratch, a loss below the whole frontier would need more than the whole budget: the saving is a bound."""
    over = any(row["below_frontier"])
    return _percent(row[name], row[f"{name}_interval"], over, "above the frontier")


def _percent(
    values: Sequence[float | None], half: float | None = None, at_least: bool = False, unreached: str = "not reached"
) -> str:
    known = [100 * v for v in values if v is not None]
    if len(known) < len(values):
        return unreached if not known else f"{unreached}: {len(values) - len(known)} of {len(values)} seeds"
    text = f"{mean(known):.1f} %" + (f" ± {100 * half:.1f}" if half is not None else "")
    if len(known) > 1:
        text += f" [{', '.join(f'{v:.1f} %' for v in known)}]"
    return "> " * at_least + text.replace("-0.0 %", "0.0 %")

"""The savings of runs relative to a baseline, over seeds: rows, tables and caveats.

The main measure compares with the frontier; other measures compare along the training curves.
"""

import itertools
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from statistics import mean, stdev
from typing import TypeAlias

from jaxgrow.registry import Registry
from jaxgrow.tables import markdown_table
from jaxgrow.typed import Json
from train.analysis.runs import (
    Run,
    Unit,
    frontier_budget,
    half_width,
    mean_cost,
    mean_loss,
    p_value,
    refuse_unlike,
)
from train.plan.phase import spoken_phase

UNITS: tuple[Unit, ...] = ("flops", "run_seconds", "seconds")
ALIKE = 0.03  # two costs are considered equal if their relative difference is below this
DECAYED = 0.05  # a schedule has decayed if it ends below this fraction of the peak
# A frontier is flat if the noise floor corresponds to more than this multiple of a budget.
FLAT = 10.0
Row: TypeAlias = Json  # one config in compare.json
Columns: TypeAlias = dict[str, Callable[[Row], str]]
# A phase without steps is listed if it has more than this part of the FLOPs of its run.
NOTHING = 0.0005
# Unit of a saving against the frontier -> its name in a row.
SAVED: dict[Unit, str] = {"flops": "saved_frontier", "run_seconds": "saved_frontier_seconds"}
# Further parts of the report, by their name in compare.json: each returns its rows and its text.
SECTIONS: Registry[Callable[["Comparison"], tuple[list[Json], str]]] = Registry(
    "report section", "train.extras"
)


def _saved_at_baseline(pairs: Sequence[tuple[Run, Run]]) -> Row:
    """Return the savings of one row at the baseline's final loss, in each unit.

    Args:
      pairs: each run, with the baseline of its seed.
    """
    row: Row = {}
    for unit in UNITS:
        for given, suffix in ((False, ""), (True, "_given")):
            saved: list[float | None] = []
            for r, b in pairs:
                own = r.cost_to(b.loss, unit)
                whole = b.cost_to(b.loss, unit)
                assert whole is not None  # a run ends at its own loss
                spent = None if own is None else own - given * r.source(unit)
                saved.append(None if spent is None else 1 - spent / whole)
            row[f"saved_{unit}{suffix}"] = saved
            row[f"saved_{unit}{suffix}_interval"] = half_width(saved)
    return row


@dataclass(frozen=True)
class Comparison:
    """Runs of several configs, each with the same seeds. ``runs[0]`` is the baseline.

    Raises:
      UserError: the runs are not evaluated in the same way.
    """

    runs: list[list[Run]]
    frontier: list[list[Run]]  # shorter runs of the baseline, one list per budget below 1
    # Metric -> scores of all runs, in the same order as ``runs`` and then ``frontier``.
    scores: Mapping[str, list[list[float]]] = field(default_factory=dict)
    # Config -> seeds that diverged and are therefore not among the runs.
    diverged: Mapping[str, list[int]] = field(default_factory=dict)
    # Sentences about settings of the command line, for the report.
    notes: Sequence[str] = ()

    def __post_init__(self):
        every = itertools.chain(*self.runs, *self.frontier)
        refuse_unlike([(r.name, r.config) for r in every])

    @property
    def scratch(self) -> list[list[Run]]:
        """The complete frontier: the baseline and its shorter runs."""
        return [self.runs[0], *self.frontier]

    def rows(self) -> list[Row]:
        """One row per config, with one saving per seed.

        Each seed is compared with the same seed of the baseline. A saving is one minus a ratio of
        costs:

        - ``saved_frontier``: the cost of the run relative to the budget with which a run from
          scratch with a complete learning rate schedule ends at the same loss. The saving of a seed
          is a lower bound if its loss is below the frontier (``below_frontier``), and None if its
          loss is above the frontier. Without a frontier, there is no list of seeds, only None.
        - ``saved_frontier_seconds``: the same for seconds of training without compilation.
        - ``cheaper_than_frontier``: for each seed, whether the run costs less than every run from
          scratch. Such a run has no known saving if it ends above them.
        - ``saved_{unit}``: the cost from which on the run stays at or below the baseline's final
          loss, relative to the same cost of the baseline. None if the run ends above this loss.
        - ``.._given``: the same if the small model that a growth starts from costs nothing.
        - ``.._interval``: half of the 95 % confidence interval of the mean (Student's t over
          seeds), if it exists.
        - ``.._p``: the p-value of a paired t-test over at least five seeds, if it exists.
        """
        baseline = {r.seed: r for r in self.runs[0]}
        budgets: dict[int, list[Run]] = {}  # the runs from scratch of each seed
        for r in itertools.chain(*self.scratch):
            budgets.setdefault(r.seed, []).append(r)
        rows = []
        for i, runs in enumerate([*self.runs, *self.frontier]):
            pairs = [(r, baseline[r.seed]) for r in runs]
            row: Row = {
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
            rows.append(row | self._saved_frontier(pairs, budgets) | _saved_at_baseline(pairs))
        return rows

    def _saved_frontier(
        self, pairs: Sequence[tuple[Run, Run]], budgets: Mapping[int, Sequence[Run]]
    ) -> Row:
        """Return the savings against the frontier of one row.

        Args:
          pairs: each run, with the baseline of its seed.
          budgets: the runs from scratch of each seed.
        """
        if not self.frontier:
            suffixes = ("", "_interval", "_p", "_given", "_given_interval", "_given_p")
            names = [f"{name}{suffix}" for name in SAVED.values() for suffix in suffixes]
            return dict.fromkeys(["below_frontier", "cheaper_than_frontier", *names])
        row: Row = {}
        row["below_frontier"] = [r.loss < min(b.loss for b in budgets[r.seed]) for r, _ in pairs]
        row["cheaper_than_frontier"] = [
            r.cost("flops") < min(b.cost("flops") for b in budgets[r.seed]) for r, _ in pairs
        ]
        for (unit, name), given in itertools.product(SAVED.items(), (False, True)):
            equal = [frontier_budget(budgets[r.seed], r.loss, unit) for r, _ in pairs]
            saved = []
            for budget, (r, b) in zip(equal, pairs, strict=True):
                own = r.cost(unit) - given * r.source(unit)
                saved.append(budget and 1 - own / min(budget, b.cost(unit)))
            name += "_given" * given
            row[name] = saved
            bounded = math.inf in equal
            row[f"{name}_interval"] = None if bounded else half_width(saved)
            row[f"{name}_p"] = None if bounded else p_value(saved)
        return row

    def noise(self) -> dict[str, float | None]:
        """The noise floor: the standard deviation of the baseline's final loss over seeds.

        ``budget`` is the change of the baseline's budget, as a fraction, that would change the loss
        by this standard deviation. It follows from the slope of the frontier at the baseline: loss
        against log FLOPs between the two largest budgets. It is None if this slope is flat.
        """
        losses = [r.loss for r in self.runs[0]]
        deviation = stdev(losses) if len(losses) > 1 else None
        budget = None
        if deviation is not None and self.frontier:
            largest = sorted(self.scratch, key=lambda runs: mean_cost(runs, "flops"))[-2:]
            # If a shorter run diverged with some seeds, the other seeds alone show the slope.
            both = set.intersection(*({r.seed for r in runs} for runs in largest))
            pairs = [[r for r in runs if r.seed in both] for runs in largest]
            x0, x1 = (math.log(mean_cost(runs, "flops")) for runs in pairs)
            y0, y1 = map(mean_loss, pairs)
            exponent = deviation * (x1 - x0) / (y0 - y1) if y1 < y0 else math.inf
            budget = math.expm1(exponent) if exponent < math.log1p(FLAT) else None
        return {"loss": deviation, "budget": budget}

    def doubts(self) -> list[str]:
        """The caveats of the savings, one sentence each."""
        first = self.runs[0][0]
        seeds = len(self.runs[0])
        noise = self.noise()
        shorter = {runs[0].name for runs in self.frontier}
        doubts = [*self.notes]
        for name, lost in self.diverged.items():
            effect = (
                "the frontier of each of these seeds has one run less"
                if name in shorter
                else "no saving is given for it"
            )
            doubts.append(f"{name} diverged with seed {', '.join(map(str, lost))}, so {effect}.")
        if not self.frontier:
            doubts.append(
                "No frontier: add --frontier, such as 0.75, to compare with shorter runs from scratch."
            )
        if seeds == 1:
            doubts.append("One seed: the noise floor and the confidence interval are unknown.")
        else:
            floor = f"Noise floor: the final loss of {first.name} varies over {seeds} seeds by "
            floor += f"{noise['loss']:.4f} (standard deviation)"
            if noise["budget"] is not None:
                floor += f", which corresponds to {noise['budget']:.1%} of its budget"
            elif self.frontier:
                floor += (
                    "; the frontier is flat at the baseline, so it does not correspond to a budget"
                )
            doubts.append(
                f"{floor}. ± is half of a 95 % interval: Student's t over the seeds, each compared with its own baseline."
            )
        for runs in self.scratch:
            if (rate := max(r.last_rate for r in runs)) > DECAYED:
                doubts.append(
                    f"{runs[0].name} is not decayed: it ends at {rate:.0%} of its peak learning rate. "
                    "This makes savings look larger."
                )
        return doubts

    def results(self) -> list[str]:
        """The result in words: a line for each config except the baseline and its shorter runs."""
        base, *rows = self.rows()
        count = len(self.runs) - 1
        return [_result_words(row, base, rows[count:]) for row in rows[:count]]

    def report(self) -> str:
        """The comparison as Markdown: configs, scores, phases, caveats, and the result in words."""
        parts = [
            self._main(),
            *self._scores(),
            self._phases(),
            *(text for _, text in self.sections.values() if text),
            *map(wrap_text, [self._about(), *self.doubts()]),
        ]
        return "\n\n".join([*parts, *map(wrap_text, self.results())]) + "\n"

    def _main(self) -> str:
        rows = self.rows()
        columns: Columns = {
            "run": lambda r: r["run"],
            "FLOPs": lambda r: f"{r['flops']:.3f}",
            "loss": _loss_cell,
        }
        if self.runs[0][0].model.predicts == "classes":
            columns["accuracy"] = lambda r: f"{mean(r['accuracy']):.1%}"
        if self.frontier:
            columns["FLOPs saved vs. frontier"] = _frontier_cell
            columns["seconds saved"] = partial(_saved_text, name=SAVED["run_seconds"])
        listed = {row["run"] for row in rows}
        lost = [name for name in self.diverged if name not in listed]
        return _row_table(
            columns,
            [*rows, *({"run": name, "loss": [], "diverged": self.diverged[name]} for name in lost)],
        )

    @cached_property
    def sections(self) -> dict[str, tuple[list[Json], str]]:
        """The rows and the text of each further part of the report."""
        return {name: section(self) for name, section in SECTIONS.items()}

    def _about(self) -> str:
        first = self.runs[0][0]
        return (
            f"FLOPs and FLOP/s are relative to {first.name}: {first.cost('flops'):.3g} FLOPs, "
            f"{mean_cost(self.runs[0], 'run_seconds'):.0f} s of training. Seconds are without compilation and validation. "
            f"Values are means over {len(self.runs[0])} seed{'s' * (len(self.runs[0]) > 1)}; compare.json has each seed."
        )

    def _scores(self) -> list[str]:
        if not self.scores:
            return []
        columns: Columns = {"run": lambda r: r["run"], "loss": _loss_cell}
        columns |= {
            name: lambda r, name=name: f"{mean(r['scores'][name]):.4f}" for name in self.scores
        }
        return [_row_table(columns, self.rows())]

    def _phases(self) -> str:
        body: list[list[str]] = []
        usual = self.scratch[0][0].speed(-1)
        for runs in self.runs:
            phases = runs[0].result["phases"]
            for i, p in enumerate(phases):
                share = p["flops"] / runs[0].cost("flops")
                if not p["steps"] and share < NOTHING:
                    continue
                name = spoken_phase(p["phase"], [other["phase"] for other in phases])
                counts = [f"{p['parameters']:,}", f"{p['steps']:,}"]
                layers = f"{round(p['layers'] / p['steps'], 2):g}" if p["steps"] else ""
                times = _milliseconds(runs, i)
                speeds = [speed / usual for r in runs if usual and (speed := r.speed(i))]
                speed = f"{mean(speeds):.2f}" if speeds else ""
                body.append([runs[0].name, name, *counts, layers, times, f"{share:.1%}", speed])
        head = ["run", "phase", "parameters", "steps", "layers", "ms per step", "FLOPs", "FLOP/s"]
        return markdown_table(head, body)


def _row_table(columns: Columns, rows: Sequence[Row]) -> str:
    body = [[_saving_cell(name, cell, row) for name, cell in columns.items()] for row in rows]
    return markdown_table(list(columns), body)


def _saving_cell(name: str, cell: Callable[[Row], str], row: Row) -> str:
    """One cell of the table.

    If some seeds of a config diverged, the saving of the other seeds would be biased, so it is not
    shown.
    """
    if row["diverged"] and "saved" in name:
        return _some_seeds(
            "diverged", len(row["diverged"]), len(row["diverged"]) + len(row["loss"])
        )
    return cell(row) if row["loss"] or name in ("run", "loss") else ""


def _some_seeds(what: str, count: int, every: int) -> str:
    return what if count == every else f"{what}: {count} of {every} seeds"


def _loss_cell(row: Row) -> str:
    """The mean over the seeds that finished, then the seeds that diverged."""
    seeds = ", ".join(map(str, row["diverged"]))
    parts = [f"{mean(row['loss']):.4f}"] if row["loss"] else []
    return ", ".join([*parts, f"diverged: seed {seeds}"] if seeds else parts)


def _result_words(row: Row, base: Row, shorter: Sequence[Row]) -> str:
    """The result of one config in words: its saving, cost and loss.

    If a run from scratch has the same cost, its loss follows.
    """
    text = (
        f"Its loss is {mean(row['loss']):.4f} with {row['flops']:.0%} of the FLOPs of {base['run']}, whose loss is "
        f"{mean(base['loss']):.4f}"
    )
    alike = [r for r in shorter if abs(r["flops"] / row["flops"] - 1) < ALIKE]
    text += "".join(
        f"; {r['run']}, from scratch with the same cost, has a loss of {mean(r['loss']):.4f}"
        for r in alike[:1]
    )
    return f"Result: {row['run']} {_saving_words(row)} {text}."


def _saving_words(row: Row) -> str:
    if row["diverged"]:
        return "diverged with some seeds, so no saving is given."
    saved = row["saved_frontier"]
    if saved is None:
        return "has no known saving, because there is no shorter run from scratch (--frontier)."
    if None in saved:
        above, cheaper = _without_saving(row)
        if above == len(saved):
            return "saved nothing: it ended above every run from scratch."
        count = above or cheaper
        some = f" with {count} of {len(saved)} seeds" * (count < len(saved))
        if above:
            return f"has no mean saving, because{some} it ended above every run from scratch and saved nothing."
        return (
            f"has no known saving, because{some} it costs less than the shortest run from scratch and ends above it; "
            f"add --frontier {row['flops']:.2g}."
        )
    value = round(mean(saved), 3)  # the rounded value decides between "more" and "fewer"
    half = row["saved_frontier_interval"]
    interval = "" if half is None else f" ± {100 * half:.1f}"
    seeds = "one seed" if len(saved) == 1 else f"{len(saved)} seeds"
    if row["saved_frontier_p"] is not None:
        seeds += f", p = {row['saved_frontier_p']:.2g}"
    bound = ("at most " if value < 0 else "more than ") * any(row["below_frontier"])
    amount = f"{bound}{100 * abs(value):.1f} %{interval}"
    return f"reached its loss with {amount} {'more' if value < 0 else 'fewer'} FLOPs than a run from scratch ({seeds})."


def _without_saving(row: Row) -> tuple[int, int]:
    """The numbers of seeds without a saving: those above the frontier, and those cheaper than it."""
    seeds = zip(row["saved_frontier"], row["cheaper_than_frontier"], strict=True)
    cheaper = [cheap for saved, cheap in seeds if saved is None]
    return cheaper.count(False), cheaper.count(True)


def wrap_text(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def _milliseconds(runs: Sequence[Run], i: int) -> str:
    # Runs that stop early may have fewer phases.
    ran = [r for r in runs if i < len(r.result["phases"])]
    times = [t for r in ran if (t := r.step_seconds(i)) is not None]
    return f"{1000 * mean(times):.1f}" if times else ""


def _frontier_cell(row: Row) -> str:
    """The saving: with its interval for three or more seeds, with each value for two seeds."""
    values = row["saved_frontier"]
    if None in values:
        above, cheaper = _without_saving(row)
        why = "above the frontier" if above else "cheaper than the frontier"
        return _some_seeds(why, above or cheaper, len(values))
    return _saved_text(row, SAVED["flops"])


def _saved_text(row: Row, name: str) -> str:
    """The saving of one unit; empty if it is unknown for a seed."""
    values = row[name]
    if None in values:
        return ""
    text = f"{100 * mean(values):.1f} %"
    if len(values) == 2:
        text += f" [{', '.join(f'{100 * v:.1f}' for v in values)}]"
    elif row[f"{name}_interval"] is not None:
        text += f" ± {100 * row[f'{name}_interval']:.1f}"
    # The frontier gives only a lower bound for a run below it.
    return "> " * any(row["below_frontier"]) + text.replace("-0.0", "0.0")

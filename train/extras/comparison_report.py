"""The comparison of runs as Markdown: configs, scores, phases, caveats, and the result in words."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import TypeAlias

from jaxgrow.tables import markdown_table
from train.analysis.comparing import REPORTS
from train.analysis.runs import Run, mean_cost
from train.analysis.savings import SAVED, Comparison, Row
from train.common.files import write_record, write_text
from train.common.output import say
from train.extras.report_sections import SECTIONS, flops_rate, step_seconds, wrap_text
from train.extras.run_plots import draw_comparison
from train.plan.phase import spoken_phase

ALIKE = 0.03  # two costs are considered equal if their relative difference is below this
DECAYED = 0.05  # a schedule has decayed if it ends below this fraction of the peak
Columns: TypeAlias = dict[str, Callable[[Row], str]]
# A phase without steps is listed if it has more than this part of the FLOPs of its run.
NOTHING = 0.0005


def write_report(comparison: Comparison, folder: Path) -> None:
    """Print the report, and write the report, all numbers and the plots to a folder."""
    report = markdown_report(comparison)
    write_text(folder / "compare.md", report)
    summary = {
        "rows": comparison.rows(),
        "noise": comparison.noise(),
        "doubts": comparison_doubts(comparison),
        "diverged": comparison.diverged,
    } | {name: section(comparison)[0] for name, section in SECTIONS.items()}
    write_record(folder / "compare.json", summary)
    figures = draw_comparison(comparison, folder)
    say(
        f"\n{report}\nall numbers: {folder / 'compare.json'}\nplots: {', '.join(map(str, figures))}"
    )


def comparison_doubts(comparison: Comparison) -> list[str]:
    """The caveats of the savings, one sentence each."""
    first = comparison.runs[0][0]
    seeds = len(comparison.runs[0])
    noise = comparison.noise()
    shorter = {runs[0].name for runs in comparison.frontier}
    doubts = [*comparison.notes]
    doubts += [
        f"{runs[0].name} starts from a model of unknown cost, which is not counted. This makes savings look larger."
        for runs in comparison.runs
        if any(p.get("kind") == "import" and not p["flops"] for p in runs[0].result["phases"])
    ]
    for name, lost in comparison.diverged.items():
        effect = (
            "the frontier of each of these seeds has one run less"
            if name in shorter
            else "no saving is given for it"
        )
        doubts.append(f"{name} diverged with seed {', '.join(map(str, lost))}, so {effect}.")
    if not comparison.frontier:
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
        elif comparison.frontier:
            floor += "; the frontier is flat at the baseline, so it does not correspond to a budget"
        doubts.append(
            f"{floor}. ± is half of a 95 % interval: Student's t over the seeds, each compared with its own baseline."
        )
    for runs in comparison.scratch:
        if (rate := max(r.last_rate for r in runs)) > DECAYED:
            doubts.append(
                f"{runs[0].name} is not decayed: it ends at {rate:.0%} of its peak learning rate. "
                "This makes savings look larger."
            )
    return doubts


def result_lines(comparison: Comparison) -> list[str]:
    """The result in words: a line for each config except the baseline and its shorter runs."""
    base, *rows = comparison.rows()
    count = len(comparison.runs) - 1
    return [_result_words(row, base, rows[count:]) for row in rows[:count]]


def markdown_report(comparison: Comparison) -> str:
    """The comparison as Markdown: configs, scores, phases, caveats, and the result in words."""
    parts = [
        _main_table(comparison),
        *_score_tables(comparison),
        _phase_table(comparison),
        *(text for section in SECTIONS.values() if (text := section(comparison)[1])),
        *map(wrap_text, [_about_costs(comparison), *comparison_doubts(comparison)]),
    ]
    return "\n\n".join([*parts, *map(wrap_text, result_lines(comparison))]) + "\n"


def _main_table(comparison: Comparison) -> str:
    rows = comparison.rows()
    columns: Columns = {
        "run": lambda r: r["run"],
        "FLOPs": lambda r: f"{r['flops']:.3f}",
        "loss": _loss_cell,
    }
    if comparison.runs[0][0].model.predicts == "classes":
        columns["accuracy"] = lambda r: f"{mean(r['accuracy']):.1%}"
    if comparison.frontier:
        columns["FLOPs saved vs. frontier"] = _frontier_cell
        columns["seconds saved"] = partial(_saved_text, name=SAVED["run_seconds"])
    listed = {row["run"] for row in rows}
    lost = [name for name in comparison.diverged if name not in listed]
    return _row_table(
        columns,
        [
            *rows,
            *({"run": name, "loss": [], "diverged": comparison.diverged[name]} for name in lost),
        ],
    )


def _about_costs(comparison: Comparison) -> str:
    baseline = comparison.runs[0]
    first = baseline[0]
    return (
        f"FLOPs and FLOP/s are relative to {first.name}: {first.cost('flops'):.3g} FLOPs, "
        f"{mean_cost(baseline, 'run_seconds'):.0f} s of training. Seconds are without compilation and validation. "
        f"Values are means over {len(baseline)} seed{'s' * (len(baseline) > 1)}; compare.json has each seed."
    )


def _score_tables(comparison: Comparison) -> list[str]:
    if not comparison.scores:
        return []
    columns: Columns = {"run": lambda r: r["run"], "loss": _loss_cell}
    columns |= {
        name: lambda r, name=name: f"{mean(r['scores'][name]):.4f}" for name in comparison.scores
    }
    return [_row_table(columns, comparison.rows())]


def _phase_table(comparison: Comparison) -> str:
    body: list[list[str]] = []
    usual = flops_rate(comparison.scratch[0][0], -1)
    for runs in comparison.runs:
        phases = runs[0].result["phases"]
        for i, p in enumerate(phases):
            share = p["flops"] / runs[0].cost("flops")
            if not p["steps"] and share < NOTHING:
                continue
            name = spoken_phase(p["phase"], [other["phase"] for other in phases])
            counts = [f"{p['parameters']:,}", f"{p['steps']:,}"]
            layers = f"{round(p['layers'] / p['steps'], 2):g}" if p["steps"] else ""
            times = _milliseconds(runs, i)
            speeds = [speed / usual for r in runs if usual and (speed := flops_rate(r, i))]
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
        # The new run costs less than this one, also after rounding.
        return (
            f"has no known saving, because{some} it costs less than the shortest run from scratch and ends above it; "
            f"add --frontier {0.9 * row['flops']:.2g}."
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


def _milliseconds(runs: Sequence[Run], i: int) -> str:
    # Runs that stop early may have fewer phases.
    ran = [r for r in runs if i < len(r.result["phases"])]
    times = [t for r in ran if (t := step_seconds(r, i)) is not None]
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


REPORTS.add("markdown", write_report)

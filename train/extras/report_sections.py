"""Further tables of `train.compare` (each growth, the averages of weights, the seconds), and times of steps."""

import textwrap
from collections.abc import Callable, Sequence
from statistics import mean

import numpy as np

from jaxgrow.tables import markdown_table
from jaxgrow.typed import Json
from train.analysis.runs import Run, mean_cost, spent_cost
from train.analysis.savings import Comparison
from train.plan.phase import spoken_phase

GROWTHS = (
    "Growths: validation loss before and right after; tokens until the loss is the one of the baseline with equal tokens; "
    "time of growing, of resharding (moving arrays whose new sizes have other shardings), and of compiling the growth and "
    "the step of the grown model."
)
TIMES = (
    "Seconds of training. Compilation, validation and checkpoints are not part of them. Compilation includes the steps "
    "that earlier runs of this command compiled."
)
AVERAGES = (
    "Final validation losses of the last weights and of the average of the weights (optim.ema)."
)
# Differences of times below this part of the seconds of a run are not mentioned.
SMALL = 0.01


def tokens_to_baseline(run: Run, growth: Json, baseline: Run) -> int | None:
    """Return the tokens from a growth until a run is as good as the baseline with equal tokens.

    The losses of both runs are interpolated linearly between their validations. After its last
    validation, the baseline keeps its final loss.

    Returns:
      0 if the grown model is as good at once; None if it never is.
    """
    tokens, losses = ([line[key] for line in baseline.curve] for key in ("tokens", "val_loss"))
    begin = growth["tokens"]
    later = [(line["tokens"], line["val_loss"]) for line in run.curve if line["tokens"] > begin]
    points = [(begin, growth["loss_after"]), *later]
    behind = [loss - float(np.interp(at, tokens, losses)) for at, loss in points]
    reached = next((i for i, gap in enumerate(behind) if gap <= 0), None)
    if not reached:
        return reached
    (t0, _), (t1, _) = points[reached - 1 : reached + 1]
    y0, y1 = behind[reached - 1 : reached + 1]
    return round(t0 + (t1 - t0) * y0 / (y0 - y1)) - begin


def growth_section(comparison: Comparison) -> tuple[list[Json], str]:
    """Return a row for each growth of each config, and the table of their means over seeds."""
    baseline = {run.seed: run for run in comparison.runs[0]}
    rows: list[Json] = []
    for runs in comparison.runs:
        every = [run.result.get("growths", []) for run in runs]
        for growths in zip(*every, strict=False):  # runs that stop early may have fewer
            row: Json = {"run": runs[0].name, "growth": growths[0]["phase"]}
            row |= {key: [g[key] for g in growths] for key in growths[0] if key != "phase"}
            row["tokens_to_baseline"] = [
                tokens_to_baseline(run, growth, baseline[run.seed])
                for run, growth in zip(runs, growths, strict=True)
            ]
            rows.append(row)
    if not rows:
        return [], ""
    times = ["growing", "resharding", "recompiling"]
    head = ["run", "growth", "loss before", "after", "caught up after", *times]
    body = [
        [row["run"], row["growth"]]
        + [f"{mean(row[key]):.4f}" for key in ("loss_before", "loss_after")]
        + [_reached(row["tokens_to_baseline"])]
        + [f"{mean(row.get(f'{name}_seconds', [0])):.1f} s" for name in times]
        for row in rows
    ]
    return rows, f"{markdown_table(head, body)}\n\n{wrap_text(GROWTHS)}"


def _reached(tokens: Sequence[int | None]) -> str:
    """The mean of the tokens; if some seeds never caught up, their number."""
    known = [count for count in tokens if count is not None]
    some = f"never: {len(tokens) - len(known)} of {len(tokens)} seeds" if known else "never"
    return f"{mean(known):,.0f} tokens" if len(known) == len(tokens) else some


def average_section(comparison: Comparison) -> tuple[list[Json], str]:
    """Return the final losses of each config that averages its weights, and their table."""
    rows: list[Json] = []
    for runs in [*comparison.runs, *comparison.frontier]:
        results = [run.result for run in runs]
        if all("val_loss_ema" in result for result in results):
            losses = {key: [r[key] for r in results] for key in ("val_loss", "val_loss_ema")}
            rows.append({"run": runs[0].name} | losses)
    if not rows:
        return [], ""
    body = [
        [row["run"], *(mean_and_each(row[key], "{:.4f}") for key in ("val_loss", "val_loss_ema"))]
        for row in rows
    ]
    table = markdown_table(["run", "last weights", "average"], body)
    return rows, f"{table}\n\n{wrap_text(AVERAGES)}"


def time_section(comparison: Comparison) -> tuple[list[Json], str]:
    """Return the seconds of each config, and their table with the reasons of slower FLOPs."""
    rows = [_mean_seconds(runs) for runs in [*comparison.runs, *comparison.frontier]]
    names = ["seconds", "compiling", "validation", "checkpoints"]
    body = [[row["run"], *(f"{row[name]:.1f}" for name in names)] for row in rows]
    others = [*comparison.runs[1:], *comparison.frontier]
    reasons = [text for runs in others if (text := _reason(runs, comparison.runs[0]))]
    texts = [markdown_table(["run", *names], body), *map(wrap_text, [TIMES, *reasons])]
    return rows, "\n\n".join(texts)


def _mean_seconds(runs: Sequence[Run]) -> Json:
    """The means over the seeds of one config."""
    shared = [sum(p.get("shared_compile_seconds", 0.0) for p in r.result["phases"]) for r in runs]
    other = [run.result.get("uncounted", {}) for run in runs]
    return {
        "run": runs[0].name,
        "seconds": mean_cost(runs, "run_seconds"),
        "compiling": mean(r.result["compile_seconds"] for r in runs) + mean(shared),
        **{name: mean(o.get(name, 0.0) for o in other) for name in ("validation", "checkpoints")},
    }


def _reason(runs: Sequence[Run], baseline: Sequence[Run]) -> str | None:
    """A sentence on the phases that take other times than their FLOPs at the baseline's speed."""
    speed = mean_cost(baseline, "flops") / mean_cost(baseline, "run_seconds")
    whole = mean_cost(runs, "run_seconds")
    labels = [phase["phase"] for phase in runs[0].result["phases"]]
    found: dict[str, float] = {}
    for phases in (run.result["phases"] for run in runs):
        for p in phases:
            late = spent_cost(p, "run_seconds") - p["flops"] / speed
            name = spoken_phase(p["phase"], labels)
            found[name] = found.get(name, 0.0) + late / len(runs)
    parts = [f"{name} {late:+.1f} s" for name, late in found.items() if abs(late) > SMALL * whole]
    text = (
        f"{runs[0].name} took {whole:.1f} s. At the speed of {baseline[0].name}, its FLOPs take "
        f"{mean_cost(runs, 'flops') / speed:.1f} s. The difference: {', '.join(parts)}."
    )
    return text if parts else None


def step_seconds(run: Run, i: int) -> float | None:
    """The median step time of phase ``i`` of a run, in seconds, without compilation and validation.

    It is measured between lines of the log; compilation falls into the interval before the
    first line. Each interval counts as often as it has steps, because the last one may be much
    shorter than the others. None if the phase has fewer than two lines.
    """
    phases = run.result["phases"]
    before = sum(p["tokens"] for p in phases[:i])
    after = before + phases[i]["tokens"]
    lines = [line for line in run.log if "loss" in line and before < line["tokens"] <= after]
    if len(lines) < 2:
        return None
    steps = np.diff([line["step"] for line in lines])
    seconds = np.diff([line["seconds"] for line in lines])
    return float(np.quantile(np.repeat(seconds / steps, steps), 0.5, method="lower"))


def flops_rate(run: Run, i: int) -> float | None:
    """The FLOPs per second of the steps of phase ``i`` of a run; None if their time is unknown."""
    phase = run.result["phases"][i]
    seconds = step_seconds(run, i)
    return phase["flops"] / phase["steps"] / seconds if phase["steps"] and seconds else None


def mean_and_each(values: Sequence[float], form: str) -> str:
    """The mean; of several values, followed by each value in brackets."""
    text = form.format(mean(values))
    return text if len(values) == 1 else f"{text} [{', '.join(form.format(v) for v in values)}]"


def wrap_text(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


# Further parts of the report, by their name in compare.json: each returns its rows and its text.
SECTIONS: dict[str, Callable[[Comparison], tuple[list[Json], str]]] = {
    "growths": growth_section,
    "averages": average_section,
    "times": time_section,
}

"""Plots of the cost and the results of runs."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import (
    LogFormatterSciNotation,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    PercentFormatter,
)

from jaxgrow.tables import short_count
from jaxgrow.typed import Json
from train.analysis.runs import (
    Run,
    Unit,
    half_width,
    mean_cost,
    mean_loss,
    phase_segments,
    spent_cost,
)
from train.analysis.savings import Comparison
from train.common.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The colours of Okabe and Ito, which colour-blind readers can distinguish, without yellow, which is
# hardly visible on white.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# Colours on which black text is readable.
LIGHT = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442")
# The width of a page in inches, dots per inch, and the smallest text in points.
WIDTH = 8.5
DPI = 200
SMALL = 8
GREY = "#666666"
# The minimum number of seeds for a band. For two seeds, the 95 % interval (Student's t) is about 13
# times as wide as the difference between them.
FEW = 3
COUNTED: dict[Unit, str] = {
    "flops": "FLOPs, all phases counted",
    "run_seconds": "seconds, all phases counted, without compilation and validation",
    "seconds": "seconds, all phases counted, with compilation, without validation",
}
NARROW = 0.04  # bars of a timeline that are narrower than this part of it have no label
BROAD: Json = {"linewidth": 4.0, "alpha": 0.35}  # the line of the baseline


def draw_comparison(comparison: Comparison, folder: Path) -> list[Path]:
    """Write the plots of a comparison to a folder, and return their paths."""
    figures = [folder / "compare.png", folder / "compare_seconds.png"]
    for path, unit in zip(figures, ("flops", "run_seconds"), strict=True):
        plot_losses(comparison, path, unit)
    if plot_keep(comparison, folder / "compare_keep.png"):
        figures.append(folder / "compare_keep.png")
    return figures


def plot_losses(comparison: Comparison, path: Path, unit: Unit = "flops") -> None:
    """Plot validation loss against cost: the mean over seeds, and a dot at the end of each seed.

    From three seeds on, bands show the 95 % intervals. Small models are dotted. The line of the
    baseline is broad, so that an identical run remains visible on top of it. An arrow points from
    the frontier to a run that ends at the same loss with fewer FLOPs.
    """
    figure, axes = wide_axes()
    looks = [line_style(i) | ({} if i else BROAD) for i in range(len(comparison.runs))]
    small = any(
        [
            _plot_curves(axes, runs, unit, look)
            for runs, look in zip(comparison.runs, looks, strict=True)
        ]
    )
    level = mean_loss(comparison.runs[0])
    axes.axhline(
        level, color=GREY, linestyle="-.", linewidth=0.8, label="final loss of the baseline"
    )
    if comparison.frontier:
        _plot_frontier(axes, comparison, unit)
    if unit == "flops":
        _arrows(axes, comparison)
    _set_limits(axes, comparison, unit)
    first = comparison.runs[0]
    seeds = f"{len(first)} seed{'s' * (len(first) > 1)}"
    of = f"{short_count(first[0].parameters)} parameters, {seeds}"
    axes.set_title(f"How low is the loss at each cost? ({of})", loc="left", fontsize=11, pad=16)
    axes.set_xlabel(COUNTED[unit])
    shared = _shared_legend(small, any(len(runs) >= FEW for runs in comparison.runs))
    finish_axes(figure, axes, comparison.runs[0][0], path, shared)


def _arrows(axes: "Axes", comparison: Comparison) -> None:
    """Draw the saving of each run as an arrow at its loss, from the frontier to its cost."""
    for i, row in enumerate(comparison.rows()[1 : len(comparison.runs)], 1):
        saved: list[float | None] = row["saved_frontier"] or [None]
        known = [part for part in saved if part is not None]
        if len(known) < len(saved) or (part := mean(known)) <= 0:
            continue
        cost = mean_cost(comparison.runs[i], "flops")
        loss = mean_loss(comparison.runs[i])
        colour = line_style(i)["color"]
        arrow = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.5, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (cost, loss), (cost / (1 - part), loss), arrowprops=arrow, zorder=4)
        more = "more than " if any(row["below_frontier"]) else ""
        axes.annotate(
            f"{more}{part * 100:.1f} % fewer FLOPs",
            (cost / (1 - part), loss),
            (0, -7),
            textcoords="offset points",
            ha="right",
            va="top",
            color=colour,
            fontweight="bold",
        )


def _plot_curves(axes: "Axes", runs: Sequence[Run], unit: Unit, look: Json) -> bool:
    """Plot the runs of one config, and return whether they also train a smaller model."""
    parts = mean_curves(runs, unit)
    small = False
    for curve in parts:
        own = curve.phase == parts[-1].phase  # the full model, also before it was coalesced
        small = small or not own
        style: Json = look if own else look | {"linestyle": ":"}
        axes.plot(curve.cost, curve.loss, **style)
        if len(runs) >= FEW:
            low = curve.loss - curve.half
            high = curve.loss + curve.half
            axes.fill_between(curve.cost, low, high, color=look["color"], alpha=0.15, linewidth=0)
    axes.lines[-1].set_label(runs[0].name)
    ends = [[r.cost(unit) for r in runs], [r.loss for r in runs]]
    axes.plot(*ends, "o", color=look["color"], alpha=0.6, markersize=4, markeredgewidth=0)
    return small


def _set_limits(axes: "Axes", comparison: Comparison, unit: Unit) -> None:
    """Set the limits of both axes, without the losses of the first steps."""
    runs = list(itertools.chain(*comparison.runs))
    shorter = list(itertools.chain(*comparison.frontier))
    finals = [r.loss for r in [*runs, *shorter]]
    points = list(itertools.chain(*(r.curve for r in runs)))
    top = min(max(p["val_loss"] for p in points), max(min(finals) * 1.3, max(finals))) + 0.05
    axes.set_ylim(min(finals) - 0.05, top)
    axes.set_xscale("log")
    # By default, every minor tick of a short axis has a label, and the labels overlap.
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    # By default, some of these ticks have no label, depending on the range of the axis.
    axes.xaxis.set_major_formatter(LogFormatterSciNotation(minor_thresholds=(math.inf, math.inf)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    seen = [
        at
        for p in points
        if p["val_loss"] < top and p["flops"] > 0 and (at := spent_cost(p, unit)) > 0
    ]
    axes.set_xlim(left=0.9 * min(seen + [r.cost(unit) for r in shorter]))


def _shared_legend(small: bool, bands: bool) -> list[Artist]:
    """Legend entries for the styles that all runs share."""
    found: list[Artist] = (
        [Line2D([], [], color=GREY, linestyle=":", label="small model of the run")] if small else []
    )
    found.append(
        Line2D([], [], color=GREY, marker="o", linestyle="", markersize=4, label="end of each seed")
    )
    if bands:
        found.append(Patch(color=GREY, alpha=0.15, linewidth=0, label="95 % interval of the mean"))
    return found


def _plot_frontier(axes: "Axes", comparison: Comparison, unit: Unit) -> None:
    scratch = sorted(comparison.scratch, key=lambda runs: mean_cost(runs, "flops"))
    costs = [mean_cost(runs, unit) for runs in scratch]
    ends = [mean_loss(runs) for runs in scratch]
    half = [_error_bar(runs) for runs in scratch]
    for runs in comparison.frontier:
        for curve in mean_curves(runs, unit):
            axes.plot(curve.cost, curve.loss, color=GREY, linewidth=0.8)
    axes.lines[-1].set_label("shorter runs from scratch")
    axes.plot(
        costs,
        ends,
        "x--",
        color=GREY,
        zorder=3,
        label="frontier: runs from scratch, each fully decayed",
    )
    axes.errorbar(costs, ends, half, fmt="none", color=GREY, zorder=3)
    where: Json = {"ha": "center", "va": "bottom", "fontsize": SMALL, "color": GREY}
    whole = mean_cost(comparison.runs[0], "flops")
    for x, runs in zip(costs, scratch, strict=True):
        axes.axvline(x, color=GREY, linewidth=0.6, alpha=0.5)
        part = f"{100 * mean_cost(runs, 'flops') / whole:.0f} %"
        text = f"{part} of the budget" if runs is scratch[-1] else part
        axes.text(x, 1.01, text, transform=axes.get_xaxis_transform(), **where)


def _error_bar(runs: Sequence[Run]) -> float:
    """Half of the 95 % interval of the mean loss; 0 for fewer than `FEW` seeds."""
    return (len(runs) >= FEW and half_width([r.loss for r in runs])) or 0.0


def dropping_steps(run: Run) -> list[list[Json]]:
    """The log lines of the steps that dropped layers, split where the phase changes."""
    return phase_segments([line for line in run.log if "keep" in line])


def plot_keep(comparison: Comparison, path: Path) -> bool:
    """Plot keep probabilities over depth and time, for each stage that drops layers.

    Returns False, without a plot, if no stage does.
    """
    firsts = (runs[0] for runs in comparison.runs)
    panels = [
        (f"{run.name}, {lines[0]['phase']}", lines)
        for run in firsts
        for lines in dropping_steps(run)
    ]
    if not panels:
        return False
    figure = Figure((WIDTH, 1 + 2 * len(panels)), dpi=DPI, layout="constrained")
    for axes, (title, lines) in zip(
        figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True
    ):
        depth = len(lines[0]["keep"])
        steps = [line["step"] for line in lines]
        # each log line describes the steps before it
        edges = [2 * steps[0] - steps[1] if len(steps) > 1 else steps[0] - 1, *steps]
        image = axes.pcolormesh(
            edges,
            np.arange(depth + 1) + 0.5,
            np.transpose([x["keep"] for x in lines]),
            vmin=0,
            vmax=1,
        )
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.set_ylabel("layer")
        figure.colorbar(image, ax=axes, label="keep probability")
    save_figure(figure, path)
    return True


def plan_timeline(rows: Sequence[tuple[str, Sequence[Json]]]) -> Figure:
    """Plot the phases of plans: a row per plan, a bar per phase.

    The width of a bar is the FLOPs of the phase, and its height is the size of the model. The
    colours name the models. Phases with almost no FLOPs are not visible.

    Args:
      rows: names, and phases as in a run's ``result.json``.
    """
    totals = [sum(p["flops"] for p in phases) for _, phases in rows]
    end = max(totals) / totals[0]
    every = [p for _, phases in rows for p in phases if p["flops"]]
    largest = max(p["parameters"] for p in every)
    models = {p["phase"].removeprefix("train "): p["parameters"] for p in every}
    colours = dict(zip(models, itertools.cycle(LIGHT), strict=False))
    figure = Figure((WIDTH, 1.0 + 1.15 * len(rows)), dpi=DPI, layout="constrained")
    panels = figure.subplots(len(rows), sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (name, phases), total in zip(panels, rows, totals, strict=True):
        start = 0.0
        for p in (p for p in phases if p["flops"]):
            width = p["flops"] / totals[0]
            colour = colours[p["phase"].removeprefix("train ")]
            height = p["parameters"] / largest
            axes.bar(start, height, width, align="edge", color=colour, edgecolor="white")
            if width > NARROW * end:
                axes.text(start + width / 2, 0.04, f"{width:.0%}", fontsize=SMALL, ha="center")
            start += width
        axes.set_title(f"{name}: {total / totals[0]:.0%}", fontsize=SMALL + 1, loc="left")
        axes.set(xlim=(0, end), ylim=(0, 1.1), yticks=[])
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(labelsize=SMALL)
    panels[-1].xaxis.set_major_formatter(PercentFormatter(1))
    panels[-1].set_xlabel(f"FLOPs relative to the first plan ({totals[0]:.3g})", fontsize=SMALL + 1)
    labels = {model: f"{model}, {short_count(size)} parameters" for model, size in models.items()}
    handles = [Patch(color=colours[model], label=label) for model, label in labels.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=SMALL)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Save a figure.

    Raises:
      UserError: the suffix of the path is not a supported format.
    """
    try:
        figure.savefig(path, format=path.suffix[1:] or "png")
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


def wide_axes() -> tuple[Figure, "Axes"]:
    figure = Figure((WIDTH, 5.0), dpi=DPI, layout="constrained")
    return figure, figure.subplots()


def line_style(i: int) -> Json:
    """The line style of config ``i``, which differs from the other configs and the frontier."""
    return {
        "color": COLOURS[i % len(COLOURS)],
        "linestyle": ("-", "--", "-.")[i // len(COLOURS) % 3],
    }


def finish_axes(
    figure: Figure, axes: "Axes", run: Run, path: Path, shared: Sequence[Artist]
) -> None:
    by_token = run.model.predicts in ("tokens", "token_classes")
    per = "token" if by_token else run.model.modality.removesuffix("s")
    axes.set_ylabel(f"validation loss (nats per {per})")
    axes.grid(alpha=0.3)
    handles = [*axes.get_legend_handles_labels()[0], *shared]
    # Below the axes, so that many entries cover no lines and leave the width to them.
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=SMALL)
    save_figure(figure, path)


class Curve(NamedTuple):
    """One segment of several runs of a config: means over seeds at their common validations."""

    phase: str
    cost: np.ndarray  # mean
    loss: np.ndarray  # mean
    half: np.ndarray  # half of the 95 % interval of the mean loss; 0 for one seed


def mean_curves(runs: Sequence[Run], unit: Unit) -> list[Curve]:
    """Average the `Run.segments` of runs that differ only by their seeds."""
    found = []
    for parts in zip(*(run.segments for run in runs), strict=True):
        at = [{line["step"]: line for line in part} for part in parts]
        lines = [[seed[step] for seed in at] for step in at[0] if all(step in s for s in at)]
        losses = [[line["val_loss"] for line in seeds] for seeds in lines]
        cost = np.array([mean(spent_cost(line, unit) for line in seeds) for seeds in lines])
        half = np.array([half_width(values) or 0.0 for values in losses])
        found.append(Curve(parts[0][0]["phase"], cost, np.mean(losses, 1), half))
    return found

"""Plots of the extra commands."""

import itertools
from pathlib import Path

import numpy as np
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from jaxgrow.extras import plot
from train.analysis.runs import Run
from train.extras.aot.compilation import Program
from train.extras.run_plots import (
    DPI,
    GREY,
    LIGHT,
    SMALL,
    WIDTH,
    finish_axes,
    line_style,
    save_figure,
    wide_axes,
)
from train.plan.learning import Maps

_OTHER = 0.4  # the opacity of all seeds except the first


def plot_race(curves: dict[str, list[tuple[Run, list[tuple[float, float]]]]], path: Path) -> None:
    """Plot validation loss against the FLOPs after the small model, for each operator and seed.

    The first point is right after growing, with almost no FLOPs. The axis is therefore linear up to
    the second point, then logarithmic.
    """
    figure, axes = wide_axes()
    for i, (by, seeds) in enumerate(curves.items()):
        for j, (_, points) in enumerate(seeds):
            axes.plot(
                *np.transpose(points),
                label=None if j else by,
                alpha=_OTHER if j else 1,
                **line_style(i),
            )
    several = any(len(seeds) > 1 for seeds in curves.values())
    shared: list[Artist] = (
        [Line2D([], [], color=GREY, alpha=_OTHER, label="other seeds")] if several else []
    )
    every = list(itertools.chain(*curves.values()))
    axes.set_xscale("symlog", linthresh=min(points[1][0] for _, points in every))
    axes.set_xlim(left=0)
    axes.set_xlabel("FLOPs after the small model")
    finish_axes(figure, axes, every[0][0], path, shared)


def plot_maps(maps: Maps, path: Path) -> None:
    """Plot all learned maps: depth weights by module, and width maps from old to new units.

    If each layer has its own width map, their mean is shown.
    """
    depth = maps.coefficients["depth"].items()
    panels = [plot.Panel(f"w, {name.removeprefix('blocks/')}", w, ("layers",)) for name, w in depth]
    for name, matrices in maps.coefficients["width"].items():
        for role, m in matrices.items():
            panels.append(plot.Panel(f"{name}, {role}", m if m.ndim == 2 else m.mean(0), (name,)))
    save_figure(plot.panel_figure(panels), path)


def plot_memory(found: dict[str, list[Program]], limit: float, machine: str, path: Path) -> None:
    """Plot the memory of each program of `train.preflight`, stacked, and the limit of a device."""
    bars = [
        (f"{config}\n{p.phase}, {p.what}", p)
        for config, programs in found.items()
        for p in programs
    ]
    figure = Figure((WIDTH, 1.2 + 0.45 * len(bars)), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    left = np.zeros(len(bars))
    for part, colour in zip(("parameters", "moments", "other", "temporary"), LIGHT, strict=False):
        sizes = np.array([getattr(p, part) / 1e9 for _, p in bars])
        axes.barh([name for name, _ in bars], sizes, left=left, label=part, color=colour)
        left += sizes
    axes.axvline(limit / 1e9, color="black", linestyle="--", label=f"a device of {machine}")
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=SMALL)
    axes.set_xlabel("GB per device")
    figure.legend(loc="outside right upper", fontsize=SMALL)
    save_figure(figure, path)

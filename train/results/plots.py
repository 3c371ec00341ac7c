"""What runs cost and gave, drawn."""

from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from train.ahead.rehearsal import Program
from train.plan.learning import Maps
from train.results.comparison import Comparison
from train.results.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_OTHER = 0.4  # how opaque seeds after the first are


def losses(comparison: Comparison, path: Path) -> None:
    """Validation loss against FLOPs; small models dotted, ends as dots, to be held against the frontier's crosses."""
    figure, axes = _wide()
    for i, runs in enumerate(comparison.runs):
        for run in runs:
            first, (*parts, last) = run is runs[0], run.segments
            look: dict[str, Any] = {"color": f"C{i % 10}", "alpha": 1 if first else _OTHER}
            for part in parts:
                own = part[0]["phase"] == last[0]["phase"]  # the full model, before it was made small
                axes.plot(*_points(part), linestyle="-" if own else ":", **look)
            axes.plot(*_points(last), linestyle="-" if i < 10 else "--", label=run.name if first else None, **look)
            axes.plot(run.cost("flops"), run.loss, "o", **look)
    if comparison.frontier:
        ends = sorted((mean(r.cost("flops") for r in rs), mean(r.loss for r in rs)) for rs in comparison.scratch)
        axes.plot(*np.transpose(ends), "kx--", zorder=3, label="frontier: scratch, each fully decayed")
    finals = [r.loss for runs in [*comparison.runs, *comparison.frontier] for r in runs]
    points = [p for runs in comparison.runs for r in runs for p in r.curve]
    top = min(max(p["val_loss"] for p in points), min(finals) * 1.6) + 0.05
    axes.set_ylim(min(finals) - 0.05, top)
    axes.set_xscale("log")
    seen = [p["flops"] for p in points if p["val_loss"] < top and p["flops"] > 0]
    axes.set_xlim(left=0.9 * min(seen + [r.cost("flops") for runs in comparison.frontier for r in runs]))
    axes.set_xlabel("FLOPs, all phases counted")
    _finish(figure, axes, comparison.runs[0][0], path)


def keep(comparison: Comparison, path: Path) -> bool:
    """Keep probability over depth and time, of each model that drops layers; False, and no plot, if none does."""
    panels: dict[str, list[dict[str, Any]]] = {}
    for run in (runs[0] for runs in comparison.runs):
        for line in run.keep:
            panels.setdefault(f"{run.name}, {line['phase']}", []).append(line)
    if not panels:
        return False
    figure = Figure(figsize=(8, 1 + 2 * len(panels)), layout="constrained")
    for axes, (title, lines) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels.items(), strict=True):
        depth = len(lines[0]["keep"])
        steps = [line["step"] for line in lines]
        edges = [
            2 * steps[0] - steps[1] if len(steps) > 1 else steps[0] - 1,
            *steps,
        ]  # each line tells of the steps before it
        image = axes.pcolormesh(
            edges, np.arange(depth + 1) + 0.5, np.transpose([x["keep"] for x in lines]), vmin=0, vmax=1
        )
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.set_ylabel("layer")
        figure.colorbar(image, ax=axes, label="keep probability")
    figure.savefig(path, dpi=120)
    return True


def race(curves: dict[str, list[tuple[Run, list[tuple[float, float]]]]], path: Path) -> None:
    """Validation loss against the FLOPs since the small model, of each operator and seed.

    The first point is right after growing, at hardly any FLOPs: the axis is linear up to the second one, then logarithmic.
    """
    figure, axes = _wide()
    for i, (by, seeds) in enumerate(curves.items()):
        for j, (_, points) in enumerate(seeds):
            look: dict[str, Any] = {
                "color": f"C{i % 10}",
                "linestyle": "-" if i < 10 else "--",
                "alpha": _OTHER if j else 1,
            }
            axes.plot(*np.transpose(points), label=None if j else by, **look)
    every = [seed for seeds in curves.values() for seed in seeds]
    axes.set_xscale("symlog", linthresh=min(points[1][0] for _, points in every))
    axes.set_xlim(left=0)
    axes.set_xlabel("FLOPs after the small model")
    _finish(figure, axes, every[0][0], path)


def maps(maps: Maps, path: Path) -> None:
    """Every map as an image: depth weights by module, width maps from old to new units."""
    images = {f"w, {name.removeprefix('blocks/')}": w for name, w in maps.coefficients["depth"].items()}
    depth = set(images)
    for name, matrices in maps.coefficients["width"].items():
        for kind, m in matrices.items():
            images[f"{name}, {kind}"] = m if m.ndim == 2 else m.mean(0)
    columns = min(4, len(images))
    rows = -(-len(images) // columns)
    figure = Figure(figsize=(3.2 * columns, 2.6 * rows), layout="constrained")
    for i, (title, m) in enumerate(images.items()):
        axes = figure.add_subplot(rows, columns, i + 1)
        bound, (new, old) = np.abs(m).max(), m.shape
        extent = (0.5, old + 0.5, new + 0.5, 0.5)  # counted from one
        image = axes.imshow(m, cmap="RdBu_r", vmin=-bound, vmax=bound, aspect="auto", extent=extent)
        figure.colorbar(image, ax=axes)
        for axis, of in ((axes.xaxis, "old"), (axes.yaxis, "new")):
            axis.set_major_locator(MaxNLocator(integer=True, nbins=6))
            axis.set_label_text(f"{of} {'layer' if title in depth else 'unit'}", fontsize=8)
        axes.set_title(title, fontsize=8)
    figure.savefig(path, dpi=100)


def memory(found: dict[str, list[Program]], limit: float, machine: str, path: Path) -> None:
    """What each program of `train.preflight` needs on a device, stacked, and what a device has."""
    bars = [(f"{config}\n{p.phase}, {p.what}", p) for config, programs in found.items() for p in programs]
    figure = Figure(figsize=(10, 1.2 + 0.45 * len(bars)), layout="constrained")
    axes = figure.subplots()
    left = np.zeros(len(bars))
    for part in ("parameters", "moments", "other", "temporary"):
        sizes = np.array([getattr(p, part) / 1e9 for _, p in bars])
        axes.barh([name for name, _ in bars], sizes, left=left, label=part)
        left += sizes
    axes.axvline(limit / 1e9, color="black", linestyle="--", label=f"a device of {machine}")
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=7)
    axes.set_xlabel("GB on a device")
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=120)


def _wide() -> tuple[Figure, "Axes"]:
    figure = Figure(figsize=(10, 5), layout="constrained")
    return figure, figure.subplots()


def _points(lines: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    return [p["flops"] for p in lines], [p["val_loss"] for p in lines]


def _finish(figure: Figure, axes: "Axes", run: Run, path: Path) -> None:
    axes.set_ylabel(f"validation loss (nats {'an image' if run.classifies else 'a token'})")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small")  # beside the lines, however many there are
    figure.savefig(path, dpi=120)

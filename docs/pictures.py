"""Draws the pictures of the site, each from what it is about: ``python docs/pictures.py [FOLDER]``."""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from configs import demo
from jaxgrow import AxisMap, flops, maps, operators
from jaxgrow.maps import by_axes
from jaxgrow.matrices import dense
from jaxgrow.operators import DEPTH
from train.plan.training import Train

HERE = Path(__file__).parent / "pictures"
BLUE, ORANGE, GREY = "#1f77b4", "#ff7f0e", "#8c8c8c"
plt.rcParams.update(
    {
        "svg.hashsalt": "jaxgrow",
        "svg.fonttype": "none",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
)


def _matrix(ax, matrix, title: str, most: float | None = None) -> None:
    most = most or np.abs(matrix).max()
    ax.imshow(matrix, cmap="RdBu_r", vmin=-most, vmax=most)
    ax.set_title(title, fontsize=9)
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_visible(True)


def one_product() -> plt.Figure:
    """A kernel that reads ``embed`` and writes ``mlp``, before and after."""
    growth = {"embed": maps.tile(3, 2), "mlp": maps.select([0, 1, 2, 3, 3, 3], 4)}
    kernel = np.random.default_rng(0).normal(size=(3, 4))
    read, write = dense(growth["embed"].read), dense(growth["mlp"].write)
    figure, axes = plt.subplots(1, 4, figsize=(8.5, 2.3), gridspec_kw={"width_ratios": [3, 4, 6, 6]})
    _matrix(axes[0], read, "read map of\nembed [6, 3]", 1)
    _matrix(axes[1], kernel, "kernel (embed.in,\nmlp) [3, 4]")
    _matrix(axes[2], write.T, "write map of mlp,\ntransposed [4, 6]", 1)
    _matrix(axes[3], read @ kernel @ write.T, "the grown\nkernel [6, 6]", np.abs(kernel).max())
    for ax, sign in zip(axes, ("·", "·", "=", ""), strict=True):
        ax.text(1.12, 0.5, sign, transform=ax.transAxes, fontsize=18, va="center")
    return figure


def pairs() -> plt.Figure:
    """Write and read maps of operators, from 4 units to 8."""
    sizes, target = {"mlp": 4}, {"mlp": 8}
    growths: dict[str, AxisMap] = {
        "decoalesce\n(far)": operators.decoalesce({"mlp": 8}, mlp="far")["mlp"],
        "decoalesce\n(adjacent)": operators.decoalesce({"mlp": 8}, mlp="adjacent")["mlp"],
        "net2net": operators.net2net(sizes, target, 1)["mlp"],
        "zero_pad": operators.zero_pad(sizes, target)["mlp"],
        "average\n(LiGO's start)": operators.average(sizes, target, 0)["mlp"],
    }
    figure, axes = plt.subplots(2, len(growths), figsize=(7, 4.6))
    for column, (name, m) in zip(axes.T, growths.items(), strict=True):
        _matrix(column[0], dense(m.write), name, 1)
        _matrix(column[1], dense(m.read), "", 1)
    axes[0, 0].set_ylabel("write [8, 4]")
    axes[1, 0].set_ylabel("read [8, 4]")
    return figure


def depth() -> plt.Figure:
    """Which old layer each new one is of, from 6 layers to 8."""
    growths = {n: operator({"layers": 6}, {"layers": 8}) for n, operator in DEPTH.items() if n != "g_stack"}
    figure, ax = plt.subplots(figsize=(6, 3.4))
    for x, growth in enumerate(growths.values()):
        found = [growth] if isinstance(growth, dict) else [by_axes(t) for rule in growth.rules for t in rule.terms]
        writes = [dense(m.write) for maps in found for m in maps.values()]
        for y, row in enumerate(max(writes, key=np.count_nonzero)):  # that of what is copied, not of what is zero
            old = int(row.argmax())
            ax.add_patch(plt.Rectangle((x - 0.4, y - 0.45), 0.8, 0.9, color=plt.cm.viridis(old / 5)))
            ax.text(x, y, old, ha="center", va="center", color="white" if old < 4 else "black", fontsize=8)
    ax.set_xlim(-0.6, len(growths) - 0.4)
    ax.set_ylim(-0.7, 7.7)
    ax.set_xticks(range(len(growths)), growths, rotation=30, ha="right")
    ax.set_yticks(range(8))
    ax.set_ylabel("new layer; in it, the old one")
    return figure


def plans() -> plt.Figure:
    """What trains when, for what cost: plans of the demo."""
    figure, axes = plt.subplots(4, 1, figsize=(6.5, 4.6), sharex=True, sharey=True)
    methods = {"from scratch": demo.scratch, "V-cycle": demo.vcycle, "half first": demo.best, "LiGO": demo.ligo}
    scratch = demo.scratch()
    whole = scratch.steps * flops.train(scratch.model, 1)
    for ax, (name, make) in zip(axes, methods.items(), strict=True):
        experiment, at = make(), 0.0
        for phase in experiment.method.plan(experiment.model, experiment.optim, experiment.steps):
            if isinstance(phase, Train):
                cost = phase.steps * flops.train(phase.config, 1) / whole
                large = phase.name == "large"
                ax.bar(at, phase.config.layers, cost, align="edge", color=BLUE if large else ORANGE, edgecolor="white")
                at += cost
        ax.set_ylabel(f"{name}\nlayers")
        ax.set_yticks([2, 4])
    axes[-1].set_xlabel(
        "FLOPs of training, of those from scratch (blue: the large model; LiGO learns its maps in between)"
    )
    return figure


def saving() -> plt.Figure:
    """How a saving is read: the rows of `docs/results/muon.md`."""
    flops, losses = np.array([0.55, 0.75, 1.0]), np.array([2.0364, 1.9606, 1.9041])
    cost, loss = 0.761, 1.9262
    equal = float(np.exp(np.interp(-loss, -losses, np.log(flops))))
    figure, ax = plt.subplots(figsize=(5.5, 3.4))
    ax.plot(flops, losses, "o-", color=GREY, label="from scratch, each fully decayed: the frontier")
    ax.plot(cost, loss, "o", color=BLUE, label="half of the layers first")
    ax.annotate("", (cost, loss), (equal, loss), arrowprops={"arrowstyle": "->", "color": BLUE})
    ax.text((cost + equal) / 2, loss - 0.004, f"saved: {1 - cost / equal:.1%}", ha="center", va="top", color=BLUE)
    ax.set_xscale("log")
    ax.set_xticks([0.55, 0.75, cost, 1.0], ["0.55", "0.75", "", "1"])
    ax.minorticks_off()
    ax.set_xlabel("FLOPs, of those of the whole baseline")
    ax.set_ylabel("final loss")
    ax.legend(frameon=False)
    return figure


def draw(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for make in (one_product, pairs, depth, plans, saving):
        figure = make()
        figure.savefig(folder / f"{make.__name__}.svg", bbox_inches="tight", metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if sys.argv[1:] else HERE)

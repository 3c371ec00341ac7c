"""Draws the pictures of the site, each from what it is about: ``python docs/pictures.py [FOLDER]``."""

import sys
from pathlib import Path

import jax
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from configs import demo
from jaxgrow import AxisMap, maps, operators, show, sizes
from jaxgrow.maps import by_axes
from jaxgrow.matrices import dense
from jaxgrow.models import GPT2Config
from jaxgrow.operators import DEPTH
from train.results import evidence, plots
from train.results.evidence import Evidence
from train.show import planned

HERE = Path(__file__).parent / "pictures"
BLUE, GREY = plots.COLOURS[1], plots.GREY
plt.rcParams.update(
    {
        "svg.hashsalt": "jaxgrow",
        "svg.fonttype": "none",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
)


def _matrix(ax, matrix, title: str, most: float = 1) -> None:
    show.image(ax, matrix, most)
    ax.set_title(title, fontsize=9)
    ax.set_aspect("equal")
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_visible(True)


def one_product() -> plt.Figure:
    """A kernel that reads ``embed`` and writes ``mlp``, before and after."""
    growth = {"embed": maps.tile(3, 2), "mlp": maps.select([0, 1, 2, 3, 3, 3], 4)}
    kernel = np.random.default_rng(0).normal(size=(3, 4))
    read, write = dense(growth["embed"].read), dense(growth["mlp"].write)
    figure, axes = plt.subplots(1, 4, figsize=(8.5, 2.3), gridspec_kw={"width_ratios": [3, 4, 6, 6]})
    _matrix(axes[0], read, "read map of\nembed [6, 3]")
    _matrix(axes[1], kernel, "kernel (embed.in,\nmlp) [3, 4]", np.abs(kernel).max())
    _matrix(axes[2], write.T, "write map of mlp,\ntransposed [4, 6]")
    _matrix(axes[3], read @ kernel @ write.T, "the grown\nkernel [6, 6]", np.abs(kernel).max())
    for ax, sign in zip(axes, ("·", "·", "=", ""), strict=True):
        at = {"xycoords": "axes fraction", "textcoords": "offset points", "ha": "center", "va": "center"}
        ax.annotate(sign, (1, 0.5), (11, 0), fontsize=18, **at)
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
        _matrix(column[0], m.write, name)
        _matrix(column[1], m.read, "")
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


def grown() -> plt.Figure:
    """What `jaxgrow show` draws: GPT-2's width by Net2Net."""
    config = GPT2Config(vocab=50257, context=1024, layers=12, embed=768, heads=12, head_dim=64, mlp=3072)
    params, axes = jax.eval_shape(config.init, jax.random.key(0)), config.axes()
    growth = operators.net2net(sizes(params, axes), {"embed": 1024, "heads": 16, "mlp": 4096}, 0)
    return show.growth(growth, params, axes)


def plans() -> plt.Figure:
    """What trains when, for what cost: plans of the demo."""
    methods = {
        "from scratch": demo.muon,
        "half of the layers first": demo.muon_deepen,
        "V-cycle": demo.muon_vcycle,
        "LiGO": demo.ligo,
    }
    whole = demo.muon().steps
    return plots.timeline(
        [(f"{name} ({make().steps:,} of {whole:,} steps)", planned(make())) for name, make in methods.items()]
    )


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


def saved_by_size() -> plt.Figure:
    """What three recipes saved on GPTs of several sizes, and what else was measured beside them."""
    figure, ax = plt.subplots(figsize=(8.5, 4))
    series = [("halves", 0.6, plots.COLOURS[2]), ("deepen", 0.5, BLUE), ("vcycle", None, plots.COLOURS[3])]
    for i, (method, tau, colour) in enumerate(series):
        rows = [e for e in evidence.of(method, tau) if (e.family, e.optimizer, e.data) == ("GPT2", "Muon", "Wikipedia")]
        short = sorted((e for e in rows if e.each and e.tokens_per_parameter < 25), key=lambda e: e.parameters)
        shift = 1.04 ** (i - 1)  # so that intervals do not hide each other
        ax.plot([e.parameters * shift for e in short], [e.mean for e in short], "-", color=colour)
        for e in filter(lambda e: e.each, rows):
            _point(ax, e, e.parameters * shift, colour)
        last = short[-1]
        ax.annotate(last.name, (last.parameters * shift, last.mean), (9, 6 * (1 - i)), color=colour, **BESIDE)
    beside = [("halves", "ModernBERT"), ("halves", "ViT"), ("vcycle", "GPT2")]
    for method, family in beside:
        optimizer = "AdamW" if family == "GPT2" else "Muon"
        found = next(e for e in evidence.of(method) if (e.family, e.optimizer) == (family, optimizer) and e.each)
        place = found.parameters * (0.9 if family == "GPT2" else 1)
        _point(ax, found, place, GREY)
        name = f"{found.name}, {evidence.FAMILIES.get(family, family)}" + ", AdamW" * (optimizer == "AdamW")
        side = {"ha": "right"} if family == "GPT2" else {}
        ax.annotate(name, (place, found.mean), (-7, -24) if side else (9, 0), color=GREY, **BESIDE | side)
    ax.axhline(0, color="black", linewidth=0.8)
    ax.set_xscale("log")
    ax.set_xlim(1.6e4, 6e6)
    ax.set_ylim(-16, 45)
    ax.set_xlabel("parameters")
    ax.set_ylabel("FLOPs saved at an equal loss, %")
    ax.text(
        1.75e4, 42, "filled: about 20 tokens per parameter; hollow: 50; grey: other models or optimizers", fontsize=8
    )
    return figure


BESIDE = {"textcoords": "offset points", "va": "center", "fontsize": 8}


def _point(ax, row: Evidence, x: float, colour: str) -> None:
    """The mean, with its interval or else the range of its seeds."""
    half = row.interval
    low, high = (half, half) if half is not None else (row.mean - min(row.each), max(row.each) - row.mean)
    hollow = {"markerfacecolor": "white"} if row.tokens_per_parameter > 25 else {}
    ax.errorbar(x, row.mean, [[low], [high]], fmt="o", color=colour, elinewidth=1, markersize=5, **hollow)


def draw(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for make in (one_product, pairs, grown, depth, plans, saving, saved_by_size):
        figure = make()
        figure.savefig(folder / f"{make.__name__}.svg", bbox_inches="tight", metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if sys.argv[1:] else HERE)

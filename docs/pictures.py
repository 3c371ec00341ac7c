"""Draw the pictures of the site from code and results: ``python docs/pictures.py [FOLDER]``."""

import json
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from configs import demo, wikipedia12
from jaxgrow import AxisMap, operators, sizes
from jaxgrow.extras import plot
from jaxgrow.growth import maps
from jaxgrow.growth.maps import by_axes
from jaxgrow.growth.matrices import dense
from jaxgrow.layerdrop import schedule
from jaxgrow.models import GPT2Config
from jaxgrow.operators import DEPTH
from train.extras import run_plots as plots
from train.extras.advice import evidence
from train.extras.advice.evidence import Evidence, Frontier
from train.extras.advice.forecast import held_out_forecasts
from train.show import planned_phases

HERE = Path(__file__).parent / "pictures"
ANATOMY = Path(__file__).parent.parent / "benchmarks" / "results" / "anatomy-wiki12.json"
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


def _matrix(ax, matrix, title: str, most: float = 1):
    image = plot.draw_matrix(ax, matrix, most)
    ax.set_title(title, fontsize=9)
    ax.set_aspect("equal")
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_visible(True)
    return image


def one_product() -> plt.Figure:
    """A kernel with the input axis ``embed`` and the output axis ``mlp``, before and after growth."""
    growth = {"embed": maps.tile(3, 2), "mlp": maps.select([0, 1, 2, 3, 3, 3], 4)}
    kernel = np.random.default_rng(0).normal(size=(3, 4))
    read, write = dense(growth["embed"].read), dense(growth["mlp"].write)
    figure, axes = plt.subplots(
        1, 4, figsize=(8.5, 2.3), gridspec_kw={"width_ratios": [3, 4, 6, 6]}
    )
    _matrix(axes[0], read, "read map of\nembed [6, 3]")
    _matrix(axes[1], kernel, "kernel (embed.in,\nmlp) [3, 4]", np.abs(kernel).max())
    _matrix(axes[2], write.T, "write map of mlp,\ntransposed [4, 6]")
    _matrix(axes[3], read @ kernel @ write.T, "the grown\nkernel [6, 6]", np.abs(kernel).max())
    for ax, sign in zip(axes, ("·", "·", "=", ""), strict=True):
        at = {
            "xycoords": "axes fraction",
            "textcoords": "offset points",
            "ha": "center",
            "va": "center",
        }
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
    figure, axes = plt.subplots(2, len(growths), figsize=(8.5, 5.2))
    for column, (name, m) in zip(axes.T, growths.items(), strict=True):
        image = _matrix(column[0], m.write, name)
        _matrix(column[1], m.read, "")
    axes[0, 0].set_ylabel("write map: 8 new units\nfrom 4 old ones")
    axes[1, 0].set_ylabel("read map: 8 new units\nfrom 4 old ones")
    bar = figure.colorbar(
        image, ax=axes, ticks=[0, 0.1, 0.25, 0.5, 1], format="%g", shrink=0.8, pad=0.03
    )
    bar.set_label("weight (the colours follow its square root)")
    bar.ax.set_ylim(0, 1)  # no map of the figure has a negative weight
    figure.suptitle(
        "A copied unit is written whole and read in equal parts", x=0.44, y=1.02, fontsize=11
    )
    return figure


def depth() -> plt.Figure:
    """Draw the source layer of each new layer: one column per depth operator, from 6 layers to 8."""
    growths = {
        n: operator({"layers": 6}, {"layers": 8})
        for n, operator in DEPTH.items()
        if n not in ("g_stack", "passthrough", "unloop")
    }
    figure, ax = plt.subplots(figsize=(6, 3.4))
    for x, growth in enumerate(growths.values()):
        found = (
            [growth]
            if isinstance(growth, dict)
            else [by_axes(t) for rule in growth.rules for t in rule.terms]
        )
        writes = [dense(m.write) for maps in found for m in maps.values()]
        copied = max(writes, key=np.count_nonzero)  # some rules write zeros only
        for y, row in enumerate(copied):
            old = int(row.argmax())
            ax.add_patch(
                plt.Rectangle((x - 0.4, y - 0.45), 0.8, 0.9, color=plt.cm.viridis(old / 5))
            )
            ax.text(
                x,
                y,
                old,
                ha="center",
                va="center",
                color="white" if old < 4 else "black",
                fontsize=8,
            )
    ax.set_xlim(-0.6, len(growths) - 0.4)
    ax.set_ylim(-0.7, 7.7)
    ax.set_xticks(range(len(growths)), growths, rotation=30, ha="right")
    ax.set_yticks(range(8))
    ax.set_ylabel("new layer (number: its source layer)")
    return figure


def grown() -> plt.Figure:
    """Draw the figure of `jaxgrow show`: the width of GPT-2 grows by Net2Net."""
    config = GPT2Config(
        vocab=50257, context=1024, layers=12, embed=768, heads=12, head_dim=64, mlp=3072
    )
    params, axes = jax.eval_shape(config.init, jax.random.key(0)), config.axes()
    growth = operators.net2net(sizes(params, axes), {"embed": 1024, "heads": 16, "mlp": 4096}, 0)
    return plot.plot_growth(growth, params, axes)


# The folders of the core from the top down, each with its purpose; then the extras.
TRAINER = (
    ("commands", "pretrain, compare"),
    ("analysis", "compares finished runs"),
    ("run", "the loop over the phases"),
    ("store", "checkpoints and logs on disk"),
    ("config", "describes an experiment"),
    ("step", "the computation of a step"),
    ("plan", "the phases, and their cost"),
    ("state", "models on devices"),
    ("data", "batches of text"),
    ("common", "files, errors, processes"),
)
LIBRARY = (
    ("cli", "the command jaxgrow"),
    ("checkpoints", "Hugging Face and Orbax folders"),
    ("models", "GPT-2, Llama, BERT, ViT"),
    ("optim", "Muon"),
    ("operators", "the maps of each method"),
    ("growth", "maps and parameter trees"),
    ("layerdrop", "PLD and SBLD"),
    ("axes", "names of axes"),
)
TRAINER_EXTRAS = (
    "text\ntokenizers\nlabelled\nimages\nevaluation\naot\nadvice\nmodifiers\nbranching\n"
    "trackers\n\nand the other\ncommands"
)
LIBRARY_EXTRAS = (
    "commands\nintegrations\nother_models\npeft\nhf_peft\nmodels\noperators\nfamilies\nplot"
)


def architecture() -> plt.Figure:
    """Draw the folders of the core, with the extras to the left and right of them."""
    figure, ax = plt.subplots(figsize=(12, 5))
    for left, title, folders, colour in (
        (2.2, "train, the trainer", TRAINER, "#fbe5c8"),
        (7.4, "jaxgrow, the library", LIBRARY, "#cfe3f5"),
    ):
        ax.text(left + 2.4, 10.35, title, ha="center", weight="bold")
        height = 10 / len(folders)
        for i, (name, does) in enumerate(folders):
            low = 10 - (i + 1) * height
            box = plt.Rectangle((left, low + 0.08), 4.8, height - 0.16, fc=colour, ec="#444")
            ax.add_patch(box)
            ax.text(left + 0.1, low + height / 2, name, va="center", weight="bold")
            ax.text(left + 4.7, low + height / 2, does, va="center", ha="right", size=8)
    for left, title, extras in (
        (0, "train/extras", TRAINER_EXTRAS),
        (12.8, "jaxgrow/extras", LIBRARY_EXTRAS),
    ):
        ax.text(left + 0.8, 10.35, title, ha="center", weight="bold")
        ax.add_patch(plt.Rectangle((left, 0.08), 1.6, 9.84, fc="none", ec="#444", ls="--"))
        ax.text(left + 0.8, 5, extras, ha="center", va="center")
    for start, end in ((1.65, 2.15), (12.75, 12.25), (7.05, 7.35)):
        ax.annotate("", (end, 5), (start, 5), arrowprops={"arrowstyle": "->", "color": "#444"})
    ax.set(xlim=(-0.1, 14.5), ylim=(0, 10.8))
    ax.axis("off")
    return figure


def plans() -> plt.Figure:
    """Draw the phases of four plans of the demo, with their costs."""
    methods = {
        "from scratch": demo.scratch,
        "half of the layers first": demo.stack,
        "V-cycle": demo.vcycle,
        "LiGO": demo.ligo,
    }
    whole = demo.scratch().steps
    return plots.plan_timeline(
        [
            (f"{name} ({make().steps:,} of {whole:,} steps)", planned_phases(make()))
            for name, make in methods.items()
        ]
    )


def saving() -> plt.Figure:
    """Illustrate the definition of a saving by a row of `docs/results/muon.md`."""
    frontier = _frontier_of("Muon")
    flops, losses = np.array(frontier.flops), np.mean(frontier.losses, 1)
    row = _row("deepen", frontier, 0.5)
    cost, loss = row.flops, float(np.mean(row.losses))
    equal = float(np.exp(np.interp(-loss, -losses, np.log(flops))))
    figure, ax = plt.subplots(figsize=(5.5, 3.4))
    ax.plot(flops, losses, "s-", color=GREY)
    ax.annotate(
        "from scratch, each fully decayed:\nthe frontier",
        (flops[1], losses[1]),
        (10, 10),
        color=GREY,
        **BESIDE,
    )
    ax.plot(cost, loss, "o", color=BLUE)
    ax.annotate("half of the layers first", (cost, loss), (-8, 0), ha="right", color=BLUE, **BESIDE)
    ax.annotate("", (cost, loss), (equal, loss), arrowprops={"arrowstyle": "->", "color": BLUE})
    ax.text(
        (cost + equal) / 2,
        loss - 0.008,
        f"saved: {row.mean:.1f} %",
        ha="center",
        va="top",
        color=BLUE,
    )
    ax.set_xscale("log")
    ax.set_xticks([*flops, cost], [f"{x:.3g}" for x in flops] + [""])
    ax.minorticks_off()
    ax.set_xlabel("FLOPs, relative to the full baseline")
    ax.set_ylabel("final loss")
    ax.set_title("A run saves FLOPs if it ends to the left of the frontier", loc="left")
    return figure


def _frontier_of(optimizer: str) -> Frontier:
    return next(
        frontier for frontier in evidence.all_frontiers() if frontier.optimizer == optimizer
    )


def _row(method: str, frontier: Frontier, tau: float | None = None) -> Evidence:
    """The row of a method whose losses are in the data file and belong to ``frontier``."""
    rows = [e for e in evidence.method_rows(method, tau) if e.losses and e.page == frontier.page]
    return next(e for e in rows if e.optimizer == frontier.optimizer)


class Point(NamedTuple):
    """One row of the data file in `_against_frontier`."""

    method: str
    tau: float | None
    label: str
    offset: tuple[int, int]  # of the label, in points; to the left if the first one is negative
    marker: str
    colour: str
    shift: float = (
        1.0  # factor on the FLOPs, so that points with nearly equal FLOPs do not hide each other
    )


def _against_frontier(optimizer: str, points: list[Point], title: str) -> plt.Figure:
    """Final loss against FLOPs: the frontier as a line, other rows as points, and each seed as a small dot."""
    frontier = _frontier_of(optimizer)
    means = np.mean(frontier.losses, 1)
    figure, ax = plt.subplots(figsize=(8.5, 4.6))
    ax.plot(frontier.flops, means, "s-", color="black", markersize=5)
    ax.plot(frontier.flops, frontier.losses, ".", color="black", markersize=4)
    ax.annotate("from scratch (the frontier)", (frontier.flops[0], means[0]), (12, 5), **BESIDE)
    for p in points:
        row = _row(p.method, frontier, p.tau)
        x, loss = row.flops * p.shift, float(np.mean(row.losses))
        ax.plot([x] * len(row.losses), row.losses, ".", color=p.colour, markersize=5)
        ax.plot(
            x,
            loss,
            p.marker,
            color=p.colour,
            markersize=9,
            markeredgecolor="white",
            markeredgewidth=0.5,
        )
        ax.annotate(
            p.label, (x, loss), p.offset, ha="right" if p.offset[0] < 0 else "left", **BESIDE
        )
    ax.set_xscale("log")
    ax.set_xticks(frontier.flops, [f"{x:g}" for x in frontier.flops])
    ax.minorticks_off()
    ax.set_xlabel("FLOPs of all phases, relative to the full baseline (log scale)")
    ax.set_ylabel("final validation loss (nats per byte)")
    ax.set_title(title, loc="left", fontsize=11)
    return figure


def wiki12() -> plt.Figure:
    """Growing under AdamW: rows of `docs/results/wikipedia.md`."""
    _, blue, red, green, pink, *_ = plots.COLOURS
    points = [
        Point("stack", None, "LEMON's width, then stacking", (12, 8), "^", red, 1.004),
        Point("aki", None, "AKI", (-10, 0), "v", pink, 0.996),
        Point("vcycle", None, "V-cycle", (8, 1), "D", green),
        Point("ligo", None, "LiGO, 100 steps", (6, -20), "P", GREY),
        Point("ligo_start", None, "LiGO's initialisation", (-10, 0), "o", blue),
    ]
    return _against_frontier(
        "AdamW", points, "Under AdamW, LiGO's initialisation saves most, and copies save nothing"
    )


def wiki12_muon() -> plt.Figure:
    """Growing under Muon: rows of `docs/results/muon.md`."""
    _, blue, red, green, pink, *_ = plots.COLOURS
    points = [
        Point("halves", 0.6, "half of the layers and of each MLP first", (-10, 0), "o", red),
        Point("twice", None, "three layers, then six, then twelve", (-8, -11), "v", pink),
        Point("deepen", 0.5, "half of the layers first", (-2, -21), "D", blue, 0.99),
        Point("vcycle", None, "V-cycle", (9, 0), "P", green, 1.01),
        Point("random_layers", None, "six random layers in each step", (-10, 0), "X", GREY),
    ]
    title = "Under Muon, a smaller model first saves FLOPs, and skipping random layers does not"
    return _against_frontier("Muon", points, title)


def keep() -> plt.Figure:
    """Keep probability over depth, of the three configs that drop layers in `docs/results/dropping.md`."""
    sensitivity = np.array(json.loads(ANATOMY.read_text())["models"]["scratch"]["matters"])
    layers = np.arange(1, len(sensitivity) + 1)
    _, blue, red, green, *_ = plots.COLOURS
    # Name, config, style, colour, and the layer and the offset of the label.
    series = [
        ("PLD", wikipedia12.pld(), "o-", blue, 11, (-8, -16)),
        ("SBLD", wikipedia12.sbld50(), "D--", red, 7, (0, -12)),
        ("uniform", wikipedia12.uniform50(), "s:", green, 2, (0, -12)),
    ]
    figure, ax = plt.subplots(figsize=(8.5, 4.2))
    for name, run, style, colour, at, offset in series:
        times = (1, run.steps // 2, run.steps)
        (dropped,) = run.method.modifiers
        first, middle, last = (
            schedule(dropped.drop, len(layers), t, run.steps, sensitivity) for t in times
        )
        if not np.allclose(middle, last, atol=1e-3) or np.min(first) < 0.97:
            raise ValueError(
                f"the keep probabilities of {name} do not agree with the labels of this figure"
            )
        ax.plot(layers, last, style, color=colour, markersize=5)
        ax.annotate(f"{name}, middle and end", (at, last[at - 1]), offset, ha="center", **BESIDE)
    ax.plot(layers, np.ones(len(layers)), "-", color="black", linewidth=1)
    ax.annotate(
        "all three, first step (PLD: 0.97 or more)", (6.5, 1), (0, 8), ha="center", **BESIDE
    )
    ax.set_ylim(0, 1.1)
    ax.set_xticks(layers)
    ax.set_xlabel("layer")
    ax.set_ylabel("keep probability (linear scale from 0)")
    title = "PLD drops the upper layers most, SBLD the layers that the loss needs least"
    ax.set_title(title, loc="left", fontsize=11)
    return figure


def starts() -> plt.Figure:
    """The relative effective rank of grown models and of their baselines: `docs/results/starts.md`."""
    models = json.loads(ANATOMY.read_text())["models"]
    names = ["from scratch", "grown by copies", "LiGO's initialisation"]
    panels = {
        "AdamW": ["scratch", "stacked", "LiGO's start"],
        "Muon": ["Muon", "Muon, stacked", "Muon, LiGO's start"],
    }
    looks = [("black", "s-"), (plots.COLOURS[2], "v--"), (BLUE, "o-")]
    figure, axes = plt.subplots(1, 2, figsize=(8.5, 4), sharey=True, layout="constrained")
    for ax, (optimizer, lines) in zip(axes, panels.items(), strict=True):
        for name, model, (colour, style) in zip(names, lines, looks, strict=True):
            values = models[model]["directions"]
            ax.plot(range(1, len(values) + 1), values, style, color=colour, markersize=4)
            ax.annotate(name, (len(values), values[-1]), (8, 0), **BESIDE)
        ax.set_title(optimizer, fontsize=10)
        ax.set_xlabel("layer")
        ax.set_xticks(range(1, 13))
    axes[0].set_ylim(0, 0.7)
    axes[0].set_ylabel(
        "effective rank / largest possible rank,\nafter training (linear scale from 0)"
    )
    figure.suptitle(
        "On average over layers, models grown by copies use fewer directions than the others",
        fontsize=11,
    )
    return figure


def saved_by_size() -> plt.Figure:
    """Draw the savings of three recipes on GPTs of several sizes, and the savings of other models."""
    figure, ax = plt.subplots(figsize=(8.5, 4.8), layout="constrained")
    series = [
        ("halves", 0.6, plots.COLOURS[2]),
        ("deepen", 0.5, BLUE),
        ("vcycle", None, plots.COLOURS[3]),
    ]
    for i, (method, tau, colour) in enumerate(series):
        rows = [
            e
            for e in evidence.method_rows(method, tau)
            if (e.family, e.optimizer, e.data) == ("GPT2", "Muon", "Wikipedia") and e.each
        ]
        larger = [e for e in rows if "Batches of 64" in e.note]
        short = sorted(
            (e for e in rows if e.tokens_per_parameter < 25 and e not in larger),
            key=lambda e: e.parameters,
        )
        shift = 1.04 ** (i - 1)  # so that intervals do not hide each other
        places = [e.parameters * shift for e in short], [e.mean for e in short]
        ax.plot(*places, "o-", color=colour, label=f"{short[0].name}: GPT, Muon")
        for e in rows:
            _point(ax, e, e.parameters * shift, colour, "X" if e in larger else "o")
    ax.plot([], [], "o", color="black", markerfacecolor="white", label="49 tokens per parameter")
    ax.plot([], [], "X", color="black", label="batches of 64 instead of 16")
    for method, family, marker in (
        ("halves", "ModernBERT", "s"),
        ("halves", "ViT", "^"),
        ("vcycle", "GPT2", "D"),
    ):
        optimizer = "AdamW" if family == "GPT2" else "Muon"
        found = next(
            e
            for e in evidence.method_rows(method)
            if (e.family, e.optimizer) == (family, optimizer) and e.each
        )
        place = found.parameters * (0.9 if family == "GPT2" else 1)
        _point(ax, found, place, GREY, marker)
        name = f"{found.name}: {evidence.FAMILIES.get(family, family)}, {optimizer}"
        ax.plot([], [], marker, color=GREY, label=name)
    ax.axhline(0, color="black", linewidth=0.8)
    ax.set_xscale("log")
    ax.set_xlim(1.6e4, 2e7)
    ax.set_ylim(-16, 40)
    ax.set_xlabel("parameters")
    ax.set_ylabel("FLOPs saved at an equal loss, %")
    ax.set_title("Growing saves 14 to 25 % of the FLOPs, and less with larger batches", loc="left")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    return figure


def forecasts() -> plt.Figure:
    """Draw measured savings against forecasts from other comparisons: `docs/should-i-grow.md`."""
    figure, ax = plt.subplots(figsize=(8.5, 4.2), layout="constrained")
    looks = {"Muon": ("o", BLUE), "AdamW": ("s", plots.COLOURS[2])}
    every = held_out_forecasts()
    hits = 0
    for row, forecast in every:
        low, high = forecast.interval
        outcome, inside = row.outcome / 100, low <= row.outcome / 100 <= high
        hits += inside
        marker, colour = looks[row.optimizer]
        bar = [[100 * (forecast.saved - low)], [100 * (high - forecast.saved)]]
        filled = colour if inside else "white"
        ax.errorbar(
            100 * outcome, 100 * forecast.saved, bar, color=colour, elinewidth=0.6, alpha=0.5
        )
        ax.plot(100 * outcome, 100 * forecast.saved, marker, color=colour, markerfacecolor=filled)
    for optimizer, (marker, colour) in looks.items():
        ax.plot([], [], marker, color=colour, label=optimizer)
    ax.plot([], [], "o", color="black", markerfacecolor="white", label="outside of its interval")
    ax.axline((0, 0), slope=1, color="black", linewidth=0.8, label="forecast = outcome")
    ax.axhline(0, color=GREY, linewidth=0.8)
    ax.set_xlabel("FLOPs saved, measured, %")
    ax.set_ylabel("FLOPs saved, forecast, %")
    ax.set_title(
        f"{hits} of {len(every)} outcomes lie in the 90 % interval of their forecast", loc="left"
    )
    ax.legend(fontsize=8, loc="lower right")
    return figure


BESIDE = {"textcoords": "offset points", "va": "center", "fontsize": 8}


def _point(ax, row: Evidence, x: float, colour: str, marker: str) -> None:
    """The mean, with its interval or else the range of its seeds."""
    half = row.interval
    low, high = (
        (half, half) if half is not None else (row.mean - min(row.each), max(row.each) - row.mean)
    )
    hollow = {"markerfacecolor": "white"} if row.tokens_per_parameter > 25 else {}
    ax.errorbar(
        x, row.mean, [[low], [high]], fmt=marker, color=colour, elinewidth=1, markersize=5, **hollow
    )


FIGURES = (
    architecture,
    one_product,
    pairs,
    grown,
    depth,
    plans,
    saving,
    saved_by_size,
    forecasts,
    wiki12,
    wiki12_muon,
    keep,
    starts,
)


def draw(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for make in FIGURES:
        figure = make()
        figure.savefig(
            folder / f"{make.__name__}.svg", bbox_inches="tight", metadata={"Date": None}
        )
        plt.close(figure)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if sys.argv[1:] else HERE)

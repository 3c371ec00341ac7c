"""The tables of docs/results/baselines.md and forms.md, from the archive of the logs."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean

from benchmarks.curves import logged_runs, unpacked_archive
from jaxgrow.tables import markdown_table
from jaxgrow.typed import Json
from train.analysis.runs import Run
from train.analysis.savings import Comparison
from train.extras.advice.settings import AVERAGE
from train.extras.report_sections import mean_and_each

LOSS = "final loss, mean [each seed]"


def seeds_of(folder: str, name: str) -> list[Run]:
    """Return the logged runs of one name, one for each seed."""
    return [*logged_runs(folder, name).values()]


def sweep_table(folder: str, name: str, settings: Mapping[str, str]) -> str:
    """Return the losses of each combination of settings that a sweep has tried.

    Args:
      folder: the folder of the archive.
      name: the name of the swept experiment.
      settings: the swept settings of the optimizer, such as ``peak_lr``, and their titles.
    """
    tried: dict[tuple[float, ...], list[Run]] = {}
    for path in (unpacked_archive() / folder).glob(f"{name}-optim.*-seed0"):
        runs = seeds_of(folder, path.name.removesuffix("-seed0"))
        tried[tuple(runs[0].config["optim"][setting] for setting in settings)] = runs
    averages = all(AVERAGE in run.result for runs in tried.values() for run in runs)
    body = []
    for values, runs in sorted(tried.items()):
        losses = [[run.loss for run in runs]]
        if averages:
            losses.append([run.result[AVERAGE] for run in runs])
        numbers = [f"{value:g}" for value in values]
        body.append([*numbers, *(mean_and_each(each, "{:.4f}") for each in losses)])
    heads = [*settings.values(), LOSS]
    if averages:
        heads.append("loss of the average, mean [each seed]")
    return markdown_table(heads, body)


def rates_table(labels: Mapping[str, str], folder: str, *compared: str) -> str:
    """Return the loss of each run at each learning rate, for seed 0.

    Args:
      labels: the text of each row, by the name of its runs.
      folder: the folder of the archive with the sweeps of the learning rate.
      compared: the folders of comparisons that have the runs at the learning rate of the config.
    """
    losses: dict[str, dict[float, float]] = {name: {} for name in labels}
    for name, found in losses.items():
        swept = (unpacked_archive() / folder).glob(f"{name}-optim.peak_lr=*-seed0")
        chosen = ((unpacked_archive() / each / f"{name}-seed0") for each in compared)
        for path in (*swept, *filter(Path.exists, chosen)):
            run = Run(name, 0, path)
            found[run.config["optim"]["peak_lr"]] = run.loss
    rates = sorted({rate for found in losses.values() for rate in found})
    body = [
        [labels[name], *(f"{found[rate]:.4f}" if rate in found else "" for rate in rates)]
        for name, found in losses.items()
    ]
    return markdown_table(["run", *(f"{rate:g}" for rate in rates)], body)


def comparison_table(folder: str, labels: Mapping[str, str], shorter: Sequence[float] = ()) -> str:
    """Return FLOPs and losses of the runs of a comparison, and the savings if there is a frontier.

    Args:
      folder: the folder of the archive.
      labels: the text of each row, by the name of its runs; the first one is the baseline.
      shorter: the fractions of the steps of the shorter runs from scratch.
    """
    (base, text), *_ = labels.items()
    names = {f"{base}-x{x:g}": f"{text}, {x:g} of the budget" for x in shorter}
    compared = Comparison(
        [seeds_of(folder, name) for name in labels], [seeds_of(folder, name) for name in names]
    )
    body = []
    for row in compared.rows():
        name = row["run"]
        cells = [
            {**labels, **names}[name],
            f"{row['flops']:.3f}",
            mean_and_each(row["loss"], "{:.4f}"),
        ]
        if shorter:
            cells.append("" if name == base or name in names else _saving(row))
        body.append(cells)
    saved = ["FLOPs saved against the frontier"] * bool(shorter)
    return markdown_table(["run", "FLOPs", LOSS, *saved], body)


def _saving(row: Json) -> str:
    """The mean saving of a row in per cent, with its interval and the saving of each seed."""
    values, interval = row["saved_frontier"], row["saved_frontier_interval"]
    if None in values:
        return f"above the frontier with {values.count(None)} of {len(values)} seeds"
    # the added 0.0 makes 0.0 of -0.0
    middle, *each = (f"{round(100 * x, 1) + 0.0:.1f}" for x in (mean(values), *values))
    half = "" if interval is None else f" ± {100 * interval:.1f}"
    return f"{'> ' * any(row['below_frontier'])}{middle} %{half} [{', '.join(each)}]"


RATE, DECAY = {"peak_lr": "learning rate"}, {"weight_decay": "weight decay"}
BASELINES = (
    partial(
        comparison_table,
        "baselines",
        {
            "muon_ema-optim.ema=0.97": "Muon",
            "muon_cautious-optim.peak_lr=2e-2-optim.weight_decay=0.1": "cautious weight decay",
            "muon_ramp-optim.peak_lr=1.4e-2": "a ramp of the batch",
            "muon_best-optim.peak_lr=1.4e-2": "a ramp and cautious weight decay",
        },
    ),
    partial(
        comparison_table,
        "baselines_best",
        {
            "wiki12_muon": "from scratch",
            "muon_deepen": "half of the layers first",
            "muon_deepen60": "half of the layers first, for 0.6 of the steps",
            "muon_halves": "half of the layers and of each MLP first",
            "muon_vcycle": "V-cycle",
        },
        (0.55, 0.75),
    ),
    partial(sweep_table, "baselines", "wiki12_muon", RATE),
    partial(sweep_table, "baselines", "muon_ema", {"ema": "d"}),
    partial(sweep_table, "baselines", "muon_cautious", RATE | DECAY),
    partial(sweep_table, "baselines", "muon_ramp", RATE),
    partial(sweep_table, "baselines", "muon_best", RATE),
)

LOOPS = {
    "wiki12_muon": "from scratch",
    "muon_interleave35": "copies after 0.35 of the steps",
    "muon_loop35": "loop after 0.35",
    "muon_unloop35": "loop after 0.35, own weights after 0.75",
}
LATER = {
    "muon_interleave50": "copies after 0.5",
    "muon_loop50": "loop after 0.5",
    "muon_unloop50": "loop after 0.5, own weights after 0.75",
}
HEADS = {
    "wiki12_muon": "tied",
    "muon_untied": "untied",
    "muon_untie": "tied for two thirds of the steps, then untied",
}
COPIES = {
    "experts_four": "four experts",
    "experts_even": "four for half of the steps, then two of each",
    "experts_utility": "four for half of the steps, then eight by utility",
    "experts_eight": "eight experts",
}
RATES = {
    name: text
    for name, text in (LOOPS | HEADS).items()
    if name not in ("wiki12_muon", "muon_untie")
}
SWEPT = {name: text for name, text in COPIES.items() if name != "experts_utility"}
FORMS = (
    partial(comparison_table, "loops", LOOPS | LATER, (0.55, 0.75)),
    partial(comparison_table, "loops8", LOOPS, (0.55, 0.75)),
    partial(comparison_table, "loops49", LOOPS, (0.55, 0.75)),
    partial(comparison_table, "heads", HEADS),
    partial(comparison_table, "copies", COPIES),
    partial(rates_table, RATES, "forms_rates", "loops", "heads", "forms_rates"),
    partial(rates_table, LOOPS, "loops8_rates", "loops8"),
    partial(rates_table, LOOPS, "loops49_rates", "loops49"),
    partial(rates_table, SWEPT, "forms_rates", "forms_rates"),
)

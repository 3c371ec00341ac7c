"""The data file of measurements is consistent, and every number on the pages comes from it."""

import json
import math
import re
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
from scipy.stats import multivariate_normal, norm

from benchmarks import curves, lag
from benchmarks.curves import logged_runs
from jaxgrow.tables import short_count
from train.advise import run_slowdown, steps_behind
from train.analysis.runs import Run, half_width
from train.analysis.savings import Comparison
from train.common.errors import UserError
from train.config.experiment import load_experiment
from train.extras.advice import forecast
from train.extras.advice.evidence import (
    OTHER,
    Case,
    Evidence,
    PilotRow,
    Setting,
    all_evidence,
    all_frontiers,
    all_pilots,
    method_names,
    method_rows,
    summary_table,
)
from train.extras.advice.fits import Fit, Measured, fit_savings
from train.extras.advice.forecast import (
    forecast_rows,
    forecast_saving,
    held_out_forecasts,
    held_out_seconds,
    pilot_error,
    seed_variance,
    small_slowdown,
)

ROOT = Path(__file__).parents[2]
PAGES = {
    str(p.relative_to(ROOT)): p.read_text()
    for p in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")))
}
for part in [name for name in PAGES if "-" in name]:  # muon-sizes.md is a part of muon.md
    whole = part.partition("-")[0] + ".md"
    if whole in PAGES:
        PAGES[whole] += PAGES[part]
OURS = [e for e in all_evidence() if e.baseline != "reported"]
INTERVAL = re.compile(r"(-?\d+(?:\.\d)?) % ± (\d+(?:\.\d)?)")
# Targets of the extrapolations in docs/results/muon.md: parameters, and tokens per parameter.
SIZES = ((1e6, 20.0), (1e8, 20.0), (1_372_992, 6.0))


@pytest.mark.parametrize(
    "row", OURS, ids=lambda e: f"{e.method}-{e.family}-{e.parameters}-{e.optimizer}"
)
def test_a_row_agrees_with_itself_and_with_its_page(row: Evidence):
    assert row.method in method_names() and (row.mean is None) <= bool(row.note)
    assert not row.each or len(row.each) == row.seeds
    if row.each and row.mean is not None:
        assert mean(row.each) == pytest.approx(row.mean, abs=0.11)  # the seeds are rounded
    if len(row.each) > 2 and not row.bounds:
        assert row.interval == pytest.approx(half_width(row.each), abs=0.16)
    text = (ROOT / row.page).read_text()  # the part of a page that has the row
    if row.interval is not None:
        assert f"{row.mean:.1f} % ± {row.interval}" in text
    elif row.each:
        assert all(re.search(rf"(?<![\d.]){x}(?!\d)", text) for x in row.each)
    elif row.mean is not None:
        assert f"{row.mean:.1f} %" in text


def on_page(page: str, flops: float, losses: tuple[float, ...]) -> bool:
    """Check whether a table row of ``page`` has these FLOPs, final losses, and their mean."""
    each = ", ".join(f"{x:.4f}" for x in losses)
    found = re.findall(rf"\| {flops:.3f} \|.* \**(\d\.\d{{4}})\** \[{each}\] \|", PAGES[page])
    # the seeds are rounded
    return any(float(x) == pytest.approx(mean(losses), abs=1.01e-4) for x in found)


@pytest.mark.parametrize("frontier", all_frontiers(), ids=lambda f: f.optimizer)
def test_figure_losses_match_the_page_and_give_the_savings(frontier):
    pairs = zip(frontier.flops, frontier.losses, strict=True)
    assert all(on_page(frontier.page, flops, losses) for flops, losses in pairs)
    rows = [
        e for e in OURS if e.losses and (e.page, e.optimizer) == (frontier.page, frontier.optimizer)
    ]
    assert len(rows) == 5
    for e in rows:
        for field in (*Setting.__dataclass_fields__, "data"):
            assert getattr(e, field) == getattr(frontier, field)
        assert on_page(e.page, e.flops, e.losses), e
        saved = [
            100 * (1 - e.flops / frontier.equal(loss, seed)) for seed, loss in enumerate(e.losses)
        ]
        assert mean(saved) == pytest.approx(e.mean, abs=0.15), e
        # The FLOPs of a run that samples its layers differ between seeds, but the data file has
        # only their mean.
        assert saved == pytest.approx(
            e.each or saved, abs=0.6 if e.method == "random_layers" else 0.15
        ), e
    assert not on_page("docs/results/muon.md", 0.647, (1.9444, 1.962, 1.9489))  # the control


def logged(folder: str, name: str) -> list[Run]:
    """Return the logged runs of one name, one for each seed."""
    return [*logged_runs(folder, name).values()]


def listed(values: list[float], digits: int, unit: str = "") -> str:
    """Return the mean, and behind it the value of each seed if there are several."""
    # the added 0.0 makes 0.0 of -0.0
    middle, *each = (f"{round(x, digits) + 0.0:.{digits}f}" for x in (mean(values), *values))
    return f"{middle}{unit}" if len(each) == 1 else f"{middle}{unit} [{', '.join(each)}]"


@pytest.mark.parametrize(
    ("rate", "folder", "names", "fractions"),
    [("2.5e-3", "m1_low", ("m1_low", "m1_low_deepen", "m1_low_halves", "m1_low_vcycle"), (0.75, 0.55)),
     ("2.5e-3", "m1_64", ("wiki_m1_64", "wiki_m1_64_deepen", "wiki_m1_64_vcycle"), (0.75,)),
     ("5e-3", "m1", ("wiki_m1", "wiki_m1_deepen"), (0.75,)),
     ("1e-2", "m1_6", ("m1_6", "m1_6_deepen", "m1_6_vcycle"), (0.75,)),
     ("5e-3", "m1_6_low", ("m1_6_low", "m1_6_low_deepen"), (0.75,)),
     ("5e-3", "m1_adamw_sweep", ("m1_adamw_5e-3", "m1_adamw_5e-3_deepen", "m1_adamw_5e-3_vcycle"), (0.75,))],
)  # fmt: skip
def test_the_logs_of_1_4_million_parameters_give_the_tables(rate, folder, names, fractions):
    configs = [logged(folder, name) for name in names]
    frontier = [logged(folder, f"{names[0]}-x{fraction}") for fraction in fractions]
    rates = {run.config["optim"]["peak_lr"] for runs in configs + frontier for run in runs}
    assert rates == {float(rate)}
    for row in Comparison(configs, frontier).rows():
        saved = listed([100 * x for x in row["saved_frontier"]], 1, " %")
        if len(row["seeds"]) > 2 and (half := row["saved_frontier_interval"]):
            saved = saved.replace(" [", f" ± {100 * half:.1f} [")
        text = f"| {rate} | {row['flops']:.3f} | {listed(row['loss'], 4)} | {saved} |"
        assert text in PAGES["docs/results/muon.md"], text


def test_the_logs_of_ten_epochs_give_the_table():
    configs = [
        logged("vit_long", f"cifar10_vit_long{name}")
        for name in ("", "_halves", "_deepen", "_vcycle")
    ]
    configs.append(logged("vit_long", "vit_long_half"))
    frontier = [logged("vit_long", f"cifar10_vit_long-x{x}") for x in (0.75, 0.55)]
    for row in Comparison(configs, frontier).rows():
        saved = listed([100 * x for x in row["saved_frontier"]], 1, " %")
        accuracy = listed([100 * x for x in row["accuracy"]], 1, " %")
        text = f"| {row['flops']:.3f} | {listed(row['loss'], 4)} | {accuracy} | {saved} |"
        assert text in PAGES["docs/results/encoders.md"], text
    rates = {run.config["optim"]["peak_lr"] for runs in configs + frontier for run in runs}
    assert rates == {1.5e-3}


def test_the_logs_of_the_longer_modernbert_give_the_table():
    names = ("encoder_long", "encoder_long_deepen", "encoder_long_vcycle", "encoder_long-x0.75")
    *configs, shorter = [logged("encoder_long", name) for name in names]
    for row in Comparison(configs, [shorter]).rows():
        ((loss,), (accuracy,), (saved,)) = (
            row[name] for name in ("loss", "accuracy", "saved_frontier")
        )
        parts = (listed([100 * x], 1, " %") for x in (accuracy, saved))
        text = f"| {row['flops']:.3f} | {loss:.4f} | {' | '.join(parts)} |"
        assert text in PAGES["docs/results/encoders.md"], text


@pytest.mark.parametrize(("name", "rates", "experiment"), [
    ("vit_sweep", ("7.5e-4", "1.5e-3", "3e-3"), "configs/cifar10.py:vit_long"),
    ("encoder_sweep", ("1.25e-3", "2.5e-3", "5e-3", "1e-2"), "configs/wikipedia_encoder.py:long"),
])  # fmt: skip
def test_the_logs_of_a_sweep_give_the_chosen_learning_rate(name, rates, experiment):
    losses = {}
    for rate in rates:
        (run,) = logged(name, f"{name}_{rate}")
        assert run.config["optim"]["peak_lr"] == float(rate)
        losses[rate] = run.loss
    best = min(losses, key=losses.get)
    assert load_experiment(experiment).optim.peak_lr == float(best)
    ends = [f"**{loss:.4f}**" if rate == best else f"{loss:.4f}" for rate, loss in losses.items()]
    told = [", ".join(words[:-1]) + f" and {words[-1]}" for words in ([*rates], ends)]
    page = " ".join(PAGES["docs/results/encoders.md"].split())
    assert f"{told[0]} end at {told[1]}" in page


def has_scores(run: Run, full: Run, task: str, split: str, rates: tuple[str, ...]) -> bool:
    """Check whether a page has a row with the cost, the loss and the logged scores of ``run``."""
    scores = []
    for rate in rates:
        folder = run.folder.parent / "finetune" / f"{task}-{run.folder.name}-lr{rate}-seed0"
        scores.append(json.loads((folder / "scores.json").read_text())[split]["accuracy"])
    cells = (f"**{x:.3f}**" if x == max(scores) else f"{x:.3f}" for x in scores)
    cost = run.cost("flops") / full.cost("flops")
    text = f"| {cost:.3f} | {run.loss:.4f} | {' | '.join(cells)} |"
    return text in PAGES["docs/results/finetuned.md"]


def test_the_scores_on_mnist_give_the_table():
    names = [
        f"cifar10_vit_long{x}" for x in ("", "-x0.75", "-x0.55", "_halves", "_deepen", "_vcycle")
    ]
    full, *others = (
        next(run for run in logged("vit_long", name) if run.seed == 1)
        for name in (*names, "vit_untrained", "vit_long_half")
    )
    for run in (full, *others):
        assert has_scores(run, full, "mnist", "valid", ("0.001", "0.003", "0.01")), run.name


def test_the_scores_on_sst2_give_the_table():
    full, *others = (
        logged("encoder_long", f"encoder_long{x}")[0]
        for x in ("", "_deepen", "_vcycle", "_untrained")
    )
    for run in (full, *others):
        assert has_scores(run, full, "sst2", "dev", ("0.0003", "0.001", "0.003")), run.name


def test_the_logs_of_a_single_warm_up_give_their_savings():
    names = ("wiki12_muon", "vc_a", "vc_b")  # the V-cycle, and the V-cycle that warms up once
    frontier = [logged("vcycle_once", "wiki12_muon-x0.75")]
    rows = Comparison([logged("vcycle_once", name) for name in names], frontier).rows()
    twice, once = (listed([100 * x for x in row["saved_frontier"]], 1) for row in rows[1:3])
    page = " ".join(PAGES["docs/results/muon.md"].split())
    (middle, each), (other, others) = (text.split(" ", 1) for text in (once, twice))
    assert f"saves {middle} % ± 5.4 {each} instead of {other} % {others}" in page
    assert 100 * rows[2]["saved_frontier_interval"] == pytest.approx(5.4, abs=0.05)
    assert f"a loss of {mean(rows[2]['loss']):.4f} instead of {mean(rows[1]['loss']):.4f}" in page
    method = load_experiment("configs/wikipedia12.py:muon_vcycle_once").method
    for run in logged("vcycle_once", "vc_b"):
        (trained,) = run.config["method"].values()
        for name in ("down", "up"):
            stages = [(stage["steps"], stage["warmup"]) for stage in trained[name]]
            assert stages == [(stage.steps, stage.warmup) for stage in getattr(method, name)]


def test_the_logs_of_the_learning_rates_give_their_distances():
    page = " ".join(PAGES["docs/results/muon.md"].split())
    ((low,), (lower,), (lowest,)) = (
        logged(name, name) for name in ("m1_6_low", "m1_6_lower", "m1_6_lowest")
    )
    for rate, run in (("2.5e-3", lower), ("1.25e-3", lowest)):
        assert run.config["optim"]["peak_lr"] == float(rate)
        assert f"| {rate} | 1.000 | {run.loss:.4f} | |" in page
    above = [run.loss - lower.loss for run in (low, lowest)]
    assert f"5e-3 ends {above[0]:.3f} higher, and 1.25e-3 ends {above[1]:.3f} higher" in page
    (grown,) = logged("m1_6_low", "m1_6_low_deepen")
    (flops,) = (row["flops"] for row in Comparison([[lower], [grown]], []).rows()[1:])
    text = f"from scratch, {lower.loss:.4f}, its best run ends {grown.loss - lower.loss:.3f} higher"
    assert f"{text}, with {flops:.3f} of the FLOPs" in page


def test_the_logs_of_adamw_at_1_4_million_parameters_give_their_losses():
    page = " ".join(PAGES["docs/results/muon.md"].split())
    rates = ("2.5e-3", "5e-3", "1e-2")
    sweep = [run for r in rates for run in logged("m1_adamw_sweep", f"m1_adamw_{r}")]
    assert [run.config["optim"]["peak_lr"] for run in sweep] == [float(r) for r in rates]
    assert {run.config["optim"]["warmup"] for run in sweep} == {446}
    (muon,) = logged("m1_6_lower", "m1_6_lower")
    (flops,) = {run.result["flops"] / muon.result["flops"] for run in sweep}
    losses = {rate: run.loss for rate, run in zip(rates, sweep, strict=True)}
    assert min(losses, key=losses.get) == "5e-3"
    for rate, loss in losses.items():
        assert f"| AdamW, from scratch | {rate} | 1.000 | {loss:.4f} |" in page
    assert f"{flops:.3f} of the FLOPs of Muon" in page
    for name, what in (("-x0.75", "from scratch"), ("_deepen", "with half of the layers first")):
        (run,) = logged("m1_6_low", f"m1_6_low{name}")
        share = run.result["flops"] / sweep[1].result["flops"]
        assert f"{share:.3f} of" in page and f"{what} ends at {run.loss:.4f}" in page


def test_the_logs_of_adamw_with_a_frontier_of_two_points_give_bounds():
    names = ("wiki_m1_adamw", "wiki_m1_adamw_deepen", "wiki_m1_adamw_vcycle")
    configs = [logged("m1_adamw", name) for name in names]
    frontier = [logged("m1_adamw_sweep", "m1_adamw_5e-3")]
    assert {runs[0].config["optim"]["peak_lr"] for runs in configs + frontier} == {5e-3}
    full, *grown, short = Comparison(configs, frontier).rows()
    for row in (full, short):
        text = f"| 5e-3 | {row['flops']:.3f} | {row['loss'][0]:.4f} | |"
        assert text in PAGES["docs/results/muon.md"], text
    for row in grown:
        (saved,), (below,) = row["saved_frontier"], row["below_frontier"]
        text = f"> {100 * saved:.1f} %" if below else f"at most {100 * saved:.1f} %"
        text = f"| 5e-3 | {row['flops']:.3f} | {row['loss'][0]:.4f} | {text} |"
        assert text in PAGES["docs/results/muon.md"], text


def of_3_million(*shorter: Run) -> list[dict]:
    """Return the rows of a comparison at 3 million parameters with these shorter runs."""
    names = ("wiki_m3", "wiki_m3_deepen", "wiki_m3_halves", "wiki_m3_vcycle")
    return Comparison([logged("m3", name) for name in names], [[run] for run in shorter]).rows()


def test_the_logs_of_3_million_parameters_give_the_table():
    (longer,), (shortest,) = logged("m3", "wiki_m3-x0.75"), logged("m3_sweep", "m3_sweep_2.5e-3")
    assert {run.config["optim"]["peak_lr"] for run in (longer, shortest)} == {2.5e-3}
    rows = of_3_million(longer, shortest)
    for row in rows:
        (saved,) = row["saved_frontier"]
        # Halves end far above the run with 0.75 of the steps, where no run of the frontier is near.
        about = "about " if row["run"] == "wiki_m3_halves" else ""
        assert bool(about) == (0.01 < row["loss"][0] - longer.loss < 0.05)
        saved = f"{about}{listed([100 * saved], 1, ' %')}"
        text = f"| 2.5e-3 | {row['flops']:.3f} | {row['loss'][0]:.4f} | {saved} |"
        assert text in PAGES["docs/results/muon.md"], text
    _, deepen, halves, vcycle, _ = of_3_million(shortest)
    each = [f"{100 * row['saved_frontier'][0]:.1f}" for row in (vcycle, deepen, halves)]
    page = " ".join(PAGES["docs/results/muon.md"].split())
    assert f"Without this run, the savings would be {each[0]}, {each[1]} and {each[2]} %." in page


def test_a_second_seed_corrects_the_shorter_run_of_3_million_parameters(tmp_path):
    """The shorter run of seed 0 ran on a CPU, the full run on a GPU. Both runs of seed 1 ran on a CPU."""
    (full,), (short,), (shortest,) = (
        logged(*run)
        for run in (("m3", "wiki_m3"), ("m3", "wiki_m3-x0.75"), ("m3_sweep", "m3_sweep_2.5e-3"))
    )
    (full_1,), (short_1,) = (logged("m3_cpu", name) for name in ("wiki_m3", "wiki_m3-x0.75"))
    difference, mixed = short_1.loss - full_1.loss, short.loss - full.loss
    folder = shutil.copytree(short.folder, tmp_path / short.folder.name)
    result = short.result | {"val_loss": full.loss + difference}
    (folder / "result.json").write_text(json.dumps(result))
    corrected = Run(short.name, short.seed, folder)
    _, deepen, halves, vcycle, *_ = of_3_million(corrected, shortest)
    each = [f"{100 * row['saved_frontier'][0]:.1f}" for row in (vcycle, deepen, halves)]
    runs = [shortest, corrected, full]
    (below,) = -below_line([r.cost("flops") for r in runs], [r.loss for r in runs])
    page = " ".join(PAGES["docs/results/muon.md"].split())
    for text in (
        f"They end at {full_1.loss:.4f} and, with 0.75 of the budget, {short_1.loss:.4f}.",
        f"The difference is {difference:.4f}, with seed 0 on two kinds of hardware {mixed:.4f}.",
        f"would be {each[0]} % (V-cycle), {each[1]} % (half of the layers first) and {each[2]} % (halves).",
        f"Corrected by a second seed, the savings are {each[0]}, {each[1]} and {each[2]} %.",
        f"corrected by a second seed, they save {each[0]} and {each[1]} %.",
        f"and {below:.3f} below it with the difference of seed 1.",
    ):
        assert text in page, text
    for name in ("README.md", "docs/results/index.md", "docs/papers/multilevel.md"):
        assert f"or {each[0]} % if the shorter run" in " ".join(PAGES[name].split())
    losses = [
        [row["loss"] for row in run.log if "loss" in row and row["step"] <= 6_000]
        for run in (full_1, short_1)
    ]
    assert losses[0] and losses[0] == losses[1]


def test_the_run_on_a_cpu_begins_like_the_run_on_a_gpu():
    """The run with 0.75 of the steps ran on a CPU, the other runs of 3 million parameters on a GPU."""
    (full,), (short,) = (logged("m3", name) for name in ("wiki_m3", "wiki_m3-x0.75"))
    losses = []
    for run in (full, short):
        rows = map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines())
        losses.append({row["step"]: (row["lr"], row["loss"]) for row in rows if "loss" in row})
    same = [
        s for s in losses[0] if s in losses[1] and losses[0][s][0] == pytest.approx(losses[1][s][0])
    ]
    assert max(same) >= 5_500
    distance = np.array([losses[1][s][1] - losses[0][s][1] for s in same])
    page = " ".join(PAGES["docs/results/muon.md"].split())
    assert (
        f"differ by {np.abs(distance).max():.3f} at most, and by {distance.mean():.3f} on average"
        in page
    )


def below_line(flops: list[float], losses: list[float]) -> np.ndarray:
    """Return how far the losses are below the line over log FLOPs between the first and the last."""
    x = np.log(flops)
    return np.interp(x, x[[0, -1]], [losses[0], losses[-1]])[1:-1] - losses[1:-1]


def test_the_loss_between_distant_budgets_is_below_the_line():
    """A saving that is read from two distant budgets is then an upper bound; at 3 million it is not."""
    for f in all_frontiers():
        assert (below_line([*f.flops], [mean(each) for each in f.losses]) > 0).all()
    sizes = {
        "m1_low": [("m1_6_lower", "m1_6_lower"), ("m1_low", "m1_low-x0.55")],
        "m1_adamw_sweep": [("m1_adamw_sweep", "m1_adamw_5e-3-x0.55")],
        "m3": [("m3_sweep", "m3_sweep_2.5e-3")],
    }
    page = " ".join(PAGES["docs/results/muon.md"].split())
    names = ("m1_low", "m1_adamw_5e-3", "wiki_m3")
    for (folder, short), name in zip(sizes.items(), names, strict=True):
        runs = [*(logged(*run)[0] for run in short), logged(folder, f"{name}-x0.75")[0]]
        runs.append(logged(folder, name)[0])
        below = below_line([r.cost("flops") for r in runs], [r.loss for r in runs])
        if name != "wiki_m3":
            assert (below > 0).all()
        if name == "m1_low":
            assert f"such a line is {below[0]:.3f} and {below[1]:.3f} above the" in page
        if name == "wiki_m3":
            assert f"is {-below[0]:.3f} below the measured loss at 0.75 of the" in page


def test_the_logs_give_the_steps_that_half_of_the_layers_first_is_behind():
    behind = []
    for folder, name, *others in (
        ("m1_64", "wiki_m1_64"),
        ("m3", "wiki_m3", ("m3_sweep", "m3_sweep_2.5e-3")),
        ("m1_low", "m1_low"),
    ):
        configs = [logged(folder, name), logged(folder, f"{name}_deepen")]
        frontier = [logged(*run) for run in ((folder, f"{name}-x0.75"), *others)]
        _, grown, *_ = Comparison(configs, frontier).rows()
        equal = grown["flops"] / (1 - mean(grown["saved_frontier"]))
        late, steps = 1 - equal, configs[0][0].config["steps"]
        # The small model trains for half of the steps.
        behind.append((f"{round(late * steps, -2):,.0f} steps behind", f"is {2 * late:.2f} of the"))
    page = " ".join(PAGES["docs/results/muon.md"].split())
    same, larger, small = behind
    assert f"ends {same[0]} the run from scratch, which {same[1]} steps of the small model" in page
    assert f"{larger[0]}, which {larger[1].replace('is', 'is also')}m. At" in page
    assert f"{small[0]}, which {small[1]}m. -" in page


def test_the_larger_batch_helps_the_run_from_scratch_most():
    gains = []
    for name in ("", "-x0.75", "_deepen"):
        ((small,), (large,)) = (
            [run for run in logged(folder, base + name) if run.seed == 0]
            for folder, base in (("m1_low", "m1_low"), ("m1_64", "wiki_m1_64"))
        )
        assert (small.config["batch"], large.config["batch"]) == (16, 64)
        assert small.result["tokens"] == pytest.approx(large.result["tokens"], rel=1e-3)
        gains.append(f"{small.loss - large.loss:.3f} lower")
    page = " ".join(PAGES["docs/results/muon.md"].split())
    assert f"ends {gains[0]}, the run with 0.75 of the budget {gains[1]}, and half" in page
    assert f"and half of the layers first {gains[2]}." in page


def test_the_logs_give_the_lags_in_intrinsic_time_and_the_gaps():
    page = PAGES["docs/results/lag.md"]
    for table in (lag.table_of_lags(), lag.table_of_gaps()):
        assert table in page, "python -m benchmarks.lag prints it again"
    every, half = (
        [f"{lag.spread(clock, method):.2f}" for clock in ("steps", "intrinsic time")]
        for method in ("", lag.DEEPEN)
    )
    page = " ".join(page.split())
    assert f"is {every[0]} with steps and {every[1]} with intrinsic time" in page
    assert f"For half of the layers alone, it is {half[0]} and {half[1]}." in page


def test_the_time_of_a_run_is_the_integral_of_its_learning_rate():
    run = logged("m1_low", "m1_low")[0]
    steps, warmup = run.config["steps"], run.config["optim"]["warmup"]
    # It warms up, is constant, and decays over half of the steps after the warm-up.
    expected = 2.5e-3 * (steps - warmup / 2 - (steps - warmup) / 4)
    assert lag.elapsed(run, "steps") == steps
    assert lag.elapsed(run, "intrinsic time") == pytest.approx(expected, rel=1e-3)
    assert lag.elapsed(run, "steps", small=True) == 0
    found = lag.fitted(
        [(np.array([0.2, 0.5, 1.0, 2.0]), lag.power(np.array([0.2, 0.5, 1, 2]), 1e-3, 5e-3, 0.7))]
    )
    np.testing.assert_allclose(found, [1e-3, 5e-3, 0.7], rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "label", "rates"),
    [
        ("m3_sweep", "Muon, from scratch", ("1.25e-3", "2.5e-3", "5e-3", "1e-2", "2e-2")),
        ("m3_deepen_sweep", "half of the layers first", ("", "2.5e-3", "5e-3", "1e-2", "")),
    ],
)
def test_the_logs_of_the_learning_rates_of_3_million_parameters_give_the_table(name, label, rates):
    losses = [
        logged("m3_sweep", f"{name}_{rate}")[0].loss if rate else float("inf") for rate in rates
    ]
    cells = [f"{x:.4f}".replace("inf", "") for x in losses]
    cells[losses.index(min(losses))] = f"**{min(losses):.4f}**"
    row = f"| {label} | {' | '.join(cells)} |".replace("|  |", "| |")
    assert row in PAGES["docs/results/muon.md"], row
    if label == "Muon, from scratch":
        best = rates[losses.index(min(losses))]
        assert load_experiment("configs/wikipedia_sizes.py:m3").optim.peak_lr == float(best)


def test_the_logs_of_layer_dropping_at_1_4_million_parameters_give_the_table():
    full = "m1_adamw_5e-3"
    names = (full, *(f"{full}_{name}" for name in ("pld", "sbld", "uniform")))
    configs = [logged("m1_adamw_sweep", name) for name in names]
    frontier = [logged("m1_adamw_sweep", f"{full}-x{fraction}") for fraction in (0.55, 0.75)]
    page = PAGES["docs/results/dropping.md"].split("## At 1.4 million parameters")[1]
    for row in Comparison(configs, frontier).rows():
        (saved,) = row["saved_frontier"]
        text = "above every run from scratch" if saved is None else listed([100 * saved], 1, " %")
        expected = rf"\| {row['flops']:.3f} \|.*\| {row['loss'][0]:.4f} \| {text} \|"
        assert re.search(expected, page), expected
    for (run,) in configs:
        last = run.result["phases"][-1]
        assert f"| {last['layers'] / last['steps']:.2f}" in page


def fit_rows(rows: list[Evidence]) -> Fit:
    """Fit the saving against size and tokens per parameter, with all seeds of ``rows``."""
    points = [
        Measured((e.parameters, e.tokens_per_parameter), tuple(x / 100 for x in e.each), e.bounds)
        for e in rows
        if e.each
    ]
    return fit_savings(points)


def regressions() -> set[tuple[float, float]]:
    """Return slopes per doubling and expected savings of the two recipes with several sizes.

    Both recipes were measured on Wikipedia.
    """
    found = set()
    for method, tau in (("halves", 0.6), ("deepen", 0.5)):
        rows = [
            e
            for e in method_rows(method, tau)
            if (e.family, e.optimizer, e.data) == ("GPT2", "Muon", "Wikipedia")
        ]
        # Some runs have larger batches, so the page has fits with and without them.
        for some in (rows, [e for e in rows if "Batches of 64" not in e.note]):
            line = fit_rows(some)
            found |= {line.slope(axis) for axis in line.slopes} | set(map(line.expected, SIZES))
    return {(100 * value, 100 * half) for value, half in found}


def known(value: str, half: str, numbers: set[tuple[float, float]]) -> bool:
    """Check whether a rounded mean and its interval are among ``numbers``.

    A page may show a negative saving as a positive loss.
    """

    def rounds(text: str, number: float) -> bool:
        return abs(float(text) - number) <= 0.5 * 10.0 ** -len(text.partition(".")[2]) + 1e-9

    return any((rounds(value, a) or rounds(value, -a)) and rounds(half, b) for a, b in numbers)


def test_every_interval_on_a_page_comes_from_the_data_file():
    pairs = [pair for e in OURS for pair in ((e.mean, e.interval), (e.given, e.given_interval))]
    numbers = regressions() | {pair for pair in pairs if None not in pair}
    strange = {
        f"{page}: {value} % ± {half}"
        for page, text in PAGES.items()
        for value, half in INTERVAL.findall(text)
        if not known(value, half, numbers)
    }
    assert not strange
    assert not known("14.0", "8.6", numbers) and not known("17.7", "3.6", numbers)  # the control


@pytest.mark.parametrize("page", ["multilevel", "ligo", "pld", "sbld"])
def test_savings_on_a_paper_page_come_from_the_data_file(page):
    numbers = {abs(x) for e in OURS for x in (e.mean, e.interval, *e.each) if x is not None}
    measured = " ".join(PAGES[f"docs/papers/{page}.md"].split("## Our measurements")[1].split())
    told = {float(x) for x in re.findall(r"(\d+\.\d)(?= %| and \d)", measured)}
    assert told <= numbers
    assert told or page == "pld"
    box = re.findall(
        r"^\| ([\w ]+) \| .", PAGES[f"docs/papers/{page}.md"].split("## ")[0], re.MULTILINE
    )
    assert box == ["at a glance", "scale of the paper", "our scale", "reproduced", "code"]


def test_the_summary_has_ten_rows_from_the_data_file():
    page = PAGES["docs/results/index.md"]
    table = summary_table("docs/results")
    assert table in page, "python docs/tables.py writes it again"
    rows = table.splitlines()[2:]
    assert len(rows) == 10 and all(
        (ROOT / "docs/results" / re.search(r"\((.*?)\)", row)[1]).exists() for row in rows
    )
    assert page.index(table) < page.index("## All results")


def covered() -> float:
    """Return the part of the outcomes that lies in the interval of its forecast."""
    held_out = held_out_forecasts()
    return mean(f.interval[0] <= e.outcome / 100 <= f.interval[1] for e, f in held_out)


def test_the_forecasts_are_calibrated():
    """90 % intervals contain 85 to 95 % of the outcomes of comparisons that they do not use."""
    held_out = held_out_forecasts()
    assert len(held_out) == len(forecast_rows()) > 50
    settings = {row.comparison for row, _ in held_out}
    assert len(settings) == 20 and len({row.parameters for row, _ in held_out}) > 7
    assert 0.85 <= covered() <= 0.95
    count = round(covered() * len(held_out))
    page = " ".join(PAGES["docs/should-i-grow.md"].split())
    text = f"contain {count} of the {len(held_out)} outcomes ({covered():.0%}) of {len(settings)}"
    assert f"{text} comparisons" in page


def test_the_forecasts_of_seconds_are_calibrated():
    """As far as the logs have the times of steps; the same law as for FLOPs."""
    timed = held_out_seconds()
    assert {id(row) for row, _ in timed} == {
        id(e) for e in forecast_rows() if e.outcome_seconds is not None
    }
    inside = [f.interval[0] <= e.outcome_seconds / 100 <= f.interval[1] for e, f in timed]
    assert len(inside) == 23 and 0.85 <= mean(inside) <= 0.95
    for row, found in timed:
        others = [e for e in forecast_rows() if e.comparison != row.comparison]
        expected = forecast_saving(row, others, row.seeds)
        time = row.flops + row.small * (small_slowdown(others, row.method)[0] - 1)
        assert 1 - found.saved == pytest.approx((1 - expected.saved) * time / row.flops)
        assert found.deviation > expected.deviation


def test_without_the_cost_of_the_small_model_the_savings_are_those_of_the_data_file():
    rows = [e for e in forecast_rows() if e.given is not None and e.mean is not None]
    assert len(rows) > 3
    for e in rows:
        assert 100 - (100 - e.mean) * e.pace(0.0) == pytest.approx(e.given, abs=0.3)


def test_the_outcome_in_seconds_is_the_ratio_of_times():
    """The small model has 0.25 of the FLOPs of a run from scratch, and takes 1.2 times as long."""
    (row,) = [
        e for e in OURS if (e.method, e.parameters, e.data) == ("deepen", 354_720, "Wikipedia")
    ]
    row = replace(row, flops=0.75, mean=10.0, slowdown=1.2)
    assert row.small == 0.25 and row.outcome_seconds == pytest.approx(100 * (1 - 0.9 * 0.8 / 0.75))
    assert replace(row, slowdown=1.0).outcome_seconds == pytest.approx(10)
    assert row.pace(0.0) == pytest.approx(0.5 / 0.75), "the small model exists already"


def test_a_forecast_does_not_see_the_comparison_that_judges_it(monkeypatch):
    """If all outcomes of a comparison change, the forecasts for it stay the same."""
    row, found = held_out_forecasts()[0]
    others = [e for e in forecast_rows() if e.comparison != row.comparison]
    assert found == forecast_saving(row, others, row.seeds)
    changed = [
        replace(e, mean=-50.0, each=()) if e.comparison == row.comparison else e
        for e in all_evidence()
    ]
    monkeypatch.setattr(forecast, "all_evidence", lambda: changed)
    assert held_out_forecasts()[0][1] == found
    assert sum(e.outcome == -50 for e in forecast_rows()) > 5


def test_a_forecast_is_the_posterior_of_the_lag():
    """The equations of the module, with the densities of scipy."""
    settings = [
        (1e6, 20.0, "deepen"),
        (16e6, 20.0, "deepen"),
        (1e6, 40.0, "vcycle"),
        (4e6, 40.0, "deepen"),
    ]
    *cases, new = [
        Case("A", "Muon", n, tokens, method=method, tau=0.5, flops=0.75)
        for n, tokens, method in settings
    ]
    assert [case.place for case in (*cases, new)] == [(0, 0), (1, 0), (0, 1), (0.5, 1)]
    assert cases[0].reach == 0.5 and cases[0].distance(cases[2]) == 1 + OTHER
    rows = [
        Evidence(
            **vars(c), data="", baseline="swept", seeds=2, page="", each=(x, x + 4), mean=x + 2
        )
        for c, x in zip(cases, (16.0, 12.0, 8.0), strict=True)
    ]
    logs = np.log1p(-np.array([e.each for e in rows]) / 100)
    seeds = np.var(logs, axis=1, ddof=1).mean()
    lags = [math.log((1 - e.mean / 100) / 0.75) / 0.5 for e in rows]
    every = [*cases, new]

    def covariance(spread: float) -> np.ndarray:
        def entry(a: Case, b: Case) -> float:
            level = 0.5**2 * (1 + (a.method == b.method)) + 0.1**2 * np.dot(a.place, b.place)
            return level + spread**2 * math.exp(-a.distance(b))

        noise = np.diag([seeds / 2 / 0.5**2] * 3 + [0.0])
        return np.array([[entry(a, b) for b in every] for a in every]) + noise

    best = max(
        forecast.SPREADS, key=lambda s: multivariate_normal(cov=covariance(s)[:3, :3]).logpdf(lags)
    )
    inverse = np.linalg.inv(covariance(best))  # its last row has the conditional distribution
    variance = 1 / inverse[3, 3]
    found = forecast_saving(new, rows, seeds=2)
    assert found.mean == pytest.approx(math.log(0.75) - 0.5 * variance * inverse[3, :3] @ lags)
    assert found.deviation == pytest.approx(math.sqrt(0.5**2 * variance + seeds / 2))
    low, high = (1 - math.exp(norm(found.mean, found.deviation).ppf(p)) for p in (0.95, 0.05))
    assert found.interval == pytest.approx((low, high), abs=1e-4)


def test_a_pilot_is_one_more_measurement():
    rows = forecast_rows()
    far = Case("Llama", "AdamW", 7e9, 140.0, method="deepen", tau=0.5, flops=0.75)
    # The lag of a pilot is too small; the mean and the variance of its error come from other models.
    bias, noise = pilot_error(rows)
    assert bias > 0.1
    alone, seeds = forecast_saving(far, rows), seed_variance(rows, far.optimizer)
    late = (alone.mean - math.log(far.flops)) / far.reach
    variance = (alone.deviation**2 - seeds) / far.reach**2
    weight = variance / (variance + noise)  # of the mean of two normal distributions
    # With these two, the most likely spread is that without a pilot.
    for measured in (0.0, 0.3):
        pilot = PilotRow(**vars(far), steps=200, lag=measured, page="")
        found = forecast_saving(far, rows, pilot=pilot)
        expected = (1 - weight) * late + weight * (measured + bias)
        assert found.mean == pytest.approx(math.log(far.flops) + far.reach * expected)
        assert found.deviation**2 == pytest.approx(weight * noise * far.reach**2 + seeds)
    others = [e for e in rows if e.parameters != 94_416]
    errors = [
        mean(e.lag for e in others if (e.key, e.method) == (p.key, p.method)) - p.lag
        for p in all_pilots()
        if p.parameters != 94_416
    ]
    assert len(errors) == 7
    assert pilot_error(others) == pytest.approx((mean(errors), np.var(errors, ddof=1) * 8 / 7))


def test_the_costs_of_the_forecast_come_from_the_pages_or_the_configs():
    configs = {24_832: "k24", 44_512: "k47", 162_752: "k163", 354_720: "k355"}
    for e in forecast_rows():
        if e.parameters in configs:
            name = f"configs/wikipedia_sizes.py:{configs[e.parameters]}"
            cost = load_experiment(f"{name}_{e.method}").cost / load_experiment(name).cost
            assert e.flops == pytest.approx(cost, abs=6e-4)
        else:
            assert re.search(rf"\| {e.flops:.3f} +\|", PAGES[e.page]), e
    for e in forecast_rows():
        if e.rough is not None:
            assert f"{e.rough} %" in PAGES[e.page] and f"{e.rough} %" in e.note


def test_the_logs_give_the_slowdown_of_small_models():
    kinds = {lag.DEEPEN: "deepen", lag.HALVES: "halves", lag.VCYCLE: "vcycle"}
    measured = set()
    groups = [
        (g.model, g.tokens, g.folder, kinds[m], n)
        for g in lag.GROUPS
        for m, n in g.grown.items()
        if m in kinds
    ]
    groups.append(("AdamW", 20, "m1_adamw", "deepen", "wiki_m1_adamw_deepen"))
    for model, tokens, folder, method, name in groups:
        runs = logged(folder, name)
        value = round(mean(map(run_slowdown, runs)), 2)
        measured.add((runs[0].parameters, model.split()[-1], tokens, method, value))
    rows = [e for e in forecast_rows() if e.slowdown is not None]
    listed_rows = {
        (e.parameters, e.optimizer, round(e.tokens_per_parameter), e.method, e.slowdown)
        for e in rows
    }
    assert len(rows) == len(listed_rows) == 23
    assert listed_rows == {m for m in measured if m[0] > 1e6}


def test_the_logs_and_the_page_give_the_lags_of_the_pilots():
    names = {354_720: "wiki_k355", 1_139_818: "cifar10_vit_long", 1_372_992: "wiki_m1"}
    for p in all_pilots():
        if p.parameters == 94_416:
            cells = re.search(rf"\| {p.steps}(?:, the.*?)? \| (\S+) \| (\S+) \|", PAGES[p.page])
            assert float(cells[1 + (p.method == "halves")]) == p.lag
            continue
        name = names[p.parameters] + "_adamw" * (p.optimizer == "AdamW") + "-pilot"
        losses = [
            [line["loss"] for line in logged("pilots", n)[0].log if "loss" in line]
            for n in (name, f"{name}-{p.method}")
        ]
        assert steps_behind(*losses, p.steps) == pytest.approx(p.lag, abs=0.0051)


def test_an_amount_has_two_digits_or_a_whole_number():
    told = {999: "999", 1_000: "1 K", 94_123: "94 K", 99_499: "99 K", 99_500: "100 K"}
    told |= {999_499: "999 K", 999_600: "1 M", 1_372_992: "1.4 M", 99_700_000: "100 M"}
    told |= {123_456_789_000: "123 B"}
    assert {count: short_count(count) for count in told} == told


def test_logs_of_new_runs_are_added_to_the_archive(tmp_path, monkeypatch):
    old = curves.unpacked_archive()
    new = tmp_path / "more" / "again-seed3"
    shutil.copytree(logged("m1", "wiki_m1")[0].folder, new)
    (new / "params").touch()
    shutil.copy(curves.ARCHIVE, tmp_path)
    monkeypatch.setattr(curves, "ARCHIVE", tmp_path / "runs.tar.xz")
    shutil.copytree(new.parent, tmp_path / "other")
    shutil.copytree(new, tmp_path / "unfinished-seed0", ignore=lambda *_: ["result.json"])
    shutil.copytree(tmp_path / "unfinished-seed0", tmp_path / "more" / "unfinished-seed0")
    with pytest.raises(UserError, match="has no finished runs"):
        curves.add_runs(tmp_path)
    curves.unpacked_archive.cache_clear()
    for folder in ("more", "other"):
        curves.add_runs(tmp_path / folder)
    with tarfile.open(tmp_path / "runs.tar.xz") as archive:
        names = {m.name for m in archive.getmembers()}
    curves.unpacked_archive.cache_clear()
    files = {str(f.relative_to(old)) for f in old.rglob("*") if f.is_file()}
    kept = ("config.json", "metrics.jsonl", "result.json")
    added = {f"{folder}/again-seed3/{name}" for folder in ("more", "other") for name in kept}
    assert names == files | added

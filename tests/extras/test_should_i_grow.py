"""The numbers of docs/should-i-grow.md come from the logs, the data file and the forecast."""

from pathlib import Path
from statistics import mean

import pytest

from benchmarks.curves import logged_runs
from train.advise import full_report, recipe_answers, with_stable_rate
from train.analysis.savings import Comparison
from train.config.experiment import load_experiment
from train.extras.advice.evidence import all_pilots, method_rows
from train.extras.advice.forecast import forecast_rows, pilot_error, small_slowdown

ROOT = Path(__file__).parents[2]
PAGE = " ".join((ROOT / "docs/should-i-grow.md").read_text().split())


def saved(method: str, parameters: int, tokens: float, optimizer: str = "Muon", **also) -> list:
    """Return the rows of the data file at a setting."""
    rows = [
        e for e in method_rows(method) if (e.parameters, e.optimizer) == (parameters, optimizer)
    ]
    rows = [e for e in rows if e.tokens_per_parameter == tokens and e.data == "Wikipedia"]
    return [e for e in rows if all(getattr(e, name) == value for name, value in also.items())]


def test_the_savings_are_rows_of_the_data_file():
    halves, deepen = (
        saved(method, 94_416, 19.5, tau=tau)[0]
        for method, tau in (("halves", 0.6), ("deepen", 0.5))
    )
    assert f"**Partly.** With every learning rate swept, it is {halves.saved} (94 K" in PAGE
    assert halves.baseline == "swept" and halves.seeds == 3
    text = f"{deepen.given:.1f} % ± {deepen.given_interval} instead of {deepen.saved}"
    assert f"Half of the layers first saved {text}" in PAGE
    vcycle = saved("vcycle", 1_372_992, 20.0, seeds=3)[0]
    assert f"at 1.4 M {vcycle.saved} (V-cycle, [three seeds]" in PAGE
    twice = [e for e in forecast_rows() if e.baseline == "untuned" and e.tokens_per_parameter == 20]
    tuned = saved("deepen", 1_372_992, 20.0)[0]
    assert f"would have shown {twice[0].mean} instead of {tuned.mean} %" in PAGE
    longer = saved("halves", 94_416, 48.8)[0]
    assert f"At 49 tokens per parameter, halves saved {longer.saved} ([94 K" in PAGE
    for method in ("halves", "deepen", "vcycle"):
        (row,) = saved(method, 94_416, 48.8)
        assert row.mean < row.interval, "no saving differs from zero"
    muon = saved("muon", 94_416, 19.5, "AdamW")[0]
    assert f"saved more than {muon.mean} % ([three seeds]" in PAGE and muon.bounds == 3
    adamw = saved("deepen", 94_416, 19.5, "AdamW", seeds=3)[0]
    assert "seeds of one recipe saved {}, {} and {} %".format(*adamw.each) in PAGE
    large = [saved(method, 3_054_816, 20.0)[0].outcome for method in ("vcycle", "deepen", "halves")]
    assert "one seed saved {}, {} and about {} %".format(*large) in PAGE


def test_no_seed_under_muon_saved_nothing():
    rows = [e for e in forecast_rows() if e.optimizer == "Muon" and e.tokens_per_parameter < 21]
    seeds = [x for e in rows for x in (*e.each, *([] if e.rough is None else [e.rough]))]
    lost = sum(x <= 0 for x in seeds)
    assert f"{lost} of {len(seeds)} runs of the three recipes saved nothing" in PAGE
    assert f"the least is about {min(seeds)} %" in PAGE


def test_the_seconds_come_from_the_logs():
    rows = forecast_rows()
    deepen, halves = (small_slowdown(rows, method)[0] for method in ("deepen", "halves"))
    counts = [
        sum(e.method == method and e.slowdown is not None for e in rows)
        for method in ("deepen", "halves")
    ]
    assert f"takes {deepen:.2f} times as long as the full model" in PAGE
    most = max(e.slowdown for e in rows if e.slowdown is not None)
    assert f"{halves:.2f} times, up to {most} on an H200" in PAGE
    assert f"({counts[0]} and {counts[1]} comparisons in the logs" in PAGE
    base, *grown = (
        logged_runs("m3", f"wiki_m3{name}")[0].result
        for name in ("", "_deepen", "_halves", "_vcycle")
    )
    more = max(run["compile_seconds"] for run in grown) - base["compile_seconds"]
    minutes = min(run["seconds"] for run in grown) / 60
    assert f"compilation took up to {more:.0f} s longer, in a run of {minutes:.1f} minutes" in PAGE


def test_the_losses_come_from_the_logs():
    base, *grown = (
        [*logged_runs("m1_low", f"m1_low{name}").values()]
        for name in ("", "_deepen", "_halves", "_vcycle")
    )
    above = [mean(r.loss for r in runs) - mean(r.loss for r in base) for runs in grown]
    cost = [runs[0].cost("flops") / base[0].cost("flops") for runs in grown]
    text = f"At 1.4 M it is {min(above):.3f} to {max(above):.3f} higher, with {min(cost):.2f} to {max(cost):.2f} of the FLOPs"
    assert text in PAGE
    full, half, *shorter = (
        logged_runs("vit_long", name)
        for name in (
            "cifar10_vit_long",
            "vit_long_half",
            "cifar10_vit_long-x0.75",
            "cifar10_vit_long-x0.55",
        )
    )
    runs = [[*some.values()] for some in (full, half, *shorter)]
    row = Comparison(runs[:2], runs[2:]).rows()[1]
    assert f"needed {100 * mean(row['saved_frontier']):.1f} % fewer FLOPs" in PAGE


def test_the_pilots_have_the_error_of_the_page():
    bias, variance = pilot_error(forecast_rows())
    count = len(all_pilots())
    spread = (variance / (1 + 1 / count)) ** 0.5
    assert f"In {count} pilots of measured models" in PAGE
    assert f"too small by {bias:.2f} on average, with a standard deviation of {spread:.2f}" in PAGE


@pytest.mark.parametrize(
    ("config", "row"),
    [
        ("wikipedia_sizes.py:m1", "GPT, 1.4 M, Muon"),
        ("papers/gpt.py:base_c4", "GPT-2, 124 M, AdamW"),
        ("papers/llama.py:llama_7b_c4", "Llama, 7 B, AdamW"),
        ("cifar10.py:vit_muon", "ViT, 0.7 M, Muon"),
    ],
)
def test_the_forecasts_are_those_of_the_command(config, row):
    assert f"`{config}`" in PAGE
    experiment = load_experiment(f"configs/{config}", corpus=False)
    best = recipe_answers(with_stable_rate(experiment))[0][0]
    cells = [
        f"{100 * f.saved:.0f} % ({100 * f.interval[0]:.0f} to {100 * f.interval[1]:.0f})"
        for f in (best.flops, best.seconds)
    ]
    decision = full_report(experiment)[0].splitlines()[-1]
    text = f"| {row} | {best.case.tokens_per_parameter:.0f} | {' | '.join(cells)} | "
    assert text in PAGE
    told = PAGE.partition(text)[2].partition(" |")[0]
    assert decision.startswith(told.partition(":")[0])
    assert (": the small model alone was cheaper" in told) == (
        "training only the small" in decision
    )

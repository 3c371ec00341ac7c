"""Every number of docs/should-i-grow.md comes from the logs, the data file or the forecast."""

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from statistics import mean

import pytest

from benchmarks import gpu_tables
from benchmarks.curves import logged_runs
from train import advise
from train.advise import full_report, recipe_answers, with_stable_rate
from train.analysis.runs import Run
from train.analysis.savings import Comparison
from train.config.experiment import load_experiment
from train.extras.advice import evidence, forecast
from train.extras.advice.evidence import Evidence, all_evidence, all_pilots, method_rows
from train.extras.advice.forecast import (
    Forecast,
    forecast_rows,
    held_out_forecasts,
    held_out_seconds,
    pilot_error,
    small_slowdown,
)
from train.extras.report_sections import step_seconds

ROOT = Path(__file__).parents[2]
PAGE = " ".join((ROOT / "docs/should-i-grow.md").read_text().split())
CONFIGS = (
    ("wikipedia_sizes.py:m1", "GPT, 1.4 M, Muon"),
    ("wikipedia_sizes.py:m1:steps=214_400", "GPT, 1.4 M, Muon"),
    ("papers/gpt.py:xl_c4:optim.name=muon:steps=79_000", "GPT-2, 1.6 B, Muon"),
    ("papers/gpt.py:base_c4", "GPT-2, 124 M, AdamW"),
    ("wikipedia_encoder.py:muon", "ModernBERT, 0.3 M, Muon"),
    ("cifar10.py:vit_muon", "ViT, 0.7 M, Muon"),
)
# Numbers that are defined, not measured: the sizes of intervals, and a constant of the page.
DEFINED = {"90", "95"}


def saved(method: str, parameters: int, tokens: float, optimizer: str = "Muon", **also) -> list:
    """Return the rows of the data file at a setting."""
    rows = [
        e for e in method_rows(method) if (e.parameters, e.optimizer) == (parameters, optimizer)
    ]
    rows = [e for e in rows if e.tokens_per_parameter == tokens and e.data == "Wikipedia"]
    return [e for e in rows if all(getattr(e, name) == value for name, value in also.items())]


def logged(folder: str, *names: str) -> list[list[Run]]:
    return [[*logged_runs(folder, name).values()] for name in names]


def questions() -> Iterator[str]:
    long = "cifar10_vit_long"
    full, half, *shorter = logged(
        "vit_long", long, "vit_long_half", f"{long}-x0.75", f"{long}-x0.55"
    )
    row = Comparison([full, half], shorter).rows()[1]
    yield f"needed {100 * mean(row['saved_frontier']):.1f} % fewer FLOPs"
    assert len(full) == 2
    muon = saved("muon", 94_416, 19.5, "AdamW")[0]
    assert muon.bounds == muon.seeds == 3
    yield f"saved more than {muon.mean} % ([three seeds]"
    deepen = saved("deepen", 94_416, 19.5, tau=0.5)[0]
    text = f"{deepen.given:.1f} % ± {deepen.given_interval:.1f} instead of {deepen.saved}"
    yield f"saved {text} ([94 thousand parameters, three seeds]"
    rows = [e for e in forecast_rows() if e.tokens_per_parameter in (19.5, 19.8, 20.0)]
    rows = [e for e in rows if (e.family, e.data, e.optimizer) == ("GPT2", "Wikipedia", "Muon")]
    means = [e.mean for e in rows if e.seeds > 2 and e.mean is not None]
    most = max(e.parameters for e in rows if e.seeds > 2)
    yield f"At about 20, and up to {most / 1e6:.1f} million parameters, growing saved {min(means):.0f} to {max(means):.0f} %"
    for method in ("halves", "deepen", "vcycle"):
        (row,) = saved(method, 94_416, 48.8)
        assert row.mean < row.interval, "no saving differs from zero"
    yield f"At {row.tokens_per_parameter:.0f}, no saving differs from zero"


def told(saving: Forecast) -> str:
    low, high = (100 * x for x in saving.interval)
    return f"{100 * saving.saved:.0f} % ({low:.0f} to {high:.0f})"


def situations() -> Iterator[str]:
    for config, name in CONFIGS:
        yield f"`{config}`"
        experiment = load_experiment(f"configs/{config}", corpus=False)
        answers = recipe_answers(with_stable_rate(experiment))[0]
        best = answers[0]
        given = max((a.given for a in answers if a.recipe.tau), key=lambda f: f.saved)
        cells = " | ".join(map(told, (best.flops, best.seconds, given)))
        decision = full_report(experiment)[0].splitlines()[-1]
        word = re.match("Grow|Run the pilot|Do not grow", decision)[0]
        alone = ": the small model alone was cheaper" * ("training only the small" in decision)
        yield f"| {name} | {best.case.tokens_per_parameter:.0f} | {cells} | {word}{alone} |"


def objections() -> Iterator[str]:
    halves = saved("halves", 94_416, 19.5, tau=0.6)[0]
    assert halves.baseline == "swept" and halves.seeds == 3
    yield f"With every learning rate swept, it is {halves.saved} (94 K"
    yield f"at 1.4 M {saved('vcycle', 1_372_992, 20.0, seeds=3)[0].saved} (V-cycle, [three seeds]"
    twice = [e for e in forecast_rows() if e.baseline == "untuned" and e.tokens_per_parameter == 20]
    tuned = saved("deepen", 1_372_992, 20.0)[0]
    yield f"would have shown {twice[0].mean} instead of {tuned.mean} %"
    _, larger = saved("deepen", 1_372_992, 20.0)
    assert "Batches of 64" in larger.note
    runs = [logged(*name)[0][0] for name in (("m1_64", "wiki_m1_64"), ("m1_low", "m1_low"))]
    yield "with batches of {} instead of {} and equal".format(*(r.config["batch"] for r in runs))
    yield f"first saved {larger.mean} instead of {tuned.each[0]} % ([1.4 M, one seed]"
    ten = [saved(method, 9_674_240, 20.0)[0] for method in ("deepen", "vcycle")]
    yield f"At [{ten[0].parameters / 1e6:.1f} M]"
    yield f"are those [at {ten[0].parameters / 1e6:.1f} M]"
    yield "it saved {} %, and the V-cycle {} % (one seed)".format(*(e.mean for e in ten))
    longer = saved("halves", 94_416, 48.8)[0]
    yield f"At 49 tokens per parameter, halves saved {longer.saved} ([94 K"
    rows = [e for e in forecast_rows() if e.optimizer == "Muon" and e.tokens_per_parameter < 21]
    seeds = [x for e in rows for x in (*e.each, *([] if e.rough is None else [e.rough]))]
    lost = sum(x <= 0 for x in seeds)
    text = f"Under Muon at 20 tokens per parameter or fewer, {lost} of {len(seeds)} runs of the"
    yield f"{text} three recipes saved nothing: it lost {-min(seeds)} %"
    ramps = [e for e in all_evidence() if e.method.endswith("_ramp")]
    seeds = [x for e in ramps for x in e.each]
    lost = [-x for x in seeds if x <= 0]
    yield f"cautious weight decay, {len(lost)} of {len(seeds)} lost {lost[0]} %"
    better = {e.method: e.saved for e in ramps if e.tau != 0.6 or e.method == "halves_ramp"}
    yield f"halves saved {better['halves_ramp']} and half of the layers first {better['deepen_ramp']} (94 K"
    adamw = saved("deepen", 94_416, 19.5, "AdamW", seeds=3)[0]
    yield "seeds of one recipe saved {}, {} and {} %".format(*adamw.each)
    large = [saved(method, 3_054_816, 20.0)[0].outcome for method in ("vcycle", "deepen", "halves")]
    yield "[At 3 M]"
    yield "one seed saved {}, {} and about {} %".format(*large)
    yield f"Nothing above {max(e.parameters for e in forecast_rows()) / 1e6:.1f} M parameters"


def seconds() -> Iterator[str]:
    rows = [e for e in forecast_rows() if e.slowdown is not None]
    deepen, halves = (small_slowdown(rows, method)[0] for method in ("deepen", "halves"))
    counts = [sum(e.method == method for e in rows) for method in ("deepen", "halves")]
    most = max(e.slowdown for e in rows)
    yield f"takes {deepen:.2f} times as long as the full model"
    yield f"with half of each MLP {halves:.2f} times, up to {most} on an H200"
    yield f"({counts[0]} and {counts[1]} comparisons in the logs"
    names = ("m10", "m10_deepen", "m10-x0.75", "m10-x0.55")
    full, deepen, *shorter = logged("one_gpu/NVIDIA-H200/E1", *names)
    (_, row, *_) = Comparison([full, deepen], shorter).rows()
    time, cost = (100 * row[f"saved_frontier{unit}"][0] for unit in ("_seconds", ""))
    yield f"saved {time:.1f} % of the time of the steps and {cost:.1f} % of the FLOPs"
    more = deepen[0].result["compile_seconds"] - full[0].result["compile_seconds"]
    yield f"at 9.7 M {more:.0f} s longer in a run of {deepen[0].cost('seconds'):.0f} s"
    yield f"or {100 * gpu_tables.saved_seconds(deepen[0], full + shorter[0] + shorter[1]):.1f} % with compilation"
    names = [f"wiki_m3{name}" for name in ("", "_deepen", "_halves", "_vcycle")]
    base, *grown = (runs[0].result for runs in logged("m3", *names))
    more = max(run["compile_seconds"] for run in grown) - base["compile_seconds"]
    minutes = min(run["seconds"] for run in grown) / 60
    text = f"compilation took up to {more:.0f} s longer, in a run of {minutes:.1f} minutes"
    yield f"At 3 M on an H200, {text}"
    grew = [p for run in grown for p in run["phases"] if not p["steps"]]
    most = max(p["seconds"] - p["compile_seconds"] for p in grew)
    yield f"Growing itself took up to {most:.2f} s"


def losses() -> Iterator[str]:
    names = [f"m1_low{name}" for name in ("", "_deepen", "_halves", "_vcycle")]
    base, *grown = logged("m1_low", *names)
    assert {len(runs) for runs in grown} == {2, 3}
    above = [mean(r.loss for r in runs) - mean(r.loss for r in base) for runs in grown]
    cost = [runs[0].cost("flops") / base[0].cost("flops") for runs in grown]
    text = f"At 1.4 M it is {min(above):.3f} to {max(above):.3f} higher, with {min(cost):.2f}"
    yield f"{text} to {max(cost):.2f} of the FLOPs"


def hits(pairs: list[tuple[float | None, Forecast]]) -> int:
    """Return how many outcomes, in per cent, lie in the interval of their forecast."""
    return sum(f.interval[0] <= x / 100 <= f.interval[1] for x, f in pairs if x is not None)


def calibration() -> Iterator[str]:
    every = [(row.outcome, found) for row, found in held_out_forecasts()]
    rows = forecast_rows()
    part = hits(every) / len(every)
    settings = len({row.comparison for row in rows})
    yield f"contain {hits(every)} of the {len(every)} outcomes ({part:.0%}) of {settings} comparisons"
    found = []
    for module, constant in ((forecast, "LEVEL"), (forecast, "SLOPE"), (evidence, "OTHER")):
        for factor in (0.5, 2.0):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(module, constant, getattr(module, constant) * factor)
                again = [(row.outcome, f) for row, f in held_out_forecasts()]
            found.append(hits(again) / len(again))
    yield f"halved or doubled, they contain {min(found):.0%} to {max(found):.0%}"
    sizes, tokens = [e.parameters for e in rows], [e.tokens_per_parameter for e in rows]
    text = f"The comparisons have {min(sizes) / 1e3:.0f} thousand to {max(sizes) / 1e6:.1f} million parameters"
    yield f"{text} and {min(tokens):.0f} to {max(tokens):.0f} tokens per parameter"


def calibration_of_seconds() -> Iterator[str]:
    timed = held_out_seconds()
    every = [(row.outcome_seconds, found) for row, found in timed]
    settings = len({row.comparison for row, _ in timed})
    part = hits(every) / len(every)
    yield f"contain {hits(every)} of the {len(every)} outcomes ({part:.0%}) of {settings} comparisons whose logs"
    on_gpu = [(e.outcome_seconds, f) for e, f in timed if on_h200(e)]
    yield f"{hits(on_gpu)} of {len(on_gpu)} on an H200"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forecast.t, "ppf", lambda *_: forecast.HALF)
        normal = [(row.outcome_seconds, found) for row, found in held_out_seconds()]
    yield f"a normal distribution had contained {hits(normal)}"


def on_h200(row: Evidence) -> bool:
    """Return whether the runs of a row have the times of an H200."""
    adamw = (row.parameters, row.optimizer, row.tokens_per_parameter)
    return row.parameters >= 3_054_816 or adamw == (1_372_992, "AdamW", 20.0)


def pilots() -> Iterator[str]:
    bias, variance = pilot_error(forecast_rows())
    count = len(all_pilots())
    spread = (variance / (1 + 1 / count)) ** 0.5
    yield f"In {count} pilots of measured models"
    yield f"too small by {bias:.2f} on average, with a standard deviation of {spread:.2f}"
    yield f"It costs at most {100 * advise.COST:.0f} % of the budget, in FLOPs and in seconds"


def hardware() -> Iterator[str]:
    """Runs on the H200 can be compared with each other, and the runs on CPUs cannot."""
    paces = {}
    for folder, name in (("m3", "wiki_m3"), ("m1_adamw", "wiki_m1_adamw"), ("m1_low", "m1_low")):
        runs = [run for same in logged(folder, name, f"{name}_deepen") for run in same]
        steps = [seconds for run in runs if (seconds := step_seconds(run, -1))]
        paces[folder] = max(steps) / min(steps)
        assert bool(runs[0].result["xla"]["options"]) == (folder != "m1_low")
    more = 100 * (max(paces["m3"], paces["m1_adamw"]) - 1)
    yield f"runs of one model have the same step time within {more:.1f} %"
    yield f"on the CPUs, a step of one model took up to {paces['m1_low']:.1f} times as long"


def one_layer() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forecast, "METHODS", (*forecast.METHODS, "one_layer"))
        every = [(e.outcome, f) for e, f in held_out_forecasts() if e.method == "one_layer"]
    yield f"they would contain {hits(every)} of its {len(every)} outcomes"


@cache
def texts(claim: Callable[[], Iterator[str]]) -> tuple[str, ...]:
    """Return the texts of a claim, computed once."""
    return tuple(claim())


CLAIMS = [questions, situations, objections, seconds, losses, calibration]
CLAIMS += [calibration_of_seconds, hardware, one_layer, pilots]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.__name__)
def test_the_page_has_the_computed_numbers(claim):
    for text in texts(claim):
        assert text in PAGE, text


def test_every_number_of_the_page_is_computed():
    rest = PAGE
    for claim in CLAIMS:
        for text in texts(claim):
            rest = rest.replace(text, " ")
    # targets of links, code, and the numbers of the questions
    rest = re.sub(r"\]\([^)]*\)|`[^`]*`|\b\d\. \*\*", " ", rest)
    left = {x.strip(".,") for x in re.findall(r"(?<![\w.-])\d[\d.,]*", rest)}
    assert left <= DEFINED


def test_each_path_ends_in_a_decision():
    """Every question, every situation and the last line name one of the three decisions."""
    questions = re.findall(r"\b\d\. \*\*(.*?)(?= \d\. \*\*| The command)", PAGE)
    words = ("grow", "run the pilot", "do not grow")
    assert len(questions) == 5
    for text in questions:
        assert any(f"*{word}" in text.lower() for word in words) or "ask again" in text, text

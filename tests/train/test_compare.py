"""Comparisons read costs from logs, and a script trains the missing runs.

The numbers are checked by hand on synthetic runs.
"""

import json
import math
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import runs
from synthetic import (
    COMPILING,
    CONFIG,
    CYCLE,
    GROWN,
    SCRATCH,
    at,
    dropping,
    made,
    tables,
    two_seeds,
)

from train import compare
from train.analysis.runs import Run, frontier_budget, half_width, p_value, refuse_unlike
from train.analysis.savings import Comparison
from train.common.errors import UserError, exits_cleanly
from train.config.overrides import seed_list
from train.extras.comparison_report import markdown_report, result_lines
from train.extras.report_sections import step_seconds
from train.extras.run_plots import mean_curves
from train.step import programs


def test_the_cost_of_a_loss_is_interpolated(tmp_path):
    run = made(tmp_path, "cycle", CYCLE)
    for loss, unit, cost in (
        (3.0, "run_seconds", 26.0),  # halfway from 3.5 to 2.5
        (3.0, "seconds", 26.0 + COMPILING),
        (3.0, "flops", 260.0),
        (3.5, "run_seconds", 24.0),
        (4.5, "run_seconds", 20.0),  # reached by the first validation of the phase
        (1.9, "run_seconds", None),  # Only a small model reached it.
    ):
        assert run.cost_to(loss, unit) == cost
    assert made(tmp_path, "scratch", SCRATCH).cost_to(3.0, "run_seconds") == 40.0


def test_the_last_time_counts_where_the_loss_rises_again(tmp_path):
    losses = 4.0, 2.0, 3.0, 1.0, 1.5
    wavy = made(tmp_path, "wavy", [("train large", s, s, v) for s, v in enumerate(losses, 1)])
    # The loss reaches 1.5 on the way to 1.0 and does not exceed 1.5 afterwards. The last loss is
    # higher than 1.2 again.
    for loss, cost in ((2.5, 3.25), (1.5, 3.75), (1.2, None)):
        assert wavy.cost_to(loss, "run_seconds") == cost


def test_the_frontier_is_read_in_the_logarithm_of_flops(tmp_path):
    ends = [(100.0, 4.0), (10.0, 6.0), (1000.0, 3.0)]
    frontier = [made(tmp_path, f"x{c:g}", [("train large", 1, c / 10, v)]) for c, v in ends]
    assert frontier_budget(frontier, 5.0) == pytest.approx(math.sqrt(10 * 100))
    assert frontier_budget(frontier, 3.75) == pytest.approx(10**2.25)
    assert frontier_budget(frontier, 3.0) == pytest.approx(1000)
    assert frontier_budget(frontier, 2.9) == math.inf and frontier_budget(frontier, 6.1) is None
    # a frontier of one run, and two runs with the same loss
    assert frontier_budget(frontier[:1], 4.0) == pytest.approx(100)
    assert frontier_budget(frontier[:1], 4.1) is None
    same = [*frontier[:2], made(tmp_path, "same", [("train large", 1, 20.0, 4.0)])]
    assert frontier_budget(same, 4.0) == pytest.approx(100)
    assert frontier_budget(same[::2], 4.0) == pytest.approx(100)
    # a longer run that ends higher: the smallest of several budgets
    higher = [*frontier, made(tmp_path, "higher", [("train large", 1, 1000.0, 3.5)])]
    assert frontier_budget(higher, 3.5) == pytest.approx(10**2.5)


def test_a_run_that_ends_with_an_earlier_model_costs_all_of_its_steps(tmp_path):
    """A run with `train.extras.fine_tune.Best` ends with the model of its best evaluation."""
    curve = [("train large", s, float(10 * s), v) for s, v in ((1, 4.0), (2, 2.0), (3, 3.0))]
    kept = made(tmp_path, "kept", curve, val_loss=2.0)
    scratch = made(tmp_path, "scratch", SCRATCH)
    # The loss of this run stays below 3.5 from 12.5 on.
    for loss, cost in ((2.0, 30.0), (3.5, 12.5), (1.9, None)):
        assert kept.cost_to(loss, "run_seconds") == cost
    first, second = Comparison([[kept], [scratch]], []).rows()
    assert (first["saved_flops"], second["saved_flops"]) == ([0.0], [None])
    row = Comparison([[scratch], [kept]], []).rows()[1]
    assert (row["loss"], row["flops"]) == ([2.0], 30 / 40)
    # With early stopping, the seeds may have different numbers of phases.
    one = kept.result["phases"]
    longer = made(tmp_path, "longer", curve, phases=[*one, *one])
    shorter = made(tmp_path, "longer", curve, seed=1, phases=one)
    same = [scratch, made(tmp_path, "scratch", SCRATCH, seed=1)]
    _, phases, *_ = tables(markdown_report(Comparison([same, [longer, shorter]], [])))
    assert phases["longer"]["steps"] == "4"


@pytest.fixture
def comparison(tmp_path):
    return two_seeds(tmp_path)


def test_savings_by_hand(comparison):
    scratch, cycle, short = comparison.rows()
    assert scratch["saved_frontier"] == pytest.approx([0, 0]) and scratch["flops"] == 1
    assert scratch["saved_flops"] == [0, 0]
    # Each seed is compared with its own baseline.
    assert cycle["saved_flops"] == pytest.approx([1 - 26 / 40, 1 - 26 / 80])
    assert cycle["saved_run_seconds"] == pytest.approx(cycle["saved_flops"])
    # including compilation
    assert cycle["saved_seconds"] == pytest.approx([1 - 29 / 43, 1 - 29 / 83])
    assert cycle["flops"] == pytest.approx((32 / 40 + 32 / 80) / 2) == cycle["run_seconds"]
    assert cycle["seconds"] == pytest.approx((35 / 43 + 35 / 83) / 2)
    assert (cycle["loss"], cycle["seeds"]) == ([2.0, 2.0], [0, 1])
    assert cycle["tokens_per_parameter"] == 2.0
    # Training from scratch would need more than the full budget.
    assert cycle["below_frontier"] == [True, True]
    assert cycle["saved_frontier"] == pytest.approx([1 - 32 / 40, 1 - 32 / 80])
    assert cycle["saved_frontier_interval"] is None  # Bounds have no interval.
    assert not any(scratch["below_frontier"] + short["below_frontier"])
    assert short["saved_flops"] == [None, None] and short["saved_flops_interval"] is None
    assert short["saved_frontier"] == pytest.approx([0, 0])
    assert short["saved_frontier_interval"] == pytest.approx(0)


def test_a_run_compared_with_itself_saves_nothing(comparison):
    """Also if its FLOPs and its seconds are in another ratio than those of the frontier."""
    scratch, short = [run[0] for run in (comparison.runs[0], *comparison.frontier)]
    (short.folder / "result.json").write_text(json.dumps(short.result | {"flops": 10.0}))
    found = Comparison([[scratch], [scratch]], [[Run("short", 0, short.folder)]])
    for name in ("saved_frontier", "saved_frontier_seconds"):
        saved = [x for r in found.rows() for x in r[name]]
        assert saved == pytest.approx([0.0] * 3, abs=1e-9)
    assert "The difference" not in markdown_report(found)


def test_the_interval_is_students():
    """The interval uses Student's quantiles: 12.706 for two values, 4.303 for three."""
    assert half_width([0.1, 0.3]) == pytest.approx(12.706 * 0.1, rel=1e-4)
    assert half_width([0.1, 0.2, 0.6]) == pytest.approx(4.303 * math.sqrt(0.07 / 3), rel=1e-4)
    assert half_width([0.1]) is None and half_width([0.1, None, 0.3]) is None


def test_the_p_value_is_that_of_a_paired_t_test():
    """t = 0.18 / (0.0837 / sqrt(5)) = 4.811 with four degrees of freedom."""
    assert p_value([0.1, 0.2, 0.3, 0.2, 0.1]) == pytest.approx(0.00858, abs=1e-5)
    assert p_value([0.1, -0.1, 0.2, -0.2, 0.0]) == pytest.approx(1)
    for without in ([0.1, 0.2, 0.3, 0.2], [0.1, 0.2, 0.3, 0.2, None], [0.1] * 5):
        assert p_value(without) is None


def test_five_seeds_have_a_p_value(tmp_path):
    noise = (0.0, 0.01, -0.01, 0.02, 0.0)
    base, shorter, grown = (
        at(tmp_path, name, [(cost, loss + scale * x) for x in noise])
        for name, cost, loss, scale in (("a", 10, 2, 1), ("half", 5, 3, 1), ("b", 7, 2.1, 2))
    )
    comparison = Comparison([base, grown], [shorter])
    row = comparison.rows()[1]
    assert row["saved_frontier_p"] == p_value(row["saved_frontier"])
    assert f"(5 seeds, p = {row['saved_frontier_p']:.2g})" in result_lines(comparison)[0]


def test_seeds_are_a_list_or_a_range():
    for text, seeds in (("0-4", [0, 1, 2, 3, 4]), ("3-3", [3]), ("0,1", [0, 1]), ("2", [2])):
        assert seed_list(text) == seeds
    for text in ("4-0", "-1", "0-", "0-4294967295", "1-2-3"):
        with pytest.raises(UserError, match="--seeds takes numbers"):
            seed_list(text)


def test_the_report_fits_into_100_columns(comparison, tmp_path):
    names = "scratch", "cycle"
    third = [made(tmp_path, name, SCRATCH, seed=2) for name in names]
    short = made(tmp_path, "scratch-x0.5", [("train large", 1, 20.0, 4.0)], seed=2)
    runs = [[*same, more] for same, more in zip(comparison.runs, third, strict=True)]
    every = Comparison(runs, [[*comparison.frontier[0], short]], diverged={"wild": [0, 1, 2]})
    assert max(map(len, markdown_report(every).splitlines())) <= 100
    main, phases, times = tables(markdown_report(every))
    saved = ["FLOPs saved vs. frontier", "seconds saved"]
    assert list(main["scratch"]) == ["run", "FLOPs", "loss", *saved]
    # a run compared with itself
    assert [main["scratch"][name] for name in saved] == ["0.0 % ± 0.0"] * 2
    assert list(times["cycle"]) == ["run", "seconds", "compiling", "validation", "checkpoints"]
    columns = ["run", "phase", "parameters", "steps", "layers", "ms per step", "FLOPs", "FLOP/s"]
    assert list(phases["scratch"]) == columns


def test_the_result_is_told_in_words(comparison, tmp_path):
    (line,) = result_lines(comparison)
    assert line == (
        "Result: cycle reached its loss with more than 40.0 % fewer FLOPs than a run from scratch (2 seeds). "
        "Its loss is 2.0000 with 60% of the FLOPs of scratch, whose loss is 3.0000."
    )
    report = markdown_report(comparison)
    assert " ".join(report.split()).endswith(line)
    assert tables(report)[0]["cycle"]["FLOPs saved vs. frontier"] == "> 40.0 % [20.0, 60.0]"
    says = "has no known saving, because there is no shorter run from scratch (--frontier)"
    assert says in result_lines(replace(comparison, frontier=[]))[0]


@pytest.mark.parametrize(("cost", "loss", "cell", "says"), [
    (39.0, 7.0, "above the frontier", "saved nothing: it ended above every run from scratch."),
    (10.0, 7.0, "cheaper than the frontier", "costs less than the shortest run from scratch and ends above it"),
    (19.9, 7.0, "cheaper than the frontier", "costs less than the shortest run from scratch and ends above it"),
    (39.0, 3.6, "", "more FLOPs than a run from scratch (one seed)"),
    (20.0, 3.4, "", "fewer FLOPs than a run from scratch (one seed)"),
])  # fmt: skip
def test_the_result_of_one_seed_is_told_in_words(comparison, tmp_path, cost, loss, cell, says):
    one = made(tmp_path, "one", [("train large", 1, cost, loss)])
    found = Comparison([comparison.runs[0][:1], [one]], [comparison.frontier[0][:1]])
    (line,) = result_lines(found)
    assert says in line
    shown = tables(markdown_report(found))[0]["one"]["FLOPs saved vs. frontier"]
    assert shown == cell if cell else shown.endswith("%")
    equal = "scratch-x0.5, from scratch with the same cost, has a loss of 4.0000"
    advised = line.partition("add --frontier ")[2].split(". ")[0]
    assert bool(advised) == cell.startswith("cheaper")
    # The baseline costs 40, and the advised run costs less than this one.
    assert not advised or 0 < 40 * float(advised) < cost
    assert (equal in line) == (cost in (19.9, 20.0))


SHORT = (20.0, 4.0)
# Costs and final losses of a run and of the shorter run, with each seed; the seeds with which the
# shorter run diverged; the saving in the table, and the sentence of the report. The full run costs 40
# and has a loss of 3.
JUDGED = {
    "a negative bound is an upper bound of the additional FLOPs": (
        [(48.0, 2.9)] * 2, [SHORT] * 2, [], "> -20.0 % [-20.0, -20.0]",
        "with at most 20.0 % more FLOPs than a run from scratch (2 seeds)"),
    "one seed above the frontier does not mean that no seed saved": (
        [(30.0, 3.1), (30.0, 4.1), (30.0, 3.1)], [SHORT] * 3, [], "above the frontier: 1 of 3 seeds",
        "has no mean saving, because with 1 of 3 seeds it ended above every run from scratch"),
    "a bound is one only beside a number": (
        [(32.0, 2.0), (32.0, 11.0)], [SHORT] * 2, [], "above the frontier: 1 of 2 seeds", "with 1 of 2 seeds it ended above"),
    "one seed costs less than the frontier": (
        [(19.0, 3.9), (19.0, 3.9), (19.0, 4.1)], [SHORT] * 3, [], "cheaper than the frontier: 1 of 3 seeds",
        "because with 1 of 3 seeds it costs less than the shortest run from scratch"),
    "a shorter run that diverged leaves a smaller frontier": (
        [(30.0, 3.1)] * 2, [SHORT], [1], "cheaper than the frontier: 1 of 2 seeds",
        "full-x0.5 diverged with seed 1, so the frontier of each of these seeds has one run less."),
    "the values of two seeds are in the order of the seeds": (
        [(20.0, 3.5), (22.0, 3.5)], [SHORT] * 2, [], "25.8 % [29.3, 22.2]", "Its loss is 3.5000 with 52% of the FLOPs of full"),
}  # fmt: skip


@pytest.mark.parametrize(("run", "short", "diverged", "cell", "says"), JUDGED.values(), ids=JUDGED)
def test_how_a_run_is_judged_by_the_frontier(tmp_path, run, short, diverged, cell, says):
    full = at(tmp_path, "full", [(40.0, 3.0)] * len(run))
    runs, shorter = at(tmp_path, "run", run), at(tmp_path, "full-x0.5", short)
    without = {"full-x0.5": diverged} if diverged else {}
    report = markdown_report(Comparison([full, runs], [shorter], diverged=without))
    main, *_ = tables(report)
    assert main["run"]["FLOPs saved vs. frontier"] == cell
    nothing = {2: "0.0 % [0.0, 0.0]", 3: "0.0 % ± 0.0"}  # two values, or their mean and interval
    assert main["full"]["FLOPs saved vs. frontier"] == nothing[len(run)]
    assert says in " ".join(report.split())


def test_without_a_frontier_no_saving_is_reported(comparison):
    alone = replace(comparison, frontier=[])
    for row in alone.rows():
        assert row["saved_frontier"] is row["saved_frontier_given"] is row["below_frontier"] is None
        assert row["saved_frontier_interval"] is None
    report = markdown_report(alone)
    assert not [column for column in tables(report)[0]["cycle"] if "saved" in column]
    assert "add --frontier" in report and "add --frontier" not in markdown_report(comparison)


# --- false claims that a comparison must not make ---


def noisy(seed: int, steps: int = 60, shift: float = 0.0) -> list[tuple]:
    """Return a noisy, frequently evaluated curve that falls by 1.5 nats per budget."""
    draw = random.Random(seed)

    def loss(s: int) -> float:
        return 4.5 - 1.5 * (s / steps) ** 0.2 - shift * s / steps + draw.gauss(0, 0.1)

    return [("train large", s, float(s), loss(s)) for s in range(1, steps + 1)]


def test_a_run_compared_with_its_copy_saves_nothing(tmp_path):
    """A comparison of the first crossing with the full budget would report a third or more."""
    first = [made(tmp_path, "one", noisy(seed), seed) for seed in range(5)]
    again = [made(tmp_path, "two", noisy(seed), seed) for seed in range(5)]
    crossed = [
        next(line["flops"] for line in r.curve if line["val_loss"] <= r.loss) / r.cost("flops")
        for r in first
    ]
    assert min(crossed) < 0.7  # the control: the naive comparison
    shorter = [made(tmp_path, "one-x0.5", noisy(100 + s, 30, -0.4), s) for s in range(5)]
    row = Comparison([first, again], [shorter]).rows()[1]
    for name in ("saved_frontier", "saved_flops", "saved_run_seconds", "saved_seconds"):
        assert row[name] == pytest.approx([0] * 5, abs=1e-12), name
        assert row[f"{name}_interval"] == pytest.approx(0, abs=1e-12), name


@pytest.mark.parametrize(("change", "says"), [
    ({"data": {"Data": {"source": "text", "path": "easy"}}}, r"data.path: None and 'easy'; data.source: 'stdlib' and 'text'"),
    ({"data": {"Data": {"tokenizer": "t.json"}}}, r"data.tokenizer: 'bytes' and 't.json'"),
    ({"data": {"Data": {"valid_fraction": 0.5}}}, r"data.valid_fraction: 0.02 and 0.5"),
    ({"model": {"context": 7}}, r"model.context: 1024 and 7"),
    ({"eval_batches": 1}, r"eval_batches \* batch: 32 and 4"),
    ({"batch": 8}, r"eval_batches \* batch: 32 and 64"),
    ({"corpus": {"valid": "cd"}}, r"corpus.valid: 'b' and 'cd'"),
    ({"corpus": {"train": "cd"}}, r"corpus.train: 'a' and 'cd'"),
])  # fmt: skip
def test_runs_that_are_not_judged_alike_are_refused(tmp_path, change, says):
    def changed(old, new):
        return {
            k: changed(v, new[k]) if k in new and isinstance(v, dict) else new.get(k, v)
            for k, v in old.items()
        }

    corpus = {"corpus": {"name": "x", "train": "a", "valid": "b", "tokenizer": "c"}}
    config = CONFIG | (corpus if "corpus" in change else {})
    base = made(tmp_path, "base", SCRATCH, config=config)
    other = made(tmp_path, "other", SCRATCH, config=changed(config, change))
    alike = "^base and other are not evaluated in the same way: .*"
    for frontier in ([], [[other]]):
        with pytest.raises(UserError, match=alike + says):
            Comparison([[base]] + ([] if frontier else [[other]]), frontier)


def test_runs_with_other_numbers_of_evaluated_samples_are_refused():
    def config(**evaluated: int) -> dict:
        return CONFIG | {"corpus": {"train": "a", "valid": "b", "tokenizer": "bytes"} | evaluated}

    with pytest.raises(UserError, match="evaluated samples: 80 and 64"):
        refuse_unlike([("a", config(evaluated=80)), ("b", config(evaluated=64))])
    refuse_unlike([("a", config(evaluated=80)), ("b", config(evaluated=80)), ("old", config())])


def test_runs_that_train_otherwise_are_compared(tmp_path):
    config = CONFIG | {"batch": 8, "eval_batches": 4, "steps": 9, "seed": 3, "accumulate": 2}
    config["optim"] = {"peak_lr": 1.0}
    data = {"Data": CONFIG["data"]["Data"] | {"cache": "elsewhere"}}
    config |= {"data": data, "model": CONFIG["model"] | {"layers": 99}}
    other = made(tmp_path, "other", SCRATCH, config=config)
    assert Comparison([[made(tmp_path, "base", SCRATCH)], [other]], []).rows()
    # the same content under another path
    moved = CONFIG["data"]["Data"] | {"path": "there", "tokenizer": "there.json"}
    corpus = {"corpus": {"name": "x", "train": "a", "valid": "b", "tokenizer": "c"}}
    here = made(tmp_path, "here", SCRATCH, config=CONFIG | corpus)
    there = made(tmp_path, "there", SCRATCH, config=CONFIG | {"data": {"Data": moved}} | corpus)
    assert Comparison([[here], [there]], []).rows()


def test_a_baseline_that_is_not_decayed_is_said(tmp_path):
    flat = made(tmp_path, "flat", SCRATCH, rates=(0.5, 1.0, 0.3))
    said = "flat is not decayed: it ends at 30% of its peak learning rate"
    assert said in markdown_report(Comparison([[flat]], []))
    down = made(tmp_path, "down", SCRATCH, rates=(0.5, 1.0, 0.01))
    # A method may keep its learning rate.
    assert "not decayed" not in markdown_report(Comparison([[down], [flat]], []))
    # Every point of the frontier is a baseline and must decay.
    assert said in markdown_report(Comparison([[down]], [[flat]]))


def test_the_noise_floor_by_hand(tmp_path):
    """Halving the budget costs 0.5 nats; losses 2.9 and 3.1 have a standard deviation of 0.1414."""
    full, deviation = at(tmp_path, "full", [(40.0, 2.9), (40.0, 3.1)]), math.sqrt(0.02)
    half = at(tmp_path, "full-x0.5", [(20.0, 3.5)] * 2)
    found = Comparison([full], [half])
    assert found.noise() == pytest.approx({"loss": deviation, "budget": 2 ** (deviation / 0.5) - 1})
    says = "the final loss of full varies over 2 seeds by 0.1414 (standard deviation), which corresponds to 21.7% of"
    assert says in " ".join(markdown_report(found).split())
    # The shorter run diverged with the worse seed. The slope is the one of the other seed.
    better = Comparison([full], [at(tmp_path, "full-x0.51", [(20.0, 3.0)])]).noise()
    slope = (3.0 - 2.9) / math.log(2)
    assert better["budget"] == pytest.approx(math.expm1(deviation / slope))
    # A flat frontier: its exponential would overflow.
    ends = [(20.0, r.loss + 1e-7) for r in full]
    flat = Comparison([full], [at(tmp_path, "full-x0.52", ends)])
    assert flat.noise()["budget"] is None
    said = "the frontier is flat at the baseline, so it does not correspond to a budget"
    assert said in " ".join(markdown_report(flat).split())
    alone = {"loss": pytest.approx(deviation), "budget": None}
    assert Comparison([full], []).noise() == alone
    one = Comparison([full[:1]], [half[:1]])
    assert one.noise() == {"loss": None, "budget": None}
    says = "One seed: the noise floor and the confidence interval are unknown"
    assert says in markdown_report(one)


def test_a_diverged_config_is_marked_without_a_saving(comparison):
    (scratch, cycle), shorter = comparison.runs, comparison.frontier
    diverged = {"cycle": [1], "wild": [0, 1]}
    partly = Comparison([scratch, cycle[:1]], shorter, diverged=diverged)
    assert [row["diverged"] for row in partly.rows()] == [[], [1], []]
    main, *_ = tables(markdown_report(partly))
    assert main["cycle"]["loss"] == "2.0000, diverged: seed 1"
    assert main["cycle"]["FLOPs saved vs. frontier"] == "diverged: 1 of 2 seeds"
    assert main["wild"]["loss"] == "diverged: seed 0, 1" and main["wild"]["FLOPs"] == ""
    assert main["scratch"] == tables(markdown_report(comparison))[0]["scratch"]
    assert "wild diverged with seed 0, 1, so no saving is given for it." in markdown_report(partly)


SOURCES = (
    [("train small", 4.0), ("measure small", 1.0), ("train small", 1.0)],
    [("import small", 6.0)],
)


def grown(folder: Path, name: str, source: list[tuple[str, float]]) -> Run:
    """Create a run that reaches the final loss of `SCRATCH` in 26 instead of 40 seconds.

    ``source`` gives the seconds of its first phases.
    """
    same = {"parameters": 50, "steps": 4, "tokens": 50, "layers": 8.0, "compile_seconds": 1.0}
    phases = [
        {"phase": p, "model": p.split()[1], "flops": 10 * s, "seconds": s + 1} | same
        for p, s in [*source, ("train large", 20.0)]
    ]
    return made(folder, name, GROWN, phases=phases)


@pytest.mark.parametrize("source", SOURCES, ids=["trained", "imported"])
def test_a_small_model_that_one_has_already_is_told_apart(tmp_path, source):
    curve = [("train large", 1, 10.0, 6.0), ("train large", 2, 20.0, 4.0)]
    short, run = made(tmp_path, "scratch-x0.5", curve), grown(tmp_path, "grown", source)
    assert run.source("run_seconds") == 6 and run.source("flops") == 60
    assert run.source("seconds") == 6 + len(source)  # including their compilation
    comparison = Comparison([[made(tmp_path, "scratch", SCRATCH)], [run]], [[short]])
    scratch, row, _ = comparison.rows()
    for column in ("saved_flops", "saved_run_seconds", "saved_frontier"):
        assert row[column] == pytest.approx([1 - 26 / 40])
        assert row[f"{column}_given"] == pytest.approx([1 - 20 / 40])
    assert row["source"] == 6 / 40 and scratch["source"] == 0


def test_the_report_says_that_the_cost_of_a_foreign_model_is_unknown(tmp_path):
    base, known = made(tmp_path, "base", SCRATCH), grown(tmp_path, "known", SOURCES[1])
    foreign = grown(tmp_path, "foreign", [("import small", 0.0)])
    for run in (known, foreign):  # a finished run has a cost, a Hugging Face folder has none
        result = run.result
        result["phases"][0]["kind"] = "import"
        (run.folder / "result.json").write_text(json.dumps(result))
    report = markdown_report(Comparison([[base], [known], [foreign]], []))
    says = "starts from a model of unknown cost, which is not counted."
    assert f"foreign {says}" in " ".join(report.split()) and report.count("unknown cost") == 1


def test_learning_maps_is_a_cost_of_the_method(tmp_path):
    learned = grown(tmp_path, "learned", [("learn maps", 6.0)])
    short = made(tmp_path, "short", [("train large", 1, 10.0, 6.0)])
    _, row, _ = Comparison([[made(tmp_path, "base", SCRATCH)], [learned]], [[short]]).rows()
    assert row["source"] == 0 and row["saved_frontier_given"] == row["saved_frontier"]
    assert row["saved_flops_given"] == row["saved_flops"]


def test_a_phases_layers_and_the_median_time_of_its_steps(tmp_path):
    runs = [dropping(tmp_path, seed, seconds) for seed, seconds in ((0, 0.5), (1, 0.75))]
    # the lower median of eight steps of 0.5 s and eight of (80 - 13) / 8 s
    assert [step_seconds(runs[0], i) for i in range(3)] == [1.0, None, 0.5]
    scratch = [made(tmp_path, "scratch", SCRATCH, s) for s in (0, 1)]
    lines = markdown_report(Comparison([scratch, runs], [])).splitlines()
    rows = [
        [c.strip() for c in line.split("|")[1:-1]] for line in lines if line.startswith("| drop")
    ]
    assert [row[4:6] for row in rows[1:4]] == [["4", "1000.0"], ["", ""], ["2.75", "625.0"]]


def test_a_short_last_interval_does_not_decide_the_time_of_a_step(tmp_path):
    """Check a phase of 402 steps with a log line every 200 steps and at its end."""
    run = made(tmp_path, "stage", SCRATCH)
    phase = {"phase": "train large", "steps": 402, "tokens": 402}
    (run.folder / "result.json").write_text(json.dumps(run.result | {"phases": [phase]}))
    with (run.folder / "metrics.jsonl").open("w") as log:
        for step, seconds in ((200, 60.0), (400, 110.0), (402, 120.0)):
            line = {"phase": "train large", "step": step, "tokens": step, "loss": 2.0}
            line |= {"seconds": seconds, "compile_seconds": 0.0, "flops": 1.0}
            log.write(json.dumps(line) + "\n")
    assert step_seconds(Run("stage", 0, run.folder), 0) == 0.25


# --- plots ---


def test_curves_over_seeds_are_means_with_intervals_by_hand(tmp_path):
    one, two = ([(p, s, k * c, v + k) for p, s, c, v in SCRATCH] for k in (1, 2))
    both = [made(tmp_path, "a", one), made(tmp_path, "a", two, seed=1)]
    (curve,) = mean_curves(both, "run_seconds")
    assert curve.phase == "train large" and curve.cost.tolist() == [15, 30, 45, 60]
    assert curve.loss.tolist() == [7.5, 6.5, 5.5, 4.5]
    assert curve.half == pytest.approx([12.706 * 0.5] * 4, rel=1e-4)
    same = mean_curves([made(tmp_path, "b", CYCLE), made(tmp_path, "b", CYCLE, seed=1)], "flops")
    assert [c.phase for c in same] == ["train large", "train coarse1", "train large"]
    # Equal seeds have zero width.
    assert same[2].loss.tolist() == [v for *_, v in CYCLE[3:]]
    assert not any(c.half.any() for c in same)
    alone = mean_curves([made(tmp_path, "c", CYCLE)], "seconds")[2]
    assert alone.cost.tolist() == [c + COMPILING for _, _, c, _ in CYCLE[3:]]
    assert not alone.half.any()


# --- the script ---


def called(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["compare", *map(str, arguments)])
    exits_cleanly(compare.main)


def test_compare_runs_what_is_missing_and_nothing_twice(tmp_path, monkeypatch, capsys):
    scratch = runs.experiment(tmp_path, name="scratch")
    cycle = runs.experiment(tmp_path, name="cycle", method=runs.VCYCLE)
    configs = [runs.script(tmp_path, e) for e in (scratch, cycle)]
    configs[1] += ":optim.peak_lr=0.03"
    folder = tmp_path / "runs"
    options = ["--seeds", "3", "--frontier", "0.5:optim.peak_lr=0.02:optim.warmup=1"]
    options += ["--workdir", folder, "--set", "eval_batches=1"]
    called(monkeypatch, *configs, *options)
    names = ("scratch", "cycle", "scratch-x0.5")
    where = {name: folder / f"{name}-seed3" for name in names}
    assert {p.parent for p in folder.glob("*/result.json")} == {*where.values()}
    assert json.loads((where["scratch-x0.5"] / "result.json").read_text())["steps"] == 4
    written = [json.loads((path / "config.json").read_text()) for path in where.values()]
    assert [(c["eval_batches"], c["seed"]) for c in written] == [(1, 3)] * 3
    rates = [(c["optim"]["peak_lr"], c["optim"]["warmup"]) for c in written]
    assert rates == [(0.01, 2), (0.03, 2), (0.02, 1)]
    first = {name: (folder / name).read_bytes() for name in ("compare.md", "compare.json")}
    for plot in ("compare.png", "compare_seconds.png"):
        assert (folder / plot).read_bytes()[:4] == b"\x89PNG"
    told, said = first["compare.md"].decode(), capsys.readouterr().out
    assert told in said
    (line,) = (line for line in said.splitlines() if line.startswith("Result: "))
    assert line.startswith("Result: cycle ")
    found = json.loads(first["compare.json"])
    rows = {row["run"]: row for row in found["rows"]}
    assert rows.keys() == set(names) and rows["scratch"]["saved_frontier"] == pytest.approx([0.0])
    assert rows["scratch"]["saved_flops"] == [0.0]
    assert found["noise"] == {"loss": None, "budget": None}
    assert "One seed" in " ".join(found["doubts"])

    monkeypatch.setattr(programs, "step", None)  # Any training step would raise an error.
    called(monkeypatch, *configs, *options)
    assert {name: (folder / name).read_bytes() for name in first} == first


@pytest.mark.parametrize(("options", "says"), [
    (("{0}",), "such as CONFIG:name=again"),
    (("--seeds", "-1"), "--seeds takes numbers between 0 and 2^32 - 1, not -1"),
    (("{0}:eval_batches=1:name=again",),
     "are not evaluated in the same way: eval_batches * batch: 16 and 8; compare runs that agree"),
    (("{0}", "--frontier", "0.5:data.tokenizer=t"),
     "two runs have the same name: scratch, scratch, scratch-x0.5; set different"),
    (("{0}:name=again", "--frontier", "0.5:data.tokenizer=t"),
     "not evaluated in the same way: data.tokenizer: 'bytes' and 't'"),
    (("--frontier", "half"), "--frontier takes numbers separated by commas, not 'half'"),
    (("--frontier", "0.5,:name=a"), "--frontier 0.5,:name=a has settings without a fraction"),
    (("--seeds", ","), "--seeds needs at least one seed"),
    (("--finetune", "configs/finetune.py:bytes_sst2", "--finetune", "configs/finetune.py:pieces_sst2"),
     "two fine-tunings have the same name: sst2, sst2; set different names"),
    (("{0}:name=again:mesh.fsdp=3",), "again: a mesh of data=any x fsdp=3 x tensor=1 does not fit 4 devices"),
    (("{0}:name=again:accumulate=8",), "again: a micro-batch of 1 (batch=8, accumulate=8) is not divisible by 4"),
    (("{0}:name=again:seed=7",), "again sets seed=7, but --seeds determines the seeds"),
])  # fmt: skip
def test_unlike_runs_are_refused_before_anything_runs(tmp_path, monkeypatch, capsys, options, says):
    script = runs.script(tmp_path, runs.experiment(tmp_path, name="scratch"))
    with pytest.raises(SystemExit):
        options = [o.format(script) for o in options]
        called(monkeypatch, script, *options, "--workdir", tmp_path / "runs")
    assert says in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_runs_that_differ_by_chance_save_zero(tmp_path):
    """A/A test with independent noise, 20 times: a 95 % interval may occasionally exclude zero."""
    missed = 0
    for i in range(20):
        folder = tmp_path / str(i)
        folder.mkdir()
        first, other, shorter = (
            [made(folder, name, noisy(1000 * i + 10 * s + j, steps, shift), s) for s in range(4)]
            for j, (name, steps, shift) in enumerate(
                (("one", 60, 0), ("two", 60, 0), ("one-x0.5", 30, -0.4))
            )
        )
        row = Comparison([first, other], [shorter]).rows()[1]
        mean = sum(row["saved_frontier"]) / 4 if None not in row["saved_frontier"] else 0
        half = row["saved_frontier_interval"]
        missed += half is not None and abs(mean) > half
        reached = [s for s in row["saved_flops"] if s is not None]
        missed += len(reached) == 4 and abs(sum(reached) / 4) > row["saved_flops_interval"]
    assert missed <= 4


def test_a_better_run_does_save(tmp_path):
    """The control of the two A/A tests above: the same noise at half the cost."""
    first = [made(tmp_path, "one", noisy(seed), seed) for seed in range(4)]
    half = [
        made(tmp_path, "half", [(p, s, c / 2, v - 0.1) for p, s, c, v in noisy(50 + seed)], seed)
        for seed in range(4)
    ]
    row = Comparison(
        [first, half], [[made(tmp_path, "one-x0.5", noisy(90 + s, 30, -0.4), s) for s in range(4)]]
    ).rows()[1]
    assert min(row["saved_frontier"]) > 0.3

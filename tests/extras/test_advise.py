"""Advice: forecasts, decisions, pilots, and written configs."""

import json
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import runs
from advice import command, refused

from jaxgrow.layerdrop import LayerDrop
from jaxgrow.models import GPT2Config
from train import advise
from train.advise import RECIPES, Pilot, PilotClock, PilotLate, as_code, full_report, recipe_answers
from train.common.errors import Diverged, UserError
from train.config.experiment import load_experiment
from train.extras import timing
from train.extras.advice.evidence import PilotRow, all_evidence
from train.plan.methods import Growing, Scratch, TrainStage
from train.plan.modifiers import DropLayers
from train.plan.recipes import deepened
from train.run.stop import Stop
from train.state.mesh import Mesh
from train.state.optim import Optim

HALF, HALVES, VCYCLE = RECIPES
WSD = Optim(schedule="wsd", decay=0.1)
MODEL = GPT2Config(vocab=256, context=64, layers=12, embed=24, heads=3, head_dim=8, mlp=96)


def experiment(tmp_path, **changes):
    return runs.experiment(tmp_path, **{"optim": WSD, "steps": 1000, "model": MODEL} | changes)


@pytest.mark.parametrize(
    ("vocab", "tau", "expected"), [(50257, 0.5, 0.32), (50257, 0.8, 0.51), (256, 0.5, 0.46)]
)
def test_the_most_that_one_layer_first_can_save(tmp_path, vocab, tau, expected):
    """One layer first (Bu, 2511.04981), published with two digits.

    The costs count parameters only: the head is included, and the attention scores are not.
    """
    model = GPT2Config(vocab=vocab, context=16)
    e = experiment(tmp_path, model=model)
    grown = replace(e, method=deepened(model, 1, tau, TrainStage(1 - tau)))
    assert 1 - grown.cost / e.cost == pytest.approx(expected, abs=0.0075)


def test_the_costs_of_the_small_model_are_a_part_of_the_plan(tmp_path):
    e = experiment(tmp_path)
    answers = {answer.recipe: answer for answer in recipe_answers(e)[0]}
    for recipe, tau in ((HALF, 0.5), (HALVES, 0.6), (VCYCLE, 0.4)):
        grown, case = answers[recipe].grown, answers[recipe].case
        costs = [p.cost(e.batch) / e.cost for p in grown.plan if p.cost(1) and p.config != e.model]
        assert case.small == pytest.approx(sum(costs), abs=1e-3)
        assert 0.3 < case.small / tau < 0.6 and case.flops == grown.cost / e.cost


def test_a_recipe_grows_after_the_measured_fraction_and_then_decays(tmp_path):
    e = experiment(tmp_path)
    plan = replace(e, method=HALF.method(e, 0.5)).plan
    assert [phase.steps for phase in plan if phase.cost(1)] == [500, 400, 100]


def test_how_far_one_curve_is_behind_another():
    """Recover the lag behind ``L = 3 t^-0.1``; batches differ by 4 %."""
    small, rng = 200, np.random.default_rng(0)
    step, batches = 1 + np.arange(500), 1 + 0.04 * rng.standard_normal(500)
    scratch = 3 * step**-0.1 * batches
    own = 1 + 0.004 * rng.standard_normal(500)  # noise that the two curves do not share
    steps_behind = advise.steps_behind
    assert steps_behind(scratch, scratch, small) == 0
    for behind in (0.1, 0.9):
        grown = 3 * np.maximum(step - behind * small, 1) ** -0.1 * batches
        grown[small : small + small // 2] *= 1.5  # the loss spike after growth
        assert steps_behind(scratch, grown, small) == pytest.approx(behind, rel=0.1)
        assert steps_behind(scratch, grown * own, small) == pytest.approx(behind, rel=0.1, abs=0.02)
    assert steps_behind(scratch, scratch * 0.99, small) < 0  # ahead
    message = r"does not fall, .*3\.\d+ after step 200, 3\.\d+ at the end; check whether the learning rate"
    with pytest.raises(UserError, match=message):
        steps_behind(3 * step**0.01, scratch, small)


MUON = replace(WSD, name="muon", decay=0.5)


# The usual size and budget: 94 thousand parameters, 19.5 tokens per parameter.
def near(tmp_path, **changes):
    return experiment(tmp_path, **{"optim": MUON, "steps": 3600} | changes)


def found(e, lag, slowdown=1.0, recipe="deepen"):
    """A pilot of ``e`` that found this lag."""
    answers, _ = recipe_answers(e)
    case = next(answer.case for answer in answers if answer.recipe.name == recipe)
    return Pilot(PilotRow(**vars(case), steps=200, lag=lag, page=""), slowdown, 0.02, 0.025)


def test_near_the_measurements_growing_is_advised(tmp_path):
    e = near(tmp_path)
    text, best = full_report(e)
    answers, _ = recipe_answers(e)
    assert "\nGrow: half of the layers first. It is expected to save 15% of the FLOPs" in text
    assert best is not None and best.method == answers[0].grown.method
    # The intervals contain the measured savings of both recipes.
    for answer, measured in ((answers[0], 0.147), (answers[2], 0.177)):
        low, high = answer.flops.interval
        assert 0 < low < measured < high < 0.35
        assert "| " + " | ".join(answer.cells) in re.sub(" +", " ", text)
    assert "the nearest one to half of the layers first: 14.7 % ± 4.5 (GPT2, Muon, 94 K" in text
    # The advice grows after half of the steps, as in the measurement.
    assert [p.steps for p in best.plan if p.cost(1)] == [1800, 1800]


@pytest.mark.parametrize("changes", [
    {"steps": 3600 * 16},  # 316 tokens per parameter
    {"model": GPT2Config(vocab=50257, context=1024), "steps": 300_000},  # 124 M parameters
    {"optim": replace(MUON, name="adamw")},
])  # fmt: skip
def test_far_from_the_measurements_the_interval_contains_zero(tmp_path, changes):
    e = near(tmp_path, **changes)
    text, best = full_report(e)
    assert best is None and text.endswith("contains savings above and below zero.\n")
    assert "\nRun the pilot (--measure): " in text
    for answer in recipe_answers(e)[0]:
        low, high = answer.flops.interval
        assert low < 0 < high and high - low > 0.28
    muon = "Muon instead of AdamW saved more than any recipe: > 41.0 %"
    assert (muon in text) == (e.optim.name == "adamw")


def test_no_recipe_is_advised_if_the_small_model_was_cheaper(tmp_path):
    rows = {(e.family, e.method) for e in all_evidence() if e.small_alone_is_cheaper}
    assert rows == {(f, m) for f in ("ViT", "ModernBERT") for m in ("deepen", "halves")}
    vit = load_experiment("configs/cifar10.py:vit_muon")
    for pilot in (None, found(vit, 0.0)):
        text, best = full_report(vit, pilot)
        assert best is None and "\nDo not grow: near this setting, training only the small" in text
    # There is no pilot, because its result could not change the decision.
    assert advise.measure_lag(vit, tmp_path / "none") is None and not (tmp_path / "none").exists()


def test_after_a_pilot_the_expected_saving_decides(tmp_path):
    e = near(tmp_path, steps=3600 * 16)
    text, best = full_report(e, found(e, -0.1))
    assert "\nGrow: half of the layers first." in text and isinstance(best.method, Growing)
    assert best.method.small == replace(e.model, layers=6) and best.optim == e.optim
    assert "found a lag of -0.10. It cost 2.0% of the FLOPs and 2.5% of the seconds" in text
    text, best = full_report(e, found(e, 1.5))
    assert "\nDo not grow: the upper end of its interval is below 3%." in text and best is None
    slow = full_report(e, found(e, 0.1, slowdown=1.4))[0]
    assert "\nDo not grow: after the pilot, less than 3% is expected." in slow
    text, best = full_report(replace(e, optim=replace(MUON, schedule="cosine")), found(e, -0.1))
    assert "With cosine, the learning rate falls from the first step on" in text
    assert best.optim == replace(MUON, decay=Optim().decay) and isinstance(best.method, Growing)


def test_a_slow_small_model_lowers_the_seconds_and_not_the_flops(tmp_path):
    e = near(tmp_path)
    pilots = [found(e, 0.0, slowdown=x) for x in (1.0, 1.5)]
    each = [recipe_answers(e, pilot)[0] for pilot in pilots]
    fast, slow = (next(a for a in answers if a.recipe is HALF) for answers in each)
    assert fast.flops == slow.flops == fast.seconds
    # 1 - saving is proportional to the time of the plan.
    ratio = (1 - slow.seconds.saved) / (1 - fast.seconds.saved)
    assert ratio == pytest.approx((slow.case.flops + 0.5 * slow.case.small) / slow.case.flops)


def test_an_existing_small_model_has_its_own_decision(tmp_path):
    e = near(tmp_path)
    halves = next(a for a in recipe_answers(e)[0] if a.recipe is HALVES)
    low, high = halves.given.interval
    assert low < 0.491 < high, "the measured saving without the cost of the small model"
    given = f"half of the layers and of each MLP first saves {halves.given.saved:.0%} ({low:.0%} to {high:.0%})"
    said = f"\nIf you already have the small model, {given} of the FLOPs: grow.\n\nGrow"
    assert said in full_report(e)[0]
    long = near(tmp_path, steps=3600 * 16)
    behind = full_report(long, found(long, 9.0))[0]
    assert "of the FLOPs: do not grow.\n\nDo not grow: " in behind
    # The V-cycle makes its small model itself.
    assert advise.given_decision([a for a in recipe_answers(e)[0] if a.recipe is VCYCLE]) == []


def test_recipes_that_do_not_fit_are_named(tmp_path):
    odd = full_report(near(tmp_path, model=replace(MODEL, layers=3)))[0]
    assert "\nV-cycle in depth, corrected: does not fit: axis 'layers'" in odd
    # Its momentum includes the weight decay, so it depends on the parameters.
    sgd = experiment(tmp_path, optim=Optim("sgd", schedule="wsd"))
    text, best = full_report(sgd)
    assert text.count("does not fit: optimizer state") == len(RECIPES) and best is None
    end = "Do not grow: no recipe fits this model and its optimizer.\n"
    assert "| recipe |" not in text and text.endswith(end)
    with pytest.raises(UserError, match="no recipe to measure: half of the layers first: does not"):
        advise.measure_lag(sgd, tmp_path)


def test_a_pilot_costs_at_most_three_per_cent(tmp_path, monkeypatch):
    """The first pilot may decide; a budget that is too small for a pilot is refused.

    Compilation costs ``shows["compiling"]`` of the seconds, but only in the first pilot.
    """
    ran = []
    shows = {"pace": 1.0}

    def run(experiment, answer, small, workdir, begin):
        steps = small + int(advise.REACH * small)
        base = replace(experiment, steps=steps)
        grown = replace(base, method=answer.recipe.method(base, small / steps))
        flops = (base.cost + grown.cost) / experiment.cost
        seconds = shows["pace"] * flops + (0 if ran else shows["compiling"])
        if sum(s for _, s in ran) + seconds > advise.COST:
            raise PilotLate("late")
        ran.append((flops, seconds))
        return replace(found(experiment, shows["lag"]), flops=flops, seconds=seconds)

    def costs(steps, **values):
        ran.clear()
        shows.update(values)
        pilot = advise.measure_lag(near(tmp_path, steps=steps), tmp_path)
        assert pilot is not None and max(pilot.flops, pilot.seconds) <= 0.03
        assert pilot.flops == pytest.approx(sum(f for f, _ in ran)) or pilot.flops == 0.03
        return [flops for flops, _ in ran]

    monkeypatch.setattr(advise, "run_pilot", run)
    for lag, compiling, cost in ((0.0, 0.0, 0.03), (9.0, 0.0, 0.01), (0.0, 0.004, 0.0214)):
        spent = costs(100_000, lag=lag, compiling=compiling)
        assert 0.0095 < spent[0] <= 0.01 and sum(spent) == pytest.approx(cost, abs=4e-4)
    assert len(costs(100_000, lag=0.0, compiling=0.011)) == 1  # too little is left
    assert len(costs(100_000, pace=1.4, compiling=0.0)) == 2
    (spent,) = costs(10_000, pace=1.0)
    assert 0.02 < spent < 0.022, "the first pilot has at least 45 steps"
    with pytest.raises(UserError, match=r"for 24 steps, but at least 45 .*--budget") as e:
        advise.measure_lag(near(tmp_path), tmp_path)
    enough = float(re.search("--budget (\\S+)", str(e.value))[1])
    costs(advise.with_budget(near(tmp_path), enough).steps)
    with pytest.raises(PilotLate):
        costs(10_000, compiling=0.02)


def test_a_late_second_pilot_leaves_the_result_of_the_first(tmp_path, monkeypatch):
    e = near(tmp_path, steps=100_000)
    first = replace(found(e, 0.1), flops=0.01, seconds=0.011)
    answers = iter([first])

    def run(*_):
        for pilot in answers:
            return pilot
        raise PilotLate("late")

    monkeypatch.setattr(advise, "run_pilot", run)
    assert advise.measure_lag(e, tmp_path) == replace(first, flops=0.03, seconds=0.03)


def test_the_clock_of_a_pilot_counts_compilation(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(advise.time, "monotonic", lambda: now[0])

    def late(begin, compiling, step, *pace):
        """The number of steps after which the clock stops a run, of at most 50."""
        clock = PilotClock(1000, begin, *pace)
        now[0] += compiling
        for count in range(50):
            if clock.asked():
                return count
            now[0] += step
        return None

    # 3 % of 1,000 steps of 0.1 s are 3 s.
    assert late(now[0], 5.0, 0.1) == 5
    begin = now[0]
    assert late(begin, 0.55, 0.1) == 25, "the first step after 3 s"
    # The run that grows knows the step of the full model, and the time of the run before it.
    now[0] = begin + 1.0
    assert late(begin, 1.02, 0.05, 0.1) == 20


def test_a_pilot_that_takes_too_long_is_stopped_and_can_continue(tmp_path):
    e = runs.experiment(tmp_path, steps=400, optim=replace(WSD, warmup=2), checkpoint_every=99)
    answer = next(a for a in recipe_answers(e)[0] if a.recipe is HALF)
    long_ago = advise.time.monotonic() - 1e6
    with pytest.raises(PilotLate, match=r"more than 3% of the seconds .* give a larger --budget"):
        advise.run_pilot(e, answer, 10, tmp_path / "pilot", long_ago)
    (folder,) = (tmp_path / "pilot").iterdir()
    assert [p.name for p in (folder / "checkpoints").iterdir()] == ["6"]
    assert not (folder / "result.json").exists()


def test_a_pilot_skips_no_steps(tmp_path, monkeypatch):
    """The losses of its two runs are compared step by step, and a skipped step has none."""

    def diverges(experiment, *_, **__):
        raise Diverged(f"on_nan={experiment.on_nan}")

    monkeypatch.setattr(advise, "run_experiment", diverges)
    e = runs.experiment(tmp_path, steps=1000, on_nan="skip")
    answer = next(a for a in advise.recipe_answers(e)[0] if a.recipe.tau)
    with pytest.raises(Diverged, match="on_nan=stop"):
        advise.run_pilot(e, answer, 10, tmp_path / "pilot", 0.0)


def test_the_steps_of_a_budget_in_seconds_are_measured(tmp_path, monkeypatch):
    script = runs.script(tmp_path, near(tmp_path, steps=0, seconds=3.6))
    out = tmp_path / "mine.py"
    monkeypatch.setattr(timing, "_rehearsed", lambda e, count: [0.001])
    said = command("train.advise", script, "--workdir", tmp_path / "advise", "--write", out)
    assert "3,600 steps" in said
    made = load_experiment(out)
    assert (made.steps, made.seconds) == (3600, None) and isinstance(made.method, Growing)
    # A budget in FLOPs replaces the one in seconds, so nothing is measured.
    monkeypatch.setattr(timing, "_rehearsed", None)
    flops = near(tmp_path, steps=1800).cost
    said = command("train.advise", script, "--workdir", tmp_path / "other", "--budget", flops)
    assert "1,800 steps" in said and not (tmp_path / "other").exists()


def test_a_pilot_prints_its_cost_and_writes_the_advised_config(tmp_path, monkeypatch, capsys):
    optim = Optim(schedule="wsd", decay=0.1, warmup=2, peak_lr=1e-2)
    e = runs.experiment(tmp_path, steps=40, optim=optim, checkpoint_every=99)
    changes = {"RECIPES": (HALF, VCYCLE), "SHORTEST": 4, "COST": 0.5, "FIRST": 0.05}
    for name, value in changes.items():
        monkeypatch.setattr(advise, name, value)
    # Compilation alone takes more than this budget.
    monkeypatch.setattr(advise, "PilotClock", lambda *_: Stop())
    # A pilot this short measures only noise.
    monkeypatch.setattr(advise, "steps_behind", lambda *_: -9.0)
    monkeypatch.setattr(advise, "run_slowdown", lambda _: 1.0)
    out = tmp_path / "new" / "mine.py"
    options = f"--measure --workdir {tmp_path}/pilot --write {out} --set eval_batches=1"
    monkeypatch.setattr(sys, "argv", ["advise", runs.script(tmp_path, e), *options.split()])
    advise.main()
    said = capsys.readouterr()
    made = load_experiment(out)
    assert made.eval_batches == 1 and made.name == "tiny_grown" and isinstance(made.method, Growing)
    code = as_code(made.optim, set())
    assert eval(code, {"Optim": Optim}) == made.optim and "b1" not in code
    folders = sorted(p.name for p in (tmp_path / "pilot").iterdir())
    assert folders == ["tiny-pilot4-deepen-seed0", "tiny-pilot4-seed0"]
    results = [json.loads((tmp_path / "pilot" / f / "result.json").read_text()) for f in folders]
    share = f"{sum(r['flops'] for r in results) / e.plan[0].cost(e.batch):.1%} of the FLOPs"
    # The cost is printed before and after the pilot.
    assert f"cost {share}" in said.out and f"the pilot: 2 runs of 10 steps, {share}" in said.err


def test_the_config_that_is_written_imports_whatever_it_names(tmp_path):
    e, out = experiment(tmp_path), tmp_path / "mine.py"
    data = replace(e.data, valid_fraction=0.25)
    other = replace(e, mesh=Mesh(fsdp=2), data=data, method=HALF.method(e, 0.5))
    out.write_text(advise.config_script(runs.script(tmp_path, e), other))
    assert load_experiment(out) == other


@pytest.mark.parametrize(("changes", "says"), [
    ({"method": runs.VCYCLE}, "not a training from scratch (its method is VCycle); give its baseline"),
    ({"method": Scratch((DropLayers(LayerDrop(theta=0.5)),))}, "DropLayers, which the recipes would leave"),
    # The small model has fewer tokens than its part of the steps, and other batches than the large one.
    ({"ramp": (0.5,)}, "has ramp=(0.5,), but forecasts and pilots are for batches of one size: set ramp=()"),
], ids=["V-cycle", "modifiers", "ramp"])  # fmt: skip
def test_what_is_no_baseline_is_refused(tmp_path, changes, says):
    script = runs.script(tmp_path, runs.experiment(tmp_path, **changes))
    assert says in refused(lambda: command("train.advise", script))


@pytest.mark.parametrize(("budget", "told"), [("nan", "nan"), ("1e30", r"1e\+30")])
def test_impossible_budgets_are_refused(tmp_path, budget, told):
    script = runs.script(tmp_path, runs.experiment(tmp_path))
    said = refused(lambda: command("train.advise", script, "--budget", budget))
    assert re.search(f"must be between the FLOPs of one step, .*, but is {told}$", said)

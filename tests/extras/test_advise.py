"""Advice: savings against published results and comparable measurements, pilots, written configs.

Requests without a comparable measurement are refused.
"""

import json
import math
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import runs

from jaxgrow.layerdrop import LayerDrop
from jaxgrow.models import BERTConfig, GPT2Config
from train import advise
from train.advise import (
    LEAST,
    RECIPES,
    Pilot,
    as_code,
    best_moment,
    expected_saving,
    full_report,
    plan_saving,
    setting_of,
    steps_behind,
    switch_to_muon,
)
from train.common.errors import UserError, exits_cleanly
from train.config.experiment import load_experiment
from train.extras.advice.evidence import all_evidence, estimate_saving, method_rows
from train.plan.methods import Growing, Scratch, VCycle
from train.plan.modifiers import DropLayers
from train.plan.recipes import halves
from train.state.mesh import Mesh
from train.state.optim import Optim

HALF, HALVES, ONE, VCYCLE = RECIPES
WSD = Optim(schedule="wsd", decay=0.1)
SIZES = dict(vocab=256, context=64, layers=12, embed=24, heads=3, head_dim=8, mlp=96)
MODEL = GPT2Config(**SIZES)


def experiment(tmp_path, **changes):
    return runs.experiment(tmp_path, **{"optim": WSD, "steps": 1000, "model": MODEL} | changes)


@pytest.mark.parametrize(
    ("model", "tau", "expected"),
    # One layer first (Bu, 2511.04981). The costs count parameters only: the head is included, and
    # the attention scores are not.
    [
        (GPT2Config(vocab=50257, context=16), 0.5, 0.32),
        (GPT2Config(vocab=50257, context=16), 0.6, 0.38),
        (GPT2Config(vocab=50257, context=16), 0.8, 0.51),
        (GPT2Config(vocab=256, context=16), 0.5, 0.46),
        (GPT2Config(vocab=256, context=16), 0.6, 0.55),
    ],
)
def test_the_most_that_one_layer_first_can_save(tmp_path, model, tau, expected):
    # published with two digits
    assert plan_saving(experiment(tmp_path, model=model), ONE, tau) == pytest.approx(
        expected, abs=0.0075
    )


def test_what_a_growth_saves_at_an_equal_loss(tmp_path):
    """The prediction matches savings measured at 94 thousand parameters and 20 tokens each.

    For any model, it follows from the costs of that model.
    """
    e = experiment(tmp_path, optim=replace(WSD, decay=0.3))
    for recipe, tau, behind, measured in [
        (HALF, 0.4, 0.22, 0.127),
        (HALF, 0.5, 0.22, 0.147),
        (HALF, 0.6, 0.22, 0.149),
        (HALVES, 0.5, 0.28, 0.180),
        (HALVES, 0.6, 0.28, 0.177),
        (HALVES, 0.7, 0.28, 0.162),
    ]:
        assert expected_saving(e, recipe, tau, behind) == pytest.approx(measured, abs=0.015), (
            recipe.name,
            tau,
        )
    # Without a lag, the saving is the training cost that the plan skips.
    assert expected_saving(e, HALF, 0.5, 0.0) == pytest.approx(plan_saving(e, HALF, 0.5))
    # At 0.8 the root of the equation is 2, and at 0.2 it is a half.
    for tau, worth in ((0.8, 1 - 0.8 * 0.1 * 2), (0.2, 1 - 0.2 * 0.1 / 2)):
        exact = 1 - (1 - plan_saving(e, HALF, tau)) / worth
        assert expected_saving(e, HALF, tau, 0.1) == pytest.approx(exact, rel=1e-12)
    assert expected_saving(e, HALF, 0.5, 2.0) == -math.inf  # The lag is larger than the run.
    c = 1 - plan_saving(e, HALF, 0.5) / 0.5
    assert expected_saving(e, HALF, 0.5, 1 - c) == pytest.approx(
        0
    )  # The lag cancels the skipped cost.
    assert plan_saving(e, HALF, 0.0) == 0


def test_growth_is_placed_at_the_largest_saving(tmp_path):
    e = experiment(tmp_path)  # The learning rate decays over the last tenth.
    for behind in (0.0, 0.22, 0.5, 0.9):
        gain, tau = best_moment(e, HALF, behind)
        assert (
            all(gain >= expected_saving(e, HALF, t / 100, behind) for t in range(40, 71, 5))
            and 0.4 <= tau <= 0.7
        )
    assert best_moment(e, HALF, 0.0)[1] == 0.7 and best_moment(e, HALF, 0.9)[1] == 0.4
    for decay in (0.5, 0.8):
        assert best_moment(replace(e, optim=replace(WSD, decay=decay)), HALF, 0.0)[
            1
        ] == pytest.approx(1 - decay)
    grown = replace(e, method=HALF.method(e, 0.8))
    steps = [round(1000 * s) for s in (0.8, 0.1, 0.1)]
    assert [phase.steps for phase in grown.plan if phase.cost(1)] == steps


def test_how_far_one_curve_is_behind_another():
    """The lag behind the curve from scratch, ``L = 3 t^-0.1``, is recovered.

    The loss of the grown model equals the loss from scratch some steps earlier. Batches differ
    by 4 %.
    """
    small, rng = 200, np.random.default_rng(0)
    step, batches = 1 + np.arange(500), 1 + 0.04 * rng.standard_normal(500)
    scratch = 3 * step**-0.1 * batches
    own = 1 + 0.004 * rng.standard_normal(500)  # noise that the two curves do not share
    assert steps_behind(scratch, scratch, small) == 0  # a curve compared with itself
    for behind in (0.1, 0.3, 0.9):
        grown = 3 * np.maximum(step - behind * small, 1) ** -0.1 * batches
        grown[small : small + small // 2] *= 1.5  # the loss spike after growth
        assert steps_behind(scratch, grown, small) == pytest.approx(behind, rel=0.1)
        assert steps_behind(scratch, grown * own, small) == pytest.approx(behind, rel=0.1, abs=0.02)
    assert steps_behind(scratch, scratch * 0.99, small) < 0  # The second curve is ahead.
    message = r"does not fall, .*3\.\d+ after step 200, 3\.\d+ at the end; check whether the learning rate"
    with pytest.raises(UserError, match=message):
        steps_behind(3 * step**0.01, scratch, small)


MUON = replace(WSD, name="muon", decay=0.5)


def near(tmp_path, **changes):
    """A run at the usual size and budget: 94 thousand parameters, 19.5 tokens per parameter."""
    return experiment(tmp_path, **{"optim": MUON, "steps": 3600} | changes)


def test_without_a_pilot_advice_is_the_regression(tmp_path):
    e = near(tmp_path)
    text, best = full_report(e)
    rows = [
        line
        for line in text.splitlines()
        if line.startswith("| half of the layers and of each MLP")
    ]
    (found,) = [row.split("|")[3].strip() for row in rows]
    # The regression decides, which also contains the measurements at other sizes and budgets.
    assert found == estimate_saving(method_rows("halves", 0.6), setting_of(e)).told
    assert re.fullmatch(r"\d+\.\d % ± \d+\.\d", found)
    assert "Try half of the layers and of each MLP first" in text and best is not None
    # The advice grows after 0.6 of the steps, as in the measurement.
    assert best.method == halves(e.model)
    assert plan_saving(e, VCYCLE, None) > 0.1 and isinstance(VCYCLE.method(e, 0.0), VCycle)


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 3600 * 16},  # 316 tokens per parameter
        {"steps": 360},
        {"model": GPT2Config(vocab=50257, context=1024), "steps": 300_000},  # 124 M parameters
        {"optim": replace(MUON, name="sgd", weight_decay=0.0)},
        {"model": BERTConfig(**SIZES, types=1)},
    ],
)
def test_no_advice_far_from_comparable_measurements(tmp_path, changes):
    """No advice is given for another size, budget, model family or optimizer."""
    text, best = full_report(near(tmp_path, **changes))
    assert (
        best is None
        and "No advice: there are no measurements near this setting" in text
        and "--measure runs a pilot" in text
    )
    assert text.count("no comparable measurement; the nearest one is ") == len(RECIPES)


def test_the_nearest_measurement_prefers_the_same_family():
    text, _ = full_report(load_experiment("configs/wikipedia_encoder.py:muon", ["steps=200"]))
    line = next(line for line in text.splitlines() if line.startswith("- half of the layers first"))
    assert "nearest one is > 19.7 % [22.8, 16.7] (ModernBERT, Muon, 269 K parameters" in line


def test_no_recipe_is_advised_if_the_small_model_was_cheaper(tmp_path):
    rows = [e for e in all_evidence() if e.small_alone_is_cheaper]
    assert {(e.family, e.method) for e in rows} == {
        (f, m) for f in ("ViT", "ModernBERT") for m in ("deepen", "halves")
    }
    vit = load_experiment("configs/cifar10.py:vit_muon")
    for pilot in (None, found(0.1, 0.1)):
        text, best = full_report(vit, pilot)
        assert (
            best is None
            and "training only the small model reached its final loss for fewer FLOPs" in text
        )


def test_a_saving_without_an_interval_above_zero_is_not_advised(tmp_path):
    # The measurements are 13.5 % ± 15.9 and single seeds.
    text, best = full_report(near(tmp_path, optim=replace(MUON, name="adamw")))
    assert (
        best is None and "no measured saving has an interval that is completely above zero" in text
    )
    # The saving of one layer under AdamW is a measurement. It does not come from a fitted law.
    assert "| 31.8 %, no interval" in text


def test_muon_is_advised_first_where_it_was_measured(tmp_path):
    e = near(tmp_path, optim=replace(MUON, name="adamw"))
    made, said = switch_to_muon(e)
    assert made.optim == MUON and said.startswith("First use Muon") and "> 41.0 %" in said
    far = replace(e, steps=36)
    assert switch_to_muon(far)[0] is far and "no comparable measurement" in switch_to_muon(far)[1]
    assert switch_to_muon(near(tmp_path)) == (near(tmp_path), "")


def found(half, halves):
    return Pilot({"deepen": half, "halves": halves}, 1.0)


def test_a_pilot_answers_wherever_it_ran(tmp_path):
    e = experiment(tmp_path, optim=MUON, steps=200)  # No comparable measurement exists.
    text, best = full_report(e, found(0.1, 0.9))
    assert (
        "Try half of the layers first" in text
        and best is not None
        and isinstance(best.method, Growing)
    )
    assert (
        best.method.small == replace(e.model, layers=e.model.layers // 2) and best.optim == e.optim
    )
    # A short pilot underestimates the lag.
    assert f"grown after 50% of the steps, b = {LEAST:.2f}" in text
    assert best.method.source.steps == 0.5
    text, best = full_report(e, found(0.5, 0.1))
    assert (
        "Try half of the layers and of each MLP first" in text
        and best.method.small.mlp == e.model.mlp // 2
    )
    text, best = full_report(e, found(1.1, 1.1))
    assert "it saves nothing at this budget" in text and best is None
    text, best = full_report(replace(e, optim=replace(MUON, schedule="cosine")), found(0.1, 0.9))
    assert "With cosine, the learning rate falls from the first step on" in text
    assert best.optim == replace(MUON, decay=Optim().decay) and isinstance(best.method, Growing)


def test_a_pilot_is_capped_by_comparable_measurements(tmp_path):
    optimistic = found(0.0, 0.0)
    gain = best_moment(near(tmp_path), HALVES, LEAST)[0]
    said = re.search(r"about (\d+)%", full_report(near(tmp_path), optimistic)[0])
    assert int(said[1]) < 100 * gain - 1
    said = re.search(r"about (\d+)%", full_report(near(tmp_path, steps=200), optimistic)[0])
    assert int(said[1]) == round(100 * best_moment(near(tmp_path, steps=200), HALVES, LEAST)[0])


def test_recipes_that_do_not_fit_are_named(tmp_path):
    odd = experiment(tmp_path, model=replace(MODEL, layers=3))
    text, best = full_report(odd, found(0.1, 0.9))
    assert "- V-cycle in depth, corrected: does not fit: axis 'layers'" in text
    assert best is not None and isinstance(best.method, Growing)
    # Its momentum includes the weight decay, so it depends on the parameters.
    sgd = experiment(tmp_path, optim=Optim("sgd", schedule="wsd"))
    text, best = full_report(sgd)
    assert text.count("does not fit: optimizer state") == len(RECIPES) and best is None
    assert "| recipe |" not in text
    assert text.endswith("No advice: no recipe fits this model and its optimizer.\n")
    with pytest.raises(UserError, match="no recipe to measure: half of the layers first: does not"):
        advise.run_pilot(sgd, tmp_path)


def advised(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["advise", *map(str, arguments)])
    exits_cleanly(advise.main)


def test_a_pilot_prints_its_cost_and_writes_the_advised_config(tmp_path, monkeypatch, capsys):
    e = runs.experiment(
        tmp_path,
        steps=40,
        optim=Optim(schedule="wsd", decay=0.1, warmup=2, peak_lr=1e-2),
        checkpoint_every=99,
    )
    monkeypatch.setattr(advise, "RECIPES", (HALF, VCYCLE))
    monkeypatch.setattr(advise, "SHORTEST", 4)
    # A pilot this short measures only noise.
    monkeypatch.setattr(advise, "steps_behind", lambda *_: 0.1)
    monkeypatch.setattr(advise, "WORTH", 0.0)
    script = runs.script(tmp_path, e)
    out = tmp_path / "new" / "mine.py"
    options = f"--measure --workdir {tmp_path}/pilot --write {out} --set eval_batches=1"
    advised(monkeypatch, script, *options.split())
    said = capsys.readouterr()
    made = load_experiment(out)
    assert made.eval_batches == 1 and made.name == "tiny_grown" and isinstance(made.method, Growing)
    assert eval(as_code(made.optim, set()), {"Optim": Optim}) == made.optim and "b1" not in as_code(
        made.optim, set()
    )
    folders = sorted(p.name for p in (tmp_path / "pilot").iterdir())
    assert folders == ["tiny-pilot-deepen-seed0", "tiny-pilot-seed0"]
    spent = sum(
        json.loads((tmp_path / "pilot" / f / "result.json").read_text())["flops"] for f in folders
    )
    share = f"{spent / e.plan[0].cost(e.batch):.1%} of the budget"
    # The cost is printed before and after the pilot.
    assert f"cost {share}" in said.out and f"the pilot: 2 runs of 10 steps, {share}" in said.err


def test_the_config_that_is_written_imports_whatever_it_names(tmp_path):
    e = experiment(tmp_path)
    script = runs.script(tmp_path, e)
    other = replace(
        e, mesh=Mesh(fsdp=2), data=replace(e.data, valid_fraction=0.25), method=HALF.method(e, 0.5)
    )
    out = tmp_path / "mine.py"
    out.write_text(advise.config_script(str(script), other))
    assert load_experiment(out) == other


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (runs.VCYCLE, "not a training from scratch (its method is VCycle); give its baseline"),
        (Scratch((DropLayers(LayerDrop(theta=0.5)),)), "DropLayers, which the recipes would leave"),
    ],
    ids=["V-cycle", "modifiers"],
)
def test_what_is_no_baseline_is_refused(tmp_path, monkeypatch, capsys, method, says):
    script = runs.script(tmp_path, runs.experiment(tmp_path, method=method))
    with pytest.raises(SystemExit):
        advised(monkeypatch, script)
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        *(
            (("--budget", budget), f"must be between the FLOPs of one step, .*, but is {told}$")
            for budget, told in [(x, x) for x in ("1", "0", "nan", "inf")] + [("1e30", r"1e\+30")]
        ),
        (("--write", "adv.txt"), "--write takes the name of a config file, FILE.py, not adv.txt"),
    ],
)
def test_impossible_arguments_are_refused(tmp_path, monkeypatch, capsys, options, says):
    script = runs.script(tmp_path, runs.experiment(tmp_path))
    with pytest.raises(SystemExit):
        advised(monkeypatch, script, *options)
    assert re.search(says, capsys.readouterr().err.strip())

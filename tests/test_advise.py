"""What can be saved: caps against the arithmetic of the literature, the time to catch up, a config that runs, refusals."""

import json
import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import runs

from jaxgrow.models import GPT2Config
from train import advise
from train.advise import RECIPES, Pilot, advice, expected, placed, saved, steps_behind, written
from train.errors import UserError, exits_cleanly
from train.experiment import load
from train.plan.methods import Growing, VCycle
from train.results.evidence import EVIDENCE, nearest
from train.state.mesh import Mesh
from train.state.optim import Optim

HALF, HALVES, ONE, VCYCLE = RECIPES
WSD = Optim(schedule="wsd", decay=0.1)
MODEL = GPT2Config(vocab=256, context=64, layers=12, embed=24, heads=3, head_dim=8, mlp=96)


def experiment(tmp_path, **changes):
    return runs.experiment(tmp_path, **{"optim": WSD, "steps": 1000, "model": MODEL} | changes)


@pytest.mark.parametrize(
    ("model", "tau", "expected"),
    [  # one layer first (Bu, 2511.04981): by parameters alone, so without attention's scores, the head counted
        (GPT2Config(vocab=50257, context=16), 0.5, 0.32),
        (GPT2Config(vocab=50257, context=16), 0.6, 0.38),
        (GPT2Config(vocab=50257, context=16), 0.8, 0.51),
        (GPT2Config(vocab=256, context=16), 0.5, 0.46),
        (GPT2Config(vocab=256, context=16), 0.6, 0.55),
    ],
)
def test_the_most_that_one_layer_first_can_save(tmp_path, model, tau, expected):
    assert saved(experiment(tmp_path, model=model), ONE, tau) == pytest.approx(expected, abs=0.0075)  # of two digits


def test_what_a_growth_saves_at_an_equal_loss(tmp_path):
    """As measured at 94 thousand parameters, 20 tokens each, to a per cent; and the same for any model, by its own costs."""
    e = experiment(tmp_path, optim=replace(WSD, decay=0.3))
    for recipe, tau, measured in [
        (HALF, 0.4, 0.127),
        (HALF, 0.5, 0.147),
        (HALF, 0.6, 0.149),
        (HALVES, 0.5, 0.180),
        (HALVES, 0.6, 0.177),
        (HALVES, 0.7, 0.162),
        (ONE, 0.5, -0.036),
    ]:
        assert expected(e, recipe, tau, recipe.behind) == pytest.approx(measured, abs=0.015), (recipe.name, tau)
    assert expected(e, HALF, 0.5, 0.0) == pytest.approx(saved(e, HALF, 0.5))  # nothing behind: what the plan leaves out
    assert expected(e, HALF, 0.5, 2.0) == -math.inf  # never ahead of the first step
    c = 1 - saved(e, HALF, 0.5) / 0.5
    assert expected(e, HALF, 0.5, 1 - c) == pytest.approx(0)  # as much behind as it left out
    assert saved(e, HALF, 0.0) == 0


def test_a_growth_comes_where_most_is_saved_and_before_the_rate_decays(tmp_path):
    e = experiment(tmp_path)  # the rate decays over the last tenth
    for behind in (0.0, 0.22, 0.5, 0.9):
        gain, tau = placed(e, HALF, behind)
        assert all(gain >= expected(e, HALF, t / 100, behind) for t in range(40, 71, 5)) and 0.4 <= tau <= 0.7
    assert placed(e, HALF, 0.0)[1] == 0.7 and placed(e, HALF, 0.9)[1] == 0.4
    for decay in (0.5, 0.8):
        assert placed(replace(e, optim=replace(WSD, decay=decay)), HALF, 0.0)[1] == pytest.approx(1 - decay)
    grown = replace(e, method=HALF.method(e, 0.8))
    steps = [round(1000 * s) for s in (0.8, 0.1, 0.1)]
    assert [phase.steps for phase in grown.plan if phase.cost(1)] == steps


def test_how_far_one_curve_is_behind_another():
    """From scratch ``L = 3 t^-0.1``; the grown model is as far as it was some steps before. Batches differ by 4 %."""
    small, rng = 200, np.random.default_rng(0)
    step, batches = 1 + np.arange(500), 1 + 0.04 * rng.standard_normal(500)
    scratch = 3 * step**-0.1 * batches
    own = 1 + 0.004 * rng.standard_normal(500)  # noise that is not the batches'
    assert steps_behind(scratch, scratch, small) == 0  # with itself
    for behind in (0.1, 0.3, 0.9):
        grown = 3 * np.maximum(step - behind * small, 1) ** -0.1 * batches
        grown[small : small + small // 2] *= 1.5  # what the growth upset
        assert steps_behind(scratch, grown, small) == pytest.approx(behind, rel=0.1)
        assert steps_behind(scratch, grown * own, small) == pytest.approx(behind, rel=0.1, abs=0.02)
    assert steps_behind(scratch, scratch * 0.99, small) < 0  # ahead
    with pytest.raises(
        UserError, match=r"does not fall, .*3\.\d+ after step 200, 3\.\d+ in the end; is the rate too high"
    ):
        steps_behind(3 * step**0.01, scratch, small)


def found(half, halves, one):
    return Pilot({"deepen": half, "halves": halves, "one layer": one}, 1.0)


def test_advice_is_of_what_a_pilot_found(tmp_path):
    e = experiment(tmp_path, optim=replace(WSD, name="muon", decay=0.5))
    text, best = advice(e, found(0.1, 0.9, 0.9))
    assert "Growing, half of the layers first" in text and best is not None and isinstance(best.method, Growing)
    assert best.method.small == replace(e.model, layers=e.model.layers // 2)
    assert best.optim == e.optim and "First of all Muon" not in text
    assert "grown at 50% of the steps, b = 0.20" in text  # what a short pilot says less than
    assert best.method.source.steps == 0.5
    text, best = advice(e, found(0.5, 0.1, 0.9))
    assert "Growing, half of the layers and of each MLP first" in text and best.method.small.mlp == e.model.mlp // 2
    text, best = advice(e, found(1.1, 1.1, 1.1))
    assert "nothing to gain at this budget" in text and best is None
    text, best = advice(replace(e, optim=Optim()), found(0.1, 0.9, 0.9))  # a cosine
    assert "cosine falls from the first step on" in text and "First of all Muon" in text
    assert best.optim == Optim(name="muon", schedule="wsd") and isinstance(best.method, Growing)
    assert saved(e, VCYCLE, 0.0) > 0.1 and isinstance(VCYCLE.method(e, 0.0), VCycle)
    assert "--measure finds out" in advice(e)[0]


def test_advice_follows_what_was_measured_nearest(tmp_path):
    small = experiment(tmp_path, optim=replace(WSD, name="muon"))
    large = replace(small, model=GPT2Config(vocab=50257, context=1024), steps=1_500_000)  # 124 M: a report of one layer
    near = found(0.5, 0.9, 0.1)
    assert advice(large, near)[1].method.small.layers == 1
    half = small.model.layers // 2
    assert advice(small, near)[1].method.small.layers == half  # where one layer cost more than it saved


def advised(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["advise", *map(str, arguments)])
    exits_cleanly(advise.main)


def test_a_pilot_runs_its_cost_is_told_and_the_config_is_that_advised(tmp_path, monkeypatch, capsys):
    e = runs.experiment(
        tmp_path, steps=40, optim=Optim(schedule="wsd", decay=0.1, warmup=2, peak_lr=1e-2), checkpoint_every=99
    )
    monkeypatch.setattr(advise, "RECIPES", (HALF, VCYCLE))
    monkeypatch.setattr(advise, "SHORTEST", 4)
    script = runs.script(tmp_path, e)
    out = tmp_path / "mine.py"
    advised(
        monkeypatch, script, "--measure", "--workdir", tmp_path / "pilot", "--write", out, "--set", "eval_batches=1"
    )
    said = capsys.readouterr()
    made = load(out)
    assert made.optim.name == "muon" and made.eval_batches == 1 and made.name.startswith("tiny_muon")
    assert eval(written(made.optim, set()), {"Optim": Optim}) == made.optim and "b1" not in written(made.optim, set())
    folders = sorted(p.name for p in (tmp_path / "pilot").iterdir())
    assert folders == ["tiny-pilot-deepen-seed0", "tiny-pilot-seed0"]
    spent = sum(json.loads((tmp_path / "pilot" / f / "result.json").read_text())["flops"] for f in folders)
    share = f"{spent / e.plan[0].cost(e.batch):.1%} of the budget"
    assert (
        f"cost {share}" in said.out and f"the pilot: 2 runs of 10 steps, {share}" in said.err
    )  # told before, and after


def test_the_config_that_is_written_imports_whatever_it_names(tmp_path):
    e = experiment(tmp_path)
    script = runs.script(tmp_path, e)
    other = replace(e, mesh=Mesh(fsdp=2), data=replace(e.data, valid_fraction=0.25), method=HALF.method(e, 0.5))
    out = tmp_path / "mine.py"
    out.write_text(advise.script(str(script), other))
    assert load(out) == other


def test_without_a_pilot_a_growth_comes_where_it_was_best_elsewhere_whatever_the_budget(tmp_path):
    e = experiment(tmp_path, optim=replace(WSD, name="muon"))
    for steps in (200, 5000):
        text, best = advice(replace(e, steps=steps))  # the rate is stable for 0.9 of them
        assert 0.5 <= best.method.source.steps <= 0.6 and "of the steps, b = 0.22" in text


def test_what_is_no_baseline_is_refused(tmp_path, monkeypatch, capsys):
    script = runs.script(tmp_path, runs.experiment(tmp_path, name="cycle", method=runs.VCYCLE))
    with pytest.raises(SystemExit):
        advised(monkeypatch, script)
    assert "cycle is no training from scratch, but VCycle: name its baseline" in capsys.readouterr().err
    script = runs.script(tmp_path, runs.experiment(tmp_path))
    with pytest.raises(SystemExit):
        advised(monkeypatch, script, "--budget", "1")
    assert "--budget 1 is less than a step" in capsys.readouterr().err


def test_evidence_is_told_by_its_distance():
    assert {e.recipe for e in EVIDENCE} >= {r.name for r in RECIPES}
    near = nearest("deepen", 94e3, 20)
    assert near[0].parameters == 94e3 and all(math.isfinite(e.distance(94e3, 20)) for e in EVIDENCE)
    assert "94 K parameters, 20 tokens each" in near[0].told

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
from train.advise import RECIPES, Pilot, advice, caught_up, latest, saved, written
from train.errors import exits_cleanly
from train.experiment import load
from train.plan.methods import Growing, VCycle
from train.results.evidence import EVIDENCE, nearest
from train.state.mesh import Mesh
from train.state.optim import Optim

HALF, HALVES, ONE, VCYCLE = RECIPES
WSD = Optim(schedule="wsd", decay=0.1)


def experiment(tmp_path, **changes):
    return runs.experiment(tmp_path, **{"optim": WSD, "steps": 1000} | changes)


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


def test_a_growth_comes_early_enough_to_catch_up_and_before_the_rate_decays(tmp_path):
    e = experiment(tmp_path)  # the rate decays over the last tenth
    assert latest(e, 1.0) == 0.5  # as many steps as the small model had
    assert latest(e, 3.0) == 0.25
    assert latest(e, 0.05) == 0.9  # but never while the rate falls
    grown = replace(e, method=HALF.method(e, 0.8))
    steps = [round(1000 * s) for s in (0.8, 0.1, 0.1)]
    assert [phase.steps for phase in grown.plan if phase.cost(1)] == steps
    assert saved(e, HALF, 0.0) == 0


def test_when_two_curves_meet():
    """The gap falls as 2 % * 2^(-t / 100): half a per cent after 200 steps. Batches differ by 4 % from each other."""
    at, small = np.arange(1, 301), 100
    batches = 1 + 0.04 * np.random.default_rng(0).standard_normal(400)
    scratch = 3 * batches
    gap = np.concatenate([np.full(small, 0.1), 0.02 * 2 ** (-at / small)])
    assert caught_up(scratch, scratch, small) == 0  # with itself
    assert caught_up(scratch, scratch * (1 + gap), small) == 2
    own = 1 + 0.004 * np.random.default_rng(1).standard_normal(400)  # noise that is not the batches'
    assert caught_up(scratch, scratch * own * (1 + gap), small) == pytest.approx(2, abs=0.25)
    assert caught_up(scratch, (scratch * (1 + gap))[:300], small) is None  # of a run that ends there
    assert caught_up(scratch, scratch * (1 - gap), small) == 0  # below from the start


def found(half, halves, one):
    return Pilot({"deepen": half, "halves": halves, "one layer": one}, 1.0)


def test_advice_is_of_what_the_budget_leaves_time_for(tmp_path):
    e = experiment(tmp_path, optim=replace(WSD, name="muon"), model=runs.LARGE)
    text, best = advice(e, found(0.5, None, 0.5))
    assert "Growing, half of the layers first" in text and best is not None and isinstance(best.method, Growing)
    assert best.method.small == replace(e.model, layers=e.model.layers // 2)
    assert best.optim == e.optim and "First of all Muon" not in text
    assert best.method.source.steps == 0.5 and "grown at 50% of the steps, r = 1" in text  # a pilot's r is the least
    text, best = advice(e, found(1.5, None, None))
    assert best.method.source.steps == pytest.approx(0.4) and "grown at 40% of the steps, r = 1.5" in text
    text, best = advice(e, found(19.0, 0.5, 0.5))  # half of the layers alone could grow at a twentieth of the steps
    assert "Growing, half of the layers and of each MLP first" in text and best.method.small.mlp == e.model.mlp // 2
    for pilot in (found(100.0, 100.0, 100.0), found(None, None, None)):
        text, best = advice(e, pilot)
        assert "nothing to gain at this budget" in text and best is None
    assert "nothing: r > 2" in text
    text, best = advice(replace(e, optim=Optim()), found(0.5, None, None))  # a cosine
    assert "cosine falls from the first step on" in text and "First of all Muon" in text
    assert best.optim == Optim(name="muon", schedule="wsd") and isinstance(best.method, Growing)
    assert saved(e, VCYCLE, 0.0) > 0.1 and isinstance(VCYCLE.method(e, 0.0), VCycle)
    assert "--measure finds out" in advice(e)[0]


def test_advice_follows_what_was_measured_nearest(tmp_path):
    small = experiment(tmp_path, optim=replace(WSD, name="muon"), model=runs.LARGE)
    large = replace(small, model=GPT2Config(vocab=50257, context=1024), steps=1_500_000)  # 124 M: a report of one layer
    caught = found(1.0, None, 0.2)
    assert advice(large, caught)[1].method.small.layers == 1
    half = small.model.layers // 2
    assert advice(small, caught)[1].method.small.layers == half  # where one layer cost more than it saved


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
        f"cost {share}" in said.out and f"the pilot: 2 runs of 12 steps, {share}" in said.err
    )  # told before, and after


def test_the_config_that_is_written_imports_whatever_it_names(tmp_path):
    e = experiment(tmp_path)
    script = runs.script(tmp_path, e)
    other = replace(e, mesh=Mesh(fsdp=2), data=replace(e.data, valid_fraction=0.25), method=HALF.method(e, 0.5))
    out = tmp_path / "mine.py"
    out.write_text(advise.script(str(script), other))
    assert load(out) == other


def test_without_a_pilot_a_growth_comes_where_it_sufficed_elsewhere_whatever_the_budget(tmp_path):
    e = experiment(tmp_path, optim=replace(WSD, name="muon"))
    for steps in (200, 5000):
        text, best = advice(replace(e, steps=steps))  # the rate is stable for 0.9 of them
        assert best.method.source.steps == 0.5 and "grown at 50% of the steps" in text


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

"""The experiments of configs/wikipedia_baselines.py: their plans, and tiny runs of them."""

import json
from dataclasses import replace

import chex
import numpy as np
import pytest
import runs
from cases import cases

from configs import wikipedia12, wikipedia_baselines
from jaxgrow import checkpoints
from jaxgrow.models import LlamaConfig, Loop
from train import pretrain
from train.common.errors import UserError
from train.config.experiment import experiment_names, load_experiment
from train.extras.expert_utility import MeasureExperts
from train.extras.run_params import checkpoint_params
from train.plan.methods import Growing, GrowTo, TrainStage
from train.plan.training import Train
from train.state.optim import Optim, learning_rate

NAMES = experiment_names(wikipedia_baselines)
MOE = LlamaConfig(
    **{"vocab": 256, "context": 8, "layers": 2, "embed": 8, "heads": 2, "kv_heads": 2},
    **{"head_dim": 4, "mlp": 8, "experts": 2, "active": 1},
)
MUON = Optim("muon", peak_lr=1e-2, warmup=1, ema=0.5, cautious_decay=True)
DEEP = replace(runs.MODEL, layers=4)


def rates(experiment):
    """Return the learning rate of each step of a run, relative to the highest one."""
    peak = experiment.optim.peak_lr
    return [
        learning_rate(p.optim, p.steps, step) / peak
        for p in experiment.plan
        if isinstance(p, Train)
        for step in range(p.begin, p.end)
    ]


def test_the_costs_are_those_that_the_file_claims():
    cost = {name: getattr(wikipedia_baselines, name)().cost for name in NAMES}
    muon = wikipedia12.muon()
    assert cost["ema"] == cost["cautious"] == muon.cost
    # Muon's matrix products cost the same in each of the additional steps.
    assert cost["ramp"] / muon.cost == pytest.approx(1.013, abs=5e-4)
    for at in ("35", "50"):
        assert cost[f"loop{at}"] == pytest.approx(cost[f"interleave{at}"], rel=0.03)
        assert cost[f"unloop{at}"] == pytest.approx(cost[f"interleave{at}"], rel=0.03)
    assert cost["untie"] == cost["untied"] == muon.cost
    assert cost["experts_even"] == cost["experts_utility"]


@pytest.mark.parametrize("name", ["untie", "unloop35", "loop35", "interleave50"])
def test_the_learning_rates_are_those_of_the_baseline(name):
    """The warm-up ends after 100 steps. The fall of the baseline begins 50 steps later."""
    found, base = rates(getattr(wikipedia_baselines, name)()), rates(wikipedia12.muon())
    assert len(found) == len(base) == 1800
    np.testing.assert_allclose(found, base, atol=50 / 900 + 1e-2)
    assert found[-1] < 2e-3 and found[899] == 1.0


LOOPED, HALF = replace(runs.MODEL, loop=Loop(0, 2)), (TrainStage(0.5, warmup=0),)
CASES = {
    "loop": (DEEP, Growing(runs.MODEL, TrainStage(0.25), (
        GrowTo((TrainStage(0.25, warmup=0),), ("loop",), LOOPED, moments="copy"),
        GrowTo(HALF, ("unloop",), moments="exact"),
    ))),
    "untie": (replace(DEEP, tied=False),
        Growing(replace(DEEP, tied=True), TrainStage(0.5), (GrowTo(HALF, ("untie",), moments="copy"),))),
    "experts": (replace(MOE, experts=4),
        Growing(MOE, TrainStage(0.5), (GrowTo(HALF, ("expert_copies",), moments="copy", utility=2),))),
}  # fmt: skip


@pytest.mark.parametrize("optimizer", ["muon", pytest.param("adamw", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", cases(CASES.keys(), ["loop"], []))
def test_runs_with_optimizer_state_resume_and_keep_their_averages(tmp_path, name, optimizer):
    model, method = CASES[name]
    how = dict(optim=replace(MUON, name=optimizer), checkpoint_every=1, eval_every=1, ramp=(0.25,))
    e = runs.experiment(tmp_path, model=model, method=method, **how)
    whole, again = tmp_path / "whole", tmp_path / "again"
    pretrain.run_experiment(e, whole)
    runs.stopped(e, again, 3, 5)
    runs.assert_same_end(again, whole)
    both = [checkpoints.load(folder / "ema") for folder in (again, whole)]
    chex.assert_trees_all_equal(both[0][1], both[1][1])
    assert both[0][0] == model and np.isfinite(both[0][1]["final_norm"]["scale"]).all()
    lines = [line for line in runs.log(whole) if "val_loss" in line]
    if name != "experts":  # the noise of the router changes the function
        grown = [i for i, line in enumerate(lines) if line["phase"].startswith("grow")]
        for i in grown if name == "untie" else grown[1:]:
            for key in ("val_loss", "val_loss_ema"):
                assert lines[i][key] == pytest.approx(lines[i - 1][key], rel=1e-6)


def test_the_experts_of_the_highest_utility_are_copied(tmp_path):
    e = runs.experiment(tmp_path, model=replace(MOE, experts=3), method=CASES["experts"][1])
    assert [type(p).__name__ for p in e.plan] == ["Train", "MeasureExperts", "Grow", "Train"]
    assert isinstance(e.plan[1], MeasureExperts) and e.plan[1].probes == 2
    run = tmp_path / "run"
    pretrain.run_experiment(replace(e, checkpoint_every=1, keep_every=1), run)
    (line,) = [line for line in runs.log(run) if "sensitivity" in line]
    utility = np.reshape(line["sensitivity"], (2, 2))
    assert (utility >= 0).all() and (utility[:, 0] != utility[:, 1]).all()
    steps = {"small": 4, "large": 5}
    small, large = (checkpoint_params(run / "checkpoints", *of) for of in steps.items())
    for layer, best in enumerate(utility.argmax(1)):
        old, new = (p["blocks"]["mlp"]["down"]["kernel"][layer] for p in (small, large))
        # One step later, the third expert is near the expert that it is a copy of.
        distances = [np.abs(new[2] - x).max() for x in old]
        assert np.argmin(distances) == best
    costs = json.loads((run / "result.json").read_text())["phases"]
    assert [p["phase"] for p in costs][1] == "measure small" and costs[1]["flops"] > 0


def test_a_negative_utility_is_refused(tmp_path):
    config = runs.script(tmp_path, runs.experiment(tmp_path, method=Growing(runs.MODEL)))
    with pytest.raises(UserError, match="utility must be at least 0, but is -1"):
        load_experiment(config, ["method.to.0.utility=-1"])

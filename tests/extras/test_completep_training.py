"""Runs with CompleteP multipliers grow, resume and initialise by the current model size."""

import math
from typing import Any

import jax
import numpy as np
import pytest
import runs
from families import FAMILIES
from runs import MODEL

from jaxgrow.models import LlamaConfig
from train.extras.fine_tune import FineTune
from train.plan.methods import Growing, GrowTo, Scratch, TrainStage
from train.plan.transforms import Grow
from train.run.trainer import run_experiment
from train.state.model import TrainState
from train.state.optim import Optim, transformation


@pytest.mark.slow
def test_a_run_that_was_killed_ends_with_the_same_bits(tmp_path):
    optim = Optim(peak_lr=1e-2, warmup=2, base=runs.SMALL)
    to = GrowTo((TrainStage(0.5),), by=runs.DOUBLED, moments="exact")
    method = Growing(runs.SMALL, TrainStage(0.5), (to,))
    given = dict(optim=optim, model=runs.LARGE, method=method, checkpoint_every=2)
    experiment = runs.experiment(tmp_path, **given)
    run_experiment(experiment, tmp_path / "whole")
    runs.stopped(experiment, tmp_path / "stopped", 2, 6)
    runs.assert_same_end(tmp_path / "stopped", tmp_path / "whole")


def test_what_a_growth_makes_anew_has_the_scale_of_its_birth():
    models = {"a": TrainState(runs.fresh(runs.MODEL), None, runs.MODEL)}

    def grown(base, fresh: Any = True):
        phase = Grow("a", "b", runs.MODEL, runs.LARGE, ("stack",), fresh=fresh, base=base)
        tx = transformation(Optim())
        return jax.jit(lambda models: phase.apply(models, tx).params["blocks"])(models)

    with_base, without, scaled = grown(runs.MODEL), grown(None), grown(None, "spectral")
    for module, scale in (("up", 1.0), ("down", math.sqrt(2) / 2)):
        ours, plain = (x["mlp"][module]["kernel"] for x in (with_base, without))
        np.testing.assert_array_equal(ours[:2], plain[:2])
        np.testing.assert_allclose(ours[2:], scale * plain[2:], rtol=1e-6)
        np.testing.assert_array_equal(scaled["mlp"][module]["kernel"][:2], plain[:2])
    norms = np.linalg.norm(scaled["mlp"]["up"]["kernel"][2:], axis=(1, 2))
    np.testing.assert_allclose(norms, 16 / (math.sqrt(8) + math.sqrt(16)), rtol=1e-6)
    method = Growing(runs.MODEL, TrainStage(0.5), (GrowTo(fresh=True),))
    phase = method.plan(runs.LARGE, Optim(base=runs.MODEL), 8)[1]
    assert isinstance(phase, Grow) and phase.base == runs.MODEL


def test_what_has_no_multipliers_is_refused():
    with pytest.raises(ValueError, match="adamw and muon, not for sgd"):
        Optim(name="sgd", base=MODEL)
    with pytest.raises(ValueError, match=r"leave optim\.base out"):
        FineTune("there").plan(MODEL, Optim(base=MODEL), 8)
    says = r"no size for the axes \['kv_heads'\].*of the same family"
    with pytest.raises(ValueError, match=says):
        Scratch().plan(LlamaConfig(kv_heads=4), Optim(base=MODEL), 8)
    swin = FAMILIES["Swin"]
    says = r"one stack of 'layers', but this model has \['layers.0', 'layers.1'\]"
    with pytest.raises(ValueError, match=says):
        Scratch().plan(swin, Optim(base=swin), 8)

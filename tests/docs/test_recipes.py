"""Recipes derive the small model and its growth from the large model."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import optax
import pytest
import runs

from jaxgrow.extras.models.swin import SwinConfig
from jaxgrow.models import LlamaConfig
from jaxgrow.operators import interleave
from train.analysis.comparing import shortened_experiment
from train.config.experiment import load_experiment
from train.plan.methods import TrainStage
from train.plan.recipes import deepened
from train.plan.transforms import Grow
from train.state.model import TrainState
from train.state.optim import Optim

STAGES = dict(embed=(8, 16), heads=(2, 4), head_dim=4, image=32, window=4)


@pytest.mark.extra
def test_growing_narrower_mlps_is_exact_and_copies_differ():
    method = deepened(runs.LARGE, 2, 0.5, TrainStage(0.5), narrower=2)
    assert method.small == replace(runs.LARGE, layers=2, mlp=runs.LARGE.mlp // 2)
    noisy = next(p for p in method.plan(runs.LARGE, Optim(), 8) if isinstance(p, Grow))
    assert noisy.config == runs.LARGE and noisy.noise
    small, tokens = TrainState(runs.fresh(method.small), None, method.small), np.arange(8)[None]
    params = [
        replace(noisy, noise=noise).apply({"small": small}, optax.sgd(1.0)).params
        for noise in (noisy.noise, None)
    ]
    logits = [runs.LARGE.module.apply({"params": p}, tokens) for p in params]
    np.testing.assert_allclose(*logits, atol=1e-5)  # float32
    down = [p["blocks"]["mlp"]["down"]["kernel"] for p in params]
    assert np.abs(down[0] - down[1]).max() > 0.1 * np.abs(down[1]).max()


def test_the_demo_compares_like_with_like():
    """All runs have one optimizer; grown runs cost the same as the short run from scratch.

    The README states this cost as a fraction.
    """
    names = ("muon", "muon_deepen", "muon_vcycle")
    base, grown, cycle = (load_experiment(f"configs/demo.py:{name}") for name in names)
    assert base.optim == grown.optim == cycle.optim and base.optim.name == "muon"
    assert base.model == grown.model == cycle.model and base.data == grown.data == cycle.data
    assert (grown.steps, base.steps) == (772, 1200)
    tokens = base.steps * base.batch * base.model.context
    np.testing.assert_allclose(tokens, 20 * 61_120, rtol=0.01)
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    fraction = float(re.search(r"configs/demo.py:muon_deepen --frontier (\S+)", readme)[1])
    short = shortened_experiment(base, fraction)
    whole, *costs = (sum(p.cost(e.batch) for p in e.plan) for e in (base, short, grown, cycle))
    np.testing.assert_allclose(np.array(costs) / whole, fraction, rtol=0.01)


def test_what_does_not_divide_stays():
    odd = (replace(runs.LARGE, mlp=15), 2, 0.5, TrainStage(0.5))
    assert deepened(*odd, narrower=2) == deepened(*odd)
    swin = SwinConfig(**STAGES, layers=(1, 2), mlp=(15, 32))
    small = deepened(swin, 2, 0.5, TrainStage(0.5), narrower=2).small
    # each stage is halved separately and keeps at least one layer
    assert small.layers == (1, 1) and small.mlp == (15, 16)


def growth_of(large):
    """Return the growth from half of the layers."""
    plan = deepened(large, 6, 0.5, TrainStage(0.5)).plan(large, Optim(), 8)
    [grown] = (p for p in plan if isinstance(p, Grow))
    return grown


def test_layers_of_several_kinds_keep_their_kind():
    sizes = dict(layers=12, embed=8, heads=2, kv_heads=2, head_dim=4, mlp=16, vocab=32, context=16)
    large = LlamaConfig(**sizes, kinds="fss", window=4)
    grown = growth_of(large)
    assert grown.small.resized(*grown.growths).kinds == large.kinds
    # control: each layer next to its copy
    neighbours = interleave(grown.small.sizes(), {"layers": 12})
    assert grown.small.resized(neighbours).kinds == "ffssss"


def test_layers_with_a_shift_become_layers_with_a_shift():
    grown = growth_of(SwinConfig(**STAGES, layers=(4, 8), mlp=(16, 32)))
    sources = [grown.growths[0][f"layers.{s}"].write.index[:, 0] for s in (0, 1)]
    assert [s.tolist() for s in sources] == [[0, 1, 0, 1], [0, 1, 0, 1, 2, 3, 2, 3]]

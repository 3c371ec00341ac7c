"""Experts from a dense model: a byte-level decoder on English Wikipedia, upcycled at half of its FLOPs, against going on dense.

    python -m train.compare configs/wikipedia_experts.py:dense configs/wikipedia_experts.py:upcycled \\
        configs/wikipedia_experts.py:dropped configs/wikipedia_experts.py:groups configs/wikipedia_experts.py:born \\
        --seeds 0,1 --workdir runs/experts

All spend the FLOPs of `dense`: a token goes through two of four experts, 1.5 times the work, or through two of eight of half
the size, which costs as much as the dense MLP.
"""

from dataclasses import replace

from configs import wikipedia12
from jaxgrow.models import LlamaConfig
from train.experiment import Experiment
from train.plan.methods import Growing, GrowTo, Stage

DENSE = LlamaConfig(
    vocab=256, context=64, layers=6, embed=32, heads=4, kv_heads=4, head_dim=8, mlp=96, remat="projections"
)
ONE = replace(DENSE, experts=1, active=1)  # the same, with the axis to grow
FOUR = replace(DENSE, experts=4, active=2)
FINE = replace(DENSE, experts=8, active=2, mlp=48)


def dense() -> Experiment:
    """The baseline, 97 thousand parameters."""
    base = wikipedia12.scratch()
    return replace(base, name="experts_dense", model=DENSE, optim=replace(base.optim, peak_lr=1e-2))


def _upcycled(name: str, model: LlamaConfig, **options) -> Experiment:
    """Half of the steps dense, at a constant rate; then, under the same schedule and with the moments copied, as many FLOPs
    with experts."""
    last = 0.5 * _cost(DENSE) / _cost(model)
    by = ("virtual_groups",) if model.mlp < DENSE.mlp else ("upcycle",)
    grown = GrowTo((Stage(last, warmup=0, schedule="linear"),), by=by, moments="copy", **options)
    return replace(dense(), name=f"experts_{name}", model=model, method=Growing(ONE, Stage(0.5, floor=1.0), (grown,)))


def _cost(model: LlamaConfig) -> float:
    each = model.cost(model.length)
    return model.layers * each.layer + each.outside


def upcycled() -> Experiment:
    """Four copies of each MLP, of which each token goes through two (Komatsuzaki et al., ICLR 2023)."""
    return _upcycled("upcycled", FOUR)


def dropped() -> Experiment:
    """.. with half of each expert's units drawn anew (drop-upcycling; Nakamura et al., ICLR 2025)."""
    return _upcycled("dropped", FOUR, redrawn=0.5)


def groups() -> Experiment:
    """Eight experts of half the units, in virtual groups (He et al., 2024)."""
    return _upcycled("groups", FINE)


def born() -> Experiment:
    """The control: four experts from the first step on."""
    base = dense()
    return replace(base, name="experts_born", model=FOUR, steps=round(base.steps * _cost(DENSE) / _cost(FOUR)))

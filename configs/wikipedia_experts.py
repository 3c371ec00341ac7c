"""Does it pay to convert a dense model into a mixture of experts halfway through training?

    python -m train.compare configs/wikipedia_experts.py:dense configs/wikipedia_experts.py:upcycled \\
        configs/wikipedia_experts.py:dropped configs/wikipedia_experts.py:groups \\
        configs/wikipedia_experts.py:init_experts --seeds 0,1 --workdir runs/experts

Expected result (`docs/results/experts.md`, seed 0 alone): `dense` ends at a loss of 1.8672,
`upcycled` at 1.8686, `dropped` at 1.8770, `groups` at 1.8410, and `init_experts` at 1.8875.

The model is a byte-level decoder on English Wikipedia. Each run costs the same FLOPs as `dense`. In
the upcycled model, each token uses two of four experts, which is 1.5 times the work of the dense
model. In `groups`, it uses two of eight experts of half of the size, which costs as much as the
dense MLP.
"""

from dataclasses import replace

from configs import wikipedia12
from jaxgrow.models import LlamaConfig
from train.config.experiment import Experiment
from train.plan.methods import Growing, GrowTo, TrainStage

DENSE = LlamaConfig(
    vocab=256,
    context=64,
    layers=6,
    embed=32,
    heads=4,
    kv_heads=4,
    head_dim=8,
    mlp=96,
    remat="projections",
)
ONE = replace(DENSE, experts=1, active=1)  # the same model, with an axis of experts that can grow
FOUR = replace(DENSE, experts=4, active=2)
FINE = replace(DENSE, experts=8, active=2, mlp=48)


def dense() -> Experiment:
    """The baseline: a dense decoder of 97 thousand parameters."""
    base = wikipedia12.scratch()
    return replace(base, name="experts_dense", model=DENSE, optim=replace(base.optim, peak_lr=1e-2))


def _upcycled(name: str, model: LlamaConfig, **options) -> Experiment:
    """Train dense for half of the steps, then with experts for the other half of the FLOPs.

    The learning rate is constant before the growth. One schedule covers both models, and the
    moments are copied.
    """
    last = 0.5 * _cost(DENSE) / _cost(model)
    by = ("virtual_groups",) if model.mlp < DENSE.mlp else ("upcycle",)
    grown = GrowTo(
        (TrainStage(last, warmup=0, schedule="linear"),), by=by, moments="copy", **options
    )
    return replace(
        dense(),
        name=f"experts_{name}",
        model=model,
        method=Growing(ONE, TrainStage(0.5, floor=1.0), (grown,)),
    )


def _cost(model: LlamaConfig) -> float:
    each = model.cost(model.length)
    return model.layers * each.layer + each.outside


def upcycled() -> Experiment:
    """Four copies of each MLP, of which each token uses two (Komatsuzaki et al., ICLR 2023)."""
    return _upcycled("upcycled", FOUR)


def dropped() -> Experiment:
    """`upcycled`, with half of the units of each expert sampled again.

    This is drop-upcycling (Nakamura et al., ICLR 2025).
    """
    return _upcycled("dropped", FOUR, redrawn=0.5)


def groups() -> Experiment:
    """Eight experts with half of the units, in virtual groups (He et al., 2024)."""
    return _upcycled("groups", FINE)


def init_experts() -> Experiment:
    """The control: four experts from the first step."""
    base = dense()
    return replace(
        base, name="init_experts", model=FOUR, steps=round(base.steps * _cost(DENSE) / _cost(FOUR))
    )

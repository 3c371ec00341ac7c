"""Does the saving carry over? Half of the layers first, and half of each MLP, by Muon, on byte-level GPTs of five sizes.

    c=configs/wikipedia_sizes.py
    python -m train.compare $c:k24 $c:k24_deepen $c:k24_halves --seeds 0,1,2 --workdir runs/k24 \\
        --frontier 0.55:optim.peak_lr=8e-2,0.75:optim.peak_lr=8e-2
    python -m train.compare $c:k47 $c:k47_deepen $c:k47_halves --seeds 0,1,2 --workdir runs/k47 --frontier 0.55,0.75
    python -m train.compare $c:k163 $c:k163_halves --seeds 0,1 --workdir runs/k163 --frontier 0.75
    python -m train.compare $c:k355 $c:k355_deepen $c:k355_halves --seeds 0,1 --workdir runs/k355 --frontier 0.55,0.75

`configs/wikipedia12.py:muon`, of 94 thousand parameters, lies between the second and the third. English Wikipedia, 20 tokens a
parameter, a warm-up of a part of the steps that is the same for all; rates are the best of a sweep of each row and each point
of the frontiers, but for halves, which have those of half of the layers, and the two largest models (`docs/results`).
"""

from dataclasses import replace

from configs import wikipedia, wikipedia12
from train.experiment import Experiment
from train.plan.recipes import deepened, halves


def _sized(name: str, layers: int, embed: int, steps: int, rate: float) -> Experiment:
    base = wikipedia12.muon()
    model = replace(base.model, layers=layers, embed=embed, heads=embed // base.model.head_dim, mlp=4 * embed)
    optim = replace(base.optim, peak_lr=rate, warmup=steps * base.optim.warmup // base.steps)
    return replace(base, name=f"wiki_{name}", model=model, steps=steps, optim=optim, eval_every=steps // 12)


def _deepened(experiment: Experiment) -> Experiment:
    method = deepened(experiment.model, experiment.model.layers // 2, 0.5, wikipedia.FINAL)
    return replace(experiment, name=f"{experiment.name}_deepen", method=method)


def _halves(experiment: Experiment) -> Experiment:
    return replace(experiment, name=f"{experiment.name}_halves", method=halves(experiment.model))


def k24() -> Experiment:
    """6 layers of width 16."""
    return _sized("k24", 6, 16, 480, 4e-2)


def k24_deepen() -> Experiment:
    """.. 3 layers first, at twice the rate."""
    base = k24()
    return _deepened(replace(base, optim=replace(base.optim, peak_lr=8e-2)))


def k24_halves() -> Experiment:
    """.. and half of each MLP."""
    base = k24()
    return _halves(replace(base, optim=replace(base.optim, peak_lr=8e-2)))


def k47() -> Experiment:
    """12 layers of width 16."""
    return _sized("k47", 12, 16, 860, 4e-2)


def k47_deepen() -> Experiment:
    """.. 6 layers first."""
    return _deepened(k47())


def k47_halves() -> Experiment:
    """.. and half of each MLP."""
    return _halves(k47())


def k163() -> Experiment:
    """12 layers of width 32."""
    return _sized("k163", 12, 32, 3200, 1e-2)


def k163_halves() -> Experiment:
    """.. 6 layers and half of each MLP first."""
    return _halves(k163())


def k355() -> Experiment:
    """12 layers of width 48."""
    return _sized("k355", 12, 48, 6900, 1e-2)


def k355_deepen() -> Experiment:
    """.. 6 layers first."""
    return _deepened(k355())


def k355_halves() -> Experiment:
    """.. and half of each MLP."""
    return _halves(k355())

"""Does the saving carry over? Half of the layers first, and half of each MLP, by Muon, on byte-level GPTs of seven sizes.

    c=configs/wikipedia_sizes.py
    python -m train.compare $c:k24 $c:k24_deepen $c:k24_halves --seeds 0,1,2 --workdir runs/k24 \\
        --frontier 0.55:optim.peak_lr=8e-2,0.75:optim.peak_lr=8e-2
    python -m train.compare $c:k47 $c:k47_deepen $c:k47_halves --seeds 0,1,2 --workdir runs/k47 --frontier 0.55,0.75
    python -m train.compare $c:k163 $c:k163_halves --seeds 0,1 --workdir runs/k163 --frontier 0.75
    python -m train.compare $c:k355 $c:k355_deepen $c:k355_halves --seeds 0,1 --workdir runs/k355 --frontier 0.55,0.75
    python -m train.compare $c:m1 $c:m1_deepen $c:m1_halves $c:m1_vcycle --seeds 0,1 --workdir runs/m1 --frontier 0.55,0.75
    python -m train.compare $c:m3 $c:m3_deepen $c:m3_vcycle --workdir runs/m3 --frontier 0.75

`configs/wikipedia12.py:muon`, of 94 thousand parameters, lies between the second and the third. English Wikipedia, 20 tokens a
parameter, a warm-up of a part of the steps that is the same for all; rates are the best of a sweep of each row and each point
of the frontiers, but for halves, which have those of half of the layers, and the two largest models (`docs/results`).
"""

from dataclasses import replace

from configs import wikipedia, wikipedia12
from train.experiment import Experiment
from train.plan.methods import Stage
from train.plan.recipes import deep_vcycle, deepened, halves


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


def _cycled(experiment: Experiment) -> Experiment:
    """The V-cycle of `configs/wikipedia.py`, whose warm-up is a part of the steps that is the same for all sizes."""
    small = Stage(0.4, warmup=experiment.steps * 50 // 1800, floor=1.0)
    return replace(experiment, name=f"{experiment.name}_vcycle", method=deep_vcycle(small, wikipedia.FINAL))


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


def m1() -> Experiment:
    """12 layers of width 96: 1.4 million parameters."""
    return _sized("m1", 12, 96, 26800, 1e-2)


def m1_deepen() -> Experiment:
    """`m1` with 6 layers first."""
    return _deepened(m1())


def m1_halves() -> Experiment:
    """`m1` with 6 layers and half of each MLP first."""
    return _halves(m1())


def m1_vcycle() -> Experiment:
    """`m1` by the V-cycle of `configs/wikipedia.py`."""
    return _cycled(m1())


def m3() -> Experiment:
    """12 layers of width 144: 3.0 million parameters."""
    return _sized("m3", 12, 144, 59600, 1e-2)


def m3_deepen() -> Experiment:
    """`m3` with 6 layers first."""
    return _deepened(m3())


def m3_halves() -> Experiment:
    """`m3` with 6 layers and half of each MLP first."""
    return _halves(m3())


def m3_vcycle() -> Experiment:
    """`m3` by the V-cycle of `configs/wikipedia.py`."""
    return _cycled(m3())

"""Does the saving carry over? Half of the layers first, by Muon, on byte-level GPTs of 24 to 210 thousand parameters.

    python -m train.compare configs/wikipedia_sizes.py:k24 configs/wikipedia_sizes.py:k24_deepen --seeds 0,1,2 \\
        --frontier 0.55,0.75 --workdir runs/sizes

and with ``k47`` and ``k210``; `configs/wikipedia12.py:muon` is the size between. English Wikipedia, 20 tokens a parameter, a
warm-up of a part of the steps that is the same for all.
"""

from dataclasses import replace

from configs import wikipedia, wikipedia12
from train.experiment import Experiment
from train.plan.recipes import deepened


def _sized(name: str, layers: int, embed: int, steps: int) -> Experiment:
    base = wikipedia12.muon()
    model = replace(base.model, layers=layers, embed=embed, heads=embed // base.model.head_dim, mlp=4 * embed)
    optim = replace(base.optim, warmup=steps * base.optim.warmup // base.steps)
    return replace(base, name=f"wiki_{name}", model=model, steps=steps, optim=optim, eval_every=steps // 12)


def _deepened(experiment: Experiment) -> Experiment:
    method = deepened(experiment.model, experiment.model.layers // 2, 0.5, wikipedia.FINAL)
    return replace(experiment, name=f"{experiment.name}_deepen", method=method)


def k24() -> Experiment:
    """6 layers of width 16."""
    return _sized("k24", 6, 16, 480)


def k24_deepen() -> Experiment:
    """.. 3 layers first."""
    return _deepened(k24())


def k47() -> Experiment:
    """12 layers of width 16."""
    return _sized("k47", 12, 16, 860)


def k47_deepen() -> Experiment:
    """.. 6 layers first."""
    return _deepened(k47())


def k210() -> Experiment:
    """16 layers of width 32."""
    return _sized("k210", 16, 32, 4080)


def k210_deepen() -> Experiment:
    """.. 8 layers first."""
    return _deepened(k210())

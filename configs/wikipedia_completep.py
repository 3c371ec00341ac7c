"""Does a rate carry over in width and depth? Byte-level GPTs at a few rates, as they are and with CompleteP's multipliers.

    c=configs/wikipedia_completep.py
    for row in base wide wide_p deep deep_p; do
        python -m train.sweep $c:$row --set optim.peak_lr=5e-3,1e-2,2e-2,4e-2,8e-2 --workdir runs/completep
    done

All have as many steps, so that what is compared is where the best rate lies: where it is `base`'s, the rate carries over
(`docs/results/wikipedia.md`).
"""

from dataclasses import replace

from configs import wikipedia12
from train.experiment import Experiment


def base() -> Experiment:
    """4 layers of width 16, whose rate is the one to carry over."""
    return _sized("base", 4, 16)


def wide() -> Experiment:
    """Four times as wide."""
    return _sized("wide", 4, 64)


def wide_p() -> Experiment:
    """.. with `base`'s multipliers."""
    return _parametrised(wide())


def deep() -> Experiment:
    """Four times as deep."""
    return _sized("deep", 16, 16)


def deep_p() -> Experiment:
    """.. with `base`'s multipliers."""
    return _parametrised(deep())


def _sized(name: str, layers: int, embed: int) -> Experiment:
    like = wikipedia12.scratch()
    model = replace(like.model, layers=layers, embed=embed, heads=embed // like.model.head_dim, mlp=4 * embed)
    optim = replace(like.optim, warmup=50)
    return replace(like, name=f"completep_{name}", model=model, steps=400, optim=optim, eval_every=100)


def _parametrised(experiment: Experiment) -> Experiment:
    optim = replace(experiment.optim, base=base().model)
    return replace(experiment, name=f"{experiment.name}_p", optim=optim)

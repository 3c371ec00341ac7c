"""Does a learning rate transfer to wider and deeper models, with and without CompleteP?

    c=configs/wikipedia_completep.py
    for row in base wide wide_p deep deep_p; do
        python -m train.sweep $c:$row --set optim.peak_lr=5e-3,1e-2,2e-2,4e-2,8e-2 --workdir runs/completep
    done

Expected result (`docs/results/wikipedia.md`): with the multipliers, the best learning rate stays
close to 2e-2, the best one of `base`, and the losses around it are flat. Without them, it moves to
5e-3 (`wide`) and 1e-2 (`deep`), and both models end at a lower loss there.

The models are byte-level GPTs. All of them have the same number of steps, so that only the position
of the best learning rate is compared.
"""

from dataclasses import replace

from configs import wikipedia12
from train.config.experiment import Experiment


def base() -> Experiment:
    """The base model: 4 layers of width 16. Its best learning rate is the one to transfer."""
    return _sized("base", 4, 16)


def wide() -> Experiment:
    """A model four times as wide as `base`."""
    return _sized("wide", 4, 64)


def wide_p() -> Experiment:
    """`wide` with CompleteP's multipliers relative to `base`."""
    return _parametrised(wide())


def deep() -> Experiment:
    """A model four times as deep as `base`."""
    return _sized("deep", 16, 16)


def deep_p() -> Experiment:
    """`deep` with CompleteP's multipliers relative to `base`."""
    return _parametrised(deep())


def _sized(name: str, layers: int, embed: int) -> Experiment:
    like = wikipedia12.scratch()
    model = replace(
        like.model, layers=layers, embed=embed, heads=embed // like.model.head_dim, mlp=4 * embed
    )
    optim = replace(like.optim, warmup=50)
    return replace(
        like, name=f"completep_{name}", model=model, steps=400, optim=optim, eval_every=100
    )


def _parametrised(experiment: Experiment) -> Experiment:
    optim = replace(experiment.optim, base=base().model)
    return replace(experiment, name=f"{experiment.name}_p", optim=optim)

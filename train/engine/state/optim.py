"""AdamW, Muon and SGD, and their learning-rate schedules."""

import math
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, TypeAlias

import jax
import optax

from jaxgrow.axes import Axes, Tree, is_names, path, role, sizes
from jaxgrow.growth.moments import rebias
from jaxgrow.models import Config
from jaxgrow.optim import completep, muon
from train.config.overrides import LATER


@dataclass(frozen=True)
class Optim:
    """AdamW, Muon beside it, or SGD, with a warm-up and a decay over the steps of one phase."""

    # Muon: of the layers' matrices (`jaxgrow.optim.muon`); all else is AdamW's. SGD: with
    # Nesterov's momentum b1, and the decay of weights added to their gradient, as vision has it.
    name: Literal["adamw", "muon", "sgd"] = field(default="adamw", metadata=LATER)
    peak_lr: float = 6e-4
    schedule: Literal["cosine", "linear", "wsd"] = "cosine"
    warmup: int = 100  # steps of linear warm-up
    floor: float = 0.0  # the last learning rate, as a fraction of the peak
    decay: float = 0.2  # of the steps, for "wsd": warm-up, stable, then this part decays linearly
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1  # of kernels and embeddings
    clip: float = 1.0  # global norm of the gradient
    muon_momentum: float = field(default=0.95, metadata=LATER)
    # Of Muon's update of a matrix, over the rate; 0.2 is about Adam's.
    muon_rms: float = field(default=0.2, metadata=LATER)
    # The model that the rate was tuned on: others have CompleteP's multipliers then
    # (`jaxgrow.optim.completep`), from birth on.
    base: Config | None = field(default=None, metadata=LATER)

    def __post_init__(self):
        if self.name not in ("adamw", "muon", "sgd"):
            raise ValueError(f"name is 'adamw', 'muon' or 'sgd', not {self.name!r}")
        if self.schedule not in ("cosine", "linear", "wsd"):
            raise ValueError(f"schedule is 'cosine', 'linear' or 'wsd', not {self.schedule!r}")
        if self.base is not None and self.name == "sgd":
            raise ValueError(
                "CompleteP's multipliers are of adamw and muon, not of sgd: leave base out"
            )
        for name in ("floor", "decay"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} lies between 0 and 1, but is {getattr(self, name)}")
        for name in ("b1", "b2", "muon_momentum"):
            if (
                not 0 <= getattr(self, name) < 1
            ):  # at 1 an average would never move, and its correction divides by 0
                raise ValueError(
                    f"{name} is at least 0 and less than 1, but is {getattr(self, name)}"
                )
        for name in ("peak_lr", "clip", "muon_rms"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is positive and finite, but is {getattr(self, name)}")
        for name in ("weight_decay", "eps", "warmup"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is finite and not negative, but is {getattr(self, name)}")


def learning_rate(optim: Optim, steps: int, step: int) -> float:
    """The learning rate of step ``step = 0 .. steps - 1``; the first step moves, after the last it would be the floor."""
    warm = min(1.0, (step + 1) / max(optim.warmup, 1))
    done = min(1.0, max(0.0, (step - optim.warmup) / max(steps - optim.warmup, 1)))
    shape = {
        "cosine": 0.5 * (1 + math.cos(math.pi * done)),
        "linear": 1 - done,
        "wsd": min(1.0, (1 - done) / max(optim.decay, 1e-9)),
    }[optim.schedule]
    return optim.peak_lr * warm * (optim.floor + (1 - optim.floor) * shape)


def transformation(optim: Optim, axes: Axes | None = None) -> optax.GradientTransformationExtraArgs:
    """The optimizer without its rate, which the step multiplies in: the schedule restarts with each phase, Adam need not.

    ``axes``, the axis names of a run's models, tell Muon which leaves are matrices; AdamW does
    without. ``update(.., axes=axes)`` takes those of the parameters at hand, by which they decay,
    and have their multipliers where the settings name a base; with None, nothing does. The same
    object for settings that differ in the schedule only, so that their runs share compiled steps.
    """
    base = None if optim.base is None else tuple(optim.base.sizes().items())
    if optim.name == "adamw":
        return _adamw(optim.clip, optim.b1, optim.b2, optim.eps, optim.weight_decay, base)
    if optim.name == "sgd":
        return _sgd(optim.clip, optim.b1, optim.weight_decay)
    matrices = tuple(muon.dimension_numbers(axes).items())
    own = (
        optim.clip,
        optim.muon_momentum,
        optim.muon_rms,
        optim.b1,
        optim.b2,
        optim.eps,
        optim.weight_decay,
    )
    return _muon(matrices, *own, base)


Base: TypeAlias = tuple[tuple[str, int], ...] | None  # sizes by axis, to be hashed


@cache
def _adamw(
    clip: float, b1: float, b2: float, eps: float, weight_decay: float, base: Base
) -> optax.GradientTransformationExtraArgs:
    adam = optax.chain(
        completep.clip_by_global_norm(clip),
        completep.scale_by_adam(b1, b2, eps),
        rebias(b1, b2),
        _decay(weight_decay),
    )
    return _by_size(adam, base)


@cache
def _muon(
    matrices: tuple,
    clip: float,
    momentum: float,
    rms: float,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
    base: Base,
) -> optax.GradientTransformationExtraArgs:
    both = optax.chain(
        completep.clip_by_global_norm(clip),
        muon.scale_by_muon_and_adam(dict(matrices), momentum, rms, b1, b2, eps),
        _decay(weight_decay),
    )
    return _by_size(both, base)


def _by_size(
    inner: optax.GradientTransformationExtraArgs, base: Base
) -> optax.GradientTransformationExtraArgs:
    """``inner``, told the multipliers of the parameters at hand: a model that grows has others from its next step on."""
    if base is None:
        return inner

    def update(updates, state, params=None, *, axes: Axes | None):
        found = (
            None if axes is None else completep.multipliers(axes, sizes(params, axes), dict(base))
        )
        return inner.update(updates, state, params, axes=axes, multipliers=found)

    return optax.GradientTransformationExtraArgs(inner.init, update)  # type: ignore[arg-type]  # as of `_decay`


@cache
def _sgd(
    clip: float, momentum: float, weight_decay: float
) -> optax.GradientTransformationExtraArgs:
    return optax.chain(
        optax.clip_by_global_norm(clip), _decay(weight_decay), optax.trace(momentum, nesterov=True)
    )


def decays(axes: Tree) -> Tree:
    """Of each leaf, whether it decays: kernels and tables do; what is added, or multiplies unit by unit, does not.

    Raises:
      ValueError: a leaf does not say its role (`jaxgrow.axes`).
    """
    return jax.tree_util.tree_map_with_path(
        lambda p, names: role(path(p), names) in ("kernel", "table"), axes, is_leaf=is_names
    )


def _decay(weight_decay: float) -> optax.GradientTransformationExtraArgs:
    plain = optax.add_decayed_weights(weight_decay)

    def init(params):
        return optax.masked(plain, jax.tree.map(lambda _: True, params)).init(params)

    def update(updates, state, params=None, *, axes: Tree | None, **_):
        if axes is None:
            return updates, state
        return optax.masked(plain, decays(axes)).update(updates, state, params)

    return optax.GradientTransformationExtraArgs(init, update)  # type: ignore[arg-type]  # axes has no default: forgotten, it raises

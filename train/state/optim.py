"""AdamW, Muon and SGD, and their learning-rate schedules."""

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import optax

from jaxgrow.axes import Axes, Tree, is_names, path, role_of, sizes
from jaxgrow.growth.moments import rebias
from jaxgrow.models import Config
from jaxgrow.optim import muon, scaling
from train.common.fields import GIVEN, SAME


@dataclass(frozen=True)
class Optim:
    """AdamW, Muon with AdamW, or SGD, with a warm-up and a decay over the steps of one phase."""

    # Muon updates the matrices of the layers (`jaxgrow.optim.muon`), and AdamW all other
    # parameters. SGD has Nesterov momentum b1, and weight decay is added to the gradient, as is
    # usual in vision.
    name: Literal["adamw", "muon", "sgd"] = "adamw"
    peak_lr: float = 6e-4
    schedule: Literal["cosine", "linear", "wsd"] = "cosine"
    warmup: int = 100  # steps of linear warm-up
    floor: float = 0.0  # the last learning rate, as a fraction of the peak
    # For "wsd" (warmup, stable, decay): the fraction of the steps after the warm-up with the linear
    # decay at the end.
    decay: float = 0.2
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1  # applied to kernels and embeddings only
    # Decay only entries that the update makes smaller (Chen et al., 2025).
    cautious_decay: bool = False
    clip: float = 1.0  # largest global norm of the gradient
    muon_momentum: float = 0.95
    # RMS of Muon's update of a matrix, divided by the learning rate; Adam's is about 0.2.
    muon_rms: float = 0.2
    # Decay rate of an average of the weights, which is evaluated beside them. 0: no average.
    ema: float = 0.0
    # The model that the learning rate was tuned on. Models of other sizes then get CompleteP's
    # multipliers (`jaxgrow.extras.completep`), from initialisation on.
    base: Config | None = None

    # The choices that use a field (`train.extras.effect`).
    used_with = {
        "schedule": {"/plan.schedule": SAME},
        "warmup": {"/plan.warmup": SAME},
        "floor": {"/plan.floor": SAME},
        "decay": {"/plan.schedule": ("wsd",)},
        "b2": {"name": ("adamw", "muon")},
        "eps": {"name": ("adamw", "muon")},
        "cautious_decay": {"name": ("adamw", "muon"), "weight_decay": GIVEN},
        "muon_momentum": {"name": ("muon",)},
        "muon_rms": {"name": ("muon",)},
    }
    step_counts = ("warmup",)

    def __post_init__(self):
        if self.name not in ("adamw", "muon", "sgd"):
            raise ValueError(f"name must be 'adamw', 'muon' or 'sgd', not {self.name!r}")
        if self.schedule not in ("cosine", "linear", "wsd"):
            raise ValueError(f"schedule must be 'cosine', 'linear' or 'wsd', not {self.schedule!r}")
        if self.base is not None and self.name == "sgd":
            raise ValueError(
                "base (CompleteP) is supported for adamw and muon, not for sgd: leave base out"
            )
        for name in ("floor", "decay"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be between 0 and 1, but is {getattr(self, name)}")
        for name in ("b1", "b2", "muon_momentum", "ema"):
            # At 1 the average would never change, and its bias correction would divide by 0.
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 0 and less than 1, but is {getattr(self, name)}"
                )
        for name in ("peak_lr", "clip", "muon_rms"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name} must be positive and finite, but is {getattr(self, name)}"
                )
        for name in ("weight_decay", "eps", "warmup"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name} must be finite and not negative, but is {getattr(self, name)}"
                )


def learning_rate(optim: Optim, steps: int, step: int) -> float:
    """Return the learning rate of step ``step = 0 .. steps - 1``.

    The learning rate of the first step is above 0. The schedule would reach the floor at step
    ``steps``, one step after the last.

    Args:
      optim: settings of the optimizer.
      steps: number of steps of the phase.
      step: index of the step in the phase.
    """
    warm = min(1.0, (step + 1) / max(optim.warmup, 1))
    done = min(1.0, max(0.0, (step - optim.warmup) / max(steps - optim.warmup, 1)))
    shape = {
        "cosine": 0.5 * (1 + math.cos(math.pi * done)),
        "linear": 1 - done,
        "wsd": min(1.0, (1 - done) / max(optim.decay, 1e-9)),
    }[optim.schedule]
    return optim.peak_lr * warm * (optim.floor + (1 - optim.floor) * shape)


def transformation(optim: Optim, axes: Axes | None = None) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer without its learning rate; the train step multiplies the update by it.

    Therefore the schedule restarts with each phase, whereas Adam's state can continue. Settings that
    differ only in the schedule get the same object, so that their runs share compiled steps.

    The ``update`` function of the optimizer takes ``axes``, the axis names of the current
    parameters. They decide which leaves have weight decay and, if the settings name a base, their
    multipliers. With ``axes=None``, there is neither weight decay nor a multiplier.

    Args:
      optim: settings of the optimizer; the schedule is not used.
      axes: axis names of the models of a run. Muon needs them to find the matrices; the other
        optimizers do not.
    """
    base = None if optim.base is None else tuple(optim.base.sizes().items())
    decay = (optim.weight_decay, optim.cautious_decay)
    if optim.name == "adamw":
        return _adamw(optim.clip, optim.b1, optim.b2, optim.eps, *decay, base)
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
        *decay,
    )
    return _muon(matrices, *own, base)


Base: TypeAlias = tuple[tuple[str, int], ...] | None  # sizes by axis name, hashable


@cache
def _adamw(
    clip: float, b1: float, b2: float, eps: float, weight_decay: float, cautious: bool, base: Base
) -> optax.GradientTransformationExtraArgs:
    adam = optax.chain(
        scaling.clip_by_global_norm(clip),
        scaling.scale_by_adam(b1, b2, eps),
        rebias(b1, b2),
        _decay(weight_decay, cautious),
    )
    return _with_multipliers(adam, base)


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
    cautious: bool,
    base: Base,
) -> optax.GradientTransformationExtraArgs:
    both = optax.chain(
        scaling.clip_by_global_norm(clip),
        muon.scale_by_muon_and_adam(dict(matrices), momentum, rms, b1, b2, eps),
        _decay(weight_decay, cautious),
    )
    return _with_multipliers(both, base)


def _with_multipliers(
    inner: optax.GradientTransformationExtraArgs, base: Base
) -> optax.GradientTransformationExtraArgs:
    """Pass CompleteP's multipliers of the current parameters to ``inner``.

    The multipliers of a grown model therefore change with its next step.
    """
    if base is None:
        return inner

    def update(updates, state, params=None, *, axes: Axes | None):
        found = (
            None
            if axes is None
            else scaling.MULTIPLIERS["completep"](axes, sizes(params, axes), dict(base))
        )
        return inner.update(updates, state, params, axes=axes, multipliers=found)

    return optax.GradientTransformationExtraArgs(inner.init, update)  # type: ignore[arg-type]  # see `_decay`


@cache
def _sgd(
    clip: float, momentum: float, weight_decay: float
) -> optax.GradientTransformationExtraArgs:
    return optax.chain(
        optax.clip_by_global_norm(clip), _decay(weight_decay), optax.trace(momentum, nesterov=True)
    )


def decays(axes: Tree) -> Tree:
    """Return for each leaf whether it has weight decay.

    Kernels and embeddings decay. Biases, and scales that multiply each unit, do not.

    Raises:
      ValueError: the axis names of a leaf do not state its role (`jaxgrow.axes`).
    """
    return jax.tree_util.tree_map_with_path(
        lambda p, names: role_of(path(p), names) in ("kernel", "embedding"), axes, is_leaf=is_names
    )


def _decay(weight_decay: float, cautious: bool = False) -> optax.GradientTransformationExtraArgs:
    """Add ``weight_decay p`` to the update u of each parameter p that decays.

    If ``cautious``, it is added only to the entries with ``u p >= 0``, whose size the update does not
    increase.

    References:
      Chen et al., `Cautious Weight Decay <https://arxiv.org/abs/2510.12402>`_, 2025
    """
    plain = optax.add_decayed_weights(weight_decay)

    def init(params):
        return optax.masked(plain, jax.tree.map(lambda _: True, params)).init(params)

    def update(updates, state, params=None, *, axes: Tree | None, **_):
        if axes is None:
            return updates, state
        if cautious:
            params = jax.tree.map(lambda u, p: jnp.where(u * p >= 0, p, 0), updates, params)
        return optax.masked(plain, decays(axes)).update(updates, state, params)

    return optax.GradientTransformationExtraArgs(init, update)  # type: ignore[arg-type]  # axes has no default, so omitting it raises an error

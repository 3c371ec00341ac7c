"""When and where layers are dropped: keep probabilities over time and depth. Pure and jittable.

``l = 1 .. L`` counts layers, ``t`` steps, ``T`` all steps of the phase, ``theta`` the keep probability of the whole model.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxgrow.drop.allocation import Sensitivity, allocate, block_list


@dataclass(frozen=True)
class LayerDrop:
    """How a phase of training drops layers: schedule, scaling, execution. `schedule` gives the probabilities.

    =============================== ======================================== =========================================
    method                          fields                                   source
    =============================== ======================================== =========================================
    PLD                             (the defaults)                           Zhang & He, NeurIPS 2020
    SBLD                            ``sensitivity=Sensitivity()``            Zeng et al., AAAI 2023, reconstructed
    stochastic depth, linear decay  ``time="constant"``                      Huang et al. 2016
    LayerDrop                       ``time="constant", depth="uniform",      Fan et al. 2019
                                    scale="none", theta=0.8``
    LayerSkip's dropping            ``time="layerskip", depth="layerskip",   Elhoushi et al. 2024
                                    scale="none"``
    dropping that decreases         ``reverse=True``, ``recovery=0.1``
    training a bottom sub-network   ``time="constant", depth="prefix",       Chen et al. 2022, in the staged training of LiGO
                                    scale="none"``
    =============================== ======================================== =========================================
    """

    theta: float = 0.5  # what theta(t) goes to
    time: Literal["pld", "constant", "linear", "layerskip"] = "pld"
    depth: Literal["linear", "algorithm1", "uniform", "layerskip", "prefix"] = "linear"  # without a sensitivity
    gamma: float = 100.0  # of time="pld", in units of 1/T; the paper's 100
    reverse: bool = False  # time runs backwards: dropping decreases
    recovery: float = 0.0  # the last fraction of the steps, which keeps every layer
    sensitivity: Sensitivity | None = None  # SBLD: depth by measured sensitivities
    scale: Literal["sublayer", "block", "none"] = "sublayer"
    execution: Literal["cond", "gather"] = "cond"
    dropped: Literal["momentum", "freeze"] = "momentum"  # what the optimizer does with layers that no micro-batch ran

    def __post_init__(self):
        for name, low in (("theta", 0.05), ("recovery", 0.0)):
            if not low <= getattr(self, name) <= 1:
                raise ValueError(f"{name} lies between {low} and 1, but is {getattr(self, name)}")
        if self.depth == "prefix" and self.scale != "none":
            raise ValueError(f"depth='prefix' never runs the upper layers, so scale must be 'none', not {self.scale!r}")
        if self.gamma < 0:
            raise ValueError(f"gamma must not be negative, but is {self.gamma}")
        if self.recovery == 1:
            raise ValueError("recovery=1.0 leaves no step that drops layers; use no layer drop")
        if self.after + self.recovery >= 1:
            raise ValueError(f"after={self.after} and recovery={self.recovery} leave no step that drops layers")

    @property
    def after(self) -> float:
        """The first part of the steps, which keeps every layer: a pre-analysis."""
        return 0.0 if self.sensitivity is None else self.sensitivity.after


def theta(drop: LayerDrop, t: ArrayLike, steps: int) -> jax.Array:
    """The keep probability of the whole model at time ``t`` of ``steps``: 1 - (1 - limit) * amount(t / T).

    ============ ==================================== ==========================================================
    time         amount(u)                            source
    ============ ==================================== ==========================================================
    pld          1 - exp(-gamma u)                    Zhang & He: (1 - limit) exp(-gamma t / T) + limit
    constant     1                                    Huang et al., Fan et al.
    linear       u
    layerskip    2^u - 1                              Elhoushi et al.
    ============ ==================================== ==========================================================

    u runs from 0 to 1 while layers are dropped: T, here and in PLD's gamma, is the number of those steps. Before them, in the
    pre-analysis of a ``sensitivity`` (its part ``after`` of the steps), and after them, in the last part ``recovery``, theta
    is 1. ``reverse`` takes 1 - u for u. The steps of a phase are t = 1 .. steps, as in Algorithm 1 of PLD.
    """
    first, last, t = round(drop.after * steps), (1 - drop.recovery) * steps, jnp.asarray(t)
    at = jnp.clip((t - first) / (last - first), 0, 1)
    at = 1 - at if drop.reverse else at
    amount = {
        "pld": lambda: 1 - jnp.exp(-drop.gamma * at),
        "constant": lambda: jnp.ones_like(at),
        "linear": lambda: at,
        "layerskip": lambda: 2**at - 1,
    }[drop.time]()
    every = (t > last) | ((t <= first) if first else False)
    return 1 - (1 - drop.theta) * jnp.where(every, 0, amount)


def schedule(drop: LayerDrop, layers: int, t: ArrayLike, steps: int, sensitivity: ArrayLike | None = None) -> jax.Array:
    """Keep probabilities ``[layers]`` at time ``t`` of ``steps``.

    ============ ======================================= =======================================================
    depth        p_l                                     source
    ============ ======================================= =======================================================
    linear       1 - l / L (1 - theta)                   Zhang & He's equation; Huang et al.'s linear decay
    algorithm1   1 - (l - 1) / L (1 - theta)             Zhang & He's Algorithm 1: the first layer is always kept
    uniform      theta                                   Fan et al.
    layerskip    1 - (2^((l - 1) / (L - 1)) - 1)         Elhoushi et al.
                 (1 - theta)
    prefix       1 for the bottom round(theta L) layers, Chen et al., ACL 2022: sub-models of the bottom layers
                 0 above
    ============ ======================================= =======================================================

    With ``drop.sensitivity``, `allocate` divides the same mean keep probability as "linear" by the ``sensitivity``
    [layers] that was measured.
    """
    now = theta(drop, t, steps)
    if drop.sensitivity is not None:
        if sensitivity is None:
            raise ValueError("this layer drop goes by sensitivities: measure them first, and pass them on")
        s = drop.sensitivity
        return allocate(sensitivity, now, blocked=block_list(sensitivity, s), beta=s.beta, p_min=s.p_min)
    place = jnp.arange(1, layers + 1, dtype=now.dtype)
    if drop.depth == "prefix":
        return (place <= jnp.maximum(1, jnp.round(now * layers))).astype(now.dtype)
    amount = {
        "linear": lambda: place / layers,
        "algorithm1": lambda: (place - 1) / layers,
        "uniform": lambda: jnp.ones_like(place),
        "layerskip": lambda: 2 ** ((place - 1) / max(layers - 1, 1)) - 1,
    }[drop.depth]()
    return 1 - amount * (1 - now)

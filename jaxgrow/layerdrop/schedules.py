"""When and where layers are dropped: keep probabilities over time and depth. Pure and jittable.

``l = 1 .. L`` counts layers, ``t`` steps, ``T`` all steps of the phase, ``theta`` the keep
probability of the whole model.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxgrow.layerdrop.allocation import Sensitivity, allocate, block_list


@dataclass(frozen=True)
class Variance:
    """How much dropping disturbs training over time, as a share of the most: what ``time="variance"`` goes by.

    .. math:: \\phi(u) = (u / peak)^{shape - 1} \\exp(-(shape - 1) (u / peak - 1))

    The curve of a gamma distribution, 1 at ``u = peak``, where u runs from 0 to 1 while layers are
    dropped. SBLD fits "a poly-weighted exponential gamma distribution" to the variance between
    training with and without dropping. Neither that formula, nor how probabilities follow from it,
    nor when and on what it is measured, is public: this curve stands in for it, `fit_variance` for
    its fit, and `theta` says what we make of it. [reconstructed]
    """

    peak: float
    shape: float

    def __post_init__(self):
        if not 0 < self.peak <= 1 or not self.shape > 1:
            raise ValueError(
                f"peak lies in (0, 1] and shape above 1, but they are {self.peak} and {self.shape}"
            )

    def __call__(self, u: ArrayLike) -> jax.Array:
        at = jnp.asarray(u) / self.peak
        return jnp.exp((self.shape - 1) * (jnp.log(at) - at + 1))


def fit_variance(times: ArrayLike, variance: ArrayLike) -> Variance:
    """The `Variance` nearest to what was measured: ``variance`` [n], not negative, at the ``times`` u [n], in (0, 1].

    Such as ``(loss_dropped - loss_baseline)^2`` of two runs (``python -m train.variance`` reads it
    off their logs). Least squares of log v = a + (shape - 1) (log u - u / peak), which is linear in
    its three unknowns, each point weighted by v^2: to first order, least squares in v itself. What
    is zero has no weight. Pure; NumPy, in float64. [reconstructed]

    Args:
      times: when it was measured.
      variance: what was measured.

    Returns:
      The curve, for ``LayerDrop(time="variance", variance=...)``.

    Raises:
      ValueError: less than three points that are not zero, or no peak among ``times``.

    Example:
      >>> u = np.linspace(0.1, 1, 10)
      >>> found = fit_variance(u, Variance(peak=0.25, shape=3.0)(u))
      >>> round(found.peak, 3), round(found.shape, 3)
      (0.25, 3.0)
    """
    u, v = (np.asarray(x, np.float64) for x in (times, variance))
    some = v > 0
    u, v = u[some], v[some]
    if len(np.unique(u)) < 3:
        raise ValueError(
            f"three points or more that are not zero make a fit, but there are {len(np.unique(u))}"
        )
    v = v / v.max()
    terms = np.stack([np.ones_like(u), np.log(u), -u], 1)
    _, rise, fall = np.linalg.lstsq(v[:, None] * terms, v * np.log(v), rcond=None)[0]
    if not 0 < rise <= fall:
        raise ValueError(
            "the variance has no peak while layers are dropped, it only "
            f"{'falls' if rise <= 0 else 'rises'}: measure longer or more often, or use another time than 'variance'"
        )
    return Variance(float(rise / fall), float(1 + rise))


@dataclass(frozen=True)
class LayerDrop:
    """How a phase of training drops layers: schedule, scaling, execution. `schedule` gives the probabilities.

    =============================== ======================================== =========================================
    method                          fields                                   source
    =============================== ======================================== =========================================
    PLD                             (the defaults)                           Zhang & He, NeurIPS 2020
    SBLD                            ``sensitivity=Sensitivity()``            Zeng et al., AAAI 2023, reconstructed
    .. scheduled by variance        and ``time="variance",                   the same; stands in for their fit
                                    variance=fit_variance(...)``
    stochastic depth, linear decay  ``time="constant"``                      Huang et al. 2016
    LayerDrop                       ``time="constant", depth="uniform",      Fan et al. 2019
                                    scale="none", theta=0.8``
    LayerSkip's dropping            ``time="layerskip", depth="layerskip",   Elhoushi et al. 2024
                                    scale="none"``
    dropping that decreases         ``reverse=True``, ``recovery=0.1``
    training a bottom sub-network   ``time="constant", depth="prefix",       Chen et al. 2022, in the staged training of LiGO
                                    scale="none"``
    .. of no layers                 and ``theta=0.0, dropped="freeze"``      Bu 2026: the layers stay as at birth
    =============================== ======================================== =========================================
    """

    theta: float = 0.5  # what theta(t) goes to
    time: Literal["pld", "constant", "linear", "layerskip", "variance"] = "pld"
    depth: Literal["linear", "algorithm1", "uniform", "layerskip", "prefix"] = (
        "linear"  # without a sensitivity
    )
    gamma: float = 100.0  # of time="pld", in units of 1/T; the paper's 100
    variance: Variance | None = None  # of time="variance", as `fit_variance` finds it
    reverse: bool = False  # time runs backwards: dropping decreases
    recovery: float = 0.0  # the last fraction of the steps, which keeps every layer
    sensitivity: Sensitivity | None = None  # SBLD: depth by measured sensitivities
    scale: Literal["sublayer", "block", "none"] = "sublayer"
    execution: Literal["cond", "gather", "gather_independent"] = (
        "cond"  # docs/concepts/dropping.md compares them
    )
    # the most train steps that the two of gather compile: their numbers of layers are rounded up
    programs: int = 4
    dropped: Literal["momentum", "freeze"] = (
        "momentum"  # what the optimizer does with layers that no micro-batch ran
    )

    def __post_init__(self):
        for name, low in (("theta", 0.0 if self.depth == "prefix" else 0.05), ("recovery", 0.0)):
            if not low <= getattr(self, name) <= 1:
                raise ValueError(f"{name} lies between {low} and 1, but is {getattr(self, name)}")
        if (self.time == "variance") != (self.variance is not None):
            raise ValueError(
                f"time='variance' goes by a variance, and no other time does, but time={self.time!r} has "
                f"variance={self.variance}; python -m train.variance fits one to two runs"
            )
        if self.programs < 2:
            raise ValueError(
                f"programs must be at least 2 (all layers, and fewer), but is {self.programs}"
            )
        if self.depth == "prefix" and self.scale != "none":
            raise ValueError(
                f"depth='prefix' never runs the upper layers, so scale must be 'none', not {self.scale!r}"
            )
        if self.gamma < 0:
            raise ValueError(f"gamma must not be negative, but is {self.gamma}")
        if self.recovery == 1:
            raise ValueError("recovery=1.0 leaves no step that drops layers; use no layer drop")
        if self.after + self.recovery >= 1:
            raise ValueError(
                f"after={self.after} and recovery={self.recovery} leave no step that drops layers"
            )

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
    variance     0 up to the peak, then 1 - phi(u)    `Variance`; in place of Zeng et al.'s [reconstructed]
    ============ ==================================== ==========================================================

    u runs from 0 to 1 while layers are dropped: T, here and in PLD's gamma, is the number of those
    steps. Before them, in the pre-analysis of a ``sensitivity`` (its part ``after`` of the steps),
    and after them, in the last part ``recovery``, theta is 1. ``reverse`` takes 1 - u for u. The
    steps of a phase are t = 1 .. steps, as in Algorithm 1 of PLD.

    Args:
      drop: how layers are dropped.
      t: the step, ``1 .. steps``.
      steps: how many the phase has.

    Returns:
      A scalar.

    Example:
      >>> float(theta(LayerDrop(theta=0.5, time="linear"), 50, steps=100))
      0.75

    References:
      Zhang & He,
      `Accelerating Training of Transformer-Based Language Models with Progressive Layer Dropping <https://arxiv.org/abs/2010.13369>`_,
      NeurIPS 2020
    """
    first, last, t = round(drop.after * steps), (1 - drop.recovery) * steps, jnp.asarray(t)
    at = jnp.clip((t - first) / (last - first), 0, 1)
    at = 1 - at if drop.reverse else at
    amount = {
        "pld": lambda: 1 - jnp.exp(-drop.gamma * at),
        "constant": lambda: jnp.ones_like(at),
        "linear": lambda: at,
        "layerskip": lambda: 2**at - 1,
        "variance": lambda: 1 - drop.variance(jnp.maximum(at, drop.variance.peak)),  # type: ignore[misc, union-attr]
    }[drop.time]()
    every = (t > last) | ((t <= first) if first else False)
    return 1 - (1 - drop.theta) * jnp.where(every, 0, amount)


def schedule(
    drop: LayerDrop, layers: int, t: ArrayLike, steps: int, sensitivity: ArrayLike | None = None
) -> jax.Array:
    """Keep probabilities ``[layers]`` at time ``t`` of ``steps``.

    ============ ======================================= =======================================================
    depth        p_l                                     source
    ============ ======================================= =======================================================
    linear       1 - l / L (1 - theta)                   Zhang & He's equation; Huang et al.'s linear decay
    algorithm1   1 - (l - 1) / L (1 - theta)             Zhang & He's Algorithm 1: the first layer is always kept
    uniform      theta                                   Fan et al.
    layerskip    1 - (2^((l - 1) / (L - 1)) - 1)         Elhoushi et al.
                 (1 - theta)
    prefix       1 for the bottom round(theta L) layers, Chen et al., ACL 2022: sub-models of the bottom layers; Bu,
                 0 above; one at least, unless the       ICML 2026: none of them first
                 limit is 0
    ============ ======================================= =======================================================

    With ``drop.sensitivity``, `allocate` divides the same mean keep probability as "linear" by the
    ``sensitivity`` [layers] that was measured.

    Args:
      drop: how layers are dropped.
      layers: how many there are.
      t: the step, ``1 .. steps``.
      steps: how many the phase has.
      sensitivity: of each layer, as last measured, if ``drop`` goes by it.

    Returns:
      ``p_l`` for each layer.

    Raises:
      ValueError: ``drop`` goes by sensitivities, and there are none.

    Example:
      >>> schedule(LayerDrop(theta=0.5, time="constant"), 4, 1, steps=100).tolist()
      [0.875, 0.75, 0.625, 0.5]

    References:
      Zhang & He,
      `Accelerating Training of Transformer-Based Language Models with Progressive Layer Dropping <https://arxiv.org/abs/2010.13369>`_,
      NeurIPS 2020
    """
    now = theta(drop, t, steps)
    if drop.sensitivity is not None:
        if sensitivity is None:
            raise ValueError(
                "this layer drop goes by sensitivities: measure them first, and pass them on"
            )
        s = drop.sensitivity
        return allocate(
            sensitivity, now, blocked=block_list(sensitivity, s), beta=s.beta, p_min=s.p_min
        )
    place = jnp.arange(1, layers + 1, dtype=now.dtype)
    if drop.depth == "prefix":
        return (place <= jnp.maximum(1 if drop.theta else 0, jnp.round(now * layers))).astype(
            now.dtype
        )
    amount = {
        "linear": lambda: place / layers,
        "algorithm1": lambda: (place - 1) / layers,
        "uniform": lambda: jnp.ones_like(place),
        "layerskip": lambda: 2 ** ((place - 1) / max(layers - 1, 1)) - 1,
    }[drop.depth]()
    return 1 - amount * (1 - now)

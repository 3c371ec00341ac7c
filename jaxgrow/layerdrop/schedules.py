"""Schedules of layer dropping: keep probabilities over time and depth. Pure and jittable.

``l = 1 .. L`` are the layers, ``t`` is the step, and ``T`` the number of steps of the phase.
``theta`` is the global keep probability; `schedule` derives one for each layer from it.
"""

from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxgrow.layerdrop.allocation import Sensitivity, block_list, keep_probabilities
from jaxgrow.typed import check_choices


def whole_steps(fraction: float, steps: int) -> int:
    """The number of steps in a fraction of ``steps``, at least one unless one of the two is 0.

    Example:
      >>> whole_steps(0.25, 8), whole_steps(0.05, 8), whole_steps(0.0, 8)
      (2, 1, 0)
    """
    return max(1, round(fraction * steps)) if fraction and steps else 0


@dataclass(frozen=True)
class Variance:
    """A curve for how much layer dropping disturbs training over time, relative to its maximum.

    The curve determines the schedule with ``time="variance"``.

    .. math:: \\phi(u) = (u / peak)^{shape - 1} \\exp(-(shape - 1) (u / peak - 1))

    This is the curve of a gamma distribution with the value 1 at ``u = peak``, where u runs from 0
    to 1 while layers are dropped. SBLD fits "a poly-weighted exponential gamma distribution" to the
    variance between training with and without dropping. That formula, its relation to the keep
    probabilities, and the data and time of the measurement are not public. This curve replaces the
    formula, `jaxgrow.extras.variance.fit_variance` replaces the fit, and `theta` defines our relation to the keep
    probabilities. [reconstructed]

    Attributes:
      peak: the time u of the largest disturbance, in (0, 1].
      shape: shape of the gamma distribution, above 1. A larger shape makes the peak narrower.
    """

    peak: float
    shape: float

    def __post_init__(self):
        if not 0 < self.peak <= 1 or not self.shape > 1:
            raise ValueError(
                f"peak must be in (0, 1] and shape above 1, but they are {self.peak} and {self.shape}"
            )

    def __call__(self, u: ArrayLike) -> jax.Array:
        at = jnp.asarray(u) / self.peak
        return jnp.exp((self.shape - 1) * (jnp.log(at) - at + 1))


@dataclass(frozen=True)
class LayerDrop:
    """How a phase of training drops layers. `schedule` gives the keep probabilities.

    =============================== =================================== ============================
    method                          fields                              source
    =============================== =================================== ============================
    PLD                             (the defaults)                      Zhang & He, NeurIPS 2020
    PLD as in the published code    ``keep="published", gamma=200.0``   the same
    SBLD                            ``sensitivity=Sensitivity()``       Zeng et al., AAAI 2023,
                                                                        reconstructed
    SBLD, scheduled by variance     ``sensitivity=Sensitivity(),        the same; our curve replaces
                                    time="variance",                    their fit
                                    variance=fit_variance(...)``
    stochastic depth, linear decay  ``time="constant"``                 Huang et al. 2016
    LayerDrop                       ``time="constant",                  Fan et al. 2019
                                    depth="uniform",
                                    scale="none", theta=0.8``
    LayerSkip's dropping            ``time="layerskip",                 Elhoushi et al. 2024
                                    depth="layerskip",
                                    scale="none"``
    dropping that decreases         ``reverse=True, recovery=0.1``
    training a bottom sub-network   ``time="constant",                  Chen et al. 2022, in the
                                    depth="prefix", scale="none"``      staged training of LiGO
    bottom sub-network, no layers   as above, with ``theta=0.0,         Bu 2026: the layers keep
                                    dropped="freeze"``                  their initial values
    =============================== =================================== ============================

    Attributes:
      theta: the limit of theta(t), the global keep probability.
      time: the schedule of theta over time (`theta`).
      depth: the keep probabilities over depth (`schedule`), if there is no ``sensitivity``.
      gamma: how fast theta approaches its limit with ``time="pld"``, in units of 1/T. The paper
        proposes 100; the published config has 0.001 per step in 200,000 steps, which is 200.
      variance: the curve for ``time="variance"``, as returned by `jaxgrow.extras.variance.fit_variance`.
      reverse: whether time runs backwards, so that dropping decreases.
      recovery: fraction of the steps at the end in which every layer is kept.
      sensitivity: settings of SBLD, which sets the keep probabilities over depth by measured
        sensitivities.
      keep: None divides the output of a kept layer by the probability with which it was kept.
        "published" samples and divides as the published code of PLD: Algorithm 1 keeps layer l with
        the probability of layer l - 1 in the equation, and the output is divided by the probability
        of layer l in the equation. The expected factor of the output of layer l is then
        ``p_(l-1) / p_l`` instead of 1. With theta 0.5 it rises over the layers from 1.04 to 1.08
        (12 layers) or from 1.03 to 1.06 (16 layers).
      scale: where the output of a kept layer is divided by its keep probability
        (`jaxgrow.layerdrop.KeepMask`); "none" does not divide.
      execution: how layers are skipped, and how keep masks are sampled (`jaxgrow.layerdrop.keep_masks`).
        docs/concepts/dropping.md compares the three executions.
      programs: the largest number of train-step programs that the two gather executions compile.
        A step runs the smallest of these programs that has enough layers.
      dropped: how the optimizer treats layers that ran in no micro-batch. "momentum" updates
        them with zero gradients, so that momentum and weight decay still change them; "freeze"
        leaves them and their optimizer state unchanged.
    """

    theta: float = 0.5
    time: Literal["pld", "constant", "linear", "layerskip", "variance"] = "pld"
    depth: Literal["linear", "algorithm1", "uniform", "layerskip", "prefix"] = "linear"
    gamma: float = 100.0
    variance: Variance | None = None
    reverse: bool = False
    recovery: float = 0.0
    sensitivity: Sensitivity | None = None
    keep: Literal["published"] | None = None
    scale: Literal["sublayer", "block", "none"] = "sublayer"
    execution: Literal["cond", "gather", "gather_independent"] = "cond"
    programs: int = 4
    dropped: Literal["momentum", "freeze"] = "momentum"

    # The choices that use a field (`train.extras.effect` checks them).
    used_with = {
        "depth": {"sensitivity": (None,)},
        "gamma": {"time": ("pld",)},
        "reverse": {"time": ("pld", "linear", "layerskip", "variance")},
        "programs": {"execution": ("gather", "gather_independent")},
    }

    def __post_init__(self):
        check_choices(self)
        for name, low in (("theta", 0.0 if self.depth == "prefix" else 0.05), ("recovery", 0.0)):
            if not low <= getattr(self, name) <= 1:
                raise ValueError(
                    f"{name} must be between {low} and 1, but is {getattr(self, name)}"
                )
        if (self.time == "variance") != (self.variance is not None):
            raise ValueError(
                f"time='variance' needs a variance, and other times do not accept one, but time={self.time!r} has "
                f"variance={self.variance}. Run python -m train.variance to fit one to two runs"
            )
        if self.programs < 2:
            raise ValueError(
                f"programs must be at least 2 (all layers, and fewer), but is {self.programs}"
            )
        if self.depth == "prefix" and self.scale != "none":
            raise ValueError(
                f"depth='prefix' never runs the upper layers, so scale must be 'none', not {self.scale!r}"
            )
        own = self.depth == "linear" and self.sensitivity is None and self.scale != "none"
        if self.keep == "published" and not own:
            raise ValueError(
                "keep='published' has the keep probabilities and the scale of PLD's code, so depth must be 'linear', scale "
                f"not 'none', and sensitivity None, but they are {self.depth!r}, {self.scale!r} and {self.sensitivity}"
            )
        if self.gamma < 0:
            raise ValueError(f"gamma must not be negative, but is {self.gamma}")
        if self.recovery == 1:
            raise ValueError(
                "recovery=1.0 leaves no step that drops layers. Remove the layer drop instead"
            )
        if self.after + self.recovery >= 1:
            raise ValueError(
                f"after={self.after} and recovery={self.recovery} leave no step that drops layers. Their sum must be below 1"
            )

    @property
    def after(self) -> float:
        """The fraction of the steps at the start in which every layer is kept (pre-analysis)."""
        return 0.0 if self.sensitivity is None else self.sensitivity.after


def theta(drop: LayerDrop, t: ArrayLike, steps: int) -> jax.Array:
    """The global keep probability at step t: ``1 - (1 - limit) amount(u)``.

    ============ ===================================== =============================================
    time         amount(u)                             source
    ============ ===================================== =============================================
    pld          1 - exp(-gamma u)                     Zhang & He: (1 - limit) exp(-gamma t / T) +
                                                       limit
    constant     1                                     Huang et al., Fan et al.
    linear       u
    layerskip    2^u - 1                               Elhoushi et al.
    variance     0 up to the peak, then 1 - phi(u)     `Variance`; replaces the formula of Zeng
                                                       et al. [reconstructed]
    ============ ===================================== =============================================

    u runs from 0 to 1 while layers are dropped. T, here and in the gamma of PLD, is the number of
    these steps. Before them, in the pre-analysis of a ``sensitivity`` (the fraction ``after`` of
    the steps), theta is 1. After them, in the last fraction ``recovery``, theta is also 1.
    ``reverse`` replaces u by 1 - u. The steps t of a phase are numbered from 1 to ``steps``, as in
    Algorithm 1 of PLD.

    Args:
      drop: how layers are dropped.
      t: the step, ``1 .. steps``.
      steps: number of steps of the phase.

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
    first = whole_steps(drop.after, steps)
    last = (1 - drop.recovery) * steps
    t = jnp.asarray(t)
    # A phase without steps would divide by 0.
    at = jnp.clip((t - first) / jnp.maximum(last - first, 1), 0, 1)
    at = 1 - at if drop.reverse else at
    every = (t > last) | ((t <= first) if first else False)
    return 1 - (1 - drop.theta) * jnp.where(every, 0, _amount(drop, at))


def _amount(drop: LayerDrop, at: jax.Array) -> jax.Array:
    """The amount of dropping at the fraction ``at`` of the steps that drop layers, from 0 to 1."""
    if drop.variance is not None:
        return 1 - drop.variance(jnp.maximum(at, drop.variance.peak))
    if drop.time == "pld":
        return 1 - jnp.exp(-drop.gamma * at)
    if drop.time == "layerskip":
        return 2**at - 1
    return jnp.ones_like(at) if drop.time == "constant" else at


def schedule(
    drop: LayerDrop, layers: int, t: ArrayLike, steps: int, sensitivity: ArrayLike | None = None
) -> jax.Array:
    """The keep probabilities ``[layers]`` at step ``t`` of ``steps``.

    ============ ================================== ================================================
    depth        p_l                                source
    ============ ================================== ================================================
    linear       1 - l / L (1 - theta)              Zhang & He's equation; Huang et al.'s linear
                                                    decay
    algorithm1   1 - (l - 1) / L (1 - theta)        Zhang & He's Algorithm 1: the first layer is
                                                    always kept
    uniform      theta                              Fan et al.
    layerskip    1 - (2^((l - 1) / (L - 1)) - 1)    Elhoushi et al.
                 (1 - theta)
    prefix       1 for the bottom round(theta L)    Chen et al., ACL 2022: sub-models of the bottom
                 layers, 0 above; at least one      layers; Bu, ICML 2026: at first without layers
                 layer unless the limit is 0
    ============ ================================== ================================================

    With ``drop.sensitivity``, `keep_probabilities` computes the keep probabilities instead. Their
    mean equals the mean of "linear", and the measured ``sensitivity`` determines the differences
    between layers. With ``drop.keep="published"``, the keep probabilities are computed as for
    "algorithm1", and `output_divisors` as for "linear".

    Args:
      drop: how layers are dropped.
      layers: number of layers.
      t: the step, ``1 .. steps``.
      steps: number of steps of the phase.
      sensitivity: the last measured sensitivity of each layer, if ``drop`` uses sensitivities.

    Returns:
      ``p_l`` for each layer.

    Raises:
      ValueError: ``drop`` uses sensitivities, but ``sensitivity`` is None.

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
                "this layer drop uses sensitivities, but sensitivity is None. Measure them first and pass them as sensitivity"
            )
        s = drop.sensitivity
        return keep_probabilities(
            sensitivity, now, blocked=block_list(sensitivity, s), beta=s.beta, p_min=s.p_min
        )
    place = jnp.arange(1, layers + 1, dtype=now.dtype)
    if drop.depth == "prefix":
        number = jnp.maximum(1 if drop.theta else 0, jnp.round(now * layers))
        return (place <= number).astype(now.dtype)
    depth = "algorithm1" if drop.keep == "published" else drop.depth
    amount = {
        "linear": lambda: place / layers,
        "algorithm1": lambda: (place - 1) / layers,
        "uniform": lambda: jnp.ones_like(place),
        "layerskip": lambda: 2 ** ((place - 1) / max(layers - 1, 1)) - 1,
    }[depth]()
    return 1 - amount * (1 - now)


def output_divisors(
    drop: LayerDrop, layers: int, t: ArrayLike, steps: int, sensitivity: ArrayLike | None = None
) -> jax.Array:
    """The probabilities ``[layers]`` by which the outputs of kept layers are divided at step ``t``.

    They are the keep probabilities (`schedule`) unless ``drop.keep`` is "published".

    Args:
      drop: how layers are dropped.
      layers: number of layers.
      t: the step, ``1 .. steps``.
      steps: number of steps of the phase.
      sensitivity: the last measured sensitivity of each layer, if ``drop`` uses sensitivities.

    Returns:
      The probability for each layer.

    Example:
      >>> published = LayerDrop(theta=0.5, time="constant", keep="published")
      >>> schedule(published, 4, 1, steps=100).tolist()
      [1.0, 0.875, 0.75, 0.625]
      >>> output_divisors(published, 4, 1, steps=100).tolist()
      [0.875, 0.75, 0.625, 0.5]
    """
    return schedule(replace(drop, keep=None), layers, t, steps, sensitivity)

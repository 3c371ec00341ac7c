"""Sensitivity-based layer dropping (SBLD): sensitivities, and keep probabilities from them.

The source is Zeng, He, Vasyltsov, Pang and Chen, AAAI 2023. The paper describes the following
method. A pre-analysis measures the sensitivity of every layer. The most sensitive layers are
blocked from dropping, and the others are allowed. In every iteration, a list of keep probabilities
follows from the sensitivities and from one global keep probability. The latter is
scheduled by the variance between training with and without dropping. The paper gives no formula,
and no code is public. Each equation below, all defaults, and the schedule
(`jaxgrow.layerdrop.schedules.Variance`) are therefore **our reconstruction**.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jaxgrow.layerdrop.execution import KeepMask
from jaxgrow.typed import check_choice, check_choices

Measure: TypeAlias = Literal["loss_delta", "taylor"]
Batch: TypeAlias = Any  # a pytree of arrays, the input of the loss
Loss: TypeAlias = Callable[[KeepMask | None, Batch], jax.Array]

# JAX does not annotate these functions.
Slope: TypeAlias = Callable[[jax.Array], jax.Array]
_grad: Callable[[Slope], Slope] = jax.grad  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
_map: Callable[[Callable[[Any], jax.Array], Any], jax.Array] = lax.map  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


@dataclass(frozen=True)
class Sensitivity:
    """How sensitivities are measured, and how they become keep probabilities.

    Layers are given by index; -1 is the last layer.

    Attributes:
      kind: the measure (`layer_sensitivity`), or "influence" (`jaxgrow.extras.importance.block_influence`).
      after: length of the pre-analysis, as a fraction of the steps. The pre-analysis keeps every
        layer, and the schedule of theta begins after it.
      every: fraction of the steps after which sensitivities are measured again; 0 measures them
        once.
      batches: number of validation micro-batches per measurement.
      beta: the keep probabilities of the least and the most sensitive layer that may be dropped
        differ by beta (1 - theta); 0 gives uniform dropping.
      p_min: the smallest keep probability. It limits the factor 1/p of the outputs of kept layers,
        which causes spikes in the gradients that Adam sees.
      share: fraction of the layers that are blocked from dropping. The most sensitive layers are
        chosen.
      block: layers that are always blocked, independent of their sensitivity.
      allow: layers that are not blocked, even if they are the most sensitive ones. A layer in
        ``block`` is blocked nevertheless.
    """

    kind: Measure | Literal["influence"] = "loss_delta"
    after: float = 0.05
    every: float = 0.0
    batches: int = 8
    beta: float = 1.0
    p_min: float = 0.2
    share: float = 0.1
    block: tuple[int, ...] = (0, -1)
    allow: tuple[int, ...] = ()

    def __post_init__(self):
        check_choices(self)
        for name in ("after", "every", "p_min", "share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be between 0 and 1, but is {getattr(self, name)}")
        if self.after == 1:
            raise ValueError(
                "after=1.0 leaves no step that drops layers. Remove the layer drop instead"
            )
        if self.batches < 1 or self.beta < 0:
            raise ValueError(
                f"batches must be at least 1 and beta not negative, but they are {self.batches} and {self.beta}"
            )


def layer_sensitivity(
    loss: Loss,
    layers: int,
    batches: Batch,
    kind: Measure = "loss_delta",
) -> jax.Array:
    """Measure how strongly the loss depends on each layer.

    ============ =============================================== ===================================
    kind         S_l, mean over batches b, clipped at 0          cost
    ============ =============================================== ===================================
    loss_delta   loss(b; layer l skipped) - loss(b; all)         L + 1 forward passes per batch
    taylor       ``|d loss / d a_l|`` at a = 1,                  one forward and backward pass per
                 x' = x + a_l (Block_l(x) - x)                   batch
    ============ =============================================== ===================================

    The function is pure. The caller must fix the random numbers in ``loss``. [reconstructed]

    Args:
      loss: ``(keep_mask, batch) -> scalar``. ``keep_mask`` is None for all layers; otherwise ``loss`` must
        pass it to the stack.
      layers: number of layers.
      batches: a pytree whose leaves have a leading axis of batches.
      kind: the measure, as in the table.

    Returns:
      The sensitivity of each layer, float32 [layers], not negative.

    Raises:
      ValueError: an unknown measure.

    Example:
      A "model" to which each layer adds a number. The second layer adds twice as much.

      >>> worth = jnp.array([1.0, 2.0])
      >>> loss = lambda keep_mask, batch: batch - (worth.sum() if keep_mask is None else worth @ keep_mask.layers)
      >>> layer_sensitivity(loss, 2, jnp.ones(3)).tolist()
      [1.0, 2.0]

    References:
      Zeng et al.,
      `Acceleration of Large Transformer Model Training by Sensitivity-Based Layer Dropping <https://doi.org/10.1609/aaai.v37i9.26321>`_,
      AAAI 2023
    """
    check_choice("kind", kind, Measure)
    if kind == "taylor":
        return jnp.abs(_map(partial(_scale_slope, loss, layers), batches)).mean(0)

    def delta(batch: Batch) -> jax.Array:
        def skipping(keep: jax.Array) -> jax.Array:
            return loss(KeepMask(keep), batch)

        # The layers are measured one after the other, because batched keep masks would run every
        # layer in every pass.
        return _map(skipping, ~jnp.eye(layers, dtype=bool)) - loss(None, batch)

    return jnp.maximum(_map(delta, batches).mean(0), 0).astype(jnp.float32)


def _scale_slope(loss: Loss, layers: int, batch: Batch) -> jax.Array:
    """The derivative of the loss with respect to the scale of each layer, at 1: [layers]."""

    def scaled(scale: jax.Array) -> jax.Array:
        return loss(KeepMask(None, scale), batch)

    return _grad(scaled)(jnp.ones(layers))


def block_list(measured: ArrayLike, s: Sensitivity) -> jax.Array:
    """The layers that are never dropped, bool [layers].

    These are the ``ceil(share L)`` layers with the largest sensitivity, without the layers in
    ``s.allow``, and all layers in ``s.block``. The allow list of the paper contains all other
    layers. [reconstructed]

    Args:
      measured: the sensitivities [layers].
      s: the fraction of blocked layers, and the block and allow lists.

    Returns:
      True for layers that are never dropped.

    Raises:
      ValueError: ``s.block`` or ``s.allow`` contains a layer that does not exist.

    Example:
      >>> block_list([3.0, 1.0, 2.0, 9.0], Sensitivity(share=0.25, block=(0,))).tolist()
      [True, False, False, True]

    References:
      Zeng et al.,
      `Acceleration of Large Transformer Model Training by Sensitivity-Based Layer Dropping <https://doi.org/10.1609/aaai.v37i9.26321>`_,
      AAAI 2023
    """
    measured = jnp.asarray(measured)
    layers = len(measured)
    wrong = [i for i in (*s.block, *s.allow) if not -layers <= i < layers]
    if wrong:
        raise ValueError(
            f"the block and allow lists name the layers {wrong}, but the model has only {layers} layers"
        )
    # Without the small number, rounding could add a layer: 0.14 * 50 is 7.000000000000001.
    most = max(1, math.ceil(s.share * layers - 1e-9)) if s.share else 0
    never = jnp.argsort(jnp.argsort(-measured)) < most
    never = never.at[jnp.array(s.allow, int)].set(False) if s.allow else never
    return never.at[jnp.array(s.block, int)].set(True) if s.block else never


def keep_probabilities(
    sensitivity: ArrayLike,
    theta: ArrayLike,
    *,
    blocked: ArrayLike | None = None,
    beta: float = 1.0,
    p_min: float = 0.2,
    costs: ArrayLike | None = None,
) -> jax.Array:
    """Compute the keep probabilities of one iteration from sensitivities and ``theta``. Jittable.

    .. math:: p_l = 1 \\text{ if blocked, else } m + b (z_l - \\bar z)

    =========== ====================================================================================
    z_l         the rank of S_l among the layers that are not blocked: 0 for the least sensitive, 1
                for the most sensitive, ties averaged
    m           such that the mean over all layers, weighted by ``costs`` (their FLOPs), equals the
                mean of PLD at this theta, ``1 - (1 - theta)(L + 1) / (2 L)``, so that the two can
                be compared fairly
    b           ``beta (1 - theta)``, or less if a p would leave [``p_min``, 1]
    =========== ====================================================================================

    The formula is reconstructed. It uses ranks because in a trained model, the sensitivity of one
    layer is often ten times as large as all others. With any linear scale, the other layers would
    get nearly the same probability. The disadvantage is that layers whose sensitivities differ only
    by noise also get different probabilities. If a probability would leave its range, the spread b
    of all layers shrinks. Clipping single probabilities instead would make different layers equal.

    The result has these properties:

    - Among layers that are not blocked, p increases strictly with S (if beta > 0, theta < 1 and
      m > p_min). It depends only on the order of the layers by S. The most and the least sensitive
      of these layers differ by b.
    - theta = 1 gives ones. ``beta = 0`` is uniform dropping.
    - ``S_l = L - l``, ``beta = (L - 1) / L``, ``p_min = 0`` and an empty block list give the linear
      schedule of PLD.
    - If blocked layers make the mean impossible, every other layer gets ``p_min``, and the mean is
      larger.

    Args:
      sensitivity: the sensitivity of each layer.
      theta: the global keep probability.
      blocked: layers that are never dropped, bool [layers].
      beta: the difference between the keep probabilities of the most and the least sensitive layer
        that may be dropped, divided by 1 - theta.
      p_min: the smallest keep probability.
      costs: the cost of each layer, in any unit. By default, all costs are equal.

    Returns:
      The keep probability ``p_l`` of each layer, [layers].

    Example:
      >>> [round(p, 2) for p in keep_probabilities([1.0, 2.0, 3.0], 0.7).tolist()]
      [0.65, 0.8, 0.95]

    References:
      Zeng et al.,
      `Acceleration of Large Transformer Model Training by Sensitivity-Based Layer Dropping <https://doi.org/10.1609/aaai.v37i9.26321>`_,
      AAAI 2023
    """
    s = jnp.asarray(sensitivity)
    real = jnp.promote_types(s.dtype, jnp.float32)
    layers = len(s)
    theta = jnp.asarray(theta, real)
    free = jnp.ones(layers, bool) if blocked is None else ~jnp.asarray(blocked)
    costs = jnp.ones(layers, real) if costs is None else jnp.asarray(costs, real)
    theirs = jnp.where(free, costs, 0)
    total = jnp.maximum(theirs.sum(), float(np.finfo(real).tiny))

    row = s[:, None]
    column = s[None, :]
    rank = (
        jnp.where(row > column, 1, jnp.where(row == column, 0.5, 0)).astype(real)
        @ free.astype(real)
        - 0.5
    )
    z = rank / jnp.maximum(free.sum() - 1, 1)
    z = jnp.where(free, z - theirs @ z / total, 0)

    # The free layers must account for all FLOPs that are dropped on average.
    mean = jnp.maximum(1 - (1 - theta) * (layers + 1) / (2 * layers) * costs.sum() / total, p_min)

    def room(distance: jax.Array, extent: jax.Array) -> jax.Array:
        return jnp.where(extent > 0, distance / jnp.where(extent > 0, extent, 1), jnp.inf)

    spread = jnp.minimum(
        beta * (1 - theta), jnp.minimum(room(mean - p_min, -z.min()), room(1 - mean, z.max()))
    )
    # The clip corrects only rounding errors.
    return jnp.where(free, jnp.clip(mean + spread * z, p_min, 1), 1)

"""Sensitivity-based layer dropping (SBLD; Zeng, He, Vasyltsov, Pang, Chen, AAAI 2023): what a layer may be dropped.

The paper's: a pre-analysis measures every layer's sensitivity; the most sensitive ones are blocked
from dropping, the others allowed; every iteration, a list of keep probabilities follows from the
sensitivities and one keep probability of the whole model, which is scheduled by the variance
between training with and without dropping. **Our reconstruction**, for no formula and no code of it
is public: each equation below, all defaults, and the schedule
(`jaxgrow.layerdrop.schedules.Variance`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxgrow.layerdrop.execution import Kept

Kind: TypeAlias = Literal["loss_delta", "taylor"]
Batch: TypeAlias = Any  # a pytree of arrays: what the loss takes


@dataclass(frozen=True)
class Sensitivity:
    """How sensitivities are measured, and how they become keep probabilities. Layers are named by number, -1 the last."""

    kind: Kind | Literal["influence"] = (
        "loss_delta"  # of `sensitivity`, or `jaxgrow.models.importance.influence`
    )
    after: float = (
        0.05  # of the steps: the pre-analysis, with every layer; the schedule of theta begins then
    )
    every: float = 0.0  # of the steps: measured again and again; 0: once
    batches: int = 8  # held-out micro-batches
    # the most and the least sensitive layer that may be dropped differ by beta (1 - theta); 0:
    # uniform
    beta: float = 1.0
    p_min: float = 0.2  # below it, Adam sees spikes of 1/p
    share: float = 0.1  # of the layers, the most sensitive: blocked
    block: tuple[int, ...] = (0, -1)  # blocked whatever their sensitivity
    allow: tuple[int, ...] = ()  # not blocked whatever their sensitivity

    def __post_init__(self):
        for name in ("after", "every", "p_min", "share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} lies between 0 and 1, but is {getattr(self, name)}")
        if self.after == 1:
            raise ValueError("after=1.0 leaves no step that drops layers; use no layer drop")
        if self.batches < 1 or self.beta < 0:
            raise ValueError(
                f"batches must be at least 1 and beta not negative, but they are {self.batches} and {self.beta}"
            )


def sensitivity(
    loss: Callable[[Kept | None, Batch], jax.Array],
    layers: int,
    batches: Batch,
    kind: Kind = "loss_delta",
) -> jax.Array:
    """How much the loss depends on each layer: float32 [layers], not negative.

    ============ ================================================================ ==================================
    kind         S_l, mean over batches b, clipped at 0                           cost
    ============ ================================================================ ==================================
    loss_delta   loss(b; layer l skipped) - loss(b; all)                          L + 1 forward passes a batch
    taylor       ``|d loss / d a_l|`` at a = 1, x' = x + a_l (Block_l(x) - x)     one forward and backward a batch
    ============ ================================================================ ==================================

    ``loss(kept, batch)`` is a scalar; ``kept`` is None for all layers, else to be handed to the
    stack. ``batches`` is a pytree with a leading axis. Pure: what is random in ``loss`` must be
    fixed by the caller. [reconstructed]

    Args:
      loss: ``(kept, batch) -> scalar``.
      layers: how many there are.
      batches: a pytree whose leaves have a leading axis of batches.
      kind: of the table.

    Returns:
      What each layer is worth.

    Example:
      A "model" that adds what its layers are worth; the second is worth twice the first.

      >>> worth = jnp.array([1.0, 2.0])
      >>> loss = lambda kept, batch: batch - (worth.sum() if kept is None else worth @ kept.layers)
      >>> sensitivity(loss, 2, jnp.ones(3)).tolist()
      [1.0, 2.0]

    References:
      Zeng et al.,
      `Acceleration of Large Transformer Model Training by Sensitivity-Based Layer Dropping <https://doi.org/10.1609/aaai.v37i9.26321>`_,
      AAAI 2023
    """
    if kind == "taylor":
        slope = jax.grad(lambda scale, batch: loss(Kept(None, scale), batch))
        return jnp.abs(lax.map(lambda b: slope(jnp.ones(layers), b), batches)).mean(0)

    def delta(batch):
        # One layer after the other: batched gates would run every layer of every pass.
        without = lax.map(lambda gates: loss(Kept(gates), batch), ~jnp.eye(layers, dtype=bool))
        return without - loss(None, batch)

    return jnp.maximum(lax.map(delta, batches).mean(0), 0).astype(jnp.float32)


def block_list(measured: ArrayLike, s: Sensitivity) -> jax.Array:
    """The layers that are never dropped, bool [layers]: the ``max(1, ceil(share L))`` with the
    largest ``measured`` sensitivity, without ``s.allow``, and ``s.block``. The allow list of the
    paper is its complement. [reconstructed]

    Args:
      measured: sensitivities [layers].
      s: how many are blocked, and which in any case.

    Returns:
      True for those that are never dropped.

    Raises:
      ValueError: a layer of ``s.block`` or ``s.allow`` that is none.

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
        raise ValueError(f"layers {wrong} of a block or allow list are none of the {layers} layers")
    most = max(1, -int(-s.share * layers // 1)) if s.share else 0
    never = jnp.argsort(jnp.argsort(-measured)) < most
    never = never.at[jnp.array(s.allow, int)].set(False) if s.allow else never
    return never.at[jnp.array(s.block, int)].set(True) if s.block else never


def allocate(
    sensitivity: ArrayLike,
    theta: ArrayLike,
    *,
    blocked: ArrayLike | None = None,
    beta: float = 1.0,
    p_min: float = 0.2,
    costs: ArrayLike | None = None,
) -> jax.Array:
    """Keep probabilities [layers] of one iteration, from sensitivities and ``theta``. Jittable. [reconstructed]

    .. math:: p_l = 1 \\text{ if blocked, else } m + b (z_l - \\bar z)

    =========== ======================================================================================================
    z_l         the rank of S_l among the layers that are not blocked, 0 the least sensitive, 1 the most, ties averaged
    m           such that the mean over all layers, weighted by ``costs`` (their FLOPs), is that of PLD at this theta,
                ``1 - (1 - theta)(L + 1) / (2 L)``: comparisons of the two are fair
    b           ``beta (1 - theta)``, or less where a p would leave [``p_min``, 1]
    =========== ======================================================================================================

    Ranks, and not the sensitivities themselves: of a trained model's, one is often ten times all
    others, so that any linear scale gives those nearly one probability. Their price is that layers
    whose sensitivities differ by noise alone are told apart as well. A spread that shrinks, and not
    p clipped one by one: what is clipped is told apart no more.

    Guarantees: p increases strictly with S among layers that are not blocked (with beta > 0, theta
    < 1, m > p_min), from the least to the most sensitive by b; it depends on their order alone.
    theta = 1 gives ones; ``beta = 0`` is uniform dropping; ``S_l = L - l``, ``beta = (L - 1) / L``,
    ``p_min = 0`` and no block list give PLD's linear schedule. Where blocked layers leave no room
    for the mean, every other layer gets ``p_min``, and the mean is larger.

    Args:
      sensitivity: of each layer.
      theta: the keep probability of the whole model.
      blocked: layers that are never dropped, bool [layers].
      beta: by how much the most and the least sensitive layer differ, over 1 - theta.
      p_min: the least keep probability.
      costs: of each layer, in any unit; if left out they are equal.

    Returns:
      ``p_l`` for each layer.

    Example:
      >>> [round(p, 2) for p in allocate([1.0, 2.0, 3.0], 0.7).tolist()]
      [0.65, 0.8, 0.95]

    References:
      Zeng et al.,
      `Acceleration of Large Transformer Model Training by Sensitivity-Based Layer Dropping <https://doi.org/10.1609/aaai.v37i9.26321>`_,
      AAAI 2023
    """
    s = jnp.asarray(sensitivity)
    real, layers = jnp.promote_types(s.dtype, jnp.float32), len(s)
    theta = jnp.asarray(theta, real)
    free = jnp.ones(layers, bool) if blocked is None else ~jnp.asarray(blocked)
    costs = jnp.ones(layers, real) if costs is None else jnp.asarray(costs, real)
    theirs = jnp.where(free, costs, 0)
    total = jnp.maximum(theirs.sum(), jnp.finfo(real).tiny)

    row, column = s[:, None], s[None, :]
    rank = (
        jnp.where(row > column, 1, jnp.where(row == column, 0.5, 0)).astype(real)
        @ free.astype(real)
        - 0.5
    )
    z = rank / jnp.maximum(free.sum() - 1, 1)
    z = jnp.where(free, z - theirs @ z / total, 0)

    # What may be dropped of all FLOPs, layers that are free must drop.
    mean = jnp.maximum(1 - (1 - theta) * (layers + 1) / (2 * layers) * costs.sum() / total, p_min)

    def room(distance, extent):
        return jnp.where(extent > 0, distance / jnp.where(extent > 0, extent, 1), jnp.inf)

    spread = jnp.minimum(
        beta * (1 - theta), jnp.minimum(room(mean - p_min, -z.min()), room(1 - mean, z.max()))
    )
    return jnp.where(free, jnp.clip(mean + spread * z, p_min, 1), 1)  # the clip mends rounding only

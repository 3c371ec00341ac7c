"""Sensitivity-based layer dropping (SBLD; Zeng, He, Vasyltsov, Pang, Chen, AAAI 2023): what a layer may be dropped.

The paper's: a pre-analysis measures every layer's sensitivity; the most sensitive ones are blocked from dropping, the others
allowed; every iteration, a list of keep probabilities follows from the sensitivities and one keep probability of the whole
model. **Our reconstruction**, for no formula and no code of it is public: each equation below, and all defaults.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxgrow.drop.execution import Kept

Kind = Literal["loss_delta", "taylor"]


@dataclass(frozen=True)
class Sensitivity:
    """How sensitivities are measured, and how they become keep probabilities. Layers are named by number, -1 the last."""

    kind: Kind = "loss_delta"
    after: float = 0.05  # of the steps: the pre-analysis, with every layer
    every: float = 0.0  # of the steps: measured again and again; 0: once
    batches: int = 8  # held-out micro-batches
    beta: float = 1.0  # how far probabilities follow sensitivities; 0: uniform
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
    loss: Callable[[Kept | None, Any], jax.Array], layers: int, batches: Any, kind: Kind = "loss_delta"
) -> jax.Array:
    """How much the loss depends on each layer: float32 [layers], not negative.

    ============ ================================================================ ==================================
    kind         S_l, mean over batches b, clipped at 0                           cost
    ============ ================================================================ ==================================
    loss_delta   loss(b; layer l skipped) - loss(b; all)                          L + 1 forward passes a batch
    taylor       ``|d loss / d a_l|`` at a = 1, x' = x + a_l (Block_l(x) - x)     one forward and backward a batch
    ============ ================================================================ ==================================

    ``loss(kept, batch)`` is a scalar; ``kept`` is None for all layers, else to be handed to the stack. ``batches`` is a
    pytree with a leading axis. Pure: what is random in ``loss`` must be fixed by the caller. [reconstructed]
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
    """The layers that are never dropped, bool [layers]: the ``max(1, ceil(share L))`` with the largest ``measured``
    sensitivity, without ``s.allow``, and ``s.block``. The allow list of the paper is its complement. [reconstructed]
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

    .. math:: p_l = 1 \\text{ if blocked, else } clip(\\tau + \\beta (1 - \\theta) z_l, p_{min}, 1)

    with z the sensitivities brought to [0, 1], less their mean, and tau such that the mean, weighted by ``costs`` (the
    layers' FLOPs), is that of PLD at this theta, ``1 - (1 - theta)(L + 1) / (2 L)``: comparisons of the two are fair.
    Where blocked layers leave no room for that, every other layer gets ``p_min``, and the mean is larger.

    Guarantees: p is not decreasing in S; theta = 1 gives ones; ``beta = 0`` is uniform dropping; ``S_l = L - l``,
    ``beta = (L - 1) / L``, ``p_min = 0`` and no block list give PLD's linear schedule.
    """
    s = jnp.asarray(sensitivity)
    s = s.astype(jnp.promote_types(s.dtype, jnp.float32))
    layers = len(s)
    theta = jnp.asarray(theta, s.dtype)
    never = jnp.zeros(layers, bool) if blocked is None else jnp.asarray(blocked)
    weights = jnp.ones(layers, s.dtype) if costs is None else jnp.asarray(costs, s.dtype)
    weights = weights / weights.sum()
    budget = 1 - (1 - theta) * (layers + 1) / (2 * layers)

    spread = s.max() - s.min()
    z = (s - s.min()) / jnp.where(spread > 0, spread, 1)
    z = beta * (1 - theta) * (z - z.mean())

    def probabilities(tau):
        return jnp.where(never, 1, jnp.clip(tau + z, p_min, 1))

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) / 2
        enough = (weights * probabilities(middle)).sum() >= budget
        return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

    bounds = (jnp.asarray(p_min - beta, s.dtype), jnp.asarray(1 + beta, s.dtype))
    p = probabilities(lax.fori_loop(0, 60, halve, bounds)[1])
    return jnp.where(theta >= 1, 1, p)  # to the bit, where the mean is only a sum of many

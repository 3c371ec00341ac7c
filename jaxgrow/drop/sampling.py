"""Which layers a step keeps: gates, a pure function of keep probabilities and (seed, step, micro-step), never of a device.

All replicas must drop the same layers: where each draws its own, a step lasts as long as the unluckiest one's.
"""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxgrow.drop.schedules import LayerDrop, schedule

GRID = 1 << 20  # systematic sampling works in integers, on probabilities rounded to this grid: counts are then exact


def sample(key: jax.Array, probs: ArrayLike) -> jax.Array:
    """Independent gates, bool [layers]: ``P(gate_l) = probs_l``.

    Args:
      key: of a step and a micro-step, the same on every device.
      probs: keep probabilities [layers].

    Returns:
      Which layers are kept.

    Example:
      >>> sample(jax.random.key(0), [1.0, 0.0]).tolist()
      [True, False]
    """
    return jax.random.bernoulli(key, jnp.asarray(probs))


def systematic(key: jax.Array, probs: ArrayLike, count_key: jax.Array | None = None) -> jax.Array:
    """Gates, bool [layers], with ``P(gate_l) = probs_l``, of which floor or ceil of ``sum(probs)`` are open, never else.

    With the layers in random order, C the running sum of their probabilities, and one u in (0, 1], a layer is kept if
    ``floor(C_l - u) > floor(C_(l-1) - u)``: random systematic sampling (Hartley & Rao, 1962). Gates of different layers are
    not independent, but no two layers avoid each other, as neighbours in a fixed order do. Draws that share ``count_key`` and
    probabilities keep equally many, each still with these marginals: what one scan over micro-batches needs.

    Args:
      key: of a step and a micro-step, the same on every device.
      probs: keep probabilities [layers].
      count_key: draws that share it keep equally many.

    Returns:
      Which layers are kept.

    Example:
      >>> int(systematic(jax.random.key(0), [0.5, 0.5, 0.5, 0.5]).sum())
      2
    """
    count_key = jax.random.fold_in(key, 0) if count_key is None else count_key
    order_key, key = jax.random.split(key)
    p = jnp.round(jnp.asarray(probs) * GRID).astype(jnp.int32)
    sure = p >= GRID
    p = jnp.where(sure, 0, p)
    more = p.sum() % GRID  # u up to here: one layer more than otherwise
    first = jax.random.randint(count_key, (), 1, GRID + 1) <= more
    u = jax.random.randint(key, (), jnp.where(first, 1, more + 1), jnp.where(first, more, GRID) + 1)
    place = jax.random.bits(order_key, p.shape)
    row, column = place[:, None], place[None, :]
    earlier = (column < row) | ((column == row) & jnp.tri(len(p), k=-1, dtype=bool))  # cheaper to compile than a sort
    before = jnp.where(earlier, p[None, :], 0).sum(1)
    return sure | ((before + p - u) // GRID > (before - u) // GRID)


def gates(
    drop: LayerDrop,
    layers: int | Sequence[int],
    steps: int,
    t: ArrayLike,
    *,
    seed: int,
    micro: int = 1,
    sensitivity: ArrayLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """What a step keeps: independent gates for the ``cond`` execution, systematic ones for ``gather``.

    Args:
      drop: how layers are dropped.
      layers: how many there are; or in each stage, in order. Systematic gates are then drawn for each stage, so that
        micro-steps keep equally many there.
      steps: how many steps the phase has.
      t: the step, ``1 .. steps``.
      seed: of the run, and not of a device.
      micro: how many micro-steps there are in a step.
      sensitivity: of each layer, as last measured, if ``drop`` goes by it.

    Returns:
      ``(keep probabilities [layers], gates bool [micro, layers])``.

    Example:
      >>> probs, drawn = gates(LayerDrop(time="constant", depth="uniform"), 4, 100, 1, seed=0, micro=2)
      >>> probs.tolist(), drawn.shape
      ([0.5, 0.5, 0.5, 0.5], (2, 4))
    """
    depths = (layers,) if isinstance(layers, int) else tuple(layers)
    probs = schedule(drop, sum(depths), t, steps, sensitivity)
    key = jax.random.fold_in(jax.random.key(seed), t)
    keys = jax.vmap(lambda m: jax.random.fold_in(key, m))(jnp.arange(1, micro + 1))
    if drop.execution == "cond":
        return probs, lax.map(lambda k: sample(k, probs), keys)
    if len(depths) == 1:
        return probs, lax.map(lambda k: systematic(k, probs, jax.random.fold_in(key, 0)), keys)
    ends = list(itertools.accumulate(depths))

    def staged(k: jax.Array) -> jax.Array:
        parts = enumerate(probs[end - n : end] for n, end in zip(depths, ends, strict=True))
        count = jax.random.fold_in(key, 0)
        fold = jax.random.fold_in
        return jnp.concatenate([systematic(fold(k, s), p, fold(count, s)) for s, p in parts])

    return probs, lax.map(staged, keys)

"""Which layers a step keeps: gates, a pure function of keep probabilities and (seed, step, micro-step), never of a device.

All replicas must drop the same layers: where each draws its own, a step lasts as long as the
unluckiest one's.
"""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxgrow.layerdrop.schedules import LayerDrop, schedule

GRID = (
    1 << 20
    # systematic sampling works in integers, on probabilities rounded to this grid: counts are then
    # exact
)


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

    With the layers in random order, C the running sum of their probabilities, and one u in (0, 1],
    a layer is kept if ``floor(C_l - u) > floor(C_(l-1) - u)``: random systematic sampling (Hartley
    & Rao, 1962). Gates of different layers are not independent, but no two layers avoid each other,
    as neighbours in a fixed order do. Draws that share ``count_key`` and probabilities keep equally
    many, each still with these marginals: what one scan over micro-batches needs.

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
    sure, p, more, first = _on_grid(probs, count_key)
    u = jax.random.randint(key, (), jnp.where(first, 1, more + 1), jnp.where(first, more, GRID) + 1)
    place = jax.random.bits(order_key, p.shape)
    row, column = place[:, None], place[None, :]
    earlier = (column < row) | (
        (column == row) & jnp.tri(len(p), k=-1, dtype=bool)
    )  # cheaper to compile than a sort
    before = jnp.where(earlier, p[None, :], 0).sum(1)
    return sure | ((before + p - u) // GRID > (before - u) // GRID)


def _on_grid(probs: ArrayLike, count_key: jax.Array) -> tuple[jax.Array, ...]:
    """``(certain layers, the other probabilities in GRID-ths, the largest u with one layer more, whether u is that small)``."""
    p = jnp.round(jnp.asarray(probs) * GRID).astype(jnp.int32)
    sure = p >= GRID
    p = jnp.where(sure, 0, p)
    more = p.sum() % GRID
    return sure, p, more, jax.random.randint(count_key, (), 1, GRID + 1) <= more


def independent(key: jax.Array, probs: ArrayLike, count_key: jax.Array) -> jax.Array:
    """Independent keep masks, bool [layers], of which all that share ``count_key`` keep equally many layers.

    The number of kept layers is that of one independent mask, drawn with ``count_key``. Given this
    number k, the layers are decided one after the other: layer l is kept with probability

    .. math:: p_l P_{l+1}(r - 1) / P_l(r),

    where r of the k layers are still to be chosen and :math:`P_l(r)` is the probability that r of
    the layers l .. L are kept. So each mask has the distribution of `sample`, to float rounding.
    Only masks of different micro-steps depend on each other, through their number, which leaves the
    mean of their gradients unbiased.

    Args:
      key: of a step and a micro-step, the same on every device.
      probs: keep probabilities [layers].
      count_key: masks that share it keep equally many layers.

    Returns:
      Which layers are kept.

    Example:
      >>> keys = jax.random.split(jax.random.key(0), 3)
      >>> len({int(independent(key, [0.5, 0.8, 0.9], keys[0]).sum()) for key in keys})
      1
    """
    p = jnp.asarray(probs)
    number = jnp.arange(len(p) + 1)

    def earlier(after, p):
        return (1 - p) * after + p * jnp.where(number > 0, jnp.roll(after, 1), 0), after

    _, after = lax.scan(earlier, (number == 0).astype(p.dtype), p, reverse=True)

    def choose(left, layer):
        p, after, chance, others = layer
        kept, dropped = p * after[left - 1], (1 - p) * after[left]
        # The first two conditions hold by themselves, but for rounding.
        keep = (left > others) | ((left > 0) & (chance * (kept + dropped) < kept))
        return left - keep, keep

    chance = jax.random.uniform(key, p.shape, p.dtype)
    return lax.scan(choose, sample(count_key, p).sum(), (p, after, chance, number[: len(p)][::-1]))[
        1
    ]


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
    """What a step keeps: the keep masks of its micro-steps.

    ====================== ==========================================================================================
    execution              masks
    ====================== ==========================================================================================
    ``cond``               `sample`: independent
    ``gather``             `systematic`: a fixed number of layers, floor or ceil of the expected one; layers correlated
    ``gather_independent`` `independent`: independent within a micro-step, all micro-steps keep
    equally many layers
    ====================== ==========================================================================================

    Args:
      drop: how layers are dropped.
      layers: how many there are; or in each stage, in order. The masks of the last two rows are
        then drawn for each stage, so that micro-steps keep equally many there.
      steps: how many steps the phase has.
      t: the step, ``1 .. steps``.
      seed: of the run, and not of a device.
      micro: how many micro-steps there are in a step.
      sensitivity: of each layer, as last measured, if ``drop`` goes by it.

    Returns:
      ``(keep probabilities [layers], masks bool [micro, layers])``.

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
    draw = systematic if drop.execution == "gather" else independent
    parts, counts = _staged(probs, depths), _stage_keys(jax.random.fold_in(key, 0), depths)

    def drawn(k: jax.Array) -> jax.Array:
        mine = _stage_keys(k, depths)
        return jnp.concatenate(
            [draw(k, p, count) for k, p, count in zip(mine, parts, counts, strict=True)]
        )

    return probs, lax.map(drawn, keys)


def _staged(probs: jax.Array, depths: Sequence[int]) -> list[jax.Array]:
    return jnp.split(probs, list(itertools.accumulate(depths))[:-1])


def _stage_keys(key: jax.Array, depths: Sequence[int]) -> list[jax.Array]:
    return [key] if len(depths) == 1 else [jax.random.fold_in(key, s) for s in range(len(depths))]

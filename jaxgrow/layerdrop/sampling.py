"""Keep masks: the layers that a step keeps, sampled from keep probabilities.

They are a pure function of the probabilities, the seed, the step and the micro-step. They do not
depend on the device, because all replicas must drop the same layers. If each replica sampled its
own mask, the slowest replica would determine the step time.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxgrow.layerdrop.schedules import LayerDrop, schedule

# Systematic sampling rounds probabilities to this grid and uses integers, so that counts are exact.
GRID = 1 << 20
# JAX does not annotate this function.
_map: Callable[[Callable[[jax.Array], jax.Array], jax.Array], jax.Array] = lax.map  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def sample(key: jax.Array, probs: ArrayLike) -> jax.Array:
    """Sample independent keep masks, bool [layers]: layer l is kept with probability ``probs_l``.

    Args:
      key: random key of a step and micro-step, equal on all devices.
      probs: keep probabilities [layers].

    Returns:
      The keep mask.

    Example:
      >>> sample(jax.random.key(0), [1.0, 0.0]).tolist()
      [True, False]
    """
    return jax.random.bernoulli(key, jnp.asarray(probs))


def systematic(key: jax.Array, probs: ArrayLike, count_key: jax.Array | None = None) -> jax.Array:
    """Sample a keep mask, bool [layers], whose number of kept layers varies by at most one.

    Layer l is kept with exactly the probability ``probs_l``, and the number of kept layers is
    always the floor or the ceiling of ``sum(probs)``. This is random systematic sampling (Hartley &
    Rao, 1962). It puts the layers in random order, computes the running sum C of their
    probabilities, and samples one u in (0, 1]. A layer is kept if
    ``floor(C_l - u) > floor(C_(l-1) - u)``. The masks of different layers are not independent. The
    random order ensures that no two layers exclude each other, as neighbours do in a fixed order.
    Samples with the same ``count_key`` and probabilities keep the same number of layers, and each
    layer is still kept with its probability. A scan over micro-batches requires this.

    Args:
      key: random key of a step and micro-step, equal on all devices.
      probs: keep probabilities [layers].
      count_key: random key of the number of kept layers.

    Returns:
      The keep mask.

    Example:
      >>> int(systematic(jax.random.key(0), [0.5, 0.5, 0.5, 0.5]).sum())
      2
    """
    count_key = jax.random.fold_in(key, 0) if count_key is None else count_key
    order_key, key = jax.random.split(key)
    sure, p, more, first = _on_grid(probs, count_key)
    u = jax.random.randint(key, (), jnp.where(first, 1, more + 1), jnp.where(first, more, GRID) + 1)
    place = jax.random.bits(order_key, p.shape)
    row = place[:, None]
    column = place[None, :]
    # This ranks the numbers. It is cheaper to compile than a sort.
    earlier = (column < row) | ((column == row) & jnp.tri(len(p), k=-1, dtype=bool))
    before = jnp.where(earlier, p[None, :], 0).sum(1)
    return sure | ((before + p - u) // GRID > (before - u) // GRID)


def _on_grid(probs: ArrayLike, count_key: jax.Array) -> tuple[jax.Array, ...]:
    """The parts of systematic sampling, in integers.

    Returns:
      The layers that are certainly kept, the other probabilities in units of 1 / GRID, the largest
      u for which the number of kept layers is the ceiling, and whether u is at most this value.
    """
    p = jnp.round(jnp.asarray(probs) * GRID).astype(jnp.int32)
    sure = p >= GRID
    p = jnp.where(sure, 0, p)
    more = p.sum() % GRID
    return sure, p, more, jax.random.randint(count_key, (), 1, GRID + 1) <= more


def independent(key: jax.Array, probs: ArrayLike, count_key: jax.Array) -> jax.Array:
    """Sample an independent keep mask, bool [layers], with a number of layers set by ``count_key``.

    All masks with the same ``count_key`` keep the same number of layers: the number k that one
    independent mask, sampled with ``count_key``, keeps. Given k, the layers are decided one after
    the other. Layer l is kept with probability

    .. math:: p_l P_{l+1}(r - 1) / P_l(r),

    where r of the k layers are still to be chosen, and :math:`P_l(r)` is the probability that r of
    the layers l .. L are kept. Each mask therefore has the distribution of `sample`, up to float
    rounding. Only the masks of different micro-steps depend on each other, through their number.
    The mean of their gradients stays unbiased.

    Args:
      key: random key of a step and micro-step, equal on all devices.
      probs: keep probabilities [layers].
      count_key: random key of the number of kept layers.

    Returns:
      The keep mask.

    Example:
      >>> keys = jax.random.split(jax.random.key(0), 3)
      >>> len({int(independent(key, [0.5, 0.8, 0.9], keys[0]).sum()) for key in keys})
      1
    """
    p = jnp.asarray(probs)
    number = jnp.arange(len(p) + 1)

    def earlier(after: jax.Array, p: jax.Array) -> tuple[jax.Array, jax.Array]:
        return (1 - p) * after + p * jnp.where(number > 0, jnp.roll(after, 1), 0), after

    _, after = lax.scan(earlier, (number == 0).astype(p.dtype), p, reverse=True)

    def choose(left: jax.Array, layer: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        p, after, chance, others = layer
        kept = p * after[left - 1]
        dropped = (1 - p) * after[left]
        # The first two conditions only correct rounding errors: without rounding, the probability
        # would be exactly 1 or 0 in these cases.
        keep = (left > others) | ((left > 0) & (chance * (kept + dropped) < kept))
        return left - keep, keep

    chance = jax.random.uniform(key, p.shape, p.dtype)
    layers = p, after, chance, number[: len(p)][::-1]
    _, mask = lax.scan(choose, sample(count_key, p).sum(), layers)
    return mask


def keep_masks(
    drop: LayerDrop,
    layers: int | Sequence[int],
    steps: int,
    t: ArrayLike,
    *,
    seed: int,
    micro: int = 1,
    sensitivity: ArrayLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Sample the keep masks of the micro-steps of a step.

    ====================== =========================================================================
    execution              masks
    ====================== =========================================================================
    ``cond``               `sample`: independent
    ``gather``             `systematic`: the floor or the ceiling of the expected number of layers;
                           layers are correlated
    ``gather_independent`` `independent`: independent within a micro-step; all micro-steps keep the
                           same number of layers
    ====================== =========================================================================

    Args:
      drop: how layers are dropped.
      layers: number of layers, or the number in each stage, in order. With stages, the two gather
        executions sample a mask for each stage, so that all micro-steps keep the same number of
        layers in each stage.
      steps: number of steps of the phase.
      t: the step, ``1 .. steps``.
      seed: random seed of the run, equal on all devices.
      micro: number of micro-steps of a step.
      sensitivity: the last measured sensitivity of each layer, if ``drop`` uses sensitivities.

    Returns:
      ``(keep probabilities [layers], keep masks, bool [micro, layers])``.

    Example:
      >>> probs, drawn = keep_masks(LayerDrop(time="constant", depth="uniform"), 4, 100, 1, seed=0, micro=2)
      >>> probs.tolist(), drawn.shape
      ([0.5, 0.5, 0.5, 0.5], (2, 4))
    """
    depths = (layers,) if isinstance(layers, int) else tuple(layers)
    probs = schedule(drop, sum(depths), t, steps, sensitivity)
    key = jax.random.fold_in(jax.random.key(seed), t)
    keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(1, micro + 1))
    if drop.execution == "cond":
        return probs, _map(partial(sample, probs=probs), keys)
    draw = systematic if drop.execution == "gather" else independent
    parts = jnp.split(probs, list(itertools.accumulate(depths))[:-1])  # of the stages
    counts = _stage_keys(jax.random.fold_in(key, 0), depths)

    def sampled(k: jax.Array) -> jax.Array:
        mine = _stage_keys(k, depths)
        return jnp.concatenate(
            [draw(k, p, count) for k, p, count in zip(mine, parts, counts, strict=True)]
        )

    return probs, _map(sampled, keys)


def _stage_keys(key: jax.Array, depths: Sequence[int]) -> list[jax.Array]:
    return [key] if len(depths) == 1 else [jax.random.fold_in(key, s) for s in range(len(depths))]

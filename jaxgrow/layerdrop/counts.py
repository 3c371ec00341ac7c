"""The number of layers that each compiled program of the two gather executions runs.

A scan over kept layers has a static length, so each number of layers needs a separate program. Only
a few numbers are allowed, so that only a few programs are compiled. If a step keeps a number of
layers for which there is no program, it runs the next larger program. This program also runs some
dropped layers, which `padded` chooses, and multiplies their outputs by zero. The padding does not
change keep masks, results or gradients, but it costs the FLOPs of the added layers. The code runs
in NumPy on the host.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from numpy.typing import NDArray

from jaxgrow.layerdrop.schedules import LayerDrop, schedule

STEPS = 1024  # the largest number of evenly spaced steps that represent a phase


def padded(keep: np.ndarray, number: int) -> np.ndarray:
    """The layers that a program of ``number`` layers runs: the kept layers and some dropped ones.

    Dropped layers are added to the kept layers until there are ``number`` layers. Set the scale of
    dropped layers to zero: ``KeepMask(padded(keep, number), np.where(keep, 1 / probs, 0))``.

    Args:
      keep: keep masks, bool [..., layers].
      number: number of layers that the program runs. No mask may keep more layers.

    Returns:
      Layer indices, int32 [..., number], in ascending order.

    Raises:
      ValueError: a mask keeps more layers than ``number``.

    Example:
      >>> padded(np.array([False, False, True, True, False]), 3).tolist()
      [0, 2, 3]
    """
    if (most := int(keep.sum(-1).max())) > number:
        raise ValueError(
            f"a keep mask keeps {most} layers, but the program runs {number}. Choose a larger program"
        )
    order = np.argsort(~keep, axis=-1, kind="stable")  # kept layers first
    return np.sort(order[..., :number], axis=-1).astype(np.int32)


def program_counts(
    drop: LayerDrop,
    layers: int | Sequence[int],
    steps: int,
    sensitivity: ArrayLike | None = None,
    costs: Sequence[float] | None = None,
) -> np.ndarray:
    """Choose the numbers of layers of the programs of a phase, with the lowest expected cost.

    A step runs the first program that has enough layers. Let F(c) be the fraction of steps that
    keep at most c layers (in each stage). Dynamic programming finds the programs
    :math:`c_1 \\le \\dots \\le c_n` that minimise the expected cost of a step:

    .. math:: \\sum_j (F(c_j) - F(c_{j-1})) \\, cost(c_j), \\qquad c_n = \\text{all layers}.

    Args:
      drop: how layers are dropped; its execution must be one of the two gather executions.
      layers: number of layers, or the number in each stage, in order.
      steps: number of steps of the phase.
      sensitivity: the last measured sensitivity of each layer, if ``drop`` uses sensitivities.
      costs: the cost of one layer of each stage, in any unit. By default, all costs are equal.

    Returns:
      int [``drop.programs``, stages], each column in ascending order, possibly with repetitions.

    Example:
      PLD keeps 8 or 9 of 12 layers in most steps, and more at the beginning.

      >>> program_counts(LayerDrop(execution="gather"), 12, 1000).ravel().tolist()
      [8, 9, 10, 12]
    """
    depths = _depths(layers)
    last = max(steps, 1)  # a phase without steps also has programs
    times = np.unique(np.linspace(1, last, min(last, STEPS)).round())
    odds = _odds(drop, _probabilities(drop, depths, times, steps, sensitivity), depths)
    cells = np.stack(np.meshgrid(*(np.arange(n + 1) for n in depths), indexing="ij"), -1).reshape(
        -1, len(depths)
    )
    fits = _enough(odds, cells).mean(0)
    cost = cells @ (np.ones(len(depths)) if costs is None else np.asarray(costs))
    below = (cells[:, None] <= cells[None]).all(-1)
    # The cost that a program b adds if the next smaller program is a.
    more = np.where(below, (fits[None] - fits[:, None]) * cost[None], np.inf)
    total = fits * cost
    before: list[np.ndarray] = []
    for _ in range(drop.programs - 1):
        through = total[:, None] + more
        before.append(through.argmin(0))
        total = through.min(0)
    chosen = [len(cells) - 1]
    for last in reversed(before):
        chosen.append(int(last[chosen[-1]]))
    return cells[chosen[::-1]]


def program_odds(
    drop: LayerDrop,
    layers: int | Sequence[int],
    steps: int,
    times: ArrayLike,
    counts: np.ndarray,
    sensitivity: ArrayLike | None = None,
) -> np.ndarray:
    """The probability that each program runs at each of the given steps.

    Args:
      drop: how layers are dropped; its execution must be one of the two gather executions.
      layers: number of layers, or the number in each stage, in order.
      steps: number of steps of the phase.
      times: the steps of interest, from ``1 .. steps``.
      counts: the numbers of layers of the programs, as returned by `program_counts`.
      sensitivity: the last measured sensitivity of each layer, if ``drop`` uses sensitivities.

    Returns:
      Probabilities, float [times, programs]. Each row sums to 1.

    Example:
      >>> drop = LayerDrop(time="constant", execution="gather")
      >>> program_odds(drop, 12, 1000, [1], np.array([[8], [9], [10], [12]])).round(6).tolist()
      [[0.25, 0.75, 0.0, 0.0]]
    """
    depths = _depths(layers)
    odds = _odds(drop, _probabilities(drop, depths, np.asarray(times), steps, sensitivity), depths)
    return np.diff(_enough(odds, counts), prepend=0.0)


def _depths(layers: int | Sequence[int]) -> tuple[int, ...]:
    return (layers,) if isinstance(layers, int) else tuple(layers)


def _probabilities(
    drop: LayerDrop,
    depths: tuple[int, ...],
    times: np.ndarray,
    steps: int,
    sensitivity: ArrayLike | None,
) -> np.ndarray:
    """Keep probabilities, float64 [times, layers]."""

    def at(t: jax.Array) -> jax.Array:
        return schedule(drop, sum(depths), t, steps, sensitivity)

    @jax.jit  # pyright: ignore[reportUnknownMemberType]
    def every(times: jax.Array) -> jax.Array:
        return jax.vmap(at)(times)

    return np.asarray(every(jnp.asarray(times, float)), np.float64)


def _odds(drop: LayerDrop, probs: np.ndarray, depths: tuple[int, ...]) -> list[np.ndarray]:
    """For each stage, the probability of each number of kept layers: [times, layers + 1]."""
    distribution = _of_fixed if drop.execution == "gather" else _of_independent
    return [distribution(part) for part in np.split(probs, np.cumsum(depths)[:-1], axis=1)]


def _of_fixed(probs: np.ndarray) -> np.ndarray:
    """The odds of a number that is always the floor or the ceiling of its mean."""
    mean: NDArray[np.float64] = probs.sum(1).round(6)[:, None]
    return np.clip(1 - np.abs(np.arange(len(probs.T) + 1) - mean), 0, None)


def _of_independent(probs: np.ndarray) -> np.ndarray:
    odds = np.zeros((len(probs), probs.shape[1] + 1))
    odds[:, 0] = 1
    for p in probs.T[:, :, None]:
        # The entry that `np.roll` moves from the end to the front is still zero.
        odds = (1 - p) * odds + p * np.roll(odds, 1, axis=1)
    return odds


def _enough(odds: list[np.ndarray], counts: np.ndarray) -> np.ndarray:
    """The probability that a step keeps at most ``counts`` layers: [times, programs].

    ``counts`` has shape [programs, stages].
    """
    return np.prod(
        [np.cumsum(each, -1)[:, n] for each, n in zip(odds, counts.T, strict=True)], axis=0
    )

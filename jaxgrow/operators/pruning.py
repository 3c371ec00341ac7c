"""Pruning: down to a smaller model by leaving units out. The sister of coalescing, which makes one unit of several.

A stage's axes are pruned each by itself: ``layers.1``, ``mlp.0``, and ``embed.0``, of which what
merges patches reads the rest.
"""

from collections.abc import Collection, Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from jaxgrow.axes.names import LAYERS, beside, is_layers, kind
from jaxgrow.growth.maps import AxisMap, Growth, Rule, Rules, select
from jaxgrow.growth.matrices import Rows
from jaxgrow.operators.targets import HEADS, KV_HEADS, WIDTHS, Sizes, of_kinds, unknown, whole

Units: TypeAlias = Mapping[
    str, ArrayLike
]  # by axis: [units], or [layers, units] where each layer has its own


def keep(sizes: Sizes, kept: Units) -> Growth:
    """From a model of ``sizes`` to one that has some of its units, as they are: who read the others reads them no more.

    ``write[i, j] = read[i, j] = [j is the i-th kept unit]``. Its `jaxgrow.growth.maps.swap` is the
    way back up, D, where what was left out is zero. ``C(D(s)) == s`` to the bit, and so
    `jaxgrow.correct` with D gives back the large model to the bit if nothing was learned. A removed
    layer is skipped: its input is its output.

    Args:
      sizes: of the large model.
      kept: the units that stay, of each axis that shrinks, in order; ``[layers, units]`` where each
        layer keeps its own, for unit i of one layer has nothing to do with unit i of the next. Only
        the residual stream ``embed`` is the same in all.

    Returns:
      One map for each axis; or, where layers keep their own units, rules with a term for each layer
      that stays. What has such an axis in no layer, as a CaiT's class layers, keeps the units that
      most layers keep. `jaxgrow.checkpoints.transform` applies such rules layer by layer;
      `jaxgrow.grow` goes over all of a leaf for each term.

    Raises:
      ValueError: units that do not exist, or not once each and in order; query heads that do not
        read, of the key heads that stay, what they read before.

    Example:
      >>> down = keep({"layers": 4, "mlp": 8}, {"layers": [0, 1, 3]})
      >>> down["layers"].write.index[:, 0].tolist()
      [0, 1, 3]

    References:
      Men et al., `ShortGPT <https://arxiv.org/abs/2403.03853>`_, 2024

      Gromov et al.,
      `The Unreasonable Ineffectiveness of the Deeper Layers <https://arxiv.org/abs/2403.17887>`_,
      ICLR 2025
    """
    sizes = whole("keep", "sizes", sizes)
    units = {axis: _checked(axis, sizes, np.asarray(found)) for axis, found in kept.items()}
    _reads_as_before(sizes, units)
    each = {axis: found for axis, found in units.items() if found.ndim == 2}
    shared = {axis: select(found, sizes[axis]) for axis, found in units.items() if axis not in each}
    if not each:
        return shared
    rules = []
    for layers in dict.fromkeys(beside(axis, LAYERS) for axis in each):
        own = {axis: found for axis, found in each.items() if beside(axis, LAYERS) == layers}
        stay = units.get(layers, np.arange(sizes[layers]))
        terms = tuple(
            {**shared, layers: _only(i, j, stay, sizes[layers])}
            | {axis: select(found[j], sizes[axis]) for axis, found in own.items()}
            for i, j in enumerate(stay)
        )
        rules += [Rule(terms, axes=(layers, axis)) for axis in own]
    common = {
        axis: select(_commonest(found, sizes[axis]), sizes[axis]) for axis, found in each.items()
    }
    return Rules((*rules, Rule(({**shared, **common},))))


def best(scores: ArrayLike, count: int, alternating: bool = False) -> np.ndarray:
    """The units with the highest scores, in order; of equal ones, the first.

    Args:
      scores: ``[.., units]``.
      count: how many.
      alternating: of layers of two kinds by turns, that each may keep its own: the units with the
        highest sum among those that are by turns even and odd, too; ``scores`` are [units]. So
        neighbours go in pairs, and of an odd number the last one.

    Returns:
      Their numbers, ``[.., count]``.

    Example:
      >>> best([0.9, 0.2, 0.1, 0.4], 3).tolist()
      [0, 1, 3]
      >>> best([0.9, 0.2, 0.1, 0.4], 2, alternating=True).tolist()
      [0, 3]
    """
    scores = np.asarray(scores)
    if not alternating:
        return np.sort(np.argsort(-scores, axis=-1, kind="stable")[..., :count], axis=-1)
    # Unit i of those that stay is i + 2 s, and s never falls. The most that it and those before it
    # are worth, by i and s:
    index = np.arange(count)[:, None] + 2 * np.arange((len(scores) - count) // 2 + 1)[None]
    worth = scores[index]
    for i in range(1, count):
        worth[i] += np.maximum.accumulate(worth[i - 1])
    shift, kept = index.shape[1] - 1, []
    for i in reversed(range(count)):
        shift = worth[i, : shift + 1].argmax()
        kept.append(index[i, shift])
    return np.array(kept[::-1])


def prune(sizes: Sizes, target: Sizes, scores: Units, alternating: Collection[str] = ()) -> Growth:
    """`keep`, of the units with the highest scores; of equal ones, the first.

    Where queries share keys, a key head goes with its queries: of each key head the best queries
    stay, as many as there will be to each, and the key heads stay whose queries are worth most in
    sum. ``kv_heads`` alone takes whole groups, ``heads`` alone as many from each.

    Args:
      sizes: of the large model.
      target: the new sizes of the axes that shrink: ``layers``, ``embed``, ``heads``, ``kv_heads``,
        ``mlp``.
      scores: what units are worth (`jaxgrow.models.importance`): of each axis ``[units]``, or
        ``[layers, units]``; key heads have no scores of their own.
      alternating: the model's (`jaxgrow.models.Config.traits`): the axes of layers that are of two
        kinds by turns, which keep theirs (`best`).

    Returns:
      As `keep`.

    Raises:
      ValueError: an axis that is not pruned, a target above its size, scores that are missing, not
        finite, or of another shape, or query heads that do not divide among the key heads.

    Example:
      >>> down = prune({"layers": 4, "mlp": 8}, {"layers": 3}, {"layers": [0.9, 0.2, 0.1, 0.4]})
      >>> down["layers"].write.index[:, 0].tolist()
      [0, 1, 3]

    References:
      Muralidharan et al., `Compact Language Models via Pruning and Knowledge Distillation
      <https://arxiv.org/abs/2407.14679>`_, NeurIPS 2024
    """
    sizes, target = whole("prune", "sizes", sizes), whole("prune", "target", target)
    axes = of_kinds((LAYERS, *WIDTHS), sizes)
    wrong = unknown("prune() takes", (LAYERS, *WIDTHS), sizes, target)
    wrong += [
        f"axis {a!r}: prune cannot take {sizes[a]} to {n}; it leaves 1 .. {sizes[a]}"
        for a, n in target.items()
        if a in axes and not 1 <= n <= sizes[a]
    ]
    if wrong:
        raise ValueError("\n  ".join(wrong))
    kept = {
        axis: best(_scores(axis, sizes, scores), target[axis], axis in alternating)
        for axis in axes
        if axis in target and kind(axis) not in (HEADS, KV_HEADS)
    }
    for axis in dict.fromkeys(
        beside(a, HEADS) for a in axes if a in target and kind(a) in (HEADS, KV_HEADS)
    ):
        kept |= _heads(axis, sizes, target, _scores(axis, sizes, scores))
    return keep(
        sizes, {axis: units for axis, units in kept.items() if units.shape[-1] < sizes[axis]}
    )


def _heads(axis: str, sizes: Sizes, target: Sizes, scores: np.ndarray) -> dict[str, np.ndarray]:
    key_axis = beside(axis, KV_HEADS)
    old, keys = sizes[axis], sizes.get(key_axis, sizes[axis])
    group = old // keys
    new_keys = target.get(key_axis, keys if key_axis in sizes else target.get(axis, keys))
    new = target.get(axis, new_keys * group)
    share, rest = divmod(new, new_keys)
    if rest or not 1 <= share <= group:
        raise ValueError(
            f"axis {axis!r}: {new} query heads on {new_keys} key heads are not 1 .. {group} to each, of the {group} that there "
            f"are now; {axis}={new_keys * group} keeps whole groups"
        )
    grouped = scores.reshape(*scores.shape[:-1], keys, group)
    within = best(grouped, share)
    found = best(np.take_along_axis(grouped, within, -1).sum(-1), new_keys)
    queries = found[..., None] * group + np.take_along_axis(within, found[..., None], -2)
    heads = queries.reshape(*found.shape[:-1], new)
    return {axis: heads, key_axis: found} if key_axis in sizes else {axis: heads}


def _scores(axis: str, sizes: Sizes, scores: Units) -> np.ndarray:
    if axis not in scores:
        raise ValueError(
            f"axis {axis!r}: there are no scores, only of {', '.join(scores) or 'nothing'}"
        )
    found = np.asarray(scores[axis], np.float64)
    shapes = _shapes(axis, sizes, sizes[axis])
    if found.shape not in shapes or not np.isfinite(found).all():
        said = (
            "are not finite"
            if found.shape in shapes
            else f"have shape {found.shape}, not {' or '.join(map(str, shapes))}"
        )
        raise ValueError(f"axis {axis!r}: its scores {said}")
    return found


def _shapes(axis: str, sizes: Sizes, units: int) -> tuple[tuple[int, ...], ...]:
    """What one number for each unit may have."""
    layers = sizes.get(beside(axis, LAYERS))
    return ((units,),) if _alone(axis) or layers is None else ((units,), (layers, units))


def _alone(axis: str) -> bool:
    """Whether its units are not of each layer."""
    return is_layers(axis) or kind(axis) == "embed"


def _checked(axis: str, sizes: Sizes, units: np.ndarray) -> np.ndarray:
    if axis not in sizes:
        raise ValueError(f"axis {axis!r}: the model has no such axis, only {', '.join(sizes)}")
    if (
        units.ndim == 0
        or units.size == 0
        or units.shape not in _shapes(axis, sizes, units.shape[-1])
    ):
        layers = sizes.get(beside(axis, LAYERS))
        whose = "" if _alone(axis) or layers is None else f", or of each of {layers} layers"
        raise ValueError(
            f"axis {axis!r}: the units that stay are a list{whose}, but have shape {units.shape}"
        )
    if units.min() < 0 or units.max() >= sizes[axis] or (np.diff(units) <= 0).any():
        raise ValueError(
            f"axis {axis!r}: the units that stay are some of 0 .. {sizes[axis] - 1}, in order, not {units.tolist()}"
        )
    return units


def _reads_as_before(sizes: Sizes, units: Mapping[str, np.ndarray]) -> None:
    """
    Raises:
      ValueError: a query head would read another key head than before.
    """
    for key_axis in (axis for axis in sizes if kind(axis) == KV_HEADS):
        axis = beside(key_axis, HEADS)
        heads, keys = (units.get(a, np.arange(sizes[a])) for a in (axis, key_axis))
        new, new_keys = heads.shape[-1], keys.shape[-1]
        read = heads * sizes[key_axis] // sizes[axis]
        if new % new_keys or (read != np.repeat(keys, new // new_keys, axis=-1)).any():
            raise ValueError(
                f"axis {axis!r}: the {new} query heads that stay would not read, of {new_keys} key heads, those that they read "
                "before: as many queries stay with each key head that stays"
            )


def _only(new: int, old: int, layers: np.ndarray, size: int) -> AxisMap:
    """Layer ``new``, a copy of ``old``; all others are zero."""
    m = Rows(
        np.full((len(layers), 1), old, np.int32),
        (np.arange(len(layers)) == new)[:, None].astype(float),
        size,
    )
    return AxisMap(m, m)


def _commonest(units: np.ndarray, size: int) -> np.ndarray:
    """Of the units that each layer keeps, as many that most layers keep."""
    return best(np.bincount(units.reshape(-1), minlength=size), units.shape[-1])

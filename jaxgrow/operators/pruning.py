"""Pruning: down to a smaller model by leaving units out. The sister of coalescing, which makes one unit of several."""

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from jaxgrow.axes import LAYERS
from jaxgrow.maps import AxisMap, Growth, Rule, Rules, select
from jaxgrow.matrices import Rows
from jaxgrow.operators.targets import HEADS, KV_HEADS, Sizes, width

Units: TypeAlias = Mapping[str, ArrayLike]  # by axis: [units], or [layers, units] where each layer has its own


def keep(sizes: Sizes, kept: Units) -> Growth:
    """From a model of ``sizes`` to one that has some of its units, as they are: who read the others reads them no more.

    ``write[i, j] = read[i, j] = [j is the i-th kept unit]``. Its `jaxgrow.maps.swap` is the way back up, D, where what was
    left out is zero. ``C(D(s)) == s`` to the bit, and so `jaxgrow.correct` with D gives back the large model to the bit if
    nothing was learned. A removed layer is skipped: its input is its output.

    Args:
      sizes: of the large model.
      kept: the units that stay, of each axis that shrinks, in order; ``[layers, units]`` where each layer keeps its own, for
        unit i of one layer has nothing to do with unit i of the next. Only the residual stream ``embed`` is the same in all.

    Returns:
      One map for each axis; or, where layers keep their own units, rules with a term for each layer that stays. What has such
      an axis in no layer, as a CaiT's class layers, keeps the units that most layers keep. `jaxgrow.interop.transform` applies
      such rules layer by layer; `jaxgrow.grow` goes over all of a leaf for each term.

    Raises:
      ValueError: units that do not exist, or not once each and in order; query heads that do not read, of the key heads that
        stay, what they read before.

    Example:
      >>> down = keep({"layers": 4, "mlp": 8}, {"layers": [0, 1, 3]})
      >>> down["layers"].write.index[:, 0].tolist()
      [0, 1, 3]

    References:
      Men et al., `ShortGPT <https://arxiv.org/abs/2403.03853>`_, 2024

      Gromov et al., `The Unreasonable Ineffectiveness of the Deeper Layers <https://arxiv.org/abs/2403.17887>`_, ICLR 2025
    """
    units = {axis: _checked(axis, sizes, np.asarray(found)) for axis, found in kept.items()}
    _reads_as_before(sizes, units)
    each = {axis: found for axis, found in units.items() if found.ndim == 2}
    shared = {axis: select(found, sizes[axis]) for axis, found in units.items() if axis not in each}
    if not each:
        return shared
    layers = units.get(LAYERS, np.arange(sizes[LAYERS]))
    terms = tuple(
        {**shared, LAYERS: _only(i, j, layers, sizes[LAYERS])}
        | {axis: select(found[j], sizes[axis]) for axis, found in each.items()}
        for i, j in enumerate(layers)
    )
    common = {axis: select(_commonest(found, sizes[axis]), sizes[axis]) for axis, found in each.items()}
    return Rules((*(Rule(terms, axes=(LAYERS, axis)) for axis in each), Rule(({**shared, **common},))))


def best(scores: ArrayLike, count: int) -> np.ndarray:
    """The units with the highest scores, in order; of equal ones, the first.

    Args:
      scores: ``[.., units]``.
      count: how many.

    Returns:
      Their numbers, ``[.., count]``.

    Example:
      >>> best([0.9, 0.2, 0.1, 0.4], 3).tolist()
      [0, 1, 3]
    """
    return np.sort(np.argsort(-np.asarray(scores), axis=-1, kind="stable")[..., :count], axis=-1)


def prune(sizes: Sizes, target: Sizes, scores: Units) -> Growth:
    """`keep`, of the units with the highest scores; of equal ones, the first.

    Where queries share keys, a key head goes with its queries: of each key head the best queries stay, as many as there will be
    to each, and the key heads stay whose queries are worth most in sum. ``kv_heads`` alone takes whole groups, ``heads`` alone
    as many from each.

    Args:
      sizes: of the large model.
      target: the new sizes of the axes that shrink: ``layers``, ``embed``, ``heads``, ``kv_heads``, ``mlp``.
      scores: what units are worth (`jaxgrow.importance`): of each axis ``[units]``, or ``[layers, units]``; key heads have no
        scores of their own.

    Returns:
      As `keep`.

    Raises:
      ValueError: an axis that is not pruned, a target above its size, scores that are missing, not finite, or of another shape,
        or query heads that do not divide among the key heads.

    Example:
      >>> down = prune({"layers": 4, "mlp": 8}, {"layers": 3}, {"layers": [0.9, 0.2, 0.1, 0.4]})
      >>> down["layers"].write.index[:, 0].tolist()
      [0, 1, 3]

    References:
      Muralidharan et al., `Compact Language Models via Pruning and Knowledge Distillation
      <https://arxiv.org/abs/2407.14679>`_, NeurIPS 2024
    """
    axes = (LAYERS, *width(sizes))
    wrong = [f"axis {a!r}: prune() takes {', '.join(axes)}" for a in target if a not in axes]
    wrong += [
        f"axis {a!r}: prune() cannot take {sizes[a]} to {n}; it leaves 1 .. {sizes[a]}"
        for a, n in target.items()
        if a in axes and not 1 <= n <= sizes[a]
    ]
    if wrong:
        raise ValueError("\n  ".join(wrong))
    kept = {
        axis: best(_scores(axis, sizes, scores), target[axis]) for axis in (LAYERS, "embed", "mlp") if axis in target
    }
    if {HEADS, KV_HEADS} & target.keys():
        kept |= _heads(sizes, target, _scores(HEADS, sizes, scores))
    return keep(sizes, {axis: units for axis, units in kept.items() if units.shape[-1] < sizes[axis]})


def _heads(sizes: Sizes, target: Sizes, scores: np.ndarray) -> dict[str, np.ndarray]:
    old, keys = sizes[HEADS], sizes.get(KV_HEADS, sizes[HEADS])
    group = old // keys
    new_keys = target.get(KV_HEADS, keys if KV_HEADS in sizes else target.get(HEADS, keys))
    new = target.get(HEADS, new_keys * group)
    share, rest = divmod(new, new_keys)
    if rest or not 1 <= share <= group:
        raise ValueError(
            f"axis 'heads': {new} query heads on {new_keys} key heads are not 1 .. {group} to each, of the {group} that there "
            f"are now; heads={new_keys * group} keeps whole groups"
        )
    grouped = scores.reshape(*scores.shape[:-1], keys, group)
    within = best(grouped, share)
    found = best(np.take_along_axis(grouped, within, -1).sum(-1), new_keys)
    queries = found[..., None] * group + np.take_along_axis(within, found[..., None], -2)
    heads = queries.reshape(*found.shape[:-1], new)
    return {HEADS: heads, KV_HEADS: found} if KV_HEADS in sizes else {HEADS: heads}


def _scores(axis: str, sizes: Sizes, scores: Units) -> np.ndarray:
    if axis not in scores:
        raise ValueError(f"axis {axis!r}: there are no scores, only of {', '.join(scores) or 'nothing'}")
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
    return ((units,),) if axis in (LAYERS, "embed") else ((units,), (sizes[LAYERS], units))


def _checked(axis: str, sizes: Sizes, units: np.ndarray) -> np.ndarray:
    if axis not in sizes:
        raise ValueError(f"axis {axis!r}: the model has no such axis, only {', '.join(sizes)}")
    if units.ndim == 0 or units.size == 0 or units.shape not in _shapes(axis, sizes, units.shape[-1]):
        whose = "" if axis in (LAYERS, "embed") else f", or of each of {sizes[LAYERS]} layers"
        raise ValueError(f"axis {axis!r}: the units that stay are a list{whose}, but have shape {units.shape}")
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
    if KV_HEADS not in sizes or not {HEADS, KV_HEADS} & units.keys():
        return
    heads, keys = (units.get(axis, np.arange(sizes[axis])) for axis in (HEADS, KV_HEADS))
    new, new_keys = heads.shape[-1], keys.shape[-1]
    read = heads * sizes[KV_HEADS] // sizes[HEADS]
    if new % new_keys or (read != np.repeat(keys, new // new_keys, axis=-1)).any():
        raise ValueError(
            f"axis 'heads': the {new} query heads that stay would not read, of {new_keys} key heads, those that they read "
            "before: as many queries stay with each key head that stays"
        )


def _only(new: int, old: int, layers: np.ndarray, size: int) -> AxisMap:
    """Layer ``new``, a copy of ``old``; all others are zero."""
    m = Rows(np.full((len(layers), 1), old, np.int32), (np.arange(len(layers)) == new)[:, None].astype(float), size)
    return AxisMap(m, m)


def _commonest(units: np.ndarray, size: int) -> np.ndarray:
    """Of the units that each layer keeps, as many that most layers keep."""
    return best(np.bincount(units.reshape(-1), minlength=size), units.shape[-1])

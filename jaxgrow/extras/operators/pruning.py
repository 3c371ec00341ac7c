"""Pruning: make a model smaller by removing units. Coalescing, in contrast, merges several units.

`prune` chooses units by their scores (`jaxgrow.extras.importance`). The axes of each stage are pruned
separately, for example ``layers.1``, ``mlp.0`` or ``embed.0``. If ``embed.0`` is pruned, the layer
that merges patches for the next stage reads only the kept units.
"""

from collections.abc import Collection, Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from jaxgrow.axes.names import LAYERS, axis_kind, is_layers, sibling_axis
from jaxgrow.axes.size_error import SizeError
from jaxgrow.growth.maps import AxisMap, Growth, Maps, Rule, Rules, select
from jaxgrow.growth.matrices import SparseMap
from jaxgrow.operators.targets import (
    HEADS,
    KV_HEADS,
    WIDTHS,
    Sizes,
    checked_sizes,
    of_kinds,
    unknown_axes,
)

__all__ = ["best_units", "keep_units", "prune"]

# For each axis, an array [units], or [layers, units] if the layers differ.
Units: TypeAlias = Mapping[str, ArrayLike]


def keep_units(sizes: Sizes, kept: Units) -> Growth:
    """Keep some units of a model unchanged, and remove the others and the weights that read them.

    ``write[i, j] = read[i, j] = [j is the i-th kept unit]``. Let C be this growth and D its
    `jaxgrow.growth.maps.swap`, which restores the size and sets the removed units to zero. Then
    ``C(D(s)) == s`` bitwise. If the small model did not change in training, `jaxgrow.correct` with
    D therefore restores the large model bitwise. A removed layer acts as the identity.

    Args:
      sizes: the axis sizes of the large model.
      kept: for each axis that shrinks, the indices of the kept units in ascending order, with shape
        ``[units]``, or ``[layers, units]`` if each layer keeps different units. Unit i of one layer
        is unrelated to unit i of the next layer. Only the units of the residual stream ``embed``
        are the same in all layers.

    Returns:
      One map for each axis, or, if layers keep different units, rules with one term for each kept
      layer. With such rules, parameters outside these layers that have the same axis, such as the
      class layers of CaiT, keep the units that most layers keep. `jaxgrow.checkpoints.transform`
      applies such rules layer by layer; `jaxgrow.grow` processes the complete leaf for each term.

    Raises:
      ValueError: units that do not exist, repeated units, units that are not in ascending order, or
        query heads that would not read the same kept key/value head as before.

    Example:
      >>> down = keep_units({"layers": 4, "mlp": 8}, {"layers": [0, 1, 3]})
      >>> down["layers"].write.index[:, 0].tolist()
      [0, 1, 3]

    References:
      Men et al., `ShortGPT <https://arxiv.org/abs/2403.03853>`_, 2024

      Gromov et al.,
      `The Unreasonable Ineffectiveness of the Deeper Layers <https://arxiv.org/abs/2403.17887>`_,
      ICLR 2025
    """
    sizes = checked_sizes("keep_units", "sizes", sizes)
    units = {axis: _checked_units(axis, sizes, np.asarray(found)) for axis, found in kept.items()}
    _reads_as_before(sizes, units)
    each = {axis: found for axis, found in units.items() if found.ndim == 2}
    shared = {axis: select(found, sizes[axis]) for axis, found in units.items() if axis not in each}
    if not each:
        return shared
    rules: list[Rule] = []
    for layers in dict.fromkeys(sibling_axis(axis, LAYERS) for axis in each):
        own = {axis: found for axis, found in each.items() if sibling_axis(axis, LAYERS) == layers}
        stay = units.get(layers, np.arange(sizes[layers]))
        terms: list[Maps] = []
        for i, j in enumerate(stay):
            of_layer = {axis: select(found[j], sizes[axis]) for axis, found in own.items()}
            terms.append(
                {**shared, layers: single_layer_map(i, j, stay, sizes[layers]), **of_layer}
            )
        rules += [Rule(tuple(terms), axes=(layers, axis)) for axis in own]
    # Outside of the layers, the units stay that most layers keep.
    common = {
        axis: select(
            best_units(np.bincount(found.reshape(-1), minlength=sizes[axis]), found.shape[-1]),
            sizes[axis],
        )
        for axis, found in each.items()
    }
    return Rules((*rules, Rule(({**shared, **common},))))


def best_units(scores: ArrayLike, count: int, alternating: bool = False) -> np.ndarray:
    """The indices of the units with the highest scores, in ascending order.

    Among units with equal scores, those with lower indices are kept.

    Args:
      scores: the importance of each unit, ``[..., units]``.
      count: number of units to keep.
      alternating: whether the units are layers of two alternating kinds. The kept layers then also
        alternate between even and odd indices, so that each keeps its kind. Among all such choices,
        the function returns the one with the highest sum of scores. It removes layers in pairs of
        neighbours, and also the last layer if the number of removed layers is odd. ``scores`` must
        have shape [units].

    Returns:
      Indices, ``[..., count]``.

    Example:
      >>> best_units([0.9, 0.2, 0.1, 0.4], 3).tolist()
      [0, 1, 3]
      >>> best_units([0.9, 0.2, 0.1, 0.4], 2, alternating=True).tolist()
      [0, 3]
    """
    scores = np.asarray(scores)
    if not alternating:
        return np.sort(np.argsort(-scores, axis=-1, kind="stable")[..., :count], axis=-1)
    # The i-th kept unit has the index i + 2 s, where s never decreases. ``worth[i, s]`` becomes the
    # highest sum of the scores of this unit and the kept units before it.
    index = np.arange(count)[:, None] + 2 * np.arange((len(scores) - count) // 2 + 1)[None]
    worth = scores[index]
    for i in range(1, count):
        worth[i] += np.maximum.accumulate(worth[i - 1])
    shift = index.shape[1] - 1
    kept: list[int] = []
    for i in reversed(range(count)):
        shift = worth[i, : shift + 1].argmax()
        kept.append(index[i, shift])
    return np.array(kept[::-1])


def shapes_of_units(axis: str, sizes: Sizes, units: int) -> tuple[tuple[int, ...], ...]:
    """The shapes that an array with one number for each unit may have."""
    layers = sizes.get(sibling_axis(axis, LAYERS))
    return ((units,),) if _same_in_layers(axis) or layers is None else ((units,), (layers, units))


def _same_in_layers(axis: str) -> bool:
    """Whether the units of an axis are the same in all layers."""
    return is_layers(axis) or axis_kind(axis) == "embed"


def _checked_units(axis: str, sizes: Sizes, units: np.ndarray) -> np.ndarray:
    if axis not in sizes:
        raise ValueError(f"axis {axis!r}: the model has no such axis, only {', '.join(sizes)}")
    if (
        units.ndim == 0
        or units.size == 0
        or units.shape not in shapes_of_units(axis, sizes, units.shape[-1])
    ):
        layers = sizes.get(sibling_axis(axis, LAYERS))
        each = (
            ""
            if _same_in_layers(axis) or layers is None
            else f", or one list for each of {layers} layers"
        )
        raise ValueError(
            f"axis {axis!r}: the kept units must be a list of indices{each}, but have shape {units.shape}"
        )
    if units.min() < 0 or units.max() >= sizes[axis] or (np.diff(units) <= 0).any():
        raise ValueError(
            f"axis {axis!r}: the kept units must be some of 0 .. {sizes[axis] - 1}, in ascending order, not {units.tolist()}"
        )
    return units


def _reads_as_before(sizes: Sizes, units: Mapping[str, np.ndarray]) -> None:
    """Check that every kept query head reads the same key/value head as before.

    Raises:
      ValueError: a query head would read another key/value head.
    """
    for key_axis in (axis for axis in sizes if axis_kind(axis) == KV_HEADS):
        axis = sibling_axis(key_axis, HEADS)
        heads, keys = (units.get(a, np.arange(sizes[a])) for a in (axis, key_axis))
        new = heads.shape[-1]
        new_keys = keys.shape[-1]
        read = heads * sizes[key_axis] // sizes[axis]
        if new % new_keys or (read != np.repeat(keys, new // new_keys, axis=-1)).any():
            raise ValueError(
                f"axis {axis!r}: the {new} kept query heads would not read the same one of {new_keys} key/value heads as "
                "before. Keep the same number of query heads for each kept key/value head, and no other query heads"
            )


def single_layer_map(new: int, old: int, layers: np.ndarray, size: int) -> AxisMap:
    """The map that copies layer ``old`` to layer ``new``, and makes all other layers zero."""
    m = SparseMap(
        np.full((len(layers), 1), old, np.int32),
        (np.arange(len(layers)) == new)[:, None].astype(float),
        size,
    )
    return AxisMap(m, m)


def prune(sizes: Sizes, target: Sizes, scores: Units, alternating: Collection[str] = ()) -> Growth:
    """Keep the units with the highest scores, as a growth (`keep_units`).

    Among units with equal scores, those with lower indices are kept. With GQA, a key/value head is
    removed together with its query heads. Within each key/value head, the query heads with the
    highest scores are kept; the target determines their number. The kept key/value heads are those
    whose remaining query heads have the highest sum of scores. If ``target`` contains only
    ``kv_heads``, complete groups are removed. If it contains only ``heads``, each group loses the
    same number of query heads.

    Args:
      sizes: the axis sizes of the large model.
      target: the new sizes of the axes that shrink: ``layers``, ``embed``, ``heads``, ``kv_heads``,
        ``mlp``, ``experts``.
      scores: the importance of the units of each axis (`jaxgrow.extras.importance`), ``[units]`` or
        ``[layers, units]``. Key/value heads do not need scores.
      alternating: layer axes with two alternating kinds of layers, which must continue to alternate
        (`best_units`). A model lists them in `jaxgrow.models.Config.traits`.

    Returns:
      The growth, as in `keep_units`.

    Raises:
      ValueError: an axis that cannot be pruned; a target above the size of its axis; scores that
        are missing, not finite, or of a wrong shape; query heads that cannot be divided among the
        key/value heads.

    Example:
      >>> down = prune({"layers": 4, "mlp": 8}, {"layers": 3}, {"layers": [0.9, 0.2, 0.1, 0.4]})
      >>> down["layers"].write.index[:, 0].tolist()
      [0, 1, 3]

    References:
      Muralidharan et al., `Compact Language Models via Pruning and Knowledge Distillation
      <https://arxiv.org/abs/2407.14679>`_, NeurIPS 2024
    """
    sizes = checked_sizes("prune", "sizes", sizes)
    target = checked_sizes("prune", "target", target)
    kinds = (LAYERS, *WIDTHS, *(axis for axis in ("experts",) if axis in sizes))
    axes = of_kinds(kinds, sizes)
    wrong = unknown_axes("prune() takes", kinds, sizes, target)
    wrong += [
        f"axis {a!r}: prune cannot change the size from {sizes[a]} to {n}. The new size must be in 1 .. {sizes[a]}"
        for a, n in target.items()
        if a in axes and not 1 <= n <= sizes[a]
    ]
    if wrong:
        raise ValueError("\n  ".join(wrong))
    kept = {
        axis: best_units(_unit_scores(axis, sizes, scores), target[axis], axis in alternating)
        for axis in axes
        if axis in target and axis_kind(axis) not in (HEADS, KV_HEADS)
    }
    for axis in dict.fromkeys(
        sibling_axis(a, HEADS) for a in axes if a in target and axis_kind(a) in (HEADS, KV_HEADS)
    ):
        kept |= _best_heads(axis, sizes, target, _unit_scores(axis, sizes, scores))
    return keep_units(
        sizes, {axis: units for axis, units in kept.items() if units.shape[-1] < sizes[axis]}
    )


def _best_heads(
    axis: str, sizes: Sizes, target: Sizes, scores: np.ndarray
) -> dict[str, np.ndarray]:
    key_axis = sibling_axis(axis, KV_HEADS)
    old = sizes[axis]
    keys = sizes.get(key_axis, sizes[axis])
    group = old // keys
    new_keys = target.get(key_axis, keys if key_axis in sizes else target.get(axis, keys))
    new = target.get(axis, new_keys * group)
    share, rest = divmod(new, new_keys)
    if rest or not 1 <= share <= group:
        raise SizeError(
            f"axis {axis!r}: {new} query heads cannot be divided among {new_keys} key/value heads "
            f"with the same number, from 1 to {group}, for each. {{}} keeps complete groups",
            (axis, new_keys * group),
        )
    grouped = scores.reshape(*scores.shape[:-1], keys, group)
    within = best_units(grouped, share)
    found = best_units(np.take_along_axis(grouped, within, -1).sum(-1), new_keys)
    queries = found[..., None] * group + np.take_along_axis(within, found[..., None], -2)
    heads = queries.reshape(*found.shape[:-1], new)
    return {axis: heads, key_axis: found} if key_axis in sizes else {axis: heads}


def _unit_scores(axis: str, sizes: Sizes, scores: Units) -> np.ndarray:
    if axis not in scores:
        raise ValueError(
            f"axis {axis!r}: its scores are missing. There are scores of {', '.join(scores) or 'no axis'}"
        )
    found = np.asarray(scores[axis], np.float64)
    shapes = shapes_of_units(axis, sizes, sizes[axis])
    if found.shape not in shapes or not np.isfinite(found).all():
        problem = (
            "are not finite"
            if found.shape in shapes
            else f"have shape {found.shape}, not {' or '.join(map(str, shapes))}"
        )
        raise ValueError(f"axis {axis!r}: its scores {problem}")
    return found

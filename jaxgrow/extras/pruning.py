"""Which units does pruning keep? Those with the highest scores (`jaxgrow.extras.importance`)."""

from collections.abc import Collection

import numpy as np

from jaxgrow.axes.names import LAYERS, axis_kind, sibling_axis
from jaxgrow.axes.size_error import SizeError
from jaxgrow.growth.maps import Growth
from jaxgrow.operators import LATER
from jaxgrow.operators.pruning import Units, best_units, keep_units, shapes_of_units
from jaxgrow.operators.targets import (
    HEADS,
    KV_HEADS,
    WIDTHS,
    Sizes,
    checked_sizes,
    of_kinds,
    unknown_axes,
)


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


LATER.add("prune", prune)

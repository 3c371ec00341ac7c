"""What every operator of growth is told: the sizes of a model's axes, and the new sizes of those that grow.

Where queries share keys, a model has an axis ``kv_heads``, and query head i reads key head ``i // (heads / kv_heads)``. Then
new query heads must copy old ones that read what their new key head copies (`sources`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from jaxgrow.axes import is_layers, kind

Sizes: TypeAlias = Mapping[str, int]
Choose: TypeAlias = Callable[[int, int], np.ndarray]

HEADS, KV_HEADS = "heads", "kv_heads"


def width(sizes: Sizes) -> tuple[str, ...]:
    """The axes that operators widen, of those that a model has, in every stage.

    Example:
      >>> width({"layers": 2, "mlp": 8, "embed": 4, "heads": 2})
      ('embed', 'heads', 'mlp')
    """
    return tuple(name for of in ("embed", HEADS, KV_HEADS, "mlp") for name in sizes if kind(name) == of)


def depth(sizes: Sizes) -> tuple[str, ...]:
    """The axes of layers that a model has, one for each stage."""
    return tuple(filter(is_layers, sizes))


def in_turn(old: int, new: int) -> np.ndarray:
    """``[0, 1, .., old - 1, 0, 1, ..]``."""
    return np.arange(new) % old


def grown(operator: str, axes: Sequence[str], sizes: Sizes, target: Sizes) -> dict[str, tuple[int, int]]:
    """``{axis: (old, new)}`` of the axes of ``target``, in a fixed order.

    Raises:
      ValueError: an axis that is none of ``axes`` or not the model's, or a target smaller than the model; all in one message.

    Example:
      >>> grown("stack", ("layers",), {"layers": 2}, {"layers": 4})
      {'layers': (2, 4)}
    """
    wrong = [f"axis {a!r}: {operator} grows {', '.join(axes)}" for a in target if a not in axes]
    wrong += [f"axis {a!r}: the model has no such axis, only {', '.join(sizes)}" for a in target if a not in sizes]
    wrong += [
        f"axis {a!r}: {operator} cannot take {sizes[a]} to {new}; coalesce() and prune() make models smaller"
        for a, new in target.items()
        if a in sizes and new < sizes[a]
    ]
    if wrong:
        raise ValueError("\n  ".join(wrong))
    return {a: (sizes[a], target[a]) for a in sorted(target)}


def multiples(operator: str, axes: Sequence[str], sizes: Sizes, target: Sizes) -> dict[str, tuple[int, int]]:
    """`grown`, where every new size must be a multiple of the old one.

    Raises:
      ValueError: as `grown`, or a new size that is no multiple.
    """
    found = grown(operator, axes, sizes, target)
    wrong = [
        f"axis {a!r}: {operator} needs a multiple of {old}, not {new}: {a}={-(-new // old) * old}, say"
        for a, (old, new) in found.items()
        if new % old
    ]
    if wrong:
        raise ValueError("\n  ".join(wrong))
    return found


def sources(
    operator: str, sizes: Sizes, found: Mapping[str, tuple[int, int]], choose: Choose = in_turn
) -> dict[str, np.ndarray]:
    """``{axis: index}``: the old unit that each new unit copies, for the axes of ``found`` (`grown`).

    ``choose(old, new)`` says it of one axis; it must begin with all old units. Query heads that share keys it chooses for each
    new key head, among those of the old one. If fewer queries share a key head than before, each key head is repeated, and its
    query heads are divided among its copies, whatever ``choose`` would say.

    A target may name ``heads`` or ``kv_heads`` alone, the other then stays. Copying keeps the function of attention in every
    case. Gradients of keys and values grow by the dual where ``heads / kv_heads`` or ``kv_heads`` stays.

    Args:
      operator: its name, for errors.
      sizes: the size of every axis of the model.
      found: old and new sizes of the axes that grow, as `grown` gives them.
      choose: the old unit of each new one of an axis.

    Returns:
      The old unit that each new one copies, by axis.

    Raises:
      ValueError: query heads that do not divide among the key heads, or have no place any more.

    Example:
      >>> sources("mine", {"heads": 4, "kv_heads": 2}, {"heads": (4, 8), "kv_heads": (2, 4)})["heads"].tolist()
      [0, 1, 2, 3, 0, 1, 2, 3]
    """
    grouped = {HEADS, KV_HEADS} & found.keys() if KV_HEADS in sizes else set()
    out = {axis: choose(*found[axis]) for axis in found if axis not in grouped}
    if grouped:
        (old, new), (old_kv, new_kv) = (found.get(axis, (sizes[axis],) * 2) for axis in (HEADS, KV_HEADS))
        heads, kv_heads = _grouped(operator, (old, new), (old_kv, new_kv), choose)
        out |= {axis: index for axis, index in ((HEADS, heads), (KV_HEADS, kv_heads)) if axis in found}
    return {axis: out[axis] for axis in found}


def _grouped(
    operator: str, heads: tuple[int, int], kv_heads: tuple[int, int], choose: Choose
) -> tuple[np.ndarray, np.ndarray]:
    (old, new), (old_kv, new_kv) = heads, kv_heads
    group = old // old_kv
    keep = f"kv_heads={new // group} keeps {group} queries to each"
    ratio = keep if new % group == 0 else f"{old_kv} are there now"
    if new % new_kv:
        raise ValueError(f"axis 'heads': {operator} cannot divide {new} query heads among {new_kv} key heads; {ratio}")
    share = new // new_kv
    if share >= group:
        kv = choose(old_kv, new_kv)
        return np.concatenate([group * head + choose(group, share) for head in kv]), kv
    kv = np.arange(new_kv) * old_kv // new_kv
    copy = np.arange(new_kv) - np.searchsorted(kv, kv)  # its number among those of its key head
    places = (copy[:, None] * share + np.arange(share)) % group
    query = (group * kv[:, None] + places).reshape(-1)
    if lost := sorted(set(range(old)) - set(query.tolist())):
        raise ValueError(
            f"axis 'kv_heads': {operator} to {new} query heads on {new_kv} key heads leaves no place for the query heads "
            f"{lost}; {ratio}"
        )
    return query, kv


def first(index: np.ndarray) -> np.ndarray:
    """Which new units are the first copy of an old one, bool [new]: those that were there before.

    Example:
      >>> first(np.array([0, 1, 0, 2])).tolist()
      [True, True, False, True]
    """
    mask = np.zeros(len(index), bool)
    mask[np.unique(index, return_index=True)[1]] = True
    return mask

"""Coalesce a model, by merging each group of units into one unit, and de-coalesce it again.

The source is Zou et al., ICLR 2024.
"""

import itertools
import re
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from jaxgrow.axes.names import LAYERS, axis_kind, is_layers, sibling_axis
from jaxgrow.axes.size_error import SizeError
from jaxgrow.growth.maps import AxisMap, CopyMap, blocks, select, swap
from jaxgrow.operators.targets import (
    HEADS,
    KV_HEADS,
    WIDTHS,
    Sizes,
    checked_sizes,
    layer_axes,
    of_kinds,
    unknown_axes,
    width_axes,
)

__all__ = ["Groups", "adjacent", "alike", "coalesce", "decoalesce", "far", "group_size"]

# Either a partition, or a name. "far" and "adjacent" form pairs; "far:3" forms groups of three.
# Layers also accept "alike".
Groups: TypeAlias = Sequence[Sequence[int]] | str


def far(old: int, new: int) -> tuple[tuple[int, ...], ...]:
    """Group units that are ``new`` positions apart, as the published code does for pairs.

    Args:
      old: number of units.
      new: number of groups.

    Returns:
      The units of each group.

    Raises:
      ValueError: ``old`` is not a multiple of ``new``.

    Example:
      >>> far(4, 2)
      ((0, 2), (1, 3))
    """
    _divides("far", old, new)
    return tuple(tuple(range(i, old, new)) for i in range(new))


def adjacent(old: int, new: int) -> tuple[tuple[int, ...], ...]:
    """Group neighbouring units, as the paper does for pairs of layers.

    Args:
      old: number of units.
      new: number of groups.

    Returns:
      The units of each group.

    Raises:
      ValueError: ``old`` is not a multiple of ``new``.

    Example:
      >>> adjacent(4, 2)
      ((0, 1), (2, 3))
    """
    _divides("adjacent", old, new)
    return tuple(tuple(range(i * (old // new), (i + 1) * (old // new))) for i in range(new))


def alike(kinds: str) -> tuple[tuple[int, ...], ...]:
    """Pair each layer with the next layer of the same kind.

    If a kind has an odd number of layers, its last layer forms a group of one layer. Groups are in
    the order of their first layers.

    Args:
      kinds: one letter for each layer, such as `jaxgrow.models.Config.layer_kinds`.

    Returns:
      The layers of each group.

    Example:
      >>> alike("sfsfsf")
      ((0, 2), (1, 3), (4,), (5,))
    """
    groups: list[tuple[int, ...]] = []
    for one in set(kinds):
        same = [i for i, kind in enumerate(kinds) if kind == one]
        groups += [tuple(same[i : i + 2]) for i in range(0, len(same), 2)]
    return tuple(sorted(groups))


def decoalesce(
    sizes: Sizes,
    *,
    heads: Groups | None = None,
    kv_heads: Groups | None = None,
    embed: Groups | None = None,
    mlp: Groups | None = None,
    layers: Groups | None = None,
    kinds: str | None = None,
) -> dict[str, CopyMap]:
    """Split a coalesced model to ``sizes``: copy outputs and divide inputs by the group size.

    For a kernel (column convention), ``W = T_out W' F_in`` with ``T[j, i] = [j in group i]`` and
    ``F = T.T / group size``. Layers are copied (Zou et al., ICLR 2024, section 3.2). The axis names
    of the model replace the paper's table of parameters.

    De-coalescing a model and then coalescing it returns exactly the same model. Coalescing a model
    and then de-coalescing it does not. De-coalescing preserves the function if ``layers`` is not
    given and all groups of ``embed`` have the same size (with an untied head, or with the tied head
    of `jaxgrow.models.gpt2`). Copying layers never preserves it. In a model with stages, the axes
    of every stage are grouped in this way, and follow the heads of their stage.

    Args:
      sizes: the axis sizes of the *large* model.
      heads: groups of heads that become one head in the small model. The value can be a partition,
        such as ``((0, 2), (1, 3))``, or a name. ``"far"`` and ``"adjacent"`` form pairs, or groups
        of three or five if the number of heads is odd; ``"far:4"`` forms groups of four. With GQA,
        a name applies to the key/value heads (unless there is only one), and the query heads of
        merged key/value heads are merged by position. A partition of the query heads also merges
        the key/value heads that the merged query heads read. (This is our extension: the paper does
        not cover GQA.)
      kv_heads: groups of key/value heads, if they differ from the groups that follow from
        ``heads``. Without ``heads``, the query heads are merged by position.
      embed: groups of the units of the residual stream. By default, the stream is divided into one
        block per head, and blocks are merged like the heads.
      mlp: groups of MLP units. By default, the units are divided into one block per head, and
        blocks are merged like the heads, as in the published mapper. If the number of units is not
        a multiple of the number of heads, they form ``"far"`` groups of the same size as the groups
        of heads.
      layers: groups of layers. ``"alike"`` pairs each layer with the next layer of its kind
        (`alike`).
      kinds: one letter for each layer of the large model, for ``"alike"``
        (`jaxgrow.models.Config.layer_kinds`). None: all layers are of one kind.

    Returns:
      One map from the small to the large model for each axis that changes.

    Raises:
      ValueError: an axis that the model does not have, groups that are not a partition of the axis,
        or groups of query heads that would not share the merged key/value heads equally.

    Example:
      >>> up = decoalesce({"layers": 2, "embed": 8, "heads": 4, "mlp": 16}, heads="far", layers="adjacent")
      >>> {axis: (m.old, m.new) for axis, m in up.items()}
      {'heads': (2, 4), 'embed': (4, 8), 'mlp': (8, 16), 'layers': (1, 2)}

    References:
      Zou et al.,
      `A Multi-Level Framework for Accelerating Training Transformer Models <https://arxiv.org/abs/2404.07999>`_,
      ICLR 2024
    """
    sizes = checked_sizes("decoalesce", "sizes", sizes)
    given = {"embed": embed, "mlp": mlp}
    groupings = {HEADS: heads, KV_HEADS: kv_heads, **given, LAYERS: layers}
    absent = [
        of for of, groups in groupings.items() if groups is not None and not of_kinds((of,), sizes)
    ]
    if wrong := unknown_axes("coalescing takes", (LAYERS, *WIDTHS), sizes, absent):
        raise ValueError("\n  ".join(wrong))
    growth: dict[str, CopyMap] = {}
    if heads is not None or kv_heads is not None:
        for axis in of_kinds((HEADS,), sizes):
            growth |= _head_maps(axis, sizes, heads, kv_heads)
    for axis in (axis for axis in width_axes(sizes) if axis_kind(axis) in given):
        if (groups := given[axis_kind(axis)]) is not None:
            growth[axis] = _partition(axis, sizes[axis], groups)
        elif sibling_axis(axis, HEADS) in growth:
            growth[axis] = _following(axis, sizes, growth[sibling_axis(axis, HEADS)])
    if layers is not None:
        growth |= _layers(sizes, layers, kinds)
    return growth


def _layers(sizes: Sizes, groups: Groups, kinds: str | None) -> dict[str, CopyMap]:
    """The maps of the layers of each stage."""
    axes = layer_axes(sizes)
    kinds = kinds or "f" * sum(sizes[axis] for axis in axes)
    growth: dict[str, CopyMap] = {}
    begin = 0
    for axis in axes:
        end = begin + sizes[axis]
        growth[axis] = _partition(
            axis, sizes[axis], alike(kinds[begin:end]) if groups == "alike" else groups
        )
        begin = end
    return growth


def coalesce(
    sizes: Sizes, *, kinds: str | None = None, **groups: Groups | None
) -> dict[str, AxisMap]:
    """Merge units of a model of ``sizes``: average outputs, add inputs, and average layers.

    ``W' = F_out W T_in`` in the notation of `decoalesce` (Zou et al., ICLR 2024, Eq. 1 and 2). It
    is the `swap` of `decoalesce`, and takes the same arguments.

    Args:
      sizes: the axis sizes of the large model.
      kinds: as in `decoalesce`.
      groups: ``heads``, ``kv_heads``, ``embed``, ``mlp`` and ``layers``, as in `decoalesce`.

    Returns:
      One map from the large to the small model for each axis that changes.

    Raises:
      ValueError: as in `decoalesce`.

    Example:
      >>> down = coalesce({"layers": 2, "embed": 8, "heads": 4, "mlp": 16}, heads="far")
      >>> {axis: (m.old, m.new) for axis, m in down.items()}
      {'heads': (4, 2), 'embed': (8, 4), 'mlp': (16, 8)}

    References:
      Zou et al.,
      `A Multi-Level Framework for Accelerating Training Transformer Models <https://arxiv.org/abs/2404.07999>`_,
      ICLR 2024
    """
    return swap(decoalesce(sizes, kinds=kinds, **groups))


def group_size(groups: str, size: int | None = None) -> int:
    """The number of units in each group, for groups that are given by name.

    Args:
      groups: ``"far"`` or ``"adjacent"``, optionally with a size, such as ``"far:3"``.
      size: the number of heads, for axes of heads. If it is odd and the name contains no size,
        groups have three heads if the number is divisible by three, or else five.

    Returns:
      The group size.

    Raises:
      ValueError: an unknown name of groups.

    Example:
      >>> group_size("far"), group_size("far:4"), group_size("far", 9)
      (2, 4, 3)
    """
    found = re.fullmatch("(?:far|adjacent)(?::([1-9][0-9]*))?", groups)
    if not found:
        raise ValueError(
            f"groups must be 'far', 'adjacent', 'far:3', 'adjacent:3' or a partition, not {groups!r}"
        )
    if found[1]:
        return int(found[1])
    return next((g for g in (2, 3, 5) if size and size % g == 0), 2)


def _head_maps(
    axis: str, sizes: Sizes, heads: Groups | None, kv_heads: Groups | None
) -> dict[str, CopyMap]:
    """The maps of the query heads ``axis`` and, if there are such, of their key/value heads."""
    key_axis = sibling_axis(axis, KV_HEADS)
    keys = sizes.get(key_axis)
    if keys is None:
        if heads is None or kv_heads is not None:
            raise ValueError(
                f"axis {key_axis!r}: the model has no such axis. Give the groups of {axis!r} instead"
            )
        return {axis: _partition(axis, sizes[axis], heads)}
    old = sizes[axis]
    if isinstance(heads, str) and kv_heads is None and keys > 1:
        heads, kv_heads = None, heads
    by_key = None if kv_heads is None else _partition(key_axis, keys, kv_heads)
    if heads is None:
        assert by_key is not None
        return {axis: blocks(by_key, old // keys), key_axis: by_key}
    by_head = _partition(axis, old, heads)
    of = _group_index(by_head)
    if by_key is None:
        return {axis: by_head, key_axis: _merged_keys(axis, of, by_head.old, keys)}
    # The new key/value head that each old query head should read.
    reads = _group_index(by_key)[np.arange(old) * keys // old]
    if by_head.old % by_key.old or (reads != of * by_key.old // by_head.old).any():
        raise ValueError(
            f"axis {key_axis!r}: the groups do not fit together. After merging to {by_head.old} query "
            f"heads and {by_key.old} key/value heads, some query heads would use a key/value head "
            f"that does not contain the one that they used before. Omit the groups of {key_axis!r}, "
            f"which then follow from {axis!r}"
        )
    return {axis: by_head, key_axis: by_key}


def _merged_keys(axis: str, of: np.ndarray, new: int, keys: int) -> CopyMap:
    """The map of key/value heads that follows from groups of query heads.

    Args:
      axis: the axis of the query heads.
      of: the new query head of each old query head.
      new: the number of new query heads.
      keys: the number of old key/value heads.
    """
    read = np.arange(len(of)) * keys // len(of)  # the key/value head that each query head reads
    part = np.arange(keys)  # equal numbers for key/value heads that are merged
    for i in range(new):
        part[np.isin(part, part[read[of == i]])] = part[read[of == i]].min()
    parts = np.unique(part)
    # The part that each new query head reads.
    reads = np.array([part[read[of == i][0]] for i in range(new)])
    order = reads[:: max(1, new // len(parts))]
    if new % len(parts) or not np.array_equal(reads, np.repeat(order, new // len(parts))):
        merged = [tuple(np.flatnonzero(part == p).tolist()) for p in parts]
        raise ValueError(
            f"axis {axis!r}: the groups merge the key/value heads into {merged}. In order, the new query heads read the merged "
            f"heads {np.searchsorted(parts, reads).tolist()}, but each merged head must be read by the same number of "
            "consecutive query heads. Change the order of the groups, or choose other groups"
        )
    return select([int(np.flatnonzero(order == p)[0]) for p in part], len(parts))


def _following(axis: str, sizes: Sizes, by_head: CopyMap) -> CopyMap:
    """The map of an axis whose units follow the heads."""
    size = sizes[axis]
    heads = by_head.new
    if size % heads == 0:
        return blocks(by_head, size // heads)
    found = sorted({int(n) for n in np.bincount(_group_index(by_head))})
    if len(found) > 1 or size % found[0]:
        as_heads = f"groups of {' and '.join(map(str, found))} like the heads"
        _divides(
            f"axis {axis!r} follows the heads in equal blocks",
            size,
            heads,
            f"it cannot follow in {as_heads} either. Give the groups of this axis",
        )
    return _partition(axis, size, f"far:{found[0]}")


def _group_index(m: CopyMap) -> np.ndarray:
    """The group of each unit."""
    return m.write.index[:, 0]


def _partition(axis: str, size: int, groups: Groups) -> CopyMap:
    """The map of de-coalescing: unit ``j`` of the large axis copies its group."""
    if isinstance(groups, str):
        groups = _named_groups(axis, size, groups)
    count = np.zeros(size, int)
    of = np.zeros(size, int)
    outside = sorted({j for j in itertools.chain.from_iterable(groups) if not 0 <= j < size})
    for i, group in enumerate(groups):
        inside = [j for j in group if 0 <= j < size]
        np.add.at(count, inside, 1)
        of[inside] = i
    wrong = [
        f"{what} {units}"
        for what, units in (
            (f"outside 0 .. {size - 1}:", outside),
            ("in no group:", np.flatnonzero(count == 0).tolist()),
            ("in two groups:", np.flatnonzero(count > 1).tolist()),
        )
        if units
    ]
    if any(len(g) == 0 for g in groups):
        wrong.append("an empty group")
    if wrong:
        raise ValueError(
            f"axis {axis!r}: the groups must hold each of its {size} units exactly once, but there are units "
            + "; ".join(wrong)
        )
    return select(of, len(groups))


def _named_groups(axis: str, size: int, name: str) -> tuple[tuple[int, ...], ...]:
    """The units of each group of an axis, for groups given by a name such as ``"far:4"``."""
    try:
        each = group_size(name, size if axis_kind(axis) in (HEADS, KV_HEADS) else None)
    except ValueError as error:
        raise ValueError(f"axis {axis!r}: {error}") from None
    what = f"{name} pairs" if each == 2 else f"{name.partition(':')[0]} groups of {each}"
    by_kind = [("layers", "alike")] if is_layers(axis) else []
    least = next((d for d in range(2, size + 1) if size % d == 0), 1)
    _divides(
        f"axis {axis!r}: {what}",
        size,
        each,
        f"give the groups explicitly, or a size that divides it: far:{least}"
        + ", or {}" * len(by_kind),
        *by_kind,
    )
    return (far if name.startswith("far") else adjacent)(size, size // each)


def _divides(
    what: str,
    size: int,
    by: int,
    way_out: str = "give the groups explicitly",
    *proposals: tuple[str, str],
) -> None:
    if by < 1 or size % by:
        raise SizeError(f"{what}: {size} is not a multiple of {by}; {way_out}", *proposals)

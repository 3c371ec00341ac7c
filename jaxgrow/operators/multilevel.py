"""Coalescing and de-coalescing (Zou et al., ICLR 2024): down to a smaller model by groups of units, and back."""

import re
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from jaxgrow.axes.names import LAYERS, beside, is_layers, kind
from jaxgrow.growth.maps import AxisMap, blocks, select, swap
from jaxgrow.growth.matrices import Rows
from jaxgrow.operators.targets import (
    HEADS,
    KV_HEADS,
    WIDTHS,
    Sizes,
    depth,
    of_kinds,
    unknown,
    whole,
    width,
)

# A partition, or "far" or "adjacent": pairs; with a size, as in "far:3", groups of so many. Of
# layers also "alike".
Groups: TypeAlias = Sequence[Sequence[int]] | str


def far(old: int, new: int) -> tuple[tuple[int, ...], ...]:
    """Groups of units ``new`` apart: the pairs of the published code.

    Args:
      old: how many units there are.
      new: how many groups.

    Returns:
      The units of each group.

    Raises:
      ValueError: the groups would not be equal.

    Example:
      >>> far(4, 2)
      ((0, 2), (1, 3))
    """
    _divides("far", old, new)
    return tuple(tuple(range(i, old, new)) for i in range(new))


def adjacent(old: int, new: int) -> tuple[tuple[int, ...], ...]:
    """Groups of neighbours: the paper's pairs of layers.

    Args:
      old: how many units there are.
      new: how many groups.

    Returns:
      The units of each group.

    Raises:
      ValueError: the groups would not be equal.

    Example:
      >>> adjacent(4, 2)
      ((0, 1), (2, 3))
    """
    _divides("adjacent", old, new)
    return tuple(tuple(range(i * (old // new), (i + 1) * (old // new))) for i in range(new))


def alike(kinds: str) -> tuple[tuple[int, ...], ...]:
    """Pair each layer with the next one of its kind; the last layer of a kind that has an odd number stays alone.

    Pairs are in the order of their first layers.

    Args:
      kinds: a letter for each layer, as of `jaxgrow.models.Config.layer_kinds`.

    Returns:
      The layers of each group.

    Example:
      >>> alike("sfsfsf")
      ((0, 2), (1, 3), (4,), (5,))
    """
    places = [[i for i, kind in enumerate(kinds) if kind == one] for one in set(kinds)]
    return tuple(sorted(tuple(same[i : i + 2]) for same in places for i in range(0, len(same), 2)))


def decoalesce(
    sizes: Sizes,
    *,
    heads: Groups | None = None,
    kv_heads: Groups | None = None,
    embed: Groups | None = None,
    mlp: Groups | None = None,
    layers: Groups | None = None,
    kinds: str | None = None,
) -> dict[str, AxisMap]:
    """From the coalesced model back to one of ``sizes``: copies outputs, divides inputs by the group size.

    For a kernel (column convention): ``W = T_out W' F_in``, ``T[j, i] = [j in group i]``,
    ``F = T.T / group size``; layers are copied. Zou et al., ICLR 2024, section 3.2; the parameter
    table is the axis names of the model.

    Exact inverse on one side: ``coalesce`` after ``decoalesce`` is the identity. Keeps the function
    if ``layers`` is left out and the groups of ``embed`` are of one size (an untied head, or the
    tied one of `jaxgrow.models.gpt2`); copying layers never does. Of a model with stages, the axes
    of each are grouped so, and follow its own heads.

    Args:
      sizes: of the *large* model.
      heads: groups of heads that are one head in the small model: any partition, e.g.
        ``((0, 2), (1, 3))``, or ``"far"`` or ``"adjacent"`` for pairs, or threes or fives where
        heads make no pairs; ``"far:4"`` for groups of four. Where queries share keys, names are of
        key heads, unless there is only one, and their query heads follow by their place; of a
        partition of the query heads, those key heads are merged whose query heads are. (Our
        extension: the paper has no grouped queries.)
      kv_heads: groups of key heads, if not those that follow from ``heads``; alone, the query heads
        follow by their place.
      embed: groups of the units of the residual stream; if left out they follow the heads, in as
        many equal blocks.
      mlp: groups of MLP units; if left out they follow the heads, too, as in the published mapper.
        Units that are no multiple of the heads follow as ``"far"`` groups of the size that all
        groups of heads have.
      layers: groups of layers; ``"alike"`` pairs each layer with the next one of its kind
        (`alike`).
      kinds: a letter for each layer of the large model, for ``"alike"``
        (`jaxgrow.models.Config.layer_kinds`); None: all layers are of one kind.

    Returns:
      One map for each axis that changes, from the small to the large model.

    Raises:
      ValueError: an axis that the model does not have; groups that are no partition of the axis, or
        whose query heads do not share the merged keys alike.

    Example:
      >>> up = decoalesce({"layers": 2, "embed": 8, "heads": 4, "mlp": 16}, heads="far", layers="adjacent")
      >>> {axis: (m.old, m.new) for axis, m in up.items()}
      {'heads': (2, 4), 'embed': (4, 8), 'mlp': (8, 16), 'layers': (1, 2)}

    References:
      Zou et al.,
      `A Multi-Level Framework for Accelerating Training Transformer Models <https://arxiv.org/abs/2404.07999>`_,
      ICLR 2024
    """
    sizes = whole("decoalesce", "sizes", sizes)
    given = {"embed": embed, "mlp": mlp}
    asked = {HEADS: heads, **given, LAYERS: layers}
    absent = [
        of for of, groups in asked.items() if groups is not None and not of_kinds((of,), sizes)
    ]
    if wrong := unknown("coalescing takes", (LAYERS, *WIDTHS), sizes, absent):
        raise ValueError("\n  ".join(wrong))
    growth = _heads(sizes, heads, kv_heads) if heads is not None or kv_heads is not None else {}
    for axis in (axis for axis in width(sizes) if kind(axis) in given):
        if (groups := given[kind(axis)]) is not None:
            growth[axis] = _partition(axis, sizes[axis], groups)
        elif beside(axis, HEADS) in growth:
            growth[axis] = _following(axis, sizes, growth[beside(axis, HEADS)])
    if layers is not None:
        growth |= _layers(sizes, layers, kinds)
    return growth


def _layers(sizes: Sizes, groups: Groups, kinds: str | None) -> dict[str, AxisMap]:
    """The maps of the layers of each stage."""
    axes = depth(sizes)
    kinds = kinds or "f" * sum(sizes[axis] for axis in axes)
    growth, begin = {}, 0
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
    """From a model of ``sizes`` to a smaller one: mean over merged outputs, sum over merged inputs, mean over layers.

    ``W' = F_out W T_in`` in the notation of `decoalesce`, whose `swap` this is; same arguments,
    same errors. Zou et al., ICLR 2024, Eq. 1 and 2.

    Args:
      sizes: of the large model.
      kinds: as of `decoalesce`.
      groups: as of `decoalesce`.

    Returns:
      One map for each axis that changes, from the large to the small model.

    Raises:
      ValueError: as `decoalesce`.

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
    """How many units each group has by its name.

    Args:
      groups: ``"far"`` or ``"adjacent"``, perhaps with a size, as ``"far:3"``.
      size: of heads: these, if they make no pairs, go by threes or fives, whatever divides them.

    Returns:
      The size.

    Raises:
      ValueError: there are no such groups.

    Example:
      >>> group_size("far"), group_size("far:4"), group_size("far", 9)
      (2, 4, 3)
    """
    found = re.fullmatch("(?:far|adjacent)(?::([1-9][0-9]*))?", groups)
    if not found:
        raise ValueError(
            f"groups are 'far', 'adjacent', 'far:3', 'adjacent:3' or a partition, not {groups!r}"
        )
    if found[1]:
        return int(found[1])
    return next((g for g in (2, 3, 5) if size and size % g == 0), 2)


def _heads(sizes: Sizes, heads: Groups | None, kv_heads: Groups | None) -> dict[str, AxisMap]:
    """The maps of the query heads, and of the key heads, if the model has such an axis."""
    keys = sizes.get(KV_HEADS)
    if keys is None:
        if heads is None or kv_heads is not None:
            raise ValueError(
                "axis 'kv_heads': the model has no such axis; give the groups of 'heads'"
            )
        return {
            axis: _partition(axis, sizes[axis], heads)
            for axis in width(sizes)
            if kind(axis) == HEADS
        }
    old = sizes[HEADS]
    if isinstance(heads, str) and kv_heads is None and keys > 1:
        heads, kv_heads = None, heads
    by_key = None if kv_heads is None else _partition(KV_HEADS, keys, kv_heads)
    if heads is None:
        assert by_key is not None
        return {HEADS: blocks(by_key, old // keys), KV_HEADS: by_key}
    by_head = _partition(HEADS, old, heads)
    of = _of(by_head)
    if by_key is None:
        return {HEADS: by_head, KV_HEADS: _merged_keys(of, by_head.old, keys)}
    reads = _of(by_key)[
        np.arange(old) * keys // old
    ]  # the new key head that an old query head should read
    if by_head.old % by_key.old or (reads != of * by_key.old // by_head.old).any():
        raise ValueError(
            f"axis 'kv_heads': the {by_head.old} new query heads would not read, of {by_key.old} new key heads, what their old "
            "ones read; leave out the groups of 'kv_heads', which then follow"
        )
    return {HEADS: by_head, KV_HEADS: by_key}


def _merged_keys(of: np.ndarray, new: int, keys: int) -> AxisMap:
    """The map of key heads that goes with that of query heads: old query head j becomes ``of[j]``, one of ``new``."""
    read = np.arange(len(of)) * keys // len(of)  # the key head that a query head reads
    part = np.arange(keys)  # of a key head: one number for all that are merged
    for i in range(new):
        part[np.isin(part, part[read[of == i]])] = part[read[of == i]].min()
    parts = np.unique(part)
    reads = np.array(
        [part[read[of == i][0]] for i in range(new)]
    )  # the part that a new query head reads
    order = reads[:: max(1, new // len(parts))]
    if new % len(parts) or not np.array_equal(reads, np.repeat(order, new // len(parts))):
        merged = [tuple(np.flatnonzero(part == p).tolist()) for p in parts]
        raise ValueError(
            f"axis 'heads': the groups merge the key heads {merged}, of which the new query heads read, in turn, "
            f"{[int(np.searchsorted(parts, p)) for p in reads]}; as many neighbours must read each: name the groups in "
            "another order, or others"
        )
    return select([int(np.flatnonzero(order == p)[0]) for p in part], len(parts))


def _following(axis: str, sizes: Sizes, by_head: AxisMap) -> AxisMap:
    """The map of an axis whose units go with the heads."""
    size, heads = sizes[axis], by_head.new
    if size % heads == 0:
        return blocks(by_head, size // heads)
    found = sorted({int(n) for n in np.bincount(_of(by_head))})
    if len(found) > 1 or size % found[0]:
        as_heads = f"groups of {' and '.join(map(str, found))}, as the heads do"
        _divides(
            f"axis {axis!r} follows the heads in equal blocks",
            size,
            heads,
            f"nor {as_heads}; name its groups, too",
        )
    return _partition(axis, size, f"far:{found[0]}")


def _of(m: AxisMap) -> np.ndarray:
    """The group of every unit."""
    assert isinstance(m.write, Rows)
    return m.write.index[:, 0]


def _partition(axis: str, size: int, groups: Groups) -> AxisMap:
    """The map of de-coalescing: unit ``j`` of the large axis copies the group that it is in."""
    if isinstance(groups, str):
        try:
            each = group_size(groups, size if kind(axis) in (HEADS, KV_HEADS) else None)
        except ValueError as error:
            raise ValueError(f"axis {axis!r}: {error}") from None
        what = f"{groups} pairs" if each == 2 else f"{groups.partition(':')[0]} groups of {each}"
        by_kind = ', or layers="alike"' if is_layers(axis) else ""
        _divides(
            f"axis {axis!r}: {what}",
            size,
            each,
            f"name the groups instead, or their size: far:{_least(size)}{by_kind}",
        )
        groups = (far if groups.startswith("far") else adjacent)(size, size // each)
    count = np.zeros(size, int)
    of = np.zeros(size, int)
    outside = sorted({j for g in groups for j in g if not 0 <= j < size})
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


def _least(size: int) -> int:
    """The smallest divisor above 1."""
    return next((d for d in range(2, size + 1) if size % d == 0), 1)


def _divides(what: str, size: int, by: int, way_out: str = "name the groups instead") -> None:
    if by < 1 or size % by:
        raise ValueError(f"{what}: {size} is not a multiple of {by}; {way_out}")

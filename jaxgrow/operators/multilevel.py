"""Coalescing and de-coalescing (Zou et al., ICLR 2024): down to a smaller model by groups of units, and back."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np

from jaxgrow.maps import AxisMap, Rows, blocks, select, swap
from jaxgrow.operators.targets import HEADS, KV_HEADS, Sizes

Groups: TypeAlias = Sequence[Sequence[int]] | Literal["far", "adjacent"]


def far(old: int, new: int) -> tuple[tuple[int, ...], ...]:
    """Groups of units ``new`` apart: ``far(4, 2) == ((0, 2), (1, 3))``; the pairs of the published code."""
    _divides("far", old, new)
    return tuple(tuple(range(i, old, new)) for i in range(new))


def adjacent(old: int, new: int) -> tuple[tuple[int, ...], ...]:
    """Groups of neighbours: ``adjacent(4, 2) == ((0, 1), (2, 3))``; the paper's pairs of layers."""
    _divides("adjacent", old, new)
    return tuple(tuple(range(i * (old // new), (i + 1) * (old // new))) for i in range(new))


def decoalesce(
    sizes: Sizes, *, heads: Groups | None = None, mlp: Groups | None = None, layers: Groups | None = None
) -> dict[str, AxisMap]:
    """From the coalesced model back to one of ``sizes``: copies outputs, divides inputs by the group size.

    For a kernel (column convention): ``W = T_out W' F_in``, ``T[j, i] = [j in group i]``, ``F = T.T / group size``; layers
    are copied. Zou et al., ICLR 2024, section 3.2; the parameter table is the axis names of the model.

    Args:
      sizes: of the *large* model.
      heads: groups of heads that are one head in the small model: any partition, e.g. ``((0, 2), (1, 3))``, or ``"far"``
        or ``"adjacent"`` for pairs. The residual stream follows, in as many equal blocks. Where queries share keys, pairs
        are of key heads, unless there is only one, and their query heads follow by their place; of a partition of the query
        heads, those key heads are merged whose query heads are. (Our extension: the paper has no grouped queries.)
      mlp: groups of MLP units; if left out they follow the heads, in as many equal blocks, as in the published mapper.
      layers: groups of layers.

    Exact inverse on one side: ``coalesce`` after ``decoalesce`` is the identity. Keeps the function if ``layers`` is left
    out and the groups of heads are of one size (an untied head, or the tied one of `jaxgrow.models.gpt2`); copying layers
    never does.

    Raises:
      ValueError: groups that are no partition of the axis, or whose query heads do not share the merged keys alike.
    """
    growth = {}
    if heads is not None:
        growth |= _heads(sizes, heads)
        by_head = growth[HEADS]
        growth["embed"] = blocks(by_head, _per_head(sizes, "embed"))
        if mlp is None:
            growth["mlp"] = blocks(by_head, _per_head(sizes, "mlp"))
    if mlp is not None:
        growth["mlp"] = _partition("mlp", sizes["mlp"], mlp)
    if layers is not None:
        growth["layers"] = _partition("layers", sizes["layers"], layers)
    return growth


def coalesce(
    sizes: Sizes, *, heads: Groups | None = None, mlp: Groups | None = None, layers: Groups | None = None
) -> dict[str, AxisMap]:
    """From a model of ``sizes`` to a smaller one: mean over merged outputs, sum over merged inputs, mean over layers.

    ``W' = F_out W T_in`` in the notation of `decoalesce`, whose `swap` this is; same arguments, same errors. Zou et al.,
    ICLR 2024, Eq. 1 and 2.
    """
    return swap(decoalesce(sizes, heads=heads, mlp=mlp, layers=layers))


def _heads(sizes: Sizes, groups: Groups) -> dict[str, AxisMap]:
    """The maps of the query heads, and of the key heads, if the model has such an axis."""
    old, keys = sizes[HEADS], sizes.get(KV_HEADS)
    if keys is None:
        return {HEADS: _partition(HEADS, old, groups)}
    if isinstance(groups, str) and keys > 1:
        by_key = _partition(KV_HEADS, keys, groups)
        return {HEADS: blocks(by_key, old // keys), KV_HEADS: by_key}
    by_head = _partition(HEADS, old, groups)
    assert isinstance(by_head.write, Rows)
    return {HEADS: by_head, KV_HEADS: _merged_keys(by_head.write.index[:, 0], by_head.old, keys)}


def _merged_keys(of: np.ndarray, new: int, keys: int) -> AxisMap:
    """The map of key heads that goes with that of query heads: old query head j becomes ``of[j]``, one of ``new``."""
    read = np.arange(len(of)) * keys // len(of)  # the key head that a query head reads
    part = np.arange(keys)  # of a key head: one number for all that are merged
    for i in range(new):
        part[np.isin(part, part[read[of == i]])] = part[read[of == i]].min()
    parts = np.unique(part)
    reads = np.array([part[read[of == i][0]] for i in range(new)])  # the part that a new query head reads
    order = reads[:: max(1, new // len(parts))]
    if new % len(parts) or not np.array_equal(reads, np.repeat(order, new // len(parts))):
        merged = [tuple(np.flatnonzero(part == p).tolist()) for p in parts]
        raise ValueError(
            f"axis 'heads': the groups merge the key heads {merged}, of which the new query heads read, in turn, "
            f"{[int(np.searchsorted(parts, p)) for p in reads]}; as many neighbours must read each: name the groups in "
            "another order, or others"
        )
    return select([int(np.flatnonzero(order == p)[0]) for p in part], len(parts))


def _partition(axis: str, size: int, groups: Groups) -> AxisMap:
    """The map of de-coalescing: unit ``j`` of the large axis copies the group that it is in."""
    if isinstance(groups, str):
        if groups not in ("far", "adjacent"):
            raise ValueError(f"axis {axis!r}: groups are 'far', 'adjacent' or a partition, not {groups!r}")
        _divides(f"axis {axis!r}: {groups} pairs", size, 2, "groups of two need an even size; name the groups instead")
        groups = (far if groups == "far" else adjacent)(size, size // 2)
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


def _per_head(sizes: Sizes, axis: str) -> int:
    _divides(
        f"axis {axis!r} follows the heads in equal blocks", sizes[axis], sizes["heads"], "give its groups yourself"
    )
    return sizes[axis] // sizes["heads"]


def _divides(what: str, size: int, by: int, way_out: str = "name the groups instead") -> None:
    if by < 1 or size % by:
        raise ValueError(f"{what}: {size} is not a multiple of {by}; {way_out}")

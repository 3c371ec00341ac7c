"""What every operator of growth is told: the sizes of a model's axes, and the new sizes of those that grow.

Where queries share keys, a model has an axis ``kv_heads``, and query head i reads key head
``i // (heads / kv_heads)``. Then new query heads must copy old ones that read what their new key
head copies (`sources`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from jaxgrow.axes.names import LAYERS, beside, is_layers, kind

Sizes: TypeAlias = Mapping[str, int]
Choose: TypeAlias = Callable[[int, int], np.ndarray]

HEADS, KV_HEADS = "heads", "kv_heads"
WIDTHS = ("embed", HEADS, KV_HEADS, "mlp")  # the kinds of axes that operators widen
_STACK = (
    "if each layer is a subtree of its own, stack the layers first, of the parameters and of the axes: "
    "jaxgrow.stack_layers"
)


def width(sizes: Sizes) -> tuple[str, ...]:
    """The axes that operators widen, of those that a model has, in every stage.

    Example:
      >>> width({"layers": 2, "mlp": 8, "embed": 4, "heads": 2})
      ('embed', 'heads', 'mlp')
    """
    return of_kinds(WIDTHS, sizes)


def of_kinds(kinds: Sequence[str], sizes: Sizes) -> tuple[str, ...]:
    """The axes of these kinds that a model has, in every stage, by kind."""
    return tuple(name for of in kinds for name in sizes if kind(name) == of)


def depth(sizes: Sizes) -> tuple[str, ...]:
    """The axes of layers that a model has, one for each stage."""
    return tuple(filter(is_layers, sizes))


def in_turn(old: int, new: int) -> np.ndarray:
    """``[0, 1, .., old - 1, 0, 1, ..]``."""
    return np.arange(new) % old


def unknown(takes: str, kinds: Sequence[str], sizes: Sizes, asked: Iterable[str]) -> list[str]:
    """A line for each axis of ``asked`` that an operator does not take, or that the model does not have.

    Args:
      takes: the operator and its verb, for the message.
      kinds: the kinds of axes that it takes.
      sizes: the size of every axis of the model.
      asked: the axes that it is asked to change.

    Example:
      >>> unknown("stack grows", ("layers",), {"layers": 2, "mlp": 8}, ["mlp"])
      ["axis 'mlp': stack grows layers"]
    """
    axes, has = of_kinds(kinds, sizes), f"the model has no such axis, only {', '.join(sizes)}"
    takes = (
        f"{takes} {', '.join(axes)}"
        if axes
        else f"{takes} {', '.join(kinds)}, and {has}: name its axes so (jaxgrow.axes)"
    )
    # Of an axis of a kind that it takes, but that the model has none of, the second line says all.
    wrong = [
        f"axis {a!r}: {takes}"
        for a in asked
        if a not in axes and (kind(a) not in kinds or of_kinds((kind(a),), sizes))
    ]
    stack = "" if depth(sizes) else f"; {_STACK}"
    return wrong + [
        f"axis {a!r}: {has}{stack if is_layers(a) else ''}"
        for a in asked
        if a not in sizes and (axes or kind(a) in kinds)
    ]


def whole(operator: str, argument: str, of: Sizes) -> dict[str, int]:
    """The sizes of axes as they were given to an operator, as Python's integers.

    Args:
      operator: its name, for the message.
      argument: the name of its argument, for the message.
      of: what it was given.

    Raises:
      TypeError: it is not a mapping from names of axes to whole numbers.

    Example:
      >>> whole("stack", "target", {"layers": np.int32(6)})
      {'layers': 6}
    """
    if not isinstance(of, Mapping):
        raise TypeError(
            f"{operator}: {argument} is {_brief(of)}, but should be the sizes of axes by their names, such as "
            '{"layers": 24}'
            + (
                ", as of jaxgrow.sizes(params, axes) or config.sizes()"
                if argument == "sizes"
                else ""
            )
        )
    wrong = [
        f"{axis!r}: {_brief(size)}"
        for axis, size in of.items()
        if not isinstance(axis, str)
        or not isinstance(size, int | np.integer)
        or isinstance(size, bool)
    ]
    if wrong:
        raise TypeError(
            f"{operator}: {argument} has {', '.join(wrong)}, but the size of an axis is a whole number"
        )
    return {axis: int(size) for axis, size in of.items()}


def _brief(x: object) -> str:
    """A wrong argument, for a message."""
    text = repr(x)
    return f"{text if len(text) <= 60 else '..'} of type {type(x).__name__}"


def layers_beside(operator: str, axis: str, sizes: Sizes) -> str:
    """The axis of the layers that ``axis`` belongs to, for an operator that treats each layer by itself.

    Raises:
      ValueError: the model has no such axis.
    """
    layers = beside(axis, LAYERS)
    if layers not in sizes:
        raise ValueError(
            f"axis {axis!r}: {operator} needs the axis {layers!r} of its layers, but the model has only "
            f"{', '.join(sizes)}; {_STACK}"
        )
    return layers


def grown(
    operator: str, kinds: Sequence[str], sizes: Sizes, target: Sizes
) -> dict[str, tuple[int, int]]:
    """``{axis: (old, new)}`` of the axes of ``target``, in a fixed order.

    Raises:
      ValueError: an axis that is of none of these ``kinds`` or not the model's, or a target smaller
        than the model; all in one message.
      TypeError: as `whole`.

    Example:
      >>> grown("stack", ("layers",), {"layers": 2}, {"layers": 4})
      {'layers': (2, 4)}
    """
    sizes, target = whole(operator, "sizes", sizes), whole(operator, "target", target)
    wrong = unknown(f"{operator} grows", kinds, sizes, target)
    wrong += [
        f"axis {a!r}: {operator} cannot take {sizes[a]} to {new}; coalesce and prune make models smaller"
        for a, new in target.items()
        if a in sizes and new < sizes[a]
    ]
    if wrong:
        raise ValueError("\n  ".join(wrong))
    return {a: (sizes[a], target[a]) for a in sorted(target)}


def multiples(
    operator: str, kinds: Sequence[str], sizes: Sizes, target: Sizes
) -> dict[str, tuple[int, int]]:
    """`grown`, where every new size must be a multiple of the old one.

    Raises:
      ValueError: as `grown`, or a new size that is no multiple.
    """
    found = grown(operator, kinds, sizes, target)
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

    ``choose(old, new)`` says it of one axis; it must begin with all old units. Query heads that
    share keys it chooses for each new key head, among those of the old one. If fewer queries share
    a key head than before, each key head is repeated, and its query heads are divided among its
    copies, whatever ``choose`` would say.

    A target may name ``heads`` or ``kv_heads`` alone, the other then stays. Copying keeps the
    function of attention in every case. Gradients of keys and values grow by the dual where
    ``heads / kv_heads`` or ``kv_heads`` stays.

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
        (old, new), (old_kv, new_kv) = (
            found.get(axis, (sizes[axis],) * 2) for axis in (HEADS, KV_HEADS)
        )
        heads, kv_heads = _grouped(operator, (old, new), (old_kv, new_kv), choose)
        out |= {
            axis: index for axis, index in ((HEADS, heads), (KV_HEADS, kv_heads)) if axis in found
        }
    return {axis: out[axis] for axis in found}


def _grouped(
    operator: str, heads: tuple[int, int], kv_heads: tuple[int, int], choose: Choose
) -> tuple[np.ndarray, np.ndarray]:
    (old, new), (old_kv, new_kv) = heads, kv_heads
    group = old // old_kv
    keep = f"kv_heads={new // group} keeps {group} queries to each"
    ratio = keep if new % group == 0 else f"{old_kv} are there now"
    if new % new_kv:
        raise ValueError(
            f"axis 'heads': {operator} cannot divide {new} query heads among {new_kv} key heads; {ratio}"
        )
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

"""Checks of the arguments of growth operators: the sizes of a model's axes, and their new sizes.

With GQA, a model has an axis ``kv_heads``, and query head i reads key/value head
``i // (heads / kv_heads)``. A new query head must then be a copy of a query head whose key/value
head is also the source of the new key/value head (`copied_units`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

import numpy as np

from jaxgrow.axes.names import LAYERS, axis_kind, is_layers, sibling_axis
from jaxgrow.axes.size_error import SizeError

Sizes: TypeAlias = Mapping[str, int]
Choose: TypeAlias = Callable[[int, int], np.ndarray]

HEADS = "heads"
KV_HEADS = "kv_heads"
WIDTHS = ("embed", HEADS, KV_HEADS, "mlp")  # the kinds of axes that operators widen
_STACK = (
    "if each layer is a separate subtree, first stack the layers of the parameters and of the axes with "
    "jaxgrow.stack_layers"
)


def width_axes(sizes: Sizes) -> tuple[str, ...]:
    """The axes of a model that operators can widen, in every stage.

    Example:
      >>> width_axes({"layers": 2, "mlp": 8, "embed": 4, "heads": 2})
      ('embed', 'heads', 'mlp')
    """
    return of_kinds(WIDTHS, sizes)


def of_kinds(kinds: Sequence[str], sizes: Sizes) -> tuple[str, ...]:
    """The axes of a model of the given kinds, in every stage, in the order of ``kinds``."""
    found: list[str] = []
    for of in kinds:
        found += [name for name in sizes if axis_kind(name) == of]
    return tuple(found)


def layer_axes(sizes: Sizes) -> tuple[str, ...]:
    """The layer axes of a model, one for each stage."""
    return tuple(filter(is_layers, sizes))


def in_turn(old: int, new: int) -> np.ndarray:
    """The sources that copy the old units in turn: ``[0, 1, ..., old - 1, 0, 1, ...]``."""
    return np.arange(new) % old


def unknown_axes(takes: str, kinds: Sequence[str], sizes: Sizes, asked: Iterable[str]) -> list[str]:
    """One message for each axis that an operator does not accept or the model does not have.

    Args:
      takes: the name of the operator and its verb, which begin the message.
      kinds: the kinds of axes that the operator accepts.
      sizes: the size of every axis of the model.
      asked: the axes that the operator should change.

    Example:
      >>> unknown_axes("stack grows", ("layers",), {"layers": 2, "mlp": 8}, ["mlp"])
      ["axis 'mlp': stack grows layers"]
    """
    axes = of_kinds(kinds, sizes)
    has = f"the model has no such axis, only {', '.join(sizes)}"
    takes = (
        f"{takes} {', '.join(axes)}"
        if axes
        else f"{takes} {', '.join(kinds)}, and {has}. Rename its axes (see jaxgrow.axes)"
    )
    # An axis of an accepted kind that the model does not have is reported by the second list only.
    wrong = [
        f"axis {a!r}: {takes}"
        for a in asked
        if a not in axes and (axis_kind(a) not in kinds or of_kinds((axis_kind(a),), sizes))
    ]
    stack = "" if layer_axes(sizes) else f"; {_STACK}"
    return wrong + [
        f"axis {a!r}: {has}{stack if is_layers(a) else ''}"
        for a in asked
        if a not in sizes and (axes or axis_kind(a) in kinds)
    ]


def _is_size(axis: object, size: object) -> bool:
    number = isinstance(size, int | np.integer) and not isinstance(size, bool)
    return isinstance(axis, str) and number


def checked_sizes(operator: str, argument: str, of: Sizes) -> dict[str, int]:
    """Check the sizes of axes that an operator was given, and convert them to Python integers.

    Args:
      operator: the name of the operator, which the message contains.
      argument: the name of its argument, which the message contains.
      of: the value of the argument.

    Raises:
      TypeError: the value is not a mapping from axis names to integers.

    Example:
      >>> checked_sizes("stack", "target", {"layers": np.int32(6)})
      {'layers': 6}
    """
    if not isinstance(of, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"{operator}: {argument} is {_brief(of)}, but must map axis names to sizes, such as "
            '{"layers": 24}'
            + (". Use jaxgrow.sizes(params, axes) or config.sizes()" if argument == "sizes" else "")
        )
    wrong = [f"{axis!r}: {_brief(size)}" for axis, size in of.items() if not _is_size(axis, size)]
    if wrong:
        raise TypeError(
            f"{operator}: {argument} has {', '.join(wrong)}, but the size of an axis must be an integer"
        )
    return {axis: int(size) for axis, size in of.items()}


def _brief(x: object) -> str:
    """A wrong argument and its type, for a message."""
    text = repr(x)
    return f"{text if len(text) <= 60 else '...'} of type {type(x).__name__}"


def axis_beside(operator: str, axis: str, kind: Literal["layers", "embed"], sizes: Sizes) -> str:
    """The layer axis or the residual stream that belongs to ``axis``, for an operator that needs it.

    Raises:
      ValueError: the model does not have such an axis.
    """
    found = sibling_axis(axis, kind)
    if found not in sizes:
        what, way_out = {
            LAYERS: ("layer axis", f"; {_STACK}"),
            "embed": ("residual stream", ". Rename its axes (see jaxgrow.axes)"),
        }[kind]
        raise ValueError(
            f"axis {axis!r}: {operator} needs the {what} {found!r}, but the model has only "
            f"{', '.join(sizes)}{way_out}"
        )
    return found


def grown_sizes(
    operator: str, kinds: Sequence[str], sizes: Sizes, target: Sizes
) -> dict[str, tuple[int, int]]:
    """``{axis: (old, new)}`` for the axes of ``target``, in a fixed order.

    Raises:
      ValueError: an axis of another kind than ``kinds``, an axis that the model does not have or
        that has size 0, or a target below the size of the model. One message lists all problems.
      TypeError: as in `checked_sizes`.

    Example:
      >>> grown_sizes("stack", ("layers",), {"layers": 2}, {"layers": 4})
      {'layers': (2, 4)}
    """
    sizes = checked_sizes(operator, "sizes", sizes)
    target = checked_sizes(operator, "target", target)
    wrong = unknown_axes(f"{operator} grows", kinds, sizes, target)
    wrong += [
        f"axis {a!r}: {operator} cannot reduce the size from {sizes[a]} to {new}. Use coalesce or prune to make a model smaller"
        for a, new in target.items()
        if a in sizes and new < sizes[a]
    ]
    wrong += [
        f"axis {a!r}: has size 0, so {operator} cannot grow it to {new}. Remove it from the target"
        for a, new in target.items()
        if sizes.get(a) == 0
    ]
    if wrong:
        raise ValueError("\n  ".join(wrong))
    return {a: (sizes[a], target[a]) for a in sorted(target)}


def multiple_sizes(
    operator: str, kinds: Sequence[str], sizes: Sizes, target: Sizes
) -> dict[str, tuple[int, int]]:
    """Same as `grown_sizes`, for operators whose new sizes must be multiples of the old sizes.

    Raises:
      ValueError: as in `grown_sizes`.
      SizeError: a new size that is not a multiple.
    """
    found = grown_sizes(operator, kinds, sizes, target)
    wrong = {a: both for a, both in found.items() if both[1] % both[0]}
    if wrong:
        lines = [
            f"axis {a!r}: {operator} needs a multiple of {old}, not {new}. For example, use {{}}"
            for a, (old, new) in wrong.items()
        ]
        nearest = [(a, -(-new // old) * old) for a, (old, new) in wrong.items()]
        raise SizeError("\n  ".join(lines), *nearest)
    return found


def copied_units(
    operator: str, sizes: Sizes, found: Mapping[str, tuple[int, int]], choose: Choose = in_turn
) -> dict[str, np.ndarray]:
    """``{axis: index}``: the old unit that each new unit copies, for the axes of ``found``.

    ``choose(old, new)`` returns the sources for one axis. They must begin with all old units. With
    GQA, ``choose`` selects the sources of the query heads within each key/value head, from the
    query heads of its old key/value head. If fewer query heads share a key/value head than before,
    ``choose`` is not used: each key/value head is repeated, and its query heads are divided among
    its copies.

    A target may contain only ``heads`` or only ``kv_heads``. The other axis then keeps its size.
    Copying preserves the function of attention in every case. Gradients of keys and values grow by
    the dual if ``heads / kv_heads`` or ``kv_heads`` does not change. Exceptions are operators that
    divide input weights unequally among copies of key/value heads (`lemon`). If ``kv_heads`` grow
    alone, copies of a key/value head belong to different query heads and have different gradients.

    Args:
      operator: the name of the operator, for error messages.
      sizes: the size of every axis of the model.
      found: the old and new sizes of the axes that grow, as returned by `grown_sizes`.
      choose: a function from an old and a new size to the old unit of each new unit.

    Returns:
      For each axis, the index of the old unit that each new unit copies.

    Raises:
      ValueError: query heads that cannot be divided among the key/value heads, or old query heads
        that no new head would copy.

    Example:
      >>> copied_units("mine", {"heads": 4, "kv_heads": 2}, {"heads": (4, 8), "kv_heads": (2, 4)})["heads"].tolist()
      [0, 1, 2, 3, 0, 1, 2, 3]
    """
    grouped = [
        axis
        for axis in found
        if axis_kind(axis) in (HEADS, KV_HEADS) and sibling_axis(axis, KV_HEADS) in sizes
    ]
    out = {axis: choose(*found[axis]) for axis in found if axis not in grouped}
    every = {axis: found.get(axis, (size, size)) for axis, size in sizes.items()}
    for heads in dict.fromkeys(sibling_axis(axis, HEADS) for axis in grouped):
        out |= _grouped(operator, heads, every, choose)
    return {axis: out[axis] for axis in found}


def _grouped(
    operator: str, heads: str, every: Mapping[str, tuple[int, int]], choose: Choose
) -> dict[str, np.ndarray]:
    """The sources of the query heads ``heads`` and of their key/value heads."""
    keys = sibling_axis(heads, KV_HEADS)
    old, new = every[heads]
    old_kv, new_kv = every[keys]
    group = old // old_kv
    if new % group == 0:
        proposals = [(keys, new // group)]
        way_out = f"{{}} keeps {group} query heads per key/value head"
    else:
        proposals = []
        way_out = f"the model has {old_kv} key/value heads now"
    if new % new_kv:
        raise SizeError(
            f"axis {heads!r}: {operator} cannot divide {new} query heads among {new_kv} key/value "
            f"heads; {way_out}",
            *proposals,
        )
    share = new // new_kv
    if share >= group:
        kv = choose(old_kv, new_kv)
        query = np.concatenate([group * head + choose(group, share) for head in kv])
        return {heads: query, keys: kv}
    kv = np.arange(new_kv) * old_kv // new_kv
    # The number of each copy among the copies of the same key/value head.
    copy = np.arange(new_kv) - np.searchsorted(kv, kv)
    positions = (copy[:, None] * share + np.arange(share)) % group
    query = (group * kv[:, None] + positions).reshape(-1)
    if lost := sorted(set(range(old)) - set(query.tolist())):
        raise SizeError(
            f"axis {keys!r}: with {new} query heads on {new_kv} key/value heads, {operator} "
            f"would lose the query heads {lost}; {way_out}",
            *proposals,
        )
    return {heads: query, keys: kv}


def mark_first_copies(index: np.ndarray) -> np.ndarray:
    """A mask, bool [new]: true for the first copy of each old unit, and false for new units.

    Example:
      >>> mark_first_copies(np.array([0, 1, 0, 2])).tolist()
      [True, True, False, True]
    """
    mask = np.zeros(len(index), bool)
    mask[np.unique(index, return_index=True)[1]] = True
    return mask

"""What every operator of growth is told: the sizes of a model's axes, and the new sizes of those that grow."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

Sizes: TypeAlias = Mapping[str, int]

WIDTH = ("embed", "heads", "mlp")


def grown(operator: str, axes: Sequence[str], sizes: Sizes, target: Sizes) -> dict[str, tuple[int, int]]:
    """``{axis: (old, new)}`` of the axes of ``target``, in a fixed order.

    Raises:
      ValueError: an axis that is none of ``axes`` or not the model's, or a target smaller than the model; all in one message.
    """
    wrong = [f"axis {a!r}: {operator} grows {', '.join(axes)}" for a in target if a not in axes]
    wrong += [f"axis {a!r}: the model has no such axis, only {', '.join(sizes)}" for a in target if a not in sizes]
    wrong += [
        f"axis {a!r}: {operator} cannot take {sizes[a]} to {new}; coalesce() makes models smaller"
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
        f"axis {a!r}: {operator} needs a multiple of {old}, not {new}" for a, (old, new) in found.items() if new % old
    ]
    if wrong:
        raise ValueError("\n  ".join(wrong))
    return found

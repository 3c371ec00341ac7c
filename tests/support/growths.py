"""Growths of one small model by every operator, and the laws that each growth obeys."""

from typing import Any, NamedTuple

import tiny

from jaxgrow import operators as registry
from jaxgrow.growth.maps import Growth
from jaxgrow.operators import (
    Operator,
    aki,
    decoalesce,
    far,
    fpi,
    hypercloning,
    interleave,
    lemon,
    solar,
    stack,
    zero_pad,
)

OLD = tiny.WIDTHS
# The methods that follow a loop of the model (`test_loops`) or a list of layers (`test_passthrough`)
# instead of new sizes.
LISTED = ("unloop", "passthrough")
DEPTH = {name: found for name, found in registry.DEPTH.items() if name not in LISTED}
GROUPS = ((3, 0, 4), (2, 1))
RAGGED = {"embed": 8, "heads": 5, "mlp": 13}
BIT, ROUNDED, NOT = "to the bit", "up to rounding", "not"
INVERSES = {"bitwise": BIT, "rounded": ROUNDED, "no": NOT}


class Row(NamedTuple):
    growth: Growth
    keeps: bool  # the function of every model
    # C D = 1; bitwise if all group sizes are powers of two
    inverts: str
    dual: bool = True  # gradients grow by the dual if the function is preserved


def to(**new: int) -> dict[str, int]:
    return {**OLD, **new}


FOUR = to(layers=4)


def heads(count: int, groups: Any) -> Growth:
    """Return the growth of three heads, each with two features and three MLP units, to more."""
    return decoalesce(to(heads=count, embed=2 * count, mlp=3 * count), heads=groups)


def registered(operator: Operator) -> Row:
    """Return the registered example of an operator with its declared properties."""
    growth = operator(OLD, operator.example, passes=(0, 1, 1), sources=(1, 0, 1))
    keeps = operator.preserves_for(growth, tiny.config(dtype="float32"))
    return Row(growth, keeps, INVERSES[operator.inverts], operator.dual)


OPERATORS = {
    **{
        name: registered(found)
        for name, found in registry.OPERATORS.items()
        if found.example and name == found.name
    },
    "decoalesce heads, far pairs": Row(heads(6, "far"), True, BIT),
    "decoalesce heads, adjacent pairs": Row(heads(6, "adjacent"), True, BIT),
    "decoalesce heads, threes": Row(heads(9, far(9, 3)), True, ROUNDED),
    "decoalesce heads, 4 + 2 + 1": Row(heads(7, ((5, 0, 6, 2), (1, 4), (3,))), False, BIT),
    "decoalesce heads, random": Row(heads(10, tiny.random_groups(10, 3, seed=1)), False, ROUNDED),
    "decoalesce mlp, random": Row(
        decoalesce(to(mlp=20), mlp=tiny.random_groups(20, 9, seed=2)), True, ROUNDED
    ),
    "decoalesce layers, far pairs": Row(decoalesce(FOUR, layers="far"), False, BIT),
    "decoalesce layers, adjacent pairs": Row(decoalesce(FOUR, layers="adjacent"), False, BIT),
    "decoalesce layers, 3 + 2": Row(decoalesce(to(layers=5), layers=GROUPS), False, ROUNDED),
    "decoalesce everything": Row(
        decoalesce(
            to(**tiny.BIG), heads="far", mlp=tiny.random_groups(18, 9, seed=3), layers="adjacent"
        ),
        False,
        ROUNDED,
    ),
    "stack, ragged": Row(stack(OLD, {"layers": 5}), False, ROUNDED),
    "interleave, ragged": Row(interleave(OLD, {"layers": 5}), False, ROUNDED),
    "fpi, ragged": Row(fpi(OLD, {"embed": 8, "heads": 5, "mlp": 13}, seed=2), False, ROUNDED),
    "hypercloning 3": Row(hypercloning(OLD, tiny.wider(3)), True, ROUNDED),
    "solar, blended": Row(solar(OLD, {"layers": 3}, blend=1), False, ROUNDED),
    "zero_pad heads and mlp": Row(zero_pad(OLD, {"heads": 5, "mlp": 13}), True, BIT),
    "aki, and layers": Row(aki(OLD, {**RAGGED, "layers": 5}, seed=4), False, NOT),
    # Copies of the residual stream with unequal shares have unequal gradients, and the backward
    # pass of a norm mixes them.
    "lemon 2": Row(lemon(OLD, tiny.wider(2), seed=6), True, ROUNDED, dual=False),
    # The norms are scaled, and coalescing does not undo that.
    "lemon, ragged": Row(lemon(OLD, RAGGED, seed=7), True, NOT, dual=False),
}

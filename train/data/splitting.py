"""Which part of the data is held out for validation, if there is no validation set."""

import math
from fractions import Fraction


def exact(fraction: float) -> Fraction:
    """The fraction that a float such as 0.02 or 0.3333 stands for."""
    return Fraction(fraction).limit_denominator(10_000)


def held_out(n: int, fraction: Fraction) -> bool:
    """Whether element ``n`` is held out.

    Element n is held out if ``floor(n f) > floor((n - 1) f)``. The held-out elements are therefore
    evenly spaced, and for f = 1/k they are the multiples of k.
    """
    return math.floor(n * fraction) > math.floor((n - 1) * fraction)

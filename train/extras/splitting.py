"""Which part of the data is held out for validation, if there is no validation set."""

from fractions import Fraction


def exact_fraction(fraction: float) -> Fraction:
    """The fraction that a float such as 0.02 or 0.3333 stands for."""
    return Fraction(fraction).limit_denominator(10_000)


def held_out(n: int, fraction: Fraction) -> bool:
    """Whether element ``n`` is held out.

    Element n is held out if ``floor(n f) > floor((n - 1) f)``. The held-out elements are therefore
    evenly spaced, and for f = 1/k they are the multiples of k.
    """
    # These are integers: a product with a `Fraction` takes a hundred times as long, and this runs
    # for each document of a corpus and for each image.
    some, every = fraction.numerator, fraction.denominator
    return n * some // every > (n - 1) * some // every


def more_held_out(held: bool, fraction: float) -> str:
    """The part of a message that says how to get more validation data.

    Args:
      held: whether ``data.valid_fraction`` of the training data are the validation data.
      fraction: the value of ``data.valid_fraction``.
    """
    if held and fraction < 0.5:
        return f"raise data.valid_fraction={fraction:g} (at most 0.5)"
    return "give more data" if held else "give more of them in the validation split of the data"

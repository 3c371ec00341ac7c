"""Which part of the data is held out for validation, if there is no validation set."""

from fractions import Fraction

import numpy as np


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


def held_out_rows(count: int, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Divide the numbers of rows without a split: for training, and for validation.

    They are shuffled first, because their order may depend on the content.
    """
    order = np.random.default_rng(0).permutation(count)
    exactly = exact_fraction(fraction)
    held = np.sort([row for i, row in enumerate(order) if held_out(i, exactly)])
    return np.setdiff1d(np.arange(count), held), held

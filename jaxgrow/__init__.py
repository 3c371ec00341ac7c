"""Grow, coalesce and interpolate Transformers: pure functions over parameter pytrees whose axes have names."""

from jaxgrow.axes import named, sizes, split
from jaxgrow.grow import grow
from jaxgrow.maps import AxisMap, Rows, compose, dual, preserves_function, swap
from jaxgrow.merge import correct, interpolate
from jaxgrow.moments import grow_optimizer

__version__ = "0.1.0"

__all__ = [
    "AxisMap",
    "Rows",
    "compose",
    "correct",
    "dual",
    "grow",
    "grow_optimizer",
    "interpolate",
    "named",
    "preserves_function",
    "sizes",
    "split",
    "swap",
]

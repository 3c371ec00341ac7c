"""Grow, coalesce and interpolate Transformers: pure functions over parameter pytrees whose axes have names."""

from jaxgrow import (
    adapters,
    axes,
    drop,
    flops,
    freeze,
    generation,
    importance,
    interop,
    ligo,
    lora,
    maps,
    matrices,
    merge,
    models,
    moments,
    muon,
    operators,
    report,
    sharding,
    symmetry,
    testing,
)
from jaxgrow._grow import grow
from jaxgrow._version import __version__
from jaxgrow.axes import named, sizes, split
from jaxgrow.generation import generate
from jaxgrow.maps import AxisMap, compose, dual, preserves_function, swap
from jaxgrow.matrices import Rows
from jaxgrow.merge import correct, interpolate
from jaxgrow.moments import grow_optimizer

__all__ = [
    "AxisMap",
    "Rows",
    "__version__",
    "adapters",
    "axes",
    "compose",
    "correct",
    "drop",
    "dual",
    "flops",
    "freeze",
    "generate",
    "generation",
    "grow",
    "grow_optimizer",
    "importance",
    "interop",
    "interpolate",
    "ligo",
    "lora",
    "maps",
    "matrices",
    "merge",
    "models",
    "moments",
    "muon",
    "named",
    "operators",
    "preserves_function",
    "report",
    "sharding",
    "sizes",
    "split",
    "swap",
    "symmetry",
    "testing",
]

"""Grow, coalesce and interpolate Transformers: pure functions over parameter pytrees whose axes have names."""

from jaxgrow import (
    adapters,
    axes,
    drop,
    experts,
    flops,
    freeze,
    fused,
    generation,
    importance,
    interop,
    layout,
    ligo,
    lora,
    maps,
    matrices,
    merge,
    models,
    moments,
    muon,
    naming,
    nnx,
    operators,
    report,
    sharding,
    symmetry,
    testing,
)
from jaxgrow._grow import grow
from jaxgrow._version import __version__
from jaxgrow.axes import named, sizes, split
from jaxgrow.fused import join_fused, split_fused
from jaxgrow.generation import generate
from jaxgrow.layout import restructured, stack_layers, unstack_layers
from jaxgrow.maps import AxisMap, compose, dual, preserves_function, swap
from jaxgrow.matrices import Rows
from jaxgrow.merge import correct, interpolate
from jaxgrow.moments import grow_optimizer
from jaxgrow.naming import by_convention, from_rules, infer

__all__ = [
    "AxisMap",
    "Rows",
    "__version__",
    "adapters",
    "axes",
    "by_convention",
    "compose",
    "correct",
    "drop",
    "dual",
    "experts",
    "flops",
    "freeze",
    "from_rules",
    "fused",
    "generate",
    "generation",
    "grow",
    "grow_optimizer",
    "importance",
    "infer",
    "interop",
    "interpolate",
    "join_fused",
    "layout",
    "ligo",
    "lora",
    "maps",
    "matrices",
    "merge",
    "models",
    "moments",
    "muon",
    "named",
    "naming",
    "nnx",
    "operators",
    "preserves_function",
    "report",
    "restructured",
    "sharding",
    "sizes",
    "split",
    "split_fused",
    "stack_layers",
    "swap",
    "symmetry",
    "testing",
    "unstack_layers",
]

"""Grow, coalesce and interpolate Transformers: pure functions on pytrees with named axes."""

from jaxgrow import (
    axes,
    checking,
    checkpoints,
    flops,
    growth,
    integrations,
    layerdrop,
    models,
    operators,
    optim,
    peft,
    plot,
    sharding,
    testing,
)
from jaxgrow._version import __version__
from jaxgrow.axes import (
    by_convention,
    from_rules,
    infer,
    join_fused,
    named,
    restructured,
    sizes,
    split,
    split_fused,
    stack_layers,
    unstack_layers,
)
from jaxgrow.checking import Checked, check_rules
from jaxgrow.growth import report, symmetry
from jaxgrow.growth.apply import grow
from jaxgrow.growth.composition import compose
from jaxgrow.growth.maps import AxisMap, dual, preserves_function, swap
from jaxgrow.growth.matrices import Rows
from jaxgrow.growth.merge import correct, interpolate
from jaxgrow.growth.moments import grow_optimizer
from jaxgrow.integrations import nnx
from jaxgrow.models import importance, upcycling
from jaxgrow.models.generation import generate
from jaxgrow.operators import ligo
from jaxgrow.optim import completep, freeze, muon
from jaxgrow.peft import adapters, lora

__all__ = [
    "AxisMap",
    "Checked",
    "Rows",
    "__version__",
    "adapters",
    "axes",
    "by_convention",
    "check_rules",
    "checking",
    "checkpoints",
    "completep",
    "compose",
    "correct",
    "dual",
    "flops",
    "freeze",
    "from_rules",
    "generate",
    "grow",
    "grow_optimizer",
    "growth",
    "importance",
    "infer",
    "integrations",
    "interpolate",
    "join_fused",
    "layerdrop",
    "ligo",
    "lora",
    "models",
    "muon",
    "named",
    "nnx",
    "operators",
    "optim",
    "peft",
    "plot",
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
    "upcycling",
]

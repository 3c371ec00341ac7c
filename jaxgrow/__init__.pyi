"""The public names of `jaxgrow` and where they are defined; `jaxgrow/__init__.py` reads this file."""

from . import (
    axes,
    checkpoints,
    flops,
    growth,
    layerdrop,
    models,
    operators,
    optim,
    sharding,
    testing,
)
from ._version import __version__
from .axes import named_init, sizes, split_boxed, stack_layers, unstack_layers
from .extras import completep, freeze, importance
from .extras.composition import compose
from .extras.other_models.fused import join_fused, split_fused
from .extras.other_models.naming import by_convention, from_rules, infer_rules
from .extras.other_models.restructuring import restructure
from .extras.other_models.rule_checks import Checked, check_rules
from .growth import symmetry
from .growth.apply import grow
from .growth.maps import AxisMap, dual, preserves_function, swap
from .growth.matrices import SparseMap
from .growth.merge import correct, interpolate
from .growth.moments import grow_optimizer
from .operators import ligo
from .optim import muon

__all__ = [
    "AxisMap",
    "Checked",
    "SparseMap",
    "__version__",
    "axes",
    "by_convention",
    "check_rules",
    "checkpoints",
    "completep",
    "compose",
    "correct",
    "dual",
    "flops",
    "freeze",
    "from_rules",
    "grow",
    "grow_optimizer",
    "growth",
    "importance",
    "infer_rules",
    "interpolate",
    "join_fused",
    "layerdrop",
    "ligo",
    "models",
    "muon",
    "named_init",
    "operators",
    "optim",
    "preserves_function",
    "restructure",
    "sharding",
    "sizes",
    "split_boxed",
    "split_fused",
    "stack_layers",
    "swap",
    "symmetry",
    "testing",
    "unstack_layers",
]

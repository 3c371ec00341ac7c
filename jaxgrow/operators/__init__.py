"""Published growth operators: short functions that return a growth for `jaxgrow.grow`.

Every function takes ``sizes``, the sizes of a model's axes (`jaxgrow.sizes`), under the axis names
that the models of this library use: ``layers``, ``embed`` (the residual stream), ``heads`` and
``mlp``. Heads are always copied completely, because the dimensions within a head are a separate
axis. With GQA, ``kv_heads`` is another axis, and operators keep every query head with its key/value
head. Growth operators also take a ``target``, the new sizes of the axes that grow, and random
operators take a ``seed``. All raise `ValueError` for an axis that they do not grow and for a size
that they cannot reach. LiGO learns its maps and has a separate module, `jaxgrow.operators.ligo`.
"""

from jaxgrow.operators import depth as _depth
from jaxgrow.operators import experts as _experts
from jaxgrow.operators import width as _width
from jaxgrow.operators.depth import (
    g_stack,
    g_stack_tokens,
    interleave,
    lidas,
    llama_pro,
    midas,
    midas_lengths,
    mslt,
    new_layers,
    solar,
    stack,
)
from jaxgrow.operators.experts import upcycle, virtual_groups
from jaxgrow.operators.multilevel import (
    Groups,
    adjacent,
    alike,
    coalesce,
    decoalesce,
    far,
    group_size,
)
from jaxgrow.operators.pruning import Units, best, keep, prune
from jaxgrow.operators.registry import OPERATORS, Operator, operator
from jaxgrow.operators.targets import Sizes
from jaxgrow.operators.width import (
    aki,
    average,
    fpi,
    hypercloning,
    lemon,
    sparkling,
    staged,
    zero_pad,
)

net2net = fpi  # the original name of the same operator

DEPTH, WIDTH, EXPERTS = (
    {
        name: found.function
        for name, found in OPERATORS.items()
        if found.function.__module__ == module.__name__
    }
    for module in (_depth, _width, _experts)
)

__all__ = [
    "DEPTH",
    "EXPERTS",
    "OPERATORS",
    "WIDTH",
    "Groups",
    "Operator",
    "Sizes",
    "Units",
    "adjacent",
    "aki",
    "alike",
    "average",
    "best",
    "coalesce",
    "decoalesce",
    "far",
    "fpi",
    "g_stack",
    "g_stack_tokens",
    "group_size",
    "hypercloning",
    "interleave",
    "keep",
    "lemon",
    "lidas",
    "llama_pro",
    "midas",
    "midas_lengths",
    "mslt",
    "net2net",
    "new_layers",
    "operator",
    "prune",
    "solar",
    "sparkling",
    "stack",
    "staged",
    "upcycle",
    "virtual_groups",
    "zero_pad",
]

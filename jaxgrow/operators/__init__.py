"""Published growth operators: short functions that return a growth for `jaxgrow.grow`.

Every function takes ``sizes``, the sizes of a model's axes (`jaxgrow.sizes`). The axes have the
names that the models of this library use: ``layers``, ``embed`` (the residual stream), ``heads``
and ``mlp``. Heads are always copied completely, because the dimensions within a head are a separate
axis. With GQA, ``kv_heads`` is another axis, and operators keep every query head with its key/value
head. Growth operators also take a ``target``, the new sizes of the axes that grow, and random
operators take a ``seed``. All raise `ValueError` for an axis that they do not grow and for a size
that they cannot reach. LiGO learns its maps and has a separate module, `jaxgrow.operators.ligo`.

The most used ones are:

==========================================  ========================================================
`jaxgrow.operators.width.hypercloning`      widen by copying units; the outputs stay the same
`jaxgrow.operators.width.lemon`             widen to any size; the outputs stay the same
`jaxgrow.operators.depth.interleave`        deepen: each layer is followed by its copy
`jaxgrow.operators.depth.stack`             deepen: all layers, then all layers again
`jaxgrow.operators.depth.llama_pro`         deepen by layers that do nothing at first
`jaxgrow.operators.multilevel.coalesce`     make a model smaller by averaging units or layers (V-cycle)
`jaxgrow.extras.operators.pruning.prune`    make a model smaller by removing the least important units
`jaxgrow.extras.operators.experts.upcycle`  turn each MLP into several experts
==========================================  ========================================================
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxgrow.axes.names import Tree
from jaxgrow.operators import depth as _depth
from jaxgrow.operators import ligo as ligo
from jaxgrow.operators import multilevel as _multilevel
from jaxgrow.operators import registry as _registry
from jaxgrow.operators import tying as _tying
from jaxgrow.operators import width as _width
from jaxgrow.operators.depth import *  # noqa: F403
from jaxgrow.operators.multilevel import *  # noqa: F403
from jaxgrow.operators.registry import Operator
from jaxgrow.operators.targets import Sizes
from jaxgrow.operators.tying import *  # noqa: F403
from jaxgrow.operators.width import *  # noqa: F403
from jaxgrow.operators.width import fpi
from jaxgrow.registry import Registry

if TYPE_CHECKING:
    from jaxgrow.operators.registry import DEPTH, EXPERTS, FORMS, OPERATORS, WIDTH, operator

net2net = fpi  # the original name of the same operator
# Functions of extras that this package also provides.
LATER: Registry[Callable[..., Tree]] = Registry("operator function")


def __getattr__(name: str) -> Callable[..., Tree]:
    """Return a function of an extra, such as `prune`, or a name of the registry of operators."""
    if name in ("DEPTH", "EXPERTS", "FORMS", "OPERATORS", "WIDTH", "operator"):
        # Import the extras. The tables contain their operators, and no other operator has their names.
        list(LATER.values())
        return getattr(_registry, name)
    if name not in LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return LATER[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "DEPTH",
    "EXPERTS",
    "FORMS",
    "OPERATORS",
    "WIDTH",
    "Operator",
    "Sizes",
    "net2net",
    "operator",
]
__all__ += _depth.__all__
__all__ += _multilevel.__all__
__all__ += _tying.__all__
__all__ += _width.__all__
__all__ += LATER  # pyright: ignore[reportUnsupportedDunderAll]

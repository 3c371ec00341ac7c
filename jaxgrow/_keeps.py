"""What each method of growth takes, and what it keeps of a model's function: for help, and for those who are about to grow."""

from collections.abc import Iterable, Mapping

import numpy as np

from jaxgrow import operators
from jaxgrow.axes import Names, axis
from jaxgrow.interop.source import Leaf
from jaxgrow.maps import Growth, Rules, by_axes, new_sizes, preserves_function, terms
from jaxgrow.matrices import Matrix, Rows, dense
from jaxgrow.models import Config

_WIDTH = "embed, heads, kv-heads, mlp"
# Of each method: the axes that it takes, and whether it keeps the function of a model whose norms come first.
METHODS = {
    "stack": ("layers", "no"),
    "interleave": ("layers", "no"),
    "g_stack": ("layers, a whole number of times", "no"),
    "mslt": ("layers, at most twice", "no"),
    "midas": ("layers, by a block of which there is a whole number", "no"),
    "lidas": ("layers, at most twice", "no"),
    "solar": ("layers, to an even number", "no"),
    "llama_pro": ("layers, at most twice", "yes, to the bit; not that of a BERT"),
    "zero_pad": (_WIDTH, "heads and mlp: yes; embed: no"),
    "fpi": (_WIDTH, "heads and mlp: yes; embed: no, up to its norms"),
    "net2net": (_WIDTH, "as fpi"),
    "aki": (f"layers, {_WIDTH}", "no"),
    "average": (f"layers, {_WIDTH}", "no"),
    "hypercloning": (f"{_WIDTH}, a whole number of times", "yes"),
    "staged": (f"{_WIDTH}: twice, all of them", "yes"),
    "lemon": (_WIDTH, "yes; of a BERT, or with LayerScale, if embed grows a whole number of times"),
    "sparkling": (_WIDTH, "no, but the size of activations"),
    "upcycle": ("experts, of a dense model", "yes"),
    "virtual_groups": ("experts, of fewer mlp units each", "yes, if active is a whole number of its parts"),
}
assert METHODS.keys() == (operators.DEPTH | operators.WIDTH | operators.EXPERTS).keys()


def keeps(growth: Growth, config: Config, method: str = "") -> bool:
    """Whether the function of a model of ``config`` stays the same, but for rounding. ``method``: what made `Rules`."""
    headless = config.predicts == "states"
    if headless and isinstance(growth, Rules) and new_sizes(growth).get("embed", 0) % config.integers()["embed"]:
        return False  # no head compensates for features that are not copied equally often
    if not isinstance(growth, Rules):
        if headless:  # the outputs are copies of the old features
            return preserves_function(growth, normed=config.normed)
        return preserves_function(growth, config.axes(), config.normed)
    if method == "lemon" and growth.eps != 1 and not config.means_stay:  # eps is scaled by spare units
        return False
    if method == "lemon" and not all(_evenly(growth, axis) for axis in config.normed if axis != "embed"):
        return False
    if not getattr(config, "norm_scale", True) and "embed" in new_sizes(growth):
        # No scale of the final norm compensates for a table that is used both ways.
        return method == "staged" and not getattr(config, "ties", False)
    return method == "staged" or (method in ("llama_pro", "lemon") and config.pre_norm)


def _evenly(growth: Rules, axis: str) -> bool:
    """Whether all units of an axis have as many copies."""
    m = by_axes(growth.rules[-1].terms[0]).get((axis,))
    return m is None or len(set(np.count_nonzero(dense(m.write), 0).tolist())) == 1


def rounding(growth: Growth, grown: Mapping[str, Leaf], made: Mapping[str, Leaf], noise: bool = False) -> list[str]:
    """What to tell of half precision about a growth that keeps the function, a line each.

    ``grown``: the leaves as they are computed; ``made``: as they are stored; ``noise``: whether some was added.
    """
    narrower = _names(
        made[path].dtype for path, leaf in grown.items() if made[path].dtype.itemsize < leaf.dtype.itemsize
    )
    half = {path: leaf for path, leaf in made.items() if leaf.dtype.itemsize < 4}
    by_growth = _names(leaf.dtype for path, leaf in half.items() if noise or not _in_powers(growth, path, leaf.names))
    way_out = "`jaxgrow report` measures the difference, and --dtype float32 avoids it"
    if narrower:
        return [f"{narrower} rounds every number; {way_out}"]
    return [f"{by_growth} rounds what is multiplied by no power of two; {way_out}"] if by_growth else []


def _names(dtypes: Iterable[np.dtype]) -> str:
    return " and ".join(sorted({dtype.name for dtype in dtypes}))


def _in_powers(growth: Growth, path: str, names: Names) -> bool:
    """Whether all that a leaf is multiplied by is a power of two, and nothing is added."""
    found = terms(growth, path, names)
    return all(_exact(m.of(n)) for term in found for axes, m in term.items() for n in names if axis(n) in axes)


def _exact(m: Matrix) -> bool:
    weight = np.asarray(m.weight if isinstance(m, Rows) else m)
    mantissa = np.frexp(np.abs(weight[weight != 0]))[0]
    return bool((mantissa == 0.5).all()) and int((weight != 0).sum(1).max(initial=0)) <= 1

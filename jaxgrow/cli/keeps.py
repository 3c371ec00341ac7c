"""Which axes does a growth method support, and does a growth preserve the function of a model?"""

from collections.abc import Iterable, Mapping

import numpy as np

from jaxgrow import operators
from jaxgrow.axes.names import Names, axis
from jaxgrow.checkpoints.source import Leaf
from jaxgrow.growth.maps import Growth, Rules, new_sizes, preserves_function, terms
from jaxgrow.growth.matrices import Matrix, Rows
from jaxgrow.models import Config

# For each method: the axes that it grows, and whether it preserves the function of a pre-LN model.
METHODS = {
    name: (
        ", ".join(found.axes).replace("_", "-") + (f" ({found.sizes})" if found.sizes else ""),
        found.preserves,
    )
    for name, found in operators.OPERATORS.items()
}


def keeps(growth: Growth, config: Config, method: str = "") -> bool:
    """Return whether a growth preserves the function of a model, up to rounding.

    Args:
      growth: the growth.
      config: the config of the model before the growth.
      method: the name of the operator that made the growth, if it made `Rules`.
    """
    if config.predicts == "states":
        return _keeps_states(growth, config, method)
    if not isinstance(growth, Rules):
        return preserves_function(growth, config.axes(), config.normed)
    if not config.norm_scale and "embed" in new_sizes(growth):
        # A norm without a scale cannot compensate for an embedding that is also the head.
        return method == "staged" and not config.ties
    return _by_operator(growth, config, method)


def _keeps_states(growth: Growth, config: Config, method: str) -> bool:
    """Same as `keeps`, for a model without a head: all output features need the same number of copies."""
    if not isinstance(growth, Rules):
        return preserves_function(growth, normed=config.normed)
    if new_sizes(growth).get("embed", 0) % config.integers()["embed"]:
        return False
    return _by_operator(growth, config, method)


def _by_operator(growth: Growth, config: Config, method: str) -> bool:
    operator = operators.OPERATORS.get(method)
    return operator is not None and operator.preserves_for(growth, config)


def rounding(
    growth: Growth, grown: Mapping[str, Leaf], made: Mapping[str, Leaf], noise: bool = False
) -> list[str]:
    """Describe how half precision rounds the result of a function-preserving growth.

    Args:
      growth: the growth.
      grown: the leaves in the dtypes in which they are computed, by path.
      made: the leaves in the dtypes in which they are stored, by path.
      noise: whether noise was added to the copies.

    Returns:
      One note, or none if the stored numbers are exact.
    """
    narrower = _names(
        made[path].dtype
        for path, leaf in grown.items()
        if made[path].dtype.itemsize < leaf.dtype.itemsize
    )
    half = {path: leaf for path, leaf in made.items() if leaf.dtype.itemsize < 4}
    by_growth = _names(
        leaf.dtype
        for path, leaf in half.items()
        if noise or not _in_powers(growth, path, leaf.names)
    )
    way_out = "`jaxgrow report` measures the difference; --dtype float32 avoids it"
    if narrower:
        return [f"every parameter is rounded to {narrower}; {way_out}"]
    return (
        [f"{by_growth} rounds parameters whose factor is not a power of two; {way_out}"]
        if by_growth
        else []
    )


def _names(dtypes: Iterable[np.dtype]) -> str:
    return " and ".join(sorted({dtype.name for dtype in dtypes}))


def _in_powers(growth: Growth, path: str, names: Names) -> bool:
    """Whether the growth of a leaf is exact: only factors that are powers of two, and no sums."""
    for term in terms(growth, path, names):
        for axes, m in term.items():
            mapped = [n for n in names if axis(n) in axes]
            if not all(_exact(m.of(n)) for n in mapped):
                return False
    return True


def _exact(m: Matrix) -> bool:
    weight = np.asarray(m.weight if isinstance(m, Rows) else m)
    mantissa = np.frexp(np.abs(weight[weight != 0]))[0]
    return bool((mantissa == 0.5).all()) and int((weight != 0).sum(1).max(initial=0)) <= 1

"""Which axes does a growth method support, and does a growth preserve the function of a model?"""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from jaxgrow import operators
from jaxgrow.axes.names import Names, axis_of
from jaxgrow.checkpoints.hf.storage import Form
from jaxgrow.checkpoints.io.files import listed
from jaxgrow.checkpoints.source import Leaf
from jaxgrow.growth.maps import Growth, Rules, new_sizes, preserves_function, terms
from jaxgrow.growth.matrices import SparseMap
from jaxgrow.models import Config


def described_methods() -> dict[str, tuple[str, str]]:
    """Return the axes that each method grows, and whether it preserves a pre-LN model's function.

    Methods that were registered in this process, such as a user's own, are among them.
    """
    return {
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
    growth: Growth,
    grown: Mapping[str, Leaf],
    cast: Mapping[str, Leaf],
    forms: tuple[Mapping[str, Form], Mapping[str, Form]],
    noise: bool = False,
) -> list[str]:
    """Describe how half precision rounds the result of a function-preserving growth.

    Args:
      growth: the growth.
      grown: the leaves in the dtypes in which they are computed, by path.
      cast: the leaves in the new dtypes, by path.
      forms: how the leaves are stored before and after the growth (`checkpoints.stored_forms`).
      noise: whether noise was added to the copies.

    Returns:
      Notes; none if the stored numbers are exact.
    """
    narrower = _names(
        cast[path].dtype
        for path, leaf in grown.items()
        if cast[path].dtype.itemsize < leaf.dtype.itemsize
    )
    way_out = "`jaxgrow report` measures the difference; --dtype float32 avoids it"
    if narrower:
        return [f"every parameter is rounded to {narrower}; {way_out}"]
    before, after = forms
    half = {path: form.dtype for path, form in after.items() if form.dtype.itemsize < 4}
    by_growth = [p for p in half if noise or not _in_powers(growth, p, cast[p].names)]
    stored = [
        p for p in half if not _stored_exactly(growth, p, cast[p].names, before.get(p), after[p])
    ]
    notes = []
    if by_growth:
        dtypes = _names(half[p] for p in by_growth)
        notes.append(f"{dtypes} rounds parameters whose factor is not a power of two; {way_out}")
    if stored:
        dtypes = _names(half[p] for p in stored)
        notes.append(
            f"{dtypes} rounds {listed(stored)}, because the architecture stores such parameters "
            f"scaled by a factor of the hidden size, or minus one; {way_out}"
        )
    return notes


def _names(dtypes: Iterable[np.dtype]) -> str:
    return " and ".join(sorted({dtype.name for dtype in dtypes}))


def _matrices(growth: Growth, path: str, names: Names) -> Iterator[np.ndarray]:
    """The weights by which a growth maps the axes of a leaf."""
    for term in terms(growth, path, names):
        for axes, m in term.items():
            for name in names:
                if axis_of(name) in axes:
                    matrix = m.of(name)
                    yield np.asarray(matrix.weight if isinstance(matrix, SparseMap) else matrix)


def _in_powers(growth: Growth, path: str, names: Names) -> bool:
    """Whether the growth of a leaf is exact: only factors that are powers of two, and no sums."""
    return all(map(_exact, _matrices(growth, path, names)))


def _exact(weight: np.ndarray) -> bool:
    mantissa = np.frexp(np.abs(weight[weight != 0]))[0]
    return bool((mantissa == 0.5).all()) and int((weight != 0).sum(1).max(initial=0)) <= 1


def _stored_exactly(
    growth: Growth, path: str, names: Names, before: Form | None, after: Form
) -> bool:
    """Whether the change between the stored forms of a leaf is exact in half precision.

    A leaf that is stored shifted, such as a norm scale minus one, must not change at all.
    """
    times, plus = (1.0, 0.0) if before is None else (before.times, before.plus)
    power = np.log2(after.times / times)
    if plus or after.plus:
        unchanged = plus == after.plus and np.isclose(power, 0)
        weights = _matrices(growth, path, names)
        return bool(unchanged) and all((w[w != 0] == 1).all() for w in weights)
    return bool(np.isclose(power, np.round(power)))

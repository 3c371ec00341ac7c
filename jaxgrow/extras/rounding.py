"""How does half precision round the result of a growth that preserves the function?"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxgrow.axes.names import Names, axis_of
from jaxgrow.checkpoints.hf import storage
from jaxgrow.checkpoints.hf.base import Family
from jaxgrow.checkpoints.hf.storage import HuggingFace
from jaxgrow.checkpoints.io.files import listed
from jaxgrow.checkpoints.source import Checkpoint, Source
from jaxgrow.checkpoints.writing import Output
from jaxgrow.cli.writing import ROUNDING
from jaxgrow.growth.maps import Growth, terms
from jaxgrow.growth.matrices import SparseMap

_WAY_OUT = "`jaxgrow report` measures the difference; --dtype float32 avoids it"


class StoredForm(NamedTuple):
    """How the values of a leaf are stored: ``times * leaf + plus``, in ``dtype``."""

    times: float
    plus: float
    dtype: np.dtype


def rounding_notes(
    source: Checkpoint, model: Source, growth: Growth, output: Output, noise: bool = False
) -> list[str]:
    """Describe how half precision rounds the result of a growth that preserves the function.

    Args:
      source: the model before the growth.
      model: the grown model, in its new dtypes.
      growth: the growth.
      output: the new checkpoint.
      noise: whether noise was added to the copies.

    Returns:
      Notes; none if the stored numbers are exact.
    """
    new = output.dtype
    if new and any(jnp.promote_types(x.dtype, new) != new for x in source.leaves.values()):
        return [f"every parameter is rounded to {new}; {_WAY_OUT}"]
    before = _plain_forms(source)
    if isinstance(source, HuggingFace):
        before = _tensor_forms(source, source.family)
    after = _plain_forms(model)
    if output.is_hf([source]):
        after = _tensor_forms(model, storage.family_for(model.config, source.hf_config)[0])
    half = {path: form for path, form in after.items() if form.dtype.itemsize < 4}
    weights = {path: list(_weights(growth, path, model.leaves[path].names)) for path in half}
    by_growth = [path for path in half if noise or not all(map(_is_exact, weights[path]))]
    plain = StoredForm(1.0, 0.0, np.dtype(np.float32))
    stored = [
        path
        for path, form in half.items()
        if not _is_stored_exactly(before.get(path, plain), form, weights[path])
    ]
    notes = []
    if by_growth:
        dtypes = _dtype_names(half, by_growth)
        notes += [f"{dtypes} rounds parameters whose factor is not a power of two; {_WAY_OUT}"]
    if stored:
        notes += [
            f"{_dtype_names(half, stored)} rounds {listed(stored)}, because the architecture stores "
            f"such parameters scaled by a factor of the hidden size, or minus one; {_WAY_OUT}"
        ]
    return notes


def _tensor_forms(source: Source, family: Family) -> dict[str, StoredForm]:
    """Return how an architecture stores the leaves of a model, by path."""
    names = family.names(source.config)
    dtypes = storage.tensor_dtypes(source, names)
    return {p: StoredForm(place.times, place.plus, dtypes[p]) for p, place in names.items()}


def _plain_forms(source: Source) -> dict[str, StoredForm]:
    return {path: StoredForm(1.0, 0.0, leaf.dtype) for path, leaf in source.leaves.items()}


def _dtype_names(forms: Mapping[str, StoredForm], paths: Iterable[str]) -> str:
    return " and ".join(sorted({forms[path].dtype.name for path in paths}))


def _weights(growth: Growth, path: str, names: Names) -> Iterator[np.ndarray]:
    """The weights by which a growth maps the axes of a leaf."""
    for term in terms(growth, path, names):
        for axes, m in term.items():
            for name in names:
                if axis_of(name) in axes:
                    matrix = m.of(name)
                    yield np.asarray(matrix.weight if isinstance(matrix, SparseMap) else matrix)


def _is_exact(weight: np.ndarray) -> bool:
    """Whether the weights are powers of two, and no values are added."""
    mantissa = np.frexp(np.abs(weight[weight != 0]))[0]
    return bool((mantissa == 0.5).all()) and int((weight != 0).sum(1).max(initial=0)) <= 1


def _is_stored_exactly(before: StoredForm, after: StoredForm, weights: list[np.ndarray]) -> bool:
    """Whether the change between the stored forms of a leaf is exact in half precision.

    A leaf that is stored shifted, such as a norm scale minus one, must not change at all.
    """
    power = np.log2(after.times / before.times)
    if before.plus or after.plus:
        unchanged = before.plus == after.plus and np.isclose(power, 0)
        return bool(unchanged) and all((w[w != 0] == 1).all() for w in weights)
    return bool(np.isclose(power, np.round(power)))


ROUNDING.add("notes", rounding_notes)

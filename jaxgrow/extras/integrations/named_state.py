"""How is an optimizer state in a safetensors file grown? It is read without PyTorch.

The file has one tensor ``[...]state.PARAMETER.KIND`` for each parameter and kind of state. These
are the names of ``get_optimizer_state_dict(.., flatten_optimizer_state_dict=True)`` of PyTorch.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxgrow.checkpoints.hf.storage import HuggingFace
from jaxgrow.checkpoints.io import safetensors
from jaxgrow.checkpoints.io.files import CheckpointError, listed
from jaxgrow.untrusted import chosen_file

FILE = "optimizer.safetensors"
_KEY = re.compile(r"^(?:.*\.)?state\.(?P<parameter>.+)\.(?P<kind>\w+)$")


@dataclass(frozen=True)
class State:
    """The optimizer state of a model.

    Attributes:
      arrays: ``{kind: {parameter: array}}``, such as ``{"exp_avg": {"model.norm.weight": x}}``.
      scalars: ``{parameter: {kind: value}}`` for values without axes, such as ``step``.
    """

    arrays: dict[str, dict[str, Any]]
    scalars: dict[str, dict[str, Any]]


def parameters(keys: Iterable[str], model: HuggingFace) -> dict[str, tuple[str, str]]:
    """``{key: (parameter, kind)}`` of the keys that belong to a parameter of the model."""
    found = {}
    for key in keys:
        match = _KEY.match(key)
        if match and match["parameter"] in model.tensors:
            found[key] = (match["parameter"], match["kind"])
    return found


def read(file: Path, model: HuggingFace) -> State:
    """Read an optimizer state. The values of its tensors are read when they are needed.

    Args:
      file: the file.
      model: the model that it belongs to.

    Returns:
      The state, by the names of the tensors of ``model``.

    Raises:
      CheckpointError: no tensor belongs to a parameter of the model.
    """
    stored = safetensors.header(chosen_file(file))
    state = State({}, {})
    for key, (name, kind) in parameters(stored, model).items():
        tensor = stored[key]
        if tensor.shape in ((), (1,)) and model.tensors[name].shape != tensor.shape:
            state.scalars.setdefault(name, {})[kind] = tensor.read()
        else:
            state.arrays.setdefault(kind, {})[name] = tensor
    if not state.arrays:
        raise CheckpointError(
            f"{file} has no optimizer state for the parameters in {model.folder}. Its tensors are "
            f"{listed(list(stored))}"
        )
    return state


def write(file: Path, model: HuggingFace, state: State, like: Path) -> None:
    """Write an optimizer state with the dtypes and the other tensors of an older file.

    Args:
      file: the new file.
      model: the model that ``like`` belongs to, before the growth.
      state: the state of the grown model.
      like: the older file.
    """
    stored = safetensors.header(chosen_file(like))
    of = parameters(stored, model)
    key, (name, kind) = next(iter(of.items()))
    prefix = key.removesuffix(f"{name}.{kind}")
    dtypes = {kind: stored[key].dtype for key, (_, kind) in of.items()}
    values: dict[str, np.ndarray] = {}
    for kind, arrays in state.arrays.items():
        values |= {f"{prefix}{name}.{kind}": x.astype(dtypes[kind]) for name, x in arrays.items()}
    for name, entry in state.scalars.items():
        values |= {f"{prefix}{name}.{kind}": x for kind, x in entry.items()}
    planned = [
        safetensors.Planned(key, x.dtype, x.shape, _constant(x)) for key, x in values.items()
    ]
    planned += [
        safetensors.Planned(key, x.dtype, x.shape, _constant(x))
        for key, x in stored.items()
        if key not in of
    ]
    safetensors.write_file(file, planned)


def _constant(
    x: safetensors.Tensor | np.ndarray,
) -> Callable[[], safetensors.Tensor | np.ndarray]:
    return lambda: x

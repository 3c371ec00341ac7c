"""The Hugging Face architectures that can be read and written."""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from jaxgrow.axes.names import Names
from jaxgrow.checkpoints.hf import families
from jaxgrow.checkpoints.hf.base import Family
from jaxgrow.checkpoints.hf.tensor_layout import TensorLayout
from jaxgrow.checkpoints.io.safetensors import Tensor
from jaxgrow.registry import Registry

FAMILIES: Registry[Family] = Registry("architecture")
#: Readers of folders with more than a model, or with other names. Each returns the remaining content,
#: and remarks for the user: "text model" takes the folder, its ``config.json`` and tensors; "predicted
#: layers" a ``config.json`` and the key of the number of layers; "unwrapped" tensors, the
#: architecture, the config and the folder, and also returns the architecture, which has no head if
#: that is missing; "predicted tensors" tensors, the layouts of leaves, and the number of layers if
#: further ones are left out.
NAMING: Registry[Callable[..., Any]] = Registry("naming")
#: Why a folder is not read or replaced, or a model not stored; the empty text without a reason.
#: "quantised" takes the folder, its ``config.json`` and tensors; "empty" takes tensors; "other head"
#: takes the model; "misfits" the model whose tensors do not fit, the file ``config.json``, and whether
#: further layers are left out; "unsupported" a ``config.json``; "not stored" the config of a model,
#: and the errors of the architectures that have its head; "other content" the folder to replace.
DIAGNOSES: Registry[Callable[..., str]] = Registry("diagnosis")
#: The layouts of leaves, from those in an architecture, with the layouts that tensors have for
#: fused experts; from tensors, the axis names and shapes of leaves, and the size of every axis.
StoredExperts: TypeAlias = Callable[
    [
        Mapping[str, TensorLayout],
        Mapping[str, Tensor],
        Mapping[str, tuple[Names, tuple[int, ...]]],
        Mapping[str, int],
    ],
    dict[str, TensorLayout],
]
STORED_EXPERTS: Registry[StoredExperts] = Registry("stored experts")


def register_families(*added: Family) -> None:
    """Make architectures readable and writable.

    The modules in `jaxgrow.checkpoints.hf.families` are registered on import.

    Args:
      added: the architectures. If several can store the same model, the pre-training architecture
        comes first.

    Raises:
      ValueError: an architecture of this name exists.
    """
    for family in added:
        FAMILIES.add(family.architecture, family)


for _module in pkgutil.iter_modules(families.__path__, f"{families.__name__}."):
    register_families(*importlib.import_module(_module.name).FAMILIES)

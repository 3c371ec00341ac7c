"""The Hugging Face architectures that can be read and written."""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import TypeAlias

from jaxgrow.checkpoints.hf import families
from jaxgrow.checkpoints.hf.base import Family
from jaxgrow.checkpoints.io.safetensors import Tensor
from jaxgrow.registry import Registry
from jaxgrow.typed import Json

FAMILIES: Registry[Family] = Registry("architecture")
#: From a ``config.json`` and tensors to those of the text model in them, and a note for the user.
TextPart: TypeAlias = Callable[[Json, Mapping[str, Tensor]], tuple[Json, Mapping[str, Tensor], str]]
#: Architectures that are read as the text model that they contain.
TEXT_PARTS: Registry[TextPart] = Registry("text part")


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

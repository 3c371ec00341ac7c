"""The public names of `jaxgrow.checkpoints` and where they are defined."""

from . import changed as changed
from . import hf as hf
from . import io as io
from . import orbax as orbax
from . import source as source
from ._transform import (
    config_notes,
    load,
    open_checkpoint,
    save,
    stored_forms,
    transform,
    write,
)
from .changed import Cast, Noisy
from .hf.base import Family, TensorLayout
from .hf.registry import FAMILIES
from .hf.upcycled import Upcycled
from .io.files import CheckpointError
from .source import Grown, Interpolated, Loaded, Source

__all__ = [
    "FAMILIES",
    "Cast",
    "CheckpointError",
    "Family",
    "Grown",
    "Interpolated",
    "Loaded",
    "Noisy",
    "Source",
    "TensorLayout",
    "Upcycled",
    "config_notes",
    "load",
    "open_checkpoint",
    "save",
    "stored_forms",
    "transform",
    "write",
]

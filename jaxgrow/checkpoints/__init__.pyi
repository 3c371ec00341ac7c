"""The public names of `jaxgrow.checkpoints` and where they are defined."""

from . import changed as changed
from . import hf as hf
from . import io as io
from . import orbax as orbax
from . import source as source
from .changed import Cast
from .hf.base import Family
from .hf.registry import FAMILIES
from .hf.tensor_layout import TensorLayout
from .io.files import CheckpointError
from .opening import load, open_checkpoint
from .source import Grown, Interpolated, Loaded, Source
from .writing import Output, Written, save, transform, write

__all__ = [
    "FAMILIES",
    "Cast",
    "CheckpointError",
    "Family",
    "Grown",
    "Interpolated",
    "Loaded",
    "Output",
    "Source",
    "TensorLayout",
    "Written",
    "load",
    "open_checkpoint",
    "save",
    "transform",
    "write",
]

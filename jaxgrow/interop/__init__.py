"""Checkpoints of Hugging Face and Orbax: read, transformed and written, tensor by tensor, without PyTorch."""

from jaxgrow.interop._transform import load, open_checkpoint, save, transform, write
from jaxgrow.interop.changed import Cast, Noisy
from jaxgrow.interop.families import FAMILIES
from jaxgrow.interop.family import Family, Stored
from jaxgrow.interop.files import CheckpointError
from jaxgrow.interop.source import Grown, Interpolated, Loaded, Source
from jaxgrow.interop.upcycled import Upcycled

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
    "Stored",
    "Upcycled",
    "load",
    "open_checkpoint",
    "save",
    "transform",
    "write",
]

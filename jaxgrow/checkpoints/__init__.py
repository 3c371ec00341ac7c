"""Read, transform and write Hugging Face and Orbax checkpoints without PyTorch.

A Hugging Face checkpoint is transformed with one tensor in memory at a time. An Orbax checkpoint is
loaded completely.
"""

from jaxgrow.checkpoints._transform import (
    load,
    open_checkpoint,
    save,
    stored_forms,
    transform,
    write,
)
from jaxgrow.checkpoints.changed import Cast, Noisy
from jaxgrow.checkpoints.hf.base import Family, Stored
from jaxgrow.checkpoints.hf.registry import FAMILIES
from jaxgrow.checkpoints.hf.upcycled import Upcycled
from jaxgrow.checkpoints.io.files import CheckpointError
from jaxgrow.checkpoints.source import Grown, Interpolated, Loaded, Source

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
    "stored_forms",
    "transform",
    "write",
]

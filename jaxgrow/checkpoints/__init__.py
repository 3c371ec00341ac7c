"""Read, transform and write Hugging Face and Orbax checkpoints without PyTorch.

Only one tensor is in memory at a time, except with Orbax.
"""

from jaxgrow.checkpoints._transform import load, open_checkpoint, save, transform, write
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
    "transform",
    "write",
]

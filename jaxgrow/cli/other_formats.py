"""How do ``jaxgrow inspect`` and ``jaxgrow grow`` find the extra for a checkpoint of another trainer?"""

import argparse
from pathlib import Path
from typing import Protocol

from jaxgrow.cli.errors import refuse_options
from jaxgrow.registry import Registry


class CheckpointFormat(Protocol):
    """Commands for checkpoints that `jaxgrow.checkpoints.open_checkpoint` cannot open."""

    def accepts(self, folder: Path, a: argparse.Namespace) -> bool:
        """Return whether a folder is such a checkpoint, or the arguments choose such a format."""
        ...

    def inspect(self, a: argparse.Namespace) -> None:
        """Run ``jaxgrow inspect``."""
        ...

    def grow(self, a: argparse.Namespace) -> None:
        """Run ``jaxgrow grow``."""
        ...


#: The formats by their names.
CHECKPOINT_FORMATS: Registry[CheckpointFormat] = Registry("checkpoint format")


def format_of(folder: Path, a: argparse.Namespace) -> CheckpointFormat | None:
    """Find the format of a checkpoint; None if it is one that this library writes."""
    found = next((f for f in CHECKPOINT_FORMATS.values() if f.accepts(folder, a)), None)
    if found is None:
        refuse_options(a, "only checkpoints of other trainers need it", "head_dim")
    return found

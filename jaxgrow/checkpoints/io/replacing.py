"""When may a new checkpoint replace an existing folder?

A folder may be replaced if it is empty, or if it holds a checkpoint and nothing else.
"""

import os
from pathlib import Path

from jaxgrow.checkpoints.hf.registry import DIAGNOSES
from jaxgrow.checkpoints.io.files import CheckpointError


def may_become(target: Path, sources: list[Path], overwrite: bool) -> None:
    """Check that a new folder may be written to ``target``.

    Args:
      target: the path of the new folder.
      sources: folders that the target must not overlap.
      overwrite: whether an existing checkpoint may be replaced.

    Raises:
      CheckpointError: the target overlaps a source, exists although ``overwrite`` is false, is not
        a checkpoint, or holds other files besides a checkpoint.
    """
    for source in sources:
        a = target.resolve()
        b = source.resolve()
        if a == b or a.is_relative_to(b) or b.is_relative_to(a):
            raise CheckpointError(
                f"{target} is the source {source}, contains it, or is inside it. Choose another folder"
            )
    if not os.path.lexists(target):
        above = next(p for p in target.absolute().parents if os.path.lexists(p))
        if not above.is_dir():
            raise CheckpointError(
                f"{target} cannot be written, because {above} is not a folder. Choose another path"
            )
        return
    if target.is_symlink() or not target.is_dir():
        raise CheckpointError(f"{target} exists and is not a folder. Choose another path")
    if os.path.ismount(target):
        raise CheckpointError(
            f"{target} is a mount point, which cannot be replaced. Choose a folder in it"
        )
    if any(target.iterdir()) and (why := DIAGNOSES["other content"](target)):
        raise CheckpointError(f"{target} exists and {why}. Choose another folder")
    if not overwrite:
        raise CheckpointError(
            f"{target} exists; --overwrite replaces it (in Python: overwrite=True)"
        )

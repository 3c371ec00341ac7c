"""How are the other files of a checkpoint of another trainer copied?"""

import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxgrow.checkpoints.io.files import listed
from jaxgrow.untrusted import (
    UntrustedError,
    chosen_file,
    copy_file,
    lies_inside,
    narrow_permissions,
)


def copy_tree(source: Path, target: Path, home: Path) -> list[str]:
    """Copy a file, or a folder with everything in it, without the links that lead out of ``home``.

    A link to a file in ``home`` becomes a file. A link to a folder is not copied, because it could
    contain itself. Nothing in the target is more open than its source.

    Args:
      source: the file or folder, which is inside ``home``.
      target: the new path, which does not exist.
      home: the folder that the user named.

    Returns:
      The paths below ``home`` that were not copied: such links, devices and FIFOs.
    """
    return list(_copy_inside(source, target, home.resolve()))


def _copy_inside(source: Path, target: Path, root: Path) -> Iterator[str]:
    mode = source.lstat().st_mode
    if stat.S_ISDIR(mode):
        target.mkdir()
        for inner in sorted(source.iterdir()):
            yield from _copy_inside(inner, target / inner.name, root)
        narrow_permissions(target, mode)
        return
    try:
        file = chosen_file(source)
    except (UntrustedError, OSError):  # not a regular file, or a link that leads to no file
        yield str(source)
        return
    # The links are followed once, so the copied file is the one that this checks.
    if lies_inside(file.path, root):
        copy_file(file, target)
    else:
        yield str(source)


def not_copied(left_out: Sequence[str]) -> str:
    """The note about files that were not copied because of their links (`copy_tree`)."""
    return (
        f"not copied, because they are links that lead out of the folder or to a folder, or no "
        f"regular files: {listed(left_out)}. Replace each link by its file to keep it"
    )

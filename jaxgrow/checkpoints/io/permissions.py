"""How open may a new folder be? No more open than the folders that it is made of, or replaces.

The umask still applies. The owner may always read and write the new files.
"""

import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from jaxgrow.untrusted import narrow_permissions


class _Modes:
    """The permissions of everything in a folder, by relative path."""

    def __init__(self, folder: Path):
        self._files: dict[str, int] = {}
        self._folders: dict[str, int] = {}
        for name, mode in _visible_modes(folder):
            kind = self._folders if stat.S_ISDIR(mode) else self._files
            kind[name] = stat.S_IMODE(mode)

    def of(self, name: str, folder: bool) -> int:
        """The permissions of a path, or what all such paths have in common if it does not exist."""
        known = self._folders if folder else self._files
        if name in known:
            return known[name]
        common = 0o777
        for mode in known.values():
            common &= mode
        return common


def keep_private(new: Path, olds: Iterable[Path]) -> None:
    """Remove permissions of a new folder that an older folder does not give.

    A new file gets the permissions of the file with the same name, or those that all files of the
    older folder have.

    Args:
      new: the new folder.
      olds: the folders that it is made of, or replaces.
    """
    modes = [_Modes(old) for old in olds]
    for name, mode in list(_visible_modes(new)):
        for old in modes:
            narrow_permissions(new / name, old.of(name, stat.S_ISDIR(mode)))


def _visible_modes(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield relative path and mode of the folder, and of everything in it that is not hidden.

    Hidden files, such as locks, do not get into a new folder.
    """
    for where, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield os.path.relpath(where, folder), os.stat(where).st_mode
        for name in files:
            path = os.path.join(where, name)
            if not name.startswith(".") and os.path.isfile(path):
                yield os.path.relpath(path, folder), os.stat(path).st_mode

"""How open may a new folder be? No more open than the folders that it is made of, or replaces.

The umask still applies. The owner may always read and write the new files.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from jaxgrow.untrusted import narrow_permissions


def keep_private(new: Path, olds: Iterable[Path]) -> None:
    """Remove permissions of a new folder that an older folder does not give.

    A new file gets the permissions of the file with the same name, or those that all files of the
    older folder have.

    Args:
      new: the new folder.
      olds: the folders that it is made of, or replaces.
    """
    for old in olds:
        known = dict(_visible_modes(old))
        common = {True: 0o777, False: 0o777}
        for (is_folder, _), mode in known.items():
            common[is_folder] &= mode
        for is_folder, name in [*dict(_visible_modes(new))]:
            narrow_permissions(new / name, known.get((is_folder, name), common[is_folder]))


def _visible_modes(folder: Path) -> Iterator[tuple[tuple[bool, str], int]]:
    """Yield the mode of a folder, and of everything in it that is not hidden.

    Each comes with whether it is a folder, and its relative path. Hidden files, such as locks, do
    not get into a new folder.
    """
    for where, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield (True, os.path.relpath(where, folder)), os.stat(where).st_mode
        for name in files:
            path = os.path.join(where, name)
            if not name.startswith(".") and os.path.isfile(path):
                yield (False, os.path.relpath(path, folder)), os.stat(path).st_mode

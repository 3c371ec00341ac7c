"""How are small files of text, JSON or arrays written atomically, and checked when they are read?

The module also locks folders.
"""

import fcntl
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxgrow.checkpoints.io.folders import atomic_file
from jaxgrow.typed import Json
from jaxgrow.untrusted import UntrustedError, checked_path, file_limits
from train.common.errors import UserError

_PART = re.compile(r"\..+\.[0-9a-f]{16}\.part")


def delete_parts(folder: Path) -> None:
    """Delete the temporary files of `jaxgrow.checkpoints.io.folders.atomic_file` of killed processes.

    No other process may write into the folder.
    """
    for path in folder.glob(".*.part"):
        if _PART.fullmatch(path.name) and path.is_file() and not path.is_symlink():
            path.unlink()


def write_bytes(path: Path, content: bytes) -> None:
    with atomic_file(path) as part:
        part.write_bytes(content)


def write_text(path: Path, content: str) -> None:
    write_bytes(path, content.encode())


def write_record(path: Path, content: object) -> None:
    write_text(path, json.dumps(content, indent=1) + "\n")


def read_record(path: Path, way_out: str, keys: Sequence[str] = ()) -> Json:
    """Read the JSON object in ``path``.

    Args:
      path: the file.
      way_out: end of the error message, which says how to restore the file.
      keys: keys that the object must have.

    Raises:
      UserError: the file is missing or damaged.
    """
    if not os.path.lexists(path):
        raise UserError(f"{path} is missing; {way_out}")
    content = read_own(path, way_out)
    try:
        file_limits().check(str(path), record=len(content))
        return parsed_json(content, keys)
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}; {way_out}") from error


def read_own(path: Path, way_out: str = "remove it") -> bytes:
    """Return the content of a regular file in the folder of a run.

    Raises:
      UserError: it is missing, too large, not a regular file, or a link out of its folder.
    """
    try:
        with checked_path(path.parent, path.name).open() as file:
            file_limits().check(str(path), bytes=os.fstat(file.fileno()).st_size)
            return file.read()
    except UntrustedError as error:
        raise UserError(f"{error}; {way_out}") from error


def parsed_json(content: bytes, keys: Sequence[str] = ()) -> Json:
    """Parse the JSON object in ``content``, which must have these ``keys``.

    Raises:
      ValueError: the content is not such an object; the message says why.
    """
    if not content.strip():
        raise ValueError("it is empty")
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError("its lists are nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"it contains {type(value).__name__}, not a JSON object")
    if missing := [key for key in keys if key not in value]:
        raise ValueError(f"it has no {' and no '.join(map(repr, missing))}")
    return value


def write_arrays(path: Path, about: Json, arrays: Json) -> None:
    """Write an npz file of named arrays, with a JSON description ``about``."""
    with atomic_file(path) as part, part.open("wb") as file:
        every: Json = {"about": json.dumps(about)} | {
            name: np.asarray(x) for name, x in arrays.items()
        }
        np.savez(file, **every)


def locked_folder(folder: Path) -> int | None:
    """Lock a folder until the returned handle is closed. Removing files in it does not unlock it.

    Returns:
      The handle, or None if the file system can lock only files, such as NFS.

    Raises:
      BlockingIOError: another process has the lock.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise
    except OSError:
        os.close(handle)
        return None
    return handle

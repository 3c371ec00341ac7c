"""How are small files of text, JSON or arrays written atomically, and checked when they are read?

The module also has locks between processes.
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np

from jaxgrow.checkpoints.io.folders import sync_folder
from train.common.errors import UserError

T = TypeVar("T")


@contextmanager
def appears_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path, which replaces ``path`` if the block succeeds.

    It replaces ``path`` only after its content is on disk. After a crash or a power failure,
    ``path`` therefore has either its old content or the complete new content.
    """
    part = path.with_name(f"{path.name}.part")
    yield part
    with part.open("rb+") as file:
        os.fsync(file.fileno())
    os.replace(part, path)
    sync_folder(path.parent)


def write_text(path: Path, content: str) -> None:
    with appears_whole(path) as part:
        part.write_text(content, "utf-8")


def write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=1) + "\n")


def read_json(path: Path, way_out: str, keys: Sequence[str] = ()) -> dict[str, Any]:
    """Read the JSON object in ``path``.

    Args:
      path: the file.
      way_out: end of the error message, which says how to restore the file.
      keys: keys that the object must have.

    Raises:
      UserError: the file is missing or damaged.
    """
    try:
        return checked_json(path.read_bytes(), keys)
    except FileNotFoundError:
        raise UserError(f"{path} is missing; {way_out}") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}; {way_out}") from error


def checked_json(content: bytes, keys: Sequence[str] = ()) -> dict[str, Any]:
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


def write_arrays(path: Path, about: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    """Write an npz file of named arrays, with a JSON description ``about``."""
    with appears_whole(path) as part, part.open("wb") as file:
        every: dict[str, Any] = {"about": json.dumps(about)} | {
            name: np.asarray(x) for name, x in arrays.items()
        }
        np.savez(file, **every)


def read_arrays(
    path: Path, make: Callable[[dict[str, Any], dict[str, np.ndarray]], T], what: str, way_out: str
) -> T:
    """Return ``make(about, arrays)`` for a file that `write_arrays` wrote.

    Args:
      path: the file.
      make: function that builds the result from the description and the arrays.
      what: name of the content, for error messages.
      way_out: end of the error message for a missing file, which says how to get it.

    Raises:
      UserError: the file is missing, damaged, or has other content.
    """
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        return make(json.loads(str(arrays.pop("about"))), arrays)
    except FileNotFoundError:
        raise UserError(f"there is no file {path} with {what}; {way_out}") from None
    except Exception as error:
        raise UserError(
            f"{path} has no readable {what}: {type(error).__name__}: {error}"
        ) from error


def lock(path: Path, *, wait: bool) -> IO[str]:
    """Lock the file ``path`` until it is closed. The system closes it when the process ends.

    Args:
      path: the file.
      wait: whether to wait until another process releases the lock.

    Raises:
      BlockingIOError: another process has the lock, and ``wait`` is False.
    """
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BaseException:
        file.close()
        raise
    return file

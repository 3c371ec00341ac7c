"""Small files of text, JSON or arrays: written whole or not at all, checked when they are read; and locks between processes."""

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
    """A path to write to, which becomes ``path`` if the block succeeds, when its content is on the disk.

    After a crash or a power cut ``path`` has its old content or the new one.
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
    """The JSON object in ``path``, which must have these ``keys``.

    Raises:
      UserError: the file is missing or damaged; the message ends with ``way_out``, which says how
        to get it back.
    """
    try:
        return checked_json(path.read_bytes(), keys)
    except FileNotFoundError:
        raise UserError(f"{path} is missing; {way_out}") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}; {way_out}") from error


def checked_json(content: bytes, keys: Sequence[str] = ()) -> dict[str, Any]:
    """The JSON object that ``content`` is, which must have these ``keys``.

    Raises:
      ValueError: it is something else; the message says what.
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
        raise ValueError(f"it holds {type(value).__name__}, not a JSON object")
    if missing := [key for key in keys if key not in value]:
        raise ValueError(f"it has no {' and no '.join(map(repr, missing))}")
    return value


def write_arrays(path: Path, about: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    """An npz file of arrays by name, with what they are, as JSON."""
    with appears_whole(path) as part, part.open("wb") as file:
        every: dict[str, Any] = {"about": json.dumps(about)} | {
            name: np.asarray(x) for name, x in arrays.items()
        }
        np.savez(file, **every)


def read_arrays(
    path: Path, make: Callable[[dict[str, Any], dict[str, np.ndarray]], T], what: str, way_out: str
) -> T:
    """``make(about, arrays)`` of a file that `write_arrays` wrote, which is to hold ``what``.

    Raises:
      UserError: it is missing, damaged, or holds something else.
    """
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        return make(json.loads(str(arrays.pop("about"))), arrays)
    except FileNotFoundError:
        raise UserError(f"there is no file {path}, of {what}; {way_out}") from None
    except Exception as error:
        raise UserError(
            f"{path} holds no {what} that can be read: {type(error).__name__}: {error}"
        ) from error


def lock(path: Path, *, wait: bool) -> IO[str]:
    """The file ``path``, locked until it is closed; the system closes it, however a process ends.

    Raises:
      BlockingIOError: another process holds it, and this one is not to wait.
    """
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BaseException:
        file.close()
        raise
    return file

"""Files that appear whole or not at all, of text or of arrays, and locks between processes."""

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np

from train.errors import UserError

T = TypeVar("T")


@contextmanager
def appears_whole(path: Path) -> Iterator[Path]:
    """A path to write to, which becomes ``path`` when the block ends well."""
    part = path.with_suffix(".part")
    yield part
    os.replace(part, path)


def write_json(path: Path, content: Any) -> None:
    with appears_whole(path) as part:
        part.write_text(json.dumps(content, indent=1) + "\n")


def write_arrays(path: Path, about: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    """An npz file of arrays by name, with what they are, as JSON."""
    with appears_whole(path) as part, part.open("wb") as file:
        every: dict[str, Any] = {"about": json.dumps(about)} | {name: np.asarray(x) for name, x in arrays.items()}
        np.savez(file, **every)


def read_arrays(path: Path, make: Callable[[dict[str, Any], dict[str, np.ndarray]], T], what: str, way_out: str) -> T:
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
        raise UserError(f"{path} holds no {what} that can be read: {type(error).__name__}: {error}") from error


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

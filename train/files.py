"""Files that appear whole or not at all, and locks between processes."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def appears_whole(path: Path) -> Iterator[Path]:
    """A path to write to, which becomes ``path`` when the block ends well."""
    part = path.with_suffix(".part")
    yield part
    os.replace(part, path)


def write_json(path: Path, content: Any) -> None:
    with appears_whole(path) as part:
        part.write_text(json.dumps(content, indent=1) + "\n")


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

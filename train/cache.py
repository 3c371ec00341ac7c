"""What is made once and kept: folders that appear whole or not at all."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """A folder to write to, which becomes ``folder`` at the end, and vanishes if that is never reached."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".unfinished-"))
    try:
        yield work
        try:
            work.rename(folder)
        except OSError:
            if not folder.exists():  # another process may have finished the same work
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)

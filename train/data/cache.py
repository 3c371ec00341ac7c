"""Cached folders, which appear completely or not at all."""

import shutil
from collections.abc import Callable
from pathlib import Path

from jaxgrow.checkpoints.io.folders import sync, sync_folder
from train.common.files import lock

# If a folder has this file, an interrupted computation is continued from it.
PROGRESS = "progress.json"


def cached(folder: Path, make: Callable[[Path], None]) -> Path:
    """Return ``folder``. If it does not exist, ``make`` fills a working folder, which is renamed.

    Processes that need the same folder wait for the first one. If ``make`` was killed, the next
    call finds its files. If ``make`` failed, its files are deleted, unless they include `PROGRESS`.
    """
    work = folder.with_name(f".unfinished-{folder.name}")
    while not folder.exists():
        try:
            work.mkdir(parents=True, exist_ok=True)
            locked = lock(work / ".lock", wait=True)
        except FileNotFoundError:  # another process has just finished and renamed it
            continue
        except FileExistsError:  # removed between the two checks of mkdir
            if work.is_file():
                raise
            continue
        with locked:
            # Another process finished it before this process created its own working folder.
            if folder.exists():
                shutil.rmtree(work)
                continue
            try:
                make(work)
                (work / PROGRESS).unlink(missing_ok=True)
                sync(work)
                (work / ".lock").unlink()
                work.rename(folder)
                sync_folder(folder.parent)
            except BaseException:
                if not (work / PROGRESS).exists():
                    shutil.rmtree(work, ignore_errors=True)
                raise
    return folder


def again(folder: Path) -> str:
    """The hint for restoring damaged files in a folder of the cache."""
    return f"delete the folder {folder} and repeat the command, which creates it again"

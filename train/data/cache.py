"""What is made once and kept: folders that appear whole or not at all."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from jaxgrow.checkpoints.io.folders import sync, sync_folder
from train.common.files import lock

PROGRESS = "progress.json"  # a folder that holds it is gone on with when what made it ended early


def made(folder: Path, make: Callable[[Path], None]) -> Path:
    """``folder``; if it is not there, ``make`` fills another that becomes it.

    Processes that want the same one wait for the first. What a killed ``make`` left is found by the
    next, and what one that failed left is deleted, unless it holds `PROGRESS`.
    """
    work = folder.with_name(f".unfinished-{folder.name}")
    while not folder.exists():
        try:
            work.mkdir(parents=True, exist_ok=True)
            locked = lock(work / ".lock", wait=True)
        except FileNotFoundError:  # another process was done with it just now
            continue
        except FileExistsError:  # .. between mkdir's finding it and its looking what it is
            if work.is_file():
                raise
            continue
        with locked:
            if not _is_at(locked.fileno(), work / ".lock"):
                continue
            # it came to be after we looked, and before this work folder, which is ours, was made
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
    """How to get back files that are damaged in a folder of the cache."""
    return f"delete the folder {folder}, and the same command makes it again"


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False

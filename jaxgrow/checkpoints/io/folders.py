"""Folders that appear whole or not at all: written beside their place, and put there by one system call."""

import ctypes
import errno
import logging
import os
import platform
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from jaxgrow.checkpoints.io.files import CheckpointError, read_json, write_json
from jaxgrow.checkpoints.io.replacing import may_become
from jaxgrow.signals import uninterrupted

try:
    import fcntl
except ImportError:  # as on Windows
    fcntl = None

_PREFIX = ".jaxgrow-"
# What is in a folder of that prefix: the new folder, then what it replaced; what it replaced,
# between two renames; a file whose lock is held by the process that lives; for whom it does, once
# it is held.
_NEW, _OLD, _LOCK, _ABOUT = "new", "old", "lock", "about.json"
_LOG = logging.getLogger(__name__)


@contextmanager
def appearing(target: Path, sources: list[Path], overwrite: bool) -> Iterator[Path]:
    """A folder to write into, which becomes ``target`` when the block ends well; otherwise nothing is left.

    Until then it lies beside the target, in a hidden folder of a name that nobody foresees. At
    every moment the target is what it was, or the new one; a note of the exception says which.
    (Where a system cannot exchange two folders at once, there is none between two renames; should
    the second fail, the first is taken back.) What a killed process left is removed, and what it
    had taken away put back, by the next one that writes the same target on the same machine.

    Raises:
      CheckpointError: the target may not be replaced, it overlaps a source, or another process
        writes it.
    """
    target = Path(os.path.abspath(target.expanduser()))
    may_become(target, sources, overwrite)
    stood, missing = os.path.lexists(target), [p for p in target.parents if not p.exists()]
    work = target.with_name(_PREFIX + secrets.token_hex(8))
    new, lock, made = work / _NEW, None, None
    try:
        with uninterrupted():
            target.parent.mkdir(parents=True, exist_ok=True)
            work.mkdir(0o700)
            lock = _locked(work, target)
            _no_others(work, target)
            may_become(target, sources, overwrite)  # it may have been put back
            new.mkdir()
            made = new.stat()
        yield new
        sync(new)
        with uninterrupted():
            may_become(target, sources, overwrite)  # it may have been changed meanwhile
            _place(new, target, work / _OLD)
            sync_folder(target.parent)
            lock.close()  # NFS keeps a deleted file that is open
            _remove(work)
    except BaseException as error:
        with uninterrupted():
            if lock is not None:
                lock.close()
            with suppress(OSError):
                _remove(work)
            placed = made is not None and target.exists() and os.path.samestat(made, target.stat())
            with suppress(OSError):
                for folder in [] if placed else missing:
                    folder.rmdir()
            if placed:
                error.add_note(f"{target} is written whole")
            if os.path.lexists(work / _OLD):
                error.add_note(f"what {target} held is in {work / _OLD}")
            elif not placed:
                error.add_note(f"{target} is as it was" if stood else "nothing was written")
            if os.path.lexists(work / _NEW):
                error.add_note(f"{work} could not be removed")
        raise


# --- the exchange ---


def _place(new: Path, target: Path, old: Path) -> None:
    """Puts a folder in its place; what was there is in ``new`` then. ``old`` is where that lies between two renames."""
    if not os.path.lexists(target):
        os.rename(new, target)
    elif not _exchanged(new, target):
        try:
            os.rename(target, old)
            os.rename(new, target)
        finally:
            if os.path.lexists(old):
                os.rename(old, new if os.path.lexists(target) else target)


def _exchanged(a: Path, b: Path) -> bool:
    """Whether two paths were exchanged in one system call, which not every system and file system has."""
    call = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    here, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of linux/fcntl.h and linux/fs.h
    return call is not None and call(here, os.fsencode(a), here, os.fsencode(b), exchange) == 0


# --- other processes ---


def _locked(work: Path, target: Path) -> IO[str]:
    """An open file, locked where that can be done: a process that lives is told from one that was killed by it."""
    lock = (work / _LOCK).open("w")  # not the folder: NFS and CIFS lock what is open for writing
    try:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            write_json(
                work / _ABOUT, {"target": target.name, "host": platform.node(), "pid": os.getpid()}
            )
    except OSError as error:
        _LOG.warning(
            "%s cannot be locked (%s): others that write %s are not seen",
            lock.name,
            error.strerror,
            target,
        )
    return lock


def _no_others(work: Path, target: Path) -> None:
    """Removes what killed processes left of the target; what they had taken out of its place is put back.

    Raises:
      CheckpointError: another process is writing the target.
    """
    if fcntl is None:
        return
    for other in target.parent.glob(_PREFIX + "*"):
        with suppress(OSError):
            if other == work or other.is_symlink() or other.stat().st_uid != work.stat().st_uid:
                continue
            try:
                about = read_json(other / _ABOUT)
            except CheckpointError:
                continue
            if about.get("target") != target.name:
                continue
            with (other / _LOCK).open("r+") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    who = f"process {about.get('pid')} on {about.get('host')}"
                    raise CheckpointError(f"another process is writing {target}: {who}") from None
            if (
                about.get("host") != platform.node()
            ):  # some network file systems lock on one machine only
                continue
            if os.path.lexists(other / _OLD) and not os.path.lexists(target):
                os.rename(other / _OLD, target)
            _remove(other)


# --- the disk ---


def _remove(work: Path) -> None:
    """Removes a folder of ours, unless it holds the only copy of what was replaced."""
    if os.path.lexists(work / _OLD):
        return
    for pause in (
        0.01,
        0.1,
        1,
        None,
    ):  # a thread of Orbax's may still write, another process may be removing it
        try:
            shutil.rmtree(work)
        except OSError:
            if os.path.lexists(work) and pause is None:
                raise
        if not os.path.lexists(work):
            return
        time.sleep(pause or 0)


def sync(folder: Path) -> None:
    """Waits until all files in ``folder``, and their names, are on the disk."""
    for where, _, names in os.walk(folder, topdown=False):
        for name in names:
            with open(os.path.join(where, name), "rb+") as file:
                os.fsync(file.fileno())
        sync_folder(Path(where))


def sync_folder(folder: Path) -> None:
    """Waits until the names in ``folder`` are on the disk."""
    if os.name == "nt":  # which has no such thing
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # as file systems say that cannot
            raise
    finally:
        os.close(handle)

"""How are a folder and a file written so that they appear complete or not at all?

They are written next to their target, and moved there by one system call.
"""

import ctypes
import errno
import logging
import os
import platform
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from jaxgrow.checkpoints.io.files import CheckpointError, inside, read_json, write_json
from jaxgrow.checkpoints.io.permissions import keep_private
from jaxgrow.checkpoints.io.replacing import may_become
from jaxgrow.signals import defer_signals
from jaxgrow.untrusted import open_regular

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_PREFIX = ".jaxgrow-"
# A working folder of that prefix contains:
# - new: the new folder; after the exchange, the folder that it replaced;
# - old: the replaced folder between two renames, where folders cannot be exchanged;
# - lock: a file that the writing process keeps locked while it runs;
# - about.json: the target and the process. It is written after the lock is acquired.
_NEW = "new"
_OLD = "old"
_LATE = 0.2  # seconds in which a thread of Orbax may create a removed folder again
_LOCK = "lock"
_ABOUT = "about.json"
_LOG = logging.getLogger(__name__)


@contextmanager
def atomic_folder(target: Path, sources: list[Path], overwrite: bool) -> Iterator[Path]:
    """Yield a folder to write into, which becomes ``target`` if the block succeeds.

    If the block fails, nothing remains. Until the end, the new folder is in a hidden folder with a
    random name next to the target. At every moment the target is either unchanged or the new
    folder, and a note of a raised exception states which one.

    A system that cannot exchange two folders atomically needs two renames. Between them, the target
    does not exist. The first rename is undone if the second one fails. If a process is killed, the
    next process that writes the same target on the same machine removes the remains, and puts back
    a folder that had been moved away.

    Args:
      target: the folder to create or replace.
      sources: folders that the target must not overlap, and than which it is not more open.
      overwrite: whether an existing checkpoint is replaced.

    Raises:
      CheckpointError: the target may not be replaced, it overlaps a source, or another process is
        writing it.
    """
    target = Path(os.path.abspath(target.expanduser()))
    may_become(target, sources, overwrite)
    stood = os.path.lexists(target)
    missing = [p for p in target.parents if not p.exists()]
    work = target.with_name(_PREFIX + secrets.token_hex(8))
    new = work / _NEW
    lock = None
    created = None
    try:
        with defer_signals():
            target.parent.mkdir(parents=True, exist_ok=True)
            work.mkdir(0o700)
            lock = _locked(work, target)
            _no_others(work, target)
            # A folder that a killed process had moved away may be back by now.
            may_become(target, sources, overwrite)
            new.mkdir()
            created = new.stat()
        yield new
        keep_private(new, [*sources, *([target] if stood else [])])
        sync(new)
        with defer_signals():
            # The target may have changed while the block ran.
            may_become(target, sources, overwrite)
            _place(new, target, work / _OLD)
            sync_folder(target.parent)
            # NFS keeps a deleted file that is still open.
            if lock is not None:
                lock.close()
            _remove(work)
    except BaseException as error:
        with defer_signals():
            _abandon(work, lock)
            placed = (
                created is not None and target.exists() and os.path.samestat(created, target.stat())
            )
            with suppress(OSError):
                for folder in [] if placed else missing:
                    folder.rmdir()
            for note in _left(target, work, placed, stood):
                error.add_note(note)
        raise


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path, which replaces ``path`` if the block succeeds.

    It replaces ``path`` only after its content is on disk. After a crash or a power failure,
    ``path`` therefore has either its old content or the complete new content. A link at ``path`` is
    replaced, not followed. The new file is not more open than the file that it replaces.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    try:
        if path.is_file() and not path.is_symlink():
            # The owner must be able to write the temporary file.
            part.chmod(stat.S_IMODE(part.stat().st_mode & path.stat().st_mode) | 0o600)
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _abandon(work: Path, lock: BinaryIO | None) -> None:
    """Remove the working folder after an error, as far as that is possible."""
    if lock is not None:
        lock.close()
    with suppress(OSError):
        _remove(work)
        time.sleep(_LATE)
        _remove(work)


def _left(target: Path, work: Path, placed: bool, stood: bool) -> Iterator[str]:
    """Describe what is on disk after an error.

    Args:
      target: the folder to create or replace.
      work: the working folder.
      placed: whether the target is the new folder.
      stood: whether there was a target before.
    """
    if placed:
        yield f"{target} is complete"
    if os.path.lexists(work / _OLD):
        yield f"the previous content of {target} is in {work / _OLD}"
    elif not placed:
        yield f"{target} is unchanged" if stood else "nothing was written"
    if os.path.lexists(work / _NEW):
        yield f"{work} could not be removed"


# --- the exchange ---


def _place(new: Path, target: Path, old: Path) -> None:
    """Move a new folder to its target. A folder that was there is then at ``new``.

    ``old`` is its path between the two renames, where folders cannot be exchanged.
    """
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
    """Exchange two paths by one system call, and return whether the system could do that."""
    call = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    # AT_FDCWD and RENAME_EXCHANGE in linux/fcntl.h and linux/fs.h.
    here = -100
    exchange = 2
    return call is not None and call(here, os.fsencode(a), here, os.fsencode(b), exchange) == 0


# --- other processes ---


def lock_file(path: Path, *, wait: bool) -> BinaryIO:
    """Lock a file until it is closed. The system closes it when the process ends.

    The file is created if it is missing, and its content stays. A file that was removed or replaced
    while this process waited does not count.

    Args:
      path: the file.
      wait: whether to wait until another process releases the lock.

    Raises:
      BlockingIOError: another process has the lock, and ``wait`` is False.
      UntrustedError: the path is a link, or not a regular file.
      CheckpointError: the file system does not support locks.
    """
    while True:
        # NFS and CIFS can lock only files that are open for writing.
        file = open_regular(path, write=True)
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if is_at(file.fileno(), path):
                return file
            file.close()
        except BlockingIOError:
            file.close()
            raise
        except OSError as error:
            file.close()
            raise CheckpointError(
                f"{path} cannot be locked (flock: {error.strerror}): mount the file system of {path.parent} with locks (NFS "
                "without nolock, Lustre with flock), or give a folder in another file system"
            ) from error
        except BaseException:
            file.close()
            raise


def is_at(handle: int, path: Path) -> bool:
    """Whether the path still leads to the open file or folder."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat(follow_symlinks=False))
    except FileNotFoundError:
        return False


def _locked(work: Path, target: Path) -> BinaryIO | None:
    """Lock a file in the working folder, and record its target.

    The lock distinguishes a running process from a killed one. The result is None if the file
    system does not support locks.
    """
    try:
        lock = lock_file(work / _LOCK, wait=False)
    except CheckpointError as error:
        _LOG.warning("%s. Other processes that write %s are not detected", error, target)
        return None
    about = {"target": target.name, "host": platform.node(), "pid": os.getpid()}
    write_json(work / _ABOUT, about)
    return lock


def _no_others(work: Path, target: Path) -> None:
    """Remove the remains of killed processes for this target, and put back folders they had moved.

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
                about = read_json(inside(other, _ABOUT))
            except CheckpointError:
                continue
            if about.get("target") != target.name:
                continue
            try:
                lock_file(inside(other, _LOCK).path, wait=False).close()
            except BlockingIOError:
                who = f"process {about.get('pid')} on {about.get('host')}"
                raise CheckpointError(f"another process is writing {target}: {who}") from None
            # Locks of some network file systems are valid on one machine only.
            if about.get("host") != platform.node():
                continue
            if os.path.lexists(other / _OLD) and not os.path.lexists(target):
                os.rename(other / _OLD, target)
            _remove(other)


# --- the disk ---


def _remove(work: Path) -> None:
    """Remove a working folder, unless it holds the only copy of the folder to replace."""
    if os.path.lexists(work / _OLD):
        return
    # A thread of Orbax may still be writing there, or another process may be removing the folder.
    for pause in (0.01, 0.1, 1, None):
        try:
            shutil.rmtree(work)
        except OSError:
            if os.path.lexists(work) and pause is None:
                raise
        if not os.path.lexists(work):
            return
        time.sleep(pause or 0)


def sync(folder: Path) -> None:
    """Wait until all files in a folder, and their names, are on the disk.

    A link is only a name: its file is elsewhere, and may be missing. Files may be read-only.
    """
    for where, _, names in os.walk(folder, topdown=False):
        for file in (Path(where, name) for name in names):
            if file.is_file() and not file.is_symlink():
                with _to_sync(file) as opened:
                    os.fsync(opened.fileno())
        sync_folder(Path(where))


def _to_sync(file: Path) -> BinaryIO:
    """Open a file for writing, as Windows requires it, or for reading if it is read-only."""
    try:
        return file.open("rb+")
    except PermissionError:
        return file.open("rb")


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    # Windows cannot synchronize a folder.
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # File systems that do not support it return EINVAL.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(handle)

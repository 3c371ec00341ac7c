"""Cached folders, which appear completely or not at all, and are verified when they are opened."""

import hashlib
import json
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from jaxgrow.checkpoints.io.checksums import Sums, damage, in_parallel, seal
from jaxgrow.checkpoints.io.folders import lock_file, sync, sync_folder
from jaxgrow.untrusted import CheckedPath, chosen_file
from train.common.errors import UserError
from train.common.output import say

# If a folder has this file, an interrupted computation is continued from it.
PROGRESS = "progress.json"
# Words and bytes in a block of `block_digest`, and bytes that a thread reads at once.
_BLOCK = 1 << 14
_BYTES = 8 * _BLOCK
_PART = 64 * _BYTES


def block_digest(path: CheckedPath | Path) -> str:
    """Return a digest of a file that is computed about as fast as the file is read.

    It detects damage: the sum of the words of a block, times odd weights and modulo 2^64, changes
    with each word. Unlike `sha256`, it does not tell whether two files have the same content.
    """
    weights = np.frombuffer(hashlib.shake_128(b"weights").digest(_BYTES), "<u8") | 1
    with chosen_file(path).open(buffering=0) as file:
        size = os.fstat(file.fileno()).st_size

        def part(begin: int) -> bytes:
            content = b""
            while more := os.pread(file.fileno(), _PART - len(content), begin + len(content)):
                content += more
            words = np.frombuffer(content.ljust(-(-len(content) // _BYTES) * _BYTES, b"\0"), "<u8")
            return (words.reshape(-1, _BLOCK) @ weights).tobytes()

        parts = in_parallel(part, range(0, size, _PART))
    return hashlib.sha256(b"".join(parts) + size.to_bytes(8, "little")).hexdigest()


# A cache may have many gigabytes, and each run verifies it.
SUMS = Sums("SUMS", block_digest)
# The state of the folders that this process has verified. A run opens its data several times.
_verified: dict[Path, Any] = {}


def cache_folder(cache: str, settings: object, content: str) -> Path:
    """The folder of a result in the cache.

    If there is a result for the same settings and other content, the change is said: the user may
    not expect that the data are read again.

    Args:
      cache: the folder of the cache.
      settings: JSON value of the settings, including the path of the data.
      content: a text that differs if the data may have changed.
    """
    which = hashlib.sha256(json.dumps(settings, default=str).encode()).hexdigest()[:8]
    home = Path(cache).expanduser()
    folder = home / f"{which}-{hashlib.sha256(content.encode()).hexdigest()[:24]}"
    if not os.path.lexists(folder) and any(home.glob(f"{which}-*")):
        say(
            f"the data have changed since they were cached in {home}: they are read again",
            file=sys.stderr,
        )
    return folder


def cached_folder(folder: Path, make: Callable[[Path], None]) -> Path:
    """Return ``folder``. If it does not exist, ``make`` fills a working folder, which becomes it.

    The folder has checksums, which are verified when a process opens it first. This takes about as
    long as reading it. A damaged folder is set aside with a note, and made again. Processes that
    need the same folder wait for the first one.

    If ``make`` failed or was killed, and its files include `PROGRESS`, the next call finds them.
    Otherwise it begins with an empty folder.

    Raises:
      UserError: the folder or its working folder is a link, or was not made by this user.
    """
    if _wrong(folder) is None:
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = folder.with_name(f".lock-{folder.name}")
    with lock_file(lock, wait=True):
        try:
            if (wrong := _wrong(folder)) is not None:
                if os.path.lexists(folder):
                    _set_aside(folder, wrong)
                with _working_folder(folder) as new:
                    make(new)
        finally:
            lock.unlink(missing_ok=True)  # a process that waits creates it again
    return folder


@contextmanager
def _working_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to write into, which becomes ``folder`` if the block succeeds.

    Until then, only this user may read it.
    """
    work = folder.with_name(f".unfinished-{folder.name}")
    if not os.path.lexists(work):
        work.mkdir(0o700)
    _check_own(work)
    new = work / "new"
    try:
        if new.exists() and not (new / PROGRESS).exists():
            shutil.rmtree(new)
        new.mkdir(exist_ok=True)
        yield new
        (new / PROGRESS).unlink(missing_ok=True)
        seal(new, SUMS)
        sync(new)
        new.rename(folder)
        sync_folder(folder.parent)
    finally:
        if not (new / PROGRESS).exists():
            shutil.rmtree(work, ignore_errors=True)


def _check_own(work: Path) -> None:
    """Check a working folder, whose name can be foreseen, and in which files are overwritten.

    Raises:
      UserError: it was not made by this user, or has links.
    """
    about = work.lstat()
    own = stat.S_ISDIR(about.st_mode) and (not hasattr(os, "getuid") or about.st_uid == os.getuid())
    files = [file.lstat() for file in work.rglob("*")] if own else []
    if not own or not all(
        stat.S_ISDIR(file.st_mode) or (stat.S_ISREG(file.st_mode) and file.st_nlink == 1)
        for file in files
    ):
        raise UserError(
            f"{work} is not a working folder of the cache, or has links in it: move it away, or name another cache"
        )


def make_again(folder: Path) -> str:
    """The hint for restoring damaged files in a folder of the cache."""
    return f"delete the folder {folder} and repeat the command, which creates it again"


def _wrong(folder: Path) -> str | None:
    """How the folder differs from its checksums; None if it is complete."""
    if not os.path.lexists(folder):
        return "it is missing"
    if folder.is_symlink() or not folder.is_dir():
        raise UserError(f"{folder} is not a folder of the cache; delete it or name another cache")
    state = [
        (file.name, about.st_size, about.st_mtime_ns, about.st_ino)
        for file in sorted(folder.iterdir())
        for about in [file.stat()]
    ]
    if _verified.get(folder) == state:
        return None
    wrong = damage(folder, SUMS)
    if wrong is None:
        _verified[folder] = state
    return wrong


def _set_aside(folder: Path, wrong: str) -> None:
    aside = folder.with_name(f"damaged-{folder.name}-{secrets.token_hex(4)}")
    folder.rename(aside)
    say(
        f"the cache {folder} is damaged ({wrong}): it is made again. The damaged files are in {aside}, which can be deleted",
        file=sys.stderr,
    )

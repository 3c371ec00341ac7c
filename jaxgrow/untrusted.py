"""How is a name from a stranger's file opened, how much may a decoder use, how is its text printed?

Every file except a config in Python is untrusted. `SECURITY.md` describes the rules.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO


class UntrustedError(ValueError):
    """A name, a link or a size in a file that is not trusted. The message names the way out."""


class CheckedPath:
    """The path of a file or a folder that a stranger's file named, proved to lie in its folder.

    `checked` is the only constructor. Libraries accept the object as a path (``os.fspath``).
    """

    __slots__ = ("_path",)
    _path: Path

    def __init__(self) -> None:
        raise TypeError("use jaxgrow.untrusted.checked(folder, name)")

    def __fspath__(self) -> str:
        return str(self._path)

    def __repr__(self) -> str:
        return f"CheckedPath({str(self._path)!r})"

    def __str__(self) -> str:
        return str(self._path)

    @property
    def path(self) -> Path:
        """The checked path, without links."""
        return self._path

    def open(self) -> BinaryIO:
        """Open the regular file for reading.

        The file is neither a link nor a FIFO, also if it was replaced after the check.

        Raises:
          UntrustedError: it is not a regular file any more.
        """
        return open_regular(self._path)


def checked(folder: Path, name: str, *, deep: bool = False, new: bool = False) -> CheckedPath:
    """Check a name from a file against the folder that it must lie in.

    Args:
      folder: the folder that the user named.
      name: the name that a file in this folder gives.
      deep: whether the name may have several parts, ``"a/b"``.
      new: whether the path may be missing, because it is written. Its existing parents are checked.

    Returns:
      The real path, in the folder or in the blob store of the cache of Hugging Face that the folder
      belongs to.

    Raises:
      UntrustedError: the name or a link leads out of the folder, or the path is missing.
    """
    parts = name.split("/")
    plain = all(part not in ("", ".", "..") for part in parts) and not set(name) & {"\\", "\0"}
    if not plain or Path(name).is_absolute() or Path(name).drive or (len(parts) > 1 and not deep):
        raise UntrustedError(
            f"{folder}: {name!r} is not the name of a file in this folder; other files are not read"
        )
    path = folder / name
    if not new and not os.path.lexists(path):
        raise UntrustedError(f"{path} is missing")
    try:
        real = path.resolve(strict=not new)
    except (OSError, RuntimeError) as error:
        raise UntrustedError(f"{path} is a link without a target, or a circle of links") from error
    home = folder.resolve()
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    if not real.is_relative_to(home) and not real.is_relative_to(blobs):
        raise UntrustedError(
            f"{path} is a link to {real}, outside the folder. Replace the link by the file"
        )
    found = object.__new__(CheckedPath)
    object.__setattr__(found, "_path", real)
    return found


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading, without following a link at its last part.

    Raises:
      UntrustedError: it is a link, a folder, a device or a FIFO.
    """
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        handle = os.open(path, flags | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
    except OSError as error:
        if os.path.islink(path):
            raise UntrustedError(f"{path} is a link. Replace the link by the file") from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise UntrustedError(f"{path} is not a regular file")
    return os.fdopen(handle, "rb")


# --- the budget of a decoder ---


@dataclass(frozen=True)
class Limits:
    """How much one untrusted file may cost before it is refused.

    Attributes:
      bytes: bytes that a decoder may produce or hold at once. Weights are not decoded; files of
        weights and uncompressed texts that are streamed do not count.
      entries: members of an archive, files of a folder, or layers of a config.
      seconds: time for one expression, template or image.
    """

    bytes: int = 4 << 30
    entries: int = 10_000_000
    seconds: float = 10.0

    def check(self, what: str, *, bytes: int = 0, entries: int = 0) -> None:
        """Refuse an amount above a limit.

        Raises:
          UntrustedError: it names ``what``, both numbers and the option that raises the limit.
        """
        for name, amount, largest in (
            ("bytes", bytes, self.bytes),
            ("entries", entries, self.entries),
        ):
            if amount > largest:
                raise UntrustedError(
                    f"{what} has {amount:,} {name}; the limit is {largest:,}. If you trust the "
                    f"file, use --limits {name}={amount}"
                )


_limits = Limits()


def limits() -> Limits:
    """Return the limits of this process."""
    return _limits


@contextmanager
def using_limits(**changed: float) -> Iterator[None]:
    """Change limits of this process within a block; the option ``--limits`` uses it."""
    global _limits
    before = _limits
    _limits = replace(before, **changed)
    try:
        yield
    finally:
        _limits = before


def printable(text: str) -> str:
    """Escape everything in a text from a file that a terminal could execute.

    Example:
      >>> printable("a" + chr(27) + "[31m")
      'a\\\\x1b[31m'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)

"""How is a name from a stranger's file opened, how much may a decoder use, how is its text printed?

Every file except a config in Python is untrusted. `SECURITY.md` describes the rules.
"""

import os
import stat
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
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


def open_regular(path: Path, *, write: bool = False) -> BinaryIO:
    """Open a regular file, without following a link at its last part.

    Args:
      path: the file.
      write: whether to open it for reading and writing, and to create it if it is missing. Its
        content stays.

    Raises:
      UntrustedError: it is a link, a folder, a device or a FIFO.
    """
    flags = os.O_RDWR | os.O_CREAT if write else os.O_RDONLY
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"):
        flags |= getattr(os, name, 0)
    try:
        handle = os.open(path, flags, 0o666)
    except OSError as error:
        if os.path.islink(path):
            raise UntrustedError(f"{path} is a link. Replace the link by the file") from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise UntrustedError(f"{path} is not a regular file")
    return os.fdopen(handle, "r+b" if write else "rb")


# --- the budget of a decoder ---


@dataclass(frozen=True)
class Limits:
    """How much one untrusted file may cost before it is refused.

    Attributes:
      bytes: bytes that a decoder may produce or hold at once. Weights are not decoded; files of
        weights and uncompressed texts that are streamed do not count.
      record: bytes of one line, cell, row, image file or rendered template. They are in memory at
        once, often several times.
      entries: members of an archive, files of a folder, or layers of a config.
      seconds: time for one expression, template or image.
    """

    bytes: int = 1 << 30
    record: int = 64 << 20
    entries: int = 10_000_000
    seconds: float = 10.0

    def check(self, what: str, *, bytes: int = 0, record: int = 0, entries: int = 0) -> None:
        """Refuse an amount above a limit.

        Raises:
          UntrustedError: it names ``what``, both numbers and the option that raises the limit.
        """
        amounts = {"bytes": bytes, "record": record, "entries": entries}
        for name, amount in amounts.items():
            if amount > (largest := getattr(self, name)):
                unit = "entries" if name == "entries" else "bytes"
                raise UntrustedError(
                    f"{what} has {amount:,} {unit}; the limit is {largest:,}. If you trust the "
                    f"file, raise it, such as with --limits {name}={2 * amount}"
                )

    def check_expansion(self, what: str, made: int, size: int) -> None:
        """Refuse what a stream has decompressed so far, if its file is too small for it.

        Texts are compressed at most by a factor of about 20. A stream needs little memory, so a
        large file may have more than ``bytes``.

        Args:
          what: the file, for the message.
          made: bytes that were decompressed so far.
          size: bytes of the file.

        Raises:
          UntrustedError: as for `check`.
        """
        if made > _RATIO * size:
            self.check(f"{what} decompresses to too much: it", bytes=made)


_RATIO = 100
# Child processes take the limits from the environment.
_VARIABLE = "JAXGROW_LIMITS"


def limits() -> Limits:
    """Return the limits of this process."""
    return _limits


def set_limits(text: str) -> None:
    """Change limits of this process, and of processes that it starts later.

    Args:
      text: the value of the option ``--limits``, such as ``"bytes=8e9,seconds=60"``.

    Raises:
      ValueError: a limit does not exist, or is not a positive number.
    """
    global _limits
    changed = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        kind = {field.name: type(field.default) for field in fields(Limits)}.get(name)
        try:
            changed[name] = kind(float(value)) if kind else 0
        except (ValueError, OverflowError):
            changed[name] = 0
        if not changed[name] > 0:
            known = ", ".join(field.name for field in fields(Limits))
            raise ValueError(f"{part!r} is not NAME=NUMBER; the names are {known}")
    _limits = replace(_limits, **changed)
    os.environ[_VARIABLE] = ",".join(f"{name}={value}" for name, value in vars(_limits).items())


@contextmanager
def using_limits(**changed: float) -> Iterator[None]:
    """Change limits of this process, and of processes that it starts, within a block."""
    global _limits
    before = _limits, os.environ.get(_VARIABLE)
    set_limits(",".join(f"{name}={value}" for name, value in changed.items()))
    try:
        yield
    finally:
        _limits = before[0]
        os.environ.pop(_VARIABLE)
        os.environ |= {} if before[1] is None else {_VARIABLE: before[1]}


_limits = Limits()
if _VARIABLE in os.environ:
    set_limits(os.environ[_VARIABLE])


def printable(text: str) -> str:
    """Escape everything in a text from a file that a terminal could execute.

    Letters and spaces of all scripts stay as they are.

    Example:
      >>> printable("a" + chr(27) + "[31m")
      'a\\\\x1b[31m'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or _is_harmless(c) else ascii(c)[1:-1] for c in text)


def _is_harmless(character: str) -> bool:
    """Whether a terminal shows a character that `str.isprintable` does not count as printable."""
    # The joiners are parts of emoji and of Persian and Indic words.
    return character in "\n\t\u200c\u200d" or unicodedata.category(character) == "Zs"

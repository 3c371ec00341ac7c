"""How is a name from a stranger's file opened, how much may a decoder use, how is its text printed?

Every file except a config in Python is untrusted. `SECURITY.md` describes the rules.
"""

import argparse
import logging
import os
import shutil
import signal
import stat
import sys
import threading
import unicodedata
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from traceback import format_exception
from types import TracebackType
from typing import BinaryIO, TextIO, cast


class UntrustedError(ValueError):
    """A name, a link or a size in a file that is not trusted. The message names the way out."""


class CheckedPath:
    """The path of a file or a folder, checked to stay inside the folder that the user named.

    `checked_path` and `chosen_file` are the only constructors. Libraries accept the object as a
    path (``os.fspath``). Messages show the path before its links were followed (``str``).
    """

    __slots__ = ("_path", "_shown")
    _path: Path
    _shown: Path

    def __init__(self) -> None:
        raise TypeError("use jaxgrow.untrusted.checked_path(folder, name)")

    def __fspath__(self) -> str:
        return str(self._path)

    def __repr__(self) -> str:
        return f"CheckedPath({str(self._path)!r})"

    def __str__(self) -> str:
        return str(self._shown)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CheckedPath) and self._path == other._path

    def __hash__(self) -> int:
        return hash(self._path)

    @property
    def path(self) -> Path:
        """The checked path, without links."""
        return self._path

    @property
    def name(self) -> str:
        """The name of the file, before links were followed."""
        return self._shown.name

    def open(self, buffering: int = -1) -> BinaryIO:
        """Open the regular file for reading.

        The file is neither a link nor a FIFO, also if it was replaced after the check.

        Args:
          buffering: as for the function `open` of Python.

        Raises:
          UntrustedError: it is not a regular file any more.
        """
        return open_regular(self._path, buffering)


def checked_path(folder: Path, name: str, *, deep: bool = False, new: bool = False) -> CheckedPath:
    """Check that a name from a file stays inside a folder, and return its path.

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
    if not isinstance(name, str):
        raise UntrustedError(f"{folder}: {name!r:.100} is not the name of a file")
    parts = name.split("/")
    plain = all(part not in ("", ".", "..") for part in parts) and not set(name) & {"\\", "\0"}
    if not plain or os.path.splitdrive(name)[0] or (len(parts) > 1 and not deep):
        raise UntrustedError(
            f"{folder}: {name!r} is not the name of a file in this folder; other files are not read"
        )
    path = folder / name
    try:
        home = Path(os.path.realpath(folder))
        mode = _mode_of(path)
        if mode is None and not new:
            raise UntrustedError(f"{path} is missing")
        if len(parts) == 1 and not stat.S_ISLNK(mode or 0):
            return _proved(home / name, path)  # resolving all folders again would take too long
        return _proved(_inside(path, home, strict=not new), path)
    except UnicodeError as error:
        raise UntrustedError(f"{folder}: {name!r} is not the name of a file") from error


def chosen_file(path: CheckedPath | Path) -> CheckedPath:
    """Return the path of a file that the user named, whose links are followed.

    Args:
      path: the path. A checked path is returned unchanged.

    Raises:
      UntrustedError: it is a folder, a device, a FIFO or a circle of links.
      OSError: it does not exist.
    """
    if isinstance(path, CheckedPath):
        return path
    try:
        real = path.resolve(strict=True)
    except RuntimeError as error:  # Python 3.11 and 3.12; later versions raise an OSError
        raise UntrustedError(f"{path} is a circle of links. Name the file") from error
    if not real.is_file():
        raise UntrustedError(f"{path} is not a regular file")
    return _proved(real, path)


def checked_tree(folder: Path, home: Path) -> int:
    """Check a file, or everything in a folder, before a library opens it without this module.

    Args:
      folder: the file or folder that the library opens.
      home: the folder that the user named, which contains it.

    Returns:
      The size of all files in bytes. A file that several links lead to counts once.

    Raises:
      UntrustedError: the folder is a link that leads out of ``home``, or contains one, a link to a
        folder (whose files would not be checked), a circle of links, a device or a FIFO.
    """
    root = home.resolve()
    if not os.path.lexists(folder):
        raise UntrustedError(f"{folder} is missing")
    real = _inside(folder, root)
    if not real.is_file() and not real.is_dir():
        raise UntrustedError(f"{folder} is not a regular file")
    entries = 0
    about = folder.stat()
    sizes = {(about.st_dev, about.st_ino): about.st_size}
    for where, folders, files in os.walk(folder):
        entries += len(files)
        file_limits().check(str(folder), entries=entries)
        for name in [*folders, *files]:
            path = os.path.join(where, name)
            about = os.lstat(path)
            if stat.S_ISLNK(about.st_mode) and _inside(Path(path), root).is_dir():
                raise UntrustedError(
                    f"{path} is a link to a folder. Replace the link by the folder"
                )
            about = os.stat(path)
            if not stat.S_ISREG(about.st_mode) and not stat.S_ISDIR(about.st_mode):
                raise UntrustedError(f"{path} is not a regular file")
            sizes[about.st_dev, about.st_ino] = about.st_size
    return sum(sizes.values())


def _inside(path: Path, home: Path, strict: bool = True) -> Path:
    """Follow the links of a path that stays in ``home``; ``strict``: the path exists."""
    try:
        real = path.resolve(strict=strict)
    except (OSError, RuntimeError) as error:
        raise UntrustedError(f"{path} is a link without a target, or a circle of links") from error
    if not lies_inside(real, home):
        raise UntrustedError(
            f"{path} is a link to {real}, outside the folder. Replace the link by the file"
        )
    return real


def _mode_of(path: Path) -> int | None:
    """The mode of a path itself, also if it is a link; None if it is missing."""
    try:
        return os.lstat(path).st_mode
    except (OSError, ValueError):
        return None


def lies_inside(real: Path, home: Path) -> bool:
    """Whether a path is in a folder, or in the blob store of its cache of Hugging Face."""
    if real.is_relative_to(home):
        return True
    return home.parent.name == "snapshots" and real.is_relative_to(home.parent.parent / "blobs")


def _proved(real: Path, shown: Path) -> CheckedPath:
    found = object.__new__(CheckedPath)
    object.__setattr__(found, "_path", real)
    object.__setattr__(found, "_shown", shown)
    return found


def copy_file(source: CheckedPath, target: Path) -> None:
    """Copy a regular file to a new path, which is not more open than the source.

    The owner may always write the new file, because the source may be read-only.
    """
    with source.open() as old, target.open("xb") as new:
        shutil.copyfileobj(old, new, 1 << 20)
        narrow_permissions(target, os.fstat(old.fileno()).st_mode)


def narrow_permissions(path: Path, mode: int) -> None:
    """Remove the permissions of a path for groups and others that ``mode`` does not give them."""
    now = stat.S_IMODE(path.stat().st_mode)
    private = now & (mode | ~0o077)
    if private != now:
        path.chmod(private)


_SAFE = 0
for _name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"):
    _SAFE |= getattr(os, _name, 0)


def open_regular(path: Path, buffering: int = -1, *, write: bool = False) -> BinaryIO:
    """Open a regular file, without following a link at its last part.

    Args:
      path: the file.
      buffering: as for the function `open` of Python.
      write: whether to open it for reading and writing, and to create it if it is missing. Its
        content stays.

    Raises:
      UntrustedError: it is a link, a folder, a device or a FIFO.
    """
    flags = os.O_RDWR | os.O_CREAT if write else os.O_RDONLY
    try:
        handle = os.open(path, flags | _SAFE, 0o666)
    except OSError as error:
        if os.path.islink(path):
            raise UntrustedError(f"{path} is a link. Replace the link by the file") from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise UntrustedError(f"{path} is not a regular file")
    return cast(BinaryIO, os.fdopen(handle, "r+b" if write else "rb", buffering))


# --- the budget of a decoder ---


@dataclass(frozen=True)
class Limits:
    """How much one untrusted file may cost before it is refused.

    Attributes:
      bytes: bytes that a decoder may produce or hold at once. Weights are not decoded; files of
        weights and uncompressed texts that are streamed do not count.
      record: bytes of one line, cell, row, image file or rendered template. They are in memory at
        once, often several times.
      entries: members of an archive, files of a folder, cells of a table, or modules of a LoRA.
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
        """Refuse a stream that has decompressed to too many bytes for the size of its file.

        Texts are compressed at most by a factor of about 20. A stream needs little memory, so a
        large file may have more than ``bytes``.

        Args:
          what: name of the file in the message.
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


def file_limits() -> Limits:
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


class _SetLimits(argparse.Action):
    """Apply ``--limits`` at once, for this process and the processes that it starts."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: object, values: object, *_: object
    ) -> None:
        try:
            set_limits(str(values))
        except ValueError as error:
            parser.error(f"--limits: {error}")


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--limits`` to the parser of a command."""
    shown = ",".join(f"{name}={value}" for name, value in vars(file_limits()).items())
    parser.add_argument(
        "--limits",
        action=_SetLimits,
        metavar="NAME=N,...",
        default=argparse.SUPPRESS,
        help=f"limits for files of others (default: {shown})",
    )


_limits = Limits()
if _VARIABLE in os.environ:
    set_limits(os.environ[_VARIABLE])


# --- texts of strangers ---


def escape_text(text: str) -> str:
    """Escape everything in a text from a file that a terminal could execute.

    Letters and spaces of all scripts stay as they are.

    Example:
      >>> escape_text("a" + chr(27) + "[31m")
      'a\\\\x1b[31m'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or _is_harmless(c) else ascii(c)[1:-1] for c in text)


def _is_harmless(character: str) -> bool:
    """Whether a terminal shows a character that `str.isprintable` does not count as printable."""
    # The joiners are parts of emoji and of Persian and Indic words.
    return character in "\n\t\u200c\u200d" or unicodedata.category(character) == "Zs"


def print_text(text: object, *, file: TextIO | None = None, end: str = "\n") -> None:
    """Print a text that may contain names and values from files, as `escape_text` escapes it."""
    print(escape_text(str(text)), file=sys.stdout if file is None else file, end=end)


class _Escaped(logging.LogRecord):
    def getMessage(self) -> str:
        return escape_text(super().getMessage())


_formatted = warnings.formatwarning


def _escaped(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    return escape_text(_formatted(message, category, filename, lineno, line))


def _print_error(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
) -> None:
    # TensorStore reports errors in its own threads, and raises them in the main thread as well.
    if threading.current_thread() is threading.main_thread():
        print_text("".join(format_exception(kind, error, trace)), file=sys.stderr, end="")


def _report_ignored(about: "sys.UnraisableHookArgs") -> None:
    """Print an error that Python ignores; send the signal of an interrupt again, or it would be lost."""
    error = about.exc_value
    if isinstance(error, KeyboardInterrupt):  # for example in a callback of the garbage collector
        number = error.args[0] if error.args else signal.SIGINT
        again = threading.Timer(0.01, os.kill, (os.getpid(), number))
        again.daemon = True
        again.start()
    else:
        _print_error(about.exc_type, error, about.exc_traceback)


def prepare_messages() -> None:
    """Escape warnings, logs and tracebacks of a command, because they may quote a file.

    Messages about errors that are raised as well are not printed, and no interrupt is lost.
    """
    warnings.formatwarning = _escaped
    logging.setLogRecordFactory(_Escaped)
    for name in ("absl", "asyncio"):  # Orbax logs tracebacks with both
        logging.getLogger(name).setLevel(logging.CRITICAL)
    sys.excepthook = _print_error
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _report_ignored


@contextmanager
def one_line(error: type[Exception], what: str) -> Iterator[None]:
    """Raise ``error`` for everything that fails while a file is read; the entrance of a format.

    Libraries raise many types of errors for damaged files. Panics of libraries in Rust, and errors
    of PyTorch, are not even an `Exception`. Errors of the machine, and errors that already have a message, are raised
    unchanged.

    Args:
      error: the type of error that commands print in one line.
      what: the file and its expected content, such as ``"tokenizer.json is not a tokenizer"``.
    """
    try:
        yield
    except (error, UntrustedError, OSError, MemoryError):
        raise
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as found:
        lines = str(found).strip().splitlines() or [""]
        raise error(f"{what}: {type(found).__name__}: {lines[0][:500]}") from found

"""The errors of the command ``jaxgrow``, with sizes written as options."""

import argparse
import errno
from collections.abc import Iterator
from contextlib import contextmanager

from jaxgrow.axes.size_error import SizeError
from jaxgrow.checkpoints.io.files import CheckpointError
from jaxgrow.cli.options import axis_option

_WAYS = {
    errno.ENOENT: "check the path",
    errno.EACCES: "check the permissions, or give another path",
    errno.EPERM: "check the permissions, or give another path",
    errno.ENOTDIR: "a part of the path is a file; give another path",
    errno.EISDIR: "give the path of a file",
    errno.EROFS: "give a path in another file system",
    errno.ENOSPC: "free some space, or give a path on another disk",
}


class UsageError(CheckpointError):
    """Arguments that are invalid independently of the checkpoint files."""


def refuse_options(a: argparse.Namespace, why: str, *names: str) -> None:
    """Check that no option is given that would have no effect.

    Args:
      a: the parsed arguments.
      why: why the options have no effect.
      *names: the options, as attributes of the arguments.

    Raises:
      UsageError: there is such an option.
    """
    given = ", ".join(axis_option(n) for n in names if getattr(a, n, None) is not None)
    if given:
        raise UsageError(f"{given}: {why}; omit {given}")


def system_reason(error: OSError) -> str:
    """Return the message of an error of the file system: the path, the reason, and the way out.

    Example:
      >>> system_reason(FileNotFoundError(2, "No such file or directory", "a.txt"))
      'a.txt: no such file or directory; check the path'
    """
    if error.strerror is None or error.filename is None:
        return str(error)
    reason = error.strerror[:1].lower() + error.strerror[1:]
    way = _WAYS.get(error.errno or 0)
    return f"{error.filename}: {reason}" + (f"; {way}" if way else "")


@contextmanager
def errors_with_options(sizes: bool = True) -> Iterator[None]:
    """Raise a `CheckpointError` for each ValueError of the library.

    Args:
      sizes: whether the command has options for new sizes. The sizes that a `SizeError` proposes
        are then written as options: ``--heads 8``, not ``heads=8``.
    """
    try:
        yield
    except ValueError as error:
        found = CheckpointError(with_options(error, sizes))
        for note in getattr(error, "__notes__", []):  # the state of DST
            found.add_note(note)
        raise found from error


def with_options(error: BaseException, sizes: bool = True) -> str:
    """The message of an error, in which groups and sizes that a `SizeError` proposes are options.

    The `SizeError` may be among the causes of the error, if the error repeats its message. Without
    ``sizes``, only groups are options, such as ``--layers alike``.
    """

    def spelled(axis: str, value: int | str) -> str:
        option = sizes or isinstance(value, str)
        return f"{axis_option(axis)} {value}" if option else f"{axis}={value}"

    text = str(error)
    for cause in _with_causes(error):
        if isinstance(cause, SizeError):
            text = text.replace(str(cause), cause.spelled(spelled))
    return text


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    yield error
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from _with_causes(member)
    elif error.__cause__ is not None:
        yield from _with_causes(error.__cause__)

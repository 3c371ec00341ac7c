"""How do the commands print? Text from files is escaped before a terminal sees it."""

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from tqdm import tqdm

from jaxgrow.untrusted import escape_text


class OutputClosed(Exception):
    """The reader of the output has ended, or the terminal was closed."""


def say(text: object, *, file: TextIO | None = None, end: str = "\n", flush: bool = False) -> None:
    """Print a text to ``file`` (default: stdout). Terminal escapes are printed as ``\\x1b``.

    Raises:
      OutputClosed: the output was closed, unless `when_closed` handles it.
    """
    stream = sys.stdout if file is None else file
    try:
        print(escape_text(str(text)), file=stream, end=end, flush=flush)
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        _drop_output(stream)
        _on_close[-1]()


def note(text: str) -> None:
    """Print a line to stderr, above a progress bar."""
    with tqdm.external_write_mode(file=sys.stderr):
        say(text, file=sys.stderr)


def say_notes(source: object) -> None:
    """Print the notes of a checkpoint to stderr, such as the step of a run that it is from."""
    for text in getattr(source, "notes", ()):
        say(f"note: {text}", file=sys.stderr)


def _drop_output(stream: TextIO) -> None:
    """Let everything that is printed to a closed stream disappear, also at the end of Python."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _raise() -> None:
    raise OutputClosed


_on_close: list[Callable[[], None]] = [_raise]


@contextmanager
def when_closed(act: Callable[[], None]) -> Iterator[None]:
    """Call ``act`` if the output is closed within the block, instead of raising an error."""
    _on_close.append(act)
    try:
        yield
    finally:
        _on_close.remove(act)

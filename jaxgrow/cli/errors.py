"""The errors of the command ``jaxgrow``, with sizes written as options."""

from collections.abc import Iterator
from contextlib import contextmanager

from jaxgrow.axes.size_error import SizeError
from jaxgrow.checkpoints.io.files import CheckpointError
from jaxgrow.cli.options import axis_option


class UsageError(CheckpointError):
    """Arguments that are invalid independently of the checkpoint files."""


@contextmanager
def reported() -> Iterator[None]:
    """Raise a `CheckpointError` for each ValueError of the library.

    The sizes that a `SizeError` proposes are written as options: ``--heads 8``, not ``heads=8``.
    """
    try:
        yield
    except ValueError as error:
        found = CheckpointError(with_options(error))
        for note in getattr(error, "__notes__", []):  # the state of DST
            found.add_note(note)
        raise found from error


def with_options(error: BaseException) -> str:
    """The message of an error, in which sizes that a `SizeError` proposes are options.

    The `SizeError` may be among the causes of the error, if the error repeats its message.
    """
    text = str(error)
    for cause in _with_causes(error):
        if isinstance(cause, SizeError):
            proposed = cause.spelled(lambda axis, value: f"{axis_option(axis)} {value}")
            text = text.replace(str(cause), proposed)
    return text


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    yield error
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from _with_causes(member)
    elif error.__cause__ is not None:
        yield from _with_causes(error.__cause__)

"""Messages that advise a setting or a command, and functions that follow their advice.

A case provokes a message, takes the advice out of its text, and follows it.
"""

import contextlib
import io
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from limits import using_limits

from jaxgrow.checkpoints import CheckpointError
from jaxgrow.cli.program import main as jaxgrow
from jaxgrow.untrusted import UntrustedError, file_limits
from train.common.errors import UserError

Change = Callable[[list[str], str], list[str]]  # the words of a command, and a message
ERRORS = (UserError, CheckpointError, UntrustedError, ValueError, ImportError)


@dataclass(frozen=True)
class Case:
    """A message and its advice.

    Attributes:
      says: words of the message; expressions in braces stand for any text.
      fails: provokes the message.
      follows: follows the advice in the text of the message; it must not raise.
      slow: whether the test is left out by default.
      needs: a package without which the test is skipped.
    """

    says: str
    fails: Callable[["Place"], Any]
    follows: Callable[["Place", str], Any]
    slow: bool = False
    needs: str = ""


class Place(dict):
    """A folder of a case; models and files are made when their name is read.

    Args:
      home: folder of the models, which all cases share and none changes.
      folder: folder of the case.
      makers: function for each name that makes it below ``home``, and returns its path.
      made: paths that exist already.
    """

    def __init__(
        self,
        home: Path,
        folder: Path,
        makers: dict[str, Callable[[Path], Path]],
        made: dict[str, Path],
    ):
        super().__init__()
        self.home, self.folder, self.makers, self.made = home, folder, makers, made

    def __missing__(self, name: str) -> Path:
        if name not in self.makers:
            return self.folder / name
        if name not in self.made:
            self.made[name] = self.makers[name](self.home / name)
        return self.made[name]

    def words(self, line: str) -> list[str]:
        """The words of a command line whose ``{name}`` are folders."""
        return [word.format_map(self) for word in line.split()]


class Refused(ValueError):
    """A command ended with an error; the text is on stderr."""


def command(*words: str) -> str:
    """Run ``jaxgrow WORDS`` or ``train.COMMAND WORDS`` and return its output."""
    name, *rest = map(str, words)
    out, err = io.StringIO(), io.StringIO()
    argv, sys.argv = sys.argv, list(map(str, words))
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            using_limits(
                seconds=file_limits().seconds
            ),  # --limits changes the limits of the process
        ):
            try:
                if name.startswith("train."):
                    sys.argv = [name, *rest]
                    import_module(name).main()
                    return out.getvalue()
                status = jaxgrow([name, *rest])
            except SystemExit as ended:
                status = ended.code
    finally:
        sys.argv = argv
    if status:
        raise Refused(err.getvalue())
    return out.getvalue()


_OPTION = r"--[a-z][a-z-]*"


def advised(words: list[str], said: str) -> list[str]:
    """Change the options of a command as a message advises.

    ``omit --a and --b`` and ``leave out --a`` remove options. ``such as --a 1``, ``give --a 1``,
    ``with --a 1``, ``use --a 1`` and ``or --a 1`` set one; a name in capitals is not a value.
    """
    for found in re.finditer(rf"(?i:omit|leave out) ({_OPTION})(?: and ({_OPTION}))?", said):
        for option in filter(None, found.groups()):
            words = without(words, option)
    given = re.search(
        rf"(?i:such as|give|with|use|or|pass|lower|name) ({_OPTION})[ =]([^\s;,)]+?)[.,;)]*(?=\s|$)",
        said,
    )
    if given and not given[2].isupper():
        words = [*without(words, given[1]), given[1], given[2]]
    return words


def without(words: list[str], option: str) -> list[str]:
    """Remove an option with its values."""
    if option not in words:
        return words
    at = words.index(option)
    end = next((i for i in range(at + 1, len(words)) if words[i].startswith("--")), len(words))
    return words[:at] + words[end:]


def cli(says: str, line: str, how: Change | str = advised, **options: Any) -> Case:
    """A case of a command line.

    Args:
      says: words of the message.
      line: the command line that fails, with ``{name}`` for the folders of `Place`.
      how: how the message changes the words: a function of the words and of the text, or further
        words, of which the options must stand in the message.
      **options: further attributes of the case.
    """

    def follows(place: Place, said: str) -> None:
        words = place.words(line)
        if isinstance(how, str):
            more = place.words(how)
            for option in (word for word in more if word.startswith("--")):
                assert option in said, f"{option} is not in the message: {said}"
                words = without(words, option)
            words += more
        else:
            words = how(words, said)
        assert words != place.words(line), f"no advice found in: {said}"
        command(*words)

    return Case(says, lambda place: command(*place.words(line)), follows, **options)


# ``set a.b=c``, ``set a.b to c``, ``leave out a.b``, ``raise a.b to c``
_SETS = re.compile(
    r"(?:set|raise|lower|must be|to|or|use|both|needs|be|and|with|give)\s+(?:it\s+)?'?([a-z][a-z_.]*)\s?"
    r"(?:=|\bto\b)\s?'?([\w.+-]*[\w])'?"
)


def settings(said: str) -> Iterator[tuple[str, str]]:
    """The settings ``(name, value)`` that a message advises."""
    for found in _SETS.finditer(said):
        yield found[1], found[2]


def parts(pattern: str, said: str) -> tuple[str, ...]:
    """The groups of a pattern that a message must contain."""
    found = re.search(pattern, said)
    assert found, f"{pattern} is not in: {said}"
    return found.groups()


def part(pattern: str, said: str) -> str:
    """The first group of a pattern that a message must contain."""
    return parts(pattern, said)[0]


def values_of(pattern: str, option: str) -> Change:
    """Set an option to the value that a pattern finds in the message."""
    return lambda words, said: [*without(words, option), option, part(pattern, said)]


def last(pattern: str) -> Change:
    """Replace the last word by what a pattern finds in the message."""
    return lambda words, said: [*words[:-1], part(pattern, said)]


def changed(advice: str, old: str, new: str) -> Change:
    """Replace a part of the words, as ``advice`` in the message says."""
    return lambda words, said: [w.replace(old, new) if advice in said else w for w in words]


def refused(call: Callable[[], Any]) -> str:
    """Return the text of the error of a call."""
    try:
        call()
    except ERRORS as error:
        return str(error)
    raise AssertionError("nothing was refused")

"""How do the commands of ``python -m train`` format their help and read ``--set``?"""

import argparse
import ast
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from jaxgrow.cli.options import UsageParser
from jaxgrow.typed import did_you_mean
from jaxgrow.untrusted import add_limits
from train.common.errors import UserError

_MARKED = re.compile(r"`+([^`]+)`+")
# The attributes of syntax nodes that hold names.
_NAMING = ("id", "name", "asname", "attr")
_SETTING = re.compile(r"[\w.]+=")


Check: TypeAlias = Callable[[argparse.Namespace], None]


@dataclass(frozen=True)
class Arguments:
    """The arguments of a command.

    Args:
      of: names and settings of each argument, as for `argparse`.
      checks: functions that check the parsed arguments together, and raise a `UserError`.
    """

    of: tuple[tuple[tuple[str, ...], dict[str, object]], ...]
    checks: tuple[Check, ...] = ()


def argument(*names: str, **settings: object) -> tuple[tuple[str, ...], dict[str, object]]:
    """Declare an argument. Its help ends with the default, unless the default is None or empty."""
    default = settings.get("default")
    if default not in (None, "", []):
        settings["help"] = f"{settings.get('help')} (default: {default})"
    return names, settings


def set_argument(help: str = "override fields of the config", metavar: str = "a.b=c"):
    """Declare ``--set a.b=c ...``, which may be repeated."""
    return argument(
        "--set", action="append", default=[], metavar=metavar, help=f"{help} (default: none)"
    )


def workdir_argument(default: str):
    """Declare ``--workdir``."""
    return argument(
        "--workdir",
        type=Path,
        default=Path(default),
        help="folder of all runs and of the results",
    )


class Parser(UsageParser):
    """A parser whose help keeps the paragraphs of the description."""

    def __init__(self, command: str, description: str | None, *declared: Arguments):
        super().__init__(
            prog=f"python -m train.{command}",
            description=_MARKED.sub(r"\1", description or ""),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.checks = [check for arguments in declared for check in arguments.checks]
        for names, settings in itertools.chain(*(arguments.of for arguments in declared)):
            self.add_argument(*names, **settings)  # type: ignore[arg-type]
        add_limits(self)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        found = super().parse_args(args, namespace)
        paths = {name: path for name, path in vars(found).items() if isinstance(path, Path)}
        # A shell does not expand --workdir=~/runs.
        vars(found).update({n: Path(os.path.expanduser(path)) for n, path in paths.items()})
        for check in self.checks:
            check(found)
        return found

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        given = sys.argv[1:] if args is None else args
        return super().parse_known_args([*_set_for_each(given)], namespace)


def config_text(text: str, kind: str = "Experiment") -> str:
    """Return ``FILE.py:NAME:a.b=c``, if the file exists and, as far as its text shows, the name.

    Raises:
      UserError: the file does not exist, or does not define the name.
    """
    file, *settings = text.split(":")
    name = settings[0] if settings and "=" not in settings[0] else None
    path = config_file(file)
    try:
        body = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError):  # its import says where
        return text
    functions = [f for f in body if isinstance(f, ast.FunctionDef) and f.name[0] != "_"]
    others = [f.name for f in functions if f.returns and ast.unparse(f.returns) == kind]
    names = {getattr(node, key, None) for node in ast.walk(ast.Module(body, [])) for key in _NAMING}
    # Names that a star import or other code binds are found only by the import.
    if others and not names & {name or "config", "*", "globals", "setattr", "exec"}:
        raise unknown_experiment(path, name, others)
    return text


def unknown_experiment(path: Path, name: str | None, others: Sequence[str]) -> UserError:
    """Return the error for a config that does not define an experiment, or has several of them."""
    ways = f"give one, such as {path}:{others[0]}, of {', '.join(others)}"
    if name is None:
        return UserError(f"{path} has {len(others)} experiments; {ways}")
    return UserError(f"{path} has no experiment {name!r}; {ways}{did_you_mean(name, others)}")


def config_file(name: str) -> Path:
    """Return the path of an existing config.

    Raises:
      UserError: the file does not exist, or is not a Python file. The message proposes another one.
    """
    path = Path(name)
    if path.is_file() and path.suffix == ".py":
        return path
    root = Path(__file__).parents[2]
    others = (path.with_suffix(".py"), root / path.with_suffix(".py")) if path.name else ()
    other = next((f". Did you mean {other}?" for other in others if other.is_file()), "")
    what = "is a folder" if path.is_dir() else "does not end in .py" if path.exists() else None
    problem = f"there is no config {path}" if what is None else f"the config {path} {what}"
    raise UserError(f"{problem}; a config is an existing Python file, FILE.py{other}")


def _set_for_each(arguments: Iterable[str]) -> Iterator[str]:
    """Rewrite ``--set a=1 b=2`` as ``--set a=1 --set b=2``.

    ``nargs="+"`` is not used, because it would also take a config that follows.
    """
    setting = False
    before = None
    for argument in arguments:
        if setting and before != "--set" and _SETTING.match(argument):
            yield "--set"
        elif before != "--set":
            setting = argument == "--set"
        yield argument
        before = argument

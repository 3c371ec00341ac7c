"""How do the commands of ``python -m train`` format their help and read ``--set``?"""

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxgrow.cli.options import UsageParser
from jaxgrow.untrusted import add_limits

_MARKED = re.compile(r"`+([^`]+)`+")
_SETTING = re.compile(r"[\w.]+=")


class Parser(UsageParser):
    """A parser whose help keeps the paragraphs of the description and shows every default."""

    def __init__(self, command: str, description: str | None):
        super().__init__(
            prog=f"python -m train.{command}",
            description=_MARKED.sub(r"\1", description or ""),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_limits(self)

    def add_argument(self, *names: str, help: str | None = None, **options: Any) -> argparse.Action:
        """Add an argument. Its help ends with the default, unless the default is None or empty."""
        default = options.get("default")
        shown = "" if default in (None, "", [], argparse.SUPPRESS) else f" (default: {default})"
        return super().add_argument(*names, help=(help or "") + shown, **options)

    def add_set(self, help: str = "override fields of the config", metavar: str = "a.b=c") -> None:
        """Add ``--set a.b=c ...``, which may be repeated."""
        self.add_argument(
            "--set", action="append", default=[], metavar=metavar, help=f"{help} (default: none)"
        )

    def add_workdir(self, default: str) -> None:
        """Add ``--workdir``, the folder of all runs."""
        where = "folder of all runs and of the results"
        self.add_argument("--workdir", type=Path, default=Path(default), help=where)

    def add_tokenizer(self) -> None:
        """Add ``--tokenizer``, for a model without a tokenizer."""
        which = "tokenizer.json, a folder, or bytes (default: the tokenizer of MODEL)"
        self.add_argument("--tokenizer", help=which)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        given = sys.argv[1:] if args is None else args
        return super().parse_known_args([*_one_each(given)], namespace)


def _one_each(arguments: Iterable[str]) -> Iterator[str]:
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

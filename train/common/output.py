"""How do the commands print? Text from files is escaped before a terminal sees it."""

import sys
import warnings
from traceback import format_exception
from typing import Any, TextIO

from jaxgrow.untrusted import printable


def say(text: Any, *, file: TextIO | None = None, end: str = "\n", flush: bool = False) -> None:
    """Print a text to ``file`` (default: stdout). Terminal escapes are printed as ``\\x1b``."""
    print(printable(str(text)), file=sys.stdout if file is None else file, end=end, flush=flush)


_formatted = warnings.formatwarning


def _escaped(*arguments: Any, **more: Any) -> str:
    return printable(_formatted(*arguments, **more))


def escape_messages() -> None:
    """Escape the text of warnings and of tracebacks, which may quote a file, as well."""
    warnings.formatwarning = _escaped
    sys.excepthook = lambda *error: say("".join(format_exception(*error)), file=sys.stderr, end="")

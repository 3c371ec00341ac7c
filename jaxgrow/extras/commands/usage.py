"""Which name did the user of a command mean? This module does not import JAX."""

import argparse
import re

from jaxgrow.cli.options import USAGE_ADVICE
from jaxgrow.typed import did_you_mean


def propose_names(parser: argparse.ArgumentParser, message: str) -> str:
    """Return the message of a usage error with the nearest name of a choice or an option."""
    found = re.fullmatch(r"(.*)invalid choice: '(.*)' \(choose from (.*)\)", message)
    if found is not None:
        names = [name.strip("'\" ") for name in found[3].split(",")]
        near = did_you_mean(found[2], names) or f"; choose from {', '.join(names)}"
        message = f"{found[1]}{found[2]!r} does not exist{near}"
    unknown = re.fullmatch(r"unrecognized arguments: (--[\w-]+).*", message, re.DOTALL)
    if unknown is not None:
        message += did_you_mean(unknown[1], _long_options(parser))
    return message


def _long_options(parser: argparse.ArgumentParser) -> list[str]:
    """Return the long options of a parser and of its subcommands."""
    own = [o for action in parser._actions for o in action.option_strings if o.startswith("--")]
    for action in parser._actions:
        for inner in action.choices.values() if isinstance(action.choices, dict) else ():
            own += _long_options(inner)
    return own


USAGE_ADVICE.add("names", propose_names)

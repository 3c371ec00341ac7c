"""The options that several subcommands of ``jaxgrow`` share, and the types of their values."""

import argparse
import re
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import NoReturn

from jaxgrow.typed import did_you_mean
from jaxgrow.untrusted import add_limits

# The axes that have an option, with the meaning of their size for the help text.
AXES = {
    "layers": "layers",
    "embed": "features of the residual stream (the hidden size)",
    "heads": "query heads",
    "kv_heads": "key and value heads",
    "mlp": "hidden units of each MLP (the intermediate size)",
}
MODEL = (
    "the checkpoint directory of a model: from Hugging Face (safetensors), of a run (if it has not "
    "finished, its newest checkpoint; RUN@STEP chooses one), or written by this command"
)
_FOLDERS = {
    "SRC": f"{MODEL}; it is not modified",
    "BEFORE": "the model with weight 1 - alpha",
    "UP": "the model with weight alpha; it has the same sizes as BEFORE",
}
DTYPES = ("float32", "bfloat16", "float16")


class UsageParser(argparse.ArgumentParser):
    """A parser whose usage errors are one line, which proposes the nearest name."""

    def error(self, message: str) -> NoReturn:
        """End the process with status 2."""
        found = re.fullmatch(r"(.*)invalid choice: '(.*)' \(choose from (.*)\)", message)
        if found is not None:
            names = [name.strip("'\" ") for name in found[3].split(",")]
            near = did_you_mean(found[2], names) or f"; choose from {', '.join(names)}"
            message = f"{found[1]}{found[2]!r} does not exist{near}"
        unknown = re.fullmatch(r"unrecognized arguments: (--[\w-]+).*", message, re.DOTALL)
        if unknown is not None:
            message += did_you_mean(unknown[1], _long_options(self))
        self.exit(2, f"error: {message.rstrip('?.')}; {self.prog} --help lists the options\n")


def _long_options(parser: argparse.ArgumentParser) -> list[str]:
    """Return the long options of a parser and of its subcommands."""
    own = [o for action in parser._actions for o in action.option_strings if o.startswith("--")]
    for action in parser._actions:
        for inner in action.choices.values() if isinstance(action.choices, dict) else ():
            own += _long_options(inner)
    return own


class Commands:
    """The subcommands of a parser.

    Args:
      parser: the parser of the command ``jaxgrow``.
    """

    def __init__(self, parser: argparse.ArgumentParser):
        self._subparsers = parser.add_subparsers(required=True, metavar="COMMAND")

    @property
    def by_name(self) -> Mapping[str, argparse.ArgumentParser]:
        """The parser of each subcommand that was added."""
        return self._subparsers.choices

    def name(self, name: str, about: str) -> argparse.ArgumentParser:
        """Add a subcommand without arguments; ``about``: its description in one sentence."""
        return self._subparsers.add_parser(name, help=about)

    def add(
        self,
        name: str,
        help: str,
        run: str,
        *folders: str,
        writes: bool = False,
        evaluates: bool = False,
        epilog: str = "",
    ) -> argparse.ArgumentParser:
        """Add a subcommand.

        Args:
          name: the name of the subcommand.
          help: its description in one sentence.
          run: the path of the function that runs the parsed arguments. Its module is imported then.
          *folders: the names of its positional arguments, each the folder of a model.
          writes: whether it writes a model to DST, and can print the result as JSON.
          evaluates: whether it evaluates models, which may use an accelerator.
          epilog: text after the list of options; its line breaks are kept.
        """
        raw = argparse.RawDescriptionHelpFormatter if "\n" in epilog else argparse.HelpFormatter
        p = self._subparsers.add_parser(
            name, help=help, description=help, epilog=epilog or None, formatter_class=raw
        )
        for folder in folders:
            about = _FOLDERS.get(folder, MODEL)
            p.add_argument(folder.lower(), metavar=folder, type=Path, help=about)
        if writes:
            _destination(p)
            add_json(p)
        add_limits(p)
        p.set_defaults(run=run, command=name, evaluates=evaluates)
        return p


def _destination(p: argparse.ArgumentParser) -> None:
    p.add_argument("dst", metavar="DST", type=Path, help="the directory to create")
    p.add_argument(
        "--to",
        choices=["hf", "orbax"],
        help="the format of DST (default: the format of the source; convert writes a run as hf)",
    )
    p.add_argument(
        "--dtype",
        choices=DTYPES,
        help="the dtype of the parameters in DST; they are computed in float32 or a wider dtype, "
        "and rounded once at the end (default: the dtype of the source)",
    )
    p.add_argument(
        "--shard-size",
        type=_file_size,
        metavar="N",
        help="the maximum size of a weight file, such as 500MB, 1.5GB or 5GiB (default: 5GB)",
    )
    p.add_argument(
        "--overwrite",
        action="store_true",
        help="replace an existing checkpoint in DST, after the new one is complete",
    )
    p.add_argument(
        "--dry-run",
        action="store_true",
        help="print a description of the result without writing DST",
    )


def add_json(p: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    p.add_argument("--json", action="store_true", help="print the result as JSON")


def add_lora(p: argparse.ArgumentParser) -> None:
    """Add the options for a LoRA that is transformed with its model."""
    p.add_argument(
        "--lora",
        type=Path,
        metavar="DIR",
        help="a LoRA of SRC in PEFT's format, for example in SRC itself; the LoRA is transformed "
        "with the model, and also written into DST",
    )
    p.add_argument(
        "--lora-only",
        action="store_true",
        default=None,
        help="write only the LoRA into DST, without the model",
    )


def axis_option(axis: str) -> str:
    """The option that sets the size of an axis.

    Example:
      >>> axis_option("kv_heads")
      '--kv-heads'
    """
    return f"--{axis.replace('_', '-')}"


def add_sizes(p: argparse.ArgumentParser) -> None:
    """Add one option per axis for its new size."""
    for axis, what in AXES.items():
        about = (
            f"the new number of {what}; for a model with stages (Swin) one per stage, such as "
            "2,2,18,2"
        )
        p.add_argument(axis_option(axis), type=_stages, metavar="N", help=about)


# --- the types of values ---


def unit_groups(text: str) -> str | tuple[tuple[int, ...], ...]:
    """Read the groups of the units of an axis, such as ``far:3`` or ``0+2,1+3``."""
    if text.startswith(("far", "adjacent")) or text == "alike":
        return text
    try:
        return tuple(tuple(map(int, group.split("+"))) for group in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not 'far', 'adjacent' or 'far:3', nor a list of groups such as 0+2,1+3: "
            "join the old units of a group with a plus, and separate groups with a comma"
        ) from None


def layer_loop(text: str) -> tuple[int, int, int]:
    """Read a loop over layers: ``4-7x2`` runs the layers 4, 5, 6 and 7 two times.

    Example:
      >>> layer_loop("4-7x2")
      (4, 8, 2)
    """
    found = re.fullmatch(r"([0-9]{1,6})-([0-9]{1,6})x([0-9]{1,6})", text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a loop: give the first layer, the last layer and how often they run, such as 4-7x2"
        )
    begin, last, times = map(int, found.groups())
    return begin, last + 1, times


def layer_list(text: str) -> list[tuple[str, int]]:
    """Read a list of layers, and the folder of each layer; an empty folder is that of SRC.

    Example:
      >>> layer_list("0-1,0,big/model:7-8")
      [('', 0), ('', 1), ('', 0), ('big/model', 7), ('big/model', 8)]
    """
    layers: list[tuple[str, int]] = []
    for part in text.split(","):
        found = re.fullmatch(r"(?:(.+):)?([0-9]{1,6})(?:-([0-9]{1,6}))?", part)
        if found is None or int(found[2]) > int(found[3] or found[2]):
            raise argparse.ArgumentTypeError(
                f"{part!r} is not a range of layers: give the first and the last layer, counted from 0, such as 8-23, and "
                "before them the folder of another model, such as other:8-23"
            )
        layers += [(found[1] or "", i) for i in range(int(found[2]), int(found[3] or found[2]) + 1)]
    return layers


def _stages(text: str) -> int | tuple[int, ...]:
    try:
        found = [int(size) for size in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size: give a number such as 24, or one per stage such as 2,2,18,2"
        ) from None
    return tuple(found) if len(found) > 1 else found[0]


def _file_size(text: str) -> int:
    found = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?) ?([KMGT])(I?)B", text.upper())
    base = 1024 if found and found[3] else 1000
    size = int(Fraction(found[1]) * base ** (1 + "KMGT".index(found[2]))) if found else 0
    if not size:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a file size: give one such as 500MB, 1.5GB or 5GiB"
        )
    return size

"""The arguments of the commands of extras.

This module does not import JAX, as `jaxgrow.cli.arguments`.
"""

import argparse
from fractions import Fraction
from pathlib import Path

from jaxgrow.cli.arguments import (
    COMMANDS,
    OPTIMIZER,
    OPTIMIZER_STATE,
    add_method,
    add_trainer_format,
    known_methods,
    methods_table,
)
from jaxgrow.cli.methods import EXPERTS
from jaxgrow.cli.options import Commands, add_json, add_lora, add_sizes, layer_list

DATA = (
    "input file: text, which the tokenizer.json in {} tokenises; token ids (.npy); or images "
    "(.npy) for a vision model"
)


def parameter_count(text: str) -> int:
    """Read a number of parameters, such as ``6e9``.

    Example:
      >>> parameter_count("1.5e9")
      1500000000
    """
    try:
        count = float(text)
    except ValueError:
        count = 0.0
    if not 1 <= count < 1e15:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of parameters, such as 6e9")
    return round(count)


# Further options of prune: name, type, metavariable and help.
_PRUNE = (
    (
        *("--params", parameter_count, "N"),
        "the number of parameters, instead of new sizes, such as 6e9; sizes within 2 %% are chosen, and "
        "the number of layers stays if possible",
    ),
    (
        *("--vocab", str, "TOKENS"),
        "the tokens to keep, instead of new sizes: a number N for the first N, or a JSON file "
        '{"keep": [ids]}; nothing is measured',
    ),
    ("--data", Path, "FILE", DATA.format("SRC")),
    ("--optimizer-state", Path, "PATH", OPTIMIZER_STATE),
    (
        *("--scores", Path, "FILE"),
        "the file of the importance (safetensors). If it does not exist, it is written; if it does, "
        "SRC is not evaluated, and --data only adds a report of the effect",
    ),
)
_STARTUP = (
    "For bash: jaxgrow completion bash >> ~/.bash_completion; "
    "for zsh: jaxgrow completion zsh >> ~/.zshrc"
)


def _add_extra(
    commands: Commands,
    name: str,
    run: str,
    *folders: str,
    writes: bool = False,
    evaluates: bool = False,
    epilog: str = "",
) -> argparse.ArgumentParser:
    """Add a command that a function of this folder runs."""
    about, run = COMMANDS.describe(name), f"{__package__}.{run}"
    p = commands.add(name, about, run, *folders, writes=writes, evaluates=evaluates, epilog=epilog)
    if not writes and folders:
        add_json(p)
    return p


def growth_factor(text: str) -> Fraction:
    """Read a factor of growth such as ``2x`` or ``1.5x``.

    Example:
      >>> growth_factor("1.5x")
      Fraction(3, 2)
    """
    number = text.removesuffix("x")
    if not number.replace(".", "", 1).isdecimal() or not 1 < Fraction(number) <= 1024:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a factor of growth; give a number above 1, such as 2x or 1.5x"
        )
    return Fraction(number)


def layers_of_one(text: str) -> list[tuple[str, int]]:
    """Read a list of layers of a single model, such as ``0-3,6-11``, as `layer_list`."""
    if ":" in text:
        raise argparse.ArgumentTypeError(
            f"{text!r} names another model, but this command reads the layers of SRC only, such as 0-3,6-11"
        )
    return layer_list(text)


def add_inspect(commands: Commands) -> None:
    """Add ``jaxgrow inspect``."""
    add_trainer_format(_add_extra(commands, "inspect", "inspect.run_inspect", "PATH"))


def add_architectures(commands: Commands) -> None:
    """Add ``jaxgrow architectures``."""
    add_json(_add_extra(commands, "architectures", "inspect.run_architectures"))


def add_show(commands: Commands) -> None:
    """Add ``jaxgrow show``."""
    # Maps do not describe what the other methods do.
    methods = {n: row for n, row in known_methods().items() if n not in (*EXPERTS, "untie", "tie")}
    table = methods_table(methods)
    p = _add_extra(commands, "show", "show.run_show", "SRC", epilog=table)
    add_method(p, methods, layers_of_one)
    add_sizes(p)
    p.add_argument("--seed", type=int, metavar="N", help="random seed (default: 0)")
    p.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help="the image file to write (.png, .svg or .pdf)",
    )
    p.set_defaults(noise=None)


def add_suggest(commands: Commands) -> None:
    """Add ``jaxgrow suggest``."""
    p = _add_extra(commands, "suggest", "suggest.run_suggest", "SRC")
    p.add_argument(
        "--to",
        type=growth_factor,
        metavar="2x",
        help="the growth factor, instead of new sizes; sizes that fit it are proposed",
    )
    p.add_argument(
        "--to-params",
        type=parameter_count,
        metavar="N",
        help="the number of parameters, instead of new sizes, such as 6e9; sizes within 2 %% are proposed",
    )
    add_sizes(p)
    p.add_argument(
        "--keep-function", action="store_true", help="list only function-preserving methods"
    )


def add_prune(commands: Commands) -> None:
    """Add ``jaxgrow prune``."""
    p = _add_extra(commands, "prune", "prune.run_prune", "SRC", evaluates=True, writes=True)
    add_sizes(p)
    p.add_argument(
        "--experts",
        type=int,
        metavar="N",
        help="the new number of experts of a mixture; those are removed whose output, weighted by the "
        "router, is smallest (REAP)",
    )
    add_lora(p)
    p.add_argument(
        "--keep",
        type=layers_of_one,
        metavar="LIST",
        help="the layers that stay, such as 0-3,6-11, counted from 0; nothing is measured",
    )
    for option, kind, metavar, about in _PRUNE:
        p.add_argument(option, type=kind, metavar=metavar, help=about)
    p.add_argument("--optimizer", choices=["drop", "copy", "exact"], help=OPTIMIZER)
    p.add_argument(
        "--by",
        choices=["influence", "angular"],
        help="which layers are removed: 'influence' removes the layers that individually change "
        "their input least (default), 'angular' the consecutive layers that together change it "
        "least",
    )


def add_report(commands: Commands) -> None:
    """Add ``jaxgrow report``."""
    p = _add_extra(commands, "report", "report.run_report", "A", "B", evaluates=True)
    p.add_argument(
        "--data", type=Path, metavar="FILE", help=f"{DATA.format('A')} (default: random inputs)"
    )


def add_completion(commands: Commands) -> None:
    """Add ``jaxgrow completion``."""
    p = _add_extra(commands, "completion", "completion.run_completion", epilog=_STARTUP)
    p.add_argument("shell", choices=["bash", "zsh"])


COMMANDS.add("inspect", add_inspect)
COMMANDS.add("architectures", add_architectures)
COMMANDS.add("show", add_show)
COMMANDS.add("suggest", add_suggest)
COMMANDS.add("prune", add_prune)
COMMANDS.add("report", add_report)
COMMANDS.add("completion", add_completion)

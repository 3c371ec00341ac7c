"""The arguments of the commands ``python -m train.X``.

Help and wrong arguments do not wait for JAX: this module imports nothing that imports it.
`train` parses the arguments before it imports the module of the command.
"""

import ast
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from jaxgrow.registry import Registry
from jaxgrow.typed import did_you_mean
from train.common.commands import (
    Arguments,
    Parser,
    argument,
    config_text,
    set_argument,
    workdir_argument,
)
from train.common.errors import UserError
from train.config.overrides import number_list, seed_list

CONFIG = "FILE.py:NAME, or FILE.py with config() -> Experiment"
_TRAIN = Path(__file__).parent
COMMANDS: Registry[Arguments] = Registry("command", "train.extras")
# What extras add to a command of the core.
MORE: Registry[Arguments] = Registry("arguments", "train.extras")
# "settings" returns what ``--list`` and ``--show`` of `train.pretrain` print, from its arguments.
LISTINGS: Registry[Callable[[Namespace], str]] = Registry("listing", "train.extras")


def command_parser(command: str) -> Parser:
    """Return the parser of ``python -m train.COMMAND``; the module's docstring describes it."""
    text = (_TRAIN / f"{command}.py").read_text(encoding="utf-8")
    declared = [registry[command] for registry in (COMMANDS, MORE) if command in registry]
    return Parser(command, ast.get_docstring(ast.parse(text)), *declared)


def check_arguments() -> None:
    """Parse the arguments of this process, ``python -m train.X ..``, before its module is imported.

    Modules in folders, which are not commands, are left to Python.

    Raises:
      UserError: the command does not exist, or an argument is wrong.
    """
    # At this moment, Python has replaced `-m train.X` in sys.argv by `-m`.
    module = sys.orig_argv[-len(sys.argv)].removeprefix("-m")
    package, _, command = module.partition(".")
    if command in COMMANDS:
        command_parser(command).parse_args()
    elif package == "train" and "." not in command:
        every = [f"train.{name}" for name in COMMANDS]
        near = did_you_mean(module, every) or f"; the commands are {', '.join(every)}"
        raise UserError(f"{module} is not a command{near}")


def fraction_of(text: str, option: str) -> float:
    """Return the fraction of the steps that an option names.

    Raises:
      UserError: it is not a number between 0 and 1.
    """
    found = number_list(text, float, option)
    if len(found) != 1 or not 0 < found[0] < 1:
        raise UserError(f"{option} takes fractions between 0 and 1, not {text}")
    return found[0]


def seeds_argument(each: str):
    """Declare ``--seeds``, the seeds of each config, operator, or combination."""
    about = f"seeds of each {each}, such as 0,1,2 or 0-2"
    return argument("--seeds", type=seed_list, default="0", help=about)


def _frontier_points(text: str) -> list[tuple[float, list[str]]]:
    """Read the fractions of ``--frontier``, each with its settings."""
    found = []
    for fraction, *settings in (part.split(":") for part in text.split(",") if part):
        if not fraction:
            raise UserError(f"--frontier {text} has settings without a fraction; write 0.4:a.b=c")
        if lengths := [
            s for s in settings if s.partition("=")[0] in ("steps", "epochs", "seconds")
        ]:
            raise UserError(
                f"--frontier {fraction} and its setting {lengths[0]} both set the length of the run: leave out one of them"
            )
        found.append((fraction_of(fraction, "--frontier"), settings))
    return found


COMMANDS.add(
    "compare",
    Arguments(
        (
            argument(
                "configs",
                nargs="+",
                type=config_text,
                help="FILE.py[:NAME], with individual settings :a.b=c ...; the first config is the baseline",
            ),
            seeds_argument("config"),
            argument(
                "--frontier",
                type=_frontier_points,
                default="",
                help="fractions of the steps of the baseline, such as 0.4,0.75:a.b=c (default: none)",
            ),
            workdir_argument("runs"),
            set_argument("override fields of every config"),
        )
    ),
)


def _check_config(a: Namespace) -> None:
    if not a.list:
        config_text(a.config)


def _check_profile(a: Namespace) -> None:
    if a.profile < 0:
        raise UserError(f"--profile must be a number of steps, 0 or more, but is {a.profile}")


COMMANDS.add(
    "pretrain",
    Arguments(
        (
            argument("config", help=CONFIG),
            argument(
                "--workdir",
                help="folder of the run (default: runs/NAME, with the name of the experiment)",
            ),
            set_argument(),
            argument(
                "--from",
                dest="start",
                metavar="RUN[@STEP]",
                help="folder of another run, finished or not, from whose checkpoint of this step of the run the new run starts "
                "(default: none; without @STEP, the newest checkpoint)",
            ),
            argument(
                "--profile",
                type=int,
                default=0,
                metavar="STEPS",
                help="number of steps to trace for xprof and Perfetto, in the folder profile of the run",
            ),
            argument(
                "--show",
                action="store_true",
                help="print all fields of the experiment, and run nothing",
            ),
            argument(
                "--list",
                action="store_true",
                help="print the experiments of the file, and run nothing",
            ),
            argument(
                "--coordinator",
                metavar="HOST:PORT",
                help="address of process 0 with a free port, for several processes (default: found by JAX)",
            ),
            argument(
                "--processes",
                type=int,
                metavar="N",
                help="number of processes (default: found by JAX)",
            ),
            argument(
                "--process",
                type=int,
                metavar="I",
                help="index of this process, from 0 (default: found by JAX)",
            ),
        ),
        (_check_config, _check_profile),
    ),
)

"""The arguments of the subcommands of ``jaxgrow``.

Help and usage errors do not wait for JAX: this module imports nothing that imports it. A subcommand
names the function that runs it, whose module is imported after the arguments are valid.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jaxgrow._version import __version__
from jaxgrow.cli.methods import FORMATS, METHODS, OPTIMIZER_POLICIES
from jaxgrow.cli.options import (
    Commands,
    UsageParser,
    add_lora,
    add_sizes,
    axis_option,
    layer_list,
    layer_loop,
    unit_groups,
)
from jaxgrow.registry import Registry

_TITLE = "Grow, coalesce, prune, interpolate, compare and convert checkpoints on disk."
_TRAINING = (
    "Models are trained, compared and evaluated by other commands, which run in a clone of the "
    "repository: python -m train.pretrain --help."
)
_HEADS = (
    "the groups of heads: 'far' or 'adjacent' (pairs), 'far:3' (groups of three), or explicit "
    "groups such as 0+2,1+3; key/value heads, residual features and MLP units are grouped "
    "accordingly"
)
_TIED = (
    "how the scale of tied embeddings is corrected: 'norm' scales the final norm, which makes "
    "decoalesce function-preserving; 'paper' scales the embedding, as the published code does "
    "(default: norm)"
)
_TAKE_CONFIG = (
    "which config the result has if settings such as the rotary base differ: A, that of BEFORE, or "
    "B, that of UP (default: an error)"
)
OPTIMIZER = (
    "the policy for growing the optimizer state in SRC; without this option, the command chooses a "
    "policy for a checkpoint of another trainer, but the state of a PyTorch run is dropped"
)
OPTIMIZER_STATE = (
    "the optimizer state of a PyTorch run: an optimizer.pt, an optimizer.safetensors, or a "
    "directory of torch.distributed.checkpoint (default: found in SRC)"
)
_LAYERS_FROM = (
    "the layers of the new model, such as 0-15,8-23, as numbers of old layers, counted from 0; "
    "DIR:8-23 takes them from another model of the same widths. The method is then passthrough"
)
# The options of single methods for depth: name, type, metavariable and help.
_DEPTH = (
    (
        *("--loop", layer_loop, "I-JxN"),
        "for loop: the layers I to J, counted from 0, run N times; the new model has a copy of each "
        "layer for every time",
    ),
    (
        *("--blend", int, "N"),
        "the number of layers that solar averages where its two copies meet (default: 0)",
    ),
)
# The options of grow instead of a method: name, type, metavariable and help.
_TOKENS = (
    (
        *("--vocab", int, "N"),
        "the new number of tokens; each new row of embedding and head is the mean of random old rows "
        "plus noise, with the covariance of the old rows",
    ),
    (
        *("--like-tokens", Path, "FILE"),
        "a JSON object of new tokens and lists of old ids, such as "
        '{"<think>": [12, 881]}; each new row is the mean of these old rows',
    ),
)
# Further options of grow.
_GROW = (
    (
        "--experts",
        int,
        "N",
        "the number of experts of the new model, for upcycle and virtual_groups",
    ),
    ("--active", int, "N", "the number of experts that each token is routed to (default: 2)"),
    ("--seed", int, "N", "random seed for sampled units, new routers, and --noise (default: 0)"),
    (
        *("--noise", float, "DB"),
        "add noise to copies, DB decibels below the weights; the noise of the copies of a unit sums "
        "to zero, so it breaks their symmetry without changing the function",
    ),
    ("--optimizer-state", Path, "PATH", OPTIMIZER_STATE),
)
_V_CYCLE = "jaxgrow.cli.v_cycle_commands"
_BY_GROUPS = {
    "coalesce": "make a model smaller by merging groups of heads, units and layers",
    "decoalesce": "expand a coalesced model to its size before coalescing; give the same groups",
}
# The options for the groups of each axis, with their help.
_GROUPS = {
    "heads": _HEADS,
    "kv_heads": "the groups of key/value heads (default: derived from --heads)",
    "embed": "the groups of residual features (default: derived from the heads)",
    "mlp": "the groups of hidden units of each MLP (default: derived from the heads)",
    "layers": "the groups of layers, or 'alike': pairs of layers of the same kind",
}


#: The commands of extras: functions that add a command to the parser, by the name of the command.
COMMANDS: Registry[Callable[[Commands], None]] = Registry("command")


def jaxgrow_parser(words: Sequence[str] | None = None) -> UsageParser:
    """Build the parser of all subcommands.

    The parsed arguments hold the path of the function that runs the subcommand as ``run``.

    Args:
      words: the words of the command line. A command of an extra that is not among them has no
        arguments, so that the extra is not imported. None: all commands have their arguments.
    """
    found = UsageParser(prog="jaxgrow", description=_TITLE, epilog=_TRAINING)
    found.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = Commands(found)
    _add_grow(commands)
    _add_v_cycle(commands)
    commands.add(
        "convert",
        "write a model in another format or dtype, or with another shard size",
        "jaxgrow.cli.convert_command.run_convert",
        "SRC",
        writes=True,
    )
    found.set_defaults(commands=commands.by_name)
    for name in COMMANDS:
        if words is None or name in words:
            COMMANDS[name](commands)
        else:
            commands.name(name, COMMANDS.describe(name))
    return found


def _add_v_cycle(commands: Commands) -> None:
    for name, about in _BY_GROUPS.items():
        p = commands.add(name, about, f"{_V_CYCLE}.run_{name}", "SRC", writes=True)
        for axis, about in _GROUPS.items():
            p.add_argument(axis_option(axis), type=unit_groups, help=about)
        p.add_argument("--tied", choices=["norm", "paper"], default="norm", help=_TIED)
        add_lora(p)
    p = commands.add(
        "interpolate",
        "interpolate two models: (1 - alpha) BEFORE + alpha UP",
        f"{_V_CYCLE}.run_interpolate",
        *("BEFORE", "UP"),
        writes=True,
    )
    p.add_argument("--alpha", type=float, required=True, help="the weight of UP (0 to 1)")
    p.add_argument("--take-config", choices=["A", "B"], help=_TAKE_CONFIG)


def _add_grow(commands: Commands) -> None:
    methods = known_methods()
    p = commands.add(
        "grow",
        "make a model larger with a published growth method",
        "jaxgrow.cli.grow_commands.run_grow",
        "SRC",
        epilog=methods_table(methods),
        writes=True,
    )
    add_method(p, methods, more=_TOKENS)
    add_sizes(p)
    for option, kind, metavar, about in _GROW:
        p.add_argument(option, type=kind, metavar=metavar, help=about)
    p.add_argument("--optimizer", choices=["drop", *OPTIMIZER_POLICIES], help=OPTIMIZER)
    add_trainer_format(p)
    add_lora(p)


def add_trainer_format(p: argparse.ArgumentParser) -> None:
    """Add the options for checkpoints of other trainers."""
    names = p.add_mutually_exclusive_group()
    names.add_argument(
        "--format",
        choices=FORMATS,
        help="the trainer that wrote the checkpoint (default: detected from its paths)",
    )
    names.add_argument(
        "--names",
        type=Path,
        metavar="FILE",
        help="a JSON file with the axis names of a checkpoint of another trainer",
    )
    p.add_argument(
        "--head-dim",
        type=int,
        metavar="N",
        help="the size of a head, for checkpoints of other trainers that do not store it",
    )


class _ChosenLayers(argparse.Action):
    """A list of layers, which stands for the method passthrough."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values, option=None
    ) -> None:
        namespace.layers_from, namespace.method = values, "passthrough"


def add_method(
    p: argparse.ArgumentParser,
    methods: Mapping[str, tuple[str, str]],
    layers: Callable[[str], list[tuple[str, int]]] = layer_list,
    more: Sequence[tuple[str, Callable[[str], object], str, str]] = (),
) -> None:
    """Add ``--method`` and the options of methods for depth.

    Args:
      p: the parser.
      methods: the methods.
      layers: the type of ``--layers-from``, which stands for the method passthrough.
      more: the options that are given instead of a method.
    """
    one = p.add_mutually_exclusive_group(required=True)
    one.add_argument(
        "--method",
        choices=sorted(methods),
        help="the growth method; the table below describes the methods",
    )
    one.add_argument(
        "--layers-from", action=_ChosenLayers, type=layers, metavar="LIST", help=_LAYERS_FROM
    )
    for option, kind, metavar, about in more:
        one.add_argument(option, type=kind, metavar=metavar, help=about)
    for option, kind, metavar, about in _DEPTH:
        p.add_argument(option, type=kind, metavar=metavar, help=about)


def described_methods() -> dict[str, tuple[str, str]]:
    """Return the axes that each method grows, and whether it preserves a pre-LN model's function."""
    from jaxgrow.operators import OPERATORS

    return {
        name: (
            found.grows.replace("_", "-"),
            found.preserves,
        )
        for name, found in OPERATORS.items()
    }


def known_methods() -> Mapping[str, tuple[str, str]]:
    """Return the methods of this library, and those that a program has registered before."""
    return described_methods() if "jaxgrow.operators" in sys.modules else METHODS


def methods_table(methods: Mapping[str, tuple[str, str]]) -> str:
    """Format the methods as a table for the help text."""
    rows = [("METHOD", "GROWS", "FUNCTION-PRESERVING")]
    rows += [(name, *about) for name, about in methods.items()]
    first, second, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    return "\n".join(f"{a:{first}}  {b:{second}}  {c}" for a, b, c in rows)

"""The arguments of the subcommands of ``jaxgrow``.

Help and usage errors do not wait for JAX: this module imports nothing that imports it. A subcommand
names the function that runs it, whose module is imported after the arguments are valid.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from jaxgrow._version import __version__
from jaxgrow.cli.methods import EXPERTS, METHODS, OPTIMIZER_POLICIES
from jaxgrow.cli.options import (
    DATA,
    Commands,
    UsageParser,
    as_json,
    axis_option,
    groups,
    growth_factor,
    lora,
    sizes,
    trainer_format,
)

_TITLE = "Grow, coalesce, prune, interpolate, compare and convert checkpoints on disk."
_TRAINING = (
    "Models are trained, compared and evaluated by other commands, which run in a clone of the "
    "repository: python -m train.pretrain --help."
)
_COMPLETION = "print a shell script that completes commands, options and methods"
_STARTUP = (
    "For bash: jaxgrow completion bash >> ~/.bash_completion; "
    "for zsh: jaxgrow completion zsh >> ~/.zshrc"
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
# The options for the groups of each axis, with their help.
_GROUPS = {
    "heads": _HEADS,
    "kv_heads": "the groups of key/value heads (default: derived from --heads)",
    "embed": "the groups of residual features (default: derived from the heads)",
    "mlp": "the groups of hidden units of each MLP (default: derived from the heads)",
    "layers": "the groups of layers, or 'alike': pairs of layers of the same kind",
}


def parser() -> argparse.ArgumentParser:
    """Build the parser of all subcommands.

    The parsed arguments hold the name of the function that runs the subcommand as ``run``, and the
    parsers of all subcommands as ``commands``.
    """
    found = UsageParser(prog="jaxgrow", description=_TITLE, epilog=_TRAINING)
    found.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = Commands(found)
    for add in (
        *(add_inspect, add_coalesce, add_decoalesce, add_interpolate, add_show, add_grow),
        *(add_suggest, add_prune, add_report, add_convert, add_architectures, add_completion),
    ):
        add(commands)
    found.set_defaults(commands=commands.by_name)
    return found


def add_inspect(commands: Commands) -> None:
    """Add ``jaxgrow inspect``."""
    about = "show the config of a model and the shape, axes, dtype and location of each parameter"
    p = commands.add("inspect", about, "file_commands.run_inspect", "PATH")
    as_json(p)
    trainer_format(p)


def add_coalesce(commands: Commands) -> None:
    """Add ``jaxgrow coalesce``."""
    about = "make a model smaller by merging groups of heads, units and layers"
    _add_groups(
        commands.add("coalesce", about, "v_cycle_commands.run_coalesce", "SRC", writes=True)
    )


def add_decoalesce(commands: Commands) -> None:
    """Add ``jaxgrow decoalesce``."""
    about = "expand a coalesced model to its size before coalescing; give the same groups"
    _add_groups(
        commands.add("decoalesce", about, "v_cycle_commands.run_decoalesce", "SRC", writes=True)
    )


def _add_groups(p: argparse.ArgumentParser) -> None:
    for axis, about in _GROUPS.items():
        p.add_argument(axis_option(axis), type=groups, help=about)
    p.add_argument("--tied", choices=["norm", "paper"], default="norm", help=_TIED)
    lora(p)


def add_interpolate(commands: Commands) -> None:
    """Add ``jaxgrow interpolate``."""
    about = "interpolate two models: (1 - alpha) BEFORE + alpha UP"
    p = commands.add(
        "interpolate", about, "v_cycle_commands.run_interpolate", "BEFORE", "UP", writes=True
    )
    p.add_argument("--alpha", type=float, required=True, help="the weight of UP (0 to 1)")
    p.add_argument(
        "--take-config",
        choices=["A", "B"],
        help="which config the result has if settings such as the rotary base differ: A, that of "
        "BEFORE, or B, that of UP (default: an error)",
    )


def add_show(commands: Commands) -> None:
    """Add ``jaxgrow show``."""
    about = "plot the maps from old to new units that grow would apply"
    methods = {name: row for name, row in known_methods().items() if name not in EXPERTS}
    p = commands.add("show", about, "grow_commands.run_show", "SRC", epilog=_methods(methods))
    as_json(p)
    p.add_argument(
        "--method",
        choices=sorted(methods),
        required=True,
        help="the growth method; the table below describes the methods",
    )
    sizes(p)
    p.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="random seed for methods that sample units (default: 0)",
    )
    _add_blend(p)
    p.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help="the image file to write (.png, .svg or .pdf)",
    )
    p.set_defaults(noise=None)


def add_grow(commands: Commands) -> None:
    """Add ``jaxgrow grow``."""
    about = "make a model larger with a published growth method"
    methods = known_methods()
    p = commands.add(
        "grow", about, "grow_commands.run_grow", "SRC", epilog=_methods(methods), writes=True
    )
    p.add_argument(
        "--method",
        choices=sorted(methods),
        required=True,
        help="the growth method; the table below describes the methods",
    )
    sizes(p)
    _add_experts(p)
    p.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="random seed for sampled units, new routers, and --noise (default: 0)",
    )
    _add_blend(p)
    p.add_argument(
        "--noise",
        type=float,
        metavar="DB",
        help="add noise to copies, DB decibels below the weights; the noise of the copies of a "
        "unit sums to zero, so it breaks their symmetry without changing the function",
    )
    _add_optimizer(p)
    lora(p)


def _add_blend(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--blend",
        type=int,
        metavar="N",
        help="the number of layers that solar averages where its two copies meet (default: 0)",
    )


def _add_experts(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--experts",
        type=int,
        metavar="N",
        help="the number of experts of the new model, for upcycle and virtual_groups",
    )
    p.add_argument(
        "--active",
        type=int,
        metavar="N",
        help="the number of experts that each token is routed to (default: 2)",
    )


def _add_optimizer(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--optimizer",
        choices=["drop", *OPTIMIZER_POLICIES],
        help="the policy for growing the optimizer state in SRC; without this option, the command "
        "chooses a policy for a checkpoint of another trainer, but the state "
        "of a PyTorch run is dropped",
    )
    trainer_format(p)
    p.add_argument(
        "--optimizer-state",
        type=Path,
        metavar="PATH",
        help="the optimizer state of a PyTorch run: an optimizer.pt, an "
        "optimizer.safetensors, or a directory of torch.distributed.checkpoint (default: found in "
        "SRC)",
    )


def known_methods() -> Mapping[str, tuple[str, str]]:
    """Return the methods of this library, and those that a program has registered before."""
    if "jaxgrow.operators" not in sys.modules:
        return METHODS
    from jaxgrow.cli.keeps import described_methods

    return described_methods()


def _methods(methods: Mapping[str, tuple[str, str]]) -> str:
    """Format the methods as a table for the help text."""
    rows = [("METHOD", "GROWS", "FUNCTION-PRESERVING")]
    rows += [(name, *about) for name, about in methods.items()]
    first, second, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    return "\n".join(f"{a:{first}}  {b:{second}}  {c}" for a, b, c in rows)


def add_suggest(commands: Commands) -> None:
    """Add ``jaxgrow suggest``."""
    about = (
        "list the growth methods that fit a model, with the FLOPs that they saved in our "
        "measurements"
    )
    p = commands.add("suggest", about, "grow_commands.run_suggest", "SRC")
    as_json(p)
    p.add_argument(
        "--to",
        type=growth_factor,
        metavar="2x",
        help="the growth factor, instead of new sizes; sizes that fit it are proposed",
    )
    sizes(p)
    p.add_argument(
        "--keep-function", action="store_true", help="list only function-preserving methods"
    )


def add_prune(commands: Commands) -> None:
    """Add ``jaxgrow prune``."""
    about = (
        "make a model smaller by removing the layers and units that are least important on given "
        "data"
    )
    p = commands.add("prune", about, "prune_command.run_prune", "SRC", evaluates=True, writes=True)
    sizes(p)
    p.add_argument(
        "--experts",
        type=int,
        metavar="N",
        help="the new number of experts of a mixture; those with the smallest gates are removed",
    )
    lora(p)
    p.add_argument("--data", type=Path, required=True, metavar="FILE", help=DATA.format("SRC"))
    p.add_argument(
        "--by",
        choices=["influence", "angular"],
        help="which layers are removed: 'influence' removes the layers that individually change "
        "their input least (default), 'angular' the consecutive layers that together change it "
        "least",
    )


def add_report(commands: Commands) -> None:
    """Add ``jaxgrow report``."""
    about = "compare the outputs of two models on the same inputs"
    p = commands.add("report", about, "file_commands.run_report", "A", "B", evaluates=True)
    as_json(p)
    p.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help=f"{DATA.format('A')} (default: random inputs)",
    )


def add_convert(commands: Commands) -> None:
    """Add ``jaxgrow convert``."""
    about = "write a model in another format or dtype, or with another shard size"
    commands.add("convert", about, "file_commands.run_convert", "SRC", writes=True)


def add_architectures(commands: Commands) -> None:
    """Add ``jaxgrow architectures``."""
    about = "list the supported architectures of transformers"
    as_json(commands.add("architectures", about, "file_commands.run_architectures"))


def add_completion(commands: Commands) -> None:
    """Add ``jaxgrow completion``."""
    p = commands.add("completion", _COMPLETION, "completion.run_completion", epilog=_STARTUP)
    p.add_argument("shell", choices=["bash", "zsh"])

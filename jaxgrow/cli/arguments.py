"""Which subcommands and options does the command ``jaxgrow`` have?"""

import argparse
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from jaxgrow import operators
from jaxgrow._version import __version__
from jaxgrow.checkpoints.io.safetensors import SHARD
from jaxgrow.cli.keeps import METHODS
from jaxgrow.cli.suggest import factor
from jaxgrow.integrations.formats import FORMATS
from jaxgrow.integrations.torch_optimizer import POLICIES

TITLE = "Grow, coalesce, prune, interpolate, compare and convert checkpoints on disk."
# The axes that have an option, with the meaning of their size for the help text.
AXES = {
    "layers": "layers",
    "embed": "features of the residual stream (the hidden size)",
    "heads": "query heads",
    "kv_heads": "key and value heads",
    "mlp": "hidden units of each MLP (the intermediate size)",
}
MODEL = (
    "the checkpoint directory of a model: from Hugging Face (safetensors), of a finished run, or "
    "written by this command"
)
_FOLDERS = {
    "SRC": f"{MODEL}; it is not modified",
    "BEFORE": "the model with weight 1 - alpha",
    "UP": "the model with weight alpha; it has the same sizes as BEFORE",
}
DATA = (
    "input file: text, which the tokenizer.json in {} tokenises; token ids (.npy); or images "
    "(.npy) for "
    "a vision model"
)
COMPLETION = "print a shell script that completes commands, options and methods"
_STARTUP = (
    "For bash: jaxgrow completion bash >> ~/.bash_completion; "
    "for zsh: jaxgrow completion zsh >> ~/.zshrc"
)
DTYPES = ("float32", "bfloat16", "float16")


def parser(runs: Mapping[str, Callable[[argparse.Namespace], None]]) -> argparse.ArgumentParser:
    """Build the parser.

    Args:
      runs: the function of each subcommand, by name; parsed arguments have it as ``run``.
    """
    parser = argparse.ArgumentParser(prog="jaxgrow", description=TITLE)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(
        name: str, help: str, *folders: str, writes: bool = True, **more: Any
    ) -> argparse.ArgumentParser:
        p = commands.add_parser(name, help=help, description=help, **more)
        for folder in folders:
            p.add_argument(
                folder.lower(), metavar=folder, type=Path, help=_FOLDERS.get(folder, MODEL)
            )
        if writes:
            p.add_argument("dst", metavar="DST", type=Path, help="the directory to create")
            p.add_argument(
                "--to",
                choices=["hf", "orbax"],
                help="the format of DST (default: the format of the source)",
            )
            p.add_argument(
                "--dtype",
                choices=DTYPES,
                help="the dtype of the parameters in DST; they are computed in float32 or a wider "
                "dtype, and "
                "rounded once at the end (default: the dtype of the source)",
            )
            p.add_argument(
                "--shard-size",
                type=_bytes,
                default=SHARD,
                metavar="N",
                help="the maximum size of a weight file, such as 500MB, 1.5GB or 5GiB (default: "
                "5GB)",
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
        p.add_argument("--json", action="store_true", help="print the result as JSON")
        p.set_defaults(run=runs[name], command=name)
        return p

    p = command(
        "inspect",
        "show the config of a model and the shape, axes, dtype and location of each parameter",
        "PATH",
        writes=False,
    )
    _format(p)
    for name, help in (
        ("coalesce", "make a model smaller by merging groups of heads, units and layers"),
        ("decoalesce", "expand a coalesced model to its size before; give the groups of that size"),
    ):
        p = command(name, help, "SRC")
        form = (
            "the groups of heads: 'far' or 'adjacent' (pairs), 'far:3' (groups of three), or "
            "explicit "
            "groups such as 0+2,1+3"
        )
        p.add_argument(
            "--heads",
            type=_groups,
            help=f"{form}; key/value heads, residual features and MLP units are grouped "
            "accordingly",
        )
        p.add_argument(
            "--kv-heads",
            type=_groups,
            help="the groups of key/value heads (default: derived from --heads)",
        )
        p.add_argument(
            "--embed",
            type=_groups,
            help="the groups of residual features (default: derived from the heads)",
        )
        p.add_argument(
            "--mlp",
            type=_groups,
            help="the groups of hidden units of each MLP (default: derived from the heads)",
        )
        p.add_argument(
            "--layers",
            type=_groups,
            help="the groups of layers, or 'alike': pairs of layers of the same kind",
        )
        p.add_argument(
            "--tied",
            choices=["norm", "paper"],
            default="norm",
            help="how the scale of tied embeddings is corrected: 'norm' scales the final norm, "
            "which makes "
            "decoalesce function-preserving; 'paper' scales the embedding, as the published code "
            "does "
            "(default: norm)",
        )
        _lora(p)
    p = command(
        "interpolate",
        "interpolate two models: (1 - alpha) BEFORE + alpha UP",
        "BEFORE",
        "UP",
    )
    p.add_argument("--alpha", type=float, required=True, help="the weight of UP (0 to 1)")
    dense = {name: about for name, about in METHODS.items() if name not in operators.EXPERTS}
    for name, help, methods, writes in (
        ("show", "plot the maps from old to new units that grow would apply", dense, False),
        ("grow", "make a model larger with a published growth method", METHODS, True),
    ):
        raw = argparse.RawDescriptionHelpFormatter
        p = command(name, help, "SRC", writes=writes, formatter_class=raw, epilog=_methods(methods))
        p.add_argument("--method", choices=sorted(methods), required=True)
        _sizes(p)
        if not writes:
            p.add_argument(
                "--seed",
                type=int,
                metavar="N",
                help="random seed for methods that sample units (default: 0)",
            )
            p.add_argument(
                "--out",
                type=Path,
                required=True,
                metavar="FILE",
                help="the image file to write (.png, .svg or .pdf)",
            )
            p.set_defaults(noise=None)
            continue
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
        p.add_argument(
            "--seed",
            type=int,
            metavar="N",
            help="random seed for sampled units, new routers, and --noise (default: 0)",
        )
        p.add_argument(
            "--noise",
            type=float,
            metavar="DB",
            help="add noise to copies, DB decibels below the weights; the noise of the copies of "
            "a unit sums to "
            "zero, so it breaks their symmetry without changing the function",
        )
        p.add_argument(
            "--optimizer",
            choices=["drop", *POLICIES],
            help="the policy for growing the optimizer state in SRC; without this option, the "
            "state of a PyTorch "
            "run is dropped",
        )
        _format(p)
        p.add_argument(
            "--optimizer-state",
            type=Path,
            metavar="PATH",
            help="the optimizer state of a PyTorch run: an optimizer.pt, or a directory of "
            "torch.distributed.checkpoint (default: found in SRC)",
        )
        _lora(p)
    p = command(
        "suggest",
        "list the growth methods that fit a model, with the FLOPs that they saved in our "
        "measurements",
        "SRC",
        writes=False,
    )
    p.add_argument(
        "--to",
        type=_factor,
        metavar="2x",
        help="the growth factor, instead of new sizes; sizes that fit it are proposed",
    )
    _sizes(p)
    p.add_argument(
        "--keep-function",
        action="store_true",
        help="list only function-preserving methods",
    )
    p = command(
        "prune",
        "make a model smaller by removing the layers and units that are least important on given "
        "data",
        "SRC",
    )
    _sizes(p)
    _lora(p)
    p.add_argument("--data", type=Path, required=True, metavar="FILE", help=DATA.format("SRC"))
    p.add_argument(
        "--by",
        choices=["influence", "angular"],
        help="which layers are removed: 'influence' removes the layers that individually change "
        "their input "
        "least (default), 'angular' the consecutive layers that together change it least",
    )
    p = command(
        "report", "compare the outputs of two models on the same inputs", "A", "B", writes=False
    )
    p.add_argument(
        "--data", type=Path, metavar="FILE", help=f"{DATA.format('A')} (default: random inputs)"
    )
    command(
        "convert", "write a model in another format or dtype, or with another shard size", "SRC"
    )
    command(
        "architectures",
        "list the supported architectures of transformers",
        writes=False,
    )
    p = commands.add_parser("completion", help=COMPLETION, description=COMPLETION, epilog=_STARTUP)
    p.add_argument("shell", choices=["bash", "zsh"])
    p.set_defaults(run=runs["completion"], command="completion", commands=commands.choices)
    return parser


def _format(p: argparse.ArgumentParser) -> None:
    help = "the trainer that wrote the Orbax checkpoint (default: detected from its paths)"
    p.add_argument("--format", choices=sorted(FORMATS), help=help)
    p.add_argument(
        "--names",
        type=Path,
        metavar="FILE",
        help="a JSON file with the axis names of an Orbax checkpoint in an unknown format",
    )


def _lora(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--lora",
        type=Path,
        metavar="DIR",
        help="a LoRA of SRC in PEFT's format, for example in SRC itself; the LoRA is transformed "
        "with the model, "
        "and also written into DST",
    )
    p.add_argument(
        "--lora-only",
        action="store_true",
        help="write only the LoRA into DST, without the model",
    )


def _sizes(p: argparse.ArgumentParser) -> None:
    for axis, what in AXES.items():
        about = (
            f"the new number of {what}; for a model with stages (Swin) one per stage, such as "
            "2,2,18,2"
        )
        p.add_argument(f"--{axis.replace('_', '-')}", type=_stages, metavar="N", help=about)


def _methods(methods: Mapping[str, tuple[str, str]]) -> str:
    """Format the methods as a table for the help text."""
    rows = [
        ("METHOD", "GROWS", "FUNCTION-PRESERVING"),
        *((name, *about) for name, about in methods.items()),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _groups(text: str) -> operators.Groups:
    if text.startswith(("far", "adjacent")) or text == "alike":
        return text
    try:
        return tuple(tuple(int(unit) for unit in group.split("+")) for group in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not 'far', 'adjacent' or 'far:3', nor a list of groups such as 0+2,1+3: "
            "join the old "
            "units of a group with a plus, and separate groups with a comma"
        ) from None


def _stages(text: str) -> int | tuple[int, ...]:
    try:
        sizes = [int(size) for size in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size: give a number such as 24, or one per stage such as 2,2,18,2"
        ) from None
    return tuple(sizes) if len(sizes) > 1 else sizes[0]


def _factor(text: str) -> Fraction:
    try:
        return factor(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _bytes(text: str) -> int:
    found = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?) ?([KMGT])(I?)B", text.upper())
    base = 1024 if found and found[3] else 1000
    size = int(Fraction(found[1]) * base ** (1 + "KMGT".index(found[2]))) if found else 0
    if not size:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a file size: give one such as 500MB, 1.5GB or 5GiB"
        )
    return size

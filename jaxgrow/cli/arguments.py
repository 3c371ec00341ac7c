"""What the command ``jaxgrow`` may be told."""

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

TITLE = "Checkpoints on disk: grown, coalesced, pruned, interpolated, compared and converted."
# The axes that an option names, and what their units are.
AXES = {
    "layers": "layers",
    "embed": "features of the residual stream (the hidden size)",
    "heads": "query heads",
    "kv_heads": "key and value heads",
    "mlp": "units of each MLP (the intermediate size)",
}
MODEL = "a model: a Hugging Face folder with safetensors, a finished run, or a folder that this command wrote"
_FOLDERS = {
    "SRC": f"{MODEL}; it is only read",
    "BEFORE": "the model whose weight is 1 - alpha",
    "UP": "the model whose weight is alpha, of the same sizes",
}
DATA = "text, for the tokenizer.json in {}; or token ids, as .npy; for a model of images: images, as .npy"
COMPLETION = "print a script with which a shell completes commands, options and methods"
_STARTUP = "For bash: jaxgrow completion bash >> ~/.bash_completion; for zsh: jaxgrow completion zsh >> ~/.zshrc"
DTYPES = ("float32", "bfloat16", "float16")


def parser(runs: Mapping[str, Callable[[argparse.Namespace], None]]) -> argparse.ArgumentParser:
    """Of the commands by their names; ``run`` of what it parses is that of the command."""
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
            p.add_argument("dst", metavar="DST", type=Path, help="a folder to be made")
            p.add_argument(
                "--to",
                choices=["hf", "orbax"],
                help="the kind of DST (default: that of the source)",
            )
            p.add_argument(
                "--dtype",
                choices=DTYPES,
                help="the dtype of the parameters in DST; they are computed in float32 or better and rounded once, at the end "
                "(default: the dtype of the source)",
            )
            p.add_argument(
                "--shard-size",
                type=_bytes,
                default=SHARD,
                metavar="N",
                help="the largest file of weights, such as 500MB, 1.5GB or 5GiB (default: 5GB)",
            )
            p.add_argument(
                "--overwrite", action="store_true", help="replace a checkpoint in DST, at the end"
            )
            p.add_argument(
                "--dry-run", action="store_true", help="say what DST would be, and write nothing"
            )
        p.add_argument("--json", action="store_true", help="say it as JSON")
        p.set_defaults(run=runs[name], command=name)
        return p

    p = command(
        "inspect",
        "show a model: its config, and every leaf with shape, axes, dtype and place",
        "PATH",
        writes=False,
    )
    _format(p)
    for name, help in (
        ("coalesce", "make a model smaller: groups of heads, units and layers become one"),
        ("decoalesce", "make a coalesced model large again; groups are those of the large model"),
    ):
        p = command(name, help, "SRC")
        form = "'far', 'adjacent' (pairs), 'far:3' (threes), or groups of old units: 0+2,1+3"
        p.add_argument(
            "--heads", type=_groups, help=f"{form}; key heads, residual stream and MLP units follow"
        )
        p.add_argument(
            "--kv-heads", type=_groups, help="groups of key heads; without --heads, these follow"
        )
        p.add_argument(
            "--embed", type=_groups, help="of the residual stream's units, if not as the heads"
        )
        p.add_argument("--mlp", type=_groups, help="of the MLP's units, if not as the heads")
        p.add_argument(
            "--layers", type=_groups, help="groups of layers, or 'alike': pairs of the same kind"
        )
        p.add_argument(
            "--tied",
            choices=["norm", "paper"],
            default="norm",
            help="where a tied embedding's missing factor goes: 'norm' puts it into the final norm, so that decoalesce keeps "
            "the function; 'paper' scales the embedding, as the published code does (default: norm)",
        )
        _lora(p)
    p = command("interpolate", "(1 - alpha) BEFORE + alpha UP", "BEFORE", "UP")
    p.add_argument("--alpha", type=float, required=True, help="the weight of UP")
    dense = {name: about for name, about in METHODS.items() if name not in operators.EXPERTS}
    for name, help, methods, writes in (
        ("show", "draw what grow would do: which old unit goes where, axis by axis", dense, False),
        ("grow", "make a model larger by a published method", METHODS, True),
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
                help="the random seed of methods that choose units (default: 0)",
            )
            p.add_argument(
                "--out",
                type=Path,
                required=True,
                metavar="FILE",
                help="the picture: .png, .svg, .pdf",
            )
            p.set_defaults(noise=None)
            continue
        p.add_argument(
            "--experts",
            type=int,
            metavar="N",
            help="the number of experts that upcycle and virtual_groups make",
        )
        p.add_argument(
            "--active",
            type=int,
            metavar="N",
            help="the number of experts that each token goes through (default: 2)",
        )
        p.add_argument(
            "--seed",
            type=int,
            metavar="N",
            help="random seed of drawn units, routers, and --noise (default: 0)",
        )
        p.add_argument(
            "--noise",
            type=float,
            metavar="DB",
            help="tell copies apart by noise that cancels, DB below the weights",
        )
        p.add_argument(
            "--optimizer",
            choices=["drop", *POLICIES],
            help="grow the optimizer state in SRC by this policy; of PyTorch runs it is left out without this option",
        )
        _format(p)
        p.add_argument(
            "--optimizer-state",
            type=Path,
            metavar="PATH",
            help="an optimizer.pt or a folder of torch.distributed.checkpoint",
        )
        _lora(p)
    p = command(
        "suggest",
        "list the growth methods that fit a model, and what was measured for each",
        "SRC",
        writes=False,
    )
    p.add_argument(
        "--to", type=_factor, metavar="2x", help="how many times as large, instead of the new sizes"
    )
    _sizes(p)
    p.add_argument(
        "--keep-function",
        action="store_true",
        help="list only methods that keep the model's function",
    )
    p = command(
        "prune",
        "make a model smaller: the layers and units that matter least, on some data, are left out",
        "SRC",
    )
    _sizes(p)
    _lora(p)
    p.add_argument("--data", type=Path, required=True, metavar="FILE", help=DATA.format("SRC"))
    p.add_argument(
        "--by", choices=["influence", "angular"], help="the layers that change their input least, one by one (default), or the "
        "consecutive ones that do so together"
    )  # fmt: skip
    p = command(
        "report", "compare the functions of two models on the same inputs", "A", "B", writes=False
    )
    p.add_argument(
        "--data", type=Path, metavar="FILE", help=f"{DATA.format('A')} (default: random inputs)"
    )
    command(
        "convert", "write a model as another kind of folder, in another dtype or other files", "SRC"
    )
    command(
        "architectures",
        "list the architectures of transformers whose checkpoints are supported",
        writes=False,
    )
    p = commands.add_parser("completion", help=COMPLETION, description=COMPLETION, epilog=_STARTUP)
    p.add_argument("shell", choices=["bash", "zsh"])
    p.set_defaults(run=runs["completion"], command="completion", commands=commands.choices)
    return parser


def _format(p: argparse.ArgumentParser) -> None:
    help = "the trainer that wrote an Orbax checkpoint (default: recognised by its paths)"
    p.add_argument("--format", choices=sorted(FORMATS), help=help)
    p.add_argument(
        "--names",
        type=Path,
        metavar="FILE",
        help="JSON with the axis names of an Orbax checkpoint of another program",
    )


def _lora(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--lora",
        type=Path,
        metavar="DIR",
        help="a LoRA of SRC in PEFT's layout, perhaps SRC itself: it becomes one of DST, and is written into that folder, too",
    )
    p.add_argument(
        "--lora-only", action="store_true", help="write the LoRA alone into DST, without its model"
    )


def _sizes(p: argparse.ArgumentParser) -> None:
    for axis, what in AXES.items():
        about = f"the new number of {what}; of a model with stages (Swin) one for each stage, as 2,2,18,2"
        p.add_argument(f"--{axis.replace('_', '-')}", type=_stages, metavar="N", help=about)


def _methods(methods: Mapping[str, tuple[str, str]]) -> str:
    """A table for people to read."""
    rows = [
        ("METHOD", "GROWS", "KEEPS THE FUNCTION"),
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
            f"{text!r} is not 'far', 'adjacent', 'far:3' or groups like 0+2,1+3: a comma between new units, a plus between "
            "old ones"
        ) from None


def _stages(text: str) -> int | tuple[int, ...]:
    try:
        sizes = [int(size) for size in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size, as 24, nor one of each stage, as 2,2,18,2"
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
            f"{text!r} is not the size of a file; give one like 500MB, 1.5GB or 5GiB"
        )
    return size

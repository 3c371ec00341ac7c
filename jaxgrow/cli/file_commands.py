"""The commands that do not change a model: inspect, report, convert, architectures, completion."""

import argparse
from dataclasses import asdict
from pathlib import Path

from jaxgrow.checkpoints import FAMILIES, open_checkpoint
from jaxgrow.checkpoints.io.safetensors import SHARD
from jaxgrow.cli import model_inputs, options
from jaxgrow.cli.completion import script
from jaxgrow.cli.errors import UsageError, reported
from jaxgrow.cli.model_outputs import outputs
from jaxgrow.cli.options import Commands
from jaxgrow.cli.writing import amount, as_text, in_dtype, print_json, size_record, write
from jaxgrow.growth.report import preservation
from jaxgrow.integrations import command
from jaxgrow.tables import aligned

_COMPLETION = "print a shell script that completes commands, options and methods"
_STARTUP = (
    "For bash: jaxgrow completion bash >> ~/.bash_completion; "
    "for zsh: jaxgrow completion zsh >> ~/.zshrc"
)


def add_inspect(commands: Commands) -> None:
    """Add ``jaxgrow inspect``."""
    about = "show the config of a model and the shape, axes, dtype and location of each parameter"
    p = commands.add("inspect", about, _inspect, "PATH")
    options.as_json(p)
    options.trainer_format(p)


def _inspect(a: argparse.Namespace) -> None:
    if a.format or a.names or command.is_run(a.path):
        about = command.inspected(command.opened(a.path, a.format, a.names, a.head_dim))
        return print_json(about) if a.json else print(command.described(a.path, about))
    source = open_checkpoint(a.path)
    architecture = (
        source.foreign["architectures"][0] if source.foreign else type(source.config).__name__
    )
    places = {p: source.place(p) for p in source.leaves}
    if a.json:
        leaves = [
            {
                "path": p,
                "shape": x.shape,
                "axes": x.names,
                "dtype": x.dtype.name,
                "place": places[p],
            }
            for p, x in source.leaves.items()
        ]
        about = {
            "path": str(a.path),
            "architecture": architecture,
            "config": source.config.as_json(),
        }
        return print_json({**about, **size_record(source, source.bytes), "leaves": leaves})
    print(f"{architecture} in {a.path}\n{source.config}")
    print(as_text(source.sizes()))
    rows = [
        [p, str(x.shape), " ".join(x.names), x.dtype.name, places[p]]
        for p, x in source.leaves.items()
    ]
    print(aligned((), rows))
    print(amount(source, source.bytes))


def add_report(commands: Commands) -> None:
    """Add ``jaxgrow report``."""
    about = "compare the outputs of two models on the same inputs"
    p = commands.add("report", about, _report, "A", "B", evaluates=True)
    options.as_json(p)
    p.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help=f"{options.DATA.format('A')} (default: random inputs)",
    )


def _report(a: argparse.Namespace) -> None:
    first = open_checkpoint(a.a)
    second = open_checkpoint(a.b)
    inputs, what = model_inputs.of_both(first, second, a.data)
    with reported():
        found = preservation(outputs(first), outputs(second), inputs, (str(a.a), str(a.b)))
    notes = model_inputs.tokenizer_notes(first, second)
    if a.json:
        about = {"a": str(a.a), "b": str(a.b), "inputs": what, **asdict(found), "notes": notes}
        return print_json(about)
    print(f"a: {a.a}, b: {a.b}, on {what}")
    print(found)
    for note in notes:
        print(f"note: {note}")


def add_convert(commands: Commands) -> None:
    """Add ``jaxgrow convert``."""
    about = "write a model in another format or dtype, or with another shard size"
    commands.add("convert", about, _convert, "SRC", writes=True)


def _convert(a: argparse.Namespace) -> None:
    if a.to is None and a.dtype is None and a.shard_size == SHARD:
        raise UsageError("convert needs at least one of --to, --dtype and --shard-size")
    source = open_checkpoint(a.src)
    write(a, in_dtype(a, source), {}, source)


def add_architectures(commands: Commands) -> None:
    """Add ``jaxgrow architectures``."""
    about = "list the supported architectures of transformers"
    options.as_json(commands.add("architectures", about, _architectures))


def _architectures(a: argparse.Namespace) -> None:
    found = {name: family.model_type for name, family in FAMILIES.items()}
    if a.json:
        return print_json(found)
    for name, model_type in sorted(found.items()):
        print(f"{name}  (model_type {model_type})")


def add_completion(commands: Commands) -> None:
    """Add ``jaxgrow completion``. It also completes commands that are added after it."""

    def run(a: argparse.Namespace) -> None:
        print(script(commands.by_name, a.shell), end="")

    p = commands.add("completion", _COMPLETION, run, epilog=_STARTUP)
    p.add_argument("shell", choices=["bash", "zsh"])

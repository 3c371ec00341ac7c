"""The commands that do not change a model: inspect, report, convert, architectures, completion."""

import argparse
from dataclasses import asdict

from jaxgrow.checkpoints import FAMILIES, open_checkpoint
from jaxgrow.checkpoints.io.files import SHARD
from jaxgrow.cli import model_inputs
from jaxgrow.cli.errors import UsageError, reported
from jaxgrow.cli.model_outputs import outputs
from jaxgrow.cli.writing import amount, as_text, in_dtype, print_json, size_record, write
from jaxgrow.extras.integrations import command
from jaxgrow.growth.report import preservation
from jaxgrow.tables import align_columns
from jaxgrow.untrusted import print_text


def run_inspect(a: argparse.Namespace) -> None:
    """Run ``jaxgrow inspect``."""
    if a.format or a.names or command.is_run(a.path):
        about = command.inspected(command.opened(a.path, a.format, a.names, a.head_dim))
        return print_json(about) if a.json else print_text(command.described(a.path, about))
    source = open_checkpoint(a.path)
    architecture = (
        source.hf_config["architectures"][0] if source.hf_config else type(source.config).__name__
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
        about |= {**size_record(source, source.bytes), "notes": source.notes, "leaves": leaves}
        return print_json(about)
    print_text(f"{architecture} in {a.path}\n{source.config}")
    print_text(as_text(source.sizes()))
    rows = [
        [p, str(x.shape), " ".join(x.names), x.dtype.name, places[p]]
        for p, x in source.leaves.items()
    ]
    print_text(align_columns((), rows))
    print_text(amount(source, source.bytes))
    for note in source.notes:
        print_text(f"note: {note}")


def run_report(a: argparse.Namespace) -> None:
    """Run ``jaxgrow report``."""
    first = open_checkpoint(a.a)
    second = open_checkpoint(a.b)
    inputs, what = model_inputs.of_both(first, second, a.data)
    with reported():
        found = preservation(outputs(first), outputs(second), inputs, (str(a.a), str(a.b)))
    notes = [*first.notes, *second.notes, *model_inputs.tokenizer_notes(first, second)]
    if a.json:
        about = {"a": str(a.a), "b": str(a.b), "inputs": what, **asdict(found), "notes": notes}
        return print_json(about)
    print_text(f"a: {a.a}, b: {a.b}, on {what}")
    print_text(found)
    for note in notes:
        print_text(f"note: {note}")


def run_convert(a: argparse.Namespace) -> None:
    """Run ``jaxgrow convert``."""
    source = open_checkpoint(a.src)
    if a.to is None and source.of_run:
        a.to = "hf"
    if a.to is None and a.dtype is None and a.shard_size == SHARD:
        raise UsageError("convert needs at least one of --to, --dtype and --shard-size")
    write(a, in_dtype(a, source), {}, source)


def run_architectures(a: argparse.Namespace) -> None:
    """Run ``jaxgrow architectures``."""
    found = {name: family.model_type for name, family in FAMILIES.items()}
    if a.json:
        return print_json(found)
    for name, model_type in sorted(found.items()):
        print_text(f"{name}  (model_type {model_type})")

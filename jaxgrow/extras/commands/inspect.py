"""The commands that describe a model, and list the architectures: inspect, architectures."""

import argparse

from jaxgrow.checkpoints import FAMILIES, open_checkpoint
from jaxgrow.checkpoints.hf.storage import HuggingFace
from jaxgrow.checkpoints.source import Checkpoint
from jaxgrow.cli.other_formats import format_of
from jaxgrow.cli.writing import (
    model_size,
    print_json,
    print_notes,
    size_record,
    sizes_as_text,
)
from jaxgrow.tables import align_columns
from jaxgrow.untrusted import print_text


def run_inspect(a: argparse.Namespace) -> None:
    """Run ``jaxgrow inspect``."""
    if (other := format_of(a.path, a)) is not None:
        return other.inspect(a)
    source = open_checkpoint(a.path)
    architecture = (
        source.hf_config["architectures"][0] if source.hf_config else type(source.config).__name__
    )
    leaves = [
        {
            "path": p,
            "shape": x.shape,
            "axes": x.names,
            "dtype": x.dtype.name,
            "place": _place(source, p),
        }
        for p, x in source.leaves.items()
    ]
    if a.json:
        about = {"path": str(a.path), "architecture": architecture}
        about |= {"config": source.config.as_json(), **size_record(source, source.bytes)}
        return print_json({**about, "notes": source.notes, "leaves": leaves})
    print_text(f"{architecture} in {a.path}\n{source.config}")
    print_text(sizes_as_text(source.sizes()))
    rows = [
        [x["path"], str(x["shape"]), " ".join(x["axes"]), x["dtype"], x["place"]] for x in leaves
    ]
    print_text(align_columns((), rows))
    print_text(model_size(source, source.bytes))
    print_notes(source.notes)


def _place(source: Checkpoint, path: str) -> str:
    """Describe where a leaf is stored."""
    if not isinstance(source, HuggingFace):
        return source.stored_in
    place = source.names[path]
    files = sorted({tensor.file.name for tensor in source.tensors_of(path)}) or ["no file"]
    part = "" if place.part is None else f" part {place.part}"
    last = f" .. {files[-1]}" if len(files) > 1 else ""
    return f"{place.name} ({place.layout}){part} in {files[0]}{last}"


def run_architectures(a: argparse.Namespace) -> None:
    """Run ``jaxgrow architectures``."""
    found = {name: family.model_type for name, family in FAMILIES.items()}
    if a.json:
        return print_json(found)
    for name, model_type in sorted(found.items()):
        print_text(f"{name}  (model_type {model_type})")

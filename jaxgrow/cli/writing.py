"""How do commands write a model, and how do they describe the result?"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxgrow import operators
from jaxgrow.checkpoints import (
    Cast,
    CheckpointError,
    Grown,
    Noisy,
    Source,
    config_notes,
    stored_forms,
)
from jaxgrow.checkpoints import write as write_checkpoint
from jaxgrow.checkpoints.hf.storage import HuggingFace
from jaxgrow.checkpoints.io.files import ADAPTER, RECORD, left_out, listed
from jaxgrow.checkpoints.io.folders import atomic_folder
from jaxgrow.checkpoints.io.replacing import may_become
from jaxgrow.checkpoints.source import Checkpoint
from jaxgrow.cli.errors import UsageError, reported
from jaxgrow.cli.keeps import keeps, rounding
from jaxgrow.extras import hf_peft as peft
from jaxgrow.extras.integrations import torch_optimizer
from jaxgrow.growth.maps import Growth, Rules
from jaxgrow.untrusted import print_text

try:
    import resource
except ImportError:  # as on Windows
    resource = None

# A function that writes more files into the new folder, and returns their names.
WriteFiles = Callable[[Path], list[str]]
_DORA = (
    "transformers 5 loads the DoRA in {0} without its magnitudes. Move "
    f"{' and '.join(ADAPTER)} "
    "to another folder and load them with PeftModel.from_pretrained, or merge the DoRA into its "
    "model before growing"
)


def in_dtype(a: argparse.Namespace, source: Source, at_least: bool = False) -> Source:
    """The source in ``--dtype``, if it is given.

    Args:
      a: the parsed arguments.
      source: the source.
      at_least: whether a wider dtype is kept, so that values are rounded only once, at the end.
    """
    return source if a.dtype is None else Cast(source, a.dtype, at_least=at_least)


def transform(
    a: argparse.Namespace,
    root: Checkpoint,
    growth: Growth,
    arguments: dict[str, Any],
    **facts: Any,
) -> None:
    """Write the grown model and its LoRA, and report whether the function is preserved.

    Args:
      a: the parsed arguments.
      root: the model.
      growth: the growth.
      arguments: the arguments of the growth, for the record in DST.
      **facts: further entries of the JSON output.
    """
    facts |= new_record(growth)
    lora = _grown_lora(a, root, growth)
    if lora is not None:
        arguments = arguments | {"lora": str(a.lora)}
        facts["lora"] = lora_record(lora)
        if a.lora_only:
            return _write_lora(a, lora, root, growth, facts["lora"])
    paper = arguments.get("tied") == "paper"
    with reported():
        axes = root.config.paper_axes() if paper else None
        grown: Source = Grown(in_dtype(a, root, at_least=True), growth, axes)
    kept = keeps(growth, root.config, arguments.get("method", "")) and not paper
    noise = arguments.get("noise")
    if noise is not None:
        if isinstance(growth, Rules) or not kept:
            raise CheckpointError(
                "--noise requires a growth that preserves the function by exact copies, but "
                f"{a.method} does not do that for this model. Omit --noise"
            )
        grown = Noisy(grown, growth, arguments["seed"], noise)
    cast = in_dtype(a, grown)
    rounded = rounding_notes(a, root, growth, grown, cast, noise is not None) if kept else []
    policy = getattr(a, "optimizer", None)
    if policy is not None:
        arguments = arguments | {"optimizer": policy}
    files = _files_beside(a, root, cast, growth, lora)
    notes = [] if lora is None else [*lora.notes, *[_DORA.format(a.dst)] * bool(lora.gains)]
    write(a, cast, arguments, root, files=files, rounded=rounded, notes=notes, keeps=kept, **facts)


def rounding_notes(
    a: argparse.Namespace,
    root: Checkpoint,
    growth: Growth,
    grown: Source,
    cast: Source,
    noise: bool = False,
) -> list[str]:
    """The notes of `rounding` about a growth that preserves the function.

    Args:
      a: the parsed arguments.
      root: the model before the growth.
      growth: the growth.
      grown: the grown model in the dtypes in which it is computed.
      cast: the grown model in its new dtypes.
      noise: whether noise was added to the copies.
    """
    with reported():
        forms = (stored_forms(root, root, None), stored_forms(cast, root, a.to))
    return rounding(growth, grown.leaves, cast.leaves, forms, noise)


def _files_beside(
    a: argparse.Namespace,
    root: Checkpoint,
    cast: Source,
    growth: Growth,
    lora: peft.PeftAdapter | None,
) -> WriteFiles | None:
    """The function that writes the grown LoRA and optimizer state; None without either."""
    policy = getattr(a, "optimizer", None)
    grows_state = policy not in (None, "drop")
    if lora is None and not grows_state:
        return None

    def write(part: Path) -> list[str]:
        names = []
        if lora is not None:
            names += peft.write_into(part, lora, cast, str(a.dst))
        if grows_state:
            names += _write_state(a, root, part, growth)
        return names

    return write


def _write_state(a: argparse.Namespace, root: Checkpoint, part: Path, growth: Growth) -> list[str]:
    """Write the grown optimizer state of a PyTorch run."""
    if not isinstance(root, HuggingFace):
        raise CheckpointError(
            f"--optimizer {a.optimizer} grows the optimizer state of a PyTorch run, but "
            f"{root.folder} is not a Hugging Face folder. Omit --optimizer"
        )
    return torch_optimizer.write_beside(root, part, growth, a.optimizer, a.optimizer_state)


# --- LoRA ---


def _grown_lora(a: argparse.Namespace, root: Checkpoint, growth: Growth) -> peft.PeftAdapter | None:
    """The LoRA of the grown model, if ``--lora`` is given."""
    if a.lora is None:
        if a.lora_only:
            raise UsageError("--lora-only requires a LoRA: give its directory with --lora DIR")
        return None
    own = peft.load_beside(a.lora, root)
    with reported():
        return own.grown(growth)


def _write_lora(
    a: argparse.Namespace,
    lora: peft.PeftAdapter,
    root: Checkpoint,
    growth: Growth,
    about: dict[str, Any],
) -> None:
    """Write a LoRA without its model."""
    sources = [root.folder, a.lora]
    if a.dry_run:
        may_become(a.dst, sources, a.overwrite)
    else:
        with atomic_folder(a.dst, sources, a.overwrite) as part:
            peft.write_into(part, lora, Grown(root, growth))
    sizes = lora.config.sizes()
    if a.json:
        facts = {"dst": str(a.dst), "written": not a.dry_run, "lora": about, "sizes": sizes}
        return print_json(facts)
    nothing = "; nothing was written (--dry-run)" if a.dry_run else ""
    print_text(f"{a.dst}: only the LoRA, {_lora_text(about)}{nothing}")
    print_text(as_text(sizes))


# --- write a model, and describe it ---


def write(
    a: argparse.Namespace,
    source: Source,
    arguments: dict[str, Any],
    *roots: Checkpoint,
    files: WriteFiles | None = None,
    rounded: Sequence[str] = (),
    notes: Sequence[str] = (),
    **facts: Any,
) -> None:
    """Write a model to DST and print what was written.

    Args:
      a: the parsed arguments.
      source: the model.
      arguments: the arguments of the transformation, for the record in DST.
      *roots: the checkpoints that it is made of.
      files: a function that writes further files into DST.
      rounded: notes about rounding.
      notes: other notes.
      **facts: further entries of the JSON output. ``keeps``, ``lora``, ``groups`` and
        ``new_layers`` are also printed as text; the last one is also in the record in DST.
    """
    began = time.perf_counter()
    dtype = {} if a.dtype is None else {"dtype": a.dtype}
    record: dict[str, Any] = {"operator": a.command, "arguments": arguments | dtype}
    if "new_layers" in facts:
        record["new_layers"] = facts["new_layers"]
    size = put(a, source, record, *roots, dry_run=a.dry_run, files=files)
    seconds = time.perf_counter() - began
    about = {"dst": str(a.dst), "written": not a.dry_run, **record}
    about |= {**size_record(source, size), **facts, "seconds": seconds}
    of_roots = [note for root in roots for note in root.notes]
    with reported():
        changed = config_notes(source, roots[0], a.to)
    about["notes"] = [*rounded, *notes, *of_roots, *changed, *_not_copied(a, roots[0])]
    peak = _peak_memory()
    if peak is not None:
        about["peak_memory"] = peak
    if a.json:
        print_json(about)
    else:
        _print(a, source, size, about, rounded)


def _not_copied(a: argparse.Namespace, root: Checkpoint) -> list[str]:
    """A note that lists the subfolders of a model that are not in DST."""
    folders = left_out(root.folder) if root.hf_config is not None else []
    names = [f"{name}/" for name in folders if not (a.dst / name).exists()]
    return [f"{root.folder} has folders that are not copied: {listed(names)}"] if names else []


def _print(
    a: argparse.Namespace,
    source: Source,
    size: int,
    about: Mapping[str, Any],
    rounded: Sequence[str],
) -> None:
    """Print the result of `write` as text; ``rounded``: notes about rounding."""
    written = f"{a.dst}: {amount(source, size)}"
    if a.dry_run:
        print_text(f"{written}; nothing was written (--dry-run)\n{as_text(source.sizes())}")
    else:
        peak = about.get("peak_memory")
        memory = "" if peak is None else f"; peak memory {in_bytes(peak)}"
        print_text(
            f"{written}, in {about['seconds']:.1f} s{memory}; the arguments are recorded in "
            f"{RECORD}"
        )
    if "lora" in about:
        print_text(f"with LoRA: {_lora_text(about['lora'])}")
    if "new_layers" in about:
        print_text(new_as_text(about["new_layers"]))
    if "keeps" in about:
        print_text(kept_as_text(about["keeps"], rounded))
    for note in (*about["notes"], *about.get("groups", [])):
        print_text(f"note: {note}")


def _peak_memory() -> int | None:
    """The peak memory of this process in bytes, or None if the system does not count it."""
    if resource is None:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def put(
    a: argparse.Namespace,
    source: Source,
    record: dict[str, Any],
    *roots: Checkpoint,
    dry_run: bool,
    files: WriteFiles | None = None,
) -> int:
    """Write the model, or only check that this is possible. Return the size of its tensors in bytes."""
    lora = getattr(a, "lora", None)
    with reported():
        return write_checkpoint(
            source,
            a.dst,
            record,
            roots,
            to=a.to,
            overwrite=a.overwrite,
            shard=a.shard_size,
            progress=True,
            dry_run=dry_run,
            beside=files,
            others=[] if lora is None else [lora],
        )


def kept_as_text(kept: bool, rounded: Sequence[str] = ()) -> str:
    """Describe whether the function is preserved; ``rounded``: notes about rounding."""
    if not kept:
        return "the function is changed by the transformation"
    return "the function is preserved up to rounding" if rounded else "the function is preserved"


def new_record(growth: Growth) -> dict[str, list[int]]:
    """The entry of the JSON output about the new layers; empty if the depth does not grow."""
    try:
        found = operators.new_layers(growth)
    except ValueError:  # one of its maps combines layers with another axis
        found = ()
    return {"new_layers": list(found)} if found else {}


def new_as_text(layers: Sequence[int]) -> str:
    """The indices of the new layers, as text."""
    return f"new layers, counted from 0: {', '.join(map(str, layers))}"


def print_json(about: Mapping[str, Any]) -> None:
    """Print a result as JSON."""
    print_text(json.dumps(about, indent=2))


def size_record(source: Source, size: int) -> dict[str, Any]:
    """The entries of the JSON output about the size of a model."""
    return {"sizes": source.sizes(), "parameters": source.parameters, "bytes": size}


def lora_record(adapter: peft.PeftAdapter) -> dict[str, Any]:
    """The entries of the JSON output about a LoRA: its modules, and the ranks in its files."""
    ranks = sorted({*peft.module_ranks(adapter).values()})
    several = {"ranks": ranks} if len(ranks) > 1 else {}
    return {"rank": ranks[-1], **several, "modules": len(adapter.lora.targets)}


def _lora_text(about: Mapping[str, Any]) -> str:
    ranks = " and ".join(map(str, about.get("ranks", [about["rank"]])))
    return f"{about['modules']} modules of rank {ranks}"


def amount(source: Source, size: int) -> str:
    """The number of parameters and the size of a model on disk, as text."""
    return f"{source.parameters:,} parameters, {in_bytes(size)}"


def in_bytes(count: int) -> str:
    """A number of bytes with a unit, so that a small model does not have 0.0 MB.

    Example:
      >>> in_bytes(900), in_bytes(13_500), in_bytes(2_400_000_000)
      ('900 bytes', '13.5 kB', '2,400.0 MB')
    """
    if count < 1000:
        return f"{count} bytes"
    return f"{count / 1e3:.1f} kB" if count < 1e6 else f"{count / 1e6:,.1f} MB"


def as_text(sizes: Mapping[str, int]) -> str:
    """The size of each axis, as text.

    Example:
      >>> as_text({"layers": 2, "embed": 8})
      'embed=8 layers=2'
    """
    return " ".join(f"{axis}={size}" for axis, size in sorted(sizes.items()))

"""How do commands write a model, and how do they describe the result?"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence

from jaxgrow import checkpoints, operators
from jaxgrow.checkpoints import CheckpointError, Output, Source, Written
from jaxgrow.checkpoints.io.files import RECORD, SHARD
from jaxgrow.checkpoints.source import Checkpoint
from jaxgrow.checkpoints.writing import Companion
from jaxgrow.cli.errors import UsageError, errors_with_options, refuse_options
from jaxgrow.cli.preservation import keeps_function
from jaxgrow.growth.maps import Growth, Rules
from jaxgrow.registry import Registry
from jaxgrow.typed import Json
from jaxgrow.untrusted import print_text

try:
    import resource
except ImportError:  # as on Windows
    resource = None


# "notes" describes how half precision rounds a result: from the model before the growth, the grown
# model, the growth, the new checkpoint, and whether noise was added.
ROUNDING: Registry[Callable[[Checkpoint, Source, Growth, Output, bool], list[str]]] = Registry(
    "rounding"
)
# "lora" writes a grown LoRA without its model. It takes further entries of the JSON output, with notes.
ADAPTERS: Registry[Callable[[argparse.Namespace, Checkpoint, Growth, Json], None]] = Registry(
    "adapter"
)


def output_of(a: argparse.Namespace, dry_run: bool = False) -> Output:
    """The checkpoint that the arguments describe.

    Raises:
      UsageError: ``--lora-only`` is given without a LoRA, or with an option for the model.
    """
    if getattr(a, "lora_only", None):
        if a.lora is None:
            raise UsageError("--lora-only requires a LoRA: give its directory with --lora DIR")
        why = "--lora-only writes no model, to which this applies"
        refuse_options(a, why, "to", "dtype", "shard_size", "noise", "optimizer")
    dry_run = dry_run or a.dry_run
    shard = a.shard_size or SHARD
    return Output(a.dst, a.to, a.dtype, shard, a.overwrite, dry_run=dry_run, progress=True)


def transform_model(
    a: argparse.Namespace,
    root: Checkpoint,
    growth: Growth,
    arguments: Json,
    notes: Sequence[str] = (),
    beside: Sequence[Companion] = (),
    **facts: object,
) -> None:
    """Write a grown model with its LoRA and optimizer state, and print a summary.

    Args:
      a: the parsed arguments.
      root: the model.
      growth: the growth.
      arguments: the arguments of the growth. The file ``jaxgrow.json`` in DST records them.
      notes: remarks about the growth.
      beside: further files of DST.
      **facts: further entries of the JSON output.
    """
    if a.lora_only:
        return ADAPTERS["lora"](a, root, growth, {"arguments": arguments, **facts, "notes": notes})
    paper = arguments.get("tied") == "paper"
    method = arguments.get("method", "")
    noise = arguments.get("noise")
    kept = keeps_function(growth, root.config, method) and not paper
    if noise is not None and (isinstance(growth, Rules) or not kept):
        raise CheckpointError(
            "--noise requires a growth that preserves the function by exact copies, but "
            f"{method} does not do that for this model. Omit --noise"
        )
    policy = getattr(a, "optimizer", None)
    given = {"lora": a.lora and str(a.lora), "optimizer": policy}
    arguments = arguments | {name: x for name, x in given.items() if x is not None}
    output = output_of(a)
    record = full_record(a, arguments, growth)
    # The options of coalesce and decoalesce are groups, not sizes.
    with errors_with_options("tied" not in a):
        written = checkpoints.transform(
            root,
            output,
            growth,
            record,
            axes=root.config.paper_axes() if paper else None,
            noise=noise,
            seed=arguments.get("seed", 0),
            lora=a.lora,
            optimizer=None if policy in (None, "drop") else (policy, a.optimizer_state),
            beside=beside,
        )
        rounded: list[str] = []
        if kept:
            rounded = ROUNDING["notes"](root, written.model, growth, output, noise is not None)
    report_written(a, written, record, notes, rounded, keeps=kept, **facts)


def write_model(
    a: argparse.Namespace, model: Source, arguments: Json, notes: Sequence[str] = ()
) -> None:
    """Write a model to DST and print a summary; the arguments are as for `transform_model`."""
    record = full_record(a, arguments)
    with errors_with_options(sizes=False):
        written = checkpoints.write(model, output_of(a), record)
    report_written(a, written, record, notes)


def full_record(a: argparse.Namespace, arguments: Json, growth: Growth | None = None) -> Json:
    """The content of ``jaxgrow.json``: the command, its arguments, and the indices of new layers."""
    dtype = {} if a.dtype is None else {"dtype": a.dtype}
    record: Json = {"operator": a.command, "arguments": arguments | dtype}
    return record | ({} if growth is None else new_layers_entry(growth))


def new_layers_entry(growth: Growth) -> dict[str, list[int]]:
    """The entry of a record about the new layers; empty if the depth does not grow."""
    try:
        found = operators.new_layers(growth)
    except ValueError:  # one of its maps combines layers with another axis
        found = ()
    return {"new_layers": list(found)} if found else {}


def report_written(
    a: argparse.Namespace,
    written: Written,
    record: Json,
    notes: Sequence[str] = (),
    rounded: Sequence[str] = (),
    **facts: object,
) -> None:
    """Print a summary of a written checkpoint.

    Args:
      a: the parsed arguments.
      written: the written checkpoint.
      record: the content of ``jaxgrow.json`` (`full_record`).
      notes: remarks for the user.
      rounded: remarks about rounding.
      **facts: further entries of the JSON output. ``keeps`` is also printed as text: whether the
        function is preserved.
    """
    about = {"dst": str(a.dst), "written": not a.dry_run, **record}
    about |= {**size_record(written.model, written.size), **facts}
    about["seconds"] = written.seconds
    about["notes"] = [*rounded, *notes, *written.notes]
    peak = _peak_memory()
    if peak is not None:
        about["peak_memory"] = peak
    if a.json:
        return print_json(about)
    memory = "" if peak is None else f"; peak memory {_size_in_bytes(peak)}"
    end = f", in {written.seconds:.1f} s{memory}; the arguments are recorded in {RECORD}"
    if a.dry_run:
        end = f"; nothing was written (--dry-run)\n{sizes_as_text(written.model.sizes())}"
    print_text(f"{a.dst}: {model_size(written.model, written.size)}{end}")
    if "new_layers" in about:
        print_text(f"new layers, counted from 0: {', '.join(map(str, about['new_layers']))}")
    if "keeps" in about:
        print_text(kept_as_text(about["keeps"], bool(rounded)))
    print_notes(about["notes"])


def _peak_memory() -> int | None:
    """The peak memory of this process in bytes, or None if the system does not count it."""
    if resource is None:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def kept_as_text(kept: bool, rounded: bool = False) -> str:
    """Describe whether the function is preserved, and whether parameters are rounded."""
    if not kept:
        return "the function is changed by the transformation"
    return "the function is preserved up to rounding" if rounded else "the function is preserved"


def print_notes(notes: Sequence[str]) -> None:
    """Print remarks, one per line."""
    for note in notes:
        print_text(f"note: {note}")


def print_json(about: Mapping[str, object]) -> None:
    """Print a result as JSON."""
    print_text(json.dumps(about, indent=2))


def size_record(source: Source, size: int) -> Json:
    """The entries of the JSON output about the size of a model."""
    return {"sizes": source.sizes(), "parameters": source.parameters, "bytes": size}


def model_size(source: Source, size: int) -> str:
    """The number of parameters and the size of a model on disk, as text."""
    return f"{source.parameters:,} parameters, {_size_in_bytes(size)}"


def _size_in_bytes(count: int) -> str:
    """A number of bytes with a unit, so that a small model does not have 0.0 MB.

    Example:
      >>> _size_in_bytes(900), _size_in_bytes(13_500), _size_in_bytes(2_400_000_000)
      ('900 bytes', '13.5 kB', '2,400.0 MB')
    """
    if count < 1000:
        return f"{count} bytes"
    return f"{count / 1e3:.1f} kB" if count < 1e6 else f"{count / 1e6:,.1f} MB"


def sizes_as_text(sizes: Mapping[str, int]) -> str:
    """The size of each axis, as text.

    Example:
      >>> sizes_as_text({"layers": 2, "embed": 8})
      'embed=8 layers=2'
    """
    return " ".join(f"{axis}={size}" for axis, size in sorted(sizes.items()))

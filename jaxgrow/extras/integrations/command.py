"""How do ``jaxgrow inspect`` and ``jaxgrow grow`` handle checkpoints of other trainers?"""

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from jaxgrow._version import __version__
from jaxgrow.checkpoints.io.files import (
    PARAMS,
    RECORD,
    CheckpointError,
    inside,
    listed,
    read_json,
)
from jaxgrow.checkpoints.io.folders import atomic_folder
from jaxgrow.checkpoints.io.replacing import may_become
from jaxgrow.cli.errors import UsageError, refuse_options
from jaxgrow.cli.grow_commands import growth_by_method
from jaxgrow.cli.new_sizes import target_sizes
from jaxgrow.cli.other_formats import CHECKPOINT_FORMATS
from jaxgrow.cli.writing import new_layers_entry, print_json, sizes_as_text
from jaxgrow.extras.integrations.copying import not_copied
from jaxgrow.extras.integrations.formats import FORMATS, from_file, plain_path, recognise_format
from jaxgrow.growth.maps import Growth, Rules, new_sizes
from jaxgrow.operators import OPERATORS
from jaxgrow.tables import align_columns
from jaxgrow.typed import Json
from jaxgrow.untrusted import one_line, print_text

if TYPE_CHECKING:
    # TensorStore takes a second to import, and most commands do not need it.
    from jaxgrow.extras.integrations.orbax_run import OrbaxRun, Policy

# Files by which checkpoints of Orbax, of levanter and of EasyDeL are recognised.
_MARKS = ("_METADATA", "manifest.ocdbt", "tensorstore_index.json")
# The same for torch.distributed.checkpoint. In the folder of a Hugging Face model, it is the
# optimizer state of that model.
_DISTRIBUTED = ".metadata"
POLICIES = ("drop", "copy", "exact")


def is_foreign_run(folder: Path) -> bool:
    """Whether a folder holds a checkpoint of another trainer, which this library did not write."""
    if not folder.is_dir() or _is_ours(folder):
        return False
    marks = _MARKS if (folder / "config.json").is_file() else (*_MARKS, _DISTRIBUTED)
    found = (f"{deep}{name}" for name in marks for deep in ("", "*/", "*/*/"))
    return any(any(folder.glob(pattern)) for pattern in found)


def _is_ours(folder: Path) -> bool:
    """Whether this library wrote a folder, which may be damaged, as a checkpoint of its own.

    A grown checkpoint of another trainer also has a record, and may have an item ``params``. Its
    record names the format.
    """
    if not (folder / PARAMS).is_dir() or not (folder / RECORD).is_file():
        return False
    try:
        arguments = read_json(inside(folder, RECORD)).get("arguments")
    except CheckpointError:
        return True
    return not isinstance(arguments, dict) or "format" not in arguments


def open_run(
    folder: Path, name: str | None, names: Path | None, head_dim: int | None = None
) -> "OrbaxRun":
    """Open a checkpoint of another trainer.

    Args:
      folder: the folder of all steps of a run, of one step, or of one item of a step.
      name: the name of the format; None: the format is detected.
      names: a JSON file with axis names, used instead of a format.
      head_dim: the size of a head, if the checkpoint does not determine it.

    Raises:
      CheckpointError: no format fits.
    """
    from jaxgrow.extras.integrations.orbax_run import OrbaxRun
    from jaxgrow.extras.integrations.trees import open_tree

    with one_line(CheckpointError, f"{folder} cannot be read"):
        tree = open_tree(folder)
        form = FORMATS[name] if name else recognise_format(tree.arrays)
        form = from_file(names) if names else form
        if form is None:
            found = [f"{path} {array.shape}" for path, array in tree.arrays.items()]
            raise CheckpointError(
                f"{folder} is a checkpoint of an unknown format; the known formats are "
                f"{', '.join(FORMATS)}. "
                f"Give the axis names in a file with --names FILE. Its arrays: {listed(found)}"
            )
        return OrbaxRun(tree, form, {} if head_dim is None else {"head_dim": head_dim})


def inspect_run(run: "OrbaxRun") -> Json:
    """Describe a checkpoint: its format, its sizes, and the axis names and shape of each leaf."""
    leaves = [
        {
            "path": path,
            "shape": place.shape,
            "axes": place.names,
            "dtype": run.shapes[path].dtype.name,
            "arrays": len(place.paths),
            "layout": {k: v for k, v in vars(place.row).items() if v and k != "names"},
        }
        for path, place in run.places.items()
    ]
    moments = sorted(
        {plain_path(place.template).removesuffix(path).strip("/") for path, place in run.states}
    )
    return {
        "format": run.format.name,
        "item": str(run.tree.item),
        "parameters_at": run.prefix.strip("/"),
        "sizes": run.sizes(),
        "settings": run.settings(run.sizes()),
        "parameters": run.parameters,
        "optimizer_state_at": moments,
        "others": run.others,
        "leaves": leaves,
    }


def run_as_text(folder: Path, about: Json) -> str:
    """Format the result of `inspect_run` as text."""
    rows = [
        (leaf["path"], str(leaf["shape"]), " ".join(leaf["axes"]), leaf["dtype"])
        for leaf in about["leaves"]
    ]
    return "\n".join(
        [
            f"{folder}: a checkpoint of format {about['format']}, in {about['item']}",
            f"parameters: {about['parameters_at']}; optimizer state: "
            f"{', '.join(about['optimizer_state_at']) or 'none found'}",
            f"unchanged by a growth: {', '.join(about['others']) or 'nothing'}",
            sizes_as_text(about["sizes"]),
            align_columns((), rows),
            f"{about['parameters']:,} parameters",
        ]
    )


def grow_folder(
    run: "OrbaxRun",
    growth: Growth,
    policy: "Policy",
    dst: Path,
    record: Json,
    *,
    overwrite: bool,
    dry_run: bool,
) -> Json:
    """Grow a checkpoint into ``dst``, or only check that this is possible.

    Args:
      run: the checkpoint.
      growth: the growth.
      policy: the policy for the optimizer state, one of `POLICIES`.
      dst: the new folder.
      record: the entries of the record in the new folder: ``arguments``, those of the command, and
        others.
      overwrite: whether an existing ``dst`` may be replaced.
      dry_run: whether to check only, without writing.

    Returns:
      The sizes and settings of the grown model, and the factor of the eps of its norms if that
      changes.
    """
    from jaxgrow.extras.integrations import orbax_run

    sizes = run.sizes() | new_sizes(growth)
    about = {
        "dst": str(dst),
        "written": not dry_run,
        "operator": "grow",
        **record,
        "sizes": sizes,
        "settings": run.settings(sizes),
    }
    if isinstance(growth, Rules) and growth.eps != 1:
        about |= {"norm_eps_factor": growth.eps}
    folder = run.tree.folder
    with one_line(CheckpointError, f"{folder} cannot be grown"):
        if dry_run:
            may_become(Path(os.path.abspath(dst.expanduser())), [folder], overwrite)
            orbax_run.growth_jobs(run, growth, policy)
            return about
        with atomic_folder(dst, [folder], overwrite) as part:
            orbax_run.grow_run(run, growth, policy, part)
            content = json.dumps({"version": __version__, **about}, indent=2)
            (part / RECORD).write_text(content + "\n")
    left_out = run.tree.left_out
    return about | {"notes": [not_copied(left_out)] if left_out else []}


def growth_as_text(dst: Path, about: Json, keeps: str) -> str:
    """Format the result of `grow_folder` as text."""
    settings = " ".join(f"{key}={value}" for key, value in about["settings"].items())
    nothing = "" if about["written"] else "; nothing was written (--dry-run)"
    lines = [
        f"{dst}: {sizes_as_text(about['sizes'])}{nothing}",
        f"function-preserving: {keeps}",
        f"optimizer state: {about['arguments']['optimizer']}",
        *[f"settings of the larger model: {settings}"] * bool(settings),
    ]
    if factor := about.get("norm_eps_factor"):
        lines += [
            f"the eps of all norms: set it to {factor:.7g} times the old value in the trainer's "
            "config; the checkpoint does not contain it"
        ]
    lines += [f"note: {note}" for note in about.get("notes", ())]
    if layers := about.get("new_layers"):
        lines += [f"new layers, counted from 0: {', '.join(map(str, layers))}"]
    return "\n".join(lines)


class OtherTrainers:
    """The commands for checkpoints of other trainers."""

    def accepts(self, folder: Path, a: argparse.Namespace) -> bool:
        """Return whether a folder is such a checkpoint, or the arguments choose a format."""
        return bool(a.format or a.names) or is_foreign_run(folder)

    def inspect(self, a: argparse.Namespace) -> None:
        """Run ``jaxgrow inspect``."""
        about = inspect_run(open_run(a.path, a.format, a.names, a.head_dim))
        if a.json:
            print_json(about)
        else:
            print_text(run_as_text(a.path, about))

    def grow(self, a: argparse.Namespace) -> None:
        """Run ``jaxgrow grow``."""
        why = f"not supported for {a.src}, which is a checkpoint of another trainer"
        others = ("noise", "lora", "lora_only", "optimizer_state")
        refuse_options(a, why, "to", "dtype", "shard_size", *others)
        why += "; list the layers of all passes with --layers-from instead, such as 0-3,2-3,4-5"
        refuse_options(a, why, "loop")
        run = open_run(a.src, a.format, a.names, a.head_dim)
        target = target_sizes(a)
        policy = a.optimizer or _default_policy(a.method)
        if policy not in POLICIES:
            raise UsageError(
                f"--optimizer {policy} is not supported for checkpoints of other trainers: choose "
                f"from {', '.join(POLICIES)}"
            )
        growth, taken = growth_by_method(a, run.sizes(), target, run.traits)
        may_become(a.dst, [a.src], a.overwrite)
        arguments = {"format": run.format.name, "method": a.method, "target": target, **taken}
        record = {"arguments": arguments | {"optimizer": policy}, **new_layers_entry(growth)}
        about = grow_folder(
            run, growth, policy, a.dst, record, overwrite=a.overwrite, dry_run=a.dry_run
        )
        if a.json:
            print_json(about)
        else:
            print_text(growth_as_text(a.dst, about, OPERATORS[a.method].preserves))


def _default_policy(method: str) -> str:
    """The optimizer policy that suits a method.

    For methods that suit ``asymmetric``, it is ``copy``, because ``asymmetric`` requires an
    optimizer with `rebias`.
    """
    policy = OPERATORS[method].policies[0]
    return policy if policy in POLICIES else "copy"


CHECKPOINT_FORMATS.add("other trainers", OtherTrainers())

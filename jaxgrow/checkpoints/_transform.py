"""How are checkpoints opened as a `Source`, and how is any `Source` written as a checkpoint?"""

import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jax.sharding import Mesh
from tqdm import tqdm

from jaxgrow._version import __version__
from jaxgrow.axes.names import Axes, Params
from jaxgrow.checkpoints.changed import InColour
from jaxgrow.checkpoints.hf import layer_lists, storage
from jaxgrow.checkpoints.hf.base import Family
from jaxgrow.checkpoints.hf.storage import HuggingFace
from jaxgrow.checkpoints.io.files import (
    ADAPTER,
    CARD,
    PROCESSOR,
    RECORD,
    SHARD,
    CheckpointError,
    at_step,
    extras,
    inside,
    read_json,
    write_json,
)
from jaxgrow.checkpoints.io.folders import atomic_folder
from jaxgrow.checkpoints.io.replacing import may_become
from jaxgrow.checkpoints.source import Checkpoint, Grown, Loaded, Source
from jaxgrow.growth.maps import Growth
from jaxgrow.models import Config
from jaxgrow.typed import Json
from jaxgrow.untrusted import checked_path, copy_file, one_line

Kind = Literal["hf", "orbax"]


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Open the checkpoint in a Hugging Face folder or an Orbax folder.

    A Hugging Face folder gives a `HuggingFace`. An Orbax folder that jaxgrow wrote, such as the
    folder of a finished run, gives an `Orbax`. The folder of an unfinished run gives the model in
    its newest checkpoint, and a note names the step; ``RUN@STEP`` gives the model in
    another checkpoint of a run.

    Args:
      folder: a folder on disk. In the cache of Hugging Face, it may be the folder of the model or
        one of its snapshots.

    Returns:
      A `Source`. At first, only names and sizes are read. An Orbax folder is read completely as soon
      as one leaf is read.

    Raises:
      CheckpointError: the folder does not exist, is damaged, or has a model that is not supported.
    """
    folder, step = at_step(Path(folder).expanduser())
    folder = _snapshot(folder)
    if not folder.is_dir():
        raise CheckpointError(
            f"there is no folder {folder}. jaxgrow reads models from disk and does not download them"
        )
    with one_line(CheckpointError, f"{folder} cannot be read"):
        if step is None and (folder / RECORD).is_file() and (folder / "params").is_dir():
            # The import takes seconds, and Hugging Face folders do not need it.
            from jaxgrow.checkpoints.orbax import Orbax

            return Orbax(folder)
        if (folder / "checkpoints").is_dir():
            from jaxgrow.checkpoints.orbax import RunCheckpoint, is_of_run

            if is_of_run(folder):
                return RunCheckpoint(folder, step)
        if step is not None:
            raise CheckpointError(
                f"{folder} is not the folder of a run with checkpoints, so it has no step {step}. Give the folder alone"
            )
        if _is_huggingface(folder):
            return HuggingFace(folder)
    raise CheckpointError(
        f"{folder} is neither a finished run nor a Hugging Face folder. A run writes {RECORD} and params/ when it "
        "ends, and checkpoints before; a Hugging Face folder has a config.json that names an architecture"
    )


def _is_huggingface(folder: Path) -> bool:
    """Whether a folder is meant to be a Hugging Face folder, even if it is damaged."""
    if any(folder.glob("*.safetensors")):
        return True
    if not os.path.lexists(folder / "config.json"):
        return False
    try:
        about = read_json(inside(folder, "config.json"))
    except CheckpointError:
        return True
    return not {"architectures", "model_type"}.isdisjoint(about)


def _snapshot(folder: Path) -> Path:
    """Find the snapshot to read in a folder ``models--org--name`` of the cache of Hugging Face.

    It is the revision that was downloaded last as ``main``, or the only snapshot. Any other folder
    is returned unchanged.

    Raises:
      CheckpointError: there are several snapshots, and ``main`` is not one of them.
    """
    if not folder.name.startswith("models--") or not (folder / "snapshots").is_dir():
        return folder
    main = folder / "refs" / "main"
    found = sorted(f for f in (folder / "snapshots").iterdir() if f.is_dir())
    if main.is_file():
        with checked_path(folder, "refs/main", deep=True).open() as file:
            name = file.read(1000).decode(errors="replace").strip()
        found = [f for f in found if f.name == name] or found
    if len(found) != 1:
        names = ", ".join(f.name for f in found) or "none"
        raise CheckpointError(
            f"{folder} has these snapshots: {names}. Give the path of one of them, {folder.name}/snapshots/HASH"
        )
    return found[0]


def load(folder: str | Path, mesh: Mesh | None = None) -> tuple[Config, Params]:
    """Load the config and the parameters of a checkpoint, with stacked blocks.

    To shard with other rules, or to grow a model while it is read, use `Source.shard` instead of
    ``mesh``.

    Args:
      folder: the folder of the checkpoint, as for `open_checkpoint`.
      mesh: the devices onto which the parameters are sharded while they are read (`Source.shard`).
        None keeps the parameters on the host.

    Returns:
      ``(config, parameters)``. The parameters are NumPy arrays, or arrays on the mesh.
      ``config.module.apply({"params": params}, tokens)`` computes the outputs of the model.

    Raises:
      CheckpointError: as `open_checkpoint`.
    """
    source = open_checkpoint(folder)
    return source.config, source.params() if mesh is None else source.shard(mesh)


def save(
    folder: str | Path,
    config: Config,
    params: Params,
    like: str | Path | None = None,
    *,
    overwrite: bool = False,
    settings: Json | None = None,
) -> None:
    """Write a model as a Hugging Face folder.

    Args:
      folder: the new folder.
      config: the config of the model.
      params: its parameters.
      like: a checkpoint of the same architecture, or of the same model with another head. Its other
        files, and the keys of its ``config.json`` that jaxgrow does not know, are copied.
      overwrite: whether to replace an existing checkpoint, after the new one is complete.
      settings: further keys of ``config.json``, as for `write`.

    Raises:
      CheckpointError: no architecture stores such a model, the parameters do not fit the config, or
        the folder exists.
    """
    template = None if like is None else open_checkpoint(like)
    write(
        Loaded(config, params),
        folder,
        {"operator": "save"},
        [template] if template else [],
        to="hf",
        overwrite=overwrite,
        settings=settings,
        # The folder ``like`` may hold an adapter, which does not belong to these parameters.
        beside=lambda part: [],
    )


def transform(
    source: str | Path | Checkpoint,
    folder: str | Path,
    growth: Growth,
    record: Json | None = None,
    *,
    axes: Axes | None = None,
    lora: str | Path | None = None,
    **options: Any,
) -> int:
    """Grow a checkpoint on disk into another one, layer by layer.

    The written parameters are ``grow(growth, parameters, axes)``.

    Args:
      source: a folder, or a checkpoint from `open_checkpoint`. Operators take its ``sizes()``.
      folder: the new folder.
      growth: the growth, as for `jaxgrow.grow`. Layers that no new layer depends on are not read.
      record: what ``jaxgrow.json`` records about this growth, such as
        ``{"operator": "stack", "target": {"layers": 24}}``.
      axes: axis names that replace the names in the config, such as
        `jaxgrow.models.Config.paper_axes`.
      lora: the folder of a LoRA of the source in the layout of PEFT, which may be the source
        itself. The LoRA is grown by the same growth and written into the new folder, where
        ``transformers`` finds it.
      options: options of `write`.

    Returns:
      The size in bytes of the tensors that are written, without the LoRA.

    Raises:
      CheckpointError: as `open_checkpoint` and `write`, the growth does not fit, the source holds a
        LoRA and ``lora`` is None, or ``folder`` overlaps the folder of the LoRA.
    """
    source = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    grown = Grown(source, growth, axes)
    if lora is not None:
        # This is not at the top of the file because peft imports this module.
        from jaxgrow.extras import hf_peft as peft

        own = peft.load_beside(lora, source).grown(growth)
        options["others"] = [Path(lora).expanduser()]
        options["beside"] = lambda part: peft.write_into(part, own, grown, str(folder))
    return write(grown, folder, record or {}, [source], **options)


def write(
    source: Source,
    folder: str | Path,
    record: Json,
    roots: Sequence[Checkpoint],
    *,
    to: Kind | None = None,
    overwrite: bool = False,
    shard: int = SHARD,
    progress: bool = False,
    dry_run: bool = False,
    settings: Json | None = None,
    beside: Callable[[Path], list[str]] | None = None,
    others: Sequence[Path] = (),
) -> int:
    """Write a model as a new folder, which appears only when it is complete.

    Args:
      source: the model. Only one tensor is in memory at a time; for an Orbax folder, all of them
        are.
      folder: the new folder.
      record: keys of ``jaxgrow.json``, which also holds the version, the config, and the
        fingerprints of ``roots``.
      roots: the checkpoints from which the model was made. The ``config.json`` and the other files
        of the first one are copied.
      to: the kind of folder, Hugging Face or Orbax; None: the kind of the first root.
      overwrite: whether to replace an existing checkpoint, after the new one is complete.
      shard: the largest size of a safetensors file in bytes.
      progress: whether to show a progress bar.
      dry_run: whether to write nothing. The model and the folder are checked as usual.
      settings: keys of the ``config.json`` of a Hugging Face folder that the model does not
        determine, such as ``id2label``, the labels of the classes, or ``pad_token_id``
        (`jaxgrow.checkpoints.hf.labels`).
      beside: a function of the new folder that writes further files into it, and returns their
        names.
      others: further folders that these files are made of.

    Returns:
      The size in bytes of the tensors that are written.

    Raises:
      CheckpointError: the folder exists, the architecture has no such model, or a root holds a LoRA
        and ``beside`` is None.
    """
    if beside is None:
        for root in roots:
            _check_no_lora(root.folder)
    source = _for_images(source, roots, to)
    planned = _planned(source, roots, to, settings)
    sources = [*(root.folder for root in roots), *others]
    if dry_run:
        may_become(_absolute(folder), sources, overwrite)
        return planned.size
    about = _record(source, roots, record, planned)
    with atomic_folder(Path(folder), sources, overwrite) as part:
        free = shutil.disk_usage(part).free
        if planned.size > free:
            raise CheckpointError(
                f"{folder} needs {planned.size} bytes, but {free} are free on its disk. Free some "
                "space, or choose another disk"
            )
        _write_model(source, planned, part, shard, progress)
        for name in planned.carried:
            (part / name).parent.mkdir(exist_ok=True)
            copy_file(
                checked_path(roots[0].files_beside or roots[0].folder, name, deep=True), part / name
            )
        about["files"] += beside(part) if beside is not None else []
        write_json(part / RECORD, about)
    return planned.size


def _absolute(folder: str | Path) -> Path:
    """The path of a new folder, as `atomic_folder` computes it."""
    return Path(os.path.abspath(Path(folder).expanduser()))


@dataclass(frozen=True)
class _Planned:
    """The content of a new folder.

    Attributes:
      family: the architecture of a Hugging Face folder; None for an Orbax folder.
      hf_config: the ``config.json`` of the model, if it has one.
      head: special tokens, task and labels that an Orbax folder records.
      carried: the other files that are copied, as paths in ``files_beside`` of the first root.
      size: the size of the tensors in bytes.
    """

    family: Family | None
    hf_config: Json | None
    head: Json
    carried: list[str]
    size: int


def _planned(
    source: Source,
    roots: Sequence[Checkpoint],
    to: Kind | None,
    settings: Json | None,
) -> _Planned:
    root = roots[0] if roots else None
    hf_config = root.hf_config if root else None
    carried = extras(root.files_beside) if root and root.files_beside is not None else []
    if root is not None and hf_config is None and (source.config != root.config or len(roots) > 1):
        carried = [name for name in carried if name != CARD]  # it describes another model
    head = _head(source, root)
    family = None
    stored = Counter()
    if _is_hf(to, root):
        family, hf_config = storage.family_for(
            source.config, hf_config, {**head, **(settings or {})} or None
        )
        for tensor in storage.planned(source, family):
            stored[tensor.dtype.name] += tensor.size
    else:
        for leaf in source.leaves.values():
            stored[leaf.dtype.name] += leaf.size
    if hf_config is not None and root is not None:
        hf_config = _in_dtype(hf_config, stored)
    size = stored.total() if family is not None else source.bytes
    return _Planned(family, hf_config, head, carried, size)


def _for_images(source: Source, roots: Sequence[Checkpoint], to: Kind | None) -> Source:
    """Convert a model of gray images to colours if `transformers` will convert its images."""
    root = roots[0] if roots else None
    if (
        root is None
        or root.hf_config is not None
        or root.files_beside is None
        or not _is_hf(to, root)
    ):
        return source
    gray = source.config.sizes().get("channels") == 1
    return InColour(source) if gray and (root.files_beside / PROCESSOR).is_file() else source


def _is_hf(to: Kind | None, root: Checkpoint | None) -> bool:
    """Whether a Hugging Face folder is written."""
    return to == "hf" or (to is None and isinstance(root, HuggingFace))


def stored_forms(source: Source, root: Checkpoint, to: Kind | None) -> dict[str, storage.Form]:
    """Return how the leaves of a model are stored, by path.

    Args:
      source: the model: ``root`` itself, or a model made of it.
      root: the checkpoint that `write` follows.
      to: as for `write`.

    Raises:
      CheckpointError: the architecture has no such model.
    """
    if source is root and isinstance(root, HuggingFace):
        return storage.forms(root, root.family)
    if source is not root and _is_hf(to, root):
        return storage.forms(source, storage.family_for(source.config, root.hf_config)[0])
    return {path: storage.Form(1.0, 0.0, leaf.dtype) for path, leaf in source.leaves.items()}


def config_notes(source: Source, root: Checkpoint, to: Kind | None) -> list[str]:
    """Return notes about keys of ``config.json`` that `write` removes, with its arguments."""
    if root.hf_config is None or source is root or not _is_hf(to, root):
        return []
    return layer_lists.lost(root.hf_config, storage.family_for(source.config, root.hf_config)[1])


def _record(source: Source, roots: Sequence[Checkpoint], record: Json, planned: _Planned) -> Json:
    """The content of ``jaxgrow.json``."""
    about: Json = {
        "version": __version__,
        **record,
        "sources": [r.fingerprint() for r in roots],
        "config": source.config.as_json(),
        "files": list(planned.carried),
    }
    if history := _history(roots):
        about["history"] = history
    if planned.family is None and planned.hf_config is not None:
        # A later conversion to Hugging Face needs it.
        about["huggingface"] = planned.hf_config
    if planned.family is None and planned.head:
        about["head"] = planned.head
    return about


def _write_model(source: Source, planned: _Planned, part: Path, shard: int, progress: bool) -> None:
    bar = tqdm(total=planned.size, unit="B", unit_scale=True, disable=None if progress else True)
    with bar:
        if planned.family is not None and planned.hf_config is not None:
            storage.write(
                source, planned.family, planned.hf_config, part, shard=shard, done=bar.update
            )
        else:
            from jaxgrow.checkpoints import orbax

            orbax.write(source, part)
            bar.update(planned.size)


def _head(source: Source, root: Checkpoint | None) -> Json:
    """Return what an Orbax folder records for ``config.json``: special tokens, task and labels.

    Task and labels are left out if the model to write has another head.
    """
    if root is None or isinstance(root, HuggingFace) or root.head is root.hf_config:
        return {}
    own = ("predicts", "classes")
    same = all(
        getattr(source.config, name, None) == getattr(root.config, name, None) for name in own
    )
    return root.own_settings | (dict(root.head) if same else {})


def _check_no_lora(folder: Path) -> None:
    """Check that a folder holds a model without a LoRA.

    Raises:
      CheckpointError: it holds a LoRA.
    """
    if (folder / ADAPTER[0]).is_file():
        raise CheckpointError(
            f"{folder} contains an adapter in addition to its model ({ADAPTER[0]}), which "
            f"would not fit the new model. To change both, pass --lora {folder} to grow, coalesce, "
            f"decoalesce or prune (in Python: transform(..., lora={str(folder)!r})). To "
            f"continue without the adapter, move {' and '.join(ADAPTER)} out of the folder"
        )


def _in_dtype(hf_config: Json, stored: Mapping[str, int]) -> Json:
    """Correct the dtype in a ``config.json``, also in its parts, if it has one.

    Args:
      hf_config: the content of ``config.json``.
      stored: the number of bytes of the tensors that are written, by their dtype.
    """
    out: Json = {}
    for key, value in hf_config.items():
        if key.endswith("_config") and isinstance(value, dict):
            value = _in_dtype(value, stored)
        # A model in several dtypes may be computed in any of them.
        if key in ("dtype", "torch_dtype") and str(value).removeprefix("torch.") not in stored:
            value = max(stored, key=lambda name: stored[name])
        out[key] = value
    return out


def _history(roots: Sequence[Checkpoint]) -> list[Json]:
    """Return the earlier steps of the sources, oldest first.

    The key ``made`` of a step is the fingerprint of its result.

    Raises:
      CheckpointError: the ``jaxgrow.json`` of a source is not valid JSON.
    """
    out: list[Json] = []
    for root in roots:
        if not (root.folder / RECORD).is_file():
            continue
        record = read_json(inside(root.folder, RECORD))
        earlier = record.get("history")
        last = {
            k: v
            for k, v in record.items()
            if k not in ("history", "config", "files", "huggingface", "head")
        }
        for step in [
            *(earlier if isinstance(earlier, list) else []),
            {**last, "made": root.fingerprint()},
        ]:
            if step not in out:
                out.append(step)
    return out

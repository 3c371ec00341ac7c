"""Checkpoints in, checkpoints out: opened as a `Source`, whatever their kind, and written from any."""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jax.sharding import Mesh
from tqdm import tqdm

from jaxgrow._version import __version__
from jaxgrow.axes.names import Axes, Params
from jaxgrow.checkpoints.hf import storage
from jaxgrow.checkpoints.hf.storage import HuggingFace
from jaxgrow.checkpoints.io.files import (
    ADAPTER,
    RECORD,
    CheckpointError,
    extras,
    inside,
    read_json,
    write_json,
)
from jaxgrow.checkpoints.io.folders import appearing
from jaxgrow.checkpoints.io.replacing import may_become
from jaxgrow.checkpoints.io.safetensors import SHARD
from jaxgrow.checkpoints.source import Checkpoint, Grown, Loaded, Source
from jaxgrow.growth.maps import Growth
from jaxgrow.models import Config

Kind = Literal["hf", "orbax"]


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """The model of a Hugging Face folder (`HuggingFace`), or of an Orbax folder of ours, such as a finished run's (`Orbax`).

    Args:
      folder: on disk; of Hugging Face's cache, the model's own or one of its snapshots.

    Returns:
      A `Source`, of which nothing but sizes and names is read yet (of Orbax folders, all of it).

    Raises:
      CheckpointError: there is none, or it is damaged or not supported.
    """
    folder = _snapshot(Path(folder).expanduser())
    if not folder.is_dir():
        raise CheckpointError(
            f"there is no folder {folder}; models are not downloaded, only read from disk"
        )
    if (folder / RECORD).is_file() and (folder / "params").is_dir():
        from jaxgrow.checkpoints.orbax import (
            Orbax,
        )  # seconds to import, which Hugging Face folders need not wait for

        return Orbax(folder)
    if not _is_huggingface(folder):
        raise CheckpointError(
            f"{folder} is no finished run and no Hugging Face folder: it has neither {RECORD} and params/, which a run "
            "writes when it ends, nor a config.json that names an architecture"
        )
    return HuggingFace(folder)


def _is_huggingface(folder: Path) -> bool:
    """Whether a folder is meant to be one, however damaged."""
    file = folder / "config.json"
    try:
        return any(folder.glob("*.safetensors")) or not {"architectures", "model_type"}.isdisjoint(
            read_json(file)
        )
    except FileNotFoundError:
        return False
    except CheckpointError:
        return True


def _snapshot(folder: Path) -> Path:
    """Where a model lies in Hugging Face's cache: of ``models--org--name``, the revision that was fetched last as ``main``.

    Raises:
      CheckpointError: there are several, and none is ``main``.
    """
    if not folder.name.startswith("models--") or not (folder / "snapshots").is_dir():
        return folder
    main, found = (
        folder / "refs" / "main",
        sorted(f for f in (folder / "snapshots").iterdir() if f.is_dir()),
    )
    if main.is_file():
        found = [f for f in found if f.name == main.read_text(errors="replace").strip()] or found
    if len(found) != 1:
        names = ", ".join(f.name for f in found) or "none"
        raise CheckpointError(
            f"{folder}: name one of its snapshots, as {folder.name}/snapshots/HASH; there are {names}"
        )
    return found[0]


def load(folder: str | Path, mesh: Mesh | None = None) -> tuple[Config, Params]:
    """``(config, parameters)``, blocks stacked, the parameters as NumPy arrays, or on the devices of a mesh.

    Args:
      folder: as of `open_checkpoint`.
      mesh: where they go, read and divided part by part (`Source.shard`, which takes other rules,
        and models that are grown on the way); None: they stay on the host.

    Returns:
      Both; ``config.module.apply({"params": params}, tokens)`` computes with them.

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
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Writes a Hugging Face folder; with ``like``, unknown keys of its ``config.json`` and its other files are carried over.

    Args:
      folder: to be made.
      config: of the model.
      params: its parameters.
      like: a checkpoint of the same architecture, or of the same model with another head.
      overwrite: whether a checkpoint that is there is replaced, at the end.
      settings: as of `write`.

    Raises:
      CheckpointError: no architecture stores such a model, parameters that do not fit the config,
        or a folder that exists.
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
        beside=lambda part: [],  # an adapter of the template is not one of these parameters
    )


def transform(
    source: str | Path | Checkpoint,
    folder: str | Path,
    growth: Growth,
    record: Mapping[str, Any] | None = None,
    *,
    axes: Axes | None = None,
    lora: str | Path | None = None,
    **options: Any,
) -> int:
    """Grows a checkpoint on disk into another: ``grow(growth, parameters, axes)``, layer by layer.

    Args:
      source: a folder, or what `open_checkpoint` returned, whose ``sizes()`` operators want.
      folder: to be made.
      growth: as of `jaxgrow.grow`. In layers, what the map of a new layer does not name is not
        read.
      record: what ``jaxgrow.json`` should say of it, e.g.
        ``{"operator": "stack", "target": {"layers": 24}}``.
      axes: other names than the config's, as of `jaxgrow.models.Config.paper_axes`.
      lora: the folder of a LoRA of the source in PEFT's layout, which may be the source itself. It
        grows by the same growth, and is written beside the grown model, where ``transformers``
        finds it.
      options: as of `write`.

    Returns:
      The bytes of the tensors that are written, without the LoRA.

    Raises:
      CheckpointError: as `open_checkpoint` and `write`, the growth does not fit, or the source
        holds a LoRA that is not given.
    """
    source = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    grown = Grown(source, growth, axes)
    if lora is not None:
        from jaxgrow.checkpoints.hf import peft  # which imports this file

        own = peft.load_beside(lora, source).grown(growth)
        options["beside"] = lambda part: peft.write_into(part, own, grown, str(folder))
    return write(grown, folder, record or {}, [source], **options)


def write(
    source: Source,
    folder: str | Path,
    record: Mapping[str, Any],
    roots: Sequence[Checkpoint],
    *,
    to: Kind | None = None,
    overwrite: bool = False,
    shard: int = SHARD,
    progress: bool = False,
    dry_run: bool = False,
    settings: Mapping[str, Any] | None = None,
    beside: Callable[[Path], list[str]] | None = None,
) -> int:
    """Writes a model as a folder, which appears whole or not at all.

    Args:
      source: the model, of which one tensor is in memory at a time (Orbax folders are written
        whole).
      folder: to be made.
      record: goes into ``jaxgrow.json``, beside the version, our config, and the sources'
        fingerprints.
      roots: the checkpoints that it was made of. The first one says the kind, if ``to`` does not,
        and has the ``config.json`` and the other files that are carried over.
      to: a Hugging Face folder, or an Orbax one.
      overwrite: whether a checkpoint that is there is replaced, at the end.
      shard: bytes of a safetensors file, at most.
      progress: whether to show a bar.
      dry_run: writes nothing; what is wrong with the model or the folder is told all the same.
      settings: what the ``config.json`` of a Hugging Face folder should say that the model does
        not, such as ``id2label``, the labels of classes, or ``pad_token_id``
        (`jaxgrow.checkpoints.hf.labels`).
      beside: writes more files into the new folder, which it is given, and returns their names.

    Returns:
      The bytes of the tensors that are written.

    Raises:
      CheckpointError: the folder exists, the architecture has no such model, or a source holds a
        LoRA of which nothing is written.
    """
    if beside is None:
        for of in roots:
            _check_no_lora(of.folder)
    root = roots[0] if roots else None
    kind = to or ("hf" if isinstance(root, HuggingFace) else "orbax")
    foreign = root.foreign if root else None
    carried = extras(root.folder) if root and foreign is not None else []
    size, family = source.bytes, None
    head = _head(source, root)
    if kind == "hf":
        settings = {**head, **(settings or {})} or None
        family, foreign = storage.family_for(source.config, foreign, settings)
        size = storage.written_bytes(source, family)
    if foreign is not None and root is not None:
        foreign = _in_dtype(foreign, source, root)
    if dry_run:
        may_become(Path(os.path.abspath(folder)), [r.folder for r in roots], overwrite)
        return size
    about: dict[str, Any] = {
        "version": __version__,
        **record,
        "sources": [r.fingerprint() for r in roots],
    }
    about |= {"config": source.config.as_json(), "files": [file.name for file in carried]}
    if history := _history(roots):
        about["history"] = history
    if kind != "hf" and foreign is not None:
        about["huggingface"] = foreign  # for the way back
    if kind != "hf" and head:
        about["head"] = head
    with appearing(Path(folder), [r.folder for r in roots], overwrite) as part:
        free = shutil.disk_usage(part).free
        if size > free:
            raise CheckpointError(f"{folder} needs {size} bytes, but {free} are free on its disk")
        bar = tqdm(total=size, unit="B", unit_scale=True, disable=None if progress else True)
        with bar:
            if family is not None and foreign is not None:
                storage.write(source, family, foreign, part, shard=shard, done=bar.update)
            else:
                from jaxgrow.checkpoints import orbax

                orbax.write(source, part)
                bar.update(size)
        for file in carried:
            shutil.copyfile(file, part / file.name)
        about["files"] += beside(part) if beside is not None else []
        write_json(part / RECORD, about)
    return size


def _head(source: Source, root: Checkpoint | None) -> dict[str, Any]:
    """What an Orbax folder records of its head, if the model that is made of it still has that head."""
    if root is None or isinstance(root, HuggingFace) or root.head is root.foreign:
        return {}
    own = ("predicts", "classes")
    same = all(
        getattr(source.config, name, None) == getattr(root.config, name, None) for name in own
    )
    return dict(root.head) if same else {}


def _check_no_lora(folder: Path) -> None:
    """
    Raises:
      CheckpointError: the folder holds a LoRA beside the model.
    """
    if (folder / ADAPTER[0]).is_file():
        raise CheckpointError(
            f"{folder} holds an adapter beside its model ({ADAPTER[0]}), which would not fit another model. To grow both, give "
            f"--lora {folder} to grow, coalesce, decoalesce or prune (in Python: transform(.., lora={str(folder)!r})); to "
            f"go on without it, move {' and '.join(ADAPTER)} out of the folder"
        )


def _in_dtype(foreign: dict[str, Any], source: Source, root: Source) -> dict[str, Any]:
    """A ``config.json`` that says the dtype of the parameters, if it says one and they have another than they had."""
    now, before = ({leaf.dtype.name for leaf in model.leaves.values()} for model in (source, root))
    keys = {"dtype", "torch_dtype"} & foreign.keys()
    return {**foreign, **dict.fromkeys(keys, *now)} if len(now) == 1 and now != before else foreign


def _history(roots: Sequence[Checkpoint]) -> list[dict[str, Any]]:
    """What was done to the sources before, oldest first; ``made`` is the fingerprint of what came out.

    Raises:
      CheckpointError: their ``jaxgrow.json`` is no JSON.
    """
    out: list[dict[str, Any]] = []
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

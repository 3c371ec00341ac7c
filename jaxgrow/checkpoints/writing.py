"""How is a model written as a checkpoint, and how is a checkpoint grown into another one?"""

import os
import shlex
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

from tqdm import tqdm

from jaxgrow._version import __version__
from jaxgrow.axes.names import LAYERS, Axes, Params
from jaxgrow.checkpoints.changed import Cast
from jaxgrow.checkpoints.hf import storage
from jaxgrow.checkpoints.hf.base import REPEATED_KEYS, Family
from jaxgrow.checkpoints.hf.storage import HuggingFace
from jaxgrow.checkpoints.io.files import (
    ADAPTER,
    CARD,
    RECORD,
    SHARD,
    CheckpointError,
    files_to_copy,
    inside,
    left_out,
    listed,
    read_json,
    write_json,
)
from jaxgrow.checkpoints.io.folders import atomic_folder
from jaxgrow.checkpoints.io.replacing import may_become
from jaxgrow.checkpoints.opening import open_checkpoint
from jaxgrow.checkpoints.source import Checkpoint, Grown, Loaded, Source
from jaxgrow.growth.maps import Growth, select
from jaxgrow.models import Config
from jaxgrow.registry import Registry
from jaxgrow.typed import Json, check_choices
from jaxgrow.untrusted import checked_path, copy_file


@dataclass(frozen=True)
class Output:
    """A checkpoint to write.

    Args:
      dst: the new folder.
      format: the kind of folder, Hugging Face or Orbax; None: the kind of the first checkpoint from
        which the model is made.
      dtype: the dtype of the parameters, to which they are rounded once, at the end; None: the
        dtypes of the model.
      shard: the largest size of a safetensors file in bytes.
      overwrite: whether to replace an existing checkpoint, after the new one is complete.
      settings: keys of the ``config.json`` of a Hugging Face folder that the model does not
        determine, such as ``id2label``, the labels of the classes, or ``pad_token_id``
        (`jaxgrow.checkpoints.hf.labels`).
      dry_run: whether to write nothing. The model and the folder are checked as usual.
      progress: whether to show a progress bar.

    Raises:
      ValueError: an unknown format.
    """

    dst: str | Path
    format: Literal["hf", "orbax"] | None = None
    dtype: str | None = None
    shard: int = SHARD
    overwrite: bool = False
    settings: Mapping[str, object] = field(default_factory=dict)
    dry_run: bool = False
    progress: bool = False

    def __post_init__(self):
        check_choices(self)

    @property
    def folder(self) -> Path:
        """The absolute path of the new folder."""
        return Path(os.path.abspath(Path(self.dst).expanduser()))

    def is_hf(self, roots: Sequence[Checkpoint]) -> bool:
        """Return whether a model that is made from ``roots`` becomes a Hugging Face folder."""
        first = isinstance(roots[0], HuggingFace) if roots else False
        return self.format == "hf" or (self.format is None and first)


@dataclass(frozen=True)
class Written:
    """A checkpoint that `write` has written.

    Attributes:
      model: the model in the dtype in which it is stored.
      size: the size of its tensors in bytes.
      notes: remarks for the user.
      seconds: how long the writing took.
    """

    model: Source
    size: int
    notes: list[str]
    seconds: float


class Companion(Protocol):
    """Files that belong to a model and are written into its folder, such as a LoRA.

    Attributes:
      folders: the folders that they are made of, which the new folder must not overlap.
      notes: remarks for the user.
    """

    folders: Sequence[Path]
    notes: Sequence[str]

    def write(self, part: Path, model: Source | None, output: Output) -> list[str]:
        """Write the files into the folder ``part`` and return their names.

        Args:
          part: the folder.
          model: the model that the folder holds; None: it holds no model.
          output: the description of the folder.
        """
        ...


#: Functions that grow the companions of a checkpoint, by the argument of `transform` that names
#: them: ``COMPANIONS["lora"](checkpoint, growth, value of the argument)``.
COMPANIONS: Registry[Callable[[Checkpoint, Growth, Any], Companion]] = Registry("companion")
#: "images" converts a model of gray images, from the model, its roots and the new checkpoint.
CONVERSIONS: Registry[Callable[[Source, Sequence[Checkpoint], Output], Source]] = Registry(
    "conversion"
)
#: "copies" adds noise to a grown model, from the model, the growth, the seed and the signal-to-noise
#: ratio.
NOISES: Registry[Callable[[Source, Growth, int, float], Source]] = Registry("noise")

#: Functions that return the model card of a model that is made from other models, from the model, the
#: content of its ``jaxgrow.json`` and its architecture.
MODEL_CARDS: Registry[Callable[[Source, Json, str], str]] = Registry("card of a changed model")


def save(
    folder: str | Path,
    config: Config,
    params: Params,
    like: str | Path | None = None,
    *,
    overwrite: bool = False,
    settings: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Write a model as a Hugging Face folder.

    Args:
      folder: the new folder.
      config: the config of the model.
      params: its parameters.
      like: a checkpoint of the same architecture, or of the same model with another head. Its other
        files, and the keys of its ``config.json`` that jaxgrow does not know, are copied.
      overwrite: whether to replace an existing checkpoint, after the new one is complete.
      settings: further keys of ``config.json``, as for `Output`.

    Raises:
      CheckpointError: no architecture stores such a model, the parameters do not fit the config, or
        the folder exists.
    """
    model = Loaded(config, params, None if like is None else open_checkpoint(like))
    output = Output(folder, "hf", overwrite=overwrite, settings=settings)
    write(model, output, {"operator": "save"})


def transform(
    source: str | Path | Checkpoint,
    output: Output | str | Path,
    growth: Growth,
    record: Mapping[str, object] = MappingProxyType({}),
    *,
    axes: Axes | None = None,
    noise: float | None = None,
    seed: int = 0,
    lora: str | Path | None = None,
    optimizer: tuple[str, Path | None] | None = None,
    beside: Sequence[Companion] = (),
) -> Written:
    """Grow a checkpoint on disk into another one, layer by layer.

    The written parameters are ``grow(growth, parameters, axes)``.

    Args:
      source: a folder, or a checkpoint from `open_checkpoint`. Operators take its ``sizes()``.
      output: the new checkpoint, or its folder.
      growth: the growth, as for `jaxgrow.grow`. Layers that no new layer depends on are not read.
      record: what ``jaxgrow.json`` records about this growth, such as
        ``{"operator": "stack", "target": {"layers": 24}}``.
      axes: axis names that replace the names in the config, such as
        `jaxgrow.models.Config.paper_axes`.
      noise: the signal-to-noise ratio in decibels of noise that makes the copies of a unit differ
        (`jaxgrow.growth.symmetry.break_symmetry`); None: no noise.
      seed: random seed of the noise.
      lora: the folder of a LoRA of the source in the layout of PEFT, which may be the source
        itself. The LoRA is grown by the same growth and written into the new folder, where
        ``transformers`` finds it.
      optimizer: the policy by which the optimizer state of a PyTorch run is grown, and its path;
        None instead of the path: the optimizer state in the source.
      beside: further files of the new checkpoint.

    Raises:
      CheckpointError: as `open_checkpoint` and `write`, the growth does not fit or has no copies
        that noise makes different, or the source holds a LoRA and ``lora`` is None.
    """
    source = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    output = output if isinstance(output, Output) else Output(output)
    wide = source if output.dtype is None else Cast(source, output.dtype, at_least=True)
    grown: Source = Grown(wide, growth, axes)
    if noise is not None:
        grown = NOISES["copies"](grown, growth, seed, noise)
    if lora is None:
        _check_no_lora(source.folder)
    given = {"lora": lora, "optimizer": optimizer}
    companions = [COMPANIONS[n](source, growth, x) for n, x in given.items() if x is not None]
    return write(grown, output, record, [*companions, *beside])


def write(
    source: Source,
    output: Output | str | Path,
    record: Mapping[str, object] = MappingProxyType({}),
    companions: Sequence[Companion] = (),
) -> Written:
    """Write a model as a new folder, which appears only when it is complete.

    The ``config.json`` and the other files of the first checkpoint from which the model is made
    (`Source.roots`) are copied. Its ``README.md`` is copied only with the same model. A changed model
    gets another one, which names the models from which it is made.

    Args:
      source: the model. Only one tensor is in memory at a time; for an Orbax folder, all of them
        are.
      output: the new checkpoint, or its folder.
      record: keys of ``jaxgrow.json``, which also holds the version, the config, and the
        fingerprints of the checkpoints from which the model is made.
      companions: further files of the model.

    Raises:
      CheckpointError: the folder exists, the architecture has no such model, or a checkpoint holds
        a LoRA and there are no companions.
    """
    began = time.perf_counter()
    output = output if isinstance(output, Output) else Output(output)
    roots = source.roots
    # The folder ``like`` of `save` may hold an adapter, which does not belong to these parameters.
    if not companions and type(source) is not Loaded:
        for root in roots:
            _check_no_lora(root.folder)
    changed = not isinstance(source, Checkpoint | Loaded)
    source = source if output.dtype is None else Cast(source, output.dtype)
    source = CONVERSIONS["images"](source, roots, output)
    passes = source.config.traits["passes"]
    if passes and output.is_hf(roots):  # no architecture of transformers has a loop
        source = Grown(source, {LAYERS: select(passes, source.sizes()[LAYERS])})
    plan = _planned_content(source, roots, output, changed)
    folders = [root.folder for root in roots]
    folders += [folder for companion in companions for folder in companion.folders]
    if output.dry_run:
        may_become(output.folder, folders, output.overwrite)
    else:
        about = _full_record(source, record, plan)
        with atomic_folder(output.folder, folders, output.overwrite) as part:
            free = shutil.disk_usage(part).free
            if plan.size > free:
                raise CheckpointError(
                    f"{output.dst} needs {plan.size} bytes, but {free} are free on its disk. Free "
                    "some space, or choose another disk"
                )
            _write_model(source, plan, part, output)
            for name in plan.carried:
                (part / name).parent.mkdir(exist_ok=True)
                beside = roots[0].files_beside or roots[0].folder
                copy_file(checked_path(beside, name, deep=True), part / name)
            for companion in companions:
                about["files"] += companion.write(part, source, output)
            write_json(part / RECORD, about)
            if changed and roots and plan.hf_config is not None:
                name = plan.hf_config["architectures"][0]
                (part / CARD).write_text(MODEL_CARDS["transformers"](source, about, name), "utf-8")
    notes = [note for origin in (*companions, *roots) for note in origin.notes]
    notes += _change_notes(roots, plan, output.folder)
    return Written(source, plan.size, notes, time.perf_counter() - began)


@dataclass(frozen=True)
class _Content:
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


def _planned_content(
    source: Source, roots: Sequence[Checkpoint], output: Output, changed: bool
) -> _Content:
    root = roots[0] if roots else None
    hf_config = root.hf_config if root else None
    carried = files_to_copy(root.files_beside) if root and root.files_beside is not None else []
    if changed or (root is not None and hf_config is None and source.config != root.config):
        carried = [name for name in carried if name != CARD]  # it describes another model
    head = _recorded_head(source, root)
    family = None
    stored = Counter()
    if output.is_hf(roots):
        old = hf_config
        family, hf_config = storage.family_for(
            source.config, old, {**head, **output.settings} or None
        )
        for tensor in storage.planned_tensors(source, family):
            stored[tensor.dtype.name] += tensor.size
    else:
        if output.shard != SHARD:
            raise CheckpointError(
                "an Orbax folder has no weight files whose size can be limited: omit --shard-size (in "
                "Python: shard), or choose the format hf"
            )
        for leaf in source.leaves.values():
            stored[leaf.dtype.name] += leaf.size
    if hf_config is not None and root is not None:
        hf_config = _in_dtype(hf_config, stored)
    return _Content(family, hf_config, head, carried, stored.total())


def _full_record(source: Source, record: Mapping[str, object], plan: _Content) -> Json:
    """The content of ``jaxgrow.json``."""
    about: Json = {
        "version": __version__,
        **record,
        "sources": [root.fingerprint() for root in source.roots],
        "config": source.config.as_json(),
        "files": list(plan.carried),
    }
    if history := _history(source.roots):
        about["history"] = history
    if plan.family is None and plan.hf_config is not None:
        # A later conversion to Hugging Face needs it.
        about["huggingface"] = plan.hf_config
    if plan.family is None and plan.head:
        about["head"] = plan.head
    return about


def _write_model(source: Source, plan: _Content, part: Path, output: Output) -> None:
    hidden = None if output.progress else True
    with tqdm(total=plan.size, unit="B", unit_scale=True, disable=hidden) as bar:
        if plan.family is not None and plan.hf_config is not None:
            storage.write_hf_folder(
                source, plan.family, plan.hf_config, part, shard=output.shard, done=bar.update
            )
        else:
            # The import takes seconds, and Hugging Face folders do not need it.
            from jaxgrow.checkpoints import orbax

            orbax.write_orbax(source, part)
            bar.update(plan.size)


def _recorded_head(source: Source, root: Checkpoint | None) -> Json:
    """Return what an Orbax folder records for ``config.json``: special tokens, task and labels.

    Task and labels are left out if the model to write has another head.
    """
    if root is None or isinstance(root, HuggingFace) or root.head is root.hf_config:
        return {}
    own = ("predicts", "classes")
    same = all(
        getattr(source.config, name, None) == getattr(root.config, name, None) for name in own
    )
    return {**root.own_settings, **(root.head if same else {})}


def _check_no_lora(folder: Path) -> None:
    """Check that a folder holds a model without a LoRA.

    Raises:
      CheckpointError: it holds a LoRA.
    """
    if (folder / ADAPTER[0]).is_file():
        raise CheckpointError(
            f"{folder} contains an adapter in addition to its model ({ADAPTER[0]}), which "
            f"would not fit the new model. To change both, pass --lora {shlex.quote(str(folder))} to grow, coalesce, "
            f"decoalesce or prune (in Python: transform(..., lora={str(folder)!r})); for a change that does not take a LoRA, "
            "merge it into the model with PEFT (merge_and_unload) before. To "
            f"continue without the adapter, move {' and '.join(ADAPTER)} out of the folder"
        )


def _in_dtype(hf_config: Mapping[str, object], stored: Mapping[str, int]) -> Json:
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
    not_repeated = ("history", "config", "files", "huggingface", "head")
    out: list[Json] = []
    for root in roots:
        if not (root.folder / RECORD).is_file():
            continue
        record = read_json(inside(root.folder, RECORD))
        earlier = record.get("history")
        last = {key: value for key, value in record.items() if key not in not_repeated}
        steps = [
            *(earlier if isinstance(earlier, list) else []),
            last | {"made": root.fingerprint()},
        ]
        out += [step for step in steps if step not in out]
    return out


def _change_notes(roots: Sequence[Checkpoint], plan: _Content, folder: Path) -> list[str]:
    """Notes about keys of ``config.json`` that are removed, and about subfolders that are not copied."""
    like = roots[0].hf_config if roots else None
    if like is None:
        return []
    notes = REPEATED_KEYS["removed"](like, plan.hf_config or {}) if plan.family else []
    names = [f"{name}/" for name in left_out(roots[0].folder) if not (folder / name).exists()]
    note = f"{roots[0].folder} has folders that are not copied: {listed(names)}"
    return [*notes, note] if names else notes

"""How is a LoRA read from the files of PEFT?"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxgrow.axes.names import Params, axis_of, layers_of
from jaxgrow.checkpoints.hf.storage import family_for
from jaxgrow.checkpoints.hf.tensor_layout import TensorLayout
from jaxgrow.checkpoints.hf.tensor_names import without_values
from jaxgrow.checkpoints.hf.text_part import text_tensors
from jaxgrow.checkpoints.io import safetensors
from jaxgrow.checkpoints.io.files import CheckpointError, inside, listed, spelt
from jaxgrow.checkpoints.opening import open_checkpoint
from jaxgrow.checkpoints.source import Checkpoint, Source, flat, initial_layout, nested
from jaxgrow.extras.hf_peft.peft_adapter import RESAVED, PeftAdapter
from jaxgrow.extras.hf_peft.peft_settings import Settings
from jaxgrow.extras.hf_peft.places import (
    CONFIG,
    PREFIX,
    WEIGHTS,
    Factors,
    ModuleNames,
    architectures,
)
from jaxgrow.extras.peft.lora import RANK, LoRA
from jaxgrow.models import Config
from jaxgrow.typed import Json
from jaxgrow.untrusted import CheckedPath, one_line


def load(
    folder: str | Path, config: Config, like: str | Path | Checkpoint | None = None
) -> PeftAdapter:
    """Read a LoRA in the layout of PEFT, as float32 or wider.

    If one tensor of the base model holds several kernels of jaxgrow, such as the queries, keys and
    values of GPT-2, each of these kernels gets the same ``a``.

    Args:
      folder: the folder with the two files.
      config: the config of the base model. If the adapter holds the head of another task, the
        config of the result has that head.
      like: the base model, or its folder, after which the modules are named. Without it, the names
        in the file decide. A DoRA needs it, because its magnitudes are norms of the kernels of the
        base model.

    Returns:
      The adapter.

    Raises:
      CheckpointError: a file is missing or damaged, the adapter changes the function in a way that
        is not supported, or it belongs to another model.
    """
    folder = Path(folder).expanduser()
    with one_line(CheckpointError, f"{folder} cannot be read"):
        return _load(folder, config, like)


def _load(folder: Path, config: Config, like: str | Path | Checkpoint | None) -> PeftAdapter:
    settings = Settings(inside(folder, CONFIG))
    file = inside(folder, WEIGHTS)
    stored = _plain(file, settings)
    base = open_checkpoint(like) if isinstance(like, str | Path) else like
    config, names = _adapted(config, base, settings, stored)
    config, notes = _resized(config, names, stored)
    found = _Found(settings, file, stored)
    own, factors = _read_factors(found, names, config)
    gains = _read_gains(found, names, config, own, factors, base) if settings.dora else {}
    saved = _read_saved(found, names, config)
    if unknown := [name for name in found.tensors if name not in found.known]:
        raise CheckpointError(
            f"{file} has {listed(unknown, most=5)}. Either the layers of {names.family.architecture} do "
            f"not have such kernels, or {CONFIG} does not name their modules. If PEFT reads the adapter, merge it into its "
            "model (merge_and_unload), and grow the merged model"
        )
    return PeftAdapter(config, own, factors, gains, saved, settings.about, *names, notes)


def load_beside(folder: str | Path, base: Checkpoint) -> PeftAdapter:
    """Read a LoRA of a checkpoint, as `load` does.

    Args:
      folder: the folder of the LoRA.
      base: the checkpoint.

    Raises:
      CheckpointError: as `load`, or the adapter needs a head, and neither the adapter nor the base
        model has all leaves of that head.
    """
    own = load(folder, base.config, base)
    if lost := sorted(initial_layout(own.config).keys() - base.leaves.keys() - own.saved.keys()):
        raise CheckpointError(
            f"{folder}: the head of this adapter needs {', '.join(lost)}, which neither it nor "
            f"{base.folder} has. Load the base model with that head in transformers, and save it"
        )
    return own


# --- the names in the file ---


def _plain(file: CheckedPath, settings: Settings) -> dict[str, safetensors.Tensor]:
    """Return the tensors of an adapter by the names that a text model has for them.

    Raises:
      CheckpointError: PEFT would not read the tensors.
    """
    stored = safetensors.header(file)
    if ignored := [name for name in stored if not name.startswith(PREFIX)]:
        raise CheckpointError(
            f"{file} has {listed(ignored, most=5)}. PEFT ignores tensors whose names do not begin with {PREFIX!r}; put it "
            "before each name, or save the adapter again with save_pretrained of PEFT"
        )
    if empty := without_values(stored, stored):
        raise CheckpointError(f"{file}: {empty}")
    # PEFT reads the names with and without the name of the adapter.
    marked = {
        re.sub(
            r"(?<=\.lora_[AB])\.default(?=\.weight$)|(?<=_vector)(\.default)?(\.weight)?$", "", n
        ): n
        for n in stored
    }
    own = {name.removeprefix(PREFIX): name for name in marked}
    plain = text_tensors({name: name for name in own})
    for name, spelt_as in plain.items():
        settings.spellings[name.partition(".lora_")[0]] = spelt_as.partition(".lora_")[0]
    return {name: stored[marked[own[spelt_as]]] for name, spelt_as in plain.items()}


def _resized(
    config: Any, names: ModuleNames, stored: Mapping[str, safetensors.Tensor]
) -> tuple[Any, tuple[str, ...]]:
    """Return the config with the vocabulary of the embeddings in the adapter, and a note."""
    place = names.of(config).get("token_embedding")
    if place is None or place.name not in stored or not stored[place.name].shape:
        return config, ()
    rows = stored[place.name].shape[0]
    if rows in (0, config.vocab):
        return config, ()
    return replace(config, vocab=rows), (
        f"the adapter has embeddings of {rows} tokens, and its model of {config.vocab}: call resize_token_embeddings({rows}) "
        "of the model before the adapter is loaded",
    )


# --- the architecture after which the modules are named ---


def _adapted(
    config: Config, base: Checkpoint | None, settings: Settings, stored: Json
) -> tuple[Config, ModuleNames]:
    """Return the config of the adapted model, and the names that most of the tensors have."""
    if settings.task is not None and config.predicts != settings.task[0]:
        config = _with_head(config, settings, stored)
    hf_config = None if base is None else base.hf_config
    families = architectures(config) if hf_config is None else [family_for(config, hf_config)[0]]
    candidates = [ModuleNames(family, older) for family in families for older in (False, True)]
    modules = {name.partition(".lora_")[0] for name in stored if ".lora_" in name}
    return config, max(candidates, key=lambda names: len(modules & _every_module(names, config)))


def _every_module(names: ModuleNames, config: Config) -> set[str]:
    sizes = config.sizes()
    modules: set[str] = set()
    for pattern, group in names.modules(config).items():
        modules |= {pattern.format(layers=layer) for layer in range(group[0].layers(sizes))}
    return modules


def _with_head(config: Config, settings: Settings, stored: Json) -> Config:
    """Return the config with the head of the adapter's task, and with the classes in the file."""
    assert settings.task is not None
    head, modules = settings.task
    ends = tuple(f"{module}{of}.weight" for module in modules for of in ("", ".out_proj"))
    shapes = [tensor.shape for name, tensor in stored.items() if name.endswith(ends)]
    if len(shapes) != 1 or config.modality != "text":
        raise CheckpointError(
            f"{settings.file}: task_type is {spelt(settings.about['task_type'])}, but the adapter "
            f"has no head of that task, {' or '.join(modules)}, that fits this "
            f"{type(config).__name__}"
        )
    return config.for_task(head, shapes[0][0], None)


# --- the tensors ---


class _Found:
    """The tensors of an adapter, and the names of the tensors that have been read."""

    def __init__(
        self, settings: Settings, file: CheckedPath, tensors: Mapping[str, safetensors.Tensor]
    ):
        self.settings = settings
        self.file = file
        self.tensors = tensors
        self.known: set[str] = set()

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        self.known.add(name)
        return safetensors.read_tensor(self.tensors, self.file, name, shape)

    def need(self, names: list[str]) -> None:
        """Check that the adapter has these tensors.

        Raises:
          CheckpointError: some of them are missing.
        """
        if missing := [name for name in names if name not in self.tensors]:
            raise CheckpointError(
                f"{self.file} lacks {listed(missing)}, which {CONFIG} requires. Is it the adapter "
                "of another model?"
            )


class _Target(NamedTuple):
    """A module of one layer that has a LoRA, and the kernels of jaxgrow that it holds."""

    group: list[Factors]
    layer: int
    module: str


def _targets(found: _Found, names: ModuleNames, config: Config) -> list[_Target]:
    sizes = config.sizes()
    found.settings.learn(_every_module(names, config))
    targets = []
    for pattern, group in names.modules(config).items():
        for layer in range(group[0].layers(sizes)):
            module = pattern.format(layers=layer)
            if found.settings.targets(module):
                targets.append(_Target(group, layer, module))
    found.need([f"{target.module}.lora_{x}.weight" for target in targets for x in "AB"])
    if not targets:
        raise CheckpointError(
            f"{found.file} has no LoRA of a kernel in the layers of {names.family.architecture}"
        )
    return targets


def _read_factors(found: _Found, names: ModuleNames, config: Config) -> tuple[LoRA, Params]:
    """Read the factors. Smaller ranks are padded with zeros, and other scales are in ``b``."""
    settings = found.settings
    sizes = config.sizes()
    targets = _targets(found, names, config)
    rank = max(settings.rank(target.module) for target in targets)
    if rank > sum(tensor.size for tensor in found.tensors.values()):
        raise CheckpointError(f"{settings.file} has rank {rank}, which {found.file} does not have")
    scale = settings.scale(targets[0].module)
    leaves: dict[str, np.ndarray] = {}
    for target in targets:
        own = settings.rank(target.module)
        times = settings.scale(target.module) / scale
        for place in target.group:
            for leaf, x, axes in _read_sides(found, place, target.layer, {**sizes, RANK: own}):
                path = f"{place.module}/{leaf}"
                if path not in leaves:
                    shape = [rank if axis_of(n) == RANK else sizes[axis_of(n)] for n in axes]
                    leaves[path] = np.zeros((place.layers(sizes), *shape), x.dtype)
                part = leaves[path][target.layer]
                if leaf == "a":
                    part[..., :own] = x
                else:
                    part[:own] = times * x
    modules = tuple(dict.fromkeys(path.rpartition("/")[0] for path in leaves))
    return LoRA(rank, scale * rank, modules), nested(leaves)


def _read_sides(
    found: _Found, place: Factors, layer: int, sizes: Mapping[str, int]
) -> Iterator[tuple[str, np.ndarray, tuple[str, ...]]]:
    """Yield the leaf, the values and the axes of both factors of one layer."""
    for leaf, stored, axes in place.sides:
        x = found.read(stored.name.format(layers=layer), stored.shape(axes, sizes))
        yield leaf, stored.to_leaf(x, axes, sizes), axes


def _read_gains(
    found: _Found,
    names: ModuleNames,
    config: Config,
    own: LoRA,
    factors: Params,
    base: Source | None,
) -> dict[str, np.ndarray]:
    """Read the gains of a DoRA. They are 1 in layers without a DoRA."""
    if base is None:
        raise CheckpointError(
            f"{found.settings.file}: use_dora is true. The magnitudes of a DoRA are norms of the "
            "kernels of its base model: give the folder of the base model (in Python: like=...)"
        )
    gains = {}
    leaves = flat(factors)
    sizes = config.sizes()
    for target in _targets(found, names, config):
        for place in target.group:
            axes = place.kernel.written
            stored = place.magnitude
            if place.module not in gains:
                shape = (place.layers(sizes), *(sizes[axis_of(n)] for n in axes))
                gains[place.module] = np.ones(shape, np.float32)
            name = stored.name.format(layers=target.layer)
            found.need([name])
            magnitude = stored.to_leaf(found.read(name, stored.shape(axes, sizes)), axes, sizes)
            norms = place.norms(base, target.layer, own, leaves)
            gains[place.module][target.layer] = magnitude / norms
    return gains


def _read_saved(found: _Found, names: ModuleNames, config: Config) -> dict[str, np.ndarray]:
    """Read the complete leaves that the adapter holds."""
    out = {}
    sizes = config.sizes()
    for path, stored in names.of(config).items():
        own = found.settings.saves(stored.name.rpartition(".")[0])
        if not own and not (path in RESAVED and stored.name in found.tensors):
            continue
        if own and path == "token_embedding" and config.tied:
            raise CheckpointError(
                f"{found.file} has {stored.name}, but the head of this model is tied to it, and "
                "PEFT trained a separate copy. Merge the adapter into its model with PEFT "
                "(merge_and_unload), and grow the merged model"
            )
        axes, shape = initial_layout(config)[path]
        layers = stored.layers(range(shape[0]) if layers_of(axes) else (None,))
        tensors = [stored.name.format(layers=layer) for layer in layers]
        found.need(tensors)
        read = [
            stored.to_leaf(found.read(n, stored.shape(axes, sizes)), axes, sizes) for n in tensors
        ]
        if path == "token_embedding" and config.tied:
            _check_repeated(found, names, config, stored)
        # Layers below the first stored layer keep the value 1.
        out[path] = np.ones(shape, read[0].dtype)
        out[path][stored.first :] = read if layers_of(axes) else read[0]
    return out


def _check_repeated(
    found: _Found, names: ModuleNames, config: Any, embedding: TensorLayout
) -> None:
    """Check that a saved head is the saved embedding to which it is tied.

    Raises:
      CheckpointError: it is not.
    """
    head = names.of(replace(config, tied=False)).get("head_kernel")
    if head is None or head.name not in found.tensors:
        return
    found.known.add(head.name)
    if not found.tensors[head.name].equals(found.tensors[embedding.name]):
        raise CheckpointError(
            f"{found.file} has {head.name} and {embedding.name}, which differ although the head of the model is tied to its "
            "embedding. Merge the adapter into its model with PEFT (merge_and_unload), and grow the merged model"
        )

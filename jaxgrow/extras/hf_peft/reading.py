"""How is a LoRA read from the files of PEFT?"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxgrow.axes.names import Params, axis_of, layers_of
from jaxgrow.checkpoints.hf.storage import family_for
from jaxgrow.checkpoints.hf.tensor_layout import TensorLayout
from jaxgrow.checkpoints.io import safetensors
from jaxgrow.checkpoints.io.files import CheckpointError, inside, listed, spelt
from jaxgrow.checkpoints.opening import open_checkpoint
from jaxgrow.checkpoints.source import (
    Checkpoint,
    Source,
    initial_layout,
    leaves_by_path,
    tree_from_paths,
)
from jaxgrow.extras.families.misfits import tensors_without_values
from jaxgrow.extras.families.text_part import text_tensors
from jaxgrow.extras.hf_peft.peft_adapter import RESAVED, PeftAdapter
from jaxgrow.extras.hf_peft.peft_settings import PeftSettings
from jaxgrow.extras.hf_peft.places import (
    CONFIG,
    PREFIX,
    WEIGHTS,
    Factors,
    ModuleNames,
    storing_families,
)
from jaxgrow.extras.peft.lora import RANK, LoRA
from jaxgrow.models import Config
from jaxgrow.typed import Json
from jaxgrow.untrusted import CheckedPath, one_line


def read_tensor(
    stored: Mapping[str, safetensors.Tensor],
    file: CheckedPath | Path,
    name: str,
    shape: tuple[int, ...],
) -> np.ndarray:
    """Read a tensor of a known shape.

    Args:
      stored: the tensors of a file, by name.
      file: the file, which a message names.
      name: the name of the tensor.
      shape: its shape.

    Returns:
      The values, as float32 or wider.

    Raises:
      CheckpointError: the file lacks the tensor, or it has another shape.
    """
    if name not in stored:
        raise CheckpointError(f"{file} lacks {name}. Either all layers have such tensors, or none")
    if stored[name].shape != shape:
        raise CheckpointError(
            f"{name} in {file} has shape {stored[name].shape}, but the model needs {shape}. Does the file belong to "
            "another model?"
        )
    x = stored[name].read()
    return x if x.dtype.itemsize >= 4 else x.astype(np.float32)


def read_peft(
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
        settings = PeftSettings(inside(folder, CONFIG))
        file = inside(folder, WEIGHTS)
        base = open_checkpoint(like) if isinstance(like, str | Path) else like
        found = _PeftTensors(settings, file)
        config, names = _adapted_config(config, base, found)
        config, notes = _with_saved_vocab(config, names, found)
        targets = _adapted_modules(found, names, config)
        lora, factors = _read_factors(found, targets, config)
        gains = _read_gains(found, targets, config, lora, factors, base) if settings.dora else {}
        saved = _read_saved(found, names, config)
        if unknown := [name for name in found.tensors if name not in found.known]:
            # A merge changes the shared weights, and thereby the embedding and the head.
            first = (
                " after its head was separated from the embedding with jaxgrow grow SRC DST --method untie"
                if config.tied and not all(re.search(r"\.\d+\.", name) for name in unknown)
                else ""
            )
            raise CheckpointError(
                f"{file} has {listed(unknown, most=5)}. Either the layers of {names.family.architecture} do "
                f"not have such kernels, or {CONFIG} does not name their modules. If PEFT reads the adapter, merge it into its "
                f"model{first} (merge_and_unload), and grow the merged model"
            )
        return PeftAdapter(config, lora, factors, saved, settings.about, *names, gains, notes)


def read_peft_beside(folder: str | Path, base: Checkpoint) -> PeftAdapter:
    """Read a LoRA of a checkpoint, as `read_peft` does.

    Args:
      folder: the folder of the LoRA.
      base: the checkpoint.

    Raises:
      CheckpointError: as `read_peft`, or the adapter needs a head, and neither the adapter nor the
        base model has all leaves of that head.
    """
    own = read_peft(folder, base.config, base)
    if lost := sorted(initial_layout(own.config).keys() - base.leaves.keys() - own.saved.keys()):
        raise CheckpointError(
            f"{folder}: the head of this adapter needs {', '.join(lost)}, which neither it nor "
            f"{base.folder} has. Load the base model with that head in transformers, and save it"
        )
    return own


class _PeftTensors:
    """The tensors of an adapter, by their names in the base model, and those that have been read.

    Raises:
      CheckpointError: PEFT would not read the tensors.
    """

    def __init__(self, settings: PeftSettings, file: CheckedPath):
        self.settings = settings
        self.file = file
        self.known: set[str] = set()
        stored = safetensors.read_header(file)
        if ignored := [name for name in stored if not name.startswith(PREFIX)]:
            raise CheckpointError(
                f"{file} has {listed(ignored, most=5)}. PEFT ignores tensors whose names do not begin with {PREFIX!r}; put it "
                "before each name, or save the adapter again with save_pretrained of PEFT"
            )
        # PEFT reads the names with and without the name of the adapter.
        marked = re.compile(
            r"(?<=\.lora_[AB])\.default(?=\.weight$)|(?<=_vector)(\.default)?(\.weight)?$"
        )
        own = {marked.sub("", n.removeprefix(PREFIX)): tensor for n, tensor in stored.items()}
        if empty := tensors_without_values(stored):
            raise CheckpointError(f"{file}: {empty}")
        # The adapter of a model of images and texts is read for its text model.
        names = text_tensors({name: name for name in own})
        self.tensors = {name: own[spelt_as] for name, spelt_as in names.items()}
        modules = {
            name.partition(".lora_")[0]: of for name, of in names.items() if ".lora_" in name
        }
        settings.spellings = {name: of.partition(".lora_")[0] for name, of in modules.items()}
        self.modules = modules.keys()

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        self.known.add(name)
        return read_tensor(self.tensors, self.file, name, shape)

    def need(self, names: Iterable[str]) -> None:
        """Check that the adapter has these tensors.

        Raises:
          CheckpointError: some of them are missing.
        """
        if missing := [name for name in names if name not in self.tensors]:
            raise CheckpointError(
                f"{self.file} lacks {listed(missing)}, which {CONFIG} requires. Is it the adapter of another model?"
            )


def _adapted_config(
    config: Config, base: Checkpoint | None, found: _PeftTensors
) -> tuple[Config, ModuleNames]:
    """Return the config of the adapted model, and the names that most of the tensors have."""
    task = found.settings.task
    if task is not None and config.predicts != task[0]:
        head, modules = task
        ends = tuple(f"{module}{of}.weight" for module in modules for of in ("", ".out_proj"))
        shapes = [tensor.shape for name, tensor in found.tensors.items() if name.endswith(ends)]
        if len(shapes) != 1 or config.modality != "text":
            raise CheckpointError(
                f"{found.settings.file}: task_type is {spelt(found.settings.about['task_type'])}, but the adapter has no head "
                f"of that task, {' or '.join(modules)}, that fits this {type(config).__name__}"
            )
        config = config.for_task(head, shapes[0][0], None)
    hf_config = None if base is None else base.hf_config
    families = storing_families(config) if hf_config is None else [family_for(config, hf_config)[0]]
    candidates = [ModuleNames(family, older) for family in families for older in (False, True)]

    def common(names: ModuleNames) -> int:
        return len(found.modules & {module for module, *_ in names.of_layers(config)})

    return config, max(candidates, key=common)


def _with_saved_vocab(
    config: Config, names: ModuleNames, found: _PeftTensors
) -> tuple[Config, tuple[str, ...]]:
    """Return the config with the vocabulary of the embeddings in the adapter, and a note."""
    place = names.of(config).get("token_embedding")
    stored = found.tensors.get(place.name) if place is not None else None
    rows = stored.shape[0] if stored is not None and stored.shape else 0
    old = config.sizes().get("vocab")
    if rows in (0, old):
        return config, ()
    new: Json = {"vocab": rows}
    return replace(config, **new), (
        f"the adapter has embeddings of {rows} tokens, and its model of {old}: call resize_token_embeddings({rows}) "
        "of the model before the adapter is loaded",
    )


def _adapted_modules(
    found: _PeftTensors, names: ModuleNames, config: Config
) -> list[tuple[str, int, list[Factors]]]:
    """Return the modules that have a LoRA by the settings, as from `ModuleNames.of_layers`.

    Raises:
      CheckpointError: there are none, or the file lacks their factors.
    """
    every = [*names.of_layers(config)]
    found.settings.learn(module for module, *_ in every)
    targets = [target for target in every if found.settings.targets(target[0])]
    found.need(f"{module}.lora_{x}.weight" for module, *_ in targets for x in "AB")
    if not targets:
        raise CheckpointError(
            f"{found.file} has no LoRA of a kernel in the layers of {names.family.architecture}"
        )
    return targets


def _read_gains(
    found: _PeftTensors,
    targets: Sequence[tuple[str, int, list[Factors]]],
    config: Config,
    lora: LoRA,
    factors: Params,
    base: Source | None,
) -> dict[str, np.ndarray]:
    """Read the gains of a DoRA. They are 1 in layers without a DoRA."""
    if base is None:
        raise CheckpointError(
            f"{found.settings.file}: use_dora is true. The magnitudes of a DoRA are norms of the "
            "kernels of its base model: give the folder of the base model (in Python: like=...)"
        )
    gains: dict[str, np.ndarray] = {}
    leaves = leaves_by_path(factors)
    sizes = config.sizes()
    for place, layer in ((place, layer) for _, layer, group in targets for place in group):
        axes = place.kernel.written
        stored = place.magnitude
        name = stored.name.format(layers=layer)
        found.need([name])
        x = found.read(name, stored.shape(axes, sizes))
        norms = place.norms(base, layer, lora, leaves)
        shape = (place.layers(sizes), *(sizes[axis_of(n)] for n in axes))
        every = gains.setdefault(place.module, np.ones(shape, np.float32))
        every[layer] = stored.to_leaf(x, axes, sizes) / norms
    return gains


def _read_factors(
    found: _PeftTensors, targets: Sequence[tuple[str, int, list[Factors]]], config: Config
) -> tuple[LoRA, Params]:
    """Read the factors. Smaller ranks are padded with zeros, and other scales are in ``b``."""
    settings = found.settings
    sizes = config.sizes()
    rank = max(settings.rank(module) for module, *_ in targets)
    if rank > sum(tensor.size for tensor in found.tensors.values()):
        raise CheckpointError(f"{settings.file} has rank {rank}, which {found.file} does not have")
    scale = settings.scale(targets[0][0])
    leaves: dict[str, np.ndarray] = {}
    for module, layer, group in targets:
        own = settings.rank(module)
        times = settings.scale(module) / scale
        for place in group:
            for leaf, stored, axes in place.sides:
                of = {**sizes, RANK: own}
                x = found.read(stored.name.format(layers=layer), stored.shape(axes, of))
                x = stored.to_leaf(x, axes, of)
                shape = [rank if axis_of(n) == RANK else sizes[axis_of(n)] for n in axes]
                path = f"{place.module}/{leaf}"
                every = leaves.setdefault(path, np.zeros((place.layers(sizes), *shape), x.dtype))
                if leaf == "a":
                    every[layer][..., :own] = x
                else:
                    every[layer][:own] = times * x
    modules = tuple(dict.fromkeys(path.rpartition("/")[0] for path in leaves))
    return LoRA(rank, scale * rank, modules), tree_from_paths(leaves)


def _read_saved(
    found: _PeftTensors, names: ModuleNames, config: Config
) -> Mapping[str, np.ndarray]:
    """Read the complete leaves that the adapter holds."""
    out: dict[str, np.ndarray] = {}
    sizes = config.sizes()
    for path, place in names.of(config).items():
        own = found.settings.saves(place.name.rpartition(".")[0])
        if not own and not (path in RESAVED and place.name in found.tensors):
            continue
        if own and path == "token_embedding" and config.tied:
            raise CheckpointError(
                f"{found.file} has {place.name}, but the head of this model is tied to it, and PEFT trained a "
                "separate copy. Merge the adapter into its model with PEFT (merge_and_unload), and grow the merged model"
            )
        axes, shape = initial_layout(config)[path]
        layers = place.layers(range(shape[0]) if layers_of(axes) else (None,))
        read = [
            place.to_leaf(
                found.read(place.name.format(layers=layer), place.shape(axes, sizes)), axes, sizes
            )
            for layer in layers
        ]
        if path == "token_embedding" and config.tied:
            _check_saved_head(found, names, config, place)
        # Layers below the first stored layer keep the value 1.
        out[path] = np.ones(shape, read[0].dtype)
        out[path][place.first :] = read if layers_of(axes) else read[0]
    return out


def _check_saved_head(
    found: _PeftTensors, names: ModuleNames, config: Config, embedding: TensorLayout
) -> None:
    """Check that a saved head is the saved embedding to which it is tied.

    Raises:
      CheckpointError: it is not.
    """
    untied: Json = {"tied": False}
    head = names.of(replace(config, **untied)).get("head_kernel")
    if head is None or head.name not in found.tensors:
        return
    found.known.add(head.name)
    if not found.tensors[head.name].equals(found.tensors[embedding.name]):
        raise CheckpointError(
            f"{found.file} has {head.name} and {embedding.name}, which differ although the head of the model is tied to its "
            "embedding. Merge the adapter into its model with PEFT (merge_and_unload), and grow the merged model"
        )

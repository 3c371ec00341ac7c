"""How is a LoRA written to the files of PEFT?"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxgrow.axes.names import layers_of
from jaxgrow.checkpoints.hf.storage import family_for
from jaxgrow.checkpoints.io import safetensors
from jaxgrow.checkpoints.io.files import ADAPTER, CheckpointError, write_json
from jaxgrow.checkpoints.io.folders import atomic_folder
from jaxgrow.checkpoints.opening import open_checkpoint
from jaxgrow.checkpoints.source import Checkpoint, Source, initial_layout, leaves_by_path
from jaxgrow.extras.hf_peft.peft_adapter import RESAVED, PeftAdapter
from jaxgrow.extras.hf_peft.places import (
    CONFIG,
    PREFIX,
    WEIGHTS,
    Factors,
    ModuleNames,
    storing_families,
)
from jaxgrow.extras.peft import lora
from jaxgrow.extras.peft.lora import RANK
from jaxgrow.typed import Json

# These keys are copied from the file that was read.
_CARRIED = ("task_type", "auto_mapping", "lora_dropout", "inference_mode")


def write_peft(
    folder: str | Path,
    adapter: PeftAdapter,
    like: str | Path | Checkpoint | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """Write a LoRA in the layout of PEFT, to a folder that appears only when it is complete.

    If one tensor of the base model holds several kernels of jaxgrow, kernels with equal ``a`` share
    the factor. Otherwise the factors are concatenated, and the rank of the module is the sum of
    their ranks.

    Args:
      folder: the new folder.
      adapter: the LoRA.
      like: the base model, or its folder, after which the modules are named. Without it,
        ``adapter.family`` decides. A DoRA needs it.
      overwrite: whether to replace an existing adapter, after the new one is complete.

    Raises:
      CheckpointError: the folder exists, no architecture stores such a model, or the layers of the
        architecture do not have these kernels.
    """
    base = open_checkpoint(like) if isinstance(like, str | Path) else like
    if base is not None:
        adapter = replace(adapter, family=family_for(adapter.config, base.hf_config)[0])
    adapter.check_base(base)
    with atomic_folder(Path(folder), [], overwrite) as part:
        write_into(part, adapter, base)


def write_into(
    folder: Path, adapter: PeftAdapter, of: Source | None, base: str | None = None
) -> list[str]:
    """Write the two files of a LoRA into a folder that exists.

    Args:
      folder: the folder.
      adapter: the LoRA.
      of: its base model, whose kernels determine the magnitudes of a DoRA.
      base: the name of the base model that the files record.

    Returns:
      The names of the files.

    Raises:
      CheckpointError: as `write_peft`.
    """
    adapter.check_base(of)
    names = _module_names(adapter)
    tensors, ranks = _factor_tensors(adapter, names, of)
    saved, whole = _saved_tensors(adapter, names)
    about = _adapter_config(adapter, names, ranks) | {"base_model_name_or_path": base}
    if whole:
        about["modules_to_save"] = adapter.about.get("modules_to_save") or whole
    content = {PREFIX + name: np.ascontiguousarray(x) for name, x in (tensors | saved).items()}
    planned = [safetensors.Planned(n, x.dtype, x.shape, lambda x=x: x) for n, x in content.items()]
    safetensors.write_file(folder / WEIGHTS, planned)
    write_json(folder / CONFIG, {"inference_mode": True, "lora_dropout": 0.0, **about})
    return list(ADAPTER)


def module_ranks(adapter: PeftAdapter) -> dict[str, int]:
    """Return the rank of each module as `write_peft` writes it, without the parts that are zero.

    Raises:
      CheckpointError: as `write_peft`.
    """
    return _factor_tensors(adapter, _module_names(adapter), None)[1]


def _module_names(adapter: PeftAdapter) -> ModuleNames:
    return ModuleNames(adapter.family or storing_families(adapter.config)[0], adapter.older)


def _adapter_config(adapter: PeftAdapter, names: ModuleNames, ranks: Mapping[str, int]) -> Json:
    """The ``adapter_config.json``, in which the most frequent rank is the default."""
    scale = adapter.lora.scale
    rank = Counter(ranks.values()).most_common(1)[0][0]
    group = next(group for _, _, group in names.of_layers(adapter.config))
    about: Json = {
        **{key: adapter.about[key] for key in _CARRIED if key in adapter.about},
        "peft_type": "LORA",
        "target_modules": list(ranks),
        "bias": "none",
        "r": rank,
        "lora_alpha": scale * rank,
        # Whether the kernels of the base model have their inputs first, as in GPT-2.
        "fan_in_fan_out": group[0].reads_first,
    }
    if adapter.gains:
        about["use_dora"] = True
    if other := {module: r for module, r in ranks.items() if r != rank}:
        about["rank_pattern"] = other
        about["alpha_pattern"] = {module: scale * r for module, r in other.items()}
    return about


def _factor_tensors(
    adapter: PeftAdapter, names: ModuleNames, base: Source | None
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Return the tensors of the factors, and the rank of each module that has a LoRA.

    Raises:
      CheckpointError: all factors are zero, or the architecture has no place for the LoRA of a
        kernel.
    """
    own = set(lora.lora_kernels(adapter.lora, adapter.config.axes()))
    if lost := own - {p.module for _, _, group in names.of_layers(adapter.config) for p in group}:
        raise CheckpointError(
            f"{', '.join(sorted(lost))}: the layers of {names.family.architecture} do not have "
            "such a kernel, so PEFT cannot have a LoRA there. Merge the LoRA "
            "(jaxgrow.extras.peft.lora.merge_lora)"
        )
    sizes = {**adapter.config.sizes(), RANK: adapter.lora.rank}
    leaves = {path: np.asarray(x) for path, x in leaves_by_path(adapter.factors).items()}
    tensors: dict[str, np.ndarray] = {}
    ranks: dict[str, int] = {}
    for module, layer, places in names.of_layers(adapter.config):
        group = [place for place in places if place.module in own]
        if not group:
            continue
        a, b = _module_factors(group, leaves, layer, sizes)
        live = np.logical_or(a.any(1), b.any(0))
        if adapter.gains and base is not None:
            magnitudes = _magnitude_tensors(group, adapter, leaves, layer, base)
            # PEFT needs a factor of each module with magnitudes, even if it is zero.
            live = live | (np.arange(len(live)) == 0) if magnitudes else np.zeros_like(live)
            tensors |= magnitudes
        if live.any():
            tensors[f"{module}.lora_A.weight"] = a[live]
            tensors[f"{module}.lora_B.weight"] = b[:, live]
            ranks[module] = int(live.sum())
    if not ranks:
        raise CheckpointError("all factors of the LoRA are zero, so there is nothing to write")
    return tensors, ranks


def _magnitude_tensors(
    group: list[Factors],
    adapter: PeftAdapter,
    leaves: Mapping[str, np.ndarray],
    layer: int,
    base: Source,
) -> dict[str, np.ndarray]:
    """Return the magnitudes of one module of a layer of a DoRA.

    The result is empty if all weights of the module are zero, or if the DoRA does not change it.

    Raises:
      CheckpointError: some outputs of the module have only zero weights, and others do not.
    """
    out: dict[str, np.ndarray] = {}
    sizes = adapter.config.sizes()
    gains = [adapter.gains[place.module][layer] for place in group]
    norms = [place.norms(base, layer, adapter.lora, leaves) for place in group]
    unchanged = all(
        (gain == 1).all() and not leaves[f"{place.module}/b"][layer].any()
        for place, gain in zip(group, gains, strict=True)
    )
    if unchanged or not any(norm.any() for norm in norms):
        return out
    if not all(norm.all() for norm in norms):
        raise CheckpointError(
            f"{group[0].module}: some outputs of layer {layer} have only zero weights, and a DoRA "
            "divides by their norm. Merge the DoRA into its model with PEFT (merge_and_unload), "
            "and grow the merged model"
        )
    for place, gain, norm in zip(group, gains, norms, strict=True):
        stored = place.magnitude
        name = stored.name.format(layers=layer)
        out[name] = stored.to_tensor(gain * norm, place.kernel.written, sizes, out.get(name))
    return out


def _module_factors(
    group: list[Factors], leaves: Mapping[str, np.ndarray], layer: int, sizes: Mapping[str, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return A [rank, inputs] and B [outputs, rank] of a module from the factors of its kernels."""
    a: list[np.ndarray] = []
    b: list[np.ndarray] = []
    for place in group:
        x, y = (
            layout.to_tensor(leaves[f"{place.module}/{leaf}"][layer], names, sizes)
            for leaf, layout, names in place.sides
        )
        same = next((i for i, other in enumerate(a) if np.array_equal(other, x)), None)
        if same is None:
            a.append(x)
            b.append(y)
        else:  # the factors of one kernel are zero at the outputs of the others, so they are added
            b[same] = b[same] + y
    return np.concatenate(a), np.concatenate(b, 1)


def _saved_tensors(
    adapter: PeftAdapter, names: ModuleNames
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return the tensors of the complete leaves, and the modules of those that a setting names."""
    out: dict[str, np.ndarray] = {}
    named: set[str] = set()
    every = adapter.about.get("modules_to_save") or not adapter.about
    sizes = adapter.config.sizes()
    for path, leaf in adapter.saved.items():
        axes = initial_layout(adapter.config)[path][0]
        place = names.of(adapter.config)[path]
        for layer in place.layers(range(len(leaf)) if layers_of(axes) else (None,)):
            name = place.name.format(layers=layer)
            x = np.asarray(leaf if layer is None else leaf[layer])
            out[name] = place.to_tensor(x, axes, sizes, out.get(name))
            named |= {name.rpartition(".")[0]} if every or path not in RESAVED else set()
    return out, sorted(named)

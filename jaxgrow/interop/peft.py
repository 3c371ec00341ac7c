"""LoRAs in the layout of Hugging Face's PEFT: ``adapter_config.json`` and ``adapter_model.safetensors``.

A kernel's factors are ``base_model.model.<module>.lora_A.weight`` [r, in] and ``.lora_B.weight`` [out, r], a layer each, where
PyTorch computes ``x W.T + alpha / r x A.T B.T``. Modules are named as `jaxgrow.interop.families` has it. So a LoRA that
somebody has can be read, grown with its model, and written again::

    own, adapter = load("their-lora", config)
    own_growth = lora.growth(growth, own, config.axes())
    grown = grow(own_growth, adapter, lora.axes_of(own, config.axes()))
    save("grown-lora", config.resized(growth), own.resized(own_growth), grown)
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxgrow.axes import Params, axis
from jaxgrow.interop import safetensors
from jaxgrow.interop.family import Stored
from jaxgrow.interop.files import CheckpointError, inside, listed, read_json, write_json
from jaxgrow.interop.folders import appearing
from jaxgrow.interop.huggingface import family_for
from jaxgrow.interop.source import flat, nested
from jaxgrow.lora import LoRA, cut, kernels
from jaxgrow.models import Config

CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
# What changes the function, and the values with which it does not. Other keys say how the LoRA trained.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none", None),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "lora_bias": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "layer_replication": ([], None),
}


class _Place(NamedTuple):
    """Where a kernel of ours lies in a module of theirs."""

    module: str  # ours
    part: int  # of their outputs, where several kernels are one tensor
    read: tuple[int, ...]  # sizes
    written: tuple[int, ...]


def load(folder: str | Path, config: Config) -> tuple[LoRA, Params]:
    """A LoRA of a model of ``config``, float32 or better.

    Where kernels of ours are one tensor of theirs (a GPT-2's queries, keys and values), each gets the same ``a``.

    Args:
      folder: with the two files.
      config: of the model that it was made for.

    Returns:
      ``(LoRA, adapter)``, the latter as of `jaxgrow.lora.init`.

    Raises:
      CheckpointError: a file that is missing or damaged, a LoRA that is more than one, or one of another model.
    """
    folder = Path(folder).expanduser()
    about = read_json(inside(folder, CONFIG))
    wrong = [f"{key} is {about[key]!r}" for key, plain in _PLAIN.items() if about.get(key) not in plain]
    rank, alpha = about.get("r"), about.get("lora_alpha")
    if about.get("peft_type") != "LORA" or wrong or type(rank) is not int or not isinstance(alpha, int | float):
        raise CheckpointError(
            f"{folder / CONFIG} is of no plain LoRA: peft_type {about.get('peft_type')!r}, r {rank!r}, lora_alpha {alpha!r}"
            f"{''.join(', ' + w for w in wrong)}; merge it into its model in PEFT, and take that"
        )
    stored = safetensors.header(inside(folder, WEIGHTS))
    leaves: dict[str, np.ndarray] = {}
    for name, places in _places(config).items():
        of = [[name.format(layers=i) + f".lora_{x}.weight" for i in range(config.layers)] for x in "AB"]
        if not any(tensor in stored for names in of for tensor in names):
            continue
        if missing := [tensor for names in of for tensor in names if tensor not in stored]:
            raise CheckpointError(f"{folder / WEIGHTS} lacks {listed(missing)}: a LoRA is in all layers, or in none")
        for place in places:
            inputs, outputs = (int(np.prod(s)) for s in (place.read, place.written))
            first = place.part * outputs
            shapes = (rank, inputs), ((1 + max(p.part for p in places)) * outputs, rank)
            a, b = (np.stack([_read(stored[n], s) for n in names]) for names, s in zip(of, shapes, strict=True))
            leaves[f"{place.module}/a"] = a.swapaxes(1, 2).reshape(-1, *place.read, rank)
            b = b[:, first : first + outputs]
            leaves[f"{place.module}/b"] = b.swapaxes(1, 2).reshape(-1, rank, *place.written)
    modules = tuple(dict.fromkeys(path.rpartition("/")[0] for path in leaves))
    known = {name.format(layers=i) for name in _places(config) for i in range(config.layers)}
    if unknown := [name for name in stored if name.rpartition(".lora_")[0] not in known]:
        raise CheckpointError(
            f"{folder / WEIGHTS} has {listed(unknown)}: the layers of this {type(config).__name__} have no such kernels"
        )
    if not modules:
        raise CheckpointError(f"{folder / WEIGHTS} is empty")
    return LoRA(rank, float(alpha), modules), nested(leaves)


def _read(tensor: safetensors.Tensor, shape: tuple[int, ...]) -> np.ndarray:
    if tensor.shape != shape:
        raise CheckpointError(
            f"{tensor.name} in {tensor.file} has shape {tensor.shape}, but the model makes it {shape}"
        )
    x = tensor.read()
    return x if x.dtype.itemsize >= 4 else x.astype(np.float32)


def save(folder: str | Path, config: Config, lora: LoRA, adapter: Params) -> None:
    """Writes a LoRA for PEFT; the folder appears whole or not at all.

    Where n kernels of ours that have one are one tensor of theirs, their factors lie side by side: then all have n times the
    rank, filled up with zeros.

    Args:
      folder: a new one.
      config: of the model.
      lora: of the adapter.
      adapter: as of `jaxgrow.lora.init`.

    Raises:
      CheckpointError: the folder exists, or no architecture has such a model, or not such kernels.
    """
    leaves = {path: np.asarray(x) for path, x in flat(adapter).items()}
    mine = set(kernels(lora, config.axes()))
    groups = {name: [p for p in places if p.module in mine] for name, places in _places(config).items()}
    if lost := mine - {p.module for places in groups.values() for p in places}:
        raise CheckpointError(
            f"no layer's kernel in PEFT's layout: {listed(sorted(lost))}; merge it (jaxgrow.lora.merge)"
        )
    rank = lora.rank * max(map(len, groups.values()))
    tensors: dict[str, np.ndarray] = {}
    for name, mine_here in groups.items():
        if not mine_here:
            continue
        parts = 1 + max(p.part for p in _places(config)[name])
        inputs, outputs = (int(np.prod(s)) for s in (mine_here[0].read, mine_here[0].written))
        a = np.zeros((config.layers, rank, inputs), leaves[f"{mine_here[0].module}/a"].dtype)
        b = np.zeros((config.layers, parts * outputs, rank), a.dtype)
        for i, place in enumerate(mine_here):
            at, out = (slice(n * size, (n + 1) * size) for n, size in ((i, lora.rank), (place.part, outputs)))
            a[:, at] = leaves[f"{place.module}/a"].reshape(config.layers, inputs, -1).swapaxes(1, 2)
            b[:, out, at] = leaves[f"{place.module}/b"].reshape(config.layers, -1, outputs).swapaxes(1, 2)
        for layer in range(config.layers):
            module = name.format(layers=layer)
            tensors |= {f"{module}.lora_A.weight": a[layer], f"{module}.lora_B.weight": b[layer]}
    modules = sorted({name.partition(".lora_")[0].removeprefix(PREFIX) for name in tensors})
    about = {"peft_type": "LORA", "r": rank, "lora_alpha": lora.scale * rank, "target_modules": modules, "bias": "none"}
    about |= {"lora_dropout": 0.0, "fan_in_fan_out": _reads_first(config), "inference_mode": True}
    planned = [safetensors.Planned(n, x.dtype, x.shape, lambda x=x: x) for n, x in tensors.items()]
    with appearing(Path(folder).expanduser(), [], False) as part:
        safetensors.write_file(part / WEIGHTS, planned)
        write_json(part / CONFIG, about)


def _stored(config: Config) -> dict[str, Stored]:
    """Where the kernels of layers lie, by our modules."""
    names = family_for(config, None)[0].names(config)
    return {p.removesuffix("/kernel"): s for p, s in names.items() if p.endswith("/kernel") and "{layers}" in s.name}


def _places(config: Config) -> dict[str, list[_Place]]:
    """By the names of their modules, with ``{layers}``."""
    out: dict[str, list[_Place]] = {}
    stored, sizes = _stored(config), config.sizes()
    for module, names in kernels(LoRA(targets=tuple(stored)), config.axes()).items():
        kernel = cut(names)
        read, written = (tuple(sizes[axis(n)] for n in of) for of in (kernel.read, kernel.written))
        name = PREFIX + stored[module].name.removesuffix(".weight")
        out.setdefault(name, []).append(_Place(module, stored[module].part or 0, read, written))
    return out


def _reads_first(config: Config) -> bool:
    """Whether their kernels lie input first, as a GPT-2's."""
    module, stored = next(iter(_stored(config).items()))
    read = cut(kernels(LoRA(targets=(module,)), config.axes())[module]).read
    return stored.layout.replace("(", " ").split()[0] == axis(read[0])

"""LoRAs in the layout of Hugging Face's PEFT: ``adapter_config.json`` and ``adapter_model.safetensors``.

A kernel's factors are ``base_model.model.<module>.lora_A.weight`` [r, in] and ``.lora_B.weight`` [out, r], a layer each, where
PyTorch computes ``x W.T + alpha / r x A.T B.T``. Modules are named as `jaxgrow.interop.families` has it. So a LoRA that
somebody has can be read, grown with its model, and written again::

    own, adapter = load("their-lora", config)
    own_growth = lora.growth(growth, own, config.axes())
    grown = grow(own_growth, adapter, lora.axes_of(own, config.axes()))
    save("grown-lora", config.resized(growth), own.resized(own_growth), grown)
"""

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxgrow.axes import Params, axis, cut
from jaxgrow.interop import safetensors
from jaxgrow.interop.family import Stored
from jaxgrow.interop.files import CheckpointError, inside, listed, read_json, write_json
from jaxgrow.interop.folders import appearing
from jaxgrow.interop.huggingface import family_for
from jaxgrow.interop.source import flat, nested
from jaxgrow.lora import LoRA, kernels
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
    parts: int
    read: tuple[int, ...]  # sizes
    written: tuple[int, ...]

    @property
    def inputs(self) -> int:
        return math.prod(self.read)

    @property
    def outputs(self) -> int:
        return math.prod(self.written)

    @property
    def rows(self) -> slice:
        """Its outputs, among those of the module."""
        return slice(self.part * self.outputs, (self.part + 1) * self.outputs)


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
    rank, alpha = _settings(inside(folder, CONFIG))
    file = inside(folder, WEIGHTS)
    stored = safetensors.header(file)
    leaves: dict[str, np.ndarray] = {}
    every = _places(config)
    for name, places in every.items():
        if not any(tensor in stored for tensor in _names(name, "A", config) + _names(name, "B", config)):
            continue
        of = places[0]
        a = safetensors.stacked(stored, file, _names(name, "A", config), (rank, of.inputs))
        b = safetensors.stacked(stored, file, _names(name, "B", config), (of.parts * of.outputs, rank))
        for place in places:
            leaves[f"{place.module}/a"] = a.swapaxes(1, 2).reshape(-1, *place.read, rank)
            leaves[f"{place.module}/b"] = b[:, place.rows].swapaxes(1, 2).reshape(-1, rank, *place.written)
    known = {tensor for name in every for x in "AB" for tensor in _names(name, x, config)}
    if unknown := [tensor for tensor in stored if tensor not in known]:
        raise CheckpointError(
            f"{file} has {listed(unknown)}: the layers of this {type(config).__name__} have no such kernels"
        )
    if not leaves:
        raise CheckpointError(f"{file} is empty")
    return LoRA(rank, alpha, tuple(dict.fromkeys(path.rpartition("/")[0] for path in leaves))), nested(leaves)


def _settings(file: Path) -> tuple[int, float]:
    """``(rank, alpha)``."""
    about = read_json(file)
    wrong = [f"{key} {about[key]!r}" for key, plain in _PLAIN.items() if about.get(key) not in plain]
    kind, rank, alpha = (about.get(key) for key in ("peft_type", "r", "lora_alpha"))
    if kind == "LORA" and not wrong and type(rank) is int and isinstance(alpha, int | float) and min(rank, alpha) > 0:
        return rank, float(alpha)
    said = ", ".join([f"peft_type {kind!r}, r {rank!r}, lora_alpha {alpha!r}", *wrong])
    raise CheckpointError(f"{file} is of no plain LoRA: {said}; merge it into its model with PEFT, and take that")


def _names(name: str, factor: str, config: Config) -> list[str]:
    """The tensors of a factor, by layers."""
    return [f"{name.format(layers=layer)}.lora_{factor}.weight" for layer in range(config.layers)]


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
            f"{', '.join(sorted(lost))}: no kernel of a layer in PEFT's layout; merge the LoRA (jaxgrow.lora.merge)"
        )
    rank = lora.rank * max(map(len, groups.values()))
    tensors: dict[str, np.ndarray] = {}
    for name, places in groups.items():
        if places:
            a, b = _factors(places, leaves, rank, lora.rank)
            tensors |= dict(zip(_names(name, "A", config), a, strict=True))
            tensors |= dict(zip(_names(name, "B", config), b, strict=True))
    modules = sorted({name.partition(".lora_")[0].removeprefix(PREFIX) for name in tensors})
    about = {"peft_type": "LORA", "r": rank, "lora_alpha": lora.scale * rank, "target_modules": modules, "bias": "none"}
    about |= {"lora_dropout": 0.0, "fan_in_fan_out": _reads_first(config), "inference_mode": True}
    planned = [safetensors.Planned(n, x.dtype, x.shape, lambda x=x: x) for n, x in tensors.items()]
    with appearing(Path(folder), [], False) as part:
        safetensors.write_file(part / WEIGHTS, planned)
        write_json(part / CONFIG, about)


def _factors(
    places: list[_Place], leaves: Mapping[str, np.ndarray], rank: int, own: int
) -> tuple[np.ndarray, np.ndarray]:
    """A [layers, rank, in] and B [layers, out, rank] of one module: of each kernel, of rank ``own``, a part."""
    of, like = places[0], leaves[f"{places[0].module}/a"]
    a = np.zeros((len(like), rank, of.inputs), like.dtype)
    b = np.zeros((len(like), of.parts * of.outputs, rank), like.dtype)
    for i, place in enumerate(places):
        at = slice(i * own, (i + 1) * own)
        a[:, at] = leaves[f"{place.module}/a"].reshape(len(like), of.inputs, own).swapaxes(1, 2)
        b[:, place.rows, at] = leaves[f"{place.module}/b"].reshape(len(like), own, of.outputs).swapaxes(1, 2)
    return a, b


def _stored(config: Config) -> dict[str, Stored]:
    """Where the kernels of layers lie, by our modules; but for experts and routers, which PEFT has no such LoRA of."""
    names = family_for(config, None)[0].names(config)
    kernels = {p.removesuffix("/kernel"): s for p, s in names.items() if p.endswith("/kernel") and "{layers}" in s.name}
    return {module: s for module, s in kernels.items() if "experts" not in f"{s.name} {s.layout}"}


def _places(config: Config) -> dict[str, list[_Place]]:
    """By the names of their modules, with ``{layers}``."""
    out: dict[str, list[_Place]] = {}
    stored, sizes = _stored(config), config.sizes()
    together = Counter(s.name for s in stored.values())
    for module, names in kernels(LoRA(targets=tuple(stored)), config.axes()).items():
        kernel, where = cut(names), stored[module]
        read, written = (tuple(sizes[axis(n)] for n in of) for of in (kernel.read, kernel.written))
        place = _Place(module, where.part or 0, together[where.name], read, written)
        out.setdefault(PREFIX + where.name.removesuffix(".weight"), []).append(place)
    return out


def _reads_first(config: Config) -> bool:
    """Whether their kernels lie input first, as a GPT-2's."""
    module, stored = next(iter(_stored(config).items()))
    read = cut(kernels(LoRA(targets=(module,)), config.axes())[module]).read
    return stored.layout.replace("(", " ").split()[0] == axis(read[0])

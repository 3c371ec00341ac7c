"""How are LoRAs read and written in the layout of Hugging Face's PEFT?

A LoRA in this layout has the files ``adapter_config.json`` and ``adapter_model.safetensors``. A
LoRA that was trained with PEFT can be read, grown with its model, and written again::

    own = peft.load("their-lora", config)
    peft.save("grown-lora", own.grown(growth))

The factors of the kernel of one layer are ``base_model.model.<module>.lora_A.weight`` [rank,
inputs] and ``.lora_B.weight`` [outputs, rank]. PyTorch computes ``x W.T + scale x A.T B.T`` with
them. The modules are named as in the base model (`jaxgrow.checkpoints.hf.registry`), and the
outputs of a fused tensor are divided among the kernels as in the base model. `Stored.factors`
derives the layout of the factors from the layout of the weight.

A `jaxgrow.peft.lora.LoRA` has one rank and one scale. When a module with a smaller rank is read
(``rank_pattern``, ``layers_to_transform``), its factors are padded with zeros. Another scale is
multiplied into ``b`` (``alpha_pattern``, ``use_rslora``). `save` removes zeros, and writes
differing ranks as ``rank_pattern``. The magnitudes of a DoRA are kept as gains
(`jaxgrow.checkpoints.hf.dora`), for which the kernels of the base model are read.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxgrow.axes.names import READ, Kernel, Params, axis, cut, layers_of
from jaxgrow.checkpoints._transform import open_checkpoint
from jaxgrow.checkpoints.hf import dora
from jaxgrow.checkpoints.hf.base import Family, Stored
from jaxgrow.checkpoints.hf.peft_settings import Settings
from jaxgrow.checkpoints.hf.registry import FAMILIES
from jaxgrow.checkpoints.hf.storage import family_for
from jaxgrow.checkpoints.io import safetensors
from jaxgrow.checkpoints.io.files import ADAPTER, CheckpointError, inside, listed, spelt, write_json
from jaxgrow.checkpoints.io.folders import appearing
from jaxgrow.checkpoints.source import Checkpoint, Source, flat, initial_layout, nested
from jaxgrow.growth.apply import grow, grow_leaf
from jaxgrow.growth.maps import Growth, terms
from jaxgrow.models import Config
from jaxgrow.peft import lora
from jaxgrow.peft.lora import RANK, LoRA

(CONFIG, WEIGHTS), PREFIX = ADAPTER, "base_model.model."
# These keys are copied from the file that was read.
_CARRIED = ("task_type", "auto_mapping", "lora_dropout", "inference_mode")


@dataclass(frozen=True)
class PeftAdapter:
    """A LoRA, with the settings and the complete leaves that PEFT stores in the same files.

    Attributes:
      config: the config of the adapted model, with the head that the adapter holds.
      lora: the rank, the scale and the modules.
      factors: the factors, as from `jaxgrow.peft.lora.init`.
      gains: the gain of each output of the kernels of a DoRA, ``[layers, *outputs]``, by module;
        empty for a LoRA.
      saved: complete trained leaves of the model, by path (``modules_to_save``). They replace the
        leaves of the base model.
      about: the ``adapter_config.json`` that was read.
      family: the architecture after which the modules are named; None: any architecture that stores
        ``config``.
      older: whether the modules have the names of transformers 4, where transformers 5 has
        other names.
    """

    config: Config
    lora: LoRA
    factors: Params
    gains: Mapping[str, np.ndarray] = field(default_factory=dict)
    saved: Mapping[str, np.ndarray] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    family: Family | None = None
    older: bool = False

    def grown(self, growth: Growth) -> "PeftAdapter":
        """Return the adapter of the grown model.

        The factors grow by `jaxgrow.peft.lora.growth`. Complete leaves grow like the leaves of the
        model.

        Args:
          growth: the growth of the model.

        Raises:
          ValueError: as from `jaxgrow.peft.lora.growth` and `jaxgrow.grow`, or the growth of a DoRA
            is not a DoRA.
        """
        axes, names = self.config.axes(), initial_layout(self.config)
        rules = lora.growth(growth, self.lora, axes)
        return replace(
            self,
            config=self.config.resized(growth),
            lora=self.lora.resized(rules),
            factors=grow(rules, self.factors, lora.axes_of(self.lora, axes)),
            gains={
                module: dora.grown(
                    gain,
                    terms(growth, f"{module}/kernel", names[f"{module}/kernel"][0]),
                    kernel,
                    module,
                )
                for module, gain in self.gains.items()
                for kernel in [cut(names[f"{module}/kernel"][0])]
            },
            saved={
                p: np.asarray(grow_leaf(terms(growth, p, names[p][0]), names[p][0], x))
                for p, x in self.saved.items()
            },
        )

    def merged(self, params: Params) -> Params:
        """Merge the adapter into the parameters of the base model.

        Args:
          params: the parameters of the base model, which may have another head.

        Returns:
          The parameters of the adapted model.

        Raises:
          ValueError: neither the model nor the adapter has all leaves.
        """
        leaves = flat(params) | dict(self.saved)
        if lost := initial_layout(self.config).keys() - leaves:
            raise ValueError(f"neither the model nor the adapter has {', '.join(sorted(lost))}")
        merged = lora.merge(
            nested({path: leaves[path] for path in initial_layout(self.config)}),
            self.factors,
            self.lora,
        )
        kernels = {
            module: cut(initial_layout(self.config)[f"{module}/kernel"][0]) for module in self.gains
        }
        return nested(dora.multiplied(flat(merged), self.gains, kernels))


class _Names(NamedTuple):
    """An architecture, and the version of transformers after which the modules are named."""

    family: Family
    older: bool  # names of transformers 4

    def of(self, config: Config) -> dict[str, Stored]:
        """The place of each leaf, by the names of the modules."""
        names = self.family.names(config)
        return (
            names
            if self.older
            else {p: replace(s, name=self.family.in_memory(s.name)) for p, s in names.items()}
        )


class _Factors(NamedTuple):
    """The places of the two factors of a kernel, which has one tensor of each for each layer."""

    module: str  # its path in jaxgrow
    kernel: Kernel
    a: Stored
    b: Stored

    @property
    def magnitude(self) -> Stored:
        """The place of the magnitudes of a DoRA, one for each output."""
        name = self.b.name.replace("lora_B.weight", "lora_magnitude_vector")
        return replace(self.b, name=name, layout=self.b.layout.removesuffix(f" {RANK}"))


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
    settings, file = Settings(inside(folder, CONFIG)), inside(folder, WEIGHTS)
    stored = safetensors.header(file)
    stored = {name.removeprefix(PREFIX): tensor for name, tensor in stored.items()}
    base = open_checkpoint(like) if isinstance(like, str | Path) else like
    config, names = _model(config, base, settings, stored)
    found = _Found(settings, file, stored)
    own, factors = _read_factors(found, names, config)
    gains = _read_gains(found, names, config, own, factors, base) if settings.dora else {}
    saved = _read_saved(found, names, config)
    if unknown := [name for name in found.tensors if name not in found.known]:
        raise CheckpointError(
            f"{file} has {listed(unknown)}. Either the layers of {names.family.architecture} do not have such kernels, or "
            f"{CONFIG} does not name their modules"
        )
    return PeftAdapter(config, own, factors, gains, saved, settings.about, *names)


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
            f"{folder}: the head of this adapter needs {', '.join(lost)}, which neither it nor {base.folder} has. Load the "
            "base model with that head in transformers, and save it"
        )
    return own


class _Found:
    """The tensors of an adapter, and the names of the tensors that have been read."""

    def __init__(self, settings: Settings, file: Path, tensors: Mapping[str, safetensors.Tensor]):
        self.settings, self.file, self.tensors = settings, file, tensors
        self.known: set[str] = set()

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        self.known.add(name)
        return safetensors.stacked(self.tensors, self.file, [name], shape)[0]

    def need(self, names: list[str]) -> None:
        """Check that the adapter has these tensors.

        Raises:
          CheckpointError: some of them are missing.
        """
        if missing := [name for name in names if name not in self.tensors]:
            raise CheckpointError(
                f"{self.file} lacks {listed(missing)}, which {CONFIG} requires. Is it the adapter of another model?"
            )


def _read_factors(found: _Found, names: _Names, config: Config) -> tuple[LoRA, Params]:
    settings, sizes, groups = found.settings, config.sizes(), _places(names, config)
    targets = {
        (pattern, layer): pattern.format(layers=layer)
        for pattern, group in groups.items()
        for layer in range(_layers(group, sizes))
        if settings.targets(pattern.format(layers=layer))
    }
    found.need([f"{module}.lora_{x}.weight" for module in targets.values() for x in "AB"])
    if not targets:
        raise CheckpointError(
            f"{found.file} has no LoRA of a kernel in the layers of {names.family.architecture}"
        )
    rank = max(settings.rank(module) for module in targets.values())
    scale = settings.scale(next(iter(targets.values())))
    leaves: dict[str, np.ndarray] = {}
    for (pattern, layer), module in targets.items():
        own = settings.rank(module)
        sizes[RANK], times = own, settings.scale(module) / scale
        for place in groups[pattern]:
            for leaf, factor, axes in _sides(place):
                x = found.read(factor.name.format(layers=layer), factor.shape(axes, sizes))
                x = factor.ours(x, axes, sizes)
                shape = [rank if axis(n) == RANK else sizes[axis(n)] for n in axes]
                path = f"{place.module}/{leaf}"
                if path not in leaves:
                    leaves[path] = np.zeros((_layers([place], sizes), *shape), x.dtype)
                part = leaves[path][layer]
                (part[..., :own] if leaf == "a" else part[:own])[...] = (
                    x if leaf == "a" else times * x
                )
    return LoRA(
        rank, scale * rank, tuple(dict.fromkeys(path.rpartition("/")[0] for path in leaves))
    ), nested(leaves)


def _read_gains(
    found: _Found, names: _Names, config: Config, own: LoRA, factors: Params, base: Source | None
) -> dict[str, np.ndarray]:
    """Read the gains of a DoRA. They are 1 in layers without a DoRA."""
    if base is None:
        raise CheckpointError(
            f"{found.settings.file}: use_dora is true. The magnitudes of a DoRA are norms of the kernels of its base model: "
            "give the folder of the base model (in Python: like=...)"
        )
    out, leaves, sizes = {}, flat(factors), config.sizes()
    for pattern, group in _places(names, config).items():
        targets = [
            i
            for i in range(_layers(group, sizes))
            if found.settings.targets(pattern.format(layers=i))
        ]
        for place in group if targets else ():
            axes, stored = place.kernel.written, place.magnitude
            gain = np.ones((_layers([place], sizes), *(sizes[axis(n)] for n in axes)), np.float32)
            for layer in targets:
                found.need([name := stored.name.format(layers=layer)])
                magnitude = stored.ours(found.read(name, stored.shape(axes, sizes)), axes, sizes)
                gain[layer] = magnitude / _norms(place, base, layer, own, leaves)
            out[place.module] = gain
    return out


def _norms(
    place: _Factors, base: Source, layer: int, own: LoRA, leaves: Mapping[str, np.ndarray]
) -> np.ndarray:
    a, b = (np.asarray(leaves[f"{place.module}/{leaf}"][layer]) for leaf in "ab")
    return dora.norms(base, place.module, place.kernel, layer, own, a, b)


def _read_saved(found: _Found, names: _Names, config: Config) -> dict[str, np.ndarray]:
    """Read the complete leaves that the adapter holds."""
    out, sizes = {}, config.sizes()
    for path, stored in names.of(config).items():
        if not found.settings.saves(stored.name.rpartition(".")[0]):
            continue
        if path == "token_embedding" and getattr(config, "tied", False):
            raise CheckpointError(
                f"{found.file} has {stored.name}, but the head of this model is tied to it, and PEFT trains the one without "
                "the other. Merge the adapter into its model with PEFT (merge_and_unload), and grow the merged model"
            )
        axes, shape = initial_layout(config)[path]
        layers = stored.layers(range(shape[0]) if layers_of(axes) else (None,))
        tensors = [stored.name.format(layers=layer) for layer in layers]
        found.need(tensors)
        read = [stored.ours(found.read(n, stored.shape(axes, sizes)), axes, sizes) for n in tensors]
        # Layers below the first stored layer keep the value 1.
        out[path] = np.ones(shape, read[0].dtype)
        out[path][stored.first :] = read if layers_of(axes) else read[0]
    return out


def _sides(place: _Factors) -> Iterator[tuple[str, Stored, tuple[str, ...]]]:
    """Yield the two factors of the kernel of one layer: leaf, place, and axes."""
    yield "a", place.a, (*place.kernel.read, RANK)
    yield "b", place.b, (RANK + READ, *place.kernel.written)


def _places(names: _Names, config: Config) -> dict[str, list[_Factors]]:
    """Return the kernels of layers by the module of the base model, with ``{layers}`` in its name.

    Experts and routers are not included, because PEFT has no LoRA for them that can be read here.
    """
    out: dict[str, list[_Factors]] = {}
    for path, stored in names.of(config).items():
        if (
            path.endswith("/kernel")
            and "{layers}" in stored.name
            and "experts" not in f"{stored.name} {stored.layout}"
        ):
            axes = initial_layout(config)[path][0]
            of = _Factors(path.removesuffix("/kernel"), cut(axes), *stored.factors(axes))
            out.setdefault(stored.name.removesuffix(".weight"), []).append(of)
    return out


def _layers(group: list[_Factors], sizes: Mapping[str, int]) -> int:
    return sizes[axis(group[0].kernel.stacked[0])]


# --- the architecture after which the modules are named ---


def _model(
    config: Config, base: Checkpoint | None, settings: Settings, stored: Mapping[str, Any]
) -> tuple[Config, _Names]:
    """Return the config of the adapted model, and the names that most of the tensors have."""
    if settings.task is not None and config.predicts != settings.task[0]:
        config = _with_head(config, settings, stored)
    modules = {name.partition(".lora_")[0] for name in stored if ".lora_" in name}
    families = (
        _families(config) if base is None or base.foreign is None else [_family(config, base)]
    )
    candidates = [_Names(family, older) for family in families for older in (False, True)]

    def known(names: _Names) -> int:
        sizes, groups = config.sizes(), _places(names, config)
        return len(
            modules
            & {
                p.format(layers=i)
                for p, group in groups.items()
                for i in range(_layers(group, sizes))
            }
        )

    return config, max(candidates, key=known)


def _with_head(config: Config, settings: Settings, stored: Mapping[str, Any]) -> Config:
    """Return the config with the head of the adapter's task, and with the classes in the file."""
    assert settings.task is not None
    head, modules = settings.task
    ends = tuple(f"{module}{of}.weight" for module in modules for of in ("", ".out_proj"))
    shapes = [tensor.shape for name, tensor in stored.items() if name.endswith(ends)]
    change: Any = getattr(config, "with_head", None)
    if len(shapes) != 1 or change is None:
        raise CheckpointError(
            f"{settings.file}: task_type is {spelt(settings.about['task_type'])}, but the adapter has no head of that task, "
            f"{' or '.join(modules)}, that fits this {type(config).__name__}"
        )
    return change(head, shapes[0][0])


def _families(config: Config) -> list[Family]:
    """Return the architectures that store a model of ``config``.

    Raises:
      CheckpointError: none does.
    """
    out = [family_for(config, None)[0]]
    for family in FAMILIES.values():
        try:
            if (
                family.config is type(config)
                and family.has_head(config)
                and family.mixture == out[0].mixture
            ):
                family.theirs(config)
                out.append(family)
        except ValueError:
            continue
    return out


def _family(config: Config, base: Checkpoint) -> Family:
    """Return the architecture of a base model with the head of ``config``."""
    return family_for(config, base.foreign)[0]


def _check_base(adapter: PeftAdapter, base: Source | None) -> None:
    """Check that a DoRA has a base model.

    Raises:
      CheckpointError: it has none.
    """
    if adapter.gains and base is None:
        raise CheckpointError(
            "the adapter is a DoRA, whose magnitudes are norms of the kernels of its base model: give its folder (like=...)"
        )


# --- writing ---


def save(
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
        adapter = replace(adapter, family=_family(adapter.config, base))
    _check_base(adapter, base)
    with appearing(Path(folder), [], overwrite) as part:
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
      CheckpointError: as `save`.
    """
    _check_base(adapter, of)
    config, names = (
        adapter.config,
        _Names(adapter.family or _families(adapter.config)[0], adapter.older),
    )
    tensors, ranks = _factor_tensors(adapter, names, of)
    rank = Counter(ranks.values()).most_common(1)[0][0]
    other = {module: r for module, r in ranks.items() if r != rank}
    saved, whole = _saved_tensors(adapter, names)
    about = {key: adapter.about[key] for key in _CARRIED if key in adapter.about}
    about |= {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "target_modules": list(ranks),
        "bias": "none",
    }
    about |= {
        "r": rank,
        "lora_alpha": adapter.lora.scale * rank,
        "fan_in_fan_out": _reads_first(names.family, config),
    }
    if adapter.gains:
        about["use_dora"] = True
    if other:
        about |= {
            "rank_pattern": other,
            "alpha_pattern": {m: adapter.lora.scale * r for m, r in other.items()},
        }
    if whole:
        about["modules_to_save"] = adapter.about.get("modules_to_save") or whole
    content = {PREFIX + name: np.ascontiguousarray(x) for name, x in (tensors | saved).items()}
    planned = [safetensors.Planned(n, x.dtype, x.shape, lambda x=x: x) for n, x in content.items()]
    safetensors.write_file(folder / WEIGHTS, planned)
    write_json(folder / CONFIG, {"inference_mode": True, "lora_dropout": 0.0, **about})
    return list(ADAPTER)


def _factor_tensors(
    adapter: PeftAdapter, names: _Names, base: Source | None
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Return the tensors of the factors, and the rank of each module that has a LoRA."""
    config, leaves = (
        adapter.config,
        {path: np.asarray(x) for path, x in flat(adapter.factors).items()},
    )
    mine, sizes = set(lora.kernels(adapter.lora, config.axes())), config.sizes()
    groups = {
        pattern: [p for p in of if p.module in mine]
        for pattern, of in _places(names, config).items()
    }
    if lost := mine - {place.module for group in groups.values() for place in group}:
        raise CheckpointError(
            f"{', '.join(sorted(lost))}: the layers of {names.family.architecture} do not have such a kernel, so PEFT cannot "
            "have a LoRA there. Merge the LoRA (jaxgrow.peft.lora.merge)"
        )
    tensors, ranks = {}, {}
    for pattern, group in groups.items():
        for layer in range(_layers(group, sizes) if group else 0):
            a, b = _module(group, leaves, layer, {**sizes, RANK: adapter.lora.rank})
            live = np.logical_or(a.any(1), b.any(0))
            if adapter.gains and base is not None:
                magnitudes = _magnitudes(group, adapter, leaves, layer, base)
                live = live | (np.arange(len(live)) == 0) if magnitudes else np.zeros_like(live)
                tensors |= magnitudes
            if live.any():
                module = pattern.format(layers=layer)
                tensors |= {
                    f"{module}.lora_A.weight": a[live],
                    f"{module}.lora_B.weight": b[:, live],
                }
                ranks[module] = int(live.sum())
    if not ranks:
        raise CheckpointError("all factors of the LoRA are zero, so there is nothing to write")
    return tensors, ranks


def _magnitudes(
    group: list[_Factors],
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
    norms = [_norms(place, base, layer, adapter.lora, leaves) for place in group]
    unchanged = all(
        (gain == 1).all() and not leaves[f"{p.module}/b"][layer].any()
        for p, gain in zip(group, gains, strict=True)
    )
    if unchanged or not any(norm.any() for norm in norms):
        return out
    if not all(norm.all() for norm in norms):
        raise CheckpointError(
            f"{group[0].module}: some outputs of layer {layer} have only zero weights, and a DoRA divides by their norm. "
            "Merge the DoRA into its model with PEFT (merge_and_unload), and grow the merged model"
        )
    for place, gain, norm in zip(group, gains, norms, strict=True):
        stored = place.magnitude
        name = stored.name.format(layers=layer)
        out[name] = stored.theirs(gain * norm, place.kernel.written, sizes, out.get(name))
    return out


def _module(
    group: list[_Factors], leaves: Mapping[str, np.ndarray], layer: int, sizes: Mapping[str, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return A [rank, inputs] and B [outputs, rank] of a module from the factors of its kernels."""
    a: list[np.ndarray] = []
    b: list[np.ndarray] = []
    for place in group:
        x, y = (
            s.theirs(leaves[f"{place.module}/{leaf}"][layer], names, sizes)
            for leaf, s, names in _sides(place)
        )
        same = next((i for i, other in enumerate(a) if np.array_equal(other, x)), None)
        if same is None:
            a.append(x)
            b.append(y)
        else:  # each is zero at the outputs of the other, so the sum keeps both
            b[same] = b[same] + y
    return np.concatenate(a), np.concatenate(b, 1)


def _saved_tensors(adapter: PeftAdapter, names: _Names) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return the tensors of the complete leaves, and their modules."""
    out: dict[str, np.ndarray] = {}
    sizes = adapter.config.sizes()
    for path, x in adapter.saved.items():
        axes, stored = initial_layout(adapter.config)[path][0], names.of(adapter.config)[path]
        layers = stored.layers(range(len(x)) if layers_of(axes) else (None,))
        for layer in layers:
            name = stored.name.format(layers=layer)
            out[name] = stored.theirs(
                np.asarray(x) if layer is None else np.asarray(x[layer]), axes, sizes, out.get(name)
            )
    return out, sorted({name.rpartition(".")[0] for name in out})


def _reads_first(family: Family, config: Config) -> bool:
    """Whether the kernels of the base model have their inputs first, as in GPT-2."""
    layered = {
        p: s
        for p, s in family.names(config).items()
        if p.endswith("/kernel") and "{layers}" in s.name
    }
    path, stored = next(iter(layered.items()))
    return stored.layout.replace("(", " ").split()[0] == axis(
        cut(initial_layout(config)[path][0]).read[0]
    )

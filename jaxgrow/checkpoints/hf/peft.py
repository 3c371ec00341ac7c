"""LoRAs in the layout of Hugging Face's PEFT: ``adapter_config.json`` and ``adapter_model.safetensors``.

A LoRA that was trained with PEFT can be read, grown with its model, and written again::

    own = peft.load("their-lora", config)
    peft.save("grown-lora", own.grown(growth))

The factors of one layer's kernel are ``base_model.model.<module>.lora_A.weight`` [rank, inputs] and
``.lora_B.weight`` [outputs, rank], where PyTorch computes ``x W.T + scale x A.T B.T``. Modules have
the names of the base model (`jaxgrow.checkpoints.hf.registry`), and outputs are divided among
kernels as those of the base model: `Stored.factors` derives the layout of the factors from that of
the weight.

A `jaxgrow.peft.lora.LoRA` has one rank and one scale. Modules of a smaller rank are filled up with
zeros when they are read (``rank_pattern``, ``layers_to_transform``), and another scale is
multiplied into ``b`` (``alpha_pattern``, ``use_rslora``). `save` leaves zeros out, and writes ranks
that differ as ``rank_pattern``. The magnitudes of a DoRA are kept as gains
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
from jaxgrow.checkpoints.source import Checkpoint, Source, born, flat, nested
from jaxgrow.growth.apply import grow, grow_leaf
from jaxgrow.growth.maps import Growth, terms
from jaxgrow.models import Config
from jaxgrow.peft import lora
from jaxgrow.peft.lora import RANK, LoRA

(CONFIG, WEIGHTS), PREFIX = ADAPTER, "base_model.model."
_CARRIED = (
    "task_type",
    "auto_mapping",
    "lora_dropout",
    "inference_mode",
)  # from the file that was read


@dataclass(frozen=True)
class PeftAdapter:
    """A LoRA with what PEFT stores beside it.

    Attributes:
      config: of the adapted model. It has the head that the adapter holds.
      lora: the rank, the scale and the modules.
      factors: as of `jaxgrow.peft.lora.init`.
      gains: of a DoRA, the factor of each output of the kernels, [layers, *outputs] by module;
        empty for a LoRA.
      saved: trained copies of whole leaves of the model, by path (``modules_to_save``). They
        replace the model's own.
      about: the ``adapter_config.json`` that was read.
      family: the architecture whose names the modules have; None: any that stores ``config``.
      older: whether the modules have the names of transformers 4, where those differ.
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
        """The adapter of the model that has grown by ``growth``.

        The factors grow by `jaxgrow.peft.lora.growth`, and whole leaves as those of the model.

        Raises:
          ValueError: as of `jaxgrow.peft.lora.growth` and `jaxgrow.grow`, or the growth makes no
            DoRA of a DoRA.
        """
        axes, names = self.config.axes(), born(self.config)
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
        """The parameters of the adapted model, without an adapter.

        Args:
          params: of the base model, which may have another head.
        """
        leaves = flat(params) | dict(self.saved)
        if lost := born(self.config).keys() - leaves:
            raise ValueError(f"neither the model nor the adapter has {', '.join(sorted(lost))}")
        merged = lora.merge(
            nested({path: leaves[path] for path in born(self.config)}), self.factors, self.lora
        )
        kernels = {module: cut(born(self.config)[f"{module}/kernel"][0]) for module in self.gains}
        return nested(dora.multiplied(flat(merged), self.gains, kernels))


class _Names(NamedTuple):
    """Which names the modules have."""

    family: Family
    older: bool  # those of transformers 4

    def of(self, config: Config) -> dict[str, Stored]:
        """Where our leaves are in the modules."""
        names = self.family.names(config)
        return (
            names
            if self.older
            else {p: replace(s, name=self.family.in_memory(s.name)) for p, s in names.items()}
        )


class _Factors(NamedTuple):
    """Where the factors of a kernel are stored, one tensor for each layer."""

    module: str  # our module
    kernel: Kernel
    a: Stored
    b: Stored

    @property
    def magnitude(self) -> Stored:
        """Where the magnitudes of a DoRA are stored, one for each output."""
        name = self.b.name.replace("lora_B.weight", "lora_magnitude_vector")
        return replace(self.b, name=name, layout=self.b.layout.removesuffix(f" {RANK}"))


def load(
    folder: str | Path, config: Config, like: str | Path | Checkpoint | None = None
) -> PeftAdapter:
    """Read a LoRA of a model of ``config``, float32 or better.

    Where several of our kernels are one tensor of the base model (queries, keys and values of a
    GPT-2), each gets the same ``a``.

    Args:
      folder: with the two files.
      config: of the base model. If the adapter holds the head of another task, the result has a
        config with that head.
      like: the base model, or its folder, whose names the modules have. Without it, the names in
        the file decide. A DoRA needs it: its magnitudes are norms of the kernels of the base model.

    Returns:
      The adapter.

    Raises:
      CheckpointError: a file is missing or damaged, the adapter changes the function in a way that
        is not computed here, or it belongs to another model.
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
            f"{file} has {listed(unknown)}. A {names.family.architecture} has no such kernels in its layers, or {CONFIG} does "
            "not name their modules"
        )
    return PeftAdapter(config, own, factors, gains, saved, settings.about, *names)


def load_beside(folder: str | Path, base: Checkpoint) -> PeftAdapter:
    """Read a LoRA of a checkpoint, as `load` does.

    Raises:
      CheckpointError: as `load`, or the adapter needs a head of which neither it nor the base model
        has all leaves.
    """
    own = load(folder, base.config, base)
    if lost := sorted(born(own.config).keys() - base.leaves.keys() - own.saved.keys()):
        raise CheckpointError(
            f"{folder}: the head of this adapter needs {', '.join(lost)}, which neither it nor {base.folder} has. Load the "
            "base model with that head in transformers, and save that"
        )
    return own


class _Found:
    """The tensors of an adapter, and which of them were read."""

    def __init__(self, settings: Settings, file: Path, tensors: Mapping[str, safetensors.Tensor]):
        self.settings, self.file, self.tensors = settings, file, tensors
        self.known: set[str] = set()

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        self.known.add(name)
        return safetensors.stacked(self.tensors, self.file, [name], shape)[0]

    def need(self, names: list[str]) -> None:
        """
        Raises:
          CheckpointError: some of them are missing.
        """
        if missing := [name for name in names if name not in self.tensors]:
            raise CheckpointError(
                f"{self.file} lacks {listed(missing)}, which belong to it by {CONFIG}; is it the adapter of another model?"
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
            f"{found.file} has no LoRA of a kernel in the layers of a {names.family.architecture}"
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
    """The gains of a DoRA; 1 in layers that have none."""
    if base is None:
        raise CheckpointError(
            f"{found.settings.file}: use_dora is true. The magnitudes of a DoRA are norms of the kernels of its base model: "
            "give the folder of the base model (in Python: like=)"
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
    """The leaves that the adapter holds whole."""
    out, sizes = {}, config.sizes()
    for path, stored in names.of(config).items():
        if not found.settings.saves(stored.name.rpartition(".")[0]):
            continue
        if path == "token_embedding" and getattr(config, "tied", False):
            raise CheckpointError(
                f"{found.file} has {stored.name}, but the head of this model is tied to it, and PEFT trains the one without "
                "the other. Merge the adapter into its model with PEFT (merge_and_unload), and grow the merged model"
            )
        axes, shape = born(config)[path]
        layers = stored.layers(range(shape[0]) if layers_of(axes) else (None,))
        tensors = [stored.name.format(layers=layer) for layer in layers]
        found.need(tensors)
        read = [stored.ours(found.read(n, stored.shape(axes, sizes)), axes, sizes) for n in tensors]
        out[path] = np.ones(shape, read[0].dtype)  # layers below the first one that is stored
        out[path][stored.first :] = read if layers_of(axes) else read[0]
    return out


def _sides(place: _Factors) -> Iterator[tuple[str, Stored, tuple[str, ...]]]:
    """The two factors of one layer's kernel: our leaf, where it is stored, and its axes."""
    yield "a", place.a, (*place.kernel.read, RANK)
    yield "b", place.b, (RANK + READ, *place.kernel.written)


def _places(names: _Names, config: Config) -> dict[str, list[_Factors]]:
    """The kernels of layers by the modules of the base model, which have ``{layers}`` in their names.

    Experts and routers are left out: PEFT has no LoRA for them that could be read here.
    """
    out: dict[str, list[_Factors]] = {}
    for path, stored in names.of(config).items():
        if (
            path.endswith("/kernel")
            and "{layers}" in stored.name
            and "experts" not in f"{stored.name} {stored.layout}"
        ):
            axes = born(config)[path][0]
            of = _Factors(path.removesuffix("/kernel"), cut(axes), *stored.factors(axes))
            out.setdefault(stored.name.removesuffix(".weight"), []).append(of)
    return out


def _layers(group: list[_Factors], sizes: Mapping[str, int]) -> int:
    return sizes[axis(group[0].kernel.stacked[0])]


# --- whose names the modules have ---


def _model(
    config: Config, base: Checkpoint | None, settings: Settings, stored: Mapping[str, Any]
) -> tuple[Config, _Names]:
    """The config of the adapted model, and the names that most of the tensors have."""
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
    """The config with the head of the adapter's task, and as many classes as the head in the file has."""
    assert settings.task is not None
    head, modules = settings.task
    ends = tuple(f"{module}{of}.weight" for module in modules for of in ("", ".out_proj"))
    shapes = [tensor.shape for name, tensor in stored.items() if name.endswith(ends)]
    change: Any = getattr(config, "with_head", None)
    if len(shapes) != 1 or change is None:
        raise CheckpointError(
            f"{settings.file}: task_type is {spelt(settings.about['task_type'])}, but there is no head of that task, named "
            f"{' or '.join(modules)}, for this {type(config).__name__}"
        )
    return change(head, shapes[0][0])


def _families(config: Config) -> list[Family]:
    """The architectures that store a model of ``config``.

    Raises:
      CheckpointError: there is none.
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
    """The architecture of a base model, with the head that ``config`` has."""
    return family_for(config, base.foreign)[0]


def _check_base(adapter: PeftAdapter, base: Source | None) -> None:
    """
    Raises:
      CheckpointError: a DoRA without its base model.
    """
    if adapter.gains and base is None:
        raise CheckpointError(
            "the adapter is a DoRA, whose magnitudes are norms of the kernels of its base model: give its folder (like=)"
        )


# --- writing ---


def save(
    folder: str | Path,
    adapter: PeftAdapter,
    like: str | Path | Checkpoint | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """Write a LoRA for PEFT; the folder appears whole or not at all.

    Where several of our kernels are one tensor of the base model, kernels with equal ``a`` share
    it. Others lie side by side: then the module has the sum of their ranks.

    Args:
      folder: to be made.
      adapter: the LoRA.
      like: the base model, or its folder, whose names the modules shall have. Without it,
        ``adapter.family`` decides. A DoRA needs it.
      overwrite: whether an adapter that is there is replaced, at the end.

    Raises:
      CheckpointError: the folder exists, no architecture stores such a model, or it has no such
        kernels in its layers.
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
    """Write the two files into a folder that exists, and return their names.

    Args:
      folder: the folder.
      adapter: the LoRA.
      of: its base model, whose kernels the magnitudes of a DoRA are computed with.
      base: the name of the base model that the files record.

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
    """The tensors of the factors, and the rank of each module that has any."""
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
            f"{', '.join(sorted(lost))}: a {names.family.architecture} has no such kernel in its layers, so PEFT cannot have a "
            "LoRA there; merge it (jaxgrow.peft.lora.merge)"
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
        raise CheckpointError(
            "the LoRA has no factor that is not zero, so there is nothing to write"
        )
    return tensors, ranks


def _magnitudes(
    group: list[_Factors],
    adapter: PeftAdapter,
    leaves: Mapping[str, np.ndarray],
    layer: int,
    base: Source,
) -> dict[str, np.ndarray]:
    """The magnitudes of one layer's module of a DoRA; nothing if the module adds nothing, or its kernel is not changed.

    Raises:
      CheckpointError: some outputs of the module read nothing, and others do.
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
            f"{group[0].module}: some outputs of layer {layer} have only zero weights, by whose norm a DoRA would divide. "
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
    """A [rank, inputs] and B [outputs, rank] of one module: the products of its kernels side by side."""
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
        else:  # each is zero where the other has its outputs
            b[same] = b[same] + y
    return np.concatenate(a), np.concatenate(b, 1)


def _saved_tensors(adapter: PeftAdapter, names: _Names) -> tuple[dict[str, np.ndarray], list[str]]:
    """The tensors of whole leaves, and their modules."""
    out: dict[str, np.ndarray] = {}
    sizes = adapter.config.sizes()
    for path, x in adapter.saved.items():
        axes, stored = born(adapter.config)[path][0], names.of(adapter.config)[path]
        layers = stored.layers(range(len(x)) if layers_of(axes) else (None,))
        for layer in layers:
            name = stored.name.format(layers=layer)
            out[name] = stored.theirs(
                np.asarray(x) if layer is None else np.asarray(x[layer]), axes, sizes, out.get(name)
            )
    return out, sorted({name.rpartition(".")[0] for name in out})


def _reads_first(family: Family, config: Config) -> bool:
    """Whether the base model's kernels have their inputs first, as those of a GPT-2."""
    layered = {
        p: s
        for p, s in family.names(config).items()
        if p.endswith("/kernel") and "{layers}" in s.name
    }
    path, stored = next(iter(layered.items()))
    return stored.layout.replace("(", " ").split()[0] == axis(cut(born(config)[path][0]).read[0])

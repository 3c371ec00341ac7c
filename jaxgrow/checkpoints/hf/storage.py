"""How are Hugging Face folders read as a `Source`, and how are they written from one?"""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import lru_cache, partial, reduce
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxgrow.axes.names import axis_of, layers_of
from jaxgrow.checkpoints.hf.base import Family
from jaxgrow.checkpoints.hf.registry import DIAGNOSES, FAMILIES, NAMING, STORED_EXPERTS
from jaxgrow.checkpoints.hf.tensor_layout import TensorLayout
from jaxgrow.checkpoints.io import safetensors
from jaxgrow.checkpoints.io.files import (
    SHARD,
    CheckpointError,
    inside,
    read_json,
    write_json,
)
from jaxgrow.checkpoints.source import Checkpoint, Leaf, Source, check_sizes, initial_layout
from jaxgrow.models import Config
from jaxgrow.models.config import EXPERTS
from jaxgrow.typed import Json
from jaxgrow.untrusted import CheckedPath


class HuggingFace(Checkpoint):
    """The model in a Hugging Face folder. Tensors are read on demand.

    Args:
      folder: the folder.

    Raises:
      CheckpointError: the folder has no config or weights, they are damaged or do not fit each
        other, or the architecture or its settings are not supported.
    """

    def __init__(self, folder: Path):
        self.folder = self.files_beside = folder
        file = inside(folder, "config.json")
        hf_config = read_json(file)
        _refuse(folder, DIAGNOSES["quantised"](folder, hf_config, {}))
        stored = safetensors.read_tensors(folder)
        hf_config, stored, notes = NAMING["text model"](folder, hf_config, stored)
        _refuse(folder, DIAGNOSES["quantised"](folder, hf_config, stored))
        self.family = family_of(hf_config, file)
        self.hf_config, further = NAMING["predicted layers"](hf_config, self.family.layers_key)
        self.notes = (*notes, *further)
        self._stored_size = sum(tensor.size for tensor in stored.values())
        if not self._stored_size:
            _refuse(folder, DIAGNOSES["empty"](stored))
        config = self._find_tensors(stored, self.read_config(file))
        if config.depth > len(self.tensors):
            raise CheckpointError(
                f"{file} has {config.depth} layers, but the folder has only {len(self.tensors)} tensors. "
                "Does config.json belong to another model?"
            )
        self.find_names(config, bool(further))
        if any(self.misfits()):
            raise CheckpointError(DIAGNOSES["misfits"](self, file, bool(further)))
        _refuse(folder, DIAGNOSES["other head"](self))
        self.leaves = {path: self._leaf(path) for path in self._layout}
        self._kept: tuple[str, np.ndarray] = ("", np.zeros(0))

    def read_config(self, file: CheckedPath) -> Config:
        """Return the config that ``hf_config`` describes, if its sizes are not above the stored ones."""
        assert self.hf_config is not None
        try:
            config = self.family.from_hf(self.hf_config)
        except ValueError as error:
            raise CheckpointError(f"{file}: {error}") from error
        # Afterwards, the number of layers is compared with the number of tensors.
        check_sizes(vars(config) | {"layers": 0}, self._stored_size, file)
        return config

    def _find_tensors(self, stored: Mapping[str, safetensors.Tensor], config: Config) -> Config:
        """Find the tensors by the names of the family, which is a body if the head is missing."""
        family = self.family
        stored = {family.current(name): tensor for name, tensor in stored.items()}
        stored, self.family, notes = NAMING["unwrapped"](stored, family, config, self.folder)
        self.notes += tuple(notes)
        if self.family is not family:
            self.hf_config = dict(self.hf_config or {}, architectures=[self.family.architecture])
            config = self.family.from_hf(self.hf_config)
        self.tensors = {self.family.current(name): tensor for name, tensor in stored.items()}
        return config

    def find_names(self, config: Config, further: bool) -> None:
        """Find the layouts of the leaves, and leave out the tensors that predict further tokens.

        ``further``: whether layers behind the last one are left out.
        """
        self.config = self.family.seen(config, self.tensors)
        self.following = self.family.following(self.config)
        self._layout = initial_layout(self.config)
        self._sizes = {
            axis_of(n): size
            for names, shape in self._layout.values()
            for n, size in zip(names, shape, strict=True)
        }
        # A file without a head may lack the prefix of the body.
        prefix = self.family.prefix
        removed = "" if any(n.startswith(prefix) for n in self.tensors) else prefix
        names = {
            path: replace(place, name=place.name.removeprefix(removed))
            for path, place in self.family.names(self.config).items()
        }
        if EXPERTS in self._sizes:
            names = STORED_EXPERTS["fused"](names, self.tensors, self._layout, self._sizes)
        self.names = names
        last = self.config.depth if further else None
        self.tensors, notes = NAMING["predicted tensors"](self.tensors, self.names.values(), last)
        self.notes += tuple(notes)

    def _leaf(self, path: str) -> Leaf:
        names, shape = self._layout[path]
        dtype = common_dtype([t.dtype for t in self.tensors_of(path)] or [np.dtype(np.float32)])
        if self.names[path].moved:
            dtype = common_dtype([dtype, np.dtype(np.float32)])
        return Leaf(names, shape, dtype)

    def read(self, path: str, layer: int | None = None) -> np.ndarray:
        place = self.names[path]
        leaf = self.leaves[path]
        if layer not in place.layers(leaf.layers):
            return np.ones(leaf.shape[1:], leaf.dtype)
        every = [
            place.to_leaf(self._whole(place, name.format(layers=layer)), leaf.names, self._sizes)
            for name in place.of_experts(self._sizes)
        ]
        x = np.stack(every) if "{experts}" in place.name else every[0]
        return x.astype(leaf.dtype, copy=False)

    def _whole(self, place: TensorLayout, name: str) -> np.ndarray:
        """Read a tensor. It is kept if it has other parts, because these are usually read next."""
        if place.part is None:
            return self.tensors[name].read()
        if self._kept[0] != name:
            self._kept = (name, self.tensors[name].read())
        return self._kept[1]

    @property
    def bytes(self) -> int:
        """The size in bytes of the stored tensors that hold the leaves.

        :meta private:
        """
        found = {
            tensor.name: tensor.size for path in self.leaves for tensor in self.tensors_of(path)
        }
        return sum(found.values())

    def tensor(self, place: TensorLayout, layer: int | None, expert: int = 0) -> safetensors.Tensor:
        """Return the stored tensor of one layer of a leaf.

        Args:
          place: the layout of the leaf.
          layer: index of the layer; None for a leaf that is not stacked.
          expert: index of the expert, if experts are stored separately.
        """
        return self.tensors[place.of_experts(self._sizes)[expert].format(layers=layer)]

    def origin(self, path: str, layer: int | None) -> tuple[Source, int | None] | None:
        return (self, layer) if layer in self.names[path].layers(self.leaves[path].layers) else None

    def fingerprint(self) -> str:
        # Sorted names make the hash independent of the sharding into files.
        digest = hashlib.sha256()
        for name, tensor in sorted(self.tensors.items()):
            digest.update(f"{name} {tensor.stored} {tensor.shape}\n".encode())
            digest.update(tensor.sample())
        return digest.hexdigest()

    def tensors_of(self, path: str) -> Iterator[safetensors.Tensor]:
        """The stored tensors of a leaf."""
        return (self.tensors[name] for name in self._tensor_names(path))

    def _tensor_names(self, path: str) -> Iterator[str]:
        """The names of the tensors of a leaf, one for each layer and each separate expert."""
        names, shape = self._layout[path]
        place = self.names[path]
        layers = place.layers(range(shape[0]) if layers_of(names) else (None,))
        for layer, name in itertools.product(layers, place.of_experts(self._sizes)):
            yield name.format(layers=layer)

    def misfits(self) -> tuple[list[str], list[str], dict[str, str]]:
        """Return the missing and the unknown tensors, and messages about tensors of another shape."""
        shapes = {
            name: (place.shape(self._layout[path][0], self._sizes), place.layout)
            for path, place in self.names.items()
            for name in self._tensor_names(path)
        }
        # Tensors without learned values, and the head of a model with tied embeddings.
        free = [*self.family.ignored, *(place.name for place in self.untied_layouts().values())]
        unknown = [
            name
            for name in self.tensors
            if name not in shapes and not any(fnmatchcase(name, pattern) for pattern in free)
        ]
        wrong = {
            name: f"{name} in {self.tensors[name].file.name} has shape {self.tensors[name].shape}, but config.json requires "
            f"{shape} (axes: {layout})"
            for name, (shape, layout) in shapes.items()
            if name in self.tensors and self.tensors[name].shape != shape
        }
        return [name for name in shapes if name not in self.tensors], unknown, wrong

    def untied_layouts(self) -> dict[str, TensorLayout]:
        """The layouts that a model with tied embeddings would have if it were untied."""
        if not self.config.tied:
            return {}
        untied: Json = {"tied": False}
        return self.family.names(replace(self.config, **untied))


def _refuse(folder: Path, why: str) -> None:
    if why:
        raise CheckpointError(f"{folder}: {why}")


def named_architecture(hf_config: Json) -> str:
    """The one architecture that a ``config.json`` names; "": none."""
    named = hf_config.get("architectures")
    one = named[0] if isinstance(named, list) and len(named) == 1 else ""
    return one if isinstance(one, str) else ""


def family_of(hf_config: Json, file: CheckedPath | Path) -> Family:
    """Return the architecture that a ``config.json`` names.

    Args:
      hf_config: the content of ``config.json``.
      file: the file, which the message names.

    Raises:
      CheckpointError: the architecture is not supported.
    """
    architecture = named_architecture(hf_config)
    if architecture not in FAMILIES:
        raise CheckpointError(f"{file}: {DIAGNOSES['unsupported'](hf_config)}")
    family = FAMILIES[architecture]
    return family.variant(hf_config) or family


def family_for(
    config: Config, hf_config: Json | None, settings: Json | None = None
) -> tuple[Family, Json]:
    """Find the architecture that stores a model, and build its ``config.json``.

    It is the architecture of ``hf_config``, or the architecture of the same model with the head, or
    the experts, of ``config``.

    Args:
      config: the config of the model.
      hf_config: the ``config.json`` to follow; None: the defaults of the architecture.
      settings: more keys of ``config.json``.

    Returns:
      The architecture, and the content of its ``config.json``.

    Raises:
      CheckpointError: no architecture stores such a model.
    """
    mixture = "experts" in config.sizes()
    family = None if hf_config is None else family_of(hf_config, Path("config.json"))
    # A dense model that became a mixture of experts has another architecture.
    if family is None or family.mixture != mixture:
        alike = [f for f in FAMILIES.values() if (f.config, f.mixture) == (type(config), mixture)]
    elif family.has_head(config):
        alike = [family]
    else:
        alike = [f for f in FAMILIES.values() if f.model_type == family.model_type]
    wrong: list[ValueError] = []
    for family in (f for f in alike if f.has_head(config)):
        try:
            content = family.to_hf(config, hf_config)
            if settings:
                content = family.to_hf(config, {**content, **settings})
            return family, content
        except ValueError as error:
            wrong.append(error)
    # The command writes the sizes that its one cause proposes as options.
    cause = wrong[0] if len(wrong) == 1 else None
    raise CheckpointError(DIAGNOSES["not stored"](config, wrong)) from cause


def common_dtype(dtypes: Iterable[np.dtype]) -> np.dtype:
    """Return the smallest dtype that represents all values of the given dtypes."""
    return np.dtype(reduce(jnp.promote_types, dtypes))


def tensor_dtypes(source: Source, names: Mapping[str, TensorLayout]) -> dict[str, np.dtype]:
    """Return the dtypes in which leaves are stored by these layouts, by path."""
    dtypes = {path: source.leaves[path].dtype for path in names}
    # Leaves that are shifted or scaled were converted to a wider dtype when they were read. They are
    # written in the dtype of the others.
    narrow = common_dtype(dtypes[path] for path, place in names.items() if not place.moved)
    return {path: narrow if place.moved else dtypes[path] for path, place in names.items()}


def planned_tensors(source: Source, family: Family) -> list[safetensors.Planned]:
    """List the tensors of a model in the order in which they are written, by layers.

    Args:
      source: the model.
      family: the architecture.

    Returns:
      The tensors. Their values are read when they are written.
    """
    reader = _TensorReader(source, family)
    parts: dict[str, list[str]] = {}
    for path, place in reader.names.items():
        parts.setdefault(place.name, []).append(path)
    # The name of a copy differs from the name under which its leaf is stored.
    parts |= {name: [path] for name, path in family.copies(source.config).items()}
    out: list[safetensors.Planned] = []
    stacks = itertools.groupby(parts, lambda name: layers_of(source.leaves[parts[name][0]].names))
    for some in [list(some) for _, some in stacks]:
        for layer in source.leaves[parts[some[0]][0]].layers:
            for name in some:
                out += reader.planned(name, parts[name], layer)
    return out


class _TensorReader:
    """The values of the tensors that an architecture has for a model."""

    def __init__(self, source: Source, family: Family):
        self._source = source
        self._family = family
        self.names = family.names(source.config)
        # The experts of a leaf are written one after the other.
        self._read = lru_cache(1)(source.read)
        self._sizes = source.sizes()
        self._dtypes = tensor_dtypes(source, self.names)

    def planned(
        self, name: str, paths: Sequence[str], layer: int | None
    ) -> Iterator[safetensors.Planned]:
        """Yield the tensors of one layer: one, or one for each expert if they are separate.

        Args:
          name: the name of the tensor in all layers.
          paths: the leaves that it holds.
          layer: index of the layer; None for leaves that are not stacked.
        """
        leaf, place = self._source.leaves[paths[0]], self.names[paths[0]]
        if layer in place.layers(leaf.layers):
            dtype = common_dtype(self._dtypes[path] for path in paths)
            shape = place.shape(leaf.names, self._sizes)
            for i, expert in enumerate(replace(place, name=name).of_experts(self._sizes)):
                content = partial(self._content, paths, layer, i, dtype)
                yield safetensors.Planned(expert.format(layers=layer), dtype, shape, content)

    def _content(
        self, paths: Sequence[str], layer: int | None, expert: int, dtype: np.dtype
    ) -> safetensors.Tensor | np.ndarray:
        """Return one tensor, which is the stored one if its values are unchanged."""
        place = self.names[paths[0]]
        origins = {self._source.origin(path, layer) for path in paths}
        stored, old = origins.pop() or (None, None)
        if not origins and isinstance(stored, HuggingFace) and stored.family is self._family:
            own = stored.names[paths[0]]
            # The config may have changed the factor of the tensor, and a file its layout.
            if replace(own, name=place.name) == place:
                tensor = stored.tensor(own, old, expert)
                if tensor.dtype == dtype:
                    return tensor
        out = None
        for path in paths:
            place = self.names[path]
            x = self._read(path, layer)
            x = x[expert] if "{experts}" in place.name else x
            x = x if place.moved else x.astype(dtype, copy=False)
            out = place.to_tensor(x, self._source.leaves[path].names, self._sizes, out)
            out = out.astype(dtype, copy=False)
        assert out is not None
        return out


def write_hf_folder(
    source: Source,
    family: Family,
    hf_config: Json,
    folder: Path,
    shard: int = SHARD,
    done: Callable[[int], object] = lambda size: None,
) -> None:
    """Write the weights and ``config.json`` of a model.

    Args:
      source: the model.
      family: the architecture.
      hf_config: the content of ``config.json``.
      folder: a folder that exists.
      shard: the largest size of a file in bytes.
      done: a function that is called with the size in bytes of each tensor that has been written.
    """
    safetensors.write_tensors(folder, planned_tensors(source, family), shard, done)
    write_json(folder / "config.json", hf_config)

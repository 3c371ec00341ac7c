"""How are Hugging Face folders read as a `Source`, and how are they written from one?"""

import difflib
import hashlib
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial, reduce
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np

from jaxgrow.axes.names import axis_of, layers_of
from jaxgrow.checkpoints.hf import layer_lists, quantised, tensor_names
from jaxgrow.checkpoints.hf.base import Family, NotStoredError
from jaxgrow.checkpoints.hf.registry import FAMILIES
from jaxgrow.checkpoints.hf.tensor_layout import TensorLayout
from jaxgrow.checkpoints.hf.text_part import text_config, text_tensors
from jaxgrow.checkpoints.io import safetensors
from jaxgrow.checkpoints.io.files import (
    CheckpointError,
    inside,
    listed,
    read_json,
    spelt,
    write_json,
)
from jaxgrow.checkpoints.source import Checkpoint, Leaf, Source, check_sizes, initial_layout
from jaxgrow.models import Config
from jaxgrow.typed import Json
from jaxgrow.untrusted import CheckedPath

T = TypeVar("T")


class HuggingFace(Checkpoint):
    """The model in a Hugging Face folder. Tensors are read on demand.

    Args:
      folder: the folder.

    Raises:
      CheckpointError: the folder has no config or weights, they are damaged or do not fit each
        other, or the architecture or its settings are not supported.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._file = inside(folder, "config.json")
        hf_config = read_json(self._file)
        quantised.check(folder, hf_config)
        stored = text_tensors(safetensors.tensors(folder))
        quantised.check(folder, hf_config, stored)
        hf_config, notes = self._valid(text_config, hf_config)
        self.notes = (*safetensors.unread(folder), *notes)
        self.family = family_of(hf_config, self._file, stored)
        self.hf_config, further = layer_lists.without_further(hf_config, self.family.layers_key)
        self.notes += further
        self._find(stored, bool(further))
        head = self.names.get("head_kernel")
        body = body_of(self.family) if self.config.causal else None
        if body is not None and head is not None and head.name not in self.tensors:
            self.notes += (
                f"{head.name} is missing, so the model is read as a {body.architecture}, without a head",
            )
            self.family = body
            self.hf_config = {**self.hf_config, "architectures": [body.architecture]}
            self._find(self.tensors, bool(further))
        if any(misfits := self._misfits()):
            raise self._unfit(*misfits, bool(further))
        self._check_tied()
        self.leaves = {path: self._leaf(path) for path in self._layout}
        self._kept: tuple[str, np.ndarray] = ("", np.zeros(0))

    def _valid(self, read: Callable[[Json], T], hf_config: Json) -> T:
        try:
            return read(hf_config)
        except ValueError as error:
            raise CheckpointError(f"{self._file}: {error}") from error

    def _find(self, stored: Mapping[str, safetensors.Tensor], further: bool) -> None:
        """Find the config, the places of the leaves, and the tensors by the names of the family.

        ``further``: whether layers behind the last one are left out.
        """
        assert self.hf_config is not None
        family = self.family
        config = self._valid(family.from_hf, self.hf_config)
        size = sum(tensor.size for tensor in stored.values())
        if not size and (empty := tensor_names.without_values(stored, stored)):
            raise CheckpointError(f"{self.folder}: {empty}")
        # Below, the number of layers is compared with the number of tensors.
        check_sizes(vars(config) | {"layers": 0}, size, self._file)
        stored = {family.current(n): tensor for n, tensor in stored.items()}
        places = family.names(config).values()
        stored, notes = tensor_names.plain(stored, places, family.prefix, self.folder)
        self.notes += notes
        self.tensors = {family.current(n): tensor for n, tensor in stored.items()}
        self.config = family.seen(config, self.tensors)
        if self.config.depth > len(self.tensors):
            raise CheckpointError(
                f"{self._file} has {self.config.depth} layers, but the folder has only "
                f"{len(self.tensors)} tensors. Does config.json belong to another model?"
            )
        self.following = family.following(self.config)
        self._layout = initial_layout(self.config)
        self._sizes = {
            axis_of(n): size
            for names, shape in self._layout.values()
            for n, size in zip(names, shape, strict=True)
        }
        names = family.names(self.config)
        if not any(n.startswith(family.prefix) for n in self.tensors):
            names = {
                p: replace(s, name=s.name.removeprefix(family.prefix)) for p, s in names.items()
            }
        self.names = tensor_names.with_experts(names, self.tensors, self._layout, self._sizes)
        self._leave_out_further(further)

    def _leave_out_further(self, further: bool) -> None:
        """Leave out the tensors that predict further tokens; ``further``: also layers behind the last."""
        own = [name for name in self.tensors if name.startswith(("mtp.", "model.mtp."))]
        if own:
            named = listed(own, most=2)
            self.notes += (f"the tensors that predict further tokens are not read: {named}",)
        if further:
            own += [
                name
                for name in self.tensors
                if tensor_names.layer_of(name, self.names) >= self.config.depth
            ]
        self.tensors = {n: tensor for n, tensor in self.tensors.items() if n not in {*own}}

    def _leaf(self, path: str) -> Leaf:
        names, shape = self._layout[path]
        dtype = common([t.dtype for t in self._tensors(path)] or [np.dtype(np.float32)])
        if self.names[path].moved:
            dtype = common([dtype, np.dtype(np.float32)])
        return Leaf(names, shape, dtype)

    def read(self, path: str, layer: int | None = None) -> np.ndarray:
        stored = self.names[path]
        leaf = self.leaves[path]
        if layer not in stored.layers(leaf.layers):
            return np.ones(leaf.shape[1:], leaf.dtype)
        every = [
            stored.to_leaf(self._whole(stored, name.format(layers=layer)), leaf.names, self._sizes)
            for name in stored.of_experts(self._sizes)
        ]
        x = np.stack(every) if "{experts}" in stored.name else every[0]
        return x.astype(leaf.dtype, copy=False)

    def _whole(self, stored: TensorLayout, name: str) -> np.ndarray:
        """Read a tensor. It is kept if it has other parts, because these are usually read next."""
        if stored.part is None:
            return self.tensors[name].read()
        if self._kept[0] != name:
            self._kept = (name, self.tensors[name].read())
        return self._kept[1]

    @property
    def bytes(self) -> int:
        """The size in bytes of the stored tensors that hold the leaves.

        :meta private:
        """
        found = {tensor.name: tensor.size for path in self.leaves for tensor in self._tensors(path)}
        return sum(found.values())

    def tensor(
        self, stored: TensorLayout, layer: int | None, expert: int = 0
    ) -> safetensors.Tensor:
        """Return the stored tensor of one layer of a leaf.

        Args:
          stored: the place of the leaf.
          layer: index of the layer; None for a leaf that is not stacked.
          expert: index of the expert, if experts are stored separately.
        """
        return self.tensors[stored.of_experts(self._sizes)[expert].format(layers=layer)]

    def origin(self, path: str, layer: int | None) -> tuple[Source, int | None] | None:
        return (self, layer) if layer in self.names[path].layers(self.leaves[path].layers) else None

    def fingerprint(self) -> str:
        # Sorted names make the hash independent of the sharding into files.
        digest = hashlib.sha256()
        for name, tensor in sorted(self.tensors.items()):
            digest.update(f"{name} {tensor.stored} {tensor.shape}\n".encode())
            digest.update(tensor.sample())
        return digest.hexdigest()

    def place(self, path: str) -> str:
        stored = self.names[path]
        files = sorted({tensor.file.name for tensor in self._tensors(path)}) or ["no file"]
        part = "" if stored.part is None else f" part {stored.part}"
        return f"{stored.name} ({stored.layout}){part} in {files[0]}{f' .. {files[-1]}' if len(files) > 1 else ''}"

    def _tensors(self, path: str) -> Iterator[safetensors.Tensor]:
        for layer in self._layers(path):
            for name in self.names[path].of_experts(self._sizes):
                yield self.tensors[name.format(layers=layer)]

    def _layers(self, path: str) -> Sequence[int | None]:
        """The layers that are stored for a leaf, as `Leaf.layers`."""
        names, shape = self._layout[path]
        return self.names[path].layers(range(shape[0]) if layers_of(names) else (None,))

    def _misfits(self) -> tuple[list[str], list[str], dict[str, str]]:
        """Return the missing and the unknown tensors, and messages about tensors of a wrong shape."""
        expected: dict[str, tuple[TensorLayout, tuple[int, ...]]] = {}
        for path, stored in self.names.items():
            shape = stored.shape(self._layout[path][0], self._sizes)
            for layer, of in itertools.product(self._layers(path), stored.of_experts(self._sizes)):
                expected[of.format(layers=layer)] = (stored, shape)
        missing = [name for name in expected if name not in self.tensors]
        # Tensors without learned values, and the head of a model with tied embeddings.
        free = [*self.family.ignored, *(s.name for s in self._untied().values())]
        unknown = [
            name
            for name in self.tensors
            if name not in expected and not any(fnmatchcase(name, pattern) for pattern in free)
        ]
        wrong = {
            name: f"{name} in {self.tensors[name].file.name} has shape {self.tensors[name].shape}, but config.json requires "
            f"{shape} (axes: {stored.layout})"
            for name, (stored, shape) in expected.items()
            if name in self.tensors and self.tensors[name].shape != shape
        }
        return missing, unknown, wrong

    def _unfit(
        self, missing: list[str], unknown: list[str], wrong: dict[str, str], further: bool
    ) -> CheckpointError:
        """The error about tensors that do not fit: their one cause, or at most five of them."""
        key, depth = self.family.layers_key, self.config.depth
        cause = tensor_names.cause(missing, unknown, self.tensors, self.names, key, depth)
        if not cause and len(other := self._other_settings(wrong, further)) == 1:
            cause = other[0]
        if cause:
            return CheckpointError(f"{self.folder}: {cause}")
        lines = [
            [f"missing: {name}" for name in missing],
            [f"unknown: {name} in {self.tensors[name].file.name}" for name in unknown],
            list(wrong.values()),
        ]
        again = ". Does the folder have all files of the model?" if missing else ""
        if missing and (absent := safetensors.absent(self.folder)):
            again = f". {absent[0]} is missing, but the index names it: download all files that it names"
        of = f"{self.folder}: the tensors do not fit the {self.family.architecture} of config.json{again}"
        if sum(map(len, lines)) == 1:
            return CheckpointError(f"{of}: {listed(*lines)}")
        most = 5 // sum(map(bool, lines))
        return CheckpointError(of + "\n  " + listed(*lines, separator="\n  ", most=most))

    def _other_settings(self, wrong: Mapping[str, str], further: bool) -> list[str]:
        """Describe each change of one size in ``config.json`` after which all tensors would fit."""
        hf_config = self.hf_config or {}
        sizes = {n for name in itertools.islice(wrong, 1) for n in self.tensors[name].shape}
        # `tensor_names.cause` finds a wrong number of layers.
        synonyms = itertools.chain(*layer_lists.SYNONYMS)
        known = {*self.family.fields, *synonyms} - {*layer_lists.SYNONYMS[0]}
        found: list[str] = []
        for key, size in itertools.product(hf_config.keys() & known, sizes):
            other = copy(self)
            other.hf_config = {**hf_config, key: size}
            with suppress(ValueError):
                other._find(self.tensors, further)
                if not any(other._misfits()):
                    about = f"{key} is {hf_config[key]}, but the weights have {size}: {next(iter(wrong.values()))}"
                    way = (
                        f"Set {key} to {size}, or give the weights that belong to this config.json"
                    )
                    found.append(f"{about}. {way}")
        return found

    def _untied(self) -> dict[str, TensorLayout]:
        """The names that a model with tied embeddings would have if it were untied.

        The result is empty for a model without tied embeddings.
        """
        if not self.config.tied:
            return {}
        untied: Any = {"tied": False}
        return self.family.names(replace(self.config, **untied))

    def _check_tied(self) -> None:
        """Check that a stored head equals the embedding to which it is tied.

        If it does not, transformers 4 ignores the head, and transformers 5 unties it.

        Raises:
          CheckpointError: they differ.
        """
        same = {"head_kernel": "token_embedding"}
        for path, stored in self._untied().items():
            mine = self.names[same.get(path, path)]
            if stored.name == mine.name or stored.name not in self.tensors:
                continue
            head = self.tensor(stored, None)
            tied = self.tensor(mine, None)
            if not head.equals(tied):
                raise CheckpointError(
                    f"{self.folder}: config.json ties {head.name} to {tied.name}, but both are stored, and they differ. Set "
                    f'"tie_word_embeddings" to false in config.json to keep the head, or remove {head.name} from '
                    f"{head.file.name}"
                )


def family_of(hf_config: Json, file: CheckedPath | Path, stored: Collection[str] = ()) -> Family:
    """Return the architecture that a ``config.json`` names.

    Args:
      hf_config: the content of ``config.json``.
      file: the file, which the message names.
      stored: the names of the tensors in its folder.

    Raises:
      CheckpointError: the architecture is not supported.
    """
    named = hf_config.get("architectures")
    architecture = named[0] if isinstance(named, list) and len(named) == 1 else None
    if isinstance(architecture, str) and architecture in FAMILIES:
        family = FAMILIES[architecture]
        return family.variant(hf_config) or family
    way_out = _way_out(str(architecture) if named else None, hf_config, stored)
    raise CheckpointError(
        f"{file}: architectures is {spelt(named)}{way_out or ', which is not supported'}. `jaxgrow architectures` lists the "
        "supported ones"
    )


def body_of(family: Family) -> Family | None:
    """Return the architecture of a model without its head; None if there is none."""
    mine = (f for f in FAMILIES.values() if f.model_type == family.model_type)
    return next((f for f in mine if f.fixed.get("head") == "states"), None)


# What to do about architectures of models of images and texts, and about architectures whose files
# also contain the head of another architecture.
_WAYS_OUT = {
    "CLIPModel": "; load its vision tower as CLIPVisionModelWithProjection in transformers, and save it",
    "SiglipModel": "; load its vision tower as SiglipVisionModel in transformers, and save it",
    "BertForPreTraining": ', which has another head in addition; write ["BertForMaskedLM"] there to read the model without it',
}


def _way_out(architecture: str | None, hf_config: Json, stored: Collection[str]) -> str:
    """Suggest what to do about an architecture that is not supported, or that is not named.

    The result is empty if no architecture with such tensors is known.
    """
    mine = [f for f in FAMILIES.values() if f.model_type == hf_config.get("model_type")]
    if architecture is None:
        classes = ", ".join(f'["{family.architecture}"]' for family in mine)
        return f"; write the class of the model there, one of {classes}" if mine else ""
    if architecture in _WAYS_OUT:
        return _WAYS_OUT[architecture]
    alike = [
        family
        for family in mine
        if architecture.startswith(re.split("For|LMHead|Model", family.architecture)[0])
        and _has_layers(family, hf_config, stored)
    ]
    if alike:
        bare = architecture.endswith("Model") and not architecture.endswith("LMHeadModel")
        # Another head, or one that is missing, would have random weights in transformers.
        todo = (
            f"give the folder of the {alike[0].architecture} from which this model was extracted"
            if bare
            else f"load it as {(body_of(alike[0]) or alike[0]).architecture} in transformers, and save it"
        )
        # After the suggested change, the settings would be refused.
        todo = _refused(alike[0], hf_config) or todo
        return f", {'a model without its head' if bare else 'another head'}; {todo}"
    for near in difflib.get_close_matches(architecture, FAMILIES):
        if _has_tensors(FAMILIES[near], hf_config, stored):
            return (
                f", which is not supported; its tensors are those of a {near}, so if the name is misspelt, write "
                f'["{near}"] there'
            )
    return ""


def _has_layers(family: Family, hf_config: Json, stored: Collection[str]) -> bool:
    """Whether a file has the tensors of a layer, under any prefix, or it is not known."""
    if not stored or _refused(family, hf_config):
        return True
    places = family.names(family.from_hf(hf_config)).values()
    names = [place.name.format(layers="*", experts=0) for place in places]
    ends = {re.escape(name.rpartition("*")[2]) for name in names if "*" in name}
    found = [family.current(name) for name in stored]
    return all(any(re.search(rf"\d{end}$", name) for name in found) for end in ends)


def _has_tensors(family: Family, hf_config: Json, stored: Collection[str]) -> bool:
    """Whether a file has exactly the names of the tensors of an architecture."""
    if _refused(family, hf_config):
        return False
    places = family.names(family.from_hf(hf_config)).values()
    found = {re.sub(r"\.\d+\.", ".0.", family.current(name)) for name in stored}
    names = {re.sub(r"\.\d+\.", ".0.", s.name.format(layers=0, experts=0)) for s in places}
    return names <= found and all(
        any(fnmatchcase(name, pattern) for pattern in family.ignored) for name in found - names
    )


def _refused(family: Family, hf_config: Json) -> str:
    """Return why a family does not support a ``config.json``; empty if it does."""
    try:
        family.from_hf(hf_config)
    except ValueError as error:
        return str(error)
    return ""


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
    candidates, kind = _candidates(config, hf_config)
    wrong: list[ValueError] = []
    for family in candidates:
        try:
            content = family.to_hf(config, hf_config)
            if settings:
                content = family.to_hf(config, {**content, **settings})
            return family, content
        except ValueError as error:
            wrong.append(error)
    # The architecture that lacks the fewest settings.
    lacking = [error for error in wrong if isinstance(error, NotStoredError)]
    nearest = min(lacking, key=lambda error: len(error.fields), default=wrong[0])
    if len(wrong) == 1:
        raise CheckpointError(str(nearest)) from nearest
    raise CheckpointError(
        f"no architecture stores this {kind}. The nearest one: {nearest}"
    ) from ExceptionGroup("not stored", wrong)


def _candidates(config: Config, hf_config: Json | None) -> tuple[list[Family], str]:
    """The architectures that may store a model, and a description of the model."""
    mixture = "experts" in config.sizes()
    family = None if hf_config is None else family_of(hf_config, Path("config.json"))
    candidates = [f for f in FAMILIES.values() if f.has_head(config)]
    # A dense model that became a mixture of experts has another architecture.
    if family is not None and family.mixture == mixture:
        kind = family.model_type
        mine = [f for f in candidates if f.model_type == kind]
        candidates = [family] if family.has_head(config) else mine
    else:
        kind = type(config).__name__
        candidates = [f for f in candidates if (f.config, f.mixture) == (type(config), mixture)]
    kind = f"{kind} that predicts {config.predicts}{' and has experts' * mixture}"
    if not candidates:
        raise CheckpointError(
            f"no architecture stores a {kind}. Write an Orbax checkpoint instead (--to orbax)"
        )
    return candidates, kind


def common(dtypes: Iterable[np.dtype]) -> np.dtype:
    """Return the smallest dtype that represents all values of the given dtypes."""
    return np.dtype(reduce(jnp.promote_types, dtypes))


class Form(NamedTuple):
    """How the values of a leaf are stored: ``times * leaf + plus``, in ``dtype``."""

    times: float
    plus: float
    dtype: np.dtype


def forms(source: Source, family: Family) -> dict[str, Form]:
    """Return how an architecture stores the leaves of a model, by path."""
    names = family.names(source.config)
    dtypes = {path: source.leaves[path].dtype for path in names}
    # Leaves that are shifted or scaled were converted to a wider dtype when they were read. They are
    # written in the dtype of the others.
    narrow = common(dtypes[path] for path, place in names.items() if not place.moved)
    return {
        path: Form(place.times, place.plus, narrow if place.moved else dtypes[path])
        for path, place in names.items()
    }


def planned(source: Source, family: Family) -> list[safetensors.Planned]:
    """List the tensors of a model in the order in which they are written, by layers.

    Args:
      source: the model.
      family: the architecture.

    Returns:
      The tensors. Their values are read when they are written.
    """
    names = family.names(source.config)
    parts: dict[str, list[str]] = {}
    for path, place in names.items():
        parts.setdefault(place.name, []).append(path)
    # The name of a copy differs from the name under which its leaf is stored.
    parts |= {name: [path] for name, path in family.copies(source.config).items()}
    reader = _Reader(source, family)
    out: list[safetensors.Planned] = []
    for _, some in itertools.groupby(
        parts, lambda name: layers_of(source.leaves[parts[name][0]].names)
    ):
        some = list(some)
        for layer in source.leaves[parts[some[0]][0]].layers:
            for name in some:
                leaf, place = source.leaves[parts[name][0]], names[parts[name][0]]
                if layer not in place.layers(leaf.layers):
                    continue
                dtype = common(reader.forms[path].dtype for path in parts[name])
                shape = place.shape(leaf.names, reader.sizes)
                for i, expert in enumerate(replace(place, name=name).of_experts(reader.sizes)):
                    content = partial(reader.content, parts[name], layer, i, dtype)
                    expert = expert.format(layers=layer)
                    out.append(safetensors.Planned(expert, dtype, shape, content))
    return out


class _Reader:
    """The values of the tensors that an architecture has for a model."""

    def __init__(self, source: Source, family: Family):
        self._source = source
        self._family = family
        self._names = family.names(source.config)
        self._last: tuple[tuple[str, int | None] | None, np.ndarray] = (None, np.zeros(0))
        self.sizes = source.sizes()
        self.forms = forms(source, family)

    def content(
        self, paths: Sequence[str], layer: int | None, expert: int, dtype: np.dtype
    ) -> safetensors.Tensor | np.ndarray:
        """Return one tensor, which is the stored one if its values are unchanged.

        Args:
          paths: the leaves that it holds.
          layer: index of the layer; None for leaves that are not stacked.
          expert: index of the expert, if experts are stored separately.
          dtype: the dtype of the tensor.
        """
        place = self._names[paths[0]]
        origins = {self._source.origin(path, layer) for path in paths}
        stored, old = origins.pop() or (None, None)
        if not origins and isinstance(stored, HuggingFace) and stored.family is self._family:
            own = stored.names[paths[0]]
            # A file may have the tensor under another name, or in another layout.
            if replace(own, name=place.name) == place:
                tensor = stored.tensor(own, old, expert)
                if tensor.dtype == dtype:
                    return tensor
        out = None
        for path in paths:
            place = self._names[path]
            x = (
                self._read(path, layer)[expert]
                if "{experts}" in place.name
                else self._source.read(path, layer)
            )
            x = x if place.moved else x.astype(dtype, copy=False)
            out = place.to_tensor(x, self._source.leaves[path].names, self.sizes, out)
            out = out.astype(dtype, copy=False)
        assert out is not None
        return out

    def _read(self, path: str, layer: int | None) -> np.ndarray:
        """Read a leaf, and keep it, because its experts are written one after the other."""
        if self._last[0] != (path, layer):
            self._last = (path, layer), self._source.read(path, layer)
        return self._last[1]


def write_hf_folder(
    source: Source, family: Family, hf_config: Json, folder: Path, **options: Any
) -> None:
    """Write the weights and ``config.json`` of a model.

    Args:
      source: the model.
      family: the architecture.
      hf_config: the content of ``config.json``.
      folder: a folder that exists.
      options: options of `jaxgrow.checkpoints.io.safetensors.write_tensors`.
    """
    safetensors.write_tensors(folder, planned(source, family), **options)
    write_json(folder / "config.json", hf_config)

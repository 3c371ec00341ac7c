"""How are Hugging Face folders read as a `Source`, and how are they written from one?"""

import difflib
import hashlib
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxgrow.axes.names import axis, layers_of
from jaxgrow.checkpoints.hf import layer_lists, quantised, tensor_names
from jaxgrow.checkpoints.hf.base import Family, NotStoredError, Stored
from jaxgrow.checkpoints.hf.registry import FAMILIES
from jaxgrow.checkpoints.hf.text_part import text_part
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
        self.folder = folder
        file = inside(folder, "config.json")
        self.foreign = read_json(file)
        quantised.check_config(folder, self.foreign)
        stored = safetensors.tensors(folder)
        quantised.check_tensors(folder, stored)
        self.notes = tuple(safetensors.unread(folder))
        if (part := text_part(self.foreign)) is not None:
            self.notes += (part.note(self.foreign),)
            try:
                self.foreign = part.config(self.foreign)
            except ValueError as error:
                raise CheckpointError(f"{file}: {error}") from error
            stored = part.tensors(stored)
        self.family = family_of(self.foreign, file, stored)
        self.foreign, further = layer_lists.without_further(self.foreign, self.family.layers_key)
        self.notes += further
        self._name_tensors(file, stored)
        if (body := self._body()) is not None:
            self.notes += (
                f"{self.names['head_kernel'].name} is missing, so the model is read as a {body.architecture}, without a head",
            )
            self.family = body
            self.foreign = {**self.foreign, "architectures": [body.architecture]}
            self._name_tensors(file, self.tensors)
        self._leave_out_further(bool(further))
        self._check()
        self._check_tied()
        self.leaves = {path: self._leaf(path) for path in self._layout}
        self._fused: tuple[str, dict[int | None, np.ndarray]] = ("", {})

    def _name_tensors(self, file: CheckedPath, stored: Mapping[str, safetensors.Tensor]) -> None:
        """Find the config, and the tensors by the names that the family has for them."""
        assert self.foreign is not None
        family = self.family
        try:
            self.config = family.ours(self.foreign)
        except ValueError as error:
            raise CheckpointError(f"{file}: {error}") from error
        # Below, the number of layers is compared with the number of tensors.
        sizes = vars(self.config) | {"layers": 0}
        size = sum(tensor.size for tensor in stored.values())
        if not size and (empty := tensor_names.without_values(stored, stored)):
            raise CheckpointError(f"{self.folder}: {empty}")
        check_sizes(sizes, size, file)
        first = {s.name.format(layers=0, experts=0) for s in family.names(self.config).values()}
        bare = {name.removeprefix(family.prefix) for name in first}
        stored = {family.current(n): tensor for n, tensor in stored.items()}
        stored, notes = tensor_names.plain(stored, first, bare, self.folder)
        self.notes += notes
        self.tensors = {family.current(n): tensor for n, tensor in stored.items()}
        self.config = family.seen(self.config, self.tensors)
        if self.config.depth > len(self.tensors):
            raise CheckpointError(
                f"{file} has {self.config.depth} layers, but the folder has only "
                f"{len(self.tensors)} tensors. Does config.json belong to another model?"
            )
        self.following = family.following(self.config)
        self.names = family.names(self.config)
        self._layout = initial_layout(self.config)
        self._sizes: dict[str, int] = {}
        for names, shape in self._layout.values():
            self._sizes.update(zip(map(axis, names), shape, strict=True))
        self._bare = bool(family.prefix) and not any(
            n.startswith(family.prefix) for n in self.tensors
        )
        places = {path: replace(s, name=self._plain(s.name)) for path, s in self.names.items()}
        self.tensors = tensor_names.unfused(self.tensors, places, self._sizes)

    def _body(self) -> Family | None:
        """The architecture without a head, if it has one and the head of a decoder is missing."""
        head = self.names.get("head_kernel")
        if head is None or head.name in self.tensors or not self.config.causal:
            return None
        mine = (f for f in FAMILIES.values() if f.model_type == self.family.model_type)
        return next((f for f in mine if f.fixed.get("head") == "states"), None)

    def _leave_out_further(self, further: bool) -> None:
        """Leave out the tensors that predict further tokens; ``further``: also layers behind the last."""
        own = [name for name in self.tensors if name.startswith(("mtp.", "model.mtp."))]
        if own:
            self.notes += (
                f"{len(own)} tensors that predict further tokens, such as {own[0]}, are not read",
            )
        if further:
            own += [name for name in self.tensors if self._layer_of(name) >= self.config.depth]
        self.tensors = {n: tensor for n, tensor in self.tensors.items() if n not in {*own}}

    def _layer_of(self, name: str) -> int:
        return tensor_names.layer_of(name, {self._plain(s.name) for s in self.names.values()})

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
        if "{experts}" in stored.name:
            each = (
                self.tensors[self._name(name, layer)].read()
                for name in stored.of_experts(self._sizes)
            )
            return np.stack(
                [
                    stored.ours(x, leaf.names, self._sizes).astype(leaf.dtype, copy=False)
                    for x in each
                ]
            )
        if stored.part is None:
            tensor = self.tensor(stored, layer).read()
        else:
            # The other parts of a fused tensor are usually read next, so the tensor is kept.
            if self._fused[0] != stored.name:
                self._fused = (stored.name, {})
            if layer not in self._fused[1]:
                self._fused[1][layer] = self.tensor(stored, layer).read()
            tensor = self._fused[1][layer]
        return stored.ours(tensor, leaf.names, self._sizes).astype(leaf.dtype, copy=False)

    @property
    def bytes(self) -> int:
        """The size in bytes of the stored tensors that hold the leaves.

        :meta private:
        """
        found = {tensor.name: tensor.size for path in self.leaves for tensor in self._tensors(path)}
        return sum(found.values())

    def tensor(self, stored: Stored, layer: int | None, expert: int = 0) -> safetensors.Tensor:
        """Return the stored tensor of one layer of a leaf.

        Args:
          stored: the place of the leaf.
          layer: index of the layer; None for a leaf that is not stacked.
          expert: index of the expert, if experts are stored separately.
        """
        return self.tensors[self._name(stored.of_experts(self._sizes)[expert], layer)]

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
        return f"{self._plain(stored.name)} ({stored.layout}){part} in {files[0]}{f' .. {files[-1]}' if len(files) > 1 else ''}"

    def _tensors(self, path: str) -> Iterator[safetensors.Tensor]:
        for layer in self._layers(path):
            for name in self.names[path].of_experts(self._sizes):
                yield self.tensors[self._name(name, layer)]

    def _layers(self, path: str) -> Sequence[int | None]:
        """The layers that are stored for a leaf, as `Leaf.layers`."""
        names, shape = self._layout[path]
        return self.names[path].layers(range(shape[0]) if layers_of(names) else (None,))

    def _name(self, name: str, layer: int | None) -> str:
        return self._plain(name).format(layers=layer)

    def _plain(self, name: str) -> str:
        return name.removeprefix(self.family.prefix) if self._bare else name

    def _check(self) -> None:
        expected: dict[str, tuple[int, ...]] = {}
        axes: dict[str, str] = {}
        for path, stored in self.names.items():
            for layer, of in itertools.product(self._layers(path), stored.of_experts(self._sizes)):
                name = self._name(of, layer)
                expected[name] = stored.shape(self._layout[path][0], self._sizes)
                axes[name] = stored.layout
        missing = [name for name in expected if name not in self.tensors]
        unknown = []
        wrong = []
        free = self._ignored()
        for name, tensor in self.tensors.items():
            if name not in expected:
                if not any(fnmatchcase(name, pattern) for pattern in free):
                    unknown.append(name)
            elif tensor.shape != expected[name]:
                wrong.append(
                    f"{name} in {tensor.file.name} has shape {tensor.shape}, but config.json requires {expected[name]} "
                    f"(axes: {axes[name]})"
                )
        if missing or unknown or wrong:
            raise self._unfit(missing, unknown, wrong)

    def _unfit(self, missing: list[str], unknown: list[str], wrong: list[str]) -> CheckpointError:
        """The error about tensors that do not fit: their one cause, or at most five of them."""
        key, depth = self.family.layers_key, self.config.depth
        cause = tensor_names.cause(missing, unknown, self.tensors, self._layer_of, key, depth)
        head = self.names.get("head_kernel")
        if head is not None and [*missing, *unknown, *wrong] == [head.name]:
            cause = (
                f"missing: {head.name}, so this is a model without its head. If the token embedding is its head, set "
                '"tie_word_embeddings" to true in config.json; otherwise give the folder with the head'
            )
        if cause:
            return CheckpointError(f"{self.folder}: {cause}")
        lines = [
            [f"missing: {name}" for name in missing],
            [f"unknown: {name} in {self.tensors[name].file.name}" for name in unknown],
            wrong,
        ]
        most = 5 // sum(map(bool, lines))
        again = ". Does the folder have all files of the model?" if missing else ""
        return CheckpointError(
            f"{self.folder}: the tensors do not fit the {self.family.architecture} of config.json{again}\n  "
            + listed(*lines, separator="\n  ", most=most)
        )

    def _ignored(self) -> list[str]:
        """Name patterns of tensors that a file may have although they are not read.

        They are tensors without learned values, and the head of a model with tied embeddings.
        """
        return [*self.family.ignored, *(s.name for s in self._untied().values())]

    def _untied(self) -> dict[str, Stored]:
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
            if stored.name == mine.name or self._name(stored.name, None) not in self.tensors:
                continue
            head = self.tensor(stored, None)
            tied = self.tensor(mine, None)
            if not head.equals(tied):
                raise CheckpointError(
                    f"{self.folder}: config.json ties {head.name} to {tied.name}, but both are stored, and they differ. Set "
                    f'"tie_word_embeddings" to false in config.json to keep the head, or remove {head.name} from '
                    f"{head.file.name}"
                )


def family_of(
    foreign: Mapping[str, Any], file: CheckedPath | Path, stored: Collection[str] = ()
) -> Family:
    """Return the architecture that a ``config.json`` names.

    Args:
      foreign: the content of ``config.json``.
      file: the file, which the message names.
      stored: the names of the tensors in its folder.

    Raises:
      CheckpointError: the architecture is not supported.
    """
    named = foreign.get("architectures")
    architecture = named[0] if isinstance(named, list) and len(named) == 1 else None
    if isinstance(architecture, str) and architecture in FAMILIES:
        family = FAMILIES[architecture]
        return family.variant(foreign) or family
    way_out = _way_out(str(architecture), foreign, stored) if named else _unnamed(foreign)
    raise CheckpointError(
        f"{file}: architectures is {spelt(named)}{way_out or ', which is not supported'}. `jaxgrow architectures` lists the "
        "supported ones"
    )


# Architectures of models of images and texts, and the architectures of their vision towers.
_TOWERS = {"CLIPModel": "CLIPVisionModelWithProjection", "SiglipModel": "SiglipVisionModel"}


# Architectures whose files also contain the head of another architecture.
_CONTAINED = {"BertForPreTraining": "BertForMaskedLM"}


def _unnamed(foreign: Mapping[str, Any]) -> str:
    """Suggest the classes of the model, which files without ``architectures`` do not name."""
    mine = [
        family.architecture
        for family in FAMILIES.values()
        if family.model_type == foreign.get("model_type")
    ]
    classes = ", ".join(f'["{name}"]' for name in mine)
    return f"; write the class of the model there, one of {classes}" if mine else ""


def _way_out(architecture: str, foreign: Mapping[str, Any], stored: Collection[str]) -> str:
    """Suggest what to do about an architecture that is not supported.

    The result is empty if neither another architecture of the same model nor one with a similar
    name and the same tensors is supported.
    """
    if architecture in _TOWERS:
        return f"; load its vision tower as {_TOWERS[architecture]} in transformers, and save it"
    if (inner := _CONTAINED.get(architecture)) is not None:
        return f', which has another head in addition; write ["{inner}"] there to read the model without it'
    alike = [
        family
        for name, family in FAMILIES.items()
        if family.model_type == foreign.get("model_type")
        and architecture.startswith(re.split("For|LMHead|Model", name)[0])
    ]
    if not alike:
        near = [
            name
            for name in difflib.get_close_matches(architecture, FAMILIES)
            if _has_tensors(FAMILIES[name], foreign, stored)
        ]
        return (
            f", which is not supported; its tensors are those of a {near[0]}, so if the name is misspelt, write "
            f'["{near[0]}"] there'
            if near
            else ""
        )
    family = alike[0]
    bare = architecture.endswith("Model") and not architecture.endswith("LMHeadModel")
    tied = foreign.get("tie_word_embeddings", family.absent.get("tie_word_embeddings"))
    if bare and family.prefix and tied is True:
        # A tied head has no weights, so nothing is missing.
        todo = f'write ["{family.architecture}"] there: the head is the token embedding'
    elif bare:
        # transformers would add a head with random weights.
        todo = f"give the folder of the {family.architecture} from which this model was extracted"
    else:
        # Another head would have random weights, so the model is loaded without one if possible.
        best = next((f for f in alike if f.fixed.get("head") == "states"), family)
        todo = f"load it as {best.architecture} in transformers, and save it"
    # After the suggested change, the settings would be refused.
    todo = _refused(family, foreign) or todo
    return f", {'a model without its head' if bare else 'another head'}; {todo}"


def _has_tensors(family: Family, foreign: Mapping[str, Any], stored: Collection[str]) -> bool:
    """Whether a file has exactly the names of the tensors of an architecture."""
    try:
        config = family.ours(foreign)
    except ValueError:
        return False
    found = {re.sub(r"\.\d+\.", ".0.", family.current(name)) for name in stored}
    names = {s.name.format(layers=0, experts=0) for s in family.names(config).values()}
    names = {re.sub(r"\.\d+\.", ".0.", name) for name in names}
    return names <= found and all(
        any(fnmatchcase(name, pattern) for pattern in family.ignored) for name in found - names
    )


def _refused(family: Family, foreign: Mapping[str, Any]) -> str:
    """Return why a family does not support a ``config.json``; empty if it does."""
    try:
        family.ours(foreign)
    except ValueError as error:
        return str(error)
    return ""


def family_for(
    config: Config, foreign: Mapping[str, Any] | None, settings: Mapping[str, Any] | None = None
) -> tuple[Family, dict[str, Any]]:
    """Find the architecture that stores a model, and build its ``config.json``.

    It is the architecture of ``foreign``, or the architecture of the same model with the head, or
    the experts, of ``config``.

    Args:
      config: the config of the model.
      foreign: the ``config.json`` to follow; None: the defaults of the architecture.
      settings: more keys of ``config.json``.

    Returns:
      The architecture, and the content of its ``config.json``.

    Raises:
      CheckpointError: no architecture stores such a model.
    """
    candidates, kind = _candidates(config, foreign)
    if not candidates:
        raise CheckpointError(
            f"no architecture stores a {kind}. Write an Orbax checkpoint instead (--to orbax)"
        )
    wrong: list[ValueError] = []
    for family in candidates:
        try:
            content = family.theirs(config, foreign)
            if settings:
                content = family.theirs(config, {**content, **settings})
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


def _candidates(config: Config, foreign: Mapping[str, Any] | None) -> tuple[list[Family], str]:
    """The architectures that may store a model, and a description of the model."""
    mixture = "experts" in config.sizes()
    candidates = [
        f
        for f in FAMILIES.values()
        if f.config is type(config) and f.has_head(config) and f.mixture == mixture
    ]
    kind = type(config).__name__
    family = None if foreign is None else family_of(foreign, Path("config.json"))
    # A dense model that became a mixture of experts has another architecture.
    if family is not None and family.mixture == mixture:
        kind = family.model_type
        candidates = [
            f for f in FAMILIES.values() if f.model_type == family.model_type and f.has_head(config)
        ]
        candidates = [family] if family.has_head(config) else candidates
    return candidates, f"{kind} that predicts {config.predicts}{' and has experts' * mixture}"


def common(dtypes: Iterable[np.dtype]) -> np.dtype:
    """Return the smallest dtype that represents all values of the given dtypes."""
    return np.dtype(reduce(jnp.promote_types, dtypes))


def _narrow(source: Source, names: Mapping[str, Stored]) -> np.dtype:
    """Return the dtype in which leaves are written that are stored shifted or scaled.

    They were converted to a wider dtype when they were read, and are written in the dtype of the
    other leaves.
    """
    return common(source.leaves[path].dtype for path, stored in names.items() if not stored.moved)


class Form(NamedTuple):
    """How the values of a leaf are stored: ``times * leaf + plus``, in ``dtype``."""

    times: float
    plus: float
    dtype: np.dtype


def forms(source: Source, family: Family) -> dict[str, Form]:
    """Return how an architecture stores the leaves of a model, by path."""
    names = family.names(source.config)
    narrow = _narrow(source, names)
    return {
        path: Form(x.times, x.plus, narrow if x.moved else source.leaves[path].dtype)
        for path, x in names.items()
    }


@dataclass(frozen=True)
class _Part:
    path: str
    stored: Stored


def planned(source: Source, family: Family) -> list[safetensors.Planned]:
    """List the tensors of a model in the order in which they are written, by layers.

    Args:
      source: the model.
      family: the architecture.

    Returns:
      The tensors. Their values are read when they are written.
    """
    groups: dict[str, list[_Part]] = {}
    names = family.names(source.config)
    for path, stored in names.items():
        groups.setdefault(stored.name, []).append(_Part(path, stored))
    groups |= {
        name: [_Part(path, names[path])] for name, path in family.copies(source.config).items()
    }
    out = []
    narrow = _narrow(source, names)
    sizes = source.sizes()
    last = {}

    def read(path: str, layer: int | None) -> np.ndarray:
        """Read a leaf, and keep it, because its experts are written one after the other."""
        if (path, layer) not in last:
            last.clear()
            last[path, layer] = source.read(path, layer)
        return last[path, layer]

    for _, patterns in itertools.groupby(
        groups, lambda name: layers_of(source.leaves[groups[name][0].path].names)
    ):
        patterns = list(patterns)
        for layer in source.leaves[groups[patterns[0]][0].path].layers:
            # The pattern of a copy differs from the name under which its leaf is stored.
            for pattern in patterns:
                parts = groups[pattern]
                if layer not in parts[0].stored.layers(source.leaves[parts[0].path].layers):
                    continue
                for expert, name in enumerate(
                    replace(parts[0].stored, name=pattern).of_experts(sizes)
                ):
                    out.append(_planned(source, family, name, parts, layer, expert, narrow, read))
    return out


def _planned(
    source: Source,
    family: Family,
    pattern: str,
    parts: list[_Part],
    layer: int | None,
    expert: int,
    narrow: np.dtype,
    read: Callable[[str, int | None], np.ndarray],
) -> safetensors.Planned:
    leaves = [source.leaves[part.path] for part in parts]
    dtype = narrow if parts[0].stored.moved else common(leaf.dtype for leaf in leaves)
    shape = parts[0].stored.shape(leaves[0].names, source.sizes())

    def content() -> safetensors.Tensor | np.ndarray:
        origins = {source.origin(part.path, layer) for part in parts}
        if len(origins) == 1 and (origin := next(iter(origins))) is not None:
            stored, old = origin
            if isinstance(stored, HuggingFace) and stored.family is family:
                tensor = stored.tensor(parts[0].stored, old, expert)
                if tensor.dtype == dtype:
                    return tensor
        out = None
        for part, leaf in zip(parts, leaves, strict=True):
            piece = (
                read(part.path, layer)
                if "{experts}" in part.stored.name
                else source.read(part.path, layer)
            )
            piece = piece[expert] if "{experts}" in part.stored.name else piece
            piece = piece if part.stored.moved else piece.astype(dtype, copy=False)
            out = part.stored.theirs(piece, leaf.names, source.sizes(), out).astype(
                dtype, copy=False
            )
        assert out is not None
        return out

    return safetensors.Planned(pattern.format(layers=layer), dtype, shape, content)


def write(
    source: Source, family: Family, foreign: Mapping[str, Any], folder: Path, **options: Any
) -> None:
    """Write the weights and ``config.json`` of a model.

    Args:
      source: the model.
      family: the architecture.
      foreign: the content of ``config.json``.
      folder: a folder that exists.
      options: options of `jaxgrow.checkpoints.io.safetensors.write`.
    """
    safetensors.write(folder, planned(source, family), **options)
    write_json(folder / "config.json", foreign)

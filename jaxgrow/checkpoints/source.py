"""How can a model be read and transformed without loading all of it into memory?

A `Source` reads one layer of one leaf at a time. A grown `Source` is again a `Source`, and so is
the interpolation of two sources. Both compute only the values that are read. To transform a
checkpoint, open it, wrap it in such a `Source`, and write the result.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

import jax
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh, NamedSharding

from jaxgrow.axes import names as naming
from jaxgrow.axes.names import Axes, Names, Params, Tree, axis_of, is_layers, layers_of
from jaxgrow.checkpoints.io.files import CheckpointError, listed, spelt
from jaxgrow.growth import merge
from jaxgrow.growth.apply import check, grow_leaf
from jaxgrow.growth.maps import AxisMap, Growth, Term, new_sizes, terms
from jaxgrow.growth.matrices import Matrix, SparseMap
from jaxgrow.models import Config
from jaxgrow.sharding import RULES, partition_spec
from jaxgrow.typed import Json


@dataclass(frozen=True)
class Leaf:
    """The description of one leaf of a model, without its values.

    Args:
      names: the names of its axes.
      shape: its shape, which includes the layer axis if the leaf is stacked.
      dtype: its dtype.
    """

    names: Names
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def layers(self) -> Sequence[int | None]:
        """The indices for `Source.read`: each layer of a stacked leaf, or None for another leaf."""
        return range(self.shape[0]) if layers_of(self.names) else (None,)

    @property
    def size(self) -> int:
        """The size of the values in bytes."""
        return int(np.prod(self.shape)) * self.dtype.itemsize


class Source:
    """A model whose parameters are read on demand, one layer of one leaf at a time.

    Its attribute ``config`` is the config of the model. ``leaves`` describes each parameter by its
    path (`jaxgrow.axes.path`). ``bytes`` is the total size of the leaves in bytes. ``sources`` are
    the models from which it is computed.
    """

    config: Config
    leaves: dict[str, Leaf]
    sources: "Sequence[Source]" = ()
    # The axes whose size is that of another axis in the format of the model.
    following: Mapping[str, str] = MappingProxyType({})

    @property
    def roots(self) -> "tuple[Checkpoint, ...]":
        """The checkpoints on disk from which the model is made."""
        return tuple(root for source in self.sources for root in source.roots)

    def read(self, path: str, layer: int | None = None) -> np.ndarray:
        """Read one layer of a stacked leaf without its layer axis, or another leaf completely.

        Args:
          path: the path of the leaf.
          layer: index of the layer; None for a leaf that is not stacked.

        Returns:
          A NumPy array.
        """
        raise NotImplementedError

    def origin(self, path: str, layer: int | None) -> "tuple[Source, int | None] | None":
        """Find the stored model that holds this layer unchanged.

        Args:
          path: the path of the leaf.
          layer: index of the layer, as for `read`.

        Returns:
          The stored model and the index of its layer, or None if the values are computed.
        """
        return self, layer

    def sizes(self) -> dict[str, int]:
        """Return the size of every axis by its name."""
        found: dict[str, int] = {}
        for leaf in self.leaves.values():
            found.update(zip(map(axis_of, leaf.names), leaf.shape, strict=True))
        return found

    @property
    def parameters(self) -> int:
        """The number of parameters that the model computes with."""
        return sum(int(np.prod(leaf.shape)) for leaf in self.leaves.values()) - self.config.idle

    @property
    def bytes(self) -> int:
        """The total size of the leaves in bytes.

        :meta private:
        """
        return sum(leaf.size for leaf in self.leaves.values())

    def params(self) -> Params:
        """Read all parameters as a nested dict of NumPy arrays."""
        stacks: dict[str | None, list[str]] = {}
        for path, leaf in self.leaves.items():
            stacks.setdefault(layers_of(leaf.names), []).append(path)
        out = {path: np.empty(leaf.shape, leaf.dtype) for path, leaf in self.leaves.items()}
        # All leaves of a layer are read together, because some may be parts of one tensor.
        for paths in stacks.values():
            for layer, path in itertools.product(self.leaves[paths[0]].layers, paths):
                out[path][... if layer is None else layer] = self.read(path, layer)
        return tree_from_paths(out)

    def shard(self, mesh: Mesh, rules: Mapping[str, str] = RULES) -> Params:
        """Read all parameters onto the devices of a mesh, sharded by `jaxgrow.sharding.partition_specs`.

        A process never holds the complete model in host memory. In addition to the shards on its
        devices, it holds one layer of one leaf, and its own shards of that leaf.

        Args:
          mesh: the devices, which may belong to several processes. Each process reads the shards of
            its own devices.
          rules: a dict from axis of the model to axis of the mesh.

        Returns:
          A nested dict of `jax.Array`.
        """
        return tree_from_paths({path: self._on(path, mesh, rules) for path in self.leaves})

    def _on(self, path: str, mesh: Mesh, rules: Mapping[str, str]) -> jax.Array:
        """Read one leaf onto the devices of a mesh."""
        leaf = self.leaves[path]
        sharding = NamedSharding(mesh, partition_spec(leaf.names, leaf.shape, mesh, rules))
        where = sharding.addressable_devices_indices_map(leaf.shape)
        indices = {str(index): index for index in where.values() if index is not None}
        parts = dict(zip(indices, self._slices(path, [*indices.values()]), strict=True))
        local = [jax.device_put(parts[str(index)], device) for device, index in where.items()]
        return jax.make_array_from_single_device_arrays(leaf.shape, sharding, local)

    def _slices(self, path: str, indices: Sequence[tuple[slice, ...]]) -> list[np.ndarray]:
        """Read several slices of one leaf. Each layer is read only once."""
        leaf = self.leaves[path]
        like = np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
        parts = [np.empty(like[index].shape, leaf.dtype) for index in indices]
        for layer in leaf.layers:
            x = self.read(path, layer)
            for part, index in zip(parts, indices, strict=True):
                if layer is None:
                    part[...] = x[index]
                elif layer in (own := range(leaf.shape[0])[index[0]]):
                    part[own.index(layer)] = x[index[1:]]
        return parts


class Checkpoint(Source):
    """A model in a folder on disk.

    Its attribute ``folder`` is that folder. ``notes`` holds remarks for the user about the
    checkpoint. ``hf_config`` is the content of the ``config.json`` of the Hugging Face model that the
    checkpoint holds or was made from; None if there is no such model.
    """

    folder: Path
    notes: tuple[str, ...] = ()
    hf_config: Json | None
    # Whether the folder is that of a run.
    of_run: bool = False
    # Where the folder of a run, or an Orbax folder, has the parameters.
    stored_in: str = ""
    # The folder of the files that are copied with the model, such as a tokenizer.
    files_beside: Path | None = None
    # Entries of ``config.json`` about these files, if ``hf_config`` has none.
    own_settings: Mapping[str, object] = MappingProxyType({})
    # The task and the labels that a run has recorded.
    _head: Json | None = None

    @property
    def roots(self) -> "tuple[Checkpoint, ...]":
        """The checkpoint itself."""
        return (self,)

    @property
    def head(self) -> Json:
        """Task and labels of the head, as in ``config.json`` (`jaxgrow.checkpoints.hf.labels`)."""
        return self._head if self._head is not None else self.hf_config or {}

    def fingerprint(self) -> str:
        """Return a hash that identifies the content of the checkpoint.

        The hash covers the name, the dtype, the shape, and the first and last 2048 bytes of every
        tensor. It is cheap to compute, and it changes with any training. An edit in the middle of a
        tensor does not change it.
        """
        raise NotImplementedError


class Loaded(Source):
    """A model whose parameters are in memory.

    Args:
      config: the config of the model.
      params: its parameters, a nested dict of arrays.
      like: the checkpoint whose other files are written with the model.

    Raises:
      CheckpointError: leaves are missing or unknown, or have another shape than the config gives
        them.
    """

    def __init__(self, config: Config, params: Params, like: Checkpoint | None = None):
        self.config = config
        self.sources = () if like is None else (like,)
        self._arrays = leaves_by_path(params)
        names = initial_layout(config)
        check_leaves(
            names, {path: np.shape(x) for path, x in self._arrays.items()}, "the parameters"
        )
        self.leaves = {
            path: Leaf(n, shape, self._arrays[path].dtype) for path, (n, shape) in names.items()
        }

    def read(self, path: str, layer: int | None = None) -> np.ndarray:
        array = self._arrays[path]
        return np.asarray(array if layer is None else array[layer])


class Grown(Source):
    """A model that is grown while it is read, equal to ``grow(growth, source)``.

    Args:
      source: the source model.
      growth: the growth, as for `jaxgrow.grow`.
      axes: axis names that replace the names in the config, such as `Config.paper_axes`.

    Raises:
      CheckpointError: the growth does not fit the source, or one of its maps combines layers with
        another axis.
    """

    def __init__(self, source: Source, growth: Growth, axes: Axes | None = None):
        self.source = source
        self.sources = (source,)
        self._growth = growth
        self._names: dict[str, Names] = {p: leaf.names for p, leaf in source.leaves.items()}
        if axes is not None:
            self._names = leaves_by_path(axes)
        together: set[tuple[str, ...]] = set()
        for path, names in self._names.items():
            for term in terms(growth, path, names):
                together.update(term)
        if any(len(axes) > 1 and any(map(is_layers, axes)) for axes in together):
            raise CheckpointError(
                "the growth has a map over layers combined with another axis, which cannot be applied "
                "layer by layer. Load the parameters and call jaxgrow.grow, or use separate maps"
            )
        try:
            shapes = {
                p: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for p, leaf in source.leaves.items()
            }
            check(growth, shapes, self._names)
            sizes = source.sizes() | new_sizes(growth)
            self.config = source.config.resized(growth)
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        self.leaves = {}
        for path, leaf in source.leaves.items():
            shape = tuple(sizes[axis_of(n)] for n in leaf.names)
            self.leaves[path] = Leaf(leaf.names, shape, leaf.dtype)

    def _terms(self, path: str, names: Names) -> Sequence[Term]:
        return terms(self._growth, path, names)

    def read(self, path: str, layer: int | None = None) -> np.ndarray:
        names = self._names[path]
        found = self._terms(path, names)
        if layer is None:
            return np.asarray(grow_leaf(found, names, self.source.read(path)))
        needed, found = _one_layer(found, _layers_key(names), layer)
        if len(needed) == 1:
            old = self.source.read(path, needed[0])[None]  # a view
        else:
            old = np.stack([self.source.read(path, j) for j in needed])
        return np.asarray(grow_leaf(found, names, old)[0])

    def origin(self, path: str, layer: int | None) -> tuple[Source, int | None] | None:
        names = self._names[path]
        found = self._terms(path, names)
        mine = {axis_of(n) for n in names}
        keys = itertools.chain.from_iterable(found)
        touching = [key for key in keys if mine.intersection(key)]
        if not touching:
            return self.source.origin(path, layer)
        if layer is None or touching != [_layers_key(names)] or len(found) != 1:
            return None
        index, weight = _map_row(found[0][_layers_key(names)].write, layer)
        return self.source.origin(path, int(index[0])) if weight.tolist() == [1.0] else None


class Interpolated(Source):
    """The interpolation ``(1 - alpha) * before + alpha * up``, in the dtypes of ``before``.

    Args:
      before: the first model.
      up: the second model.
      alpha: the weight of the second model.

    Raises:
      CheckpointError: the two models have different configs.
    """

    def __init__(self, before: Source, up: Source, alpha: float):
        self.sources = (before, up)
        self._alpha = alpha
        self.config = before.config
        self.leaves = before.leaves
        mine = before.config.as_json()
        other = up.config.run_as(before.config).as_json()
        differ = [
            f"{n} {mine.get(n)} and {other.get(n)}"
            for n in mine | other
            if mine.get(n) != other.get(n)
        ]
        if differ:
            equal = {p: leaf.shape for p, leaf in up.leaves.items()} == {
                p: leaf.shape for p, leaf in before.leaves.items()
            }
            way_out = (
                "To merge them, give both the same config (`jaxgrow interpolate --take-config A`)"
                if equal
                else "De-coalesce the smaller model first"
            )
            raise CheckpointError(f"the two models differ: {', '.join(differ)}. {way_out}")

    def read(self, path: str, layer: int | None = None) -> np.ndarray:
        before, up = (source.read(path, layer) for source in self.sources)
        return merge.interpolate(before, up, self._alpha)

    def origin(self, path: str, layer: int | None) -> None:
        return None


# --- parameter trees by path ---


@lru_cache(maxsize=64)
def initial_layout(config: Config) -> dict[str, tuple[Names, tuple[int, ...]]]:
    """Return the axis names and the shape of each parameter of a freshly initialised model.

    Nothing is allocated. The result is ``{path: (names, shape)}``.

    Raises:
      CheckpointError: no model of these sizes can be built.
    """
    try:
        shapes, axes = jax.eval_shape(lambda: config.init(jax.random.key(0))), config.axes()
    except (ValueError, TypeError, OverflowError) as error:
        raise CheckpointError(f"no model can be built from {config}: {error}") from error
    return {path: (names, x.shape) for path, x, names in naming.leaves(shapes, axes)}


# The settings of a config that are sizes of parameters, or numbers of them.
_SIZES = (
    *("layers", "class_layers", "embed", "heads", "kv_heads", "head_dim", "mlp", "position_mlp"),
    *("experts", "vocab", "types", "registers", "image", "patch", "channels"),
)


def check_sizes(settings: Json, stored: int, file: object) -> None:
    """Check that no size in a config is larger than its weights, before a model is built from it.

    Args:
      settings: the settings of a config by name, which need not be valid.
      stored: the size of the weights in bytes, at least.
      file: the file of the config, for the message.

    Raises:
      CheckpointError: a size is larger.
    """
    wrong: list[str] = []
    for name in _SIZES:
        value = settings.get(name)
        each = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(size, int | float) and size > stored for size in each):
            wrong.append(f"{name} {spelt(value)}")
    if wrong:
        raise CheckpointError(
            f"{file} has {listed(wrong)}, but the weights have only {stored:,} bytes. Does it belong "
            "to another model?"
        )


def leaves_by_path(tree: Tree) -> Json:
    """Return the leaves of a tree by their paths. Tuples of axis names are leaves."""
    return naming.by_path(tree, is_leaf=naming.is_names)


def tree_from_paths(leaves: Mapping[str, object]) -> Params:
    """Build the nested dict from leaves by their paths, such as ``{"blocks/mlp": x}``."""
    return unflatten_dict(dict(leaves), sep="/")


def check_leaves(
    expected: Mapping[str, tuple[Names, tuple[int, ...]]],
    found: Mapping[str, tuple[int, ...]],
    what: str,
) -> None:
    """Check that the leaves found are the leaves expected.

    Args:
      expected: the axis names and the shape of each expected leaf, by path.
      found: the shape of each leaf found, by path.
      what: the name of the found leaves in the message.

    Raises:
      CheckpointError: leaves are missing or unknown, or have another shape. One message lists them
        all.
    """
    missing = [f"missing: {path}" for path in expected if path not in found]
    unknown = [f"unknown: {path}" for path in found if path not in expected]
    wrong = [
        f"{path} ({', '.join(map(axis_of, names))}) has shape {found[path]}, but should have {shape}"
        for path, (names, shape) in expected.items()
        if path in found and found[path] != shape
    ]
    if missing or unknown or wrong:
        lines = listed(missing, unknown, wrong, separator="\n  ")
        raise CheckpointError(f"{what} does not fit the config:\n  {lines}")


# --- one layer of a growth ---


def _layers_key(names: Names) -> tuple[str, ...]:
    """The key of the map that acts on the layer axis of a stacked leaf."""
    stacked = layers_of(names)
    assert stacked is not None
    return (stacked,)


def _one_layer(
    found: Sequence[Term], key: tuple[str, ...], layer: int
) -> tuple[list[int], list[Term]]:
    """Restrict the terms of a growth to one new layer.

    Args:
      found: the terms.
      key: the key of the map of layers, from `_layers_key`.
      layer: index of the new layer.

    Returns:
      The indices of the old layers that the new layer needs, and the terms that compute it from
      them.
    """
    rows = [
        _map_row(term[key].write, layer) if key in term else _one_entry(layer) for term in found
    ]
    rows = rows or [_one_entry(layer)]
    live = [i for i, (_, weight) in enumerate(rows) if weight.any()] or [0]
    rows = [rows[i] for i in live]
    found = [found[i] for i in live if found]
    needed = sorted({int(j) for index, _ in rows for j in index})
    small = [
        SparseMap(np.searchsorted(needed, index)[None], weight[None], len(needed))
        for index, weight in rows
    ]
    return needed, [{**term, key: AxisMap(m, m)} for term, m in zip(found, small, strict=False)]


def _map_row(m: Matrix, i: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices and weights of one row without its zeros. A row of zeros keeps one entry."""
    if isinstance(m, SparseMap):
        index = np.asarray(m.index[i])
        weight = np.asarray(m.weight[i])
    else:
        weight = np.asarray(m[i])
        index = np.arange(len(weight))
    keep = weight != 0
    keep[0] |= not keep.any()
    return index[keep], weight[keep]


def _one_entry(layer: int) -> tuple[np.ndarray, np.ndarray]:
    return np.array([layer]), np.ones(1)

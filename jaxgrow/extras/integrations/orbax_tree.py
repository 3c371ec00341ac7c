"""How are Orbax checkpoints read and written array by array, without the code that saved them?

`OrbaxTree` lists the arrays of a checkpoint by path and reads one at a time. `Writer` writes a
checkpoint with the same tree and arrays of other shapes. Both use TensorStore, so at most one array
is in memory.
"""

import base64
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import tensorstore as ts

from jaxgrow.checkpoints.io.files import CheckpointError, listed, read_json
from jaxgrow.extras.integrations.copying import copy_tree
from jaxgrow.typed import Json
from jaxgrow.untrusted import CheckedPath, checked_path, checked_tree, file_limits

_METADATA = "_METADATA"
_ARRAYS = "array_metadatas"
_SHARDING = "_sharding"
_DATABASE = ("manifest.ocdbt", "d")
_PROCESS = "ocdbt.process_"
_DATA = (*_DATABASE, _ARRAYS, _SHARDING, _METADATA)
# The maximum size of a metadata file in bytes.
LARGEST = 100 << 20
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
# Possible names of the item with the arrays, if a step has several items.
_ITEMS = ("items", "default", "state", "params")


@dataclass(frozen=True)
class Array:
    """The shape and format of an array of a checkpoint.

    Attributes:
      shape: the shape of the array.
      dtype: the dtype.
      chunk: the shape of a stored chunk, which is the shape of one shard.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...]


class OrbaxTree:
    """The arrays of an Orbax checkpoint.

    Args:
      folder: the folder of all steps of a run (its last step is used), of one step, or of one item
        of a step.
      home: the folder that the user named, which contains ``folder``; None: ``folder``.

    Attributes:
      folder: as given.
      item: the folder with the arrays.
      arrays: `Array` by path, such as ``"params/params/decoder/decoder_norm/scale"``.
      left_out: paths of files beside the arrays that a `Writer` did not copy, because they are
        links that lead out of ``home``.

    Raises:
      CheckpointError: the folder contains no Orbax checkpoint, or its metadata is damaged.
    """

    def __init__(self, folder: Path, home: Path | None = None):
        self._enter(folder, _item_of(folder), home)
        self.metadata = read_json(self.file(_METADATA), LARGEST)
        self.ocdbt = (self.item / "manifest.ocdbt").exists()
        try:
            entries = self.metadata["tree_metadata"].values()
            paths = [_entry_path(entry) for entry in entries if _is_array_entry(entry)]
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{self.item / _METADATA} does not describe a tree: {error!r}"
            ) from error
        self.arrays = self._all_described(paths)

    def _enter(self, folder: Path, item: Path, home: Path | None = None) -> None:
        """Check the database that TensorStore opens by itself."""
        self.folder = folder
        self.item = item
        self.home = folder if home is None else home
        self.left_out: list[str] = []
        self._stored = 0
        manifest = item / _DATABASE[0]
        if os.path.lexists(manifest):
            # A database may have its files under any names.
            self._stored = checked_tree(item, self.home)
            # TensorStore reads it completely.
            file_limits().check(str(manifest), bytes=manifest.stat().st_size)

    def file(self, name: str) -> CheckedPath:
        """The path of a file beside the arrays."""
        inner = (self.item / name).relative_to(self.home)
        return checked_path(self.home, inner.as_posix(), deep=True)

    def open(self, path: str) -> Any:
        """Open the TensorStore of an array."""
        spec = _spec(self.item, self.stored_name(path), self.ocdbt, self.zarr3)
        # Otherwise, a chunk that was lost would be read as zeros.
        spec["fill_missing_data_reads"] = False
        return ts.open(spec, open=True, read=True).result()

    def stored_name(self, path: str) -> str:
        """The name under which an array is stored."""
        return path.replace("/", ".")

    def read(self, path: str) -> np.ndarray:
        """Read one array, with all its shards.

        Raises:
          CheckpointError: a file of the array is missing or damaged.
        """
        self._check_files(path)
        try:
            return np.asarray(self.open(path).read().result())
        except ValueError as error:
            raise CheckpointError(
                f"{self.item}: array {path} cannot be read, because a file is missing or damaged: "
                f"{error}. Copy the checkpoint again, or use an earlier step"
            ) from error

    def _check_files(self, path: str) -> None:
        """Check the sizes of files that TensorStore reads completely into memory.

        Raises:
          CheckpointError: a file is much larger than a chunk.
        """
        array = self.arrays[path]
        chunk = max(math.prod(array.chunk) * array.dtype.itemsize, 1 << 20)
        folder = checked_path(self.item, self.stored_name(path), deep=True, new=True).path
        files = () if self.ocdbt else folder.rglob("*")
        if large := [file.name for file in files if file.stat().st_size > 2 * chunk]:
            raise CheckpointError(
                f"{self.item}: files of array {path} are larger than its chunks of shape "
                f"{array.chunk}: {listed(large)}. Copy the checkpoint again"
            )

    @property
    def zarr3(self) -> bool:
        """Whether the arrays are stored in version 3 of the zarr format."""
        return bool(self.metadata.get("use_zarr3"))

    def _all_described(self, paths: list[str]) -> dict[str, Array]:
        """Open every array.

        Raises:
          CheckpointError: two arrays have the same name or one is inside the other, so that one of
            them would be written over the other, or an array cannot be opened.
        """
        names = sorted(map(self.stored_name, paths))
        twice = [b for a, b in itertools.pairwise(names) if a == b or b.startswith(f"{a}/")]
        if twice:
            raise CheckpointError(
                f"{self.item}: several arrays are stored at the same place: {listed(twice)}. Save "
                "the checkpoint again"
            )
        if not self.ocdbt:
            places = (checked_path(self.item, name, deep=True, new=True).path for name in names)
            self._stored = sum(checked_tree(place, self.home) for place in places)
        return {path: self._described(path) for path in paths}

    def _described(self, path: str) -> Array:
        try:
            store = self.open(path)
        except ValueError as error:
            raise CheckpointError(f"{self.item}: array {path} cannot be opened: {error}") from error
        chunk = tuple(store.chunk_layout.write_chunk.shape or store.shape)
        dtype = np.dtype(store.dtype.numpy_dtype)
        # At least one complete chunk is in memory while the array is read.
        numbers = max(math.prod(store.shape), math.prod(chunk))
        what = f"{self.item}: array {path} of shape {tuple(store.shape)}"
        file_limits().check_expansion(what, numbers * dtype.itemsize, self._stored)
        return Array(tuple(store.shape), dtype, chunk)


def _item_of(folder: Path) -> Path:
    if (folder / _METADATA).is_file():
        return folder
    inner = _items_with_arrays(_last_orbax_step(folder))
    by_name = {path.name: path for path in inner}
    named = [by_name[name] for name in _ITEMS if name in by_name]
    if named or len(inner) == 1:
        return (named or inner)[0]
    raise CheckpointError(
        f"{folder} contains no Orbax checkpoint: neither it nor a step in it has a file {_METADATA}"
    )


def _is_array_entry(entry: Json) -> bool:
    return (
        not entry["value_metadata"]["skip_deserialize"]
        and entry["value_metadata"]["value_type"] != "string"
    )


def _spec(item: Path, name: str, ocdbt: bool, zarr3: bool) -> Json:
    place = checked_path(item, name, deep=True, new=True)
    store = {**_ocdbt(item), "path": f"{name}/"} if ocdbt else _file_store(place.path)
    return {"driver": "zarr3" if zarr3 else "zarr", "kvstore": store}


def _ocdbt(folder: Path) -> Json:
    return {"driver": "ocdbt", "base": _file_store(folder)}


def _file_store(folder: Path) -> Json:
    # In a URL, some characters of a path would have another meaning, such as "%" and "#".
    return {"driver": "file", "path": f"{folder.resolve()}/"}


class Writer:
    """Write a checkpoint in the format of another one, with other shapes or other layers.

    Several processes can write one checkpoint together: each of them writes some of the arrays, and
    one of them calls `finish` at the end.

    Args:
      source: the checkpoint whose format is used.
      folder: the new folder, which exists.
      process: the index of this process.
    """

    def __init__(self, source: OrbaxTree, folder: Path, process: int = 0):
        self._source = source
        self._process = process
        self._item = folder / source.item.relative_to(source.folder)
        self._part = self._item / f"{_PROCESS}{process}" if source.ocdbt else self._item
        self._part.mkdir(parents=True, exist_ok=True)

    def write(self, path: str, x: np.ndarray, like: str) -> None:
        """Write one array.

        Args:
          path: the path of the array in the new checkpoint.
          x: the values of the array.
          like: the path of the source array whose format and sharding are used.
        """
        old = self._source.open(like)
        spec = old.spec(retain_context=False).to_json() | _spec(
            self._part, self._source.stored_name(path), self._source.ocdbt, self._source.zarr3
        )
        chunk = self.chunk(like, x.shape)
        # Orbax does not read arrays whose zero chunks are not stored.
        spec["store_data_equal_to_fill_value"] = True
        spec["metadata"] = _zarr_metadata(spec["metadata"], x.shape, chunk)
        spec.pop("transform", None)
        store = ts.open(ts.Spec(spec), create=True).result()
        store.write(x.astype(old.dtype.numpy_dtype, copy=False)).result()

    def chunk(self, like: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The chunk shape of an array of this shape with the sharding of a source array."""
        return _new_chunk(self._source.arrays[like], shape)

    def finish(self, places: Mapping[str, str], shapes: Shapes, processes: int = 1) -> None:
        """Write everything except the arrays.

        Args:
          places: for the path of each array in the new checkpoint, the path of the source array
            with its format.
          shapes: the shape of each new array.
          processes: the number of processes that wrote arrays.
        """
        if self._source.ocdbt:
            self._merge(processes)
        source = self._source
        into = self._item
        names = map(source.stored_name, [] if source.ocdbt else source.arrays)
        arrays = {name.split("/")[0] for name in names}
        source.left_out += _copy_beside(source.item, into, arrays, source.home)
        for inner in [source.item, *source.item.parents][
            : len(source.item.relative_to(source.folder).parts)
        ]:
            into = into.parent
            source.left_out += _copy_beside(
                inner.parent, into, {inner.name}, source.home, _is_step(inner)
            )
        self._describe(places, shapes)

    def _merge(self, processes: int) -> None:
        context = ts.Context()
        transaction = ts.Transaction(atomic=True)
        target = database(self._item, context).with_transaction(transaction)
        for process in range(processes):
            source = database(self._item / f"{_PROCESS}{process}", context)
            source.experimental_copy_range_to(target).result()
        transaction.commit_sync()

    def _describe(self, places: Mapping[str, str], shapes: Shapes) -> None:
        """Write the files that list the arrays."""
        source = self._source
        entries = {}
        old = {_entry_path(entry): entry for entry in source.metadata["tree_metadata"].values()}
        kept = {path: path for path, entry in old.items() if not _is_array_entry(entry)}
        for path, like in {**places, **kept}.items():
            entry = json.loads(json.dumps(old[like]))
            for key, name in zip(entry["key_metadata"], path.split("/"), strict=True):
                key["key"] = name if isinstance(key["key"], str) else type(key["key"])(name)
            if "write_shape" in entry["value_metadata"]:
                entry["value_metadata"]["write_shape"] = list(self.chunk(like, shapes[path]))
            entries[str(tuple(path.split("/")))] = entry
        metadata = {**source.metadata, "tree_metadata": entries}
        (self._item / _METADATA).write_text(json.dumps(metadata))
        self._describe_arrays(places, shapes)

    def _describe_arrays(self, places: Mapping[str, str], shapes: Shapes) -> None:
        """Write the two files that list arrays by name, if the source has them."""
        arrays: Json = {}
        for file in sorted(self._source.item.glob(f"{_ARRAYS}/process_*")):
            about = self._source.file(f"{_ARRAYS}/{file.name}")
            found = read_json(about, LARGEST)["array_metadatas"]
            arrays |= {
                entry["array_metadata"]["param_name"]: entry["array_metadata"] for entry in found
            }
        described = []
        for path, like in places.items():
            if (old := arrays.get(like.replace("/", "."))) is not None:
                chunk = list(self.chunk(like, shapes[path]))
                new = {
                    **old,
                    "param_name": path.replace("/", "."),
                    "write_shape": chunk,
                    "chunk_shape": chunk,
                }
                described.append({"array_metadata": new})
        if described:
            (self._item / _ARRAYS).mkdir()
            content = json.dumps({"array_metadatas": described})
            (self._item / _ARRAYS / "process_0").write_text(content)
        if os.path.lexists(self._source.item / _SHARDING):
            of = read_json(self._source.file(_SHARDING), LARGEST)
            pairs = {_sharding_key(path): _sharding_key(like) for path, like in places.items()}
            kept = {new: of[old] for new, old in pairs.items() if old in of}
            (self._item / _SHARDING).write_text(json.dumps(kept))


class OrbaxItems:
    """A checkpoint with separate items for parameters and optimizer state, as Tunix writes it.

    It has the interface of `OrbaxTree`.

    Args:
      folder: the folder of all steps of a run, or of one step.

    Attributes:
      folder: as given.
      item: the folder of the step.
      trees: `OrbaxTree` of each item, by its name.
      arrays: `Array` by path, which begins with the name of the item.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.item = _last_orbax_step(folder)
        self.left_out: list[str] = []
        self.trees = {path.name: OrbaxTree(path, folder) for path in _items_with_arrays(self.item)}
        self.arrays: dict[str, Array] = {}
        for name, tree in self.trees.items():
            self.arrays |= {f"{name}/{path}": array for path, array in tree.arrays.items()}

    def read(self, path: str) -> np.ndarray:
        """Read one array."""
        name, _, inside = path.partition("/")
        return self.trees[name].read(inside)


class ItemsWriter:
    """Write a checkpoint in the format of an `OrbaxItems`, with the interface of `Writer`."""

    def __init__(self, source: OrbaxItems, folder: Path, process: int = 0):
        self._source = source
        self._step = folder / source.item.relative_to(source.folder)
        self._writers = {
            name: Writer(tree, self._step / name, process) for name, tree in source.trees.items()
        }

    def write(self, path: str, x: np.ndarray, like: str) -> None:
        """Write one array, as `Writer.write`."""
        name, _, inside = path.partition("/")
        self._writers[name].write(inside, x, like.partition("/")[2])

    def finish(self, places: Mapping[str, str], shapes: Shapes, processes: int = 1) -> None:
        """Write everything except the arrays, as `Writer.finish`."""
        for name, writer in self._writers.items():
            mine = {p.removeprefix(f"{name}/"): p for p in places if p.startswith(f"{name}/")}
            writer.finish(
                {short: places[path].removeprefix(f"{name}/") for short, path in mine.items()},
                {short: shapes[path] for short, path in mine.items()},
                processes,
            )
        source = self._source
        home = source.folder
        source.left_out += _copy_beside(source.item, self._step, set(source.trees), home)
        if source.item != home:
            source.left_out += _copy_beside(
                home, self._step.parent, {source.item.name}, home, steps=True
            )
        for tree in source.trees.values():
            source.left_out += tree.left_out


def is_orbax(folder: Path) -> bool:
    """Whether a folder holds an Orbax checkpoint: of a run, of a step, or of an item."""
    patterns = (_METADATA, f"*/{_METADATA}", f"*/*/{_METADATA}")
    return any(any(folder.glob(pattern)) for pattern in patterns)


def has_items(folder: Path) -> bool:
    """Whether parameters and optimizer state are separate items, as Tunix writes them."""
    inner = _items_with_arrays(_last_orbax_step(folder))
    alone = len(inner) < 2 or any(path.name in _ITEMS for path in inner)
    return not alone and not (folder / _METADATA).is_file()


def _is_step(path: Path) -> bool:
    """Whether a path has the name of a step of a run, such as ``100`` or ``step-100``."""
    return re.fullmatch(r"\D*\d+", path.name) is not None


def _items_with_arrays(step: Path) -> list[Path]:
    """The items of a step that hold arrays."""
    return [path.parent for path in sorted(step.glob(f"*/{_METADATA}"))]


def _last_orbax_step(folder: Path) -> Path:
    """The last step in the folder of a run; any other folder is returned unchanged."""
    steps = filter(_is_step, folder.iterdir()) if folder.is_dir() else ()
    return last_step(filter(_items_with_arrays, steps)) or folder


def last_step(steps: Iterable[Path]) -> Path | None:
    """The path with the largest number at the end of its name; None: no name ends in a number."""
    ends = ((re.search(r"\d+$", path.name), path) for path in steps)
    numbered = {int(end[0]): path for end, path in ends if end}
    return numbered[max(numbered)] if numbered else None


def _copy_beside(
    folder: Path, into: Path, skip: set[str], home: Path, steps: bool = False
) -> list[str]:
    """Copy the metadata and the other items of a checkpoint, without arrays and other steps.

    Other steps may have any name: a link to a step would become a copy of the model before its
    growth.

    Args:
      folder: the folder to copy.
      into: the folder to copy into.
      skip: the names of files and folders that are not copied.
      home: the folder that the user named. Links that lead out of it are not followed.
      steps: whether the folder holds the steps of a run.

    Returns:
      The paths that were not copied because of their links.
    """
    left_out: list[str] = []
    for path in sorted(folder.iterdir()):
        arrays = path.name in _DATA or path.name.startswith(_PROCESS) or path.name in skip
        # It may have another name, such as a link ``latest`` to a step.
        other_step = (
            steps
            and path.is_dir()
            and (_is_step(path) or is_orbax(path) or (path / "manifest.ocdbt").exists())
        )
        if not arrays and not other_step:
            left_out += copy_tree(path, into / path.name, home)
    return left_out


def _sharding_key(path: str) -> str:
    return base64.b64encode(path.replace("/", ".").encode()).decode()


def database(folder: Path, context: ts.Context | None = None) -> ts.KvStore:
    """The key-value store of the arrays in a folder."""
    return ts.KvStore.open(_ocdbt(folder), context=context).result()


def _entry_path(entry: Json) -> str:
    return "/".join(str(key["key"]) for key in entry["key_metadata"])


def _new_chunk(old: Array, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The chunk shape of a new array.

    It keeps the number of chunks along each axis if the new size is divisible by it, and otherwise
    the size of the chunks.
    """
    pairs = zip(old.shape, old.chunk, shape, strict=True)
    return tuple(
        chunk * n // size if size and chunk * n % size == 0 else max(1, min(chunk, n))
        for size, chunk, n in pairs
    )


def _zarr_metadata(metadata: Json, shape: tuple[int, ...], chunk: tuple[int, ...]) -> Json:
    """The metadata of a zarr array with another shape."""
    if "chunk_grid" not in metadata:
        return {**metadata, "shape": list(shape), "chunks": list(chunk)}
    grid = {"name": "regular", "configuration": {"chunk_shape": list(chunk)}}
    codecs = [_zarr_codec(codec, chunk) for codec in metadata.get("codecs", [])]
    return {**metadata, "shape": list(shape), "chunk_grid": grid, "codecs": codecs}


def _zarr_codec(codec: Json, chunk: tuple[int, ...]) -> Json:
    """Adapt a codec to the new chunk shape.

    Orbax stores the chunks of a shard in a ``sharding_indexed`` codec. In the new array, each shard
    is one chunk.
    """
    if codec["name"] != "sharding_indexed":
        return codec
    return {**codec, "configuration": {**codec["configuration"], "chunk_shape": list(chunk)}}


def each_of(paths: Mapping[str, int], processes: int, process: int) -> list[str]:
    """Select the arrays that one process writes, such that all processes write similar amounts.

    Args:
      paths: the size of each array in bytes, by path.
      processes: the number of processes.
      process: the index of this process.

    Example:
      >>> each_of({"a": 4, "b": 3, "c": 1}, 2, 1)
      ['b', 'c']
    """
    load = [0] * processes
    mine = []
    for path, size in sorted(paths.items(), key=lambda item: -item[1]):
        least = load.index(min(load))
        load[least] += size
        if least == process:
            mine.append(path)
    return mine

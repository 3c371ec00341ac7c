"""Which checkpoints of other trainers are read and written array by array?

Each class of trees has the interface of `OrbaxTree`, and a writer with the interface of `Writer`.
Levanter and EasyDeL store the arrays as Orbax does, but describe them in other files.
"""

import itertools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

from jaxgrow.checkpoints.io.files import CheckpointError, inside, read_json
from jaxgrow.extras.integrations import orbax_tree
from jaxgrow.extras.integrations.orbax_tree import (
    ItemsWriter,
    OrbaxItems,
    OrbaxTree,
    Shapes,
    Writer,
)
from jaxgrow.extras.integrations.torch_tree import TorchTree, TorchWriter, is_distributed

_DATABASE = "manifest.ocdbt"
_MANIFEST = "manifest.json"
_COMPLETE = "metadata.json"
_ARRAY = "/zarr.json"
_INDEX = "tensorstore_index.json"

AnyTree: TypeAlias = OrbaxTree | OrbaxItems | TorchTree
AnyWriter: TypeAlias = Writer | ItemsWriter | TorchWriter


class LevanterWriter(Writer):
    """Write a checkpoint in the format of a `LevanterTree`."""

    def _describe(self, places: Mapping[str, str], shapes: Shapes) -> None:
        file = self._item / _MANIFEST
        if not file.exists():
            return
        manifest = read_json(inside(self._item, _MANIFEST), orbax_tree.LARGEST)
        old = {entry["path"]: entry for entry in manifest["arrays"]}
        manifest["arrays"] = [
            {
                **old[like],
                "path": path,
                "shape": shapes[path],
                "chunk_shape": self.chunk(like, shapes[path]),
            }
            for path, like in places.items()
        ]
        file.write_text(json.dumps(manifest, indent=2))


class LevanterTree(OrbaxTree):
    """The arrays of a levanter checkpoint: zarr version 3 in an OCDBT database.

    Each key of the database is the path of an array, and ``manifest.json`` repeats their shapes.

    Args:
      folder: the folder of all steps of a run (its last step is used), or of one step.

    Raises:
      CheckpointError: the folder contains no such checkpoint, or an array cannot be opened.
    """

    def __init__(self, folder: Path):
        self._enter(folder, _last_levanter_step(folder))
        # Older versions of levanter write no manifest. A link that leads out is not a missing one.
        if os.path.lexists(self.item / _MANIFEST):
            inside(self.item, _MANIFEST)
        self.ocdbt = True
        self.metadata = {"use_zarr3": True}
        keys = [key.decode() for key in orbax_tree.database(self.item).list().result()]
        paths = [key.removesuffix(_ARRAY) for key in keys if key.endswith(_ARRAY)]
        self.arrays = self._all_described(paths)

    def stored_name(self, path: str) -> str:
        return path


class EasydelWriter(Writer):
    """Write a checkpoint in the format of an `EasydelTree`."""

    def _describe(self, places: Mapping[str, str], shapes: Shapes) -> None:
        index = read_json(inside(self._item, _INDEX), orbax_tree.LARGEST)
        for entry in itertools.chain.from_iterable(index["prefixes"].values()):
            entry["shape"] = list(shapes[entry["path"]])
        (self._item / _INDEX).write_text(json.dumps(index, indent=2))


class EasydelTree(OrbaxTree):
    """The arrays of an EasyDeL checkpoint: zarr folders below ``model`` and ``tx``, and an index.

    The checkpoint also contains pickled trees, which determine the number of layers. They are
    copied without being read.

    Args:
      folder: the folder that ``EasyDeLState.save_state`` wrote.

    Raises:
      CheckpointError: the index is damaged, or an array cannot be opened.
    """

    def __init__(self, folder: Path):
        self._enter(folder, folder)
        self.ocdbt = False
        self.metadata = {}
        try:
            prefixes = read_json(self.file(_INDEX), orbax_tree.LARGEST)["prefixes"].values()
            paths = [str(entry["path"]) for entry in itertools.chain.from_iterable(prefixes)]
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{folder / _INDEX} does not list arrays: {error!r}") from error
        self.arrays = self._all_described(paths)

    def stored_name(self, path: str) -> str:
        return path


_WRITERS: dict[type, Callable[..., AnyWriter]] = {
    OrbaxTree: Writer,
    OrbaxItems: ItemsWriter,
    LevanterTree: LevanterWriter,
    EasydelTree: EasydelWriter,
    TorchTree: TorchWriter,
}


def writer_like(source: AnyTree, folder: Path, process: int) -> AnyWriter:
    """The writer for a checkpoint like ``source``."""
    return _WRITERS[type(source)](source, folder, process)


def open_tree(folder: Path) -> AnyTree:
    """Open a checkpoint of another trainer.

    Raises:
      CheckpointError: the folder contains none, or it is damaged.
    """
    if orbax_tree.is_orbax(folder):
        return OrbaxItems(folder) if orbax_tree.has_items(folder) else OrbaxTree(folder)
    if (folder / _INDEX).is_file():
        return EasydelTree(folder)
    if _is_complete(folder) or any(map(_is_complete, folder.glob("*"))):
        return LevanterTree(folder)
    return TorchTree(folder) if is_distributed(folder) else OrbaxTree(folder)


def _is_complete(folder: Path) -> bool:
    return (folder / _DATABASE).is_file() and (folder / _COMPLETE).is_file()


def _last_levanter_step(folder: Path) -> Path:
    """The folder of a step of levanter: the given one, or the last step in it.

    Raises:
      CheckpointError: no step is complete.
    """
    if _is_complete(folder):
        return folder
    step = orbax_tree.last_step(filter(_is_complete, folder.iterdir()))
    if step is None:
        raise CheckpointError(f"{folder} has no step with {_DATABASE} and {_COMPLETE}")
    return step

"""How are checkpoints of EasyDeL read and written array by array?

Each array is a zarr folder below ``model`` or ``tx``, and ``tensorstore_index.json`` lists the
arrays. A checkpoint also contains pickled trees, which determine the number of layers. They are
copied without being read.
"""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxgrow.checkpoints.io.files import CheckpointError, inside, read_json
from jaxgrow.extras.integrations import orbax_tree

INDEX = "tensorstore_index.json"


class EasydelTree(orbax_tree.OrbaxTree):
    """The arrays of an EasyDeL checkpoint, with the interface of `OrbaxTree`.

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
            prefixes = read_json(self.file(INDEX), orbax_tree.LARGEST)["prefixes"].values()
            entries = itertools.chain.from_iterable(prefixes)
            paths = [str(entry["path"]) for entry in entries]
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{folder / INDEX} does not list arrays: {error!r}") from error
        self.arrays = self._all_described(paths)

    def stored_name(self, path: str) -> str:
        return path


class EasydelWriter(orbax_tree.Writer):
    """Write a checkpoint in the format of an `EasydelTree`, with the interface of `Writer`."""

    def finish(
        self, places: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], processes: int = 1
    ) -> None:
        """Write everything except the arrays, as `Writer.finish`."""
        super().finish(places, shapes, processes)
        index: dict[str, Any] = read_json(inside(self._item, INDEX), orbax_tree.LARGEST)
        for entries in index["prefixes"].values():
            for entry in entries:
                entry["shape"] = list(shapes[entry["path"]])
        (self._item / INDEX).write_text(json.dumps(index, indent=2))

    def _describe(
        self, places: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
    ) -> None: ...


def is_easydel(folder: Path) -> bool:
    """Whether a folder holds an EasyDeL checkpoint."""
    return (folder / INDEX).is_file()

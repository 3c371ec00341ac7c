"""How are checkpoints of levanter read and written array by array?

They have the arrays of Orbax (zarr version 3 in an OCDBT database), but other metadata: each key of
the database is the path of an array, and ``manifest.json`` repeats their shapes.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from jaxgrow.checkpoints.io.files import CheckpointError, inside, read_json
from jaxgrow.extras.integrations import orbax_tree

_DATABASE = "manifest.ocdbt"
_MANIFEST = "manifest.json"
_COMPLETE = "metadata.json"
_ARRAY = "/zarr.json"


class LevanterTree(orbax_tree.OrbaxTree):
    """The arrays of a levanter checkpoint, with the interface of `OrbaxTree`.

    Args:
      folder: the folder of all steps of a run (its last step is used), or of one step.

    Raises:
      CheckpointError: the folder contains no such checkpoint, or an array cannot be opened.
    """

    def __init__(self, folder: Path):
        self._enter(folder, _step(folder))
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


class LevanterWriter(orbax_tree.Writer):
    """Write a checkpoint in the format of a `LevanterTree`, with the interface of `Writer`."""

    def finish(
        self, places: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], processes: int = 1
    ) -> None:
        """Write everything except the arrays, as `Writer.finish`."""
        super().finish(places, shapes, processes)
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

    def _describe(
        self, places: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
    ) -> None: ...


def is_levanter(folder: Path) -> bool:
    """Whether a folder holds a levanter checkpoint, or the steps of a run."""
    return _complete(folder) or any(map(_complete, folder.glob("*")))


def _complete(folder: Path) -> bool:
    return (folder / _DATABASE).is_file() and (folder / _COMPLETE).is_file()


def _step(folder: Path) -> Path:
    """The folder of a step: the given one, or the last step in it.

    Raises:
      CheckpointError: no step is complete.
    """
    if _complete(folder):
        return folder
    steps = [path for path in folder.iterdir() if _complete(path)]
    numbers: dict[int, Path] = {}
    for path in steps:
        if found := re.search(r"\d+$", path.name):
            numbers[int(found[0])] = path
    if not numbers:
        raise CheckpointError(f"{folder} has no step with {_DATABASE} and {_COMPLETE}")
    return numbers[max(numbers)]

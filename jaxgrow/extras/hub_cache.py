"""Find the snapshot of a model in the cache of Hugging Face."""

from pathlib import Path

from jaxgrow.checkpoints.io.files import CheckpointError
from jaxgrow.checkpoints.opening import LOCATIONS
from jaxgrow.untrusted import checked_path


def find_snapshot(folder: Path) -> Path:
    """Find the snapshot to read in a folder ``models--org--name`` of the cache of Hugging Face.

    It is the revision that was downloaded last as ``main``, or the only snapshot. Any other folder
    is returned unchanged.

    Raises:
      CheckpointError: there are several snapshots, and ``main`` is not one of them.
      UntrustedError: the snapshot is a link that leads out of the folder.
    """
    if not folder.name.startswith("models--") or not (folder / "snapshots").is_dir():
        return folder
    main = folder / "refs" / "main"
    found = sorted(f for f in (folder / "snapshots").iterdir() if f.is_dir())
    if main.is_file():
        with checked_path(folder, "refs/main", deep=True).open() as file:
            name = file.read(1000).decode(errors="replace").strip()
        found = [f for f in found if f.name == name] or found
    if len(found) != 1:
        names = ", ".join(f.name for f in found) or "none"
        raise CheckpointError(
            f"{folder} has these snapshots: {names}. Give the path of one of them, {folder.name}/snapshots/HASH"
        )
    checked_path(folder, f"snapshots/{found[0].name}", deep=True)
    return found[0]


LOCATIONS.add("snapshot", find_snapshot)

"""Which folders in ``checkpoints/`` are checkpoints of this run, are they intact, and which may go?

A save ends with a rename of a sealed folder to ``STEP``. A folder of this name without checksums
was therefore damaged later, and is never deleted. Only folders that contain nothing but the files
of a save are deleted: unfinished saves, and checkpoints that newer ones have replaced.
"""

import itertools
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from jaxgrow.checkpoints.io.checksums import NAME, damage
from jaxgrow.untrusted import checked_path, file_limits
from train.common.errors import UserError
from train.common.output import say

SAVING = ".saving-"
OLD = ".old-"
DAMAGED = "damaged-"
LOG = "log"  # the copy of the log in a checkpoint
KEPT = "kept"  # an empty file in a checkpoint that is never deleted
DELETING = ".deleting"  # an empty file in a checkpoint that is being deleted
STEP = "step"  # the file with the step, which tells a checkpoint from a copy under another name
# Only Orbax writes these names. A folder of a user may have a folder `models` as well.
_MARKS = frozenset(
    {NAME, STEP, "_CHECKPOINT_METADATA", "_METADATA", "commit_success.txt", "orbax.checkpoint"}
)
_WRITTEN = _MARKS | {KEPT, LOG, DELETING, "models"}
_TEMPORARY = ".orbax-checkpoint-tmp"


def checkpoint_steps(folder: Path, *, report: bool = False) -> list[int]:
    """Return the steps of all checkpoints of a run, damaged ones as well, in ascending order.

    Args:
      folder: folder of the checkpoints.
      report: whether to report other folders that are named like a step on stderr.
    """
    found = []
    for path in _step_folders(folder):
        if why := _foreign(path):
            if report:
                say(f"{path} {why}: it is neither used nor changed", file=sys.stderr)
        else:
            found.append(int(path.name))
    return sorted(found)


def newest_step(folder: Path) -> int:
    """Return the step of the newest checkpoint that was sealed; 0 without any checkpoint."""
    sealed = (step for step in checkpoint_steps(folder) if (folder / str(step) / NAME).is_file())
    return max(sealed, default=0)


def _step_folders(folder: Path) -> Iterator[Path]:
    for path in folder.glob("*"):
        name = path.name
        if name.isascii() and name.isdecimal() and str(int(name)) == name and path.is_dir():
            yield path


def _foreign(path: Path) -> str | None:
    """Describe why a folder with the name of a step is not a checkpoint of this run.

    A folder without any files was a checkpoint that has lost them.
    """
    names = {entry.name for entry in path.iterdir()}
    if names and not names & _MARKS:
        return "is not a checkpoint"
    recorded = path / STEP
    content = ""
    if recorded.is_file():
        with checked_path(path, STEP).open() as file:
            content = file.read(30).decode(errors="replace")
    step = content.strip()
    if step.isascii() and step.isdecimal() and step != path.name:
        return f"is a copy of checkpoint {step}"
    return None


def newest_intact(folder: Path, steps: list[int]) -> tuple[int | None, list[int]]:
    """Find the newest intact checkpoint.

    Args:
      folder: folder of the checkpoints.
      steps: steps of the checkpoints to try.

    Returns:
      ``(step, damaged)``: the step of the newest intact checkpoint, and the later steps, newest
      first. The later checkpoints are damaged, which is reported on stderr. The step is None if
      ``steps`` is empty.

    Raises:
      UserError: all of the checkpoints are damaged.
    """
    damaged: dict[int, str] = {}
    for step in sorted(steps, reverse=True):
        wrong = _damage(folder / str(step))
        if wrong is None:
            for other, why in damaged.items():
                say(f"checkpoint {other} is damaged ({why}); using {step}", file=sys.stderr)
            return step, list(damaged)
        damaged[step] = wrong
    if damaged:
        whys = "; ".join(f"{step}: {why}" for step, why in damaged.items())
        raise UserError(
            f"no checkpoint in {folder} is intact ({whys}); move the folder away to start from the beginning"
        )
    return None, []


def _damage(path: Path) -> str | None:
    return "it is a link, not a folder" if path.is_symlink() else damage(path)


def some_left(folder: Path) -> None:
    """Check that a run without any checkpoint has not lost its checkpoints.

    Raises:
      UserError: there are damaged checkpoints, or copies of checkpoints.
    """
    copies = [p.name for p in _step_folders(folder) if (_foreign(p) or "").startswith("is a copy")]
    if lost := sorted(copies + [path.name for path in folder.glob(f"{DAMAGED}*")]):
        raise UserError(
            f"no checkpoint in {folder} is intact, but it contains {', '.join(lost)}; move the folder away to start from the "
            "beginning"
        )


def set_aside(path: Path) -> None:
    """Rename a damaged checkpoint, or a link in its place, to ``damaged-STEP``."""
    path.rename(unused_path(path.with_name(f"{DAMAGED}{path.name}")))


def unused_path(path: Path) -> Path:
    """Return the path, or, if it exists, the first of ``PATH.2``, ``PATH.3``, ... that does not."""
    names = (f"{path.name}.{n}" for n in itertools.count(2))
    while os.path.lexists(path):
        path = path.with_name(next(names))
    return path


def delete_unfinished(folder: Path) -> None:
    """Delete unfinished saves and partly deleted checkpoints of killed processes."""
    for path in [*folder.glob(f"{OLD}*"), *folder.glob(f"{SAVING}*")]:
        prefix = OLD if path.name.startswith(OLD) else SAVING
        step = path.name.removeprefix(prefix).partition(".")[0]
        ours = step.isdecimal() and only_written(path)
        if prefix == OLD:  # a folder without any files is the last moment of a deletion
            ours = ours and ((path / DELETING).is_file() or not any(path.iterdir()))
        if not ours:
            say(f"{path} is not an unfinished save of this run: left as it is", file=sys.stderr)
            continue
        _delete_marked(path)
        if prefix == SAVING:
            say(
                f"checkpoint {step} is incomplete: its save was interrupted; deleted it",
                file=sys.stderr,
            )


def only_written(path: Path) -> bool:
    """Whether a folder contains nothing but the files of a save, and neither is nor has a link."""
    if path.is_symlink() or not path.is_dir():
        return False
    return all(
        (entry.name in _WRITTEN or _TEMPORARY in entry.name) and not entry.is_symlink()
        for entry in path.iterdir()
    )


def added_files(path: Path) -> list[str]:
    """Return the files and links in the folders of a sealed checkpoint that somebody has added."""
    with checked_path(path, NAME).open() as file:
        lines = file.read(file_limits().record).decode(errors="replace").splitlines()
    sealed = {line.partition("  ")[2] for line in lines}
    inner = (file for entry in path.iterdir() if entry.is_dir() for file in entry.rglob("*"))
    return [
        file.name
        for file in inner
        if file.is_symlink()
        or (not file.is_dir() and file.relative_to(path).as_posix() not in sealed)
    ]


def delete_replaced(path: Path) -> None:
    """Delete a checkpoint that newer ones have replaced.

    It is marked and renamed first. If the process is killed during the deletion, the remaining
    files neither look like a checkpoint nor like a copy that somebody has renamed.
    """
    (path / DELETING).touch()
    old = path.rename(unused_path(path.with_name(f"{OLD}{path.name}")))
    _delete_marked(old)


def _delete_marked(old: Path) -> None:
    for entry in old.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != DELETING:
            entry.unlink()
    shutil.rmtree(old)

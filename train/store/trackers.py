"""Trackers: services that show the numbers of a run.

TensorBoard is always used. The others are extras, which the experiment names.
"""

import os
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

from jaxgrow.registry import Registry
from jaxgrow.untrusted import open_regular
from train.common.errors import UserError
from train.common.files import read_record, write_record
from train.config.experiment import Experiment

PROJECT = "jaxgrow"
# File in the folder of a run with its id in each tracker, so that a resumed run continues there.
IDS = "trackers.json"


class Tracker(Protocol):
    """A service that receives the numbers of a run."""

    id: str  # of the run in the service

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add the numbers of the run at ``step``."""
        ...

    def close(self) -> None:
        """Wait until everything is written."""
        ...


# Each opens a tracker from the experiment, the folder of the run, and the id of a run that continues.
TRACKERS: Registry[Callable[[Experiment, Path, str | None], Tracker]] = Registry(
    "tracker", "train.extras"
)


def opened_trackers(experiment: Experiment, folder: Path) -> list[Tracker]:
    """Open the trackers in ``experiment.loggers`` for the run in ``folder``.

    The name of the run is the name of its folder, and its group is the name of the experiment. The
    config contains the seed.

    Args:
      experiment: experiment of the run.
      folder: folder of the run.

    Raises:
      UserError: the package of a tracker is not installed, or its service refuses the run, for
        example because of a missing key.
    """
    for name in experiment.loggers:
        if find_spec(name) is None:
            raise UserError(
                f"loggers={name} needs the package {name}: run pip install -e '.[{name}]' in a clone of jaxgrow"
            )
    file = folder / IDS
    ids = {}
    if os.path.lexists(file):
        ids = read_record(
            file, f"delete it; a new run then starts in {', '.join(experiment.loggers)}"
        )
    found: list[Tracker] = []
    for name in experiment.loggers:
        try:
            tracker = TRACKERS[name](experiment, folder, ids.get(name))
        except Exception as error:  # each service has its own exceptions
            why = " ".join(str(error).split())
            raise UserError(
                f"loggers={name} cannot be opened ({type(error).__name__}: {why}); correct the settings of this service, or "
                "leave it out of loggers"
            ) from error
        ids[name] = tracker.id
        found.append(tracker)
    if found:
        write_record(file, ids)
    return found


class TensorBoard:
    """Event files in the folder of the run.

    Args:
      folder: folder of the event files.
      sizes: size of each file in bytes at the time of a checkpoint. Later points are cut off,
        because the run computes them again.
    """

    def __init__(self, folder: Path, sizes: Mapping[str, int]):
        if folder.is_symlink():
            raise UserError(f"{folder} is a link, which a run does not follow; remove the link")
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._known = frozenset(sizes)
        # The number of the folder distinguishes the files of this run from copies of others.
        self._mark = f".{PROJECT}-{folder.stat().st_ino:x}-"
        for path in self._files():
            if path.name not in sizes:
                path.unlink()
            elif path.stat().st_size > sizes[path.name]:
                with open_regular(path, write=True) as file:
                    file.truncate(sizes[path.name])
        # This writer is synchronous: after a flush, the size of the file covers all points. Its names
        # contain whole seconds, but a run may be resumed twice within one second.
        self._events = EventsWriter(str(folder / "events"), f"{self._mark}{time.time_ns()}")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        summary = Summary(value=[Summary.Value(tag=k, simple_value=v) for k, v in values.items()])
        self._events.write_event(Event(wall_time=time.time(), step=step, summary=summary))
        self._events.flush()  # so that TensorBoard shows a running run

    def sizes(self) -> dict[str, int]:
        """Flush the files to the disk and return the size of each file in bytes."""
        self._events.flush()
        return {path.name: path.stat().st_size for path in self._files()}

    def _files(self) -> list[Path]:
        """The event files of this run. TensorBoard and people also write files into the folder."""
        return [
            path
            for path in sorted(self._folder.glob("events*"))
            if (path.name in self._known or self._mark in path.name)
            and path.is_file()
            and not path.is_symlink()
        ]

    def close(self) -> None:
        self._events.close()

"""Trackers: services that show the numbers of a run, such as TensorBoard, which is always used."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from jaxgrow.registry import Registry
from train.config.experiment import Experiment

PROJECT = "jaxgrow"


class Tracker(Protocol):
    """A service that receives the numbers of a run."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add the numbers of the run at ``step``."""
        ...

    def close(self) -> None:
        """Wait until everything is written."""
        ...


class Board(Tracker, Protocol):
    """A tracker with files in the folder of a run, which a resumed run continues."""

    def sizes(self) -> dict[str, int]:
        """Flush the files to the disk and return the size of each file in bytes."""
        ...


# "services" opens the trackers in ``experiment.loggers`` for the run in a folder.
TRACKERS: Registry[Callable[[Experiment, Path], list[Tracker]]] = Registry(
    "trackers", "train.extras"
)
# "tensorboard" opens the files in a folder, from the size of each file at the time of a checkpoint.
BOARDS: Registry[Callable[[Path, Mapping[str, int]], Board]] = Registry("board", "train.extras")

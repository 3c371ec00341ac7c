"""TensorBoard: event files in the folder of a run."""

import time
from collections.abc import Mapping
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

from jaxgrow.untrusted import open_regular
from train.common.errors import UserError
from train.store.trackers import BOARDS, PROJECT


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


BOARDS.add("tensorboard", TensorBoard)

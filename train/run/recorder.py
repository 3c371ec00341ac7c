"""What a run tells of itself: a log of one JSON object a line, the same in TensorBoard, and a bar where somebody looks.

Numbers that are not finite end a run: nothing that follows from them is worth its cost.
"""

import json
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tqdm import tqdm

from train.errors import Diverged
from train.hosts import is_first
from train.run.ledger import Ledger
from train.run.workdir import Workdir


class Recorder:
    """The ledger of a run, and everything that is said of it; of several processes, by the first.

    ``record`` is what `record()` returned when a checkpoint was saved: lines and TensorBoard's points that were logged later
    are cut off, for they will come again.
    """

    def __init__(self, folder: Path, record: dict[str, Any] | None = None, *, flops: float = 0.0):
        record = {"bytes": 0, "events": {}} | (record or {})
        self._workdir = Workdir(folder)
        self.ledger = Ledger(record)
        self.progress = Progress(flops, self.ledger.flops)
        self._files = _Files(self._workdir, record, self.ledger.steps) if is_first() else None
        self._waiting: tuple[int, dict[str, float], dict[str, Any]] | None = None

    def step(self, step: int, metrics: Mapping[str, Any], log: Mapping[str, Any]) -> None:
        """A line of training. It is written when the next one comes, or at `flush`: the device need not wait for the host."""
        self.flush()
        self._waiting = step, self.ledger.totals(), {**metrics, **log}

    def flush(self) -> None:
        """Writes the line that waits.

        Raises:
          Diverged: a number in it is not finite.
        """
        if self._waiting is None:
            return
        (step, totals, values), self._waiting = self._waiting, None
        lists = {k: [round(float(x), 4) for x in v] for k, v in values.items() if np.ndim(v)}
        numbers = self.finite(step, {k: v for k, v in values.items() if k not in lists})
        self._write(step, totals, {**numbers, **lists})
        self.progress.show(step, totals, numbers["loss"])

    def log(self, step: int, **values: float | list[float]) -> None:
        """Writes a line: what the run has cost, and ``values``, at ``step`` of the phase."""
        self._write(step, self.ledger.totals(), values)

    def _write(self, step: int, totals: dict[str, float], values: Mapping[str, float | list[float]]) -> None:
        """A line of when the run had cost ``totals``.

        TensorBoard's tags are ``model/value``, of points at the run's steps then; those of totals have no model.
        """
        if self._files is None:
            return
        totals = dict(totals)
        steps = totals.pop("steps")
        phase = self.ledger.phases[-1]
        flat = {f"{k}/{i}": x for k, v in values.items() if isinstance(v, list) for i, x in enumerate(v)}
        flat |= {k: v for k, v in values.items() if not isinstance(v, list)}
        tagged = {f"{phase['model']}/{k}": v for k, v in flat.items()} | totals
        self._files.write({"phase": phase["phase"], "step": step, **totals, **values}, steps, tagged)

    def finite(self, step: int, values: Mapping[str, Any]) -> dict[str, float]:
        """The values as numbers.

        Raises:
          Diverged: one of them is NaN or infinite.
        """
        numbers = {k: float(v) for k, v in values.items()}
        bad = [f"{k} is {v}" for k, v in numbers.items() if not math.isfinite(v)]
        if bad:
            raise Diverged(
                f"{' and '.join(bad)} at step {step} of {self.ledger.phases[-1]['phase']}; the last good checkpoint is kept in "
                f"{self._workdir.checkpoints}; lower optim.peak_lr or optim.clip, or raise optim.warmup, in a new --workdir"
            )
        return numbers

    def record(self) -> dict[str, Any]:
        """Everything that a run needs to go on from here, as JSON."""
        return self.ledger.record() | (self._files.sizes() if self._files else {})

    def close(self) -> None:
        self.ledger.close()
        self.progress.close()
        if self._files:
            self._files.close()


class _Files:
    """The log, and TensorBoard's."""

    def __init__(self, workdir: Workdir, record: Mapping[str, Any], steps: int):
        self._board = workdir.board
        self._log = _continued(workdir.log, record["bytes"])
        _cut(self._board, record["events"])
        self._events = EventFileWriter(str(self._board))
        self._events.add_event(Event(wall_time=time.time(), step=steps, file_version="brain.Event:2"))

    def write(self, line: Mapping[str, Any], steps: float, tagged: Mapping[str, float]) -> None:
        self._log.write(json.dumps(line).encode() + b"\n")
        self._log.flush()
        summary = Summary(value=[Summary.Value(tag=k, simple_value=v) for k, v in tagged.items()])
        self._events.add_event(Event(wall_time=time.time(), step=int(steps), summary=summary))

    def sizes(self) -> dict[str, Any]:
        """What there is now, and lasts: a checkpoint must not outlive the lines that it counts."""
        os.fsync(self._log.fileno())
        self._events.flush()
        events = {p.name: p.stat().st_size for p in sorted(self._board.iterdir())}
        return {"bytes": self._log.tell(), "events": events}

    def close(self) -> None:
        self._log.close()
        self._events.close()


class Progress:
    """A bar in FLOPs, so that the time left is right for small and large models alike; none where nobody looks."""

    def __init__(self, total: float, done: float):
        form = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
        self._bar = tqdm(total=total, initial=done, disable=None if is_first() else True, bar_format=form)
        self._first: dict[str, Any] | None = None  # what the run had cost at the phase's first line

    def phase(self, name: str) -> None:
        self._first = None
        self._bar.set_description_str(name)

    def show(self, step: int, totals: dict[str, Any], loss: float) -> None:
        """``totals``: what the run had cost at ``step``. The speed is since the phase's first line, without compiling."""
        self._bar.n = totals["flops"]
        self._first = self._first or totals
        spent = {unit: totals[unit] - self._first[unit] for unit in ("tokens", "seconds", "compile_seconds")}
        tokens, seconds = spent["tokens"], spent["seconds"] - spent["compile_seconds"]
        speed = f", {tokens / seconds:,.0f} tokens/s" if seconds > 0 else ""
        self._bar.set_postfix_str(f"step {step}, loss {loss:.3f}{speed}")

    def close(self) -> None:
        self._bar.close()


def _continued(path: Path, size: int) -> BinaryIO:
    """The log, without what comes after its first ``size`` bytes. One that is shorter keeps its whole lines, and is told of."""
    log = path.open("a+b")
    log.seek(0)
    kept = log.read(size)
    if len(kept) < size:
        kept = kept[: kept.rfind(b"\n") + 1]
        message = (
            f"{path} has {len(kept)} bytes of whole lines, the checkpoint {size}: the curve has a gap, costs have none"
        )
        print(message, file=sys.stderr)
    log.truncate(len(kept))
    log.seek(0, os.SEEK_END)
    return log


def _cut(board: Path, sizes: dict[str, int]) -> None:
    """Cuts TensorBoard's files to ``sizes``, and removes those that came later."""
    for path in board.glob("*"):
        if path.name not in sizes:
            path.unlink()
        elif path.stat().st_size > sizes[path.name]:
            os.truncate(path, sizes[path.name])

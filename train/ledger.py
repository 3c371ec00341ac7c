"""What a run has cost so far, and its log: one JSON object a line in ``metrics.jsonl``, the same in TensorBoard."""

import json
import os
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import jax
from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class Ledger:
    """Counts tokens, FLOPs and seconds over all phases, and of the seconds those that compiling took.

    Validation is a measurement, not a cost: its time is left out, and that of compiling it.

    ``record`` is what `record()` returned when a checkpoint was saved: counting goes on from there, and lines and TensorBoard's
    points that were logged later are cut off, for they will come again.
    """

    def __init__(self, folder: Path, record: dict[str, Any] | None = None):
        begun = {"tokens": 0, "flops": 0.0, "seconds": 0.0, "compile_seconds": 0.0, "steps": 0, "bytes": 0}
        record = begun | {"phases": [], "events": {}} | (record or {})  # one of before compiling was counted lacks it
        self.tokens, self.flops, self.steps = record["tokens"], record["flops"], record["steps"]
        self.phases: list[dict[str, Any]] = [{"compile_seconds": 0.0} | p for p in record["phases"]]
        self._before, self._start = record["seconds"], time.monotonic()
        self._compiled, self._compiling = record["compile_seconds"], Compiling()
        self._log = _continued(folder / "metrics.jsonl", record["bytes"])
        self._board = folder / "tensorboard"
        _cut(self._board, record["events"])
        self._events = EventFileWriter(str(self._board))
        self._events.add_event(Event(wall_time=time.time(), step=self.steps, file_version="brain.Event:2"))

    @property
    def seconds(self) -> float:
        return self._before + time.monotonic() - self._start

    @property
    def compile_seconds(self) -> float:
        return self._compiled + self._compiling.seconds

    @contextmanager
    def paused(self):
        """Time spent inside does not count."""
        before, compiled = self.seconds, self.compile_seconds
        yield
        self._before, self._start = before, time.monotonic()
        self._compiled = compiled - self._compiling.seconds

    def begin(self, phase: str, model: str, parameters: int) -> None:
        """Opens the account of a phase, which makes or trains ``model``, and closes the one before."""
        self._settle()
        self.phases.append(
            {"phase": phase, "model": model, "parameters": parameters}
            | {"steps": 0, "tokens": 0, "flops": 0.0, "seconds": 0.0, "compile_seconds": 0.0, "layers": 0.0}
        )

    def add(self, *, flops: float, tokens: int = 0, steps: int = 0, layers: float = 0.0) -> None:
        """``layers``: how many ran, the sum over steps."""
        self.flops, self.tokens, self.steps = self.flops + flops, self.tokens + tokens, self.steps + steps
        account = self.phases[-1]
        account["flops"] += flops
        account["tokens"] += tokens
        account["steps"] += steps
        account["layers"] += layers

    def charge(self, seconds: float, compile_seconds: float) -> None:
        """Time that was spent elsewhere, and what of it on compiling: an earlier run's, for the open phase."""
        self._before += seconds
        self._compiled += compile_seconds

    def totals(self) -> dict[str, float]:
        spent = {"seconds": round(self.seconds, 3), "compile_seconds": round(self.compile_seconds, 3)}
        return {"steps": self.steps, "tokens": self.tokens, "flops": self.flops} | spent

    def log(self, step: int, totals: dict[str, float], **values: float | list[float]) -> None:
        """Writes a line: what the run had cost, and ``values``, at ``step`` of the phase.

        TensorBoard's tags are ``model/value``, of points at the run's steps then; those of totals have no model.
        """
        totals = dict(totals)
        steps = totals.pop("steps")
        line = {"phase": self.phases[-1]["phase"], "step": step, **totals, **values}
        self._log.write(json.dumps(line).encode() + b"\n")
        self._log.flush()
        flat = {f"{k}/{i}": x for k, v in values.items() if isinstance(v, list) for i, x in enumerate(v)}
        flat |= {k: v for k, v in values.items() if not isinstance(v, list)}
        tagged = {f"{self.phases[-1]['model']}/{k}": v for k, v in flat.items()} | totals
        summary = Summary(value=[Summary.Value(tag=k, simple_value=v) for k, v in tagged.items()])
        self._events.add_event(Event(wall_time=time.time(), step=steps, summary=summary))

    def record(self) -> dict[str, Any]:
        """Everything that a run needs to go on counting from here, as JSON."""
        self._settle()
        os.fsync(self._log.fileno())  # a checkpoint must not outlive the lines that it counts
        self._events.flush()
        return {
            "tokens": self.tokens,
            "flops": self.flops,
            "seconds": sum(p["seconds"] for p in self.phases),
            "compile_seconds": sum(p["compile_seconds"] for p in self.phases),
            "steps": self.steps,
            "phases": [dict(p) for p in self.phases],
            "bytes": self._log.tell(),
            "events": {p.name: p.stat().st_size for p in sorted(self._board.iterdir())},
        }

    def _settle(self) -> None:
        """The open phase took what no earlier one did."""
        if self.phases:
            for unit, total in (("seconds", self.seconds), ("compile_seconds", self.compile_seconds)):
                self.phases[-1][unit] = total - sum(p[unit] for p in self.phases[:-1])

    def close(self) -> None:
        self._compiling.close()
        self._log.close()
        self._events.close()


class Compiling:
    """The seconds that tracing, lowering and compiling took since it was made; what is traced within a trace counts once."""

    def __init__(self):
        self.seconds = 0.0
        self._spans: list[tuple[float, float]] = []  # (begin, seconds), one after the other
        jax.monitoring.register_event_duration_secs_listener(self._ended)

    def _ended(self, event: str, duration_secs: float, **_: Any) -> None:
        if not event.startswith("/jax/core/compile/"):
            return
        begin = time.monotonic() - duration_secs
        while self._spans and self._spans[-1][0] >= begin:
            self.seconds -= self._spans.pop()[1]
        self._spans.append((begin, duration_secs))
        self.seconds += duration_secs

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._ended)


def _continued(path: Path, size: int) -> BinaryIO:
    """The log, without what comes after its first ``size`` bytes. One that is shorter keeps its whole lines, and is told of."""
    log = path.open("a+b")
    log.seek(0)
    kept = log.read(size)
    if len(kept) < size:
        kept = kept[: kept.rfind(b"\n") + 1]
        said = (
            f"{path} has {len(kept)} bytes of whole lines, the checkpoint {size}: the curve has a gap, costs have none"
        )
        print(said, file=sys.stderr)
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

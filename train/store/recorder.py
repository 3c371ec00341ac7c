"""The output of a run: a log with one JSON object per line, TensorBoard, and a progress bar.

Numbers that are not finite end a run, because further training would be wasted.
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tqdm import tqdm

from jaxgrow.typed import Json
from jaxgrow.untrusted import escape_text, open_regular
from train.common.errors import Diverged, UserError
from train.common.hosts import is_first
from train.common.output import note, say
from train.plan.ledger import Ledger
from train.plan.phase import LogValue
from train.plan.record import CostRecord
from train.store.trackers import BOARDS, Tracker
from train.store.workdir import Workdir

# Seconds without a progress line. After this time, a run without a terminal writes one at the next
# logged step.
SILENCE = 60.0


class Recorder:
    """Write the log, TensorBoard's files, trackers and progress lines, and keep the ledger.

    If there are several processes, only the first one writes.

    Args:
      folder: folder of the run.
      record: costs and file sizes at the time of a checkpoint. Later lines of the log and
        later points of TensorBoard are cut off, because the run computes them again.
      flops: expected FLOPs of the complete plan, for the progress bar.
      trackers: trackers, which get the same numbers as TensorBoard.
      run: fields that identify the run in progress lines, such as ``{"run": "demo", "seed": 0}``.
      most_skipped: the largest number of skipped steps in a row.
    """

    def __init__(
        self,
        folder: Path,
        record: CostRecord | None = None,
        *,
        flops: float = 0.0,
        trackers: Sequence[Tracker] = (),
        run: Json | None = None,
        most_skipped: int = 0,
    ):
        record = record or CostRecord()
        self._most_skipped = most_skipped
        self._workdir = Workdir(folder)
        self.ledger = Ledger(record)
        self.progress = Progress(flops, self.ledger.flops, run)
        self._files = _Files(self._workdir, record, trackers) if is_first() else None
        self._waiting: tuple[int, dict[str, float], Mapping[str, LogValue]] | None = None

    def step(self, step: int, metrics: Mapping[str, LogValue], log: Mapping[str, LogValue]) -> None:
        """Schedule a line of training for the log.

        The line is written at the next call or at `flush`, so that the device does not wait for the
        host.
        """
        self.flush()
        self._waiting = step, self.ledger.totals(), {**metrics, **log}

    def flush(self) -> None:
        """Write the scheduled line.

        Raises:
          Diverged: a number in it is not finite.
        """
        if self._waiting is None:
            return
        (step, totals, values), self._waiting = self._waiting, None
        lists = {
            name: [round(float(x), 4) for x in np.asarray(value)]
            for name, value in values.items()
            if np.ndim(value) and name != "skips"
        }
        numbers = self.settled(step, {k: v for k, v in values.items() if k not in lists})
        self._write(step, totals, {**numbers, **lists})
        self.progress.show(step, totals, numbers.get("loss"))

    def settled(self, step: int, metrics: Mapping[str, LogValue]) -> dict[str, float]:
        """Count the steps that were skipped up to ``step``, and return its metrics as floats.

        If the step itself was skipped, the metrics do not contain its loss.

        Args:
          step: step of the phase.
          metrics: metrics of the train step (`train.step.step.train_step`).

        Raises:
          Diverged: a number is not finite, or too many steps in a row were skipped.
        """
        values = dict(metrics)
        if (skips := values.pop("skips", None)) is None:
            return self.finite(step, values)
        total, row, longest = map(int, np.asarray(skips))
        account = self.ledger.phases[-1]
        account.skipped += total - self.ledger.skipped
        if longest > self._most_skipped:
            raise Diverged(
                f"{longest} steps in a row, up to step {step} of {account.phase}, had a loss or gradients that are not "
                f"finite, more than most_skipped={self._most_skipped}"
            )
        if row:
            values = {k: v for k, v in values.items() if k not in ("loss", "grad_norm")}
        return self.finite(step, values) | {"skipped": total}

    def log(self, step: int, **values: float | list[float]) -> None:
        """Write a line with the cost of the run and ``values``, at ``step`` of the phase."""
        self._write(step, self.ledger.totals(), values)

    def _write(
        self, step: int, totals: dict[str, float], values: Mapping[str, float | list[float]]
    ) -> None:
        """Write a line with the costs ``totals``.

        TensorBoard's tags are ``model/value``, and its steps are the steps of the run. The tags of
        totals do not contain a model.
        """
        if self._files is None:
            return
        totals = dict(totals)
        steps = totals.pop("steps")
        account = self.ledger.phases[-1]
        flat = {}
        for k, v in values.items():
            if isinstance(v, list):
                flat |= {f"{k}/{i}": x for i, x in enumerate(v)}
        flat |= {k: v for k, v in values.items() if not isinstance(v, list)}
        tagged = {f"{account.model}/{k}": v for k, v in flat.items()} | totals
        self._files.write({"phase": account.phase, "step": step, **totals, **values}, steps, tagged)

    def finite(self, step: int, values: Mapping[str, LogValue]) -> dict[str, float]:
        """Convert the values to floats.

        Raises:
          Diverged: one of them is NaN or infinite.
        """
        numbers = {k: float(v) for k, v in values.items()}
        bad = [f"{k} is {v}" for k, v in numbers.items() if not math.isfinite(v)]
        if bad:
            raise Diverged(f"{' and '.join(bad)} at step {step} of {self.ledger.phases[-1].phase}")
        return numbers

    def record(self) -> CostRecord:
        """Return the state that a resumed run needs to continue."""
        record = self.ledger.record()
        if self._files:
            record.bytes, record.events = self._files.sizes()
        return record

    def close(self) -> None:
        self.ledger.close()
        self.progress.close()
        if self._files:
            self._files.close()


class _Files:
    """The log, TensorBoard's files, and the trackers."""

    def __init__(self, workdir: Workdir, record: CostRecord, trackers: Sequence[Tracker]):
        self._log = _opened_log(workdir.log, record.bytes)
        self._board = BOARDS["tensorboard"](workdir.board, record.events)
        self._trackers = list(trackers)

    def write(self, line: Json, steps: float, tagged: Mapping[str, float]) -> None:
        self._log.write(json.dumps(line).encode() + b"\n")
        self._log.flush()
        self._board.write(int(steps), tagged)
        for tracker in [*self._trackers]:
            self._safely(tracker, partial(tracker.write, int(steps), tagged))

    def _safely(self, tracker: Tracker, act: Callable[[], None]) -> None:
        """Call ``act`` of a tracker. A failing service must not end the training."""
        try:
            act()
        except Exception as error:
            self._trackers.remove(tracker)
            name = type(tracker).__name__
            why = " ".join(str(error).split())
            say(
                f"{name} failed ({why}) and does not get any more numbers; the log contains all of them",
                file=sys.stderr,
            )

    def sizes(self) -> tuple[int, dict[str, int]]:
        """Flush the files to the disk and return the bytes of the log and of TensorBoard's files.

        A checkpoint records these sizes, so the lines that it counts must be on the disk before it.
        """
        os.fsync(self._log.fileno())
        return self._log.tell(), self._board.sizes()

    def close(self) -> None:
        self._log.close()
        self._board.close()
        for tracker in [*self._trackers]:
            self._safely(tracker, tracker.close)


class Progress:
    """A progress bar in FLOPs, and progress lines.

    FLOPs make the estimate of the remaining time right for small and large models. It leaves out
    compilation. The bar needs a terminal, and shows the estimate. Lines are written at every
    validation. Without a terminal, they contain the estimate, and one is also written at a logged
    step if none was written for `SILENCE` seconds.

    Args:
      total: FLOPs of the plan.
      done: FLOPs that the run has used already.
      run: fields that identify the run, such as ``{"run": "demo", "seed": 0}``.
    """

    def __init__(self, total: float, done: float, run: Json | None = None):
        form = "{desc} {percentage:3.0f}%|{bar}| {elapsed}{postfix}"
        self._run = run or {}
        self._phase = ""
        self._steps = 0
        self._bar = tqdm(
            total=total, initial=done, disable=None if is_first() else True, bar_format=form
        )
        self._first: Mapping[str, float] | None = None  # cost at the first line of the phase
        self._loss: float | None = None
        self._said = time.monotonic()

    def phase(self, name: str, steps: int = 0, compiles: bool = False) -> None:
        """Start a phase.

        Args:
          name: name of the phase for people.
          steps: number of steps of the phase.
          compiles: whether its first step is compiled now.
        """
        self._phase = name
        self._steps = steps
        self._first = None
        self._loss = None
        shown = ": ".join([*map(str, [*self._run.values()][:1]), name])
        self._bar.set_description_str(escape_text(shown))
        self._bar.set_postfix_str("compiling .." if compiles else "")
        if compiles and self._bar.disable and is_first():
            note(f"{name}: compiling ..")

    def add(self, flops: float) -> None:
        """Add the cost of an imported model, which the ledger counts, to the FLOPs of the plan."""
        self._bar.total += flops

    def show(self, step: int, totals: Mapping[str, float], loss: float | None) -> None:
        """Update the bar.

        Args:
          step: step of the phase.
          totals: cost of the run at this step. The speed is measured since the first line of the
            phase and excludes compilation.
          loss: training loss; None if the step was skipped.
        """
        # The real cost may be slightly larger than the expected one, and tqdm then shows 0 %.
        self._bar.n = min(totals["flops"], self._bar.total)
        self._first = self._first or totals
        self._loss = loss
        speed, _ = self._speed(totals)
        self._bar.set_postfix_str(
            f"step {step}, "
            + ("skipped" if loss is None else f"loss {loss:.3f}")
            + (f", {speed:,.0f} tokens/s, {self._left(totals)} left" if speed else "")
        )
        if self._bar.disable and time.monotonic() - self._said >= SILENCE:
            self.say(step, totals)

    def say(self, step: int, totals: Mapping[str, float], **losses: float) -> None:
        """Write one line for people and programs.

        Its fields are run, phase, step, losses and, without a terminal, the remaining time.
        """
        self._said = time.monotonic()
        if not is_first():
            return
        known = {"loss": self._loss} | losses
        fields = {**self._run, "phase": self._phase, "step": f"{step}/{self._steps}"}
        fields |= {k: f"{x:.4f}" for k, x in known.items() if x is not None}
        if self._bar.disable:
            fields["eta"] = self._left(totals)
        note(" ".join(f"{name}={_quoted(str(value))}" for name, value in fields.items()))

    def _left(self, totals: Mapping[str, float]) -> str:
        """Return the time that the remaining FLOPs take, without compilation; "-" if unknown."""
        _, flops = self._speed(totals)
        left = max(0.0, self._bar.total - totals["flops"])
        return str(timedelta(seconds=round(left / flops))) if flops else "-"

    def _speed(self, totals: Mapping[str, float]) -> tuple[float, float]:
        """Tokens and FLOPs per second since the phase's first line, without compilation."""
        first = self._first or totals
        spent = {
            unit: totals[unit] - first[unit]
            for unit in ("tokens", "flops", "seconds", "compile_seconds")
        }
        seconds = spent["seconds"] - spent["compile_seconds"]
        return (spent["tokens"] / seconds, spent["flops"] / seconds) if seconds > 0 else (0.0, 0.0)

    def close(self) -> None:
        self._bar.close()


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if not text or set(text) & set(' "=') else text


def _opened_log(path: Path, size: int) -> BinaryIO:
    """Open the log, cut to its first ``size`` bytes.

    Raises:
      UserError: the log is shorter, and the checkpoint does not have a copy of it.
    """
    log = open_regular(path, write=True)
    there = log.seek(0, os.SEEK_END)
    if there < size:
        log.close()
        raise UserError(
            f"{path} is damaged: it has {there} bytes, but the checkpoint counts {size}; restore it from a backup, or give "
            "another --workdir to start from the beginning"
        )
    log.truncate(size)
    log.seek(0, os.SEEK_END)
    return log

"""Requests to stop a run: preemption (SIGTERM) and Ctrl-C (SIGINT)."""

import itertools
import os
import signal
from typing import Any

import jax
from jax.experimental import multihost_utils

# JAX chooses a count that no process has reached yet, and the processes stop at exactly this count. It
# must therefore rise by one with each call, also from one run of a process to the next.
_calls = itertools.count(1)

AT_ONCE = "interrupted again: exited without saving; run the same command to continue from the last checkpoint, if any"


class Stop:
    """Record whether SIGTERM or Ctrl-C arrives within the block. A second Ctrl-C exits at once.

    If there are several processes, JAX handles SIGTERM as long as they run. It determines a step
    that no process has reached yet, and all processes stop there. Ctrl-C in one process is passed on
    to JAX as SIGTERM.
    """

    def __init__(self):
        self.interrupted = False
        self._terminated = False
        self._before: dict[signal.Signals, Any] = {}

    @property
    def code(self) -> int:
        """The exit code of the process: 130 after Ctrl-C, and 75 (EX_TEMPFAIL) after SIGTERM.

        Code 75 tells a scheduler to start the run again.
        """
        return 130 if self.interrupted else os.EX_TEMPFAIL

    @property
    def reason(self) -> str:
        return "Ctrl-C" if self.interrupted else "SIGTERM"

    def asked(self) -> bool:
        """Whether to stop after this step. The answer is the same in every process.

        Every process must call it once for each step.
        """
        if jax.process_count() == 1:
            return self.interrupted or self._terminated
        return multihost_utils.reached_preemption_sync_point(next(_calls))

    def __enter__(self):
        alone = jax.process_count() == 1
        for number, handler in {
            signal.SIGINT: self._interrupt,
            signal.SIGTERM: self._terminate,
        }.items():
            # A shell may start a background process that ignores Ctrl-C, which must continue to
            # ignore it.
            if (alone or number == signal.SIGINT) and signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, handler)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _terminate(self, *_) -> None:
        self._terminated = True

    def _interrupt(self, *_) -> None:
        if self.interrupted:
            os.write(2, f"{AT_ONCE}\n".encode())
            os._exit(130)
        self.interrupted = True
        os.write(
            2,
            b"Ctrl-C: saving a checkpoint after this step, then exiting; press Ctrl-C again to exit at once\n",
        )
        if jax.process_count() > 1:
            signal.raise_signal(signal.SIGTERM)

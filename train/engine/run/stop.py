"""Requests to stop a run: preemption (SIGTERM) and Ctrl-C (SIGINT)."""

import os
import signal
from typing import Any

import jax
from jax.experimental import multihost_utils

AT_ONCE = "interrupted again: ended without saving; the same command continues from the last checkpoint, if there is one"


class Stop:
    """Whether SIGTERM or Ctrl-C came within the block. A second Ctrl-C ends the process at once.

    Of several processes, JAX watches for SIGTERM from their start to their end, and finds a step
    that none of them is past; Ctrl-C in one of them counts as SIGTERM there.
    """

    def __init__(self):
        self.interrupted, self._terminated = False, False
        self._before: dict[signal.Signals, Any] = {}

    @property
    def code(self) -> int:
        """The exit code of the process: 130 after Ctrl-C; 75 (EX_TEMPFAIL) says that the run has to be started again."""
        return 130 if self.interrupted else os.EX_TEMPFAIL

    @property
    def reason(self) -> str:
        return "Ctrl-C" if self.interrupted else "SIGTERM"

    def asked(self, step: int) -> bool:
        """Whether to stop after ``step``, the same in every process; to be asked at each step, in ascending order."""
        if jax.process_count() == 1:
            return self.interrupted or self._terminated
        return multihost_utils.reached_preemption_sync_point(step)

    def __enter__(self):
        alone = jax.process_count() == 1
        for number, handler in {
            signal.SIGINT: self._interrupt,
            signal.SIGTERM: self._terminate,
        }.items():
            # A shell that starts a background process may have told it to ignore Ctrl-C.
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
        os.write(2, b"Ctrl-C: saves after this step, then ends; a second Ctrl-C ends at once\n")
        if jax.process_count() > 1:
            signal.raise_signal(signal.SIGTERM)

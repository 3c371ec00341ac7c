"""Requests to stop a run: SIGTERM (preemption), SIGHUP, Ctrl-C (SIGINT) and a closed output."""

import itertools
import os
import signal
import time
from contextlib import ExitStack

import jax
from jax.experimental import multihost_utils

from train.common.endings import GRACE, end_at_once, exit_status, stop_reason, watching_signals
from train.common.output import when_closed

# JAX chooses a count that no process has reached yet, and the processes stop at exactly this count. It
# must therefore rise by one with each call, also from one run of a process to the next.
_calls = itertools.count(1)

SAVING = (
    "Ctrl-C: saving a checkpoint after this step, then exiting; press Ctrl-C again to exit at once"
)
AT_ONCE = "interrupted again: exited without saving; run the same command to continue from the last checkpoint, if any"


class Stop:
    """Record whether SIGTERM, SIGHUP or Ctrl-C arrives, or the output is closed, within the block.

    Until the first step there is nothing to save, so SIGTERM, SIGHUP and a closed output end the
    process at once. After it, the run saves a checkpoint and ends. A second Ctrl-C exits at once.

    If there are several processes, JAX handles SIGTERM as long as they run. It determines a step
    that no process has reached yet, and all processes stop there. Everything else that stops one
    process is passed on to JAX as SIGTERM.
    """

    def __init__(self):
        self.interrupted = False
        self._stopped: list[int | None] = []  # the signals; None: a closed output
        self._stepped = False
        # How many Ctrl-C were sent, as a thread sees them, and how many the main thread has handled.
        self._sent = 0
        self._handled = 0
        self._answered = False
        self._entered = ExitStack()

    @property
    def code(self) -> int:
        """The exit code of the process: 130 after Ctrl-C, and 75 (EX_TEMPFAIL) otherwise.

        Code 75 tells a scheduler to start the run again.
        """
        return exit_status(signal.SIGINT) if self.interrupted else os.EX_TEMPFAIL

    @property
    def reason(self) -> str:
        return stop_reason(
            signal.SIGINT if self.interrupted else (self._stopped or [signal.SIGTERM])[0]
        )

    def asked(self) -> bool:
        """Whether to stop after this step. The answer is the same in every process.

        Every process must call it once for each step.
        """
        self._stepped = True
        if jax.process_count() == 1:
            return self.interrupted or bool(self._stopped)
        return multihost_utils.reached_preemption_sync_point(next(_calls))

    def __enter__(self):
        handlers = {signal.SIGINT: self._interrupt, signal.SIGHUP: self._stop}
        if jax.process_count() == 1:
            handlers[signal.SIGTERM] = self._stop
            self._entered.enter_context(watching_signals(self._watch))
        for number, handler in handlers.items():
            # A shell may start a background process that ignores Ctrl-C, which must continue to
            # ignore it.
            if signal.getsignal(number) != signal.SIG_IGN:
                self._entered.callback(signal.signal, number, signal.signal(number, handler))
        self._entered.enter_context(when_closed(lambda: self._stop(None)))
        return self

    def __exit__(self, *_) -> None:
        self._entered.close()

    def _watch(self, number: int) -> None:
        """Act in a thread, in place of a handler of the main thread that has to wait."""
        if not self._stepped and number in (signal.SIGTERM, signal.SIGHUP):
            end_at_once(number)
        if number == signal.SIGINT:
            self._sent += 1
            time.sleep(GRACE)
            if self._handled < self._sent:
                self._answer(self._sent)

    def _stop(self, number: int | None, *_) -> None:
        if jax.process_count() > 1:
            signal.raise_signal(signal.SIGTERM)
        elif self._stepped:
            self._stopped.append(number)
        else:
            end_at_once(number)

    def _interrupt(self, *_) -> None:
        self._handled += 1
        if not self._stepped:
            raise KeyboardInterrupt
        self._answer(self._handled)
        self.interrupted = True
        if jax.process_count() > 1:
            signal.raise_signal(signal.SIGTERM)

    def _answer(self, count: int) -> None:
        """Print what follows from the Ctrl-C number ``count``, and end the process if it must end."""
        if not self._stepped:
            end_at_once(signal.SIGINT)
        if count > 1:
            os.write(2, f"{AT_ONCE}\n".encode())
            os._exit(130)
        if not self._answered:
            os.write(2, f"{SAVING}\n".encode())
        self._answered = True

"""How does a command end when it is asked to: by SIGTERM, SIGHUP, Ctrl-C or a closed output?

A command prints one line and exits with status 75 (EX_TEMPFAIL) or, after Ctrl-C, with 130. A run
that has made steps saves a checkpoint first (`train.engine.run.stop`). This module is imported
before all others, so it must not import anything that takes time.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGHUP: "SIGHUP", signal.SIGTERM: "SIGTERM"}
CONTINUES = "the same command continues from the last checkpoint, if there is one"


def status(number: int | None) -> int:
    """Return the exit status after a signal, or after the output was closed (None)."""
    return 130 if number == signal.SIGINT else os.EX_TEMPFAIL


def reason(number: int | None) -> str:
    return "a closed output" if number is None else NAMES[signal.Signals(number)]


def end_at_once(number: int | None, frame: Any = None) -> NoReturn:
    """End the process with one line. Nothing is lost, because nothing was computed since a save.

    An exception is not reliable here: libraries catch it during imports and in callbacks.
    """
    with suppress(OSError):
        os.write(2, f"stopped by {reason(number)}; {CONTINUES}\n".encode())
    os._exit(status(number))


def begin() -> None:
    """Prepare a process that runs a command of `train`, before it imports other modules."""
    # Otherwise the next files that are opened would become stdout and stderr, and get their text.
    for handle in range(3):
        try:
            os.fstat(handle)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    for number in NAMES:
        # A shell starts background processes that ignore Ctrl-C, and nohup ignores SIGHUP.
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, end_at_once)


@contextmanager
def interruptible(several: bool = False) -> Iterator[None]:
    """Raise ``KeyboardInterrupt(number)`` for signals within the block, so that files are removed.

    Args:
      several: whether JAX already handles SIGTERM for several processes. Python does not know the
        handler of JAX, and would replace it.
    """

    def interrupt(number: int, frame: Any) -> None:
        signal.signal(number, end_at_once)  # a library may catch the exception
        raise KeyboardInterrupt(number)

    replaced = (signal.SIG_DFL, signal.default_int_handler, end_at_once)
    numbers = [n for n in NAMES if not (several and n == signal.SIGTERM)]
    before = {n: old for n in numbers if (old := signal.getsignal(n)) in replaced}
    try:
        for number in before:
            signal.signal(number, interrupt)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

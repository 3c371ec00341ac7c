"""How does a command end when it is asked to: by SIGTERM, SIGHUP, Ctrl-C or a closed output?

A command prints one line and exits with status 75 (EX_TEMPFAIL) or, after Ctrl-C, with 130. A run
that has made steps saves a checkpoint first (`train.run.stop`). This module is imported
before all others, so it must not import anything that takes time.
"""

import atexit
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGHUP: "SIGHUP", signal.SIGTERM: "SIGTERM"}
_begun: list[bool] = []
GRACE = 0.5  # seconds in which the main thread must answer a signal
CONTINUES = "the same command continues from the last checkpoint, if there is one"


def exit_status(number: int | None) -> int:
    """Return the exit status after a signal, or after the output was closed (None)."""
    return 130 if number == signal.SIGINT else os.EX_TEMPFAIL


def stop_reason(number: int | None) -> str:
    return "a closed output" if number is None else NAMES[signal.Signals(number)]


def end_at_once(number: int | None, frame: object = None) -> NoReturn:
    """End the process with one line. Nothing is lost, because nothing was computed since a save.

    An exception is not reliable here: libraries catch it during imports and in callbacks.
    """
    with suppress(OSError):
        os.write(2, f"stopped by {stop_reason(number)}; {CONTINUES}\n".encode())
    os._exit(exit_status(number))


def is_command() -> bool:
    """Whether this process runs a command of `train`, and not, for example, a test of it."""
    return bool(_begun)


def prepare_command() -> None:
    """Prepare a process that runs a command of `train`, before it imports other modules."""
    _begun.append(True)
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
    atexit.register(_ignore_late)


def _ignore_late() -> None:
    """Ignore signals after everything is done, when Python would end as if it had no handlers."""
    for number in NAMES:
        if signal.getsignal(number) is end_at_once:
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def watching_signals(act: Callable[[int], None]) -> Iterator[None]:
    """Let a thread call ``act`` with the number of each signal that arrives within the block.

    A handler in Python waits until a compilation or a lock returns, which may take minutes. Other
    threads than the main thread get no signals, and are not watched.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    read, write = os.pipe()
    os.set_blocking(write, False)

    def watch() -> None:
        while number := os.read(read, 1):
            act(number[0])
        os.close(read)

    threading.Thread(target=watch, daemon=True).start()
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(write)


@contextmanager
def interruptible(several: bool = False) -> Iterator[None]:
    """Raise ``KeyboardInterrupt(number)`` for signals within the block, so that files are removed.

    Args:
      several: whether JAX already handles SIGTERM for several processes. Python does not know the
        handler of JAX, and would replace it.
    """

    def interrupt(number: int, frame: object) -> None:
        signal.signal(number, end_at_once)  # a library may catch the exception
        raise KeyboardInterrupt(number)

    came: Counter[int] = Counter()

    def act(number: int) -> None:
        came[number] += 1
        time.sleep(GRACE)
        handler = signal.getsignal(number)
        if handler is interrupt or (handler is end_at_once and came[number] > 1):
            end_at_once(number)

    replaced = (signal.SIG_DFL, signal.default_int_handler, end_at_once)
    numbers = [n for n in NAMES if not (several and n == signal.SIGTERM)]
    before = {n: old for n in numbers if (old := signal.getsignal(n)) in replaced}
    try:
        for number in before:
            signal.signal(number, interrupt)
        with watching_signals(act):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

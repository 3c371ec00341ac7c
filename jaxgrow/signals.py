"""How are Ctrl-C, SIGTERM and SIGHUP handled: as an exception, or deferred during a critical step?

Python runs signal handlers in the main thread only. In other threads, both contexts do nothing.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

_ALL = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextmanager
def leave_at_once() -> Iterator[None]:
    """End the process with one line at a Ctrl-C inside the context, in which no work has started.

    It ends without an exception, because a module that is being imported might catch it, or be left
    partly initialised.
    """

    def leave(number: int, frame: object) -> None:
        os.write(2, b"interrupted; nothing was written\n")
        os._exit(128 + number)

    with _handled(
        (n for n in _ALL[:1] if signal.getsignal(n) == signal.default_int_handler), leave
    ):
        yield


@contextmanager
def raise_interrupts() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into ``KeyboardInterrupt(number)`` inside the context.

    Ctrl-C raises ``KeyboardInterrupt()`` without a number. The context does not change signals that
    are ignored, for example under `nohup`, or that another library handles.
    """

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt(number)

    with _handled((n for n in _ALL if signal.getsignal(n) == signal.SIG_DFL), interrupt):
        yield


@contextmanager
def defer_signals() -> Iterator[None]:
    """Defer SIGINT, SIGTERM and SIGHUP that arrive inside the context until its end."""
    came: list[int] = []
    # In a run of several processes JAX handles SIGTERM. A handler of Python would replace its
    # handler for good, because Python does not know it.
    jax = sys.modules.get("jax")  # help and usage errors do not import it
    several = jax is not None and jax.distributed.is_initialized()
    numbers = [n for n in _ALL if not (several and n == signal.SIGTERM)]
    try:
        with _handled(numbers, lambda number, frame: came.append(number)):
            yield
    finally:
        if came:
            signal.raise_signal(came[0])


@contextmanager
def _handled(numbers: Iterable[int], handler: Callable[[int, object], None]) -> Iterator[None]:
    before: dict[int, Callable[[int, FrameType | None], object] | int] = {}
    if threading.current_thread() is threading.main_thread():
        before = {
            n: old for n in numbers if (old := signal.getsignal(n)) not in (None, signal.SIG_IGN)
        }
    try:
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)

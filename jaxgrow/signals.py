"""What ends a process: Ctrl-C, SIGTERM and SIGHUP; as an exception, or put off while a step must not be left half done.

Python calls handlers in the main thread alone: in others nothing is interrupted, and both do
nothing.
"""

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

_ALL = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextmanager
def interrupting() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP raise ``KeyboardInterrupt(number)``, as Ctrl-C does without the number.

    One that is ignored stays so (`nohup`), and so does another's handler.
    """

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt(number)

    with _handled((n for n in _ALL if signal.getsignal(n) == signal.SIG_DFL), interrupt):
        yield


@contextmanager
def uninterrupted() -> Iterator[None]:
    """What comes inside is put off until the end."""
    came: list[int] = []
    try:
        with _handled(_ALL, lambda number, frame: came.append(number)):
            yield
    finally:
        if came:
            signal.raise_signal(came[0])


@contextmanager
def _handled(numbers: Iterable[int], handler: Callable[[int, Any], None]) -> Iterator[None]:
    before: dict[int, Any] = {}
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

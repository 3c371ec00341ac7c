"""Python's signal handlers, also in a process that was started in the background."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

PYTHON = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}


@contextmanager
def python_handlers() -> Iterator[None]:
    """Use Python's signal handlers in the context. Its code may change them, but must restore them.

    The test runner may have others: shells ignore SIGINT for processes in the background, and nohup
    ignores SIGHUP.
    """
    before = {number: signal.signal(number, handler) for number, handler in PYTHON.items()}
    try:
        yield
        assert {number: signal.getsignal(number) for number in PYTHON} == PYTHON
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

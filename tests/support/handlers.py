"""Processes and their signals, also if the tests themselves were started in the background."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]

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


def started_process(command: list[str], folder: Path, **options) -> subprocess.Popen:
    """Start a command that handles Ctrl-C; its stderr is a pipe."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    options = {"stderr": subprocess.PIPE, "text": True} | options
    # A shell may have started the tests in the background, where processes ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(command, cwd=folder, env=environment, **options)
    finally:
        signal.signal(signal.SIGINT, before)


def wait_for_handlers(process: subprocess.Popen) -> None:
    """Wait until a command has installed its signal handlers.

    Before this, Python itself handles Ctrl-C. The other handlers are installed with the one of SIGTERM.
    """
    where, bit = Path(f"/proc/{process.pid}/status"), 1 << (signal.SIGTERM - 1)
    while True:
        caught = re.search(r"SigCgt:\s*(\w+)", where.read_text())[1]
        if int(caught, 16) & bit:
            return
        assert process.poll() is None
        time.sleep(0.001)


def ended_process(process: subprocess.Popen) -> tuple[int, str]:
    """Return the exit status, and the last line on stderr."""
    _, said = process.communicate(timeout=300)
    assert "Traceback" not in said
    return process.returncode, said.strip().splitlines()[-1]

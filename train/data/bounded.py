"""Templates and tokenizers of others run in a child process, with limits of time and memory."""

import atexit
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from jaxgrow.untrusted import UntrustedError, limits

_SCRIPT = Path(__file__).with_name("bounded_child.py")
_START = 60.0  # seconds until the child has started


class BoundedChild:
    """A child process that answers requests, and is killed when one takes too long."""

    def __init__(self):
        self._process: subprocess.Popen[str] | None = None

    def ask(self, what: str, **request: Any) -> Any:
        """The answer of a job of ``bounded_child.py``.

        Args:
          what: the file, for messages.
          **request: the name of the job, and its arguments.

        Raises:
          UntrustedError: the job failed, or needs more than the limits.
        """
        if self._process is None:
            self._process = self._started()
        budget = {"bytes": limits().bytes, "record": limits().record, "seconds": limits().seconds}
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(budget | request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:  # the next line is the end of the output
            pass
        line, late = self._line(limits().seconds)
        if not line:
            self.close()
            raise UntrustedError(
                f"{what} needs more than {limits().seconds:g} s; if you trust the file, raise the limit, such as "
                f"with --limits seconds={10 * limits().seconds:g}"
                if late
                else f"{what} needs too much memory or is damaged: the process that ran it has ended; if you trust the "
                f"file, raise the limit, such as with --limits bytes={4 * limits().bytes}"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise UntrustedError(f"{what}: {answer['error']}")
        return answer["result"]

    def close(self) -> None:
        """End the child."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _started(self) -> "subprocess.Popen[str]":
        self._process = subprocess.Popen(
            # Isolated: modules in the working directory are not imported.
            [sys.executable, "-I", str(_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        atexit.register(self.close)
        self._line(_START)
        return self._process

    def _line(self, seconds: float) -> tuple[str, bool]:
        """A line of the child, empty if it ended; and whether it was killed."""
        process = self._process
        assert process is not None and process.stdout is not None
        late = threading.Event()

        def kill() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(seconds, kill)
        timer.daemon = True
        timer.start()
        try:
            return process.stdout.readline(), late.is_set()
        finally:
            timer.cancel()


child = BoundedChild()

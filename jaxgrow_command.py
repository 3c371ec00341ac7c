"""The entry point of the command ``jaxgrow``: handles Ctrl-C also while JAX is imported."""

import os
import signal
import sys


def main() -> int:
    """Run `jaxgrow.cli.program.main` and return its exit status."""

    def leave(number, frame):
        # Exit without an exception: a module that is being imported might catch it, or be left
        # partly initialised. No work has started yet.
        os.write(2, b"interrupted; nothing was written\n")
        os._exit(128 + number)

    before = signal.getsignal(signal.SIGINT)
    if before == signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)
    from jaxgrow.cli.program import main as run

    signal.signal(signal.SIGINT, before)
    return run()


if __name__ == "__main__":
    sys.exit(main())

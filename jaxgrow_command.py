"""The command ``jaxgrow``, which imports nothing at first: Ctrl-C ends it quietly also while JAX is being imported."""

import os
import signal
import sys


def main() -> int:
    """Runs `jaxgrow.cli.checkpoint_commands.main`; returns its exit status."""

    def leave(number, frame):
        # No exception: what is being imported may catch it, or be left half initialised. Nothing
        # was begun.
        os.write(2, b"interrupted; nothing was written\n")
        os._exit(128 + number)

    before = signal.getsignal(signal.SIGINT)
    if before == signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)
    from jaxgrow.cli.checkpoint_commands import main as run

    signal.signal(signal.SIGINT, before)
    return run()


if __name__ == "__main__":
    sys.exit(main())

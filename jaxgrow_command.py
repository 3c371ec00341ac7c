"""The entry point of the command ``jaxgrow``: handles Ctrl-C from the first import on."""

import sys


def main() -> int:
    """Run `jaxgrow.cli.program.main` and return its exit status."""
    from jaxgrow.signals import leave_at_once

    with leave_at_once():
        from jaxgrow.cli.program import main as run
    return run()


if __name__ == "__main__":
    sys.exit(main())

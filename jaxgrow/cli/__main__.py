"""``python -m jaxgrow.cli``: the command ``jaxgrow``."""

import sys

from jaxgrow.cli.checkpoint_commands import main

if __name__ == "__main__":
    sys.exit(main())

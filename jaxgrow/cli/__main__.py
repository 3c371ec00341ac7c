"""``python -m jaxgrow.cli``: the command ``jaxgrow``."""

import sys

from jaxgrow.cli.program import main

if __name__ == "__main__":
    sys.exit(main())

"""The command ``jaxgrow``: which transformations of checkpoints are available in the shell?"""

from jaxgrow.cli.program import main

__all__ = ["main"]

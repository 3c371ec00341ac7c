"""The command ``jaxgrow``: which transformations of checkpoints are available in the shell?"""

from jaxgrow.cli.checkpoint_commands import main

__all__ = ["main"]

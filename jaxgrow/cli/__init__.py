"""The command ``jaxgrow``: what can a user do to a checkpoint from the shell?"""

from jaxgrow.cli.checkpoint_commands import main

__all__ = ["main"]

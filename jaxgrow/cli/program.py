"""The command ``jaxgrow``: parse the arguments, run a subcommand, and report errors."""

import argparse
import io
import os
import signal
import sys
from collections.abc import Sequence

import jax

from jaxgrow._version import __version__
from jaxgrow.checkpoints import CheckpointError
from jaxgrow.cli import file_commands, grow_commands, prune_command, v_cycle_commands
from jaxgrow.cli.errors import UsageError
from jaxgrow.cli.options import Commands
from jaxgrow.signals import interrupting
from jaxgrow.untrusted import UntrustedError

_TITLE = "Grow, coalesce, prune, interpolate, compare and convert checkpoints on disk."


def parser() -> argparse.ArgumentParser:
    """Build the parser of all subcommands.

    The parsed arguments hold the function of the subcommand as ``run``.
    """
    found = argparse.ArgumentParser(prog="jaxgrow", description=_TITLE)
    found.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = Commands(found)
    file_commands.add_inspect(commands)
    v_cycle_commands.add_coalesce(commands)
    v_cycle_commands.add_decoalesce(commands)
    v_cycle_commands.add_interpolate(commands)
    grow_commands.add_show(commands)
    grow_commands.add_grow(commands)
    grow_commands.add_suggest(commands)
    prune_command.add_prune(commands)
    file_commands.add_report(commands)
    file_commands.add_convert(commands)
    file_commands.add_architectures(commands)
    file_commands.add_completion(commands)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
      The exit status: 0 on success; 2 if the arguments are invalid independently of the checkpoint
      files; 1 for any other failure; 128 plus the number of the signal after an interruption, or
      after the reader of the output has closed the pipe (SIGPIPE).
    """
    a = parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # As on stderr, names that the encoding of the terminal does not have are escaped.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        if (getattr(a, "seed", None) or 0) < 0:
            raise UsageError(f"--seed {a.seed}: a seed must be a non-negative integer")
        with interrupting():
            if not a.evaluates:
                # Commands that only transform files must neither wait for an accelerator nor occupy it.
                jax.config.update("jax_platforms", "cpu")
            a.run(a)
            print(end="", flush=True)  # so that a closed pipe is an error here, not at exit
    except BrokenPipeError:
        # At exit, Python flushes the rest of the output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + getattr(signal, "SIGPIPE", 13)
    except (CheckpointError, UntrustedError, OSError, MemoryError) as error:
        text = "out of memory" if isinstance(error, MemoryError) else str(error)
        return _ended(f"error: {text}", error, 2 if isinstance(error, UsageError) else 1)
    except KeyboardInterrupt as error:
        return _ended("interrupted", error, 128 + (error.args[0] if error.args else signal.SIGINT))
    return 0


def _ended(text: str, error: BaseException, status: int) -> int:
    """Print a message and the notes about DST to stderr, and return the exit status.

    Long lines are truncated and unprintable characters are escaped, because file contents may occur
    in the message.
    """
    for line in "; ".join([text, *getattr(error, "__notes__", [])]).split("\n"):
        shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line[:1000])
        print(shown + ("..." if len(line) > 1000 else ""), file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())

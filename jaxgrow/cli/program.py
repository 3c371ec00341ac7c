"""The command ``jaxgrow``: parse the arguments, run a subcommand, and report errors."""

import argparse
import importlib
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence

from jaxgrow.checkpoints.io.files import CheckpointError
from jaxgrow.cli.arguments import jaxgrow_parser
from jaxgrow.cli.errors import UsageError, system_reason
from jaxgrow.signals import leave_at_once, raise_interrupts
from jaxgrow.untrusted import UntrustedError, prepare_messages, print_text


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
      The exit status: 0 on success; 2 if the arguments are invalid independently of the checkpoint
      files; 1 for any other failure; 128 plus the number of the signal after an interruption, or
      after the reader of the output has closed the pipe (SIGPIPE).
    """
    words = sys.argv[1:] if argv is None else argv
    a = jaxgrow_parser(words).parse_args(words)
    prepare_messages()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # As on stderr, names that the encoding of the terminal does not have are escaped.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        if (getattr(a, "seed", None) or 0) < 0:
            raise UsageError(f"--seed {a.seed}: a seed must be a non-negative integer")
        run = _imported(a.run)
        with raise_interrupts():
            if not a.evaluates:
                # Commands that only transform files must neither wait for an accelerator nor occupy it.
                sys.modules["jax"].config.update("jax_platforms", "cpu")
            run(a)
            print(end="", flush=True)  # so that a closed pipe is an error here, not at exit
    except BrokenPipeError:
        # At exit, Python flushes the rest of the output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + getattr(signal, "SIGPIPE", 13)
    except (CheckpointError, UntrustedError, OSError, MemoryError) as error:
        text = "out of memory" if isinstance(error, MemoryError) else str(error)
        text = system_reason(error) if isinstance(error, OSError) else text
        return _failed_status(f"error: {text}", error, 2 if isinstance(error, UsageError) else 1)
    except KeyboardInterrupt as error:
        return _failed_status(
            "interrupted", error, 128 + (error.args[0] if error.args else signal.SIGINT)
        )
    return 0


def _imported(run: str) -> Callable[[argparse.Namespace], None]:
    """Import the function that runs a subcommand, with everything that it needs."""
    module, _, name = run.rpartition(".")
    with leave_at_once():
        importlib.import_module("jax")
        return getattr(importlib.import_module(module), name)


def _failed_status(text: str, error: BaseException, status: int) -> int:
    """Print a message and the notes about DST to stderr, and return the exit status.

    Long lines are truncated and unprintable characters are escaped, because file contents may occur
    in the message.
    """
    for line in "; ".join([text, *getattr(error, "__notes__", [])]).split("\n"):
        print_text(line[:1000] + ("..." if len(line) > 1000 else ""), file=sys.stderr)
    return status

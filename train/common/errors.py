"""How do commands report errors of the input, as opposed to errors in the program?"""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from jaxgrow.checkpoints.io.files import CheckpointError
from jaxgrow.cli.errors import system_reason
from jaxgrow.untrusted import UntrustedError, prepare_messages
from train.common import endings
from train.common.endings import interruptible
from train.common.output import OutputClosed, say

_SMALLER = (
    "in a training, model.remat=full, a larger accumulate, and mesh.fsdp on several devices reduce the memory: the same "
    "command with one of them continues the run, and python -m train.preflight checks what fits"
)

_APART = (
    "the processes of this run waited for each other too long, or one of them has ended: read the output of that process, then "
    "start the same command again in all of them"
)


class UserError(Exception):
    """Wrong input. The message has one line: the problem, the place, and the way out.

    The commands print the message and exit with status 2.
    """


class Diverged(UserError):
    """A value of a run is NaN or infinite, for example because the learning rate is too high.

    Other runs may still succeed.
    """


class Preempted(Exception):
    """A run was asked to stop, and has saved its state. The same command continues it.

    The commands exit with status ``code``.
    """

    def __init__(self, message: str, code: int = os.EX_TEMPFAIL):
        super().__init__(message)
        self.code = code


def exits_cleanly(main: Callable[[], None]) -> None:
    """Run the main function of a command; print expected errors in one line, with an exit status.

    If several processes share a run, the first process prints the errors that end all of them. A
    process that fails alone prints its error and exits immediately. The other processes notice
    this, and exit as well (`train.extras.joining`).
    """
    prepare_messages()
    with interruptible(_several()):
        run_command(main)


def run_command(main: Callable[[], None]) -> None:
    try:
        main()
        # so that a closed output is an error here, and not when Python ends
        say("", end="", flush=True)
    except UserError as error:
        sys.exit(_report_error(str(error), 2) if _speaks() else 2)
    except Preempted as stop:
        if _speaks():
            _print_line(str(stop))
        sys.exit(stop.code)
    except KeyboardInterrupt as error:
        number = error.args[0] if error.args else signal.SIGINT
        _print_line(f"stopped by {endings.stop_reason(number)}; {endings.CONTINUES}")
        # Python would wait at its end until XLA has compiled the current program.
        _leave(endings.exit_status(number), at_once=endings.is_command())
    except OutputClosed:
        _print_line("error: the output was closed before the command had finished")
        _leave(128 + signal.SIGPIPE)
    except Exception as error:
        if _several():
            # The error may only be a result of the end of another process. In this case, the thread
            # that watches the other processes prints one line and ends this process during the
            # sleep.
            time.sleep(2)
        if "Gloo" in str(error):
            _leave(_report_error(f"{_APART} ({str(error).splitlines()[0][:200]})", os.EX_TEMPFAIL))
        if (line := explained_error(error)) is not None:
            _leave(_report_error(line, 2))
        if not _several():
            raise
        say(traceback.format_exc(), file=sys.stderr)
        _leave(1)


def explained_error(error: Exception) -> str | None:
    """Return one line for an error of the input or of the machine.

    For an error in the program, return None: such an error needs its traceback.
    """
    # Imported here, because an error of the arguments must not wait for JAX.
    import jax

    from jaxgrow.models.attention import Unsupported

    if is_full_disk(error):
        return f"the disk is full ({error}); free some space, then the same command continues"
    if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
        return f"a device has no memory left ({str(error).splitlines()[0][:200]}); {_SMALLER}"
    if isinstance(error, MemoryError):
        return f"this machine has no memory left ({error}); {_SMALLER}"
    if isinstance(error, UnicodeEncodeError) and "surrogates" in error.reason:
        return (
            f"a text has half of a character, which UTF-8 cannot store ({error}); remove it, in Python for example with "
            "text.encode(errors='ignore').decode()"
        )
    if isinstance(error, UnicodeError):
        return f"a text is not UTF-8 ({error}); convert it, such as with iconv -f LATIN1 -t UTF-8"
    # An OSError is, for example, a folder without write permission, or a file in place of a folder.
    if isinstance(error, OSError):
        return system_reason(error)
    ours = UserError | CheckpointError | UntrustedError | Unsupported
    return str(error) if isinstance(error, ours) else None


def _several() -> bool:
    """Whether several processes share the run. Help and wrong arguments do not import JAX."""
    return "jax" in sys.modules and sys.modules["jax"].distributed.is_initialized()


def _speaks() -> bool:
    return not _several() or sys.modules["jax"].process_index() == 0


def _leave(code: int, at_once: bool = False) -> NoReturn:
    if at_once or _several():
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def is_full_disk(error: BaseException | None) -> bool:
    """Return whether a full disk caused ``error``, also if a library wrapped the original error."""
    while error is not None:
        if getattr(error, "errno", None) in (28, 122) or "No space left" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _report_error(message: str, code: int) -> int:
    _print_line(f"error: {' '.join(message.split())}")
    return code


def _print_line(line: str) -> None:
    with suppress(OutputClosed):
        say(line, file=sys.stderr)

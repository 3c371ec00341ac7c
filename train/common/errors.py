"""What is wrong with the input, as opposed to the program."""

import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

import jax

from jaxgrow.checkpoints.io.files import CheckpointError

_SMALLER = "accumulate, model.remat=full or mesh.fsdp make it smaller, and python -m train.preflight says what fits"


_APART = (
    "the processes of this run waited for each other too long, or one of them has ended: see why there; start the same command "
    "again in all of them"
)


class UserError(Exception):
    """Wrong input, said in one line: what, where, and the way out. The scripts print it and exit with 2."""


class Diverged(UserError):
    """A number of a run is NaN or infinite: it may be wrong input, but another run need not share it."""


class Preempted(Exception):
    """A run was asked to stop, and has saved: the same command continues it. The commands exit with ``code``."""

    def __init__(self, message: str, code: int = os.EX_TEMPFAIL):
        super().__init__(message)
        self.code = code


def exits_cleanly(main: Callable[[], None]) -> None:
    """Runs a script; wrong input and a full disk become one line and a non-zero exit instead of a traceback.

    Of several processes, the first says what ends all of them. One that fails alone says so itself,
    and ends at once: the others wait for it, and are ended by that (`train.engine.hosts`).
    """
    logging.getLogger("absl").setLevel(
        logging.CRITICAL
    )  # Orbax logs tracebacks of errors that it also raises
    try:
        main()
    except UserError as error:
        sys.exit(_say(str(error), 2) if _speaks() else 2)
    except Preempted as stop:
        if _speaks():
            print(stop, file=sys.stderr)
        sys.exit(stop.code)
    except KeyboardInterrupt:
        _leave(
            _say(
                "interrupted; the same command continues from the last checkpoint, if there is one",
                130,
            )
        )
    except Exception as error:
        if jax.distributed.is_initialized():
            time.sleep(
                2
                # if it only follows from another process's end, this one is ended meanwhile, with a
                # line
            )
        if "Gloo" in str(error):
            _leave(_say(f"{_APART} ({str(error).splitlines()[0][:200]})", os.EX_TEMPFAIL))
        if (line := explained(error)) is not None:
            _leave(_say(line, 2))
        if not jax.distributed.is_initialized():
            raise
        traceback.print_exc()
        _leave(1)


def explained(error: Exception) -> str | None:
    """One line for an error of the input or of the machine; None for a fault of the program, which needs its traceback."""
    if is_full_disk(error):
        return f"the disk is full ({error}); free some space, then the same command continues"
    if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
        return f"a device has no memory left ({str(error).splitlines()[0][:200]}); {_SMALLER}"
    if isinstance(error, MemoryError):
        return f"this machine has no memory left ({error}); {_SMALLER}"
    if isinstance(error, UnicodeError):
        return f"a text is not UTF-8 ({error}); convert it, such as by iconv -f LATIN1 -t UTF-8"
    # Of an OSError: a folder that may not be written, a file where a folder should be.
    return str(error) if isinstance(error, UserError | CheckpointError | OSError) else None


def _speaks() -> bool:
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def _leave(code: int) -> NoReturn:
    if jax.distributed.is_initialized():
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def is_full_disk(error: BaseException | None) -> bool:
    """Whether ``error`` comes from a disk without space, however deep; storage libraries wrap the system's error."""
    while error is not None:
        if getattr(error, "errno", None) in (28, 122) or "No space left" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _say(message: str, code: int) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code

"""What is wrong with the input, as opposed to the program."""

import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

import jax


class UserError(Exception):
    """Wrong input, said in one line: what, where, and the way out. The scripts print it and exit with 2."""


class Diverged(UserError):
    """A number of a run is NaN or infinite: it may be wrong input, but another run need not share it."""


class Preempted(Exception):
    """A run was asked to stop, and has saved: nothing is wrong, it only has to be started again. The scripts exit with 75."""


def exits_cleanly(main: Callable[[], None]) -> None:
    """Runs a script; wrong input and a full disk become one line and a non-zero exit instead of a traceback.

    Of several processes, the first says what ends all of them. One that fails alone says so itself, and ends at once: the
    others wait for it, and are ended by that (`train.hosts`).
    """
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs tracebacks of errors that it also raises
    try:
        main()
    except UserError as error:
        sys.exit(_say(str(error), 2) if _speaks() else 2)
    except Preempted as stop:
        if _speaks():
            print(stop, file=sys.stderr)
        sys.exit(os.EX_TEMPFAIL)
    except KeyboardInterrupt:
        _leave(_say("interrupted; the same command continues from the last checkpoint", 130))
    except Exception as error:
        if jax.distributed.is_initialized():
            time.sleep(2)  # if it only follows from another process's end, this one is ended meanwhile, with a line
        if is_full_disk(error):
            _leave(_say(f"the disk is full ({error}); free some space, then the same command continues", 2))
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
            way = "accumulate, model.remat=full or mesh.fsdp make it smaller, and python -m train.preflight says what fits"
            _leave(_say(f"a device has no memory left ({str(error).splitlines()[0][:200]}); {way}", 2))
        if isinstance(error, OSError):  # a folder that may not be written, a file where a folder should be
            _leave(_say(str(error), 2))
        if not jax.distributed.is_initialized():
            raise
        traceback.print_exc()
        _leave(1)


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

"""What is wrong with the input, as opposed to the program."""

import logging
import os
import sys
from collections.abc import Callable


class UserError(Exception):
    """Wrong input, said in one line: what, where, and the way out. The scripts print it and exit with 2."""


class Diverged(UserError):
    """A number of a run is NaN or infinite: it may be wrong input, but another run need not share it."""


class Preempted(Exception):
    """A run was asked to stop, and has saved: nothing is wrong, it only has to be started again. The scripts exit with 75."""


def exits_cleanly(main: Callable[[], None]) -> None:
    """Runs a script; wrong input and a full disk become one line and a non-zero exit instead of a traceback."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs tracebacks of errors that it also raises
    try:
        main()
    except UserError as error:
        sys.exit(_say(str(error), 2))
    except Preempted as stop:
        print(stop, file=sys.stderr)
        sys.exit(os.EX_TEMPFAIL)
    except KeyboardInterrupt:
        sys.exit(_say("interrupted; the same command continues from the last checkpoint", 130))
    except Exception as error:
        if is_full_disk(error):
            sys.exit(_say(f"the disk is full ({error}); free some space, then the same command continues", 2))
        if isinstance(error, OSError):  # a folder that may not be written, a file where a folder should be
            sys.exit(_say(str(error), 2))
        raise


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

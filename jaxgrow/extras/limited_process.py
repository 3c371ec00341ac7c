"""How does an expression or a parser of strangers run with limited time and memory?"""

import json
import math
import os
import signal
import subprocess
import sys
from typing import Any

from jaxgrow.untrusted import UntrustedError, file_limits

# The child limits its memory before it imports or reads anything.
_CHILD = """
import json, sys
request = json.load(sys.stdin)
sys.path[:] = request["path"]
try:
    import resource
    for name, amount in (("DATA", request["bytes"]), ("CPU", request["seconds"]), ("CORE", 0)):
        limit = getattr(resource, "RLIMIT_" + name)
        resource.setrlimit(limit, (amount, amount))
except (ImportError, ValueError):
    pass
"""


# The limit is CPU time. A child on a busy machine may wait this many times longer.
_PATIENCE = 10


_OUT_OF_TIME = {-getattr(signal, name, 0) for name in ("SIGXCPU", "SIGKILL")} - {0}


_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}


def run_limited(code: str, request: object, what: str) -> Any:
    """Run an expression or a parser of strangers in a process with limited time and memory.

    Args:
      code: a Python program. It finds the request in ``request["value"]``, and prints JSON.
      request: the request, as JSON.
      what: the name of the expression or the file in the message.

    Returns:
      The printed value.

    Raises:
      UntrustedError: the process took too much time or memory, or failed.
    """
    bounds = file_limits()
    sent = {"value": request, "bytes": bounds.bytes, "seconds": math.ceil(bounds.seconds)}
    text = json.dumps(sent | {"path": [entry for entry in sys.path if entry]})
    slow = (
        f"{what} takes more than {bounds.seconds:g} s. If you trust the file, use --limits "
        f"seconds={10 * bounds.seconds:g}"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _CHILD + code],
            input=text,
            capture_output=True,
            text=True,
            timeout=_PATIENCE * bounds.seconds,
            env=os.environ | _ONE_THREAD,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UntrustedError(slow) from None
    if done.returncode in _OUT_OF_TIME:
        raise UntrustedError(slow)
    if done.returncode == 0:
        return json.loads(done.stdout)
    lines = done.stderr.strip().splitlines()
    last = lines[-1][:500] if lines else f"the process ended with status {done.returncode}"
    if done.returncode < 0 or "MemoryError" in last or "memory allocation" in done.stderr:
        raise UntrustedError(
            f"{what} needs more than {bounds.bytes:,} bytes of memory, or ends the process. If you "
            f"trust the file, use --limits bytes={4 * bounds.bytes}"
        )
    raise UntrustedError(f"{what} cannot be read: {last}")

"""The processes of a run: how they find each other, agree, and end together. A run of one process needs none of it.

What lies on devices is agreed on by the programs, which are the same everywhere. The rest is here:
folders, which process 0 alone writes; errors, which are everyone's; and the end of one process,
which must not leave the others waiting for it.
"""

import atexit
import itertools
import json
import math
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from train.common.errors import UserError

ANSWER = 300.0  # seconds that processes wait for each other at the start, and at the end
# XLA gives up after 30 and 40 s, but a loaded machine and programs found in a cache separate
# processes by more.
PATIENCE = f"--xla_cpu_collective_timeout_seconds={ANSWER:.0f} --xla_cpu_collective_call_terminate_timeout_seconds={ANSWER:.0f}"
SILENCE = 60  # seconds without a sign of life, after which JAX ends the processes that are left
BY_HAND = "say where they are by --coordinator, --processes and --process"
LOST = "another process of this run has ended: see why there; the same command, started again in all, continues"
T = TypeVar("T")
_ending = threading.Lock()


def join(
    coordinator: str | None = None, processes: int | None = None, process: int | None = None
) -> None:
    """Makes this process one of several, before JAX is used: by hand, or where a cluster started it; else it stays alone.

    The process ends with one line and code 2 if the others do not come, and with 75 as soon as one
    of them is gone.

    Args:
      coordinator: ``HOST:PORT`` at process 0, where the others find it.
      processes: how many; 1: alone, whatever started it.
      process: which of them this is.

    Raises:
      UserError: some are given and others are not, or they fit no process.
    """
    by_hand = (coordinator, processes, process)
    if by_hand == (None, 1, None) or (by_hand == (None, None, None) and not _in_a_cluster()):
        return
    _check(*by_hand)
    os.environ["XLA_FLAGS"] = (
        f"{PATIENCE} {os.environ.get('XLA_FLAGS', '')}"  # of two equal flags the last one counts
    )
    what = f"--coordinator {coordinator}" if coordinator else "the processes of this job"
    late = threading.Timer(ANSWER, _end, [_late(what, process, processes), 2])
    late.daemon = True
    late.start()
    try:
        jax.distributed.initialize(
            *by_hand,
            initialization_timeout=round(ANSWER)
            + 60,  # what JAX does then is no line: our own comes first
            heartbeat_timeout_seconds=SILENCE,
            shutdown_timeout_seconds=round(ANSWER),
        )
    except ValueError as error:  # JAX finds no cluster
        if not _has_peers():
            return
        raise UserError(
            f"{what}: JAX does not find them; {BY_HAND}, or --processes 1 for each alone"
        ) from error
    except RuntimeError as error:
        way = "give a port of process 0's host that is free" if coordinator else BY_HAND
        raise UserError(f"{what}: {error}; {way}") from error
    finally:
        late.cancel()
    if jax.process_count() > 1:
        # Of a pod, others know the full name alone.
        own = socket.getfqdn() if "JOB_COMPLETION_INDEX" in os.environ else socket.gethostname()
        _watch((coordinator or "").rpartition(":")[0] or own)


def _in_a_cluster() -> bool:
    """Whether what started this process may have started others with it; which, JAX finds out."""
    # libtpu alone is no TPU: it compiles for them, too.
    tpu = find_spec("libtpu") is not None and any(
        [*Path("/dev").glob("accel*"), *Path("/dev/vfio").glob("[0-9]*")]
    )
    return _has_peers() or "JOB_COMPLETION_INDEX" in os.environ or tpu


def _has_peers() -> bool:
    """Whether SLURM or Open MPI says so. Not by ``SLURM_NTASKS``, which the shell of an allocation has, too."""
    return any(
        int(os.environ.get(name, 1)) > 1
        for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
    )


def _check(coordinator: str | None, processes: int | None, process: int | None) -> None:
    if coordinator is None and processes is None and process is None:
        return
    if coordinator is None or processes is None or process is None:
        raise UserError(
            "--coordinator, --processes and --process belong together: give all three, or, where SLURM, Open MPI, Kubernetes "
            "or a TPU starts the processes, none"
        )
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal():
        raise UserError(f"--coordinator is HOST:PORT of process 0, not {coordinator!r}")
    if not 0 <= process < processes:
        raise UserError(
            f"--process of {processes} lies between 0 and {processes - 1}, but is {process}"
        )


def _late(what: str, process: int | None, processes: int | None) -> str:
    if process == 0:
        return f"error: {what}: not all of the {processes} processes came within {ANSWER:g} s; start them at the same time"
    return f"error: {what} does not answer within {ANSWER:g} s: see whether process 0 runs and can be reached"


def connect(mesh: jax.sharding.Mesh) -> None:
    """Connects the processes along every combination of axes of ``mesh``, before they compile programs.

    Gloo makes a connection when the first program needs it, and then waits only 30 s, which no
    setting changes. Once it is there, the processes wait `ANSWER` seconds for each other.
    """
    if jax.process_count() == 1:
        return
    names = [name for name, size in mesh.shape.items() if size > 1]
    for n in range(1, len(names) + 1):
        for axes in itertools.combinations(names, n):
            _connect_along(mesh, axes)


def _connect_along(mesh: jax.sharding.Mesh, axes: tuple[str, ...]) -> None:
    shape, divided = (math.prod(mesh.shape[name] for name in axes),), NamedSharding(mesh, P(axes))
    add = jax.jit(jnp.sum, in_shardings=divided, out_shardings=NamedSharding(mesh, P()))
    program = add.lower(jax.ShapeDtypeStruct(shape, np.float32)).compile()
    ones = jax.make_array_from_callback(
        shape, divided, lambda part: np.ones(shape, np.float32)[part]
    )
    gathered(None)  # compiling may have taken different times
    jax.block_until_ready(program(ones))


# --- agreeing ---


def is_first() -> bool:
    """Whether this is process 0, which writes and speaks for all."""
    return jax.process_index() == 0


def gathered(value: Any) -> list[Any]:
    """JSON of every process, in all of them. Every process must call this, as everything below, at the same point."""
    if jax.process_count() == 1:
        return [value]
    content = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = np.ravel(multihost_utils.process_allgather(np.int32(len(content))))
    room = -(-int(sizes.max()) // 4096) * 4096  # few sizes, for each is a program
    rows = multihost_utils.process_allgather(np.pad(content, (0, room - len(content))))
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def once(act: Callable[[], T]) -> T:
    """What ``act`` gives, JSON, by process 0, which alone does it; its `UserError` is raised in all."""
    if jax.process_count() == 1:
        return act()
    result, error = None, None
    if is_first():
        try:
            result = act()
        except UserError as wrong:
            error = str(wrong)
    result, error = gathered([result, error])[0]
    if error is not None:
        raise UserError(error)
    return result  # type: ignore[return-value]


def everywhere(act: Callable[[], T]) -> T:
    """What ``act`` gives here; every process does it, and a `UserError` of one is raised in all."""
    if jax.process_count() == 1:
        return act()
    result, error = None, None
    try:
        result = act()
    except UserError as wrong:
        error = str(wrong)
    errors = gathered(error)
    if any(errors):
        process = next(i for i, e in enumerate(errors) if e)
        raise UserError(
            errors[process] if len(set(errors)) == 1 else f"process {process}: {errors[process]}"
        )
    return result  # type: ignore[return-value]


# --- ending ---


def _watch(host: str) -> None:
    """Ends this process when another is gone: what waits for it on a device may wait for ever.

    Each of the others holds a connection with process 0, which the system closes however a process
    ends; who ends well says so first. A host that is cut off closes nothing: then JAX ends the
    others (`SILENCE`).
    """
    key = secrets.token_bytes()  # who else connects is not of the run
    if is_first():
        listener = Listener(("", 0), backlog=jax.process_count(), authkey=key)
        once(lambda: [host, listener.address[1], key.hex()])
        threading.Thread(target=_accept, args=(listener,), daemon=True).start()
        return
    host, port, known = once(lambda: [])
    try:
        _follow(Client((host, port), authkey=bytes.fromhex(known)))
    except OSError as error:
        print(
            f"process {jax.process_index()} cannot connect to process 0 at {host}:{port} ({error}): if another process dies, "
            f"this one notices only {SILENCE} s later",
            file=sys.stderr,
        )


def _accept(listener: Listener) -> None:
    while True:
        try:
            _follow(listener.accept())
        except (AuthenticationError, OSError, EOFError):
            continue


def _follow(connection: Any) -> None:  # of `multiprocessing`
    def listen() -> None:
        try:
            connection.recv_bytes()  # a goodbye
        except (OSError, EOFError):
            _end(LOST, os.EX_TEMPFAIL)

    def goodbye() -> None:
        with suppress(OSError):
            connection.send_bytes(b"goodbye")

    atexit.register(goodbye)  # which those that die never come to
    threading.Thread(target=listen, daemon=True).start()


def _end(message: str, code: int) -> None:
    """Ends the process with a line, whatever its other threads wait for."""
    _ending.acquire()  # for ever: there is one line
    print(message, file=sys.stderr, flush=True)
    os._exit(code)

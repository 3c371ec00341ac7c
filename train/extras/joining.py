"""How do the processes of a run find each other, and end together?

The end of one process must not leave the others waiting for it. `train.common.hosts` has the rest:
how the processes agree.
"""

import os
import re
import secrets
import socket
import sys
import threading
import zlib
from importlib.util import find_spec
from pathlib import Path

import jax

from train.common.errors import UserError
from train.common.hosts import JOINING, is_first, on_process_zero
from train.common.output import say
from train.extras import watch

ANSWER = 300.0  # seconds that processes wait for each other at the start and at the end
# XLA's default timeouts are 30 and 40 s. Processes can be further apart than that on a loaded
# machine, or if only some of them find their programs in the cache.
PATIENCE = f"--xla_cpu_collective_timeout_seconds={ANSWER:.0f} --xla_cpu_collective_call_terminate_timeout_seconds={ANSWER:.0f}"
# Seconds without a heartbeat, after which JAX ends the remaining processes. JAX prints its stack and
# aborts, so `train.extras.watch` must notice the end of a process earlier.
HEARTBEAT = 120
LOST = watch.LOST
OPEN_MPI = "OMPI_MCA_orte_hnp_uri"  # its number of the job, and addresses of the first host
# The addresses of the hosts of a TPU pod on Kubernetes, that of process 0 first.
_TPUS = ("MEGASCALE_COORDINATOR_ADDRESS", "TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")
_EVERYWHERE = (
    "JAX listens on all addresses, because only the cloud knows the address of this host: set "
    "JAX_COORDINATOR_BIND_ADDRESS=ADDRESS:PORT to choose one"
)
BY_HAND = "give --coordinator, --processes and --process"


def join_processes(
    coordinator: str | None = None, processes: int | None = None, process: int | None = None
) -> None:
    """Make this process one of several, before JAX is used.

    The other processes are found by the three arguments or, without arguments, by the cluster that
    started the process (SLURM, Open MPI, Kubernetes or TPU). Otherwise the process runs alone. If
    the other processes do not connect, the process prints one line and exits with code 2. If one of
    them ends during the run, the process exits with code 75.

    Args:
      coordinator: ``HOST:PORT`` at process 0, where the other processes connect.
      processes: number of processes; 1 alone makes the process run alone, even in a cluster.
      process: index of this process.

    Raises:
      UserError: only some of the arguments are given, an argument is invalid, or JAX does not find
        or cannot start the processes.
    """
    by_hand = (coordinator, processes, process)
    if by_hand == (None, 1, None) or (by_hand == (None, None, None) and not _in_a_cluster()):
        return
    _check(*by_hand)
    # If a flag occurs twice, the last one takes effect.
    os.environ["XLA_FLAGS"] = f"{PATIENCE} {os.environ.get('XLA_FLAGS', '')}"
    what = f"--coordinator {coordinator}" if coordinator else "the processes of this job"
    host, port = _coordinator(coordinator)
    late = _timer(ANSWER, _late(what, process, processes), 2)
    try:
        jax.distributed.initialize(
            *by_hand,
            # The default is to listen on all addresses. Only process 0 listens.
            coordinator_bind_address=_bound(host, port) if process in (0, None) else None,
            # JAX's own timeout would print a long message, so it must be longer than our timeout.
            initialization_timeout=round(ANSWER) + 60,
            heartbeat_timeout_seconds=HEARTBEAT,
            shutdown_timeout_seconds=round(ANSWER),
        )
    except ValueError as error:  # JAX does not find a cluster
        if not _has_peers():
            return
        raise UserError(
            f"{what}: JAX cannot find them; {BY_HAND}, or --processes 1 to run each of them alone"
        ) from error
    except RuntimeError as error:
        way = "give a free port of the host of process 0" if coordinator else BY_HAND
        raise UserError(f"{what}: {error}; {way}") from error
    finally:
        late.cancel()
    if jax.process_count() > 1:
        if is_first() and not host and "JAX_COORDINATOR_BIND_ADDRESS" not in os.environ:
            say(_EVERYWHERE, file=sys.stderr)
        # Gloo and JAX end a process with long messages if another one does not answer.
        silent = _timer(watch.SILENCE, watch.silence_message(), os.EX_TEMPFAIL)
        _watch(host or socket.gethostname())
        silent.cancel()


def _in_a_cluster() -> bool:
    """Whether a cluster may have started several processes. JAX finds out which cluster it is."""
    # An installed libtpu does not prove that there is a TPU, because it can also compile without
    # one.
    tpu = find_spec("libtpu") is not None and any(
        [*Path("/dev").glob("accel*"), *Path("/dev/vfio").glob("[0-9]*")]
    )
    return _has_peers() or "JOB_COMPLETION_INDEX" in os.environ or tpu


def _has_peers() -> bool:
    """Whether SLURM or Open MPI started several processes.

    ``SLURM_NTASKS`` is not read, because the shell of an allocation has it as well.
    """
    return any(
        int(os.environ.get(name, 1)) > 1
        for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
    )


def _timer(seconds: float, message: str, code: int) -> threading.Timer:
    timer = threading.Timer(seconds, watch.end_process, [message, code])
    timer.daemon = True
    timer.start()
    return timer


def _coordinator(given: str | None) -> tuple[str, str]:
    """Return the host and the port at which the other processes call process 0.

    Both are empty on a TPU VM of Google Cloud, where JAX asks the metadata server for them.

    Args:
      given: the value of ``--coordinator``.
    """
    if address := given or os.environ.get("JAX_COORDINATOR_ADDRESS"):
        host, _, port = address.rpartition(":")
        return host.strip("[]"), port
    open_mpi = re.compile(r"(\d+)\..*?tcp6?://(?:\[([^],]+)|([^],:]+))")
    if found := open_mpi.match(os.environ.get(OPEN_MPI, "")):
        host, first = found[2] or found[3], int(found[1]) >> 12
    elif found := re.match(r"([^],[]+)(?:\[(\w+))?", os.environ.get("SLURM_STEP_NODELIST", "")):
        host, first = found[1] + (found[2] or ""), int(os.environ.get("SLURM_JOB_ID", 0))
    elif "OMPI_COMM_WORLD_SIZE" in os.environ:
        # Open MPI 5: process 0 names its host to the others, with mpi4py. All need the same port.
        host = socket.gethostname()
        first = zlib.crc32(os.environ.get("PMIX_NAMESPACE", "").encode())
    elif tpus := next(filter(None, map(os.environ.get, _TPUS)), None):
        host = tpus.split(",")[0].split(":")[0]
        return host, os.environ.setdefault("JAX_COORDINATOR_PORT", "8482")
    elif "JOB_COMPLETION_INDEX" in os.environ:
        # Other pods can resolve only the full name of a pod.
        return socket.getfqdn(), os.environ.setdefault("JAX_COORDINATOR_PORT", "55527")
    else:
        return "", ""
    # JAX has the same rule, but does not tell the port before it listens.
    return host, os.environ.setdefault("JAX_COORDINATOR_PORT", str(61440 + first % 4096))


def _bound(host: str, port: str) -> str | None:
    """Return the address at which process 0 listens, or None for the choice of JAX.

    That is ``JAX_COORDINATOR_BIND_ADDRESS`` or, without this variable, all addresses.
    """
    if not host or "JAX_COORDINATOR_BIND_ADDRESS" in os.environ:
        return None
    own = watch.own_address(host)
    return own and (f"[{own}]:{port}" if ":" in own else f"{own}:{port}")


def _check(coordinator: str | None, processes: int | None, process: int | None) -> None:
    if coordinator is None and processes is None and process is None:
        return
    if coordinator is None or processes is None or process is None:
        raise UserError(
            "--coordinator, --processes and --process belong together: give all three, or none of them if SLURM, Open MPI, "
            "Kubernetes or a TPU starts the processes"
        )
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal():
        raise UserError(f"--coordinator must be HOST:PORT of process 0, not {coordinator!r}")
    if not 0 <= process < processes:
        raise UserError(
            f"--process must be between 0 and {processes - 1} for {processes} processes, but is {process}"
        )


def _late(what: str, process: int | None, processes: int | None) -> str:
    if process == 0:
        return f"error: {what}: not all of the {processes} processes connected within {ANSWER:g} s; start them at the same time"
    return f"error: {what} does not answer within {ANSWER:g} s: check that process 0 is running and can be reached"


def _watch(host: str) -> None:
    """End this process when another one has ended, because it might wait forever for its results."""
    if is_first():
        key = secrets.token_bytes()
        port = watch.serve_processes(host, key)
        on_process_zero(lambda: [host, port, key.hex()])
        return
    host, port, known = on_process_zero(lambda: [])
    try:
        watch.join_watch(host, port, bytes.fromhex(known))
    except OSError as error:
        say(
            f"process {jax.process_index()} cannot connect to process 0 at {host}:{port} ({error}). If another process dies, "
            f"this one notices it only after {HEARTBEAT} s",
            file=sys.stderr,
        )


JOINING.add("processes", join_processes)

"""How does a process notice that another process of the run has ended, or is stopped?

Each process keeps a connection to process 0, over which both send a sign of life every few seconds.
The operating system closes the connection when a process ends for any reason; a process that ends
normally sends a goodbye first. A stopped process, or a lost network, leaves the connection open
without a sign.
"""

import atexit
import hmac
import ipaddress
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from train.common.output import say

BEAT = 5.0  # seconds between two signs of life
SILENCE = 60.0  # seconds without a sign, after which this process ends
DEADLINE = 10.0  # seconds in which a new connection must prove that it belongs to the run
GRACE = 1.0  # seconds that the other processes have to end before process 0
AGAIN = "run the same command in all processes to continue"
LOST = f"another process of this run has ended: its messages tell why; {AGAIN}"
_SIGN = b"."
_GOODBYE = b"!"
_SIZE = 32  # bytes of a challenge and of its answer
_ending = threading.Lock()
_followed: list[socket.socket] = []


def end_process(message: str, code: int = os.EX_TEMPFAIL) -> None:
    """End the process with one line and an exit code, even if its other threads are waiting."""
    # The lock is never released, so that only one thread prints its line.
    _ending.acquire()
    with suppress(Exception):  # a closed output
        say(message, file=sys.stderr, flush=True)
    if len(_followed) > 1:
        # This is process 0. When it ends, JAX aborts the other processes with a long message, so
        # they have to end before.
        for connection in _followed:
            _shut(connection)
        time.sleep(GRACE)
    os._exit(code)


def silence_message() -> str:
    """Return the line about a process that gives no sign of life."""
    what = f"another process of this run has been silent for {SILENCE:g} s"
    return f"{what}: it is stopped, or its network is down; {AGAIN}"


def own_address(host: str) -> str | None:
    """Return the address of this host that ``host`` names, or None if it names none.

    A host often maps its own name to a loopback address, which other hosts cannot reach.
    """
    try:
        found = [info[4][0] for info in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)]
    except OSError:
        return None
    for address in map(str, found):
        if ipaddress.ip_address(address).is_loopback and not _is_loopback(host):
            continue
        with suppress(OSError), _listening(address):
            return address
    return None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listening(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family)


def serve_processes(host: str, key: bytes) -> int:
    """Let the other processes connect to this one, process 0, and return the port.

    The server listens only on the address of ``host``, unless that is not an address of this host.

    Args:
      host: the host of process 0, as the other processes call it.
      key: secret of the run. Connections that do not know it are closed.
    """
    address = own_address(host)
    if address is None:
        say(f"{host} is not an address of this host: listening on all addresses", file=sys.stderr)
    server = _listening(address or "")

    def accept() -> None:
        while True:
            # A flood of connections may leave no thread for one of them.
            with suppress(OSError, RuntimeError):
                connection, _ = server.accept()
                # In a thread, so that a silent connection does not delay the others.
                threading.Thread(target=_admit, args=(connection, key), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return server.getsockname()[1]


def _admit(connection: socket.socket, key: bytes) -> None:
    deadline = threading.Timer(DEADLINE, _shut, [connection])
    deadline.daemon = True
    deadline.start()
    try:
        challenge = secrets.token_bytes(_SIZE)
        connection.sendall(challenge)
        if hmac.compare_digest(_received(connection), _answer(key, challenge)):
            deadline.cancel()
            follow_connection(connection)
            return
    except OSError:
        pass
    deadline.cancel()
    connection.close()


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def join_watch(host: str, port: int, key: bytes) -> None:
    """Connect this process to process 0.

    Raises:
      OSError: process 0 does not answer.
    """
    connection = socket.create_connection((host, port), timeout=DEADLINE)
    try:
        connection.sendall(_answer(key, _received(connection)))
    except OSError:
        connection.close()
        raise
    follow_connection(connection)


def _answer(key: bytes, challenge: bytes) -> bytes:
    return hmac.digest(key, challenge, "sha256")


def _received(connection: socket.socket) -> bytes:
    content = b""
    while len(content) < _SIZE:
        part = connection.recv(_SIZE - len(content))
        if not part:
            raise ConnectionError("the other side has closed the connection")
        content += part
    return content


def follow_connection(connection: socket.socket, ends: Callable[[str], None] = end_process) -> None:
    """Call ``ends`` with a line when the other side of a connection ends or falls silent."""
    connection.settimeout(SILENCE)
    _followed.append(connection)

    def listen() -> None:
        # Until its end, because JAX waits at the end for all processes.
        ending = False
        while True:
            try:
                sign = connection.recv(1)
            except TimeoutError:
                return ends(silence_message())
            except OSError:
                sign = b""
            if sign == _GOODBYE:
                ending = True
            elif sign != _SIGN:
                return None if ending else ends(LOST)

    def beat() -> None:
        with suppress(OSError):
            while True:
                time.sleep(BEAT)
                connection.sendall(_SIGN)

    def goodbye() -> None:
        with suppress(OSError):
            connection.sendall(_GOODBYE)

    # A process that is killed does not run this function, so the others notice it.
    atexit.register(goodbye)
    for act in (listen, beat):
        threading.Thread(target=act, daemon=True).start()

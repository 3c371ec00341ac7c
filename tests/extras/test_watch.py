"""The processes of a run notice that one of them has ended, is stopped, or is not theirs."""

import queue
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from train.extras import watch

ROOT = Path(__file__).parents[2]
KEY = b"k" * 32
PEER = """
import sys, time
from train.extras import watch
watch.BEAT, watch.SILENCE = 0.1, 2.0
if sys.argv[1:]:
    watch.join_watch("127.0.0.1", int(sys.argv[1]), b"k" * 32)
    print("joined", flush=True)
else:
    print(watch.serve_processes("127.0.0.1", b"k" * 32), flush=True)
time.sleep(90)
"""


def peer(*arguments: str) -> subprocess.Popen:
    out = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, "-c", PEER, *arguments], cwd=ROOT, text=True, **out)


SILENT = "another process of this run has been silent for 2 s: it is stopped"
CASES = [(0, signal.SIGSTOP, SILENT), (0, signal.SIGKILL, watch.LOST)]


@pytest.mark.parametrize(("stopped", "number", "says"), [*CASES, (1, signal.SIGKILL, watch.LOST)])
def test_a_stopped_or_killed_process_ends_the_other_with_a_line(stopped, number, says):
    with peer() as first, peer(first.stdout.readline().strip()) as second:
        assert second.stdout.readline() == "joined\n"
        time.sleep(0.5)
        (first, second)[stopped].send_signal(number)
        other = (second, first)[stopped]
        _, said = other.communicate(timeout=60)
        assert other.returncode == 75
        assert said.startswith(says) and said.count("\n") == 1
        (first, second)[stopped].kill()


def test_a_stopped_process_ends_all_others_with_a_line():
    """JAX would abort the others if process 0 ended first."""
    with peer() as first:
        port = first.stdout.readline().strip()
        with peer(port) as second, peer(port) as third:
            assert {second.stdout.readline(), third.stdout.readline()} == {"joined\n"}
            time.sleep(0.5)
            second.send_signal(signal.SIGSTOP)
            _, said = third.communicate(timeout=60)
            assert (third.returncode, said) == (75, f"{watch.LOST}\n")
            _, said = first.communicate(timeout=60)
            assert first.returncode == 75 and said.startswith(SILENT) and said.count("\n") == 1
            second.kill()


SIGNS = [(b".!", False, True), (b"!.", False, True), (b".!.", True, False), (b".", True, True)]


@pytest.mark.parametrize(("last", "closes", "said"), SIGNS)
def test_a_process_is_followed_until_its_end(monkeypatch, last, closes, said):
    """Also after its goodbye, because JAX waits at the end for all processes."""
    monkeypatch.setattr(watch, "SILENCE", 1.0)
    here, there = socket.socketpair()
    lines: queue.Queue[str] = queue.Queue()
    with here, there:
        watch.follow_connection(here, lines.put)
        there.sendall(last)
        if closes:
            there.close()
        if said:
            assert lines.get(timeout=30) == (watch.LOST if closes else watch.silence_message())
        else:
            with pytest.raises(queue.Empty):
                lines.get(timeout=2)


def test_silent_and_foreign_connections_do_not_block_a_peer(monkeypatch):
    monkeypatch.setattr(watch, "DEADLINE", 1.0)
    followed = []
    monkeypatch.setattr(watch, "follow_connection", followed.append)
    port = watch.serve_processes("127.0.0.1", KEY)
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
    foreign = socket.create_connection(("127.0.0.1", port))
    foreign.sendall(b"x" * 32)
    began = time.monotonic()
    watch.join_watch("127.0.0.1", port, KEY)
    assert time.monotonic() - began < 1.0
    for connection in (foreign, *silent):  # closed after the deadline
        connection.settimeout(30)
        while connection.recv(64):
            pass
    assert len(followed) == 2  # both ends of the connection of the peer
    for connection in (foreign, *silent, *followed):
        connection.close()


def test_process_0_listens_only_on_its_address(monkeypatch):
    assert watch.own_address("localhost") in ("127.0.0.1", "::1")
    assert watch.own_address("127.0.0.1") == "127.0.0.1"
    assert watch.own_address("192.0.2.1") is None  # of another host
    assert watch.own_address("no.such.host.invalid") is None
    # A host that maps its own name to loopback is called by another address.
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(2, 1, 6, "", ("127.0.1.1", 0))])
    assert watch.own_address("node17") is None

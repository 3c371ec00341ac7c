"""Processes that work for this one: none outlives it, and none is stopped before it."""

import multiprocessing
import os
import threading


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def end_with_parent(*_: int) -> None:
    """To be called in a worker as it begins.

    What is sent to the group of this process (Ctrl-C, SIGTERM), so that it saves and ends, does not
    reach the worker, which ends when this process is gone, even by SIGKILL.
    """
    os.setsid()
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()

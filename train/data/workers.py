"""Worker processes that do not outlive this process and are not stopped before it."""

import multiprocessing
import os
import threading


def core_count() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def end_with_parent(*_: int) -> None:
    """Tie the lifetime of a worker process to its parent. Call it at the start of the worker.

    Signals to the process group of the parent (Ctrl-C, SIGTERM), after which the parent saves and
    ends, do not reach the worker. The worker ends when the parent has ended, even by SIGKILL.
    """
    os.setsid()
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()

"""Being asked to stop: preemption, or a polite kill."""

import signal

import jax
from jax.experimental import multihost_utils


class Stop:
    """Whether SIGTERM came. Outside of the block it does again what it did.

    Of several processes, JAX watches for it from their start to their end, and finds a step that none of them is past.
    """

    def __init__(self):
        self._came = False

    def asked(self, step: int) -> bool:
        """Whether to stop after ``step``, the same in every process; to be asked at each, whose numbers rise."""
        return self._came if jax.process_count() == 1 else multihost_utils.reached_preemption_sync_point(step)

    def __enter__(self):
        if jax.process_count() == 1:
            self._before = signal.signal(signal.SIGTERM, self._ask)
        return self

    def __exit__(self, *_) -> None:
        if jax.process_count() == 1:
            signal.signal(signal.SIGTERM, self._before)

    def _ask(self, *_):
        self._came = True

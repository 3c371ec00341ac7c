"""Being asked to stop: preemption, or a polite kill."""

import signal


class Stop:
    """Whether SIGTERM came. Outside of the block it does again what it did."""

    def __init__(self):
        self.asked = False

    def __enter__(self):
        self._before = signal.signal(signal.SIGTERM, self._ask)
        return self

    def __exit__(self, *_) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _ask(self, *_):
        self.asked = True

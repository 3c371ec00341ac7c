"""Change the limits for files of others within a block."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from jaxgrow.untrusted import file_limits, set_limits


@contextmanager
def using_limits(**changed: float) -> Iterator[None]:
    """Change limits of this process, and of processes that it starts, within a block."""

    def changes(limits):
        return ",".join(f"{name}={value}" for name, value in limits.items())

    before = vars(file_limits())
    with mock.patch.dict(os.environ):
        try:
            set_limits(changes(changed))
            yield
        finally:
            set_limits(changes(before))

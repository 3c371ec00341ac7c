from collections.abc import Callable, Sequence
from typing import Any

Lazy = tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]

def attach(package_name: str, submodules: Sequence[str]) -> Lazy: ...
def attach_stub(package_name: str, filename: str) -> Lazy: ...

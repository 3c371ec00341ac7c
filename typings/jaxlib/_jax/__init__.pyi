# JAX ships no types for its compiled modules. Without these, every function of JAX whose signature
# names a device or the structure of a tree is partly unknown to a type checker.
from typing import Any

from jaxlib._jax import pytree as pytree

class Device:
    id: int
    platform: str
    device_kind: str
    process_index: int
    def __getattr__(self, name: str) -> Any: ...

def __getattr__(name: str) -> Any: ...

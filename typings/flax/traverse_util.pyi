# `flax.traverse_util` has no annotations.
from collections.abc import Callable, Mapping
from typing import Any

def flatten_dict(
    xs: Mapping[Any, Any],
    keep_empty_nodes: bool = False,
    is_leaf: Callable[[Any, Any], bool] | None = None,
    sep: str | None = None,
) -> dict[Any, Any]: ...
def unflatten_dict(xs: Mapping[Any, Any], sep: str | None = None) -> dict[Any, Any]: ...
def __getattr__(name: str) -> Any: ...

# `flax.struct` without annotations would make every field of a pytree dataclass partly unknown.
from collections.abc import Callable
from typing import Any, Self, TypeVar, dataclass_transform, overload

T = TypeVar("T")

def field(
    pytree_node: bool = True,
    *,
    metadata: dict[str, Any] | None = None,
    default: Any = ...,
    default_factory: Callable[[], Any] = ...,
    init: bool = True,
    repr: bool = True,
    hash: bool | None = None,
    compare: bool = True,
    kw_only: bool = ...,
) -> Any: ...
@overload
@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def dataclass(clz: type[T], **kwargs: Any) -> type[T]: ...
@overload
@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def dataclass(**kwargs: Any) -> Callable[[type[T]], type[T]]: ...

@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class PyTreeNode:
    def replace(self, **overrides: Any) -> Self: ...

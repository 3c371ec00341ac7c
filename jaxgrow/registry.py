"""What extends the core: how does it find an extra without importing it?

The core looks up models, formats, datasets and commands by name. An extra is a module that adds
more of them. The table ``EXTRAS`` of a package of extras, such as `jaxgrow.extras`, has for each
kind the names that its modules add, so that a module is imported when its name is looked up. After
the module, a colon and a description may follow.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TypeVar

T = TypeVar("T")


class Registry(Mapping[str, T]):
    """A mapping from names to what the core and the extras have added.

    Iterating and ``in`` import no extra. Looking up a name imports the module that adds it.
    """

    def __init__(self, kind: str, extras: str = "jaxgrow.extras"):
        """Start empty.

        Args:
          kind: the key in the table, such as "config".
          extras: the package with the table ``EXTRAS``: kind -> name -> module.
        """
        self.kind = kind
        self._extras = extras
        self._added: dict[str, T] = {}

    def add(self, name: str, value: T) -> None:
        """Add a value. A class that its file defines again replaces its old definition.

        Raises:
          ValueError: another value of this name was added before.
        """
        known = self._added.get(name)
        # A file of configs is executed each time that one of its configs is loaded.
        if known is not None and not is_same_class(known, value):
            raise ValueError(f"the {self.kind} {name} is registered already: choose another name")
        self._added[name] = value

    def _modules(self) -> Mapping[str, str]:
        return import_module(self._extras).EXTRAS.get(self.kind, {})

    def describe(self, name: str) -> str:
        """Return the description of a name in the table, without importing its module."""
        return self._modules()[name].partition(": ")[2]

    def __getitem__(self, name: str) -> T:
        if name not in self._added:
            import_module(self._modules()[name].partition(":")[0])
        return self._added[name]

    def __contains__(self, name: object) -> bool:
        return name in self._added or name in self._modules()

    def __iter__(self) -> Iterator[str]:
        return iter({**self._added, **self._modules()})

    def __len__(self) -> int:
        return len({**self._added, **self._modules()})


def is_same_class(old: object, new: object) -> bool:
    """Whether two classes are one, or were made by executing the same file twice."""
    if not isinstance(old, type) or not isinstance(new, type):
        return False
    return (old.__module__, old.__qualname__) == (new.__module__, new.__qualname__)

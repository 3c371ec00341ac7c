"""The registry of growth operators.

The decorator `operator` records the properties of a growth operator once. The command line, its
help, the tests of the laws and the table in ``docs/concepts/operators.md`` read them from here.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

from jaxgrow.axes.names import LAYERS, Axes
from jaxgrow.growth.maps import Growth, Rules, preserves_function
from jaxgrow.growth.moments import Policy

Function = TypeVar("Function", bound=Callable[..., Growth])
Inverse: TypeAlias = Literal["bitwise", "rounded", "no"]


class ModelForm(Protocol):
    """The properties of a model that decide whether a growth preserves its function.

    Every `jaxgrow.models.Config` has them.
    """

    @property
    def pre_norm(self) -> bool: ...
    @property
    def means_stay(self) -> bool: ...
    @property
    def normed(self) -> tuple[str, ...]: ...
    def axes(self) -> Axes: ...


def by_maps(growth: Growth, form: ModelForm) -> bool:
    """Whether the maps of a growth preserve the function. The result is false for `Rules`."""
    return not isinstance(growth, Rules) and preserves_function(growth, form.axes(), form.normed)


@dataclass(frozen=True)
class Operator:
    """A published growth operator and its properties, as given to `operator`.

    Attributes:
      function: ``(sizes, target, ...) -> Growth``.
      axes: the kinds of axes that it can grow; empty if it changes the form of the model and no size.
      sizes: which new sizes it can reach, for help texts; empty if all.
      preserves: whether it preserves the function of a pre-LN model, for help texts and tables.
      source: the publication.
      policies: the policies of `jaxgrow.grow_optimizer` that suit the operator, the best one first.
      preserves_for: whether a growth by this operator preserves the function of a given model, up
        to rounding.
      example: new sizes for a small model with 2 layers, ``embed`` 6, ``heads`` 3 and ``mlp`` 9, on
        which the laws are tested.
      inverts: whether ``swap`` of such a growth inverts it: bitwise, up to rounding, or not at all.
      dual: whether gradients grow by the dual of the growth if the function is preserved.
    """

    function: Callable[..., Growth]
    axes: tuple[str, ...]
    preserves: str
    source: str
    policies: tuple[Policy, ...]
    sizes: str = ""
    preserves_for: Callable[[Growth, ModelForm], bool] = by_maps
    example: Mapping[str, int] | None = None
    inverts: Inverse = "rounded"
    dual: bool = True

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def summary(self) -> str:
        """The first sentence of the docstring."""
        return " ".join((self.function.__doc__ or "").split("\n\n")[0].split())

    @property
    def group(self) -> dict[str, Callable[..., Growth]]:
        """The group of the operator: `FORMS`, `DEPTH`, `EXPERTS` or `WIDTH`."""
        if not self.axes:
            return FORMS
        if self.axes == (LAYERS,):
            return DEPTH
        return EXPERTS if "experts" in self.axes else WIDTH

    @property
    def grows(self) -> str:
        """The kinds of axes and the sizes that it can reach, for tables."""
        return ", ".join(self.axes) + (f" ({self.sizes})" if self.sizes else "") or "nothing"

    def __call__(
        self, sizes: Mapping[str, int], target: Mapping[str, int], **options: object
    ) -> Growth:
        """Make a growth. Options that the function does not accept (``seed``) are ignored."""
        return self.function(sizes, target, **self.accepted(options))

    def accepted(self, options: Mapping[str, object]) -> dict[str, object]:
        """Return the options that the function accepts."""
        takes = inspect.signature(self.function).parameters
        return {name: value for name, value in options.items() if name in takes}


OPERATORS: dict[str, Operator] = {}
# The functions of the operators in four groups: those that only add layers, those that make
# experts, those that change the form of a model and no size, and all others.
DEPTH: dict[str, Callable[..., Growth]] = {}
WIDTH: dict[str, Callable[..., Growth]] = {}
EXPERTS: dict[str, Callable[..., Growth]] = {}
FORMS: dict[str, Callable[..., Growth]] = {}

_ARGUMENTS = {
    "sizes": "the size of every axis of the model, such as ``jaxgrow.sizes(params, axes)`` or ``config.sizes()``.",
    "target": "the new sizes of the axes that grow; other axes keep their size.",
    "seed": "random seed for the choices described above. Equal seeds give equal growths.",
}
_RAISES = (
    "ValueError: an axis that the operator cannot grow or that the model does not have, a size that it cannot reach, or query "
    "heads that cannot be divided among the key/value heads."
)

_MAPS = "One map for each axis of ``target``."
_LAYER_MAPS = "The map of ``layers``, or of the layers of each stage."


def operator(*, also: str = "", **properties: Any) -> Callable[[Function], Function]:
    """Register a growth operator, and add the shared arguments to its docstring.

    The docstring of the function may contain the line ``{arguments}``. It is replaced by the
    description of ``sizes``, ``target`` and ``seed``. The line ``{raises}`` is replaced by the
    errors that all operators have in common. The line ``{sections}`` is replaced by both, in
    sections that also tell what most operators return.

    If the definition of an operator runs again, as in a notebook, the new function replaces the old
    one.

    Args:
      also: a second name for the same operator.
      **properties: the fields of `Operator`, except ``function``.

    Returns:
      A decorator that returns the function unchanged, apart from its docstring.

    Raises:
      ValueError: another function has the name.

    Example:
      >>> OPERATORS["net2net"] is OPERATORS["fpi"]
      True
    """

    def register(function: Function) -> Function:
        found = Operator(function, **properties)
        for name in filter(None, (found.name, also)):
            if name in OPERATORS:
                _unregister(name, function)
            OPERATORS[name] = found
            found.group[name] = function
        function.__doc__ = _completed(function.__doc__ or "", found)
        return function

    return register


def _unregister(name: str, function: Callable[..., Growth]) -> None:
    """Remove an operator that an earlier run of the same definition registered.

    A config file runs once for each of its configs, and a notebook cell whenever it is edited.
    """
    old = OPERATORS[name].function
    places = [(f.__module__, f.__qualname__) for f in (old, function)]
    if old is function or places[0] != places[1]:
        raise ValueError(f"operator {name!r} is registered twice: by {old} and {function}")
    del OPERATORS.pop(name).group[name]


def _completed(text: str, found: Operator) -> str:
    takes = inspect.signature(found.function).parameters
    arguments = [f"{name}: {about}" for name, about in _ARGUMENTS.items() if name in takes]
    sizes = [f"ValueError: a new size other than {found.sizes}."] if found.sizes else []
    sections = {
        "Args:": arguments,
        "Returns:": [_LAYER_MAPS if found.axes == (LAYERS,) else _MAPS],
        "Raises:": [*sizes, _RAISES],
    }
    replacements = {
        "{arguments}": arguments,
        "{raises}": [_RAISES],
        "{sections}": "\n\n".join(
            "\n  ".join((head, *lines)) for head, lines in sections.items()
        ).split("\n"),
    }
    filled: list[str] = []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        new = replacements.get(line.strip(), [line.strip()])
        filled += [(indent + one).rstrip() for one in new]
    return "\n".join(filled)

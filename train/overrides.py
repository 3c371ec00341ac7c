"""``--set a.b=c``: fields of nested dataclasses set by name, parsed and checked by their types."""

import ast
import copy
import dataclasses
import difflib
import types
import typing
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

from train.errors import UserError

T = TypeVar("T")

# Metadata of a field that came later than runs that people have: ``config.json`` has it only where it is not the default,
# so that these runs go on, and are compared.
LATER = {"later": True}


def numbers(text: str, kind: type, what: str) -> list:
    try:
        return [kind(part) for part in text.split(",") if part]
    except ValueError as error:
        raise UserError(f"{what} takes numbers divided by commas, not {text!r}") from error


def overridden(node: T, overrides: Sequence[str]) -> T:
    """``node`` with ``a.b=c`` overrides, which are judged together: one may need another.

    Raises:
      UserError: an override names no field, does not fit its type, or the result is refused.
    """
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals:
            raise UserError(f"--set takes a.b=c, not {override!r}")
        node = _set(node, name.split("."), text, name)
    return _valid(node, overrides) if overrides else node


def _set(node: Any, path: list[str], text: str, name: str) -> Any:
    """``node`` with the field at ``path`` set, and not judged yet. Items of tuples are named by number: ``method.up.0.lr``."""
    head, *rest = path
    if isinstance(node, tuple):
        if not head.isdigit() or int(head) >= len(node):
            raise UserError(f"--set {name}: {head!r} is none of the items 0 .. {len(node) - 1}")
        i = int(head)
        return (
            *node[:i],
            _set(node[i], rest, text, name) if rest else _parse(text, type(node[i]), name),
            *node[i + 1 :],
        )
    if not dataclasses.is_dataclass(node):
        raise UserError(f"--set {name}: nothing has a field {head!r} here, the value is {node!r}")
    types_ = _hints(node)
    if head not in types_:
        near = difflib.get_close_matches(head, types_, cutoff=0.5) or sorted(types_)
        raise UserError(f"--set {name}: {type(node).__name__} has no field {head!r}; did you mean {' or '.join(near)}?")
    inner = getattr(node, head)
    if rest and inner is None:  # its fields are set of what it would be
        inner = _made(types_[head])
    value = _set(inner, rest, text, name) if rest else _parse(text, types_[head], name)
    node = copy.copy(node)
    object.__setattr__(node, head, value)  # frozen, and to be judged when all overrides are in
    return node


def _made(hint: Any) -> Any:
    """The one dataclass that a type hint allows, with its defaults; None if there is none such."""
    kinds: list[Any] = [kind for kind in _options(hint) if dataclasses.is_dataclass(kind)]
    needed = dataclasses.MISSING
    if len(kinds) != 1 or any(
        f.default is needed and f.default_factory is needed for f in dataclasses.fields(kinds[0])
    ):
        return None
    return kinds[0]()


def _valid(node: Any, overrides: Sequence[str], name: str = "") -> Any:
    """``node``, which is at ``name``, made again from the bottom up as its classes check it.

    Raises:
      UserError: one of them refuses what ``overrides`` made of it.
    """
    if isinstance(node, tuple):
        return tuple(_valid(item, overrides, f"{name}{i}.") for i, item in enumerate(node))
    if not dataclasses.is_dataclass(node) or isinstance(node, type):
        return node
    fields = {f.name: _valid(getattr(node, f.name), overrides, f"{name}{f.name}.") for f in dataclasses.fields(node)}
    try:
        return type(node)(**fields)
    except ValueError as error:
        within = [o for o in overrides if o.startswith(name)]
        own = [o for o in within if "." not in o.partition("=")[0].removeprefix(name)]
        raise UserError(f"--set {' '.join(own or within)}: {error}") from error


def _parse(text: str, hint: Any, name: str) -> Any:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    if _fits(value, hint):
        return float(value) if type(value) is int and int not in _options(hint) else value
    if str in _options(hint):
        return text
    raise UserError(f"--set {name}: {text!r} is no {_spell(hint)}")


def misfits(node: Any, name: str = "") -> list[str]:
    """``["optim.warmup: 'long' is no int", ..]``: every field whose value is not of its type."""
    if isinstance(node, tuple):
        return [m for i, item in enumerate(node) for m in misfits(item, f"{name}.{i}")]
    if not dataclasses.is_dataclass(node):
        return []
    wrong = []
    for key, hint in _hints(node).items():
        value, path = getattr(node, key), f"{name}.{key}".lstrip(".")
        wrong += misfits(value, path) if _fits(value, hint) else [f"{path}: {value!r} is no {_spell(hint)}"]
    return wrong


def _hints(node: Any) -> dict[str, Any]:
    """The types of the fields of a dataclass."""
    hints = typing.get_type_hints(type(node))
    return {f.name: hints[f.name] for f in dataclasses.fields(node)}


def _fits(value: Any, hint: Any) -> bool:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, arg) for arg in args)
    if origin is Literal:
        return value in args
    if origin is not None:  # tuple[item, ...], Sequence[item]
        return isinstance(value, origin) and all(_fits(item, args[0]) for item in value)
    if dataclasses.is_dataclass(hint):
        return isinstance(value, typing.cast(type, hint))
    return type(value) is hint or (hint is float and type(value) is int)


def _options(hint: Any) -> list[Any]:
    """What a type hint allows: literal strings and plain types, in order."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return [o for arg in typing.get_args(hint) for o in _options(arg)]
    if origin is Literal:
        return list(typing.get_args(hint))
    return [hint]


def _spell(hint: Any) -> str:
    return " or ".join(
        o.__name__ if isinstance(o, type) else repr(o) if isinstance(o, str) else str(o) for o in _options(hint)
    )

"""Does a value have the type of a field, and how is it read from JSON?

All parts that build dataclasses from text or JSON use these functions: the configs of models,
``config.json`` of Hugging Face, and ``--set`` of the trainer.

jaxgrow has its own functions for this because no library fits. msgspec and cattrs were tried on the
same ten wrong values; tyro and draccus were evaluated by reading their documentation:

- msgspec 0.22 refuses a field that may be one of two dataclasses, such as the method of an
  experiment. It ignores unknown keys of dataclasses, and its messages contain neither the wrong
  value nor the values that are allowed ("Invalid enum value 'fp8'").
- cattrs 26.2 converts silently: ``True`` is read as 1, 2.0 as 2, and "1" as 1.0. Each primitive
  type needs a hook against this, and its messages do not contain the wrong value.
- tyro 1.0 and draccus 0.11 build a command line or a new object from text. They do not change one
  field of an object that a config has built, and they do not read JSON.
- None of them checks an object that Python code has built with wrong types.

A library would also be a new dependency in exchange for the few lines below.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Literal, TypeAlias, TypeVar

#: A JSON object, as `json.loads` returns it. Its values are not checked yet: `build_dataclass` and
#: `convert_json` do that. Functions that accept any single value have arguments of type ``object``.
Json: TypeAlias = dict[str, Any]

T = TypeVar("T")

_UNIONS = (typing.Union, types.UnionType)


@cache
def field_types(kind: type) -> dict[str, Any]:
    """Return the types of the fields of a dataclass, by name.

    Example:
      >>> @dataclasses.dataclass
      ... class Sizes:
      ...     layers: "int"
      >>> field_types(Sizes)
      {'layers': <class 'int'>}
    """
    found = typing.get_type_hints(kind)
    return {field.name: found[field.name] for field in dataclasses.fields(kind)}


def fits_type(value: Any, hint: object) -> bool:
    """Return whether a value has a type. An int is also a float, but a bool is not an int.

    Args:
      value: any value.
      hint: a class, a `Literal`, a union, ``tuple[item, ...]``, ``Sequence[item]`` or
        ``dict[key, value]``.

    Example:
      >>> fits_type(3, int | None), fits_type(True, int), fits_type(("a", 1), tuple[str, ...])
      (True, False, False)
    """
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if origin in _UNIONS:
        return any(fits_type(value, arg) for arg in args)
    if origin is Literal:
        return any(type(value) is type(arg) and value == arg for arg in args)
    if origin is dict:
        return isinstance(value, dict) and all(
            fits_type(key, args[0]) and fits_type(item, args[1]) for key, item in value.items()
        )
    if origin is not None:
        return isinstance(value, origin) and all(fits_type(item, args[0]) for item in value)
    if dataclasses.is_dataclass(hint):
        return isinstance(value, typing.cast(type, hint))
    return type(value) is hint or (hint is float and type(value) is int)


def convert_json(value: object, hint: object) -> Any:
    """Return a JSON value as a value of the type.

    A list is read as a tuple, and an object is read as a dataclass, if the type allows one.

    Raises:
      ValueError: the value does not fit the type.

    Example:
      >>> convert_json([1, 2], tuple[int, ...])
      (1, 2)
      >>> convert_json("x", int | None)
      Traceback (most recent call last):
      ValueError: expected int or None, but got 'x'
    """
    kind = next((x for x in allowed_values(hint) if dataclasses.is_dataclass(x)), None)
    if isinstance(value, Mapping) and kind is not None:
        return build_dataclass(typing.cast(type, kind), value)
    read = _with_tuples(value)
    if not fits_type(read, hint):
        raise ValueError(type_message(value, hint))
    return read


def _with_tuples(value: object) -> object:
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def build_dataclass(kind: type[T], content: Mapping[str, object]) -> T:
    """Return the dataclass that a JSON object describes.

    Raises:
      ValueError: a field is unknown, missing, or has a value of a wrong type; or the class refuses
        the values.

    Example:
      >>> @dataclasses.dataclass
      ... class Sizes:
      ...     layers: int
      >>> build_dataclass(Sizes, {"layers": 2})
      Sizes(layers=2)
      >>> build_dataclass(Sizes, {"layers": "two"})
      Traceback (most recent call last):
      ValueError: Sizes: layers: expected int, but got 'two'
    """
    name = kind.__name__
    types_ = field_types(kind)
    values = {}
    for field, value in content.items():
        if field not in types_:
            raise ValueError(f"{name} has no field {field!r}; its fields are {', '.join(types_)}")
        try:
            values[field] = convert_json(value, types_[field])
        except ValueError as error:
            raise ValueError(f"{name}: {field}: {error}") from None
    for field in dataclasses.fields(typing.cast(Any, kind)):
        optional = (field.default, field.default_factory) != (dataclasses.MISSING,) * 2
        if field.name not in values and not optional:
            raise ValueError(f"{name}: {field.name} is missing")
    return kind(**values)


def allowed_values(hint: object) -> list[object]:
    """Return the literal values and plain types that a type allows, in order.

    Example:
      >>> allowed_values(Literal["auto"] | int)
      ['auto', <class 'int'>]
    """
    origin = typing.get_origin(hint)
    if origin in _UNIONS:
        return [option for arg in typing.get_args(hint) for option in allowed_values(arg)]
    return list(typing.get_args(hint)) if origin is Literal else [hint]


def describe_type(hint: object) -> str:
    """Return a type in words, for messages.

    Example:
      >>> describe_type(tuple[int, ...] | None), describe_type(Literal["a", "b", "c"])
      ('tuple[int, ...] or None', "'a' or 'b' or 'c'")
    """
    return " or ".join(dict.fromkeys(map(_type_word, allowed_values(hint))))


def type_message(value: object, hint: object) -> str:
    """Return the message that a value does not have a type, with the most similar literal value.

    Example:
      >>> type_message("muno", Literal["adamw", "muon"])
      "expected 'adamw' or 'muon', but got 'muno'; did you mean muon?"
    """
    near = did_you_mean(value, [x for x in allowed_values(hint) if isinstance(x, str)])
    return f"expected {describe_type(hint)}, but got {value!r}{near}"


def check_choice(name: str, value: object, hint: object) -> None:
    """Check that a value is allowed, if its type has literal values.

    Args:
      name: the name of the setting or argument.
      value: its value.
      hint: its type. Types without literal values are not checked.

    Raises:
      ValueError: the value is not allowed.

    Example:
      >>> check_choice("norm", "layernorm", Literal["layer", "rms"])
      Traceback (most recent call last):
      ValueError: norm must be 'layer' or 'rms', not 'layernorm'
    """
    # A type that is written as a string is not a literal value.
    words = [x for x in allowed_values(hint) if isinstance(x, str) and x is not hint]
    if words and not fits_type(value, hint):
        raise ValueError(f"{name} must be {either_of(words)}, not {value!r}")


def check_choices(settings: Any) -> None:
    """Check the fields of a dataclass that have literal values, as `check_choice`."""
    for name, hint in field_types(type(settings)).items():
        check_choice(name, getattr(settings, name), hint)


def did_you_mean(name: object, names: Iterable[str]) -> str:
    """Return a question about the most similar name, for the end of a message; empty if none is.

    Example:
      >>> did_you_mean("muno", ["adamw", "muon"])
      '; did you mean muon?'
    """
    found = difflib.get_close_matches(str(name), list(names), n=1)
    return f"; did you mean {found[0]}?" if found else ""


def either_of(values: Iterable[object]) -> str:
    """Return literal values as a list in words.

    Example:
      >>> either_of(["post", "pre"]), either_of([1, 2, 3])
      ("'post' or 'pre'", '1, 2 or 3')
    """
    *others, last = map(repr, values)
    return f"{', '.join(others)} or {last}" if others else last


def _type_word(option: object) -> str:
    if option is types.NoneType:
        return "None"
    if (origin := typing.get_origin(option)) is not None:
        args = [*map(describe_type, typing.get_args(option)[: 2 if origin is dict else 1])]
        return f"{origin.__name__}[{', '.join([*args, *['...'] * (origin is tuple)])}]"
    return option.__name__ if isinstance(option, type) else repr(option)

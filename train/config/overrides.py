"""How does ``--set a.b=c`` set fields of nested dataclasses, and check them by their types?"""

import ast
import copy
import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from jaxgrow.registry import is_same_class
from jaxgrow.typed import Json, allowed_values, describe_type, field_types, fits_type, type_message
from train.common.errors import UserError

T = TypeVar("T")


class _ItemsOfName(NamedTuple):
    """The items of one name in a field with the metadata `train.common.fields.named`."""

    field: str
    kind: type

    @property
    def only(self) -> str | None:
        """The field that stands for the item, if it has only one."""
        fields = dataclasses.fields(self.kind)
        return fields[0].name if len(fields) == 1 else None

    @property
    def hint(self) -> object:
        return (field_types(self.kind)[self.only] if self.only else self.kind) | None

    def has(self, item: object) -> bool:
        """Whether an item has this name. Its file may have been executed again since it was made."""
        return is_same_class(type(item), self.kind)

    def get(self, node: object) -> object:
        item = next((x for x in getattr(node, self.field) if self.has(x)), None)
        return getattr(item, self.only) if item is not None and self.only else item

    def replaced(self, node: object, value: object) -> tuple[object, ...]:
        """Return the items of ``node`` with ``value`` for this name."""
        items = getattr(node, self.field)
        new = () if value is None else (self._item(value),)
        at = next((i for i, x in enumerate(items) if self.has(x)), len(items))
        return (*items[:at], *new, *items[at + 1 :])

    def _item(self, value: object) -> object:
        if not self.only:
            return value
        item = object.__new__(self.kind)
        object.__setattr__(item, self.only, value)  # validated after all overrides
        return item


def _items_by_name(kind: type) -> dict[str, _ItemsOfName]:
    """Return the names of the items of a dataclass, which are settings like its fields."""
    names = {}
    for f in dataclasses.fields(kind):
        for name, item in f.metadata.get("named", {}).items():
            names[name] = _ItemsOfName(f.name, item)
    return names


def by_name(node: object, f: dataclasses.Field) -> Json:
    """Return the items of a field with the metadata `train.common.fields.named`, in the form of ``config.json``."""
    out: Json = dict.fromkeys(f.metadata["always"])
    names = _items_by_name(type(node)).items()
    for value in getattr(node, f.name):
        name, item = next(((n, i) for n, i in names if i.has(value)), (type(value).__name__, None))
        out[name] = item.get(node) if item else value
    return out


def number_list(text: str, kind: type, what: str) -> list:
    try:
        return [kind(part) for part in text.split(",") if part]
    except ValueError as error:
        raise UserError(f"{what} takes numbers separated by commas, not {text!r}") from error


def refuse_seeds(experiments: Iterable[Any]) -> None:
    """Check that no experiment sets a seed, which ``--seeds`` would replace.

    Raises:
      UserError: one does.
    """
    for experiment in experiments:
        if experiment.seed:
            raise UserError(
                f"{experiment.name} sets seed={experiment.seed}, but --seeds determines the seeds of all runs; "
                f"give --seeds {experiment.seed}, or several, such as --seeds 0,1,2"
            )


def seed_list(text: str) -> list[int]:
    """Parse the seeds of ``--seeds 0,1,2`` or ``--seeds 0-2``.

    Raises:
      UserError: there are no seeds, a number is not a seed, or a seed is repeated, which would
        wrongly count as a replication.
    """
    first, dash, last = text.partition("-")
    if dash and first.isdecimal() and last.isdecimal() and 0 <= int(last) - int(first) < 1000:
        found = [*range(int(first), int(last) + 1)]
    else:
        found = number_list(text, int, "--seeds")
    if not found:
        raise UserError("--seeds needs at least one seed, such as 0,1,2")
    if wrong := [seed for seed in found if not 0 <= seed < 2**32]:
        raise UserError(f"--seeds takes numbers between 0 and 2^32 - 1, not {wrong[0]}")
    if repeated := sorted({seed for seed in found if found.count(seed) > 1}):
        raise UserError(
            f"--seeds names {repeated[0]} more than once: a repeated run is not a replication"
        )
    return found


def with_overrides(node: T, overrides: Sequence[str]) -> T:
    """Return ``node`` with the overrides ``a.b=c``.

    All overrides are applied before any of them is validated, because one may depend on another.

    Raises:
      UserError: an override names a field that does not exist, or its value has a wrong type or is
        not valid.
    """
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals:
            raise UserError(f"--set takes a.b=c, not {override!r}")
        try:
            node = _set(node, name.split("."), text, name)
        except _Unknown as error:
            raise UserError(f"--set {name}: {error}; {_similar(node, error.field)}") from None
    return _valid(node, overrides) if overrides else node


class SettingField(NamedTuple):
    """One field of an experiment, with its name for ``--set``."""

    name: str
    value: Any
    hint: object  # the type
    default: object  # `dataclasses.MISSING` if the field has none
    owner: type  # the class of the dataclass that has the field

    @property
    def type(self) -> str:
        return _described_type(self.hint)


def all_settings(node: object, name: str = "", unset: bool = False) -> Iterator[SettingField]:
    """Return every field of a dataclass and of the dataclasses inside it, outer fields first.

    Args:
      node: the dataclass, or a tuple of dataclasses.
      name: prefix of the names.
      unset: whether to include the fields of optional dataclasses whose value is None.
    """
    if isinstance(node, tuple):
        for i, item in enumerate(node):
            yield from all_settings(item, f"{name}{i}.", unset)
    if not dataclasses.is_dataclass(node):
        return
    types = field_types(type(node))
    for f in dataclasses.fields(node):
        if "named" in f.metadata:
            continue
        value = getattr(node, f.name)
        factory = f.default_factory
        yield SettingField(
            name + f.name,
            value,
            types[f.name],
            f.default if factory is dataclasses.MISSING else factory(),
            type(node),
        )
        inner = _default(types[f.name]) if unset and value is None else value
        yield from all_settings(inner, f"{name}{f.name}.", unset)
    for own, item in _items_by_name(type(node)).items():
        value = item.get(node)
        yield SettingField(name + own, value, item.hint, None, type(node))
        inner = _default(item.hint) if unset and value is None else value
        yield from all_settings(inner, f"{name}{own}.", unset)


class _Unknown(Exception):
    def __init__(self, field: str, where: str):
        super().__init__(f"{where} has no field {field!r}")
        self.field = field


def _similar(node: object, unknown: str) -> str:
    """Suggest settings to use instead of the field ``unknown``, by the last part of their names."""
    by_last: dict[str, list[str]] = {}
    for setting in all_settings(node, unset=True):
        by_last.setdefault(setting.name.rpartition(".")[2], []).append(setting.name)
    words = [last for last in by_last if unknown in (last, *last.split("_"))]
    close = words or difflib.get_close_matches(unknown, by_last, n=1)
    names = [name for last in close for name in by_last[last]]
    if not names:
        return "no field has a similar name; `python -m train.pretrain CONFIG --show` prints all fields"
    return f"did you mean {' or '.join(sorted(names, key=lambda name: name.count('.'))[:4])}?"


def _set(node: object, path: list[str], text: str, name: str) -> Any:
    """Return ``node`` with the field at ``path`` set, without validation.

    Items of tuples are named by their index: ``method.up.0.lr``.
    """
    head, *rest = path
    if isinstance(node, tuple):
        if not head.isdigit() or int(head) >= len(node):
            raise UserError(f"--set {name}: {head!r} is not an index from 0 to {len(node) - 1}")
        i = int(head)
        return (
            *node[:i],
            _set(node[i], rest, text, name) if rest else _parse(text, type(node[i]), name),
            *node[i + 1 :],
        )
    if not dataclasses.is_dataclass(node):
        raise _Unknown(head, f"the value {node!r}")
    item = _items_by_name(type(node)).get(head)
    plain = [f.name for f in dataclasses.fields(node) if "named" not in f.metadata]
    if item is None and head not in plain:
        raise _Unknown(head, type(node).__name__)
    inner = item.get(node) if item else getattr(node, head)
    hint = item.hint if item else field_types(type(node))[head]
    if rest and inner is None:  # its fields are set in the default value
        inner = _default(hint)
    value = _set(inner, rest, text, name) if rest else _parse(text, hint, name)
    if item:
        head = item.field
        value = item.replaced(node, value)
    node = copy.copy(node)
    object.__setattr__(node, head, value)  # frozen; validated after all overrides
    _unset_other(node, head)
    return node


def _unset_other(node: Any, name: str) -> None:
    """Give the fields that the field ``name`` replaces, by its metadata, their default values again.

    ``--set epochs=3`` thus also works for an experiment with a number of steps.
    """
    fields = {f.name: f for f in dataclasses.fields(node)}
    if getattr(node, name) != fields[name].default:
        for other in fields[name].metadata.get("replaces", ()):
            object.__setattr__(node, other, fields[other].default)


def _default(hint: object) -> object:
    """Return the only dataclass that a type hint allows, with its defaults, or None."""
    kinds: list[Any] = [kind for kind in allowed_values(hint) if dataclasses.is_dataclass(kind)]
    needed = dataclasses.MISSING
    if len(kinds) != 1 or any(
        f.default is needed and f.default_factory is needed for f in dataclasses.fields(kinds[0])
    ):
        return None
    return kinds[0]()


def _valid(node: object, overrides: Sequence[str], name: str = "") -> Any:
    """Build ``node`` again, inner dataclasses first, so that its classes validate their fields.

    Args:
      node: the dataclass, tuple or value.
      overrides: all overrides, for the error message.
      name: name of the node, with a dot at its end.

    Raises:
      UserError: a class refuses the values of ``overrides``.
    """
    if isinstance(node, tuple):
        return tuple(_valid(item, overrides, f"{name}{i}.") for i, item in enumerate(node))
    if not dataclasses.is_dataclass(node) or isinstance(node, type):
        return node
    fields = {
        f.name: _valid(getattr(node, f.name), overrides, f"{name}{f.name}.")
        for f in dataclasses.fields(node)
        if "named" not in f.metadata
    }
    for own, item in _items_by_name(type(node)).items():
        items = fields.setdefault(item.field, getattr(node, item.field))
        valid = [_valid(x, overrides, f"{name}{own}.") if item.has(x) else x for x in items]
        fields[item.field] = tuple(valid)
    try:
        return type(node)(**fields)
    except ValueError as error:
        within = [o for o in overrides if o.startswith(name)]
        own = [o for o in within if "." not in o.partition("=")[0].removeprefix(name)]
        raise UserError(f"--set {' '.join(own or within)}: {error}") from error


def _parse(text: str, hint: object, name: str) -> object:
    for value in _readings(text):
        if fits_type(value, hint):
            return float(value) if type(value) is int and int not in allowed_values(hint) else value
    raise UserError(f"--set {name}: {_wrong_type(text, hint)}")


def _choices(hint: object) -> list[str]:
    """Return the names in the ``choices`` of a base class, and nothing for another type."""
    return sorted(vars(hint).get("choices", ())) if isinstance(hint, type) else []


def _described_type(hint: object) -> str:
    return " or ".join(_choices(hint)) or describe_type(hint)


def _wrong_type(value: object, hint: object) -> str:
    if not _choices(hint):
        return type_message(value, hint)
    return f"expected {_described_type(hint)}, but got {value!r}; set it to one of them in the config file"


def _readings(text: str) -> Iterator[object]:
    """Return the values that ``text`` may mean, the most literal one first."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        value = text
    single = [value]
    if text in ("true", "false"):
        single.append(text == "true")
    if isinstance(value, float) and value.is_integer():  # such as 1e3
        single.append(int(value))
    single.append(text)
    yield from single
    if "," in text:
        yield tuple(text.split(","))  # for a tuple of words
    yield from ((value,) for value in single)  # for a tuple of one


def wrong_types(node: object, name: str = "") -> list[str]:
    """Return every field whose value has a wrong type.

    For example: ``["optim.warmup: expected int, but got 'long'", ..]``.
    """
    if isinstance(node, tuple):
        return [m for i, item in enumerate(node) for m in wrong_types(item, f"{name}.{i}")]
    if not dataclasses.is_dataclass(node):
        return []
    wrong = []
    for key, hint in field_types(type(node)).items():
        value = getattr(node, key)
        path = f"{name}.{key}".lstrip(".")
        wrong += (
            wrong_types(value, path)
            if fits_type(value, hint)
            else [f"{path}: {_wrong_type(value, hint)}"]
        )
    return wrong

"""Find settings of an experiment that have no effect, because no choice uses them.

The class attribute ``used_with`` declares, next to the fields, the choices that use a field::

    used_with = {"name": {"source": ("tfds",)}, "capacity": {"experts": CHANGED}}

A field without an entry is always used. An entry has the names of other fields, and the values of
which each of them needs one; a tuple or a text as a value has several. `CHANGED` is any value but
the default, and `GIVEN` any value but 0 and None. Several entries in a tuple are alternatives; an
empty tuple means that nothing uses the field, which the class has inherited. A name that begins
with a slash is a setting of the experiment: ``/model.masked``. ``/plan.warmup`` stands for
``optim.warmup`` of all trainings in the plan, of which `SAME` requires that one has the value of
the field itself. Only settings of the command line are compared with the plan: a config shares the
optimizer of its baseline, also if its stages have their own values.
"""

import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypeAlias

from jaxgrow.typed import either_of
from train.common.fields import CHANGED, GIVEN, SAME
from train.config.experiment import UNUSED
from train.config.overrides import SettingField, all_settings

# The values of a setting of which a condition needs one, or `CHANGED`, `GIVEN` or `SAME`.
Allowed: TypeAlias = str | tuple[object, ...]


def refuse_unused(node: object, plan: Sequence[object] = (), given: Collection[str] = ()) -> None:
    """Check that no setting has a value that nothing uses.

    Args:
      node: an experiment or another dataclass with settings.
      plan: the phases of the experiment; without them, conditions on the plan are not checked.
      given: the names of the settings of the command line.

    Raises:
      ValueError: a setting differs from its default, but has no effect.
    """
    found = {s.name: s for s in all_settings(node)}
    wrong = [_unused(s, found, node, plan if s.name in given else ()) for s in found.values()]
    if any(wrong):
        raise ValueError("; ".join(filter(None, wrong)))


def declared_conditions(kind: type) -> dict[str, tuple[Mapping[str, Allowed], ...]]:
    """Return the alternative conditions that a class and its bases declare, by field."""
    merged: dict[str, tuple[Mapping[str, Allowed], ...]] = {}
    for base in reversed(kind.__mro__):
        for field, needs in vars(base).get("used_with", {}).items():
            merged[field] = needs if isinstance(needs, tuple) else (needs,)
    return merged


def _unused(
    setting: SettingField, found: Mapping[str, SettingField], root: object, plan: Sequence[object]
) -> str | None:
    """Return why a setting has no effect; None if it has one."""
    prefix, _, field = setting.name.rpartition(".")
    needs = declared_conditions(setting.owner).get(field)
    if needs is None or setting.default is dataclasses.MISSING or setting.value == setting.default:
        return None
    if not needs:
        kind = setting.owner.__name__
        return f"{setting.name} has no effect on a {kind}: leave out {setting.name}"
    missing: dict[str, Allowed] = {}
    for alternative in needs:
        unmet: dict[str, Allowed] = {}
        for name, allowed in alternative.items():
            full = name[1:] if name[0] == "/" else f"{prefix}.{name}".lstrip(".")
            values = [*_values(full, found, root, plan)]
            if values and not any(_meets(v, allowed, setting, found.get(full)) for v in values):
                unmet[full] = allowed
        if not unmet:
            return None
        missing |= unmet
    return _unused_message(setting, missing, found, root)


def _values(
    name: str, found: Mapping[str, SettingField], root: object, plan: Sequence[object]
) -> Iterator[object]:
    if name.startswith("plan."):
        yield from (getattr(optim, name[5:]) for p in plan if (optim := getattr(p, "optim", None)))
    elif name in found:
        yield found[name].value
    elif hasattr(root, name.partition(".")[0]):  # perhaps a constant of the class
        yield functools.reduce(lambda node, part: getattr(node, part, None), name.split("."), root)


def _meets(
    value: object, allowed: Allowed, setting: SettingField, choice: SettingField | None
) -> bool:
    if allowed == SAME:
        return value == setting.value
    if allowed == GIVEN:
        return bool(value)
    if allowed == CHANGED:
        default = None if choice is None else choice.default
        return bool(value) and value != default
    assert not isinstance(allowed, str)
    return value in allowed or (isinstance(value, tuple | str) and any(x in allowed for x in value))


def _unused_message(
    setting: SettingField,
    missing: Mapping[str, Allowed],
    found: Mapping[str, SettingField],
    root: object,
) -> str:
    """Say which settings would use a setting, with their values."""
    value = f"{setting.name}={setting.value!r} has no effect"
    out = f"leave out {setting.name}"
    ways = {
        n: "" if a in (CHANGED, GIVEN) else f" to {either_of(a)}"
        for n, a in missing.items()
        if a != SAME
    }
    if not ways:
        return (
            f"{value}, because each stage of the method has its own value: set it there, such as "
            f"method.up.0.{setting.name.rpartition('.')[2]}, or {out}"
        )
    now = [f"{n}={next(_values(n, found, root, ()))!r}" for n in ways if n[:5] != "plan."]
    because = f"with {', '.join(now)}" if now else "in this plan"
    # A constant of the class, or a field that it does not have, cannot be set.
    set_to = " or ".join(
        f"{n.replace('plan.', 'optim.')}{to}"
        for n, to in ways.items()
        if n in found or n.startswith("plan.")
    )
    return f"{value} {because}: {f'set {set_to}, or ' if set_to else ''}{out}"


UNUSED.add("settings", refuse_unused)

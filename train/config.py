"""What a run is: one frozen dataclass, made by ``config()`` of a Python file, overridden by ``--set a.b=c``."""

import ast
import copy
import dataclasses
import difflib
import importlib.util
import json
import sys
import traceback
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jaxgrow.models import Config
from train.data import Data
from train.errors import UserError
from train.images import Images
from train.methods import Method, Scratch
from train.optim import Optim, transformation
from train.plan import Plan, Train, describe, shapes

# Fields as `as_json` names them: they change how a run goes and what it writes, not what it computes.
FREE = frozenset({"log_every", "checkpoint_every", "parallel", "data.Data.cache", "data.Images.cache"})


@dataclass(frozen=True)
class Experiment:
    """One run. ``steps`` is the budget of the model from scratch; a method's stages are fractions of it."""

    name: str
    model: Config
    steps: int
    batch: int  # samples: sequences of the model's context, or images; over all devices and micro-batches
    data: Data | Images = field(default_factory=Data)
    optim: Optim = field(default_factory=Optim)
    method: Method = field(default_factory=Scratch)
    accumulate: int = 1  # micro-batches that a batch is divided into
    parallel: Literal["pmap", "mesh"] = "pmap"
    seed: int = 0  # of initialisation and data order
    eval_every: int = 100  # steps
    eval_batches: int = 8
    log_every: int = 10
    checkpoint_every: int = 500

    def __post_init__(self):
        for name in ("steps", "batch", "accumulate", "eval_every", "eval_batches", "log_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, but is {getattr(self, name)}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed lies between 0 and 2^32 - 1, but is {self.seed}")
        if self.batch % self.accumulate:
            raise ValueError(f"a batch of {self.batch} cannot be divided into {self.accumulate} micro-batches")

    @property
    def plan(self) -> Plan:
        return self.method.plan(self.model, self.optim, self.steps)


def load(path: str | Path, overrides: typing.Sequence[str] = ()) -> Experiment:
    """The experiment of a config file, with ``a.b=c`` overrides, which are judged together: one may need another.

    Raises:
      UserError: the file is missing, breaks, or does not define ``config() -> Experiment``; or an override does not fit.
    """
    path = Path(path)
    if not path.is_file() or path.suffix != ".py":
        raise UserError(f"there is no config {path}: a Python file, .py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        experiment = module.config()
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f"{path}, line {lines[-1]}" if lines else path
        raise UserError(f"config {where}: {type(error).__name__}: {error}") from error
    if not isinstance(experiment, Experiment):
        raise UserError(f"config {path}: config() must return an Experiment, not {type(experiment).__name__}")
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals:
            raise UserError(f"--set takes a.b=c, not {override!r}")
        experiment = _set(experiment, name.split("."), text, name)
    if overrides:
        experiment = _valid(experiment, overrides)
    wrong = _misfits(experiment)
    if wrong:
        raise UserError(f"config {path}: {'; '.join(wrong)}")
    try:
        plan = experiment.plan
        shapes(plan, len(plan), transformation(experiment.optim))
        _ = [phase.cost for phase in plan if isinstance(phase, Train)]  # layers that a layer drop names must exist
    except ValueError as error:
        raise UserError(f"config {path}: {error}") from error
    say_long_warmups(experiment)
    return experiment


def say_long_warmups(experiment: Experiment) -> None:
    """Names on stderr each phase that ends before its warm-up does: its learning rate never comes to its peak."""
    phases = (phase for phase in experiment.plan if isinstance(phase, Train))
    for name, steps, warmup in dict.fromkeys((describe(p), p.steps, p.optim.warmup) for p in phases):
        if 0 < steps < warmup:
            said = f"{experiment.name}: {name} has {steps} steps, but a warm-up of {warmup}: its rate never comes to its peak"
            print(said, file=sys.stderr)


def as_json(experiment: Experiment) -> dict[str, Any]:
    """The experiment as ``config.json``; equal for equal ones."""

    def plain(node: Any) -> Any:
        if isinstance(node, Config):
            return node.as_json()
        if dataclasses.is_dataclass(node):
            return {f.name: plain(getattr(node, f.name)) for f in dataclasses.fields(node)}
        return [plain(item) for item in node] if isinstance(node, tuple) else node

    tagged = plain(experiment) | {
        name: {type(getattr(experiment, name)).__name__: plain(getattr(experiment, name))}
        for name in ("data", "method")
    }
    return json.loads(json.dumps(tagged))


def differences(old: Any, new: Any, name: str = "") -> list[str]:
    """``["optim.peak_lr: 0.01 and 0.02", ..]``."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(old.keys() | new.keys())
        return [d for k in keys for d in differences(old.get(k), new.get(k), f"{name}.{k}".lstrip("."))]
    return [] if old == new else [f"{name}: {old!r} and {new!r}"]


def conflicts(old: Any, new: Any) -> list[str]:
    """The `differences` of two runs' ``config.json`` that decide what is computed: all but those in `FREE`."""
    return [d for d in differences(old, new) if d.partition(": ")[0] not in FREE]


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
    value = _set(getattr(node, head), rest, text, name) if rest else _parse(text, types_[head], name)
    node = copy.copy(node)
    object.__setattr__(node, head, value)  # frozen, and to be judged when all overrides are in
    return node


def _valid(node: Any, overrides: typing.Sequence[str], name: str = "") -> Any:
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


def _misfits(node: Any, name: str = "") -> list[str]:
    """``["optim.warmup: 'long' is no int", ..]``: every field whose value is not of its type."""
    if isinstance(node, tuple):
        return [m for i, item in enumerate(node) for m in _misfits(item, f"{name}.{i}")]
    if not dataclasses.is_dataclass(node):
        return []
    found = []
    for key, hint in _hints(node).items():
        value, path = getattr(node, key), f"{name}.{key}".lstrip(".")
        found += _misfits(value, path) if _fits(value, hint) else [f"{path}: {value!r} is no {_spell(hint)}"]
    return found


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

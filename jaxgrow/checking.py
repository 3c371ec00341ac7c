"""Axis names of a third-party model, checked by experiment: the model itself says whether its names are right."""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from jaxgrow.axes.names import (
    READ,
    VALUE,
    Axes,
    Names,
    Params,
    axis,
    is_layers,
    is_names,
    kind,
    leaves,
    marked,
    path,
    reads,
    sizes,
    turned,
)
from jaxgrow.growth.apply import grow
from jaxgrow.operators import hypercloning
from jaxgrow.operators.targets import WIDTHS, width

TOLERANCE = (
    1e-3  # of the deviation of the outputs: float32 rounds to less, a wrong mark changes more
)
_TRIALS = 1500  # combinations of as many other marks, at most
_SIDE_BY_SIDE = ("qkv", "kv_parts")

Group = tuple[
    str, Names
]  # leaves that differ by numbers alone and have the same names: those of all layers
Named = Mapping[Group, Names]  # other names for some groups


@dataclass(frozen=True)
class Checked:
    """What `check_rules` found. It is true if nothing is wrong."""

    change: float  # of the outputs when all widths are doubled, of their deviation
    wrong: tuple[str, ...]  # a line for each name that is wrong
    unproven: tuple[
        str, ...
    ]  # a line for each mark that may be wrong: without it the outputs are the same

    def __bool__(self) -> bool:
        return not self.wrong

    def __str__(self) -> str:
        kept = f"doubling all widths changes the outputs by {self.change:.1e} of their deviation"
        lines = [f"wrong: {line}" for line in self.wrong] + [
            f"not proven: {line}" for line in self.unproven
        ]
        return "\n".join([kept, *lines])


def check_rules(
    apply: Callable[[Params], Any], params: Params, axes: Axes, seed: int = 0
) -> Checked:
    """Check the axis names of a model by growing it: all widths are doubled, and its outputs must stay the same.

    Each ``.in`` is removed in turn, and the outputs must then change. If they change although no
    mark was removed, other names are tried: each ``.in`` added and removed, and the layers on every
    other dimension. Attention's values are found by an experiment of their own: where keys are
    zero, the outputs depend on them and not on the queries.

    Take a small model: for each leaf of a layer it is evaluated a few times, at its own sizes and
    at the doubled ones. Leaves that differ by a number alone, such as those of all layers, are
    tried together.

    Args:
      apply: from parameters of any sizes to the outputs, an array or a tree of arrays, for fixed
        inputs. A model that is made from sizes is made here:
        ``lambda p: Model(**jaxgrow.sizes(p, axes)).apply({"params": p}, tokens)``. ``jax.jit`` of
        it makes the check faster.
      params: a pytree of arrays, or of their shapes. Noise is added, since scales of one and biases
        of zero prove nothing.
      axes: the axis names of each.
      seed: random seed for the noise.

    Returns:
      A `Checked`: what is wrong, with names that would be right, and which marks the outputs do not
      depend on.

    Raises:
      ValueError: the names do not fit the shapes, the model has no axis that is widened, or
        ``apply`` returns other shapes for the wider model.

    Example:
      >>> params = {"up": np.eye(2, 3), "down": np.ones((3, 2))}
      >>> axes = {"up": ("tokens.in", "mlp"), "down": ("mlp", "embed")}  # it lacks an ``.in``
      >>> print(check_rules(lambda p: np.maximum(p["up"], 0) @ p["down"] @ np.ones((len(p["down"][0]), 1)), params, {
      ...     **axes, "down": ("mlp", "classes")}).wrong[0])
      down: is named ('mlp', 'classes'); with ('mlp.in', 'classes') the outputs stay the same
    """
    check = _Check(apply, params, axes, seed)
    moved = check.moved_layers()
    fixes = {} if moved else check.fixes()
    wrong = moved or [
        f"{group[0]}: is named {group[1]}; with {names} the outputs stay the same"
        for group, names in fixes.items()
    ]
    change = check.tried({})
    if not wrong and change > TOLERANCE:
        wrong = [
            "the outputs change, and no few other marks prevent it: see that every axis has the right name"
        ]
    if not moved:
        wrong = [*wrong, *check.attention()]
    return Checked(change, tuple(wrong), () if wrong else tuple(check.unproven()))


class _Check:
    def __init__(self, apply: Callable[[Params], Any], params: Params, axes: Axes, seed: int):
        self.apply, self.axes = apply, axes
        self.rng = np.random.default_rng(seed + 1)
        self.groups: dict[Group, list[str]] = {}
        for leaf, _, names in leaves(params, axes):
            self.groups.setdefault((re.sub(r"\d+", "*", leaf), names), []).append(leaf)
        self.params = _drawn(params, axes, np.random.default_rng(seed))

    @cached_property
    def before(self) -> list[np.ndarray]:
        return self.outputs(self.params)

    def outputs(self, params: Params) -> list[np.ndarray]:
        return [np.asarray(x) for x in jax.tree.leaves(self.apply(params))]

    def named(self, other: Named) -> Axes:
        names = {leaf: other[group] for group in other for leaf in self.groups[group]}
        return jax.tree_util.tree_map_with_path(
            lambda p, n: names.get(path(p), n), self.axes, is_leaf=is_names
        )

    def change(self, other: Named) -> float:
        """How far the outputs change when the model is doubled by these names."""
        axes = self.named(other)
        known = sizes(self.params, axes)
        target = {name: 2 * known[name] for name in width(known)}
        if not target:
            raise ValueError(
                f"no axis of this model is widened: its axes are {', '.join(known)}, not {', '.join(WIDTHS)}"
            )
        return _change(
            self.before, self.outputs(grow(hypercloning(known, target), self.params, axes))
        )

    def tried(self, other: Named) -> float:
        """`change`, infinite where the names do not fit the shapes or the model."""
        try:
            return self.change(other)
        except Exception:  # frameworks raise what they like for shapes that they do not expect
            return float("inf")

    def moved_layers(self) -> list[str]:
        """What is wrong with the dimension that layers are stacked on, if it is wrong in every leaf alike."""
        stacked = {
            group: group[1] for group in self.groups if any(is_layers(axis(n)) for n in group[1])
        }
        if not stacked or self.tried({}) < TOLERANCE:
            return []
        for dim in range(max(len(names) for names in stacked.values())):
            moved = {group: _layers_at(names, dim) for group, names in stacked.items()}
            if moved != stacked and self.tried(moved) < TOLERANCE:
                group = next(group for group in stacked if moved[group] != group[1])
                return [
                    f"{group[0]}: is named {group[1]}; with {moved[group]}, and so wherever layers are stacked, the outputs "
                    "stay the same"
                ]
        return []

    def fixes(self) -> Named:
        """The fewest other marks with which the outputs stay the same; none, if they do, or if there are no such marks.

        Of as few marks, those of kernels go first: a norm's scale can make up for the kernel that
        alone reads it.
        """
        if self.change({}) < TOLERANCE:
            return {}
        every = [(group, names) for group in self.groups for names in _toggled(group[1])]
        every.sort(key=lambda one: _vector(one[1]))
        for count in range(1, len(every) + 1):
            if math.comb(len(every), count) > _TRIALS:
                break
            for some in itertools.combinations(every, count):
                if len(dict(some)) == count and self.tried(dict(some)) < TOLERANCE:
                    return dict(some)
        return {}

    def unproven(self) -> list[str]:
        """The marks without which the outputs are the same, too."""
        return [
            f"{group[0]}: without {name!r} of {group[1]} the outputs are the same, so that nothing proves this mark"
            for group in self.groups
            for i, name in enumerate(group[1])
            if _is_width(name) and reads(name)
            if self.tried({group: _renamed(group[1], i, turned(name, read=False))}) < 10 * TOLERANCE
        ]

    def attention(self) -> list[str]:
        """What is wrong with the marks of ``head_dim``: of keys, and of values."""
        inner = [group for group in self.groups if _of_heads(group[1])]
        if not inner or not any(_is_out(names) for _, names in self.groups):
            return []
        keys = [
            group for group in inner if any(axis(n) == "head_dim" and reads(n) for n in group[1])
        ]
        if not keys:
            return [f"no leaf is marked as attention's keys are, 'head_dim{READ}'"]
        still = self.replaced(keys, lambda x: np.zeros_like(x))
        before, wrong = self.outputs(still), []
        for group in inner:
            if group in keys or any(axis(n) in _SIDE_BY_SIDE for n in group[1]):
                continue
            other = self.replaced(
                [group], lambda x: x + self.rng.normal(size=x.shape).astype(x.dtype), still
            )
            is_value, is_marked = (
                _change(before, self.outputs(other)) > TOLERANCE,
                marked(group[1], VALUE),
            )
            if is_value and not is_marked:
                wrong.append(
                    f"{group[0]}: is named {group[1]}, but is of attention's values: 'head_dim{VALUE}'"
                )
            elif is_marked and not is_value:
                wrong.append(
                    f"{group[0]}: is named {group[1]}, but is not of attention's values: 'head_dim'"
                )
        return wrong

    def replaced(
        self, groups: list[Group], change: Callable[[Any], Any], params: Params | None = None
    ) -> Params:
        of = {leaf for group in groups for leaf in self.groups[group]}
        params = self.params if params is None else params
        return jax.tree_util.tree_map_with_path(
            lambda p, x: change(x) if path(p) in of else x, params
        )


def _drawn(params: Params, axes: Axes, rng: np.random.Generator) -> Params:
    """The parameters with noise: no scale is one, no bias zero, and no attention so even that queries do not matter.

    Of a kernel the deviation of the noise is about one over the root of its inputs, of a vector it
    is one half.
    """

    def leaf(names: Names, x: Any) -> np.ndarray:
        known = np.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else np.asarray(x)
        one = math.prod(
            n for n, name in zip(known.shape, names, strict=True) if not is_layers(axis(name))
        )
        noise = 0.5 if _vector(names) else 1.5 / one**0.25
        return (known + noise * rng.normal(size=known.shape)).astype(known.dtype)

    return jax.tree.map(leaf, axes, params, is_leaf=is_names)


def _change(before: list[np.ndarray], after: list[np.ndarray]) -> float:
    shapes = [[x.shape for x in outputs] for outputs in (before, after)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"the outputs have shapes {shapes[0]}, but {shapes[1]} when all widths are doubled: return logits, or what else "
            "has no axis that grows"
        )
    both = [
        (x.astype(np.float64), y.astype(np.float64)) for x, y in zip(before, after, strict=True)
    ]
    return max(float(np.abs(y - x).max() / max(x.std(), 1e-30)) for x, y in both)


def _is_width(name: str) -> bool:
    return kind(axis(name)) in WIDTHS


def _vector(names: Names) -> bool:
    return sum(not is_layers(axis(n)) for n in names) < 2


def _renamed(names: Names, i: int, name: str) -> Names:
    return (*names[:i], name, *names[i + 1 :])


def _toggled(names: Names) -> Iterator[Names]:
    """The names with one ``.in`` more or less. What is no vector still writes something other than ``head_dim``."""
    for i, name in enumerate(names):
        if _is_width(name):
            other = _renamed(names, i, turned(name, read=not reads(name)))
            writes = any(
                not reads(n) and not is_layers(axis(n)) and axis(n) != "head_dim" for n in other
            )
            if writes or _vector(names):
                yield other


def _layers_at(names: Names, dim: int) -> Names:
    """The names with the axis of layers on another dimension, or on the last one."""
    layers = next(n for n in names if is_layers(axis(n)))
    others = [n for n in names if n != layers]
    return (*others[:dim], layers, *others[dim:])


def _of_heads(names: Names) -> bool:
    """Whether this is a kernel or bias of queries, keys or values."""
    written = {axis(n) for n in names if not reads(n)}
    return "head_dim" in map(axis, names) and bool(written & {"heads", "kv_heads"})


def _is_out(names: Names) -> bool:
    return {"heads" + READ, "head_dim" + READ} <= set(names)

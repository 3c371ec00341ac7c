"""Are the axis names of a third-party model correct? Growing the model is the test."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np

from jaxgrow.axes.names import (
    LAYERS,
    READ,
    VALUE,
    Axes,
    Names,
    Params,
    Tree,
    axis_kind,
    axis_of,
    has_mark,
    is_layers,
    is_names,
    layers_of,
    leaves,
    path,
    reads_axis,
    sizes,
    with_direction,
)
from jaxgrow.growth.apply import grow
from jaxgrow.operators import hypercloning
from jaxgrow.operators.targets import WIDTHS, width_axes

# The largest change of the outputs that counts as rounding, relative to their standard deviation.
# Rounding in float32 causes smaller changes, and a wrong suffix causes larger changes.
TOLERANCE = 1e-3
# The maximum number of combinations that are tried for each number of changed suffixes.
_TRIALS = 1500
_SIDE_BY_SIDE = ("qkv", "kv_parts")

# Parameters with the same names whose paths differ only in numbers, such as those of all layers.
Group = tuple[str, Names]
# Replacement names for some groups.
Named = Mapping[Group, Names]


@dataclass(frozen=True)
class Checked:
    """The result of `check_rules`. It is true as a condition if no name is wrong.

    Attributes:
      change: the largest change of an output when all widths are doubled, divided by the standard
        deviation of the outputs.
      wrong: one message for each wrong name.
      unproven: one message for each ``.in`` that is not verified, because the outputs do not change
        without it, and for each axis between parameters that is not doubled.
    """

    change: float
    wrong: tuple[str, ...]
    unproven: tuple[str, ...]

    def __bool__(self) -> bool:
        return not self.wrong

    def __str__(self) -> str:
        kept = f"doubling all widths changes the outputs by {self.change:.1e} standard deviations"
        lines = [f"wrong: {line}" for line in self.wrong] + [
            f"not verified: {line}" for line in self.unproven
        ]
        return "\n".join([kept, *lines])


def check_rules(
    apply: Callable[[Params], Tree], params: Params, axes: Axes, seed: int = 0
) -> Checked:
    """Check the axis names of a model: double all its widths and compare the outputs.

    With correct names, the outputs do not change. Each ``.in`` is then removed in turn, and the
    outputs must change. If the outputs change with the given names, other names are tried: each
    ``.in`` is added or removed, and the layers are moved to each other dimension. The values of
    attention are checked by a separate experiment with all keys set to zero: the outputs must then
    depend on the values and not on the queries.

    Only ``embed``, ``heads``, ``kv_heads`` and ``mlp`` are doubled. The marks of other axes that
    connect parameters, such as ``inner`` or ``experts``, are listed as not verified.

    Use a small model, because it is evaluated a few times for each parameter of a layer, with its
    own sizes and with the doubled sizes. Parameters whose paths differ only in a number, such as
    the same parameter of different layers, are checked together.

    Args:
      apply: function from parameters of any sizes to the outputs (an array or a tree of arrays),
        for fixed inputs. If the model is constructed from its sizes, construct it in this function:
        ``lambda p: Model(**jaxgrow.sizes(p, axes)).apply({"params": p}, tokens)``. Wrapping it in
        ``jax.jit`` makes the check faster.
      params: a pytree of arrays, or of their shapes. Noise is added to them, because scales of one
        and biases of zero would hide wrong names.
      axes: the axis names of each parameter.
      seed: random seed for the noise.

    Returns:
      A `Checked` with the wrong names, the names that would be correct, and the suffixes and axes
      that are not verified.

    Raises:
      ValueError: the names do not fit the shapes, the model has no axis whose width can be doubled,
        or ``apply`` returns values that are not finite, or other shapes for the wider model.

    Example:
      >>> params = {"up": np.eye(2, 3), "down": np.ones((3, 2))}
      >>> axes = {"up": ("tokens.in", "mlp"), "down": ("mlp", "embed")}  # it lacks an ``.in``
      >>> print(check_rules(lambda p: np.maximum(p["up"], 0) @ p["down"] @ np.ones((len(p["down"][0]), 1)), params, {
      ...     **axes, "down": ("mlp", "classes")}).wrong[0])
      down: the names ('mlp', 'classes') are wrong; with ('mlp.in', 'classes'), the outputs do not change
    """
    check = _Check(apply, params, axes, seed)
    moved = check.moved_layers()
    fixes = {} if moved else check.fixes()
    wrong = moved or [
        f"{group[0]}: the names {group[1]} are wrong; with {names}, the outputs do not change"
        for group, names in fixes.items()
    ]
    change = check.tried({})
    if not wrong and change > TOLERANCE:
        wrong = [
            "the outputs change, and changing a few marks does not prevent it. Check that every "
            "axis has the correct name"
        ]
    if not moved:
        wrong = [*wrong, *check.attention()]
    unproven = () if wrong else (*check.unproven(), *check.not_doubled())
    return Checked(change, tuple(wrong), unproven)


class _Check:
    def __init__(self, apply: Callable[[Params], Tree], params: Params, axes: Axes, seed: int):
        self.apply = apply
        self.axes = axes
        self.rng = np.random.default_rng(seed + 1)
        self.groups: dict[Group, list[str]] = {}
        for leaf, _, names in leaves(params, axes):
            self.groups.setdefault((re.sub(r"\d+", "*", leaf), names), []).append(leaf)
        self.params = _noisy_params(params, axes, np.random.default_rng(seed))

    @cached_property
    def before(self) -> list[np.ndarray]:
        before = self.outputs(self.params)
        for x in before:
            if count := np.count_nonzero(~np.isfinite(x.astype(np.float64))):
                raise ValueError(
                    f"{count} of the {x.size} outputs of the model are not finite, so they cannot be "
                    "compared. Return finite outputs, for example logits without a mask of -inf"
                )
        return before

    def outputs(self, params: Params) -> list[np.ndarray]:
        # Accelerators round the operands of float32 matrix products by default, which can change the
        # outputs by more than the tolerance.
        with jax.default_matmul_precision("highest"):
            return [np.asarray(x) for x in jax.tree.leaves(self.apply(params))]

    def named(self, other: Named) -> Axes:
        names = {leaf: of for group, of in other.items() for leaf in self.groups[group]}
        return jax.tree_util.tree_map_with_path(
            lambda p, n: names.get(path(p), n), self.axes, is_leaf=is_names
        )

    def change(self, other: Named) -> float:
        """The change of the outputs when all widths are doubled with these names."""
        axes = self.named(other)
        known = sizes(self.params, axes)
        target = {name: 2 * known[name] for name in width_axes(known)}
        if not target:
            raise ValueError(
                f"no axis of this model can be widened: its axes are {', '.join(known)}, and none "
                f"of them is one of {', '.join(WIDTHS)}"
            )
        return _change(
            self.before, self.outputs(grow(hypercloning(known, target), self.params, axes))
        )

    def tried(self, other: Named) -> float:
        """Same as `change`, but infinite if the names do not fit the shapes or the model."""
        try:
            return self.change(other)
        except Exception:  # Frameworks raise many types of errors for unexpected shapes.
            return float("inf")

    def moved_layers(self) -> list[str]:
        """The message if the layers axis is on the wrong dimension in all parameters."""
        stacked = {group: group[1] for group in self.groups if layers_of(group[1])}
        if not stacked or self.tried({}) < TOLERANCE:
            return []
        for dim in range(max(len(names) for names in stacked.values())):
            moved = {group: _layers_at(names, dim) for group, names in stacked.items()}
            if moved != stacked and self.tried(moved) < TOLERANCE:
                group = next(group for group in stacked if moved[group] != group[1])
                return [
                    f"{group[0]}: the names {group[1]} are wrong; with {moved[group]}, and the "
                    "same order in all stacked parameters, the outputs do not change"
                ]
        return []

    def fixes(self) -> Named:
        """The smallest set of changed suffixes with which the outputs do not change.

        It is empty if the given names are correct, or if no such set was found. Among sets of the
        same size, those that change kernels are tried first. The reason is that if a norm feeds a
        single kernel, another suffix of its scale can compensate for a wrong name of that kernel.
        """
        if self.change({}) < TOLERANCE:
            return {}
        every = [(group, names) for group in self.groups for names in _toggled(group[1])]
        every.sort(key=lambda one: _as_vector(one[1]))
        for count in range(1, len(every) + 1):
            if math.comb(len(every), count) > _TRIALS:
                break
            for some in itertools.combinations(every, count):
                if len(dict(some)) == count and self.tried(dict(some)) < TOLERANCE:
                    return dict(some)
        return {}

    def unproven(self) -> list[str]:
        """One message for each suffix without which the outputs do not change."""
        messages: list[str] = []
        for group in self.groups:
            for i, name in enumerate(group[1]):
                if not (_is_width(name) and reads_axis(name)):
                    continue
                unmarked = _renamed(group[1], i, with_direction(name, read=False))
                if self.tried({group: unmarked}) < 10 * TOLERANCE:
                    messages.append(
                        f"{group[0]}: without the mark {name!r} in {group[1]}, the outputs do not "
                        "change, so the mark is not verified"
                    )
        return messages

    def not_doubled(self) -> list[str]:
        """One message for each axis that connects parameters, but is not doubled."""
        # `moved_layers` and `attention` check layers and ``head_dim``. The vocabulary is an axis of
        # inputs and outputs, which no parameter reads.
        others = (LAYERS, "head_dim", "vocab", *WIDTHS)
        shared = Counter(
            name
            for _, names in self.groups
            if not _as_vector(names)
            for name in dict.fromkeys(map(axis_of, names))
            if axis_kind(name) not in others
        )
        return [
            f"axis {name!r} is not doubled, so its marks are not verified"
            for name, parameters in shared.items()
            if parameters > 1
        ]

    def attention(self) -> list[str]:
        """One message for each wrong suffix of ``head_dim`` in keys and in values."""
        inner = [group for group in self.groups if _along_heads(group[1])]
        if not inner or not any(
            {"heads" + READ, "head_dim" + READ} <= {*n} for _, n in self.groups
        ):
            return []
        keys = [
            group
            for group in inner
            if "head_dim" in {axis_of(n) for n in group[1] if reads_axis(n)}
        ]
        if not keys:
            return [f"no parameter is marked as the keys of attention, 'head_dim{READ}'"]
        still = self.replaced(keys, lambda x: np.zeros_like(x))
        before = self.outputs(still)
        wrong = []
        for group in inner:
            if group in keys or any(axis_of(n) in _SIDE_BY_SIDE for n in group[1]):
                continue
            other = self.replaced(
                [group], lambda x: x + self.rng.normal(size=x.shape).astype(x.dtype), still
            )
            is_value = _change(before, self.outputs(other)) > TOLERANCE
            is_marked = has_mark(group[1], VALUE)
            if is_value and not is_marked:
                wrong.append(
                    f"{group[0]}: the names {group[1]} are wrong; it belongs to the values of "
                    f"attention: 'head_dim{VALUE}'"
                )
            elif is_marked and not is_value:
                wrong.append(
                    f"{group[0]}: the names {group[1]} are wrong; it does not belong to the values "
                    "of attention: 'head_dim'"
                )
        return wrong

    def replaced(
        self, groups: list[Group], change: Callable[[Tree], Tree], params: Params | None = None
    ) -> Params:
        of = {leaf for group in groups for leaf in self.groups[group]}
        params = self.params if params is None else params
        return jax.tree_util.tree_map_with_path(
            lambda p, x: change(x) if path(p) in of else x, params
        )


def _noisy_params(params: Params, axes: Axes, rng: np.random.Generator) -> Params:
    """Add noise to the parameters, so that no scale is one and no bias is zero.

    The noise of kernels is large enough for attention to depend on the queries. Its standard
    deviation is ``1.5 / n^(1/4)`` for a kernel with n entries per layer, and 0.5 for a vector.
    """

    def leaf(names: Names, x: Tree) -> np.ndarray:
        known = np.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else np.asarray(x)
        one = math.prod(
            n for n, name in zip(known.shape, names, strict=True) if not is_layers(axis_of(name))
        )
        noise = 0.5 if _as_vector(names) else 1.5 / one**0.25
        return (known + noise * rng.normal(size=known.shape)).astype(known.dtype)

    return jax.tree.map(leaf, axes, params, is_leaf=is_names)


def _change(before: list[np.ndarray], after: list[np.ndarray]) -> float:
    old = [x.shape for x in before]
    new = [x.shape for x in after]
    if old != new:
        raise ValueError(
            f"the outputs have shapes {old}, but {new} when all widths are doubled. "
            "Return outputs without an axis that grows, such as logits"
        )
    both = [
        (x.astype(np.float64), y.astype(np.float64)) for x, y in zip(before, after, strict=True)
    ]
    if not all(np.isfinite(y).all() for _, y in both):
        return float("inf")
    return max(float(np.abs(y - x).max() / max(x.std(), 1e-30)) for x, y in both)


def _is_width(name: str) -> bool:
    return axis_kind(axis_of(name)) in WIDTHS


def _as_vector(names: Names) -> bool:
    return sum(not is_layers(axis_of(n)) for n in names) < 2


def _renamed(names: Names, i: int, name: str) -> Names:
    return (*names[:i], name, *names[i + 1 :])


def _toggled(names: Names) -> Iterator[Names]:
    """The names with one ``.in`` added or removed.

    A kernel keeps at least one output axis other than ``head_dim``.
    """
    for i, name in enumerate(names):
        if _is_width(name):
            other = _renamed(names, i, with_direction(name, read=not reads_axis(name)))
            writes = any(
                not reads_axis(n) and not is_layers(axis_of(n)) and axis_of(n) != "head_dim"
                for n in other
            )
            if writes or _as_vector(names):
                yield other


def _layers_at(names: Names, dim: int) -> Names:
    """The names with the layers axis moved to dimension ``dim``, or to the last one."""
    layers = next(n for n in names if is_layers(axis_of(n)))
    others = [n for n in names if n != layers]
    return (*others[:dim], layers, *others[dim:])


def _along_heads(names: Names) -> bool:
    """Whether this is a kernel or bias of queries, keys or values."""
    written = {axis_of(n) for n in names if not reads_axis(n)}
    return "head_dim" in map(axis_of, names) and bool(written & {"heads", "kv_heads"})

"""Axis names: given where a parameter is born, read off a model, checked against a tree.

A leaf names each of its axes, and says whether it *writes* or *reads* it. A kernel reads an axis
when it contracts it away (mark ``.in``); everything else writes: outputs of kernels, biases, norm
scales, embedding tables. A query kernel is ``("layers", "embed.in", "heads", "head_dim")``. An axes
tree has the structure of the parameters, with such tuples as leaves.

What a leaf is for, its `role`, is read off these names, never off those of modules. A leaf over two
axes or more is a kernel, or a table if it reads none of them. What axes cannot tell is declared by
marks on a name, each after a dot, in any order; whatever else follows a dot belongs to the name:

========================= ===========================================================================================
``embed.bias``            is added to what a kernel wrote
``embed.scale``           multiplies what a sublayer wrote, unit by unit
``embed.norm.scale``      multiplies what a norm made of the axis
``embed.norm.bias``       is added to that
``embed.table``           a row of a table, as a class token is; ``.kernel`` of a kernel over one axis
``head_dim.value``        of attention's values: their ``head_dim`` is not the one of queries and keys
``embed.below``           of what makes the input of the layers, in any role; freezing goes by it (`jaxgrow.optim.freeze`)
``embed.post.norm.scale`` of a norm after a sublayer, whose output is added to the residual stream
========================= ===========================================================================================

A model whose stages have sizes of their own numbers its axes: ``embed.0``, ``layers.2``. What an
axis is for, its `kind`, does not depend on the stage, and axes of one stage belong together.

So the bias of a key is ``("layers", "heads", "head_dim.in.bias")``, and the value kernel
``("layers", "embed.in", "heads", "head_dim.value")``. What reads attention,
``("layers", "heads.in", "head_dim.in", "embed")``, needs no mark.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import jax
import numpy as np
from flax import linen as nn
from jax.nn.initializers import Initializer

Names: TypeAlias = tuple[str, ...]
Params: TypeAlias = (
    Any  # a pytree of arrays, or of what has their shape: Python has no type that any of these fits
)
Axes: TypeAlias = Any  # a pytree of the same structure, of Names
Tree: TypeAlias = Any  # any other pytree

# the kind of axis that stacks blocks: applied one after the other, so it composes instead of adding
LAYERS = "layers"
READ, VALUE, BELOW, POST = ".in", ".value", ".below", ".post"
UNSURE = "?"  # in a name that `jaxgrow.axes.naming` cannot tell
ROLES = ("kernel", "table", "bias", "scale", "norm bias", "norm scale")
_MARKS = {"in", "value", "below", "post", "norm", "kernel", "table", "bias", "scale"}


def named(init: Initializer, *names: str, role: str = "") -> Callable:
    """An initialiser whose parameter carries axis names.

    Args:
      init: an initialiser, ``(key, shape, dtype) -> array``.
      names: one for each axis, with its marks (`jaxgrow.axes`).
      role: one of `ROLES`, what the axes cannot tell: ``named(init, "embed", role="norm scale")``
        is ``named(init, "embed.norm.scale")``.

    Returns:
      An initialiser for ``self.param`` of a Flax module; `split` takes the names off again.

    Example:
      >>> from flax import linen as nn
      >>> kernel = named(nn.initializers.zeros, "embed.in", "mlp")
      >>> kernel(jax.random.key(0), (2, 3)).names
      ('embed.in', 'mlp')
    """
    if role:
        names = (*names[:-1], ".".join([names[-1], *role.split()]))
    return nn.with_logical_partitioning(init, names)


@cache
def _parsed(name: str) -> tuple[str, frozenset[str]]:
    """``("embed", {"in", "bias"})`` of ``"embed.in.bias"``."""
    words = name.split(".")
    count = len(words)
    while count > 1 and words[count - 1] in _MARKS:
        count -= 1
    return ".".join(words[:count]), frozenset(words[count:])


def reads(name: str) -> bool:
    """Whether a leaf with this name contracts the axis away: ``reads("embed.in")``."""
    return "in" in _parsed(name)[1]


def marked(names: Names, mark: str) -> bool:
    """Whether any axis of the leaf has the mark, such as `BELOW`."""
    return any(mark[1:] in _parsed(n)[1] for n in names)


def axis(name: str) -> str:
    """The axis that a leaf's name speaks of: ``"embed.in"`` and ``"embed"`` are both the axis ``"embed"``."""
    return _parsed(name)[0]


def marks(name: str) -> frozenset[str]:
    """``{"in", "bias"}`` of ``"embed.in.bias"``."""
    return _parsed(name)[1]


def kind(axis: str) -> str:
    """What an axis is for, in whichever stage: ``kind("embed.0")`` and ``kind("embed")`` are both ``"embed"``."""
    return axis.partition(".")[0]


def beside(axis: str, other: str) -> str:
    """The axis of kind ``other`` in the stage of ``axis``: ``beside("heads.2", "layers")`` is ``"layers.2"``."""
    return other + axis[len(kind(axis)) :]


def is_layers(axis: str) -> bool:
    """Whether an axis stacks layers: ``"layers"``, or ``"layers.2"`` of a stage."""
    return kind(axis) == LAYERS


def layers_of(names: Names) -> str | None:
    """The axis of layers that a leaf is stacked on, or None.

    Example:
      >>> layers_of(("layers.2", "embed.2.in", "mlp.2")), layers_of(("embed.scale",))
      ('layers.2', None)
    """
    return next((axis(n) for n in names if is_layers(axis(n))), None)


def stages(sizes: Mapping[str, int]) -> dict[str, slice]:
    """Which of all layers, counted from the input on, each axis of layers has.

    Example:
      >>> stages({"layers.0": 2, "embed.0": 96, "layers.1": 6})
      {'layers.0': slice(0, 2, None), 'layers.1': slice(2, 8, None)}
    """

    def number(name: str) -> int:
        stage = name.partition(".")[2]
        return int(stage) if stage.isdigit() else 0

    found = sorted(filter(is_layers, sizes), key=number)
    ends = list(itertools.accumulate(sizes[name] for name in found))
    return {name: slice(end - sizes[name], end) for name, end in zip(found, ends, strict=True)}


def turned(name: str, read: bool) -> str:
    """The name as a reader's, or as a writer's.

    Example:
      >>> turned("embed.norm.scale", read=True)
      'embed.in.norm.scale'
    """
    plain = axis(name)
    marks = [mark for mark in name[len(plain) :].split(".")[1:] if mark != "in"]
    return plain + READ * read + "".join(f".{mark}" for mark in marks)


def role(leaf: str, names: Names) -> str:
    """What the leaf at the path ``leaf`` is for, one of `ROLES`.

    Raises:
      ValueError: a leaf over one axis of a layer, which may be anything, declares nothing.

    Example:
      >>> role("mlp/up/kernel", ("embed.in", "mlp")), role("norm/scale", ("embed.norm.scale",))
      ('kernel', 'norm scale')
    """
    marks = frozenset().union(*(_parsed(n)[1] for n in names))
    declared = marks & {"kernel", "table", "bias", "scale"}
    if len(declared) == 1:
        (only,) = declared
        return f"norm {only}" if "norm" in marks and only in ("bias", "scale") else only
    # Heads and their dimensions are the units of one place.
    if declared or sum(kind(axis(n)) not in (LAYERS, "head_dim") for n in names) < 2:
        found = " and ".join(sorted(declared)) if declared else "nothing"
        raise ValueError(
            f"{leaf}: {names} declares {found}: name its last axis with one of .bias, .scale, .norm.scale, .norm.bias, .table, "
            ".kernel (jaxgrow.axes)"
        )
    return "kernel" if any(map(reads, names)) else "table"


class Kernel(NamedTuple):
    """The axes of a kernel: those that stack kernels, those that it reads, and those that it writes."""

    stacked: Names
    read: Names
    written: Names  # to a key, ``head_dim.in`` is one of these: it is contracted later

    @property
    def names(self) -> Names:
        return self.stacked + self.read + self.written


def cut(names: Names) -> Kernel:
    """The axes of a kernel, which reads one at least, by their parts.

    Raises:
      ValueError: layers are stacked on a later dimension, so that a kernel is no block of the
        array.

    Example:
      >>> cut(("layers", "embed.in", "heads", "head_dim")).written
      ('heads', 'head_dim')
    """
    first = next(i for i, n in enumerate(names) if reads(n))
    last = next(i for i in range(first, len(names) + 1) if i == len(names) or not reads(names[i]))
    if layers_of(names[first:]):
        dim = next(i for i, name in enumerate(names) if is_layers(axis(name)))
        raise ValueError(
            f"a kernel with the axes {names} stacks its layers on dimension {dim}: move them to the first one, of the array "
            "(jnp.moveaxis) and of its names"
        )
    return Kernel(names[:first], names[first:last], names[last:])


def is_names(x: Tree) -> TypeGuard[Names]:
    """Whether this is a leaf of an axes tree: ``is_leaf`` for `jax.tree.map`. A tuple of other things is a node of it.

    The empty tuple is the leaf of a scalar. A named tuple is a node, an empty one too, such as
    `optax.MaskedNode`.
    """
    return (
        isinstance(x, tuple)
        and not hasattr(x, "_fields")
        and (not x or any(isinstance(name, str) for name in x))
    )


def split(boxed: Tree) -> tuple[Params, Axes]:
    """Plain parameters, and the axis names that they were born with.

    Args:
      boxed: what a Flax module's ``init`` returns, of parameters that are `named`.

    Returns:
      ``(params, axes)``: the arrays, and a tree of the same structure with a tuple of names for
      each.

    Example:
      >>> from flax import linen as nn
      >>> boxed = {"up": named(nn.initializers.zeros, "embed.in", "mlp")(jax.random.key(0), (2, 3))}
      >>> params, axes = split(boxed)
      >>> params["up"].shape, axes["up"]
      ((2, 3), ('embed.in', 'mlp'))
    """
    axes = jax.tree.map(
        tuple,
        nn.get_partition_spec(boxed),
        is_leaf=lambda s: isinstance(s, jax.sharding.PartitionSpec),
    )
    return nn.meta.unbox(boxed), axes


def leaves(params: Params, axes: Axes) -> Iterator[tuple[str, Any, Names]]:
    """Every leaf with its path and its axis names.

    Args:
      params: a pytree of arrays, or of their shapes.
      axes: the axis names of each.

    Yields:
      ``(path, leaf, names)``, the path as of `path`.

    Raises:
      ValueError: the two trees differ in structure, or a leaf does not name each of its axes; every
        such leaf is listed.
      TypeError: ``axes`` is not a tree of axis names.
    """
    arrays = {path(p): x for p, x in jax.tree_util.tree_leaves_with_path(params)}
    names = {path(p): n for p, n in jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_names)}
    if other := next(((p, n) for p, n in names.items() if not is_names(n)), None):
        where = f" has at {other[0]!r} a leaf" if other[0] else " is"
        raise TypeError(
            f"axes{where} of type {type(other[1]).__name__}, but should be a tree like the parameters, with a tuple of axis "
            "names for each of them, as config.axes() gives it (jaxgrow.axes)"
        )
    wrong = [f"{p}: has no axis names" for p in arrays if p not in names]
    wrong += [
        f"{p}: is named, but the parameters have no such leaf" for p in names if p not in arrays
    ]
    wrong += [
        f"{p}: has shape {np.shape(x)}, but {len(names[p])} axis names {names[p]}"
        for p, x in arrays.items()
        if p in names and np.ndim(x) != len(names[p])
    ]
    wrong += [
        f"{p}: of its axis names {n}, {', '.join(repr(a) for a in n if not isinstance(a, str))} is none; each axis has one"
        for p, n in names.items()
        if not all(isinstance(a, str) for a in n)
    ]
    unsure: dict[tuple, list[str]] = {}
    for p, n in names.items():
        if any(isinstance(a, str) and UNSURE in a for a in n):
            unsure.setdefault(n, []).append(p)
    wrong += [
        f"{some(found)}: the names {n} are not sure of the axes with {UNSURE!r}: write which they are and which of them is read"
        for n, found in unsure.items()
    ]
    if wrong:
        raise ValueError("the axes tree does not fit the parameters:\n  " + "\n  ".join(wrong))
    for name, x in arrays.items():
        yield name, x, names[name]


def sizes(params: Params, axes: Axes) -> dict[str, int]:
    """The size of every axis, ``{"embed": 768, ...}``: what operators are told of a model.

    Args:
      params: a pytree of arrays, or of their shapes.
      axes: the axis names of each.

    Returns:
      The sizes by axis, without marks.

    Raises:
      ValueError: one axis has two sizes; both leaves are named.

    Example:
      >>> sizes({"up": np.ones((2, 3))}, {"up": ("embed.in", "mlp")})
      {'embed': 2, 'mlp': 3}
    """
    seen: dict[str, tuple[int, str]] = {}
    wrong: dict[str, list[str]] = {}
    for leaf, x, names in leaves(params, axes):
        for name, size in zip(names, np.shape(x), strict=True):
            before = seen.setdefault(axis(name), (size, leaf))
            if before[0] != size:
                fault = f"axis {axis(name)!r} has size {before[0]} in {before[1]}, but {size} in "
                wrong.setdefault(fault, []).append(leaf)
    if wrong:
        lines = [fault + some(found) for fault, found in wrong.items()]
        raise ValueError(
            "one axis has one size; give these axes different names:\n  " + "\n  ".join(lines)
        )
    return {name: size for name, (size, _) in seen.items()}


def some(leaves: Sequence[str]) -> str:
    """The first of the leaves that share a fault, and how many there are.

    Example:
      >>> some(["a", "b", "c"])
      'a and 2 others'
    """
    more = len(leaves) - 1
    return leaves[0] + (f" and {more} other{'s' * (more > 1)}" if more else "")


def path(key_path: tuple) -> str:
    """``"blocks/mlp/up/kernel"``: a leaf's name in errors, and what an optimizer state is matched by."""
    return jax.tree_util.keystr(key_path, simple=True, separator="/")


def owner(name: str, params: Iterable[str]) -> str | None:
    """The parameter that the leaf ``name`` of an optimizer state belongs to: the longest path that ends the leaf's own.

    Example:
      >>> owner("0/mu/mlp/up", ["up", "mlp/up"])
      'mlp/up'
    """
    return max((p for p in params if name.endswith("/" + p)), key=len, default=None)

"""Axis names: what does each dimension of a parameter mean?

Every parameter has a tuple with one name per axis. A name identifies an axis of the model, such as
``embed`` (the residual stream) or ``mlp``, and records whether the parameter contracts it. The
suffix ``.in`` marks an input axis: a kernel sums over this axis, or *reads* it. All other axes are
output axes: the parameter produces values along them, or *writes* them. Kernel outputs, biases,
norm scales and embeddings have output axes. For example, a query kernel is
``("layers", "embed.in", "heads", "head_dim")``. An axes tree has the same structure as the
parameters and contains such a tuple for each of them. Operators decide by these names how a
parameter grows.

The role of a parameter (`role_of`: kernel, embedding, bias, scale, norm bias or norm scale) follows
from its axis names, never from the names of modules. A parameter with two or more axes is a kernel
if it reads one of them, otherwise an embedding. Here ``layers`` is not counted, and heads and their
``head_dim`` count as one axis. If the axes do not determine the role, a suffix declares it. Each
suffix follows a dot, and several suffixes may be in any order. A word after a dot that is not one
of the following suffixes belongs to the name of the axis:

========================= ========================================================================
suffix                    meaning
========================= ========================================================================
``embed.bias``            bias that is added to the output of a kernel
``embed.scale``           scale of the output of a sublayer, one value per unit (LayerScale)
``embed.norm.scale``      scale of a norm over the axis
``embed.norm.bias``       bias of a norm over the axis
``embed.embedding``       one row of an embedding, such as a class token
``embed.in.kernel``       kernel over a single axis
``head_dim.value``        head dimension of the values, which differs from that of queries and keys
``embed.below``           parameter of any role that produces the input of the layers; freezing
                          uses it (`jaxgrow.extras.freeze`)
``embed.post.norm.scale`` norm after a sublayer, before its output is added to the residual stream
========================= ========================================================================

If the stages of a model have different sizes, the number of the stage follows the axis: ``embed.0``,
``layers.2``. The `axis_kind` of an axis is its name without this number. Axes with the same number
belong to the same stage.

For example, the bias of a key is ``("layers", "heads", "head_dim.in.bias")``, because the attention
contracts the head dimension of keys later. The value kernel is
``("layers", "embed.in", "heads", "head_dim.value")``. The output kernel of the attention,
``("layers", "heads.in", "head_dim.in", "embed")``, needs no further suffix.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple, TypeAlias, TypeGuard

import jax
import numpy as np
from flax import linen as nn
from jax.nn.initializers import Initializer

Names: TypeAlias = tuple[str, ...]
# A pytree. Python cannot express this type.
Tree: TypeAlias = Any
# A pytree of arrays or of objects with a shape.
Params: TypeAlias = Tree
# A pytree of Names, with the structure of the parameters.
Axes: TypeAlias = Tree

# The keys from the root of a pytree to a leaf, as JAX passes them.
KeyPath: TypeAlias = tuple[Any, ...]

# The axis along which layers are stacked. It differs from all other axes: layers run one after the
# other, whereas kernels sum over the units of an axis.
LAYERS = "layers"
READ = ".in"
VALUE = ".value"
BELOW = ".below"
POST = ".post"
# Axes that stack independent kernels, besides layers.
STACKS = {"experts", "qkv", "kv_parts", "num_activations", "gates"}
# `jaxgrow.extras.other_models.naming` adds this mark to each name that it cannot determine.
UNSURE = "?"
ROLES = ("kernel", "embedding", "bias", "scale", "norm bias", "norm scale")
_MARKS = {"in", "value", "below", "post", "norm", "kernel", "embedding", "bias", "scale"}


def named_init(init: Initializer, *names: str, role: str = "") -> Callable[..., Tree]:
    """Return an initializer whose parameter carries axis names.

    Args:
      init: the initializer to wrap, ``(key, shape, dtype) -> array``.
      names: one name per axis of the parameter, with its suffixes (`jaxgrow.axes`).
      role: role of the parameter, one of `ROLES`, if the axes alone do not determine it:
        ``named_init(init, "embed", role="norm scale")`` is the same as
        ``named_init(init, "embed.norm.scale")``.

    Returns:
      An initializer for ``self.param`` of a Flax module. `split_boxed` separates names and arrays
      again.

    Example:
      >>> from flax import linen as nn
      >>> kernel = named_init(nn.initializers.zeros, "embed.in", "mlp")
      >>> kernel(jax.random.key(0), (2, 3)).names
      ('embed.in', 'mlp')
    """
    if role:
        names = (*names[:-1], ".".join([names[-1], *role.split()]))
    return nn.with_logical_partitioning(init, names)


@dataclass(frozen=True)
class Axis:
    """An axis of a parameter: the parsed form of an axis name. ``str`` returns the name.

    Attributes:
      name: the name without suffixes, such as ``"embed"``, or ``"embed.0"`` in one stage.
      direction: "in" if the parameter contracts the axis, otherwise "out".
      marks: the other suffixes in order, among them the declared role.

    Example:
      >>> Axis.parse("embed.0.in.norm.scale")
      Axis(name='embed.0', direction='in', marks=('norm', 'scale'))
      >>> str(Axis("embed", "in"))
      'embed.in'
    """

    name: str
    direction: Literal["in", "out"] = "out"
    marks: tuple[str, ...] = ()

    @staticmethod
    @cache
    def parse(text: str) -> "Axis":
        """Parse an axis name. Words after a dot that are no suffixes belong to the name."""
        words = text.split(".")
        count = len(words)
        while count > 1 and words[count - 1] in _MARKS:
            count -= 1
        suffixes = words[count:]
        marks = tuple(word for word in suffixes if word != "in")
        return Axis(".".join(words[:count]), "in" if "in" in suffixes else "out", marks)

    def __str__(self) -> str:
        read = ["in"] if self.direction == "in" else []
        return ".".join([self.name, *read, *self.marks])


def reads_axis(name: str) -> bool:
    """Whether a parameter with this axis name contracts the axis: true for ``"embed.in"``."""
    return Axis.parse(name).direction == "in"


def has_mark(names: Names, mark: str) -> bool:
    """Whether any axis name of the leaf has the suffix ``mark``: `BELOW`, `POST` or `VALUE`."""
    return any(mark[1:] in Axis.parse(n).marks for n in names)


def axis_of(name: str) -> str:
    """Return the name without suffixes: ``"embed.in"`` and ``"embed"`` both give ``"embed"``."""
    return Axis.parse(name).name


def axis_kind(axis: str) -> str:
    """Return the axis name without its stage number.

    ``axis_kind("embed.0")`` and ``axis_kind("embed")`` are both ``"embed"``.
    """
    return axis.partition(".")[0]


def sibling_axis(axis: str, other: str) -> str:
    """Return the axis of kind ``other`` in the same stage as ``axis``.

    ``sibling_axis("heads.2", "layers")`` is ``"layers.2"``.
    """
    return other + axis[len(axis_kind(axis)) :]


def is_layers(axis: str) -> bool:
    """Whether layers are stacked along the axis: ``"layers"``, or ``"layers.2"`` for one stage."""
    return axis_kind(axis) == LAYERS


def layers_of(names: Names) -> str | None:
    """Return the layer axis along which a leaf is stacked, or None.

    Example:
      >>> layers_of(("layers.2", "embed.2.in", "mlp.2")), layers_of(("embed.scale",))
      ('layers.2', None)
    """
    return next((axis_of(n) for n in names if is_layers(axis_of(n))), None)


def stages(sizes: Mapping[str, int]) -> dict[str, slice]:
    """Return the layers of each stage as a slice of all layers, counted from the input.

    Args:
      sizes: size of each axis, as `sizes` returns it. Only layer axes are used.

    Returns:
      A slice for each layer axis, in the order of the stage numbers.

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


def with_direction(name: str, read: bool) -> str:
    """Return the name as an input axis (``read=True``) or output axis, keeping other suffixes.

    Example:
      >>> with_direction("embed.norm.scale", read=True)
      'embed.in.norm.scale'
    """
    return str(replace(Axis.parse(name), direction="in" if read else "out"))


def role_of(leaf: str, names: Names) -> str:
    """Return the role of a parameter, one of `ROLES`.

    Args:
      leaf: path of the parameter, for the error message.
      names: its axis names.

    Raises:
      ValueError: the role is ambiguous. Either the parameter has only one axis besides layers and
        ``head_dim``, and no suffix declares the role, or suffixes declare several roles.

    Example:
      >>> role_of("mlp/up/kernel", ("embed.in", "mlp")), role_of("norm/scale", ("embed.norm.scale",))
      ('kernel', 'norm scale')
    """
    marks = {mark for n in names for mark in Axis.parse(n).marks}
    declared = marks & {"kernel", "embedding", "bias", "scale"}
    if len(declared) == 1:
        (only,) = declared
        return f"norm {only}" if "norm" in marks and only in ("bias", "scale") else only
    # Heads and head dimensions together index the units of one axis.
    if declared or sum(axis_kind(axis_of(n)) not in (LAYERS, "head_dim") for n in names) < 2:
        found = " and ".join(sorted(declared)) if declared else "no role"
        raise ValueError(
            f"{leaf}: {names} declares {found}, so the role is ambiguous. Add exactly one of "
            ".bias, .scale, .norm.scale, .norm.bias, .embedding and .kernel to the last axis."
        )
    return "kernel" if any(map(reads_axis, names)) else "embedding"


class KernelAxes(NamedTuple):
    """The axes of a kernel in three groups: stacking axes, input axes and output axes."""

    stacked: Names
    read: Names
    # The output axes include ``head_dim.in`` of keys, which the attention contracts later.
    written: Names
    # Whether the output axes come before the input axes, as in PyTorch.
    output_first: bool = False

    @property
    def names(self) -> Names:
        sides = (self.written, self.read) if self.output_first else (self.read, self.written)
        return sum(sides, self.stacked)

    @property
    def read_dims(self) -> tuple[int, ...]:
        """The dimensions of the input axes."""
        first = len(self.stacked) + self.output_first * len(self.written)
        return tuple(range(first, first + len(self.read)))

    @property
    def written_dims(self) -> tuple[int, ...]:
        """The dimensions of the output axes."""
        first = len(self.stacked) + (not self.output_first) * len(self.read)
        return tuple(range(first, first + len(self.written)))


def split_kernel(names: Names) -> KernelAxes:
    """Split the axes of a kernel into stacking, input and output axes.

    Args:
      names: axis names of a kernel, at least one of them an input axis.

    Raises:
      ValueError: the layers are stacked along a dimension after the first input axis, so that the
        kernel of one layer is not a contiguous block of the array.

    Example:
      >>> split_kernel(("layers", "embed.in", "heads", "head_dim")).written
      ('heads', 'head_dim')
    """
    first = next(i for i, n in enumerate(names) if reads_axis(n))
    last = next(
        i for i in range(first, len(names) + 1) if i == len(names) or not reads_axis(names[i])
    )
    if layers_of(names[first:]):
        dim = next(i for i, name in enumerate(names) if is_layers(axis_of(name)))
        raise ValueError(
            f"a kernel with the axes {names} stacks its layers on dimension {dim}. Move this "
            "dimension to the front, in the array (jnp.moveaxis) and in its names."
        )
    return KernelAxes(names[:first], names[first:last], names[last:])


def layer_matrix(names: Names) -> KernelAxes:
    """Split the axes of a kernel of layers as `split_kernel` does, also if the output axes come first.

    If no output axis follows the input axes, the axes before them are output axes, except for
    layers and leading `STACKS`. If only such axes come before them, as in the router
    ``[layers, experts, embed.in]``, the `STACKS` are output axes. Without layers, such a kernel is
    returned without output axes: it may be a head ``[vocab, embed]``.

    Args:
      names: axis names of a kernel, at least one of them an input axis.

    Raises:
      ValueError: as in `split_kernel`.

    Example:
      >>> layer_matrix(("layers", "mlp", "embed.in"))
      KernelAxes(stacked=('layers',), read=('embed.in',), written=('mlp',), output_first=True)
    """
    kernel = split_kernel(names)
    if kernel.written or not layers_of(names):
        return kernel
    before = kernel.stacked
    stacked = tuple(itertools.takewhile(_stacks, before))
    if stacked == before:
        stacked = tuple(itertools.takewhile(lambda n: is_layers(axis_of(n)), before))
    written = before[len(stacked) :]
    read = kernel.read
    # The ``head_dim.in`` of keys belongs to their heads.
    if axis_of(read[0]) == "head_dim" and any(axis_of(n).endswith("heads") for n in written):
        written, read = (*written, read[0]), read[1:]
    return KernelAxes(stacked, read, written, output_first=True)


def _stacks(name: str) -> bool:
    return is_layers(axis_of(name)) or axis_kind(axis_of(name)) in STACKS


def layer_kernels(axes: Axes) -> dict[str, KernelAxes]:
    """Find the matrices of the layers: the kernels that are stacked over layers.

    Embeddings, heads and patch embeddings are not among them. The output axes of a kernel may come
    after its input axes or before them (`layer_matrix`).

    Args:
      axes: the axis names of the parameters.

    Returns:
      The axes of each such kernel, by path of the parameter.

    Example:
      >>> axes = {"up": ("layers", "embed.in", "mlp"), "norm": ("layers", "embed.norm.scale")}
      >>> {path: (k.read_dims, k.written_dims) for path, k in layer_kernels(axes).items()}
      {'up': ((1,), (2,))}
    """
    found: dict[str, KernelAxes] = {}
    for leaf, names in by_path(axes, is_leaf=is_names).items():
        if role_of(leaf, names) == "kernel":
            kernel = layer_matrix(names)
            if kernel.stacked and kernel.written:
                found[leaf] = kernel
    return found


def is_names(x: Tree) -> TypeGuard[Names]:
    """Whether this is a leaf of an axes tree, for use as ``is_leaf`` in `jax.tree.map`.

    A leaf is a tuple with at least one string, or the empty tuple, which names the axes of a
    scalar. Tuples without strings are nodes. Named tuples are always nodes, even empty ones such as
    `optax.MaskedNode`.
    """
    named = hasattr(x, "_fields")
    items: Tree = x
    return (
        isinstance(x, tuple)
        and not named
        and (not items or any(isinstance(item, str) for item in items))
    )


def split_boxed(boxed: Tree) -> tuple[Params, Axes]:
    """Split initialized variables into plain parameters and their axis names.

    Args:
      boxed: result of ``init`` of a Flax module whose parameters carry names (`named_init`).

    Returns:
      ``(params, axes)``: the arrays, and a tree of the same structure with a tuple of names for
      each array.

    Example:
      >>> from flax import linen as nn
      >>> boxed = {"up": named_init(nn.initializers.zeros, "embed.in", "mlp")(jax.random.key(0), (2, 3))}
      >>> params, axes = split_boxed(boxed)
      >>> params["up"].shape, axes["up"]
      ((2, 3), ('embed.in', 'mlp'))
    """
    axes = jax.tree.map(
        tuple,
        nn.get_partition_spec(boxed),
        is_leaf=lambda s: isinstance(s, jax.sharding.PartitionSpec),
    )
    return nn.meta.unbox(boxed), axes


def leaves(params: Params, axes: Axes) -> Iterator[tuple[str, Tree, Names]]:
    """Iterate over all leaves with their paths and axis names, after checking that the trees match.

    Args:
      params: a pytree of arrays, or of objects with a shape.
      axes: the axis names, in a tree of the same structure.

    Yields:
      ``(path, leaf, names)``, with the path in the format of `path`.

    Raises:
      ValueError: the structures of the two trees differ, a leaf does not have one name per axis, or
        a name contains ``?``. The message lists every such leaf.
      TypeError: ``axes`` is not a tree of axis names.
    """
    arrays = by_path(params)
    names = by_path(axes, is_leaf=is_names)
    if other := next(((p, n) for p, n in names.items() if not is_names(n)), None):
        where = f"the leaf {other[0]!r} of axes" if other[0] else "axes"
        raise TypeError(
            f"{where} is of type {type(other[1]).__name__}. Expected a tree with the structure of "
            "the parameters and a tuple of axis names for each of them, as config.axes() returns "
            "it (jaxgrow.axes)."
        )
    # An empty tuple in the parameters is a node without leaves, not a scalar.
    empty = by_path(params, is_leaf=is_names).keys() - arrays.keys()
    names = {p: n for p, n in names.items() if n or p not in empty}
    wrong = [f"{p}: has no axis names" for p in arrays if p not in names]
    wrong += [
        f"{p}: has axis names, but the parameters have no such leaf"
        for p in names
        if p not in arrays
    ]
    wrong += [
        f"{p}: has shape {np.shape(x)}, but {len(names[p])} axis names {names[p]}"
        for p, x in arrays.items()
        if p in names and np.ndim(x) != len(names[p])
    ]
    for p, n in names.items():
        if others := ", ".join(repr(a) for a in n if not isinstance(a, str)):
            wrong.append(
                f"{p}: the axis names {n} contain {others}, but each name must be a string"
            )
    unsure: dict[Names, list[str]] = {}
    for p, n in names.items():
        if any(isinstance(a, str) and UNSURE in a for a in n):
            unsure.setdefault(n, []).append(p)
    wrong += [
        f"{first_of_leaves(found)}: the names {n} contain {UNSURE!r}, which marks unknown axes. "
        "Write the right names, with .in for input axes."
        for n, found in unsure.items()
    ]
    if wrong:
        raise ValueError("the axes tree does not match the parameters:\n  " + "\n  ".join(wrong))
    for name, x in arrays.items():
        yield name, x, names[name]


def sizes(params: Params, axes: Axes) -> dict[str, int]:
    """Return the size of every axis of a model, ``{"embed": 768, ...}``, as operators expect it.

    Args:
      params: a pytree of arrays, or of objects with a shape.
      axes: the axis names, in a tree of the same structure.

    Returns:
      The sizes by axis name, without suffixes.

    Raises:
      ValueError: one axis has two sizes. The message names the leaves.

    Example:
      >>> sizes({"up": np.ones((2, 3))}, {"up": ("embed.in", "mlp")})
      {'embed': 2, 'mlp': 3}
    """
    seen: dict[str, tuple[int, str]] = {}
    wrong: dict[str, list[str]] = {}
    for leaf, x, names in leaves(params, axes):
        for name, size in zip(names, np.shape(x), strict=True):
            before = seen.setdefault(axis_of(name), (size, leaf))
            if before[0] != size:
                fault = (
                    f"axis {axis_of(name)!r} has size {before[0]} in {before[1]}, but {size} in "
                )
                wrong.setdefault(fault, []).append(leaf)
    if wrong:
        lines = [fault + first_of_leaves(found) for fault, found in wrong.items()]
        raise ValueError(
            "each axis must have one size; give axes of different sizes different names:\n  "
            + "\n  ".join(lines)
        )
    return {name: size for name, (size, _) in seen.items()}


def first_of_leaves(leaves: Sequence[str]) -> str:
    """Format a list of leaves with the same problem: the first one, and the number of others.

    Example:
      >>> first_of_leaves(["a", "b", "c"])
      'a and 2 others'
    """
    more = len(leaves) - 1
    return leaves[0] + (f" and {more} other{'s' * (more > 1)}" if more else "")


def path(key_path: KeyPath) -> str:
    """Format a key path as ``"blocks/mlp/up/kernel"``.

    Error messages and patterns use this format, and optimizer state is matched to parameters by it.
    """
    return jax.tree_util.keystr(  # pyright: ignore[reportUnknownMemberType]
        key_path, simple=True, separator="/"
    )


def by_path(tree: Tree, is_leaf: Callable[[Tree], bool] | None = None) -> dict[str, Tree]:
    """Return the leaves of a tree by their paths, in the format of `path`.

    Args:
      tree: any pytree.
      is_leaf: whether a node counts as a leaf, as in `jax.tree.map`. None: only JAX's own leaves.

    Example:
      >>> by_path({"up": {"kernel": 1}})
      {'up/kernel': 1}
    """
    leaves: Callable[..., list[tuple[KeyPath, Tree]]] = jax.tree_util.tree_leaves_with_path  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return {path(key_path): leaf for key_path, leaf in leaves(tree, is_leaf=is_leaf)}


def state_owners(state: Tree, params: Iterable[str]) -> dict[str, str]:
    """Return the path of the parameter that each leaf of an optimizer state belongs to.

    The path of the leaf ends with the path of this parameter. Several parameters may qualify,
    because a module may have the name of a field of the state, such as ``mu``. The state contains
    complete copies of the tree of parameters. Therefore, the leaf belongs to the parameter whose
    copy has the most parameters, and if these numbers are equal, to the one with the longest path.

    Args:
      state: the optimizer state, or a tree that contains it.
      params: paths of the parameters.

    Returns:
      Paths of parameters by paths of the leaves, without the leaves that belong to no parameter.

    Example:
      >>> state_owners({"count": 0, "mu": {"w": 1, "mu": {"w": 2}}}, ["w", "mu/w"])
      {'mu/mu/w': 'mu/w', 'mu/w': 'w'}
    """
    params = set(params)
    leaves = by_path(state)
    # A mask replaces a leaf or a subtree by an empty named tuple.
    masked = by_path(state, is_leaf=lambda x: hasattr(x, "_fields") and not x).keys() - leaves

    def has(place: str) -> bool:
        ends = [*(i for i, letter in enumerate(place) if letter == "/"), len(place)]
        return place in leaves or any(place[:end] in masked for end in ends)

    @cache
    def size(prefix: str) -> int:
        """The number of parameters of the copy of the tree at a prefix."""
        return sum(has(prefix + p) for p in params)

    found: dict[str, str] = {}
    for name in leaves:
        starts = [0, *(i + 1 for i, letter in enumerate(name) if letter == "/")]
        if starts := [i for i in starts if name[i:] in params]:
            # The first start belongs to the longest path.
            start = max(starts, key=lambda i: size(name[:i])) if len(starts) > 1 else starts[0]
            found[name] = name[start:]
    return found

"""Growths: how does a model change size?

A pair of linear maps, an `AxisMap`, changes the size of a named axis. Its write map acts on the
parameters that have the axis as an output axis. Its read map acts on the parameters that contract
the axis. For example, to double the width of an MLP, the write map copies each neuron and the read
map halves the weights that read the copies. The model then computes the same function.

A growth is a plain dict ``{axis name: AxisMap}``. Axes that it does not name are unchanged. If one
map per axis is not enough, a growth is `Rules`: different sums of such dicts for different leaves.
Growths are pytrees: they can be printed, saved, differentiated, and combined with `swap`, `dual`
and `jaxgrow.compose`. `jaxgrow.grow` applies a growth to parameters.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Generic, TypeAlias, TypeGuard, cast, overload

import flax.struct as struct
import jax
import numpy as np
from typing_extensions import TypeVar

from jaxgrow.axes.names import (
    Axes,
    Axis,
    Names,
    axis_kind,
    axis_of,
    is_layers,
    is_names,
    reads_axis,
    role_of,
)
from jaxgrow.growth.matrices import (
    Matrix,
    SparseMap,
    absolute_weights,
    describe_matrix,
    is_identity,
    is_numpy,
    kron,
    matmul,
    sparse,
    transpose,
)

# The type of both matrices of a map.
M = TypeVar("M", bound=Matrix, default=Matrix, covariant=True)


@struct.dataclass
class AxisMap(Generic[M]):
    """The change of one axis: a write map and a read map, both matrices ``[new, old]``.

    `grow` multiplies the output axis of a parameter by ``write`` and the input axis of a parameter
    by ``read`` (`jaxgrow.axes` defines input and output axes). For a kernel ``W [in, out]`` whose
    two axes grow:

    ``W' = read_in @ W @ write_out.T``

    The growth is function-preserving if ``read.T @ write == I`` and ``write`` only copies units:
    the kernels that contract the axis then compute the same outputs as before.

    Args:
      write: matrix for parameters with this output axis, ``[new, old]``.
      read: matrix for parameters with this input axis, ``[new, old]``.
      joint: ``(new sizes, old sizes)`` of the axes, if one map acts on several adjacent axes. The
        matrices then act on the flattened product of these axes.
    """

    write: M
    read: M
    joint: tuple[tuple[int, ...], tuple[int, ...]] | None = struct.field(
        pytree_node=False, default=None
    )

    @property
    def new(self) -> int:
        return self.write.shape[0]

    @property
    def old(self) -> int:
        return self.write.shape[1]

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The new sizes and the old sizes of the axes that the map acts on, usually a single axis."""
        return self.joint or ((self.new,), (self.old,))

    def of(self, name: str) -> M:
        """Return the matrix for an axis with this name: ``read`` for input axes, else ``write``."""
        return self.read if reads_axis(name) else self.write

    def __repr__(self) -> str:
        """Show sizes and kinds of the matrices, but no entries.

        For example ``AxisMap(24 -> 48, write: copies, read: scaled copies)``.
        """
        # JAX's tree functions also build this class with leaves that are not matrices.
        if not all(hasattr(m, "shape") for m in (self.write, self.read)):
            return f"AxisMap(write={self.write!r}, read={self.read!r})"
        new, old = (" x ".join(map(str, shape)) for shape in self.shapes)
        write = describe_matrix(self.write)
        read = describe_matrix(self.read)
        kinds = f"{write}" if write == read else f"write: {write}, read: {read}"
        return f"AxisMap({old} -> {new}, {kinds})"


# A map whose matrices are sparse, such as a map that copies units.
CopyMap: TypeAlias = AxisMap[SparseMap]

# Keys are tuples of axis names. A key with several names, such as ``("heads", "head_dim")``, applies
# to leaves in which these axes are adjacent. It takes precedence over maps of single axes. The first
# name decides between the write map and the read map.
Term: TypeAlias = Mapping[tuple[str, ...], AxisMap]
# Keys are names or tuples, but not both, because JAX sorts the keys of a dict.
Maps: TypeAlias = Mapping[str, AxisMap] | Term


@struct.dataclass
class Rule:
    """The growth of the leaves that match a path pattern, axes and roles: the sum of ``terms``.

    Each term contracts every axis that it names. A leaf that no term touches is unchanged.

    Args:
      terms: growths whose results are summed. Without terms, the matching leaves are unchanged.
      path: shell-style pattern for the path of a leaf; ``*`` also matches slashes.
      axes: axes that a leaf must have. ``"embed.in"`` requires an input axis, ``"embed.out"`` an
        output axis, ``"embed"`` accepts either, and ``"embed.post"`` requires this suffix.
      roles: accepted roles, from ``jaxgrow.axes.ROLES``. If empty, all roles are accepted.
      also: further conditions that a leaf must meet, as rules without terms.
    """

    terms: tuple[Maps, ...]
    path: str = struct.field(pytree_node=False, default="*")
    axes: tuple[str, ...] = struct.field(pytree_node=False, default=())
    roles: tuple[str, ...] = struct.field(pytree_node=False, default=())
    also: tuple["Rule", ...] = struct.field(pytree_node=False, default=())

    @property
    def conditions(self) -> tuple["Rule", ...]:
        """Conditions that a leaf must meet, as rules without terms; empty for a catch-all rule."""
        own = Rule((), self.path, self.axes, self.roles)
        return tuple(condition for condition in (own, *self.also) if condition != Rule(()))

    def matches(self, path: str, names: Names) -> bool:
        """Whether the rule applies to the leaf at ``path`` with these axis ``names``.

        Raises:
          ValueError: the rule has ``roles``, and the role of the leaf is ambiguous.
        """
        return all(condition._met(path, names) for condition in self.conditions)

    def _met(self, path: str, names: Names) -> bool:
        has: set[str] = set()
        for one in map(Axis.parse, names):
            suffixes = (one.direction, *one.marks)
            has |= {one.name, *(f"{one.name}.{suffix}" for suffix in suffixes)}
        return (
            fnmatchcase(path, self.path)
            and set(self.axes) <= has
            and (not self.roles or role_of(path, names) in self.roles)
        )

    def __repr__(self) -> str:
        grown = " + ".join(map(repr, self.terms)) or "unchanged"
        return f"Rule({str(self).removeprefix('a rule ')}: {grown})"

    def __str__(self) -> str:
        about: list[str] = []
        for condition in self.conditions:
            about += [f"of path {condition.path!r}"] if condition.path != "*" else []
            about += [f"of axes {', '.join(condition.axes)}"] if condition.axes else []
            about += [f"that are {' or '.join(condition.roles)}"] if condition.roles else []
        return "a rule for leaves " + ", ".join(about) if about else "a rule for all leaves"


@struct.dataclass
class Rules:
    """A growth with separate rules for leaves: a leaf grows by the first rule that matches it.

    A leaf that no rule matches is unchanged. It is an error if a rule matches no leaf of a model
    (`jaxgrow.grow`), except for a catch-all rule.

    Args:
      rules: the rules, in order of precedence.
      eps: factor for the ``eps`` of norms over ``embed``.

    Example:
      The value and output kernels of the attention are unchanged, all other heads are copied.

      >>> stays = Rule((), path="*/attention/[vo]*")
      >>> growth = Rules((stays, Rule(({"heads": tile(2, 2)},))))
      >>> [len(terms(growth, leaf, ("embed.in", "heads"))) for leaf in ("0/attention/query", "0/attention/value")]
      [1, 0]
    """

    rules: tuple[Rule, ...]
    eps: float = struct.field(pytree_node=False, default=1.0)


Growth: TypeAlias = Maps | Rules


def by_axes(maps: Maps) -> dict[tuple[str, ...], AxisMap]:
    """Return the maps with tuples of axis names as keys. Most maps have a tuple of one name.

    Raises:
      ValueError: a key and its map have different numbers of axes.
      TypeError: ``maps`` is not a mapping from axis names to maps.

    Example:
      >>> list(by_axes({"mlp": tile(3, 2)}))
      [('mlp',)]
    """
    check_maps(maps)
    found = {(key,) if isinstance(key, str) else key: m for key, m in maps.items()}
    for axes, m in found.items():
        if len(axes) != len(m.shapes[0]):
            raise ValueError(
                f"a map from the sizes {m.shapes[1]} to {m.shapes[0]} has the key {axes}, but "
                "the key must name each of its axes"
            )
    return found


def check_maps(growth: object) -> None:
    """Check that ``growth`` is a mapping from axis names to maps.

    Raises:
      TypeError: it is not.
    """
    should = "should be Rules or {axis: AxisMap}, as the functions of jaxgrow.operators return"
    if not isinstance(growth, Mapping):
        raise TypeError(f"the growth is of type {type(growth).__name__}, but {should}")
    for key, m in cast(Mapping[object, object], growth).items():
        if not isinstance(m, AxisMap):
            what = m if isinstance(m, int | float | str) else "a value"
            raise TypeError(
                f"the growth has {what} of type {type(m).__name__} for the axis {key!r}, but "
                f'{should}, for example operators.stack(sizes, {{"layers": 24}})'
            )
        for which in ("write", "read"):
            matrix: object = getattr(cast(object, m), which)
            if not hasattr(matrix, "shape"):
                raise TypeError(
                    f"axis {key!r}: the {which} map is of type {type(matrix).__name__}, but should "
                    "be a SparseMap or an array [new, old]. Convert it with numpy.asarray."
                )


def check_matrices(growth: Growth) -> None:
    """Check that the two matrices of each map are consistent. Traced values are not checked.

    Raises:
      ValueError: the matrices of a map have different shapes, or a `SparseMap` has an index out of
        range.
        The message lists all such maps.
      TypeError: as in `check_maps`.
    """
    wrong: dict[str, None] = {}  # in order, each once
    for term in all_terms(growth):
        check_maps(term)
        for key, m in term.items():
            wrong |= dict.fromkeys(f"axis {key!r}: {fault}" for fault in _faults(m))
    if wrong:
        raise ValueError("the growth has inconsistent maps:\n  " + "\n  ".join(wrong))


def _faults(m: AxisMap) -> list[str]:
    write = m.write.shape
    read = m.read.shape
    if write != read or len(write) != 2:
        return [
            f"the write map has shape {write}, and the read map has shape {read}. Both must have "
            "the same shape, [new, old]."
        ]
    found: list[str] = []
    for which, matrix in (("write", m.write), ("read", m.read)):
        if isinstance(matrix, SparseMap) and is_numpy(matrix.index):
            outside = matrix.index[(matrix.index < 0) | (matrix.index >= matrix.old)]
            if outside.size:
                found.append(
                    f"the {which} map has the index {outside[0]}, but the axis has {matrix.old} "
                    f"old units. Indices must be in 0 .. {matrix.old - 1}."
                )
    return found


def terms(growth: Growth, path: str, names: Names) -> tuple[Term, ...]:
    """Return the terms whose sum acts on a leaf; an empty tuple if the leaf is unchanged.

    Args:
      growth: maps, or rules.
      path: path of the leaf.
      names: axis names of the leaf.
    """
    if not isinstance(growth, Rules):
        return (by_axes(growth),)
    found = next((rule.terms for rule in growth.rules if rule.matches(path, names)), ())
    return tuple(by_axes(term) for term in found)


def copying(terms: Sequence[Term], squares: bool = False) -> list[Term]:
    """Return terms that copy values without scaling them: input axes also use the write map.

    Args:
      terms: the terms of a growth for one leaf.
      squares: whether the values are squares. They must not become negative, so the terms then have
        the absolute values of the weights. Maps that copy, average or sum units are the same.
    """

    def copied(m: AxisMap) -> AxisMap:
        write = absolute_weights(m.write) if squares else m.write
        return AxisMap(write, write, m.joint)

    return [_each(term, copied) for term in terms]


def first_copies(terms: Sequence[Term], asks: str) -> list[Term]:
    """Return maps that keep only the first copy of each old unit, with weight 1, on all axes.

    The maps are made from the first term, because further terms only add new values.

    Args:
      terms: the terms of a growth for one leaf.
      asks: name of the caller, for the error message.

    Raises:
      ValueError: the first term does not copy units.
    """
    if not terms:  # the leaf is unchanged
        return []

    def first(axes: tuple[str, ...], m: AxisMap) -> SparseMap:
        if not isinstance(m.write, SparseMap) or m.write.index.shape[1] != 1 or m.new < m.old:
            raise ValueError(
                f"axis {' '.join(axes)!r}: {asks} needs a growth that copies units, but the map "
                f"from {m.old} to {m.new} units combines or removes some"
            )
        copies = np.flatnonzero(m.write.weight[:, 0])
        weight = np.zeros((m.new, 1))
        weight[copies[np.unique(m.write.index[copies, 0], return_index=True)[1]]] = 1
        return SparseMap(m.write.index, weight, m.old)

    alone = {axes: (first(axes, m), m.joint) for axes, m in terms[0].items()}
    return [{axes: AxisMap(rows, rows, joint) for axes, (rows, joint) in alone.items()}]


def all_terms(growth: Growth) -> list[Maps]:
    """Return the terms of all rules of the growth. A growth without rules is one term."""
    if not isinstance(growth, Rules):
        return [growth]
    return [term for rule in growth.rules for term in rule.terms]


def new_sizes(growth: Growth) -> dict[str, int]:
    """Return the sizes of the axes that the growth changes, after the growth.

    Raises:
      ValueError: two rules give one axis different sizes, or a key and its map have different
        numbers of axes.

    Example:
      >>> new_sizes({"mlp": tile(3, 2)})
      {'mlp': 6}
    """
    sizes: dict[str, int] = {}
    every = itertools.chain.from_iterable(by_axes(term).items() for term in all_terms(growth))
    for axes, m in every:
        for name, size in zip(axes, m.shapes[0], strict=True):
            if sizes.setdefault(name, size) != size:
                raise ValueError(
                    f"axis {name!r}: one rule gives it size {sizes[name]}, another {size}"
                )
    return sizes


def new_shape(growth: Growth, names: Names, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a leaf after a growth that fits it.

    Args:
      growth: maps, or rules.
      names: axis names of the leaf.
      shape: its shape before the growth.

    Example:
      >>> new_shape({"mlp": tile(3, 2)}, ("embed.in", "mlp"), (2, 3))
      (2, 6)
    """
    new = new_sizes(growth)
    return tuple(new.get(axis_of(n), size) for n, size in zip(names, shape, strict=True))


def _by_one(growth: Growth) -> TypeGuard[Mapping[str, AxisMap]]:
    """Whether the growth has one map for each axis."""
    return not isinstance(growth, Rules) and all(isinstance(key, str) for key in growth)


Change: TypeAlias = Callable[[AxisMap], AxisMap]


@overload
def _each(growth: Rules, change: Change) -> Rules: ...
@overload
def _each(growth: Mapping[str, AxisMap], change: Change) -> dict[str, AxisMap]: ...
@overload
def _each(growth: Term, change: Change) -> dict[tuple[str, ...], AxisMap]: ...
def _each(growth: Growth, change: Change) -> Growth:
    """Apply ``change`` to every map of the growth."""
    if not isinstance(growth, Rules):
        check_maps(growth)
        return {key: change(m) for key, m in growth.items()}  # type: ignore[return-value]
    rules: list[Rule] = []
    for rule in growth.rules:
        changed = tuple(_each(term, change) for term in rule.terms)
        rules.append(replace(rule, terms=changed))
    return Rules(tuple(rules), growth.eps)


def select(index: Sequence[int] | np.ndarray, old: int) -> CopyMap:
    """Copy units: new unit ``i`` is a copy of old unit ``index[i]``.

    ``write[i, j] = [index[i] = j]``, ``read[i, j] = write[i, j] / copies of j``

    Kernels that contract the axis divide the old weight among the copies. This is the map of
    Net2Net (Chen et al., 2016, Eq. 2) and of de-coalescing (Zou et al., 2024, section 3.2).
    ``read.T @ write == I`` if every old unit is copied at least once.

    Args:
      index: old unit that each new unit copies, ``[new]``.
      old: number of old units.

    Returns:
      The map from ``old`` units to ``len(index)`` units.

    Raises:
      ValueError: an index is outside ``0 .. old - 1``.

    Example:
      >>> from jaxgrow.growth.matrices import dense
      >>> m = select([0, 1, 1], old=2)
      >>> dense(m.write).tolist()
      [[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]
      >>> dense(m.read).tolist()
      [[1.0, 0.0], [0.0, 0.5], [0.0, 0.5]]

    References:
      Chen et al., `Net2Net <https://arxiv.org/abs/1511.05641>`_, ICLR 2016

      Zou et al.,
      `A Multi-Level Framework for Accelerating Training Transformer Models <https://arxiv.org/abs/2404.07999>`_,
      ICLR 2024
    """
    index = np.asarray(index, np.int32)
    if index.ndim != 1 or index.size == 0 or index.min() < 0 or index.max() >= old:
        raise ValueError(
            f"select needs a list of units in 0 .. {old - 1}, but got {index.tolist()}"
        )
    copies = np.bincount(index, minlength=old)
    ones = np.ones((len(index), 1))
    return AxisMap(
        write=SparseMap(index[:, None], ones, old),
        read=SparseMap(index[:, None], ones / copies[index, None], old),
    )


def tile(old: int, times: int) -> CopyMap:
    """Copy the sequence of all units: ``[x, x, ...]``.

    Args:
      old: number of old units.
      times: number of copies of each unit.

    Example:
      >>> tile(2, times=2).write.index[:, 0].tolist()
      [0, 1, 0, 1]
    """
    return select(np.tile(np.arange(old), times), old)


def repeat(old: int, times: int) -> CopyMap:
    """Copy each unit next to itself: ``[x0, x0, ..., x1, x1, ...]``.

    Args:
      old: number of old units.
      times: number of copies of each unit.

    Example:
      >>> repeat(2, times=2).write.index[:, 0].tolist()
      [0, 0, 1, 1]
    """
    return select(np.repeat(np.arange(old), times), old)


def identity(size: int) -> CopyMap:
    """Return the identity map, for callers that require a map for every axis."""
    return select(np.arange(size), size)


def blocks(m: AxisMap, size: int) -> CopyMap:
    """Return the map that moves blocks of ``size`` units as ``m`` moves single units: ``m (x) I``.

    Args:
      m: map of blocks. Its matrices must be `SparseMap` objects.
      size: number of units in a block.

    Example:
      >>> blocks(tile(1, times=2), size=3).write.index[:, 0].tolist()
      [0, 1, 2, 0, 1, 2]
    """
    return AxisMap(kron(m.write, size), kron(m.read, size))


@overload
def swap(growth: Rules) -> Rules: ...
@overload
def swap(growth: Mapping[str, AxisMap]) -> dict[str, AxisMap]: ...
@overload
def swap(growth: Term) -> dict[tuple[str, ...], AxisMap]: ...
def swap(growth: Growth) -> Growth:
    """Return the reverse growth, ``write, read = read.T, write.T``: growing becomes coalescing.

    ``grow(swap(g), grow(g, s)) == s`` where ``read.T @ write == I``. This does not hold for `Rules`
    of several terms. Swapping twice returns the original growth.

    Args:
      growth: maps, or rules.

    Returns:
      A growth of the same type, from the new sizes to the old sizes.

    Example:
      >>> up = {"mlp": tile(3, times=2)}
      >>> new_sizes(up), new_sizes(swap(up))
      ({'mlp': 6}, {'mlp': 3})
    """

    def other(m: AxisMap) -> AxisMap:
        return AxisMap(
            write=transpose(m.read),
            read=transpose(m.write),
            joint=m.joint and (m.joint[1], m.joint[0]),
        )

    swapped = _each(growth, other)
    return replace(swapped, eps=1 / swapped.eps) if isinstance(swapped, Rules) else swapped


@overload
def dual(growth: Rules) -> Rules: ...
@overload
def dual(growth: Mapping[str, AxisMap]) -> dict[str, AxisMap]: ...
@overload
def dual(growth: Term) -> dict[tuple[str, ...], AxisMap]: ...
def dual(growth: Growth) -> Growth:
    """Return the growth of the gradients: ``write, read = read, write``.

    ``grad at grow(g, s) == grow(dual(g), grad at s)`` holds under three conditions: ``g`` preserves
    the function by copying units; on the axes that a norm averages over, ``read`` divides equally
    among the copies; and with GQA, the copies of a key/value head have equal gradients
    (`jaxgrow.operators.targets.copied_units`). Function-preserving operators that do not meet them
    are `llama_pro`, `lemon` if ``embed`` or ``kv_heads`` grows, and with GQA, `zero_pad` if
    ``heads`` grow, and every operator that copies key/value heads without their query heads. For
    every ``g``, ``grow(swap(dual(g)), .)`` is the adjoint of ``grow(g, .)``. Applying `dual` twice
    returns the original growth.

    Args:
      growth: maps, or rules.

    Returns:
      A growth of the same type, between the same sizes.

    Example:
      >>> up = {"mlp": tile(3, times=2)}
      >>> dual(up)["mlp"].write is up["mlp"].read
      True
    """
    return _each(growth, lambda m: AxisMap(write=m.read, read=m.write, joint=m.joint))


def preserves_function(
    growth: Growth, axes: Axes | None = None, normed: Sequence[str] = ("embed",)
) -> bool:
    """Whether the growth preserves the function of a model for all weights, up to rounding.

    The conditions on the maps are:

    - Each map satisfies ``read.T @ write == I``. Its ``write`` only copies, or sets units to zero
      that no parameter reads.
    - On the axes that a norm averages over (``normed``), every old unit is copied equally often.
      Otherwise the mean and the variance change.
    - Stacked layers are unchanged. Copying a layer changes the function to first order (Zou et al.,
      2024; measured in ``tests/operators/test_laws.py``).
    - ``head_dim`` is unchanged. Its size determines the scale ``1 / sqrt(head_dim)`` of attention,
      and its order determines the rotary embeddings.

    With ``axes``, every axis that has the suffix ``norm`` in a parameter also counts as ``normed``.
    The model must also undo the growth of a residual stream (``embed``) before its output. This
    requires a parameter outside of the layers that has the stream as an input axis and whose output
    axes no other parameter reads. Examples are a head, or a final norm with the suffix ``.in``. A
    tied head is declared as an embedding, which has no input axis. A model with a tied head and
    without a final norm therefore does not preserve the function: its logits would be multiplied by
    a factor. Without ``axes``, the function assumes that such a parameter exists.

    These assumptions are not checked:

    - The axis names must be right (`jaxgrow.check_rules`).
    - Each query head must still read the same key/value head. The operators of jaxgrow ensure this
      (`jaxgrow.operators.targets.copied_units`).
    - If an axis of the outputs grows, such as ``vocab``, copies of an output must not matter. For
      example, copies of a token change the probabilities of all tokens.
    - If ``experts`` grow, each token must be routed to the same experts with the same gates
      (`jaxgrow.operators.upcycle`).

    Args:
      growth: one map for each axis.
      axes: the axis names of the parameters of the model.
      normed: the kinds of axes that a norm averages over, in every stage. With ``axes``, the axes
        with the suffix ``norm`` are added.

    Returns:
      True if the function is preserved for all weights. False means that it changes for some
      weights.

    Raises:
      TypeError: the growth is `Rules` or has a map over several axes. Whether these preserve the
        function depends on the model: measure it with `jaxgrow.extras.preservation.measure_preservation`.

    Example:
      >>> preserves_function({"embed": tile(2, times=2)}), preserves_function({"embed": select([0, 1, 1], 2)})
      (True, False)
      >>> tied = {"embedding": ("vocab", "embed"), "norm": ("embed.norm.scale",)}
      >>> preserves_function({"embed": tile(2, times=2)}, tied)
      False
      >>> preserves_function({"embed": tile(2, times=2)}, {**tied, "norm": ("embed.in.norm.scale",)})
      True
    """
    if not _by_one(growth):
        raise TypeError(
            "preserves_function supports only growths with one map per axis. For Rules and "
            "maps over several axes, measure the change with jaxgrow.extras.preservation.measure_preservation."
        )
    check_maps(growth)
    names = itertools.chain.from_iterable(jax.tree.leaves(axes, is_leaf=is_names))
    normed = (*normed, *(axis_kind(axis_of(n)) for n in names if "norm" in Axis.parse(n).marks))
    for name, m in growth.items():
        write = sparse(m.write)
        read = sparse(m.read)
        ones = write.weight == 1
        copied = ones.sum(1) == 1
        only_copies = ((write.weight == 0) | ones).all() and (
            copied | ~(read.weight.any(1) | write.weight.any(1))
        ).all()
        if not only_copies or not is_identity(matmul(transpose(m.read), m.write)):
            return False
        if axis_kind(name) in normed and not (
            copied.all() and len(set(np.bincount(write.index[ones]).tolist())) == 1
        ):
            return False
        fixed = is_layers(name) or axis_kind(name) == "head_dim"
        if fixed and not (m.new == m.old and is_identity(m.write)):
            return False
    streams = [name for name, m in growth.items() if axis_kind(name) == "embed" and m.new != m.old]
    return axes is None or all(_leaves_by_a_reader(name, axes) for name in streams)


def _leaves_by_a_reader(stream: str, axes: Axes) -> bool:
    """Whether a parameter outside of the layers reads this stream and produces a model output.

    The output may also be another residual stream.
    """
    leaves = jax.tree.leaves(axes, is_leaf=is_names)
    every = itertools.chain.from_iterable(leaves)
    inner = {
        axis_of(n)
        for n in every
        if reads_axis(n) and (axis_kind(axis_of(n)) != "embed" or axis_of(n) == stream)
    }

    def stays(n: str) -> bool:
        """Whether the name is a layer axis, or an output axis that another parameter reads."""
        return is_layers(axis_of(n)) or (not reads_axis(n) and axis_of(n) in inner)

    def reads_stream(names: Names) -> bool:
        return any(reads_axis(n) and axis_of(n) == stream for n in names)

    readers = [names for names in leaves if reads_stream(names)]
    return any(not any(map(stays, names)) for names in readers)

"""How one named axis changes size: a pair of linear maps, as data.

A growth is a plain dict ``{axis name: AxisMap}``; axes that it does not name stay as they are.
Where one map an axis is not enough, it is `Rules`: sums of such dicts, for some leaves and not for
others. Growths are pytrees: print them, save them, differentiate through them, and combine them
with `swap`, `dual` and `jaxgrow.compose`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TypeAlias, TypeGuard, overload

import jax
import numpy as np
from flax import struct

from jaxgrow.axes.names import Axes, Names, axis, is_layers, is_names, kind, marks, reads, role
from jaxgrow.growth.matrices import (
    Matrix,
    Rows,
    described,
    is_identity,
    kron,
    matmul,
    sparse,
    transpose,
)


@struct.dataclass
class AxisMap:
    """How one axis changes size; both matrices are ``[new, old]``.

    ``write`` acts on leaves that write the axis, ``read`` on leaves that contract it away. The
    function of a network is kept when ``read.T @ write == I`` and ``write`` only copies: a reader
    then receives what it received before.
    """

    write: Matrix
    read: Matrix
    # Of a map over several adjacent axes at once, (new sizes, old sizes); the matrices are over
    # their product.
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
        """``(new, old)``: the sizes of the axes that it acts on, mostly one."""
        return self.joint or ((self.new,), (self.old,))

    def of(self, name: str) -> Matrix:
        """The matrix for an axis of a leaf that is named so."""
        return self.read if reads(name) else self.write

    def __repr__(self) -> str:
        """``AxisMap(24 -> 48, write: copies, read: scaled copies)``: sizes and kinds, never the entries."""
        if not all(
            hasattr(m, "shape") for m in (self.write, self.read)
        ):  # a tree of something else than matrices
            return f"AxisMap(write={self.write!r}, read={self.read!r})"
        new, old = (" x ".join(map(str, shape)) for shape in self.shapes)
        write, read = described(self.write), described(self.read)
        kinds = f"{write}" if write == read else f"write: {write}, read: {read}"
        return f"AxisMap({old} -> {new}, {kinds})"


# By axis. Or by the axes that go together, ``("heads", "head_dim")``, adjacent ones, for the leaves
# that have them all: those take it first, in the role of the first axis; then every key is a tuple,
# ``("embed",)``, for jax sorts the keys of a dict.
Term: TypeAlias = Mapping[tuple[str, ...], AxisMap]
Maps: TypeAlias = Mapping[str, AxisMap] | Term


@struct.dataclass
class Rule:
    """What happens to the leaves whose path matches the pattern ``path``, that have all of ``axes``
    and one of ``roles``: the sum of ``terms``.

    Each term contracts every axis that it names. A leaf that no term touches stays as it is.
    """

    terms: tuple[Maps, ...]
    path: str = struct.field(
        pytree_node=False, default="*"
    )  # as in a shell; ``*`` matches slashes, too
    # ``"embed.in"``: that it reads; ``"embed.out"``: that it writes; ``"embed"``: either;
    # ``"embed.post"``: with that mark.
    axes: tuple[str, ...] = struct.field(pytree_node=False, default=())
    roles: tuple[str, ...] = struct.field(
        pytree_node=False, default=()
    )  # of `jaxgrow.axes.ROLES`; none: any
    also: tuple["Rule", ...] = struct.field(
        pytree_node=False, default=()
    )  # further conditions: rules without terms

    @property
    def conditions(self) -> tuple["Rule", ...]:
        """What a leaf must meet, as rules without terms; of a rule for all leaves, none."""
        own = Rule((), self.path, self.axes, self.roles)
        return tuple(condition for condition in (own, *self.also) if condition != Rule(()))

    def matches(self, path: str, names: Names) -> bool:
        """Whether it is about the leaf.

        Raises:
          ValueError: it asks for a role, and the leaf does not say its own.
        """
        return all(condition._met(path, names) for condition in self.conditions)

    def _met(self, path: str, names: Names) -> bool:
        has = {axis(n) for n in names} | {axis(n) + ".out" for n in names if not reads(n)}
        has |= {f"{axis(n)}.{mark}" for n in names for mark in marks(n)}
        return (
            fnmatchcase(path, self.path)
            and set(self.axes) <= has
            and (not self.roles or role(path, names) in self.roles)
        )

    def __repr__(self) -> str:
        return f"Rule({str(self).removeprefix('a rule ')}: {' + '.join(map(repr, self.terms)) or 'unchanged'})"

    def __str__(self) -> str:
        about: list[str] = []
        for condition in self.conditions:
            about += [f"of path {condition.path!r}"] if condition.path != "*" else []
            about += [f"of axes {', '.join(condition.axes)}"] if condition.axes else []
            about += [f"that are {' or '.join(condition.roles)}"] if condition.roles else []
        return "a rule for leaves " + ", ".join(about) if about else "a rule for all leaves"


@struct.dataclass
class Rules:
    """A growth by leaves: the first rule that matches a leaf says how it grows; a leaf that none matches stays as it is.

    A rule that matches no leaf of a model is an error (`jaxgrow.grow`), unless it is one for all
    leaves.

    Example:
      Attention's value and output kernels stay as they are; all else that has heads gets a copy of each.

      >>> stays = Rule((), path="*/attention/[vo]*")
      >>> growth = Rules((stays, Rule(({"heads": tile(2, 2)},))))
      >>> [len(terms(growth, leaf, ("embed.in", "heads"))) for leaf in ("0/attention/query", "0/attention/value")]
      [1, 0]
    """

    rules: tuple[Rule, ...]
    eps: float = struct.field(
        pytree_node=False, default=1.0
    )  # what the eps of norms over ``embed`` is multiplied by


Growth: TypeAlias = Maps | Rules


def by_axes(maps: Maps) -> dict[tuple[str, ...], AxisMap]:
    """The maps, each by the axes that it acts on, mostly one.

    Raises:
      ValueError: a key does not name all of them.
      TypeError: this is not a mapping from names of axes to maps.

    Example:
      >>> list(by_axes({"mlp": tile(3, 2)}))
      [('mlp',)]
    """
    check_maps(maps)
    found = {(key,) if isinstance(key, str) else key: m for key, m in maps.items()}
    for axes, m in found.items():
        if len(axes) != len(m.shapes[0]):
            raise ValueError(
                f"a map from the sizes {m.shapes[1]} to {m.shapes[0]} has the key {axes}: it names each of its axes"
            )
    return found


def check_maps(growth: object) -> None:
    """
    Raises:
      TypeError: this is not a mapping from names of axes to maps.
    """
    should = "should be Rules or {axis: AxisMap}, as the functions of jaxgrow.operators return"
    if not isinstance(growth, Mapping):
        raise TypeError(f"the growth is of type {type(growth).__name__}, but {should}")
    for key, m in growth.items():
        if not isinstance(m, AxisMap):
            what = m if isinstance(m, int | float | str) else "a value"
            raise TypeError(
                f"the growth has {what} of type {type(m).__name__} for the axis {key!r}, but {should}: for example, "
                'operators.stack(sizes, {"layers": 24})'
            )


def terms(growth: Growth, path: str, names: Names) -> tuple[Term, ...]:
    """The maps whose sum acts on a leaf, by axes; none: it stays as it is."""
    if not isinstance(growth, Rules):
        return (by_axes(growth),)
    found = next((rule.terms for rule in growth.rules if rule.matches(path, names)), ())
    return tuple(by_axes(term) for term in found)


def copying(terms: Sequence[Term]) -> list[Term]:
    """The terms with the writers' matrices for readers, too: what copies states as it copies units."""
    return [
        {axes: AxisMap(m.write, m.write, m.joint) for axes, m in term.items()} for term in terms
    ]


def first_copies(terms: Sequence[Term], asks: str) -> list[Term]:
    """Of the first term, each unit's first copy, with weight one, for readers too: further terms hold what is new.

    Raises:
      ValueError: the terms do not copy units, as ``asks`` needs them to.
    """

    def first(axes: tuple[str, ...], m: AxisMap) -> Rows:
        if not isinstance(m.write, Rows) or m.write.index.shape[1] != 1 or m.new < m.old:
            raise ValueError(
                f"axis {' '.join(axes)!r}: {asks} needs a growth that copies units, {m.old} to {m.new}"
            )
        copies = np.flatnonzero(m.write.weight[:, 0])
        weight = np.zeros((m.new, 1))
        weight[copies[np.unique(m.write.index[copies, 0], return_index=True)[1]]] = 1
        return Rows(m.write.index, weight, m.old)

    alone = {axes: (first(axes, m), m.joint) for axes, m in terms[0].items()}
    return [{axes: AxisMap(rows, rows, joint) for axes, (rows, joint) in alone.items()}]


def new_sizes(growth: Growth) -> dict[str, int]:
    """The sizes of the axes that change, after the growth.

    Raises:
      ValueError: two rules give one axis two sizes, or a key names another number of axes than its
        map has.

    Example:
      >>> new_sizes({"mlp": tile(3, 2)})
      {'mlp': 6}
    """
    sizes: dict[str, int] = {}
    every = (
        [term for rule in growth.rules for term in rule.terms]
        if isinstance(growth, Rules)
        else [growth]
    )
    for axes, m in (item for term in every for item in by_axes(term).items()):
        for name, size in zip(axes, m.shapes[0], strict=True):
            if sizes.setdefault(name, size) != size:
                raise ValueError(
                    f"axis {name!r}: one rule gives it size {sizes[name]}, another {size}"
                )
    return sizes


def _by_one(growth: Growth) -> TypeGuard[Mapping[str, AxisMap]]:
    """Whether there is one map an axis."""
    return not isinstance(growth, Rules) and all(isinstance(key, str) for key in growth)


Change: TypeAlias = Callable[[AxisMap], AxisMap]


@overload
def _each(growth: Rules, change: Change) -> Rules: ...
@overload
def _each(growth: Mapping[str, AxisMap], change: Change) -> dict[str, AxisMap]: ...
@overload
def _each(growth: Term, change: Change) -> dict[tuple[str, ...], AxisMap]: ...
def _each(growth: Growth, change: Change) -> Growth:
    """The growth with ``change`` done to every map."""
    if not isinstance(growth, Rules):
        check_maps(growth)
        return {key: change(m) for key, m in growth.items()}  # type: ignore[return-value]
    rules = (replace(r, terms=tuple(_each(term, change) for term in r.terms)) for r in growth.rules)
    return Rules(tuple(rules), growth.eps)


def select(index: Sequence[int] | np.ndarray, old: int) -> AxisMap:
    """New unit ``i`` is a copy of old unit ``index[i]``; its readers share the old weight among the copies.

    ``write[i, j] = [index[i] = j]``, ``read[i, j] = write[i, j] / copies of j``. This is Net2Net's
    map (Chen et al., 2016, Eq. 2), and de-coalescing's (Zou et al., 2024, section 3.2).
    ``read.T @ write == I`` if each unit is copied.

    Args:
      index: the old unit that each new one copies.
      old: how many old units there are.

    Returns:
      The map from ``old`` units to ``len(index)``.

    Raises:
      ValueError: an index outside ``0 .. old - 1``.

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
        write=Rows(index[:, None], ones, old),
        read=Rows(index[:, None], ones / copies[index, None], old),
    )


def tile(old: int, times: int) -> AxisMap:
    """``[x, x, ..]``: copies lie ``old`` apart.

    Example:
      >>> tile(2, times=2).write.index[:, 0].tolist()
      [0, 1, 0, 1]
    """
    return select(np.tile(np.arange(old), times), old)


def repeat(old: int, times: int) -> AxisMap:
    """``[x0, x0, .., x1, x1, ..]``: copies lie side by side.

    Example:
      >>> repeat(2, times=2).write.index[:, 0].tolist()
      [0, 0, 1, 1]
    """
    return select(np.repeat(np.arange(old), times), old)


def identity(size: int) -> AxisMap:
    """The map that changes nothing: for an axis that must be named all the same."""
    return select(np.arange(size), size)


def blocks(m: AxisMap, size: int) -> AxisMap:
    """The map that moves whole blocks of ``size`` units as ``m`` moves units: ``m (x) I``. Needs `Rows`.

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
    """The growth the other way: ``write, read = read.T, write.T``. Growing becomes coalescing.

    Where ``read.T @ write == I``, ``grow(swap(g), grow(g, s)) == s``; for `Rules` of several terms
    this does not hold. An involution.

    Args:
      growth: maps, or rules.

    Returns:
      The same kind of growth, from the new sizes to the old ones.

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
    """How gradients travel: ``write, read = read, write``.

    Where ``g`` keeps the function by copying, and the readers of axes that a norm averages over
    share alike, ``grad at grow(g, s) == grow(dual(g), grad at s)`` (of the operators that keep it,
    not for `lemon`, if ``embed`` grows, and not for `llama_pro`); and for every ``g``,
    ``grow(swap(dual(g)), .)`` is the adjoint of ``grow(g, .)``. An involution.

    Args:
      growth: maps, or rules.

    Returns:
      The same kind of growth, between the same sizes.

    Example:
      >>> up = {"mlp": tile(3, times=2)}
      >>> dual(up)["mlp"].write is up["mlp"].read
      True
    """
    return _each(growth, lambda m: AxisMap(write=m.read, read=m.write, joint=m.joint))


def preserves_function(
    growth: Growth, axes: Axes | None = None, normed: Sequence[str] = ("embed",)
) -> bool:
    """Whether the growth preserves the function of a model with these axes, whatever its weights (up to rounding).

    Each map must satisfy ``read.T @ write == I`` with a ``write`` that only copies, or leaves units
    at zero that no parameter reads. On the axes that a norm averages over (``normed``) every old
    unit must be copied equally often, or mean and variance change. Stacked layers must stay as they
    are: copying a layer changes the function to first order (Zou et al., 2024; measured in
    ``tests/operators/test_laws.py``).

    With ``axes``, a parameter must also make the output of the model from a residual stream
    (``embed``) that grows: one outside of the layers that reads the stream and writes nothing that
    another parameter reads. It is a head, or a final norm marked ``.in``. A tied head is declared
    as a table, which writes. So a model with a tied head and no final norm does not pass: its
    logits would be multiplied. Without ``axes``, such a parameter is assumed.

    It is always assumed that the names are right (`jaxgrow.check_rules`), and that query heads stay
    with the key heads that they share, as the operators here arrange it
    (`jaxgrow.operators.targets.sources`).

    Args:
      growth: one map for each axis.
      axes: the axis names of the model's parameters.
      normed: the kinds of axes that a norm averages over, in every stage.

    Returns:
      Whether the function is preserved for all weights; False means that for some weights it is
      not.

    Raises:
      TypeError: `Rules` or a map over several axes. What these preserve depends on the model:
        `jaxgrow.growth.report.preservation` measures it.

    Example:
      >>> preserves_function({"embed": tile(2, times=2)}), preserves_function({"embed": select([0, 1, 1], 2)})
      (True, False)
      >>> tied = {"table": ("vocab", "embed"), "norm": ("embed.norm.scale",)}
      >>> preserves_function({"embed": tile(2, times=2)}, tied)
      False
      >>> preserves_function({"embed": tile(2, times=2)}, {**tied, "norm": ("embed.in.norm.scale",)})
      True
    """
    if not _by_one(growth):
        raise TypeError(
            "this judges one map an axis; measure what rules keep with jaxgrow.growth.report.preservation"
        )
    for name, m in growth.items():
        write, read = sparse(m.write), sparse(m.read)
        ones = write.weight == 1
        copied = ones.sum(1) == 1
        only_copies = ((write.weight == 0) | ones).all() and (
            copied | ~(read.weight.any(1) | write.weight.any(1))
        ).all()
        if not only_copies or not is_identity(matmul(transpose(m.read), m.write)):
            return False
        if kind(name) in normed and not (
            copied.all() and len(set(np.bincount(write.index[ones]).tolist())) == 1
        ):
            return False
        if is_layers(name) and not (m.new == m.old and is_identity(m.write)):
            return False
    streams = [name for name, m in growth.items() if kind(name) == "embed" and m.new != m.old]
    return axes is None or all(_leaves_by_a_reader(name, axes) for name in streams)


def _leaves_by_a_reader(stream: str, axes: Axes) -> bool:
    """Whether a parameter makes the output of the model, or another residual stream, of this one."""
    leaves = jax.tree.leaves(axes, is_leaf=is_names)
    inner = {
        axis(n)
        for names in leaves
        for n in names
        if reads(n) and (kind(axis(n)) != "embed" or axis(n) == stream)
    }

    def stays(n: str) -> bool:
        """Whether a parameter with this name is of a layer, or writes what another parameter reads."""
        return is_layers(axis(n)) or (not reads(n) and axis(n) in inner)

    readers = [names for names in leaves if any(reads(n) and axis(n) == stream for n in names)]
    return any(not any(map(stays, names)) for names in readers)

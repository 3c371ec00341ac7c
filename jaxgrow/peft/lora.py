"""LoRA: a kernel that stands still, and beside it a product of two small ones that trains (Hu et al., ICLR 2022).

``W + alpha / rank a b``, with a ``[layers, axes that W reads, rank]`` and b
``[layers, rank, axes that W writes]``, of experts ``[layers, experts, ..]``. Both name their axes,
so that all that goes by names works on them, and a LoRA grows with its model::

    adapter = init(lora, axes, sizes, key)
    own = growth(g, lora, axes)
    merge(grow(g, params, axes), grow(own, adapter, axes_of(lora, axes)), lora.resized(own))
    == grow(g, merge(params, adapter, lora), axes)

This holds of every growth, for grow is linear in W. Where each layer of the grown model comes from
one layer, and each leaf has one term, the rank stays: hypercloning, stacking, identity blocks,
coalescing in width. A sum of k products, over layers that are averaged or over the terms of
`Rules`, is one product of k times the rank, the parts side by side.
"""

import itertools
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxgrow.axes.names import READ, Axes, Kernel, Names, Params, axis, cut, reads
from jaxgrow.growth import maps
from jaxgrow.growth.apply import parts
from jaxgrow.growth.maps import AxisMap, Growth, Rule, Rules, Term
from jaxgrow.growth.matrices import Matrix, Rows, sparse
from jaxgrow.operators.targets import Sizes

RANK = "rank"


@dataclass(frozen=True)
class LoRA:
    """Which kernels have one, and of which rank. ``alpha / rank`` multiplies the product."""

    rank: int = 8
    alpha: float = 16.0
    # The modules whose kernels have one, as in a shell; ``*`` matches slashes, too. The paper's
    # choice: queries and values.
    targets: tuple[str, ...] = ("*/attention/query", "*/attention/value")

    def __post_init__(self):
        if self.rank < 1 or not self.alpha > 0 or not self.targets:
            raise ValueError(
                f"a LoRA has a rank of at least 1, a positive alpha, and targets, but this is {self}"
            )

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def resized(self, growth: Growth) -> "LoRA":
        """That of the grown adapter; ``growth`` is the LoRA's own. The product is multiplied by the same number as before."""
        rank = maps.new_sizes(growth).get(RANK, self.rank)
        return replace(self, rank=rank, alpha=self.scale * rank)


def kernels(lora: LoRA, axes: Axes) -> dict[str, Names]:
    """The kernels that have one: the names of their axes, by the paths of their modules.

    Args:
      lora: which modules.
      axes: the axis names of the model's parameters.

    Returns:
      Path of a module -> the names of its kernel's axes.

    Raises:
      ValueError: a target that no module with a kernel matches.

    Example:
      >>> axes = {"query": {"kernel": ("layers", "embed.in", "heads", "head_dim")}, "norm": {"scale": ("embed.norm.scale",)}}
      >>> list(kernels(LoRA(targets=("q*",)), axes))
      ['query']
    """
    leaves = {path.removesuffix("/kernel"): (path, n) for path, n in _flat(axes).items()}
    every = {
        module: n for module, (path, n) in leaves.items() if path != module and any(map(reads, n))
    }
    lost = [
        target
        for target in lora.targets
        if not any(fnmatchcase(module, target) for module in every)
    ]
    if lost:
        raise ValueError(
            f"the LoRA is for {lost}, but no such module has a kernel; those that have: {', '.join(every)}"
        )
    return {
        module: n
        for module, n in every.items()
        if any(fnmatchcase(module, target) for target in lora.targets)
    }


def axes_of(lora: LoRA, axes: Axes) -> Axes:
    """The axis names of an adapter: ``a`` reads what its kernel reads, and ``b`` writes what that writes.

    Args:
      lora: which modules have one.
      axes: the axis names of the model's parameters.

    Returns:
      A tree of the structure that `init` gives.

    Raises:
      ValueError: as `kernels`.

    Example:
      >>> axes_of(LoRA(targets=("up",)), {"up": {"kernel": ("layers", "embed.in", "mlp")}})["up"]["b"]
      ('layers', 'rank.in', 'mlp')
    """
    return _tree({module: _leaves(cut(names)) for module, names in kernels(lora, axes).items()})


def _leaves(kernel: Kernel) -> dict[str, Names]:
    """``a`` has the axes that lead and are read, ``b`` the rest."""
    return {
        "a": (*kernel.stacked, *kernel.read, RANK),
        "b": (*kernel.stacked, RANK + READ, *kernel.written),
    }


def init(lora: LoRA, axes: Axes, sizes: Sizes, key: jax.Array) -> Params:
    """A fresh adapter, float32: ``a`` uniform in ``+- 1 / sqrt(what it reads)``, ``b`` zero: the function is the model's.

    The published code's distribution (``kaiming_uniform_`` with ``a = sqrt(5)``); the paper has a
    normal one of no stated deviation. What is drawn for a kernel goes by its path: other targets
    change nothing in it.

    Args:
      lora: its rank, and which modules have one.
      axes: the axis names of the model's parameters.
      sizes: the size of every axis of the model.
      key: what is drawn goes by it.

    Returns:
      A tree ``{module: {"a": .., "b": ..}}``, of the modules' folders in the parameters.

    Raises:
      ValueError: as `kernels`.

    Example:
      >>> axes, sizes = {"up": {"kernel": ("layers", "embed.in", "mlp")}}, {"layers": 2, "embed": 4, "mlp": 3}
      >>> adapter = init(LoRA(rank=1, targets=("up",)), axes, sizes, jax.random.key(0))
      >>> adapter["up"]["a"].shape, adapter["up"]["b"].shape
      ((2, 4, 1), (2, 1, 3))

    References:
      Hu et al.,
      `LoRA: Low-Rank Adaptation of Large Language Models <https://arxiv.org/abs/2106.09685>`_, ICLR
      2022
    """
    own = {**sizes, RANK: lora.rank}

    def drawn(module: str, kernel: Kernel) -> dict[str, Any]:
        a, b = ([own[axis(n)] for n in _leaves(kernel)[leaf]] for leaf in ("a", "b"))
        bound = math.prod(own[axis(n)] for n in kernel.read) ** -0.5
        mine = jax.random.fold_in(key, zlib.crc32(module.encode()))
        return {
            "a": jax.random.uniform(mine, a, jnp.float32, -bound, bound),
            "b": jnp.zeros(b, jnp.float32),
        }

    return _tree(
        {module: drawn(module, cut(names)) for module, names in kernels(lora, axes).items()}
    )


def growth(of: Growth, lora: LoRA, axes: Axes) -> Rules:
    """How an adapter grows where its model grows by ``of``, as data for `jaxgrow.grow` and `jaxgrow.grow_optimizer`.

    A term of the model's growth is ``W'_l = sum_j d_lj R W_j S.T``, with R and S products of the
    maps of the axes that W reads and writes. For every j there is a part
    ``a'_l = R a_j, b'_l = d_lj b_j S.T`` of the adapter, at its own place along ``rank``: exact,
    whatever the growth. Where d is zero (`jaxgrow.operators.llama_pro`), ``a`` is a copy and ``b``
    zero, as at birth. `LoRA.resized` tells the rank.

    ``rank`` itself grows by any map (``{"rank": tile(8, 2)}`` keeps the product; ``LoRA.resized``
    its scale), but copies along it stay copies.

    Args:
      of: the growth of the model.
      lora: which modules have one.
      axes: the axis names of the small model's parameters.

    Returns:
      A rule for every leaf of the adapter.

    Raises:
      ValueError: a map over several axes at once, of which ``a`` has some and ``b`` the others; or
        as `kernels`.

    Example:
      >>> axes = {"up": {"kernel": ("layers", "embed.in", "mlp")}}
      >>> own = growth({"layers": maps.tile(2, 2), "mlp": maps.tile(3, 2)}, LoRA(targets=("up",)), axes)
      >>> maps.new_sizes(own)
      {'layers': 4, 'mlp': 6}
    """
    found = {}
    for module, names in kernels(lora, axes).items():
        leaf, kernel = f"{module}/kernel", cut(names)
        found[module] = [
            part
            for term in maps.terms(of, leaf, names) or ({},)
            for part in _parts(term, leaf, kernel)
        ]
    count = max(map(len, found.values()))
    rules = []
    for module, each in found.items():
        for which, leaf in enumerate(("a", "b")):
            terms = tuple(
                {**part[which], **_place(i, count, lora.rank)} for i, part in enumerate(each)
            )
            rules.append(Rule(terms, path=f"{module}/{leaf}"))
    return Rules(tuple(rules))


def merge(params: Params, adapter: Params, lora: LoRA) -> Params:
    """``W + alpha / rank a b`` in place of each kernel that has one: plain parameters, of the same function.

    Args:
      params: of the model. NumPy leaves stay NumPy, if the adapter's are.
      adapter: of the structure of `init`.
      lora: its.

    Returns:
      A tree of the structure and dtypes of ``params``.

    Raises:
      ValueError: the adapter's shapes are not those of the model's kernels.

    Example:
      >>> adapter = {"up": {"a": np.ones((2, 1)), "b": np.ones((1, 3))}}
      >>> merge({"up": {"kernel": np.zeros((2, 3))}}, adapter, LoRA(rank=1, alpha=2.0))["up"]["kernel"].tolist()
      [[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]
    """
    out = _flat(params)
    for module, (a, b) in _pairs(adapter, lora, out):
        kernel = out[f"{module}/kernel"]
        stacked = kernel.shape[: a.ndim + b.ndim - 2 - kernel.ndim]
        product = a.reshape(*stacked, -1, lora.rank) @ b.reshape(*stacked, lora.rank, -1)
        out[f"{module}/kernel"] = kernel + (lora.scale * product.reshape(kernel.shape)).astype(
            kernel.dtype
        )
    return unflatten_dict(out, sep="/")


def attach(params: Params, adapter: Params, lora: LoRA) -> Params:
    """Parameters with the adapter beside its kernels, for the model's module to compute ``x W + alpha / rank (x a) b``.

    The same function as that of `merge`, to rounding. No kernel is changed, and none has a gradient
    where ``params`` have none: this is the form to train.

    Args:
      params: of the model.
      adapter: of the structure of `init`.
      lora: its.

    Returns:
      The parameters, with two leaves more in every module that has a LoRA.

    Raises:
      ValueError: the adapter's shapes are not those of the model's kernels.

    Example:
      >>> adapter = {"up": {"a": np.ones((2, 1)), "b": np.ones((1, 3))}}
      >>> sorted(attach({"up": {"kernel": np.zeros((2, 3))}}, adapter, LoRA(rank=1))["up"])
      ['a', 'b', 'kernel']
    """
    out = _flat(params)
    out |= {
        f"{m}/{n}": x
        for m, (a, b) in _pairs(adapter, lora, out)
        for n, x in (("a", a), ("b", lora.scale * b))
    }
    return unflatten_dict(out, sep="/")


def _flat(tree: Any) -> dict[str, Any]:
    return flatten_dict(tree, sep="/")  # type: ignore[return-value]


def _tree(modules: dict[str, dict[str, Any]]) -> Any:
    return unflatten_dict(
        {f"{module}/{leaf}": x for module, of in modules.items() for leaf, x in of.items()}, sep="/"
    )


def _pairs(
    adapter: Params, lora: LoRA, params: dict[str, Any]
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """``(module, (a, b))`` of an adapter that fits."""
    leaves = _flat(adapter)
    for module in dict.fromkeys(path.rpartition("/")[0] for path in leaves):
        a, b, kernel = (
            leaves.get(f"{module}/a"),
            leaves.get(f"{module}/b"),
            params.get(f"{module}/kernel"),
        )
        shapes = [None if x is None else np.shape(x) for x in (a, b, kernel)]
        if not _fit(*shapes, rank=lora.rank):
            raise ValueError(
                f"{module}: a LoRA of rank {lora.rank} with a {shapes[0]} and b {shapes[1]} does not fit the kernel "
                f"{shapes[2]}; grow it with its model (jaxgrow.peft.lora.growth), and its rank (LoRA.resized)"
            )
        yield module, (a, b)


def _fit(a: Any, b: Any, kernel: Any, rank: int) -> bool:
    if a is None or b is None or kernel is None:
        return False
    stacked = len(a) + len(b) - 2 - len(kernel)
    whole = a[:-1] + b[stacked + 1 :]
    return (
        stacked >= 0
        and whole == kernel
        and a[:stacked] == b[:stacked]
        and a[-1] == rank == b[stacked]
    )


def _parts(term: Term, leaf: str, kernel: Kernel) -> Iterator[tuple[Term, Term]]:
    """What acts on ``a`` and on ``b`` for each product whose sum is the term."""
    a: dict[tuple[str, ...], AxisMap] = {}
    b: dict[tuple[str, ...], AxisMap] = {}
    over: list[list[tuple[Term, Term]]] = []
    first, last = len(kernel.stacked), len(kernel.stacked + kernel.read)
    for m, begin, end in parts(term, kernel.names):
        key = tuple(map(axis, kernel.names[begin:end]))
        if m is None:
            continue
        if end <= first and len(key) == 1:
            over.append([({key: of_a}, {key: of_b}) for of_a, of_b in _one_each(m)])
        elif first <= begin and end <= last:
            a[key] = m
        elif last <= begin:
            b[key] = m
        else:
            raise ValueError(
                f"{leaf}: one map acts on the axes {', '.join(key)} together, but a LoRA has them in two factors; merge it "
                "into the model first (jaxgrow.peft.lora.merge)"
            )
    for each in itertools.product(*over):
        yield {**a, **_union(x for x, _ in each)}, {**b, **_union(x for _, x in each)}


def _union(of: Iterator[Term]) -> Term:
    return {key: m for term in of for key, m in term.items()}


def _one_each(m: AxisMap) -> Iterator[tuple[AxisMap, AxisMap]]:
    """A map as a sum of maps by which every unit has one source: for ``a``, which is copied; for ``b``, which is weighed."""
    write, read = _rows(m.write), _rows(m.read)
    alike = np.array_equal(
        write.index, read.index
    )  # else nobody can say what share of a gradient each source has
    for j in range(write.index.shape[1]):
        index, weight = write.index[:, j : j + 1], write.weight[:, j : j + 1]
        copied, weighed = Rows(index, np.ones(weight.shape), m.old), Rows(index, weight, m.old)
        back = Rows(index, read.weight[:, j : j + 1], m.old) if alike else weighed
        yield AxisMap(copied, back), AxisMap(weighed, back)


def _rows(m: Matrix) -> Rows:
    return m if isinstance(m, Rows) else sparse(m)


def _place(i: int, count: int, rank: int) -> Term:
    """The map of ``rank`` by which the ``i``-th of ``count`` products has its place beside the others."""
    if count == 1:
        return {}
    place, unit = np.divmod(np.arange(count * rank, dtype=np.int32), rank)
    put = Rows(unit[:, None], (place == i).astype(float)[:, None], rank)
    return {(RANK,): AxisMap(put, put)}

"""LoRA: how is a frozen kernel adapted by a trained low-rank product (Hu et al., ICLR 2022)?

The adapted kernel is ``W + alpha / rank a b``, with a of shape ``[layers, input axes of W, rank]``
and b of shape ``[layers, rank, output axes of W]``; for experts, ``[layers, experts, ...]``. Both
have axis names, so everything that is based on axis names supports them, and a LoRA grows with its
model::

    adapter = init_lora(lora, axes, sizes, key)
    own = lora_growth(g, lora, axes)
    grown = grow(own, adapter, lora_axes(lora, axes))
    merge_lora(grow(g, params, axes), grown, lora.resized(own))
    == grow(g, merge_lora(params, adapter, lora), axes)

This equation holds for every growth, because grow is linear in W. The rank stays the same if each
layer of the grown model has one source layer and one term of the growth. This is true for
hypercloning, stacking, identity blocks, pruning, and coalescing in width. If a growth averages
layers, or has several terms for a layer, the result is a sum of k products. It is stored as one
product of k times the rank, with the parts concatenated along ``rank``.
"""

import itertools
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxgrow.axes.names import (
    READ,
    Axes,
    KernelAxes,
    Names,
    Params,
    Tree,
    axis_of,
    is_layers,
    reads_axis,
    split_kernel,
)
from jaxgrow.growth import maps
from jaxgrow.growth.apply import parts
from jaxgrow.growth.maps import AxisMap, Growth, Rule, Rules, Term
from jaxgrow.growth.matrices import Matrix, SparseMap, is_numpy, sparse
from jaxgrow.models.config import Array, Config
from jaxgrow.operators.targets import Sizes

RANK = "rank"
Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class LoRA:
    """The settings of a LoRA: its rank, its scale, and the kernels that it adapts.

    Attributes:
      rank: the rank of the product ``a b``.
      alpha: numerator of the scale; the product is multiplied by ``alpha / rank``.
      targets: glob patterns for the paths of the modules whose kernels are adapted; ``*`` also
        matches slashes. The default is the choice of the paper, queries and values.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("*/attention/query", "*/attention/value")

    def __post_init__(self):
        if self.rank < 1 or not self.alpha > 0 or not self.targets:
            raise ValueError(
                f"a LoRA requires a rank of at least 1, a positive alpha, and targets, not {self}"
            )

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def adapted(self, config: Config) -> Config:
        """Return the config of a model with this LoRA, which is stored with the kernels."""
        return config

    def sizes(self) -> dict[str, int]:
        """Return the sizes of the LoRA's own axes."""
        return {RANK: self.rank}

    def kernels(self, axes: Axes) -> tuple[Axes, Axes]:
        """Return the frozen and the trained kernels, as `adapter_train_flops` takes them."""
        return axes["blocks"], lora_axes(self, axes)

    def resized(self, growth: Growth) -> "LoRA":
        """Return the settings of the grown LoRA.

        The scale ``alpha / rank`` stays the same, also if the rank changes.

        Args:
          growth: the growth of the LoRA, as returned by the function `lora_growth`.
        """
        rank = maps.new_sizes(growth).get(RANK, self.rank)
        return replace(self, rank=rank, alpha=self.scale * rank)


def lora_kernels(lora: LoRA, axes: Axes) -> dict[str, Names]:
    """Find the kernels that a LoRA adapts.

    Args:
      lora: the settings.
      axes: the axis names of the model's parameters.

    Returns:
      The axis names of each adapted kernel, by the path of its module.

    Raises:
      ValueError: a target matches no module with a kernel.

    Example:
      >>> axes = {"query": {"kernel": ("layers", "embed.in", "heads", "head_dim")}, "norm": {"scale": ("embed.norm.scale",)}}
      >>> list(lora_kernels(LoRA(targets=("q*",)), axes))
      ['query']
    """
    leaves = {path.removesuffix("/kernel"): (path, n) for path, n in _flat(axes).items()}
    every = {
        module: n
        for module, (path, n) in leaves.items()
        if path != module and any(map(reads_axis, n))
    }
    adapted: set[str] = set()
    lost: list[str] = []
    for target in lora.targets:
        matches = [module for module in every if fnmatchcase(module, target)]
        adapted.update(matches)
        if not matches:
            lost.append(target)
    if lost:
        raise ValueError(
            f"the targets {lost} of the LoRA match no module with a kernel. The modules with a "
            f"kernel are {', '.join(every)}"
        )
    return {module: n for module, n in every.items() if module in adapted}


def lora_axes(lora: LoRA, axes: Axes) -> Axes:
    """Determine the axis names of a LoRA.

    ``a`` has the input axes of its kernel, and ``b`` has the output axes.

    Args:
      lora: the settings.
      axes: the axis names of the model's parameters.

    Returns:
      A tree with the structure that `init_lora` returns.

    Raises:
      ValueError: as `lora_kernels`.

    Example:
      >>> lora_axes(LoRA(targets=("up",)), {"up": {"kernel": ("layers", "embed.in", "mlp")}})["up"]["b"]
      ('layers', 'rank.in', 'mlp')
    """
    return _tree(
        {
            module: _factor_names(split_kernel(names))
            for module, names in lora_kernels(lora, axes).items()
        }
    )


def _factor_names(kernel: KernelAxes) -> dict[str, Names]:
    """The axis names of ``a`` (stacked and input axes) and ``b`` (stacked and output axes)."""
    return {
        "a": (*kernel.stacked, *kernel.read, RANK),
        "b": (*kernel.stacked, RANK + READ, *kernel.written),
    }


def init_lora(lora: LoRA, axes: Axes, sizes: Sizes, key: jax.Array) -> Params:
    """Initialise a LoRA in float32 such that it does not change the function of the model.

    ``b`` is zero. ``a`` is uniform in ``[-1 / sqrt(n), 1 / sqrt(n)]``, where n is the product of
    the sizes of the input axes. This is the distribution of the published code
    (``kaiming_uniform_`` with ``a = sqrt(5)``); the paper specifies a normal distribution without a
    standard deviation. The random numbers of a kernel depend on its path only, so other targets do
    not change them.

    Args:
      lora: the settings.
      axes: the axis names of the model's parameters.
      sizes: the size of every axis of the model.
      key: random key for ``a``.

    Returns:
      A tree ``{module: {"a": ..., "b": ...}}``, nested like the parameters of the model.

    Raises:
      ValueError: as `lora_kernels`.

    Example:
      >>> axes, sizes = {"up": {"kernel": ("layers", "embed.in", "mlp")}}, {"layers": 2, "embed": 4, "mlp": 3}
      >>> adapter = init_lora(LoRA(rank=1, targets=("up",)), axes, sizes, jax.random.key(0))
      >>> adapter["up"]["a"].shape, adapter["up"]["b"].shape
      ((2, 4, 1), (2, 1, 3))

    References:
      Hu et al.,
      `LoRA: Low-Rank Adaptation of Large Language Models <https://arxiv.org/abs/2106.09685>`_, ICLR
      2022
    """
    own = {**sizes, RANK: lora.rank}

    def sampled(module: str, kernel: KernelAxes) -> dict[str, jax.Array]:
        names = _factor_names(kernel)
        a = [own[axis_of(n)] for n in names["a"]]
        b = [own[axis_of(n)] for n in names["b"]]
        bound = math.prod(own[axis_of(n)] for n in kernel.read) ** -0.5
        mine = jax.random.fold_in(key, zlib.crc32(module.encode()))
        return {
            "a": jax.random.uniform(mine, a, jnp.float32, -bound, bound),
            "b": jnp.zeros(b, jnp.float32),
        }

    return _tree(
        {
            module: sampled(module, split_kernel(names))
            for module, names in lora_kernels(lora, axes).items()
        }
    )


def lora_growth(of: Growth, lora: LoRA, axes: Axes) -> Rules:
    """Derive the growth of a LoRA from the growth of its model.

    `jaxgrow.grow` and `jaxgrow.grow_optimizer` accept the result. A term of the model's growth is
    ``W'_l = sum_j d_lj R W_j S.T``, where R and S are products of the maps of the input and output
    axes of W. For every j, the grown LoRA has a part ``a'_l = R a_j, b'_l = d_lj b_j S.T`` at its
    own position along ``rank``. This is exact for every growth. For a layer with d = 0
    (`jaxgrow.operators.llama_pro`), ``a`` is a copy and ``b`` is zero, as at initialisation.
    `LoRA.resized` returns the settings with the new rank.

    The axis ``rank`` itself can be grown by any map. For example, ``{"rank": tile(8, 2)}``
    preserves the product, and ``LoRA.resized`` preserves its scale. However, copies along ``rank``
    receive equal gradients and remain copies.

    Args:
      of: the growth of the model.
      lora: the settings of the LoRA before the growth.
      axes: the axis names of the small model's parameters.

    Returns:
      Rules with one rule for every parameter of the LoRA.

    Raises:
      ValueError: one map acts on several axes together, of which ``a`` has some and ``b`` has
        others; or as `lora_kernels`.

    Example:
      >>> axes = {"up": {"kernel": ("layers", "embed.in", "mlp")}}
      >>> own = lora_growth({"layers": maps.tile(2, 2), "mlp": maps.tile(3, 2)}, LoRA(targets=("up",)), axes)
      >>> maps.new_sizes(own)
      {'layers': 4, 'mlp': 6}
    """
    found: dict[str, list[list[tuple[Term, Term]]]] = {}
    for module, names in lora_kernels(lora, axes).items():
        leaf = f"{module}/kernel"
        kernel = split_kernel(names)
        terms = maps.terms(of, leaf, names) or ({},)
        found[module] = _positions([x for term in terms for x in _factor_maps(term, leaf, kernel)])
    count = max(map(len, found.values()))
    rules = []
    for module, positions in found.items():
        for which, leaf in enumerate(("a", "b")):
            at = [
                {**part[which], **_rank_map(i, count, lora.rank)}
                for i, position in enumerate(positions)
                for part in position
            ]
            rules.append(Rule(tuple(at), path=f"{module}/{leaf}"))
    return Rules(tuple(rules))


def merge_lora(params: Params, adapter: Params, lora: LoRA) -> Params:
    """Merge a LoRA into the kernels: ``W + alpha / rank a b``.

    The result computes the same function with plain parameters.

    Args:
      params: the parameters of the model. The result has NumPy arrays if these and the LoRA have.
      adapter: the parameters of the LoRA, with the structure of `init_lora`.
      lora: the settings of the LoRA.

    Returns:
      A tree with the structure and dtypes of ``params``.

    Raises:
      ValueError: the shapes of the LoRA do not fit the kernels of the model.

    Example:
      >>> adapter = {"up": {"a": np.ones((2, 1)), "b": np.ones((1, 3))}}
      >>> merge_lora({"up": {"kernel": np.zeros((2, 3))}}, adapter, LoRA(rank=1, alpha=2.0))["up"]["kernel"].tolist()
      [[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]
    """
    out = _flat(params)
    for module, (a, b) in _pairs(adapter, lora, out):
        kernel = out[f"{module}/kernel"]
        stacked = kernel.shape[: a.ndim + b.ndim - 2 - kernel.ndim]
        product = a.reshape(*stacked, -1, lora.rank) @ b.reshape(*stacked, lora.rank, -1)
        change = lora.scale * product.reshape(kernel.shape)
        out[f"{module}/kernel"] = kernel + change.astype(kernel.dtype)
    return unflatten_dict(out, sep="/")


def attach_lora(params: Params, adapter: Params, lora: LoRA) -> Params:
    """Store a LoRA with the kernels, so that the module computes ``x W + alpha / rank (x a) b``.

    The module computes the same function as after `merge_lora`, up to rounding. The kernels do not
    change, and they have no gradient if ``params`` have none. Use this form for training.

    Args:
      params: the parameters of the model.
      adapter: the parameters of the LoRA, with the structure of `init_lora`.
      lora: the settings of the LoRA.

    Returns:
      The parameters, with two additional leaves in each adapted module.

    Raises:
      ValueError: the shapes of the LoRA do not fit the kernels of the model.

    Example:
      >>> adapter = {"up": {"a": np.ones((2, 1)), "b": np.ones((1, 3))}}
      >>> sorted(attach_lora({"up": {"kernel": np.zeros((2, 3))}}, adapter, LoRA(rank=1))["up"])
      ['a', 'b', 'kernel']
    """
    out = _flat(params)
    added: dict[str, Array] = {}
    for module, (a, b) in _pairs(adapter, lora, out):
        added |= {f"{module}/a": a, f"{module}/b": lora.scale * b}
    return unflatten_dict(out | added, sep="/")


def _flat(tree: Tree) -> dict[str, Tree]:
    return flatten_dict(tree, sep="/")  # type: ignore[return-value]


def _tree(modules: Mapping[str, Mapping[str, object]]) -> Params:
    leaves = {f"{m}/{leaf}": x for m, factors in modules.items() for leaf, x in factors.items()}
    return unflatten_dict(leaves, sep="/")


def _pairs(
    adapter: Params, lora: LoRA, params: dict[str, Array]
) -> Iterator[tuple[str, tuple[Array, Array]]]:
    """Iterate over ``(module, (a, b))`` of a LoRA, and check that the shapes fit the kernels."""
    leaves = _flat(adapter)
    for module in dict.fromkeys(path.rpartition("/")[0] for path in leaves):
        a = leaves.get(f"{module}/a")
        b = leaves.get(f"{module}/b")
        kernel = params.get(f"{module}/kernel")
        shapes = [None if x is None else np.shape(x) for x in (a, b, kernel)]
        if (
            a is None
            or b is None
            or kernel is None
            or not _fit(*map(np.shape, (a, b, kernel)), rank=lora.rank)
        ):
            raise ValueError(
                f"{module}: a LoRA of rank {lora.rank} with a of shape {shapes[0]} and b of shape "
                f"{shapes[1]} does not fit the kernel of shape {shapes[2]}. Grow the LoRA with its "
                "model (jaxgrow.extras.peft.lora.lora_growth) and use the settings of LoRA.resized"
            )
        yield module, (a, b)


def _fit(a: Shape, b: Shape, kernel: Shape, rank: int) -> bool:
    stacked = len(a) + len(b) - 2 - len(kernel)
    shape = a[:-1] + b[stacked + 1 :]
    return (
        stacked >= 0
        and shape == kernel
        and a[:stacked] == b[:stacked]
        and a[-1] == rank == b[stacked]
    )


def _positions(products: list[tuple[Term, Term]]) -> list[list[tuple[Term, Term]]]:
    """The products of a kernel's growth that share a position along ``rank``, for each position.

    If each new layer has at most one product, as when layers keep different units, one position is
    enough. In every layer, ``a`` is then that of its product, or of the first one.
    """
    keys = [key for key in products[0][1] if is_layers(key[0])]
    own = [b[key].write for key in keys for _, b in products if key in b]
    own = [m for m in own if isinstance(m, SparseMap) and is_numpy(m.weight)]
    if len(own) < len(products) or (np.sum([m.weight != 0 for m in own], 0) > 1).any():
        return [[product] for product in products]
    live = np.concatenate([m.weight for m in own], 1) != 0
    live[:, 0] |= ~live.any(1)
    copied = [
        SparseMap(m.index, x[:, None].astype(float), m.old)
        for m, x in zip(own, live.T, strict=True)
    ]
    return [
        [
            ({**a, keys[0]: AxisMap(m, a[keys[0]].read)}, b)
            for (a, b), m in zip(products, copied, strict=True)
        ]
    ]


def _factor_maps(term: Term, leaf: str, kernel: KernelAxes) -> Iterator[tuple[Term, Term]]:
    """The maps of ``a`` and of ``b`` for each product in the sum that the term stands for."""
    a: dict[tuple[str, ...], AxisMap] = {}
    b: dict[tuple[str, ...], AxisMap] = {}
    over: list[list[tuple[Term, Term]]] = []
    first = len(kernel.stacked)
    last = len(kernel.stacked + kernel.read)
    for m, begin, end in parts(term, kernel.names):
        key = tuple(map(axis_of, kernel.names[begin:end]))
        if m is None:
            continue
        if end <= first and len(key) == 1:
            over.append([({key: of_a}, {key: of_b}) for of_a, of_b in _one_source_each(m)])
        elif first <= begin and end <= last:
            a[key] = m
        elif last <= begin:
            b[key] = m
        else:
            raise ValueError(
                f"{leaf}: one map acts on the axes {', '.join(key)} together, but they are in "
                "different factors of "
                "a LoRA. Merge the LoRA into the model first (jaxgrow.extras.peft.lora.merge_lora)"
            )
    for each in itertools.product(*over):
        yield {**a, **_union(x for x, _ in each)}, {**b, **_union(x for _, x in each)}


def _union(of: Iterator[Term]) -> Term:
    return {key: m for term in of for key, m in term.items()}


def _one_source_each(m: AxisMap) -> Iterator[tuple[AxisMap, AxisMap]]:
    """Split a map into a sum of maps in which each new unit has one source.

    In each pair, the first map copies units of ``a``, and the second map multiplies units of ``b``
    by the weights of the term.
    """
    write = _as_sparse(m.write)
    read = _as_sparse(m.read)
    # If the write map and the read map have different sources, the gradient cannot be divided among
    # the parts.
    same_sources = np.array_equal(write.index, read.index)
    for j in range(write.index.shape[1]):
        index = write.index[:, j : j + 1]
        weight = write.weight[:, j : j + 1]
        copied = SparseMap(index, np.ones(weight.shape), m.old)
        weighed = SparseMap(index, weight, m.old)
        back = SparseMap(index, read.weight[:, j : j + 1], m.old) if same_sources else weighed
        yield AxisMap(copied, back), AxisMap(weighed, back)


def _as_sparse(m: Matrix) -> SparseMap:
    return m if isinstance(m, SparseMap) else sparse(m)


def _rank_map(i: int, count: int, rank: int) -> Term:
    """The map of ``rank`` that puts the ``i``-th of ``count`` products at its own position."""
    if count == 1:
        return {}
    place, unit = np.divmod(np.arange(count * rank, dtype=np.int32), rank)
    put = SparseMap(unit[:, None], (place == i).astype(float)[:, None], rank)
    return {(RANK,): AxisMap(put, put)}

"""Axis names: given where a parameter is born, read off a model, checked against a tree.

A leaf names each of its axes, and says whether it *writes* or *reads* it. A kernel reads an axis when it contracts it
away (suffix ``.in``); everything else writes: outputs of kernels, biases, norm scales, embedding tables. A query kernel
is ``("layers", "embed.in", "heads", "head_dim")``. An axes tree has the structure of the parameters, with such tuples
as leaves.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from flax import linen as nn

Names = tuple[str, ...]
Tree = Any  # a pytree of arrays, or of Names

LAYERS = "layers"  # the axis of stacked blocks: applied one after the other, so it composes instead of adding
READ = ".in"


def named(init: Callable, *names: str) -> Callable:
    """An initialiser whose parameter carries axis names: ``self.param("w", named(init, "embed.in", "mlp"), shape)``."""
    return nn.with_logical_partitioning(init, names)


def reads(name: str) -> bool:
    return name.endswith(READ)


def axis(name: str) -> str:
    """The axis that a leaf's name speaks of: ``"embed.in"`` and ``"embed"`` are both the axis ``"embed"``."""
    return name.removesuffix(READ)


def is_names(x: Any) -> bool:
    return isinstance(x, tuple)


def split(boxed: Tree) -> tuple[Tree, Tree]:
    """``(params, axes)`` from what a Flax module's ``init`` returns: plain arrays, and the names they were born with."""
    axes = jax.tree.map(
        tuple, nn.get_partition_spec(boxed), is_leaf=lambda s: isinstance(s, jax.sharding.PartitionSpec)
    )
    return nn.meta.unbox(boxed), axes


def leaves(params: Tree, axes: Tree) -> Iterator[tuple[str, Any, Names]]:
    """``(path, leaf, names)`` of every leaf.

    Raises:
      ValueError: the two trees differ in structure, or a leaf does not name each of its axes; every such leaf is listed.
    """
    arrays = {path(p): x for p, x in jax.tree_util.tree_leaves_with_path(params)}
    names = {path(p): n for p, n in jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_names)}
    wrong = [f"{p}: has no axis names" for p in arrays if p not in names]
    wrong += [f"{p}: is named, but the parameters have no such leaf" for p in names if p not in arrays]
    wrong += [
        f"{p}: has shape {np.shape(x)}, but {len(names[p])} axis names {names[p]}"
        for p, x in arrays.items()
        if p in names and np.ndim(x) != len(names[p])
    ]
    if wrong:
        raise ValueError("the axes tree does not fit the parameters:\n  " + "\n  ".join(wrong))
    for name, x in arrays.items():
        yield name, x, names[name]


def sizes(params: Tree, axes: Tree) -> dict[str, int]:
    """The size of every axis, ``{"embed": 768, ...}``.

    Raises:
      ValueError: one axis has two sizes; both leaves are named.
    """
    seen: dict[str, tuple[int, str]] = {}
    wrong = []
    for leaf, x, names in leaves(params, axes):
        for name, size in zip(names, np.shape(x), strict=True):
            before = seen.setdefault(axis(name), (size, leaf))
            if before[0] != size:
                wrong.append(f"axis {axis(name)!r} has size {before[0]} in {before[1]}, but {size} in {leaf}")
    if wrong:
        raise ValueError("one axis has one size; give these axes different names:\n  " + "\n  ".join(wrong))
    return {name: size for name, (size, _) in seen.items()}


def path(key_path: tuple) -> str:
    """``"blocks/mlp/up/kernel"``: a leaf's name in errors, and what an optimizer state is matched by."""
    return jax.tree_util.keystr(key_path, simple=True, separator="/")

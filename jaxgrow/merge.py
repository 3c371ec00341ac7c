"""Two models of one shape made one: interpolation, and the multigrid correction."""

import jax
import jax.numpy as jnp

from jaxgrow._grow import grow
from jaxgrow.axes import Tree, path
from jaxgrow.maps import Growth, swap


def interpolate(before: Tree, up: Tree, alpha: float) -> Tree:
    """``(1 - alpha) * before + alpha * up``, leaf by leaf (Zou et al., 2024, section 3.3).

    ``before`` is the large model as it was before coalescing, ``up`` the de-coalesced small one; ``alpha`` weighs ``up``.
    ``alpha = 0`` returns ``before`` and ``alpha = 1`` returns ``up``, to the bit. Note what it does beside moving the
    coarse part: it shrinks the fine part of ``before`` by ``1 - alpha``. `correct` does not.

    Raises:
      ValueError: trees of different structure or shapes.
    """
    _same_shapes(before, up)
    return jax.tree.map(lambda m, u: _mix(m, u, 1 - alpha, alpha), before, up)


def correct(before: Tree, small: Tree, growth: Growth, axes: Tree, alpha: float = 1.0) -> Tree:
    """The multigrid correction ``before + alpha * D(small - C(before))``, with ``D = grow(growth, .)``, ``C`` its `swap`.

    At ``alpha = 1`` the coarse part becomes ``small`` and the fine part of ``before`` stays: ``C(result) == small``. If
    the small model learned nothing (``small == C(before)``), the result is ``before``. Our alternative to the paper's
    interpolation, which has neither property.
    """
    coarse = grow(swap(growth), before, axes)
    _same_shapes(coarse, small)
    learned = jax.tree.map(lambda s, c: _mix(s, c, 1, -1), small, coarse)
    return jax.tree.map(lambda m, d: _mix(m, d, 1, alpha), before, grow(growth, learned, axes))


def _mix(x, y, a, b):
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return (a * x.astype(wide) + b * y.astype(wide)).astype(x.dtype)


def _same_shapes(a: Tree, b: Tree) -> None:
    def shapes(tree):
        return {path(p): x.shape for p, x in jax.tree_util.tree_leaves_with_path(tree)}

    left, right = shapes(a), shapes(b)
    wrong = [
        f"{p}: {left.get(p, 'absent')} and {right.get(p, 'absent')}"
        for p in {**left, **right}
        if left.get(p) != right.get(p)
    ]
    if wrong:
        raise ValueError("the two models differ in shape; de-coalesce the smaller one first:\n  " + "\n  ".join(wrong))

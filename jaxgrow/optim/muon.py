"""Muon: the momentum of every matrix of the layers, made orthogonal (Jordan, 2024; Liu et al., 2025); Adam for all else.

Which axes of a leaf are a matrix's rows and columns follows from their names, so that one rule
serves every family: query kernels ``[layers, embed, heads, head_dim]`` are ``layers`` matrices of
``embed`` rows. Its momentum grows with the model like any first moment (`jaxgrow.grow_optimizer`),
and is made orthogonal anew in the next update.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from jaxgrow.axes.names import Axes, Tree, axis, cut, is_names, path, role
from jaxgrow.growth.moments import rebias
from jaxgrow.optim.completep import Multiplier, scale_by_adam
from jaxgrow.sharding import apart

ITERATIONS = 5  # of Newton and Schulz


def dimension_numbers(axes: Axes) -> dict[str, MuonDimensionNumbers]:
    """The matrices of the layers: which of its axes each reads and writes, by the paths of leaves.

    A kernel that is stacked over blocks is one; embeddings, heads and what makes patches are none,
    and Adam's.

    Args:
      axes: the axis names of the parameters.

    Returns:
      Path of a leaf -> what `optax.contrib.muon` asks for.

    Example:
      >>> axes = {"out": ("layers", "heads.in", "head_dim.in", "embed"), "norm": ("layers", "embed.norm.scale")}
      >>> dimension_numbers(axes)
      {'out': MuonDimensionNumbers(reduction_axis=(1, 2), output_axis=(3,))}
    """
    found = {}
    for key_path, names in jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_names):
        leaf = path(key_path)
        if (
            role(leaf, names) != "kernel"
            or not (kernel := cut(names)).stacked
            or not kernel.written
        ):
            continue
        first, last = len(kernel.stacked), len(kernel.stacked) + len(kernel.read)
        found[leaf] = MuonDimensionNumbers(
            tuple(range(first, last)), tuple(range(last, len(names)))
        )
    return found


def scale_by_muon_and_adam(
    matrices: Mapping[str, MuonDimensionNumbers],
    momentum: float = 0.95,
    rms: float = 0.2,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
) -> optax.GradientTransformationExtraArgs:
    """Updates without a rate: ``rms sqrt(max(n, m)) U V.T`` of a matrix [n, m] whose momentum is ``U S V.T``; else Adam's.

    Five iterations of Newton and Schulz come near ``U V.T``, with Nesterov's momentum. A full
    matrix then moves by ``rms`` at each entry, in root mean square, which is about what Adam does:
    one rate and one decay serve both.

    Differs from `optax.contrib.muon` in the leaves that Adam updates: there they have Nesterov's
    momentum, too, because ``nesterov`` is passed on to Adam. Here they have that of Adam without
    it. The updates of matrices are the same.

    Args:
      matrices: as of `dimension_numbers`; leaves of other paths are Adam's.
      momentum: the decay of a matrix's momentum.
      rms: root mean square of a matrix's update.
      b1: Adam's.
      b2: Adam's.
      eps: Adam's, and of the norm that a momentum is divided by at first.

    Returns:
      The transformation. Adam's part has a clock (`jaxgrow.growth.moments.rebias`).
      ``update(.., multipliers=..)`` as of `jaxgrow.optim.completep.scale_by_adam`.

    Example:
      >>> import jax.numpy as jnp
      >>> tx = scale_by_muon_and_adam(dimension_numbers({"up": ("layers", "embed.in", "mlp")}))
      >>> params = {"up": jnp.ones((2, 4, 8))}
      >>> updates, state = tx.update({"up": jax.random.normal(jax.random.key(0), (2, 4, 8))}, tx.init(params))
      >>> bool(0.1 < jnp.sqrt(jnp.square(updates["up"]).mean()) < 0.2)  # of rank 4, at most
      True

    References:
      Jordan et al.,
      `Muon: An optimizer for hidden layers <https://kellerjordan.github.io/posts/muon/>`_, 2024

      Liu et al., `Muon is Scalable for LLM Training <https://arxiv.org/abs/2502.16982>`_, 2025
    """

    def numbers(tree: Tree) -> Tree:
        return jax.tree_util.tree_map_with_path(lambda p, _: matrices[path(p)], tree)

    def labels(tree: Tree) -> Tree:
        return jax.tree_util.tree_map_with_path(
            lambda p, _: "muon" if path(p) in matrices else "adam", tree
        )

    def as_large_as_adams(
        updates: Tree,
        state: Any,
        params: Tree | None = None,
        *,
        multipliers: Mapping[str, Multiplier] | None = None,
        **_,
    ):
        def one(p, u):
            at = matrices[path(p)]
            sides = [
                math.prod(np.take(u.shape, side)) for side in (at.reduction_axis, at.output_axis)
            ]
            return u * (
                rms * max(sides) ** 0.5 * (1 if multipliers is None else multipliers[path(p)].muon)
            )

        return jax.tree_util.tree_map_with_path(one, updates), state

    muon = optax.chain(
        _matrices_apart(
            scale_by_muon(
                ns_steps=ITERATIONS, beta=momentum, eps=eps, weight_dimension_numbers=numbers
            )
        ),
        optax.GradientTransformationExtraArgs(optax.init_empty_state, as_large_as_adams),
    )
    adam = optax.chain(scale_by_adam(b1, b2, eps), rebias(b1, b2))
    return optax.partition({"muon": muon, "adam": adam}, labels)


def _matrices_apart(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """``inner``, on a mesh: every matrix is whole where it is made orthogonal, and each device has its share of them.

    XLA would have all of a stack on every device, once for each product.
    """

    def update(updates: Tree, state: Any, params: Tree | None = None) -> tuple[Tree, Any]:
        updates, momentum = jax.tree.map(apart, (updates, state.mu))
        updates, state = inner.update(updates, state._replace(mu=momentum), params)
        updates, momentum = jax.tree.map(
            apart, (updates, state.mu)
        )  # or XLA divides what lies between as it is kept
        return updates, state._replace(mu=momentum)

    return optax.GradientTransformation(inner.init, update)


def flops(axes: Axes, sizes: Mapping[str, int]) -> float:
    """Floating-point operations that an update's matrix products take, whatever the batch.

    Of a matrix of sides ``n <= m``, each of five iterations computes ``A = X X.T``, ``A A`` and
    ``(b A + c A A) X``: ``4 n^2 m + 2 n^3``.

    Args:
      axes: the axis names of the parameters.
      sizes: the size of every axis.

    Returns:
      Floating-point operations.

    Example:
      >>> flops({"up": ("layers", "embed.in", "mlp")}, {"layers": 2, "embed": 3, "mlp": 5})
      2340.0
    """
    by_path = {path(p): n for p, n in jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_names)}
    total = 0.0
    for leaf in dimension_numbers(axes):
        kernel = cut(by_path[leaf])
        count, read, written = (math.prod(sizes[axis(n)] for n in names) for names in kernel)
        n, m = sorted((read, written))
        total += ITERATIONS * count * (4 * n * n * m + 2 * n**3)
    return total


__all__ = ["ITERATIONS", "dimension_numbers", "flops", "scale_by_muon_and_adam"]

"""Muon (Jordan, 2024; Liu et al., 2025): how are the matrices of the layers updated?

Muon orthogonalises the momentum of every matrix of the layers; Adam updates all other parameters.
The axis names determine which axes of a parameter are the rows and the columns of a matrix, so one
rule covers all model families: query kernels ``[layers, embed, heads, head_dim]`` are ``layers``
matrices with ``embed`` rows. The momentum grows with the model like any first moment
(`jaxgrow.grow_optimizer`), and the next update orthogonalises it again.
"""

import math
from collections.abc import Mapping

import jax
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from jaxgrow.axes.names import Axes, Names, Tree, axis_of, layer_kernels, path
from jaxgrow.growth.moments import rebias
from jaxgrow.optim.scaling import Multiplier, scale_by_adam
from jaxgrow.sharding import spread_entries

#: The number of Newton-Schulz iterations per update.
ITERATIONS = 5


def dimension_numbers(axes: Axes) -> dict[str, MuonDimensionNumbers]:
    """Find the matrices of the layers and their input and output axes.

    Every kernel that is stacked over layers is a stack of matrices, ``[inputs, outputs]`` or
    ``[outputs, inputs]``. Embeddings, heads and patch embeddings are not included; Adam updates
    them.

    Args:
      axes: the axis names of the parameters.

    Returns:
      The argument ``weight_dimension_numbers`` of `optax.contrib.muon`, by path of the parameter.

    Example:
      >>> axes = {"out": ("layers", "heads.in", "head_dim.in", "embed"), "norm": ("layers", "embed.norm.scale")}
      >>> dimension_numbers(axes)
      {'out': MuonDimensionNumbers(reduction_axis=(1, 2), output_axis=(3,))}
    """
    return {
        leaf: MuonDimensionNumbers(kernel.read_dims, kernel.written_dims)
        for leaf, kernel in layer_kernels(axes).items()
    }


def scale_by_muon_and_adam(
    matrices: Mapping[str, MuonDimensionNumbers],
    momentum: float = 0.95,
    rms: float = 0.2,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
) -> optax.GradientTransformationExtraArgs:
    """Scale updates by Muon for the given matrices and by Adam for all other parameters.

    The result does not include the learning rate. For a matrix of shape [n, m] whose momentum has
    the singular value decomposition ``U S V.T``, the update is ``rms sqrt(max(n, m)) U V.T``.

    Five Newton-Schulz iterations approximate ``U V.T``, with Nesterov momentum. As in Optax, the
    momentum is corrected for its bias towards zero, and the published code does not correct it.
    This changes the direction of the first updates: their cosine to the published update is 0.97 to
    0.996 in steps 2 and 3, and 1.000 from step 20. The update of a
    matrix with full rank has the root mean square ``rms``, which is close to that of an Adam
    update. One learning rate and one weight decay therefore serve both.

    For the parameters that Adam updates, this differs from `optax.contrib.muon`, which passes
    ``nesterov`` on to Adam, so that Adam uses Nesterov momentum as well. Here, Adam does not use
    it. The updates of matrices are the same.

    Args:
      matrices: the result of `dimension_numbers`; Adam updates the parameters of all other paths.
      momentum: decay rate of the momentum of matrices, from 0 to 1.
      rms: root mean square of the update of a full-rank matrix, before the learning rate.
      b1: decay rate of the first moment of Adam.
      b2: decay rate of the second moment of Adam.
      eps: epsilon of Adam; also added to the norm by which Muon divides a momentum before the
        iterations.

    Returns:
      The transformation. Its Adam part has a step count per entry
      (`jaxgrow.growth.moments.rebias`). It takes ``update(..., multipliers=...)`` as
      `jaxgrow.optim.scaling.scale_by_adam` does.

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

    plain = scale_by_muon(
        ns_steps=ITERATIONS, beta=momentum, eps=eps, weight_dimension_numbers=numbers
    )
    muon = optax.chain(_matrices_apart(plain), _as_large_as_adams(matrices, rms))
    adam = optax.chain(scale_by_adam(b1, b2, eps), rebias(b1, b2))
    return optax.partition({"muon": muon, "adam": adam}, labels)


def _as_large_as_adams(
    matrices: Mapping[str, MuonDimensionNumbers], rms: float
) -> optax.GradientTransformationExtraArgs:
    """Scale orthogonal updates so that those of full rank have the root mean square ``rms``."""

    def update(
        updates: Tree,
        state: Tree,
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
            factor = 1 if multipliers is None else multipliers[path(p)].muon
            return u * (rms * max(sides) ** 0.5 * factor)

        return jax.tree_util.tree_map_with_path(one, updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def _matrices_apart(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Run ``inner`` with the matrices of a stack distributed over the devices of the mesh.

    Each matrix is complete on one device, which orthogonalises it. Otherwise XLA would gather the
    full stack on every device for each matrix product.
    """

    def update(updates: Tree, state: Tree, params: Tree | None = None) -> tuple[Tree, Tree]:
        updates, momentum = jax.tree.map(spread_entries, (updates, state.mu))
        updates, state = inner.update(updates, state._replace(mu=momentum), params)
        # Constrain the results as well. Otherwise, XLA shards the intermediate values like the
        # stored momentum.
        updates, momentum = jax.tree.map(spread_entries, (updates, state.mu))
        return updates, state._replace(mu=momentum)

    return optax.GradientTransformation(inner.init, update)


def muon_flops(axes: Axes, sizes: Mapping[str, int]) -> float:
    """Count the floating-point operations of the matrix products in one Muon update.

    The count does not depend on the batch size. For a matrix with sides ``n <= m``, each of the
    five iterations computes ``A = X X.T``, ``A A`` and ``(b A + c A A) X``: ``4 n^2 m + 2 n^3``
    operations.

    Args:
      axes: the axis names of the parameters.
      sizes: the size of every axis.

    Returns:
      The number of floating-point operations per update.

    Example:
      >>> muon_flops({"up": ("layers", "embed.in", "mlp")}, {"layers": 2, "embed": 3, "mlp": 5})
      2340.0
    """

    def size(names: Names) -> int:
        return math.prod(sizes[axis_of(n)] for n in names)

    total = 0.0
    for kernel in layer_kernels(axes).values():
        count, read, written = map(size, (kernel.stacked, kernel.read, kernel.written))
        n, m = sorted((read, written))
        total += ITERATIONS * count * (4 * n * n * m + 2 * n**3)
    return total


__all__ = ["ITERATIONS", "dimension_numbers", "muon_flops", "scale_by_muon_and_adam"]

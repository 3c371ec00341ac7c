"""Optimizers with a learning rate and an eps for each parameter: how does a model train like its base?

The factors of the parameters follow from the sizes of a base model (`jaxgrow.extras.completep`).
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxgrow.axes.names import Tree, path
from jaxgrow.registry import Registry


class Multiplier(NamedTuple):
    """The factors that CompleteP applies to one parameter, relative to the base model.

    Attributes:
      scale: factor of the initial values.
      rate: factor of the learning rate under Adam.
      eps: factor of the epsilon of Adam.
      muon: factor of the learning rate under Muon; it replaces ``rate`` for parameters that Muon
        updates.
    """

    scale: float
    rate: float
    eps: float
    muon: float


# Functions of the axis names and sizes of a model, and of the sizes of its base model, that return
# the `Multiplier` of each parameter, by path.
MULTIPLIERS: Registry[Callable[..., dict[str, Multiplier]]] = Registry("multipliers")


def scale_by_adam(b1: float, b2: float, eps: float) -> optax.GradientTransformationExtraArgs:
    """Scale updates as `optax.scale_by_adam`, with a learning rate factor and an eps per parameter.

    The factors are passed to each update: ``update(..., multipliers=...)``.

    Args:
      b1: decay rate of the first moment.
      b2: decay rate of the second moment.
      eps: epsilon that is added to the root of the second moment, for the base model.

    Returns:
      The transformation. Its state is the state of `optax.scale_by_adam`. Without multipliers, its
      updates are also the same.

    Example:
      >>> tx, params = scale_by_adam(0.9, 0.95, 1e-8), {"w": jnp.ones(1)}
      >>> updates, _ = tx.update(params, tx.init(params), multipliers={"w": Multiplier(1, 0.5, 1, 1)})
      >>> round(float(updates["w"][0]), 3)
      0.5
    """
    plain = optax.scale_by_adam(b1, b2, eps)

    def update(
        updates: Tree,
        state: Tree,
        params: Tree | None = None,
        *,
        multipliers: Mapping[str, Multiplier] | None = None,
        **_,
    ):
        updates, state = plain.update(updates, state, params)
        if multipliers is None:
            return updates, state

        def one(p, mu, nu):
            m = multipliers[path(p)]
            return m.rate * (mu / (jnp.sqrt(nu) + eps * m.eps))

        mu = optax.tree.bias_correction(state.mu, b1, state.count)
        nu = optax.tree.bias_correction(state.nu, b2, state.count)
        return jax.tree_util.tree_map_with_path(one, mu, nu), state

    return optax.GradientTransformationExtraArgs(plain.init, update)


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """Clip gradients by a weighted global norm that is comparable between model sizes.

    The norm is ``sqrt(sum_i rate_i / eps_i |G_i|^2)``, with the multipliers of each parameter i. In
    larger models, gradients are smaller by the factor ``eps``, and parameters have more entries.
    With the weights ``rate_i / eps_i``, neither a growth by copies nor the position of a forward
    multiplier changes the norm. The threshold of the base model therefore applies to all sizes.

    Deviation(CompleteP): the paper clips by the unweighted norm, in the form with forward
    multipliers. For the sizes of the base model, both norms are equal.

    Args:
      max_norm: the maximum norm of the gradients, in the units of the base model.

    Returns:
      The transformation. It takes ``update(..., multipliers=...)`` as `scale_by_adam` does. Without
      multipliers, it is `optax.clip_by_global_norm`.

    Example:
      >>> tx, grads = clip_by_global_norm(1.0), {"w": jnp.ones(4)}
      >>> tx.update(grads, tx.init(grads), multipliers={"w": Multiplier(1, 0.5, 2, 1)})[0]["w"].tolist()
      [1.0, 1.0, 1.0, 1.0]
    """
    plain = optax.clip_by_global_norm(max_norm)

    def update(
        updates: Tree,
        state: Tree,
        params: Tree | None = None,
        *,
        multipliers: Mapping[str, Multiplier] | None = None,
        **_,
    ):
        if multipliers is None:
            return plain.update(updates, state, params)
        weights = {leaf: math.sqrt(m.rate / m.eps) for leaf, m in multipliers.items()}
        weighed: Tree = jax.tree_util.tree_map_with_path(lambda p, g: g * weights[path(p)], updates)
        clipped, state = plain.update(weighed, state, params)
        return jax.tree_util.tree_map_with_path(lambda p, g: g / weights[path(p)], clipped), state

    return optax.GradientTransformationExtraArgs(plain.init, update)

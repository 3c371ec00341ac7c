"""CompleteP (Dey et al., 2025): a rate that was tuned at one width and depth is right at others.

Every leaf has a scale at birth, a rate and an eps of its own, which follow from its axis names and
from how often larger than those of the *base*, where the rate was tuned, the sizes are. Nothing of
the forward pass changes: checkpoints stay what they are, and a growth is exact where it was.

**What is folded.** CompleteP multiplies in the forward pass, too: what a sublayer adds by
``1 / m_L``, logits by ``1 / m_N``. Let a leaf W with the multiplier c have the gradient G. The
model computes with ``W' = c W``, whose gradient is ``G' = G / c``, and

.. math::

    W \\leftarrow W - \\eta \\left( \\frac{\\hat m}{\\sqrt{\\hat v} + \\epsilon} + \\lambda W \\right)
    \\quad\\Leftrightarrow\\quad
    W' \\leftarrow W' - c \\eta \\frac{\\hat m'}{\\sqrt{\\hat v'} + \\epsilon / c} - \\eta \\lambda W'

So a leaf without a multiplier, born c times as large, with c times the rate, 1 / c times the eps,
and the same decay a step, makes the same trajectory.

**What it says of each leaf.** With ``r`` how often larger an axis is than the base's, ``m_L`` for
the layers:

====================================== ============================== ======================== ===========================
leaf                                   scale at birth                 rate                     eps
====================================== ============================== ======================== ===========================
kernel of a layer                      1 / sqrt(r read)               1 / r read               1 / (r written * m_L)
.. that writes the residual stream     1 / (sqrt(r read) * m_L)       1 / (r read * m_L)       1 / r written
bias, norm of a layer                  1                              1                        1 / (r written * m_L)
.. bias that is added to the stream    1 / m_L                        1 / m_L                  1 / r written
table                                  1                              1                        1 / r written
head, or the norm before a tied one    1 / r read                     1 / r read               1
====================================== ============================== ======================== ===========================

With one r for all widths, these are the paper's rules at alpha = 1, folded. Decay, which is
``lambda m_N`` beside a rate of ``eta / m_N`` there, is ``eta lambda`` a step of every leaf that
decays. Where norms follow the sublayers it is their scale and bias that write the stream. Scores,
which models divide by ``sqrt(head_dim)``, are divided by ``head_dim`` past the base's: the key,
which is declared as a reader of that axis, has 1 / r, and the query sqrt(r).

**A growth by copies trains as the model that it came from**: reading kernels of HyperCloning's are
1 / r as large, and so are their updates here, so that growing and training commute
(`tests/growth/test_completep.py`), whatever Adam has seen before.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxgrow.axes.names import (
    LAYERS,
    POST,
    VALUE,
    Axes,
    Names,
    Tree,
    axis,
    cut,
    is_layers,
    is_names,
    layers_of,
    marked,
    path,
    reads,
    role,
)


class Multiplier(NamedTuple):
    """What multiplies a leaf at birth, its rate, and Adam's eps; ``muon`` stands for the rate where Muon moves the leaf."""

    scale: float
    rate: float
    eps: float
    muon: float


def multipliers(
    axes: Axes, sizes: Mapping[str, int], base: Mapping[str, int], depth_scaled: bool = False
) -> dict[str, Multiplier]:
    """What CompleteP gives every leaf of a model, folded, as the table above says.

    Muon makes all singular values of an update equal, at Adam's root mean square: of a matrix whose
    smaller side is n, its spectral norm is sqrt(n) times less than that of Adam's of low rank, and
    its rate is ``sqrt(n / base n)`` times greater.

    Args:
      axes: the axis names of the parameters.
      sizes: the size of every axis.
      base: those of the model whose rate was tuned; each axis of the layers, at least.
      depth_scaled: whether the model makes kernels that write the residual stream by
        ``1 / sqrt(layers)`` smaller at birth itself (`jaxgrow.models.Config.depth_scaled`), which
        the scale then leaves as it is in the base.

    Returns:
      Path of a leaf -> its multipliers; all 1 in a model of the base's sizes.

    Raises:
      ValueError: the model has stages with layers of their own, or none; or the base lacks an axis.

    Example:
      >>> axes = {"up": ("layers", "embed.in", "mlp"), "down": ("layers", "mlp.in", "embed")}
      >>> found = multipliers(axes, {"layers": 8, "embed": 4, "mlp": 16}, {"layers": 2, "embed": 4, "mlp": 4})
      >>> found["up"].rate, found["down"].rate, found["down"].scale
      (1.0, 0.0625, 0.125)

    References:
      Dey et al.,
      `Don't be lazy: CompleteP enables compute-efficient deep transformers <https://arxiv.org/abs/2505.01618>`_,
      NeurIPS 2025

      Yang et al., `A Spectral Condition for Feature Learning <https://arxiv.org/abs/2310.17813>`_,
      2023: Muon's
    """
    leaves = {
        path(p): names for p, names in jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_names)
    }
    stacks = sorted({axis(n) for names in leaves.values() for n in names if is_layers(axis(n))})
    if stacks != [LAYERS]:
        raise ValueError(
            f"CompleteP is for models of one stack of {LAYERS!r}, but this one has {stacks}: leave base out"
        )
    of_layers = {axis(n) for names in leaves.values() if layers_of(names) for n in names}
    if missing := sorted(of_layers - base.keys()):
        raise ValueError(
            f"the base has no size for {missing}, axes of this model's layers: give a base of its family"
        )
    ratios = {name: sizes[name] / base[name] for name in of_layers}
    post = any(marked(names, POST) for names in leaves.values())
    found = {}
    for leaf, names in leaves.items():
        kernel = cut(names) if (kind := role(leaf, names)) == "kernel" else None
        to_stream = (
            layers_of(names) is not None and axis(names[-1]) == "embed" and not reads(names[-1])
        )
        branch = to_stream and (marked(names, POST) if post else kind in ("kernel", "bias"))
        depth, query = (
            ratios[LAYERS] if layers_of(names) else 1.0,
            math.sqrt(_ratio(_queries(names), ratios)),
        )
        read = _ratio([n for n in names if reads(n)], ratios)
        written = _ratio([n for n in names if not reads(n) and not is_layers(axis(n))], ratios)
        rate = query / read / (depth if branch else 1)
        eps = 1 / (query * written * (1 if branch else depth))
        scale = muon = rate
        if kernel is not None and any(axis(n) in ratios for n in kernel.written):
            scale *= math.sqrt(_ratio(kernel.read, ratios))
            sides = [_ratio(side, sizes) for side in (kernel.read, kernel.written)]
            were = [_ratio(side, {**sizes, **base}) for side in (kernel.read, kernel.written)]
            muon *= math.sqrt(min(sides) / min(were))
        if kernel is not None and to_stream and depth_scaled:
            scale *= math.sqrt(depth)
        found[leaf] = Multiplier(scale, rate, eps, muon)
    return found


def _ratio(names: Names | list[str], of: Mapping[str, float]) -> float:
    """The product over these axes; what is of no layer does not count."""
    return math.prod(of.get(axis(n), 1) for n in names)


def _queries(names: Names) -> list[str]:
    """The axis that a query writes, and a key contracts away."""
    return [n for n in names if axis(n) == "head_dim" and not reads(n) and not marked((n,), VALUE)]


def scale_by_adam(b1: float, b2: float, eps: float) -> optax.GradientTransformationExtraArgs:
    """`optax.scale_by_adam`, whose updates and eps are multiplied, leaf by leaf, by what ``update(.., multipliers=..)`` says.

    Args:
      b1: Adam's.
      b2: Adam's.
      eps: Adam's, at the base's sizes.

    Returns:
      The transformation, with optax's state; without multipliers it is optax's.

    Example:
      >>> tx, params = scale_by_adam(0.9, 0.95, 1e-8), {"w": jnp.ones(1)}
      >>> updates, _ = tx.update(params, tx.init(params), multipliers={"w": Multiplier(1, 0.5, 1, 1)})
      >>> round(float(updates["w"][0]), 3)
      0.5
    """
    plain = optax.scale_by_adam(b1, b2, eps)

    def update(
        updates: Tree,
        state: Any,
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

        mu, nu = (
            optax.tree.bias_correction(x, b, state.count)
            for x, b in ((state.mu, b1), (state.nu, b2))
        )
        return jax.tree_util.tree_map_with_path(one, mu, nu), state

    return optax.GradientTransformationExtraArgs(plain.init, update)


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """`optax.clip_by_global_norm`, of a norm that has one meaning at all sizes: ``sqrt(sum_i rate_i / eps_i |G_i|^2)``.

    A gradient shrinks with its eps, and leaves have more entries as they grow: with these weights a
    growth by copies does not change the norm, nor does the place of a forward multiplier, so that
    the base's clip holds, too.

    Deviation(CompleteP): the paper clips by the plain norm of its multiplied form, which is this
    one at the base's sizes.

    Args:
      max_norm: of gradients.

    Returns:
      The transformation; ``update(.., multipliers=..)`` as of `scale_by_adam`.

    Example:
      >>> tx, grads = clip_by_global_norm(1.0), {"w": jnp.ones(4)}
      >>> tx.update(grads, tx.init(grads), multipliers={"w": Multiplier(1, 0.5, 2, 1)})[0]["w"].tolist()
      [1.0, 1.0, 1.0, 1.0]
    """
    plain = optax.clip_by_global_norm(max_norm)

    def update(
        updates: Tree,
        state: Any,
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


__all__ = ["Multiplier", "clip_by_global_norm", "multipliers", "scale_by_adam"]

"""CompleteP (Dey et al., 2025): how does a tuned learning rate transfer to other widths and depths?

Each parameter has its own initial scale, learning rate and eps. They follow from the axis names of
the parameter, and from the ratios of the model's sizes to the sizes of the *base* model, for which
the learning rate was tuned. The forward pass does not change. Therefore checkpoints keep their
format, and function-preserving growths remain function-preserving.

**Folding the forward multipliers.** In the paper, CompleteP also multiplies in the forward pass:
the output of each sublayer by ``1 / m_L``, and the logits by ``1 / m_N``. Let G be the gradient of
a parameter W with the multiplier c. The model computes with ``W' = c W``, whose gradient is
``G' = G / c``, and

.. math::

    W \\leftarrow W - \\eta \\left( \\frac{\\hat m}{\\sqrt{\\hat v} + \\epsilon} + \\lambda W \\right)
    \\quad\\Leftrightarrow\\quad
    W' \\leftarrow W' - c \\eta \\frac{\\hat m'}{\\sqrt{\\hat v'} + \\epsilon / c} - \\eta \\lambda W'

Therefore W' follows the same trajectory without a multiplier in the forward pass if its initial
values and its learning rate are multiplied by c, its eps is divided by c, and its decay per step is
unchanged.

**The multipliers of each parameter.** ``r`` is the ratio of the size of an axis to its size in the
base model; ``m_L`` is this ratio for the layers:

====================================== ============================== ======================== ===========================
parameter                              initial scale                  learning rate            eps
====================================== ============================== ======================== ===========================
kernel of a layer                      1 / sqrt(r in)                 1 / r in                 1 / (r out * m_L)
... with the residual stream as output 1 / (sqrt(r in) * m_L)         1 / (r in * m_L)         1 / r out
bias, norm of a layer                  1                              1                        1 / (r out * m_L)
... bias added to the residual stream  1 / m_L                        1 / m_L                  1 / r out
embedding                              1                              1                        1 / r out
head, or the norm before a tied head   1 / r in                       1 / r in                 1
====================================== ============================== ======================== ===========================

"in" refers to the input axes of a parameter, "out" to its output axes. If all widths have the same
ratio r, these are the rules of the paper for alpha = 1, in folded form. The paper combines the
decay ``lambda m_N`` with the learning rate ``eta / m_N``; here this is a decay of ``eta lambda``
per step for every parameter that decays. In a post-norm model, the scale and the bias of the norms
count as the parameters whose output is the residual stream. Models divide attention scores by
``sqrt(head_dim)``. CompleteP requires that scores decrease with ``1 / r`` if ``head_dim`` grows by
the ratio r, not only with ``1 / sqrt(r)``. To obtain this, the key, whose ``head_dim`` is declared
as an input axis, has the factor 1 / r, and the query has the factor sqrt(r).

``m_L`` counts layers, not the passes of a loop, although each pass adds to the residual stream. For
a model with a loop, the base model should therefore have the same ratio of passes to layers.
``unloop`` multiplies ``m_L`` by this ratio, so it divides the learning rate of the branches by it.

**A model grown by copies trains like its source model.** HyperCloning divides kernels by r along
their input axes, and CompleteP divides their updates in the same way. Growing and training
therefore commute (`tests/extras/test_completep.py`), independently of the gradients that Adam has
seen before.

`jaxgrow.optim.scaling` has the optimizers that apply the multipliers.
"""

import itertools
import math
from collections.abc import Mapping

from jaxgrow.axes.names import (
    LAYERS,
    POST,
    VALUE,
    Axes,
    Names,
    axis_of,
    by_path,
    has_mark,
    is_layers,
    is_names,
    layer_matrix,
    layers_of,
    reads_axis,
    role_of,
)
from jaxgrow.optim.scaling import MULTIPLIERS, Multiplier


def multipliers(
    axes: Axes, sizes: Mapping[str, int], base: Mapping[str, int], depth_scaled: bool = False
) -> dict[str, Multiplier]:
    """Compute the CompleteP multipliers of every parameter, in the folded form of the table above.

    For Muon, the learning rate needs a further factor. Muon makes all singular values of an update
    equal and gives the update the root mean square of an Adam update, whereas Adam's updates have a
    low rank. For a matrix whose smaller side is ``n``, the spectral norm of Muon's update is
    therefore smaller than the spectral norm of Adam's update by a factor of ``sqrt(n)``. To
    compensate, the learning rate is also multiplied by ``sqrt(n / n of the base)``.

    Args:
      axes: the axis names of the parameters.
      sizes: the size of every axis of the model.
      base: the size of every axis of the base model, for which the learning rate was tuned. It must
        contain at least each axis of the layers.
      depth_scaled: whether the model itself initialises kernels that write the residual stream with
        a factor ``1 / sqrt(layers)`` (`jaxgrow.models.Config.depth_scaled`). The scale then keeps
        that factor at its value in the base model.

    Returns:
      The `Multiplier` of each parameter, by path. All are 1 for a model with the sizes of the base.

    Raises:
      ValueError: the model has several stages of layers, or no layers; or the base lacks an axis.

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
      2023 (the multipliers for Muon)
    """
    leaves = by_path(axes, is_leaf=is_names)
    every = {axis_of(n) for n in itertools.chain.from_iterable(leaves.values())}
    stacks = sorted(filter(is_layers, every))
    if stacks != [LAYERS]:
        raise ValueError(
            f"CompleteP supports models with one stack of {LAYERS!r}, but this model has "
            f"{stacks}. Omit base"
        )
    in_layers = filter(layers_of, leaves.values())
    of_layers = {axis_of(n) for n in itertools.chain.from_iterable(in_layers)}
    if missing := sorted(of_layers - base.keys()):
        raise ValueError(
            f"the base has no size for the axes {missing} of the layers of this model. Give a "
            "base model of the same family"
        )
    ratios = {name: sizes[name] / base[name] for name in of_layers}
    post = any(has_mark(names, POST) for names in leaves.values())
    found = {}
    for leaf, names in leaves.items():
        kind = role_of(leaf, names)
        to_stream = layers_of(names) is not None and any(
            axis_of(n) == "embed" and not reads_axis(n) for n in names
        )
        branch = to_stream and (has_mark(names, POST) if post else kind in ("kernel", "bias"))
        depth = ratios[LAYERS] if layers_of(names) else 1.0
        one = _vector_multiplier(names, ratios, depth, branch)
        if kind == "kernel":
            one = _matrix_multiplier(one, names, ratios, sizes, {**sizes, **base})
            if to_stream and depth_scaled:
                one = one._replace(scale=one.scale * math.sqrt(depth))
        found[leaf] = one
    return found


def _vector_multiplier(
    names: Names, ratios: Mapping[str, float], depth: float, branch: bool
) -> Multiplier:
    """The multipliers of a vector. `_matrix_multiplier` completes those of a kernel.

    Args:
      names: axis names of the parameter.
      ratios: ratio of each size to its size in the base model.
      depth: ratio of the number of layers; 1 for a parameter that is not in a layer.
      branch: whether the parameter scales the output of a sublayer.
    """
    # The ``head_dim`` axis over which queries and keys are contracted, if the leaf is a query.
    queries = [
        n
        for n in names
        if axis_of(n) == "head_dim" and not reads_axis(n) and not has_mark((n,), VALUE)
    ]
    query = math.sqrt(_ratio(queries, ratios))
    read = _ratio([n for n in names if reads_axis(n)], ratios)
    written = _ratio([n for n in names if not reads_axis(n) and not is_layers(axis_of(n))], ratios)
    rate = query / read / (depth if branch else 1)
    eps = 1 / (query * written * (1 if branch else depth))
    return Multiplier(rate, rate, eps, rate)


def _matrix_multiplier(
    one: Multiplier,
    names: Names,
    ratios: Mapping[str, float],
    sizes: Mapping[str, float],
    base: Mapping[str, float],
) -> Multiplier:
    """The multipliers of a kernel; ``one`` has the multipliers of a vector with the same axes."""
    kernel = layer_matrix(names)
    if not any(axis_of(n) in ratios for n in kernel.written):
        return one
    side = min(_ratio(kernel.read, sizes), _ratio(kernel.written, sizes))
    was = min(_ratio(kernel.read, base), _ratio(kernel.written, base))
    scale = one.scale * math.sqrt(_ratio(kernel.read, ratios))
    return one._replace(scale=scale, muon=one.muon * math.sqrt(side / was))


def _ratio(names: Names | list[str], of: Mapping[str, float]) -> float:
    """The product of the ratios of these axes; axes that do not occur in the layers count as 1."""
    return math.prod(of.get(axis_of(n), 1) for n in names)


MULTIPLIERS.add("completep", multipliers)

"""What the layers and units of a trained model are worth, from one pass over data: for `jaxgrow.operators.prune`.

Of layers by what they do to the residual stream: `influence` (ShortGPT) and `angular` (Gromov et
al.), of what `streams` returns. Of units by `activations` (Minitron). Means over positions: over
batches of one size, take the mean of them.

All is keyed by axis, as `jaxgrow.operators.prune` takes it:
``{layers: influence(x) for layers, x in streams(..).items()} | activations(..)``. Of a model with
stages these are ``layers.0``, ``heads.1``: each stage has a stream of its own.
"""

from collections import defaultdict
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxgrow.axes.names import Params, axis, kind, stages
from jaxgrow.models.config import Config, Inputs
from jaxgrow.models.layers import LayerNorm, Linear, Observe, RMSNorm


def streams(config: Config, params: Params, inputs: Inputs) -> dict[str, jax.Array]:
    """The residual stream before the first layer and after each, of every stage.

    Args:
      config: of any family.
      params: its parameters.
      inputs: what its module takes.

    Returns:
      By the axis of layers: ``x_0 .. x_L``, [layers + 1, batch, positions, embed], in the dtype of
      activations; positions are two axes where the model's lie on a grid, as a Swin's.

    Example:
      >>> from jaxgrow.models import GPT2Config
      >>> config = GPT2Config(vocab=11, context=8, layers=3, embed=4, heads=2, head_dim=2, mlp=8)
      >>> streams(config, config.init(jax.random.key(0)), jnp.zeros((2, 5), int))["layers"].shape
      (4, 2, 5, 4)
    """
    seen = _observed(config, params, inputs, lambda x, y: (x, y))
    return {layers: jnp.concatenate([x[:1], y]) for layers, (x, y) in seen.items()}


def influence(stream: jax.Array) -> jax.Array:
    """Block influence: ``BI_l = 1 - E cos(x_l, x_{l+1})``, the mean over positions.

    Computed as ``|u - v|^2 / 2`` of vectors of length one, which does not round where a layer does
    little, and is exactly zero where it does nothing.

    Args:
      stream: of one stage, as of `streams`.

    Returns:
      Of each layer, [layers]: those that matter least have the least.

    Example:
      The first layer turns the stream by a right angle, the second does nothing but to double it.

      >>> influence(jnp.array([[[[1.0, 0.0]]], [[[0.0, 1.0]]], [[[0.0, 2.0]]]])).tolist()
      [1.0, 0.0]

    References:
      Men et al., `ShortGPT <https://arxiv.org/abs/2403.03853>`_, 2024, Eq. 1
    """
    return _mean(_squared(stream, 1) / 2)


def angular(stream: jax.Array, count: int) -> jax.Array:
    """What ``count`` consecutive layers do together: ``d_l = E arccos(cos(x_l, x_{l+count})) / pi`` of those from l on.

    Gromov et al. remove the block with the least d. So that this is one number a layer, as of
    `influence`, a layer has the least d of all blocks that it is in: the ``count`` layers with the
    least numbers are that block.

    Deviation(Gromov): the mean over all positions, not the last of each text alone. In a causal
    model each is the last one of a text that ends there; other models have no last one that knows
    more.

    Args:
      stream: of one stage, as of `streams`.
      count: how many layers go.

    Returns:
      Of each layer, [layers], from 0 to 1.

    Raises:
      ValueError: there are not as many layers.

    Example:
      Two right angles make a half turn, or none.

      >>> x = jnp.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, 1.0]])[:, None, None]
      >>> angular(x, 2).round(6).tolist()
      [1.0, 0.0, 0.0]

    References:
      Gromov et al.,
      `The Unreasonable Ineffectiveness of the Deeper Layers <https://arxiv.org/abs/2403.17887>`_,
      ICLR 2025
    """
    layers = len(stream) - 1
    if not 1 <= count <= layers:
        raise ValueError(
            f"angular() is of 1 .. {layers} consecutive layers, which there are, not {count}"
        )
    # As `influence`: the arc cosine of what is nearly one would be noise.
    distance = _mean(2 / jnp.pi * jnp.arcsin(jnp.minimum(jnp.sqrt(_squared(stream, count)) / 2, 1)))
    layer, begin = jnp.arange(layers)[:, None], jnp.arange(len(distance))[None]
    return jnp.where((begin <= layer) & (layer < begin + count), distance[None], jnp.inf).min(1)


def activations(config: Config, params: Params, inputs: Inputs) -> dict[str, jax.Array]:
    """Minitron's importance of the units of a layer, and of the residual stream: the mean size of what they say.

    ========= ============================================================== ====================
    axis      mean over batch and positions of
    ========= ============================================================== ====================
    heads     the L2 norm, over ``head_dim``, of what attention says         [layers, heads]
    mlp       the absolute value of what ``down`` reads                      [layers, mlp]
    embed     the absolute value of what norms make of it, over all layers   [embed]
    ========= ============================================================== ====================

    The paper tries means, L2 norms and variances over either; this is its mean over both. Of a
    Swin's heads, what fills windows up are positions, too.

    Args:
      config: of any family.
      params: its parameters.
      inputs: what its module takes.

    Returns:
      The scores of each axis, for `jaxgrow.operators.prune`.

    Example:
      >>> from jaxgrow.models import GPT2Config
      >>> config = GPT2Config(vocab=11, context=8, layers=3, embed=4, heads=2, head_dim=2, mlp=8)
      >>> found = activations(config, config.init(jax.random.key(0)), jnp.zeros((2, 5), int))
      >>> {axis: scores.shape for axis, scores in found.items()}
      {'embed': (4,), 'heads': (3, 2), 'mlp': (3, 8)}

    References:
      Muralidharan et al., `Compact Language Models via Pruning and Knowledge Distillation
      <https://arxiv.org/abs/2407.14679>`_, NeurIPS 2024
    """
    depth, found = 0, defaultdict(list)  # of applied modules: a model is one, a block in it another

    def intercept(call, args, kwargs, context):
        nonlocal depth, found
        if context.method_name != "__call__":
            return call(*args, **kwargs)
        module, applied = context.module, not context.module.path
        if applied and depth == 1:
            found = defaultdict(list)
        depth += applied
        try:
            said = call(*args, **kwargs)
        finally:
            depth -= applied
        if depth == 2:
            read = (
                [axis(name) for name in module.axes[: module.contract]]
                if isinstance(module, Linear)
                else []
            )
            kinds = [kind(name) for name in read]
            if kinds == ["heads", "head_dim"]:
                found[read[0]].append(jnp.linalg.norm(_wide(args[0]), axis=-1))
            elif kinds == ["mlp"]:
                found[read[0]].append(jnp.abs(_wide(args[0])))
            elif isinstance(module, LayerNorm | RMSNorm) and kind(axis(module.axis)) == "embed":
                found[axis(module.axis)].append(jnp.abs(_wide(said)))
        return said

    def observe(x, y):
        """What was found in the block that has just been traced, in its own order."""
        return {
            axis: jnp.stack([s.mean(tuple(range(s.ndim - 1))) for s in parts]).mean(0)
            for axis, parts in found.items()
        }

    config = replace(config, remat="none")  # what is found inside of a checkpoint stays there
    with nn.intercept_methods(intercept):
        seen = _observed(config, params, inputs, observe)
    scores = {axis: x for stage in seen.values() for axis, x in stage.items()}
    return {axis: x.mean(0) if kind(axis) == "embed" else x for axis, x in scores.items()}


def _observed(config: Config, params: Params, inputs: Inputs, observe: Observe) -> dict[str, Any]:
    """Of all layers of a stage, stacked, by the axis of its layers."""
    said: Any = config.module.apply({"params": params}, inputs, observe=observe)
    return dict(
        zip(stages(config.sizes()), said[1] if len(config.depths) > 1 else said[1:], strict=True)
    )


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _squared(streams: jax.Array, count: int) -> jax.Array:
    """``|u - v|^2`` of the directions of the stream before and after each ``count`` consecutive layers, from 0 to 4."""
    x = _wide(streams)
    length = jnp.linalg.norm(x, axis=-1, keepdims=True)
    x = x / jnp.maximum(length, jnp.finfo(x.dtype).tiny)
    return jnp.square(x[count:] - x[:-count]).sum(-1)


def _mean(x: jax.Array) -> jax.Array:
    """Over all but the first axis."""
    return x.mean(tuple(range(1, x.ndim)))

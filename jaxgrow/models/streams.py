"""The residual stream of a model, and how much each layer changes it.

`jaxgrow.extras.importance` has further scores, for `jaxgrow.operators.prune`.
"""

import jax
import jax.numpy as jnp

from jaxgrow.axes.names import Params, Tree, stages
from jaxgrow.models.config import Config, Inputs
from jaxgrow.models.stack import Observe


def residual_streams(config: Config, params: Params, inputs: Inputs) -> dict[str, jax.Array]:
    """Return the residual stream before the first layer and after each layer, for every stage.

    Args:
      config: config of the model, of any family.
      params: parameters of the model.
      inputs: inputs of its module.

    Returns:
      For each axis of layers: ``x_0 .. x_L``, [layers + 1, batch, positions, embed], in the dtype
      of activations. If the positions form a grid, as in a Swin, they are two axes.

    Example:
      >>> from jaxgrow.models import GPT2Config
      >>> config = GPT2Config(vocab=11, context=8, layers=3, embed=4, heads=2, head_dim=2, mlp=8)
      >>> residual_streams(config, config.init(jax.random.key(0)), jnp.zeros((2, 5), int))["layers"].shape
      (4, 2, 5, 4)
    """
    seen = observe_layers(config, params, inputs, lambda x, y: (x, y))
    return {layers: jnp.concatenate([x[:1], y]) for layers, (x, y) in seen.items()}


def block_influence(stream: jax.Array) -> jax.Array:
    """Block influence: ``BI_l = 1 - E cos(x_l, x_{l+1})``, the mean over positions.

    It is computed as ``|u - v|^2 / 2`` of vectors of length one. This is accurate for a layer with
    a small effect, and exactly zero for a layer with no effect.

    Args:
      stream: residual stream of one stage, from `residual_streams`.

    Returns:
      The influence of each layer, [layers]. The least important layers have the smallest values.

    Example:
      The first layer rotates the stream by a right angle, and the second layer only doubles it.

      >>> block_influence(jnp.array([[[[1.0, 0.0]]], [[[0.0, 1.0]]], [[[0.0, 2.0]]]])).tolist()
      [1.0, 0.0]

    References:
      Men et al., `ShortGPT <https://arxiv.org/abs/2403.03853>`_, 2024, Eq. 1
    """
    return mean_of_layers(squared_turns(stream, 1) / 2)


def observe_layers(
    config: Config, params: Params, inputs: Inputs, observe: Observe
) -> dict[str, Tree]:
    """Return the results of ``observe`` by axis of layers, stacked over the layers of a stage."""
    output: Tree = config.module.apply({"params": params}, inputs, observe=observe)
    return dict(
        zip(
            stages(config.sizes()), output[1] if len(config.depths) > 1 else output[1:], strict=True
        )
    )


def widen_dtype(x: jax.Array) -> jax.Array:
    """Return ``x`` in float32 or better."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def squared_turns(streams: jax.Array, count: int) -> jax.Array:
    """Return ``|u - v|^2`` of the directions u and v of the stream, from 0 to 4.

    They are the directions before and after each ``count`` consecutive layers.
    """
    x = widen_dtype(streams)
    length = jnp.linalg.norm(x, axis=-1, keepdims=True)
    x = x / jnp.maximum(length, jnp.finfo(x.dtype).tiny)
    return jnp.square(x[count:] - x[:-count]).sum(-1)


def mean_of_layers(x: jax.Array) -> jax.Array:
    """Return the mean over all axes except the first."""
    return x.mean(tuple(range(1, x.ndim)))

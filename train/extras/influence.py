"""The influence of each layer on the residual stream, as a measure of its importance."""

import jax
import jax.numpy as jnp

from jaxgrow.axes import Params, Tree
from jaxgrow.extras.importance import block_influence, residual_streams
from jaxgrow.models import Config
from train.plan.training import MEASURES


def layer_influence(config: Config, params: Params, batches: Tree) -> jax.Array:
    """Return the mean of `block_influence` over micro-batches, in the layers of all stages."""

    def one(batch):
        found = residual_streams(config, params, batch[0])
        return jnp.concatenate([block_influence(stream) for stream in found.values()])

    return jax.lax.map(one, batches).mean(0)


MEASURES.add("influence", layer_influence)

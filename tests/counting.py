"""Counting the matrix products of a program, which knows nothing of the cost formula."""

from math import prod

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

from jaxgrow.models import EncoderConfig


def programs(config, **passes):
    """Forward pass, training step with all logits at once, and as it is trained; and their arguments, by shape only.

    ``passes`` as of `GPT2`. Of an encoder, logits are of the places that are masked.
    """
    params = jax.eval_shape(config.init, jax.random.key(0))
    tokens = targets = jax.ShapeDtypeStruct((2, config.length), jnp.int32)
    if isinstance(config, EncoderConfig):
        targets = jax.ShapeDtypeStruct((2, config.head_places(config.length)), jnp.int32)
        tokens = {"tokens": tokens, "places": targets}

    def forward(p, t):
        return config.module.apply({"params": p}, t, **passes)

    def loss(p, t):
        return -jax.nn.log_softmax(forward(p, t))[..., 0].mean()

    def trained(p, t):
        targets = t["places"] if isinstance(t, dict) else t
        return config.module.apply({"params": p}, t, targets=targets, **passes)

    return (forward, jax.value_and_grad(loss), jax.value_and_grad(trained, has_aux=True)), (params, tokens)


def products(jaxpr) -> int:
    """2 x multiply-adds of every matrix product in a program, a scan's as often as it runs."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            left = eqn.invars[0].aval.shape
            total += 2 * prod(eqn.outvars[0].aval.shape) * prod(left[d] for d in contracted)
        if eqn.primitive.name.startswith("ragged_dot"):  # each row goes through one of the groups
            numbers = eqn.params["ragged_dot_dimension_numbers"]
            (contracted, _), _ = numbers.dot_dimension_numbers
            left, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
            groups = eqn.invars[2].aval.shape[-1] if set(numbers.lhs_ragged_dimensions) <= set(contracted) else 1
            total += 2 * prod(out) * prod(left[d] for d in contracted) // groups
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        total += times * sum(map(products, jaxprs_in_params(eqn.params)))
    return total

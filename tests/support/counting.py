"""Count the matrix products of a program, independently of the cost formula."""

import jax
import jax.numpy as jnp

from jaxgrow import flops


def programs(config, **passes):
    """Return three programs of a model, and the shapes of their arguments.

    The programs are the forward pass, the gradient with all logits at once, and the gradient that
    training uses. ``passes`` are arguments of the module, as for `GPT2`. An encoder computes logits
    only at masked positions.
    """
    params = jax.eval_shape(config.init, jax.random.key(0))
    tokens = targets = jax.ShapeDtypeStruct((2, config.length), jnp.int32)
    if config.masked:
        targets = jax.ShapeDtypeStruct((2, config.predicted_positions(config.length)), jnp.int32)
        tokens = {"tokens": tokens, "positions": targets}

    def forward(p, t):
        return config.module.apply({"params": p}, t, **passes)

    def loss(p, t):
        return -jax.nn.log_softmax(forward(p, t))[..., 0].mean()

    def trained(p, t):
        targets = t["positions"] if isinstance(t, dict) else t
        return config.module.apply({"params": p}, t, targets=targets, **passes)

    return (forward, jax.value_and_grad(loss), jax.value_and_grad(trained, has_aux=True)), (
        params,
        tokens,
    )


def products(jaxpr) -> float:
    """Count 2 x multiply-adds of all matrix products, including every iteration of a scan."""
    return flops.counted(jaxpr).products

"""Checks that all vision families share."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import tiny

from jaxgrow import grow
from jaxgrow.growth.maps import Growth
from jaxgrow.layerdrop.execution import KeepMask
from jaxgrow.models import Config

BATCH = 3


def images(config, seed: int = 0) -> np.ndarray:
    shape = (BATCH, config.image, config.image, config.channels)
    return np.random.default_rng(seed).normal(size=shape).astype(config.dtype)


@cache
def forward(config: Config):
    """Return the function ``(params, images) -> logits``."""
    return jax.jit(lambda p, x: config.module.apply({"params": p}, x))


@cache
def gradient(config: Config):
    """Return ``(params, images) -> gradient`` of the loss for class 0."""

    def loss(p, x):
        return -jax.nn.log_softmax(config.module.apply({"params": p}, x))[:, 0].mean()

    return jax.jit(jax.grad(loss))


def change(growth: Growth, small: Config) -> float:
    """Return ``max |difference of logits| / their standard deviation`` of a growth."""
    params = tiny.params(small)
    before = forward(small)(params, images(small))
    after = forward(small.resized(growth))(grow(growth, params, tiny.axes(small)), images(small))
    return float(np.abs(after - before).max() / np.std(before))


def assert_dropping_is_exact(small: Config) -> None:
    """Check that layer dropping is exact.

    If every layer is kept, the logits are bitwise identical to the dense model. Without the last
    layer, they equal the logits of a model with one layer, and the dropped layer has no gradient.
    """
    assert small.layers == 2
    params, x = tiny.params(small, dtype=small.dtype), images(small)

    def loss(p, layers):
        keep_mask = (
            None if layers is None else KeepMask(layers, jnp.ones(2, jnp.float32), "sublayer")
        )
        logits = small.module.apply({"params": p}, x, keep_mask=keep_mask)
        return jnp.square(logits).mean(), logits

    gradient = jax.jit(jax.grad(loss, has_aux=True))
    np.testing.assert_array_equal(gradient(params, np.ones(2, bool))[1], gradient(params, None)[1])
    grads, logits = jax.device_get(gradient(params, np.array([True, False])))
    first = {**params, "blocks": jax.tree.map(lambda w: w[:1], params["blocks"])}
    expected = forward(replace(small, layers=1))(first, x)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)  # float32 rounding
    ran = [np.any([np.any(g[i]) for g in jax.tree.leaves(grads["blocks"])]) for i in range(2)]
    assert ran == [True, False]

"""Checks that all vision families share."""

from functools import cache

import jax
import numpy as np
import tiny

from jaxgrow import grow
from jaxgrow.growth.maps import Growth
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

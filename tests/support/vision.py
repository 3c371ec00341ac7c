"""Checks that all vision families share."""

import numpy as np
import tiny

from jaxgrow import grow
from jaxgrow.growth.maps import Growth
from jaxgrow.models import Config

BATCH = 3


def images(config, seed: int = 0) -> np.ndarray:
    shape = (BATCH, config.image, config.image, config.channels)
    return np.random.default_rng(seed).normal(size=shape).astype(config.dtype)


forward = tiny.forward


def change(growth: Growth, small: Config) -> float:
    """Return ``max |difference of logits| / their standard deviation`` of a growth."""
    params = tiny.params(small)
    before = forward(small)(params, images(small))
    after = forward(small.resized(growth))(grow(growth, params, tiny.axes(small)), images(small))
    return float(np.abs(after - before).max() / np.std(before))

"""Count the matrix products of a program, independently of the cost formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrow import flops
from jaxgrow.extras.token_dropping import TokenDrop
from jaxgrow.models import Config
from jaxgrow.models.stack import KeptTokens

SAMPLES = 2


def programs(config, **passes):
    """Return the programs of a model, and the shapes of their arguments.

    The programs are the forward pass, the gradient with all logits at once and, for tokens, the
    gradient that training uses. ``passes`` are arguments of the module. An encoder computes logits
    only at masked positions.
    """
    params = jax.eval_shape(config.init, jax.random.key(0))
    inputs, targets = config.batch_shapes(SAMPLES)

    def forward(p, x):
        return config.module.apply({"params": p}, x, **passes)

    def loss(p, x):
        return -jax.nn.log_softmax(forward(p, x))[..., 0].mean()

    def trained(p, x):
        labels = jnp.zeros(targets.shape, targets.dtype)
        return config.module.apply({"params": p}, x, targets=labels, **passes)

    each = [forward, jax.value_and_grad(loss)]
    if config.modality == "text":
        each.append(jax.value_and_grad(trained, has_aux=True))
    return each, (params, inputs)


def products(jaxpr) -> float:
    """Count 2 x multiply-adds of all matrix products, including every iteration of a scan."""
    return flops.counted(jaxpr).products


def assert_counted(
    config: Config, frozen: int = 0, drop: TokenDrop | None = None, once=0.0
) -> None:
    """Check the formulas of a pass and of a training step against the counted products.

    ``once``: the products of a forward pass that the formula leaves out.
    """
    passes = {"frozen": frozen}
    if drop:
        kept = np.arange(drop.kept(config.length), dtype=np.int32)
        positions = np.broadcast_to(kept, (SAMPLES, len(kept)))
        passes["kept_tokens"] = KeptTokens(positions, *drop.middle(config.depth))
    positions = SAMPLES * config.length
    with jax.enable_x64(False):
        each, arguments = programs(config, **passes)
        forward, *steps = (products(jax.make_jaxpr(f)(*arguments).jaxpr) for f in each)
    if not drop:
        found = flops.forward_flops(config, positions, at_once=positions) + once
        assert found == pytest.approx(forward, rel=1e-12)
    found = flops.train_flops(config, positions, frozen=frozen, drop=drop, at_once=positions)
    assert [found + 3 * once] * len(steps) == pytest.approx(steps, rel=1e-12)
    if drop:
        assert found < flops.train_flops(config, positions, frozen=frozen)

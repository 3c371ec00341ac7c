"""The train step and the validation loss: pure functions of one device, which `train.parallel` maps over all."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxgrow.models.gpt2 import GPT2, GPT2Config


@struct.dataclass
class Model:
    """What is trained, transformed, and kept under a name between phases."""

    params: Any
    opt: Any  # optimizer state; None: the next phase of training starts a fresh one
    config: GPT2Config = struct.field(pytree_node=False)


def loss(model: Model, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of the next token, nats; ``tokens`` is int [batch, length + 1]."""
    logits_BTV: Any = GPT2(model.config).apply({"params": model.params}, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, tokens[:, 1:]).mean()


def train_step(tx: optax.GradientTransformation, accumulate: int, axis: str):
    """``(model, tokens [batch, length + 1], lr) -> (model, metrics)``, for one device of the mapped axis ``axis``.

    Gradients are the mean over devices and ``accumulate`` micro-batches: how a batch is divided changes rounding only. The
    learning rate is an argument, so that the phases of one model share one compilation.
    """

    def gradient(model: Model, tokens: jax.Array):
        return jax.value_and_grad(lambda params: loss(replace(model, params=params), tokens))(model.params)

    def step(model: Model, tokens: jax.Array, lr: jax.Array):
        if accumulate == 1:
            value, grads = gradient(model, tokens)
        else:
            zero = jax.tree.map(jnp.zeros_like, (jnp.zeros(()), model.params))
            total, _ = jax.lax.scan(
                lambda total, micro: (jax.tree.map(jnp.add, total, gradient(model, micro)), None),
                zero,
                tokens.reshape(accumulate, -1, tokens.shape[-1]),
            )
            value, grads = jax.tree.map(lambda x: x / accumulate, total)
        value, grads = jax.lax.pmean((value, grads), axis)
        updates, opt = tx.update(grads, model.opt, model.params)
        params = jax.tree.map(lambda p, u: p - lr * u, model.params, updates)
        return replace(model, params=params, opt=opt), {"loss": value, "grad_norm": optax.tree.norm(grads)}

    return step


def eval_step(axis: str):
    """``(model, tokens) -> loss``, the mean over all devices of ``axis``."""
    return lambda model, tokens: jax.lax.pmean(loss(model, tokens), axis)

"""The train step and the validation loss: pure functions of one device, which `train.parallel` maps over all."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxgrow.drop import Kept
from jaxgrow.drop.freeze import freeze
from jaxgrow.models import gpt2
from jaxgrow.models.gpt2 import GPT2, GPT2Config


@struct.dataclass
class Model:
    """What is trained, transformed, and kept under a name between phases."""

    params: Any
    opt: Any  # optimizer state; None: the next phase of training starts a fresh one
    config: GPT2Config = struct.field(pytree_node=False)
    sensitivity: Any = None  # float32 [layers], as last measured for layer dropping


def loss(model: Model, tokens: jax.Array, kept: Kept | None = None) -> jax.Array:
    """Mean cross-entropy of the next token, nats; ``tokens`` is int [batch, length + 1]; ``kept`` as in `Kept`."""
    logits_BTV: Any = GPT2(model.config).apply({"params": model.params}, tokens[:, :-1], kept=kept)
    return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, tokens[:, 1:]).mean()


def train_step(tx: optax.GradientTransformation, accumulate: int, axis: str, *, frozen: bool = False):
    """``(model, tokens [batch, length + 1], lr, kept) -> (model, metrics)``, for one device of the mapped axis ``axis``.

    Gradients are the mean over devices and ``accumulate`` micro-batches: how a batch is divided changes rounding only. The
    learning rate is an argument, so that the phases of one model share one compilation. ``kept`` is None, for the dense
    step, or says for every micro-batch (a leading axis) which layers run, the same on all devices. ``frozen`` layers that
    none ran keep parameters and moments; else momentum and decay still move them, by a gradient of zero.
    """

    def gradient(model: Model, tokens: jax.Array, kept: Kept | None):
        return jax.value_and_grad(lambda params: loss(replace(model, params=params), tokens, kept))(model.params)

    def step(model: Model, tokens: jax.Array, lr: jax.Array, kept: Kept | None):
        if accumulate == 1:
            value, grads = gradient(model, tokens, jax.tree.map(lambda x: x[0], kept))
        else:
            zero = jax.tree.map(jnp.zeros_like, (jnp.zeros(()), model.params))
            total, _ = jax.lax.scan(
                lambda total, micro: (jax.tree.map(jnp.add, total, gradient(model, *micro)), None),
                zero,
                (tokens.reshape(accumulate, -1, tokens.shape[-1]), kept),
            )
            value, grads = jax.tree.map(lambda x: x / accumulate, total)
        value, grads = jax.lax.pmean((value, grads), axis)
        updates, opt = tx.update(grads, model.opt, model.params)
        params = jax.tree.map(lambda p, u: p - lr * u, model.params, updates)
        if frozen and kept is not None:
            before, after = (model.params, model.opt), (params, opt)
            params, opt = freeze(before, after, kept, model.params, gpt2.axes(model.config))
        return replace(model, params=params, opt=opt), {"loss": value, "grad_norm": optax.tree.norm(grads)}

    return step


def eval_step(axis: str):
    """``(model, tokens) -> loss``, the mean over all devices of ``axis``."""
    return lambda model, tokens: jax.lax.pmean(loss(model, tokens), axis)

"""The train step and the evaluation step: pure functions of one device, which `train.loop.parallel` maps over all.

Gradients, update, hold: one function for each, and in each of them the phase's modifiers (`train.plan.modifiers`) have their
say.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from jaxgrow.axes import Tree
from train.data.batches import Batch
from train.plan.modifiers import Micro, Modifier
from train.state.model import Model, cross_entropy, logits


@struct.dataclass
class StepInputs:
    """What changes from step to step, or from run to run, besides the batch; the same on all devices."""

    lr: Any
    number: Any = np.uint32(0)  # of the step: what is drawn depends on it
    seed: Any = np.uint32(0)  # .. and on it
    given: tuple[Any, ...] = ()  # to each modifier


def train_step(tx: optax.GradientTransformation, accumulate: int, axis: str, modifiers: Sequence[Modifier] = ()):
    """``(model, batch, inputs) -> (model, metrics)``, for one device of the mapped axis ``axis``.

    Gradients are the mean over devices and ``accumulate`` micro-batches: how a batch is divided changes rounding only. The
    learning rate and the seed are arguments, so that phases and runs share one compilation.
    """
    tx = optax.with_extra_args_support(tx)

    def step(model: Model, batch: Batch, inputs: StepInputs):
        pairs = list(zip(modifiers, inputs.given, strict=True))
        key = jax.random.fold_in(
            jax.random.fold_in(jax.random.key(inputs.seed), inputs.number), jax.lax.axis_index(axis)
        )
        value, grads = jax.lax.pmean(gradients(model, batch, key, accumulate, pairs), axis)
        after = updated(model, grads, tx, inputs.lr, pairs)
        for modifier, given in pairs:
            after = modifier.hold(model, after, given)
        return after, {"loss": value, "grad_norm": optax.tree.norm(grads)}

    return step


def gradients(
    model: Model, batch: Batch, key: jax.Array, accumulate: int, pairs: Sequence[tuple[Modifier, Any]]
) -> tuple[jax.Array, Tree]:
    """``(cross-entropy, gradients of the objective)``, means over the micro-batches of one device."""

    def objective(params: Tree, batch: Batch, micro: Micro):
        """``(what is minimised, cross-entropy)``."""
        inputs, targets = batch
        options = {name: x for m, given in pairs for name, x in m.options(given, micro, model.config).items()}
        output = logits(replace(model, params=params), inputs, **options)
        minimised = value = cross_entropy(output, targets)
        for modifier, given in pairs:
            minimised = modifier.objective(minimised, output, inputs, given)
        return minimised, value

    def gradient(batch: Batch, number: Any, key: jax.Array):
        micro = Micro(number, key, len(batch[1]))
        (_, value), grads = jax.value_and_grad(objective, has_aux=True)(model.params, batch, micro)
        return value, grads

    keys = jax.random.split(key, accumulate)
    if accumulate == 1:
        return gradient(batch, 0, keys[0])
    parts = jax.tree.map(lambda x: x.reshape(accumulate, -1, *x.shape[1:]), batch)
    total, _ = jax.lax.scan(
        lambda total, micro: (jax.tree.map(jnp.add, total, gradient(*micro)), None),
        jax.tree.map(jnp.zeros_like, (jnp.zeros(()), model.params)),
        (parts, jnp.arange(accumulate), keys),
    )
    return jax.tree.map(lambda x: x / accumulate, total)


def updated(
    model: Model,
    grads: Tree,
    tx: optax.GradientTransformationExtraArgs,
    lr: Any,
    pairs: Sequence[tuple[Modifier, Any]],
) -> Model:
    """``model`` after one update of the optimizer."""
    updates, opt = tx.update(grads, model.opt, model.params, axes=model.axes)
    rates = jax.tree.map(lambda _: lr, model.params)
    for modifier, given in pairs:
        rates = modifier.rates(rates, model.opt, given)
    return replace(model, params=jax.tree.map(lambda p, u, r: p - r * u, model.params, updates, rates), opt=opt)


def eval_step(axis: str):
    """``(model, batch) -> {"val_loss", "val_accuracy"}``, means over all devices of ``axis``; targets are classes."""

    def step(model: Model, batch: Batch):
        inputs, targets = batch
        output = logits(model, inputs)
        right = (output.argmax(-1) == targets).mean()
        return jax.lax.pmean({"val_loss": cross_entropy(output, targets), "val_accuracy": right}, axis)

    return step

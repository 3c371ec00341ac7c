"""The train step and the evaluation step: pure functions of a batch.

`train.engine.loop.parallel` maps them over devices, each with its part of the batch.

Gradients, update, hold: one function for each, and in each of them the phase's modifiers
(`train.plan.modifiers`) have their say.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import PartitionSpec as P

from jaxgrow.axes import Tree
from jaxgrow.sharding import only
from train.data.batches import Batch
from train.engine.state.mesh import FSDP
from train.engine.state.model import (
    Model,
    constrained_like,
    cross_entropy,
    logits,
    narrow_leaves,
    placed,
    scores,
    specs,
)
from train.plan.modifiers import Micro, Modifier


@struct.dataclass
class StepInputs:
    """What changes from step to step, or from run to run, besides the batch; the same on all devices."""

    lr: Any
    number: Any = np.uint32(0)  # of the step: what is drawn depends on it
    seed: Any = np.uint32(0)  # .. and on it
    given: tuple[Any, ...] = ()  # to each modifier


def train_step(
    tx: optax.GradientTransformation,
    accumulate: int,
    modifiers: Sequence[Modifier] = (),
    axis: str | None = None,
    once: bool = False,
):
    """``(model, batch, inputs) -> (model, metrics)``, of the whole batch or, with ``axis``, of one device's part.

    ``once``: as ``mesh.gradients=step`` (`gradients_once`).

    Gradients are the mean over devices and ``accumulate`` micro-batches: how a batch is divided
    changes rounding only. The learning rate and the seed are arguments, so that phases and runs
    share one compilation.
    """
    tx = optax.with_extra_args_support(tx)

    def step(model: Model, batch: Batch, inputs: StepInputs):
        pairs = list(zip(modifiers, inputs.given, strict=True))
        key = jax.random.fold_in(jax.random.key(inputs.seed), inputs.number)
        rows = jnp.arange(len(batch[1])) + (
            0 if axis is None else jax.lax.axis_index(axis) * len(batch[1])
        )
        found = gradients_once if once else gradients
        value, grads = _mean(found(model, batch, rows, key, accumulate, pairs), axis)
        after = updated(model, grads, tx, inputs.lr, pairs)
        for modifier, given in pairs:
            after = modifier.hold(model, after, given)
        return placed(after), {"loss": value, "grad_norm": optax.tree.norm(grads)}

    return step


def _mean(tree: Tree, axis: str | None) -> Tree:
    return tree if axis is None else jax.lax.pmean(tree, axis)


def gradients(
    model: Model,
    batch: Batch,
    rows: jax.Array,
    key: jax.Array,
    accumulate: int,
    pairs: Sequence[tuple[Modifier, Any]],
) -> tuple[jax.Array, Tree]:
    """``(cross-entropy, gradients of the objective)``, means over micro-batches; ``rows`` are the samples' places in the batch.

    A micro-batch is every so many-th sample, so that the same samples are together on any number of
    devices.
    """

    def objective(params: Tree, batch: Batch, micro: Micro):
        """``(what is minimised, cross-entropy)``."""
        inputs, targets = batch = cut(batch, math.prod(modifier.windows for modifier, _ in pairs))
        options = {
            name: x
            for m, given in pairs
            for name, x in m.options(given, micro, model.config).items()
        }
        at = replace(model, params=params)
        if not any(modifier.reads_logits and given is not None for modifier, given in pairs):
            value, _ = scores(at, batch, **options)
            return value, value
        output = logits(at, inputs, **options)
        minimised = value = cross_entropy(output, targets)
        for modifier, given in pairs:
            minimised = modifier.objective(minimised, output, inputs, given)
        return minimised, value

    def gradient(batch: Batch, rows: jax.Array, number: Any):
        (_, value), grads = jax.value_and_grad(objective, has_aux=True)(
            model.params, batch, Micro(number, key, rows)
        )
        return value, constrained_like(grads, model)

    if accumulate == 1:
        return gradient(batch, rows, 0)
    total, _ = jax.lax.scan(
        lambda total, micro: (jax.tree.map(jnp.add, total, gradient(*micro)), None),
        jax.tree.map(_zeros, (jnp.zeros(()), model.params)),
        (micro_batches(batch, accumulate), micro_batches(rows, accumulate), jnp.arange(accumulate)),
    )
    return jax.tree.map(lambda x: x / accumulate, total)


def _zeros(x: jax.Array) -> jax.Array:
    """What sums of numbers like ``x`` begin with, in float32 or better."""
    return jnp.zeros_like(x, jnp.promote_types(x.dtype, jnp.float32))


def gradients_once(
    model: Model,
    batch: Batch,
    rows: jax.Array,
    key: jax.Array,
    accumulate: int,
    pairs: Sequence[tuple[Modifier, Any]],
) -> tuple[jax.Array, Tree]:
    """`gradients`, where devices of ``fsdp`` gather all weights before the micro-batches, and add gradients once after them.

    Each device sums its gradients in float32. Weights that layers only use in the dtype of
    activations are gathered in it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    lies = jax.tree.map(lambda s: only(s, [FSDP]), specs(model, mesh).params)
    narrow = narrow_leaves(model)

    def gather(x: jax.Array, spec: P, narrow: bool) -> jax.Array:
        x = x.astype(model.config.dtype) if narrow else x
        return jax.lax.all_gather(x, FSDP, axis=spec.index(FSDP), tiled=True) if FSDP in spec else x

    def reduce(x: jax.Array, spec: P) -> jax.Array:
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        if FSDP not in spec:
            return jax.lax.pmean(x, FSDP)
        added = jax.lax.psum_scatter(x, FSDP, scatter_dimension=spec.index(FSDP), tiled=True)
        return added / jax.lax.axis_size(FSDP)

    def own(
        params: Tree, batch: Batch, rows: jax.Array, key: jax.Array, given: Any
    ) -> tuple[jax.Array, Tree]:
        whole = replace(model, params=jax.tree.map(gather, params, lies, narrow), opt=None)
        found = [(modifier, g) for (modifier, _), g in zip(pairs, given, strict=True)]
        value, grads = gradients(whole, batch, rows, key, accumulate, found)
        return jax.lax.pmean(value, FSDP), jax.tree.map(reduce, grads, lies)

    # Mapped over every axis, also over those of one device: kernels of cuDNN refuse to be mapped
    # over some axes alone.
    over = set(mesh.axis_names) - set(mesh.manual_axes)
    in_specs = lies, P(FSDP), P(FSDP), P(), P()
    mapped = jax.shard_map(
        own, in_specs=in_specs, out_specs=(P(), lies), axis_names=over, check_vma=False
    )
    return mapped(model.params, batch, rows, key, [given for _, given in pairs])


def micro_batches(batch: Tree, accumulate: int) -> Tree:
    """[accumulate, samples of each, ...]: the devices keep the samples that they have."""
    return jax.tree.map(lambda x: x.reshape(-1, accumulate, *x.shape[1:]).swapaxes(0, 1), batch)


def cut(batch: Tree, windows: int) -> Tree:
    """Every sample as so many shorter ones."""
    return (
        batch
        if windows == 1
        else jax.tree.map(lambda x: x.reshape(-1, x.shape[1] // windows), batch)
    )


@jax.named_scope("optimizer")
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
    return replace(
        model, params=jax.tree.map(lambda p, u, r: p - r * u, model.params, updates, rates), opt=opt
    )


def eval_step(accumulate: int = 1, axis: str | None = None):
    """``(model, batch) -> {"val_loss", "val_accuracy"}``, means over micro-batches and devices; targets are classes."""

    def judged(model: Model, batch: Batch):
        loss, accuracy = scores(model, batch)
        return {"val_loss": loss, "val_accuracy": accuracy}

    def step(model: Model, batch: Batch):
        if accumulate == 1:
            return _mean(judged(model, batch), axis)
        each = jax.lax.map(lambda micro: judged(model, micro), micro_batches(batch, accumulate))
        return _mean(jax.tree.map(jnp.mean, each), axis)

    return step

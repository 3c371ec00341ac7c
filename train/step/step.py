"""The train step and the evaluation step: pure functions of a model and a batch.

`train.step.parallel` maps them over devices, each with its part of the batch. A train step
has three parts, each in a function: gradients, update, and hold. The modifiers of the phase
(`train.plan.modifiers`) can change each part.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import PartitionSpec as P

from jaxgrow.axes import Tree
from jaxgrow.sharding import only_mesh_axes
from train.data.dataset import Batch
from train.plan.training import Micro, Modifier
from train.state.mesh import FSDP
from train.state.model import (
    TrainState,
    constrained_like,
    cross_entropy,
    logits,
    narrow_leaves,
    placed,
    scores,
    specs,
    target_weights,
)
from train.state.packing import Packed, packed

# The modifiers of a phase, each with its inputs of this step.
Pairs: TypeAlias = Sequence[tuple[Modifier, Tree]]


@struct.dataclass
class StepInputs:
    """Inputs of a step besides model and batch, equal on all devices."""

    lr: jax.typing.ArrayLike
    number: jax.typing.ArrayLike = np.uint32(0)  # index of the step; random numbers depend on it
    seed: jax.typing.ArrayLike = np.uint32(0)  # seed of the run; random numbers depend on it
    given: tuple[Tree, ...] = ()  # inputs of each modifier
    ema: jax.typing.ArrayLike | None = None  # decay rate of the average of the weights
    # For steps that may be skipped: the numbers of skipped steps so far, as `skipping` returns them.
    skips: Tree = None


def train_step(
    tx: optax.GradientTransformation,
    accumulate: int,
    modifiers: Sequence[Modifier] = (),
    axis: str | None = None,
    once: bool = False,
    skip: bool = False,
):
    """Build the train step ``(model, batch, inputs) -> (model, metrics)``.

    Gradients are the mean over devices and micro-batches, so the division of a batch changes only
    rounding. The learning rate and the seed are arguments of the step, so phases and runs share one
    compiled program.

    Args:
      tx: optimizer without its learning rate (`train.state.optim.transformation`).
      accumulate: number of micro-batches per step.
      modifiers: modifiers of the phase. ``inputs.given`` holds the inputs of each one.
      axis: name of the mapped axis if the step gets one device's part of the batch; None if it gets
        the full batch.
      once: whether gradients are reduced once per step, as with ``mesh.gradients=step``
        (`gradients_once`).
      skip: whether a step whose loss or gradients are not finite keeps the model as it was, with its
        optimizer state (`skipping`).
    """
    tx = optax.with_extra_args_support(tx)

    def step(model: TrainState, batch: Batch, inputs: StepInputs):
        pairs = list(zip(modifiers, inputs.given, strict=True))
        key = jax.random.fold_in(jax.random.key(inputs.seed), inputs.number)
        rows = jnp.arange(len(batch[1])) + (
            0 if axis is None else jax.lax.axis_index(axis) * len(batch[1])
        )
        found = gradients_once if once else gradients
        batch = _normalise_weights(batch, axis)
        value, grads = _mean_over_devices(found(model, batch, rows, key, accumulate, pairs), axis)
        for modifier, given in pairs:
            grads = modifier.gradients(grads, model, given)
        after = updated(model, grads, tx, inputs.lr, pairs)
        for modifier, given in pairs:
            after = modifier.hold(model, after, given)
        if inputs.ema is not None:
            average = optax.incremental_update(after.params, model.average, 1 - inputs.ema)
            after = replace(after, average=average)
        metrics = {"loss": value, "grad_norm": optax.tree.norm(grads)}
        if skip:
            after, metrics["skips"] = skipping(model, after, metrics, inputs.skips)
        return placed(after), metrics

    return step


def skipping(
    before: TrainState, after: TrainState, metrics: Mapping[str, jax.Array], skips: jax.Array
) -> tuple[TrainState, jax.Array]:
    """Return ``before`` if the loss or the gradients are not finite, and otherwise ``after``.

    The metrics are equal on all devices, and therefore the decision as well. The host does not wait
    for it.

    Args:
      before: model before the step.
      after: model after the step.
      metrics: loss, and norm of the gradients.
      skips: int [3]: all skipped steps, those in a row up to now, and the longest row.

    Returns:
      The model, and the counts after the step.
    """
    good = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
    total, row, longest = skips
    row = jnp.where(good, 0, row + 1)
    counts = jnp.stack([total + ~good, row, jnp.maximum(longest, row)])
    return jax.tree.map(lambda new, old: jnp.where(good, new, old), after, before), counts


def packed_step(*args: Any, **kwargs: Any) -> Callable:
    """Build `train_step` for `Packed` models: ``(packed, batch, inputs) -> (packed, metrics)``.

    Args:
      *args: positional arguments of `train_step`.
      **kwargs: keyword arguments of `train_step`.
    """
    step = train_step(*args, **kwargs)

    def run(state: Packed, batch: Batch, inputs: StepInputs):
        model, metrics = step(state.model, batch, inputs)
        return packed(model), metrics

    return run


def _mean_over_devices(tree: Tree, axis: str | None) -> Tree:
    return tree if axis is None else jax.lax.pmean(tree, axis)


def _normalise_weights(batch: Batch, axis: str | None) -> Batch:
    """Divide the weights of targets by their mean over devices.

    Micro-batches and devices have different sums of weights. After `_weighted`, the mean over them
    is the weighted mean over all targets.
    """
    inputs, targets = batch
    weights = target_weights(inputs)
    if weights is None:
        return batch
    mean = jnp.maximum(_mean_over_devices(weights.mean(), axis), jnp.finfo(weights.dtype).tiny)
    return inputs | {"weights": weights / mean}, targets


def _weighted(means: Tree, batch: Batch) -> Tree:
    """Multiply the weighted means of a micro-batch by its mean weight, if targets have weights."""
    weights = target_weights(batch[0])
    return means if weights is None else jax.tree.map(lambda x: x * weights.mean(), means)


def gradients(
    model: TrainState, batch: Batch, rows: jax.Array, key: jax.Array, accumulate: int, pairs: Pairs
) -> tuple[jax.Array, Tree]:
    """Return ``(cross-entropy, gradients of the objective)``, the means over micro-batches.

    With ``n = accumulate``, micro-batch ``i`` holds the samples ``i, i + n, i + 2 n, ...``, so the
    same samples are together on any number of devices.

    Args:
      model: model to differentiate.
      batch: inputs and targets, each [samples, ...].
      rows: index of each sample in the batch of all devices, int [samples].
      key: random key of the step.
      accumulate: number of micro-batches.
      pairs: modifiers of the phase, each with its inputs of this step.
    """

    def gradient(batch: Batch, rows: jax.Array, number: int | jax.Array):
        micro = Micro(number, key, rows)
        (_, value), grads = jax.value_and_grad(
            lambda params: _objective(replace(model, params=params), batch, micro, pairs),
            has_aux=True,
        )(model.params)
        return value, constrained_like(grads, model)

    if accumulate == 1:
        return gradient(batch, rows, 0)
    total, _ = jax.lax.scan(
        lambda total, micro: (jax.tree.map(jnp.add, total, gradient(*micro)), None),
        jax.tree.map(_zeros, (jnp.zeros(()), model.params)),
        (micro_batches(batch, accumulate), micro_batches(rows, accumulate), jnp.arange(accumulate)),
    )
    return jax.tree.map(lambda x: x / accumulate, total)


def _objective(
    model: TrainState, batch: Batch, micro: Micro, pairs: Pairs
) -> tuple[jax.Array, jax.Array]:
    """Return ``(objective, cross-entropy)`` of a micro-batch."""
    inputs, targets = batch = cut(batch, math.prod(modifier.windows for modifier, _ in pairs))
    options = {}
    for modifier, given in pairs:
        options |= modifier.options(given, micro, model.config)
    if not any(modifier.reads_logits and given is not None for modifier, given in pairs):
        value, _ = scores(model, batch, **options)
        return _weighted((value, value), batch)
    output = logits(model, inputs, **options)
    minimised = value = cross_entropy(output, targets, target_weights(inputs))
    for modifier, given in pairs:
        minimised = modifier.objective(minimised, output, inputs, given)
    return _weighted((minimised, value), batch)


def _zeros(x: jax.Array) -> jax.Array:
    """Zeros of the shape of ``x`` for a sum, in float32 or a wider dtype."""
    return jnp.zeros_like(x, jnp.promote_types(x.dtype, jnp.float32))


def gradients_once(
    model: TrainState, batch: Batch, rows: jax.Array, key: jax.Array, accumulate: int, pairs: Pairs
) -> tuple[jax.Array, Tree]:
    """Compute `gradients` with one gather of the weights and one gradient reduction per step.

    The devices along ``fsdp`` gather all weights before the micro-batches and reduce the gradients
    after them. Each device sums its gradients in float32. Weights that layers use only in the dtype
    of activations are gathered in this dtype.
    """
    mesh = jax.sharding.get_abstract_mesh()
    lies = jax.tree.map(lambda s: only_mesh_axes(s, [FSDP]), specs(model, mesh).params)
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
        params: Tree, batch: Batch, rows: jax.Array, key: jax.Array, given: Tree
    ) -> tuple[jax.Array, Tree]:
        whole = replace(model, params=jax.tree.map(gather, params, lies, narrow), opt=None)
        found = [(modifier, g) for (modifier, _), g in zip(pairs, given, strict=True)]
        value, grads = gradients(whole, batch, rows, key, accumulate, found)
        return jax.lax.pmean(value, FSDP), jax.tree.map(reduce, grads, lies)

    # All axes are mapped, including axes of size 1, because kernels of cuDNN do not support a map
    # over only some of the axes.
    over = set(mesh.axis_names) - set(mesh.manual_axes)
    in_specs = lies, P(FSDP), P(FSDP), P(), P()
    mapped = jax.shard_map(
        own, in_specs=in_specs, out_specs=(P(), lies), axis_names=over, check_vma=False
    )
    return mapped(model.params, batch, rows, key, [given for _, given in pairs])


def micro_batches(batch: Tree, accumulate: int) -> Tree:
    """Reshape to [accumulate, samples per micro-batch, ...]; samples stay on their devices."""
    return jax.tree.map(lambda x: x.reshape(-1, accumulate, *x.shape[1:]).swapaxes(0, 1), batch)


def cut(batch: Tree, windows: int) -> Tree:
    """Cut every sample into ``windows`` shorter ones."""
    if windows == 1:
        return batch
    return jax.tree.map(lambda x: x.reshape(-1, x.shape[1] // windows), batch)


@jax.named_scope("optimizer")
def updated(
    model: TrainState,
    grads: Tree,
    tx: optax.GradientTransformationExtraArgs,
    lr: jax.typing.ArrayLike,
    pairs: Pairs,
) -> TrainState:
    """Return ``model`` after one update of the optimizer."""
    updates, opt = tx.update(grads, model.opt, model.params, axes=model.axes)
    learning_rates = jax.tree.map(lambda _: lr, model.params)
    for modifier, given in pairs:
        learning_rates = modifier.learning_rates(learning_rates, model.opt, given)
    params = jax.tree.map(lambda p, u, r: p - r * u, model.params, updates, learning_rates)
    return replace(model, params=params, opt=opt)


def eval_step(accumulate: int = 1, axis: str | None = None):
    """Build the evaluation step ``(model, batch) -> {"val_loss", "val_accuracy"}``.

    Both values are means over micro-batches and devices; the targets are class indices. If targets
    have weights, the values are multiplied by their mean, which is then the value "weight"
    (`evaluated`).

    Args:
      accumulate: number of micro-batches.
      axis: name of the mapped axis, or None, as in `train_step`.
    """

    def judged(model: TrainState, batch: Batch):
        loss, accuracy = _weighted(scores(model, batch), batch)
        weights = target_weights(batch[0])
        weight = {} if weights is None else {"weight": weights.mean()}
        return {"val_loss": loss, "val_accuracy": accuracy} | weight

    def step(model: TrainState, batch: Batch):
        if accumulate == 1:
            return _mean_over_devices(judged(model, batch), axis)
        each = jax.lax.map(lambda micro: judged(model, micro), micro_batches(batch, accumulate))
        return _mean_over_devices(jax.tree.map(jnp.mean, each), axis)

    return step


def evaluated(batches: Sequence[Mapping[str, jax.typing.ArrayLike]]) -> dict[str, float]:
    """Return the mean of each value of `eval_step` over batches of the same number of targets."""
    found = jax.tree.map(lambda *x: np.mean(x), *batches)
    weight = found.pop("weight", None)
    return found if weight is None else {name: x / weight for name, x in found.items()}

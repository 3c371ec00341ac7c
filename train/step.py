"""The train step and the validation loss: pure functions of one device, which `train.parallel` maps over all."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from jaxgrow import grow, ligo
from jaxgrow.axes import sizes
from jaxgrow.drop import Kept, TokenDrop, sample_tokens
from jaxgrow.freeze import Freeze, hold
from jaxgrow.models import Config
from jaxgrow.models.layers import Some
from jaxgrow.moments import clock
from train.batches import Batch


@struct.dataclass
class Model:
    """What is trained, transformed, and kept under a name between phases."""

    params: Any  # of the model; or, with a ``base``, the coefficients of the maps that make it of the base
    opt: Any  # optimizer state; None: the next phase of training starts a fresh one
    config: Config = struct.field(pytree_node=False)
    sensitivity: Any = None  # float32 [layers], as last measured for layer dropping
    base: Any = None  # parameters of the small model that LiGO grows
    source: Config | None = struct.field(pytree_node=False, default=None)  # the base's config


def parameters(model: Model) -> Any:
    """The parameters that ``model.config`` computes with."""
    if model.base is None:
        return model.params
    assert model.source is not None
    axes = model.source.axes()
    growth = ligo.growth(model.params, axes, sizes(model.base, axes))
    return grow(growth, jax.lax.stop_gradient(model.base), axes)


def logits(model: Model, inputs: Any, **passes: Any) -> jax.Array:
    return model.config.module.apply({"params": parameters(model)}, inputs, **passes)  # type: ignore[return-value]


def loss(model: Model, batch: Batch, kept: Kept | None = None) -> jax.Array:
    """Mean cross-entropy of the targets of ``batch``, nats; ``kept`` as in `Kept`."""
    inputs, targets = batch
    return cross_entropy(logits(model, inputs, kept=kept), targets)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean; ``targets`` are classes, int [...], or probabilities of each, float [..., classes]."""
    if jnp.issubdtype(targets.dtype, jnp.integer):
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
    return optax.softmax_cross_entropy(logits, targets).mean()


@dataclass(frozen=True)
class Passes:
    """What a phase's steps do besides plain training: decides what is compiled."""

    hold_dropped: bool = False  # layers that no micro-batch ran keep parameters and moments
    freeze: Freeze | None = None
    tokens: TokenDrop | None = None
    temperature: float = 1.0  # of what a teacher says


@struct.dataclass
class Now:
    """What changes from step to step, or from run to run, besides the batch; the same on all devices."""

    lr: Any
    number: Any = np.uint32(0)  # of the step: what is drawn depends on it
    kept: Kept | None = None  # which layers run, for every micro-batch (a leading axis)
    teacher: Model | None = None
    lesson: Any = 0.0  # the weight of what it says
    rewarm: Any = (
        None  # (learning rate, birth): of the entries whose moments began at the step count ``birth`` or later
    )
    seed: Any = np.uint32(0)  # what is drawn depends on it, too


def inherited(logits_BTV: jax.Array, teacher_BTV: jax.Array, temperature: float) -> jax.Array:
    """``T^2 KL(p_teacher || p_student)`` at temperature T, the mean over tokens (Knowledge Inheritance, Qin et al., 2022)."""
    said, log_p = (jax.nn.log_softmax(x / temperature) for x in (teacher_BTV, logits_BTV))
    return temperature**2 * (jnp.exp(said) * (said - log_p)).sum(-1).mean()


def train_step(tx: optax.GradientTransformation, accumulate: int, axis: str, passes: Passes = Passes()):
    """``(model, batch, now) -> (model, metrics)``, for one device of the mapped axis ``axis``.

    Gradients are the mean over devices and ``accumulate`` micro-batches: how a batch is divided changes rounding only. The
    learning rate and the seed are arguments, so that phases and runs share one compilation. Where layers are dropped, those
    that did not run are still moved by momentum and decay, by a gradient of zero, unless ``passes`` says otherwise.
    """
    freeze, tx = passes.freeze or Freeze(below=False), optax.with_extra_args_support(tx)

    def objective(params: Any, model: Model, batch: Batch, kept: Kept | None, key: jax.Array, now: Now):
        """``(what is minimised, cross-entropy)``."""
        (inputs, targets), some = batch, None
        if passes.tokens is not None:
            places = sample_tokens(passes.tokens, key, len(targets), model.config.length)
            some = Some(places, *passes.tokens.middle(model.config.layers))
        frozen = passes.freeze.bottom(model.config.axes()) if passes.freeze else 0
        said = logits(replace(model, params=params), inputs, kept=kept, some=some, frozen=frozen)
        value = cross_entropy(said, targets)
        if now.teacher is None:
            return value, value
        lesson = inherited(said, jax.lax.stop_gradient(logits(now.teacher, inputs)), passes.temperature)
        return (1 - now.lesson) * value + now.lesson * lesson, value

    def step(model: Model, batch: Batch, now: Now):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(now.seed), now.number), jax.lax.axis_index(axis))
        keys = jax.random.split(key, accumulate)

        def gradient(batch, kept, key):
            (_, value), grads = jax.value_and_grad(objective, has_aux=True)(model.params, model, batch, kept, key, now)
            return value, grads

        if accumulate == 1:
            value, grads = gradient(batch, jax.tree.map(lambda x: x[0], now.kept), keys[0])
        else:
            zero = jax.tree.map(jnp.zeros_like, (jnp.zeros(()), model.params))
            total, _ = jax.lax.scan(
                lambda total, micro: (jax.tree.map(jnp.add, total, gradient(*micro)), None),
                zero,
                (jax.tree.map(lambda x: x.reshape(accumulate, -1, *x.shape[1:]), batch), now.kept, keys),
            )
            value, grads = jax.tree.map(lambda x: x / accumulate, total)
        value, grads = jax.lax.pmean((value, grads), axis)
        axes = model.config.axes()
        of_maps = model.base is not None  # what is learned is not named by the model's axes
        updates, opt = tx.update(grads, model.opt, model.params, axes=None if of_maps else axes)
        if now.rewarm is None:
            params = jax.tree.map(lambda p, u: p - now.lr * u, model.params, updates)
        else:
            lr, birth = now.rewarm
            params = jax.tree.map(
                lambda p, u, born: p - jnp.where(born >= birth, lr, now.lr) * u,
                model.params,
                updates,
                clock(model.opt).born,
            )
        held = np.zeros(model.config.layers, bool) if passes.freeze is None else freeze.mask(model.config.layers)
        if passes.hold_dropped and now.kept is not None:
            held = held | ~_ran(now.kept, model.config.layers)
        if passes.freeze is not None or (passes.hold_dropped and now.kept is not None):
            before, after = (model.params, model.opt), (params, opt)
            params, opt = hold(before, after, held, model.params, axes, freeze.paths, freeze.below)
        return replace(model, params=params, opt=opt), {"loss": value, "grad_norm": optax.tree.norm(grads)}

    return step


def _ran(kept: Kept, layers: int) -> jax.Array:
    """The layers that some micro-batch ran, bool [layers]."""
    open_: Any = kept.layers
    if open_.dtype == bool:
        return open_.reshape(-1, layers).any(0)
    return jnp.zeros(layers, bool).at[open_.reshape(-1)].set(True)


def eval_step(axis: str):
    """``(model, batch) -> {"val_loss", "val_accuracy"}``, means over all devices of ``axis``; targets are classes."""

    def step(model: Model, batch: Batch):
        inputs, targets = batch
        said = logits(model, inputs)
        right = (said.argmax(-1) == targets).mean()
        return jax.lax.pmean({"val_loss": cross_entropy(said, targets), "val_accuracy": right}, axis)

    return step

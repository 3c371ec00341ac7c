"""Models, as a run keeps them, and what they compute: logits and the loss."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxgrow import grow, ligo
from jaxgrow.axes import Tree, sizes
from jaxgrow.drop import Kept
from jaxgrow.models import Config
from train.data.batches import Batch


@struct.dataclass
class Model:
    """What is trained, transformed, and kept under a name between phases."""

    params: Any  # of the model; or, with a ``base``, the coefficients of the maps that make it of the base
    opt: Any  # optimizer state; None: the next phase of training starts a fresh one
    config: Config = struct.field(pytree_node=False)
    sensitivity: Any = None  # float32 [layers], as last measured for layer dropping
    base: Any = None  # parameters of the small model that LiGO grows
    source: Config | None = struct.field(pytree_node=False, default=None)  # the base's config

    @property
    def axes(self) -> Tree | None:
        """The axis names of what is learned; None of maps, which are not named by the model's axes."""
        return self.config.axes() if self.base is None else None


@partial(jax.jit, static_argnums=0)  # traced once a config, though every look at a plan's shapes asks
def initial(config: Config, key: jax.Array) -> Tree:
    """Fresh parameters."""
    return config.init(key)


def parameters(model: Model) -> Any:
    """The parameters that ``model.config`` computes with."""
    if model.base is None:
        return model.params
    assert model.source is not None
    axes = model.source.axes()
    growth = ligo.growth(model.params, axes, sizes(model.base, axes))
    return grow(growth, jax.lax.stop_gradient(model.base), axes)


def logits(model: Model, inputs: Any, **options: Any) -> jax.Array:
    return model.config.module.apply({"params": parameters(model)}, inputs, **options)  # type: ignore[return-value]


def loss(model: Model, batch: Batch, kept: Kept | None = None) -> jax.Array:
    """Mean cross-entropy of the targets of ``batch``, nats; ``kept`` as in `Kept`."""
    inputs, targets = batch
    return cross_entropy(logits(model, inputs, kept=kept), targets)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean; ``targets`` are classes, int [...], or probabilities of each, float [..., classes]."""
    if jnp.issubdtype(targets.dtype, jnp.integer):
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
    return optax.softmax_cross_entropy(logits, targets).mean()

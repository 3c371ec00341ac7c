"""The models of a run with their training state, and the functions that evaluate them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol, TypeAlias

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxgrow import sharding
from jaxgrow.axes import Axes, Params, Tree, axis_kind, is_names, path, role_of
from jaxgrow.layerdrop import KeepMask
from jaxgrow.models import Config
from jaxgrow.models.loss import weighted_mean
from jaxgrow.optim.scaling import MULTIPLIERS
from train.data.dataset import Batch

# The name of a file of a run, its arrays, and the function that writes them to a path.
KeptFile: TypeAlias = tuple[str, Tree, Callable[[Path, Tree], None]]


class Parametrisation(Protocol):
    """How the parameters of a model are computed from trained and frozen ones.

    ``trained`` is `TrainState.params`, and ``base`` is `TrainState.base`. A new parameter-efficient
    way to train a model is a class with these methods, and a `train.plan.training.Train` that
    starts it: LiGO (`train.plan.learning`), adapters and LoRA (`train.extras.adapting`).
    """

    def axes(self, config: Config) -> Axes | None:
        """Return the axis names of the trained parameters, or None if they do not have any."""
        ...

    def base_axes(self, config: Config) -> Axes:
        """Return the axis names of the frozen parameters."""
        ...

    def parameters(self, config: Config, trained: Tree, base: Params) -> Params:
        """Return the parameters that the model computes with."""
        ...

    def plain(self, config: Config, trained: Tree, base: Params) -> Params:
        """Return parameters of the same function with the tree structure of ``config``."""
        ...

    def kept_file(self, model: "TrainState") -> KeptFile:
        """Return the file in which a run keeps the trained parameters."""
        ...


@struct.dataclass
class TrainState:
    """A model with its training state, as a run keeps it under a name between phases.

    Attributes:
      params: trained parameters: those of the model itself or, with a ``base``, those that compute
        the model's parameters from it.
      opt: optimizer state; if it is None, the next phase of training starts a fresh one.
      config: config of the model.
      sensitivity: last measured sensitivity of each layer for layer dropping, float32 [layers].
      base: frozen parameters: the small model that LiGO grows, or the body that an adapter belongs
        to.
      parametrisation: how the parameters of the model are computed from ``params`` and ``base``;
        None if ``params`` are the parameters.
      average: moving average of ``params``, if the run keeps one (`train.state.optim.Optim.ema`).
    """

    params: Tree
    opt: Tree
    config: Config = struct.field(pytree_node=False)
    sensitivity: Tree = None
    base: Tree = None
    parametrisation: Parametrisation | None = struct.field(pytree_node=False, default=None)
    average: Tree = None

    @property
    def axes(self) -> Tree | None:
        """The axis names of ``params``; None for LiGO's maps, which have other axes."""
        by = self.parametrisation
        return self.config.axes() if by is None else by.axes(self.config)


def specs(
    model: TrainState, mesh: sharding.AnyMesh, rules: Mapping[str, str] = sharding.RULES
) -> TrainState:
    """Return the partition specs of a model, or of its shapes, on a mesh (`jaxgrow.sharding`).

    Learned growth maps are replicated.
    """
    axes = model.axes
    by = model.parametrisation
    base = (
        None
        if by is None
        else sharding.partition_specs(model.base, by.base_axes(model.config), mesh, rules)
    )
    if axes is None:
        return replace(
            model,
            params=_replicated(model.params),
            opt=_replicated(model.opt),
            base=base,
            average=_replicated(model.average),
        )
    own = sharding.partition_specs(model.params, axes, mesh, rules)
    return replace(
        model,
        params=own,
        opt=None
        if model.opt is None
        else sharding.optimizer_specs(model.opt, model.params, axes, mesh, rules),
        sensitivity=_replicated(model.sensitivity),
        base=base,
        average=None if model.average is None else own,
    )


def _replicated(tree: Tree) -> Tree:
    """Return the partition specs of arrays that every device holds completely."""
    return jax.tree.map(lambda _: P(), tree)


def shardings(model: TrainState, mesh: Mesh) -> TrainState:
    """Return `specs` as shardings on ``mesh``."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs(model, mesh))


def placed(model: TrainState, rules: Mapping[str, str] = sharding.RULES) -> TrainState:
    """Constrain ``model`` to its `specs` on the current mesh, if one is set; for traced code."""
    mesh = jax.sharding.get_abstract_mesh()
    return sharding.constrain_sharding(model, specs(model, mesh, rules))


def shared_rules(models: Iterable[TrainState]) -> Mapping[str, str]:
    """Return `RULES` without the axes that one of the models cannot shard on the current mesh."""
    mesh = jax.sharding.get_abstract_mesh().shape
    sizes = [item for model in models for item in model.config.sizes().items()]
    return {
        kind: over
        for kind, over in sharding.RULES.items()
        if all(size % mesh.get(over, 1) == 0 for axis, size in sizes if axis_kind(axis) == kind)
    }


def constrained_like(grads: Tree, model: TrainState) -> Tree:
    """Constrain gradients to the shardings of the parameters of ``model``; for traced code."""
    return sharding.constrain_sharding(grads, specs(model, jax.sharding.get_abstract_mesh()).params)


def narrow_leaves(model: TrainState) -> Tree:
    """Return for each leaf of ``params`` whether it is used only in the dtype of activations.

    These are the kernels of the layers if `Config.narrow_kernels`.
    """
    plain = model.parametrisation is None and model.config.narrow_kernels

    def narrow(key_path, names):
        name = path(key_path)
        return plain and name.startswith("blocks/") and role_of(name, names) == "kernel"

    if model.axes is None:
        return jax.tree.map(lambda _: False, model.params)
    return jax.tree_util.tree_map_with_path(narrow, model.axes, is_leaf=is_names)


# Under jit, it is traced once per config, although many callers ask for the shapes of a plan.
@partial(jax.jit, static_argnums=(0, 2))
def initial(config: Config, key: jax.Array, base: Config | None = None) -> Tree:
    """Return freshly initialised parameters; with a ``base``, each one at CompleteP's scale."""
    params = config.init(key)
    if base is None:
        return params
    found = MULTIPLIERS["completep"](
        config.axes(), config.sizes(), base.sizes(), config.depth_scaled
    )
    return jax.tree_util.tree_map_with_path(lambda p, x: x * found[path(p)].scale, params)


def parameters(model: TrainState) -> Params:
    """Return the parameters that ``model.config`` computes with."""
    if model.parametrisation is None:
        return model.params
    base = jax.lax.stop_gradient(model.base)
    return model.parametrisation.parameters(model.config, model.params, base)


def plain(model: TrainState) -> Params:
    """Return parameters of the same function with the tree structure of ``model.config``."""
    if model.parametrisation is None:
        return model.params
    return model.parametrisation.plain(model.config, model.params, model.base)


def logits(model: TrainState, inputs: Tree, **options: object) -> jax.Array:
    return model.config.module.apply({"params": parameters(model)}, inputs, **options)  # type: ignore[return-value]


def scores(model: TrainState, batch: Batch, **options: object) -> tuple[jax.Array, jax.Array]:
    """Return ``(mean loss, accuracy)`` of a batch.

    The loss is the cross-entropy, and a prediction is correct if the target is the most likely
    class. A span is correct if both of its ends are. If the model predicts one number, the loss is
    the squared error, and errors below 0.5 are correct. If the model predicts tokens, the logits
    over the vocabulary are never materialised as one array.
    """
    inputs, targets = batch
    if model.config.predicts == "tokens":
        return logits(model, inputs, targets=targets, **options)  # type: ignore[return-value]
    output = logits(model, inputs, **options)
    if model.config.predicts == "spans":  # classes are the positions, for each end
        output = output.swapaxes(1, 2)
        return cross_entropy(output, targets), (output.argmax(-1) == targets).all(-1).mean()
    if output.shape[-1] == 1:
        error = jnp.abs(output[..., 0] - targets)
        return jnp.square(error).mean(), (error < 0.5).mean()
    classes = targets if jnp.issubdtype(targets.dtype, jnp.integer) else targets.argmax(-1)
    return cross_entropy(output, targets), (output.argmax(-1) == classes).mean()


def target_weights(inputs: Tree) -> jax.Array | None:
    """Return the weights of the targets of a batch, float [B, T]; None: all targets count alike."""
    return inputs.get("weights") if isinstance(inputs, Mapping) else None


def loss(model: TrainState, batch: Batch, keep_mask: KeepMask | None = None) -> jax.Array:
    """Return the mean cross-entropy of the targets of ``batch`` in nats.

    Args:
      model: model to evaluate.
      batch: inputs and targets.
      keep_mask: layers and tokens that the model keeps (`KeepMask`); None keeps all of them.
    """
    return scores(model, batch, keep_mask=keep_mask)[0]


def cross_entropy(
    logits: jax.Array, targets: jax.Array, weights: jax.Array | None = None
) -> jax.Array:
    """Return the mean cross-entropy in nats.

    Args:
      logits: float [..., classes].
      targets: class indices, int [...], or class probabilities, float [..., classes].
      weights: weights of class indices in the mean, float [...]; None: 1.
    """
    if jnp.issubdtype(targets.dtype, jnp.integer):
        each = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return weighted_mean(each, weights)
    return optax.softmax_cross_entropy(logits, targets).mean()


# --- task heads: the layers on top of the model body, which differ between tasks ---

HEADS = (
    "transform",
    "head_norm",
    "head_bias",
    "head_kernel",
    "pooler",
    "classifier",
    "head",
    "distillation_head",
)


def split_head(tree: Tree) -> tuple[Tree, Tree]:
    """Split parameters, or a tree of their structure, into ``(body, head)``."""
    return {n: of for n, of in tree.items() if n not in HEADS}, {
        n: of for n, of in tree.items() if n in HEADS
    }


@partial(jax.jit, static_argnums=0)
def fresh_head(config: Config, key: jax.Array) -> Params:
    """Return freshly initialised parameters of the head."""
    return split_head(config.init(key))[1]

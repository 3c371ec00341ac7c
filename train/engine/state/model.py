"""Models, as a run keeps them, and what they compute: logits and the loss."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxgrow import sharding
from jaxgrow.axes import Tree, is_names, path, role
from jaxgrow.layerdrop import Kept
from jaxgrow.models import Config, TextConfig
from jaxgrow.optim.completep import multipliers
from train.data.batches import Batch
from train.engine.state.assembly import Made


@struct.dataclass
class Model:
    """What is trained, transformed, and kept under a name between phases."""

    params: Any  # what trains: the model's own, or, with a ``base``, what makes them of it
    opt: Any  # optimizer state; None: the next phase of training starts a fresh one
    config: Config = struct.field(pytree_node=False)
    sensitivity: Any = None  # float32 [layers], as last measured for layer dropping
    # Parameters that stand still: of the small model that LiGO grows, or of the body that an
    # adapter is of.
    base: Any = None
    made: Made | None = struct.field(
        pytree_node=False, default=None
    )  # how ``params`` and ``base`` make the parameters

    @property
    def axes(self) -> Tree | None:
        """The axis names of ``params``; None of maps, which are not named by the model's axes."""
        return self.config.axes() if self.made is None else self.made.axes(self.config)


def specs(model: Model, mesh: sharding.AnyMesh) -> Model:
    """How a model, or its shapes, is divided among the devices of a mesh (`jaxgrow.sharding`). Learned maps are not."""
    axes, everywhere = model.axes, lambda tree: jax.tree.map(lambda _: P(), tree)
    base = (
        None
        if model.made is None
        else sharding.specs(model.base, model.made.base_axes(model.config), mesh)
    )
    if axes is None:
        return replace(model, params=everywhere(model.params), opt=everywhere(model.opt), base=base)
    return replace(
        model,
        params=sharding.specs(model.params, axes, mesh),
        opt=None
        if model.opt is None
        else sharding.optimizer_specs(model.opt, model.params, axes, mesh),
        sensitivity=everywhere(model.sensitivity),
        base=base,
    )


def shardings(model: Model, mesh: Mesh) -> Model:
    """`specs`, on this mesh."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs(model, mesh))


def placed(model: Model) -> Model:
    """``model``, divided by `specs` among the devices of the mesh that is set, if any; for traced code."""
    return sharding.constrained(model, specs(model, jax.sharding.get_abstract_mesh()))


def constrained_like(grads: Tree, model: Model) -> Tree:
    """Gradients, which lie as the parameters of ``model`` do; for traced code."""
    return sharding.constrained(grads, specs(model, jax.sharding.get_abstract_mesh()).params)


def narrow_leaves(model: Model) -> Tree:
    """Of each leaf of ``params``, whether the model uses it in the dtype of activations alone: the
    kernels of the layers of models of text, but for experts, whose gates are computed in float32.
    """
    plain = (
        model.made is None
        and isinstance(model.config, TextConfig)
        and not getattr(model.config, "experts", 0)
    )

    def narrow(key_path, names):
        name = path(key_path)
        return plain and name.startswith("blocks/") and role(name, names) == "kernel"

    if model.axes is None:
        return jax.tree.map(lambda _: False, model.params)
    return jax.tree_util.tree_map_with_path(narrow, model.axes, is_leaf=is_names)


@partial(
    jax.jit, static_argnums=(0, 2)
)  # traced once a config, though every look at a plan's shapes asks
def initial(config: Config, key: jax.Array, base: Config | None = None) -> Tree:
    """Fresh parameters; with a ``base``, each at CompleteP's scale."""
    params = config.init(key)
    if base is None:
        return params
    found = multipliers(config.axes(), config.sizes(), base.sizes(), config.depth_scaled)
    return jax.tree_util.tree_map_with_path(lambda p, x: x * found[path(p)].scale, params)


def parameters(model: Model) -> Any:
    """The parameters that ``model.config`` computes with."""
    if model.made is None:
        return model.params
    return model.made.parameters(model.config, model.params, jax.lax.stop_gradient(model.base))


def plain(model: Model) -> Any:
    """Parameters of the same function, of the structure that ``model.config`` has."""
    return (
        model.params
        if model.made is None
        else model.made.plain(model.config, model.params, model.base)
    )


def logits(model: Model, inputs: Any, **options: Any) -> jax.Array:
    return model.config.module.apply({"params": parameters(model)}, inputs, **options)  # type: ignore[return-value]


def scores(model: Model, batch: Batch, **options: Any) -> tuple[jax.Array, jax.Array]:
    """``(mean loss, share of the targets that are met)``; logits over a vocabulary are never whole.

    The loss is the cross-entropy, and what is most likely meets its target, of a span at both ends;
    of a model that says one number, the squared error, and within a half is met.
    """
    inputs, targets = batch
    if model.config.predicts == "tokens":
        return logits(model, inputs, targets=targets, **options)  # type: ignore[return-value]
    output = logits(model, inputs, **options)
    if model.config.predicts == "spans":  # over the places, for each end
        output = output.swapaxes(1, 2)
        return cross_entropy(output, targets), (output.argmax(-1) == targets).all(-1).mean()
    if output.shape[-1] == 1:
        error = jnp.abs(output[..., 0] - targets)
        return jnp.square(error).mean(), (error < 0.5).mean()
    classes = targets if jnp.issubdtype(targets.dtype, jnp.integer) else targets.argmax(-1)
    return cross_entropy(output, targets), (output.argmax(-1) == classes).mean()


def loss(model: Model, batch: Batch, kept: Kept | None = None) -> jax.Array:
    """Mean cross-entropy of the targets of ``batch``, nats; ``kept`` as in `Kept`."""
    return scores(model, batch, kept=kept)[0]


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean; ``targets`` are classes, int [...], or probabilities of each, float [..., classes]."""
    if jnp.issubdtype(targets.dtype, jnp.integer):
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
    return optax.softmax_cross_entropy(logits, targets).mean()

"""Models of Flax NNX: grown into a new graph of the new sizes, with their optimizer, and their layers dropped.

A graph holds sizes beside its arrays, such as ``Linear.out_features``. So a grown model is one that
its own constructor makes, with the grown parameters in it. All else of the library works on the
parameters as they are: ``nnx.as_pure(nnx.state(model, nnx.Param))`` is a tree of arrays, which
`jaxgrow.from_rules` names.
"""

from collections.abc import Callable, Iterator, MutableSequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxgrow.axes.names import Axes, Params
from jaxgrow.axes.stacking import restructured, stack_layers, unstack_layers
from jaxgrow.growth import apply, moments
from jaxgrow.growth.maps import Growth
from jaxgrow.layerdrop.execution import Kept, conditional, scaled, unbatched

M = TypeVar("M", bound=nnx.Module)


def axes(model: nnx.Module) -> Axes:
    """The axis names that the parameters of a model carry in their metadata: what `flax.nnx.get_partition_spec` reads.

    Args:
      model: whose parameters were made with ``out_sharding=("embed.in", "mlp")``; shapes suffice
        (`flax.nnx.eval_shape`).

    Returns:
      A tuple of names for each. If they have no marks, `jaxgrow.by_convention` adds them.

    Example:
      >>> model = nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0), use_bias=False, kernel_metadata={
      ...     "out_sharding": ("embed.in", "mlp"), "eager_sharding": False}))
      >>> axes(model)["kernel"]
      ('embed.in', 'mlp')
    """
    specs = nnx.as_pure(nnx.get_partition_spec(nnx.state(model, nnx.Param)))
    return jax.tree.map(tuple, specs, is_leaf=lambda s: isinstance(s, jax.sharding.PartitionSpec))


def build(make: Callable[[], M], params: Params) -> M:
    """The model that ``make`` makes, with these parameters in place of those that it would draw, which are never made.

    What a model has besides, such as the keys of its dropout, is as ``make`` makes it.

    Args:
      make: the constructor: ``lambda: Model(config, rngs=nnx.Rngs(0))``. Pure, as it is traced.
      params: a tree of arrays, as of ``nnx.as_pure(nnx.state(model, nnx.Param))``.

    Returns:
      A new model.

    Raises:
      ValueError: its parameters have other paths or shapes than these; all in one message.

    Example:
      >>> model = build(lambda: nnx.Linear(2, 3, use_bias=False, rngs=nnx.Rngs(0)), {"kernel": jnp.ones((2, 3))})
      >>> model(jnp.ones(2)).tolist()
      [2.0, 2.0, 2.0]
    """
    model, others = nnx.eval_shape(make), nnx.Not(nnx.Param)
    nnx.update(model, restructured(params, nnx.as_pure(nnx.state(model, nnx.Param))))
    if jax.tree.leaves(nnx.state(model, others)):
        nnx.update(model, _others(make))
    return model


@partial(jax.jit, static_argnums=0)
def _others(make: Callable[[], nnx.Module]) -> Any:
    """What is no parameter of a new model. Compiled once for each constructor, and without the parameters."""
    return nnx.as_pure(nnx.state(make(), nnx.Not(nnx.Param)))


def grow(
    model: M, growth: Growth, axes: Axes, make: Callable[[], M], layers: str | None = None
) -> M:
    """`jaxgrow.grow` for a model of NNX.

    Args:
      model: with all of its parameters in `flax.nnx.Param`.
      growth: as of `jaxgrow.grow`.
      axes: the names of its parameters, of `jaxgrow.from_rules` or `axes`; with ``layers``, stacked
        as these are.
      make: the constructor of the larger model, as of `build`.
      layers: where its layers are, if they are not stacked and growth is of ``layers``:
        ``"layers/{}"``, as of `jaxgrow.stack_layers`.

    Returns:
      The larger model; ``model`` stays as it is.

    Raises:
      ValueError: as `jaxgrow.grow`, `jaxgrow.stack_layers`, and `build`.

    Example:
      >>> from jaxgrow import from_rules, operators
      >>> def make(size):
      ...     layers = [nnx.Linear(*of, use_bias=False, rngs=nnx.Rngs(0)) for of in ((2, size), (size, 2))]
      ...     return nnx.Sequential(layers[0], nnx.relu, layers[1])
      >>> model, rules = make(3), {"layers/0/kernel": ("embed.in", "mlp"), "layers/2/kernel": ("mlp.in", "embed")}
      >>> names = from_rules(nnx.as_pure(nnx.state(model, nnx.Param)), rules)
      >>> wider = grow(model, operators.hypercloning({"mlp": 3}, {"mlp": 6}), names, lambda: make(6))
      >>> bool(jnp.allclose(wider(jnp.ones(2)), model(jnp.ones(2)), atol=1e-6))
      True
    """
    return build(make, _unstacked(apply.grow(growth, _params(model, layers), axes), layers))


def grow_optimizer(
    optimizer: nnx.Optimizer,
    model: nnx.Module,
    growth: Growth,
    axes: Axes,
    grown: nnx.Module,
    policy: moments.Policy,
    layers: str | None = None,
) -> nnx.Optimizer:
    """`jaxgrow.grow_optimizer` for an optimizer of NNX.

    Args:
      optimizer: of ``model``.
      model: before the growth.
      growth: as of `grow`.
      axes: as of `grow`.
      grown: what `grow` made of the model.
      policy: as of `jaxgrow.grow_optimizer`.
      layers: as of `grow`.

    Returns:
      An optimizer of ``grown`` with the same transformation.

    Raises:
      ValueError: as `jaxgrow.grow_optimizer`.

    Example:
      >>> import optax
      >>> from jaxgrow import from_rules, operators
      >>> def make(size):
      ...     return nnx.Linear(2, size, use_bias=False, rngs=nnx.Rngs(0))
      >>> model, growth = make(3), operators.hypercloning({"mlp": 3}, {"mlp": 6})
      >>> names = from_rules(nnx.as_pure(nnx.state(model, nnx.Param)), {"kernel": ("embed.in", "mlp")})
      >>> wider = grow(model, growth, names, lambda: make(6))
      >>> optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
      >>> grow_optimizer(optimizer, model, growth, names, wider, "copy").opt_state[0].mu["kernel"].shape
      (2, 6)
    """
    state = nnx.as_pure(optimizer.opt_state)
    state = stack_layers(state, layers) if layers else state
    state = moments.grow_optimizer(
        optimizer.tx, state, growth, _params(model, layers), axes, policy, layers
    )
    out = nnx.Optimizer(grown, optimizer.tx, wrt=optimizer.wrt)
    nnx.update(
        out.opt_state,
        nnx.state(restructured(_unstacked(state, layers), nnx.as_pure(out.opt_state))),
    )
    out.step[...] = optimizer.step[...]
    return out


def _params(model: nnx.Module, layers: str | None) -> Params:
    params = nnx.as_pure(nnx.state(model, nnx.Param))
    return stack_layers(params, layers) if layers else params


def _unstacked(tree: Params, layers: str | None) -> Params:
    return unstack_layers(tree, layers) if layers else tree


@contextmanager
def dropping(blocks: MutableSequence, kept: Kept) -> Iterator[None]:
    """Inside, the i-th of a model's ``blocks`` runs only if ``kept.layers[i]``: an NNX model drops layers, as it is.

    For models that call the blocks of a list. Each takes the array that it changes first and
    returns it. Random streams of a block advance whether it runs or not; other variables that it
    would write (batch statistics, caches) are not kept. Blocks that are stacked for ``nnx.scan``
    need nothing of this: with ``graphdef, state = nnx.split(blocks)``,
    `jaxgrow.models.layers.run_stack` runs ``lambda w, x: nnx.merge(graphdef, w)(x)`` over
    ``state``.

    Args:
      blocks: the list, ``model.layers``; inside the loss, as all that depends on parameters.
      kept: their gates, bool [layers], and what kept ones are scaled by, as
        ``Kept(gates, 1 / probs)``.

    Returns:
      A context, in which the model is called.

    Raises:
      ValueError: there are more or fewer blocks than gates, gates are indices, or a block does not
        return what it takes.

    Example:
      >>> model = nnx.Sequential(*(nnx.Linear(1, 1, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0)) for _ in range(3)))
      >>> model.layers[1].kernel[...] *= 10
      >>> with dropping(model.layers, Kept(jnp.array([True, False, True]))):
      ...     print(model(jnp.ones(1)))
      [1.]
    """
    if kept.layers is None or kept.layers.dtype != bool or len(kept.layers) != len(blocks):
        raise ValueError(
            f"dropping() takes a gate for each of {len(blocks)} blocks, bool, not {kept.layers}"
        )
    gates, whole = unbatched(kept.layers), list(blocks)
    for i, block in enumerate(whole):
        scale = None if kept.scale is None else jnp.asarray(kept.scale[i : i + 1])
        blocks[i] = _gated(block, gates[i : i + 1], scale, kept)
    try:
        yield
    finally:
        blocks[:] = whole


def _gated(block: nnx.Module, gate: jax.Array, scale: jax.Array | None, kept: Kept) -> Callable:
    def call(x, *args, **kwargs):
        keys = {
            path: node() for path, node in nnx.iter_graph(block) if isinstance(node, nnx.RngStream)
        }
        graphdef, state = nnx.split(block)

        def apply(w, x, *scale):
            state, keys = w
            own = nnx.merge(graphdef, state)
            for path, node in nnx.iter_graph(own):
                if path in keys and isinstance(node, nnx.RngStream):
                    node.key[...] = keys[path]
            y = own(x, *scale, *args, **kwargs)
            if getattr(y, "shape", None) != x.shape or y.dtype != x.dtype:
                raise ValueError(
                    f"{type(block).__name__} takes {x.dtype}{list(x.shape)} and returns "
                    f"{jax.tree.map(jnp.shape, y)}: what is dropped hands on its argument, so that must be what it returns"
                )
            return y

        def layer(inputs, x):
            return scaled(apply, kept)(inputs[0], x, inputs[1])

        one = jax.tree.map(lambda a: a[None], (state, keys))
        return conditional(layer)(gate, (one, scale), x)

    return call

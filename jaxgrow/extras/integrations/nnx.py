"""How are models of Flax NNX grown, with their optimizers, and how are their layers dropped?

The graph of an NNX model contains sizes as well as arrays, such as ``Linear.out_features``. The
grown model is therefore constructed by its own constructor, and then receives the grown parameters.
All other functions of the library work on the parameters directly:
``nnx.as_pure(nnx.state(model, nnx.Param))`` is a tree of arrays, and `jaxgrow.from_rules` assigns
axis names to it.
"""

from collections.abc import Callable, Iterator, MutableSequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxgrow.axes.names import Axes, Params, Tree
from jaxgrow.axes.stacking import stack_layers, unstack_layers
from jaxgrow.extras.other_models.restructuring import restructure
from jaxgrow.growth import apply, moments
from jaxgrow.growth.maps import Growth
from jaxgrow.layerdrop.execution import KeepMask, conditional, scaled, unbatched

M = TypeVar("M", bound=nnx.Module)


def axes(model: nnx.Module) -> Axes:
    """Read the axis names from the metadata of a model's parameters.

    These are the names that `flax.nnx.get_partition_spec` returns.

    Args:
      model: a model whose parameters were created with ``out_sharding=("embed.in", "mlp")``. An
        abstract model from `flax.nnx.eval_shape` is sufficient.

    Returns:
      A tuple of names for each parameter. If the names lack the suffixes of jaxgrow, such as
      ``.in``, add them with `jaxgrow.by_convention`.

    Example:
      >>> model = nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0), use_bias=False, kernel_metadata={
      ...     "out_sharding": ("embed.in", "mlp"), "eager_sharding": False}))
      >>> axes(model)["kernel"]
      ('embed.in', 'mlp')
    """
    specs = nnx.as_pure(nnx.get_partition_spec(nnx.state(model, nnx.Param)))
    return jax.tree.map(tuple, specs, is_leaf=lambda s: isinstance(s, jax.sharding.PartitionSpec))


def build_nnx(make: Callable[[], M], params: Params) -> M:
    """Construct a model with the given parameters, without allocating its initial parameters.

    Other variables, such as the random keys of dropout, are initialised by ``make``.

    Args:
      make: the constructor, such as ``lambda: Model(config, rngs=nnx.Rngs(0))``. It must be pure,
        because it is traced.
      params: a tree of arrays, as returned by ``nnx.as_pure(nnx.state(model, nnx.Param))``.

    Returns:
      A new model.

    Raises:
      ValueError: paths or shapes of ``params`` differ from those of the model. The message lists
        all differences.

    Example:
      >>> model = build_nnx(lambda: nnx.Linear(2, 3, use_bias=False, rngs=nnx.Rngs(0)), {"kernel": jnp.ones((2, 3))})
      >>> model(jnp.ones(2)).tolist()
      [2.0, 2.0, 2.0]
    """
    model = nnx.eval_shape(make)
    others = nnx.Not(nnx.Param)
    nnx.update(model, restructure(params, nnx.as_pure(nnx.state(model, nnx.Param))))
    if jax.tree.leaves(nnx.state(model, others)):
        nnx.update(model, _other_variables(make))
    return model


@partial(jax.jit, static_argnums=0)
def _other_variables(make: Callable[[], nnx.Module]) -> Tree:
    """The variables of a new model that are not parameters.

    The function is compiled once per constructor, and XLA removes the initialisation of the
    parameters.
    """
    return nnx.as_pure(nnx.state(make(), nnx.Not(nnx.Param)))


def grow_nnx(
    model: M, growth: Growth, axes: Axes, make: Callable[[], M], layers: str | None = None
) -> M:
    """Grow a model of Flax NNX, as `jaxgrow.grow` grows a parameter tree.

    Args:
      model: the model; all its parameters are of type `flax.nnx.Param`.
      growth: the growth, as for `jaxgrow.grow`.
      axes: the axis names of the parameters, from `jaxgrow.from_rules` or `axes`. With ``layers``,
        the names are those of the stacked parameters.
      make: the constructor of the larger model, as for `build_nnx`.
      layers: the path of the layers, such as ``"layers/{}"``, as for `jaxgrow.stack_layers`.
        Required if the growth changes ``layers`` and the model stores its layers separately.

    Returns:
      The larger model; ``model`` does not change.

    Raises:
      ValueError: as `jaxgrow.grow`, `jaxgrow.stack_layers`, and `build_nnx`.

    Example:
      >>> from jaxgrow import from_rules, operators
      >>> def make(size):
      ...     layers = [nnx.Linear(*of, use_bias=False, rngs=nnx.Rngs(0)) for of in ((2, size), (size, 2))]
      ...     return nnx.Sequential(layers[0], nnx.relu, layers[1])
      >>> model, rules = make(3), {"layers/0/kernel": ("embed.in", "mlp"), "layers/2/kernel": ("mlp.in", "embed")}
      >>> names = from_rules(nnx.as_pure(nnx.state(model, nnx.Param)), rules)
      >>> wider = grow_nnx(model, operators.hypercloning({"mlp": 3}, {"mlp": 6}), names, lambda: make(6))
      >>> bool(jnp.allclose(wider(jnp.ones(2)), model(jnp.ones(2)), atol=1e-6))
      True
    """
    return build_nnx(make, _unstacked(apply.grow(growth, _params(model, layers), axes), layers))


def grow_nnx_optimizer(
    optimizer: nnx.Optimizer,
    model: nnx.Module,
    growth: Growth,
    axes: Axes,
    grown: nnx.Module,
    policy: moments.Policy,
    layers: str | None = None,
) -> nnx.Optimizer:
    """Grow an optimizer of Flax NNX, as `jaxgrow.grow_optimizer` grows an optimizer state.

    Args:
      optimizer: the optimizer of ``model``.
      model: the model before the growth.
      growth: the growth, as for `grow_nnx`.
      axes: the axis names of the parameters, as for `grow_nnx`.
      grown: the result of `grow_nnx` for the model.
      policy: the policy for the moments, as for `jaxgrow.grow_optimizer`.
      layers: the path of the layers, as for `grow_nnx`.

    Returns:
      An optimizer of ``grown`` with the same gradient transformation.

    Raises:
      ValueError: as `jaxgrow.grow_optimizer`.

    Example:
      >>> import optax
      >>> from jaxgrow import from_rules, operators
      >>> def make(size):
      ...     return nnx.Linear(2, size, use_bias=False, rngs=nnx.Rngs(0))
      >>> model, growth = make(3), operators.hypercloning({"mlp": 3}, {"mlp": 6})
      >>> names = from_rules(nnx.as_pure(nnx.state(model, nnx.Param)), {"kernel": ("embed.in", "mlp")})
      >>> wider = grow_nnx(model, growth, names, lambda: make(6))
      >>> optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
      >>> grow_nnx_optimizer(optimizer, model, growth, names, wider, "copy").opt_state[0].mu["kernel"].shape
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
        nnx.state(restructure(_unstacked(state, layers), nnx.as_pure(out.opt_state))),
    )
    out.step[...] = optimizer.step[...]
    return out


def _params(model: nnx.Module, layers: str | None) -> Params:
    params = nnx.as_pure(nnx.state(model, nnx.Param))
    return stack_layers(params, layers) if layers else params


def _unstacked(tree: Params, layers: str | None) -> Params:
    return unstack_layers(tree, layers) if layers else tree


@contextmanager
def drop_nnx_blocks(blocks: MutableSequence, keep_mask: KeepMask) -> Iterator[None]:
    """Drop layers of an unmodified NNX model: the i-th of its ``blocks`` runs only if it is kept.

    This supports models that call the blocks of a list one after another. Each block takes the
    array that it changes as its first argument, and returns it. The random streams of a block
    advance whether it runs or not. Other variables that a block writes (batch statistics, caches)
    are not stored. Blocks that are stacked for ``nnx.scan`` do not need this context: with
    ``graphdef, state = nnx.split(blocks)``, `jaxgrow.models.stack.run_stack` runs
    ``lambda w, x: nnx.merge(graphdef, w)(x)`` over ``state``.

    Args:
      blocks: the list of blocks, such as ``model.layers``. Enter the context inside the loss
        function, because the blocks depend on the parameters.
      keep_mask: the keep mask, bool [layers], and the factor of the kept layers, such as
        ``KeepMask(mask, 1 / probs)``.

    Returns:
      A context in which to call the model.

    Raises:
      ValueError: the keep mask does not have one entry per block, it contains indices, or the shape
        or dtype of the output of a block differs from its input.

    Example:
      >>> model = nnx.Sequential(*(nnx.Linear(1, 1, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0)) for _ in range(3)))
      >>> model.layers[1].kernel[...] *= 10
      >>> with drop_nnx_blocks(model.layers, KeepMask(jnp.array([True, False, True]))):
      ...     print(model(jnp.ones(1)))
      [1.]
    """
    if (
        keep_mask.layers is None
        or keep_mask.layers.dtype != bool
        or len(keep_mask.layers) != len(blocks)
    ):
        raise ValueError(
            f"drop_nnx_blocks() requires a keep mask, bool [{len(blocks)}] with one entry per block, not "
            f"{keep_mask.layers}"
        )
    layers = unbatched(keep_mask.layers)
    whole = list(blocks)
    for i, block in enumerate(whole):
        scale = None if keep_mask.scale is None else jnp.asarray(keep_mask.scale[i : i + 1])
        blocks[i] = _gated_block(block, layers[i : i + 1], scale, keep_mask)
    try:
        yield
    finally:
        blocks[:] = whole


def _gated_block(
    block: nnx.Module, gate: jax.Array, scale: jax.Array | None, keep_mask: KeepMask
) -> Callable:
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
                    f"{jax.tree.map(jnp.shape, y)}. A dropped block returns its first argument, so "
                    "the output of a block must have the same shape and dtype"
                )
            return y

        def layer(inputs, x):
            return scaled(apply, keep_mask)(inputs[0], x, inputs[1])

        one = jax.tree.map(lambda a: a[None], (state, keys))
        return conditional(layer)(gate, (one, scale), x)

    return call

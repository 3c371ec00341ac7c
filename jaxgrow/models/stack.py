"""How stacked layers are created and run: remat, dropped layers, kept tokens.

Shape suffixes: B batch, T positions, S kept tokens, D embed.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import struct
from flax.core import meta
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.extend.core import Primitive

from jaxgrow.axes.names import LAYERS, Params, Tree
from jaxgrow.layerdrop.execution import Dropout, KeepMask, conditional, scaled, unbatched
from jaxgrow.sharding import split_sequences

T = TypeVar("T")
Remat: TypeAlias = Literal["none", "products", "projections", "full"]
# A function of a layer's input and output. Its result is returned with the model's output.
Observe: TypeAlias = Callable[[jax.Array, jax.Array], Tree]


def saves_products(primitive: Primitive, *_: object, **__: object) -> bool:
    """A policy of `jax.checkpoint` that saves the results of matrix products.

    It includes the products of experts and the results of attention kernels.
    """
    return primitive.name in ("dot_general", "pallas_call") or primitive.name.startswith(
        ("ragged_dot", "dot_product_attention_fwd")
    )


POLICIES = {
    "auto": saves_products,
    "products": saves_products,
    "projections": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


# Flax checks the shapes of parameters at each call of a model. With `jit`, the initialisation is
# traced only once for each block.
@partial(jax.jit, static_argnums=(0, 2), static_argnames="axis")
def stacked_init(
    block: nn.Module, key: jax.Array, layers: int, *args, axis: str = LAYERS
) -> Params:
    """Return the parameters of ``layers`` blocks, stacked along a leading ``axis``.

    Operators and layer dropping treat the blocks as layers only if ``axis`` is a layer axis.
    """
    params = jax.vmap(lambda k: block.init(k, *args)["params"])(jax.random.split(key, layers))
    return meta.add_axis(params, 0, {nn.PARTITION_NAME: axis})


def stacked_blocks(
    module: nn.Module, name: str, block: nn.Module, layers: int, *args, axis: str = LAYERS
) -> Params:
    """Return the stacked blocks of a compact module, as `stacked_init` makes them.

    The module gets them as the parameter ``name``. If a LoRA is stored with the kernels of the
    blocks (`jaxgrow.extras.peft.lora.attach_lora`), it is included.
    """
    given = flatten_dict(module.get_variable("params", name, {}))
    beside = {path: x for path, x in given.items() if path[-1] in ("a", "b")}

    def init(key: jax.Array) -> Params:
        fresh = stacked_init(block, key, layers, *args, axis=axis)
        return unflatten_dict(flatten_dict(fresh) | beside) if beside else fresh

    return module.param(name, init)


@struct.dataclass
class KeptTokens:
    """The tokens that pass through the layers ``begin .. end - 1``.

    Attributes:
      positions_BS: positions of these tokens, int32, ascending.
      begin: the first of the layers.
      end: the layer after the last one.
    """

    positions_BS: jax.Array
    begin: int = struct.field(pytree_node=False)
    end: int = struct.field(pytree_node=False)


@dataclass(frozen=True)
class Loop:
    """The layers ``begin .. end - 1`` run ``times`` times in turn, with the same weights.

    A run of a layer is a pass. A model of 4 layers with ``Loop(1, 3)`` has the passes 0, 1, 2, 1, 2
    and 3. Layer dropping, observations and the KV cache count passes instead of layers.

    Attributes:
      begin: the first of the layers.
      end: the layer after the last one.
      times: how often they run.
    """

    begin: int
    end: int
    times: int = 2

    def __post_init__(self):
        if not (0 <= self.begin < self.end and self.times > 1):
            raise ValueError(
                f"a loop runs at least one layer at least twice, but is {self}: set begin < end and "
                "times > 1"
            )

    def repeat(self, layers: Sequence[T]) -> list[T]:
        """Return the items of the passes from the items of the layers."""
        looped = layers[self.begin : self.end]
        return [*layers[: self.begin], *[*looped] * self.times, *layers[self.end :]]


def loop_blocks(blocks: Params, loop: Loop | None) -> Params:
    """Return the stacked blocks with a row for each pass of a `Loop`.

    The gradient of a layer is the sum of the gradients of its passes. The copies exist only inside
    of the step. (Indexing would add them up in any order on some devices.)
    """
    if loop is None:
        return blocks
    cuts = ((0, loop.begin), *[(loop.begin, loop.end)] * loop.times, (loop.end, None))
    return jax.tree.map(lambda w: jnp.concatenate([w[a:b] for a, b in cuts]), blocks)


def run_parts(
    apply: Callable,
    stacked: Params,
    x_BTD: jax.Array,
    *,
    kept_tokens: KeptTokens | None = None,
    apply_kept_tokens: Callable | None = None,
    frozen: int = 0,
    **options: Any,
) -> tuple[jax.Array, Tree]:
    """Split the stack into parts, and call `run_stack` for each part.

    The stack is split where dropped tokens leave and rejoin the residual stream, and above the
    bottom ``frozen`` layers.

    Args:
      apply: the block, as in `run_stack`.
      stacked: parameters of the blocks, stacked.
      x_BTD: input of the first block.
      kept_tokens: the tokens that pass through some of the layers; None: all tokens pass.
      apply_kept_tokens: replaces ``apply`` in the layers of ``kept_tokens`` if a block must know
        the positions of its tokens.
      frozen: number of frozen layers at the bottom.
      options: further arguments of `run_stack`.
    """
    layers = len(jax.tree.leaves(stacked)[0])
    begin, end = (kept_tokens.begin, kept_tokens.end) if kept_tokens else (0, 0)
    cuts = sorted({0, min(frozen, layers), begin, end, layers})
    observed = []
    for start, stop in itertools.pairwise(cuts):
        part = (
            stacked
            if stop - start == layers
            else jax.tree.map(lambda w, a=start, b=stop: w[a:b], stacked)
        )
        if stop <= frozen:
            part = jax.lax.stop_gradient(part)
        if kept_tokens is not None and begin <= start < end:
            rows = jnp.arange(len(x_BTD))[:, None]
            y, own = run_stack(
                apply_kept_tokens or apply, part, x_BTD[rows, kept_tokens.positions_BS], **options
            )
            x_BTD = x_BTD.at[rows, kept_tokens.positions_BS].set(
                y, unique_indices=True, indices_are_sorted=True
            )
        else:
            x_BTD, own = run_stack(apply, part, x_BTD, **options)
        observed.append(own)
    return x_BTD, jax.tree.map(lambda *parts: jnp.concatenate(parts), *observed)


def _kept_rows(of: jax.Array, a: jax.Array | np.ndarray) -> jax.Array:
    return (
        jnp.asarray(a)
        .at[of]
        .get(unique_indices=True, indices_are_sorted=True, mode="promise_in_bounds")
    )


def run_stack(
    apply: Callable,
    stacked: Params,
    x: jax.Array,
    *,
    remat: Literal["auto", Remat],
    scan: bool = True,
    observe: Observe | None = None,
    keep_mask: KeepMask | None = None,
) -> tuple[jax.Array, Tree]:
    """Run ``x`` through the blocks, one after the other.

    The blocks run in one scan, so that compile time does not grow with depth.

    ``remat`` sets the values that each block saves for the backward pass, which recomputes the
    others:

    - ``"products"``: the results of matrix products. The operations between them take less time to
      compute than to write and read.
    - ``"projections"``: the results of products with weights only, so that attention is recomputed
      (`docs/results/speed.md`).
    - ``"full"``: only the block's input.
    - ``"none"``: all values, so that nothing is recomputed.

    Args:
      apply: a block, ``apply(w, x) -> x``; with ``keep_mask.scaling == "sublayer"``,
        ``apply(w, x, scale)``.
      stacked: parameters of the blocks, stacked.
      x: input of the first block.
      remat: see above.
      scan: False unrolls the scan, except for layers behind conditionals.
      observe: function of each block's input and output.
      keep_mask: the blocks that run; None: all. Blocks that do not run cost only their zero gradients.

    Returns:
      ``(output, stacked results of observe, or None)``.
    """
    keep_mask = keep_mask or KeepMask(None)
    if observe is not None and keep_mask.layers is not None:
        raise ValueError(
            "observe needs a pass through all layers, but keep_mask drops some: leave out keep_mask"
        )
    stacked, scale, layers = _selected(stacked, keep_mask)
    layer = scaled(
        lambda w, x, *scale: split_sequences(apply(w, split_sequences(x), *scale)), keep_mask
    )
    indexed = keep_mask.layers is not None and layers is None
    if indexed and scale is not None and not isinstance(scale, Dropout):
        layer = _without_padding(layer)
    unrolled = not scan and layers is None
    if remat != "none":
        layer = jax.checkpoint(layer, prevent_cse=unrolled, policy=POLICIES[remat])
    if layers is not None:
        return conditional(lambda inputs, x: layer(inputs[0], x, inputs[1]))(
            layers, (stacked, scale), x
        ), None

    def body(x, inputs):
        w, scale = inputs
        y = layer(w, x, scale)
        return y, observe and observe(x, y)

    run = _unrolled if unrolled else jax.lax.scan
    return run(body, x, (stacked, scale))


def _without_padding(layer: Callable) -> Callable:
    """Return ``layer``, but with a scale of 0 it returns its input and has no gradients.

    A block can have losses of its own, such as the load balancing of experts. Their gradients do
    not depend on the gradient of the block's output, so the scale alone would not remove them.
    """

    def run(w, x, scale):
        runs = scale != 0
        w, own = _differentiated_if(runs, (w, x))
        return jnp.where(runs, layer(w, own, scale), x)

    return run


@jax.custom_vjp
def _differentiated_if(runs: jax.Array, tree: Tree) -> Tree:
    """Return ``tree``; its gradient is zero unless ``runs``.

    `jnp.where` and `jax.lax.stop_gradient` would do the same, but without remat the scan would then
    save a second copy of the weights.
    """
    return tree


def _differentiated_if_forward(runs, tree):
    return tree, runs


def _differentiated_if_backward(runs, gradient):
    def masked(g):
        # Leaves that are not floating-point numbers have gradients of dtype float0.
        return g if g.dtype == jax.dtypes.float0 else jnp.where(runs, g, 0)

    return None, jax.tree.map(masked, gradient)


_differentiated_if.defvjp(_differentiated_if_forward, _differentiated_if_backward)


def _selected(stacked: Params, keep_mask: KeepMask) -> tuple[Params, Tree, jax.Array | None]:
    """Select the blocks that a keep mask runs.

    If the mask contains indices of layers, the parameters of these layers are copied. If it is of
    dtype bool, all parameters are returned with it.

    Returns:
      ``(parameters, scales, runs)`` of the blocks. ``runs`` is bool [layers] and marks the blocks
      that run; None: all returned blocks run.
    """
    layers = keep_mask.layers
    scale = keep_mask.scale
    if layers is None:
        return stacked, scale, None
    layers = unbatched(layers)
    if layers.dtype == bool:
        return stacked, scale, layers
    # The weights of the kept layers are copied once, which costs less than adding into the
    # gradients of the full stack at every layer. The indices are unique and in order. Therefore, if
    # there is an index for every layer, nothing has to be copied.
    if len(layers) < len(jax.tree.leaves(stacked)[0]):
        stacked, scale = jax.tree.map(partial(_kept_rows, layers), (stacked, scale))
    return stacked, scale, None


def _unrolled(body: Callable, x: jax.Array, inputs: Tree) -> tuple[jax.Array, Tree]:
    """`jax.lax.scan` without a loop.

    The gradients of the stacked inputs are concatenated once, because the transpose of
    `jax.lax.split` is a concatenation. The transpose of indexing would be a full stack of zeros for
    each layer.
    """
    leaves, tree = jax.tree.flatten(inputs)
    layers = len(leaves[0])
    parts = []
    for leaf in leaves:
        of_layers = jax.lax.split(leaf, (1,) * layers)
        parts.append([part[0] for part in of_layers])
    observed = []
    for own in zip(*parts, strict=True):
        x, seen = body(x, jax.tree.unflatten(tree, own))
        observed.append(seen)
    return x, jax.tree.map(lambda *layers: jnp.stack(layers), *observed)

"""Two ways to execute a stack of layers without its dropped layers.

The first one is a ``lax.cond`` around each layer. The second one is a scan over the kept layers
only. Both skip the forward and the backward pass of a dropped layer, and give equal results for
equal keep masks. Masking the outputs of dropped layers would save no time.
"""

import zlib
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any, Literal, NoReturn, TypeAlias, TypeVar

import flax.struct as struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import custom_batching, lax
from jax.tree_util import PyTreeDef

from jaxgrow.typed import check_choice

Array: TypeAlias = jax.Array | np.ndarray
# Pytrees of arrays: the weights of a layer, and the value that passes through the layers.
Weights: TypeAlias = Any
Carry: TypeAlias = Any
# The value that passes through the layers, and arrays that each layer writes one row of.
Stacking: TypeAlias = tuple[Carry, list[jax.Array]]
T = TypeVar("T")

# JAX does not annotate these functions.
_eval_shape: Callable[..., Any] = jax.eval_shape  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
_switch: Callable[..., Carry] = lax.switch  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
_vjp: Callable[..., tuple[Carry, Callable[..., Any]]] = jax.vjp  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


@struct.dataclass
class KeepMask:
    """The layers of a stack that one forward pass runs.

    ========== ====================================== ==============================================
    scaling    output of a kept layer                 expectation over independent keep masks
    ========== ====================================== ==============================================
    block      x + scale (Block(x) - x)               for any block and any given x, equal to the
                                                      dense layer up to rounding; for a stack of
                                                      linear blocks, equal to the dense stack
    sublayer   h = x + scale f(x), h + scale g(h)     biased by (1/p - 1) g f for linear f and g;
                                                      this is the published form of PLD
    ========== ====================================== ==============================================

    Masks with a fixed number of kept layers (`jaxgrow.layerdrop.systematic`, which
    ``execution="gather"`` samples) are not independent. The statement about a single layer still
    holds. However, the product of the factors of two layers does not have mean 1, so the stack is
    biased with either scaling. Take four layers x + x/2 with p = 1/2. The dense stack gives 5.0625
    x, and so do independent masks on average. Masks that keep two layers always give 4 x.

    Attributes:
      layers: a keep mask, indices, or None for all layers. A keep mask is bool [layers]; each layer
        is then behind a `lax.cond`. Indices are int32 [run]: the layers that run, in order. Only
        their number is static. For a model with stages, indices are a tuple with one array for each
        stage, counted within the stage.
      scale: float [layers], the factor of the output of a kept layer, 1 / keep probability; or a
        `Dropout`; or None. A layer that runs with scale 0 adds nothing, and its gradients are zero.
        `jaxgrow.layerdrop.counts.padded` uses such layers to complete a fixed number of indices.
      scaling: the output that the scale multiplies, as in the table.
    """

    layers: Any  # Array | tuple[Array, ...] | None
    scale: Any = None  # Array | Dropout | None
    scaling: Literal["block", "sublayer"] = struct.field(pytree_node=False, default="block")

    def part(self, stage: int, layers: slice) -> "KeepMask":
        """The `KeepMask` of one stage, whose layers are the slice ``layers`` of all layers.

        Raises:
          ValueError: indices that are not given separately for each stage.
        """

        own = self.layers
        scale = jax.tree.map(itemgetter(layers), self.scale)
        if isinstance(own, tuple):
            return KeepMask(own[stage], scale, self.scaling)
        if own is not None and own.dtype != bool:
            raise ValueError(
                "the number of layers that a stage keeps is static: give a tuple with an array of indices for each stage, or a "
                "keep mask"
            )
        return KeepMask(None if own is None else own[layers], scale, self.scaling)


@struct.dataclass
class Dropout:
    """Dropout of the output of every sublayer, used as a ``KeepMask.scale`` (Srivastava et al., 2014).

    Attributes:
      keys: a random key for each layer and sample, [layers, B]. A block gets the keys of its layer,
        [B].
      rate: the probability that an entry becomes zero. The other entries are divided by
        ``1 - rate``.
    """

    keys: jax.Array
    rate: float = struct.field(pytree_node=False)

    def __call__(self, y: jax.Array, sublayer: str) -> jax.Array:
        """Drop entries of ``y`` [B, ...]. Each sublayer drops different entries."""
        own = jax.vmap(partial(jax.random.fold_in, data=zlib.crc32(sublayer.encode())))(self.keys)
        kept = jax.vmap(partial(jax.random.bernoulli, p=1 - self.rate, shape=y.shape[1:]))(own)
        return jnp.where(kept, y / (1 - self.rate), 0).astype(y.dtype)


def rescaled(y: jax.Array, scale: "jax.Array | Dropout | None", sublayer: str = "") -> jax.Array:
    """Multiply the output of a sublayer by its scale, and round once to the dtype of ``y``.

    A block with "sublayer" scaling applies this to the output of each sublayer. The product is
    computed in float32 or a wider type. In bfloat16, 1 / p has a rounding error of up to 0.4 %. The
    error is the same for every keep mask, so it would change the expectation over keep masks. If
    scale is 1 or None, the result is bitwise identical to ``y``.
    """
    if scale is None:
        return y
    if isinstance(scale, Dropout):
        return scale(y, sublayer)
    wide = jnp.promote_types(y.dtype, jnp.float32)
    return (scale.astype(wide) * y.astype(wide)).astype(y.dtype)


def scaled(apply: Callable[..., jax.Array], keep_mask: KeepMask) -> Callable[..., jax.Array]:
    """The function ``(w, x, scale, *rest) -> x`` of a kept layer.

    ``apply`` is ``(w, x, *rest) -> x``, or ``(w, x, scale, *rest) -> x`` if the block scales its
    sublayers.
    """

    def plain(w: Weights, x: jax.Array, scale: object, *rest: Any) -> jax.Array:
        return apply(w, x, *rest)

    def fixed(scale: T) -> T:
        # Only the measurement of sensitivities differentiates a scale, and it uses no keep masks.
        # With keep masks, the gradient of the scale would need the output of the block.
        return scale if keep_mask.layers is None else lax.stop_gradient(scale)

    def by_sublayer(
        w: Weights, x: jax.Array, scale: "jax.Array | Dropout", *rest: Any
    ) -> jax.Array:
        return apply(w, x, fixed(scale), *rest)

    def by_block(w: Weights, x: jax.Array, scale: jax.Array, *rest: Any) -> jax.Array:
        y = apply(w, x, *rest)
        scale = fixed(scale)
        wide = jnp.promote_types(x.dtype, jnp.float32)  # as in `rescaled`, also for y - x
        change = y.astype(wide) - x.astype(wide)
        delta = (x.astype(wide) + scale.astype(wide) * change).astype(x.dtype)
        # x + (y - x) has rounding errors, but at p = 1 a layer must be bitwise identical to the dense
        # layer. Without keep masks, the sum must be used, because it is differentiated.
        return delta if keep_mask.layers is None else jnp.where(scale == 1, y, delta)

    if keep_mask.scale is None:
        return plain
    check_choice("scaling of KeepMask", keep_mask.scaling, Literal["block", "sublayer"])
    return by_sublayer if keep_mask.scaling == "sublayer" else by_block


def conditional(
    apply: Callable[[Weights, Carry], Carry],
) -> Callable[[jax.Array, Weights, Carry], Carry]:
    """Run ``apply(w, x)`` for each kept layer in turn, and skip the dropped layers.

    This is a scan over the layers, with one `lax.switch` in the forward and one in the backward
    pass of each layer. A dropped layer has no cost: neither its forward nor its backward pass runs,
    and no values are saved for it. Its gradients are exactly zero. (If JAX differentiates a
    `lax.cond` in a scan, it saves a copy of all weights, and writes zeros wherever a kept layer
    saves values.) For a kept layer, all values that its backward pass needs are saved, or only those
    that `jax.checkpoint` around ``apply`` selects. Only reverse mode is supported: `jax.jvp` raises
    a TypeError.

    Args:
      apply: ``(w, x) -> x``, one layer. Values that are differentiated must be arguments: weights
        that several layers share belong to ``x``. JAX raises an error if ``apply`` takes them from
        an enclosing function.

    Returns:
      ``(keep bool [layers], stacked, x) -> x``. The weights ``stacked`` have a leading axis of
      layers.

    Example:
      >>> add = conditional(lambda w, x: x + w)
      >>> float(add(jnp.array([True, False, True]), jnp.array([1.0, 10.0, 100.0]), 0.0))
      101.0
    """

    @jax.custom_vjp
    def stack(keep: jax.Array, stacked: Weights, x: Carry) -> Carry:
        return _scan(keep, stacked, x, lambda x, w, i: apply(w, x))

    def forward(
        keep: jax.Array, stacked: Weights, x: Carry
    ) -> tuple[Carry, tuple[jax.Array, Weights, _Pullback]]:
        y, pullbacks = _forward(apply, keep, stacked, x)
        return y, (keep, stacked, pullbacks)

    stack.defvjp(forward, _backward)  # pyright: ignore[reportUnknownMemberType]

    def call(keep: jax.Array, stacked: Weights, x: Carry) -> Carry:
        arrays = varying((stacked, x), (keep, stacked, x))
        return stack(keep, *arrays)  # pyright: ignore[reportUnknownVariableType]

    return call


def _scan(
    keep: jax.Array,
    stacked: Weights,
    carry: T,
    run: Callable[[T, Weights, jax.Array], T],
    *,
    reverse: bool = False,
) -> T:
    """Compute ``carry = run(carry, w, i)`` for every layer i that is kept."""

    def skip(carry: T, w: Weights, i: jax.Array) -> T:
        return carry

    def body(carry: T, inputs: tuple[jax.Array, Weights, jax.Array]) -> tuple[T, None]:
        keep, w, i = inputs
        # The identity must be branch 0: only branch 0 reliably forwards its operands without a copy.
        branch = keep.astype(jnp.int32)
        return _switch(branch, [skip, run], carry, w, i), None

    return lax.scan(body, carry, (keep, stacked, jnp.arange(len(keep))), reverse=reverse)[0]


def _forward(
    apply: Callable[[Weights, Carry], Carry], keep: jax.Array, stacked: Weights, x: Carry
) -> tuple[Carry, "_Pullback"]:
    """Run the kept layers, and save what their backward passes need."""

    def run(carry: Stacking, w: Weights, i: jax.Array) -> Stacking:
        x, saved = carry
        y, new = _pulled(apply, w, x)
        return y, _written_back(saved, new.saved, i)

    def pullback(stacked: Weights, x: Carry) -> _Pullback:
        w = jax.tree.map(itemgetter(0), stacked)
        return _pulled(apply, w, x)[1]

    one: _Pullback = _eval_shape(pullback, stacked, x)
    saved = [_blank((len(keep), *s.shape), s.dtype) for s in one.saved]
    y, saved = _scan(keep, stacked, (x, varying(saved, (keep, stacked, x))), run)
    return y, one.replace(saved=saved)


def _backward(
    residuals: tuple[jax.Array, Weights, "_Pullback"], dy: Carry
) -> tuple[None, Weights, Carry]:
    """Run the backward passes of the kept layers, from the last one to the first one."""
    keep, stacked, pullbacks = residuals
    moving, _ = _floating(stacked)

    def run(carry: Stacking, w: Weights, i: jax.Array) -> Stacking:
        dx, dw = carry
        new, dx = pullbacks.of(i, w)(dx)
        return dx, _written_back(dw, new, i)

    dx, dw = _scan(keep, stacked, (dy, [jnp.zeros_like(m) for m in moving]), run, reverse=True)
    rest = iter(dw)

    def gradient(a: jax.Array) -> Array:
        return next(rest) if is_floating(a) else np.zeros(a.shape, jax.dtypes.float0)

    return None, jax.tree.map(gradient, stacked), dx


def _written_back(stack: list[jax.Array], new: list[jax.Array], i: jax.Array) -> list[jax.Array]:
    """Write the arrays of layer i into the stacked arrays."""
    return [lax.dynamic_update_index_in_dim(s, n, i, 0) for s, n in zip(stack, new, strict=True)]


def varying(arrays: T, data: object) -> T:
    """Make ``arrays`` vary over all axes of a `shard_map` over which ``data`` varies.

    JAX requires this of the results of all branches of a conditional, whether a branch computes
    them from the data, returns zeros or returns its operands. The function selects between equal
    values by a condition that depends on the data and is never true; XLA removes the selection. It
    does not use JAX's API for these types, because that API has changed between releases.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return arrays
    never: jax.Array | bool = False
    for a in jax.tree.leaves(data):
        if a.size:
            a = (
                jax.random.key_data(a)
                if jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
                else jnp.asarray(a)
            )
            first = a.ravel()[0]
            never = never | ((first == first) & False)

    def selected(a: jax.Array) -> jax.Array:
        return jnp.where(never, lax.stop_gradient(a), a)

    return jax.tree.map(selected, arrays)


class _Pullback(struct.PyTreeNode):
    """The result of `jax.vjp` for a layer, or for all layers, stacked.

    Attributes:
      saved: the leaves of the `jax.vjp` function, except for those that are weights of the layer.
      tree: the structure of the `jax.vjp` function.
      sources: for each leaf, the index of the weight that is this leaf, or None if it is saved.
    """

    saved: list[jax.Array]
    tree: PyTreeDef = struct.field(pytree_node=False)
    sources: tuple[int | None, ...] = struct.field(pytree_node=False)

    def of(self, i: jax.Array, w: Weights) -> Callable[[Carry], tuple[list[jax.Array], Carry]]:
        """Return the backward pass of layer i, whose weights are ``w``."""
        saved = iter([_at_index(s, i) for s in self.saved])
        given = jax.tree.leaves(w)
        return jax.tree.unflatten(
            self.tree, [next(saved) if j is None else given[j] for j in self.sources]
        )


def _at_index(stack: jax.Array, i: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(stack, i, 0, keepdims=False)  # pyright: ignore[reportUnknownVariableType]


def _pulled(
    apply: Callable[[Weights, Carry], Carry], w: Weights, x: Carry
) -> tuple[Carry, _Pullback]:
    """Run one layer, and return its backward pass.

    Weights are not saved again, because the backward pass receives them as an argument.
    """
    moving, join = _floating(w)

    def run(moving: list[jax.Array], x: Carry) -> Carry:
        return apply(join(moving), x)

    y, back = _vjp(run, moving, x)
    leaves, tree = jax.tree.flatten(back)
    index = {id(a): i for i, a in reversed(list(enumerate(jax.tree.leaves(w))))}
    sources = tuple(index.get(id(leaf)) for leaf in leaves)
    saved = [leaf for leaf, i in zip(leaves, sources, strict=True) if i is None]
    return y, _Pullback(saved, tree, sources)


def is_floating(x: jax.Array) -> bool:
    """Whether an array has gradients: its numbers are floating-point or complex."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _floating(inputs: Weights) -> tuple[list[jax.Array], Callable[[list[jax.Array]], Weights]]:
    """The leaves that have gradients, and a function that puts them back into the tree."""
    leaves, tree = jax.tree.flatten(inputs)

    def join(moving: list[jax.Array]) -> Weights:
        rest = iter(moving)
        return jax.tree.unflatten(tree, [next(rest) if is_floating(x) else x for x in leaves])

    return [x for x in leaves if is_floating(x)], join


def _blank(shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), shape)
    return jnp.zeros(shape, dtype)


@custom_batching.custom_vmap
def unbatched(layers: jax.Array) -> jax.Array:
    """Return ``layers``, and raise an error under `vmap` over it.

    A conditional on a batch of keep masks would run both branches and save nothing.

    Raises:
      ValueError: under `vmap` over keep masks.
    """
    return layers


@unbatched.def_vmap
def _refuse(axis_size: int, in_batched: list[bool], layers: jax.Array) -> NoReturn:
    raise ValueError(
        f"vmap over {axis_size} keep masks would run every layer for each of them and save no time. Sample one keep mask "
        "outside and pass it with in_axes=None, or use lax.map over the keep masks"
    )

"""How a layer is not run: ``lax.cond`` around it, or a scan over the kept ones alone.

Both save a dropped layer's forward and backward pass, and give equal results for equal gates. Masking saves nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import struct
from jax import custom_batching, lax


@struct.dataclass
class Kept:
    """Which layers of a stack one forward pass runs.

    ``layers``: bool [layers], each behind a `lax.cond`; or int32 [kept], their indices in order, of which only the number
    is static; or None, all. ``scale``, float [layers] or None: 1 / keep probability, the factor of what a kept layer adds.

    ========== ============================================= ==================================================================
    scaling    a kept layer                                  expectation
    ========== ============================================= ==================================================================
    block      x + scale (Block(x) - x)                      that of the dense layer, exactly, for any block
    sublayer   h = x + scale f(x), h + scale g(h)            biased by (1/p - 1) g f where f, g are linear: as PLD publishes it
    ========== ============================================= ==================================================================
    """

    layers: jax.Array | np.ndarray | None
    scale: jax.Array | np.ndarray | None = None
    scaling: Literal["block", "sublayer"] = struct.field(pytree_node=False, default="block")


def rescaled(y: jax.Array, scale: jax.Array | None) -> jax.Array:
    """``scale y``, rounded once, to the dtype of ``y``; what a block with "sublayer" scaling does to each sublayer's output.

    In float32 at least: bfloat16's 1 / p is off by up to 0.4 %, always to the same side for one p, so that the expectation
    over gates would be another. ``y`` itself, to the bit, where scale is 1 or None.
    """
    if scale is None:
        return y
    wide = jnp.promote_types(y.dtype, jnp.float32)
    return (scale.astype(wide) * y.astype(wide)).astype(y.dtype)


def scaled(apply: Callable, kept: Kept) -> Callable:
    """``(w, x, scale, *rest) -> x`` of a kept layer, from ``apply(w, x, *rest)``, or ``apply(w, x, scale, *rest)`` where the
    block scales its sublayers itself."""
    if kept.scale is None:
        return lambda w, x, scale, *rest: apply(w, x, *rest)
    # Only without gates is a scale differentiated (the sensitivities); elsewhere its gradient would cost what a block adds.
    fixed = (lambda scale: scale) if kept.layers is None else lax.stop_gradient
    if kept.scaling == "sublayer":
        return lambda w, x, scale, *rest: apply(w, x, fixed(scale), *rest)

    def block(w, x, scale, *rest):
        y, scale = apply(w, x, *rest), fixed(scale)
        wide = jnp.promote_types(x.dtype, jnp.float32)  # as in `rescaled`, and so is y - x
        delta = (x.astype(wide) + scale.astype(wide) * (y.astype(wide) - x.astype(wide))).astype(x.dtype)
        # x + (y - x) may round: at p = 1 a layer is the dense one, to the bit. Without gates, this is to be differentiated.
        return delta if kept.layers is None else jnp.where(scale == 1, y, delta)

    return block


def conditional(apply: Callable) -> Callable:
    """``(keep bool [layers], stacked, x) -> x``: for each layer in turn ``apply(w, x)`` if it is kept, else ``x``.

    A scan over the layers, each behind one `lax.switch` forward and one backward. A dropped layer costs nothing: neither its
    forward nor its backward pass runs, and nothing is written for it; its gradients are exactly zero. (`lax.cond` under
    plain differentiation saves, in a scan, a copy of all weights, and writes zeros wherever a kept layer saves something.)
    What a kept layer computes for its backward pass is saved: all of it, or what `jax.checkpoint` around ``apply`` says.
    Reverse mode only.
    """

    def scan(keep, stacked, carry, run, *, reverse):
        """``carry = run(carry, w, i)`` for every layer i that is kept."""

        def body(carry, inputs):
            keep, w, i = inputs
            # Identity is branch 0: only that one is sure to forward its operands without a copy.
            return lax.switch(keep.astype(jnp.int32), [lambda carry, w, i: carry, run], carry, w, i), None

        return lax.scan(body, carry, (keep, stacked, jnp.arange(len(keep))), reverse=reverse)[0]

    @jax.custom_vjp
    def stack(keep, stacked, x):
        return scan(keep, stacked, x, lambda x, w, i: apply(w, x), reverse=False)

    def forward(keep, stacked, x):
        pullback: Any = None

        def pulled(w, x):
            nonlocal pullback
            moving, join = _floating(w)
            y, back = jax.vjp(lambda moving, x: apply(join(moving), x), moving, x)
            leaves, tree = jax.tree.flatten(back)
            given = jax.tree.leaves(w)  # not saved again: the backward pass has them
            sources = tuple(next((i for i, a in enumerate(given) if a is leaf), None) for leaf in leaves)
            pullback = _Pullback([], tree, sources)
            return y, [leaf for leaf, i in zip(leaves, sources, strict=True) if i is None]

        def run(carry, w, i):
            x, saved = carry
            y, new = pulled(w, x)
            return y, [lax.dynamic_update_index_in_dim(s, n, i, 0) for s, n in zip(saved, new, strict=True)]

        layer = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), stacked)
        saved = [_blank((len(keep), *s.shape), s.dtype) for s in jax.eval_shape(pulled, layer, x)[1]]
        y, saved = scan(keep, stacked, (x, saved), run, reverse=False)
        return y, (keep, stacked, pullback.replace(saved=saved))

    def backward(residuals, dy):
        keep, stacked, pullback = residuals
        moving, _ = _floating(stacked)

        def run(carry, w, i):
            dx, dw = carry
            new, dx = pullback.of(i, w)(dx)
            return dx, [lax.dynamic_update_index_in_dim(s, n, i, 0) for s, n in zip(dw, new, strict=True)]

        dx, dw = scan(keep, stacked, (dy, [jnp.zeros_like(m) for m in moving]), run, reverse=True)
        dw = iter(dw)
        return None, jax.tree.map(lambda a: next(dw) if _is_floating(a) else _no_gradient(a), stacked), dx

    stack.defvjp(forward, backward)
    return stack


@struct.dataclass
class _Pullback:
    """What `jax.vjp` returned for each layer, stacked, without those of its leaves that are the layer's weights."""

    saved: list[jax.Array]
    tree: Any = struct.field(pytree_node=False)
    sources: tuple[int | None, ...] = struct.field(pytree_node=False)  # the weight that stands in, or None: saved

    def of(self, i: jax.Array, w: Any) -> Callable:
        saved = (lax.dynamic_index_in_dim(s, i, 0, keepdims=False) for s in self.saved)
        given = jax.tree.leaves(w)
        return jax.tree.unflatten(self.tree, [next(saved) if j is None else given[j] for j in self.sources])


def _is_floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _floating(inputs: Any) -> tuple[list[jax.Array], Callable]:
    """The leaves that have gradients, and what puts them back."""
    leaves, tree = jax.tree.flatten(inputs)

    def join(moving):
        moving = iter(moving)
        return jax.tree.unflatten(tree, [next(moving) if _is_floating(x) else x for x in leaves])

    return [x for x in leaves if _is_floating(x)], join


def _no_gradient(x: jax.Array) -> np.ndarray:
    return np.zeros(x.shape, jax.dtypes.float0)


def _blank(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), shape)
    return jnp.zeros(shape, dtype)


@custom_batching.custom_vmap
def unbatched(layers: jax.Array) -> jax.Array:
    """``layers``, which `vmap` must not batch: a conditional on a batch of gates runs both branches and saves nothing.

    Raises:
      ValueError: under `vmap` over gates.
    """
    return layers


@unbatched.def_vmap
def _refuse(axis_size, in_batched, layers):
    raise ValueError(
        f"vmap over {axis_size} sets of gates would run every layer of each, and save nothing: draw gates outside and pass "
        "them with in_axes=None, or go over them with lax.map"
    )


@contextmanager
def dropping(block: type[nn.Module], kept: Kept) -> Iterator[None]:
    """Inside, the i-th call of a module of class ``block`` runs only if ``kept.layers[i]``: any Flax model drops layers.

    ::

        with dropping(EncoderLayer, Kept(gates, 1 / probs)):
            logits = model.apply({"params": params}, tokens)

    For models that call one block after the other, from a Python loop; a scanned stack takes `Kept` itself
    (`jaxgrow.models.layers.run_stack`). The block's first argument is what it changes and returns. Variables that a block
    would write (batch statistics, sown values) are not kept. Initialise outside.

    Raises:
      ValueError: ``block`` was called more or less often than there are gates, or gates are indices.
    """
    if kept.layers is None or kept.layers.dtype != bool:
        raise ValueError("dropping() takes gates, bool [layers]; indices of kept layers are for run_stack")
    open_, calls, inside = unbatched(kept.layers), 0, False

    def intercept(call, args, kwargs, context):
        nonlocal calls
        module = context.module
        if inside or context.method_name != "__call__" or not isinstance(module, block):
            return call(*args, **kwargs)
        if calls < len(open_):
            i, calls = calls, calls + 1
        else:
            raise ValueError(f"{block.__name__} is called more than {len(open_)} times, but there are no more gates")
        alone = module.clone(parent=None, name=None)
        assert module.scope is not None  # a module that is called is bound
        keys = {name: module.make_rng(name) for name in module.scope.rngs if name != "params"}

        def apply(variables, x, *rest):
            nonlocal inside
            *scale, keys, rest, kwargs = rest
            inside = True
            try:
                return alone.apply(variables, x, *scale, *rest, rngs=keys, **kwargs)
            finally:
                inside = False

        x, *rest = args
        scale = None if kept.scale is None else kept.scale[i]
        arrays = {k: v for k, v in kwargs.items() if isinstance(v, jax.Array)}
        static = {k: v for k, v in kwargs.items() if k not in arrays}
        layer = scaled(lambda v, x, *a: apply(v, x, *a[:-1], {**static, **a[-1]}), kept)
        one = jax.tree.map(lambda a: a[None], (module.variables, scale, keys, tuple(rest), arrays))
        return conditional(lambda w, x: layer(w[0], x, *w[1:]))(open_[i : i + 1], one, x)

    with nn.intercept_methods(intercept):
        yield
    if calls < len(open_):
        raise ValueError(
            f"{block.__name__} was called {calls} times, but there are {len(open_)} gates; a scanned stack "
            "calls its block once: hand Kept to run_stack instead"
        )

"""How a layer is not run: ``lax.cond`` around it, or a scan over the kept ones alone.

Both save a dropped layer's forward and backward pass, and give equal results for equal gates.
Masking saves nothing.
"""

import inspect
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
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

    ``layers``: bool [layers], each behind a `lax.cond`; or int32 [run], the indices in order of the
    layers that run, of which only the number is static, of a model with stages one such array for
    each, counted within it; or None, all. ``scale``, float [layers] or None: 1 / keep probability,
    the factor of what a kept layer adds. A layer that runs with scale 0 adds nothing, and its
    gradients are zero: dropped layers that fill up a fixed number of indices
    (`jaxgrow.layerdrop.counts.padded`).

    ========== ============================================= ==================================================================
    scaling    a kept layer                                  expectation over independent keep masks
    ========== ============================================= ==================================================================
    block      x + scale (Block(x) - x)                      for any block and any given x, that of the dense layer, to
                                                             rounding; through a stack of linear
                                                             blocks that of the dense stack
    sublayer   h = x + scale f(x), h + scale g(h)            biased by (1/p - 1) g f where f, g are linear: as PLD publishes it
    ========== ============================================= ==================================================================

    Masks with a fixed number of kept layers (`jaxgrow.layerdrop.systematic`, which
    ``execution="gather"`` draws) are not independent. The first column holds for each layer alone,
    but the factors of two layers have a product whose mean is not 1, so that the stack is biased
    with either scaling. Of four layers x + x/2 with p = 1/2, the dense stack gives 5.0625 x. So do
    independent masks on average, while masks that keep two layers always give 4 x.
    """

    layers: Any  # jax.Array | np.ndarray | tuple of these | None
    scale: Any = None  # jax.Array | np.ndarray | Dropout | None
    scaling: Literal["block", "sublayer"] = struct.field(pytree_node=False, default="block")

    def part(self, stage: int, layers: slice) -> "Kept":
        """Of one stage, which has these of all ``layers``.

        Raises:
          ValueError: indices that are not given for each stage.
        """
        own, scale = self.layers, jax.tree.map(lambda x: x[layers], self.scale)
        if isinstance(own, tuple):
            return Kept(own[stage], scale, self.scaling)
        if own is not None and own.dtype != bool:
            raise ValueError(
                "how many layers a stage keeps is static: give indices as a tuple, an array for each stage, or gates"
            )
        return Kept(None if own is None else own[layers], scale, self.scaling)


@struct.dataclass
class Dropout:
    """Dropout of the output of every sublayer, as a ``Kept.scale`` (Srivastava et al., 2014).

    Attributes:
      keys: a random key for each layer and sample, [layers, B]; within a block, [B].
      rate: the probability that an entry becomes zero; the others are divided by ``1 - rate``.
    """

    keys: jax.Array
    rate: float = struct.field(pytree_node=False)

    def __call__(self, y: jax.Array, sublayer: str) -> jax.Array:
        """``y`` [B, ..] with some entries dropped, others in each sublayer."""
        own = jax.vmap(partial(jax.random.fold_in, data=zlib.crc32(sublayer.encode())))(self.keys)
        kept = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - self.rate, y.shape[1:]))(own)
        return jnp.where(kept, y / (1 - self.rate), 0).astype(y.dtype)


def rescaled(y: jax.Array, scale: Any, sublayer: str = "") -> jax.Array:
    """``scale y``, rounded once, to the dtype of ``y``; what a block with "sublayer" scaling does to each sublayer's output.

    In float32 at least: bfloat16's 1 / p is off by up to 0.4 %, always to the same side for one p,
    so that the expectation over gates would be another. ``y`` itself, to the bit, where scale is 1
    or None.
    """
    if scale is None:
        return y
    if isinstance(scale, Dropout):
        return scale(y, sublayer)
    wide = jnp.promote_types(y.dtype, jnp.float32)
    return (scale.astype(wide) * y.astype(wide)).astype(y.dtype)


def scaled(apply: Callable, kept: Kept) -> Callable:
    """``(w, x, scale, *rest) -> x`` of a kept layer, from ``apply(w, x, *rest)``, or
    ``apply(w, x, scale, *rest)`` where the block scales its sublayers itself.
    """
    if kept.scale is None:
        return lambda w, x, scale, *rest: apply(w, x, *rest)
    # Only without gates is a scale differentiated (the sensitivities); elsewhere its gradient would
    # cost what a block adds.
    fixed = (lambda scale: scale) if kept.layers is None else lax.stop_gradient
    if kept.scaling == "sublayer":
        return lambda w, x, scale, *rest: apply(w, x, fixed(scale), *rest)

    def block(w, x, scale, *rest):
        y, scale = apply(w, x, *rest), fixed(scale)
        wide = jnp.promote_types(x.dtype, jnp.float32)  # as in `rescaled`, and so is y - x
        delta = (x.astype(wide) + scale.astype(wide) * (y.astype(wide) - x.astype(wide))).astype(
            x.dtype
        )
        # x + (y - x) may round: at p = 1 a layer is the dense one, to the bit. Without gates, this
        # is to be differentiated.
        return delta if kept.layers is None else jnp.where(scale == 1, y, delta)

    return block


def conditional(apply: Callable) -> Callable:
    """``(keep bool [layers], stacked, x) -> x``: for each layer in turn ``apply(w, x)`` if it is kept, else ``x``.

    A scan over the layers, each behind one `lax.switch` forward and one backward. A dropped layer
    costs nothing: neither its forward nor its backward pass runs, and nothing is written for it;
    its gradients are exactly zero. (`lax.cond` under plain differentiation saves, in a scan, a copy
    of all weights, and writes zeros wherever a kept layer saves something.) What a kept layer
    computes for its backward pass is saved: all of it, or what `jax.checkpoint` around ``apply``
    says. Only reverse mode is supported: `jax.jvp` raises a TypeError.

    Args:
      apply: ``(w, x) -> x``, one layer.

    Returns:
      ``(keep bool [layers], stacked, x) -> x``, of weights that are stacked on a leading axis.

    Example:
      >>> add = conditional(lambda w, x: x + w)
      >>> float(add(jnp.array([True, False, True]), jnp.array([1.0, 10.0, 100.0]), 0.0))
      101.0
    """

    def scan(keep, stacked, carry, run, *, reverse):
        """``carry = run(carry, w, i)`` for every layer i that is kept."""

        def body(carry, inputs):
            keep, w, i = inputs
            # Identity is branch 0: only that one is sure to forward its operands without a copy.
            return lax.switch(
                keep.astype(jnp.int32), [lambda carry, w, i: carry, run], carry, w, i
            ), None

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
            sources = tuple(
                next((i for i, a in enumerate(given) if a is leaf), None) for leaf in leaves
            )
            pullback = _Pullback([], tree, sources)
            return y, [leaf for leaf, i in zip(leaves, sources, strict=True) if i is None]

        def run(carry, w, i):
            x, saved = carry
            y, new = pulled(w, x)
            return y, [
                lax.dynamic_update_index_in_dim(s, n, i, 0) for s, n in zip(saved, new, strict=True)
            ]

        saved = jax.eval_shape(
            lambda stacked: pulled(jax.tree.map(lambda a: a[0], stacked), x)[1], stacked
        )
        saved = _varying(
            [_blank((len(keep), *s.shape), s.dtype) for s in saved], (keep, stacked, x)
        )
        y, saved = scan(keep, stacked, (x, saved), run, reverse=False)
        return y, (keep, stacked, pullback.replace(saved=saved))

    def backward(residuals, dy):
        keep, stacked, pullback = residuals
        moving, _ = _floating(stacked)

        def run(carry, w, i):
            dx, dw = carry
            new, dx = pullback.of(i, w)(dx)
            return dx, [
                lax.dynamic_update_index_in_dim(s, n, i, 0) for s, n in zip(dw, new, strict=True)
            ]

        dx, dw = scan(keep, stacked, (dy, [jnp.zeros_like(m) for m in moving]), run, reverse=True)
        dw = iter(dw)
        return (
            None,
            jax.tree.map(lambda a: next(dw) if _is_floating(a) else _no_gradient(a), stacked),
            dx,
        )

    stack.defvjp(forward, backward)

    def call(keep, stacked, x):
        return stack(keep, *_varying((stacked, x), (keep, stacked, x)))

    return call


def _varying(arrays: Any, data: Any) -> Any:
    """``arrays``, in a `shard_map` varying over every axis that one of ``data`` varies over.

    What one branch of a conditional makes of data, another must match, be it zeros or handed on. By
    a selection that XLA removes, since what it goes by is never true: how JAX spells these types
    has changed from release to release.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return arrays
    never: Any = False
    for a in jax.tree.leaves(data):
        if a.size:
            a = (
                jax.random.key_data(a)
                if jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
                else jnp.asarray(a)
            )
            first = a.ravel()[0]
            never = never | ((first == first) & False)
    return jax.tree.map(lambda a: jnp.where(never, lax.stop_gradient(a), a), arrays)


@struct.dataclass
class _Pullback:
    """What `jax.vjp` returned for each layer, stacked, without those of its leaves that are the layer's weights."""

    saved: list[jax.Array]
    tree: Any = struct.field(pytree_node=False)
    sources: tuple[int | None, ...] = struct.field(
        pytree_node=False
    )  # the weight that stands in, or None: saved

    def of(self, i: jax.Array, w: Any) -> Callable:
        saved = (lax.dynamic_index_in_dim(s, i, 0, keepdims=False) for s in self.saved)
        given = jax.tree.leaves(w)
        return jax.tree.unflatten(
            self.tree, [next(saved) if j is None else given[j] for j in self.sources]
        )


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
    """Inside, the i-th call of a module of class ``block`` runs only if ``kept.layers[i]``: a Flax (Linen) model drops layers.

    For models that call one block after the other, from a Python loop; one under ``nn.scan`` is
    refused, and a stack of one's own takes `Kept` itself (`jaxgrow.models.layers.run_stack`). The
    block's first argument, by position or by name, is the array that it changes; all others may be
    anything. It returns that array, or a tuple that begins with it: what follows is zero, unscaled,
    where the block is dropped. With "sublayer" scaling the block takes the scale as its second
    argument. Variables that a block would write (batch statistics, sown values) are not kept.
    Initialise outside.

    A kept block draws the same random numbers, such as those of dropout, as in the model without
    this context. A module that is called several times draws others from its second call on. Only
    reverse mode is supported: `jax.jvp`, `jax.jacfwd` and `jax.hessian` of a model in this context
    raise a TypeError.

    Args:
      block: the class of the model's blocks.
      kept: their gates, bool [layers], and what kept ones are scaled by, as
        ``Kept(gates, 1 / probs)``.

    Returns:
      A context, in which the model is applied.

    Raises:
      ValueError: ``block`` was called more or less often than there are gates, gates are indices,
        or the block does not return what it takes.

    Example:
      >>> class Add(nn.Module):
      ...     def __call__(self, x):
      ...         return x + 1
      >>> class Model(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         return Add()(Add()(Add()(x)))
      >>> with dropping(Add, Kept(jnp.array([True, False, True]))):
      ...     print(Model().apply({}, jnp.zeros(1)))
      [2.]
    """
    if not hasattr(kept.layers, "dtype") or kept.layers.dtype != bool:
        raise ValueError(
            "dropping() takes gates, bool [layers]; indices of kept layers are for run_stack"
        )
    open_, calls, inside = unbatched(kept.layers), 0, False
    whole: Any = {}  # the model's parameters
    called: set[tuple[str, ...]] = set()

    def intercept(call, args, kwargs, context):
        nonlocal calls, whole
        module = context.module
        if not inside and module.scope is not None and not module.path:
            whole = module.variables.get(
                "params", whole
            )  # modules that Flax sets up only have none
        if inside or context.method_name != "__call__" or not isinstance(module, block):
            return call(*args, **kwargs)
        if _sliced(module, whole):
            raise ValueError(
                f"nn.scan runs one call of {block.__name__} for all layers, which have a gate each: hand Kept to run_stack "
                "instead, or call the blocks from a Python loop"
            )
        if calls < len(open_):
            i, calls = calls, calls + 1
        else:
            raise ValueError(
                f"{block.__name__} is called more than {len(open_)} times, but there are no more gates"
            )
        alone = module.clone(parent=None, name=None)
        assert module.scope is not None  # a module that is called is bound
        keys = _random_streams(module, again=module.path in called)
        called.add(module.path)
        x, name, args, kwargs = _changed(module, args, kwargs)
        # Arrays become arguments of what is differentiated; a flag stays the Python value that the
        # block may branch on.
        leaves, tree = jax.tree.flatten((args, kwargs))
        arrays = [a if isinstance(a, jax.Array) else None for a in leaves]

        def apply(w, x, *scale):
            nonlocal inside
            variables, keys, arrays = w
            given = [old if new is None else new for old, new in zip(leaves, arrays, strict=True)]
            args, kwargs = jax.tree.unflatten(tree, given)
            if name is None or scale:
                args = (x, *scale, *args)
            else:
                kwargs = {name: x, **kwargs}
            inside = True
            try:
                return _Result.of(alone.apply(variables, *args, rngs=keys, **kwargs), x, block)
            finally:
                inside = False

        rebuilt: Any = None

        def layer(inputs, carry):
            nonlocal rebuilt
            w, scale = inputs
            found = []

            def changed(w, x, *scale):
                found.append(apply(w, x, *scale))
                return found[0].x

            x = scaled(changed, kept)(w, carry[0], scale)
            rebuilt = found[0].rebuilt
            return x, found[0].others

        inputs = (
            (module.variables, keys, arrays),
            None if kept.scale is None else jnp.asarray(kept.scale[i]),
        )
        others = [
            jnp.zeros(s.shape, s.dtype)
            for s in jax.eval_shape(lambda w, x: layer(w, (x,))[1], inputs, x)
        ]
        others = _varying(others, (open_, inputs, x))
        one = jax.tree.map(lambda a: a[None], inputs)
        x, others = conditional(layer)(open_[i : i + 1], one, (x, others))
        return rebuilt(x, others)

    with nn.intercept_methods(intercept):
        yield
    if calls < len(open_):
        raise ValueError(
            f"{block.__name__} was called {calls} times, but there are {len(open_)} gates; a scanned stack "
            "calls its block once: hand Kept to run_stack instead"
        )


def _random_streams(module: nn.Module, again: bool) -> dict[str, Any]:
    """What the module draws its random numbers from: the same streams as outside of `dropping`, unless it is called again."""
    assert module.scope is not None  # a module that is called is bound
    streams = {name: stream for name, stream in module.scope.rngs.items() if name != "params"}
    return {name: module.make_rng(name) for name in streams} if again else streams


def _sliced(module: nn.Module, whole: Any) -> bool:
    """Whether the module has one layer's parameters of those that the model holds in its place, as inside an `nn.scan`."""
    for name in module.path:
        whole = whole.get(name, {})
    parts, wholes = (jax.tree.leaves(tree) for tree in (module.variables.get("params", {}), whole))
    return len(parts) == len(wholes) and any(
        a.ndim != b.ndim for a, b in zip(parts, wholes, strict=True)
    )


def _changed(
    module: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[Any, str | None, tuple, dict[str, Any]]:
    """The block's first argument, its name if it was given by name, and the other arguments."""
    name = None if args else next(iter(inspect.signature(module.__call__).parameters), None)
    x = args[0] if args else kwargs.get(name or "")
    if not isinstance(x, jax.Array | np.ndarray):
        raise ValueError(
            f"the first argument of {type(module).__name__} must be the array that it changes, not {x!r}"
        )
    return x, name, args[1:], {k: v for k, v in kwargs.items() if k != name}


@struct.dataclass
class _Result:
    """What a block returns: ``x``, and the arrays that come after it in a tuple."""

    x: jax.Array
    others: list[jax.Array]
    rebuilt: Callable = struct.field(pytree_node=False)

    @classmethod
    def of(cls, returned: Any, x: jax.Array, block: type[nn.Module]) -> "_Result":
        several = isinstance(returned, tuple | list)
        y, *more = returned if several else (returned,)
        if getattr(y, "shape", None) != x.shape or y.dtype != x.dtype:
            found = f"{y.dtype}{list(y.shape)}" if hasattr(y, "shape") else type(y).__name__
            raise ValueError(
                f"{block.__name__} takes {x.dtype}{list(x.shape)} and returns {found}: what is dropped hands on its first "
                "argument, so that must be what the block returns, alone or first in a tuple"
            )
        others, tree = jax.tree.flatten(more)
        others = [jnp.asarray(a) for a in others]
        wrong = sorted({str(a.dtype) for a in others if not _is_floating(a)})
        if wrong:
            raise ValueError(
                f"{block.__name__} returns {', '.join(wrong)} besides what it changes, which must be floats"
            )

        def rebuilt(y, others):
            items = (y, *jax.tree.unflatten(tree, others))
            if not several:
                return y
            return type(returned)(*items) if hasattr(returned, "_fields") else type(returned)(items)

        return cls(y, others, rebuilt)

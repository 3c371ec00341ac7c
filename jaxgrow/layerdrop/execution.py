"""Two executions of layer dropping that skip dropped layers.

They are a ``lax.cond`` around each layer, and a scan over the kept layers only. Both skip the
forward and backward pass of a dropped layer, and give equal results for equal keep masks. Masking
the outputs would save no time.
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
      layers: one of three forms. Bool [layers] is a keep mask; each layer is then behind a
        `lax.cond`. int32 [run] contains the indices of the layers that run, in order. Only their
        number is static. For a model with stages, it is a tuple with one such array for each stage,
        counted within the stage. None runs all layers.
      scale: float [layers], the factor of the output of a kept layer, 1 / keep probability; or a
        `Dropout`; or None. A layer that runs with scale 0 adds nothing, and its gradients are zero.
        Such layers are dropped layers that complete a fixed number of indices
        (`jaxgrow.layerdrop.counts.padded`).
      scaling: the place of the scale, as in the table.
    """

    layers: Any  # jax.Array | np.ndarray | tuple of these | None
    scale: Any = None  # jax.Array | np.ndarray | Dropout | None
    scaling: Literal["block", "sublayer"] = struct.field(pytree_node=False, default="block")

    def part(self, stage: int, layers: slice) -> "KeepMask":
        """The `KeepMask` of one stage, whose layers are the slice ``layers`` of all layers.

        Raises:
          ValueError: indices that are not given separately for each stage.
        """
        own, scale = self.layers, jax.tree.map(lambda x: x[layers], self.scale)
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
      keys: a random key for each layer and sample, [layers, B]; within a block, [B].
      rate: the probability that an entry becomes zero. The other entries are divided by
        ``1 - rate``.
    """

    keys: jax.Array
    rate: float = struct.field(pytree_node=False)

    def __call__(self, y: jax.Array, sublayer: str) -> jax.Array:
        """Drop entries of ``y`` [B, ...]. Each sublayer drops different entries."""
        own = jax.vmap(partial(jax.random.fold_in, data=zlib.crc32(sublayer.encode())))(self.keys)
        kept = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - self.rate, y.shape[1:]))(own)
        return jnp.where(kept, y / (1 - self.rate), 0).astype(y.dtype)


def rescaled(y: jax.Array, scale: Any, sublayer: str = "") -> jax.Array:
    """Multiply the output of a sublayer by its scale, and round once to the dtype of ``y``.

    A block with "sublayer" scaling applies this to the output of each sublayer. The product is
    computed in float32 or a wider type. In bfloat16, 1 / p is wrong by up to 0.4 %, always in the
    same direction for one p, so that the expectation over keep masks would change. If scale is 1 or
    None, the result is bitwise identical to ``y``.
    """
    if scale is None:
        return y
    if isinstance(scale, Dropout):
        return scale(y, sublayer)
    wide = jnp.promote_types(y.dtype, jnp.float32)
    return (scale.astype(wide) * y.astype(wide)).astype(y.dtype)


def scaled(apply: Callable, keep_mask: KeepMask) -> Callable:
    """The function ``(w, x, scale, *rest) -> x`` of a kept layer.

    ``apply`` is ``(w, x, *rest) -> x``, or ``(w, x, scale, *rest) -> x`` if the block scales its
    sublayers.
    """
    if keep_mask.scale is None:
        return lambda w, x, scale, *rest: apply(w, x, *rest)
    # A scale is differentiated only without keep masks, for the sensitivities. Elsewhere its
    # gradient would need the output of the block.
    fixed = (lambda scale: scale) if keep_mask.layers is None else lax.stop_gradient
    if keep_mask.scaling == "sublayer":
        return lambda w, x, scale, *rest: apply(w, x, fixed(scale), *rest)

    def block(w, x, scale, *rest):
        y, scale = apply(w, x, *rest), fixed(scale)
        wide = jnp.promote_types(x.dtype, jnp.float32)  # as in `rescaled`, also for y - x
        delta = (x.astype(wide) + scale.astype(wide) * (y.astype(wide) - x.astype(wide))).astype(
            x.dtype
        )
        # x + (y - x) may round, but at p = 1 a layer must be bitwise identical to the dense one.
        # Without keep masks, the sum itself must be differentiated.
        return delta if keep_mask.layers is None else jnp.where(scale == 1, y, delta)

    return block


def conditional(apply: Callable) -> Callable:
    """Run ``apply(w, x)`` for each kept layer in turn, and skip the dropped layers.

    This is a scan over the layers, with one `lax.switch` in the forward and one in the backward
    pass of each layer. A dropped layer has no cost: neither its forward nor its backward pass runs,
    and nothing is written for it. Its gradients are exactly zero. (With plain differentiation,
    `lax.cond` in a scan saves a copy of all weights, and writes zeros wherever a kept layer saves
    values.) The values that a kept layer computes for its backward pass are saved: all of them, or
    those that `jax.checkpoint` around ``apply`` selects. Only reverse mode is supported: `jax.jvp`
    raises a TypeError.

    Args:
      apply: ``(w, x) -> x``, one layer.

    Returns:
      ``(keep bool [layers], stacked, x) -> x``. The weights ``stacked`` have a leading axis of
      layers.

    Example:
      >>> add = conditional(lambda w, x: x + w)
      >>> float(add(jnp.array([True, False, True]), jnp.array([1.0, 10.0, 100.0]), 0.0))
      101.0
    """

    def scan(keep, stacked, carry, run, *, reverse):
        """``carry = run(carry, w, i)`` for every layer i that is kept."""

        def body(carry, inputs):
            keep, w, i = inputs
            # Identity is branch 0: only branch 0 reliably forwards its operands without a copy.
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
            given = jax.tree.leaves(w)  # not saved again, because the backward pass has them
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
    """Make ``arrays`` vary over all axes of a `shard_map` over which ``data`` varies.

    All branches of a conditional must agree in this, whether they compute from the data, return
    zeros or return their operands. A selection that XLA removes achieves it, because its condition
    is never true. The way in which JAX spells these types has changed between releases.
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
    """The result of `jax.vjp` for each layer, stacked.

    It omits the leaves that are weights of the layer. ``sources`` contains, for each leaf, the
    index of the weight that replaces it, or None if the leaf is saved.
    """

    saved: list[jax.Array]
    tree: Any = struct.field(pytree_node=False)
    sources: tuple[int | None, ...] = struct.field(pytree_node=False)

    def of(self, i: jax.Array, w: Any) -> Callable:
        saved = (lax.dynamic_index_in_dim(s, i, 0, keepdims=False) for s in self.saved)
        given = jax.tree.leaves(w)
        return jax.tree.unflatten(
            self.tree, [next(saved) if j is None else given[j] for j in self.sources]
        )


def _is_floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _floating(inputs: Any) -> tuple[list[jax.Array], Callable]:
    """The leaves that have gradients, and a function that puts them back into the tree."""
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
    """Return ``layers``, and refuse `vmap` over it.

    A conditional on a batch of keep masks would run both branches and save nothing.

    Raises:
      ValueError: under `vmap` over keep masks.
    """
    return layers


@unbatched.def_vmap
def _refuse(axis_size, in_batched, layers):
    raise ValueError(
        f"vmap over {axis_size} keep masks would run every layer for each of them and save no time. Sample one keep mask "
        "outside and pass it with in_axes=None, or use lax.map over the keep masks"
    )


@contextmanager
def dropping(block: type[nn.Module], keep_mask: KeepMask) -> Iterator[None]:
    """A context in which the i-th call of a ``block`` runs only if ``keep_mask.layers[i]`` is true.

    A Flax (Linen) model drops layers in this way. The model must call one block after the other
    from a Python loop. A model with ``nn.scan`` is refused; a custom stack passes `KeepMask` to
    `jaxgrow.models.stack.run_stack` instead.

    The first argument of the block, by position or by name, is the array that it changes. The other
    arguments can be of any type. The block returns that array, or a tuple that begins with it. The
    other items of the tuple are not scaled, and are zero if the block is dropped. With "sublayer"
    scaling, the block takes the scale as its second argument. Variables that a block would write
    (batch statistics, sown values) are lost. Initialise the model outside of this context.

    A kept block samples the same random numbers, for example for dropout, as in the model without
    this context. A module that is called several times samples other numbers from its second call
    on. Only reverse mode is supported: `jax.jvp`, `jax.jacfwd` and `jax.hessian` of a model in this
    context raise a TypeError.

    Args:
      block: the class of the model's blocks.
      keep_mask: the keep mask of the blocks, bool [layers], and the scale of kept blocks, such as
        ``KeepMask(mask, 1 / probs)``.

    Returns:
      A context in which the model is applied.

    Raises:
      ValueError: the number of calls of ``block`` differs from the length of the keep mask,
        ``keep_mask`` contains indices, or the block does not return an array like its first argument.

    Example:
      >>> class Add(nn.Module):
      ...     def __call__(self, x):
      ...         return x + 1
      >>> class Model(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         return Add()(Add()(Add()(x)))
      >>> with dropping(Add, KeepMask(jnp.array([True, False, True]))):
      ...     print(Model().apply({}, jnp.zeros(1)))
      [2.]
    """
    if not hasattr(keep_mask.layers, "dtype") or keep_mask.layers.dtype != bool:
        raise ValueError(
            "dropping() takes a keep mask, bool [layers]. Pass indices of kept layers to run_stack instead"
        )
    open_, calls, inside = unbatched(keep_mask.layers), 0, False
    whole: Any = {}  # the model's parameters
    called: set[tuple[str, ...]] = set()

    def intercept(call, args, kwargs, context):
        nonlocal calls, whole
        module = context.module
        if not inside and module.scope is not None and not module.path:
            whole = module.variables.get(
                "params", whole
            )  # modules that Flax only sets up do not have parameters
        if inside or context.method_name != "__call__" or not isinstance(module, block):
            return call(*args, **kwargs)
        if _sliced(module, whole):
            raise ValueError(
                f"nn.scan runs one call of {block.__name__} for all layers, but the keep mask has one entry per layer. "
                "Pass KeepMask to run_stack instead, or call the blocks from a Python loop"
            )
        if calls < len(open_):
            i, calls = calls, calls + 1
        else:
            raise ValueError(
                f"{block.__name__} is called more than {len(open_)} times, but the keep mask has {len(open_)} entries"
            )
        alone = module.clone(parent=None, name=None)
        assert module.scope is not None  # a module that is called is bound
        keys = _random_streams(module, again=module.path in called)
        called.add(module.path)
        x, name, args, kwargs = _changed(module, args, kwargs)
        # Arrays become arguments of the differentiated function. A flag stays a Python value,
        # because the block may branch on it.
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

            x = scaled(changed, keep_mask)(w, carry[0], scale)
            rebuilt = found[0].rebuilt
            return x, found[0].others

        inputs = (
            (module.variables, keys, arrays),
            None if keep_mask.scale is None else jnp.asarray(keep_mask.scale[i]),
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
            f"{block.__name__} was called {calls} times, but the keep mask has {len(open_)} entries. A scanned stack calls its "
            "block once: pass KeepMask to run_stack instead"
        )


def _random_streams(module: nn.Module, again: bool) -> dict[str, Any]:
    """The sources of random numbers of the module.

    They are the same streams as outside of `dropping`, except if the module is called again.
    """
    assert module.scope is not None  # a module that is called is bound
    streams = {name: stream for name, stream in module.scope.rngs.items() if name != "params"}
    return {name: module.make_rng(name) for name in streams} if again else streams


def _sliced(module: nn.Module, whole: Any) -> bool:
    """Whether the module holds the parameters of one layer of the model, as inside an `nn.scan`."""
    for name in module.path:
        whole = whole.get(name, {})
    parts, wholes = (jax.tree.leaves(tree) for tree in (module.variables.get("params", {}), whole))
    return len(parts) == len(wholes) and any(
        a.ndim != b.ndim for a, b in zip(parts, wholes, strict=True)
    )


def _changed(
    module: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[Any, str | None, tuple, dict[str, Any]]:
    """The first argument of the block, its name if it was given by name, and the others."""
    name = None if args else next(iter(inspect.signature(module.__call__).parameters), None)
    x = args[0] if args else kwargs.get(name or "")
    if not isinstance(x, jax.Array | np.ndarray):
        raise ValueError(
            f"the first argument of {type(module).__name__} must be the array that it changes, not {x!r}"
        )
    return x, name, args[1:], {k: v for k, v in kwargs.items() if k != name}


@struct.dataclass
class _Result:
    """The result of a block: ``x``, and the arrays that follow it in a tuple."""

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
                f"{block.__name__} takes {x.dtype}{list(x.shape)} and returns {found}. A dropped block returns its "
                "first argument, so the block must return an array like it, alone or first in a tuple"
            )
        others, tree = jax.tree.flatten(more)
        others = [jnp.asarray(a) for a in others]
        wrong = sorted({str(a.dtype) for a in others if not _is_floating(a)})
        if wrong:
            raise ValueError(
                f"{block.__name__} returns {', '.join(wrong)} after its first result. The other results must be floats"
            )

        def rebuilt(y, others):
            items = (y, *jax.tree.unflatten(tree, others))
            if not several:
                return y
            return type(returned)(*items) if hasattr(returned, "_fields") else type(returned)(items)

        return cls(y, others, rebuilt)

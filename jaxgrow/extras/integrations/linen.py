"""Layer dropping for Flax (Linen) models that call their blocks from a Python loop.

`drop_blocks` intercepts the calls of a block, and puts each of them behind a conditional.
"""

import inspect
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, TypeAlias

import flax.struct as struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.linen.module import InterceptorContext
from jax.tree_util import PyTreeDef

from jaxgrow.axes.names import Params, Tree
from jaxgrow.layerdrop.execution import (
    Array,
    Dropout,
    KeepMask,
    conditional,
    is_floating,
    scaled,
    unbatched,
    varying,
)

Arguments: TypeAlias = tuple[tuple[object, ...], dict[str, object]]


@contextmanager
def drop_blocks(block: type[nn.Module], keep_mask: KeepMask) -> Generator[None]:
    """A context in which the i-th call of a ``block`` runs only if ``keep_mask.layers[i]`` is true.

    Use it to drop layers of an unmodified Flax (Linen) model. The model must call one block after
    the other from a Python loop. A model with ``nn.scan`` raises an error; a custom stack passes
    `KeepMask` to `jaxgrow.models.stack.run_stack` instead.

    The first argument of the block, by position or by name, is the array that it changes. The other
    arguments can be of any type. The block returns the changed array, or a tuple that begins with
    it. The other items of the tuple are not scaled, and are zero if the block is dropped. With
    "sublayer" scaling, the block takes the scale as its second argument. Variables that a block
    would write (batch statistics, sown values) are lost. Initialise the model outside of this
    context.

    A kept block samples the same random numbers, for example for dropout, as in the model without
    this context. If a module is called several times, its second and later calls sample different
    numbers than without this context. Only reverse mode is supported: `jax.jvp`, `jax.jacfwd` and
    `jax.hessian` of a model in this context raise a TypeError.

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
      >>> with drop_blocks(Add, KeepMask(jnp.array([True, False, True]))):
      ...     print(Model().apply({}, jnp.zeros(1)))
      [2.]
    """
    if getattr(keep_mask.layers, "dtype", None) != np.dtype(bool):
        raise ValueError(
            "drop_blocks() takes a keep mask, bool [layers]. Pass indices of kept layers to run_stack instead"
        )
    calls = _Calls(block, keep_mask)
    with nn.intercept_methods(calls.intercept):
        yield
    if calls.number < len(calls.open):
        raise ValueError(
            f"{block.__name__} was called {calls.number} times, but the keep mask has {len(calls.open)} entries. A scanned "
            "stack calls its block once: pass KeepMask to run_stack instead"
        )


class _Calls:
    """The calls of a block in one context: their number, and the modules that were called.

    Args:
      block: the class of the blocks.
      keep_mask: the keep mask of the calls.
    """

    def __init__(self, block: type[nn.Module], keep_mask: KeepMask):
        if isinstance(keep_mask.scale, Dropout):
            raise TypeError(
                "drop_blocks() takes one scale per block, float [layers], not a Dropout. Use nn.Dropout in the blocks"
            )
        self._scale = keep_mask.scale
        self.open = unbatched(keep_mask.layers)
        self.number = 0
        self._block = block
        self._keep_mask = keep_mask
        self._called: set[tuple[str, ...]] = set()
        self._params: Params = {}  # parameters of the complete model
        self._inside = False  # whether a block is running, which may contain blocks

    def intercept(
        self,
        call: Callable[..., Tree],
        args: tuple[object, ...],
        kwargs: dict[str, object],
        context: InterceptorContext,
    ) -> Tree:
        """Run a method of any module: a call of the block itself runs behind a conditional."""
        module = context.module
        if not self._inside and module.scope is not None and not module.path:
            # Modules that Flax only sets up do not have parameters.
            self._params = module.variables.get("params", self._params)
        is_block = context.method_name == "__call__" and isinstance(module, self._block)
        if self._inside or not is_block:
            return call(*args, **kwargs)
        return self._run(module, self._next(module), args, kwargs)

    def _next(self, module: nn.Module) -> int:
        """Return the index of the next call in the keep mask."""
        if _sliced(module, self._params):
            raise ValueError(
                f"nn.scan runs one call of {self._block.__name__} for all layers, but the keep mask has one entry per layer. "
                "Pass KeepMask to run_stack instead, or call the blocks from a Python loop"
            )
        if self.number == len(self.open):
            raise ValueError(
                f"{self._block.__name__} is called more than {len(self.open)} times, but the keep mask has {len(self.open)} "
                "entries"
            )
        self.number += 1
        return self.number - 1

    def _run(
        self, module: nn.Module, i: int, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Tree:
        """Run a call of the block if the keep mask is true at ``i``; otherwise return its input."""
        keys = _random_streams(module, again=module.path in self._called)
        self._called.add(module.path)
        call = _Call.of(module, args, kwargs)

        def apply(w: Tree, x: jax.Array, *scale: jax.Array | None) -> Tree:
            self._inside = True
            try:
                return call.run(w, x, *scale)
            finally:
                self._inside = False

        def layer(inputs: Tree, x: jax.Array) -> _Result:
            w, scale = inputs
            found: list[_Result] = []

            def changed(w: Tree, x: jax.Array, *scale: jax.Array | None) -> jax.Array:
                found.append(_Result.of(apply(w, x, *scale), x, self._block))
                return found[0].x

            x = scaled(changed, self._keep_mask)(w, x, scale)
            return found[0].replace(x=x)

        weights = module.variables, keys, call.arrays
        inputs = weights, None if self._scale is None else jnp.asarray(self._scale[i])
        shape: _Result = jax.eval_shape(layer, inputs, call.x)
        others = [jnp.zeros(s.shape, s.dtype) for s in shape.others]
        others = varying(others, (self.open, inputs, call.x))

        def carried(
            inputs: Tree, carry: tuple[jax.Array, list[jax.Array]]
        ) -> tuple[jax.Array, list[jax.Array]]:
            result = layer(inputs, carry[0])
            return result.x, result.others

        one = jax.tree.map(partial(jnp.expand_dims, axis=0), inputs)
        x, others = conditional(carried)(self.open[i : i + 1], one, (call.x, others))
        return jax.tree.unflatten(shape.tree, [x, *others])


class _Call(NamedTuple):
    """The arguments of a call, apart from the array that the block changes.

    Arrays become arguments of the differentiated function. Other values, such as flags, stay Python
    values, because the block may branch on them.

    Attributes:
      block: an unbound copy of the module.
      x: the first argument, which the block changes.
      name: the name of the first argument if it was given by name.
      leaves: the leaves of the other arguments.
      tree: the structure of the other arguments.
    """

    block: nn.Module
    x: Array
    name: str | None
    leaves: list[object]
    tree: PyTreeDef

    @classmethod
    def of(cls, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> "_Call":
        x, name, others = _changed_array(module, args, kwargs)
        alone = module.clone(parent=None, name=None)  # pyright: ignore[reportUnknownMemberType]
        return cls(alone, x, name, *jax.tree.flatten(others))

    @property
    def arrays(self) -> list[jax.Array | None]:
        return [a if isinstance(a, jax.Array) else None for a in self.leaves]

    def run(self, w: Tree, x: jax.Array, *scale: jax.Array | None) -> Tree:
        variables, keys, arrays = w
        pairs = zip(self.leaves, arrays, strict=True)
        args, kwargs = jax.tree.unflatten(
            self.tree, [old if new is None else new for old, new in pairs]
        )
        if self.name is None or scale:
            args = (x, *scale, *args)
        else:
            kwargs = {self.name: x, **kwargs}
        apply = _method(self.block, "apply")
        return apply(variables, *args, rngs=keys, **kwargs)


def _random_streams(module: nn.Module, again: bool) -> Mapping[str, object]:
    """The random streams of the module.

    They are the same streams as outside of `drop_blocks`, unless the module was called before.
    """
    assert module.scope is not None  # a module that is called is bound
    streams = {name: stream for name, stream in module.scope.rngs.items() if name != "params"}
    return {name: module.make_rng(name) for name in streams} if again else streams


def _sliced(module: nn.Module, params: Params) -> bool:
    """Whether the module holds a slice of the model's parameters, as inside an `nn.scan`."""
    for name in module.path:
        params = params.get(name, {})
    own = jax.tree.leaves(module.variables.get("params", {}))
    full = jax.tree.leaves(params)
    return len(own) == len(full) and any(a.ndim != b.ndim for a, b in zip(own, full, strict=True))


def _changed_array(
    module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[Array, str | None, Arguments]:
    """The first argument of the block, its name if it was given by name, and the other arguments."""
    call = _method(module, "__call__")
    name = None if args else next(iter(inspect.signature(call).parameters), None)
    x = args[0] if args else kwargs.get(name or "")
    if not isinstance(x, jax.Array | np.ndarray):
        raise ValueError(
            f"the first argument of {type(module).__name__} must be the array that it changes, not {x!r}"
        )
    return x, name, (args[1:], {k: v for k, v in kwargs.items() if k != name})


def _method(module: nn.Module, name: str) -> Callable[..., Tree]:
    return getattr(module, name)


class _Result(struct.PyTreeNode):
    """The result of a block: ``x``, the arrays that follow it in a tuple, and their structure."""

    x: jax.Array
    others: list[jax.Array]
    tree: PyTreeDef = struct.field(pytree_node=False)

    @classmethod
    def of(cls, returned: Tree, x: jax.Array, block: type[nn.Module]) -> "_Result":
        y: Tree = returned
        if isinstance(returned, tuple | list):
            y = next(iter(returned), None)
        if getattr(y, "shape", None) != x.shape or y.dtype != x.dtype:
            found = f"{y.dtype}{list(y.shape)}" if hasattr(y, "shape") else type(y).__name__
            raise ValueError(
                f"{block.__name__} takes {x.dtype}{list(x.shape)} and returns {found}. A dropped block returns its "
                "first argument, so the block must return an array like it, alone or first in a tuple"
            )
        leaves, tree = jax.tree.flatten(returned)
        others = [jnp.asarray(a) for a in leaves[1:]]
        wrong = sorted({str(a.dtype) for a in others if not is_floating(a)})
        if wrong:
            raise ValueError(
                f"{block.__name__} returns {', '.join(wrong)} after its first result. The other results must be floats"
            )
        return cls(y, others, tree)

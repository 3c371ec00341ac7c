"""Which laws should a growth operator satisfy? Assertions for the tests of your own operators.

An operator is any function from a parameter tree to a parameter tree. All assertions raise
`AssertionError`, also if a shape differs or a result is NaN. Tolerances are absolute, and their
defaults are for weights of order one in float64; choose them for your precision.
"""

from collections.abc import Callable
from typing import TypeAlias

import chex
import jax
import numpy as np

from jaxgrow.axes.names import Params, Tree

Operator: TypeAlias = Callable[[Params], Params]


def _assert_close(found: Tree, expected: Tree, atol: float) -> None:
    """Assert that two trees have equal shapes and close values, none of which is NaN."""
    # For chex, NaN equals NaN, and a scalar equals an array of its values.
    chex.assert_trees_all_equal(*(jax.tree.map(np.shape, tree) for tree in (found, expected)))
    chex.assert_trees_all_close(found, expected, rtol=0, atol=atol)
    nan = any(np.any(x != x) for x in jax.tree.leaves(found))
    np.testing.assert_equal(nan, False, "some results are NaN")


def assert_linear(operator: Operator, x: Params, y: Params, *, atol: float = 1e-12) -> None:
    """Assert that an operator is linear: ``f(2 x - 3 y) == 2 f(x) - 3 f(y)``.

    Args:
      operator: the function ``f`` from parameters to parameters.
      x: parameters.
      y: other parameters with the same shapes.
      atol: absolute tolerance of each entry.
    """
    mix = jax.tree.map(lambda a, b: 2 * a - 3 * b, x, y)
    expected = jax.tree.map(lambda a, b: 2 * a - 3 * b, operator(x), operator(y))
    _assert_close(operator(mix), expected, atol)


def assert_inverse(down: Operator, up: Operator, small: Params, *, atol: float = 0.0) -> None:
    """Assert that an operator inverts another one: ``down(up(s)) == s``.

    Args:
      down: the operator that makes a model smaller.
      up: the operator that makes a model larger.
      small: the parameters ``s`` of the small model.
      atol: absolute tolerance of each entry; 0 requires bitwise equality.
    """
    _assert_close(down(up(small)), small, atol)


def assert_idempotent(operator: Operator, x: Params, *, atol: float = 1e-12) -> None:
    """Assert that an operator is a projection: ``f(f(x)) == f(x)``.

    Args:
      operator: the function ``f`` from parameters to parameters.
      x: parameters.
      atol: absolute tolerance of each entry.
    """
    once = operator(x)
    _assert_close(operator(once), once, atol)


def assert_function_preserving(
    operator: Operator,
    params: Params,
    before: Callable,
    after: Callable,
    inputs,
    *,
    atol: float = 1e-10,
) -> None:
    """Assert that a growth preserves the function of a model.

    The assertion is ``after(operator(params), inputs) == before(params, inputs)``.

    Args:
      operator: the growth, a function from parameters to parameters.
      params: the parameters of the small model.
      before: the small model, ``(params, inputs) -> outputs``.
      after: the grown model, ``(params, inputs) -> outputs``.
      inputs: inputs of both models.
      atol: absolute tolerance of each output.
    """
    _assert_close(after(operator(params), inputs), before(params, inputs), atol)


def assert_gradient_duality(
    operator: Operator,
    dual: Operator,
    params: Params,
    before: Callable,
    after: Callable,
    *,
    atol: float = 1e-10,
) -> None:
    """Assert that gradients grow by the dual of the growth.

    The assertion is ``grad(after)(operator(params)) == dual(grad(before)(params))``.

    Args:
      operator: the growth, a function from parameters to parameters.
      dual: the growth of gradients, for example by `jaxgrow.dual`.
      params: the parameters of the small model.
      before: the loss of the small model, a scalar function of its parameters.
      after: the loss of the grown model, a scalar function of its parameters.
      atol: absolute tolerance of each entry.
    """
    _assert_close(jax.grad(after)(operator(params)), dual(jax.grad(before)(params)), atol)


def assert_adjoint(
    operator: Operator, adjoint: Operator, x: Params, y: Params, *, rtol: float = 1e-12
) -> None:
    """Assert that two operators are adjoint: ``<f(x), y> == <x, f*(y)>``.

    Args:
      operator: the function ``f``.
      adjoint: the function ``f*``.
      x: parameters of the small model.
      y: parameters of the grown model.
      rtol: relative tolerance of the inner products.
    """

    def inner(a: Tree, b: Tree) -> float:
        return sum(
            float(np.vdot(u, v))
            for u, v in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        )

    large, small = operator(x), adjoint(y)
    chex.assert_trees_all_equal_shapes(large, y)
    chex.assert_trees_all_equal_shapes(small, x)
    np.testing.assert_allclose(inner(large, y), inner(x, small), rtol=rtol, equal_nan=False)


def assert_structure_kept(operator: Operator, params: Params) -> None:
    """Assert that an operator keeps the tree structure, and the rank and dtype of each parameter.

    Args:
      operator: the growth, a function from parameters to parameters.
      params: the parameters of the small model.
    """
    result = operator(params)
    chex.assert_trees_all_equal_structs(result, params)
    chex.assert_trees_all_equal_dtypes(result, params)
    jax.tree.map(lambda a, b: chex.assert_rank(a, b.ndim), result, params)

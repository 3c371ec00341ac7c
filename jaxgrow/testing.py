"""Assertions to put on growth operators, those here and your own. All raise `AssertionError`, by chex.

An operator is any function from a parameter tree to a parameter tree. Tolerances are absolute, for
weights of order one in float64; choose them for your precision.
"""

from collections.abc import Callable
from typing import TypeAlias

import chex
import jax
import numpy as np

from jaxgrow.axes.names import Params, Tree

Operator: TypeAlias = Callable[[Params], Params]


def assert_linear(operator: Operator, x: Params, y: Params, *, atol: float = 1e-12) -> None:
    """``f(2 x - 3 y) == 2 f(x) - 3 f(y)``."""
    mix = jax.tree.map(lambda a, b: 2 * a - 3 * b, x, y)
    expected = jax.tree.map(lambda a, b: 2 * a - 3 * b, operator(x), operator(y))
    chex.assert_trees_all_close(operator(mix), expected, rtol=0, atol=atol)


def assert_inverse(down: Operator, up: Operator, small: Params, *, atol: float = 0.0) -> None:
    """``down(up(s)) == s``; by default to the bit."""
    chex.assert_trees_all_close(down(up(small)), small, rtol=0, atol=atol)


def assert_idempotent(operator: Operator, x: Params, *, atol: float = 1e-12) -> None:
    """``f(f(x)) == f(x)``: what a projector does."""
    once = operator(x)
    chex.assert_trees_all_close(operator(once), once, rtol=0, atol=atol)


def assert_function_preserving(
    operator: Operator,
    params: Params,
    before: Callable,
    after: Callable,
    inputs,
    *,
    atol: float = 1e-10,
) -> None:
    """``after(operator(p), inputs) == before(p, inputs)``: the grown model computes what the old one did."""
    chex.assert_trees_all_close(
        after(operator(params), inputs), before(params, inputs), rtol=0, atol=atol
    )


def assert_gradient_duality(
    operator: Operator,
    dual: Operator,
    params: Params,
    before: Callable,
    after: Callable,
    *,
    atol: float = 1e-10,
) -> None:
    """``grad after (operator(p)) == dual(grad before (p))``, for scalar functions ``before`` and ``after`` of parameters."""
    chex.assert_trees_all_close(
        jax.grad(after)(operator(params)), dual(jax.grad(before)(params)), rtol=0, atol=atol
    )


def assert_adjoint(
    operator: Operator, adjoint: Operator, x: Params, y: Params, *, rtol: float = 1e-12
) -> None:
    """``<f(x), y> == <x, f*(y)>``."""

    def inner(a: Tree, b: Tree) -> float:
        return sum(
            float(np.vdot(u, v))
            for u, v in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        )

    np.testing.assert_allclose(inner(operator(x), y), inner(x, adjoint(y)), rtol=rtol)


def assert_structure_kept(operator: Operator, params: Params) -> None:
    """The result has the same leaves under the same names, each of the same rank and dtype."""
    result = operator(params)
    chex.assert_trees_all_equal_structs(result, params)
    chex.assert_trees_all_equal_dtypes(result, params)
    jax.tree.map(lambda a, b: chex.assert_rank(a, b.ndim), result, params)

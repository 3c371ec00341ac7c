"""Each public assertion passes for an operator with the property and fails for one without it.

The tolerances are the defaults of the assertions.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrow import dual, grow, swap
from jaxgrow import testing as assertions
from jaxgrow.growth.maps import select

pytestmark = pytest.mark.usefixtures("x64")

RNG = np.random.default_rng(0)
AXES = {"w": ("x.in", "a"), "v": ("a.in", "y")}
SMALL = {"w": RNG.normal(size=(2, 3)), "v": RNG.normal(size=(3, 5))}
LARGE = {"w": RNG.normal(size=(2, 7)), "v": RNG.normal(size=(7, 5))}
INPUTS = RNG.normal(size=(11, 2))
GROWTH = {"a": select([0, 1, 2, 0, 1, 0, 0], 3)}  # groups of 4, 2 and 1: exact


def up(p):
    return grow(GROWTH, p, AXES)


def down(p):
    return grow(swap(GROWTH), p, AXES)


def by_dual(p):
    return grow(dual(GROWTH), p, AXES)


def model(p, x):
    return jnp.tanh(x @ p["w"]) @ p["v"]


def loss(p):
    return jnp.square(model(p, INPUTS)).sum()


def also(operator, change):
    """Break an operator by changing the growth that it returns."""
    return lambda p: jax.tree.map(change, operator(p))


@pytest.mark.parametrize(("assertion", "right", "wrong"), [
    (assertions.assert_linear, (up, SMALL, down(LARGE)), (also(up, np.square), SMALL, down(LARGE))),
    (assertions.assert_linear, (down, LARGE, up(SMALL)), (also(down, lambda x: x + 1), LARGE, up(SMALL))),
    (assertions.assert_inverse, (down, up, SMALL), (down, also(up, lambda x: x * (1 + 1e-15)), SMALL)),
    (assertions.assert_inverse, (down, up, SMALL), (up, down, LARGE)),
    (assertions.assert_idempotent, (lambda p: up(down(p)), LARGE), (also(lambda p: up(down(p)), lambda x: 1.001 * x), LARGE)),
    (assertions.assert_function_preserving, (up, SMALL, model, model, INPUTS),
     (also(up, lambda x: x + 1e-6), SMALL, model, model, INPUTS)),
    (assertions.assert_gradient_duality, (up, by_dual, SMALL, loss, loss), (up, up, SMALL, loss, loss)),
    (assertions.assert_adjoint, (down, by_dual, LARGE, SMALL), (down, up, LARGE, SMALL)),
    # NaN is not equal to NaN, a scalar is no array, and the numbers of a kernel in another shape are another kernel.
    (assertions.assert_linear, (up, SMALL, down(LARGE)), (also(up, lambda x: x * np.nan), SMALL, down(LARGE))),
    (assertions.assert_idempotent, (lambda p: up(down(p)), LARGE), (also(lambda p: up(down(p)), lambda x: x * np.nan), LARGE)),
    (assertions.assert_function_preserving, (up, SMALL, model, model, INPUTS),
     (up, SMALL, lambda p, x: np.nan * x, lambda p, x: np.nan * x, INPUTS)),
    (assertions.assert_function_preserving, (up, SMALL, model, model, INPUTS),
     (up, SMALL, lambda p, x: np.zeros(5), lambda p, x: np.zeros(()), INPUTS)),
    (assertions.assert_gradient_duality, (up, by_dual, SMALL, loss, loss),
     (up, by_dual, SMALL, lambda p: np.nan * loss(p), lambda p: np.nan * loss(p))),
    (assertions.assert_adjoint, (down, by_dual, LARGE, SMALL), (also(down, lambda x: x * np.nan), by_dual, LARGE, SMALL)),
    (assertions.assert_adjoint, (lambda p: p, lambda p: p, SMALL, SMALL),
     (also(lambda p: p, np.ravel), also(lambda p: p, np.ravel), SMALL, SMALL)),
    (assertions.assert_adjoint, (down, by_dual, LARGE, SMALL), (lambda p: {"w": down(p)["w"]}, by_dual, LARGE, SMALL)),
    (assertions.assert_structure_kept, (up, SMALL), (lambda p: {"w": up(p)["w"]}, SMALL)),
    (assertions.assert_structure_kept, (up, SMALL), (also(up, np.float32), SMALL)),
    (assertions.assert_structure_kept, (up, SMALL), (also(up, lambda x: x[None]), SMALL)),
])  # fmt: skip
def test_passes_and_fails(assertion, right, wrong):
    assertion(*right)
    with pytest.raises(AssertionError):
        assertion(*wrong)


def test_tolerances_are_the_caller_s():
    off = also(up, lambda x: x + 1e-4)
    assertions.assert_inverse(down, off, SMALL, atol=1e-3)
    assertions.assert_function_preserving(off, SMALL, model, model, INPUTS, atol=1e-1)

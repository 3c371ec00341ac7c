"""Every operator against every law. A new operator is a new row of `OPERATORS`.

D is the growth of a row, ``grow(g, .)``, and C its `swap`. Tolerance 1e-10 on functions and gradients: float64 through
two layers; equality to the bit where only copies and powers of two are involved.
"""

from functools import partial
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxgrow import compose, dual, grow, preserves_function, swap
from jaxgrow import testing as assertions
from jaxgrow.maps import AxisMap, dense, select, tile
from jaxgrow.models.gpt2 import paper_tied_axes, resized
from jaxgrow.operators import decoalesce, far, fpi, hypercloning, interleave, stack

pytestmark = pytest.mark.usefixtures("x64")

TOLERANCE = 1e-10
VISIBLE = 1e-2  # of what is of order one
OLD = tiny.WIDTHS


class Row(NamedTuple):
    growth: dict[str, AxisMap]
    keeps: bool  # the function of every model
    powers_of_two: bool  # every group has 1, 2, 4 .. units, so its mean and its shares are exact


def to(**new: int) -> dict[str, int]:
    return {**OLD, **new}


OPERATORS = {
    "decoalesce heads, far pairs": Row(decoalesce(to(heads=6, embed=12, mlp=18), heads="far"), True, True),
    "decoalesce heads, adjacent pairs": Row(decoalesce(to(heads=6, embed=12, mlp=18), heads="adjacent"), True, True),
    "decoalesce heads, threes": Row(decoalesce(to(heads=9, embed=18, mlp=27), heads=far(9, 3)), True, False),
    "decoalesce heads, 4 + 2 + 1": Row(
        decoalesce(to(heads=7, embed=14, mlp=21), heads=((5, 0, 6, 2), (1, 4), (3,))), False, True
    ),
    "decoalesce heads, random": Row(
        decoalesce(to(heads=10, embed=20, mlp=30), heads=tiny.random_groups(10, 3, seed=1)), False, False
    ),
    "decoalesce mlp, random": Row(decoalesce(to(mlp=20), mlp=tiny.random_groups(20, 9, seed=2)), True, False),
    "decoalesce layers, far pairs": Row(decoalesce(to(layers=4), layers="far"), False, True),
    "decoalesce layers, adjacent pairs": Row(decoalesce(to(layers=4), layers="adjacent"), False, True),
    "decoalesce layers, 3 + 2": Row(decoalesce(to(layers=5), layers=((3, 0, 4), (2, 1))), False, False),
    "decoalesce everything": Row(
        decoalesce(to(**tiny.BIG), heads="far", mlp=tiny.random_groups(18, 9, seed=3), layers="adjacent"), False, False
    ),
    "stack": Row(stack(OLD, 4), False, True),
    "stack, ragged": Row(stack(OLD, 5), False, False),
    "interleave": Row(interleave(OLD, 4), False, True),
    "interleave, ragged": Row(interleave(OLD, 5), False, False),
    "fpi heads and mlp": Row(fpi(OLD, {"heads": 5, "mlp": 13}, seed=1), True, False),
    "fpi, ragged": Row(fpi(OLD, {"embed": 8, "heads": 5, "mlp": 13}, seed=2), False, False),
    "hypercloning 2": Row(hypercloning(OLD, 2), True, True),
    "hypercloning 3": Row(hypercloning(OLD, 3), True, False),
}
KEEPING = [name for name, row in OPERATORS.items() if row.keeps]
DEPTH = [name for name, row in OPERATORS.items() if "layers" in row.growth]


def rows(names=OPERATORS):
    return pytest.mark.parametrize("row", [pytest.param(OPERATORS[n], id=n) for n in names])


def model(tied=True):
    """The small model of every row: ``(config, axes, parameters)``."""
    config = tiny.config(tied=tied)
    return config, tiny.axes(config), tiny.params(config)


def large(row, tied=True, seed=7):
    """Unrelated parameters in the shape of the grown model."""
    return tiny.params(resized(tiny.config(tied=tied), row.growth), seed)


# --- the algebra ---


@rows()
def test_growing_is_linear(row):
    config, axes, small = model()
    assertions.assert_linear(lambda p: grow(row.growth, p, axes), small, tiny.params(config, seed=1))
    assertions.assert_linear(lambda p: grow(swap(row.growth), p, axes), large(row), large(row, seed=8))


@rows()
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_structure_and_dtype_are_kept_and_sizes_are_the_config_s(row, dtype):
    config, axes, _ = model()
    small = tiny.params(config, dtype=dtype)
    assertions.assert_structure_kept(lambda p: grow(row.growth, p, axes), small)
    chex.assert_trees_all_equal_shapes(grow(row.growth, small, axes), large(row))


@rows()
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_swapping_inverts_to_the_bit_for_groups_of_powers_of_two(row, dtype):
    config, axes, _ = model()
    rounding = {"float64": 1e-15, "float32": 1e-6, "bfloat16": 2e-2}[dtype]
    assertions.assert_inverse(
        lambda p: grow(swap(row.growth), p, axes),
        lambda p: grow(row.growth, p, axes),
        tiny.params(config, dtype=dtype),
        atol=0 if row.powers_of_two else rounding,
    )


@rows()
def test_growing_after_coalescing_is_a_projector_and_not_the_identity(row):
    _, axes, _ = model()

    def project(p):
        return grow(row.growth, grow(swap(row.growth), p, axes), axes)

    assertions.assert_idempotent(project, large(row))
    assert tiny.distance(project(large(row)), large(row)) > VISIBLE


@rows()
def test_the_dual_is_the_adjoint_of_the_swap(row):
    """``<C M, s> == <M, D* s>``, and ``<D s, M> == <s, C* M>``."""
    _, axes, small = model()
    g = row.growth
    assertions.assert_adjoint(lambda p: grow(swap(g), p, axes), lambda p: grow(dual(g), p, axes), large(row), small)
    assertions.assert_adjoint(lambda p: grow(g, p, axes), lambda p: grow(swap(dual(g)), p, axes), small, large(row))


@rows()
def test_composing_multiplies_maps(row):
    _, axes, small = model()
    again = {
        **hypercloning(tiny.of(row.growth, OLD), 2),
        "layers": select([1, 0, 1], tiny.of(row.growth, OLD)["layers"]),
    }
    two_steps = grow(again, grow(row.growth, small, axes), axes)
    chex.assert_trees_all_close(grow(compose(again, row.growth), small, axes), two_steps, rtol=0, atol=1e-15)


@rows()
def test_growths_of_different_axes_commute_to_the_bit(row):
    """Width and depth above all. Doubling keeps the other factor exact, so that the order cannot show by rounding."""
    config, axes, small = model()
    sizes = {**OLD, "vocab": config.vocab, "context": config.context}
    others = {name: tile(size, 2) for name, size in sizes.items() if name not in row.growth}
    one = grow(others, grow(row.growth, small, axes), axes)
    chex.assert_trees_all_equal(one, grow(row.growth, grow(others, small, axes), axes))


@rows()
def test_numpy_and_jit_agree_to_the_bit(row):
    _, axes, small = model()
    compiled = tiny.quick_jit(lambda p: grow(row.growth, p, axes))
    chex.assert_trees_all_equal(compiled(small), grow(row.growth, small, axes))


# --- the function of a model ---


def change_of_logits(growth, tied, small_axes=None, dtype="float64"):
    """``max |difference of logits| / standard deviation of the logits`` when a GPT-2 grows."""
    config = tiny.config(tied=tied, dtype=dtype)
    small = tiny.params(config, dtype=dtype)
    before = tiny.forward(config)(small, tiny.tokens())
    grown = grow(growth, small, small_axes or tiny.axes(config))
    after = tiny.forward(resized(config, growth))(grown, tiny.tokens())
    return float(jnp.abs(after - before).max() / before.std())


@rows()
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_preserves_function_says_what_is_measured(row, tied):
    assert preserves_function(row.growth) == row.keeps
    change = change_of_logits(row.growth, tied)
    assert change < TOLERANCE if row.keeps else change > VISIBLE


def test_a_dense_map_that_copies_is_recognised_and_one_that_mixes_is_not():
    copy = select([0, 1, 2, 1], 3)
    assert preserves_function({"mlp": AxisMap(jnp.asarray(dense(copy.write)), jnp.asarray(dense(copy.read)))})
    mix = np.random.default_rng(0).normal(size=(4, 3))
    assert not preserves_function({"mlp": AxisMap(mix, np.linalg.pinv(mix).T)})
    assert not preserves_function({"mlp": AxisMap(dense(copy.write), dense(copy.write))})


@rows(KEEPING)
def test_gradients_grow_by_the_dual_where_the_function_is_kept_and_not_like_weights(row):
    config, axes, small = model()
    gradient = jax.device_get(tiny.gradient(config)(small, tiny.tokens()))
    large_gradient = tiny.gradient(resized(config, row.growth))(grow(row.growth, small, axes), tiny.tokens())
    chex.assert_trees_all_close(large_gradient, grow(dual(row.growth), gradient, axes), rtol=0, atol=TOLERANCE)
    scale = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(large_gradient))
    assert tiny.distance(large_gradient, grow(row.growth, gradient, axes)) > VISIBLE * scale


# --- what must fail ---


@rows(DEPTH)
def test_copying_layers_never_keeps_the_function(row):
    alone = {"layers": row.growth["layers"]}
    assert not preserves_function(alone)
    assert change_of_logits(alone, tied=True) > VISIBLE


def test_ragged_growth_fails_because_of_the_norms_alone():
    """Readers receive what they received before (``read.T @ write == I``), but mean and variance count copies."""
    growth = OPERATORS["fpi, ragged"].growth
    for m in growth.values():
        np.testing.assert_allclose(dense(m.read).T @ dense(m.write), np.eye(m.old), rtol=0, atol=1e-15)
    assert change_of_logits(growth, tied=False) > VISIBLE
    without_norms = {name: m for name, m in growth.items() if name != "embed"}
    assert change_of_logits(without_norms, tied=False) < TOLERANCE
    assert preserves_function(growth, normed=())


def test_the_published_tied_head_changes_the_function():
    """Dividing the tables scales the residual stream where it begins, but not where the blocks add to it."""
    halves = hypercloning(OLD, 2)
    published = paper_tied_axes(tiny.axes(tiny.config(tied=True)))
    change = partial(change_of_logits, halves, True, dtype="float32")
    assert change(small_axes=published) > VISIBLE
    assert change() < 1e-5


def test_two_steps_of_pairs_are_one_step_of_fours():
    """Groups of equal size only: the mean of means weighs a small group's members more."""
    eight, four = to(heads=8, embed=16, mlp=24), to(heads=4, embed=8, mlp=12)
    steps = compose(decoalesce(eight, heads="far"), decoalesce(four, heads="far"))
    once = decoalesce(eight, heads=far(8, 2))
    ragged = compose(decoalesce(to(mlp=3), mlp=((0, 1), (2,))), decoalesce(to(mlp=2), mlp=((0, 1),)))
    thirds = decoalesce(to(mlp=3), mlp=((0, 1, 2),))
    for name in once:
        np.testing.assert_array_equal(dense(steps[name].write), dense(once[name].write))
        np.testing.assert_array_equal(dense(steps[name].read), dense(once[name].read))
    np.testing.assert_array_equal(dense(ragged["mlp"].read)[:, 0], [0.25, 0.25, 0.5])
    np.testing.assert_allclose(dense(thirds["mlp"].read)[:, 0], [1 / 3] * 3)

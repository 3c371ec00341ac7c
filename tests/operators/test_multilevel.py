"""Multi-level training: properties of coalescing C, de-coalescing D and interpolation I.

The method is by Zou et al., ICLR 2024. Properties that do not hold are tested as well. M is a
large model, s a small one. The tolerance is 1e-14, for sums of a few numbers of order one in
float64.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from jaxgrow import correct, dual, grow, interpolate, swap
from jaxgrow import testing as assertions
from jaxgrow.operators import coalesce, decoalesce, far

pytestmark = pytest.mark.usefixtures("x64")

TOLERANCE = 1e-14
LARGE = {"layers": 4, "heads": 4, "embed": 12, "mlp": 20}
SMALL = {"layers": 2, "heads": 2, "embed": 6, "mlp": 10}
PATTERNS = {
    "pairs of heads, neighbouring layers": decoalesce(LARGE, heads="far", layers="adjacent"),
    "pairs of heads, layers i and i + L/2": decoalesce(LARGE, heads="far", layers="far"),
    "groups of 3 + 1": decoalesce(LARGE, heads=((2, 0, 3), (1,)), layers=((0, 1, 3), (2,))),
}
AXES = tiny.axes(tiny.config(**LARGE))


def close(a, b, atol=TOLERANCE):
    chex.assert_trees_all_close(a, b, rtol=0, atol=atol)


def combine(a, x, b, y):
    return jax.tree.map(lambda u, v: a * u + b * v, x, y)


@pytest.fixture(params=PATTERNS.values(), ids=PATTERNS)
def pattern(request):
    return request.param


@pytest.fixture
def up(pattern):
    """De-coalescing D."""
    return lambda s: grow(pattern, s, AXES)


@pytest.fixture
def down(pattern):
    """Coalescing C."""
    return lambda m: grow(swap(pattern), m, AXES)


@pytest.fixture
def m():
    return tiny.params(tiny.config(**LARGE), seed=1)


@pytest.fixture
def s():
    return tiny.params(tiny.config(**SMALL), seed=2)


# --- C and D ---


@given(st.integers(1, 7), st.integers(1, 5), st.integers(0, 99))
def test_coalescing_inverts_decoalescing_for_every_partition(heads, layers, seed):
    large = {"heads": 7, "embed": 14, "mlp": 21, "layers": 5}
    of = {
        "heads": tiny.random_groups(7, heads, seed),
        "layers": tiny.random_groups(5, layers, seed),
    }
    config = tiny.config(heads=heads, embed=2 * heads, mlp=3 * heads, layers=layers)
    up, down = decoalesce(large, **of), coalesce(large, **of)
    exact = all(len(g) in (1, 2, 4) for partition in of.values() for g in partition)
    assertions.assert_inverse(
        lambda p: grow(down, p, AXES),
        lambda p: grow(up, p, AXES),
        tiny.params(config, seed),
        atol=0 if exact else TOLERANCE,
    )


def test_decoalescing_does_not_invert_coalescing(m, up, down):
    assertions.assert_idempotent(lambda p: up(down(p)), m)
    assert tiny.distance(up(down(m)), m) > 1


@pytest.mark.parametrize(
    "published", [False, True], ids=["tables write", "tables read, as published"]
)
def test_norms_and_adjoints_of_equal_groups(published, g=3):
    """Matrices keep their norm and C is the adjoint of D; vectors grow by sqrt(g) and C = D*/g.

    With the published axes, embeddings have the inverse factors.
    """
    config = tiny.config()
    axes = tiny.paper_axes(config) if published else tiny.axes(config)
    growth = decoalesce({"heads": 3 * g, "embed": 6 * g, "mlp": 9 * g}, heads=far(3 * g, 3))
    small, large = tiny.params(config), tiny.params(config.resized(growth), seed=3)
    norms = {
        path: np.linalg.norm(b) / np.linalg.norm(a)
        for path, a, b in tiny.pairs(small, grow(growth, small, axes))
    }
    down, adjoint = grow(swap(growth), large, axes), grow(swap(dual(growth)), large, axes)
    for path, by_c, by_adjoint in tiny.pairs(down, adjoint):
        reads = "embedding" in path if published else path.startswith("final_norm")
        power = 0 if "kernel" in path else -1 if reads else 1
        np.testing.assert_allclose(norms[path], g ** (power / 2), err_msg=path)
        np.testing.assert_allclose(
            by_c, by_adjoint / g**power, rtol=0, atol=TOLERANCE, err_msg=path
        )


def test_pairs_twice_equal_fours_only_for_equal_groups(m):
    """Published axes: if embeddings are summed over the group; the published code multiplies by 2 instead."""

    def both(axes, first, second, at_once):
        step = grow(coalesce(LARGE, heads=first), m, axes)
        two_steps = grow(coalesce(SMALL, heads=second), step, axes)
        return two_steps, grow(coalesce(LARGE, heads=at_once), m, axes)

    for axes in (AXES, tiny.paper_axes(tiny.config())):
        close(*both(axes, ((0, 2), (1, 3)), ((0, 1),), ((0, 1, 2, 3),)))
        assert tiny.distance(*both(axes, ((0, 2, 3), (1,)), ((0, 1),), ((0, 1, 2, 3),))) > 0.05


# --- interpolation and correction ---


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_interpolation_ends_at_either_model_to_the_bit(dtype):
    m, u = (tiny.params(tiny.config(**LARGE), seed, dtype) for seed in (1, 2))
    chex.assert_trees_all_equal(interpolate(m, u, 0.0), m)
    chex.assert_trees_all_equal(interpolate(m, u, 1.0), u)


@pytest.mark.extra
def test_low_precision_is_rounded_once():
    m, u = (tiny.params(tiny.config(**SMALL), seed, "bfloat16") for seed in (1, 2))
    wide = jax.tree.map(lambda a, b: 0.7 * a.astype("float32") + 0.3 * b.astype("float32"), m, u)
    m, u = (jax.tree.map(jnp.asarray, p) for p in (m, u))  # jax keeps bfloat16 where NumPy does not
    once = jax.tree.map(lambda x: x.astype("bfloat16"), wide)
    chex.assert_trees_all_equal(interpolate(m, u, 0.3), once)


def test_correction_sets_the_coarse_part_and_keeps_the_rest(m, s, up, down, pattern):
    corrected = correct(m, s, pattern, AXES)
    close(down(corrected), s)
    close(combine(1, corrected, -1, up(down(corrected))), combine(1, m, -1, up(down(m))))
    chex.assert_trees_all_equal(correct(m, down(m), pattern, AXES), m)
    close(correct(m, s, pattern, AXES, alpha=0.25), combine(0.75, m, 0.25, corrected))

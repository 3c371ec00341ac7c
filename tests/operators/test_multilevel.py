"""Multi-level training: properties of coalescing C, de-coalescing D and interpolation I.

The method is by Zou et al., ICLR 2024. Properties that do not hold are tested as well. M is a
large model, s a small one. The tolerance is 1e-14, for sums of a few numbers of order one in
float64.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
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
    groups = {
        "heads": tiny.random_groups(7, heads, seed),
        "layers": tiny.random_groups(5, layers, seed),
    }
    small = tiny.params(
        tiny.config(heads=heads, embed=2 * heads, mlp=3 * heads, layers=layers), seed
    )
    up, down = decoalesce(large, **groups), coalesce(large, **groups)
    exact = all(len(g) in (1, 2, 4) for partition in groups.values() for g in partition)
    assertions.assert_inverse(
        lambda p: grow(down, p, AXES),
        lambda p: grow(up, p, AXES),
        small,
        atol=0 if exact else TOLERANCE,
    )


def test_decoalescing_does_not_invert_coalescing(m, up, down):
    assertions.assert_idempotent(lambda p: up(down(p)), m)
    assert tiny.distance(up(down(m)), m) > 1


def test_all_three_are_linear(m, s, up, down):
    assertions.assert_linear(down, m, up(s))
    assertions.assert_linear(up, s, down(m))
    twice = interpolate(combine(2, m, -3, up(s)), combine(2, up(s), -3, m), 0.25)
    close(twice, combine(2, interpolate(m, up(s), 0.25), -3, interpolate(up(s), m, 0.25)))


def test_width_and_depth_commute(pattern, m):
    width = swap({name: a for name, a in pattern.items() if name != "layers"})
    depth = swap({"layers": pattern["layers"]})
    one, other = grow(depth, grow(width, m, AXES), AXES), grow(width, grow(depth, m, AXES), AXES)
    close(one, other)
    close(one, grow(swap(pattern), m, AXES))


@pytest.mark.parametrize(
    "published", [False, True], ids=["tables write", "tables read, as published"]
)
@pytest.mark.parametrize("g", [2, 3])
def test_norms_and_adjoints_of_equal_groups(g, published):
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


def test_norm_and_adjoint_in_depth(s):
    growth = decoalesce({"layers": 4}, layers="adjacent")
    large = tiny.params(tiny.config(**{**SMALL, "layers": 4}))
    for path, a, b in tiny.pairs(s["blocks"], grow(growth, s, AXES)["blocks"]):
        np.testing.assert_allclose(np.linalg.norm(b) / np.linalg.norm(a), 2**0.5, err_msg=path)
    down, adjoint = grow(swap(growth), large, AXES), grow(swap(dual(growth)), large, AXES)
    close(down["blocks"], jax.tree.map(lambda x: x / 2, adjoint["blocks"]))


def test_a_decoalesced_matrix_has_the_rank_of_the_small_one(s, m):
    kernel = grow(PATTERNS["pairs of heads, neighbouring layers"], s, AXES)["blocks"]["mlp"]["up"][
        "kernel"
    ][0]
    assert kernel.shape == (12, 20)
    assert np.linalg.matrix_rank(kernel) == 6
    assert np.linalg.matrix_rank(m["blocks"]["mlp"]["up"]["kernel"][0]) == 12


def test_pairs_twice_equal_fours_only_for_equal_groups(m):
    """Also holds with the published axes, if embeddings are summed over the group.

    The published code multiplies them by 2 instead.
    """

    def both(axes, first, second, at_once):
        step = grow(coalesce(LARGE, heads=first), m, axes)
        halves = {"heads": 2, "embed": 6, "mlp": 10}
        return grow(coalesce(halves, heads=second), step, axes), grow(
            coalesce(LARGE, heads=at_once), m, axes
        )

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
    chex.assert_trees_all_equal(
        interpolate(m, u, 0.3), jax.tree.map(lambda x: x.astype("bfloat16"), wide)
    )


def test_the_coarse_part_is_interpolated(m, s, up, down):
    """``C(I) == (1 - a) C(M) + a s``."""
    close(down(interpolate(m, up(s), 0.25)), combine(0.75, down(m), 0.25, s))


def test_interpolation_shrinks_the_fine_part(m, s, up, down):
    """``I == (1 - a) (M - D C M) + D((1 - a) C M + a s)``."""
    fine = combine(1, m, -1, up(down(m)))
    close(interpolate(m, up(s), 0.25), combine(0.75, fine, 1, up(combine(0.75, down(m), 0.25, s))))


def test_interpolating_an_untrained_small_model_changes_weights(m, up, down):
    """``I - M == a (D C M - M)``, so M is not a fixed point."""
    learned_nothing = interpolate(m, up(down(m)), 0.5)
    assert tiny.distance(learned_nothing, m) > 0.5
    close(combine(1, learned_nothing, -1, m), combine(0.5, up(down(m)), -0.5, m))


def test_correction_sets_the_coarse_part_and_keeps_the_rest(m, s, up, down, pattern):
    corrected = correct(m, s, pattern, AXES)
    close(down(corrected), s)
    close(combine(1, corrected, -1, up(down(corrected))), combine(1, m, -1, up(down(m))))
    chex.assert_trees_all_equal(correct(m, down(m), pattern, AXES), m)
    close(correct(m, s, pattern, AXES, alpha=0.25), combine(0.75, m, 0.25, corrected))


def test_repeated_interpolation_decays_all_parts_equally(m, s, up, down):
    """Coarse error and fine part are both multiplied by ``1 - a``: .75, .5625, .421875."""
    now = m
    for k in (1, 2, 3):
        now = interpolate(now, up(s), 0.25)
        close(
            combine(1, down(now), -1, s),
            jax.tree.map(lambda x, k=k: 0.75**k * x, combine(1, down(m), -1, s)),
        )
        fine = combine(1, m, -1, up(down(m)))
        close(combine(1, now, -1, up(down(now))), jax.tree.map(lambda x, k=k: 0.75**k * x, fine))


def test_standard_deviations_of_a_fresh_model_after_each_step():
    """The tolerance is 1 %, for statistics of 2^18 normal numbers of deviation .02.

    The embedding has the published axes.
    """
    axes = {"kernel": ("layers", "a.in", "b"), "table": ("vocab", "a.in")}
    rng = np.random.default_rng(0)
    fresh = {
        "kernel": rng.normal(0, 0.02, (4, 256, 256)),
        "table": rng.normal(0, 0.02, (1024, 256)),
    }

    def std(tree, name="kernel"):
        return tree[name].std()

    by_width = {name: coalesce({"mlp": 256}, mlp="far")["mlp"] for name in "ab"}
    by_both = by_width | coalesce({"layers": 4}, layers="adjacent")
    wide, both = grow(by_width, fresh, axes), grow(by_both, fresh, axes)
    np.testing.assert_allclose([std(wide), std(both)], [0.02, 0.02 / 2**0.5], rtol=0.01)
    np.testing.assert_allclose(std(wide, "table"), 0.02 * 2**0.5, rtol=0.01)
    np.testing.assert_allclose(std(grow(swap(by_both), both, axes)), 0.02 / 8**0.5, rtol=0.01)

    unrelated = {
        "kernel": rng.normal(0, 0.02, (4, 128, 128)),
        "table": rng.normal(0, 0.02, (1024, 128)),
    }
    up = grow(swap(by_width), unrelated, axes)
    np.testing.assert_allclose(std(interpolate(fresh, up, 0.25)), 0.0152, rtol=0.01)
    np.testing.assert_allclose(std(interpolate(fresh, up, 0.5)), 0.0112, rtol=0.01)


# --- training after de-coalescing ---


def test_twins_stay_equal_until_interpolation_separates_them(m):
    """Without dropout, copies always have equal gradients, and the model stays in the range of D.

    This is bitwise true if the compiler sums in the same order for all units, which it does not
    guarantee. Where a gradient is zero, Adam divides the rounding difference by its eps, 1e-8, and
    moves by .01 of the result.
    """
    config = tiny.config(**LARGE)
    growth = decoalesce(LARGE, heads="far")
    small = tiny.params(tiny.config(**{**SMALL, "layers": 4}))
    tx = optax.adamw(0.01)

    @jax.jit
    def step(p, state, gradient):
        updates, state = tx.update(gradient, state, p)
        return optax.apply_updates(p, updates), state

    def train(p):
        state = tx.init(p)
        for seed in range(5):
            p, state = step(p, state, tiny.gradient(config)(p, tiny.tokens(4, 7, seed)))
        return jax.device_get(p)

    def project(p):
        return grow(growth, grow(swap(growth), p, AXES), AXES)

    up = grow(growth, small, AXES)
    locked = train(up)
    assert tiny.distance(locked, up) > 0.01
    close(locked, project(locked), atol=0.01 * TOLERANCE / 1e-8)
    parted = train(interpolate(m, up, 0.5))
    for path, x, coarse in tiny.pairs(parted, project(parted)):
        assert np.linalg.norm(x - coarse) > 0.1 * np.linalg.norm(x), path


@pytest.mark.parametrize(("move", "expected"), [
    (lambda g: g, {"first": 0.5, "middle": 1, "last": 2, "first_bias": 0.5, "middle_bias": 0.5}),
    (jnp.sign, {"first": 1, "middle": 2, "last": 2, "first_bias": 1, "middle_bias": 1}),
], ids=["SGD", "sign, or the first step of Adam"])  # fmt: skip
def test_one_step_on_twins_seen_from_the_coarse_level(move, expected):
    """``C(step of D(s)) / step of s`` for pairs: for coarse matrices 2 with Adam, 1 with SGD."""
    axes = {
        "first": ("x.in", "a"), "first_bias": ("a",),
        "middle": ("a.in", "b"), "middle_bias": ("b",),
        "last": ("b.in", "y"),
    }  # fmt: skip
    sizes = {"x": 2, "a": 3, "b": 5, "y": 7}
    rng = np.random.default_rng(0)
    small = {
        k: rng.normal(size=[sizes[n.removesuffix(".in")] for n in names])
        for k, names in axes.items()
    }
    x, y = rng.normal(size=(11, 2)), rng.normal(size=(11, 7))

    def loss(p):
        h = jnp.tanh(x @ p["first"] + p["first_bias"][None])
        h = jnp.tanh(h @ p["middle"] + p["middle_bias"][None])
        return jnp.square(h @ p["last"] - y).mean()

    growth = {name: decoalesce({"mlp": 2 * sizes[name]}, mlp="far")["mlp"] for name in "ab"}
    step = jax.jit(lambda p: jax.tree.map(move, jax.grad(loss)(p)))
    small_step, large_step = step(small), step(grow(growth, small, axes))
    coarse = grow(swap(growth), large_step, axes)
    for name, ratio in expected.items():
        np.testing.assert_allclose(
            coarse[name], ratio * small_step[name], rtol=0, atol=TOLERANCE, err_msg=name
        )

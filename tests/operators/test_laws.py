"""Every operator obeys every law that applies to it.

A new operator appears here by its registration; other sizes of it are rows of `OPERATORS`. D is the
growth of a row, ``grow(g, .)``, and C its `swap`. The tolerance is 1e-10 on functions and
gradients, for float64 through two layers; results are bitwise identical where only copies and
powers of two are involved. Laws of one map per axis are checked on the rows in `PLAIN`; all other
laws also apply to `Rules`.
"""

from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from cases import cases
from growths import BIT, NOT, OLD, OPERATORS, RAGGED, to
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgrow import compose, dual, grow, preserves_function, swap
from jaxgrow import testing as assertions
from jaxgrow.growth.maps import AxisMap, Rule, Rules, new_sizes, select, tile
from jaxgrow.growth.matrices import SparseMap, dense
from jaxgrow.operators import (
    aki,
    average,
    decoalesce,
    far,
    fpi,
    hypercloning,
    lemon,
    lidas,
    llama_pro,
    new_layers,
    solar,
    sparkling,
    staged,
    zero_pad,
)

pytestmark = pytest.mark.usefixtures("x64")

TOLERANCE = 1e-10
VISIBLE = 1e-2  # for numbers of order one


PLAIN = [name for name, row in OPERATORS.items() if not isinstance(row.growth, Rules)]
RULES = [name for name in OPERATORS if name not in PLAIN]
KEEPING = [name for name, row in OPERATORS.items() if row.keeps]
INVERTING = [name for name, row in OPERATORS.items() if row.inverts != NOT]
AGAIN = (  # operators that other rows cover with other sizes
    "decoalesce heads, adjacent pairs",
    "decoalesce heads, threes",
    "decoalesce mlp, random",
    "decoalesce layers, adjacent pairs",
    "decoalesce layers, 3 + 2",
    "stack, ragged",
    "hypercloning",
    "lemon",
    "zero_pad",
)
DEPTH = [name for name in PLAIN if "layers" in OPERATORS[name].growth]


# One row for each kind of growth.
CORE = (
    *("decoalesce heads, far pairs", "decoalesce everything", "stack", "fpi, ragged", "aki"),
    *("hypercloning 3", "llama_pro", "staged", "lemon, ragged", "average", "solar, blended"),
)


def rows(names=OPERATORS, slow=AGAIN):
    chosen = {n: OPERATORS[n] for n in names}
    core = [n for n in CORE if n in names and n not in slow]
    return pytest.mark.parametrize("row", cases(chosen, core, chosen.keys() - slow))


dtypes = pytest.mark.parametrize(
    "dtype", ["float64", pytest.param("float32", marks=pytest.mark.slow), "bfloat16"]
)


def model(tied=True):
    """Return ``(config, axes, parameters)`` of the small model of every row."""
    config = tiny.config(tied=tied)
    return config, tiny.axes(config), tiny.params(config)


def of_products(growth):
    """Return the tolerance: zero, except for products with dense matrices, which round."""
    matrices = jax.tree.leaves(growth, is_leaf=lambda x: isinstance(x, SparseMap))
    return 0 if all(isinstance(m, SparseMap) for m in matrices) else 1e-15


def large(row, tied=True, seed=7):
    """Return unrelated parameters in the shape of the grown model."""
    return tiny.params(tiny.config(tied=tied).resized(row.growth), seed)


# --- the algebra ---


@rows()
def test_growing_is_linear(row):
    config, axes, small = model()
    assertions.assert_linear(
        lambda p: grow(row.growth, p, axes), small, tiny.params(config, seed=1)
    )
    assertions.assert_linear(
        lambda p: grow(swap(row.growth), p, axes), large(row), large(row, seed=8)
    )


@rows()
@dtypes
def test_growth_keeps_structure_and_dtype_and_has_config_sizes(row, dtype):
    config, axes, _ = model()
    small = tiny.params(config, dtype=dtype)
    assertions.assert_structure_kept(lambda p: grow(row.growth, p, axes), small)
    chex.assert_trees_all_equal_shapes(grow(row.growth, small, axes), large(row))


@rows(INVERTING)
@dtypes
def test_swap_inverts_bitwise_for_groups_of_powers_of_two(row, dtype):
    config, axes, _ = model()
    rounding = {"float64": 1e-15, "float32": 1e-6, "bfloat16": 2e-2}[dtype]
    assertions.assert_inverse(
        lambda p: grow(swap(row.growth), p, axes),
        lambda p: grow(row.growth, p, axes),
        tiny.params(config, dtype=dtype),
        atol=0 if row.inverts == BIT else rounding,
    )


@rows([name for name in OPERATORS if name not in INVERTING])
def test_what_scales_or_mixes_layers_is_not_inverted(row):
    _, axes, small = model()
    assert (
        tiny.distance(grow(swap(row.growth), grow(row.growth, small, axes), axes), small) > VISIBLE
    )


@rows(INVERTING)
def test_growing_after_coalescing_is_a_nontrivial_projector(row):
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
    assertions.assert_adjoint(
        lambda p: grow(swap(g), p, axes), lambda p: grow(dual(g), p, axes), large(row), small
    )
    assertions.assert_adjoint(
        lambda p: grow(g, p, axes), lambda p: grow(swap(dual(g)), p, axes), small, large(row)
    )


@rows(PLAIN)
def test_composing_multiplies_maps(row):
    _, axes, small = model()
    grown = tiny.of(row.growth, OLD)
    again = {
        **hypercloning(grown, tiny.wider(2, grown)),
        "layers": select([1, 0, 1], grown["layers"]),
    }
    two_steps = grow(again, grow(row.growth, small, axes), axes)
    chex.assert_trees_all_close(
        grow(compose(again, row.growth), small, axes), two_steps, rtol=0, atol=1e-15
    )


@rows(RULES)
def test_composing_rules_grows_twice_in_one_pass(row):
    """Covers rules after maps, maps after rules, and rules after rules.

    Some rules are sums of terms, and no term touches some of the leaves.
    """
    _, axes, small = model()
    grown = tiny.of(row.growth, OLD)
    widths = {"embed": 2 * grown["embed"], "heads": 2 * grown["heads"], "mlp": 2 * grown["mlp"]}
    for second in (
        hypercloning(grown, widths),
        llama_pro(grown, {"layers": grown["layers"] + 1}),
        staged(grown, widths),
        lemon(grown, {**widths, "embed": grown["embed"] + 3}, seed=9),
    ):
        two_steps = grow(second, grow(row.growth, small, axes), axes)
        both = compose(second, row.growth)
        chex.assert_trees_all_close(grow(both, small, axes), two_steps, rtol=0, atol=1e-12)
        assert new_sizes(both) == new_sizes(row.growth) | new_sizes(second)
    before = hypercloning({**OLD, "embed": 3, "mlp": 3}, {"embed": 6, "mlp": 9})
    tinier = grow(swap(before), small, axes)
    two_steps = grow(row.growth, grow(before, tinier, axes), axes)
    chex.assert_trees_all_close(
        grow(compose(row.growth, before), tinier, axes), two_steps, rtol=0, atol=1e-12
    )


def test_composed_rules_keep_the_function_and_the_factor_of_eps():
    ragged = lemon(OLD, RAGGED, seed=7)
    sizes = tiny.of(ragged, OLD)
    both = compose(llama_pro(sizes, {"layers": 3}), ragged)
    assert both.eps == ragged.eps and tiny.change_of_logits(both) < TOLERANCE
    both = compose(lemon(OLD, {"embed": 8, "mlp": 10}, seed=1), {})
    twice = compose(lemon(tiny.of(both, OLD), {"embed": 12}, seed=2), both)
    assert twice.eps == both.eps * (8 / 12)
    assert new_layers(compose(hypercloning(OLD, tiny.wider(2)), llama_pro(OLD, {"layers": 3}))) == (
        2,
    )


def test_a_composed_rule_without_matching_leaf_is_an_error():
    _, axes, small = model()
    silent = Rules((Rule(({},), "blocks/attn/*"), Rule(({},))))
    for both in (
        compose(silent, llama_pro(OLD, {"layers": 3})),
        compose(llama_pro(OLD, {"layers": 3}), silent),
    ):
        with pytest.raises(
            ValueError,
            match=r"a rule for leaves of path 'blocks/attn/\*' matches no leaf of this model",
        ):
            grow(both, small, axes)


@rows()
def test_growths_of_different_axes_commute_to_the_bit(row):
    """The main case is width and depth.

    Doubling keeps the other factor exact, so rounding cannot reveal the order.
    """
    config, axes, small = model()
    sizes = {**OLD, "vocab": config.vocab, "context": config.context}
    others = {
        name: tile(size, 2) for name, size in sizes.items() if name not in new_sizes(row.growth)
    }
    one, other = (
        grow(others, grow(row.growth, small, axes), axes),
        grow(row.growth, grow(others, small, axes), axes),
    )
    chex.assert_trees_all_close(one, other, rtol=0, atol=of_products(row.growth))


# operators that copy layers, as `stack` does
COPIES = ("interleave", "interleave, ragged", "g_stack", "mslt", "midas", "lidas", "solar")


@rows(slow=(*AGAIN, *COPIES))
def test_numpy_and_jit_agree_to_the_bit(row):
    _, axes, small = model()
    compiled = jax.jit(lambda p: grow(row.growth, p, axes))
    chex.assert_trees_all_close(
        compiled(small), grow(row.growth, small, axes), rtol=0, atol=of_products(row.growth)
    )


# --- the function of a model ---


UNTIED = (  # one row per kind of growth; an untied head changes nothing in the layers below it
    *(
        "decoalesce heads, far pairs",
        "stack",
        "fpi, ragged",
        "hypercloning 3",
        "llama_pro",
        "lemon, ragged",
    ),
)


@rows()
def test_the_function_is_kept_or_visibly_not(row):
    change = tiny.change_of_logits(row.growth)
    assert change < TOLERANCE if row.keeps else change > VISIBLE


@rows(slow=OPERATORS.keys() - UNTIED)
def test_the_function_with_an_untied_head_is_kept_or_visibly_not(row):
    change = tiny.change_of_logits(row.growth, tied=False)
    assert change < TOLERANCE if row.keeps else change > VISIBLE


@rows(PLAIN)
def test_preserves_function_says_what_is_measured(row):
    assert preserves_function(row.growth) == row.keeps


@rows(RULES)
def test_rules_are_not_judged(row):
    with pytest.raises(TypeError, match="measure the change with"):
        preserves_function(row.growth)


def test_dense_copy_maps_are_recognised_and_mixing_maps_are_not():
    copy = select([0, 1, 2, 1], 3)
    assert preserves_function(
        {"mlp": AxisMap(jnp.asarray(dense(copy.write)), jnp.asarray(dense(copy.read)))}
    )
    mix = np.random.default_rng(0).normal(size=(4, 3))
    assert not preserves_function({"mlp": AxisMap(mix, np.linalg.pinv(mix).T)})
    assert not preserves_function({"mlp": AxisMap(dense(copy.write), dense(copy.write))})


def test_a_norm_over_another_axis_needs_equal_copies_there():
    """The axis names show that a norm averages over ``mlp``."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, 2))
    params = {"up": rng.normal(size=(2, 3)), "norm": np.ones(3), "down": rng.normal(size=(3, 2))}
    axes = {"up": ("embed.in", "mlp"), "norm": ("mlp.norm.scale",), "down": ("mlp.in", "embed")}

    def change(growth):
        def apply(p):
            h = x @ p["up"]
            return (
                (h - h.mean(-1, keepdims=True)) / h.std(-1, keepdims=True) * p["norm"] @ p["down"]
            )

        return np.abs(apply(grow(growth, params, axes)) - apply(params)).max()

    uneven, even = {"mlp": select([0, 1, 2, 2], 3)}, {"mlp": select([0, 1, 2, 2, 0, 1], 3)}
    assert change(uneven) > VISIBLE and not preserves_function(uneven, axes)
    assert change(even) < TOLERANCE and preserves_function(even, axes)
    assert preserves_function(uneven, {**axes, "norm": ("mlp.scale",)})


@pytest.mark.parametrize("tied", [False, True])
def test_a_larger_head_dimension_changes_the_scale_of_scores(tied):
    size = tiny.config().head_dim
    growth = {"head_dim": select(np.tile(np.arange(size), 2), size)}
    assert tiny.change_of_logits(growth, tied) > VISIBLE and not preserves_function(growth)
    assert preserves_function({"head_dim": select(np.arange(size), size)})


@rows(KEEPING)
def test_gradients_grow_by_the_dual_of_a_preserving_growth(row):
    config, axes, small = model()
    gradient, large_gradient = jax.device_get(
        (
            tiny.gradient(config)(small, tiny.tokens()),
            tiny.gradient(config.resized(row.growth))(grow(row.growth, small, axes), tiny.tokens()),
        )
    )
    visible = VISIBLE * max(float(np.abs(g).max()) for g in jax.tree.leaves(large_gradient))
    by_the_dual, like_weights = (
        grow(dual(row.growth), gradient, axes),
        grow(row.growth, gradient, axes),
    )
    if not row.dual:
        assert tiny.distance(large_gradient, by_the_dual) > visible
        return
    chex.assert_trees_all_close(large_gradient, by_the_dual, rtol=0, atol=TOLERANCE)
    # zero_pad uses the same map for reading and writing.
    if tiny.distance(by_the_dual, like_weights) > 0:
        assert tiny.distance(large_gradient, like_weights) > visible


# --- what must fail ---


@rows(DEPTH)
def test_copying_layers_never_keeps_the_function(row):
    alone = {"layers": row.growth["layers"]}
    assert not preserves_function(alone)
    assert tiny.change_of_logits(alone) > VISIBLE


def test_ragged_growth_fails_because_of_the_norms_alone():
    """Readers get the same values (``read.T @ write == I``), but mean and variance count copies."""
    growth = OPERATORS["fpi, ragged"].growth
    for m in growth.values():
        np.testing.assert_allclose(
            dense(m.read).T @ dense(m.write), np.eye(m.old), rtol=0, atol=1e-15
        )
    assert tiny.change_of_logits(growth, tied=False) > VISIBLE
    without_norms = {name: m for name, m in growth.items() if name != "embed"}
    assert tiny.change_of_logits(without_norms, tied=False) < TOLERANCE
    assert preserves_function(growth, normed=())


def test_the_published_tied_head_changes_the_function():
    """Dividing the embeddings scales the first residual stream, but not the blocks' outputs."""
    halves = hypercloning(OLD, tiny.wider(2))
    published = tiny.paper_axes(tiny.config(tied=True))
    change = partial(tiny.change_of_logits, halves, True, dtype="float32")
    assert change(small_axes=published) > VISIBLE
    assert change() < 1e-5


def test_two_steps_of_pairs_are_one_step_of_fours():
    """This holds only for groups of equal size.

    A mean of means gives more weight to the members of a small group.
    """
    eight, four = to(heads=8, embed=16, mlp=24), to(heads=4, embed=8, mlp=12)
    steps = compose(decoalesce(eight, heads="far"), decoalesce(four, heads="far"))
    once = decoalesce(eight, heads=far(8, 2))
    ragged = compose(
        decoalesce(to(mlp=3), mlp=((0, 1), (2,))), decoalesce(to(mlp=2), mlp=((0, 1),))
    )
    thirds = decoalesce(to(mlp=3), mlp=((0, 1, 2),))
    for name in once:
        np.testing.assert_array_equal(dense(steps[name].write), dense(once[name].write))
        np.testing.assert_array_equal(dense(steps[name].read), dense(once[name].read))
    np.testing.assert_array_equal(dense(ragged["mlp"].read)[:, 0], [0.25, 0.25, 0.5])
    np.testing.assert_allclose(dense(thirds["mlp"].read)[:, 0], [1 / 3] * 3)


# --- any sizes ---


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("widths", [OLD, dict.fromkeys(OLD, 1), tiny.BIG], ids=str)
def test_shapes_by_name_are_those_of_an_initialisation(tied, widths):
    config = tiny.config(tied=tied, **widths)
    chex.assert_trees_all_equal_shapes(tiny.shapes_by_name(config), tiny.shapes(config))


@st.composite
def any_growth(draw, operator):
    """Draw ``(sizes, growth)``."""
    old = draw(
        st.sampled_from(
            [OLD, dict.fromkeys(OLD, 1), {"layers": 3, "embed": 5, "heads": 2, "mlp": 4}]
        )
    )
    if operator in (solar, lidas, llama_pro):
        old = to(layers=draw(st.integers(1, 6)))
    layers = old["layers"]
    if operator is solar:
        cut = draw(st.integers(0, layers // 2))
        blend = draw(st.integers(0, layers - 2 * cut))
        return old, solar(old, {"layers": 2 * (layers - cut) - blend}, blend)
    most = {axis: 3 * size for axis, size in old.items()}
    if operator in (lidas, llama_pro):
        most = {"layers": 2 * layers}
    elif operator not in (aki, average):
        most.pop("layers")
    return old, operator(
        old, {axis: draw(st.integers(old[axis], size)) for axis, size in most.items()}
    )


@pytest.mark.parametrize(
    "operator", [fpi, lemon, aki, average, sparkling, zero_pad, solar, lidas, llama_pro]
)
@settings(max_examples=10)
@given(st.data())
def test_any_sizes_grow_to_the_shapes_of_their_model(operator, data):
    """All results are finite, and copies are inverted, except for `average` and `sparkling`."""
    old, growth = data.draw(any_growth(operator))
    config = tiny.config(**old)
    large = grow(growth, tiny.params(config), tiny.axes(tiny.config()))
    chex.assert_trees_all_equal_shapes(
        large, tiny.shapes_by_name(replace(config.resized(growth), eps=config.eps))
    )
    chex.assert_tree_all_finite(large)
    copies = growth.rules[-1].terms[0] if isinstance(growth, Rules) else growth
    for m in copies.values() if operator not in (average, sparkling) else ():
        np.testing.assert_allclose(
            dense(m.read).T @ dense(m.write), np.eye(m.old), rtol=0, atol=1e-14
        )

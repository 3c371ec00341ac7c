"""Maps are checked against integer examples by hand, then against laws that hold for every map.

Integers, halves and quarters are exact in float64, so their tolerance is zero; random dense
products have tolerance 1e-12.
"""

import re

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from jaxgrow import AxisMap, SparseMap, compose, dual, grow, preserves_function, swap
from jaxgrow.growth.maps import Rule, Rules, blocks, identity, new_sizes, repeat, select, tile
from jaxgrow.growth.matrices import apply, dense, matmul, transpose

pytestmark = pytest.mark.usefixtures("x64")


def equal(a, b):
    np.testing.assert_array_equal(dense(a) if isinstance(a, SparseMap) else a, b)


# --- by hand ---


UP = {"a": select([0, 1, 1], 2)}
TILE, REPEAT, BLOCKS = (
    {"a": m} for m in (tile(3, 2), repeat(3, 2), blocks(select([1, 0, 1], 2), 2))
)
KERNEL = [[6, 12], [18, 24]]
BY_HAND = {  # (growth, leaf, its axis names, the grown leaf)
    "writers are copied": (UP, [10, 20], ["a"], [10, 20, 20]),
    "readers are shared": (UP, [[10], [20]], ["a.in", "b"], [[10], [10], [10]]),
    "read times kernel times write":
        (UP | {"b": select([1, 0], 2)}, KERNEL, ["a.in", "b"], [[12, 6], [12, 9], [12, 9]]),
    "tile repeats the axis": (TILE, [1, 2, 3], ["a"], [1, 2, 3, 1, 2, 3]),
    "tile, readers": (TILE, [2, 4, 6], ["a.in"], [1, 2, 3, 1, 2, 3]),
    "repeat repeats each unit": (REPEAT, [1, 2, 3], ["a"], [1, 1, 2, 2, 3, 3]),
    "identity": ({"a": identity(3)}, [1, 2, 3], ["a"], [1, 2, 3]),
    "identity, readers": ({"a": identity(3)}, [1, 2, 3], ["a.in"], [1, 2, 3]),
    "blocks move whole heads": (BLOCKS, [1, 2, 3, 4], ["a"], [3, 4, 1, 2, 3, 4]),
    "blocks, readers": (BLOCKS, [1, 2, 6, 8], ["a.in"], [3, 4, 1, 2, 3, 4]),
    "swap takes means of writers": (swap(UP), [10, 20, 40], ["a"], [10, 30]),
    "swap takes sums of readers": (swap(UP), [10, 20, 40], ["a.in"], [10, 60]),
    "dual shares writers": (dual(UP), [10, 20], ["a"], [10, 10, 10]),
    "dual copies readers": (dual(UP), [10, 20], ["a.in"], [10, 20, 20]),
}  # fmt: skip


@pytest.mark.parametrize(("growth", "leaf", "names", "expected"), BY_HAND.values(), ids=BY_HAND)
def test_maps_by_hand(growth, leaf, names, expected):
    equal(grow(growth, np.array(leaf, float), tuple(names)), expected)


def test_a_selection_is_two_matrices():
    m = select([0, 1, 1], old=2)
    equal(m.write, [[1, 0], [0, 1], [0, 1]])
    equal(m.read, [[1, 0], [0, 0.5], [0, 0.5]])
    assert (m.old, m.new) == (2, 3)


def test_compose_applies_both_maps_and_keeps_unshared_axes():
    first = {"a": select([0, 1, 1], 2), "b": tile(2, 2)}
    second = {"a": select([2, 0], 3), "c": tile(3, 2)}
    both = compose(second, first)
    assert set(both) == {"a", "b", "c"}
    equal(both["a"].write, [[0, 1], [1, 0]])
    equal(both["a"].read, [[0, 0.5], [1, 0]])
    equal(both["b"].write, dense(first["b"].write))
    equal(both["c"].read, dense(second["c"].read))


def test_sparse_products_use_as_few_terms_as_they_need():
    pairs, fours = swap({"a": tile(2, 2)})["a"].write, swap({"a": tile(1, 4)})["a"].write
    assert pairs.index.shape == (2, 2)
    both = matmul(swap({"a": tile(1, 2)})["a"].write, pairs)
    assert both.index.shape == fours.index.shape == (1, 4)
    assert matmul(pairs, tile(2, 2).write).index.shape == (2, 1)
    empty = transpose(select([2, 2], 4).write)
    equal(empty, [[0, 0], [0, 0], [1, 1], [0, 0]])


# --- rules, by hand ---

LEAVES = {"up": {"kernel": np.array([[1.0, 2]]), "bias": np.array([3.0, 4])}}
LEAVES["down"] = {"bias": np.array([5.0])}
LEAVES_AXES = {"up": {"kernel": ("a.in", "b"), "bias": ("b.bias",)}, "down": {"bias": ("a.bias",)}}
TERMS = np.array([[1.0, 0], [0, 1], [0, 0]]), np.array([[0, 0], [0, 0], [0, 1.0]])
FIRST, SECOND = ({"b": AxisMap(m, m)} for m in TERMS)


def test_first_matching_rule_applies_and_other_leaves_stay():
    twice = {"b": AxisMap(2 * np.eye(2), 2 * np.eye(2))}
    rules = Rule((twice,), "*/kernel"), Rule(({"b": tile(2, 1)},), "up/*")
    grown = grow(Rules((*rules, Rule((twice,), "*/bias", ("b",)))), LEAVES, LEAVES_AXES)
    equal(grown["up"]["kernel"], [[2, 4]])
    equal(grown["up"]["bias"], [3, 4])
    assert grown["down"]["bias"] is LEAVES["down"]["bias"]
    assert grow(Rules(()), LEAVES, LEAVES_AXES)["up"]["bias"] is LEAVES["up"]["bias"]


def test_a_rule_needs_all_of_its_axes_and_its_whole_path():
    twice = {"a": AxisMap(2 * np.eye(1), 2 * np.eye(1)), "b": AxisMap(2 * np.eye(2), 2 * np.eye(2))}

    def grown(path, *axes, roles=()):
        out = grow(Rules((Rule((twice,), path, axes, roles),)), LEAVES, LEAVES_AXES)
        leaves = (out["up"]["kernel"], out["up"]["bias"], out["down"]["bias"])
        return [float(x.reshape(-1)[0]) for x in leaves]

    assert grown("*") == [4, 6, 10]
    assert grown("*", "a", "b") == [4, 3, 5]
    assert grown("*", "a") == [4, 3, 10]
    assert grown("*", "a.in") == grown("*", "a.in", "b.out") == [4, 3, 5]
    assert grown("*", roles=("kernel",)) == [4, 3, 5]
    assert grown("*", "a.out") == grown("*", "a", roles=("bias", "embedding")) == [1, 3, 10]
    for nothing in ("up", "kernel", "UP/*"):
        with pytest.raises(ValueError, match=f"of path '{re.escape(nothing)}' matches no leaf of"):
            grown(nothing)
    assert grown("*/bias") == [1, 6, 10]
    assert grown("up/k*") == [4, 3, 5]


def test_terms_of_a_rule_add_up_and_untouched_leaves_count_once():
    grown = grow(Rules((Rule((FIRST, SECOND)),)), LEAVES, LEAVES_AXES)
    equal(grown["up"]["kernel"], [[1, 2, 2]])
    equal(grown["up"]["bias"], [3, 4, 4])
    assert grown["down"]["bias"] is LEAVES["down"]["bias"]


def test_terms_add_up_in_float32_or_better():
    """1 + 1/256 + 1/256 is 1 + 1/128 in bfloat16, but not if each sum is rounded."""
    weights = [np.full((1, 1), w) for w in (1, 1 / 256, 1 / 256)]
    terms = tuple({"a": AxisMap(w, w)} for w in weights)
    grown = grow(Rules((Rule(terms),)), np.ones(1, ml_dtypes.bfloat16), ("a",))
    equal(grown, np.array([1 + 1 / 128], ml_dtypes.bfloat16))


def test_rules_swap_dualise_and_say_their_sizes_map_by_map():
    m, n = AxisMap(np.ones((3, 2)), 2 * np.ones((3, 2))), tile(4, 2)
    two_terms = Rule(({"b": m}, {"b": m, "c": n}), "up/*", ("b",))
    growth = Rules((two_terms, Rule(({"a": tile(1, 5)},))), eps=0.25)
    assert new_sizes(growth) == {"a": 5, "b": 3, "c": 8}
    assert new_sizes(swap(growth)) == {"a": 1, "b": 2, "c": 4}
    assert (swap(growth).eps, dual(growth).eps) == (4, 0.25)
    rule = swap(growth).rules[0]
    assert (rule.path, rule.axes, len(rule.terms)) == ("up/*", ("b",), 2)
    equal(rule.terms[1]["b"].write, 2 * np.ones((2, 3)))
    equal(dual(growth).rules[0].terms[1]["b"].write, 2 * np.ones((3, 2)))
    chex.assert_trees_all_equal(swap(swap(growth)), growth)
    chex.assert_trees_all_equal(dual(dual(growth)), growth)
    assert len(jax.tree.leaves(growth)) == 2 + 2 + 4 + 4


# --- adjacent axes that grow together, by hand ---

# Units (i, j) of a 2 by 2 axis pair, in order 00, 01, 10, 11; the new pair is 3 by 1.
ONE = select([3, 0, 3], 4)
PAIR = {("h", "k"): AxisMap(ONE.write, ONE.read, ((3, 1), (2, 2)))}


def test_axes_that_go_together_have_the_role_of_the_first():
    x = np.array([[1.0, 2], [3, 4]])
    equal(grow(PAIR, x, ("h", "k")), [[4], [1], [4]])
    equal(grow(PAIR, x, ("h", "k.in")), [[4], [1], [4]])
    equal(grow(PAIR, x, ("h.in", "k.in")), [[2], [1], [2]])
    equal(grow(PAIR, x, ("h.in", "k")), [[2], [1], [2]])
    wide = np.stack([x, 10 * x], -1)
    equal(grow(PAIR, wide, ("h", "k", "d")), [[[4, 40]], [[1, 10]], [[4, 40]]])
    equal(grow({**PAIR, ("d",): tile(2, 2)}, wide, ("h", "k", "d"))[1], [[1, 10, 1, 10]])
    equal(jax.jit(lambda x: grow(PAIR, x, ("h", "k")))(x), [[4], [1], [4]])
    # All keys have one type, because jax sorts them.
    assert len(jax.tree.leaves({**PAIR, ("d",): tile(2, 2)})) == 4 + 4


def test_axes_that_go_together_swap_their_sizes():
    assert new_sizes(PAIR) == {"h": 3, "k": 1}
    assert new_sizes(swap(PAIR)) == {"h": 2, "k": 2}
    assert dual(PAIR)[("h", "k")].joint == ((3, 1), (2, 2))
    both = {("h", "k"): AxisMap(identity(6).write, identity(6).read, ((3, 2), (2, 3)))}
    x = np.arange(6.0).reshape(2, 3)
    equal(grow(both, x, ("h", "k")), [[0, 1], [2, 3], [4, 5]])
    equal(grow(swap(both), grow(both, x, ("h", "k")), ("h", "k")), x)
    with pytest.raises(ValueError, match=r"the sizes \(2, 2\) to \(3, 1\) has the key \('h k',\)"):
        grow({"h k": PAIR["h", "k"]}, x, ("h", "k"))
    back = compose(swap(both), both)
    assert new_sizes(back) == {"h": 2, "k": 3}
    equal(grow(back, x, ("h", "k")), x)
    assert set(compose(PAIR, {"d": tile(2, 2)})) == {("h", "k"), ("d",)}
    with pytest.raises(ValueError, match=r"'h x k': .* at size 3 x 1, the second starts at size 2"):
        compose(PAIR, PAIR)
    with pytest.raises(TypeError, match="over the axes h x k by one over h: grow twice instead"):
        compose(PAIR, {"h": tile(1, 2)})
    with pytest.raises(TypeError, match="one map per axis"):
        preserves_function(PAIR)


# --- for every map ---

SIZES = st.sampled_from([1, 2, 3, 5, 7])


@st.composite
def rows(draw, new=None, old=None):
    """Draw any sparse matrix, with repeated columns, zero weights and rows of any sum."""
    new, old, terms = new or draw(SIZES), old or draw(SIZES), draw(st.integers(1, 3))
    index = draw(st.lists(st.integers(0, old - 1), min_size=new * terms, max_size=new * terms))
    weight = draw(st.lists(st.integers(-3, 3), min_size=new * terms, max_size=new * terms))
    index, weight = np.array(index, np.int32), np.array(weight, float)
    return SparseMap(index.reshape(new, terms), weight.reshape(new, terms), old)


@given(st.data())
def test_rows_are_matrices(data):
    a = data.draw(rows())
    b, size = data.draw(rows(new=a.old)), data.draw(st.integers(1, 3))
    equal(transpose(a), dense(a).T)
    equal(transpose(transpose(a)), dense(a))
    equal(matmul(a, b), dense(a) @ dense(b))
    equal(blocks(AxisMap(a, a), size).write, np.kron(dense(a), np.eye(size)))
    x = np.arange(2.0 * b.old * 3).reshape(2, b.old, 3)
    equal(apply(b, x, 1), np.einsum("no,aob->anb", dense(b), x))
    equal(apply(b, x, 1), apply(dense(b), x, 1))


@given(st.integers(1, 9), st.data())
def test_a_random_partition_round_trips(size, data):
    count, seed = data.draw(st.integers(1, size)), data.draw(st.integers(0, 99))
    of = np.zeros(size, int)
    for i, group in enumerate(tiny.random_groups(size, count, seed)):
        of[list(group)] = i
    m = select(of, count)
    back = compose(swap({"a": m}), {"a": m})["a"]
    for product in (dense(m.read).T @ dense(m.write), dense(back.write)):
        np.testing.assert_allclose(product, np.eye(count), rtol=0, atol=1e-15)
    for law in (swap, dual):
        twice = law(law({"a": m}))["a"]
        equal(twice.write, dense(m.write))
        equal(twice.read, dense(m.read))


# --- execution: NumPy, eager and jit ---


def test_array_types_are_kept_and_unmapped_leaves_not_copied():
    growth, axes = {"a": tile(3, 2)}, {"x": ("a",), "y": ("b",)}
    x, y = np.arange(3.0), np.arange(5.0)
    grown = grow(growth, {"x": x, "y": y}, axes)
    assert type(grown["x"]) is np.ndarray
    assert grown["y"] is y
    on_device = grow(growth, {"x": jnp.asarray(x), "y": y}, axes)
    assert isinstance(on_device["x"], jax.Array)
    brain = grow(growth, {"x": x.astype(ml_dtypes.bfloat16), "y": y}, axes)
    assert brain["x"].dtype == ml_dtypes.bfloat16
    wide = {"a": AxisMap(jnp.eye(3), jnp.eye(3))}
    assert isinstance(grow(wide, {"x": x, "y": y}, axes)["x"], jax.Array)


INDICES = {
    "a slice": np.arange(2, 6),
    "every other unit": np.arange(0, 6, 2),
    "tiled": np.tile(np.arange(6), 3),
    "repeated": np.repeat(np.arange(6), 2),
    "repeated unevenly": np.arange(20) * 6 // 20,
    "blocks": np.array([4, 5, 0, 1, 4, 5]),
    "reversed": np.arange(6)[::-1],
    "one unit": np.array([5, 5, 5]),
    "scattered": np.random.default_rng(0).integers(0, 6, 200),
}


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_numpy_eager_and_jit_match_a_plain_gather_bitwise(index):
    """A selection runs as slices, blocks or a gather. The map is known at compile time or not."""
    m = select(index, 6)
    x = np.random.default_rng(1).normal(size=(2, 6, 3))
    share = 1 / np.bincount(index, minlength=6)[index]
    for matrix, expected in ((m.write, x[:, index]), (m.read, x[:, index] * share[:, None])):
        equal(apply(matrix, x, 1), expected)
        equal(apply(matrix, jnp.asarray(x), 1), expected)
        equal(jax.jit(lambda x, matrix=matrix: apply(matrix, x, 1))(x), expected)
        equal(jax.jit(lambda matrix, x: apply(matrix, x, 1))(matrix, x), expected)


@pytest.mark.parametrize("shape", [(6, 2, 50_000), (6, 50_000, 2), (50_000, 6, 2)])
def test_numpy_leaves_larger_than_a_cache_grow_as_small_ones_do(shape):
    """A leaf of 4.8 MB is processed in several parts: all axes are doubled and coalesced again, then one axis alone."""
    x = np.random.default_rng(0).normal(size=shape)
    axes = tuple("abc"[: x.ndim])
    up = {name: repeat(size, 2) for name, size in zip(axes, shape, strict=True)}
    expected = x
    for dim in range(x.ndim):
        expected = np.repeat(expected, 2, dim)
    large = grow(up, x, axes)
    equal(large, expected)
    equal(grow(swap(up), large, axes), x)
    equal(grow({"b": up["b"]}, x, axes), np.repeat(x, 2, 1))


def test_dense_maps_apply_and_are_learned_through():
    rng = np.random.default_rng(0)
    write, read = rng.normal(size=(5, 3)), rng.normal(size=(5, 3))
    x, y = rng.normal(size=(2, 3)), rng.normal(size=(3, 7))
    axes = {"x": ("b", "a"), "y": ("a.in", "c")}

    def grown(growth):
        return grow(growth, {"x": x, "y": y}, axes)

    out = grown({"a": AxisMap(write, read)})
    np.testing.assert_allclose(out["x"], x @ write.T, rtol=0, atol=1e-12)
    np.testing.assert_allclose(out["y"], read @ y, rtol=0, atol=1e-12)

    def total(m):
        return grown({"a": m})["x"].sum() + grown({"a": m})["y"].sum()

    gradient = jax.grad(total)(AxisMap(jnp.asarray(write), jnp.asarray(read)))
    np.testing.assert_allclose(gradient.write, np.tile(x.sum(0), (5, 1)), rtol=0, atol=1e-12)
    np.testing.assert_allclose(gradient.read, np.tile(y.sum(1), (5, 1)), rtol=0, atol=1e-12)


def test_dense_and_sparse_maps_compose():
    a = np.random.default_rng(0).normal(size=(5, 3))
    mixed = compose({"a": AxisMap(a, a)}, {"a": select([0, 1, 1], 2)})["a"]
    equal(mixed.write, a @ [[1, 0], [0, 1], [0, 1]])
    equal(compose({"a": identity(5)}, {"a": AxisMap(a, a)})["a"].read, a)


def test_sums_are_taken_in_float32_or_better():
    """Seven sevenths, each rounded to bfloat16, add up to less than one."""
    mean = swap({"a": tile(1, 7)})
    x = np.ones(7, ml_dtypes.bfloat16)
    equal(grow(mean, x, ("a",)), np.ones(1, ml_dtypes.bfloat16))
    assert sum(x * ml_dtypes.bfloat16(1 / 7)) < 1


# --- errors ---


@pytest.mark.parametrize("index", [[0, 2], [-1, 0], [], [[0, 1]]])
def test_select_needs_units_that_exist(index):
    with pytest.raises(ValueError, match=r"select needs a list of units in 0 \.\. 1, but got"):
        select(index, 2)


def test_blocks_of_a_dense_map_are_refused():
    with pytest.raises(TypeError, match=r"np\.kron"):
        blocks(AxisMap(np.eye(2), np.eye(2)), 3)


def test_compose_names_the_axis_and_both_sizes():
    with pytest.raises(ValueError, match=r"axis 'a': .* at size 4, the second starts at size 3"):
        compose({"a": tile(3, 2)}, {"a": tile(2, 2)})


# --- the printed form of a growth ---


def test_a_printed_growth_is_its_axes_sizes_and_kinds():
    up = select([0, 1, 1], 2)
    zeroed = AxisMap(SparseMap(up.write.index, np.array([[1.0], [1], [0]]), 2), np.ones((3, 2)))
    shown = {
        "AxisMap(2 -> 3, write: copies, read: scaled copies)": up,
        "AxisMap(3 -> 2, write: means, read: sums)": swap({"a": up})["a"],
        "AxisMap(2 -> 3, write: copies and zeros, read: dense)": zeroed,
        "AxisMap(4 -> 4, identity)": identity(4),
        "AxisMap(2 x 2 -> 3 x 1, write: copies and zeros, read: zeros)": AxisMap(
            zeroed.write, SparseMap(up.read.index, 0 * up.read.weight, 2), ((3, 1), (2, 2))
        ),
    }
    assert [repr(m) for m in shown.values()] == [*shown]
    rules = Rules((Rule(({"a": up}, {"a": up}), "*/bias", ("a",)), Rule(())), eps=0.5)
    one = "{'a': AxisMap(2 -> 3, write: copies, read: scaled copies)}"
    first = f"Rule(for leaves of path '*/bias', of axes a: {one} + {one})"
    assert repr(rules) == f"Rules(rules=({first}, Rule(for all leaves: unchanged)), eps=0.5)"
    assert repr(up.write) == "SparseMap(2 -> 3, copies)"


def test_trees_of_something_else_than_matrices_can_be_printed():
    growth = {"a": tile(2, 2), "b": AxisMap(np.eye(2), np.eye(2))}
    emptied = jax.tree.map(lambda _: None, growth)
    assert "AxisMap(write=SparseMap(index=None, weight=None, old=2)" in repr(emptied)
    seen = []
    jax.jit(lambda g: seen.append(repr(g)))(growth)
    assert seen == ["{'a': AxisMap(2 -> 4, sparse), 'b': AxisMap(2 -> 2, dense)}"]

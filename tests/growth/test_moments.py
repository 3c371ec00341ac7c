"""Optimizer states grow by each policy, some exactly, and restarted entries have the right bias.

The bias is the bias of Adam's moments. The tolerance is 1e-12 in float64, for squared gradients of
a tiny GPT-2 and powers of b2 close to one. Where nothing restarts, the states are bitwise
identical.
"""

import re
from functools import cache, partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from jaxgrow import dual, grow, grow_optimizer, swap
from jaxgrow.axes import axis_of
from jaxgrow.growth.maps import AxisMap, Rule, Rules, select, tile
from jaxgrow.growth.matrices import SparseMap, dense
from jaxgrow.growth.moments import RebiasState, rebias
from jaxgrow.operators import aki, fpi, hypercloning, lemon, llama_pro, staged

pytestmark = pytest.mark.usefixtures("x64")

TOLERANCE = 1e-12
B1, B2 = 0.9, 0.999
# Clipping depends on the norm of all gradients, which growing changes, so nothing is exact behind
# an active clip. This clip is inactive.


def jitted(tx):
    """Compile an update of many small operations at once; separate compilation takes seconds."""
    return optax.GradientTransformation(jax.jit(tx.init), jax.jit(tx.update))


ADAM = optax.scale_by_adam(B1, B2)
CLOCKED = optax.chain(ADAM, rebias(B1, B2))
CLIP, DECAY = optax.clip_by_global_norm(1e3), optax.add_decayed_weights(0.1)
ADAMW = jitted(optax.chain(CLIP, ADAM, rebias(B1, B2), DECAY))
MICRO = optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation()
OPTIMIZERS = {  # `test_moments_table` has all others
    "adamw with clipping and rebias": ADAMW,
    "adam over two micro-batches": jitted(MICRO),
    "amsgrad": jitted(optax.amsgrad(0.1)),
    "muon": jitted(optax.contrib.muon(0.1)),
}
# A model of two leaves: one unit of "a" becomes three, the other stays single.
AXES = {"w": ("a.in", "b"), "v": ("a",)}
THREE = {"a": select([0, 0, 1, 0], 2)}
SMALL = {"w": np.array([[0.3, -0.5, 0.7], [0.2, 1.1, -1.3]]), "v": np.array([0.5, -0.7])}


@pytest.fixture(params=OPTIMIZERS.values(), ids=OPTIMIZERS)
def tx(request):
    return request.param


def close(a, b, atol=TOLERANCE):
    chex.assert_trees_all_close(a, b, rtol=0, atol=atol)


def gradients(like, steps, seed=0):
    rng = np.random.default_rng(seed)
    return [jax.tree.map(lambda x: rng.normal(size=x.shape), like) for _ in range(steps)]


def run(tx, params, state, gs):
    """Return the updates of each step and the last state, as NumPy arrays, which need no compiler."""
    out, update = [], jax.jit(tx.update)
    for g in gs:
        updates, state = update(g, state, params)
        out.append(updates)
    return jax.device_get((out, state))


@cache
def trained(tx, steps=3):
    return run(tx, SMALL, tx.init(SMALL), gradients(SMALL, steps))[1]


def is_adam(x):
    return isinstance(x, optax.ScaleByAdamState)


def of_adam(state):
    return next(s for s in jax.tree.leaves(state, is_leaf=is_adam) if is_adam(s))


# --- policies ---


def test_dropping_is_a_fresh_start():
    found = grow_optimizer(ADAMW, trained(ADAMW), THREE, SMALL, AXES, "drop")
    chex.assert_trees_all_equal(found, ADAMW.init(grow(THREE, SMALL, AXES)))


def test_policies_by_hand():
    state = optax.ScaleByAdamState(
        count=np.asarray(5), mu={"w": np.asarray([[6.0], [2]]), "v": np.asarray([12.0, 2])},
        nu={"w": np.asarray([[36.0], [4]]), "v": np.asarray([144.0, 4])},
    )  # fmt: skip
    params = {"w": np.ones((2, 1)), "v": np.ones(2)}

    def moments(policy, tx=None, state=state):
        tx = tx or optax.scale_by_adam()
        adam = of_adam(grow_optimizer(tx, state, THREE, params, AXES, policy))
        assert adam.count == 5
        leaves = (adam.mu["w"], adam.mu["v"], adam.nu["w"], adam.nu["v"])
        return [x.reshape(-1).tolist() for x in leaves]

    assert moments("copy") == [[6, 6, 2, 6], [12, 12, 2, 12], [36, 36, 4, 36], [144, 144, 4, 144]]
    close(moments("exact"), [[6, 6, 2, 6], [4, 4, 2, 4], [36, 36, 4, 36], [16, 16, 4, 16]])
    clocked = (state, RebiasState(np.asarray(5), {"w": np.asarray(0), "v": np.asarray(0)}))
    first = moments("asymmetric", CLOCKED, clocked)
    assert first == [[6, 0, 2, 0], [12, 0, 2, 0], [36, 0, 4, 0], [144, 0, 4, 0]]


def test_a_unit_left_at_zero_is_no_first_copy():
    late = SparseMap(np.array([[0], [0], [1], [0]]), np.array([[0.0], [1], [1], [1]]), 2)
    state, growth = trained(ADAMW), {"a": AxisMap(late, late)}
    grown = grow_optimizer(ADAMW, state, growth, SMALL, AXES, "asymmetric")
    first, second = of_adam(state).mu["v"]
    np.testing.assert_array_equal(of_adam(grown).mu["v"], [0, first, second, 0])


def test_copied_second_moments_are_never_negative():
    """A new unit that extrapolates has a weight of -1. The control is the first moment. Means are unchanged."""
    sparse = SparseMap(np.array([[0, 0], [1, 1], [1, 0]]), np.array([[1.0, 0], [1, 0], [2, -1]]), 2)
    tx = optax.scale_by_adam()
    state = trained(tx)
    state = state._replace(nu={**state.nu, "v": np.array([9.0, 1])})
    for write in (sparse, dense(sparse), jnp.asarray(dense(sparse))):
        growth = {"a": AxisMap(write, write)}
        grown = grow_optimizer(tx, state, growth, SMALL, AXES, "copy")
        first, second = state.mu["v"]
        close(grown.mu["v"], np.array([first, second, 2 * second - first]))
        assert grown.nu["v"].tolist() == [9, 1, 11]
        large = grow(growth, SMALL, AXES)
        updates, _ = tx.update(gradients(large, 1)[0], grown)
        assert all(np.isfinite(u).all() for u in jax.tree.leaves(updates))
    mean = grow_optimizer(tx, state, swap({"a": tile(1, 2)}), SMALL, AXES, "copy")
    assert mean.nu["v"].tolist() == [5]


# --- exactness ---


@pytest.mark.parametrize("growth", [
    hypercloning(tiny.WIDTHS, tiny.wider(2)),
    pytest.param(staged(tiny.WIDTHS, tiny.wider(2)), marks=pytest.mark.extra),
    pytest.param(lemon(tiny.WIDTHS, {"heads": 5, "mlp": 13}, seed=1), marks=pytest.mark.slow),
], ids=["hypercloning", "staged", "lemon, heads and mlp"])  # fmt: skip
def test_exact_moments_are_those_of_training_a_grown_gpt2(growth):
    """A step after growing equals growing after the step. Each model computes its own gradients; they are not grown."""
    config = tiny.config()
    axes, small = tiny.axes(config), tiny.params(config)
    large, tx = grow(growth, small, axes), optax.scale_by_adam(B1, B2)
    step = jax.jit(tx.update)
    state = jax.jit(tx.init)(small)
    for seed in (0, 1):
        _, state = step(tiny.gradient(config)(small, tiny.tokens(seed=seed)), state)
    across = jax.jit(lambda state: grow_optimizer(tx, state, growth, small, axes, "exact"))
    grown = across(state)
    _, after = step(tiny.gradient(config)(small, tiny.tokens(seed=2)), state)
    _, grown = step(tiny.gradient(config.resized(growth))(large, tiny.tokens(seed=2)), grown)
    close(grown, across(after))


@pytest.mark.parametrize("policy", ["exact", "copy"])
def test_exact_moments_match_training_the_grown_model(tx, policy):
    growth = {"a": tile(2, 2)}
    first, then = gradients(SMALL, 2), gradients(SMALL, 1, seed=1)
    then = jax.tree.map(lambda g: 10 * g, then)  # so that a maximum also changes
    _, before = run(tx, SMALL, tx.init(SMALL), first)
    _, after = run(tx, SMALL, before, then)
    grown = grow_optimizer(tx, before, growth, SMALL, AXES, policy)
    large, then = grow(growth, SMALL, AXES), [grow(dual(growth), g, AXES) for g in then]
    chex.assert_trees_all_equal_shapes_and_dtypes(grown, tx.init(large))
    _, grown = run(tx, large, grown, then)
    expected = grow_optimizer(tx, after, growth, SMALL, AXES, "exact")
    if policy == "exact":
        close(grown, expected)
    else:
        assert tiny.distance(grown, expected) > 1e-3


def test_coalescing_sums_the_first_moments_of_twins_exactly():
    """Coalescing restores the first moments, and the second moments where twins had equal gradients."""
    growth, tx = {"a": tile(2, 3)}, jitted(optax.scale_by_adam())
    state, large = trained(tx), grow({"a": tile(2, 3)}, SMALL, AXES)
    up = grow_optimizer(tx, state, growth, SMALL, AXES, "exact")
    close(grow_optimizer(tx, up, swap(growth), large, AXES, "exact"), state)

    _, unlike = run(tx, large, tx.init(large), gradients(large, 3))
    summed = grow(dual(swap(growth)), gradients(large, 3), [AXES] * 3)
    _, expected = run(tx, SMALL, tx.init(SMALL), summed)
    down = grow_optimizer(tx, unlike, swap(growth), large, AXES, "exact")
    close(down.mu, expected.mu)
    for path, bound, nu in tiny.pairs(down.nu, expected.nu):
        assert (bound >= nu).all(), path
        assert (bound > 1.01 * nu).any(), path


# --- restarting single entries ---


def test_rebias_changes_no_bit_where_nothing_restarted():
    gs = gradients(SMALL, 5)
    chex.assert_trees_all_equal(*(run(tx, SMALL, tx.init(SMALL), gs)[0] for tx in (ADAM, CLOCKED)))


@pytest.mark.parametrize("b2", [0.999, 0.95])
def test_restarted_entries_act_as_fresh_adam_and_kept_continue(b2):
    """Also for two growths: each generation of twins counts from its own first step."""
    fresh = optax.scale_by_adam(B1, b2, eps=0)
    tx, fresh = jitted(optax.chain(fresh, rebias(B1, b2))), jitted(fresh)
    vector, axes = {"v": SMALL["v"]}, {"v": ("a",)}
    first, second = {"a": tile(2, 2)}, {"a": tile(4, 2)}
    # Copies receive different gradients, so all entries are distinguishable.
    long = [{"v": g} for g in np.random.default_rng(1).normal(size=(14, 8))]

    def columns(gs, start, stop):
        return [{"v": g["v"][start:stop]} for g in gs]

    middle, large = grow(first, vector, axes), grow(second, grow(first, vector, axes), axes)
    _, state = run(tx, vector, tx.init(vector), columns(long[:3], 0, 2))
    state = grow_optimizer(tx, state, first, vector, axes, "asymmetric")
    one, state = run(tx, middle, state, columns(long[3:8], 0, 4))
    state = grow_optimizer(tx, state, second, middle, axes, "asymmetric")
    two, _ = run(tx, large, state, columns(long[8:], 0, 8))

    def expected(begin, start, stop):
        zeros = {"v": np.zeros(stop - start)}
        return run(fresh, zeros, fresh.init(zeros), columns(long[begin:], start, stop))[0]

    for start, stop, begin in ((0, 2, 0), (2, 4, 3), (4, 8, 8)):
        updates = [{"v": u["v"][start:stop]} for u in (one if begin < 8 else []) + two]
        close(updates, expected(begin, start, stop)[-len(updates) :])


@pytest.mark.parametrize("unchanged", [(Rule((), "u"),), ()], ids=["no terms", "no rule"])
def test_the_state_of_an_unchanged_parameter_goes_on(unchanged):
    params, axes = {**SMALL, "u": np.ones(5)}, {**AXES, "u": ("c",)}
    moments = {**SMALL, "u": np.arange(5.0)}
    adam = optax.ScaleByAdamState(np.int32(3), moments, jax.tree.map(np.square, moments))
    state = (adam, RebiasState(np.int32(3), jax.tree.map(lambda _: np.int32(0), params)))
    growth = Rules((*unchanged, Rule(({"a": tile(2, 2)},), axes=("a",))))
    adam, clock = grow_optimizer(CLOCKED, state, growth, params, axes, "asymmetric")
    assert adam.mu["u"].tolist() == [0, 1, 2, 3, 4]
    assert clock.start_count["u"].tolist() == [0] * 5
    assert clock.start_count["v"].tolist() == [0, 0, 3, 3]


def test_copied_clocks_follow_their_units():
    state = grow_optimizer(ADAMW, trained(ADAMW), {"a": tile(2, 2)}, SMALL, AXES, "asymmetric")
    large = grow({"a": tile(2, 2)}, SMALL, AXES)
    again = grow_optimizer(ADAMW, state, {"a": select([3, 0], 4)}, large, AXES, "copy")
    assert again[2].start_count["v"].tolist() == [3, 0]
    assert again[2].start_count["v"].dtype == jnp.int32
    # The weights of a map scale values, such as the scales of norms in `lemon`, but not steps.
    scaled = SparseMap(np.array([[3], [0]]), np.array([[0.5], [-2.0]]), 4)
    again = grow_optimizer(ADAMW, state, {"a": AxisMap(scaled, scaled)}, large, AXES, "copy")
    assert again[2].start_count["v"].tolist() == [3, 0]


@pytest.mark.parametrize(
    ("b2", "overshoot"),
    [(0.999, {1: 3.16, 12: 6.57, 200: 2.35}), (0.95, {1: 0.447, 12: 1.055, 200: 1.0})],
)
def test_without_rebias_a_restarted_entry_moves_too_far(b2, overshoot):
    """With zero moments and a large step count, a step is too large by ``(1 - b1^j) / sqrt(1 - b2^j)``."""
    tx = optax.scale_by_adam(B1, b2, eps=0)
    clocked = optax.chain(tx, rebias(B1, b2))
    one = {"v": jnp.ones(1)}
    late = jnp.asarray(100_000, jnp.int32)
    adam = tx.init(one)._replace(count=late)

    def steps(tx, state):
        scan = partial(jax.lax.scan, lambda s, _: tx.update(one, s)[::-1], length=200)
        return jax.jit(scan)(state)[1]

    naive, right = steps(tx, adam), steps(clocked, (adam, RebiasState(late, {"v": late})))
    for step, factor in overshoot.items():
        np.testing.assert_allclose(naive["v"][step - 1], factor, rtol=0.005)
    np.testing.assert_allclose(right["v"], 1, rtol=1e-9)


# --- sums of terms ---

OLD = tiny.WIDTHS
RAGGED = {"embed": 8, "heads": 5, "mlp": 13}


def of_gpt2():
    """Return parameters, their axes, and a state of three steps whose first moments equal them."""
    small = tiny.params(tiny.config())
    adam = optax.ScaleByAdamState(count=np.int32(3), mu=small, nu=jax.tree.map(np.square, small))
    starts = jax.tree.map(lambda _: np.int32(0), small)
    return small, tiny.axes(tiny.config()), (adam, RebiasState(np.int32(3), starts))


def test_copies_of_units_carry_what_their_pair_had():
    """In staged growth, copies carry the moments of their pair of units, also where the staged weights are zero."""
    small, axes, state = of_gpt2()
    grown = grow_optimizer(CLOCKED, state, staged(OLD, tiny.wider(2)), small, axes, "copy")
    names = jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, tuple))
    for (path, x, mu), on in zip(tiny.pairs(small, grown[0].mu), names, strict=True):
        twice = [2 if axis_of(name) in ("embed", "heads", "mlp") else 1 for name in on]
        np.testing.assert_array_equal(mu, np.tile(x, twice), err_msg=path)


def test_units_from_the_next_layer_carry_its_moments():
    small, axes, state = of_gpt2()
    grown = grow_optimizer(CLOCKED, state, aki(OLD, RAGGED, seed=3), small, axes, "copy")
    g = {axis: m.write.index[:, 0] for axis, m in fpi(OLD, RAGGED, seed=3).items()}
    mu, blocks = grown[0].mu["blocks"], small["blocks"]
    for layer, following in ((0, 1), (1, 1)):
        for j, unit in enumerate(g["mlp"]):
            source = following if j >= OLD["mlp"] else layer
            assert mu["mlp"]["up"]["bias"][layer, j] == blocks["mlp"]["up"]["bias"][source, unit]
            expected = blocks["mlp"]["down"]["kernel"][source, unit, g["embed"]]
            np.testing.assert_array_equal(mu["mlp"]["down"]["kernel"][layer, j], expected)
        for j, head in enumerate(g["heads"]):
            source = following if j >= OLD["heads"] else layer
            expected = blocks["attention"]["key"]["kernel"][source, g["embed"], head]
            found = mu["attention"]["key"]["kernel"][layer, :, j]
            np.testing.assert_array_equal(found, expected)
    norm = small["final_norm"]["scale"][g["embed"]]
    np.testing.assert_array_equal(grown[0].mu["final_norm"]["scale"], norm)


@pytest.mark.parametrize(("growth", "kept_layers"), [
    (aki(OLD, RAGGED, seed=3), [0, 1]),
    (aki(OLD, {**RAGGED, "layers": 5}, seed=3), [0, 1]),
    (staged(OLD, tiny.wider(2)), [0, 1]),
    (llama_pro(OLD, {"layers": 4}), [0, 2]),
], ids=["aki", "aki, and layers", "staged", "llama_pro"])  # fmt: skip
def test_old_entries_go_on_and_new_ones_restart(growth, kept_layers):
    small, axes, state = of_gpt2()
    across = jax.jit(
        lambda state: grow_optimizer(CLOCKED, state, growth, small, axes, "asymmetric")
    )
    adam, clock = across(state)
    assert (adam.count, clock.count) == (3, 3)
    chex.assert_trees_all_equal_shapes(adam.mu, tiny.params(tiny.config().resized(growth)))
    names = jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, tuple))
    pairs = zip(tiny.pairs(small, adam.mu), tiny.pairs(adam.nu, clock.start_count), strict=True)
    for ((path, x, mu), (_, nu, starts)), on in zip(pairs, names, strict=True):
        sizes = zip(on, x.shape, strict=True)
        where = np.ix_(*(kept_layers if n == "layers" else range(size) for n, size in sizes))
        expected, fresh = np.zeros(mu.shape), np.full(mu.shape, 3)
        expected[where], fresh[where] = x, 0
        np.testing.assert_array_equal(mu, expected, err_msg=path)
        np.testing.assert_array_equal(nu, np.square(expected), err_msg=path)
        np.testing.assert_array_equal(starts, fresh, err_msg=path)
        assert starts.dtype == np.int32


# --- errors ---


def raises(message):
    return pytest.raises(ValueError, match=re.escape(message))


def test_asymmetric_needs_a_clock_and_copies():
    adam, state = optax.adam(0.1), trained(optax.adam(0.1))
    with raises(
        "the optimizer does not correct their bias. Chain jaxgrow.growth.moments.rebias(b1, b2)"
    ):
        grow_optimizer(adam, state, THREE, SMALL, AXES, "asymmetric")
    small, axes, state = of_gpt2()
    needs = "policy 'asymmetric' needs a growth that copies units, but the map from"
    # lemon fills the added units with means.
    with raises(f"axis 'embed': {needs} 6 to 8 units"):
        grow_optimizer(CLOCKED, state, lemon(OLD, {"embed": 8}), small, axes, "asymmetric")
    mix = AxisMap(np.ones((3, 2)), np.ones((3, 2)))
    for growth, sizes in ((swap({"a": tile(1, 2)}), "2 to 1"), ({"a": mix}, "2 to 3")):
        with raises(f"axis 'a': {needs} {sizes} units"):
            grow_optimizer(ADAMW, trained(ADAMW), growth, SMALL, AXES, "asymmetric")


def test_moments_of_unknown_kind_are_copied_but_never_scaled():
    tx = optax.adadelta(0.1)
    with raises(
        "e_x/v: holds neither the gradients of each entry nor their squares. Use policy 'copy'"
    ):
        grow_optimizer(tx, trained(tx), THREE, SMALL, AXES, "exact")
    copied = grow_optimizer(tx, trained(tx), THREE, SMALL, AXES, "copy")
    expected = np.asarray(trained(tx)[1].e_g["w"])[[0, 0, 1, 0]]
    np.testing.assert_array_equal(copied[1].e_g["w"], expected)
    tx = optax.chain(tx, rebias(B1, B2))
    kept = grow_optimizer(tx, trained(tx), THREE, SMALL, AXES, "asymmetric")
    first, second = trained(tx)[0][1].e_g["v"]
    np.testing.assert_array_equal(kept[0][1].e_g["v"], [first, 0, second, 0])


def test_moments_with_a_different_shape_are_refused():
    tx = optax.adafactor(0.1)
    with raises("Use policy 'drop'"):
        grow_optimizer(tx, trained(tx), THREE, SMALL, AXES, "copy")
    grow_optimizer(tx, trained(tx), THREE, SMALL, AXES, "drop")


# --- modules that have the names of fields of the state ---

NAMED_LIKE_ADAM = jitted(CLOCKED)
# The state of "mu/w" is at the paths "0/mu/mu/w" and "0/nu/mu/w", and that of "w" at "0/mu/w" and
# "0/nu/w". With the mask, "mu/w" has no state.
MASKED = optax.masked(ADAM, lambda params: {name: name == "w" for name in params})
WITHOUT_MODULE = optax.chain(MASKED, rebias(B1, B2))


def grown_with_a_module(name, policy, tx, module_axes=("b.in", "a")):
    """Grow the trained optimizer state of a kernel and a module with another kernel."""
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(2, 2)), name: {"w": rng.normal(size=(2, 2))}}
    axes = {"w": ("a.in", "b"), name: {"w": module_axes}}
    state = run(tx, params, tx.init(params), gradients(params, 3))[1]
    grown = grow_optimizer(tx, state, {"a": tile(2, 2)}, params, axes, policy)
    expected = tx.init(grow({"a": tile(2, 2)}, params, axes))
    if policy != "asymmetric":
        chex.assert_trees_all_equal_shapes(grown, expected)
    return jax.tree.leaves(grown)


@pytest.mark.parametrize("tx", [NAMED_LIKE_ADAM, WITHOUT_MODULE], ids=["all", "masked"])
@pytest.mark.parametrize("policy", ["drop", "copy", "exact", "asymmetric"])
def test_a_module_may_have_the_name_of_a_moment(policy, tx):
    """The names of modules do not matter, as long as they are in the same order."""
    chex.assert_trees_all_equal(*(grown_with_a_module(name, policy, tx) for name in ("mu", "m")))


def test_the_parameters_of_such_a_model_grow_differently():
    """If both kernels grew alike, the test above could not fail."""
    alike = grown_with_a_module("mu", "copy", NAMED_LIKE_ADAM, ("a.in", "b"))
    different = grown_with_a_module("mu", "copy", NAMED_LIKE_ADAM)
    assert [x.shape for x in alike] != [x.shape for x in different]


# --- arguments that do not fit ---


@pytest.mark.parametrize("policy", ["Copy", None])
def test_unknown_policies_are_refused(policy):
    with raises(f"policy must be 'drop', 'copy', 'exact' or 'asymmetric', not {policy!r}"):
        grow_optimizer(ADAMW, trained(ADAMW), THREE, SMALL, AXES, policy)


@pytest.mark.parametrize("policy", ["drop", "copy", "exact", "asymmetric"])
def test_the_growth_and_the_axes_fit_the_parameters(policy):
    def refused(message, growth=THREE, axes=AXES):
        with raises(message):
            grow_optimizer(ADAMW, trained(ADAMW), growth, SMALL, axes, policy)

    refused("w: axis 'a' has size 2, but its map takes 3 to 6", {"a": tile(3, 2)})
    refused("axis 'c': the model has no such axis, only 'a', 'b'", {"c": tile(2, 2)})
    refused("v: has no axis names", axes={"w": AXES["w"]})
    refused("w: has shape (2, 3), but 1 axis names ('a',)", axes={"w": ("a",), "v": ("a",)})


@pytest.mark.parametrize("policy", ["copy", "exact", "asymmetric"])
def test_the_parameters_and_the_state_are_those_from_before_the_growth(policy):
    state, large = trained(ADAMW), grow(THREE, SMALL, AXES)
    with raises(
        "The parameters have the sizes of the grown model. Pass the parameters from before"
    ):
        grow_optimizer(ADAMW, state, THREE, large, AXES, policy)
    with raises(
        "mu/v: has the shape (4,) of the grown parameter, but the parameter has shape (2,). Pass"
    ):
        grow_optimizer(ADAMW, ADAMW.init(large), THREE, SMALL, AXES, policy)


# --- a parameter that is a bare array ---


@pytest.mark.parametrize("policy", ["drop", "copy", "exact", "asymmetric"])
def test_the_moments_of_a_bare_array_grow_as_those_of_a_leaf(policy):
    tx, bare = NAMED_LIKE_ADAM, SMALL["w"]
    grown = []
    for p, on in ((bare, AXES["w"]), ({"w": bare}, {"w": AXES["w"]})):
        state = run(tx, p, tx.init(p), gradients(p, 3))[1]
        grown.append(grow_optimizer(tx, state, THREE, p, on, policy))
    assert of_adam(grown[0]).mu.shape == (4, 3)
    assert jax.tree.structure(grown[0]) == jax.tree.structure(tx.init(grow(THREE, bare, AXES["w"])))
    for x, y in zip(*map(jax.tree.leaves, grown), strict=True):
        np.testing.assert_array_equal(x, y)

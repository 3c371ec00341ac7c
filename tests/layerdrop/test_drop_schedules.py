"""Keep probabilities over time and depth, their allocation by sensitivity, and keep masks."""

import itertools
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import masks
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgrow.extras.variance import fit_variance
from jaxgrow.layerdrop import (
    LayerDrop,
    Sensitivity,
    Variance,
    block_list,
    independent,
    keep_masks,
    keep_probabilities,
    output_divisors,
    padded,
    program_counts,
    program_odds,
    sample,
    schedule,
    systematic,
    theta,
)
from jaxgrow.layerdrop.sampling import GRID

TOLERANCE = 1e-12  # float64, numbers of order one
STEPS = 1000
PLD = LayerDrop(theta=0.5)
ALL = [
    replace(PLD, time=time, depth=depth, reverse=reverse)
    for time in ("pld", "constant", "linear", "layerskip")
    for depth in ("linear", "algorithm1", "uniform", "layerskip")
    for reverse in (False, True)
]
pytestmark = pytest.mark.usefixtures("x64")


def over_time(drop, times=range(STEPS + 1)):
    return np.array(
        jax.jit(jax.vmap(lambda t: theta(drop, t, STEPS)))(np.array(list(times), float))
    )


@cache  # Compile one program each, instead of one per operation.
def of(drop, layers):
    return jax.jit(partial(schedule, drop, layers, steps=STEPS))


def at(drop, t, layers=5, **rest):
    return np.asarray(of(drop, layers)(t=np.asarray(t, float), **rest))


# --- time ---


def test_pld_is_its_equation():
    t = np.arange(STEPS + 1)
    expected = (1 - 0.5) * np.exp(-100 / STEPS * t) + 0.5
    np.testing.assert_allclose(over_time(PLD), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("time", ["pld", "linear", "layerskip"])
def test_drop_rate_rises_to_its_limit_or_falls_if_reversed(time):
    drop = replace(PLD, time=time, theta=0.3)
    values, reverse = over_time(drop), over_time(replace(drop, reverse=True))
    assert values[0] == 1 and values[-1] == pytest.approx(0.3, abs=1e-9)
    assert (np.diff(values) <= 0).all() and (values >= 0.3 - TOLERANCE).all()
    np.testing.assert_allclose(reverse, values[::-1], rtol=0, atol=1e-9)


def test_constant_and_gamma_zero():
    assert (over_time(replace(PLD, time="constant", theta=0.8)) == 1 - (1 - 0.8)).all()
    assert (over_time(replace(PLD, gamma=0.0)) == 1).all()


@pytest.mark.parametrize(("layers", "least", "most"), [(12, 1.04, 1.09), (16, 1.03, 1.063)])
def test_the_published_sampling_scales_every_layer_up(layers, least, most):
    """The expected factor of a layer, by both values of its mask, is p_(l-1) / p_l."""
    drop = replace(PLD, time="constant", keep="published")
    kept = at(drop, 7, layers)
    factor = kept * (1 / np.asarray(output_divisors(drop, layers, 7, STEPS)))
    equation = 1 - np.arange(layers + 1) / layers / 2
    np.testing.assert_allclose(factor, equation[:-1] / equation[1:], rtol=1e-12)
    assert least < factor.min() < factor.max() < most
    default, first = replace(drop, keep=None), replace(PLD, time="constant", depth="algorithm1")
    np.testing.assert_array_equal(kept, at(first, 7, layers))
    divisors = output_divisors(default, layers, 7, STEPS)
    np.testing.assert_array_equal(divisors, at(default, 7, layers))
    for wrong in ({"depth": "uniform"}, {"scale": "none"}, {"sensitivity": Sensitivity()}):
        with pytest.raises(ValueError, match="keep='published' has the keep probabilities"):
            replace(drop, **wrong)


@pytest.mark.parametrize("reverse", [False, True])
def test_recovery_keeps_every_layer_at_the_end(reverse):
    drop = replace(PLD, time="linear", reverse=reverse, recovery=0.25)
    values = over_time(drop)
    assert (values[751:] == 1).all()
    assert values[0 if reverse else 750] == pytest.approx(0.5)
    assert values[750 if reverse else 0] == 1


CURVE = Variance(peak=0.2, shape=3.0)
DISTURBED = LayerDrop(theta=0.3, time="variance", variance=CURVE)


def test_variance_schedule_keeps_all_layers_until_the_peak():
    values, u = over_time(DISTURBED), np.arange(STEPS + 1) / STEPS
    assert (values[: STEPS // 5 + 1] == 1).all() and (np.diff(values[STEPS // 5 :]) < 0).all()
    gamma = (u / 0.2) ** 2 * np.exp(-2 * (u / 0.2 - 1))  # the curve computed by hand
    np.testing.assert_allclose(values[200:], 0.3 + 0.7 * gamma[200:], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(np.asarray(CURVE(u)), gamma, rtol=0, atol=TOLERANCE)
    late = over_time(replace(DISTURBED, sensitivity=Sensitivity(after=0.5)))
    # The schedule follows the clock that starts when dropping starts.
    np.testing.assert_allclose(late[500::5], values[::10], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("curve", [CURVE, Variance(0.01, 1.5), Variance(0.9, 40.0)], ids=str)
def test_a_fit_recovers_the_curve_at_any_scale_and_order(curve):
    u = np.random.default_rng(0).permutation(np.arange(1, 41) / 40)
    v = 1e-3 * np.asarray(curve(u))
    found = fit_variance(u, np.where(v < 1e-300, 0, v))
    np.testing.assert_allclose((found.peak, found.shape), (curve.peak, curve.shape), rtol=1e-6)


def test_a_fit_weights_large_values_and_tolerates_noise():
    """The relative noise is one half below a tenth of the maximum, and one twentieth elsewhere."""
    u, rng = np.arange(1, 101) / 100, np.random.default_rng(0)
    v = np.asarray(CURVE(u))
    found = fit_variance(u, v * np.exp(rng.normal(size=100) * np.where(v < 0.1, 0.5, 0.05)))
    assert found.peak == pytest.approx(0.2, abs=0.01) and found.shape == pytest.approx(3, abs=0.2)


@pytest.mark.parametrize(("u", "v", "says"), [
    ([0.1, 0.2, 0.3], [0, 1, 2], "at least three points that are not zero, but there are 2"),
    ([0.1, 0.4, 0.7, 1], [10, 2.5, 1, 0.5], "not have a peak while layers are dropped. It only falls"),
    ([0.1, 0.4, 0.7, 1], [1, 2, 4, 8], "not have a peak while layers are dropped. It only rises"),
])  # fmt: skip
def test_what_has_no_peak_is_not_fitted(u, v, says):
    with pytest.raises(ValueError, match=says):
        fit_variance(u, v)


# --- depth ---


def test_depth_by_hand():
    for depth, expected in (
        ("linear", [0.8, 0.6, 0.4, 0.2]),
        ("algorithm1", [1, 0.8, 0.6, 0.4]),
        ("uniform", [0.2] * 4),
        ("layerskip", 1 - 0.8 * (np.exp(np.arange(4) * np.log(2) / 3) - 1)),
    ):
        drop = LayerDrop(depth=depth, time="constant", theta=0.2)
        np.testing.assert_allclose(at(drop, 1, 4), expected, atol=TOLERANCE)
    assert at(drop, 1, 1) == 1


PREFIX = LayerDrop(time="constant", depth="prefix", scale="none")


@pytest.mark.parametrize(("now", "ran"), [(0.4, 2), (0.05, 1), (0.0, 0)])
def test_prefix_keeps_bottom_layers_and_none_only_if_requested(now, ran):
    drop = replace(PREFIX, theta=now)
    for t in (1, STEPS):
        assert at(drop, t, 4).tolist() == [1.0] * ran + [0.0] * (4 - ran)
    both = [replace(drop, execution=execution) for execution in ("cond", "gather")]
    draw = jax.jit(lambda t: [keep_masks(d, 4, STEPS, t, seed=5, micro=3)[1] for d in both])
    for drawn in map(np.asarray, draw(7)):
        assert drawn.sum(-1).tolist() == [ran] * 3 and drawn[:, :ran].all()


def test_a_prefix_that_shrinks_or_recovers():
    shrinking = replace(PREFIX, time="linear", theta=0.5)
    # These are the rounded values of 4, 3.6, 3.2, 2.8 and 2.
    assert [at(shrinking, t, 4).sum() for t in (0, 200, 400, 600, 1000)] == [4, 4, 3, 3, 2]
    assert at(replace(PREFIX, recovery=0.25), 751, 4).tolist() == [1] * 4


def test_every_schedule_is_probabilities_and_jittable():
    every = jax.jit(lambda t: [schedule(drop, 7, t, STEPS) for drop in ALL])
    alone, together = every(350.0), jax.jit(jax.vmap(every))(jnp.arange(0, STEPS + 1, 50) * 1.0)
    for drop, found, one in zip(ALL, map(np.asarray, together), alone, strict=True):
        assert found.shape == (21, 7), drop
        assert ((found >= 0.5 - 1e-9) & (found <= 1)).all(), drop
        np.testing.assert_allclose(found[7], one, rtol=0, atol=TOLERANCE, err_msg=str(drop))


def test_theta_one_keeps_everything():
    always = [replace(drop, theta=1.0) for drop in (*ALL, replace(PLD, sensitivity=Sensitivity()))]
    run = jax.jit(lambda t: [schedule(drop, 5, t, STEPS, np.arange(5.0)) for drop in always])
    assert all((p == 1).all() for t in (0.0, 1.0, STEPS * 1.0) for p in jax.device_get(run(t)))


# --- allocation by sensitivity ---

CASES = st.tuples(
    *(st.sampled_from([4, 5, 12, 30]), st.floats(0.05, 1), st.floats(0, 3)),
    *(st.floats(0.0, 0.5), st.integers(0, 3), st.integers(0, 99)),
)


def case(layers, now, beta, p_min, never, seed):
    rng = np.random.default_rng(seed)
    s, costs = rng.exponential(size=layers), rng.uniform(0.5, 2, layers)
    block = np.isin(np.arange(layers), rng.choice(layers, never, replace=False))
    return s, now, {"blocked": block, "beta": beta, "p_min": p_min, "costs": costs}


def budget(now, layers):
    return 1 - (1 - now) * (layers + 1) / (2 * layers)


allocated = jax.jit(keep_probabilities)  # compiled once for each number of layers


@given(CASES)
def test_allocation_meets_its_budget_and_keeps_what_is_blocked(values):
    s, now, rest = case(*values)
    p = np.asarray(allocated(s, now, **rest))
    weights = rest["costs"] / rest["costs"].sum()
    least = (weights * np.where(rest["blocked"], 1, rest["p_min"])).sum()
    assert (weights * p).sum() == pytest.approx(max(least, budget(now, len(s))), abs=1e-9)
    assert (p[rest["blocked"]] == 1).all() and ((p >= rest["p_min"]) & (p <= 1)).all()


@given(CASES)
def test_allocation_is_monotone_and_permutation_equivariant(values):
    s, now, rest = case(*values)
    p = np.asarray(allocated(s, now, **rest))
    order = np.random.default_rng(1).permutation(len(s))
    moved = rest | {name: rest[name][order] for name in ("blocked", "costs")}
    np.testing.assert_allclose(allocated(s[order], now, **moved), p[order], rtol=0, atol=1e-9)
    free = ~rest["blocked"]
    assert (np.diff(p[free][np.argsort(s[free])]) >= -TOLERANCE).all()


# These are measured sensitivities of 12 layers. The first one outweighs all others.
OUTLIER = np.array([3, *np.arange(5, 15) / 100, 0.5])
SENSITIVITIES = {
    "one layer outweighs all": OUTLIER,
    "one that is not blocked": OUTLIER[np.r_[1:6, 0, 6:12]],
    "tiny differences": 1 + 1e-6 * np.random.default_rng(0).permutation(12),
    "infinite": np.r_[np.arange(11.0), np.inf],
}


@pytest.mark.parametrize("s", SENSITIVITIES.values(), ids=SENSITIVITIES)
def test_distinct_sensitivities_are_spaced_evenly_around_blocks(s):
    """Check that droppable layers have equally spaced keep probabilities, ordered by sensitivity.

    The least and the most sensitive of them differ by ``beta (1 - theta)``.
    """
    cases = itertools.product(([], [0], [0, 11], [0, 5, 11], [4, 5, 6, 7]), (0.5, 0.7, 0.9))
    blocks, thetas = zip(*cases, strict=True)
    never = np.array([np.isin(np.arange(12), b) for b in blocks])

    def probabilities(theta, blocked, beta):
        return keep_probabilities(s, theta, blocked=blocked, beta=beta)

    many = jax.jit(jax.vmap(probabilities, (0, 0, None)))
    for beta in (1.0, 0.5, 0.0):
        found = np.asarray(many(np.array(thetas), never, beta))
        for p, free, now in zip(found, ~never, thetas, strict=True):
            steps = beta * (1 - now) / (free.sum() - 1)
            np.testing.assert_allclose(np.diff(p[free][np.argsort(s[free])]), steps, atol=TOLERANCE)
            assert p.mean() == pytest.approx(budget(now, 12), abs=TOLERANCE)
            assert (p[~free] == 1).all()


@given(CASES)
def test_distinct_sensitivities_never_tie_if_the_mean_allows(values):
    """Clipping a spread of ``beta (1 - theta)`` to [p_min, 1] would cause ties."""
    s, now, rest = case(*values)
    free, p = ~rest["blocked"], np.asarray(allocated(s, now, **rest))
    mean = p[free] @ rest["costs"][free] / rest["costs"][free].sum()
    room = min(mean - rest["p_min"], 1 - now, rest["beta"])
    gaps = np.diff(p[free][np.argsort(s[free])])
    assert (gaps >= room * min(1, rest["beta"]) / (2 * len(s) ** 2) - TOLERANCE).all()
    tied = np.asarray(allocated(np.where(free, 1.0, s), now, **rest))
    np.testing.assert_allclose(np.ptp(tied[free]), 0, atol=TOLERANCE)


def test_sbld_and_its_uniform_control_differ_only_in_allocation():
    sbld = LayerDrop(theta=0.5, sensitivity=Sensitivity())
    control = replace(sbld, sensitivity=Sensitivity(beta=0.0))
    one, two = (at(drop, STEPS, 12, sensitivity=OUTLIER) for drop in (sbld, control))
    assert one.sum() == pytest.approx(two.sum(), abs=1e-9)
    assert np.flatnonzero(one == 1).tolist() == np.flatnonzero(two == 1).tolist() == [0, 11]
    assert np.ptp(two[1:-1]) <= TOLERANCE and np.ptp(one[1:-1]) == pytest.approx(0.5, abs=1e-9)


def test_pld_is_a_special_case_of_allocation():
    for layers, now in ((4, 0.3), (12, 0.9)):
        i = np.arange(1.0, layers + 1)
        p = allocated(layers - i, now, beta=(layers - 1) / layers, p_min=0.0)
        np.testing.assert_allclose(p, 1 - i / layers * (1 - now), rtol=0, atol=1e-13)


def test_block_and_allow_lists_by_hand():
    def found(**fields):
        s = [0.1, 0.9, 0.5, 0.7, 0.3, 0.2]
        return np.flatnonzero(block_list(s, Sensitivity(**fields))).tolist()

    assert found() == [0, 1, 5]  # the most sensitive, the first and the last layer
    assert found(share=0.3, block=()) == [1, 3]  # 1.8 rounded up
    assert found(share=0.3, block=(2,), allow=(1,)) == [2, 3]
    assert found(share=0.0, block=()) == []
    many = block_list(np.arange(50.0), Sensitivity(share=0.14, block=()))
    assert many.sum() == 7  # although 0.14 * 50 is 7.000000000000001 in floats
    says = r"lists name the layers \[6\], but the model has only 6 layers"
    with pytest.raises(ValueError, match=says):
        found(block=(6,))


def test_sbld_needs_sensitivities():
    with pytest.raises(ValueError, match="Measure them first"):
        schedule(LayerDrop(sensitivity=Sensitivity()), 12, 1, STEPS)


@pytest.mark.parametrize("recovery", [0.0, 0.25])
def test_the_clock_of_sbld_starts_when_dropping_starts(recovery):
    """Check that the clock equals the clock of a run with only the layer-dropping steps."""
    drop = LayerDrop(sensitivity=Sensitivity(after=0.05), recovery=recovery)
    found = over_time(drop, range(1, STEPS + 1))
    end = round((1 - recovery) * STEPS)
    assert (found[:50] == 1).all() and (found[end:] == 1).all()
    alone = jax.vmap(lambda t: theta(LayerDrop(), t, end - 50))(np.arange(1.0, end - 49))
    np.testing.assert_allclose(found[50:end], alone, rtol=0, atol=TOLERANCE)
    # Of STEPS = 1000, theta - 0.5 falls by exp(-100 / (end - 50)) per step.
    assert found[50] > 0.93
    p = at(drop, 51, 12, sensitivity=OUTLIER)
    assert p.mean() == pytest.approx(budget(found[50], 12), abs=1e-9)


@pytest.mark.parametrize(("bad", "says"), [
    (lambda: LayerDrop(theta=0.0), "theta must be between 0.05 and 1, but is 0.0"),
    (lambda: LayerDrop(recovery=1.0), "leaves no step that drops"),
    (lambda: LayerDrop(recovery=0.6, sensitivity=Sensitivity(after=0.4)), "after=0.4 and recovery=0.6 leave no step"),
    (lambda: LayerDrop(time="variance"), "time='variance' needs a variance"),
    (lambda: LayerDrop(variance=CURVE), "other times do not accept one, but time='pld' has variance=Variance"),
    (lambda: Variance(1.5, 2.0), "peak must be in .0, 1. and shape above 1, but they are 1.5 and 2.0"),
    (lambda: LayerDrop(gamma=-1.0), "gamma must not be negative"),
    (lambda: LayerDrop(programs=1), "programs must be at least 2 .all layers, and fewer., but is 1"),
    (lambda: LayerDrop(depth="prefix"), "never runs the upper layers, so scale must be 'none', not 'sublayer'"),
    (lambda: LayerDrop(depth="prefix", scale="block"), "scale must be 'none', not 'block'"),
    (lambda: Sensitivity(share=2.0), "share must be between 0 and 1, but is 2.0"),
    (lambda: Sensitivity(after=1.0), "after=1.0 leaves no step"),
    (lambda: Sensitivity(batches=0), "batches must be at least 1"),
])  # fmt: skip
def test_numbers_out_of_range_are_refused(bad, says):
    with pytest.raises(ValueError, match=says):
        bad()


# --- keep masks ---

P = np.array([1.0, 0.9, 0.35, 0.5, 0.125, 1.0, 0.7])


def draws_of(draw):
    """Return a function that samples many masks; `independent` shares its number of layers."""

    def drawn(p, number):
        keys = jax.random.split(jax.random.key(0), number)
        return np.asarray(jax.jit(jax.vmap(lambda k: draw(k, p)))(keys))

    return drawn


drawn_gates = draws_of(systematic)


SMALL = [np.array([1.0, 0.9, 0.35, 0.5, 0.125, 0.7]), np.array([0.5, 0.5]), np.array([1.0, 1.0])]


KINDS = {
    "fixed": (masks.fixed, drawn_gates),
    "independent": (
        masks.independent,
        draws_of(lambda k, p: independent(k, p, jax.random.fold_in(k, 1))),
    ),
    "of cond": (masks.independent, draws_of(sample)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("p", SMALL, ids=str)
def test_keep_masks_have_the_joint_distribution_of_their_kind(p, kind):
    define, draw = KINDS[kind]
    draws, expected = 4000, define(p)
    # The marginals are exact.
    marginals = np.array(list(expected.values())) @ np.array(list(expected))
    np.testing.assert_allclose(marginals, p, atol=1 / GRID)
    drawn = [tuple(row) for row in draw(p, draws).tolist()]
    assert set(drawn) <= {pattern for pattern, q in expected.items() if q}
    for pattern, q in expected.items():
        noise = 5 * np.sqrt(q * (1 - q) / draws) + 1 / draws
        assert abs(drawn.count(pattern) / draws - q) <= noise, pattern


def test_any_two_droppable_layers_are_sometimes_both_dropped():
    """In a fixed order, neighbours would never be dropped together.

    The interval of length one of some u would have to hold both.
    """
    p, draws = at(PLD, STEPS, 12), 20_000
    drawn = drawn_gates(p, draws)
    assert set(drawn.sum(-1)) == {int(np.floor(p.sum())), int(np.ceil(p.sum()))}
    assert (abs(drawn.mean(0) - p) <= 5 * np.sqrt(p * (1 - p) / draws)).all()
    assert len(np.unique(drawn, axis=0)) > 550
    dropped = (~drawn).astype(float)
    together = dropped.T @ dropped / draws
    independent = np.outer(1 - p, 1 - p)
    often = independent * draws > 100  # Rarer pairs depend on chance.
    np.fill_diagonal(often, False)
    assert often[-2:, :-2].sum() > 6
    ratio = together[often] / independent[often]
    assert ((ratio > 0.25) & (ratio < 1.5)).all()


@pytest.mark.parametrize(("draw", "numbers"), [(systematic, 2), (independent, 6)])
def test_masks_sharing_a_count_have_equal_sums_and_marginals(draw, numbers):
    keys = jax.random.split(jax.random.key(3), 1500)

    def step(key):
        return jax.vmap(lambda k: draw(k, P, key))(jax.random.split(jax.random.fold_in(key, 1), 3))

    drawn = np.asarray(jax.jit(jax.vmap(step))(keys))  # axes: step, micro-step, layer
    counts = drawn.sum(-1)
    assert (counts == counts[:, :1]).all()
    assert len(np.unique(counts)) == numbers
    assert (abs(drawn.mean((0, 1)) - P) <= 4 * np.sqrt(P * (1 - P) / len(keys))).all()
    assert (drawn[:, 0] != drawn[:, 1]).any()


@pytest.mark.parametrize(
    "execution",
    ["gather", *(pytest.param(e, marks=pytest.mark.extra) for e in ("cond", "gather_independent"))],
)
def test_gates_are_a_function_of_seed_step_and_micro_step(execution):
    drop = replace(PLD, time="constant", execution=execution)

    @partial(jax.jit, static_argnums=2)
    def draw(seed, step, micro=3):
        return keep_masks(drop, 12, STEPS, step, seed=seed, micro=micro)[1]

    np.testing.assert_array_equal(draw(5, 7), draw(5, 7))
    again = jax.jit(jax.vmap(lambda step: draw(5, step)))(jnp.arange(5, 9))
    # The masks do not depend on the other steps of the same call.
    np.testing.assert_array_equal(again[2], draw(5, 7))
    many = [np.asarray(draw(seed, step)) for seed, step in itertools.product(range(3), range(20))]
    assert len({g.tobytes() for g in many}) > 50
    assert any((g[0] != g[1]).any() for g in many)
    if execution == "cond":
        np.testing.assert_array_equal(draw(5, 7, 1)[0], draw(5, 7)[0])


# --- numbers of layers for which programs are compiled ---


def test_padding_adds_dropped_layers_in_order():
    keep = np.array([[True, False, True, False], [False, True, False, True]])
    np.testing.assert_array_equal(padded(keep, 2), [[0, 2], [1, 3]])
    np.testing.assert_array_equal(padded(keep, 3), [[0, 1, 2], [0, 1, 3]])
    assert padded(keep, 4).dtype == np.int32 and padded(keep, 4).tolist() == [[0, 1, 2, 3]] * 2
    with pytest.raises(ValueError, match="a keep mask keeps 2 layers, but the program runs 1"):
        padded(keep, 1)


@pytest.mark.parametrize("execution", ["gather", "gather_independent"])
def test_program_sizes_minimise_the_padded_layers(execution):
    """Compare with all choices of sizes; the odds of numbers of layers come from the masks."""
    drop = LayerDrop(theta=0.5, time="constant", execution=execution, programs=3)
    p = at(drop, 1, 5)
    odds = (masks.fixed if execution == "gather" else masks.independent)(p)

    def padding(counts):
        waste = {mask: min(c for c in counts if c >= sum(mask)) - sum(mask) for mask in odds}
        return sum(q * waste[mask] for mask, q in odds.items())

    found = program_counts(drop, 5, STEPS).ravel().tolist()
    assert found[-1] == 5
    best = min(padding((*some, 5)) for some in itertools.combinations(range(6), 2))
    assert padding(found) == pytest.approx(best, abs=1e-5)
    run = program_odds(drop, 5, STEPS, [1], np.array(found)[:, None])[0] @ found
    assert run == pytest.approx(p.sum() + best, abs=1e-5)


@pytest.mark.extra
def test_programs_of_stages_run_enough_layers_in_each():
    drop = replace(
        PLD, time="constant", depth="uniform", execution="gather_independent", programs=3
    )
    counts = program_counts(drop, (2, 4), STEPS)
    assert counts.shape == (3, 2) and counts[-1].tolist() == [2, 4]
    assert (np.diff(counts, axis=0) >= 0).all()
    expected = np.zeros(3)
    for mask, q in masks.independent(np.full(6, 0.5)).items():
        kept = [sum(mask[:2]), sum(mask[2:])]
        expected[(counts >= kept).all(1).argmax()] += q
    odds = program_odds(drop, (2, 4), STEPS, [1, 9], counts)
    np.testing.assert_allclose(odds, [expected] * 2, atol=1e-12)
    costs = np.array([3.0, 1.0])

    def cost(counts):
        return program_odds(drop, (2, 4), STEPS, [1], counts)[0] @ (counts @ costs)

    cells = np.array(list(itertools.product(range(3), range(5))))
    pairs = itertools.product(cells, cells)
    least = min(cost(np.array([a, b, (2, 4)])) for a, b in pairs if (a <= b).all())
    found = program_counts(drop, (2, 4), STEPS, costs=costs)
    assert cost(found) == pytest.approx(least, abs=1e-12)


@pytest.mark.parametrize(("layers", "fixed"), [(12, [8, 9, 10, 12]), (48, [35, 36, 40, 48])])
def test_pld_compiles_four_programs_at_any_depth(layers, fixed):
    """Check the sizes and the padding cost of four programs.

    One program for each number of layers would be 5 programs at 12 layers, and 14 at 48.
    """
    drop = LayerDrop(execution="gather")
    assert program_counts(drop, layers, 10_000).ravel().tolist() == fixed
    times = np.arange(1, 10_001, 13)
    kept = np.asarray(jax.jit(jax.vmap(lambda t: schedule(drop, layers, t, 10_000).sum()))(times))
    several = partial(replace, drop, execution="gather_independent")
    for one, below in ((drop, 1.007), (several(programs=4), 1.05), (several(programs=8), 1.02)):
        counts = program_counts(one, layers, 10_000)
        run = program_odds(one, layers, 10_000, times, counts) @ counts[:, 0]
        assert 1 < run.mean() / kept.mean() < below  # the relative cost of padding

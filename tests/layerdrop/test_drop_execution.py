"""Both executions of layer dropping are bitwise equal to each other and to the dense stack.

Dropped layers cost no computation.
"""

import itertools
from collections import defaultdict
from dataclasses import replace
from functools import cache, partial

import chex
import jax
import jax.numpy as jnp
import masks
import numpy as np
import pytest
import runs
import tiny
from jax import lax
from jax.extend.core import jaxprs_in_params
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxgrow.layerdrop import KeepMask, LayerDrop, conditional, keep_masks, padded, sample
from jaxgrow.layerdrop.execution import rescaled
from jaxgrow.models import LlamaConfig
from jaxgrow.models.stack import run_stack

LAYERS = 5
PROBS = np.array([1.0, 0.8, 0.7, 0.6, 0.5])
TOLERANCE = 1e-12  # float64, numbers of order one


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


# --- expectations in float64, by enumeration of all keep masks ---


def linear_stack(seed=0, layers=LAYERS, width=3):
    """Return the sublayers f_l(x) = x B_l and g_l(x) = x C_l of a linear model."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(2, layers, width, width)) / 3, rng.normal(size=(4, width))


def block(w, x, scale=1.0):
    b, c = w
    h = x + scale * (x @ b)
    return h + scale * (h @ c)


def expectation(probs, drawn, weights, x, scaling, scale=None):
    """Return the expected stack output over all keep masks, with keep probabilities ``drawn``."""
    scale = None if scaling is None else (1 / probs if scale is None else scale)
    masks = np.array(list(itertools.product([False, True], repeat=len(probs))))

    def run(mask):
        keep_mask = KeepMask(mask, scale, scaling or "block")
        return run_stack(block, tuple(weights), x, remat="products", keep_mask=keep_mask)[0]

    outputs = jax.jit(partial(lax.map, run))(masks)
    return np.tensordot(np.prod(np.where(masks, drawn, 1 - drawn), axis=1), outputs, 1)


def dense_linear(weights, x, excess=None):
    for i in range(len(weights[0])):
        b, c = weights[0][i], weights[1][i]
        more = 0 if excess is None else excess[i] * (b @ c)
        x = x @ ((np.eye(len(b)) + b) @ (np.eye(len(b)) + c) + more)
    return x


@pytest.mark.usefixtures("float64")
def test_block_scaling_is_unbiased_and_sublayer_scaling_is_not():
    weights, x = linear_stack()
    found = expectation(PROBS, PROBS, weights, x, "block")
    np.testing.assert_allclose(found, dense_linear(weights, x), rtol=0, atol=TOLERANCE)
    published = expectation(PROBS, PROBS, weights, x, "sublayer")
    np.testing.assert_allclose(
        published, dense_linear(weights, x, 1 / PROBS - 1), rtol=0, atol=TOLERANCE
    )
    assert abs(published - dense_linear(weights, x)).max() > 0.05
    assert abs(expectation(PROBS, PROBS, weights, x, None) - dense_linear(weights, x)).max() > 0.05


@pytest.mark.usefixtures("float64")
def test_block_scaling_is_unbiased_for_any_one_block():
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=(1, 3, 3)), rng.normal(size=(4, 3))

    def curved(w, x):
        return jnp.tanh(x @ w) * x

    run = jax.jit(
        lambda g: run_stack(
            curved, w, x, remat="products", keep_mask=KeepMask(g, np.array([1 / 0.3]))
        )[0]
    )
    outputs = [run(np.array([g])) for g in (False, True)]
    np.testing.assert_allclose(
        0.7 * outputs[0] + 0.3 * outputs[1], curved(w[0], x), rtol=0, atol=TOLERANCE
    )


@pytest.mark.usefixtures("float64")
def test_scaling_by_another_layers_probability_is_biased():
    """Reproduce the error of a published client.

    It samples with p_(l-1) and scales with 1 / p_l.
    """
    weights, x = linear_stack()
    before = np.concatenate([[1.0], PROBS[:-1]])
    wrong = expectation(PROBS, before, weights, x, "block")
    assert abs(wrong - dense_linear(weights, x)).max() > 0.05
    probs, drawn = keep_masks(LayerDrop(time="constant"), LAYERS, 10, 3, seed=0)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 3), 1)
    # Our keep mask is sampled with the same p that scales.
    np.testing.assert_array_equal(drawn[0], sample(key, probs))


@pytest.mark.parametrize("scaling", ["block", "sublayer"])
@pytest.mark.parametrize("execution", ["cond", "gather"])
@pytest.mark.parametrize("p", [0.958, 0.7])
def test_bfloat16_scaling_is_unbiased_up_to_rounding(scaling, execution, p):
    """Check E[G y / p] = y in the mean over many y.

    A factor 1 / p rounded to bfloat16 would be off by the same 0.33 % for all of them.
    """
    y = jnp.asarray(np.random.default_rng(0).uniform(1, 2, (1, 4096)), jnp.bfloat16)
    gate = np.array([True]) if execution == "cond" else np.array([0])
    keep_mask = KeepMask(gate, np.array([1 / p], np.float32), scaling)

    def apply(w, x, scale=None):
        return x + rescaled(w, scale)

    def run(y):
        return run_stack(apply, y, jnp.zeros_like(y[0]), remat="products", keep_mask=keep_mask)[0]

    x, pullback = jax.vjp(jax.jit(run), y)
    (slope,) = pullback(jnp.ones_like(x))
    assert x.dtype == slope.dtype == jnp.bfloat16
    expected, slope = (
        p * np.asarray(x, np.float64) / np.asarray(y, np.float64),
        p * np.asarray(slope, np.float64),
    )
    # Each value may be off by half a unit in the last place.
    np.testing.assert_allclose(expected, 1, atol=2.0**-8)
    assert expected.mean() == pytest.approx(1, abs=3e-4)
    np.testing.assert_allclose(slope, 1, atol=2.0**-8)


EXPECTED = {
    "cond": masks.independent,
    "gather_independent": masks.independent,
    "gather": masks.fixed,
}


def mean_gradient(execution, probs, weights, x, direction):
    """Return the expectations of ``<direction, stack(x)>`` and of its gradients.

    The expectation is over all keep masks of an execution.
    """
    layers = len(probs)

    def run(keep_mask):
        def inner(weights):
            y, _ = run_stack(block, weights, x, remat="products", keep_mask=keep_mask)
            return (direction * y).sum()

        return jax.value_and_grad(inner)(tuple(weights))

    # The masks of one program: all of them, or those for which it gathers equally many layers.
    chances = EXPECTED[execution](probs)
    programs = defaultdict(list)
    for mask in map(np.array, chances):
        count = layers - 1 if mask.sum() < layers else layers
        chosen = mask if execution == "cond" else padded(mask, count)
        programs[len(chosen)].append((mask, chosen))
    total = []
    for chosen_masks in programs.values():
        each = [KeepMask(chosen, np.where(mask, 1 / probs, 0)) for mask, chosen in chosen_masks]
        stacked = jax.tree.map(lambda *a: np.stack(a), *each)
        found = jax.jit(partial(lax.map, run))(stacked)
        q = np.array([chances[tuple(mask.tolist())] for mask, _ in chosen_masks])
        total.append(jax.tree.map(lambda a, q=q: np.tensordot(q, a, 1), found))
    return jax.tree.map(lambda *a: sum(a), *total)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("execution", EXPECTED)
def test_only_independent_masks_give_an_unbiased_gradient(
    execution,
):
    weights, x = linear_stack()
    direction = np.random.default_rng(1).normal(size=x.shape)
    dense = jax.value_and_grad(lambda w: (direction * dense_linear(w, x)).sum())(tuple(weights))
    found = mean_gradient(execution, PROBS, weights, x, direction)
    if execution != "gather":
        chex.assert_trees_all_close(found, dense, rtol=0, atol=TOLERANCE)
        return
    gradients = [
        np.concatenate([np.ravel(a) for a in jax.tree.leaves(tree[1])]) for tree in (found, dense)
    ]
    assert 0.05 < np.linalg.norm(gradients[0] - gradients[1]) / np.linalg.norm(gradients[1]) < 0.5


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("execution", "expected"), [("cond", 5.0625), ("gather_independent", 5.0625), ("gather", 4.0)]
)
def test_four_layers_that_add_half_by_hand(execution, expected):
    """Check two values: (3/2)^4 = 5.0625, and 2^2 = 4 if two of four layers always add all of x."""
    half = np.full((4, 1, 1), 0.5), np.zeros((4, 1, 1))
    value, _ = mean_gradient(execution, np.full(4, 0.5), half, np.ones((1, 1)), 1.0)
    assert value == pytest.approx(expected, abs=TOLERANCE)


# --- both executions on the real model ---

GATES = np.array([True, False, True, True, False])
SCALE = np.array([1.0, 2.0, 1.25, 1.5, 2.0], np.float32)
MODES = [("float32", "products"), ("float32", "projections"), ("bfloat16", "projections")]
SCALINGS = ["block", "sublayer", None]


def config(dtype="float32", remat="products"):
    return replace(tiny.config(layers=LAYERS, dtype=dtype), remat=remat)


def program_of(dtype, remat, jit):
    """Return a function ``keep_mask -> (loss, gradient)``."""
    params, tokens = tiny.params(config(), dtype="float32"), tiny.tokens(3, 7)

    def loss(params, keep_mask):
        logits = config(dtype, remat).module.apply(
            {"params": params}, tokens[:, :-1], keep_mask=keep_mask
        )
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1).mean()

    return partial(jit(jax.value_and_grad(loss)), params)


# The tests of a real run below check the float32 programs.
modes = [*(pytest.param(m, marks=pytest.mark.slow) for m in MODES[:2]), MODES[2]]


@pytest.fixture(scope="module", params=modes, ids=", ".join)
def loss_and_gradient(request):
    return program_of(*request.param, jax.jit)


FIRST, *OTHERS = itertools.product(MODES, SCALINGS)


@cache
def optimized(mode):
    return program_of(*mode, tiny.optimized_jit)


optimizing = pytest.mark.parametrize(
    ("mode", "scaling"), [FIRST, *(pytest.param(*o, marks=pytest.mark.slow) for o in OTHERS)]
)


@pytest.mark.extra
@optimizing
def test_optimized_programs_match_the_dense_one_bitwise(mode, scaling):
    """Check that XLA fuses a layer in the same way inside any surrounding program."""
    every = KeepMask(
        np.ones(LAYERS, bool), None if scaling is None else np.ones_like(SCALE), scaling or "block"
    )
    chex.assert_trees_all_equal(optimized(mode)(every), optimized(mode)(None))


@optimizing
@pytest.mark.slow
def test_optimized_programs_match_bitwise_across_executions(mode, scaling):
    scale, how = None if scaling is None else SCALE, scaling or "block"
    indices = np.flatnonzero(GATES).astype(np.int32)
    chex.assert_trees_all_equal(
        *(optimized(mode)(KeepMask(layers, scale, how)) for layers in (GATES, indices))
    )


@pytest.mark.parametrize(
    "scaling", ["block", *(pytest.param(s, marks=pytest.mark.slow) for s in (None, "sublayer"))]
)
def test_equal_gates_give_equal_bits_by_both_executions(loss_and_gradient, scaling):
    scale = None if scaling is None else SCALE
    filled = np.where(GATES, 1 if scale is None else SCALE, 0).astype(np.float32)
    by = {
        "cond": loss_and_gradient(KeepMask(GATES, scale, scaling or "block")),
        "gather": loss_and_gradient(KeepMask(padded(GATES, 3), scale, scaling or "block")),
        "gather, padded": loss_and_gradient(KeepMask(padded(GATES, 4), filled, scaling or "block")),
        "gather, all layers": loss_and_gradient(
            KeepMask(padded(GATES, 5), filled, scaling or "block")
        ),
    }
    for other in by.values():
        chex.assert_trees_all_equal(by["cond"], other)
    for _, g, _ in tiny.pairs(by["cond"][1]["blocks"], by["cond"][1]["blocks"]):
        assert (g[~GATES] == 0).all()
        assert (g[GATES] != 0).any()


@pytest.mark.extra
@pytest.mark.parametrize("scaling", ["sublayer", pytest.param("block", marks=pytest.mark.slow)])
def test_the_losses_of_experts_do_not_train_layers_that_run_as_padding(scaling):
    """Experts add a load-balancing loss, whose gradient does not depend on the layer's output."""
    c = LlamaConfig(
        **dict(vocab=11, context=4, layers=2, embed=4, heads=1, kv_heads=1, head_dim=4, mlp=3),
        **dict(experts=2, active=1, balance=1.0),
    )
    params = runs.fresh(c)
    tokens, keep = jnp.arange(8).reshape(2, 4), np.array([False, True])

    @jax.jit
    def gradient(keep_mask):
        def loss(params):
            return c.module.apply({"params": params}, tokens, targets=tokens, keep_mask=keep_mask)[
                0
            ]

        return jax.grad(loss)(params)

    masks = [
        KeepMask(keep, np.array([1.0, 1.5], np.float32), scaling),
        KeepMask(padded(keep, 2), np.array([0.0, 1.5], np.float32), scaling),
    ]
    cond, gathered = jax.device_get([gradient(mask) for mask in masks])
    chex.assert_trees_all_close(gathered, cond, rtol=1e-6, atol=1e-7)
    router = gathered["blocks"]["mlp"]["router"]["kernel"]
    assert (router[0] == 0).all()
    assert (router[1] != 0).any()


def test_integers_beside_weights_have_no_gradient_in_layers_that_run_as_padding():
    """The kinds of layers are integers. They select the windows of attention, for example."""
    kinds, weights = np.array([2, 3], np.int32), np.array([2.0, 5.0], np.float32)

    def loss(weights, keep_mask):
        def apply(w, x, scale):
            return x + scale * w[0] * w[1] * x

        y, _ = run_stack(apply, (weights, kinds), jnp.ones(1), remat="none", keep_mask=keep_mask)
        return y.sum()

    padding = KeepMask(np.array([0, 1]), np.array([0.0, 1.0], np.float32), "sublayer")
    assert jax.jit(jax.grad(loss))(weights, padding).tolist() == [0, 3]


@pytest.mark.extra
@pytest.mark.parametrize("scaling", ["sublayer", pytest.param("block", marks=pytest.mark.slow)])
def test_keep_probability_one_is_the_dense_stack_to_the_bit(loss_and_gradient, scaling):
    ones = np.ones(LAYERS, np.float32)
    dense = loss_and_gradient(None)
    for layers in (ones > 0, np.arange(LAYERS, dtype=np.int32)):
        chex.assert_trees_all_equal(loss_and_gradient(KeepMask(layers, ones, scaling)), dense)


def test_dropping_all_layers_with_probability_zero_is_finite():
    params, tokens = tiny.params(config(), dtype="float32"), tiny.tokens()

    def loss(params, keep_mask):
        return config().module.apply({"params": params}, tokens, keep_mask=keep_mask).sum()

    never = KeepMask(np.zeros(LAYERS, bool), np.full(LAYERS, np.inf, np.float32))
    value, gradient = jax.device_get(jax.jit(jax.value_and_grad(loss))(params, never))
    chex.assert_tree_all_finite((value, gradient))
    assert all((g == 0).all() for g in jax.tree.leaves(gradient["blocks"]))


@pytest.mark.usefixtures("float64")
def test_both_agree_with_a_model_of_the_kept_layers_alone():
    c = tiny.config(layers=LAYERS)
    params, tokens = tiny.params(c), tiny.tokens()
    kept = np.flatnonzero(GATES)
    fewer = params | {"blocks": jax.tree.map(lambda a: a[kept], params["blocks"])}
    expected = tiny.forward(replace(c, layers=len(kept)))(fewer, tokens)
    for layers in (GATES, kept):
        found = jax.jit(lambda p, g: c.module.apply({"params": p}, tokens, keep_mask=KeepMask(g)))(
            params, layers
        )
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


# --- structure ---


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for sub in jaxprs_in_params(eqn.params):
            yield from equations(getattr(sub, "jaxpr", sub))


@pytest.fixture(scope="module")
def program():
    params, tokens = tiny.params(config(), dtype="float32"), tiny.tokens()

    def loss(params, gates):
        return config().module.apply({"params": params}, tokens, keep_mask=KeepMask(gates)).sum()

    return jax.make_jaxpr(jax.grad(loss))(params, GATES), params


def test_a_scan_has_one_conditional_per_pass_and_no_select(program):
    scans = [e for e in equations(program[0].jaxpr) if e.primitive.name == "scan"]
    assert [
        sum(e.primitive.name == "cond" for e in s.params["jaxpr"].jaxpr.eqns) for s in scans
    ] == [1, 1]
    wide = [
        e for s in scans for e in s.params["jaxpr"].jaxpr.eqns if e.primitive.name == "select_n"
    ]
    assert not [e for e in wide if e.outvars[0].aval.ndim > 1]


def test_identity_is_the_first_branch(program):
    for eqn in equations(program[0].jaxpr):
        if eqn.primitive.name == "cond":
            assert [len(list(equations(b.jaxpr))) == 0 for b in eqn.params["branches"]] == [
                True,
                False,
            ]


def test_the_forward_scan_saves_no_copy_of_the_weights(program):
    jaxpr, params = program
    forward = next(e for e in equations(jaxpr.jaxpr) if e.primitive.name == "scan")
    kernels = {x.shape for x in jax.tree.leaves(params["blocks"]) if x.ndim > 2}
    saved = {v.aval.shape for v in forward.outvars}
    assert saved
    assert not kernels & saved


def test_only_kept_layers_run():
    ran = []

    def noisy(w, x):
        jax.debug.callback(lambda i: ran.append(int(i)), w)
        return x * 1.5

    for layers in (GATES, np.flatnonzero(GATES)):
        ran.clear()
        jax.block_until_ready(
            run_stack(
                noisy,
                np.arange(float(LAYERS)),
                np.ones(3),
                remat="products",
                keep_mask=KeepMask(layers),
            )[0]
        )
        jax.effects_barrier()
        assert sorted(ran) == [0, 2, 3]


@pytest.mark.parametrize(
    "layers", [np.stack([GATES, ~GATES]), np.array([[0, 2], [1, 3]])], ids=["keep_masks", "indices"]
)
def test_vmap_over_gates_is_refused(layers):
    def run(layers):
        return run_stack(
            lambda w, x: x * w,
            np.ones(LAYERS),
            np.ones(3),
            remat="products",
            keep_mask=KeepMask(layers),
        )[0]

    with pytest.raises(ValueError, match=r"vmap over 2 keep masks would run every layer.*lax\.map"):
        jax.vmap(run)(layers)
    assert lax.map(run, layers).shape == (2, 3)


def test_vmap_over_data_keeps_the_conditional():
    def run(x):
        return run_stack(
            lambda w, x: jnp.sin(x) * w,
            np.ones(LAYERS),
            x,
            remat="products",
            keep_mask=KeepMask(GATES),
        )[0]

    assert any(
        e.primitive.name == "cond"
        for e in equations(jax.make_jaxpr(jax.vmap(run))(np.ones((2, 3))).jaxpr)
    )


def test_what_is_observed_of_layers_needs_all_of_them():
    with pytest.raises(ValueError, match="leave out keep_mask"):
        keep_mask = KeepMask(np.ones(2, bool))
        run_stack(
            lambda w, x: x,
            np.ones(2),
            np.ones(3),
            remat="products",
            observe=lambda x, y: y,
            keep_mask=keep_mask,
        )


def test_gates_drawn_on_each_device_are_the_same():
    drop = LayerDrop(time="constant")
    mesh = Mesh(np.array(jax.devices()), ("data",))

    def draw(_):
        return keep_masks(drop, 12, 100, 7, seed=3, micro=2)[1][None]

    drawn = np.asarray(
        jax.jit(jax.shard_map(draw, mesh=mesh, in_specs=P("data"), out_specs=P("data")))(
            np.arange(4)
        )
    )
    assert drawn.shape == (4, 2, 12)
    assert (drawn == drawn[:1]).all()
    np.testing.assert_array_equal(drawn[0], jax.jit(draw)(0)[0])


@pytest.mark.slow
@pytest.mark.parametrize("layers", [np.array([True, False, True]), np.array([0, 2])], ids=str)
def test_dropped_layers_inside_a_shard_map_that_checks_what_varies(layers):
    scale = np.array([1.5, 2, 1.25], np.float32)
    small = tiny.config(layers=3, dtype="float32")
    params, x = tiny.params(small, dtype="float32"), tiny.tokens(4)

    def loss(params, x, layers):
        keep_mask = KeepMask(layers, scale, "sublayer")
        y = small.module.apply({"params": params}, x, keep_mask=keep_mask)
        return jnp.square(y).mean((1, 2)).sum()

    gradient = tiny.sharded_gradient(loss, params, x, layers)
    blocks = jax.tree.map(lambda g: g[1], gradient["blocks"])
    assert all((g == 0).all() for g in jax.tree.leaves(blocks))


def test_conditional_gives_integers_and_keys_no_gradient():
    def apply(w, x):
        scale, index, key = w
        return x * scale + index * jax.random.uniform(key, x.shape)

    w = (np.array([2.0, 3.0], np.float32), np.array([1, 2]), jax.random.split(jax.random.key(0), 2))

    def loss(scale, x, gate):
        return conditional(apply)(gate, (scale, *w[1:]), x).sum()

    both = jax.jit(jax.grad(loss, (0, 1)))(w[0], np.ones(3, np.float32), np.array([False, True]))
    chex.assert_trees_all_close(
        both, (np.array([0.0, 3.0], np.float32), np.full(3, 3.0, np.float32))
    )

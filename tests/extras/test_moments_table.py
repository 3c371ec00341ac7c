"""The state of every optimizer of optax and optax.contrib grows as promised, or is refused by name.

If ``exact`` grows a state, a step after growing equals growing after the step, in float64 up to
1e-9 for means and squares of gradients and epsilons. Parameters in a state grow as the parameters
do.
"""

import inspect
import warnings
from contextlib import suppress
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from cases import cases

from jaxgrow import dual, grow, grow_optimizer, stack_layers, unstack_layers
from jaxgrow.axes import path
from jaxgrow.growth._trial import kinds
from jaxgrow.growth.maps import tile

AXES = {"w": ("a.in", "b"), "v": ("a",), "u": ("b.bias",)}
SMALL = {"w": np.array([[0.3, -0.5, 0.7], [0.2, 1.1, -1.3]]), "v": np.array([0.5, -0.7])}
SMALL["u"] = np.array([0.1, -0.2, 0.4])
GROWTH = {"a": tile(2, 2)}
# the other optimizers add no new cases
SHOWN = ("adam", "schedule_free_adamw", "sm3", "lars", "muon", "prodigy")

# For each policy, the reason why it refuses an optimizer: a leaf of the state, and why.
SHAPE, OTHERS, OWN, FAILED = "shape", "depends on", "holds neither", "a trial of the optimizer"
LATE = "did not change in the trial .* at most 64 steps.* pass one that accumulates two"
REFUSED = {  # refused by both policies
    SHAPE: "adafactor galore scale_by_distance_over_gradients scale_by_factored_rms scale_by_galore",
    OTHERS: "cocob lars prodigy scale_by_cocob scale_by_lbfgs dadapt_adamw dog dowg momo momo_adam "
    "novograd scale_by_novograd scale_by_sm3 sm3",
    FAILED: "hutchinson_estimator_diag_hessian lbfgs scale_by_muon sophia",
}
REFUSED = {name: why for why, names in REFUSED.items() for name in names.split()}
ONLY_COPIED = ("adadelta", "adopt", "optimistic_adam", "optimistic_adam_v2", "rprop")
ONLY_COPIED = (*ONLY_COPIED, "scale_by_adadelta", "scale_by_adopt", "scale_by_rprop")
GROWN = """
acprop adabelief adagrad adam adamax adamaxw adamw adan ademamix amsgrad apply_every lamb lion
madgrad muon nadam nadamw noisy_sgd optimistic_gradient_descent radam reduce_on_plateau rmsprop
scale_by_acprop scale_by_adam scale_by_adamax scale_by_adan scale_by_ademamix scale_by_amsgrad
scale_by_belief scale_by_lion scale_by_madgrad scale_by_optimistic_gradient scale_by_radam
scale_by_rms scale_by_rss scale_by_simplified_ademamix scale_by_stddev scale_by_yogi
schedule_free_adamw schedule_free_sgd signum simplified_ademamix yogi zero_nans
""".split()  # noqa: SIM905


def of_optax() -> dict[str, optax.GradientTransformation]:
    """All optimizers that need only a learning rate and have a state."""
    found = {}
    for name, make in {**vars(optax), **vars(optax.contrib)}.items():
        if not inspect.isfunction(make) and not isinstance(make, partial):
            continue
        if name.startswith("_") or name in ("inject_hyperparams", "named_chain"):
            continue
        parameters = inspect.signature(make).parameters.values()
        needed = {p.name for p in parameters if p.default is p.empty and p.kind in (1, 3)}
        if needed - {"learning_rate"}:
            continue
        with warnings.catch_warnings(), suppress(TypeError, ValueError):
            warnings.simplefilter("ignore")  # about random keys that will be needed
            tx = make(**dict.fromkeys(needed, 0.1))
            is_optimizer = isinstance(tx, optax.GradientTransformation)
            if is_optimizer and jax.tree.leaves(jax.eval_shape(tx.init, SMALL)):
                found[name] = tx
    return found


def _centred(updates, params=None):
    del params
    return jax.tree.map(lambda g: g - g.mean(0) if g.ndim > 1 else g, updates)


OPTIMIZERS = of_optax()
DECAYED = optax.chain(optax.add_decayed_weights(1e-4), optax.trace(0.9))
ADAM = optax.adam(0.1)
PARTS = {"w": "a", "v": "b", "u": "a"}
MASK = {"w": True, "v": False, "u": True}
CENTRED = optax.chain(optax.stateless(_centred), optax.trace(0.9))
BOTH = {"a": ADAM, "b": optax.sgd(0.1, 0.9)}
SLOW = optax.MultiSteps(ADAM, 65).gradient_transformation()
OTHER = {  # wrappers: (optimizer, what refuses copy, what refuses exact)
    "masked": (optax.masked(ADAM, MASK), None, None),
    "multi_transform": (optax.multi_transform(BOTH, PARTS), None, None),
    "MultiSteps": (optax.MultiSteps(ADAM, 6).gradient_transformation(), None, None),
    "more micro-batches than the trial has": (SLOW, None, LATE),
    "apply_if_finite": (optax.apply_if_finite(ADAM, 3), None, None),
    "inject_hyperparams": (optax.inject_hyperparams(optax.adam)(0.1), None, None),
    "clipped": (optax.chain(optax.clip_by_global_norm(0.01), ADAM), None, None),
    "decayed weights in the momentum": (DECAYED, OTHERS, OTHERS),
    "a mean of updates": (optax.chain(optax.scale_by_adam(), optax.ema(0.9)), None, OWN),
    "centred": (optax.chain(optax.centralize(), optax.trace(0.9)), OTHERS, OTHERS),
    "centred along the first axis": (CENTRED, OTHERS, OTHERS),
    "flatten": (optax.flatten(ADAM), OTHERS, OTHERS),
    "mechanize": (optax.contrib.mechanize(ADAM), OTHERS, OTHERS),
}
LATER = lambda step, **_: step > 2  # noqa: E731
FURTHER = {  # optimizers with a state that need more than a learning rate
    "trace": (optax.trace(0.9), None, None),
    "ema": (optax.ema(0.9), None, None),
    "sgd": (optax.sgd(0.1, 0.9, nesterov=True), None, None),
    "add_noise": (optax.add_noise(0.1, 0.5, 0), None, None),
    "scale_by_schedule": (optax.scale_by_schedule(optax.constant_schedule(0.1)), None, None),
    "scale_by_learning_rate": (optax.scale_by_learning_rate(lambda step: 0.1), None, None),
    "sign_sgd": (optax.sign_sgd(optax.constant_schedule(0.1)), None, None),
    "scale_by_zoom_linesearch": (optax.scale_by_zoom_linesearch(5), FAILED, FAILED),
    "scale_by_backtracking_linesearch": (optax.scale_by_backtracking_linesearch(5), FAILED, FAILED),
    "conditionally_mask": (optax.conditionally_mask(ADAM, LATER), None, None),
    "conditionally_transform": (optax.conditionally_transform(ADAM, LATER), None, None),
    "selective_transform": (optax.selective_transform(ADAM, freeze_mask=MASK), None, None),
    "partition": (optax.partition({"a": ADAM, "b": optax.trace(0.9)}, PARTS), None, None),
    "named_chain": (optax.named_chain(("a", ADAM), ("b", optax.trace(0.9))), None, OWN),
    "snapshot": (optax.snapshot("norm", optax.tree.norm), OTHERS, OTHERS),
    "measure_with_ema": (optax.measure_with_ema(optax.tree.norm, 0.9), FAILED, FAILED),
    "adaptive_grad_clip": (optax.chain(optax.adaptive_grad_clip(0.1), ADAM), OTHERS, OTHERS),
    "schedule_free": (optax.contrib.schedule_free(optax.adam(0.1, b1=0.0), 0.1), None, None),
    "split_real_and_imaginary": (optax.contrib.split_real_and_imaginary(ADAM), None, None),
}
CASES = (
    {
        name: (tx, REFUSED.get(name), OWN if name in ONLY_COPIED else REFUSED.get(name))
        for name, tx in OPTIMIZERS.items()
    }
    | OTHER
    | FURTHER
)
# They have no state.
WITHOUT_STATE = """
add_decayed_weights centralize clip clip_by_block_rms clip_by_global_norm freeze fromage
identity keep_params_nonnegative normalize normalize_by_update_norm polyak_sgd scale
scale_by_param_block_norm scale_by_param_block_rms scale_by_polyak scale_by_sign
scale_by_trust_ratio set_to_zero stateless stateless_with_tree_map
""".split()  # noqa: SIM905
# Other tests cover them; `inject_stateful_hyperparams` is deprecated.
ELSEWHERE = """
chain differentially_private_aggregate dpsgd inject_stateful_hyperparams lookahead sam
with_extra_args_support
""".split()  # noqa: SIM905


def test_every_optimizer_of_optax_is_in_the_table():
    assert set(OPTIMIZERS) == {*REFUSED, *ONLY_COPIED, *GROWN}


def test_every_function_that_makes_an_optimizer_is_in_a_list():
    """Optimizers are found by their return annotation, so a new one in optax fails here."""
    makers = {
        name
        for name, make in {**vars(optax), **vars(optax.contrib)}.items()
        if inspect.isfunction(make) and not name.startswith("_")
        if "GradientTransformation" in str(inspect.signature(make).return_annotation)
    }
    assert makers <= {*CASES, *WITHOUT_STATE, *ELSEWHERE}


@pytest.mark.usefixtures("promoting")
def test_what_needs_gradients_of_each_sample_grows_its_seed():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the deprecated seed, which is still required
        tx = optax.contrib.dpsgd(0.1, 1.0, 0.1, 0)
    state = tx.init(SMALL)
    chex.assert_trees_all_equal(grow_optimizer(tx, state, GROWTH, SMALL, AXES, "exact"), state)


def test_the_parameters_that_sam_returns_to_grow_with_them():
    tx = optax.contrib.sam(optax.adam(0.1), optax.chain(optax.contrib.normalize(), optax.sgd(0.05)))
    grown = grow_optimizer(tx, tx.init(SMALL), GROWTH, SMALL, AXES, "exact")
    chex.assert_trees_all_equal(grown.cache, grow(GROWTH, SMALL, AXES))


def stepped(tx, state, params, seed, growth=None, size=1.0):
    """The state after a step with random gradients of the small model, perhaps grown."""
    rng = np.random.default_rng(seed)
    gradients = jax.tree.map(lambda x: size * rng.normal(size=x.shape), SMALL)
    if growth is not None:
        gradients, params = grow(dual(growth), gradients, AXES), grow(growth, params, AXES)
    update = partial(optax.with_extra_args_support(tx).update, value=jnp.float32(1))
    return jax.device_get(jax.jit(update)(gradients, state, params)[1])


@pytest.fixture
def promoting():
    """Allow rank promotion, which some third-party optimizers use."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.usefixtures("x64", "promoting")
@pytest.mark.parametrize("name", cases(CASES.keys(), (), (*SHOWN, *OTHER)))
def test_states_grow_as_promised_or_are_refused_by_name(name):
    tx, *refused = CASES[name]
    state, size = jax.jit(tx.init)(SMALL), 1e-3 if name == "clipped" else 1.0
    if FAILED not in refused:
        for seed in (0, 1):
            state = stepped(tx, state, SMALL, seed, size=size)
    for policy, why in zip(("copy", "exact"), refused, strict=True):
        if why:
            with pytest.raises(ValueError, match=why) as error:
                grow_optimizer(tx, state, GROWTH, SMALL, AXES, policy)
            assert "optimizer state" in str(error.value) and "'drop'" in str(error.value)
            continue
        grown = grow_optimizer(tx, state, GROWTH, SMALL, AXES, policy)
        expected = jax.eval_shape(tx.init, grow(GROWTH, SMALL, AXES))
        assert jax.tree.map(jnp.shape, grown) == jax.tree.map(jnp.shape, expected)
        holds = kinds(tx, SMALL, AXES)
        same_as_parameters(state, grown, holds)
        if policy == "exact":
            after = stepped(tx, state, SMALL, 2, size=size)
            after = by_path(grow_optimizer(tx, after, GROWTH, SMALL, AXES, "exact"))
            for leaf, found in by_path(stepped(tx, grown, SMALL, 2, GROWTH, size)).items():
                if holds[leaf] != "parameters":
                    np.testing.assert_allclose(
                        found, after[leaf], rtol=1e-6, atol=1e-9, err_msg=leaf
                    )


def by_path(tree):
    def numbers(x):
        return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    return {path(p): numbers(x) for p, x in jax.tree_util.tree_leaves_with_path(tree)}


def same_as_parameters(state, grown, holds):
    before, after = by_path(state), by_path(grown)
    for leaf in (leaf for leaf, kind in holds.items() if kind == "parameters"):
        own = leaf.rsplit("/", 1)[-1]
        expected = grow(GROWTH, SMALL | {own: before[leaf]}, AXES)[own]
        np.testing.assert_array_equal(after[leaf], expected, err_msg=leaf)


def test_parameter_copies_in_a_state_are_found_under_any_name():
    found = kinds(optax.contrib.schedule_free_adamw(0.1), SMALL, AXES)
    assert {leaf for leaf, kind in found.items() if kind == "parameters"} == {"z/w", "z/v", "z/u"}
    assert found["base_optimizer_state/0/nu/w"] == 2 and found["weight_sum"] == "unchanged"


def test_a_trial_waits_for_late_leaves_beside_constant_ones():
    def init(params):
        constant, sums = jax.tree.map(jnp.ones_like, params), jax.tree.map(jnp.zeros_like, params)
        return {"constant": constant, "sums": sums, "late": sums, "step": jnp.int32(0)}

    def update(gradients, state, params=None):
        del params
        sums = jax.tree.map(jnp.add, state["sums"], gradients)
        now = (state["step"] + 1) % 9 == 0
        late = jax.tree.map(lambda new, old: jnp.where(now, new, old), sums, state["late"])
        return gradients, state | {"sums": sums, "late": late, "step": state["step"] + 1}

    found = kinds(optax.GradientTransformation(init, update), SMALL, AXES)
    by_kind = {leaf: kind for leaf, kind in found.items() if leaf.endswith("/w")}
    assert by_kind == {"constant/w": "unchanged", "sums/w": 1, "late/w": 1}


def test_lookahead_is_refused_by_name():
    """Its parameters are pairs, and only the fast ones have gradients."""
    tx, pair = optax.lookahead(optax.adam(0.1), 2, 0.5), optax.LookaheadParams(SMALL, SMALL)
    with pytest.raises(ValueError, match=r"a trial of the optimizer(.|\n)*LookaheadParams"):
        grow_optimizer(tx, tx.init(pair), GROWTH, pair, optax.LookaheadParams(AXES, AXES), "copy")


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("policy", ["drop", "exact"])
def test_muon_of_a_list_of_layers_grows(policy):
    """Muon would treat a stacked kernel, which has three axes, as a parameter for Adam."""
    rng = np.random.default_rng(0)
    layers = [{"w": rng.normal(size=(2, 3)), "v": rng.normal(size=2)} for _ in range(3)]
    params, tx = {"layers": layers}, optax.contrib.muon(0.1)
    axes = {"layers": [{"w": ("layers", "a.in", "b"), "v": ("layers", "a")}]}
    state = jax.device_get(jax.jit(tx.update)(params, tx.init(params), params)[1])
    stacked, of_state = (stack_layers(tree, "layers/{}") for tree in (params, state))
    grown = grow_optimizer(tx, of_state, GROWTH, stacked, axes, policy, "layers/{}")
    back = unstack_layers(grown, "layers/{}")
    large = unstack_layers(grow(GROWTH, stacked, axes), "layers/{}")
    assert jax.tree.structure(back) == jax.tree.structure(tx.init(large))
    if policy == "exact":
        mu, before = (
            s.inner_states["muon"].inner_state[0].mu["layers"][1]["w"] for s in (back, state)
        )
        np.testing.assert_allclose(mu, np.concatenate([before, before]), atol=1e-12)
        with pytest.raises(
            ValueError, match=r"the optimizer has no such leaf .* pattern as layers"
        ):
            grow_optimizer(tx, of_state, GROWTH, stacked, axes, policy)


@pytest.mark.parametrize("policy", ["copy", "exact"])
@pytest.mark.parametrize("name", ["decay", "masked", "labels"])
def test_masks_and_labels_may_be_trees_with_all_layers(name, policy):
    """The trial has as many layers as the model, so a tree with an entry for each layer fits."""
    layers = {f"layers_{i}": {"w": np.full((2, 3), 1.0 + i), "v": np.ones(2)} for i in range(4)}
    axes = {layer: {"w": ("a.in", "b"), "v": ("a.bias",)} for layer in layers}
    axes = stack_layers(axes, "layers_{}")
    mask = jax.tree.map(lambda x: x.ndim > 1, layers)
    labels = jax.tree.map(lambda matrix: "a" if matrix else "b", mask)
    tx = {
        "decay": optax.adamw(0.1, mask=mask),
        "masked": optax.masked(ADAM, mask),
        "labels": optax.multi_transform(BOTH, labels),
    }[name]
    params, state = (stack_layers(tree, "layers_{}") for tree in (layers, tx.init(layers)))
    grown = grow_optimizer(tx, state, GROWTH, params, axes, policy, "layers_{}")
    large = unstack_layers(grow(GROWTH, params, axes), "layers_{}")
    expected = jax.eval_shape(tx.init, large)
    back = unstack_layers(grown, "layers_{}")
    assert jax.tree.map(jnp.shape, back) == jax.tree.map(jnp.shape, expected)


def test_a_prng_key_among_the_parameters_is_named():
    params = {"seed": jax.random.key(0), "v": np.ones(2)}
    tx = optax.masked(optax.adam(0.1), {"seed": False, "v": True})
    with pytest.raises(ValueError, match=r"seed: has dtype key<fry>, .* or use policy 'drop'"):
        axes = {"seed": (), "v": ("a",)}
        grow_optimizer(tx, tx.init(params), GROWTH, params, axes, "exact")

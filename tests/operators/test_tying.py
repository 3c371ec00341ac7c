"""Heads that get their own weights, or lose them: untie preserves the function, tie averages."""

from dataclasses import replace
from functools import cache, partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from jaxgrow import grow
from jaxgrow.models import BERTConfig, LlamaConfig
from jaxgrow.operators import hypercloning, tie, tie_head, untie, untie_head
from train.plan.transforms import Grow
from train.state.model import TrainState
from train.state.optim import Optim, transformation

GPT2 = tiny.config(dtype="float32")
SIZES = {"vocab": 11, "context": 7, "layers": 2, "embed": 8, "heads": 2, "head_dim": 4, "mlp": 12}
CONFIGS = {
    "gpt2": GPT2,
    "llama": LlamaConfig(**SIZES, kv_heads=1, tied=True, embed_scale=2.0, logit_cap=5.0),
    "bert": BERTConfig(**SIZES),
}
TOKENS = tiny.tokens()
EMBEDDING, HEAD = "token_embedding", "head_kernel"

either = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def apply(config, params):
    inputs = TOKENS if config.causal else {"tokens": TOKENS}
    return config.module.apply({"params": params}, inputs)


@cache
def forward(config):
    return jax.jit(partial(apply, config))


def run(config, params):
    return forward(config)(params)


@cache
def gradient_of(config):
    return jax.jit(jax.grad(lambda p: -jax.nn.log_softmax(run(config, p))[..., 3].mean()))


def gradient(config, params):
    return jax.device_get(gradient_of(config)(params))


@either
def test_untie_copies_the_embedding_and_keeps_the_function_bitwise(config):
    params = tiny.params(config, dtype="float32")
    apart = untie_head(params)
    own = replace(config, tied=False)
    columns = [params[EMBEDDING][i] for i in range(11)]
    np.testing.assert_array_equal(apart[HEAD], np.stack(columns, 1))
    chex.assert_trees_all_equal_shapes(apart, tiny.shapes(own))
    assert untie(config.sizes(), {}) == tie(config.sizes(), {}) == {}
    # A compiler may sum the products with a transposed matrix in another order.
    np.testing.assert_array_equal(apply(own, apart), apply(config, params))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_factor_of_a_growth_with_a_tied_head_is_kept(name):
    """The final norm has the factor 1/k of a head that reads k copies. Later growths divide the head."""
    config = CONFIGS[name]
    params = tiny.params(config, dtype="float32")
    twice = {axis: 2 * n for axis, n in config.sizes().items() if axis in ("embed", "heads", "mlp")}
    growth = hypercloning(config.sizes(), twice | ({"kv_heads": 2} if name == "llama" else {}))
    wide, large = config.resized(growth), grow(growth, params, config.axes())
    own, apart = replace(wide, tied=False), untie_head(large)
    factor, old = apart["final_norm"]["scale"], params["final_norm"]["scale"]
    np.testing.assert_allclose(factor[: config.embed], old / 2, rtol=1e-6)
    np.testing.assert_array_equal(apply(own, apart), apply(wide, large))
    again = hypercloning(own.sizes(), {"embed": 2 * own.embed, "mlp": 2 * own.mlp})
    wider = grow(again, apart, own.axes())
    np.testing.assert_allclose(run(own.resized(again), wider), run(config, params), atol=1e-4)
    first = grow(growth, untie_head(params), replace(config, tied=False).axes())
    np.testing.assert_allclose(run(own, first), run(config, params), atol=1e-4)


@either
def test_the_gradient_of_a_tied_head_is_the_sum_of_both_parts(config):
    params = tiny.params(config, dtype="float32")
    both = gradient(replace(config, tied=False), untie_head(params))
    expected = {name: g for name, g in both.items() if name != HEAD}
    expected[EMBEDDING] = both[EMBEDDING] + both[HEAD].T
    chex.assert_trees_all_close(gradient(config, params), expected, rtol=1e-4, atol=1e-6)


OPTIMIZERS = {
    "adam": optax.adam(1e-3),
    "muon": transformation(Optim("muon"), GPT2.axes()),
    "adamw of the trainer": transformation(Optim("adamw")),
}


@pytest.mark.parametrize("tx", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_optimizer_state_is_copied_and_averaged(tx):
    params = tiny.params(GPT2, dtype="float32")
    options = {} if tx is OPTIMIZERS["adam"] else {"axes": GPT2.axes()}
    update = jax.jit(partial(tx.update, **options))
    state = jax.device_get(update(gradient(GPT2, params), tx.init(params), params)[1])
    apart = untie_head(state)
    chex.assert_trees_all_equal_shapes_and_dtypes(apart, tx.init(untie_head(params)))

    def leaves(tree):
        found = jax.tree_util.tree_leaves_with_path(tree)
        return {jax.tree_util.keystr(path): np.asarray(x) for path, x in found}

    old, new = leaves(state), leaves(apart)
    for path, x in new.items():
        same = old[path.replace(HEAD, EMBEDDING)]
        np.testing.assert_array_equal(x, same.T if HEAD in path else same)
    assert any(HEAD in path and x.any() for path, x in new.items())
    chex.assert_trees_all_equal(tie_head(apart), state)


def test_tie_averages_embedding_and_head():
    params = tiny.params(replace(GPT2, tied=False), dtype="float32")
    found = tie_head(params)
    np.testing.assert_array_equal(found[EMBEDDING], (params[EMBEDDING] + params[HEAD].T) / 2)
    chex.assert_trees_all_equal_shapes(found, tiny.shapes(GPT2))
    assert np.abs(run(GPT2, found) - run(replace(GPT2, tied=False), params)).max() > 1e-2


def test_a_plan_unties_with_other_growths_and_the_optimizer_state():
    tx = OPTIMIZERS["adam"]
    params = tiny.params(GPT2, dtype="float32")
    state = jax.device_get(jax.jit(tx.update)(params, tx.init(params), params)[1])
    model = TrainState(params, state, GPT2)
    own = replace(GPT2, tied=False)
    phase = Grow("small", "large", GPT2, own, ("untie",), moments="exact")
    found = phase.apply({"small": model}, tx)
    chex.assert_trees_all_equal(found, TrainState(untie_head(params), untie_head(state), own))
    back = Grow("small", "large", own, GPT2, ("tie",), moments="copy").apply({"small": found}, tx)
    chex.assert_trees_all_equal(back, model)
    wide = replace(own, mlp=18)
    for by in (("untie", "hypercloning"), ("hypercloning", "untie")):
        phase = Grow("small", "large", GPT2, wide, by, noise=20.0, moments="exact")
        grown = phase.apply({"small": model}, tx)
        np.testing.assert_allclose(run(wide, grown.params), run(GPT2, params), atol=1e-4)
        chex.assert_trees_all_equal_shapes(grown.opt, tx.init(grown.params))


def test_messages():
    with pytest.raises(ValueError, match="untie changes no size, but the target has embed"):
        untie(GPT2.sizes(), {"embed": 12})
    own = replace(GPT2, tied=False)
    for small, large, by in ((GPT2, own, ()), (own, GPT2, ("untie",)), (GPT2, own, ("tie",))):
        with pytest.raises(ValueError, match="use the operator untie for False, and tie for True"):
            _ = Grow("small", "large", small, large, by).growths
    assert jnp.asarray(1).T.shape == ()  # step counts without axes are transposed too

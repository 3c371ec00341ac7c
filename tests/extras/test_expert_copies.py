"""Copies of trained experts: by an oracle, the cases in which they preserve the function, and their load."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxgrow import grow
from jaxgrow.extras import importance
from jaxgrow.extras.models.upcycling import add_router_noise
from jaxgrow.models import LlamaConfig
from jaxgrow.operators import OPERATORS, expert_copies
from train.plan.transforms import Grow
from train.state.model import TrainState

MOE = LlamaConfig(
    **{"vocab": 11, "context": 32, "layers": 2, "embed": 8, "heads": 2, "kv_heads": 1},
    **{"head_dim": 4, "mlp": 6, "experts": 3, "active": 2},
)
ONE = replace(MOE, active=1)
TOKENS = tiny.tokens(4, 32)
UTILITY = np.array([[0.5, 0.1, 0.3], [0.0, 1.0, 0.0]])
# Each further copy goes to the expert with the most utility per copy.
SOURCES = ([0, 1, 2, 0, 0, 2], [0, 1, 2, 1, 1, 1])


def run(config, params):
    return jax.jit(lambda p: config.module.apply({"params": p}, TOKENS))(params)


def routed(params, sources):
    """Return the oracle: the experts and router columns of each layer, one after the other."""
    mlp = params["blocks"]["mlp"]

    def copies(name, axis):
        layers = zip(mlp[name]["kernel"], sources, strict=True)
        return {"kernel": np.stack([np.take(w, own, axis) for w, own in layers])}

    new = {name: copies(name, 0) for name in ("gate", "up", "down")} | {
        "router": copies("router", 1)
    }
    return {**params, "blocks": {**params["blocks"], "mlp": new}}


@pytest.mark.parametrize(("utility", "sources"), [(None, ([0, 1, 2] * 2,) * 2), (UTILITY, SOURCES)])
def test_experts_and_router_columns_are_copied(utility, sources):
    params = tiny.params(MOE, dtype="float32")
    growth = expert_copies(MOE.sizes(), {"experts": 6}, utility)
    chex.assert_trees_all_equal(grow(growth, params, MOE.axes()), routed(params, sources))
    large = MOE.resized(growth)
    assert (large.experts, large.active, large.layers) == (6, 2, 2)


@pytest.mark.parametrize("utility", [None, UTILITY], ids=["evenly", "by utility"])
def test_the_function_is_preserved_if_each_token_uses_one_expert(utility):
    preserves = OPERATORS["expert_copies"].preserves_for
    for config, kept in ((ONE, True), (MOE, False), (replace(ONE, gates_normed=False), False)):
        params = tiny.params(config, dtype="float32")
        growth = expert_copies(config.sizes(), {"experts": 6}, utility)
        large = config.resized(growth)
        change = np.abs(run(large, grow(growth, params, config.axes())) - run(config, params)).max()
        assert preserves(growth, config) == kept
        assert change < 1e-5 if kept else change > 1e-3


def test_even_copies_share_the_probability_of_their_expert():
    """This is what logits lowered by log m would give."""
    params = tiny.params(ONE, dtype="float32")
    growth = expert_copies(ONE.sizes(), {"experts": 6})
    x = np.random.default_rng(0).normal(size=(5, 8))

    def probabilities(p):
        logits = x @ p["blocks"]["mlp"]["router"]["kernel"][0]
        return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)

    before, after = probabilities(params), probabilities(grow(growth, params, ONE.axes()))
    np.testing.assert_allclose(after, np.tile(before / 2, 2), rtol=1e-5)


def load(config, params):
    """Return the share of the tokens that each expert gets, [layers, experts]."""
    found = importance.unit_importance(config, params, TOKENS, experts="frequency")
    return np.asarray(found["experts"])


def test_a_misspelled_measure_of_experts_is_refused():
    with pytest.raises(ValueError, match="experts must be 'reap' or 'frequency', not 'count'"):
        importance.unit_importance(ONE, {}, TOKENS, experts="count")


def test_noise_in_the_router_divides_the_tokens_among_the_copies():
    """Without noise, the first copy gets all tokens. With noise, both copies get a share."""
    config = replace(ONE, layers=1)
    params = tiny.params(config, dtype="float32")
    growth = expert_copies(config.sizes(), {"experts": 6})
    large, copies = config.resized(growth), grow(growth, params, config.axes())
    before, after = load(config, params)[0], load(large, copies)[0]
    np.testing.assert_array_equal(after, [*before, 0, 0, 0])
    noisy = add_router_noise(copies, large.axes(), seed=1)
    first, second = load(large, noisy)[0].reshape(2, 3)
    np.testing.assert_allclose(first + second, before, rtol=0, atol=0.05)
    assert (np.minimum(first, second)[before > 0.1] > 0.1 * before[before > 0.1]).all()
    changed = np.abs(run(large, noisy) - run(config, params)).max(-1) > 1e-4
    assert changed.mean() < 0.1


def test_the_utility_is_the_change_of_the_loss_per_scale_of_the_output():
    params = tiny.params(MOE, dtype="float32")
    found = importance.expert_utility(MOE, params, jnp.asarray(TOKENS))
    assert found.shape == (2, 3)
    loss = jax.jit(
        lambda p, row: MOE.module.apply({"params": p}, row[:-1][None], targets=row[1:][None])[0]
    )
    # A change in the last layer does not change the choices of routers.
    for layer, expert in ((1, 0), (1, 2)):
        scaled = [jax.tree.map(np.copy, params) for _ in range(2)]
        for new, scale in zip(scaled, (0.99, 1.01), strict=True):
            new["blocks"]["mlp"]["down"]["kernel"][layer, expert] *= scale
        slopes = [abs(loss(scaled[1], row) - loss(scaled[0], row)) / 0.02 for row in TOKENS]
        np.testing.assert_allclose(found[layer, expert], np.mean(slopes), rtol=2e-2, atol=1e-4)


def test_a_plan_copies_experts_with_noise():
    params = tiny.params(MOE, dtype="float32")
    large = replace(MOE, experts=6)
    phase = Grow("small", "large", MOE, large, ("expert_copies",), seed=3)
    found = phase.apply({"small": TrainState(params, None, MOE)}, None)
    growth = expert_copies(MOE.sizes(), {"experts": 6})
    expected = add_router_noise(grow(growth, params, MOE.axes()), large.axes(), 3)
    chex.assert_trees_all_equal(found, TrainState(expected, None, large))


def test_messages():
    for utility in (UTILITY[:1], -UTILITY, np.full((2, 3), np.nan)):
        with pytest.raises(ValueError, match="needs a utility of at least 0 for each of 2 layers"):
            expert_copies(MOE.sizes(), {"experts": 6}, utility)
    with pytest.raises(ValueError, match="expert_copies cannot reduce the size from 3 to 2"):
        expert_copies(MOE.sizes(), {"experts": 2})

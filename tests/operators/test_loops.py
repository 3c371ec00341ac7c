"""Loops: layers that run several times compute what a model with a copy for each pass computes."""

from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from cases import cases

from jaxgrow import grow, grow_optimizer
from jaxgrow.extras.freeze import Freeze
from jaxgrow.extras.models.cache import Past
from jaxgrow.extras.preservation import output_rms
from jaxgrow.flops import counted, forward_flops, train_flops
from jaxgrow.growth.maps import swap
from jaxgrow.layerdrop import KeepMask, LayerDrop
from jaxgrow.models import GPT2Config, LlamaConfig, Loop
from jaxgrow.models.stack import KeptTokens
from jaxgrow.operators import hypercloning, interleave, loop, unloop
from train.extras.modifiers import FreezeParts
from train.plan.modifiers import DropLayers
from train.plan.training import Train
from train.state.optim import Optim

PASSES = (0, 1, 2, 1, 2, 1, 2, 3)
LOOP = Loop(1, 3, 3)
GPT2 = tiny.config(layers=4, dtype="float32")
# Layers of three kinds, so that a pass must have the kind of its layer.
LLAMA = LlamaConfig(
    **{"vocab": 11, "context": 7, "layers": 4, "embed": 12, "heads": 4, "kv_heads": 2},
    **{"head_dim": 4, "mlp": 9, "kinds": "fsn", "window": 2, "local_theta": 100.0},
)
CONFIGS = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "experts": replace(LLAMA, experts=3, kinds="f"),
    "unrolled": replace(GPT2, scan_layers=False),
}
TOKENS = tiny.tokens()


@pytest.fixture(scope="module", params=cases(CONFIGS, core=("llama",)))
def case(request):
    """Return ``(looped config, parameters, growth, unlooped config, parameters)``."""
    config = replace(request.param, loop=LOOP)
    params = tiny.params(config, dtype="float32")
    growth = unloop(config.sizes(), {}, config.traits["passes"])
    return config, params, growth, config.resized(growth), grow(growth, params, config.axes())


def apply(config, params, *inputs, **options):
    return jax.jit(lambda p: config.module.apply({"params": p}, *inputs, **options))(params)


def loss(config, params):
    log_p = jax.nn.log_softmax(apply(config, params, TOKENS[:, :-1]))
    return -jnp.take_along_axis(log_p, TOKENS[:, 1:, None], -1).mean()


def test_the_passes_are_the_layers_in_the_order_in_which_they_run():
    assert replace(GPT2, loop=LOOP).traits["passes"] == PASSES
    assert replace(LLAMA, loop=LOOP).depth == replace(GPT2, loop=LOOP).depth == len(PASSES)
    assert GPT2.traits["passes"] == () and GPT2.depth == 4
    config = replace(LLAMA, loop=LOOP)
    assert config.sizes()["layers"] == 4 and config.axes() == LLAMA.axes()


def test_unloop_copies_the_layer_of_each_pass(case):
    """The oracle takes one row after the other from each stack."""
    config, params, growth, larger, grown = case
    assert larger.layers == len(PASSES) and larger.loop is None
    expected = {
        **params,
        "blocks": jax.tree.map(lambda w: np.stack([w[i] for i in PASSES]), params["blocks"]),
    }
    chex.assert_trees_all_equal(grown, expected)
    # The mean of three copies rounds.
    back = grow(swap(growth), grown, config.axes())
    chex.assert_trees_all_close(back, params, rtol=0, atol=3e-7)


def test_unloop_preserves_the_function_bitwise(case):
    config, params, _, larger, grown = case
    outputs = apply(config, params, TOKENS, observe=output_rms)
    chex.assert_trees_all_equal(outputs, apply(larger, grown, TOKENS, observe=output_rms))
    assert len(jax.tree.leaves(outputs[1])[0]) == len(PASSES)
    once = apply(replace(config, loop=None), params, TOKENS)
    assert np.abs(once - outputs[0]).max() > 1e-2


def test_the_gradient_of_a_layer_is_the_sum_over_its_passes(case):
    config, params, _, larger, grown = case
    shared, of_copies = (
        jax.device_get(jax.jit(jax.grad(partial(loss, c)))(p))
        for c, p in ((config, params), (larger, grown))
    )
    expected = dict(of_copies)
    expected["blocks"] = jax.tree.map(
        lambda g: np.stack(
            [sum(g[p] for p, i in enumerate(PASSES) if i == layer) for layer in range(4)]
        ),
        of_copies["blocks"],
    )
    chex.assert_trees_all_close(shared, expected, rtol=1e-4, atol=1e-6)


def test_layer_and_token_dropping_count_passes(case):
    config, params, _, larger, grown = case
    ran = np.array([1, 0, 1, 1, 0, 0, 1, 1], bool)
    some = KeptTokens(jnp.array([[0, 2], [1, 4]]), 2, 7)
    for options in (
        {"keep_mask": KeepMask(ran, np.linspace(1, 2, 8, dtype=np.float32))},
        {"keep_mask": KeepMask(np.flatnonzero(ran))},
        {"kept_tokens": some},
    ):
        chex.assert_trees_all_close(
            apply(config, params, TOKENS, **options),
            apply(larger, grown, TOKENS, **options),
            atol=1e-6,
        )


def test_the_cache_has_an_entry_for_each_pass(case):
    config, params, *_ = case
    whole = apply(config, params, TOKENS)
    _, past = apply(config, params, TOKENS[:, :3], past=Past())
    assert len(past.keys) == len(PASSES)
    past = past.with_room(5)
    for at in (3, 4):
        logits, new = apply(config, params, TOKENS[:, at : at + 1], past=past)
        past = past.and_then(new)
    np.testing.assert_allclose(logits, whole[:, -1], atol=1e-5)


def test_flops_count_every_pass(case):
    config, params, _, larger, _ = case
    if config.scan_layers and not getattr(config, "experts", 0):
        program = jax.make_jaxpr(lambda p: apply(config, p, TOKENS))(params)
        assert counted(program.jaxpr).products == forward_flops(
            config, TOKENS.size, TOKENS.shape[1]
        )
    assert train_flops(config, 100) == train_flops(larger, 100)
    assert train_flops(config, 100) > 1.5 * train_flops(replace(config, loop=None), 100)


@pytest.mark.parametrize("policy", ["copy", "exact"])
def test_loop_keeps_the_optimizer_state_and_unloop_gives_each_pass_its_own(case, policy):
    config, params, growth, _, grown = case
    axes, tx = config.axes(), optax.adam(1e-3)
    state = jax.device_get(jax.jit(tx.update)(params, tx.init(params), params)[1])
    same = grow_optimizer(tx, state, loop(config.sizes(), {}), params, axes, "copy")
    chex.assert_trees_all_equal(same, state)
    large = grow_optimizer(tx, state, growth, params, axes, policy)
    chex.assert_trees_all_equal_shapes(large, tx.init(grown))
    # "exact" divides the gradient of a layer equally among its passes.
    share = [1 if policy == "copy" else PASSES.count(i) for i in PASSES]
    for power, name in ((1, "mu"), (2, "nu")):
        mine, old = (getattr(s[0], name)["blocks"] for s in (large, state))
        expected = jax.tree.map(
            lambda m, k=power: np.stack([m[i] / n**k for i, n in zip(PASSES, share, strict=True)]),
            old,
        )
        chex.assert_trees_all_close(mine, expected, rtol=1e-5)


def test_a_looped_model_grows_in_width_and_keeps_its_loop():
    config = replace(GPT2, loop=LOOP)
    params = tiny.params(config, dtype="float32")
    growth = hypercloning(config.sizes(), {"embed": 12, "heads": 6, "mlp": 18})
    wide = config.resized(growth)
    assert wide.loop == LOOP and wide.embed == 12
    np.testing.assert_allclose(
        apply(wide, grow(growth, params, config.axes()), TOKENS),
        apply(config, params, TOKENS),
        atol=1e-4,
    )


# --- what must fail ---


def test_other_growths_of_the_layers_of_a_loop_are_refused():
    config = replace(GPT2, loop=LOOP)
    for layers in (len(PASSES), 6):
        with pytest.raises(ValueError, match="with the operator unloop"):
            config.resized(interleave(config.sizes(), {"layers": layers}))


def test_messages():
    with pytest.raises(ValueError, match="this GPT2Config has 4 layers, but loop is Loop"):
        replace(GPT2, loop=Loop(1, 5))
    with pytest.raises(ValueError, match="at least one layer at least twice"):
        Loop(1, 1)
    with pytest.raises(ValueError, match="unloop needs a model with a loop"):
        unloop(GPT2.sizes(), {"layers": 8})
    with pytest.raises(ValueError, match="each of the 8 passes of a loop, but the target is 9"):
        unloop(GPT2.sizes(), {"layers": 9}, PASSES)
    with pytest.raises(ValueError, match="loop adds no weights, but the target has layers"):
        loop(GPT2.sizes(), {"layers": 8})
    config = replace(GPT2, loop=LOOP)
    with pytest.raises(
        ValueError, match="the 2 frozen layers at the bottom include layers of Loop"
    ):
        apply(config, tiny.params(config, dtype="float32"), TOKENS, frozen=2)


def test_modifiers_that_hold_layers_are_refused():
    phase = Train("large", 4, Optim(), replace(GPT2, loop=LOOP))
    for modifier, says in (
        (FreezeParts(Freeze()), "freeze is not supported for a model with Loop"),
        (DropLayers(LayerDrop(dropped="freeze")), "set dropped to 'momentum'"),
    ):
        with pytest.raises(ValueError, match=says):
            modifier.check(phase)
    DropLayers(LayerDrop()).check(phase)


def test_only_the_decoders_of_the_core_have_loops():
    from jaxgrow.extras.models.modernbert import ModernBERTConfig
    from jaxgrow.models import BERTConfig, ViTConfig

    for family in (BERTConfig, ViTConfig, ModernBERTConfig):
        with pytest.raises(ValueError, match=f"this {family.__name__} runs each layer only once"):
            family(layers=4, loop=Loop(1, 3))
    assert GPT2Config(loop=Loop(1, 3)).depth == 14

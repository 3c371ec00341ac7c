"""The form of a Llama-like decoder decides which growths preserve it, including mixed layer kinds.

Exact means 1e-10 of the standard deviation of the logits, in float64. A change must be visible:
above 1e-2.
"""

import json
from dataclasses import replace

import chex
import jax
import numpy as np
import optax
import pytest
import tiny

from jaxgrow import grow
from jaxgrow.checkpoints import FAMILIES
from jaxgrow.growth.maps import swap
from jaxgrow.layerdrop import KeepMask
from jaxgrow.models import LlamaConfig, from_json
from jaxgrow.models.llama import repeated_kinds, rotary_angles
from jaxgrow.models.stack import KeptTokens
from jaxgrow.operators import coalesce, hypercloning, lemon, llama_pro, stack

pytestmark = pytest.mark.usefixtures("x64")

EXACT, VISIBLE = 1e-10, 1e-2
OLD = {"layers": 2, "heads": 4, "kv_heads": 2, "embed": 6, "mlp": 9}
KIN = {
    "Qwen3": dict(query_norm="head"),
    "Gemma 2": dict(
        **dict(norms="both", tied=True, activation="gelu_tanh", kinds="sf", window=3),
        **dict(embed_scale=2.5, score_dim=9.0, score_cap=2.0, logit_cap=3.0),
    ),
    "OLMo 2": dict(norms="after", query_norm="all"),
    "Granite": dict(embed_scale=2.5, score_dim=9.0, residual_scale=0.6, logit_divisor=3.0),
}


def config(name: str, **other) -> LlamaConfig:
    own = {"vocab": 11, "context": 7, "head_dim": 4, "dtype": "float64"}
    return LlamaConfig(**own | OLD | KIN[name] | other)


def test_lemon_needs_scales_of_norms_for_an_uneven_width():
    c = replace(config("Granite"), layer_norm=True, norm_scale=False)
    of = {"norm": c.traits["norm"]}
    assert set(lemon(c.sizes(), {"mlp": c.mlp + 1, "embed": 2 * c.embed}, **of)) == {"mlp", "embed"}
    message = f"the norms of this model have no scale: choose a multiple of {c.embed}"
    with pytest.raises(ValueError, match=message):
        lemon(c.sizes(), {"embed": c.embed + 2}, **of)


def test_a_block_that_adds_nothing_learns_slowly_behind_a_norm():
    """With zero kernels, the post-norm would amplify their first small values to unit size."""
    small = config("OLMo 2", dtype="float32")
    params, tx = tiny.params(small, dtype="float32"), optax.adam(1e-3)
    moved = []
    for post_norm in (True, False):
        growth = llama_pro(OLD, {"layers": 3}, post_norm=post_norm)
        large, forward = small.resized(growth), tiny.forward(small.resized(growth))
        grown = grow(growth, params, tiny.axes(small))
        gradient = tiny.gradient(large)(grown, tiny.tokens())["blocks"]
        updates, _ = jax.jit(lambda g: tx.update(g, tx.init(g)))(gradient)
        # Only the new layer is updated.
        blocks = jax.tree.map(
            lambda p, u: np.concatenate([p[:2], p[2:] + u[2:]]),
            grown["blocks"],
            jax.device_get(updates),
        )
        before = forward(grown, tiny.tokens())
        after = forward({**grown, "blocks": blocks}, tiny.tokens())
        moved.append(float(np.abs(after - before).max() / np.std(before)))
    assert 0 < moved[0] < 0.05 < 0.5 < moved[1]


def test_long_positions_are_those_of_the_length_of_a_sequence():
    """``rope_long`` applies at every position; scores grow by the square of ``rope_scale``."""
    own = dict(rope_by="longrope", rope_short=(1.0, 2.0), rope_long=(3.0, 5.0))
    c = config("Qwen3", query_norm="none", rope_context=5, rope_scale=1.5, **own)
    assert from_json(json.loads(json.dumps(c.as_json()))) == c
    plain = 10000.0 ** -(np.arange(0, 4, 2) / 4)
    for length, factors in ((5, (1.0, 2.0)), (6, (3.0, 5.0))):
        cos, sin = rotary_angles(c, length)
        expected = 1.5 * np.sin(np.arange(length)[:, None] * plain / factors)
        np.testing.assert_allclose(sin, expected, rtol=0, atol=1e-15)
        np.testing.assert_allclose(cos**2 + sin**2, 1.5**2, rtol=0, atol=1e-15)
    params, tokens = tiny.params(c), tiny.tokens(2, 6)
    short, whole = tiny.forward(c)(params, tokens[:, :5]), tiny.forward(c)(params, tokens)
    assert np.abs(whole[:, :5] - short).max() > VISIBLE
    longer = tiny.forward(replace(c, rope_context=6))(params, tokens)
    np.testing.assert_allclose(longer[:, :5], short, rtol=0, atol=EXACT)
    message = r"rope_long must have a number above 0 for each of the 2 pairs .* but is \(3.0,\)"
    with pytest.raises(ValueError, match=message):
        replace(c, rope_long=(3.0,))


def test_a_phi3_that_is_scaled_otherwise_is_refused():
    said = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 1}
    said["max_position_embeddings"] = 8
    family = FAMILIES["Phi3ForCausalLM"]
    with pytest.raises(ValueError, match='rope_type is "linear", but Phi-3 supports only longrope'):
        family.inferred(said | {"rope_scaling": {"type": "linear", "factor": 2.0}})
    with pytest.raises(KeyError, match="long_factor"):
        family.inferred(said | {"rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.0]}})
    one = {"type": "su", "short_factor": [1.0, 1.0], "long_factor": [1.0, 2.0]}
    message = "original_max_position_embeddings is 1, but rope_type longrope needs 2 or more"
    with pytest.raises(ValueError, match=message):
        family.inferred(said | {"rope_scaling": one, "original_max_position_embeddings": 1})


def test_kinds_go_with_their_layers():
    c = config("Qwen3", layers=6, kinds="ssf")
    sizes = c.sizes()
    assert c.layer_kinds == "ssfssf" and repeated_kinds("ssfssf") == "ssf"
    assert c.resized(stack(sizes, {"layers": 12})).kinds == "ssf"
    assert c.resized(stack(sizes, {"layers": 8})).layer_kinds == "ssfssfss"
    assert c.resized(llama_pro(sizes, {"layers": 9})).layer_kinds == "sssfsssff"
    assert c.resized(hypercloning(sizes, {"mlp": 18})).kinds == "ssf"
    assert c.resized(coalesce(sizes, layers="far")).layer_kinds == "ssf"
    message = r"new layer 1 would consist in equal parts of the layers 2 \(f\), 3 \(s\), which are of different"
    with pytest.raises(ValueError, match=message):
        c.resized(coalesce(sizes, layers="adjacent"))
    back = c.resized(coalesce(sizes, layers="far")).resized(swap(coalesce(sizes, layers="far")))
    assert back == c
    assert from_json(c.as_json()) == c
    with pytest.raises(ValueError, match="kinds is 'sx', but must have one of the letters f, s, n"):
        config("Qwen3", kinds="sx")


def test_windows_and_positions_match_single_kind_models():
    """The other layer of the stack of both kinds adds nothing."""
    both = config("Qwen3", kinds="sn", window=3, local_theta=50.0)
    params, tokens = tiny.params(both), tiny.tokens(2, 7)
    for i, kind in enumerate("sn"):
        one = replace(both, layers=1, kinds=kind)
        alone = {**params, "blocks": jax.tree.map(lambda x, i=i: x[i : i + 1], params["blocks"])}
        silent = jax.tree.map(np.copy, params["blocks"])
        for sublayer, name in (("attention", "out"), ("mlp", "down")):
            silent[sublayer][name]["kernel"][1 - i] = 0
        expected = tiny.forward(one)(alone, tokens)
        found = tiny.forward(both)({**params, "blocks": silent}, tokens)
        np.testing.assert_array_equal(found, expected)
        plain = tiny.forward(replace(one, kinds="f"))(alone, tokens)
        assert np.abs(plain - expected).max() > VISIBLE
        # With a window of 3, the first token is not visible from the fourth position on.
        if kind == "s":
            other = tokens.copy()
            other[:, 0] = (other[:, 0] + 1) % 11
            near = tiny.forward(one)(alone, other) == expected
            assert not near[:, :3].all() and near[:, 3:].all()


def test_skipped_tokens_keep_their_distances_in_windows():
    """The window of position 3 does not contain position 0, which is the kept token before it."""
    c = config("Qwen3", layers=1, kinds="s", window=2)
    params, tokens = tiny.params(c), tiny.tokens(1, 7)
    kept = KeptTokens(np.array([[0, 3, 4]], np.int32), 0, 1)
    run = jax.jit(lambda t: c.module.apply({"params": params}, t, kept_tokens=kept))
    before = run(tokens)
    for changed, seen in ((0, [0]), (3, [3, 4])):
        other = tokens.copy()
        other[0, changed] = (other[0, changed] + 1) % 11
        assert np.flatnonzero(np.abs(run(other) - before)[0].max(-1)).tolist() == seen


def test_mixed_kinds_are_dropped_equally_by_both_executions():
    c = config("Gemma 2", layers=5, dtype="float32", score_cap=0.0)
    params = tiny.params(c, dtype="float32")
    tokens, gates = tiny.tokens(), np.array([True, False, True, True, False])

    @tiny.optimized_jit
    def gradients(p, layers):
        def loss(p):
            given = dict(targets=tokens[:, 1:], keep_mask=KeepMask(layers))
            return c.module.apply({"params": p}, tokens[:, :-1], **given)[0]

        return jax.grad(loss)(p)

    # A float32 model runs without 64-bit mode.
    with jax.enable_x64(False):
        by_conditional = gradients(params, gates)
        by_indices = gradients(params, np.flatnonzero(gates).astype(np.int32))
    chex.assert_trees_all_equal(by_conditional, by_indices)
    for gradient in jax.tree.leaves(jax.device_get(by_conditional["blocks"])):
        assert not gradient[[1, 4]].any() and gradient[2:4].any()

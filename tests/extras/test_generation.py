"""Cached generation equals a full pass, rows are independent, and samples follow the softmax.

The tolerance is 1e-10, for float64 through three layers.
"""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import AxisType
from scipy import stats

from jaxgrow import checkpoints, sharding
from jaxgrow.extras.models import generation
from jaxgrow.extras.models.cache import Past
from jaxgrow.extras.models.generation import WATCHED, Sampling, draw_tokens, generate, least_logits
from jaxgrow.models import BERTConfig, GPT2Config, LlamaConfig

pytestmark = pytest.mark.usefixtures("x64")

TOLERANCE = 1e-10
LLAMA = dict(vocab=11, context=40, head_dim=6, layers=3, heads=4, embed=12, mlp=20, dtype="float64")
GPT_OSS = dict(kv_heads=2, sinks=True, clamp=0.5, qkv_bias=True, out_bias=True)
MODELS = {
    "gpt2, tied": tiny.config(context=40),
    "llama": LlamaConfig(**LLAMA, kv_heads=2, rope_factor=4.0, rope_context=16, rope_theta=100.0),
    "gpt-oss": LlamaConfig(**LLAMA, **GPT_OSS, experts=3, kinds="sf", window=5),
    # Two of the positions are reserved.
    "opt": GPT2Config(**LLAMA | {"context": 42}, activation="relu", first_position=2),
}
GPT, DRAWS = MODELS["gpt2, tied"], {"temperature": 0.9, "top_k": 9, "top_p": 0.95}
PROMPTS = [[1, 2, 3], [4], [*range(11), 3, 1, 4, 1, 5, 9]]


def models(*names):
    return pytest.mark.parametrize("config", [MODELS[name] for name in names], ids=names)


@cache
def params(config):
    return tiny.params(config)


def whole(config, tokens):
    """Return the logits at each position from one pass over a padded context."""
    padded = np.zeros((1, config.length), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(tiny.forward(config)(params(config), padded))[0, : len(tokens)]


def likeliest(config, prompt, count):
    """Generate tokens greedily, with a full pass over all earlier tokens for each new token."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(whole(config, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def lists(found):
    return [tokens.tolist() for tokens in found]


# --- the KV cache ---


@models("llama", "gpt-oss", "opt")
def test_what_is_kept_gives_the_logits_of_a_whole_pass(config):
    tokens_BT, lengths_B = tiny.tokens(2, 12), np.array([3, 6])

    @jax.jit
    def read(weights):
        def step(past, tokens_BT, lengths_B):
            inputs = {"tokens": tokens_BT, "lengths": lengths_B}
            return config.module.apply({"params": weights}, inputs, past=past)

        logits_BV, past = step(Past(), tokens_BT[:, :7], lengths_B)
        found, past = [logits_BV], past.with_room(20)
        for count in (2, 1):  # Several new tokens are also read at once.
            skipped = sum(range(2, count, -1))
            rows = np.stack([tokens_BT[i, n + skipped :][:count] for i, n in enumerate(lengths_B)])
            logits_BV, new = step(past, rows, np.full(2, count))
            past = past.and_then(new)
            found.append(logits_BV)
        return jnp.stack(found, 1), past.lengths_B

    found_BNV, read_B = read(params(config))
    np.testing.assert_array_equal(read_B, lengths_B + 3)
    for found_NV, tokens_T, length in zip(found_BNV, tokens_BT, lengths_B, strict=True):
        expected = whole(config, tokens_T)[[length - 1, length + 1, length + 2]]
        np.testing.assert_allclose(found_NV, expected, rtol=0, atol=TOLERANCE)


@models("gpt2, tied", "llama")
def test_prompts_of_any_length_continue_greedily_to_the_context(config):
    found = lists(generate(config, params(config), PROMPTS, max_new=30))
    assert [len(tokens) for tokens in found] == [30, 30, 23]
    each = zip(PROMPTS, found, strict=True)
    assert found == [likeliest(config, prompt, len(new)) for prompt, new in each]


def test_with_a_past_nothing_else_is_asked():
    for config, other in (
        (GPT, {"observe": lambda x, y: y}),
        (GPT, {"frozen": 1}),
        (MODELS["llama"], {"targets": tiny.tokens()}),
    ):
        message = r"cached decoding \(past\) does not support"
        with pytest.raises(ValueError, match=message):
            config.module.apply({"params": params(config)}, tiny.tokens(), past=Past(), **other)


def test_on_a_mesh_they_are_the_same():
    config = MODELS["llama"]
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), (AxisType.Auto,) * 2)
    divided = sharding.shard_params(params(config), tiny.axes(config), mesh)
    alone = lists(generate(config, params(config), PROMPTS[:2], max_new=9))
    assert lists(generate(config, divided, PROMPTS[:2], max_new=9)) == alone
    with jax.set_mesh(mesh):
        assert lists(generate(config, divided, PROMPTS[:2], max_new=9)) == alone


# --- rows ---

SIZES = LLAMA | dict(head_dim=4, kv_heads=2)
GEMMA = dict(norms="both", tied=True, activation="gelu_tanh", embed_scale=2.5, query_norm="head")
GEMMA3 = GEMMA | dict(local_theta=100.0, rope_by="linear", rope_factor=8.0)
LONGROPE = dict(rope_by="longrope", rope_short=(1.0, 1.5), rope_long=(3.0, 9.0), rope_context=14)
MIXED = dict(experts=4, active=2)
NEOX = dict(layer_norm=True, parallel=True, gated=False, bias=True, qkv_bias=True, rotary=0.5)
GRANITE = dict(embed_scale=3.0, residual_scale=0.4, logit_divisor=2.0)
OWN = {
    "llama": dict(rope_factor=4.0, rope_context=16, rope_theta=100.0),
    "qwen2": dict(qkv_bias=True, tied=True),
    "qwen3": dict(query_norm="head"),
    "mistral": dict(kinds="s", window=6),
    "mixtral": MIXED,
    "gemma2": GEMMA | dict(kinds="sf", window=5, score_cap=2.0, logit_cap=3.0),
    "gemma3_text": GEMMA3 | dict(kinds="ssf", window=5),
    "gemma": dict(tied=True, activation="gelu_tanh", embed_scale=2.5),
    "qwen3_moe": MIXED | dict(query_norm="head", gates_normed=False),
    "olmoe": MIXED | dict(query_norm="all", gates_normed=False),
    "olmo3": dict(norms="after", query_norm="all", kinds="sssf", window=5),
    "olmo2": dict(norms="after", query_norm="all"),
    "phi3": LONGROPE | dict(rope_scale=1.3),
    "smollm3": dict(kinds="fffn"),
    "gpt_neox": NEOX,
    "olmo": dict(layer_norm=True, norm_scale=False),
    "granite": GRANITE | dict(score_dim=9.0),
    "granitemoehybrid": GRANITE | dict(kinds="n"),
    "qwen2_moe": MIXED | dict(shared=8, qkv_bias=True),
}
FAMILIES = {name: LlamaConfig(**SIZES | own) for name, own in OWN.items()}
FAMILIES |= {"gpt2": GPT, "opt": MODELS["opt"], "gpt_oss": MODELS["gpt-oss"]}
POSITIONS = {
    "yarn": LlamaConfig(**SIZES, rope_by="yarn", rope_factor=4.0, rope_context=16, rope_scale=1.1),
    "dynamic": LlamaConfig(**SIZES, rope_by="dynamic", rope_factor=4.0),
}


@pytest.mark.parametrize(("name", "settings"), [
    pytest.param("gemma2", DRAWS | {"repetition_penalty": 2.5}, id="gemma2, drawn"),
    *(pytest.param(x, {}, id=x, marks=pytest.mark.slow) for x in FAMILIES | POSITIONS),
])  # fmt: skip
def test_a_text_is_independent_of_padding_batch_and_maximum(name, settings):
    """The second text crosses the original context of the longrope model."""
    config = (FAMILIES | POSITIONS)[name]
    weights, prompts = params(config), [[1, 2, 3], [5, 4, 3, 2, 1, 0, 9, 8, 7, 6], [*range(11)] * 2]
    together = lists(generate(config, weights, prompts, max_new=18, seed=3, **settings))
    assert [len(tokens) for tokens in together] == [18, 18, 18]
    for most, others in ((18, [[9]] * 2), (5, [[9], prompts[2]]), (12, [prompts[2], [9]])):
        batch = [others[0], prompts[1], others[1]]
        found = lists(generate(config, weights, batch, max_new=most, seed=3, **settings))
        assert found[1] == together[1][:most]
    [alone] = lists(generate(config, weights, prompts[:1], max_new=6, seed=3, **settings))
    assert alone == together[0][:6]


def test_experts_with_a_capacity_drop_no_token():
    """Otherwise, a text would depend on its padding and on the other texts."""
    config = LlamaConfig(**SIZES, experts=4, active=2, capacity=1.0)
    all_tokens = replace(config, capacity=0.0)
    weights = params(all_tokens)
    expected = lists(generate(all_tokens, weights, PROMPTS, max_new=9))
    assert lists(generate(config, weights, PROMPTS, max_new=9)) == expected


def test_every_family_of_decoders_has_a_test_of_independence():
    ends = ("ForCausalLM", "LMHeadModel")
    decoders = {of.model_type for n, of in checkpoints.FAMILIES.items() if n.endswith(ends)}
    assert decoders == {*FAMILIES}


def test_longrope_reads_a_text_by_its_own_length():
    """Each token follows from one pass over exactly the tokens before it, without padding."""
    config = FAMILIES["phi3"]
    forward = tiny.forward(config)
    # The prompts have 10 and 15 tokens; the original context has 14.
    for prompt in ([5, 4, 3, 2, 1, 0, 9, 8, 7, 6], [*range(11), 1, 2, 3, 4]):
        tokens = list(prompt)
        for _ in range(7):
            logits = np.asarray(forward(params(config), np.array([tokens], np.int32)))
            tokens.append(int(logits[0, -1].argmax()))
        [found] = lists(generate(config, params(config), [prompt], max_new=7))
        assert found == tokens[len(prompt) :]


def test_equal_prompts_get_other_draws_and_so_do_other_seeds():
    draws = [
        generate(GPT, params(GPT), [[1], [1]], max_new=16, seed=seed, **DRAWS) for seed in (0, 0, 1)
    ]
    (a, b), again, other = map(lists, draws)
    assert a != b and again == [a, b]
    assert other[0] != a and other[1] != b


def test_each_of_several_tokens_ends_a_text():
    plain = lists(generate(GPT, params(GPT), PROMPTS[:2], max_new=9))
    ends = [plain[0][4], plain[1][2]]
    found = lists(generate(GPT, params(GPT), PROMPTS[:2], max_new=9, end=ends))
    for before, tokens in zip(plain, found, strict=True):
        first = min(before.index(end) for end in ends if end in before)
        assert tokens == before[: first + 1]


# --- stopping by a watch function ---


@pytest.mark.parametrize("settings", [{}, DRAWS], ids=["likeliest", "drawn"])
def test_a_watched_text_is_the_same_and_is_seen_as_it_grows(settings):
    settings = {"max_new": 21, "seed": 3} | settings
    plain = lists(generate(GPT, params(GPT), PROMPTS, **settings))
    seen = {0: [], 1: [], 2: []}

    def watch(row, tokens):
        seen[row].append(tokens.tolist())
        return False

    assert lists(generate(GPT, params(GPT), PROMPTS, watch=watch, **settings)) == plain
    for row, tokens in enumerate(plain):
        assert seen[row] == [tokens[:n] for n in (WATCHED, 2 * WATCHED, 21)]


@pytest.mark.parametrize("name", ["gpt2", "phi3"])
def test_a_stopped_text_gets_no_more_tokens_and_others_continue(name):
    """Stop a text whose continuation would exceed the original context of the longrope model."""
    config = FAMILIES[name]
    plain = lists(generate(config, params(config), PROMPTS[:2], max_new=20))

    def watch(row, tokens):
        return row == 0 and len(tokens) >= 2 * WATCHED - 5

    found = lists(generate(config, params(config), PROMPTS[:2], max_new=20, watch=watch))
    assert found[1] == plain[1]
    assert 2 * WATCHED - 5 <= len(found[0]) < 20 and found[0] == plain[0][: len(found[0])]


# --- repetition penalty ---


def test_a_penalty_lowers_the_logits_of_tokens_that_were_there():
    """Zeros that pad the shorter prompts were not there, and neither were other prompts."""
    config, penalty = MODELS["llama"], 1.7
    expected = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(9):
            logits = whole(config, tokens)[-1].copy()
            there = sorted({*tokens})
            old = logits[there]
            logits[there] = np.where(old > 0, old / penalty, old * penalty)
            tokens.append(int(logits.argmax()))
        expected.append(tokens[len(prompt) :])
    found = lists(generate(config, params(config), PROMPTS, max_new=9, repetition_penalty=penalty))
    assert found == expected
    assert found != lists(generate(config, params(config), PROMPTS, max_new=9))


def test_what_has_the_same_shape_is_compiled_once():
    count = generation._generated._cache_size
    generate(GPT, params(GPT), [[1, 2], [3]], max_new=9, seed=0, **DRAWS)
    before = count()
    changed = {"temperature": 0.5, "top_k": 2, "top_p": 0.3}
    generate(GPT, params(GPT), [[1] * 16, [4, 5]], max_new=16, seed=7, end=3, **changed)
    assert count() == before
    generate(GPT, params(GPT), [[1] * 17, [4, 5]], max_new=16, seed=7, end=3, **changed)
    assert count() == before + 1


# --- sampling ---


def written_down(logits, temperature, top_k=None, top_p=None):
    """Return the probabilities of the sampling distribution; ``top_k`` comes first."""
    order = np.argsort(-logits)[:top_k]
    p = np.exp((logits[order] - logits.max()) / temperature)
    p /= p.sum()
    if top_p is not None:
        kept = next((n for n in range(1, len(p)) if p[:n].sum() >= top_p), len(p))
        order, p = order[:kept], p[:kept] / p[:kept].sum()
    out = np.zeros_like(logits)
    out[order] = p
    return out


@pytest.mark.parametrize("limits", [
    {"temperature": 2.0, "top_k": 4},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 6, "top_p": 0.9},
], ids=str)  # fmt: skip
def test_frequencies_of_draws_are_the_probabilities(limits):
    """Apply Pearson's test, which 9999 of 10000 seeds pass."""
    draws, logits = 20_000, np.random.default_rng(1).normal(size=11)
    expected = written_down(logits, **limits)
    rows = jnp.arange(draws, dtype=jnp.int32)
    same, sampling = jnp.tile(logits[None], (draws, 1)), Sampling(**limits)
    draw = jax.jit(lambda key: draw_tokens(same, sampling, key, rows, jnp.full_like(rows, 3)))
    found = np.bincount(draw(jax.random.key(0)), minlength=11)
    possible = expected > 0
    assert found[~possible].sum() == 0
    distance = ((found - draws * expected)[possible] ** 2 / (draws * expected[possible])).sum()
    assert distance < stats.chi2.ppf(0.9999, possible.sum() - 1)


def left(logits_BV, **limits):
    """Return the tokens that the limits keep."""
    least = jax.jit(least_logits)(logits_BV, Sampling(1.0, **limits))
    return np.asarray(logits_BV >= least)


@pytest.mark.parametrize("top_p", [None, 0.05, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("top_k", [None, 7, 300])
def test_what_limits_leave_is_what_they_say(top_k, top_p):
    logits_BV = 3 * np.random.default_rng(0).normal(size=(20, 50))
    given = None if top_p == 1.0 else top_p
    expected = np.stack([written_down(x, 1.0, top_k, given) > 0 for x in logits_BV])
    np.testing.assert_array_equal(left(logits_BV, top_k=top_k, top_p=top_p), expected)


def test_tokens_as_likely_as_the_last_one_are_left_with_it():
    logits_BV = np.array([[2.0, 1.0, 1.0, 0.0]])
    expected = [[True, True, True, False]]
    for limits in ({"top_k": 2}, {"top_p": 0.7}):
        assert left(logits_BV, **limits).tolist() == expected


@pytest.mark.parametrize("min_p", [0.01, 0.3, 1.0])
def test_min_p_leaves_tokens_by_their_ratio_to_the_likeliest(min_p):
    logits_BV = 3 * np.random.default_rng(0).normal(size=(20, 50))
    p_BV = np.exp(logits_BV)
    expected = p_BV >= min_p * p_BV.max(1, keepdims=True)
    np.testing.assert_array_equal(left(logits_BV, min_p=min_p), expected)


# --- errors ---


DRAWN, LEAVE = "without a temperature the likeliest token is taken: also set", "leave it out"


@pytest.mark.parametrize(("prompts", "settings", "says"), [
    ([[1], []], {}, "prompt 1 is empty: give at least one token"),
    ([[[1]]], {}, "prompt 0 is not a sequence of tokens"),
    ([[0.5]], {}, "prompt 0 has tokens of float64, not integers"),
    ([[1, 11]], {}, "prompt 0 has the token 11, but the model's tokens are 0 to 10"),
    ([[1, -1]], {}, "prompt 0 has the token -1, but"),
    ([[1] * 40], {}, "has 40 tokens, which leaves no room in the model's context of 40: shorten"),
    ([[1]], {"max_new": 0}, "max_new is 0, less than 1"),
    ([[1]], {"end": 11}, "end is 11, but the model's tokens are 0 to 10"),
    ([[1]], {"end": [3, 12]}, "end is 12, but the model's tokens are 0 to 10"),
    ([[1]], {"temperature": 0.0}, f"temperature is 0.0, but must be above 0; {LEAVE}"),
    ([[1]], {"temperature": float("nan")}, "temperature is nan, but must be above 0"),
    ([[1]], {"top_k": 5}, f"top_k is 5, but {DRAWN}"),
    ([[1]], {"min_p": 0.1}, f"min_p is 0.1, but {DRAWN}"),
    ([[1]], {"temperature": 1.0, "top_k": 0}, f"top_k is 0, less than 1; {LEAVE}"),
    ([[1]], {"temperature": 1.0, "top_p": 0.0}, "top_p is 0.0, .* above 0 and at most 1"),
    ([[1]], {"temperature": 1.0, "top_p": 1.1}, "top_p is 1.1, .* above 0 and at most 1"),
    ([[1]], {"temperature": 1.0, "min_p": 1.5}, "min_p is 1.5, .* above 0 and at most 1"),
    ([[1]], {"repetition_penalty": 0.0}, f"penalty is 0.0, but must be above 0; {LEAVE}"),
])  # fmt: skip
def test_what_is_wrong_is_said(prompts, settings, says):
    with pytest.raises(ValueError, match=says):
        generate(GPT, {}, prompts, **{"max_new": 3} | settings)


def test_models_that_do_not_continue_text_are_refused():
    with pytest.raises(ValueError, match="a BERT does not continue text: use a GPT-2 or a Llama"):
        generate(BERTConfig(), {}, [[1]], max_new=1)
    assert generate(GPT, {}, [], max_new=3) == []  # no prompts

"""Attention in segments: packed documents have the loss and gradients of each document alone."""

from dataclasses import replace
from functools import partial
from typing import Any

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import strategies
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType

from jaxgrow import grow
from jaxgrow.extras.models.deberta import DeBERTaConfig
from jaxgrow.extras.models.modernbert import ModernBERTConfig
from jaxgrow.extras.peft import lora
from jaxgrow.layerdrop import KeepMask
from jaxgrow.models import BERTConfig, Config, GPT2Config, LlamaConfig
from jaxgrow.models import attention as module
from jaxgrow.models.attention import ScoreForm, attention, segment_positions
from jaxgrow.models.stack import KeptTokens
from jaxgrow.operators import hypercloning, llama_pro

TOLERANCE = 1e-5  # sums of float32 in another order
SIZES = dict(vocab=11, context=12, layers=3, embed=12, heads=4, head_dim=4, mlp=20)
GROUPED = SIZES | {"kv_heads": 2}
LONGROPE = dict(rope_by="longrope", rope_short=(1.0, 1.5), rope_long=(3.0, 9.0), rope_context=4)
FAMILIES: dict[str, Config] = {
    "gpt2": GPT2Config(**SIZES),
    "gpt2-pieces": GPT2Config(**SIZES, head_positions=5),
    "opt": GPT2Config(**SIZES | {"context": 14}, first_position=2, activation="relu"),
    "llama": LlamaConfig(**GROUPED),
    "mistral": LlamaConfig(**GROUPED, kinds="s", window=3),
    "gemma": LlamaConfig(
        **GROUPED,
        kinds="ssf",
        window=3,
        local_theta=100.0,
        score_cap=2.0,
        logit_cap=3.0,
        norms="both",
    ),
    "yarn": LlamaConfig(**GROUPED, rope_by="yarn", rope_factor=4.0, rope_context=4, rope_scale=1.1),
    "dynamic": LlamaConfig(**GROUPED, rope_by="dynamic", rope_factor=4.0),
    "longrope": LlamaConfig(**GROUPED, **LONGROPE, rope_scale=1.3),
    "smollm3": LlamaConfig(**GROUPED, kinds="fn"),
    "gpt-neox": LlamaConfig(**GROUPED, layer_norm=True, parallel=True, gated=False, rotary=0.5),
    "gpt-oss": LlamaConfig(
        **GROUPED, experts=4, balance=0.0, clamp=7.0, sinks=True, kinds="sf", window=3
    ),
    "bert": BERTConfig(**SIZES),
    "roberta": BERTConfig(**SIZES | {"context": 14}, types=1, first_position=2),
    "pre-bert": BERTConfig(**SIZES, norm="pre"),
    "modernbert": ModernBERTConfig(**SIZES, kv_heads=4, kinds="fss", window=3),
    "deberta": DeBERTaConfig(**SIZES, distances=8, farthest=12),
}
LENGTHS = (1, 5, 2, 4)
QUICK = ("gpt2", "gemma", "bert")


def documents(lengths=LENGTHS, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 11, n).astype(np.int32) for n in lengths]


def packed(docs) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return inputs and targets of one row; the targets of last tokens are those of a stranger."""
    tokens = np.concatenate(docs)[None]
    # The ids are not consecutive, and the row begins within the numbering of a corpus.
    segments = np.repeat(7 * np.arange(3, 3 + len(docs)), [len(d) for d in docs])[None]
    last = np.zeros(tokens.shape, bool)
    last[0, np.cumsum([len(d) for d in docs]) - 1] = True
    inputs = {"tokens": tokens, "segments": segments.astype(np.int32)}
    return inputs | {"weights": (~last).astype(np.float32)}, np.roll(tokens, -1, 1)


def of_row(config: Config, docs, params: Any, **options: Any) -> Any:
    """Return the sum of the losses of a packed row."""
    inputs, targets = packed(docs)
    if config.masked:
        inputs, targets = {name: inputs[name] for name in ("tokens", "segments")}, inputs["tokens"]
    mean, _ = config.module.apply({"params": params}, inputs, targets=targets, **options)
    return mean * (targets.size if config.masked else inputs["weights"].sum())


def of_each(config: Config, docs, params: Any, **options: Any) -> Any:
    """Return the sum of the losses of documents that are rows of their own."""
    total = 0.0
    for document in docs:
        inputs: Any = {"tokens": document[None]} if config.masked else document[None]
        logits = config.module.apply({"params": params}, inputs, **options)
        log_p = jax.nn.log_softmax(logits)[0]
        targets = document if config.masked else document[1:]
        total -= jnp.take_along_axis(log_p[: len(targets)], targets[:, None], 1).sum()
    return total


def assert_law(config: Config, docs=None, params: Any = None, **options: Any) -> None:
    docs = docs or documents()
    params = tiny.params(config, dtype="float32") if params is None else params
    run = [
        jax.jit(jax.value_and_grad(partial(f, config, docs, **options))) for f in (of_row, of_each)
    ]
    found, expected = (f(params) for f in run)
    chex.assert_trees_all_close(found[0], expected[0], rtol=TOLERANCE)
    largest = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(expected[1]))
    chex.assert_trees_all_close(
        *(g[1] for g in (found, expected)), rtol=TOLERANCE, atol=TOLERANCE * largest
    )


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in FAMILIES]
)
def test_a_packed_row_is_the_sum_of_its_documents(name):
    assert_law(FAMILIES[name])


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_without_segments_the_row_is_another(name):
    """A control: the law is not true of any attention."""
    config = FAMILIES[name]
    params = tiny.params(config, dtype="float32")
    inputs, _ = packed(documents())
    del inputs["weights"]
    both = [
        np.asarray(tiny.forward(config)(params, given))
        for given in (inputs, {"tokens": inputs["tokens"]})
    ]
    first = slice(0, LENGTHS[0])
    if config.causal:
        chex.assert_trees_all_close(both[0][:, first], both[1][:, first], rtol=1e-4, atol=1e-4)
    assert np.abs(both[0] - both[1])[:, LENGTHS[0] :].max() > 0.1


LLAMA = FAMILIES["llama"]
EXECUTIONS = {
    "unrolled": (replace(LLAMA, scan_layers=False), {}),
    "remat": (replace(LLAMA, remat="full"), {}),
    "projections": (replace(FAMILIES["gpt2"], remat="projections"), {}),
    "no-remat": (replace(FAMILIES["gemma"], remat="none"), {}),
    "conditional": (FAMILIES["gpt2"], {"keep_mask": KeepMask(np.array([True, False, True]))}),
    "conditional-llama": (
        FAMILIES["gemma"],
        {"keep_mask": KeepMask(np.array([False, True, True]))},
    ),
    "conditional-bert": (
        FAMILIES["pre-bert"],
        {"keep_mask": KeepMask(np.array([True, False, True]))},
    ),
    "gather": (LLAMA, {"keep_mask": KeepMask(np.array([0, 2], np.int32))}),
    "scaled": (
        FAMILIES["gpt2"],
        {
            "keep_mask": KeepMask(
                np.array([0, 2], np.int32), np.array([1.5, 1.0, 0.5], np.float32), "sublayer"
            )
        },
    ),
    "frozen": (FAMILIES["gpt2"], {"frozen": 1}),
    "pieces": (replace(LLAMA, head_positions=5), {}),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow] * (n not in ("conditional", "scaled")))
        for n in EXECUTIONS
    ],
)
def test_every_execution_obeys_the_law(name):
    config, options = EXECUTIONS[name]
    assert_law(config, **options)


@pytest.mark.parametrize("name", ["gpt2", pytest.param("mistral", marks=pytest.mark.slow)])
def test_with_dropped_tokens_each_document_drops_its_own(name):
    config = FAMILIES[name]
    docs = documents((5, 7))
    kept = np.array([[0, 2, 3, 5, 6, 10, 11]], np.int32)
    params = tiny.params(config, dtype="float32")
    inputs, _ = packed(docs)

    def run(inputs, positions):
        return config.module.apply(
            {"params": params}, inputs, kept_tokens=KeptTokens(jnp.asarray(positions), 1, 2)
        )

    found = run(inputs, kept)
    alone = [run(docs[0][None], kept[:, :3]), run(docs[1][None], kept[:, 3:] - 5)]
    chex.assert_trees_all_close(found, jnp.concatenate(alone, 1), rtol=1e-4, atol=TOLERANCE)


def test_a_lora_obeys_the_law():
    config = FAMILIES["llama"]
    params = tiny.params(config, dtype="float32")
    how = lora.LoRA(rank=2)
    adapter = lora.init_lora(how, config.axes(), config.sizes(), jax.random.key(0))
    adapter = jax.tree.map(lambda x: x + 0.1, adapter)
    assert_law(config, params=lora.attach_lora(params, adapter, how))


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
@pytest.mark.parametrize("operator", [hypercloning, llama_pro])
def test_growths_that_preserve_the_function_do_so_in_segments(name, operator):
    config = FAMILIES[name]
    target = {"layers": 6} if operator is llama_pro else {"embed": 24, "mlp": 40}
    growth = operator(config.sizes(), target)
    params = tiny.params(config, dtype="float32")
    inputs, targets = packed(documents())
    grown = grow(growth, params, config.axes())
    before, after = (
        c.module.apply({"params": p}, inputs, targets=targets, each=True)[0]
        for c, p in ((config, params), (config.resized(growth), grown))
    )
    chex.assert_trees_all_close(before, after, rtol=1e-4)


@hypothesis.settings(max_examples=10)
@hypothesis.given(
    lengths=strategies.lists(strategies.integers(1, 16), min_size=1, max_size=12),
    begin=strategies.integers(0, 20),
    seed=strategies.integers(0, 99),
)
def test_windows_of_documents_of_any_length(lengths, begin, seed):
    """A window may begin within a document, and a document may be longer than the window."""
    config = FAMILIES["gpt2"]
    docs = documents((*lengths, 40), seed)
    stream = np.concatenate(docs)
    number = np.repeat(np.arange(len(docs)), [len(d) for d in docs]).astype(np.int32)
    window = slice(begin, begin + 12)
    params = tiny.params(config, dtype="float32")
    inputs = {"tokens": stream[None, window], "segments": number[None, window]}
    found = tiny.forward(config)(params, inputs)[0]
    for n in np.unique(inputs["segments"]):
        own = inputs["segments"][0] == n
        alone = np.zeros((1, 12), np.int32)  # causal: what follows the document changes nothing
        alone[0, : own.sum()] = inputs["tokens"][0][own]
        expected = tiny.forward(config)(params, alone)[0, : own.sum()]
        chex.assert_trees_all_close(found[own], expected, rtol=1e-4, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_an_input_of_another_name_is_an_error(name):
    inputs, _ = packed(documents())
    inputs["segment"] = inputs.pop("segments")
    with pytest.raises(ValueError, match="has no input segment: give only tokens, lengths, segm"):
        tiny.forward(FAMILIES[name])(tiny.params(FAMILIES[name]), inputs)


def test_positions_restart_with_each_segment():
    segments = jnp.array([[5, 5, 5, 2, 2, 9], [0, 1, 2, 2, 2, 2]])
    assert segment_positions(segments).tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 2, 3]]


# --- kernels ---


def arrays(length: int, dtype: str = "float32", head_dim: int = 8, samples: int = 2):
    rng = np.random.default_rng(0)
    shapes = [(samples, length, h, head_dim) for h in (4, 2, 2)]
    segments = np.sort(rng.integers(0, 5, (samples, length)), 1).astype(np.int32)
    return [jnp.asarray(rng.normal(size=s), dtype) for s in shapes], segments


def expected_of(qkv, segments, causal: bool):
    """Attention of each segment alone, in float64."""
    out = np.zeros(qkv[0].shape)
    for row, ids in enumerate(segments):
        for n in np.unique(ids):
            own = ids == n
            q, k, v = (np.float64(x)[row, own] for x in qkv)
            k, v = (np.repeat(x, 2, 1) for x in (k, v))
            scores = np.einsum("thk,shk->hts", q, k) / q.shape[-1] ** 0.5
            if causal:
                scores = np.where(np.tri(len(q), dtype=bool)[None], scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            out[row, own] = np.einsum("hts,shk->thk", weights, v)
    return out


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_by_xla_in_blocks_of_queries(causal, dtype):
    qkv, segments = arrays(300)
    if dtype == "float64":
        with jax.enable_x64():
            qkv = [jnp.asarray(x, dtype) for x in qkv]
            found = attention(*qkv, causal=causal, form=ScoreForm(segments_BT=segments))
    else:
        found = attention(*qkv, causal=causal, form=ScoreForm(segments_BT=segments))
    np.testing.assert_allclose(found, expected_of(qkv, segments, causal), rtol=0, atol=TOLERANCE)


@pytest.fixture
def as_on_a_tpu(monkeypatch):
    """Run splash attention in interpreter mode on a CPU."""
    monkeypatch.setattr(module, "platform", lambda: "tpu")
    monkeypatch.setattr(splash, "make_splash_mha", partial(splash.make_splash_mha, interpret=True))


def with_gradients(causal: bool, by: Any = "auto"):
    def loss(q, k, v, segments):
        y = attention(q, k, v, causal=causal, by=by, form=ScoreForm(segments_BT=segments))
        wide = y.astype(jnp.float32)
        return (wide * jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)).sum(), y

    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)


@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_by_splash_attention(as_on_a_tpu, causal):
    qkv, segments = arrays(128, "bfloat16", 64)
    (_, found), slopes = jax.jit(with_gradients(causal))(*qkv, segments)
    expected = expected_of(qkv, segments, causal)
    np.testing.assert_allclose(np.float64(found), expected, rtol=0, atol=0.02)
    _, by_xla = jax.jit(with_gradients(causal, "xla"))(*qkv, segments)
    for a, b in zip(slopes, by_xla, strict=True):
        largest = np.abs(np.float64(b)).max()
        np.testing.assert_allclose(np.float64(a), np.float64(b), rtol=0, atol=0.02 * largest)


@pytest.mark.parametrize("axes", [{"context": 4}, {"fsdp": 2, "context": 2}], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_by_ring_attention(axes, causal):
    qkv, segments = arrays(64)
    alone = jax.jit(with_gradients(causal))(*qkv, segments)
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), (AxisType.Auto,) * len(axes))
    with jax.set_mesh(mesh), pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "RING_QUERIES", 8)
        found = jax.jit(with_gradients(causal))(*qkv, segments)
    chex.assert_trees_all_close(found, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_model_with_a_sharded_context(name):
    config = FAMILIES[name]
    params = tiny.params(config, dtype="float32")
    run = jax.value_and_grad(partial(of_row, config, documents()))
    alone = jax.jit(run)(params)
    with jax.set_mesh(jax.make_mesh((4,), ("context",), (AxisType.Auto,))):
        found = jax.jit(run)(params)
    chex.assert_trees_all_close(found, alone, rtol=1e-4, atol=1e-4)


def sizes_of(jaxpr) -> list[int]:
    """Return the sizes of all arrays of a program, outside of kernels."""
    found = [v.aval.size for eqn in jaxpr.eqns for v in eqn.outvars]
    for eqn in jaxpr.eqns:
        if eqn.primitive.name != "pallas_call":
            for inner in jaxprs_in_params(eqn.params):
                found += sizes_of(inner)
    return found


def test_kernels_with_segments_make_no_mask_of_a_row(as_on_a_tpu):
    samples, length = 8, 1024  # the mask of one row for each of 4 heads is a constant
    qkv, segments = arrays(length, "bfloat16", 8, samples)
    run = [jax.make_jaxpr(with_gradients(True, by))(*qkv, segments) for by in ("splash", "xla")]
    largest, control = (max(sizes_of(jaxpr.jaxpr)) for jaxpr in run)
    assert largest < samples * length**2 < 4 * control


def test_cudnn_names_the_kernels_that_have_segments(monkeypatch):
    monkeypatch.setattr(module, "platform", lambda: "gpu")
    qkv, segments = arrays(128, "bfloat16")
    with pytest.raises(
        ValueError, match="attention in segments needs the kernel splash or xla; set attention=auto"
    ):
        attention(*qkv, causal=True, by="cudnn", form=ScoreForm(segments_BT=segments))
    run = partial(attention, causal=True, form=ScoreForm(segments_BT=segments))
    assert jax.eval_shape(run, *qkv).shape == qkv[0].shape


# --- refusals ---


def test_combinations_without_a_meaning_are_refused():
    inputs, _ = packed(documents())
    mask = np.ones((1, 12), bool)
    llama, bert, dynamic = (FAMILIES[name] for name in ("llama", "bert", "dynamic"))
    with pytest.raises(ValueError, match="segments cannot be combined with mask_BS"):
        tiny_call(llama, inputs, mask_BS=mask)
    with pytest.raises(ValueError, match="inputs have mask and segments"):
        tiny_call(bert, {name: inputs[name] for name in ("tokens", "segments")} | {"mask": mask})
    long = {name: np.tile(x, (1, 2)) for name, x in inputs.items()}
    with pytest.raises(
        ValueError, match=r"rope_by='dynamic' does not support segments .* 24 tokens"
    ):
        tiny_call(dynamic, long)


def tiny_call(config: Config, inputs: Any, **options: Any) -> Any:
    run = partial(config.module.apply, **options)
    return jax.eval_shape(run, {"params": tiny.shapes(config)}, inputs)

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
from cases import cases
from hypothesis import strategies
from jax.sharding import AxisType
from packing import LENGTHS, SIZES, TOLERANCE, assert_law, documents, of_row, packed

from jaxgrow.extras.models.deberta import DeBERTaConfig
from jaxgrow.extras.models.modernbert import ModernBERTConfig
from jaxgrow.layerdrop import KeepMask
from jaxgrow.models import BERTConfig, Config, GPT2Config, LlamaConfig
from jaxgrow.models.stack import KeptTokens

GROUPED = SIZES | {"kv_heads": 2}
LONGROPE = dict(rope_by="longrope", rope_short=(1.0, 1.5), rope_long=(3.0, 9.0), rope_context=4)
FAMILIES: dict[str, Config] = {
    "gpt2": GPT2Config(**SIZES),
    "gpt2-pieces": GPT2Config(**SIZES, head_positions=5),
    "opt": GPT2Config(**SIZES | {"context": 14}, first_position=2, activation="relu"),
    "llama": LlamaConfig(**GROUPED),
    "mistral": LlamaConfig(**GROUPED, kinds="s", window=3),
    "gemma": LlamaConfig(**GROUPED, kinds="ssf", window=3, local_theta=100.0, score_cap=2.0, logit_cap=3.0, norms="both"),
    "yarn": LlamaConfig(**GROUPED, rope_by="yarn", rope_factor=4.0, rope_context=4, rope_scale=1.1),
    "dynamic": LlamaConfig(**GROUPED, rope_by="dynamic", rope_factor=4.0),
    "longrope": LlamaConfig(**GROUPED, **LONGROPE, rope_scale=1.3),
    "smollm3": LlamaConfig(**GROUPED, kinds="fn"),
    "gpt-neox": LlamaConfig(**GROUPED, layer_norm=True, parallel=True, gated=False, rotary=0.5),
    "gpt-oss": LlamaConfig(**GROUPED, experts=4, balance=0.0, clamp=7.0, sinks=True, kinds="sf", window=3),
    "bert": BERTConfig(**SIZES),
    "roberta": BERTConfig(**SIZES | {"context": 14}, types=1, first_position=2),
    "pre-bert": BERTConfig(**SIZES, norm="pre"),
    "modernbert": ModernBERTConfig(**SIZES, kv_heads=4, kinds="fss", window=3),
    "deberta": DeBERTaConfig(**SIZES, distances=8, farthest=12),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", cases(FAMILIES.keys(), ["gpt2"], ["gemma", "modernbert", "deberta"])
)
def test_a_packed_row_is_the_sum_of_its_documents(name):
    assert_law(FAMILIES[name])


def test_without_segments_the_row_is_another():
    """A control: the law is not true of any attention."""
    config = FAMILIES["gpt2"]
    params = tiny.params(config, dtype="float32")
    inputs, _ = packed(documents())
    del inputs["weights"]
    by_documents, as_one = (
        np.asarray(tiny.forward(config)(params, given))
        for given in (inputs, {"tokens": inputs["tokens"]})
    )
    n = LENGTHS[0]
    chex.assert_trees_all_close(by_documents[:, :n], as_one[:, :n], rtol=1e-4, atol=1e-4)
    assert np.abs(by_documents - as_one)[:, n:].max() > 0.1


LLAMA = FAMILIES["llama"]
EXECUTIONS = {
    "unrolled and remat": (replace(LLAMA, scan_layers=False, remat="full"), {}),
    "conditional": (FAMILIES["gemma"], {"keep_mask": KeepMask(np.array([False, True, True]))}),
    "conditional-bert": (FAMILIES["pre-bert"], {"keep_mask": KeepMask(np.array([True, False, True]))}),
    "scaled": (FAMILIES["gpt2"],
     {"keep_mask": KeepMask(np.array([0, 2], np.int32), np.array([1.5, 1.0, 0.5], np.float32), "sublayer")}),
    "frozen": (FAMILIES["gpt2"], {"frozen": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", cases(EXECUTIONS.keys(), [], ["scaled"]))
def test_every_execution_obeys_the_law(name):
    config, options = EXECUTIONS[name]
    assert_law(config, **options)


@pytest.mark.extra
def test_a_packed_row_with_a_sharded_context():
    config = FAMILIES["gpt2"]
    params = tiny.params(config, dtype="float32")
    run = jax.value_and_grad(partial(of_row, config, documents()))
    alone = jax.jit(run)(params)
    with jax.set_mesh(jax.make_mesh((4,), ("context",), (AxisType.Auto,))):
        found = jax.jit(run)(params)
    chex.assert_trees_all_close(found, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.extra
@pytest.mark.parametrize("name", ["gpt2", pytest.param("mistral", marks=pytest.mark.slow)])
def test_with_dropped_tokens_each_document_drops_its_own(name):
    config = FAMILIES[name]
    docs = documents((5, 7))
    kept = np.array([[0, 2, 3, 5, 6, 10, 11]], np.int32)
    params = tiny.params(config, dtype="float32")
    inputs, _ = packed(docs)

    def run(inputs, positions):
        dropped = KeptTokens(jnp.asarray(positions), 1, 2)
        return config.module.apply({"params": params}, inputs, kept_tokens=dropped)

    found = run(inputs, kept)
    alone = [run(docs[0][None], kept[:, :3]), run(docs[1][None], kept[:, 3:] - 5)]
    chex.assert_trees_all_close(found, jnp.concatenate(alone, 1), rtol=1e-4, atol=TOLERANCE)


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


def test_an_input_of_another_name_is_an_error():
    inputs, _ = packed(documents())
    inputs["segment"] = inputs.pop("segments")
    with pytest.raises(ValueError, match="has no input segment: give only tokens, lengths, segm"):
        tiny_call(FAMILIES["gpt2"], inputs)


def test_combinations_without_a_meaning_are_refused():
    inputs, _ = packed(documents())
    mask = np.ones((1, 12), bool)
    llama, bert, dynamic = (FAMILIES[name] for name in ("llama", "bert", "dynamic"))
    with pytest.raises(ValueError, match="segments cannot be combined with mask_BS"):
        tiny_call(llama, inputs, mask_BS=mask)
    with pytest.raises(ValueError, match="inputs have mask and segments"):
        tiny_call(bert, {name: inputs[name] for name in ("tokens", "segments")} | {"mask": mask})
    long = {name: np.tile(x, (1, 2)) for name, x in inputs.items()}
    says = r"rope_by='dynamic' does not support segments .* 24 tokens"
    with pytest.raises(ValueError, match=says):
        tiny_call(dynamic, long)


def test_inputs_and_targets_without_an_effect_are_refused():
    gpt2, bert = FAMILIES["gpt2"], FAMILIES["bert"]
    tokens = np.zeros((2, 6), np.int32)
    padded = {"tokens": tokens, "lengths": np.array([3, 6], np.int32)}
    tiny_call(gpt2.with_head("classes"), padded)  # control: this head reads the last token
    for more in ({}, {"targets": tokens}):
        with pytest.raises(ValueError, match="lengths choose the token that head=classes reads"):
            tiny_call(gpt2, padded, **more)
    weighted = {"tokens": tokens, "weights": np.ones((2, 6), np.float32)}  # the advice
    tiny_call(gpt2, weighted, targets=tokens)
    for config in (gpt2, bert):
        for head in ("classes", "states"):
            with pytest.raises(ValueError, match=f"but head={head} and targets are given"):
                tiny_call(config.with_head(head), {"tokens": tokens}, targets=tokens)
        with pytest.raises(ValueError, match="targets are missing: leave out targets and each"):
            tiny_call(config, {"tokens": tokens}, each=True)


@pytest.mark.parametrize("name", ["bert", "modernbert", "llama"])
def test_a_loss_of_hidden_tokens_is_refused_with_ways_out(name):
    config = FAMILIES[name]
    params = tiny.params(config)
    tokens, mask = np.arange(12).reshape(2, 6) % 5 + 1, np.ones((2, 6), bool)
    mask[1, 3:] = False

    def loss(targets: Any, each: bool = False, **more: Any) -> Any:
        inputs = (
            {"tokens": tokens, **more}
            if config.causal
            else {"tokens": tokens, "mask": mask, **more}
        )
        hidden = {"mask_BS": mask} if config.causal else {}
        return config.module.apply(
            {"params": params}, inputs, targets=targets, each=each, **hidden
        )[0]

    with pytest.raises(ValueError, match="would count targets of tokens that the mask hides"):
        loss(tokens)
    each = np.asarray(loss(tokens, each=True))
    if config.causal:
        chosen, of = loss(tokens, weights=mask.astype(np.float32)), each[mask]
    else:
        chosen, of = (
            loss(tokens[:, :3], positions=np.arange(6).reshape(2, 3) % 3),
            each[:, :3],
        )
    np.testing.assert_allclose(chosen, of.mean(), rtol=1e-5)
    assert abs(of.mean() - each.mean()) > 1e-5  # control: the hidden tokens have another mean


@pytest.mark.parametrize("pooler", [False, True])
def test_positions_cannot_move_the_token_that_a_pooler_or_a_head_of_classes_reads(pooler):
    config = replace(FAMILIES["bert"].with_head("states"), pooler=pooler)
    inputs = {"tokens": np.zeros((1, 6), np.int32), "positions": np.array([[2, 3]])}
    with pytest.raises(ValueError, match="leave out positions"):
        tiny_call(config if pooler else config.with_head("classes"), inputs)
    tiny_call(config, {"tokens": inputs["tokens"]})  # the advice
    tiny_call(config.with_head("token_classes"), inputs)  # a head of each token reads the positions


def tiny_call(config: Config, inputs: Any, **options: Any) -> Any:
    run = partial(config.module.apply, **options)
    return jax.eval_shape(run, {"params": tiny.shapes(config)}, inputs)

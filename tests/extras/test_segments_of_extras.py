"""Attention in segments, in models and with adapters that are extras."""

from functools import partial

import chex
import jax
import pytest
import tiny
from jax.sharding import AxisType
from packing import SIZES, assert_law, documents, of_row

from jaxgrow.extras.models.deberta import DeBERTaConfig
from jaxgrow.extras.models.modernbert import ModernBERTConfig
from jaxgrow.extras.peft import lora
from jaxgrow.models import GPT2Config, LlamaConfig

LLAMA = LlamaConfig(**SIZES, kv_heads=2)


@pytest.mark.parametrize(
    "config",
    [
        ModernBERTConfig(**SIZES, kv_heads=4, kinds="fss", window=3),
        DeBERTaConfig(**SIZES, distances=8, farthest=12),
    ],
    ids=["modernbert", "deberta"],
)
def test_a_packed_row_is_the_sum_of_its_documents(config):
    assert_law(config)


def test_a_lora_obeys_the_law():
    params = tiny.params(LLAMA, dtype="float32")
    how = lora.LoRA(rank=2)
    adapter = lora.init_lora(how, LLAMA.axes(), LLAMA.sizes(), jax.random.key(0))
    adapter = jax.tree.map(lambda x: x + 0.1, adapter)
    assert_law(LLAMA, params=lora.attach_lora(params, adapter, how))


@pytest.mark.parametrize(
    "config",
    [GPT2Config(**SIZES), pytest.param(LLAMA, marks=pytest.mark.slow)],
    ids=["gpt2", "llama"],
)
def test_a_packed_row_with_a_sharded_context(config):
    params = tiny.params(config, dtype="float32")
    run = jax.value_and_grad(partial(of_row, config, documents()))
    alone = jax.jit(run)(params)
    with jax.set_mesh(jax.make_mesh((4,), ("context",), (AxisType.Auto,))):
        found = jax.jit(run)(params)
    chex.assert_trees_all_close(found, alone, rtol=1e-4, atol=1e-4)

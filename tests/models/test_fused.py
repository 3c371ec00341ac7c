"""The fused GPU programs compute the same numbers on a CPU as the ordinary programs."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from cases import cases

from jaxgrow.extras.models.fused import log_sum_in_one_pass
from jaxgrow.models import Config, GPT2Config, LlamaConfig, loss, modules, norms
from jaxgrow.models.loss import vocabulary_loss

pytestmark = pytest.mark.usefixtures("x64")

SIZES = dict(vocab=11, context=7, layers=2, embed=6, heads=2, head_dim=4, mlp=9, dtype="float64")
FAMILIES: dict[str, tuple[Config, str, bool]] = {
    "GPT-2": (GPT2Config(**SIZES), "none", False),
    "Llama": (LlamaConfig(**SIZES, kv_heads=1), "none", False),
    "Qwen2": (LlamaConfig(**SIZES, kv_heads=1, qkv_bias=True, layer_norm=True), "products", True),
}


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    def switch():
        for module in (loss, modules, norms):
            monkeypatch.setattr(module, "current_platform", lambda: "gpu")

    return switch


def gradient(config, params, tokens):
    def loss(params):
        return config.module.apply({"params": params}, tokens, targets=tokens[:, ::-1])

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)


@pytest.mark.parametrize(("config", "remat", "scan"), cases(FAMILIES, ["GPT-2"], ["Qwen2"]))
def test_losses_and_gradients_are_those_of_other_devices(as_on_a_gpu, config, remat, scan):
    config = replace(config, remat=remat, scan_layers=scan)
    rng = np.random.default_rng(0)
    params = config.init(jax.random.key(0))
    params = jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape), params)
    tokens = tiny.tokens()
    expected = gradient(config, params, tokens)
    as_on_a_gpu()
    found = gradient(config, params, tokens)
    chex.assert_trees_all_close(found, expected, rtol=1e-10, atol=1e-12)
    both = zip(*map(jax.tree.leaves, (found, expected)), strict=True)
    assert any((np.asarray(a) != np.asarray(b)).any() for a, b in both)


def test_of_equal_logits_the_first_is_the_greatest(as_on_a_gpu):
    as_on_a_gpu()
    x, head = jnp.zeros((1, 4, 3)), jnp.zeros((3, 5))
    loss, right = vocabulary_loss(x, head, jnp.array([[0, 1, 0, 4]]), "float64")
    assert float(loss) == pytest.approx(np.log(5)) and float(right) == 0.5


@pytest.mark.parametrize("most", [1e4, -1e4])
def test_sums_of_exponentials_neither_overflow_nor_vanish(as_on_a_gpu, most):
    as_on_a_gpu()
    logits, targets = jnp.array([[[most, most + 1, most - 1]]]), jnp.array([[1]])
    is_target = jnp.arange(3)[None, None] == targets[..., None]
    log_z, target, right = log_sum_in_one_pass(logits, is_target, targets)
    assert float(log_z[0, 0]) == pytest.approx(most + np.log(1 + np.e + 1 / np.e))
    assert float(target[0, 0]) == most + 1 and bool(right[0, 0])


def test_queries_keys_and_values_are_one_product(as_on_a_gpu):
    config = GPT2Config(**SIZES, remat="none", scan_layers=False)
    params = config.init(jax.random.key(0))

    def products():
        loss = jax.grad(lambda p: config.module.apply({"params": p}, tiny.tokens()).sum())
        return str(jax.make_jaxpr(loss)(params)).count("= dot_general[")

    apart = products()
    as_on_a_gpu()
    jax.clear_caches()
    # Each layer has two fewer products in the forward pass and four fewer in the backward pass.
    assert apart - products() == 6 * config.layers


@pytest.mark.extra
def test_pieces_of_the_head_have_a_size():
    config = GPT2Config(**{**SIZES, "head_positions": 2})
    params, tokens = config.init(jax.random.key(0)), tiny.tokens()
    whole = replace(config, head_positions=0)
    found, expected = (gradient(c, params, tokens) for c in (config, whole))
    chex.assert_trees_all_close(found, expected, rtol=1e-10, atol=1e-12)
    with pytest.raises(ValueError, match="head_positions is -1, less than 0"):
        replace(config, head_positions=-1)
    assert "head_positions" not in config.sizes()

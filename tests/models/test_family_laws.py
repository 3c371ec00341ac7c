"""Laws of layers and of growth that every model family obeys.

The default suite checks the families of the core, the extra suite all others. Float64 through four
layers: results of different programs differ by less than 1e-10.
"""

from dataclasses import replace
from functools import cache, partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from cases import cases
from families import FAMILIES, doubled

from jaxgrow import dual, grow, operators, swap
from jaxgrow.growth.symmetry import break_symmetry
from jaxgrow.layerdrop import KeepMask
from jaxgrow.models import Config
from jaxgrow.models.stack import KeptTokens
from jaxgrow.operators import ligo
from train.state.model import TrainState, scores

pytestmark = pytest.mark.usefixtures("x64")

TOLERANCE, VISIBLE = 1e-10, 1e-3
CORE = ("GPT-2", "BERT", "Llama", "ViT")
# Families without stages: each layer is a row of ``blocks``.
ONE_STACK = [name for name, config in FAMILIES.items() if len(config.depths) == 1]
TEXT = [name for name in ONE_STACK if FAMILIES[name].modality == "text"]


def wide(name: str, dtype: str = "float64") -> Config:
    return replace(FAMILIES[name], dtype=dtype)


def batch(config: Config):
    """Return random inputs and targets of two samples."""
    rng = np.random.default_rng(0)

    def leaf(x):
        if jnp.issubdtype(x.dtype, jnp.integer):
            return rng.integers(0, 4, x.shape).astype(x.dtype)
        return rng.normal(size=x.shape).astype(config.dtype)

    return jax.tree.map(leaf, config.batch_shapes(2))


@cache
def program(config: Config, frozen: int | None = None):
    """Return a function ``(params, options) -> (loss, gradient)`` with NumPy results."""
    fixed = {} if frozen is None else {"frozen": frozen}

    def loss(params, options):
        return scores(TrainState(params, None, config), batch(config), **fixed, **options)[0]

    run = jax.jit(jax.value_and_grad(loss))
    return lambda params, **options: jax.device_get(run(params, options))


close = partial(chex.assert_trees_all_close, rtol=0, atol=TOLERANCE)


# --- dropped and frozen layers, dropped tokens ---


@pytest.mark.parametrize("name", cases(ONE_STACK, ["BERT"], ["Llama", "ViT"]))
def test_a_dropped_layer_is_left_out_and_has_no_gradient(name):
    config = wide(name)
    params = tiny.params(config)
    gates = np.array([True, True, True, False])
    by_gates, by_indices = (
        program(config)(params, keep_mask=KeepMask(layers, np.ones(4), "sublayer"))
        for layers in (gates, np.flatnonzero(gates).astype(np.int32))
    )
    close(by_gates, by_indices)
    fewer = params | {"blocks": jax.tree.map(lambda x: x[:3], params["blocks"])}
    loss, gradient = program(replace(config, layers=3))(fewer)
    close(by_gates[0], loss)
    close(jax.tree.map(lambda x: x[:3], by_gates[1]["blocks"]), gradient["blocks"])
    assert not any(x[3].any() for x in jax.tree.leaves(by_gates[1]["blocks"]))
    assert abs(loss - program(config)(params)[0]) > TOLERANCE


# `test_drop_execution` checks GPT-2 in the default suite.
@pytest.mark.parametrize("name", cases(FAMILIES.keys(), [], ["Llama"]))
def test_with_all_layers_kept_dropping_changes_no_bit(name):
    config, ones = wide(name, "float32"), np.ones(4, np.float32)
    with jax.enable_x64(False):
        params = tiny.params(config, dtype="float32")
        gated = program(config)(params, keep_mask=KeepMask(ones > 0, ones, "sublayer"))
        chex.assert_trees_all_equal(gated, program(config)(params))


# `test_tokens` checks GPT-2 in the default suite.
@pytest.mark.parametrize("name", cases(TEXT, [], ["Llama"]))
def test_tokens_that_all_pass_are_the_dense_model(name):
    config = wide(name)
    params = tiny.params(config)
    positions = np.broadcast_to(np.arange(6, dtype=np.int32), (2, 6))
    dense = program(config)(params)
    close(program(config)(params, kept_tokens=KeptTokens(positions, 1, 3)), dense)
    fewer, _ = program(config)(params, kept_tokens=KeptTokens(positions[:, :3], 1, 3))
    assert abs(fewer - dense[0]) > TOLERANCE


@pytest.mark.parametrize("name", cases(ONE_STACK, [], ["BERT", "ViT"]))
def test_only_parameters_above_the_frozen_layers_have_a_gradient(name):
    config = wide(name)
    _, gradient = program(config, frozen=2)(tiny.params(config))
    _, dense = program(config)(tiny.params(config))
    for path, found, whole in tiny.pairs(gradient, dense):
        if path.startswith("blocks"):
            assert not found[:2].any(), path
            np.testing.assert_allclose(found[2:], whole[2:], rtol=0, atol=TOLERANCE, err_msg=path)
        elif path.startswith(("position_embedding", "patch_embedding")):
            assert not found.any(), path


@pytest.mark.parametrize("name", cases(FAMILIES.keys(), ["GPT-2"], []))
@pytest.mark.parametrize(("remat", "scan"), [
    ("full", True),
    ("products", False),
    *(pytest.param(r, True, marks=pytest.mark.slow) for r in ("none", "projections")),
])  # fmt: skip
def test_remat_and_scanning_do_not_change_gradients(name, remat, scan):
    config = wide(name)
    params = tiny.params(config)
    found = program(replace(config, remat=remat, scan_layers=scan))(params)
    close(found, program(config)(params))


# --- initial values ---


@pytest.mark.parametrize(("name", "residual"), [
    ("GPT-2", 0.02 / 6**0.5),
    pytest.param("BERT", 0.02, marks=pytest.mark.slow),
    pytest.param("BERT, pre-LN", 0.02 / 6**0.5, marks=pytest.mark.slow),
])  # fmt: skip
def test_initial_values(name, residual):
    """Check the initial distributions.

    Kernels and embeddings are N(0, .02). Kernels that write into the residual stream are N(0, .02 /
    sqrt(2 L)) before a norm, and not smaller with norms after the sum. Layers are drawn separately.
    """
    sizes = dict(vocab=640, context=64, layers=3, embed=64, heads=4, head_dim=16, mlp=96)
    config = replace(FAMILIES[name], **sizes)
    with jax.enable_x64(False):
        params = jax.jit(lambda k: config.init(k))(jax.random.key(0))
    for path, x, _ in tiny.pairs(jax.device_get(params), params):
        assert x.dtype == jnp.float32
        if path.endswith(("bias", "scale")):
            np.testing.assert_array_equal(x, 1.0 if path.endswith("scale") else 0.0)
            continue
        if path == "type_embedding":  # has too few numbers for a standard deviation
            continue
        std = residual if "out/" in path or "down/" in path else 0.02
        np.testing.assert_allclose(x.std(), std, rtol=0.03, err_msg=path)
        if path.startswith("blocks"):
            assert abs(np.corrcoef(x[0].ravel(), x[1].ravel())[0, 1]) < 0.1, path


# --- growth ---


@pytest.mark.parametrize("name", cases(FAMILIES.keys(), CORE, ["Swin", "DeBERTa"]))
def test_growth_by_equal_copies_is_exact(name):
    """The loss stays, gradients grow by the dual, the swap inverts, and noise changes no loss."""
    config = wide(name)
    params, axes = tiny.params(config), config.axes()
    loss, gradient = program(config)(params)
    target = doubled(config, "embed", "heads", "kv_heads", "mlp")
    growths = [operators.hypercloning(config.sizes(), target)]
    if name in ONE_STACK:
        growths.append(operators.decoalesce(config.sizes() | target, heads="far"))
    for growth in growths:
        grown = grow(growth, params, axes)
        close(grow(swap(growth), grown, axes), params)
        run = program(config.resized(growth))
        found, large = run(grown)
        close(found, loss)
        close(large, grow(dual(growth), gradient, axes))
        noisy = jax.device_get(jax.jit(partial(break_symmetry, growth=growth, axes=axes))(grown))
        assert tiny.distance(noisy, grown) > VISIBLE
        close(run(noisy)[0], loss)


@pytest.mark.parametrize("name", cases(ONE_STACK, ["BERT", "Llama"]))
def test_learned_maps_without_noise_are_stack_and_zero_pad(name):
    config = wide(name)
    params, axes, sizes = tiny.params(config), config.axes(), config.sizes()
    target = {"embed": 12, "heads": 8, "mlp": 15} | (
        {"kv_heads": 2 * sizes["kv_heads"]} if "kv_heads" in sizes else {}
    )

    @jax.jit
    def grown(params):
        how = ligo.LiGO(width="zero", noise=0.0)
        key = jax.random.key(0)
        start = ligo.init_coefficients(how, axes, sizes, target | {"layers": 8}, key)
        return grow(ligo.learned_growth(start, axes, sizes), params, axes)

    padded = grow(operators.zero_pad(sizes, target), params, axes)
    expected = grow(operators.stack(sizes, {"layers": 8}), padded, axes)
    chex.assert_trees_all_equal(jax.device_get(grown(params)), expected)

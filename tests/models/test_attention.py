"""Every attention kernel computes softmax(q k / sqrt(K)) v, and the selected kernel is reported."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import AxisType

from jaxgrow.checkpoints.source import initial_layout
from jaxgrow.extras.models.cait import CaiTConfig
from jaxgrow.models import GPT2Config
from jaxgrow.models import attention as module
from jaxgrow.models.attention import attention


def arrays(length, heads, kv_heads, head_dim, dtype="float32", samples=2):
    rng = np.random.default_rng(0)
    shapes = [(samples, length, h, head_dim) for h in (heads, kv_heads, kv_heads)]
    return [jnp.asarray(rng.normal(size=s), dtype) for s in shapes]


def written_down(q, k, v, causal):
    """Compute attention with NumPy in float64."""
    q, (k, v) = (
        np.float64(q),
        (np.repeat(np.float64(x), q.shape[2] // k.shape[2], 2) for x in (k, v)),
    )
    scores = np.einsum("bthk,bshk->bhts", q, k) / q.shape[-1] ** 0.5
    if causal:
        scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhts,bshk->bthk", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
@pytest.mark.parametrize("length", [1, 128, 129, 300])
def test_by_xla_in_blocks_of_queries(length, causal):
    q, k, v = arrays(length, 4, 2, 8)
    found = jax.jit(partial(attention, causal=causal))(q, k, v)
    np.testing.assert_allclose(found, written_down(q, k, v, causal), rtol=0, atol=1e-5)


@pytest.fixture
def as_on_a_tpu(monkeypatch):
    """Run splash attention in interpreter mode on a CPU."""
    monkeypatch.setattr(module, "platform", lambda: "tpu")
    monkeypatch.setattr(splash, "make_splash_mha", partial(splash.make_splash_mha, interpret=True))


def by_splash(causal, by="auto"):
    """Return a function ``(q, k, v) -> (result, gradient of its weighted sum)``."""

    def loss(q, k, v):
        y = attention(q, k, v, causal=causal, by=by)
        return (
            y.astype(jnp.float32) * jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
        ).sum(), y

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))


@pytest.mark.parametrize(
    "causal",
    [pytest.param(True, id="causal"), pytest.param(False, id="all", marks=pytest.mark.slow)],
)
def test_by_splash_attention_with_shared_keys(as_on_a_tpu, causal):
    given = arrays(128, 4, 2, 64, "bfloat16")
    (_, y), slopes = by_splash(causal)(*given)
    np.testing.assert_allclose(np.float64(y), written_down(*given, causal), rtol=0, atol=0.02)
    (_, plain), expected = by_splash(causal, "xla")(*given)
    # A difference in rounding shows that another kernel ran.
    assert (np.asarray(plain) != np.asarray(y)).any()
    for a, b in zip(slopes, expected, strict=True):
        np.testing.assert_allclose(
            np.float64(a), np.float64(b), rtol=0, atol=0.02 * np.abs(np.float64(b)).max()
        )


@pytest.mark.parametrize(
    "axes",
    [
        {"fsdp": 2, "tensor": 2},
        *(pytest.param(a, marks=pytest.mark.slow) for a in ({"tensor": 2}, {"data": 4})),
    ],
    ids=str,
)
def test_each_mesh_device_attends_for_its_samples_and_heads(as_on_a_tpu, axes):
    given = arrays(128, 4, 2, 64, "bfloat16", samples=4)
    alone = by_splash(True)(*given)
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), (AxisType.Auto,) * len(axes))
    with jax.set_mesh(mesh):
        found = by_splash(True)(*given)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(np.float64(a), np.float64(b), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    "axes",
    [{"context": 4}, pytest.param({"fsdp": 2, "context": 2}, marks=pytest.mark.slow)],
    ids=str,
)
@pytest.mark.parametrize("causal", [True, False])
def test_ring_attention_is_that_of_the_whole_sequence(axes, causal):
    """Use two query blocks per device and grouped queries, and compare the gradients as well."""
    q, k, v = arrays(64, 4, 2, 8, "float32", samples=2)

    def loss(q, k, v):
        y = attention(q, k, v, causal=causal)
        return jnp.square(y).sum(), y

    run = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
    alone = run(q, k, v)
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), (AxisType.Auto,) * len(axes))
    with jax.set_mesh(mesh), pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "RING_QUERIES", 8)
        found = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_ring_attention_refuses_what_it_does_not_compute():
    q, k, v = arrays(8, 2, 2, 8, "float32")
    with (
        jax.set_mesh(jax.make_mesh((4,), ("context",), (AxisType.Auto,))),
        pytest.raises(ValueError, match="context=1"),
    ):
        jax.eval_shape(lambda: attention(q, k, v, causal=True, mask_BS=np.ones((len(q), 8), bool)))


@pytest.mark.parametrize(
    ("by", "on", "given", "says"),
    [
        (
            "cudnn",
            "cpu",
            {},
            "attention=cudnn does not support this model: the kernel runs on GPUs, but the program is for cpu",
        ),
        (
            "cudnn",
            "gpu",
            {"dtype": "float32"},
            "activations are float32, not bfloat16; set attention=auto",
        ),
        ("cudnn", "gpu", {"head_dim": 12}, "head_dim is 12, not a multiple of 8"),
        ("cudnn", "gpu", {"head_dim": 256}, "head_dim is 256, greater than 128"),
        # A ViT of 14 x 14 patches and a class token.
        ("cudnn", "gpu", {"length": 197}, "queries and keys, 197 and 197, are not both even"),
        ("splash", "gpu", {}, "the kernel runs on TPUs, but the program is for gpu"),
        ("splash", "tpu", {"length": 130}, "130 positions are not a multiple of 128"),
    ],
)
def test_a_kernel_that_does_not_serve_says_why(monkeypatch, by, on, given, says):
    monkeypatch.setattr(module, "platform", lambda: on)
    q, k, v = arrays(
        **{"length": 128, "heads": 2, "kv_heads": 2, "head_dim": 8, "dtype": "bfloat16"} | given
    )
    with pytest.raises(ValueError, match=says):
        attention(q, k, v, causal=True, by=by)
    # Automatic selection takes another kernel.
    if given:
        assert (
            jax.eval_shape(lambda *given: attention(*given, causal=True), q, k, v).shape == q.shape
        )


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
def test_padded_texts_on_a_gpu_run_in_xla(monkeypatch, causal):
    """JAX refuses a mask of keys for cuDNN, and computes the gradient of a mask of scores."""
    monkeypatch.setattr(module, "platform", lambda: "gpu")
    q, k, v = arrays(128, 2, 2, 8, "bfloat16")
    mask = jnp.ones((len(q), 128), bool)
    with pytest.raises(ValueError, match=r"attention=cudnn .*: some keys are masked"):
        attention(q, k, v, causal=causal, mask_BS=mask, by="cudnn")
    found = jax.eval_shape(partial(attention, causal=causal, mask_BS=mask), q, k, v)
    assert found.shape == q.shape


@pytest.mark.parametrize(
    ("capability", "widest"),
    [("9.0", 256), ("12.0", 256), ("8.9", 128), ("7.5", 0), ("gfx942", 0)],
)
def test_the_kernel_of_cudnn_depends_on_the_gpu(monkeypatch, capability, widest):
    monkeypatch.setattr(module, "platform", lambda: "gpu")
    gpu = SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    served = [
        n
        for n in (8, 128, 136, 256, 264)
        if not module.unsupported_reasons("cudnn", "bfloat16", (128, 2, n), (128, 2, n), False)
    ]
    assert max(served, default=0) == widest


def test_splash_refuses_masked_keys_and_indivisible_heads(monkeypatch):
    monkeypatch.setattr(module, "platform", lambda: "tpu")
    assert module.unsupported_reasons("splash", "bfloat16", (128, 3, 64), (128, 3, 64), False) == []
    assert module.unsupported_reasons("splash", "bfloat16", (128, 3, 64), (128, 3, 64), True) == [
        "some keys are masked"
    ]
    with jax.set_mesh(jax.make_mesh((2,), ("tensor",), (AxisType.Auto,))):
        (why,) = module.unsupported_reasons("splash", "bfloat16", (128, 3, 64), (128, 1, 64), False)
    assert why == "3 heads and 1 key/value heads are not divisible by 2 devices"


@pytest.mark.parametrize("by", ["cudnn", "splash"])
def test_the_parameters_of_a_model_do_not_depend_on_its_kernel(by):
    """The example of a text model has one position, which only XLA supports."""
    auto = GPT2Config(vocab=8, context=8, layers=1, embed=4, heads=1, head_dim=4, mlp=4)
    named = replace(auto, attention=by)
    key = jax.random.key(0)
    assert jax.eval_shape(named.init, key) == jax.eval_shape(auto.init, key)
    assert named.axes() == auto.axes()
    assert initial_layout(named) == initial_layout(auto)


def test_a_choice_that_there_is_not_is_refused():
    with pytest.raises(
        ValueError, match="attention must be 'auto', 'cudnn', 'xla' or 'splash', not 'flash'"
    ):
        GPT2Config(attention="flash")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError,
        match="a CaiT mixes its attention heads, which no kernel supports: set attention=auto, not splash",
    ):
        CaiTConfig(attention="splash")

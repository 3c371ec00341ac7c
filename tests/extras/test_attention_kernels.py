"""Every attention kernel computes softmax(q k / sqrt(K)) v, and the selected kernel is reported."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attending import arrays, defined
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType

from jaxgrow.checkpoints.source import initial_layout
from jaxgrow.extras.models import kernels
from jaxgrow.models import GPT2Config
from jaxgrow.models import attention as module
from jaxgrow.models.attention import KERNELS, PLAIN, ScoreForm, attention

SLOW = pytest.mark.slow


def run_as_on(monkeypatch, platform):
    """Choose kernels as in a program for this platform."""
    for where in (module, kernels):
        monkeypatch.setattr(where, "current_platform", lambda: platform)


@pytest.fixture
def as_on_a_tpu(monkeypatch):
    """Run splash attention in interpreter mode on a CPU."""
    run_as_on(monkeypatch, "tpu")
    monkeypatch.setattr(splash, "make_splash_mha", partial(splash.make_splash_mha, interpret=True))


def with_gradients(causal, segments=None, by="auto"):
    """Return a function ``(q, k, v) -> (result, gradient of its weighted sum)``."""

    def loss(q, k, v):
        y = attention(q, k, v, causal=causal, by=by, form=ScoreForm(segments_BT=segments))
        wide = y.astype(jnp.float32)
        return (wide * jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)).sum(), y

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))


def mesh_of(**axes):
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), (AxisType.Auto,) * len(axes))
    return jax.set_mesh(mesh)


@pytest.mark.parametrize("in_segments", [False, True])
@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=SLOW)], ids=["causal", "all"])
def test_by_splash_with_shared_keys(as_on_a_tpu, causal, in_segments):
    qkv, segments = arrays(128, 64, "bfloat16")
    segments = segments if in_segments else None
    (_, y), slopes = with_gradients(causal, segments)(*qkv)
    np.testing.assert_allclose(np.float64(y), defined(qkv, causal, segments), rtol=0, atol=0.02)
    (_, plain), expected = with_gradients(causal, segments, "xla")(*qkv)
    # A difference in rounding shows that another kernel ran.
    assert (np.asarray(plain) != np.asarray(y)).any()
    for a, b in zip(slopes, expected, strict=True):
        largest = np.abs(np.float64(b)).max()
        np.testing.assert_allclose(np.float64(a), np.float64(b), rtol=0, atol=0.02 * largest)


def test_by_splash_each_mesh_device_attends_for_its_samples_and_heads(as_on_a_tpu):
    qkv, _ = arrays(128, 64, "bfloat16", samples=4)
    alone = with_gradients(True)(*qkv)
    with mesh_of(fsdp=2, tensor=2):
        found = with_gradients(True)(*qkv)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(np.float64(a), np.float64(b), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    "axes", [{"context": 4}, pytest.param({"fsdp": 2, "context": 2}, marks=SLOW)], ids=str
)
@pytest.mark.parametrize("in_segments", [False, True])
@pytest.mark.parametrize("causal", [True, False])
def test_by_ring_is_attention_of_the_whole_sequence(monkeypatch, axes, causal, in_segments):
    """Use two query blocks per device and grouped queries, and compare the gradients as well."""
    qkv, segments = arrays(64)
    segments = segments if in_segments else None
    alone = with_gradients(causal, segments)(*qkv)
    monkeypatch.setattr(kernels, "RING_QUERIES", 8)
    with mesh_of(**axes):
        found = with_gradients(causal, segments)(*qkv)
    chex.assert_trees_all_close(found, alone, rtol=1e-4, atol=1e-4)


def test_by_ring_refuses_what_it_does_not_compute():
    qkv, _ = arrays(8)
    mask = np.ones((2, 8), bool)
    with mesh_of(context=4), pytest.raises(ValueError, match="context=1"):
        jax.eval_shape(partial(attention, causal=True, mask_BS=mask), *qkv)
    # The positions of the tokens that are kept.
    form = ScoreForm(positions_BT=np.tile(np.arange(0, 16, 2), (2, 1)))
    with mesh_of(context=4), pytest.raises(ValueError, match=r"dropped tokens.*context=1"):
        jax.eval_shape(partial(attention, causal=True, form=form), *qkv)


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
    qkv, segments = arrays(length, 8, "bfloat16", samples)
    run = [jax.make_jaxpr(with_gradients(True, segments, by))(*qkv) for by in ("splash", "xla")]
    largest, control = (max(sizes_of(jaxpr.jaxpr)) for jaxpr in run)
    assert largest < samples * length**2 < 4 * control


@pytest.mark.parametrize(("by", "on", "given", "says"), [
    ("cudnn", "cpu", {}, "attention=cudnn does .*: the kernel runs on GPUs, .* is for cpu"),
    ("cudnn", "gpu", {"dtype": "float32"}, "are float32, not bfloat16; set attention=auto"),
    ("cudnn", "gpu", {"head_dim": 12}, "head_dim is 12, not a multiple of 8"),
    # A ViT of 14 x 14 patches and a class token.
    ("cudnn", "gpu", {"length": 197}, "queries and keys, 197 and 197, are not both even"),
    ("splash", "gpu", {}, "the kernel runs on TPUs, but the program is for gpu"),
    ("splash", "tpu", {"length": 130}, "130 positions are not a multiple of 128"),
])  # fmt: skip
def test_a_kernel_that_does_not_serve_says_why(monkeypatch, by, on, given, says):
    run_as_on(monkeypatch, on)
    qkv, _ = arrays(**{"length": 128, "dtype": "bfloat16"} | given)
    with pytest.raises(ValueError, match=says):
        attention(*qkv, causal=True, by=by)
    # Automatic selection takes another kernel.
    if given:
        assert jax.eval_shape(partial(attention, causal=True), *qkv).shape == qkv[0].shape


@pytest.mark.parametrize(("given", "says"), [
    ({"mask_BS": jnp.ones((2, 128), bool)}, "attention=cudnn .*: some keys are masked"),
    ({"form": ScoreForm(segments_BT=np.zeros((2, 128), np.int32))},
     "attention in segments needs the kernel splash or xla; set attention=auto"),
])  # fmt: skip
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
def test_padding_and_segments_on_a_gpu_run_in_xla(monkeypatch, causal, given, says):
    """JAX refuses a mask of keys for cuDNN, and computes the gradient of a mask of scores."""
    run_as_on(monkeypatch, "gpu")
    qkv, _ = arrays(128, 8, "bfloat16")
    with pytest.raises(ValueError, match=says):
        attention(*qkv, causal=causal, by="cudnn", **given)
    found = jax.eval_shape(partial(attention, causal=causal, **given), *qkv)
    assert found.shape == qkv[0].shape


def refused(kernel, heads, kv_heads, head_dim, masked=False):
    """Return why a kernel does not support attention of these sizes."""
    shapes = [jax.ShapeDtypeStruct((2, 128, h, head_dim), jnp.bfloat16) for h in (heads, kv_heads)]
    return KERNELS[kernel].reasons(*shapes, masked, PLAIN)


@pytest.mark.parametrize(("capability", "widest"), [
    ("9.0", 256), ("12.0", 256), ("8.9", 128), ("7.5", 0), ("gfx942", 0),
])  # fmt: skip
def test_the_kernel_of_cudnn_depends_on_the_gpu(monkeypatch, capability, widest):
    run_as_on(monkeypatch, "gpu")
    gpu = SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    served = [n for n in (8, 128, 136, 256, 264) if not refused("cudnn", 2, 2, n)]
    assert max(served, default=0) == widest


def test_splash_refuses_masked_keys_and_indivisible_heads(monkeypatch):
    run_as_on(monkeypatch, "tpu")
    assert refused("splash", 3, 3, 64) == []
    assert refused("splash", 3, 3, 64, masked=True) == ["some keys are masked"]
    with mesh_of(tensor=2):
        (why,) = refused("splash", 3, 1, 64)
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

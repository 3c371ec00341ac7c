"""The loss in pieces of the vocabulary has the values and gradients of the loss of all logits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import cases
from jax.sharding import AxisType

from jaxgrow import sharding
from jaxgrow.models import BERTConfig, Config, GPT2Config, LlamaConfig
from jaxgrow.models.loss import SCORED, vocabulary_logits, vocabulary_loss

EMBED, VOCAB = 12, 50
# The tolerances are relative to the largest number of each result.
ROUNDING = {"float32": 3e-6, "bfloat16": 2e-2}
SIZES = dict(vocab=37, context=20, layers=1, embed=EMBED, heads=2, head_dim=6, mlp=16)
FAMILIES: dict[str, Config] = {
    "GPT-2": GPT2Config(**SIZES),
    "BERT": BERTConfig(**SIZES),  # with a bias over the vocabulary
    "Llama": LlamaConfig(**SIZES, kv_heads=1),  # untied
}


def of_all_logits(logits_BTV, targets_BT):
    """Return the loss and the accuracy computed directly from all logits."""
    log_p = jax.nn.log_softmax(logits_BTV)
    loss = -jnp.take_along_axis(log_p, targets_BT[..., None], -1).mean()
    return loss, (logits_BTV.argmax(-1) == targets_BT).mean()


def arrays(samples, length, dtype, seed=0):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.normal(size=(samples, length, EMBED)), dtype)
    head, bias = (jnp.asarray(rng.normal(size=n), jnp.float32) for n in ((EMBED, VOCAB), (VOCAB,)))
    return x, head, bias, rng.integers(0, VOCAB, (samples, length))


def both(x, head, bias, targets, dtype):
    """Return ``((loss, accuracy), gradients)``, computed in pieces and at once."""

    def in_pieces(x, head, bias):
        return vocabulary_loss(x, head, targets, dtype, bias)

    def whole(x, head, bias):
        return of_all_logits(vocabulary_logits(x, head, dtype) + bias[None, None], targets)

    return [
        jax.jit(jax.value_and_grad(f, (0, 1, 2), has_aux=True))(x, head, bias)
        for f in (in_pieces, whole)
    ]


def assert_same(found, expected, rounding):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        # All queries see the same key bias, so its gradient is zero up to rounding.
        np.testing.assert_allclose(a, b, rtol=0, atol=rounding * max(np.abs(b).max(), 1e-4))


LENGTHS = {
    "one piece": (4, 5),
    "pieces": (4, 256),
    "a rest": (4, 300),
    "long": (2, 1100),
    "more samples than positions at once": (SCORED + 1, 3),
}


@pytest.mark.parametrize(("samples", "length", "dtype"), [
    *(pytest.param(*sizes, "float32", id=name) for name, sizes in LENGTHS.items()),
    pytest.param(*LENGTHS["a rest"], "bfloat16", id="bfloat16"),
])  # fmt: skip
def test_in_pieces_as_whole(samples, length, dtype):
    (found, slopes), (expected, expected_slopes) = both(*arrays(samples, length, dtype), dtype)
    assert_same(found, expected, 3e-6)  # The sum is in float32 for any dtype of the products.
    assert_same(slopes, expected_slopes, ROUNDING[dtype])


def test_a_target_that_is_off_by_one_is_seen():
    """Check as a control that the tolerance distinguishes losses of different targets."""
    x, head, bias, targets = arrays(4, 300, "float32")
    (found, _), _ = both(x, head, bias, targets, "float32")
    (moved, _), _ = both(x, head, bias, np.roll(targets, 1, -1), "float32")
    with pytest.raises(AssertionError):
        assert_same(found, moved, 3e-6)


def test_what_is_not_asked_for_is_not_computed():
    x, head, bias, targets = arrays(4, 300, "float32")
    _, (_, expected) = both(x, head, bias, targets, "float32")

    def found(x, head, bias):
        return vocabulary_loss(x, head, targets, "float32", bias)

    for asked in ((0,), (1,), (2,), (0, 2)):
        slopes = jax.jit(jax.grad(lambda *given: found(*given)[0], asked))(x, head, bias)
        assert_same(slopes, tuple(expected[i] for i in asked), 3e-6)
    slope = jax.jit(jax.grad(lambda *given: found(*given)[1]))(x, head, bias)
    assert not np.any(slope)  # The accuracy has zero gradient.


def test_on_a_mesh_as_on_one_device():
    axes = {"fsdp": 2, "tensor": 2}
    given = arrays(8, 300, "float32")
    expected = both(*given, "float32")[0]
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), (AxisType.Auto,) * len(axes))
    x, head, bias, targets = given
    head = sharding.shard_params(head, ("embed", "vocab"), mesh)
    with jax.set_mesh(mesh):
        assert sharding.batch_parts(8) > 1
        assert_same(both(x, head, bias, targets, "float32")[0], expected, 3e-6)


def drawn(config):
    """Return small random numbers, with norm scales around one."""
    rng = np.random.default_rng(2)

    def leaf(path, x):
        scale = jax.tree_util.keystr(path[-1:], simple=True) == "scale"
        return (0.1 * rng.normal(size=x.shape) + scale).astype(x.dtype)

    return jax.tree_util.tree_map_with_path(leaf, jax.eval_shape(config.init, jax.random.key(0)))


@pytest.mark.parametrize("config", cases(FAMILIES, ["BERT"]))
def test_every_family_with_a_vocabulary(config, monkeypatch):
    # 8 of 20 positions of 3 samples per piece give two full pieces and a remainder.
    monkeypatch.setattr("jaxgrow.models.loss.SCORED", 24)
    rng, params = np.random.default_rng(1), drawn(config)
    tokens, targets = rng.integers(0, config.vocab, (2, 3, config.context))
    inputs = {"tokens": tokens} if isinstance(config, BERTConfig) else tokens

    def whole(p):
        return of_all_logits(config.module.apply({"params": p}, inputs), targets)

    def in_pieces(p):
        return config.module.apply({"params": p}, inputs, targets=targets)

    found, expected = (
        jax.jit(jax.value_and_grad(f, has_aux=True))(params) for f in (in_pieces, whole)
    )
    assert_same(found, expected, 1e-5)


# The test above checks how each family gets its output head.
def test_each_place_has_its_own_loss():
    config = FAMILIES["GPT-2"]
    params = drawn(config)
    tokens, targets = (np.random.default_rng(i).integers(0, 37, (3, 20)) for i in range(2))

    @jax.jit
    def said(params):
        run = partial(config.module.apply, {"params": params}, tokens)
        return run(targets=targets, each=True), run()

    (loss_BT, right_BT), logits_BTV = said(params)
    log_p = np.asarray(jax.nn.log_softmax(logits_BTV))
    expected = -np.take_along_axis(log_p, targets[..., None], -1)[..., 0]
    np.testing.assert_allclose(loss_BT, expected, atol=3e-6)
    np.testing.assert_array_equal(right_BT, logits_BTV.argmax(-1) == targets)

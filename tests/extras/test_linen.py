"""Layers of unmodified Flax (Linen) models are dropped, and cost nothing."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import linen as nn

from jaxgrow.extras.integrations.linen import drop_blocks
from jaxgrow.layerdrop import KeepMask


class Layer(nn.Module):
    """A nonlinear third-party block with dropout and extra arguments by position and name."""

    @nn.compact
    def __call__(self, x, shift, *, factor, train: bool):
        h = nn.LayerNorm()(x)
        h = nn.Dense(7)(h) * factor
        h = nn.Dropout(0.5, deterministic=not train)(jnp.tanh(h))
        return x + nn.Dense(x.shape[-1])(h) + shift


class Loop(nn.Module):
    layers: tuple[int, ...] = (0, 1, 2)

    @nn.compact
    def __call__(self, x, train: bool = False):
        x, factor = nn.Dense(4)(x), jnp.float32(0.5)
        for i in self.layers:
            x = Layer(name=f"layer{i}")(x, jnp.ones(4)[None] * i, factor=factor, train=train)
        return nn.Dense(2)(x)


HALF = Loop((0, 2))  # without its middle layer


@pytest.fixture(scope="module")
def stranger():
    x = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    params = jax.device_get(jax.jit(Loop().init)(jax.random.key(0), x))["params"]
    return params, x


def fewer(params):
    return {k: v for k, v in params.items() if k != "layer1"}


def assert_alike(value, gradient, expected, by_hand):
    """Compare with the model without its middle layer."""
    assert float(value) == pytest.approx(float(expected), rel=1e-6)
    assert all((g == 0).all() for g in jax.tree.leaves(gradient["layer1"]))
    chex.assert_trees_all_close(fewer(gradient), by_hand, rtol=1e-5, atol=1e-6)


def dropped(params, x, layers, scale=None, **rest):
    with drop_blocks(Layer, KeepMask(layers, scale)):
        return Loop().apply({"params": params}, x, **rest)


def test_any_flax_model_drops_layers_and_their_gradients(stranger):
    params, x = stranger
    gate = np.array([True, False, True])

    def loss(params, gate):
        return jnp.square(dropped(params, x, gate)).sum()

    value, gradient = jax.device_get(jax.jit(jax.value_and_grad(loss))(params, gate))
    without = jax.value_and_grad(lambda p: jnp.square(HALF.apply({"params": p}, x)).sum())
    assert_alike(value, gradient, *jax.jit(without)(fewer(params)))
    assert "cond" in str(jax.make_jaxpr(jax.grad(loss))(params, gate))


def test_kept_layers_draw_the_dropout_of_the_full_model(stranger):
    """The random numbers depend on the layer, not on its position in the reduced stack."""
    params, x = stranger
    rest = dict(train=True, rngs={"dropout": jax.random.key(3)})
    ones = np.ones(3, np.float32)

    def gradient(apply):
        return jax.jit(jax.grad(lambda p: jnp.square(apply(p)).sum()))(params)

    whole = gradient(lambda p: Loop().apply({"params": p}, x, **rest))
    found = gradient(lambda p: dropped(p, x, ones > 0, ones, **rest))
    chex.assert_trees_all_close(found, whole, rtol=1e-5, atol=1e-6)
    expected = jax.jit(lambda p: HALF.apply({"params": p}, x, **rest))(fewer(params))
    found = jax.jit(lambda p: dropped(p, x, np.array([True, False, True]), **rest))(params)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


class Twice(nn.Module):
    """One layer that is called twice; the second call must sample other random numbers."""

    @nn.compact
    def __call__(self, x):
        layer = Noise(name="layer")
        return layer(layer(x))


class Noise(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dropout(0.5, deterministic=False)(jnp.ones_like(x))


def test_a_layer_that_is_called_again_draws_other_numbers():
    with drop_blocks(Noise, KeepMask(np.array([True, True]))):
        y = np.asarray(Twice().apply({}, jnp.zeros(64), rngs={"dropout": jax.random.key(0)}))
    assert set(y) == {0.0, 2.0, 4.0}  # The value 2 occurs if only one of the calls adds.


def test_forward_mode_is_refused(stranger):
    params, x = stranger
    with pytest.raises(TypeError, match="jvp"):
        jax.jvp(lambda x: dropped(params, x, np.array([True, True, False])), (x,), (x,))


def test_block_scaling_of_a_strangers_model(stranger):
    params, x = stranger
    one = jax.jit(Loop((0,)).apply)({"params": params}, x)
    run = jax.jit(lambda layers: dropped(params, x, layers, np.full(3, 2.0)))
    two, none = run(np.array([True, False, False])), run(np.zeros(3, bool))
    np.testing.assert_allclose(two - none, 2 * (one - none), rtol=1e-4, atol=1e-5)


class Pair(NamedTuple):
    hidden: jax.Array
    more: Any


def curve(module, x, train, width=3):
    return x + nn.Dense(x.shape[-1])(jnp.tanh(nn.Dense(width if train else 3)(x)))


class Flag(nn.Module):
    """A block with a flag, after an array that may be None, that decides what is traced."""

    @nn.compact
    def __call__(self, x, mask, train):
        return curve(self, x if mask is None else x * mask, train, width=int(train) + 2)


class Named(nn.Module):
    @nn.compact
    def __call__(self, *, hidden, options):
        return curve(self, hidden, options["train"])


class Auxiliary(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = curve(self, x, True)
        return Pair(y, {"loss": jnp.square(y).mean(), "cache": None})


class Listed(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = curve(self, x, True)
        return y, (jnp.square(y).mean(),)


# Each function calls a block and returns (the next hidden state, the auxiliary value).
CALLS = {
    Flag: lambda block, x: (block(x, None, True), 0),
    Named: lambda block, x: (block(hidden=x, options={"train": True, "mask": None}), 0),
    Auxiliary: lambda block, x: (lambda pair: (pair.hidden, pair.more["loss"]))(block(x)),
}


class Calls(nn.Module):
    block: type
    layers: tuple

    @nn.compact
    def __call__(self, x):
        total = 0.0
        for i in self.layers:
            x, more = CALLS[self.block](self.block(name=f"layer{i}"), x)
            total = total + more
        return x, total


@pytest.mark.parametrize("kind", [Flag, Named, Auxiliary])
def test_blocks_are_called_and_return_as_they_like(kind):
    """A flag by position or in a dict, an array by name, and an auxiliary loss in the result."""
    x = np.random.default_rng(0).normal(size=(2, 5)).astype(np.float32)
    gate = np.array([True, False, True])
    params = jax.jit(Calls(kind, (0, 1, 2)).init)(jax.random.key(0), x)["params"]

    def loss(params, gate=None):
        if gate is None:
            y, more = Calls(kind, (0, 2)).apply({"params": params}, x)
        else:
            with drop_blocks(kind, KeepMask(gate, np.ones(3, np.float32))):
                y, more = Calls(kind, (0, 1, 2)).apply({"params": params}, x)
        return jnp.square(y).sum() + 3 * more

    value, gradient = jax.device_get(jax.jit(jax.value_and_grad(loss))(params, gate))
    assert_alike(value, gradient, *jax.jit(jax.value_and_grad(loss))(fewer(params)))


class Wrong(nn.Module):
    how: str

    @nn.compact
    def __call__(self, x):
        y = nn.Dense(x.shape[-1] + (self.how == "wider"))(x)
        results = {"wider": y, "dict": {"x": y}, "count": (y, (y > 0).sum())}
        return (results | {"half": y.astype(jnp.float16)})[self.how]


class Scanned(nn.Module):
    """Two layers in one scan. Flax traces one layer twice, which would seem to use up two masks."""

    remat: bool

    @nn.compact
    def __call__(self, x):
        layer = nn.remat(Listed) if self.remat else Listed
        scan = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return scan()(x)[0]


@pytest.mark.parametrize(("model", "block", "says"), [
    (Wrong("wider"), Wrong, r"Wrong takes float32\[2, 5\] and returns float32\[2, 6\]\. A dropped block returns"),
    (Wrong("dict"), Wrong, r"Wrong takes float32\[2, 5\] and returns dict\. A dropped block"),
    (Wrong("half"), Wrong, r"Wrong takes float32\[2, 5\] and returns float16\[2, 5\]"),
    (Wrong("count"), Wrong, r"Wrong returns int32 after its first result\. The other results must be floats"),
    (Scanned(False), Listed, "nn.scan runs one call of Listed for all layers, but the keep mask has one entry per layer"),
    (Scanned(True), Listed, "nn.scan runs one call of Listed for all layers"),
], ids=["shape", "dict", "dtype", "integers", "nn.scan", "nn.scan, remat"])  # fmt: skip
def test_what_cannot_be_dropped_is_said(model, block, says):
    x = np.ones((2, 5), np.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    keep = KeepMask(np.ones(1 if block is Wrong else 2, bool))
    with pytest.raises(ValueError, match=says), drop_blocks(block, keep):
        jax.eval_shape(model.apply, params, x)


def test_a_block_without_the_array_that_it_changes_is_refused():
    says = "the first argument of Named must be the array that it changes, not None"
    with pytest.raises(ValueError, match=says), drop_blocks(Named, KeepMask(np.ones(1, bool))):
        Named().init(jax.random.key(0), options={})


def test_third_party_layers_inside_a_shard_map(stranger):
    gate, scale = np.array([True, False, True]), np.array([1.5, 2, 1.25], np.float32)
    params, x = stranger[0], np.random.default_rng(1).normal(size=(4, 5)).astype(np.float32)

    def loss(params, x, gate):
        return jnp.square(dropped(params, x, gate, scale)).sum()

    gradient = tiny.sharded_gradient(loss, params, x, gate)
    assert all((g == 0).all() for g in jax.tree.leaves(gradient["layer1"]))


def test_the_number_of_gates_must_be_that_of_the_blocks(stranger):
    def run(layers):
        return dropped(*stranger, layers)

    for layers, says in (
        (np.ones(2, bool), "called more than 2 times"),
        (np.ones(4, bool), "called 3 times, but the keep mask has 4 entries. A scanned stack"),
        (np.array([0, 1]), "takes a keep mask, bool"),
    ):
        with pytest.raises(ValueError, match=says):
            jax.eval_shape(run, layers)
    with pytest.raises(ValueError, match="vmap over 2 keep masks"):
        jax.eval_shape(jax.vmap(run), np.ones((2, 3), bool))

"""Flax NNX models grow into new graphs with their optimizers and can drop layers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import third_party
from flax import nnx
from third_party import FLAX, LARGE, SMALL, STEPS, TX, WIDE, tokens

import jaxgrow.extras.integrations.nnx as of_nnx
from jaxgrow import by_convention, from_rules, infer_rules, operators, sizes, stack_layers
from jaxgrow.layerdrop import KeepMask
from jaxgrow.models.stack import run_stack


class Block(nnx.Module):
    def __init__(self, embed, heads, head_dim, mlp, rngs):
        self.first, self.second = nnx.LayerNorm(embed, rngs=rngs), nnx.LayerNorm(embed, rngs=rngs)
        sizes = (heads, embed, heads * head_dim)
        self.attention = nnx.MultiHeadAttention(*sizes, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(embed, mlp, rngs=rngs), nnx.Linear(mlp, embed, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.first(x), mask=nnx.make_causal_mask(jnp.ones(x.shape[:2])))
        return x + self.down(nnx.gelu(self.up(self.second(x))))


class Model(nnx.Module):
    def __init__(self, vocab, context, layers, embed, heads, head_dim, mlp):
        rngs = nnx.Rngs(0)
        self.tokens = nnx.Embed(vocab, embed, rngs=rngs)
        self.positions = nnx.Embed(context, embed, rngs=rngs)
        self.layers = nnx.List([Block(embed, heads, head_dim, mlp, rngs) for _ in range(layers)])
        self.norm, self.head = nnx.LayerNorm(embed, rngs=rngs), nnx.Linear(embed, vocab, rngs=rngs)

    def __call__(self, tokens):
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1])[None])
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def params(model):
    return nnx.as_pure(nnx.state(model, nnx.Param))


@nnx.jit
def step(model, optimizer, tokens):
    """Return the logits before the step, and its loss."""

    def loss(model):
        logits = model(tokens)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
        return loss.mean(), logits

    (value, logits), gradient = nnx.value_and_grad(loss, has_aux=True)(model)
    optimizer.update(model, gradient)
    return logits, value


def on_host(node):
    """Convert to NumPy arrays, whose algebra needs no compilation."""
    nnx.update(node, nnx.state(jax.device_get(nnx.as_pure(nnx.state(node)))))


def test_a_model_keeps_its_function_and_its_optimizer_goes_on():
    given = third_party.drawn(params(nnx.eval_shape(lambda: Model(**SMALL))), np.float32)
    model = of_nnx.build_nnx(lambda: Model(**SMALL), given)
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    first = [step(model, optimizer, tokens())[1] for _ in range(STEPS)]
    before, _ = step(nnx.clone(model), nnx.clone(optimizer), tokens())
    on_host(model), on_host(optimizer)
    axes = stack_layers(from_rules(params(model), FLAX), "layers/{}")
    old = sizes(stack_layers(params(model), "layers/{}"), axes)

    growth = operators.hypercloning(old, WIDE)
    wide = of_nnx.grow_nnx(model, growth, axes, lambda: Model(**SMALL | WIDE), "layers/{}")
    of_wide = of_nnx.grow_nnx_optimizer(optimizer, model, growth, axes, wide, "copy", "layers/{}")
    deeper = operators.llama_pro(old, {"layers": LARGE["layers"]})
    large = of_nnx.grow_nnx(wide, deeper, axes, lambda: Model(**LARGE), "layers/{}")
    of_large = of_nnx.grow_nnx_optimizer(of_wide, wide, deeper, axes, large, "copy", "layers/{}")
    assert large.layers[2].up.out_features == LARGE["mlp"]

    after, loss = step(large, of_large, tokens())
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-5)
    later = [loss, *(step(large, of_large, tokens())[1] for _ in range(STEPS - 1))]
    assert later[-1] < later[0] < first[0]
    assert (of_large.step[...], of_large.opt_state[0].count[...]) == (2 * STEPS, 2 * STEPS)


def test_nnx_parameters_are_named_by_the_same_rules_as_linen():
    tree = params(nnx.eval_shape(lambda: Model(**SMALL)))
    assert from_rules(tree, infer_rules(tree, SMALL)) == from_rules(tree, FLAX)


def test_names_in_the_metadata_are_read_and_marked():
    def linear(*names):
        kernel, bias = ({"out_sharding": n, "eager_sharding": False} for n in (names, names[1:]))
        rngs = nnx.Rngs(0)
        return nnx.Linear(2, 3, rngs=rngs, kernel_metadata=kernel, bias_metadata=bias)

    assert of_nnx.axes(linear("embed.in", "mlp"))["kernel"] == ("embed.in", "mlp")
    marked = by_convention(of_nnx.axes(nnx.eval_shape(lambda: linear("embed", "mlp"))))
    assert dict(marked) == {"kernel": ("embed.in", "mlp"), "bias": ("mlp.bias",)}


def test_build_sets_parameters_and_keeps_other_state():
    def make():
        dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(7))
        return nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), dropout)

    given = jax.tree.map(lambda x: x + 1, params(make()))
    built = of_nnx.build_nnx(make, given)
    jax.tree.map(np.testing.assert_array_equal, params(built), given)
    np.testing.assert_array_equal(built(jnp.ones((4, 2))) == 0, make()(jnp.ones((4, 2))) == 0)
    wide = jax.tree.map(lambda x: jnp.ones((*x.shape[:-1], 4)), given)
    says = r"layers/0/kernel: has shape \(2, 4\), but \(2, 3\) in the larger model"
    with pytest.raises(ValueError, match=says):
        of_nnx.build_nnx(make, wide)


class Sublayer(nnx.Module):
    def __init__(self, rngs, dropout=0.0):
        self.linear, self.dropout = nnx.Linear(3, 3, rngs=rngs), nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(jnp.tanh(self.linear(x)))


class Stack(nnx.Module):
    def __init__(self, layers, dropout=0.0):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([Sublayer(rngs, dropout) for _ in range(layers)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


X = jnp.arange(6.0).reshape(2, 3) / 5


@nnx.jit
def dropped(model, gates, scale):
    """Return the output and the gradient of the sum of its squares."""

    def loss(model):
        with of_nnx.drop_nnx_blocks(model.layers, KeepMask(gates, scale)):
            y = model(X)
        return jnp.square(y).sum(), y

    gradient, y = nnx.grad(loss, has_aux=True)(model)
    return y, gradient


def test_a_dropped_layer_is_as_if_it_were_not_there():
    model, scale = Stack(3), jnp.array([2.0, 5.0, 1.0])
    y, gradient = dropped(model, jnp.array([True, False, True]), scale)
    first, _, last = model.layers
    x = X + 2 * (first(X) - X)
    np.testing.assert_allclose(y, last(x), rtol=1e-6)
    moved = [bool(np.any(layer.linear.kernel[...])) for layer in gradient.layers.values()]
    assert moved == [True, False, True]
    assert all(isinstance(layer, Sublayer) for layer in model.layers)
    np.testing.assert_allclose(dropped(model, jnp.ones(3, bool), None)[0], model(X), rtol=1e-6)
    copy = lambda: nnx.merge(*nnx.split(model), copy=True)  # noqa: E731
    program = jax.make_jaxpr(lambda gates: dropped(copy(), gates, scale)[0])(jnp.ones(3, bool))
    assert " cond" in str(program)


def test_run_stack_drops_layers_of_stacked_blocks():
    model, gates = Stack(3), jnp.array([True, False, True])
    graphdef, _ = nnx.split(model.layers[0])
    state = jax.tree.map(lambda *x: jnp.stack(x), *(nnx.state(layer) for layer in model.layers))
    block = lambda w, x: nnx.merge(graphdef, w)(x)  # noqa: E731
    y, _ = run_stack(block, state, X, remat="none", keep_mask=KeepMask(gates))
    np.testing.assert_allclose(y, dropped(model, gates, None)[0], rtol=1e-6)


def test_gates_that_do_not_fit_are_refused():
    model = Stack(2)
    drop, says = of_nnx.drop_nnx_blocks, r"requires a keep mask, bool \[2\]"
    for layers in (jnp.ones(3, bool), jnp.array([0, 1]), None):
        with pytest.raises(ValueError, match=says), drop(model.layers, KeepMask(layers)):
            pass
    ends = nnx.List([nnx.Linear(3, 2, rngs=nnx.Rngs(0))])
    says = r"Linear takes float32\[2, 3\] and returns \(2, 2\)"
    with drop(ends, KeepMask(jnp.ones(1, bool))), pytest.raises(ValueError, match=says):
        ends[0](X)

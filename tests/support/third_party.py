"""Small Transformers without axis names, written with Flax Linen, NNX and Equinox.

Each model is built from its own parts. The checks in this file apply to every third-party model,
including the real ones in `test_public_models`.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from jaxgrow import (
    from_rules,
    grow,
    grow_optimizer,
    join_fused,
    operators,
    restructure,
    sizes,
    split_fused,
    stack_layers,
    unstack_layers,
)
from jaxgrow.axes import axis_of, is_names, path, reads_axis

SMALL = {"vocab": 13, "context": 7, "layers": 2, "embed": 6, "heads": 3, "head_dim": 5, "mlp": 9}
WIDE = {"embed": 12, "heads": 6, "mlp": 18}
LARGE = {**SMALL, **WIDE, "layers": 3}
TX = optax.adam(1e-2)


def tokens(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, SMALL["vocab"], (2, SMALL["context"]))


def drawn(shapes: Any, dtype: Any = np.float64) -> Any:
    """Draw random parameters; norms and biases also differ from their initial values."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: (rng.normal(size=x.shape) / 2).astype(dtype), shapes)


def fresh_state(params: Any) -> Any:
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(TX.init, params))


STEPS = 10


def trained(apply: Callable, params: Any, state: Any) -> tuple[Any, Any, Any, Any]:
    """Train for ten steps of Adam.

    Returns ``(parameters, state, losses, logits)``. Losses and logits are from before each step and
    after the last one.
    """
    every, losses, logits = jax.device_get(_trained(apply, params, state, tokens()))
    return *jax.tree.map(lambda x: x[STEPS], every), losses, logits


@partial(jax.jit, static_argnums=0)
def _trained(apply, params, state, tokens):
    def loss(params):
        logits = apply(params, tokens)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits[:, :-1], tokens[:, 1:]
        ).mean(), logits

    def step(carry, _):
        params, state = carry
        (value, logits), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = TX.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), (carry, value, logits)

    return jax.lax.scan(step, (params, state), length=STEPS + 1)[1]


class Stranger(NamedTuple):
    shapes: Callable[[dict[str, int]], Any]  # shapes of the parameters for given sizes
    apply: Callable[[dict[str, int]], Callable]
    layers: str
    rules: dict[str, tuple[str, ...]]
    fused: tuple[tuple, ...] = ()  # arguments of `split_fused`, without sizes
    small: dict[str, int] = SMALL
    wide: dict[str, int] = WIDE

    @property
    def large(self) -> dict[str, int]:
        return {**self.small, **self.wide, "layers": self.small["layers"] + 1}

    def inwards(self, tree: Any) -> Any:
        """Split the fused axes of a tree."""
        for fused in self.fused:
            tree = split_fused(tree, *fused, head_dim=self.small["head_dim"])
        return tree

    def outwards(self, tree: Any) -> Any:
        """Restore the layout of the model: unstack layers and join fused axes."""
        tree = unstack_layers(tree, self.layers)
        for fused in self.fused:
            tree = join_fused(tree, *fused)
        return tree


class Journey(NamedTuple):
    """A model that is trained, widened (HyperCloning), deepened (LLaMA-Pro) and trained again."""

    grow: Callable[[Any], Any]  # parameters of the large model for an axes tree
    axes: Any
    logits: tuple[Any, Any]  # logits before and after the growth
    losses: tuple[Any, Any]
    forward: Callable[[Any], Any]  # forward pass of the large model


def journey(model: Stranger, dtype: Any = np.float64) -> Journey:
    small, large = model.apply(model.small), model.apply(model.large)
    params = drawn(model.shapes(model.small), dtype)
    params, state, losses, before = trained(small, params, fresh_state(params))
    params, state = model.inwards(params), model.inwards(state)
    axes = stack_layers(from_rules(params, model.rules), model.layers)
    params, state = stack_layers(params, model.layers), stack_layers(state, model.layers)
    wider = operators.hypercloning(sizes(params, axes), model.wide)
    deeper = operators.llama_pro(sizes(params, axes), {"layers": model.large["layers"]})

    def grown(axes):
        return restructure(
            model.outwards(grow(deeper, grow(wider, params, axes), axes)), model.shapes(model.large)
        )

    state = grow_optimizer(TX, state, wider, params, axes, "copy")
    state = grow_optimizer(TX, state, deeper, grow(wider, params, axes), axes, "copy")
    state = restructure(model.outwards(state), jax.eval_shape(TX.init, model.shapes(model.large)))
    _, after_all, later, after = trained(large, grown(axes), state)
    assert after_all[0].count == 2 * STEPS
    forward = lambda params: trained(large, params, state)[-1][0]  # noqa: E731
    return Journey(grown, axes, (before[-1], after[0]), (losses, later), forward)


def forgotten(journey: Journey) -> dict[str, float]:
    """Measure the change of the logits for each leaf whose axis names lack their ``.in``."""
    flat = jax.tree_util.tree_leaves_with_path(journey.axes, is_leaf=is_names)

    def off(at):
        axes = jax.tree_util.tree_map_with_path(
            lambda p, names: (
                tuple(n.replace(".in", "") if axis_of(n) in WIDE else n for n in names)
                if p == at
                else names
            ),
            journey.axes,
            is_leaf=is_names,
        )
        return float(np.abs(journey.forward(journey.grow(axes)) - journey.logits[1]).max())

    return {
        path(at): off(at)
        for at, names in flat
        if any(axis_of(n) in WIDE and reads_axis(n) for n in names)
    }


# --- Linen: a dict with a key for each layer ---


class LinenBlock(nn.Module):
    heads: int
    head_dim: int
    mlp: int

    @nn.compact
    def __call__(self, x):
        embed, mask = x.shape[-1], nn.make_causal_mask(jnp.ones(x.shape[:2]))
        attention = nn.MultiHeadDotProductAttention(
            self.heads, qkv_features=self.heads * self.head_dim
        )
        x = x + attention(nn.LayerNorm()(x), mask=mask)
        h = nn.Dense(self.mlp, name="up")(nn.LayerNorm()(x))
        return x + nn.Dense(embed, name="down")(nn.gelu(h))


class Linen(nn.Module):
    vocab: int
    context: int
    layers: int
    embed: int
    heads: int
    head_dim: int
    mlp: int

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(self.vocab, self.embed, name="tokens")(tokens)
        x = x + nn.Embed(self.context, self.embed, name="positions")(
            jnp.arange(tokens.shape[1])[None]
        )
        for i in range(self.layers):
            x = LinenBlock(self.heads, self.head_dim, self.mlp, name=f"layers_{i}")(x)
        return nn.Dense(self.vocab, name="head")(nn.LayerNorm(name="norm")(x))


def linen_shapes(sizes: dict[str, int]) -> Any:
    return _linen_shapes(tuple(sizes.items()))


@cache
def _linen_shapes(sizes):
    return jax.eval_shape(Linen(**dict(sizes)).init, jax.random.key(0), tokens())["params"]


def linen_apply(sizes: dict[str, int]) -> Callable:
    return lambda params, tokens: Linen(**sizes).apply({"params": params}, tokens)


FLAX = {
    "*/key/bias": ("heads", "head_dim.in.bias"),
    "*/key/kernel": ("embed.in", "heads", "head_dim.in"),
    "*/query/bias": ("heads", "head_dim.bias"),
    "*/query/kernel": ("embed.in", "heads", "head_dim"),
    "*/value/bias": ("heads", "head_dim.value.bias"),
    "*/value/kernel": ("embed.in", "heads", "head_dim.value"),
    "*/out/bias": ("embed.bias",),
    "*/out/kernel": ("heads.in", "head_dim.in", "embed"),
    "*/up/bias": ("mlp.bias",),
    "*/up/kernel": ("embed.in", "mlp"),
    "*/down/bias": ("embed.bias",),
    "*/down/kernel": ("mlp.in", "embed"),
    "head/bias": ("vocab.bias",),
    "head/kernel": ("embed.in", "vocab"),
    "positions/embedding": ("context", "embed"),
    "tokens/embedding": ("vocab", "embed"),
    "*/scale": ("embed.norm.scale",),
    "*/bias": ("embed.norm.bias",),
}
LINEN = Stranger(linen_shapes, linen_apply, "layers_{}", FLAX)


# --- Equinox: a module whose arrays are its parameters, layers in a list, kernels [outputs, inputs], heads flat ---


def equinox() -> Stranger:
    eqx = pytest.importorskip("equinox")

    class Block(eqx.Module):
        first: eqx.nn.LayerNorm
        attention: eqx.nn.MultiheadAttention
        second: eqx.nn.LayerNorm
        mlp: eqx.nn.MLP

        def __init__(self, embed, heads, head_dim, mlp, key):
            of_attention, of_mlp = jax.random.split(key)
            self.first, self.second = eqx.nn.LayerNorm(embed), eqx.nn.LayerNorm(embed)
            sizes = dict(qk_size=head_dim, vo_size=head_dim, use_output_bias=True)
            self.attention = eqx.nn.MultiheadAttention(heads, embed, **sizes, key=of_attention)
            self.mlp = eqx.nn.MLP(embed, embed, mlp, 1, jax.nn.gelu, key=of_mlp)

        def __call__(self, x):
            h, mask = jax.vmap(self.first)(x), np.tril(np.ones((len(x), len(x)), bool))
            x = x + self.attention(h, h, h, mask=mask)
            return x + jax.vmap(self.mlp)(jax.vmap(self.second)(x))

    class Equinox(eqx.Module):
        tokens: eqx.nn.Embedding
        positions: eqx.nn.Embedding
        blocks: list
        norm: eqx.nn.LayerNorm
        head: eqx.nn.Linear

        def __init__(self, vocab, context, layers, embed, heads, head_dim, mlp):
            keys = jax.random.split(jax.random.key(0), layers + 3)
            self.tokens = eqx.nn.Embedding(vocab, embed, key=keys[0])
            self.positions = eqx.nn.Embedding(context, embed, key=keys[1])
            self.blocks = [Block(embed, heads, head_dim, mlp, key) for key in keys[3:]]
            self.norm = eqx.nn.LayerNorm(embed)
            self.head = eqx.nn.Linear(embed, vocab, key=keys[2])

        def __call__(self, tokens):
            x = jax.vmap(self.tokens)(tokens) + jax.vmap(self.positions)(jnp.arange(len(tokens)))
            for block in self.blocks:
                x = block(x)
            return jax.vmap(self.head)(jax.vmap(self.norm)(x))

    @cache
    def known(sizes):
        model = eqx.filter_eval_shape(lambda: Equinox(**dict(sizes)))
        return eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def apply(sizes):
        static = known(tuple(sizes.items()))[1]
        return lambda params, tokens: jax.vmap(eqx.combine(params, static))(tokens)

    rules = {
        "*/attention/key_proj/weight": ("heads", "head_dim.in", "embed.in"),
        "*/attention/query_proj/weight": ("heads", "head_dim", "embed.in"),
        "*/attention/value_proj/weight": ("heads", "head_dim.value", "embed.in"),
        "*/attention/output_proj/bias": ("embed.bias",),
        "*/attention/output_proj/weight": ("embed", "heads.in", "head_dim.in"),
        "*/mlp/layers/0/bias": ("mlp.bias",),
        "*/mlp/layers/0/weight": ("mlp", "embed.in"),
        "*/mlp/layers/1/bias": ("embed.bias",),
        "*/mlp/layers/1/weight": ("embed", "mlp.in"),
        "head/bias": ("vocab.bias",),
        "head/weight": ("vocab", "embed.in"),
        "positions/weight": ("context", "embed"),
        "tokens/weight": ("vocab", "embed"),
        "*/bias": ("embed.norm.bias",),
        "*/weight": ("embed.norm.scale",),
    }
    fused = (
        ("*/[qkv]*_proj/weight", "(heads head_dim) embed"),
        ("*/output_proj/weight", "embed (heads head_dim)"),
    )
    return Stranger(lambda sizes: known(tuple(sizes.items()))[0], apply, "blocks/{}", rules, fused)

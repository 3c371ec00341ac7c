"""Fresh adapters change nothing, and growth preserves them wherever it preserves their model.

Their cost is counted.
"""

import json
import math
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import optax
import pytest
import tiny
from counting import products

from jaxgrow import flops, grow, grow_optimizer, sizes
from jaxgrow.checkpoints import CheckpointError
from jaxgrow.checkpoints.hf import storage
from jaxgrow.extras.models.cait import CaiTConfig
from jaxgrow.extras.peft import adapters
from jaxgrow.extras.peft.adapter_flops import adapter_train_flops
from jaxgrow.growth.maps import new_sizes, tile
from jaxgrow.models import Adapter, BERTConfig, GPT2Config, LlamaConfig, ViTConfig, from_json
from jaxgrow.operators import hypercloning, lemon, ligo, llama_pro, stack, staged

pytestmark = pytest.mark.usefixtures("x64")

WIDTHS = dict(layers=2, embed=8, heads=4, head_dim=2, mlp=10, dtype="float64")
TEXT, IMAGE = dict(vocab=11, context=8), dict(image=4, patch=2, channels=1, classes=3)
FAMILIES = {
    "gpt2": GPT2Config(**WIDTHS, **TEXT),
    "bert": BERTConfig(**WIDTHS, **TEXT),
    "llama": LlamaConfig(**WIDTHS, **TEXT, kv_heads=2),
    "vit": ViTConfig(**WIDTHS, **IMAGE),
    "cait": CaiTConfig(**WIDTHS, **IMAGE, class_layers=1),
}
HOULSBY = Adapter(size=3)
RELU = Adapter(size=3, activation="relu")


def inputs(config):
    if isinstance(config, ViTConfig | CaiTConfig):
        return np.random.default_rng(2).normal(size=(2, 4, 4, 1))
    return {"tokens": tiny.tokens()} if isinstance(config, BERTConfig) else tiny.tokens()


@cache
def _run(config):
    return jax.jit(lambda p: config.module.apply({"params": p}, inputs(config)))


def forward(config, params):
    return np.asarray(_run(config)(params))


def model(family, adapter=HOULSBY, **changes):
    """Return ``(config with adapters, parameters)``, all with random parameters of order 0.5."""
    config = replace(FAMILIES[family], adapter=adapter, **changes)
    return config, tiny.params(config)


def apart(config):
    """Return the same model without adapters."""
    return replace(config, adapter=None)


def silent(adapter):
    """Set the up-projection of each adapter to its initial zeros, ``U = 0`` and ``u = 0``."""
    return jax.tree_util.tree_map_with_path(
        lambda p, x: 0 * x if "'up'" in jax.tree_util.keystr(p) else x, adapter
    )


# --- definition ---


@pytest.mark.parametrize("family", ["gpt2", "llama", "vit", "cait"])
def test_they_add_something(family):
    config, params = model(family)
    alone, own = adapters.detach_adapters(params)
    without = forward(config, adapters.attach_adapters(alone, jax.tree.map(np.zeros_like, own)))
    np.testing.assert_array_equal(
        forward(config, adapters.attach_adapters(alone, silent(own))), without
    )
    assert tiny.distance(forward(config, params), without) > 1e-2
    assert sizes(params, config.axes()) == config.sizes()
    # For BERT, the comparison with NumPy below checks this.
    if family == "gpt2":
        np.testing.assert_array_equal(forward(apart(config), alone), without)


def test_they_start_as_identity():
    config, params = model("gpt2")
    fresh = adapters.init_adapters(config, jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, fresh, silent(fresh))
    down = fresh["blocks"]["mlp_adapter"]["down"]["kernel"]
    assert 0.5 * config.embed**-0.5 < np.abs(down).max() <= config.embed**-0.5
    jax.tree.map(
        lambda x, y: np.testing.assert_equal(x.shape, y.shape),
        fresh,
        adapters.detach_adapters(params)[1],
    )
    with pytest.raises(ValueError, match="has no adapter"):
        adapters.init_adapters(apart(config), jax.random.key(0))


def norm(x, p, eps=1e-12):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * p["scale"] + p["bias"]


def bottleneck(y, p, i, f=lambda h: np.maximum(h, 0)):
    kernel = {name: p[name]["kernel"][i] for name in p}
    return f(y @ kernel["down"] + p["down"]["bias"][i]) @ kernel["up"] + p["up"]["bias"][i]


def oracle(config, params, x):
    """Compute a post-LN BERT in NumPy with adapters placed as in Houlsby et al. (Figure 2)."""
    p = params["blocks"]

    def adapted(name, y, i):
        return y + bottleneck(y, p[f"{name}_adapter"], i)

    for i in range(config.layers):
        at = jax.tree.map(lambda a, i=i: a[i], p)
        a, m = at["attention"], at["mlp"]
        q, k, v = (
            np.einsum("btd,dhk->bthk", x, a[n]["kernel"]) + a[n]["bias"]
            for n in ("query", "key", "value")
        )
        weights = np.exp(np.einsum("bthk,bshk->bhts", q, k) / config.head_dim**0.5)
        y = np.einsum("bhts,bshk->bthk", weights / weights.sum(-1, keepdims=True), v)
        y = np.einsum("bthk,hkd->btd", y, a["out"]["kernel"]) + a["out"]["bias"]
        x = norm(x + adapted("attention", y, i), at["attention_norm"])
        h = x @ m["up"]["kernel"] + m["up"]["bias"]
        h = h * np.vectorize(lambda z: 0.5 * (1 + math.erf(z / math.sqrt(2))))(h)
        x = norm(x + adapted("mlp", h @ m["down"]["kernel"] + m["down"]["bias"], i), at["mlp_norm"])
    return x


def test_numpy_computes_the_same():
    config, params = model("bert", RELU, head="spans")
    start = (
        params["token_embedding"][tiny.tokens()]
        + params["position_embedding"][:5]
        + params["type_embedding"][0]
    )
    x = oracle(config, params, norm(start, params["embedding_norm"]))
    expected = x @ params["classifier"]["kernel"] + params["classifier"]["bias"]
    assert tiny.distance(forward(config, params), expected) < 1e-10


# --- growth ---

WIDER = {"embed": 16, "heads": 8, "mlp": 20}
# These growths preserve the function of a pre-LN model.
KEEP = {
    "hypercloning": lambda s: hypercloning(s, WIDER),
    "staged": lambda s: staged(s, WIDER),
    "lemon, ragged": lambda s: lemon(s, {"embed": 12, "mlp": 13}, seed=1),
    "llama_pro": lambda s: llama_pro(s, {"layers": 3}),
    "the bottleneck": lambda s: {"bottleneck": tile(3, 2)},
}


def change(config, params, growth):
    """Measure how far the function moves when the model and its adapters grow together."""
    alone, own = adapters.detach_adapters(params)
    axes, part = adapters.detach_adapters(config.axes())[0], adapters.adapter_growth(growth, config)
    after = config.resized(growth)
    small = {a for a in new_sizes(growth) if a in apart(config).sizes()}
    alone = grow(growth, alone, axes) if small else alone
    large = adapters.attach_adapters(alone, grow(part, own, adapters.adapter_axes(config)))
    jax.tree.map(np.testing.assert_array_equal, large, grow(growth, params, config.axes()))
    return tiny.distance(forward(after, large), forward(config, params)), large


@pytest.mark.parametrize("name", KEEP)
def test_a_preserving_growth_preserves_the_adapted_model(name):
    config, params = model("gpt2", RELU)
    assert change(config, params, KEEP[name](config.sizes()))[0] < 1e-10


def test_adapted_post_ln_models_are_exact_with_even_copies_only():
    config, params = model("bert", RELU)
    assert change(config, params, hypercloning(config.sizes(), WIDER))[0] < 1e-10
    assert change(config, params, llama_pro(config.sizes(), {"layers": 3}))[0] > 1e-2


def test_a_new_layer_s_adapter_adds_nothing_and_can_learn():
    config, params = model("gpt2")
    growth = llama_pro(config.sizes(), {"layers": 3})
    large = grow(
        adapters.adapter_growth(growth, config),
        adapters.detach_adapters(params)[1],
        adapters.adapter_axes(config),
    )
    own, old = large["blocks"]["mlp_adapter"], params["blocks"]["mlp_adapter"]
    for leaf in ("kernel", "bias"):
        np.testing.assert_array_equal(own["down"][leaf], old["down"][leaf][[0, 1, 1]])
        np.testing.assert_array_equal(
            own["up"][leaf], np.stack([*old["up"][leaf], np.zeros_like(old["up"][leaf][0])])
        )


def test_their_moments_are_those_of_training_the_grown_ones():
    """Check that growing after an optimizer step equals an optimizer step after growing.

    Growth copies the input of an adapter and divides the gradient of its output among the copies.
    """
    config = model("gpt2", replace(HOULSBY, at=("mlp",)))[0]
    growth, tx, rng = {"embed": tile(8, 2)}, optax.scale_by_adam(), np.random.default_rng(3)
    said, asked = rng.normal(size=(2, 5, 8))  # axes: position, embed
    part, names = adapters.adapter_growth(growth, config), adapters.adapter_axes(config)
    own = adapters.detach_adapters(tiny.params(config))[1]

    def gradient(own, said, asked):
        """Compute the gradient of ``asked . (relu(y D + d) U + u)`` by hand."""
        p = own["blocks"]["mlp_adapter"]
        h = said @ p["down"]["kernel"] + p["down"]["bias"][:, None]
        back = (h > 0) * (asked @ p["up"]["kernel"].swapaxes(1, 2))
        up = {
            "kernel": np.maximum(h, 0).swapaxes(1, 2) @ asked,
            "bias": np.tile(asked.sum(0), (2, 1)),
        }
        return {
            "blocks": {
                "mlp_adapter": {"down": {"kernel": said.T @ back, "bias": back.sum(1)}, "up": up}
            }
        }

    g = gradient(own, said, asked)
    large = gradient(grow(part, own, names), np.tile(said, 2), np.tile(asked, 2) / 2)

    def step(gradient, state):
        # The state is converted to NumPy arrays, which grow without compilation.
        return jax.tree.map(np.asarray, jax.jit(tx.update)(gradient, state)[1])

    state = step(g, tx.init(own))
    after = step(large, grow_optimizer(tx, state, part, own, names, "exact"))
    expected = grow_optimizer(tx, step(g, state), part, own, names, "exact")
    assert tiny.distance(after, expected) < 1e-12
    assert max(np.abs(x).max() for x in jax.tree.leaves(expected.mu)) > 1e-3


def test_learned_maps_are_of_the_model_with_its_adapters():
    config, params = model("gpt2")

    def maps(config):
        learned = ligo.init_coefficients(
            ligo.LiGO(), config.axes(), config.sizes(), {"embed": 12}, jax.random.key(0)
        )
        return ligo.learned_growth(learned, config.axes(), config.sizes())

    large = jax.eval_shape(lambda: grow(maps(config), params, config.axes()))
    assert large["blocks"]["mlp_adapter"]["up"]["kernel"].shape == (2, 3, 12)
    message = (
        r"attention_adapter/down/kernel: embed grows from 8 to 12 in the model, but the growth"
    )
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: adapters.adapter_growth(maps(apart(config)), config))


# --- cost ---


@pytest.mark.parametrize("family, adapter", [("gpt2", HOULSBY), ("bert", RELU)])
def test_every_matrix_product_of_their_training_is_counted(family, adapter):
    """Check that the FLOPs formula counts no gradient products for frozen kernels."""
    plain = replace(FAMILIES[family], dtype="float32", head="classes", tied=False)
    config = replace(plain, adapter=adapter)
    params = jax.eval_shape(config.init, jax.random.key(0))
    still, own = adapters.detach_adapters(params)

    def logits(own, head, still, tokens):
        inputs = {"tokens": tokens} if family == "bert" else tokens
        return config.module.apply(
            {"params": {**adapters.attach_adapters(still, own), **head}}, inputs
        )[:, 0].mean()

    head = {name: params[name] for name in ("classifier", "pooler") if name in params}
    arguments = own, head, still, jax.ShapeDtypeStruct((2, 8), np.int32)
    assert products(jax.make_jaxpr(logits)(*arguments).jaxpr) == flops.forward_flops(config, 16)
    counted = products(jax.make_jaxpr(jax.value_and_grad(logits, (0, 1)))(*arguments).jaxpr)
    assert counted == adapter_train_flops(adapter, plain, 16)
    assert counted < flops.train_flops(config, 16)
    with pytest.raises(ValueError, match="cannot be combined with frozen layers"):
        adapter_train_flops(adapter, plain, 16, frozen=1)


# --- errors ---


def test_adapter_settings_are_stored_in_the_config_only():
    config, params = model("llama", RELU)
    assert from_json(json.loads(json.dumps(config.as_json()))) == config
    assert apart(config).as_json()["adapter"] is None
    for wrong in (
        {"size": 0},
        {"at": []},
        {"at": ["norm"]},
        {"activation": "tanh"},
        {"width": 3},
        7,
    ):
        content = {**config.as_json()["adapter"], **wrong} if isinstance(wrong, dict) else wrong
        with pytest.raises(ValueError, match="adapter"):
            from_json({**config.as_json(), "adapter": content})
    with pytest.raises(CheckpointError, match="no setting for adapter"):
        storage.family_for(replace(config, dtype="float32"), None)
    alone, own = adapters.detach_adapters(params)
    deep = grow(
        stack(sizes(alone, apart(config).axes()), {"layers": 4}), alone, apart(config).axes()
    )
    message = r"number of layers, not 2 and 4. Grow the adapters with their model"
    with pytest.raises(ValueError, match=message):
        adapters.attach_adapters(deep, own)

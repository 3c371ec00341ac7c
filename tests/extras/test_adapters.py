"""Fresh adapters change nothing, and growth preserves them wherever it preserves their model."""

import json
import math
from dataclasses import replace
from functools import partial

import chex
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


@partial(jax.jit, static_argnums=0)
def forward(config, params):
    return config.module.apply({"params": params}, inputs(config))


def model(family, adapter=HOULSBY, **changes):
    """Return ``(config with adapters, parameters)``, all with random parameters of order 0.5."""
    config = replace(FAMILIES[family], adapter=adapter, **changes)
    return config, tiny.params(config)


def apart(config):
    """Return the same model without adapters."""
    return replace(config, adapter=None)


def silent(adapter):
    """Set the up-projection of each adapter to its initial zeros, ``U = 0`` and ``u = 0``."""
    up = {name: jax.tree.map(np.zeros_like, a["up"]) for name, a in adapter["blocks"].items()}
    return {"blocks": {name: {**a, "up": up[name]} for name, a in adapter["blocks"].items()}}


@pytest.mark.parametrize("family", ["gpt2", "llama", "vit", "cait"])
def test_they_add_something(family):
    config, params = model(family)
    alone, own = adapters.detach_adapters(params)
    each = (
        adapters.attach_adapters(alone, x) for x in (jax.tree.map(np.zeros_like, own), silent(own))
    )
    without, unused = (forward(config, of) for of in each)
    np.testing.assert_array_equal(unused, without)
    assert tiny.distance(forward(config, params), without) > 1e-2
    assert sizes(params, config.axes()) == config.sizes()
    # For BERT, the comparison with NumPy below checks this.
    if family == "gpt2":
        np.testing.assert_array_equal(forward(apart(config), alone), without)


def test_they_start_as_identity():
    config, params = model("gpt2")
    fresh = adapters.init_adapters(config, jax.random.key(0))
    chex.assert_trees_all_equal(fresh, silent(fresh))
    down = fresh["blocks"]["mlp_adapter"]["down"]["kernel"]
    assert 0.5 * config.embed**-0.5 < np.abs(down).max() <= config.embed**-0.5
    chex.assert_trees_all_equal_shapes(fresh, adapters.detach_adapters(params)[1])
    with pytest.raises(ValueError, match="has no adapter"):
        adapters.init_adapters(apart(config), jax.random.key(0))


def norm(x, p, eps=1e-12):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * p["scale"] + p["bias"]


def adapted(y, p):
    h = np.maximum(y @ p["down"]["kernel"] + p["down"]["bias"], 0)
    return y + h @ p["up"]["kernel"] + p["up"]["bias"]


def oracle(config, params, x):
    """Compute a post-LN BERT in NumPy with adapters placed as in Houlsby et al. (Figure 2)."""
    for i in range(config.layers):
        at = jax.tree.map(lambda a, i=i: a[i], params["blocks"])
        a, m = at["attention"], at["mlp"]
        each = (a[name] for name in ("query", "key", "value"))
        q, k, v = (np.einsum("btd,dhk->bthk", x, of["kernel"]) + of["bias"] for of in each)
        weights = np.exp(np.einsum("bthk,bshk->bhts", q, k) / config.head_dim**0.5)
        y = np.einsum("bhts,bshk->bthk", weights / weights.sum(-1, keepdims=True), v)
        y = np.einsum("bthk,hkd->btd", y, a["out"]["kernel"]) + a["out"]["bias"]
        x = norm(x + adapted(y, at["attention_adapter"]), at["attention_norm"])
        h = x @ m["up"]["kernel"] + m["up"]["bias"]
        h = h * np.vectorize(lambda z: 0.5 * (1 + math.erf(z / math.sqrt(2))))(h)
        y = h @ m["down"]["kernel"] + m["down"]["bias"]
        x = norm(x + adapted(y, at["mlp_adapter"]), at["mlp_norm"])
    return x


def test_numpy_computes_the_same():
    config, p = model("bert", RELU, head="spans")
    tokens = p["token_embedding"][tiny.tokens()]
    start = tokens + p["position_embedding"][:5] + p["type_embedding"][0]
    x = oracle(config, p, norm(start, p["embedding_norm"]))
    expected = x @ p["classifier"]["kernel"] + p["classifier"]["bias"]
    assert tiny.distance(forward(config, p), expected) < 1e-10


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
    chex.assert_trees_all_equal(large, grow(growth, params, config.axes()))
    return tiny.distance(forward(after, large), forward(config, params))


@pytest.mark.parametrize("name", KEEP)
def test_a_preserving_growth_preserves_the_adapted_model(name):
    config, params = model("gpt2", RELU)
    assert change(config, params, KEEP[name](config.sizes())) < 1e-10


def test_adapted_post_ln_models_are_exact_with_even_copies_only():
    config, params = model("bert", RELU)
    assert change(config, params, hypercloning(config.sizes(), WIDER)) < 1e-10
    assert change(config, params, llama_pro(config.sizes(), {"layers": 3})) > 1e-2


def test_a_new_layer_s_adapter_adds_nothing_and_can_learn():
    config, params = model("gpt2")
    growth = adapters.adapter_growth(llama_pro(config.sizes(), {"layers": 3}), config)
    own = adapters.detach_adapters(params)[1]
    large = grow(growth, own, adapters.adapter_axes(config))
    own, old = large["blocks"]["mlp_adapter"], params["blocks"]["mlp_adapter"]
    for leaf in ("kernel", "bias"):
        np.testing.assert_array_equal(own["down"][leaf], old["down"][leaf][[0, 1, 1]])
        up = old["up"][leaf]
        np.testing.assert_array_equal(own["up"][leaf], np.stack([*up, np.zeros_like(up[0])]))


def test_their_moments_grow_as_in_the_optimizer_state_of_the_model():
    config, params = model("gpt2")
    growth, tx = hypercloning(config.sizes(), WIDER), optax.scale_by_adam()
    nu = jax.tree.map(np.square, tiny.params(config, 2))
    states = tx.init(params)._replace(mu=tiny.params(config, 1), nu=nu)
    whole = grow_optimizer(tx, states, growth, params, config.axes(), "exact")
    mu, nu, own = (adapters.detach_adapters(x)[1] for x in (states.mu, states.nu, params))
    part, names = adapters.adapter_growth(growth, config), adapters.adapter_axes(config)
    found = grow_optimizer(tx, states._replace(mu=mu, nu=nu), part, own, names, "exact")
    for moments in ("mu", "nu"):
        expected = adapters.detach_adapters(getattr(whole, moments))[1]
        chex.assert_trees_all_equal(getattr(found, moments), expected)


def test_learned_maps_are_of_the_model_with_its_adapters():
    config, params = model("gpt2")

    def maps(config):
        learned = ligo.init_coefficients(
            ligo.LiGO(), config.axes(), config.sizes(), {"embed": 12}, jax.random.key(0)
        )
        return ligo.learned_growth(learned, config.axes(), config.sizes())

    large = jax.eval_shape(lambda: grow(maps(config), params, config.axes()))
    assert large["blocks"]["mlp_adapter"]["up"]["kernel"].shape == (2, 3, 12)
    says = r"attention_adapter/down/kernel: embed grows from 8 to 12 in the model, but the growth"
    with pytest.raises(ValueError, match=says):
        jax.eval_shape(lambda: adapters.adapter_growth(maps(apart(config)), config))


@pytest.mark.parametrize("family, adapter", [("gpt2", HOULSBY), ("bert", RELU)])
def test_every_matrix_product_of_their_training_is_counted(family, adapter):
    """Check that the FLOPs formula counts no gradient products for frozen kernels."""
    plain = replace(FAMILIES[family], dtype="float32", head="classes", tied=False)
    config = replace(plain, adapter=adapter)
    params = jax.eval_shape(config.init, jax.random.key(0))
    still, own = adapters.detach_adapters(params)

    def logits(own, head, still, tokens):
        inputs = {"tokens": tokens} if family == "bert" else tokens
        params = {**adapters.attach_adapters(still, own), **head}
        return config.module.apply({"params": params}, inputs)[:, 0].mean()

    head = {name: params[name] for name in ("classifier", "pooler") if name in params}
    arguments = own, head, still, jax.ShapeDtypeStruct((2, 8), np.int32)
    assert products(jax.make_jaxpr(logits)(*arguments).jaxpr) == flops.forward_flops(config, 16)
    counted = products(jax.make_jaxpr(jax.value_and_grad(logits, (0, 1)))(*arguments).jaxpr)
    assert counted == adapter_train_flops(adapter, plain, 16)
    assert counted < flops.train_flops(config, 16)


def test_adapter_settings_are_stored_in_the_config_only():
    config, params = model("llama", RELU)
    assert from_json(json.loads(json.dumps(config.as_json()))) == config
    assert apart(config).as_json()["adapter"] is None
    for wrong in ({"size": 0}, {"at": []}, {"at": ["norm"]}, {"activation": "tanh"}):
        content = {**config.as_json()["adapter"], **wrong}
        with pytest.raises(ValueError, match="adapter"):
            from_json({**config.as_json(), "adapter": content})
    with pytest.raises(CheckpointError, match="no setting for adapter"):
        storage.family_for(replace(config, dtype="float32"), None)
    alone, own = adapters.detach_adapters(params)
    deep = grow(stack(apart(config).sizes(), {"layers": 4}), alone, apart(config).axes())
    says = r"number of layers, not 2 and 4. Grow the adapters with their model"
    with pytest.raises(ValueError, match=says):
        adapters.attach_adapters(deep, own)

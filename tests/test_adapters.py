"""Adapters: at birth they change nothing, they keep their function where their model does, and what they cost is counted."""

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
from flax import linen as nn

from jaxgrow import adapters, flops, grow, grow_optimizer, ligo, sizes, swap
from jaxgrow.adapters import Adapter
from jaxgrow.interop import CheckpointError, huggingface
from jaxgrow.maps import new_sizes, tile
from jaxgrow.models import BERTConfig, CaiTConfig, GPT2Config, LlamaConfig, ViTConfig, from_json
from jaxgrow.models.adapters import Fusion
from jaxgrow.operators import coalesce, hypercloning, interleave, lemon, llama_pro, net2net, stack, staged

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
FUSED = Adapter(size=3, at=("mlp",), activation="relu", fused=2)


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
    """``(config with adapters, parameters)``, both trained; of order one half."""
    config = replace(FAMILIES[family], adapter=adapter, **changes)
    return config, tiny.params(config)


def apart(config):
    """The same model without adapters."""
    return replace(config, adapter=None)


def silent(adapter):
    """``U = 0`` and ``u = 0``, as at birth."""
    return jax.tree_util.tree_map_with_path(lambda p, x: 0 * x if "'up'" in jax.tree_util.keystr(p) else x, adapter)


# --- what they are ---


@pytest.mark.parametrize("family", FAMILIES)
def test_they_add_something(family):
    config, params = model(family)
    alone, own = adapters.detach(params)
    without = forward(config, adapters.attach(alone, jax.tree.map(np.zeros_like, own)))
    np.testing.assert_array_equal(forward(config, adapters.attach(alone, silent(own))), without)
    assert tiny.distance(forward(config, params), without) > 1e-2
    assert sizes(params, config.axes()) == config.sizes()
    if family == "gpt2":  # of another, the test by NumPy says so
        np.testing.assert_array_equal(forward(apart(config), alone), without)


def test_they_are_born_so():
    config, params = model("gpt2")
    fresh = adapters.init(config, jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, fresh, silent(fresh))
    down = fresh["blocks"]["mlp_adapter"]["down"]["kernel"]
    assert 0.5 * config.embed**-0.5 < np.abs(down).max() <= config.embed**-0.5
    jax.tree.map(lambda x, y: np.testing.assert_equal(x.shape, y.shape), fresh, adapters.detach(params)[1])
    like = np.ones((1, 1, 8)), np.ones((2, 1, 1, 8))
    value = nn.meta.unbox(jax.jit(Fusion("float32").init)(jax.random.key(0), *like))["params"]["value"]["kernel"]
    assert 0 < np.abs(value - np.eye(8)).max() < 1e-5
    with pytest.raises(ValueError, match="has no adapter"):
        adapters.init(apart(config), jax.random.key(0))


def norm(x, p, eps=1e-12):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * p["scale"] + p["bias"]


def bottleneck(y, p, i, f=lambda h: np.maximum(h, 0)):
    kernel = {name: p[name]["kernel"][i] for name in p}
    return f(y @ kernel["down"] + p["down"]["bias"][i]) @ kernel["up"] + p["up"]["bias"][i]


def oracle(config, params, x):
    """The layers of a post-LN BERT by loops of NumPy, with an adapter where Houlsby et al. draw it (Figure 2)."""
    p, adapter = params["blocks"], config.adapter

    def adapted(name, y, i):
        own = p.get(f"{name}_adapter")
        if own is None:
            return y
        if adapter.fused is None:
            return y + bottleneck(y, own, i)
        out, fusion = np.zeros_like(y), {n: p[f"{name}_fusion"][n]["kernel"][i] for n in ("query", "key", "value")}
        for place in np.ndindex(y.shape[:2]):
            each = [bottleneck(y[place], jax.tree.map(lambda a, n=n: a[:, n], own), i) for n in range(adapter.fused)]
            scores = np.exp([(y[place] @ fusion["query"]) @ (z @ fusion["key"]) for z in each])
            out[place] = sum(s * (z @ fusion["value"]) for s, z in zip(scores / scores.sum(), each, strict=True))
        return y + out

    for i in range(config.layers):
        at = jax.tree.map(lambda a, i=i: a[i], p)
        a, m = at["attention"], at["mlp"]
        q, k, v = (np.einsum("btd,dhk->bthk", x, a[n]["kernel"]) + a[n]["bias"] for n in ("query", "key", "value"))
        weights = np.exp(np.einsum("bthk,bshk->bhts", q, k) / config.head_dim**0.5)
        y = np.einsum("bhts,bshk->bthk", weights / weights.sum(-1, keepdims=True), v)
        y = np.einsum("bthk,hkd->btd", y, a["out"]["kernel"]) + a["out"]["bias"]
        x = norm(x + adapted("attention", y, i), at["attention_norm"])
        h = x @ m["up"]["kernel"] + m["up"]["bias"]
        h = h * np.vectorize(lambda z: 0.5 * (1 + math.erf(z / math.sqrt(2))))(h)
        x = norm(x + adapted("mlp", h @ m["down"]["kernel"] + m["down"]["bias"], i), at["mlp_norm"])
    return x


@pytest.mark.parametrize("adapter", [replace(HOULSBY, activation="relu"), FUSED], ids=["Houlsby", "fusion"])
def test_numpy_computes_the_same(adapter):
    config, params = model("bert", adapter, head="spans")
    start = params["token_embedding"][tiny.tokens()] + params["position_embedding"][:5] + params["type_embedding"][0]
    x = oracle(config, params, norm(start, params["embedding_norm"]))
    expected = x @ params["classifier"]["kernel"] + params["classifier"]["bias"]
    assert tiny.distance(forward(config, params), expected) < 1e-10


def test_what_is_fused_of_one_or_of_twins_is_that_adapter():
    config, params = model("gpt2", replace(FUSED, fused=None))
    alone, own = adapters.detach(params)
    for count in (1, 2):
        together = replace(config, adapter=replace(FUSED, fused=count))
        # Queries and keys are of no matter here; the value begins as nearly the identity.
        fusion = jax.tree.map(
            lambda x: np.broadcast_to(np.eye(8), x.shape), tiny.params(together)["blocks"]["mlp_fusion"]
        )
        like = adapters.detach(tiny.params(together))[1]
        both = adapters.fused([own] * count, {"blocks": {**like["blocks"], "mlp_fusion": fusion}})
        assert tiny.distance(forward(together, adapters.attach(alone, both)), forward(config, params)) < 1e-12
    with pytest.raises(ValueError, match="2 adapters make it"):
        adapters.fused([own, own], adapters.detach(tiny.params(replace(together, adapter=replace(FUSED, fused=3))))[1])
    with pytest.raises(ValueError, match="all of one shape"):
        adapters.fused([own, adapters.detach(model("gpt2", Adapter(4, ("mlp",)))[1])[1]], like)


# --- they grow with their model ---

WIDER = {"embed": 16, "heads": 8, "mlp": 20}
KEEP = {  # of a model whose norms come first
    "hypercloning": lambda s: hypercloning(s, WIDER),
    "staged": lambda s: staged(s, WIDER),
    "lemon, ragged": lambda s: lemon(s, {"embed": 12, "mlp": 13}, seed=1),
    "llama_pro": lambda s: llama_pro(s, {"layers": 3}),
    "the bottleneck": lambda s: {"bottleneck": tile(3, 2)},
}
OTHERS = {
    "stack": lambda s: stack(s, {"layers": 4}),
    "interleave": lambda s: interleave(s, {"layers": 3}),
    "net2net, ragged": lambda s: net2net(s, {"embed": 12}),
    "coalesce": lambda s: coalesce(s, heads=None, layers="adjacent"),
}


def change(config, params, growth):
    """How far the function moves, where model and adapters grow, each by its own."""
    alone, own = adapters.detach(params)
    axes, part = adapters.detach(config.axes())[0], adapters.growth(growth, config)
    after = config.resized(growth)
    small = {a for a in new_sizes(growth) if a in apart(config).sizes()}
    alone = grow(growth, alone, axes) if small else alone
    large = adapters.attach(alone, grow(part, own, adapters.axes_of(config)))
    jax.tree.map(np.testing.assert_array_equal, large, grow(growth, params, config.axes()))
    return tiny.distance(forward(after, large), forward(config, params)), large


@pytest.mark.parametrize("name", KEEP)
@pytest.mark.parametrize("adapter", [HOULSBY, FUSED], ids=["Houlsby", "fusion"])
def test_a_growth_that_keeps_the_model_keeps_it_with_its_adapters(name, adapter):
    config, params = model("gpt2", adapter)
    assert change(config, params, KEEP[name](config.sizes()))[0] < 1e-10


@pytest.mark.parametrize("name", OTHERS)
def test_one_that_does_not_keeps_neither(name):
    config, params = model("gpt2")
    moved, large = change(config, params, OTHERS[name](config.sizes()))
    assert moved > 1e-2
    if name == "stack":
        up = large["blocks"]["mlp_adapter"]["up"]["kernel"]
        np.testing.assert_array_equal(up, np.tile(params["blocks"]["mlp_adapter"]["up"]["kernel"], (2, 1, 1)))


def test_a_post_ln_model_keeps_its_function_where_every_unit_has_as_many_copies():
    config, params = model("bert", FUSED)
    assert change(config, params, hypercloning(config.sizes(), WIDER))[0] < 1e-10
    assert change(config, params, llama_pro(config.sizes(), {"layers": 3}))[0] > 1e-2


def test_the_way_back_is_the_inverse():
    config, params = model("gpt2", FUSED)
    growth = hypercloning(config.sizes(), WIDER)
    large = grow(growth, params, config.axes())
    assert tiny.distance(grow(swap(growth), large, config.axes()), params) < 1e-12


def test_a_new_layer_s_adapter_adds_nothing_and_can_learn():
    config, params = model("gpt2")
    _, large = change(config, params, llama_pro(config.sizes(), {"layers": 3}))
    own, old = large["blocks"]["mlp_adapter"], params["blocks"]["mlp_adapter"]
    for leaf in ("kernel", "bias"):
        np.testing.assert_array_equal(own["down"][leaf], old["down"][leaf][[0, 1, 1]])
        np.testing.assert_array_equal(own["up"][leaf], np.stack([*old["up"][leaf], np.zeros_like(old["up"][leaf][0])]))


def test_their_moments_are_those_of_training_the_grown_ones():
    """A step after growing is growing after the step; gradients are those of the two models."""
    config, params = model("gpt2")
    growth, (alone, own) = hypercloning(config.sizes(), WIDER), adapters.detach(params)
    part, names, tx = adapters.growth(growth, config), adapters.axes_of(config), optax.scale_by_adam()

    def gradient(config, alone, own):
        def of(own):
            logits = config.module.apply({"params": adapters.attach(alone, own)}, tiny.tokens())
            return jax.nn.log_softmax(logits)[..., 0].mean()

        return jax.jit(jax.grad(of))(own)

    g = gradient(config, alone, own)
    _, state = tx.update(g, tx.init(own))
    axes = adapters.detach(config.axes())[0]
    large = gradient(config.resized(growth), grow(growth, alone, axes), grow(part, own, names))
    _, after = tx.update(large, grow_optimizer(tx, state, part, own, names, "exact"))
    expected = grow_optimizer(tx, tx.update(g, state)[1], part, own, names, "exact")
    assert tiny.distance(after, expected) < 1e-12
    assert max(np.abs(x).max() for x in jax.tree.leaves(expected.mu)) > 1e-3


def test_learned_maps_are_of_the_model_with_its_adapters():
    config, params = model("gpt2")
    target, key = {"embed": 12}, jax.random.key(0)

    def maps(config):
        learned = ligo.init(ligo.LiGO(), config.axes(), config.sizes(), target, key)
        return ligo.growth(learned, config.axes(), config.sizes())

    large = grow(maps(config), params, config.axes())
    assert large["blocks"]["mlp_adapter"]["up"]["kernel"].shape == (2, 3, 12)
    with pytest.raises(
        ValueError,
        match="attention_adapter/down/kernel: embed grows from 8 to 12 in the model, but this growth has nothing",
    ):
        adapters.growth(maps(apart(config)), config)


# --- what they cost ---


@pytest.mark.parametrize("adapter", [HOULSBY, FUSED], ids=["Houlsby", "fusion"])
@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_every_matrix_product_of_their_training_is_counted(family, adapter):
    """Of kernels that stand still, adapters that are fused among them, no product makes a gradient."""
    plain = replace(FAMILIES[family], dtype="float32", head="classes", tied=False)
    config = replace(plain, adapter=adapter)
    params = jax.eval_shape(config.init, jax.random.key(0))
    still, own = adapters.detach(params, ("_adapter",) if adapter.fused is None else ("_fusion",))

    def logits(own, head, still, tokens):
        inputs = {"tokens": tokens} if family == "bert" else tokens
        return config.module.apply({"params": {**adapters.attach(still, own), **head}}, inputs)[:, 0].mean()

    head = {name: params[name] for name in ("classifier", "pooler") if name in params}
    arguments = own, head, still, jax.ShapeDtypeStruct((2, 8), np.int32)
    assert products(jax.make_jaxpr(logits)(*arguments).jaxpr) == flops.forward(config, 16)
    counted = products(jax.make_jaxpr(jax.value_and_grad(logits, (0, 1)))(*arguments).jaxpr)
    assert counted == flops.train(plain, 16, adapter=adapter)
    assert counted < flops.train(config, 16)
    with pytest.raises(ValueError, match="not together with frozen layers"):
        flops.train(plain, 16, adapter=adapter, frozen=1)


# --- what cannot be ---


def test_what_they_are_is_kept_with_the_config_and_nothing_else_is():
    config, params = model("llama", FUSED)
    assert from_json(json.loads(json.dumps(config.as_json()))) == config
    assert "adapter" not in apart(config).as_json()
    for wrong in ({"size": 0}, {"at": []}, {"at": ["norm"]}, {"activation": "tanh"}, {"fused": 0}, {"width": 3}, 7):
        content = {**config.as_json()["adapter"], **wrong} if isinstance(wrong, dict) else wrong
        with pytest.raises(ValueError, match="adapter"):
            from_json({**config.as_json(), "adapter": content})
    with pytest.raises(CheckpointError, match="no setting for adapter"):
        huggingface.family_for(replace(config, dtype="float32"), None)
    alone, own = adapters.detach(params)
    deep = grow(stack(sizes(alone, apart(config).axes()), {"layers": 4}), alone, apart(config).axes())
    with pytest.raises(ValueError, match="have 2 and 4; grow the adapters with their model"):
        adapters.attach(deep, own)

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
from flax import linen as nn

from jaxgrow import flops, grow, grow_optimizer, sizes, swap
from jaxgrow.checkpoints import CheckpointError, save
from jaxgrow.checkpoints.hf import adapterhub, storage
from jaxgrow.checkpoints.io.files import read_json
from jaxgrow.checkpoints.io.safetensors import header
from jaxgrow.growth.maps import new_sizes, tile
from jaxgrow.models import BERTConfig, CaiTConfig, GPT2Config, LlamaConfig, ViTConfig, from_json
from jaxgrow.models.bottleneck import Fusion
from jaxgrow.operators import coalesce, hypercloning, lemon, ligo, llama_pro, net2net, stack, staged
from jaxgrow.peft import adapters
from jaxgrow.peft.adapters import Adapter

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
FUSED = Adapter(size=3, activation="relu", fused=2)


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


@pytest.mark.parametrize(
    "family", ["gpt2", "llama", *(pytest.param(f, marks=pytest.mark.slow) for f in ("vit", "cait"))]
)
def test_they_add_something(family):
    config, params = model(family)
    alone, own = adapters.detach(params)
    without = forward(config, adapters.attach(alone, jax.tree.map(np.zeros_like, own)))
    np.testing.assert_array_equal(forward(config, adapters.attach(alone, silent(own))), without)
    assert tiny.distance(forward(config, params), without) > 1e-2
    assert sizes(params, config.axes()) == config.sizes()
    # For BERT, the comparison with NumPy below checks this.
    if family == "gpt2":
        np.testing.assert_array_equal(forward(apart(config), alone), without)


def test_they_start_as_identity():
    config, params = model("gpt2")
    fresh = adapters.init(config, jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, fresh, silent(fresh))
    down = fresh["blocks"]["mlp_adapter"]["down"]["kernel"]
    assert 0.5 * config.embed**-0.5 < np.abs(down).max() <= config.embed**-0.5
    jax.tree.map(
        lambda x, y: np.testing.assert_equal(x.shape, y.shape), fresh, adapters.detach(params)[1]
    )
    like = np.ones((1, 1, 8)), np.ones((2, 1, 1, 8))
    value = nn.meta.unbox(jax.jit(Fusion("float32").init)(jax.random.key(0), *like))["params"][
        "value"
    ]["kernel"]
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
    """Compute a post-LN BERT in NumPy with adapters placed as in Houlsby et al. (Figure 2)."""
    p, adapter = params["blocks"], config.adapter

    def adapted(name, y, i):
        own = p.get(f"{name}_adapter")
        if own is None:
            return y
        if adapter.fused is None:
            return y + bottleneck(y, own, i)
        out, fusion = (
            np.zeros_like(y),
            {n: p[f"{name}_fusion"][n]["kernel"][i] for n in ("query", "key", "value")},
        )
        for place in np.ndindex(y.shape[:2]):
            each = [
                bottleneck(y[place], jax.tree.map(lambda a, n=n: a[:, n], own), i)
                for n in range(adapter.fused)
            ]
            scores = np.exp([(y[place] @ fusion["query"]) @ (z @ fusion["key"]) for z in each])
            out[place] = sum(
                s * (z @ fusion["value"]) for s, z in zip(scores / scores.sum(), each, strict=True)
            )
        return y + out

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


@pytest.mark.parametrize(
    "adapter", [replace(HOULSBY, activation="relu"), FUSED], ids=["Houlsby", "fusion"]
)
def test_numpy_computes_the_same(adapter):
    config, params = model("bert", adapter, head="spans")
    start = (
        params["token_embedding"][tiny.tokens()]
        + params["position_embedding"][:5]
        + params["type_embedding"][0]
    )
    x = oracle(config, params, norm(start, params["embedding_norm"]))
    expected = x @ params["classifier"]["kernel"] + params["classifier"]["bias"]
    assert tiny.distance(forward(config, params), expected) < 1e-10


def test_gradients_of_a_fusion_are_those_of_the_formula():
    """The reference is the backward pass, by hand, of ``sum_n s_n z_n V``."""
    rng = np.random.default_rng(0)
    y, z, given = (rng.normal(size=shape) for shape in ((6, 8), (3, 6, 8), (6, 8)))
    query, key, value = rng.normal(size=(3, 8, 8))
    q, k = y @ query, z @ key
    weights = np.exp((q * k).sum(-1))
    weights /= weights.sum(0)
    by_weight = ((z @ value) * given).sum(-1)
    by_score = (weights * (by_weight - (weights * by_weight).sum(0)))[..., None]
    expected = {
        "query": y.T @ (by_score * k).sum(0),
        "key": np.einsum("nti,ntj->ij", z, by_score * q),
        "value": np.einsum("nti,ntj->ij", z, weights[..., None] * given),
    }

    def product(params):
        return (Fusion("float64").apply({"params": params}, y[None], z[:, None])[0] * given).sum()

    params = {"query": query, "key": key, "value": value}
    found = jax.grad(product)({name: {"kernel": kernel} for name, kernel in params.items()})
    for name, kernel in expected.items():
        np.testing.assert_allclose(found[name]["kernel"], kernel, rtol=0, atol=1e-10)


def test_what_is_fused_of_twins_is_each_of_them():
    config, params = model("gpt2", replace(HOULSBY, activation="relu"))
    alone, own = adapters.detach(params)
    together = replace(config, adapter=FUSED)
    like = adapters.detach(tiny.params(together))[1]
    # The result must not depend on the queries and keys, which stay random.
    for sublayer in FUSED.at:
        value = like["blocks"][f"{sublayer}_fusion"]["value"]
        value["kernel"] = np.broadcast_to(np.eye(8), value["kernel"].shape)
    both = adapters.fused([own, own], like)
    assert (
        tiny.distance(forward(together, adapters.attach(alone, both)), forward(config, params))
        < 1e-12
    )
    with pytest.raises(ValueError, match="3 adapters have the shape"):
        adapters.fused([own, own, own], like)
    with pytest.raises(ValueError, match="must have the same shapes"):
        adapters.fused([own, adapters.detach(model("gpt2", Adapter(4))[1])[1]], like)


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
OTHERS = {
    "stack": lambda s: stack(s, {"layers": 4}),
    "net2net, ragged": lambda s: net2net(s, {"embed": 12}),
    "coalesce": lambda s: coalesce(s, heads=None, layers="adjacent"),
}


def change(config, params, growth):
    """Measure how far the function moves when the model and its adapters grow together."""
    alone, own = adapters.detach(params)
    axes, part = adapters.detach(config.axes())[0], adapters.growth(growth, config)
    after = config.resized(growth)
    small = {a for a in new_sizes(growth) if a in apart(config).sizes()}
    alone = grow(growth, alone, axes) if small else alone
    large = adapters.attach(alone, grow(part, own, adapters.axes_of(config)))
    jax.tree.map(np.testing.assert_array_equal, large, grow(growth, params, config.axes()))
    return tiny.distance(forward(after, large), forward(config, params)), large


@pytest.mark.parametrize("name", KEEP)
def test_a_preserving_growth_preserves_the_adapted_model(name):
    config, params = model("gpt2", FUSED)
    assert change(config, params, KEEP[name](config.sizes()))[0] < 1e-10


@pytest.mark.parametrize("name", OTHERS)
def test_one_that_does_not_keeps_neither(name):
    config, params = model("gpt2")
    moved, large = change(config, params, OTHERS[name](config.sizes()))
    assert moved > 1e-2
    if name == "stack":
        up = large["blocks"]["mlp_adapter"]["up"]["kernel"]
        np.testing.assert_array_equal(
            up, np.tile(params["blocks"]["mlp_adapter"]["up"]["kernel"], (2, 1, 1))
        )


def test_adapted_post_ln_models_are_exact_with_even_copies_only():
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
    growth = llama_pro(config.sizes(), {"layers": 3})
    large = grow(
        adapters.growth(growth, config), adapters.detach(params)[1], adapters.axes_of(config)
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
    part, names = adapters.growth(growth, config), adapters.axes_of(config)
    own = adapters.detach(tiny.params(config))[1]

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
        learned = ligo.init(
            ligo.LiGO(), config.axes(), config.sizes(), {"embed": 12}, jax.random.key(0)
        )
        return ligo.growth(learned, config.axes(), config.sizes())

    large = jax.eval_shape(lambda: grow(maps(config), params, config.axes()))
    assert large["blocks"]["mlp_adapter"]["up"]["kernel"].shape == (2, 3, 12)
    with pytest.raises(
        ValueError,
        match=r"attention_adapter/down/kernel: embed grows from 8 to 12 in the model, but the growth",
    ):
        jax.eval_shape(lambda: adapters.growth(maps(apart(config)), config))


# --- cost ---


@pytest.mark.parametrize("family, adapter", [("gpt2", HOULSBY), ("bert", FUSED)])
def test_every_matrix_product_of_their_training_is_counted(family, adapter):
    """Check that the FLOPs formula counts no gradient products for frozen kernels.

    Fused adapters are frozen as well.
    """
    plain = replace(FAMILIES[family], dtype="float32", head="classes", tied=False)
    config = replace(plain, adapter=adapter)
    params = jax.eval_shape(config.init, jax.random.key(0))
    still, own = adapters.detach(params, ("_adapter",) if adapter.fused is None else ("_fusion",))

    def logits(own, head, still, tokens):
        inputs = {"tokens": tokens} if family == "bert" else tokens
        return config.module.apply({"params": {**adapters.attach(still, own), **head}}, inputs)[
            :, 0
        ].mean()

    head = {name: params[name] for name in ("classifier", "pooler") if name in params}
    arguments = own, head, still, jax.ShapeDtypeStruct((2, 8), np.int32)
    assert products(jax.make_jaxpr(logits)(*arguments).jaxpr) == flops.forward(config, 16)
    counted = products(jax.make_jaxpr(jax.value_and_grad(logits, (0, 1)))(*arguments).jaxpr)
    assert counted == flops.train(plain, 16, adapter=adapter)
    assert counted < flops.train(config, 16)
    with pytest.raises(ValueError, match="cannot be combined with frozen layers"):
        flops.train(plain, 16, adapter=adapter, frozen=1)


# --- errors ---


def test_adapter_settings_are_stored_in_the_config_only():
    config, params = model("llama", FUSED)
    assert from_json(json.loads(json.dumps(config.as_json()))) == config
    assert apart(config).as_json()["adapter"] is None
    for wrong in (
        {"size": 0},
        {"at": []},
        {"at": ["norm"]},
        {"activation": "tanh"},
        {"fused": 0},
        {"width": 3},
        7,
    ):
        content = {**config.as_json()["adapter"], **wrong} if isinstance(wrong, dict) else wrong
        with pytest.raises(ValueError, match="adapter"):
            from_json({**config.as_json(), "adapter": content})
    with pytest.raises(CheckpointError, match="no setting for adapter"):
        storage.family_for(replace(config, dtype="float32"), None)
    alone, own = adapters.detach(params)
    deep = grow(
        stack(sizes(alone, apart(config).axes()), {"layers": 4}), alone, apart(config).axes()
    )
    with pytest.raises(
        ValueError, match=r"number of layers, not 2 and 4. Grow the adapters with their model"
    ):
        adapters.attach(deep, own)


# --- AdapterHub's layout ---


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_adapterhub_s_layout_holds_the_same(family, tmp_path):
    config, params = model(family)
    _, own = adapters.detach(params)
    adapterhub.save(tmp_path / "hub", config, own, "task")
    back, read = adapterhub.load(tmp_path / "hub", apart(config))
    assert back == config.adapter
    jax.tree.map(np.testing.assert_array_equal, read, own)
    about, tensors = (
        read_json(tmp_path / "hub" / adapterhub.CONFIG),
        header(tmp_path / "hub" / adapterhub.WEIGHTS),
    )
    assert config.embed // about["config"]["reduction_factor"] == 3
    layer = {"bert": "bert.encoder.layer.1.output.", "gpt2": "transformer.h.1.output_adapters."}
    up = tensors[
        layer.get(family, "model.layers.1.output_adapters.") + "adapters.task.adapter_up.weight"
    ].read()
    np.testing.assert_array_equal(up.T, own["blocks"]["mlp_adapter"]["up"]["kernel"][1])


def test_what_adapterhub_computes_otherwise_is_refused(tmp_path):
    config, params = model("bert")
    adapterhub.save(tmp_path / "hub", config, params)
    file = tmp_path / "hub" / adapterhub.CONFIG
    about = read_json(file)
    with pytest.raises(CheckpointError, match="exists"):
        adapterhub.save(tmp_path / "hub", config, params)
    with pytest.raises(CheckpointError, match=r"has shape \(3, 8\), but the model needs \(3, 16\)"):
        adapterhub.load(tmp_path / "hub", replace(apart(config), embed=16, heads=8))
    with pytest.raises(CheckpointError, match=r"lacks bert\.encoder\.layer\.2\."):
        adapterhub.load(tmp_path / "hub", apart(config).resized({"layers": tile(2, 2)}))
    with pytest.raises(CheckpointError, match=r"has bert\.encoder\.layer\.1\."):
        adapterhub.load(tmp_path / "hub", replace(apart(config), layers=1))
    # The first configuration is the one of Pfeiffer et al.
    for wrong in (
        {"original_ln_before": True},
        {"non_linearity": "tanh"},
        {"phm_layer": True},
    ):
        file.write_text(json.dumps({**about, "config": {**about["config"], **wrong}}))
        with pytest.raises(CheckpointError, match="describes an adapter that is not supported"):
            adapterhub.load(tmp_path / "hub", apart(config))
    for other in (model("bert", FUSED)[0], model("vit")[0], apart(config)):
        with pytest.raises(CheckpointError, match="does not support"):
            adapterhub.save(tmp_path / "other", other, params)


@pytest.mark.third_party
@pytest.mark.parametrize(
    "adapter", [Adapter(4), Adapter(3, ("mlp",), "relu")], ids=["Houlsby", "Pfeiffer"]
)
@pytest.mark.parametrize(
    "plain, architecture",
    [
        (BERTConfig, "BertForMaskedLM"),
        (GPT2Config, "GPT2LMHeadModel"),
        (LlamaConfig, "LlamaForCausalLM"),
    ],
)
def test_adapterhub_computes_with_what_is_written(tmp_path, plain, architecture, adapter):
    torch, hf, published = (
        pytest.importorskip(name) for name in ("torch", "transformers", "adapters")
    )
    sizes = dict(vocab=64, context=16, layers=2, embed=16, heads=2, head_dim=8, mlp=32)
    own = {"kv_heads": 1} if plain is LlamaConfig else {}
    config, rng = plain(**sizes, **own, adapter=adapter), np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: rng.normal(size=x.shape).astype(np.float32) / 4, config.init(jax.random.key(0))
    )
    save(tmp_path / "base", apart(config), adapters.detach(params)[0])
    adapterhub.save(tmp_path / "hub", config, params)
    theirs = getattr(hf, architecture).from_pretrained(tmp_path / "base")
    published.init(theirs)
    theirs.set_active_adapters(theirs.load_adapter(str(tmp_path / "hub"), use_safetensors=True))
    tokens = rng.integers(0, 64, (2, 12))
    with torch.no_grad():
        logits = theirs.eval()(torch.tensor(tokens)).logits.numpy()
    ours = config.module.apply(
        {"params": params}, {"tokens": tokens} if plain is BERTConfig else tokens
    )
    np.testing.assert_allclose(logits, ours, atol=1e-4)

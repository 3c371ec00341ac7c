"""Folded CompleteP trains like the form with forward multipliers, and commutes with growth."""

import math
from dataclasses import replace
from functools import cache
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from runs import MODEL

from jaxgrow import grow, grow_optimizer, operators
from jaxgrow.axes import is_names, layers_of, path, role_of, split_kernel
from jaxgrow.extras.completep import multipliers
from jaxgrow.extras.models.cait import CaiTConfig
from jaxgrow.layerdrop import KeepMask
from jaxgrow.models import BERTConfig, Config, LlamaConfig, ViTConfig
from jaxgrow.optim.scaling import Multiplier
from train.state.model import initial
from train.state.optim import Optim, transformation

pytestmark = pytest.mark.usefixtures("x64")
BASE = tiny.config()
# The tests must detect each of these settings.
OPTIM = Optim(peak_lr=1e-2, eps=1e-4, weight_decay=0.3, clip=0.05, b2=0.9)
WIDTHS: dict[str, Any] = {"embed": 6, "heads": 2, "head_dim": 4, "mlp": 9}
TEXT = WIDTHS | {"vocab": 11, "context": 7, "layers": 2}
IMAGES = WIDTHS | {"image": 10, "patch": 5, "channels": 2, "classes": 7}
FAMILIES: dict[str, Config] = {
    "gpt2": tiny.config(dtype="float32"),
    "llama": LlamaConfig(**TEXT, kv_heads=1),
    "llama, norms after": LlamaConfig(**TEXT, kv_heads=1, norms="both", query_norm="head"),
    "experts": LlamaConfig(**TEXT, kv_heads=1, experts=2, active=1),
    "bert": BERTConfig(**TEXT, types=1),
    "bert, norms before": BERTConfig(**TEXT, types=1, norm="pre"),
    "vit": ViTConfig(**IMAGES, layers=2),
    "cait": CaiTConfig(**IMAGES, layers=2, class_layers=2),
}


def of(config, base=BASE):
    return multipliers(tiny.axes(config), config.sizes(), base.sizes())


def wide(times: int, depth: int = 1, **options):
    return tiny.config(**tiny.wider(times), layers=depth * tiny.WIDTHS["layers"], **options)


@cache
def stepping(config, optim):
    """Return ``(optimizer, (parameters, state, tokens) -> (parameters, state))``."""
    axes = tiny.axes(config)
    tx = transformation(optim, axes)

    @jax.jit
    def step(params, opt, tokens):
        updates, opt = tx.update(tiny.gradient(config)(params, tokens), opt, params, axes=axes)
        return jax.tree.map(lambda p, u: p - optim.peak_lr * u, params, updates), opt

    return tx, step


def trained(config, params, base=None, optim=OPTIM, opt=None):
    """Return ``(parameters, state)`` after three batches."""
    tx, step = stepping(config, replace(optim, base=base))
    opt = jax.jit(tx.init)(params) if opt is None else opt
    for i in range(3):
        params, opt = step(params, opt, tiny.tokens(seed=i))
    return jax.device_get((params, opt))


# --- the folded form equals the paper's form ---


def papers(params, tied, m_n, m_l):
    """Return the paper's ``(forward multiplier, rate, decay, eps)`` of each leaf at alpha = 1."""

    def leaf(key_path, x):
        name = path(key_path)
        if not name.startswith("blocks"):
            unembeds = name == "head_kernel" or (tied and name.startswith("final_norm"))
            return 1 / m_n if unembeds else 1.0, 1.0, 1.0, 1 / m_n
        out = 1 / m_l if name.startswith(("blocks/attention/out", "blocks/mlp/down")) else 1.0
        if name.endswith("kernel"):
            return out, 1 / m_n, m_n, 1 / (m_n * m_l)
        return out, 1.0, 1.0, 1 / (m_n * m_l)

    return jax.tree_util.tree_map_with_path(leaf, params)


@pytest.mark.parametrize("tied", [True, False])
def test_folded_and_forward_multipliers_train_identically(tied):
    """Branches and logits are multiplied in the forward pass, and AdamW is written by hand."""
    m_n, m_l = 3, 2
    config = wide(m_n, m_l, tied=tied)
    rules = papers(tiny.shapes_by_name(config), tied, m_n, m_l)
    folded = tiny.params(config)
    by_path = dict(zip(dict(paths(folded)), jax.tree.leaves(rules, is_leaf=is_rule), strict=True))
    whole = {p: w / by_path[p][0] for p, w in paths(folded)}
    structure = jax.tree.structure(folded)

    @jax.jit
    @jax.value_and_grad
    def gradient(leaves, t):
        params = jax.tree.unflatten(structure, list(leaves.values()))
        scale = np.full(config.layers, 1 / m_l)  # x + F(x) / m_L
        logits: Any = config.module.apply(
            {"params": params}, t[:, :-1], keep_mask=KeepMask(None, scale, "sublayer")
        )
        return -jnp.take_along_axis(jax.nn.log_softmax(logits / m_n), t[:, 1:, None], -1).mean()

    optim = replace(OPTIM, clip=1e9)  # which depends on the norm of all gradients
    mu, nu = ({p: 0 * w for p, w in whole.items()} for _ in range(2))
    for step in range(1, 4):
        _, grads = gradient(whole, tiny.tokens(seed=step - 1))
        for p, w in whole.items():
            _, rate, decay, eps = by_path[p]
            mu[p] = optim.b1 * mu[p] + (1 - optim.b1) * grads[p]
            nu[p] = optim.b2 * nu[p] + (1 - optim.b2) * grads[p] ** 2
            nu_hat = np.sqrt(nu[p] / (1 - optim.b2**step))
            u = mu[p] / (1 - optim.b1**step) / (nu_hat + eps * optim.eps)
            decay *= optim.weight_decay if p.endswith(("kernel", "embedding")) else 0
            whole[p] = w - rate * optim.peak_lr * (u + decay * w)
    base = tiny.config(tied=tied)
    mine, _ = trained(config, folded, base, optim=optim)
    for p, w in paths(mine):
        np.testing.assert_allclose(w, by_path[p][0] * whole[p], rtol=1e-9, atol=1e-11, err_msg=p)


def paths(tree, is_leaf=None):
    return [(path(p), x) for p, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf)]


def is_rule(x):
    return isinstance(x, tuple)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_model_of_base_size_trains_bitwise_as_without_a_base(name):
    axes = {"up": ("layers", "embed.in", "mlp"), "down": ("layers", "mlp.in", "embed")}
    axes |= {"table": ("vocab", "embed.below")}
    shapes = {"up": (2, 3, 4), "down": (2, 4, 3), "table": (5, 3)}
    rng = np.random.default_rng(0)
    params = {leaf: rng.normal(size=shape).astype(np.float32) for leaf, shape in shapes.items()}

    def stepped(base):
        tx = transformation(replace(OPTIM, name=name, base=base), axes)
        return jax.jit(lambda p: tx.update(p, tx.init(p), p, axes=axes))(params)

    bases = replace(BASE, embed=3, mlp=4), None, BASE
    of_base, plain, of_another = map(stepped, bases)
    chex.assert_trees_all_equal(*map(jax.tree.leaves, (of_base, plain)))
    assert np.abs(of_another[0]["up"] - plain[0]["up"]).max() > 0.1
    assert set(of(BASE).values()) == {Multiplier(1, 1, 1, 1)}


# --- growth by copies ---


@pytest.mark.parametrize(("name", "tied", "widths"), [
    ("adamw", True, ("embed", "heads", "mlp")),
    pytest.param("muon", False, ("heads", "mlp"), marks=pytest.mark.slow),
])  # fmt: skip
def test_growing_by_copies_and_training_commute(name, tied, widths):
    """Includes moments, clipping and weight decay."""
    config = tiny.config(tied=tied)
    target = {axis: n for axis, n in tiny.wider(3).items() if axis in widths}
    growth = operators.hypercloning(config.sizes(), target)
    large, axes = config.resized(growth), tiny.axes(config)
    # Muon adds eps to norms, which may grow.
    optim = replace(OPTIM, name=name, eps=1e-4 if name == "adamw" else 1e-10)
    tx = transformation(replace(optim, base=config), axes)
    begun, opt = trained(config, tiny.params(config), config, optim)
    after = grow(growth, trained(config, begun, config, optim, opt)[0], axes)
    start = grow(growth, begun, axes)
    moments = grow_optimizer(tx, opt, growth, begun, axes, "exact")
    assert tiny.distance(trained(large, start, config, optim, moments)[0], after) < 1e-7
    if name == "adamw":  # the control
        assert tiny.distance(trained(large, start, None, optim, moments)[0], after) > 1e-3


# --- the size of a step ---


def moved(config, base, optim):
    """RMS change of the last layer's output in the first four steps after initialisation."""
    config = replace(config, dtype="float32")
    params = initial(config, jax.random.key(0), base)
    tx, step = stepping(config, replace(optim, base=base))

    def output(params):
        see = {"observe": lambda x, y: y}
        logits, seen = config.module.apply({"params": params}, tiny.tokens(), **see)
        return np.asarray(seen[-1]), np.asarray(logits)

    before, opt = output(params), tx.init(params)
    for i in range(4):
        params, opt = step(params, opt, tiny.tokens(seed=i))
    return [np.sqrt(np.square(b - a).mean()) for a, b in zip(before, output(params), strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_coordinate_check_passes_only_with_a_base_config(name):
    """The coordinate check, for the stream after the last layer and for the logits."""
    base = tiny.config(embed=16, heads=4, mlp=64, layers=2)
    optim = Optim(name=name, peak_lr=2e-2, weight_decay=0.0, clip=1e9)
    large = replace(base, embed=128, heads=32, mlp=512), replace(base, layers=16)
    small = moved(base, base, optim)
    for config in large:
        ratios = np.divide(moved(config, base, optim), small)
        assert (ratios > 0.5).all() and (ratios < 2).all(), ratios
        assert max(np.divide(moved(config, None, optim), small)) > 3


# --- multipliers of every family ---


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_every_family_has_the_rules_of_its_axes(config):
    base = replace(config, layers=config.layers // 2)
    deep = multipliers(config.axes(), config.sizes(), base.sizes())
    sizes = {**base.sizes(), "layers": config.layers}
    for axis in ("embed", "heads", "kv_heads", "mlp"):
        sizes[axis] = 4 * sizes.get(axis, 1)
    both = multipliers(config.axes(), sizes, base.sizes())
    names = dict(paths(config.axes(), is_names))
    branches = {leaf for leaf, m in deep.items() if m.rate < 1}
    last = ("out/kernel", "down/kernel", "down")
    if getattr(config, "norms", "") == "both":
        last = "post_norm/scale"
    assert {leaf for leaf in names if leaf.startswith("blocks") and leaf.endswith(last)} <= branches
    assert all(leaf.startswith("blocks") for leaf in branches)
    for leaf, m in both.items():
        read = sum(n.startswith(("embed.in", "heads.in", "mlp.in")) for n in names[leaf])
        assert m.rate == deep[leaf].rate * 4.0**-read
    parts = ("head", "head_kernel", "classifier")
    heads = [leaf for leaf, n in names.items() if leaf.split("/")[0] in parts and len(n) > 1]
    heads += [leaf for leaf, n in names.items() if n[0].startswith("embed.in.norm")]
    assert {both[leaf] for leaf in heads} == {Multiplier(1 / 4, 1 / 4, 1, 1 / 4)}


def test_at_birth_every_leaf_has_the_bases_spread_at_its_scale():
    base = replace(MODEL, embed=16, heads=4, mlp=64, layers=4)
    large = replace(base, embed=64, heads=16, mlp=256, layers=16)
    small, grown = (
        {p: np.sqrt(np.square(x).mean()) for p, x in paths(initial(c, jax.random.key(0), base))}
        for c in (base, large)
    )
    found = multipliers(large.axes(), large.sizes(), base.sizes())
    for leaf, m in found.items():
        assert grown[leaf] == pytest.approx(small[leaf] * m.scale, rel=0.1), leaf
    assert found["blocks/mlp/down/kernel"].scale == 1 / 8


def test_scores_are_divided_by_head_dim_past_the_bases():
    found = of(tiny.config(head_dim=20))
    query, key = (found[f"blocks/attention/{name}/kernel"] for name in ("query", "key"))
    assert query.scale * key.scale == query.rate * key.rate == 1 / math.sqrt(4)
    assert found["blocks/attention/value/kernel"] == Multiplier(1, 1, 1 / 4, 1)
    assert found["blocks/attention/out/kernel"].rate == 1 / 4


@pytest.mark.parametrize("family", ["gpt2", "experts"])
def test_the_order_of_inputs_and_outputs_does_not_matter(family):
    """Kernels of layers in the order of PyTorch, [outputs, inputs], have the same multipliers."""
    config = FAMILIES[family]
    axes = tiny.axes(config)

    def turned(names):
        if not (layers_of(names) and role_of("", names) == "kernel"):
            return names
        kernel = split_kernel(names)
        return kernel.stacked + kernel.written + kernel.read

    torch = jax.tree.map(turned, axes, is_leaf=is_names)
    assert torch != axes
    larger = {name: (i + 2) * size for i, (name, size) in enumerate(config.sizes().items())}
    found = [multipliers(each, larger, config.sizes(), depth_scaled=True) for each in (torch, axes)]
    assert found[0] == found[1]

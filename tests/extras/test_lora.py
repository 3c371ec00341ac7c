"""A fresh LoRA changes nothing, grows with its model exactly, and is the only thing that trains."""

import re
from dataclasses import replace

import chex
import jax
import numpy as np
import pytest
import tiny
from counting import products

from jaxgrow import flops, grow, swap
from jaxgrow.checkpoints import CheckpointError
from jaxgrow.checkpoints.hf.storage import family_for
from jaxgrow.checkpoints.io.files import read_json
from jaxgrow.checkpoints.io.safetensors import read_header
from jaxgrow.checkpoints.source import leaves_by_path
from jaxgrow.extras import hf_peft as peft
from jaxgrow.extras.hf_peft import PeftAdapter
from jaxgrow.extras.peft import lora
from jaxgrow.extras.peft.adapter_flops import adapter_train_flops
from jaxgrow.extras.peft.lora import LoRA
from jaxgrow.growth.maps import AxisMap, tile
from jaxgrow.models import BERTConfig, GPT2Config, LlamaConfig
from jaxgrow.operators import (
    aki,
    coalesce,
    decoalesce,
    hypercloning,
    lemon,
    llama_pro,
    solar,
    stack,
    staged,
)

pytestmark = pytest.mark.usefixtures("x64")

SIZES = dict(vocab=11, context=8, layers=2, embed=8, heads=4, head_dim=2, mlp=10, dtype="float64")
FAMILIES = {
    "gpt2": GPT2Config(**SIZES),
    "bert": BERTConfig(**SIZES),
    "llama": LlamaConfig(**SIZES, kv_heads=2),
}
MIXTURE = LlamaConfig(**SIZES, kv_heads=2, experts=5, active=2)
# Each block of experts then has one row, and no block is empty.
MANY = replace(MIXTURE, experts=16)
EVERY = LoRA(rank=3, alpha=5.0, targets=("*/attention/*", "*/mlp/*"))


def sizes(family):
    return FAMILIES[family].sizes()


def wider(family):
    return {
        a: 2 * n for a, n in sizes(family).items() if a in ("embed", "heads", "kv_heads", "mlp")
    }


# Each growth is listed with the factor by which it multiplies the rank.
GROWTHS = {
    "hypercloning": (lambda f: hypercloning(sizes(f), wider(f)), 1),
    "stack": (lambda f: stack(sizes(f), {"layers": 5}), 1),
    "llama_pro": (lambda f: llama_pro(sizes(f), {"layers": 3}), 1),
    "decoalesce": (lambda f: decoalesce({**sizes(f), **wider(f), "layers": 4}, layers="adjacent"), 1),
    "coalesce, widths": (lambda f: coalesce(sizes(f), heads="far", layers=None), 1),
    "coalesce, layers": (lambda f: coalesce(sizes(f), heads=None, layers="adjacent"), 2),
    "lemon, ragged": (lambda f: lemon(sizes(f), {"embed": 12, "mlp": 13}, seed=1), 1),
    "staged": (lambda f: staged(sizes(f), wider(f)), 2),
    "aki": (lambda f: aki(sizes(f), wider(f)), 2),
    "solar, blended": (lambda f: solar(sizes(f), {"layers": 3}, blend=1), 2),
    "back from hypercloning": (lambda f: swap(hypercloning({**sizes(f), "mlp": 5}, {"mlp": 10})), 1),
}  # fmt: skip


def random(tree, seed=0):
    """Return random numbers of order 0.5 with the shapes of a tree."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: rng.normal(size=x.shape) / 2, tree)


def shapes(config):
    return jax.eval_shape(config.init, jax.random.key(0))


def model(family, adapter=EVERY):
    """Return ``(config, axes, parameters, trained adapter)``."""
    config = FAMILIES[family]
    fresh = jax.eval_shape(
        lambda: lora.init_lora(adapter, config.axes(), config.sizes(), jax.random.key(0))
    )
    return config, config.axes(), random(shapes(config)), random(fresh, seed=1)


def inputs(config):
    tokens = tiny.tokens()
    return {"tokens": tokens} if isinstance(config, BERTConfig) else tokens


def forward(config):
    return jax.jit(lambda p: config.module.apply({"params": p}, inputs(config)))


# --- definition ---


def test_fresh_lora_changes_nothing_and_trained_equals_merged():
    config, axes, params, trained = model("bert")
    run = forward(config)
    fresh = lora.init_lora(EVERY, axes, config.sizes(), jax.random.key(0))
    before = run(params)
    np.testing.assert_array_equal(run(lora.attach_lora(params, fresh, EVERY)), before)
    merged = run(lora.merge_lora(params, trained, EVERY))
    assert tiny.distance(run(lora.attach_lora(params, trained, EVERY)), merged) < 1e-10
    assert tiny.distance(merged, before) > 1e-2
    chex.assert_trees_all_equal_shapes_and_dtypes(lora.merge_lora(params, trained, EVERY), params)


def test_it_names_its_axes_by_those_of_the_kernel():
    axes = lora.lora_axes(EVERY, FAMILIES["llama"].axes())["blocks"]
    assert axes["attention"]["key"] == {
        "a": ("layers", "embed.in", "rank"),
        "b": ("layers", "rank.in", "kv_heads", "head_dim.in"),
    }
    assert axes["attention"]["out"] == {
        "a": ("layers", "heads.in", "head_dim.in", "rank"),
        "b": ("layers", "rank.in", "embed"),
    }


def test_what_is_drawn_for_a_kernel_is_no_matter_of_the_others():
    config = FAMILIES["gpt2"]
    few, all_ = (
        lora.init_lora(of, config.axes(), config.sizes(), jax.random.key(1))
        for of in (LoRA(3), EVERY)
    )
    chex.assert_trees_all_equal(
        few["blocks"]["attention"]["query"], all_["blocks"]["attention"]["query"]
    )
    assert np.abs(all_["blocks"]["mlp"]["down"]["a"]).max() <= config.mlp**-0.5
    assert not np.array_equal(
        few["blocks"]["attention"]["query"]["a"], few["blocks"]["attention"]["value"]["a"]
    )


# --- growth with the model ---


@pytest.mark.parametrize("name", GROWTHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_growing_both_and_merging_is_merging_and_growing(family, name):
    make, times = GROWTHS[name]
    growth = make(family)
    _, axes, params, adapter = model(family)
    own = lora.lora_growth(growth, EVERY, axes)
    grown = grow(own, adapter, lora.lora_axes(EVERY, axes))
    after = EVERY.resized(own)
    assert (after.rank, after.scale) == (times * EVERY.rank, EVERY.scale)
    both = lora.merge_lora(grow(growth, params, axes), grown, after)
    assert tiny.distance(both, grow(growth, lora.merge_lora(params, adapter, EVERY), axes)) < 1e-12


def test_a_new_layer_that_adds_nothing_can_learn():
    """Check that a new layer copies ``a``.

    If both factors were zero, neither would ever have a gradient.
    """
    _, axes, _, adapter = model("gpt2")
    own = lora.lora_growth(llama_pro(sizes("gpt2"), {"layers": 3}), EVERY, axes)
    out = grow(own, adapter, lora.lora_axes(EVERY, axes))["blocks"]["attention"]["out"]
    old = adapter["blocks"]["attention"]["out"]
    np.testing.assert_array_equal(out["a"], old["a"][[0, 1, 1]])
    np.testing.assert_array_equal(out["b"], np.stack([*old["b"], np.zeros_like(old["b"][0])]))


def test_its_rank_grows_by_copies():
    _, axes, params, adapter = model("gpt2")
    growth = {"rank": tile(3, times=2)}
    grown = grow(growth, adapter, lora.lora_axes(EVERY, axes))
    after = EVERY.resized(growth)
    assert after.rank == 6
    assert (
        tiny.distance(
            lora.merge_lora(params, grown, after), lora.merge_lora(params, adapter, EVERY)
        )
        < 1e-12
    )


# --- errors ---


def test_unknown_targets_and_mismatched_adapters_are_refused():
    _, axes, params, adapter = model("gpt2")
    message = r"the targets \['\*/wrong'\] of the LoRA match no module with a kernel\. .*mlp/down"
    with pytest.raises(ValueError, match=message):
        lora.lora_axes(LoRA(targets=("*/attention/query", "*/wrong")), axes)
    with pytest.raises(ValueError, match="a rank of at least 1"):
        LoRA(rank=0)
    growth = hypercloning(sizes("gpt2"), wider("gpt2"))
    message = r"blocks/attention/\w+: a LoRA of rank 3 with .* does not fit the kernel"
    with pytest.raises(ValueError, match=message):
        lora.merge_lora(grow(growth, params, axes), adapter, EVERY)
    with pytest.raises(ValueError, match=r"LoRA of rank 4"):
        lora.attach_lora(params, adapter, LoRA(rank=4))


def test_a_map_over_axes_of_both_factors_is_refused():
    axes = {"up": {"kernel": ("layers", "embed.in", "mlp")}}
    both = AxisMap(np.eye(6), np.eye(6), ((2, 3), (2, 3)))
    with pytest.raises(
        ValueError, match=re.escape("up/kernel: one map acts on the axes embed, mlp together")
    ):
        lora.lora_growth({("embed", "mlp"): both}, LoRA(targets=("up",)), axes)


# --- cost ---


@pytest.mark.parametrize(
    "family", [FAMILIES["gpt2"], FAMILIES["llama"], MANY], ids=["gpt2", "llama", "mixture"]
)
def test_every_matrix_product_of_its_training_is_counted(family):
    """Check that frozen kernels add no gradient products to the count.

    Only the experts that a token passes through are counted.
    """
    config = replace(family, dtype="float32", head="classes", tied=False)
    params = shapes(config)
    fresh = jax.eval_shape(
        lambda: lora.init_lora(EVERY, config.axes(), config.sizes(), jax.random.key(0))
    )
    tokens = jax.ShapeDtypeStruct((2, 8), np.int32)

    def loss(trained, params, tokens):
        head, adapter = trained
        return config.module.apply(
            {"params": lora.attach_lora({**params, **head}, adapter, EVERY)}, tokens
        )[:, 0].mean()

    arguments = ({"classifier": params["classifier"]}, fresh), params, tokens
    counted = products(jax.make_jaxpr(jax.value_and_grad(loss))(*arguments).jaxpr)
    assert adapter_train_flops(EVERY, config, 16, at_once=16) == counted
    assert counted < flops.train_flops(config, 16) + 3 * flops.forward_flops(config, 16)
    with pytest.raises(ValueError, match="cannot be combined with frozen layers"):
        adapter_train_flops(EVERY, config, 16, frozen=1)


# --- the PEFT layout ---


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_s_layout_holds_the_same_products(family, tmp_path):
    """Check that ``W + alpha / r B A`` in PyTorch's layout equals our merged kernel."""
    config, axes, params, adapter = model(family)
    peft.write_peft(tmp_path / "lora", PeftAdapter(config, EVERY, adapter))
    about, tensors = (
        read_json(tmp_path / "lora" / peft.CONFIG),
        read_header(tmp_path / "lora" / peft.WEIGHTS),
    )
    stored = family_for(config, None)[0].names(config)
    sizes, zeros = config.sizes(), jax.tree.map(np.zeros_like, params)
    merged = leaves_by_path(lora.merge_lora(zeros, adapter, EVERY))
    assert about["fan_in_fan_out"] == (family == "gpt2")
    assert about["r"] == EVERY.rank
    assert set(about.get("rank_pattern", {}).values()) == (
        {3 * EVERY.rank} if family == "gpt2" else set()
    )
    for path, kernel in merged.items():
        if not path.endswith("/kernel") or not path.startswith("blocks"):
            continue
        name = stored[path].name.format(layers=1).removesuffix(".weight")
        assert name in about["target_modules"]
        a, b = (tensors[f"base_model.model.{name}.lora_{x}.weight"].read() for x in "AB")
        rank = about.get("rank_pattern", {}).get(name, about["r"])
        assert a.shape[0] == b.shape[1] == rank
        product = about.get("alpha_pattern", {}).get(name, about["lora_alpha"]) / rank * b @ a
        theirs = product.T if about["fan_in_fan_out"] else product
        ours = stored[path].to_leaf(theirs, leaves_by_path(axes)[path], sizes)
        np.testing.assert_allclose(ours, kernel[1], atol=1e-12)
    back = peft.read_peft(tmp_path / "lora", config)
    assert tiny.distance(back.merged(zeros), lora.merge_lora(zeros, adapter, EVERY)) < 1e-12


def test_a_lora_of_another_model_is_refused(tmp_path):
    config, _, _, adapter = model("llama")
    own = PeftAdapter(config, EVERY, adapter)
    peft.write_peft(tmp_path / "lora", own)
    with pytest.raises(CheckpointError, match="exists"):
        peft.write_peft(tmp_path / "lora", own)
    with pytest.raises(CheckpointError, match=r"has shape \(8, 3\), but the model needs \(16, 3\)"):
        peft.read_peft(tmp_path / "lora", config.resized({"embed": tile(8, 2)}))
    with pytest.raises(CheckpointError, match=r"has model\.layers\.1\.self_attn"):
        peft.read_peft(tmp_path / "lora", replace(config, layers=1))
    message = "has no LoRA of a kernel in the layers of BertForMaskedLM"
    with pytest.raises(CheckpointError, match=message):
        peft.read_peft(tmp_path / "lora", FAMILIES["bert"])
    with pytest.raises(CheckpointError, match="all factors of the LoRA are zero"):
        peft.write_peft(
            tmp_path / "zero", replace(own, factors=jax.tree.map(np.zeros_like, adapter))
        )

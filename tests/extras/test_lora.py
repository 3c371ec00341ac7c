"""A fresh LoRA changes nothing, grows with its model exactly, and is the only thing that trains."""

from dataclasses import replace

import chex
import jax
import numpy as np
import pytest
import tiny
from counting import products

from jaxgrow import flops, grow, swap
from jaxgrow import operators as ops
from jaxgrow.checkpoints import CheckpointError
from jaxgrow.checkpoints.io.files import read_json
from jaxgrow.extras import hf_peft as peft
from jaxgrow.extras.hf_peft import PeftAdapter
from jaxgrow.extras.peft import lora
from jaxgrow.extras.peft.adapter_flops import adapter_train_flops
from jaxgrow.extras.peft.lora import LoRA
from jaxgrow.growth.maps import AxisMap, tile
from jaxgrow.models import BERTConfig, GPT2Config, LlamaConfig

pytestmark = pytest.mark.usefixtures("x64")

SIZES = dict(vocab=11, context=8, layers=2, embed=8, heads=4, head_dim=2, mlp=10, dtype="float64")
FAMILIES = {
    "gpt2": GPT2Config(**SIZES),
    "bert": BERTConfig(**SIZES),
    "llama": LlamaConfig(**SIZES, kv_heads=2),
}
# Each block of experts has one row, and no block is empty.
MANY = LlamaConfig(**SIZES, kv_heads=2, experts=16, active=2)
EVERY = LoRA(rank=3, alpha=5.0, targets=("*/attention/*", "*/mlp/*"))


def wider(old):
    return {axis: 2 * n for axis, n in old.items() if axis in ("embed", "heads", "kv_heads", "mlp")}


# Each growth is listed with the factor by which it multiplies the rank.
GROWTHS = {
    "hypercloning": (lambda s: ops.hypercloning(s, wider(s)), 1),
    "stack": (lambda s: ops.stack(s, {"layers": 5}), 1),
    "decoalesce": (lambda s: ops.decoalesce({**s, **wider(s), "layers": 4}, layers="adjacent"), 1),
    "coalesce, widths": (lambda s: ops.coalesce(s, heads="far", layers=None), 1),
    "coalesce, layers": (lambda s: ops.coalesce(s, heads=None, layers="adjacent"), 2),
    "lemon, ragged": (lambda s: ops.lemon(s, {"embed": 12, "mlp": 13}, seed=1), 1),
    "staged": (lambda s: ops.staged(s, wider(s)), 2),
    "aki": (lambda s: ops.aki(s, wider(s)), 2),
    "solar, blended": (lambda s: ops.solar(s, {"layers": 3}, blend=1), 2),
    "units of each layer": (
        lambda s: ops.prune(s, {"mlp": 3}, {"mlp": np.eye(s["layers"], s["mlp"])}),
        1,
    ),
    "units and layers": (
        lambda s: ops.prune(
            s, {"layers": 1, "mlp": 3}, {"layers": [0, 1], "mlp": np.eye(2, s["mlp"])}
        ),
        1,
    ),
    "back from hypercloning": (lambda s: swap(ops.hypercloning({**s, "mlp": 5}, {"mlp": 10})), 1),
}


def random(tree, seed=0):
    """Return random numbers of order 0.5 with the shapes of a tree."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: rng.normal(size=x.shape) / 2, tree)


def shapes(config):
    return jax.eval_shape(config.init, jax.random.key(0))


def initial(config, lora_=EVERY, seed=0):
    return lora.init_lora(lora_, config.axes(), config.sizes(), jax.random.key(seed))


def model(family):
    """Return ``(config, axes, parameters, trained adapter)``."""
    config = FAMILIES[family]
    adapter = random(jax.eval_shape(lambda: initial(config)), seed=1)
    return config, config.axes(), random(shapes(config)), adapter


def test_fresh_lora_changes_nothing_and_trained_equals_merged():
    config, _, params, trained = model("bert")
    run = jax.jit(lambda p: config.module.apply({"params": p}, {"tokens": tiny.tokens()}))
    fresh = initial(config)
    before = run(params)
    np.testing.assert_array_equal(run(lora.attach_lora(params, fresh, EVERY)), before)
    merged = run(lora.merge_lora(params, trained, EVERY))
    assert tiny.distance(run(lora.attach_lora(params, trained, EVERY)), merged) < 1e-10
    assert tiny.distance(merged, before) > 1e-2
    chex.assert_trees_all_equal_shapes_and_dtypes(lora.merge_lora(params, trained, EVERY), params)


def test_what_is_drawn_for_a_kernel_is_no_matter_of_the_others():
    config = FAMILIES["gpt2"]
    few, all_ = (initial(config, of, seed=1)["blocks"] for of in (LoRA(3), EVERY))
    chex.assert_trees_all_equal(few["attention"]["query"], all_["attention"]["query"])
    assert np.abs(all_["mlp"]["down"]["a"]).max() <= config.mlp**-0.5
    assert not np.array_equal(*(few["attention"][name]["a"] for name in ("query", "value")))


@pytest.mark.parametrize("name", GROWTHS)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_growing_both_and_merging_is_merging_and_growing(family, name):
    make, times = GROWTHS[name]
    config, axes, params, adapter = model(family)
    growth = make(config.sizes())
    own = lora.lora_growth(growth, EVERY, axes)
    grown = grow(own, adapter, lora.lora_axes(EVERY, axes))
    after = EVERY.resized(own)
    assert (after.rank, after.scale) == (times * EVERY.rank, EVERY.scale)
    both = lora.merge_lora(grow(growth, params, axes), grown, after)
    assert tiny.distance(both, grow(growth, lora.merge_lora(params, adapter, EVERY), axes)) < 1e-12


def test_a_new_layer_that_adds_nothing_can_learn():
    """If both factors were zero, neither would ever have a gradient."""
    config, axes, _, adapter = model("gpt2")
    own = lora.lora_growth(ops.llama_pro(config.sizes(), {"layers": 3}), EVERY, axes)
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
    small, large = ((adapter, EVERY), (grown, after))
    assert tiny.distance(*(lora.merge_lora(params, *of) for of in (small, large))) < 1e-12


def test_unknown_targets_and_mismatched_adapters_are_refused():
    config, axes, params, adapter = model("gpt2")
    message = r"the targets \['\*/wrong'\] of the LoRA match no module with a kernel\. .*mlp/down"
    with pytest.raises(ValueError, match=message):
        lora.lora_axes(LoRA(targets=("*/attention/query", "*/wrong")), axes)
    with pytest.raises(ValueError, match="a rank of at least 1"):
        LoRA(rank=0)
    growth = ops.hypercloning(config.sizes(), wider(config.sizes()))
    message = r"blocks/attention/\w+: a LoRA of rank 3 with .* does not fit the kernel"
    with pytest.raises(ValueError, match=message):
        lora.merge_lora(grow(growth, params, axes), adapter, EVERY)
    with pytest.raises(ValueError, match=r"LoRA of rank 4"):
        lora.attach_lora(params, adapter, LoRA(rank=4))


def test_a_map_over_axes_of_both_factors_is_refused():
    axes = {"up": {"kernel": ("layers", "embed.in", "mlp")}}
    both = AxisMap(np.eye(6), np.eye(6), ((2, 3), (2, 3)))
    with pytest.raises(ValueError, match="up/kernel: one map acts on the axes embed, mlp together"):
        lora.lora_growth({("embed", "mlp"): both}, LoRA(targets=("up",)), axes)


@pytest.mark.parametrize("family", [FAMILIES["gpt2"], MANY], ids=["gpt2", "mixture"])
def test_every_matrix_product_of_its_training_is_counted(family):
    """Frozen kernels have no gradients. Only the experts of a token count."""
    config = replace(family, dtype="float32", head="classes", tied=False)
    params, fresh = shapes(config), jax.eval_shape(lambda: initial(config))
    tokens = jax.ShapeDtypeStruct((2, 8), np.int32)

    def loss(trained, params, tokens):
        head, adapter = trained
        adapted = lora.attach_lora({**params, **head}, adapter, EVERY)
        return config.module.apply({"params": adapted}, tokens)[:, 0].mean()

    arguments = ({"classifier": params["classifier"]}, fresh), params, tokens
    counted = products(jax.make_jaxpr(jax.value_and_grad(loss))(*arguments).jaxpr)
    assert adapter_train_flops(EVERY, config, 16, at_once=16) == counted
    assert counted < flops.train_flops(config, 16) + 3 * flops.forward_flops(config, 16)
    with pytest.raises(ValueError, match="cannot be combined with frozen layers"):
        adapter_train_flops(EVERY, config, 16, frozen=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_files_in_the_layout_of_peft_hold_the_same_products(family, tmp_path):
    """`test_peft` compares them with PEFT. Here, fused kernels have a separate ``a`` each."""
    config, _, params, adapter = model(family)
    peft.write_peft(tmp_path / "lora", PeftAdapter(config, EVERY, adapter))
    about, fused = read_json(tmp_path / "lora" / peft.CONFIG), family == "gpt2"
    assert (about["fan_in_fan_out"], about["r"]) == (fused, EVERY.rank)
    assert set(about.get("rank_pattern", {}).values()) == ({3 * EVERY.rank} if fused else set())
    zeros = jax.tree.map(np.zeros_like, params)
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
    zero = replace(own, factors=jax.tree.map(np.zeros_like, adapter))
    with pytest.raises(CheckpointError, match="all factors of the LoRA are zero"):
        peft.write_peft(tmp_path / "zero", zero)

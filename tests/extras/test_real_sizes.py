"""The sizes of public checkpoints can be grown and coalesced, checked on shapes without numbers.

The sizes come from public configs, with vocabularies of 7.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest
import tiny

from jaxgrow import compose, grow, operators, preserves_function
from jaxgrow.axes import axis_of
from jaxgrow.checkpoints.hf.storage import family_for
from jaxgrow.checkpoints.source import initial_layout
from jaxgrow.growth.apply import check
from jaxgrow.growth.matrices import SparseMap
from jaxgrow.models import BERTConfig, Config, GPT2Config, LlamaConfig, ViTConfig

# layers, embed, heads, key heads, head_dim, mlp
LLAMA = {
    "Llama-2-7B": (32, 4096, 32, 32, 128, 11008),
    "Llama-3.1-8B": (32, 4096, 32, 8, 128, 14336),
    "SmolLM2-135M": (30, 576, 9, 3, 64, 1536),
    "SmolLM2-360M": (32, 960, 15, 5, 64, 2560),
    "Qwen2.5-0.5B": (24, 896, 14, 2, 64, 4864),
    "Qwen2.5-1.5B": (28, 1536, 12, 2, 128, 8960),
    "Qwen2.5-7B": (28, 3584, 28, 4, 128, 18944),
}


def _config(family: type[Config], layers: int, embed: int, heads: int, **more) -> Config:
    sizes = {"head_dim": embed // heads, "mlp": 4 * embed} | more
    return family(layers=layers, embed=embed, heads=heads, **sizes)


def _llama(layers, embed, heads, kv_heads, head_dim, mlp, **more) -> Config:
    own = {"kv_heads": kv_heads, "head_dim": head_dim, "mlp": mlp, "vocab": 7}
    return _config(LlamaConfig, layers, embed, heads, **own, **more)


MODELS: dict[str, Config] = {
    **{name: _llama(*sizes, qkv_bias=name.startswith("Qwen")) for name, sizes in LLAMA.items()},
    "GPT-2": _config(GPT2Config, 12, 768, 12, vocab=7, context=7),
    "GPT-2 XL": _config(GPT2Config, 48, 1600, 25, vocab=7, context=7),
    "BERT-large": _config(BERTConfig, 24, 1024, 16, vocab=7, context=7, norm="post"),
    "DeiT-tiny": _config(ViTConfig, 12, 192, 3, classes=7),
}
models = pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)


def leaves(config: Config) -> dict:
    """Return ``{path: (axis names, shape)}``.

    The names come from a small model, which is built faster.
    """
    sizes = config.sizes()
    small = {"layers": 1, "embed": 4, "heads": 2, "head_dim": 2, "mlp": 4}
    small |= {"kv_heads": 2} if "kv_heads" in sizes else {}
    found = {}
    for path, (names, shape) in initial_layout(replace(config, **small)).items():
        each = zip(names, shape, strict=True)
        found[path] = names, tuple(sizes.get(axis_of(n), size) for n, size in each)
    return found


def grown(growth, config: Config) -> Config:
    """Return the config after the growth, and check that it fits every leaf and an architecture."""
    old = leaves(config)
    shapes = {p: jax.ShapeDtypeStruct(shape, "float32") for p, (_, shape) in old.items()}
    check(growth, shapes, {p: names for p, (names, _) in old.items()})
    new = config.resized(growth)
    family_for(new, None)
    return new


@models
def test_heads_coalesce_by_name_at_every_size(config):
    up = operators.decoalesce(config.sizes(), heads="far")
    down = operators.coalesce(config.sizes(), heads="far")
    small = grown(down, config)
    assert grown(up, small) == config
    shared = config.sizes().get("kv_heads", config.heads)
    times = next(size for size in (2, 3, 5) if shared % size == 0)
    for axis in ("heads", "embed", "mlp"):
        assert getattr(config, axis) == times * getattr(small, axis)
    assert preserves_function(up)
    # The composition C(D(s)) is the identity on s.
    for name, m in compose(down, up).items():
        for matrix in (m.write, m.read):
            assert isinstance(matrix, SparseMap) and matrix.shape == (small.sizes()[name],) * 2
            np.testing.assert_array_equal(matrix.index[:, 0], np.arange(matrix.old), err_msg=name)
            np.testing.assert_allclose(matrix.weight, 1, rtol=0, atol=1e-12, err_msg=name)
    # A merged query head reads the merge of the key heads that its old heads read.
    if isinstance(config, LlamaConfig):
        assert isinstance(small, LlamaConfig)
        query, key = (up[axis].write.index[:, 0] for axis in ("heads", "kv_heads"))
        old_key = np.arange(config.heads) * config.kv_heads // config.heads
        np.testing.assert_array_equal(key[old_key], query * small.kv_heads // small.heads)


@pytest.mark.usefixtures("x64")
def test_what_coalesced_keeps_its_function_on_the_way_back():
    """One layer with the heads of a public model, two numbers per head, and as odd an MLP."""
    config = MODELS["SmolLM2-360M"]
    small = {"layers": 1, "vocab": 11, "head_dim": 2, "embed": 2 * config.heads}
    large = replace(config, dtype="float64", mlp=config.mlp // 256, **small)
    assert large.mlp % large.heads
    up = operators.decoalesce(large.sizes(), heads="far")
    small = large.resized(operators.coalesce(large.sizes(), heads="far"))
    params = tiny.params(small)
    before = tiny.forward(small)(params, tiny.tokens())
    after = tiny.forward(large)(grow(up, params, tiny.axes(small)), tiny.tokens())
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-12 * np.std(before))


def test_heads_coalesce_within_their_keys():
    """Merge nine heads on three keys in ways that leave the keys unchanged."""
    sizes = MODELS["SmolLM2-135M"].sizes()
    for groups in (
        {"heads": "adjacent:3", "kv_heads": "far:1"},
        {"heads": ((0, 1, 2), (3, 4, 5), (6, 7, 8))},
    ):
        small = MODELS["SmolLM2-135M"].resized(operators.coalesce(sizes, **groups))
        assert (small.heads, small.sizes()["kv_heads"], small.embed, small.mlp) == (3, 3, 192, 512)
    message = "After merging to 3 query heads and 3 key/value heads, some query heads would use"
    with pytest.raises(ValueError, match=message):
        operators.coalesce(sizes, heads="far:3", kv_heads="far:1")


def test_every_axis_takes_groups_of_its_own():
    config = MODELS["Qwen2.5-1.5B"]  # Its 8960 MLP units are not a multiple of 12 heads.
    groups = {"kv_heads": "far", "embed": "adjacent:3", "mlp": "far:7", "layers": "adjacent:4"}
    small = config.resized(operators.coalesce(config.sizes(), **groups))
    names = ("heads", "kv_heads", "embed", "mlp", "layers")
    assert [small.sizes()[name] for name in names] == [6, 1, 512, 1280, 7]
    alone = operators.coalesce(config.sizes(), embed="far")
    assert set(alone) == {"embed"} and alone["embed"].new == 768

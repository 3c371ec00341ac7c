"""Each part of a layer of the Llama family has its own place, in every combination of settings."""

from dataclasses import replace

import numpy as np
import pytest

from jaxgrow.checkpoints.source import initial_layout
from jaxgrow.extras.families.llama_like import fused_layouts
from jaxgrow.models.llama import LlamaConfig

CONFIG = LlamaConfig(
    vocab=11, context=7, layers=2, embed=12, heads=4, kv_heads=2, head_dim=2, mlp=8
)


@pytest.mark.parametrize("query_norm", ["none", "head", "all"])
def test_norms_of_queries_leave_fused_kernels_fused(query_norm):
    config = replace(CONFIG, query_norm=query_norm)
    places = fused_layouts(config)
    assert places.keys() == initial_layout(config).keys()
    parts = [places[f"blocks/attention/{part}/kernel"] for part in ("query", "key", "value")]
    assert {part.name for part in parts} == {"model.layers.{layers}.self_attn.qkv_proj.weight"}
    assert [part.part for part in parts] == [0, 1, 2]


def test_a_fused_kernel_before_a_norm_of_another_eps_is_scaled():
    config = replace(CONFIG, query_norm="head", eps=4e-6, query_eps=1e-6)
    places, sizes = fused_layouts(config), config.sizes()
    rng, tensor, leaves = np.random.default_rng(0), None, {}
    for part in ("query", "key", "value"):
        path = f"blocks/attention/{part}/kernel"
        axes, shape = initial_layout(config)[path]
        leaves[path] = rng.normal(size=shape[1:])
        tensor = places[path].to_tensor(leaves[path], axes, sizes, tensor)
    assert tensor is not None and tensor.shape == ((4 + 2 + 2) * 2, 12)
    for path, leaf in leaves.items():
        found = places[path].to_leaf(tensor, initial_layout(config)[path][0], sizes)
        np.testing.assert_allclose(found, leaf)
        assert places[path].times == (1.0 if "value" in path else 2.0)

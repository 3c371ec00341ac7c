"""A small Llama of Tunix."""

from collections.abc import Callable

import pytest
from flax import nnx


def llama_of_nnx(sizes: dict[str, int]) -> Callable[[], nnx.Module]:
    found = pytest.importorskip("tunix.models.llama3.model", reason="pip install google-tunix")
    config = found.ModelConfig(
        num_layers=sizes["layers"],
        vocab_size=sizes["vocab"],
        embed_dim=sizes["embed"],
        hidden_dim=sizes["mlp"],
        num_heads=sizes["heads"],
        head_dim=sizes["head_dim"],
        num_kv_heads=sizes["kv_heads"],
        rope_theta=10_000,
        norm_eps=1e-6,
        weight_tying=True,
    )
    return lambda: found.Llama3(config, rngs=nnx.Rngs(0))

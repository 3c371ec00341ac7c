"""A small Llama of Tunix."""

from collections.abc import Callable

import pytest
from flax import nnx


def llama_of_nnx(sizes: dict[str, int]) -> Callable[[], nnx.Module]:
    found = pytest.importorskip("tunix.models.llama3.model", reason="pip install google-tunix")
    widths = {
        "embed_dim": sizes["embed"],
        "hidden_dim": sizes["mlp"],
        "head_dim": sizes["head_dim"],
    }
    counts = {"num_layers": "layers", "num_heads": "heads", "num_kv_heads": "kv_heads"}
    counts = {name: sizes[axis] for name, axis in counts.items()} | {"vocab_size": sizes["vocab"]}
    fixed = {"rope_theta": 10_000, "norm_eps": 1e-6, "weight_tying": True}
    config = found.ModelConfig(**widths, **counts, **fixed)
    return lambda: found.Llama3(config, rngs=nnx.Rngs(0))

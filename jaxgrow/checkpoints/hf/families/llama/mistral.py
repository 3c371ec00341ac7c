"""Mistral, with a window in all layers, and Mixtral, a mixture of experts in each layer."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxgrow.checkpoints.hf.families.llama.architectures import MIXTURE, architectures, read_llama
from jaxgrow.checkpoints.hf.families.llama.parts import names
from jaxgrow.checkpoints.hf.rope import read_one_window, written_one_window


def _read_mistral(theirs: Mapping[str, Any]) -> dict[str, Any]:
    return read_llama(theirs, key_heads=8) | read_one_window(theirs, 131072)


def _read_mixtral(theirs: Mapping[str, Any]) -> dict[str, Any]:
    return (
        read_llama(theirs, key_heads=8, theta=1e6)
        | read_one_window(theirs, 131072, None)
        | {"gates_normed": True}
    )


MISTRAL = architectures(
    "Mistral",
    "mistral",
    131072,
    _read_mistral,
    written_one_window,
)
MIXTRAL = architectures(
    "Mixtral",
    "mixtral",
    131072,
    _read_mixtral,
    written_one_window,
    fields={**MIXTURE, "num_experts_per_tok": ("active", 2), "num_local_experts": ("experts", 8)},
    names=partial(
        names,
        router="block_sparse_moe.gate",
        experts=tuple(f"block_sparse_moe.experts.{{experts}}.w{i}" for i in (1, 3, 2)),
    ),
    # transformers 5 has this name for the mixture.
    renamed={".mlp.": ".block_sparse_moe."},
    mixture=True,
)

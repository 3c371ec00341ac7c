"""SmolLM 3: no rotary embeddings in every fourth layer."""

from collections.abc import Mapping
from typing import Any

from jaxgrow.checkpoints.hf.families.llama.architectures import (
    MLP_BIAS,
    UNBIASED,
    architectures,
    read_llama,
)
from jaxgrow.checkpoints.hf.rope import written_rope
from jaxgrow.models.llama import LlamaConfig, repeated_kinds


def _read_smollm3(theirs: Mapping[str, Any]) -> dict[str, Any]:
    layers = theirs["num_hidden_layers"]
    every = theirs.get("no_rope_layer_interval", 4)
    turned = theirs.get("no_rope_layers") or [(i + 1) % every != 0 for i in range(layers)]
    kinds = repeated_kinds("".join("f" if t else "n" for t in turned))
    return read_llama(theirs, key_heads=4, theta=2e6) | {"kinds": kinds}


def _written_smollm3(config: LlamaConfig) -> dict[str, Any]:
    kinds = config.layer_kinds
    return written_rope(config) | {
        "no_rope_layers": [int(kind != "n") for kind in kinds],
        "layer_types": ["full_attention"] * len(kinds),
        "use_sliding_window": False,
    }


SMOLLM3 = architectures(
    "SmolLM3",
    "smollm3",
    32768,
    _read_smollm3,
    _written_smollm3,
    fields=MLP_BIAS,
    settings={**UNBIASED, "use_sliding_window": (False,)},
    absent={"tie_word_embeddings": True},
)

"""Granite: factors of embeddings, scores, sublayers and logits.

The dense models of Granite 4 have the architecture of its hybrid models and are stored differently.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxgrow.checkpoints.hf.families.llama.architectures import (
    EPS,
    MLP_BIAS,
    architectures,
    read_biased,
    written_biased,
)
from jaxgrow.checkpoints.hf.families.llama.parts import LAYER, names
from jaxgrow.checkpoints.hf.tensor_layout import TensorLayout
from jaxgrow.checkpoints.io.files import spelt
from jaxgrow.models.llama import LlamaConfig


def _names(config: LlamaConfig) -> dict[str, TensorLayout]:
    """Return the places of the leaves of Granite.

    They are as in Llama. The factor of the embeddings is a setting, and not a part of the
    embedding.
    """
    return names(replace(config, embed_scale=1.0))


def _read_granite(theirs: Mapping[str, Any]) -> dict[str, Any]:
    ours = read_biased(theirs)
    multiplier = theirs.get("attention_multiplier", 1.0)
    if not multiplier > 0:
        raise ValueError(f"attention_multiplier is {multiplier!r}, but has to be greater than 0")
    if not theirs.get("logits_scaling", 1.0) > 0:
        raise ValueError(
            f"logits_scaling is {theirs['logits_scaling']!r}, but has to be greater than 0"
        )
    score_dim = float(multiplier**-2)
    usual = math.isclose(score_dim, ours["head_dim"], rel_tol=1e-9)
    return ours | {"score_dim": 0.0 if usual else score_dim}


def _written_granite(config: LlamaConfig) -> dict[str, Any]:
    multiplier = (config.score_dim or config.head_dim) ** -0.5
    return written_biased(config) | {"attention_multiplier": float(f"{multiplier:.12g}")}


def _names_4(config: LlamaConfig) -> dict[str, TensorLayout]:
    """Return the places of the leaves of a dense Granite 4. Gate and up are one tensor."""
    found = _names(config)
    for part, ours in enumerate(("gate", "up")):
        found[f"blocks/mlp/{ours}/kernel"] = TensorLayout(
            f"{LAYER}shared_mlp.input_linear.weight", "(2 mlp) embed", part
        )
    found["blocks/mlp/down/kernel"] = TensorLayout(
        f"{LAYER}shared_mlp.output_linear.weight", "embed mlp"
    )
    return found


def _read_granite_4(theirs: Mapping[str, Any]) -> dict[str, Any]:
    types = theirs.get("layer_types", theirs.get("layers_block_type")) or ["linear_attention"]
    other = [kind for kind in types if kind not in ("attention", "full_attention")]
    if other:
        raise ValueError(
            f"layer_types has {spelt(other[0])}, but jaxgrow supports Granite 4 only if all layers "
            "are attention, as in its dense models"
        )
    if theirs.get("num_local_experts", 8) != 0:
        raise ValueError(
            f"num_local_experts is {theirs.get('num_local_experts', 8)}, but jaxgrow supports "
            "Granite 4 only without experts (0)"
        )
    rotated = theirs.get("position_embedding_type") == "rope"
    return _read_granite(theirs) | {"kinds": "f" if rotated else "n"}


def _written_granite_4(config: LlamaConfig) -> dict[str, Any]:
    return _written_granite(config) | {
        "layer_types": ["full_attention"] * config.layers,
        "num_local_experts": 0,
        "position_embedding_type": "rope" if "f" in config.layer_kinds else None,
    }


_FIELDS = {
    **EPS,
    "embedding_multiplier": ("embed_scale", 1.0),
    "residual_multiplier": ("residual_scale", 1.0),
    "logits_scaling": ("logit_divisor", 1.0),
}
# `transformers` has no classifiers of these families.
GRANITE, _ = architectures(
    "Granite",
    "granite",
    2048,
    _read_granite,
    _written_granite,
    fields={**_FIELDS, **MLP_BIAS},
    names=_names,
    heads="must divide embed",
)
GRANITE_4, _ = architectures(
    "GraniteMoeHybrid",
    "granitemoehybrid",
    2048,
    _read_granite_4,
    _written_granite_4,
    fields={**_FIELDS, "shared_intermediate_size": ("mlp", 1024)},
    names=_names_4,
    # `transformers` checks the sizes of its recurrent layers, even if the model does not have any.
    always=lambda config: {
        "mamba_expand": 2,
        "mamba_n_heads": 1,
        "mamba_d_head": 2 * config.embed,
    },
    heads="must divide embed",
)

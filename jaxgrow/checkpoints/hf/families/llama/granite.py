"""Granite: factors of embeddings, scores, sublayers and logits."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxgrow.checkpoints.hf.base import Stored
from jaxgrow.checkpoints.hf.families.llama.architectures import (
    SILU,
    architectures,
    read_biased,
    written_biased,
)
from jaxgrow.checkpoints.hf.families.llama.parts import names
from jaxgrow.models.llama import LlamaConfig


def _names(config: LlamaConfig) -> dict[str, Stored]:
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


# `transformers` has no classifier of this family.
GRANITE, _ = architectures(
    "Granite",
    "granite",
    2048,
    _read_granite,
    _written_granite,
    fields={
        "rms_norm_eps": "eps",
        "embedding_multiplier": "embed_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_divisor",
    },
    absent={
        "rms_norm_eps": 1e-6,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
    names=_names,
    settings={"hidden_act": SILU, "mlp_bias": (False,)},
    heads="must divide embed",
)

"""Gemma 1, 2 and 3 (the text model only).

They have scaled embeddings and GELU, and the stored norm scales are the leaves minus one. Gemma 2
has norms before and after sublayers, a window in every other layer, and soft-capped scores and
logits. Gemma 3 has a window in five of six layers, two kinds of rotary embeddings, norms of queries
and keys, and no soft caps.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxgrow.checkpoints.hf.families.llama.architectures import architectures, read_llama
from jaxgrow.checkpoints.hf.families.llama.parts import names
from jaxgrow.checkpoints.hf.rope import (
    read_heads,
    read_layered_rope,
    read_windows,
    written_kinds,
    written_rope,
)
from jaxgrow.checkpoints.io.files import spelt
from jaxgrow.models.llama import LlamaConfig


def _read_gemma(theirs: Mapping[str, Any], key_heads: int = 16) -> dict[str, Any]:
    embed_scale = theirs["hidden_size"] ** 0.5
    return read_llama(theirs, key_heads, head_dim=256) | {"embed_scale": embed_scale}


def _read_gemma2(theirs: Mapping[str, Any]) -> dict[str, Any]:
    caps = {
        "score_cap": _cap(theirs, "attn_logit_softcapping", 50.0),
        "logit_cap": _cap(theirs, "final_logit_softcapping", 30.0),
    }
    ours = _read_gemma(theirs, 4)
    return ours | caps | _score_dim(theirs, ours["head_dim"]) | read_windows(theirs, "sf", 8192)


def _read_gemma3(theirs: Mapping[str, Any]) -> dict[str, Any]:
    pattern = "s" * (theirs.get("sliding_window_pattern", 6) - 1) + "f"
    ours = read_heads(theirs, 4, 256) | read_layered_rope(theirs, 1e6, "rope_local_base_freq", 1e4)
    return {
        **ours,
        **_score_dim(theirs, ours["head_dim"]),
        **read_windows(theirs, pattern, 131072),
        "embed_scale": theirs["hidden_size"] ** 0.5,
        # `transformers` also has a key for a soft cap of scores, but does not apply it.
        "logit_cap": _cap(theirs, "final_logit_softcapping", None),
    }


def _cap(theirs: Mapping[str, Any], key: str, absent: float | None) -> float:
    """Return a soft cap. Null in ``config.json`` means no cap, which is 0 in jaxgrow."""
    cap = theirs.get(key, absent)
    if cap is not None and not cap > 0:
        raise ValueError(
            f"{key} is {spelt(cap)}, but a soft cap has to be greater than 0; null disables it"
        )
    return 0.0 if cap is None else float(cap)


def _score_dim(theirs: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    scale = theirs.get("query_pre_attn_scalar", 256)
    return {"score_dim": float(scale) if scale != head_dim else 0.0}


def _written_gemma2(config: LlamaConfig) -> dict[str, Any]:
    scale = config.score_dim or config.head_dim
    return {
        **written_rope(config),
        **written_kinds(config),
        "query_pre_attn_scalar": int(scale) if scale == int(scale) else scale,
        "attn_logit_softcapping": config.score_cap or None,
        "final_logit_softcapping": config.logit_cap or None,
    }


def _written_gemma3(config: LlamaConfig) -> dict[str, Any]:
    return _written_gemma2(config) | {"rope_local_base_freq": config.local_theta}


_FORWARDS = {"use_bidirectional_attention": (False, None)}
_GELU = {"hidden_activation": ("gelu_pytorch_tanh",), "attention_bias": (False,), **_FORWARDS}
_SHIFTED: dict[str, Any] = {
    "names": partial(names, one=1.0),
    "folded": ("embed_scale", "query_eps"),
    "absent": {"tie_word_embeddings": True},
}

GEMMA = architectures(
    "Gemma",
    "gemma",
    8192,
    _read_gemma,
    fixed={"activation": "gelu_tanh"},
    # The first files have "gelu" for its tanh approximation. Later files have a second key, which
    # may be null.
    settings={
        "hidden_act": ("gelu_pytorch_tanh", "gelu"),
        "hidden_activation": ("gelu_pytorch_tanh", None),
        "attention_bias": (False,),
        **_FORWARDS,
    },
    **_SHIFTED,
)
GEMMA2 = architectures(
    "Gemma2",
    "gemma2",
    8192,
    _read_gemma2,
    _written_gemma2,
    fixed={"activation": "gelu_tanh", "norms": "both"},
    settings=_GELU,
    heads="must divide embed",
    **_SHIFTED,
)
GEMMA3 = architectures(
    "Gemma3",
    "gemma3_text",
    131072,
    _read_gemma3,
    _written_gemma3,
    fixed={"activation": "gelu_tanh", "norms": "both", "query_norm": "head"},
    settings=_GELU,
    heads="must divide embed",
    classifier="Gemma3Text",
    **_SHIFTED,
)

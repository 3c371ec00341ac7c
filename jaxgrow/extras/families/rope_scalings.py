"""How does ``config.json`` describe longer contexts, and rotary embeddings of layers with windows?"""

import math

from jaxgrow.checkpoints.hf.rope import (
    STORED_SCALINGS,
    StoredScaling,
    check_whole_heads,
    read_heads,
    read_rope,
    read_scaling,
    rope_type_of,
)
from jaxgrow.checkpoints.io.files import spelt
from jaxgrow.models.llama import LlamaConfig
from jaxgrow.typed import Json


def read_partial_rope(hf_config: Json, rotary: float) -> Json:
    """Return the fields of rotary embeddings that may rotate only a part of each head.

    Args:
      hf_config: the content of ``config.json``.
      rotary: the default fraction of each head that is rotated.
    """
    rope = hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {}
    key = "partial_rotary_factor"
    part = rope.get(key, hf_config.get(key))
    others = {name: value for name, value in rope.items() if name != key}
    head_dim = read_heads(hf_config)["head_dim"]
    return {
        **read_rope({**hf_config, key: None, "rope_scaling": others, "rope_parameters": None}),
        # `transformers` rounds the number of rotated dimensions down.
        "rotary": int((rotary if part is None else part) * head_dim) / head_dim,
    }


def read_layered_rope(
    hf_config: Json,
    theta: float,
    local_key: str | None,
    local_theta: float,
    *,
    key: str = "rope_theta",
) -> Json:
    """Return the fields of rotary embeddings if layers with windows have another base.

    Args:
      hf_config: the content of ``config.json``.
      theta: the default base of the layers with full attention.
      local_key: the top-level key for the base of the layers with windows; None: the
        family has no such key.
      local_theta: the default base of the layers with windows.
      key: the top-level key for the base of the layers with full attention.

    Raises:
      ValueError: layers with windows have scaled frequencies, or only a part of each head is
        rotated.
    """
    nested = hf_config.get("rope_parameters") or {}
    full = {**(nested.get("full_attention") or {}), **(hf_config.get("rope_scaling") or {})}
    local = nested.get("sliding_attention") or {}
    if rope_type_of(local) != "default":
        raise ValueError(
            f'rope_type of sliding_attention is {spelt(rope_type_of(local))}, but only "default" is supported there'
        )
    check_whole_heads(hf_config, full, local)
    return {
        "rope_theta": float(full.get("rope_theta") or hf_config.get(key) or theta),
        "local_theta": float(
            local.get("rope_theta") or (local_key and hf_config.get(local_key)) or local_theta
        ),
        "rotary": 1.0,
        **read_scaling(full, hf_config.get("max_position_embeddings"), None),
    }


def _read_factor(rope: Json, context: int | None, before: int | None) -> Json:
    return {"rope_by": rope_type_of(rope), "rope_factor": float(rope["factor"])}


def _written_factor(config: LlamaConfig) -> Json:
    return {"rope_type": config.rope_by, "factor": config.rope_factor}


def _context_before(kind: str, rope: Json, context: int | None, before: int | None) -> int:
    """The context before a scaling of this kind, from the arguments of `StoredScaling.read`."""
    before = before or rope.get("original_max_position_embeddings") or context
    if before is None or before < 2:
        raise ValueError(
            f"original_max_position_embeddings is {spelt(before)}, but rope_type {kind} needs 2 or more"
        )
    return before


def _factor_of(given: float | None, context: int | None, before: int) -> float:
    """Return the factor of a scaling; None: the ratio of the context after and before it."""
    return float((context or before) / before if given is None else given)


def _read_llama3(rope: Json, context: int | None, before: int | None) -> Json:
    before = _context_before("llama3", rope, context, before)
    return {
        "rope_by": "llama3",
        "rope_context": before,
        "rope_factor": _factor_of(rope["factor"], context, before),
        "rope_low": float(rope["low_freq_factor"]),
        "rope_high": float(rope["high_freq_factor"]),
    }


def _written_llama3(config: LlamaConfig) -> Json:
    return {
        "rope_type": "llama3",
        "factor": config.rope_factor,
        "original_max_position_embeddings": config.rope_context,
        "low_freq_factor": config.rope_low,
        "high_freq_factor": config.rope_high,
    }


def _read_longrope(rope: Json, context: int | None, before: int | None) -> Json:
    before = _context_before("longrope", rope, context, before)
    factor = _factor_of(rope.get("factor"), context, before)
    scale = rope.get("attention_factor")
    return {
        "rope_by": "longrope",
        "rope_context": before,
        "rope_short": tuple(map(float, rope["short_factor"])),
        "rope_long": tuple(map(float, rope["long_factor"])),
        "rope_scale": float(_long_scale(factor, before) if scale is None else scale),
    }


def _read_yarn(rope: Json, context: int | None, before: int | None) -> Json:
    before = _context_before("yarn", rope, context, before)
    factor = _factor_of(rope["factor"], context, before)
    scale = rope.get("attention_factor")
    return {
        "rope_by": "yarn",
        "rope_context": before,
        "rope_factor": factor,
        "rope_low": float(rope.get("beta_slow") or 1),
        "rope_high": float(rope.get("beta_fast") or 32),
        "rope_truncated": bool(rope.get("truncate", True)),
        "rope_scale": float(_yarn_scale(factor, rope) if scale is None else scale),
    }


def _written_longrope(config: LlamaConfig) -> Json:
    usual = _long_scale(config.context / config.rope_context, config.rope_context)
    return {
        "rope_type": "longrope",
        "short_factor": [*config.rope_short],
        "long_factor": [*config.rope_long],
        "original_max_position_embeddings": config.rope_context,
        **_written_scale(config, usual),
    }


def _written_yarn(config: LlamaConfig) -> Json:
    return {
        "rope_type": "yarn",
        "factor": config.rope_factor,
        "original_max_position_embeddings": config.rope_context,
        "beta_slow": config.rope_low,
        "beta_fast": config.rope_high,
        **({} if config.rope_truncated else {"truncate": False}),
        **_written_scale(config, _yarn_scale(config.rope_factor, {})),
    }


def _written_scale(config: LlamaConfig, usual: float) -> Json:
    """Older versions of transformers do not have this key, so it is written only if it is needed."""
    return {} if config.rope_scale == usual else {"attention_factor": config.rope_scale}


def _long_scale(factor: float, before: int) -> float:
    """Return the factor of queries and keys for longrope (Ding et al., 2024).

    Args:
      factor: the ratio of the context after and before the scaling.
      before: the context before the scaling.
    """
    return math.sqrt(1 + math.log(factor) / math.log(before)) if factor > 1 else 1.0


def _yarn_scale(factor: float, rope: Json) -> float:
    """Return the factor of queries and keys, ``0.1 ln(factor) + 1`` (Peng et al., 2023).

    With ``mscale`` and ``mscale_all_dim`` it is a ratio of two such factors.
    """

    def scale(times: float) -> float:
        return 0.1 * times * math.log(factor) + 1 if factor > 1 else 1.0

    above = rope.get("mscale")
    below = rope.get("mscale_all_dim")
    return scale(above) / scale(below) if above and below else scale(1)


STORED_SCALINGS.add("linear", StoredScaling(_read_factor, _written_factor))
STORED_SCALINGS.add("dynamic", StoredScaling(_read_factor, _written_factor))
STORED_SCALINGS.add("llama3", StoredScaling(_read_llama3, _written_llama3))
STORED_SCALINGS.add("yarn", StoredScaling(_read_yarn, _written_yarn))
STORED_SCALINGS.add("longrope", StoredScaling(_read_longrope, _written_longrope))

"""How does ``config.json`` describe "longrope" and "yarn", and rotary embeddings of layers with windows?"""

import math

from jaxgrow.checkpoints.hf.rope import (
    STORED_SCALINGS,
    StoredScaling,
    check_whole_heads,
    factor_of,
    read_scaling,
    rope_type_of,
)
from jaxgrow.checkpoints.io.files import spelt
from jaxgrow.models.llama import LlamaConfig
from jaxgrow.typed import Json


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


def _read_longrope(rope: Json, context: int | None, before: int) -> Json:
    factor = factor_of(rope.get("factor"), context, before)
    scale = rope.get("attention_factor")
    return {
        "rope_short": tuple(map(float, rope["short_factor"])),
        "rope_long": tuple(map(float, rope["long_factor"])),
        "rope_scale": float(_long_scale(factor, before) if scale is None else scale),
    }


def _read_yarn(rope: Json, context: int | None, before: int) -> Json:
    factor = factor_of(rope["factor"], context, before)
    scale = rope.get("attention_factor")
    return {
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


STORED_SCALINGS.add("longrope", StoredScaling(_read_longrope, _written_longrope))
STORED_SCALINGS.add("yarn", StoredScaling(_read_yarn, _written_yarn))

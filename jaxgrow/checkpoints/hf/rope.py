"""How does ``config.json`` describe the rotary embeddings?

Settings of rotary embeddings are at the top level (``rope_theta``), in ``rope_scaling``, or, since
transformers 5, in ``rope_parameters``, which may have an entry for each type of layers. If a file
has several of them, they have the same priority as in `transformers`. It is an error if
`transformers` computes a setting in another way than jaxgrow.
"""

import math

from jaxgrow.checkpoints.io.files import spelt
from jaxgrow.models.llama import LlamaConfig
from jaxgrow.typed import Json

TYPES = {"full_attention": "f", "sliding_attention": "s"}
_SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


# --- heads ---


def read_heads(hf_config: Json, key_heads: int | None = None, head_dim: int | None = None) -> Json:
    """Return the number of key/value heads and the head size.

    Args:
      hf_config: the content of ``config.json``.
      key_heads: the default number of key/value heads; None: the number of query heads.
      head_dim: the default head size; None: the hidden size divided by the number of query heads.
    """
    heads = hf_config["num_attention_heads"]
    return {
        "head_dim": hf_config.get("head_dim") or head_dim or hf_config["hidden_size"] // heads,
        "kv_heads": hf_config.get("num_key_value_heads", key_heads) or heads,
    }


# --- rotary embeddings ---


def read_rope(hf_config: Json, theta: float = 1e4, rotary: float | None = None) -> Json:
    """Return the fields of rotary embeddings that are the same in all layers.

    Args:
      hf_config: the content of ``config.json``.
      theta: the default base.
      rotary: the default fraction of each head that is rotated. None: the family rotates complete
        heads, and another fraction in ``config.json`` is an error.

    Raises:
      ValueError: there are settings for each type of layers, a fraction in a family that rotates
        complete heads, or an unknown type.
    """
    rope = hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {}
    if nested := TYPES.keys() & rope.keys():
        raise ValueError(
            f"rope_parameters has an entry for {sorted(nested)[0]}, but all layers of a {hf_config.get('model_type')} have the "
            "same rotary embeddings; give one entry for all layers"
        )
    part = 1.0
    if rotary is None:
        _check_whole(hf_config, rope)
    else:
        part = rope.get("partial_rotary_factor", hf_config.get("partial_rotary_factor"))
        part = rotary if part is None else part
    top = hf_config.get("original_max_position_embeddings")
    return {
        "rope_theta": float(rope.get("rope_theta") or hf_config.get("rope_theta") or theta),
        "rotary": float(part),
        **_scaling(rope, hf_config.get("max_position_embeddings"), top),
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
    if _rope_type(local) != "default":
        raise ValueError(
            f'rope_type of sliding_attention is {spelt(_rope_type(local))}, but only "default" is supported there'
        )
    _check_whole(hf_config, full, local)
    return {
        "rope_theta": float(full.get("rope_theta") or hf_config.get(key) or theta),
        "local_theta": float(
            local.get("rope_theta") or (local_key and hf_config.get(local_key)) or local_theta
        ),
        "rotary": 1.0,
        **_scaling(full, hf_config.get("max_position_embeddings"), None),
    }


def _check_whole(hf_config: Json, *ropes: Json) -> None:
    """Raise a `ValueError` if a ``config.json``, or its rotary embeddings, rotates parts of heads."""
    for place in (hf_config, *ropes):
        if place.get("partial_rotary_factor") not in (None, 1):
            raise ValueError(
                f"partial_rotary_factor is {place['partial_rotary_factor']}, but a {hf_config.get('model_type')} rotates "
                "complete heads. Remove the key, or set it to 1"
            )


def _rope_type(rope: Json) -> str:
    return rope.get("rope_type", rope.get("type", "default"))


def _scaling(rope: Json, context: int | None, before: int | None) -> Json:
    """Return the fields of a scaling to longer contexts.

    Args:
      rope: the settings of the rotary embeddings.
      context: ``max_position_embeddings``.
      before: the context before the scaling, if it is at the top level.
    """
    # Older files have the first name for the second one.
    kind = {"su": "longrope"}.get(_rope_type(rope), _rope_type(rope))
    if kind not in _SCALINGS:
        raise ValueError(
            f"rope_type is {spelt(kind)}, but only {', '.join(_SCALINGS)} are supported"
        )
    if kind == "default":
        return {}
    if kind in ("linear", "dynamic"):
        return {"rope_by": kind, "rope_factor": float(rope["factor"])}
    before = before or rope.get("original_max_position_embeddings") or context
    if before is None or before < 2:
        raise ValueError(
            f"original_max_position_embeddings is {spelt(before)}, but rope_type {kind} needs 2 or more"
        )
    fields: Json = {"rope_by": kind, "rope_context": before}
    factor = rope.get("factor") if kind == "longrope" else rope["factor"]
    factor = float((context or before) / before if factor is None else factor)
    scale = rope.get("attention_factor")
    if kind == "llama3":
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        return fields | {"rope_factor": factor, "rope_low": low, "rope_high": high}
    if kind == "longrope":
        fields["rope_short"] = tuple(map(float, rope["short_factor"]))
        fields["rope_long"] = tuple(map(float, rope["long_factor"]))
        usual = _long_scale(factor, before)
    else:
        low, high = float(rope.get("beta_slow") or 1), float(rope.get("beta_fast") or 32)
        fields |= {"rope_factor": factor, "rope_low": low, "rope_high": high}
        fields["rope_truncated"] = bool(rope.get("truncate", True))
        usual = _yarn_scale(factor, rope)
    return fields | {"rope_scale": float(usual if scale is None else scale)}


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


def written_rope(config: LlamaConfig) -> Json:
    """Return heads and rotary embeddings as transformers 4 writes them and 5 reads them."""
    return {
        "head_dim": config.head_dim,
        "num_key_value_heads": config.kv_heads,
        "rope_theta": config.rope_theta,
        "rope_scaling": _written_scaling(config),
    }


def _written_scaling(config: LlamaConfig) -> Json | None:
    by, low, high = config.rope_by, config.rope_low, config.rope_high
    if config.rope_factor == 1 and by != "longrope":
        return None
    out: Json = {"rope_type": by}
    usual = config.rope_scale
    if by == "longrope":
        out |= {"short_factor": [*config.rope_short], "long_factor": [*config.rope_long]}
        usual = _long_scale(config.context / config.rope_context, config.rope_context)
    else:
        out["factor"] = config.rope_factor
    if by not in ("linear", "dynamic"):
        out["original_max_position_embeddings"] = config.rope_context
    if by == "llama3":
        out |= {"low_freq_factor": low, "high_freq_factor": high}
    if by == "yarn":
        out |= {"beta_slow": low, "beta_fast": high}
        out |= {} if config.rope_truncated else {"truncate": False}
        usual = _yarn_scale(config.rope_factor, {})
    # Older versions of transformers do not have this key, so it is written only if it is needed.
    if config.rope_scale != usual:
        out["attention_factor"] = config.rope_scale
    return out

"""Rotary positions and windows of layers, as ``config.json`` describes them.

Settings of rotary positions are at the top level (``rope_theta``), in ``rope_scaling``, or, since
transformers 5, in ``rope_parameters``, which may have an entry for each type of layers. Where
several are there, they are read in the order in which `transformers` takes them. A setting that
`transformers` computes in another way than we do is refused.
"""

import math
from collections.abc import Mapping
from typing import Any

from jaxgrow.checkpoints.io.files import spelt
from jaxgrow.models.llama import LlamaConfig, period

TYPES = {"full_attention": "f", "sliding_attention": "s"}
_SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


# --- heads ---


def read_heads(
    theirs: Mapping[str, Any], key_heads: int | None = None, head_dim: int | None = None
) -> dict[str, Any]:
    """The number of key heads and the size of a head.

    Args:
      theirs: the content of ``config.json``.
      key_heads: the number of key heads where the key is left out; None: as many as query heads.
      head_dim: the size of a head where the key is left out; None: the width divided by the query
        heads.
    """
    heads = theirs["num_attention_heads"]
    return {
        "head_dim": theirs.get("head_dim") or head_dim or theirs["hidden_size"] // heads,
        "kv_heads": theirs.get("num_key_value_heads", key_heads) or heads,
    }


# --- rotary positions ---


def read_rope(
    theirs: Mapping[str, Any], theta: float = 1e4, rotary: float | None = None
) -> dict[str, Any]:
    """The rotary positions of a model whose layers all have the same.

    Args:
      theirs: the content of ``config.json``.
      theta: the base where it is left out.
      rotary: the part of each head that is rotated where it is left out; None: whole heads, and
        nothing else is read.

    Raises:
      ValueError: settings for each type of layers, a part of a head in a family that rotates whole
        heads, or an unknown type.
    """
    rope = theirs.get("rope_scaling") or theirs.get("rope_parameters") or {}
    if nested := TYPES.keys() & rope.keys():
        raise ValueError(
            f"rope_parameters has an entry for {sorted(nested)[0]}, but all layers of a {theirs.get('model_type')} have the "
            "same rotary positions; give one entry for all layers"
        )
    if rotary is None:
        for place in (theirs, rope):
            if place.get("partial_rotary_factor") not in (None, 1):
                raise ValueError(
                    f"partial_rotary_factor is {place['partial_rotary_factor']}, but a {theirs.get('model_type')} rotates "
                    "whole heads; remove the key, or set it to 1"
                )
    part = (
        rope.get("partial_rotary_factor", theirs.get("partial_rotary_factor"))
        if rotary is not None
        else None
    )
    top = theirs.get("original_max_position_embeddings")
    return {
        "rope_theta": float(rope.get("rope_theta") or theirs.get("rope_theta") or theta),
        "rotary": float((1.0 if rotary is None else rotary) if part is None else part),
        **_scaling(rope, theirs.get("max_position_embeddings"), top),
    }


def read_layered_rope(
    theirs: Mapping[str, Any],
    theta: float,
    local_key: str | None,
    local_theta: float,
    *,
    key: str = "rope_theta",
) -> dict[str, Any]:
    """The rotary positions of a model whose layers with windows have their own base.

    Args:
      theirs: the content of ``config.json``.
      theta: the base of the layers that see all tokens where it is left out.
      local_key: the top-level key of the base of the layers with windows; None: there is no such
        key.
      local_theta: that base where it is left out.
      key: the top-level key of the base of the layers that see all tokens.

    Raises:
      ValueError: layers with windows whose frequencies are scaled.
    """
    nested = theirs.get("rope_parameters") or {}
    full = {**(nested.get("full_attention") or {}), **(theirs.get("rope_scaling") or {})}
    local = nested.get("sliding_attention") or {}
    if _kind(local) != "default":
        raise ValueError(
            f'rope_type of sliding_attention is {spelt(_kind(local))}, but only "default" is computed there'
        )
    for rope in (full, local, theirs):
        if rope.get("partial_rotary_factor") not in (None, 1):
            raise ValueError(
                f"partial_rotary_factor is {rope['partial_rotary_factor']}, but whole heads are rotated here"
            )
    return {
        "rope_theta": float(full.get("rope_theta") or theirs.get(key) or theta),
        "local_theta": float(
            local.get("rope_theta") or (local_key and theirs.get(local_key)) or local_theta
        ),
        "rotary": 1.0,
        **_scaling(full, theirs.get("max_position_embeddings"), None),
    }


def _kind(rope: Mapping[str, Any]) -> str:
    return rope.get("rope_type", rope.get("type", "default"))


def _scaling(rope: Mapping[str, Any], context: int | None, before: int | None) -> dict[str, Any]:
    """The fields of a scaling to longer contexts.

    Args:
      rope: the settings.
      context: ``max_position_embeddings``.
      before: the context before the scaling, if it is at the top level.
    """
    kind = _kind(rope)
    if kind == "su":  # the first name of longrope
        kind = "longrope"
    if kind not in _SCALINGS:
        raise ValueError(f"rope_type is {spelt(kind)}, but only {', '.join(_SCALINGS)} can be read")
    if kind == "default":
        return {}
    if kind in ("linear", "dynamic"):
        return {"rope_by": kind, "rope_factor": float(rope["factor"])}
    before = before or rope.get("original_max_position_embeddings") or context
    if before is None or before < 2:
        raise ValueError(
            f"original_max_position_embeddings is {spelt(before)}, but rope_type {kind} needs 2 or more"
        )
    ours: dict[str, Any] = {"rope_by": kind, "rope_context": before}
    longer = (context or before) / before
    if kind == "longrope":
        return ours | _read_longrope(rope, longer, before)
    ours["rope_factor"] = float(longer if rope["factor"] is None else rope["factor"])
    if kind == "llama3":
        ours |= {
            "rope_low": float(rope["low_freq_factor"]),
            "rope_high": float(rope["high_freq_factor"]),
        }
    if kind == "yarn":
        ours |= {
            "rope_low": float(rope.get("beta_slow") or 1),
            "rope_high": float(rope.get("beta_fast") or 32),
        }
        ours["rope_truncated"] = bool(rope.get("truncate", True))
        scale = rope.get("attention_factor")
        ours["rope_scale"] = float(
            _yarn_scale(ours["rope_factor"], rope) if scale is None else scale
        )
    return ours


def _read_longrope(rope: Mapping[str, Any], longer: float, before: int) -> dict[str, Any]:
    factor, scale = rope.get("factor"), rope.get("attention_factor")
    factor = longer if factor is None else factor
    return {
        "rope_short": tuple(map(float, rope["short_factor"])),
        "rope_long": tuple(map(float, rope["long_factor"])),
        "rope_scale": float(_long_scale(factor, before) if scale is None else scale),
    }


def _long_scale(factor: float, before: int) -> float:
    """The factor of queries and keys in a context that is longer than before by ``factor`` (Ding et al., 2024)."""
    return math.sqrt(1 + math.log(factor) / math.log(before)) if factor > 1 else 1.0


def _yarn_scale(factor: float, rope: Mapping[str, Any]) -> float:
    """The factor of queries and keys, ``0.1 ln(factor) + 1`` (Peng et al., 2023), or a ratio of two such factors."""

    def scale(times: float) -> float:
        return 0.1 * times * math.log(factor) + 1 if factor > 1 else 1.0

    above, below = rope.get("mscale"), rope.get("mscale_all_dim")
    return scale(above) / scale(below) if above and below else scale(1)


def written_rope(config: LlamaConfig) -> dict[str, Any]:
    """Heads and rotary positions in the form of transformers 4, which transformers 5 reads too."""
    scaling: Any = _written_scaling(config)
    return {
        "head_dim": config.head_dim,
        "num_key_value_heads": config.kv_heads,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
    }


def _written_scaling(config: LlamaConfig) -> dict[str, Any] | None:
    by, before = config.rope_by, {"original_max_position_embeddings": config.rope_context}
    out: dict[str, Any]
    if by == "longrope":
        out = {
            "short_factor": list(config.rope_short),
            "long_factor": list(config.rope_long),
        } | before
        usual = _long_scale(config.context / config.rope_context, config.rope_context)
    elif config.rope_factor == 1:
        return None
    else:
        out = {"factor": config.rope_factor} | (before if by in ("llama3", "yarn") else {})
        usual = _yarn_scale(config.rope_factor, {}) if by == "yarn" else config.rope_scale
    if by == "llama3":
        out |= {"low_freq_factor": config.rope_low, "high_freq_factor": config.rope_high}
    if by == "yarn":
        out |= {"beta_slow": config.rope_low, "beta_fast": config.rope_high}
        out |= {} if config.rope_truncated else {"truncate": False}
    if config.rope_scale != usual:  # older versions of transformers know no such key
        out["attention_factor"] = config.rope_scale
    return {"rope_type": by} | out


# --- windows ---


def read_windows(
    theirs: Mapping[str, Any], kinds: str, positions: int, window: int | None = 4096
) -> dict[str, Any]:
    """The kinds of layers, and their window.

    Args:
      theirs: the content of ``config.json``.
      kinds: the kinds of layers where ``layer_types`` is left out, as of `LlamaConfig.kinds`.
      positions: ``max_position_embeddings`` where it is left out.
      window: ``sliding_window`` where it is left out.

    Raises:
      ValueError: a type of layers that is not computed here.
    """
    window, types = theirs.get("sliding_window", window), theirs.get("layer_types")
    if types is not None:
        unknown = [kind for kind in types if kind not in TYPES]
        if unknown:
            raise ValueError(f"layer_types has {spelt(unknown[0])}, not one of {', '.join(TYPES)}")
        kinds = "".join(TYPES[kind] for kind in types)
    layers = theirs["num_hidden_layers"]
    kinds = "".join(kinds[i % len(kinds)] for i in range(layers))
    # A window as long as a sequence hides nothing; but layers with windows may have a base of their
    # own.
    if window is None or (
        window >= (theirs.get("max_position_embeddings") or positions) and set(kinds) == {"s"}
    ):
        kinds = kinds.replace("s", "f")
    return {"kinds": period(kinds)} | ({"window": window} if "s" in kinds else {})


def read_one_window(
    theirs: Mapping[str, Any], positions: int, window: int | None = 4096
) -> dict[str, Any]:
    """The window of a model whose layers all have the same one: `transformers` does not read ``layer_types`` there."""
    return read_windows({**theirs, "layer_types": None}, "s", positions, window)


def written_kinds(config: LlamaConfig) -> dict[str, Any]:
    """The types of layers, and their window."""
    types = {letter: name for name, letter in TYPES.items()}
    window = {"sliding_window": config.window} if "s" in config.layer_kinds else {}
    return {"layer_types": [types.get(kind, "nope") for kind in config.layer_kinds]} | window


def written_one_window(config: LlamaConfig) -> dict[str, Any]:
    """Heads, rotary positions, and the window that all layers have."""
    return written_rope(config) | {
        "sliding_window": config.window if "s" in config.layer_kinds else None
    }

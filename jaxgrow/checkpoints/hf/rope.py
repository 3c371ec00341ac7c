"""How does ``config.json`` describe the rotary embeddings?

Settings of rotary embeddings are at the top level (``rope_theta``), in ``rope_scaling``, or, since
transformers 5, in ``rope_parameters``, which may have an entry for each type of layers. If a file
has several of them, they have the same priority as in `transformers`. It is an error if
`transformers` computes a setting in another way than jaxgrow.
"""

from collections.abc import Callable
from typing import NamedTuple

from jaxgrow.checkpoints.io.files import spelt
from jaxgrow.models.llama import LlamaConfig
from jaxgrow.registry import Registry
from jaxgrow.typed import Json

TYPES = {"full_attention": "f", "sliding_attention": "s"}


class StoredScaling(NamedTuple):
    """How ``config.json`` describes a scaling to longer contexts.

    Attributes:
      read: function from the settings of the rotary embeddings, ``max_position_embeddings`` and the
        context before the scaling, if it is at the top level, to fields of the config.
      write: function from the config to ``rope_scaling``.
    """

    read: Callable[[Json, int | None, int | None], Json]
    write: Callable[[LlamaConfig], Json]


STORED_SCALINGS: Registry[StoredScaling] = Registry("stored rotary scaling")


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


def read_rope(hf_config: Json, theta: float = 1e4) -> Json:
    """Return the fields of rotary embeddings that are the same in all layers.

    Args:
      hf_config: the content of ``config.json``.
      theta: the default base.

    Raises:
      ValueError: there are settings for each type of layers, only a part of each head is rotated, or
        the type is unknown.
    """
    rope = hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {}
    if nested := TYPES.keys() & rope.keys():
        raise ValueError(
            f"rope_parameters has an entry for {sorted(nested)[0]}, but all layers of a {hf_config.get('model_type')} have the "
            "same rotary embeddings; give one entry for all layers"
        )
    check_whole_heads(hf_config, rope)
    top = hf_config.get("original_max_position_embeddings")
    return {
        "rope_theta": float(rope.get("rope_theta") or hf_config.get("rope_theta") or theta),
        "rotary": 1.0,
        **read_scaling(rope, hf_config.get("max_position_embeddings"), top),
    }


def check_whole_heads(hf_config: Json, *ropes: Json) -> None:
    """Raise a `ValueError` if a ``config.json``, or its rotary embeddings, rotates parts of heads."""
    for place in (hf_config, *ropes):
        if place.get("partial_rotary_factor") not in (None, 1):
            raise ValueError(
                f"partial_rotary_factor is {place['partial_rotary_factor']}, but a {hf_config.get('model_type')} rotates "
                "complete heads. Remove the key, or set it to 1"
            )


def rope_type_of(rope: Json) -> str:
    """Return the kind of scaling that the settings of rotary embeddings name."""
    return rope.get("rope_type", rope.get("type", "default"))


def read_scaling(rope: Json, context: int | None, before: int | None) -> Json:
    """Return the fields of a scaling to longer contexts.

    Args:
      rope: the settings of the rotary embeddings.
      context: ``max_position_embeddings``.
      before: the context before the scaling, if it is at the top level.
    """
    # Older files have the first name for the second one.
    kind = {"su": "longrope"}.get(rope_type_of(rope), rope_type_of(rope))
    if kind == "default":
        return {}
    if kind not in STORED_SCALINGS:
        known = ", ".join(["default", *STORED_SCALINGS])
        raise ValueError(f"rope_type is {spelt(kind)}, but only {known} are supported")
    return STORED_SCALINGS[kind].read(rope, context, before)


def written_rope(config: LlamaConfig) -> Json:
    """Return heads and rotary embeddings as transformers 4 writes them and 5 reads them."""
    return {
        "head_dim": config.head_dim,
        "num_key_value_heads": config.kv_heads,
        "rope_theta": config.rope_theta,
        "rope_scaling": _written_scaling(config),
    }


def _written_scaling(config: LlamaConfig) -> Json | None:
    if config.rope_factor == 1 and config.rope_by != "longrope":
        return None
    return STORED_SCALINGS[config.rope_by].write(config)

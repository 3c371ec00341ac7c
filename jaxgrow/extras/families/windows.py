"""How does ``config.json`` describe the attention windows of layers?"""

from jaxgrow.checkpoints.hf.rope import TYPES, written_rope
from jaxgrow.checkpoints.io.files import spelt
from jaxgrow.models.llama import LlamaConfig, repeated_kinds
from jaxgrow.typed import Json


def read_windows(
    hf_config: Json, kinds: str, window: int | None = 4096, positions: int | None = None
) -> Json:
    """Return the kinds of the layers, and the size of their windows.

    Args:
      hf_config: the content of ``config.json``.
      kinds: the default for ``layer_types``, as `LlamaConfig.kinds`. It is repeated.
      window: the default for ``sliding_window``.
      positions: the default for ``max_position_embeddings``. A window of that length has no effect
        and is removed. Without it, the window stays, because layers with windows may have another
        rotary base than the others.

    Raises:
      ValueError: a type of layers is not supported.
    """
    window = hf_config.get("sliding_window", window)
    types = hf_config.get("layer_types")
    if types is not None:
        unknown = [kind for kind in types if kind not in TYPES]
        if unknown:
            raise ValueError(f"layer_types has {spelt(unknown[0])}, not one of {', '.join(TYPES)}")
        kinds = "".join(TYPES[kind] for kind in types)
    layers = hf_config["num_hidden_layers"]
    kinds = "".join(kinds[i % len(kinds)] for i in range(layers))
    if window is None or (
        positions and window >= (hf_config.get("max_position_embeddings") or positions)
    ):
        kinds = kinds.replace("s", "f")
    return {"kinds": repeated_kinds(kinds)} | ({"window": window} if "s" in kinds else {})


def read_one_window(hf_config: Json, positions: int, window: int | None = 4096) -> Json:
    """Return the kind and the window of a model whose layers are all of the same kind.

    `transformers` does not read ``layer_types`` for such a model.
    """
    return read_windows({**hf_config, "layer_types": None}, "s", window, positions)


def written_kinds(config: LlamaConfig) -> Json:
    """Return the types of the layers, and the size of their windows."""
    types = {letter: name for name, letter in TYPES.items()}
    window = {"sliding_window": config.window} if "s" in config.layer_kinds else {}
    return {"layer_types": [types.get(kind, "nope") for kind in config.layer_kinds]} | window


def written_one_window(config: LlamaConfig) -> Json:
    """Return heads, rotary embeddings, and the window that all layers share."""
    return written_rope(config) | {
        "sliding_window": config.window if "s" in config.layer_kinds else None
    }

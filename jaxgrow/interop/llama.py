"""The names of Llama, Qwen2 and Mistral, whose kernels lie output first, each in a tensor of its own."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxgrow.interop.family import Family, Stored
from jaxgrow.interop.labels import classes, problem
from jaxgrow.models.llama import LlamaConfig


def _names(config: LlamaConfig) -> dict[str, Stored]:
    layer = "model.layers.{layers}."
    names = {"token_embedding": Stored("model.embed_tokens.weight", "vocab embed")}
    for ours, theirs, heads in (("query", "q", "heads"), ("key", "k", "kv_heads"), ("value", "v", "kv_heads")):
        linear, outputs = f"{layer}self_attn.{theirs}_proj", f"({heads} head_dim)"
        names[f"blocks/attention/{ours}/kernel"] = Stored(f"{linear}.weight", f"{outputs} embed")
        if config.qkv_bias:
            names[f"blocks/attention/{ours}/bias"] = Stored(f"{linear}.bias", outputs)
    for ours, theirs, layout in (
        ("attention/out", "self_attn.o_proj", "embed (heads head_dim)"),
        ("mlp/gate", "mlp.gate_proj", "mlp embed"),
        ("mlp/up", "mlp.up_proj", "mlp embed"),
        ("mlp/down", "mlp.down_proj", "embed mlp"),
    ):
        names[f"blocks/{ours}/kernel"] = Stored(f"{layer}{theirs}.weight", layout)
    for ours, theirs in (
        ("blocks/attention_norm", layer + "input_layernorm"),
        ("blocks/mlp_norm", layer + "post_attention_layernorm"),
        ("final_norm", "model.norm"),
    ):
        names[f"{ours}/scale"] = Stored(f"{theirs}.weight", "embed")
    if config.head == "classes":
        names["classifier/kernel"] = Stored("score.weight", "classes embed")
    elif not config.tied:
        names["head_kernel"] = Stored("lm_head.weight", "vocab embed")
    return names


def _inferred(theirs: Mapping[str, Any], key_heads: int | None = None) -> dict[str, Any]:
    """Rotary positions lie at the top (``rope_theta``, ``rope_scaling``) or, since transformers 5, in ``rope_parameters``.

    ``key_heads``: what it means to leave them out, if not those of the queries.
    """
    heads = theirs["num_attention_heads"]
    rope = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ValueError(f"config.json: rope_type is {kind!r}, but only 'default' and 'llama3' can be read")
    ours = {
        "head_dim": theirs.get("head_dim") or theirs["hidden_size"] // heads,
        "kv_heads": theirs.get("num_key_value_heads", key_heads) or heads,
        "rope_theta": float(rope.get("rope_theta") or theirs.get("rope_theta") or 10000.0),
    }
    if kind == "llama3":
        ours["rope_factor"] = float(rope["factor"])
        ours["rope_low"] = float(rope["low_freq_factor"])
        ours["rope_high"] = float(rope["high_freq_factor"])
        ours["rope_context"] = rope["original_max_position_embeddings"]
    return ours


def _derived(config: LlamaConfig) -> dict[str, Any]:
    """In the form of transformers 4, which 5 reads too."""
    scaling = {
        "rope_type": "llama3",
        "factor": config.rope_factor,
        "low_freq_factor": config.rope_low,
        "high_freq_factor": config.rope_high,
        "original_max_position_embeddings": config.rope_context,
    }
    return {
        "head_dim": config.head_dim,
        "num_key_value_heads": config.kv_heads,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling if config.rope_factor != 1 else None,
    }


def _no_window(window: int | None, theirs: Mapping[str, Any], positions: int) -> None:
    """
    Raises:
      ValueError: layers attend to fewer tokens than a sequence may have.
    """
    length = theirs.get("max_position_embeddings") or positions
    if window is not None and window < length:
        raise ValueError(
            f"sliding_window is {window}, less than the {length} positions: such windows are not computed here"
        )


def _qwen2(theirs: Mapping[str, Any]) -> dict[str, Any]:
    upper = theirs["num_hidden_layers"] - theirs.get("max_window_layers", 28)
    types = theirs.get("layer_types") or ["sliding_attention"] * upper
    if theirs.get("use_sliding_window") and "sliding_attention" in types:
        _no_window(theirs.get("sliding_window", 4096), theirs, 32768)
    return _inferred(theirs) | {"qkv_bias": True}


def _mistral(theirs: Mapping[str, Any]) -> dict[str, Any]:
    _no_window(theirs.get("sliding_window", 4096), theirs, 131072)
    return _inferred(theirs, key_heads=8)


def _families(
    model: str,
    model_type: str,
    context: int,
    inferred: Callable[[Mapping[str, Any]], dict[str, Any]],
    derived: Callable[[LlamaConfig], dict[str, Any]] = lambda config: {},
    **more: Any,
) -> tuple[Family, Family]:
    """The architectures of a model that predicts tokens, and of one that predicts classes."""
    common: dict[str, Any] = dict(
        model_type=model_type,
        config=LlamaConfig,
        fields={
            "vocab_size": "vocab",
            "max_position_embeddings": "context",
            "num_hidden_layers": "layers",
            "hidden_size": "embed",
            "num_attention_heads": "heads",
            "intermediate_size": "mlp",
            "rms_norm_eps": "eps",
            "tie_word_embeddings": "tied",
        },
        names=_names,
        absent={"max_position_embeddings": context, "rms_norm_eps": 1e-6, "tie_word_embeddings": False},
        ignored=("*.rotary_emb.inv_freq",),
        prefix="model.",
        **more,
    )
    tokens = Family(
        architecture=f"{model}ForCausalLM",
        fixed={"head": "tokens"},
        inferred=inferred,
        derived=lambda config: _derived(config) | derived(config),  # type: ignore[arg-type]
        **common,
    )
    classifying = Family(
        architecture=f"{model}ForSequenceClassification",
        fixed={"head": "classes"},
        inferred=lambda theirs: inferred(theirs) | classes(theirs),
        derived=lambda config: _derived(config) | derived(config) | problem(config),  # type: ignore[arg-type]
        **common,
    )
    return tokens, classifying


_SILU = ("silu", "swish")

LlamaForCausalLM, LlamaForSequenceClassification = _families(
    "Llama",
    "llama",
    2048,
    _inferred,
    settings={"hidden_act": _SILU, "attention_bias": (False,), "mlp_bias": (False,)},
    heads="must divide embed",
)
Qwen2ForCausalLM, Qwen2ForSequenceClassification = _families(
    "Qwen2",
    "qwen2",
    32768,
    _qwen2,
    # No window, of however many layers.
    lambda config: {"layer_types": ["full_attention"] * config.layers, "use_sliding_window": False},
    settings={"hidden_act": _SILU},
    heads="free",
)
MistralForCausalLM, MistralForSequenceClassification = _families(
    "Mistral",
    "mistral",
    131072,
    _mistral,
    lambda config: {"sliding_window": None},
    settings={"hidden_act": _SILU},
    heads="free",
)

"""How is ModernBERT stored?

Kernels are stored as [outputs, inputs]. Queries, keys and values are one tensor. The gated units
and their gates are another one.
"""

from jaxgrow.checkpoints.hf.base import Family, with_head
from jaxgrow.checkpoints.hf.registry import register_families
from jaxgrow.checkpoints.hf.rope import read_heads
from jaxgrow.checkpoints.hf.tensor_layout import TensorLayout, linear_layouts
from jaxgrow.extras.families.rope_scalings import read_layered_rope
from jaxgrow.extras.families.windows import read_windows, written_kinds
from jaxgrow.extras.models.modernbert import ModernBERTConfig
from jaxgrow.typed import Json


def _modernbert_layouts(config: ModernBERTConfig) -> dict[str, TensorLayout]:
    names = _modernbert_body(config, "" if config.head == "states" else "model.")
    if config.head == "states":
        return names
    names["head_norm/scale"] = TensorLayout("head.norm.weight", "embed")
    names["transform/kernel"] = TensorLayout("head.dense.weight", "embed embed_in")
    if config.head != "tokens":
        return names | linear_layouts("classifier", "classifier", "classes")
    names["head_bias"] = TensorLayout("decoder.bias", "vocab")
    return (
        names
        if config.tied
        else names | {"head_kernel": TensorLayout("decoder.weight", "vocab embed")}
    )


def _modernbert_body(config: ModernBERTConfig, model: str) -> dict[str, TensorLayout]:
    """Return the places of the leaves without the head, with the name prefix ``model``."""
    layer = model + "layers.{layers}."
    names = {
        "token_embedding": TensorLayout(model + "embeddings.tok_embeddings.weight", "vocab embed")
    }
    for part, (path, of) in enumerate(
        {"query": "heads", "key": "kv_heads", "value": "kv_heads"}.items()
    ):
        stored = TensorLayout(f"{layer}attn.Wqkv.weight", f"(3 {of} head_dim) embed", part)
        names[f"blocks/attention/{path}/kernel"] = stored
    names["blocks/attention/out/kernel"] = TensorLayout(
        f"{layer}attn.Wo.weight", "embed (heads head_dim)"
    )
    for part, path in enumerate(("gate", "up")):
        names[f"blocks/mlp/{path}/kernel"] = TensorLayout(
            f"{layer}mlp.Wi.weight", "(2 mlp) embed", part
        )
    names["blocks/mlp/down/kernel"] = TensorLayout(f"{layer}mlp.Wo.weight", "embed mlp")
    names["blocks/attention_norm/scale"] = TensorLayout(
        f"{layer}attn_norm.weight", "embed", first=1
    )
    for path, module in (
        ("embedding_norm", model + "embeddings.norm"),
        ("blocks/mlp_norm", f"{layer}mlp_norm"),
        ("final_norm", model + "final_norm"),
    ):
        names[f"{path}/scale"] = TensorLayout(f"{module}.weight", "embed")
    return names


def _read_modernbert(hf_config: Json) -> Json:
    every = hf_config.get("global_attn_every_n_layers") or 3
    # The number of visible tokens on either side of a token. `transformers` treats sliding_window
    # as another name for half of local_attention.
    half = hf_config.get("sliding_window", hf_config.get("local_attention", 128) // 2)
    if hf_config.get("rope_scaling"):
        raise ValueError(
            f"rope_scaling is {hf_config['rope_scaling']!r}, but jaxgrow supports ModernBERT only "
            "with unscaled frequencies"
        )
    like = {
        **hf_config,
        "sliding_window": half + 1,
        "max_position_embeddings": hf_config.get("max_position_embeddings", 8192),
        "head_dim": None,
        "num_key_value_heads": None,
    }
    fields = read_heads(like) | read_layered_rope(
        like, 160000.0, "local_rope_theta", 10000.0, key="global_rope_theta"
    )
    return fields | read_windows(like, "f" + "s" * (every - 1))


def _written_modernbert(config: ModernBERTConfig) -> Json:
    """Return ``layer_types``, and the older keys for the same information.

    ``global_attn_every_n_layers`` is n if exactly every n-th layer, from the first one on, has
    global attention. If there is no such n, it is null.
    """
    kinds = config.layer_kinds
    every = next(
        (n for n in range(1, len(kinds) + 1) if kinds == _kinds_every(n, len(kinds))), None
    )
    out = {
        "layer_types": written_kinds(config)["layer_types"],
        "global_attn_every_n_layers": every,
        "global_rope_theta": config.rope_theta,
        "local_rope_theta": config.local_theta or config.rope_theta,
    }
    return out | ({"local_attention": 2 * (config.window - 1)} if "s" in kinds else {})


def _kinds_every(n: int, layers: int) -> str:
    return "".join("s" if i % n else "f" for i in range(layers))


_BASE = Family(
    architecture="ModernBert",
    model_type="modernbert",
    config=ModernBERTConfig,
    names=_modernbert_layouts,
    fields={
        "vocab_size": "vocab",
        "max_position_embeddings": "context",
        "num_hidden_layers": "layers",
        "hidden_size": "embed",
        "num_attention_heads": "heads",
        "intermediate_size": "mlp",
        "norm_eps": "eps",
        "tie_word_embeddings": "tied",
        "classifier_pooling": "pooling",
    },
    absent={
        "max_position_embeddings": 8192,
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "classifier_pooling": "cls",
    },
    settings={
        "hidden_activation": ("gelu",),
        "classifier_activation": ("gelu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "norm_bias": (False,),
        "classifier_bias": (False,),
        "decoder_bias": (True,),
    },
    inferred=_read_modernbert,
    derived=_written_modernbert,
    unsaid={"pad_token_id": None},
)


FAMILIES = (
    with_head(_BASE, "ModernBertForMaskedLM", "tokens", ignored=("decoder.weight",)),
    with_head(_BASE, "ModernBertForSequenceClassification", "classes"),
    with_head(_BASE, "ModernBertForQuestionAnswering", "spans"),
    with_head(_BASE, "ModernBertForTokenClassification", "token_classes"),
    with_head(_BASE, "ModernBertModel", "states", stray="model.", ignored=("head.*", "decoder.*")),
)

register_families(*FAMILIES)

"""How are the dense models stored that are like Llama?

========== ========================================================================================
Qwen2      Qwen2, Qwen2.5: biases of queries, keys and values
Qwen3      norms of queries and keys
Mistral    a window in all layers
Gemma      scaled embeddings, GELU; norm scales are stored minus one
Gemma 2    norms before and after sublayers, a window in every other layer, soft-capped scores and
           logits
Gemma 3    norms before and after sublayers, a window in five of six layers, two kinds of rotary
           embeddings, norms of queries and keys, no soft caps (the text model only)
OLMo 1     LayerNorm without parameters
OLMo 2, 3  norms after sublayers, norms over all queries and over all keys; OLMo 3 also windows
Phi-3      Phi-3, Phi-4: fused kernels, a longer context by "longrope"
SmolLM 3   no rotary embeddings in every fourth layer
GPT-NeoX   Pythia: LayerNorm, biases, parallel sublayers, partial rotary embeddings (a quarter of
           each head), queries, keys and values fused head by head
Granite    factors of embeddings, scores, sublayers and logits; also the dense models of Granite 4,
           which have the architecture of its hybrid models and are stored differently
========== ========================================================================================
"""

import math
from dataclasses import replace

from jaxgrow.checkpoints.hf.base import key_of
from jaxgrow.checkpoints.hf.families.llama import (
    EPS,
    HEADS,
    LAYER,
    MLP_BIAS,
    NORMS,
    UNBIASED,
    decoder_families,
    head_layout,
    llama_layouts,
    read_biased,
    read_llama,
    written_biased,
)
from jaxgrow.checkpoints.hf.registry import register_families
from jaxgrow.checkpoints.hf.rope import read_heads, written_rope
from jaxgrow.checkpoints.hf.tensor_layout import TensorLayout, linear_layouts, norm_layouts
from jaxgrow.checkpoints.io.files import spelt
from jaxgrow.extras.families.rope_scalings import read_layered_rope, read_partial_rope
from jaxgrow.extras.families.windows import (
    read_one_window,
    read_windows,
    written_kinds,
    written_one_window,
)
from jaxgrow.models.llama import LlamaConfig, repeated_kinds
from jaxgrow.typed import Json

# --- Qwen and Mistral ---


def _read_qwen_windows(hf_config: Json) -> Json:
    if not hf_config.get("use_sliding_window"):
        return {"kinds": "f"}
    first = hf_config.get("max_window_layers", 28)
    kinds = ("s" if i >= first else "f" for i in range(hf_config["num_hidden_layers"]))
    return read_windows(hf_config, "".join(kinds))


def _written_qwen(config: LlamaConfig) -> Json:
    windows = {"use_sliding_window": "s" in config.layer_kinds}
    return written_rope(config) | written_kinds(config) | windows


QWEN2 = decoder_families(
    "Qwen2",
    "qwen2",
    32768,
    lambda hf_config: read_llama(hf_config) | _read_qwen_windows(hf_config),
    _written_qwen,
    fixed={"qkv_bias": True},
)
MISTRAL = decoder_families(
    "Mistral",
    "mistral",
    131072,
    lambda hf_config: read_llama(hf_config, key_heads=8) | read_one_window(hf_config, 131072),
    written_one_window,
)
QWEN3 = decoder_families(
    "Qwen3",
    "qwen3",
    32768,
    lambda hf_config: read_llama(hf_config, head_dim=128) | _read_qwen_windows(hf_config),
    _written_qwen,
    folded=("query_eps",),
    fixed={"query_norm": "head"},
    settings=UNBIASED,
)


# --- Gemma ---


def _read_gemma(hf_config: Json, key_heads: int = 16) -> Json:
    embed_scale = hf_config["hidden_size"] ** 0.5
    return read_llama(hf_config, key_heads, head_dim=256) | {"embed_scale": embed_scale}


def _read_gemma2(hf_config: Json) -> Json:
    fields = _read_gemma(hf_config, 4)
    return {
        **fields,
        **_read_score_dim(hf_config, fields["head_dim"]),
        **read_windows(hf_config, "sf"),
        "score_cap": _read_cap(hf_config, "attn_logit_softcapping", 50.0),
        "logit_cap": _read_cap(hf_config, "final_logit_softcapping", 30.0),
    }


def _read_gemma3(hf_config: Json) -> Json:
    pattern = "s" * (hf_config.get("sliding_window_pattern", 6) - 1) + "f"
    fields = read_heads(hf_config, 4, 256)
    return {
        **fields,
        **read_layered_rope(hf_config, 1e6, "rope_local_base_freq", 1e4),
        **_read_score_dim(hf_config, fields["head_dim"]),
        **read_windows(hf_config, pattern),
        "embed_scale": hf_config["hidden_size"] ** 0.5,
        # `transformers` also has a key for a soft cap of scores, but does not apply it.
        "logit_cap": _read_cap(hf_config, "final_logit_softcapping", None),
    }


def _read_cap(hf_config: Json, key: str, absent: float | None) -> float:
    """Return a soft cap. Null in ``config.json`` means no cap, which is 0 in jaxgrow."""
    cap = hf_config.get(key, absent)
    if cap is not None and not cap > 0:
        raise ValueError(
            f"{key} is {spelt(cap)}, but a soft cap has to be greater than 0; null disables it"
        )
    return float(cap or 0)


def _read_score_dim(hf_config: Json, head_dim: int) -> Json:
    scale = hf_config.get("query_pre_attn_scalar", 256)
    return {"score_dim": float(scale) if scale != head_dim else 0.0}


def _written_gemma2(config: LlamaConfig) -> Json:
    scale = config.score_dim or config.head_dim
    return {
        **written_rope(config),
        **written_kinds(config),
        "query_pre_attn_scalar": int(scale) if scale == int(scale) else scale,
        "attn_logit_softcapping": config.score_cap or None,
        "final_logit_softcapping": config.logit_cap or None,
    }


_FORWARDS = {"use_bidirectional_attention": (False, None)}
_GELU = {"hidden_activation": ("gelu_pytorch_tanh",), "attention_bias": (False,), **_FORWARDS}


def _gemma_layouts(config: LlamaConfig) -> dict[str, TensorLayout]:
    """Return the layouts of the leaves. The scales of all norms are stored minus one.

    Gemma multiplies the stored embedding by the square root of its width. jaxgrow multiplies the
    leaf by ``embed_scale``, which keeps its initial value when the width grows.
    """
    found = {
        path: replace(place, plus=-1.0) if path.endswith("/scale") else place
        for path, place in llama_layouts(config).items()
    }
    factor = config.embed_scale / config.embed**0.5 if config.embed_scale != 1 else 1.0
    found["token_embedding"] = replace(found["token_embedding"], times=factor)
    if config.ties:
        # A tied embedding is multiplied by its factor at the input, but not at the output. There,
        # the final norm compensates for the factor of the stored embedding.
        found["final_norm/scale"] = replace(found["final_norm/scale"], times=1 / factor)
    return found


_SHIFTED: Json = {
    "names": _gemma_layouts,
    "folded": ("embed_scale", "query_eps"),
    "absent": {"tie_word_embeddings": True},
}

GEMMA = decoder_families(
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
GEMMA2 = decoder_families(
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
# Decoders without a head are published for embeddings of texts.
GEMMA3 = decoder_families(
    "Gemma3",
    "gemma3_text",
    131072,
    _read_gemma3,
    lambda config: _written_gemma2(config) | {"rope_local_base_freq": config.local_theta},
    fixed={"activation": "gelu_tanh", "norms": "both", "query_norm": "head"},
    settings=_GELU,
    heads="must divide embed",
    classifier="Gemma3TextForSequenceClassification",
    body="Gemma3TextModel",
    **_SHIFTED,
)

# --- OLMo ---


def _read_olmo3(hf_config: Json) -> Json:
    # `transformers` applies ``rope_theta`` only to the layers with full attention.
    rope = read_layered_rope(hf_config, 5e5, None, 5e5)
    return read_heads(hf_config) | rope | read_windows(hf_config, "sssf")


_NORMED_AFTER: Json = {
    "fixed": {"norms": "after", "query_norm": "all"},
    "settings": UNBIASED,
    "absent": {"rms_norm_eps": 1e-5},
    "heads": "must divide embed",
    "folded": ("query_eps",),
}

OLMO = decoder_families(
    "Olmo",
    "olmo",
    2048,
    read_llama,
    fixed={"layer_norm": True, "norm_scale": False, "eps": 1e-5},
    fields={},
    settings={**UNBIASED, "clip_qkv": (None,)},
    heads="must divide embed",
)
OLMO2 = decoder_families("Olmo2", "olmo2", 2048, read_llama, **_NORMED_AFTER)
OLMO3 = decoder_families(
    "Olmo3",
    "olmo3",
    65536,
    _read_olmo3,
    lambda config: written_rope(config) | written_kinds(config),
    **_NORMED_AFTER,
)

# --- Phi-3 and SmolLM 3 ---


def _read_phi3(hf_config: Json) -> Json:
    rope = read_partial_rope(
        {
            "max_position_embeddings": 4096,
            # `transformers` has this default even if rope_scaling has the key.
            "original_max_position_embeddings": 4096,
            **hf_config,
        },
        1.0,
    )
    if rope.get("rope_by", "longrope") != "longrope":
        raise ValueError(f"rope_type is {spelt(rope['rope_by'])}, but Phi-3 supports only longrope")
    return read_heads(hf_config) | rope | read_one_window(hf_config, 4096, None)


def _written_phi3(config: LlamaConfig) -> Json:
    out: Json = written_one_window(config) | {"partial_rotary_factor": config.rotary}
    scaling = out["rope_scaling"]
    if scaling is not None:
        # transformers 4 accepts only the type and the factors there.
        scaling["type"] = scaling.pop("rope_type")
        out["original_max_position_embeddings"] = scaling.pop("original_max_position_embeddings")
    return out


def fused_layouts(config: LlamaConfig) -> dict[str, TensorLayout]:
    """Return the layouts; queries, keys and values are one tensor, and gate and up another one."""
    found = llama_layouts(config)
    queries = tuple(f"{heads} head_dim" for heads in HEADS.values())
    for module, kernels, beside in (
        ("self_attn.qkv_proj", [f"attention/{path}" for path in HEADS], queries),
        ("mlp.gate_up_proj", ["mlp/gate", "mlp/up"], ("mlp", "mlp")),
    ):
        for part, path in enumerate(kernels):
            own = found[f"blocks/{path}/kernel"]
            found[f"blocks/{path}/kernel"] = replace(
                own, name=f"{LAYER}{module}.weight", part=part, beside=beside
            )
    return found


PHI3 = decoder_families(
    "Phi3",
    "phi3",
    4096,
    _read_phi3,
    _written_phi3,
    absent={"rms_norm_eps": 1e-5},
    names=fused_layouts,
    # `transformers` expects the number of longrope factors that follows from the hidden size divided
    # by the number of heads, whatever ``head_dim`` is.
    heads=lambda config: "divide embed" if config.rope_by == "longrope" else "must divide embed",
)


def _read_smollm3(hf_config: Json) -> Json:
    rotated = hf_config.get("no_rope_layers")
    every = hf_config.get("no_rope_layer_interval", 4)
    if not rotated and every < 1:
        raise ValueError(f"no_rope_layer_interval is {every}, but must be at least 1")
    rotated = rotated or [(i + 1) % every != 0 for i in range(hf_config["num_hidden_layers"])]
    kinds = repeated_kinds("".join("f" if r else "n" for r in rotated))
    return read_llama(hf_config, key_heads=4, theta=2e6) | {"kinds": kinds}


def _written_smollm3(config: LlamaConfig) -> Json:
    kinds = config.layer_kinds
    return written_rope(config) | {
        "no_rope_layers": [int(kind != "n") for kind in kinds],
        "layer_types": ["full_attention"] * len(kinds),
        "use_sliding_window": False,
    }


SMOLLM3 = decoder_families(
    "SmolLM3",
    "smollm3",
    32768,
    _read_smollm3,
    _written_smollm3,
    fields=MLP_BIAS,
    settings={**UNBIASED, "use_sliding_window": (False,)},
    absent={"tie_word_embeddings": True},
)

# --- GPT-NeoX ---

_GELUS = {
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def _neox_layouts(config: LlamaConfig) -> dict[str, TensorLayout]:
    layer = "gpt_neox.layers.{layers}."
    found = {"token_embedding": TensorLayout("gpt_neox.embed_in.weight", "vocab embed")}
    for part, (path, heads) in enumerate(HEADS.items()):
        fused = f"{layer}attention.query_key_value"
        outputs = f"({heads} 3 head_dim)"
        found |= linear_layouts(f"blocks/attention/{path}", fused, outputs, part=part)
    for path, module, outputs, inputs in (
        ("attention/out", "attention.dense", "embed", "(heads head_dim)"),
        ("mlp/up", "mlp.dense_h_to_4h", "mlp", "embed"),
        ("mlp/down", "mlp.dense_4h_to_h", "embed", "mlp"),
    ):
        found |= linear_layouts(f"blocks/{path}", layer + module, outputs, inputs)
    norms = {f"blocks/{path}": layer + module for path, module in NORMS["before"].items()}
    norms["final_norm"] = "gpt_neox.final_layer_norm"
    return found | norm_layouts(norms) | head_layout(config, "embed_out")


def _read_neox(hf_config: Json) -> Json:
    heads = read_heads({**hf_config, "num_key_value_heads": None})
    if hf_config["hidden_size"] != heads["head_dim"] * hf_config["num_attention_heads"]:
        raise ValueError(
            f"head_dim is {heads['head_dim']}, but in GPT-NeoX it is the hidden size divided by "
            f"the number of heads, {hf_config['hidden_size']} / {hf_config['num_attention_heads']}"
        )
    # `transformers` does not read the usual keys for this architecture.
    like = {
        **hf_config,
        "rope_theta": hf_config.get("rotary_emb_base"),
        "partial_rotary_factor": hf_config.get("rotary_pct"),
    }
    activation = _GELUS[hf_config.get("hidden_act", "gelu")]
    return heads | read_partial_rope(like, 0.25) | {"activation": activation}


def _written_neox(config: LlamaConfig) -> Json:
    return {
        "rotary_pct": config.rotary,
        "rotary_emb_base": config.rope_theta,
        "rope_scaling": written_rope(config)["rope_scaling"],
        "hidden_act": key_of(_GELUS, config.activation),
    }


GPT_NEOX = decoder_families(
    "GPTNeoX",
    "gpt_neox",
    2048,
    _read_neox,
    _written_neox,
    fixed={"layer_norm": True, "gated": False, "bias": True, "qkv_bias": True},
    fields={"layer_norm_eps": ("eps", 1e-5), "use_parallel_residual": ("parallel", True)},
    settings={"hidden_act": tuple(_GELUS), "attention_bias": (True,)},
    names=_neox_layouts,
    prefix="gpt_neox.",
    modules={"embed_out": "lm_head"},
    ignored=("*.rotary_emb.inv_freq", "*.attention.bias", "*.attention.masked_bias"),
    heads="divide embed",
)

# --- Granite ---


def _granite4_layouts(config: LlamaConfig) -> dict[str, TensorLayout]:
    """Return the layouts of a dense Granite 4. Gate and up are one tensor."""
    mlp = f"{LAYER}shared_mlp."
    down = TensorLayout(f"{mlp}output_linear.weight", "embed mlp")
    fused = {
        f"blocks/mlp/{path}/kernel": TensorLayout(
            f"{mlp}input_linear.weight", "(2 mlp) embed", part
        )
        for part, path in enumerate(("gate", "up"))
    }
    return {**llama_layouts(config), **fused, "blocks/mlp/down/kernel": down}


def _read_granite(hf_config: Json) -> Json:
    fields = read_biased(hf_config)
    multiplier = hf_config.get("attention_multiplier", 1.0)
    for key in ("attention_multiplier", "logits_scaling"):
        if not hf_config.get(key, 1.0) > 0:
            raise ValueError(f"{key} is {hf_config[key]!r}, but has to be greater than 0")
    score_dim = float(multiplier**-2)
    usual = math.isclose(score_dim, fields["head_dim"], rel_tol=1e-9)
    return fields | {"score_dim": 0.0 if usual else score_dim}


def _written_granite(config: LlamaConfig) -> Json:
    multiplier = (config.score_dim or config.head_dim) ** -0.5
    return written_biased(config) | {"attention_multiplier": float(f"{multiplier:.12g}")}


def _read_granite4(hf_config: Json) -> Json:
    types = hf_config.get("layer_types", hf_config.get("layers_block_type")) or ["linear_attention"]
    experts = hf_config.get("num_local_experts", 8)
    if experts or not {*types} <= {"attention", "full_attention"}:
        raise ValueError(
            f"layer_types is {spelt(types)} and num_local_experts is {spelt(experts)}, but jaxgrow supports Granite 4 only if "
            "all layers are attention and it has no experts (0), as in its dense models"
        )
    rotated = hf_config.get("position_embedding_type") == "rope"
    return _read_granite(hf_config) | {"kinds": "f" if rotated else "n"}


def _written_granite4(config: LlamaConfig) -> Json:
    return _written_granite(config) | {
        "layer_types": ["full_attention"] * config.layers,
        "num_local_experts": 0,
        "position_embedding_type": "rope" if "f" in config.layer_kinds else None,
    }


_FACTORS = {
    **EPS,
    "embedding_multiplier": ("embed_scale", 1.0),
    "residual_multiplier": ("residual_scale", 1.0),
    "logits_scaling": ("logit_divisor", 1.0),
}
GRANITE = decoder_families(
    "Granite",
    "granite",
    2048,
    _read_granite,
    _written_granite,
    fields={**_FACTORS, **MLP_BIAS},
    heads="must divide embed",
    classifier=None,
)
GRANITE4 = decoder_families(
    "GraniteMoeHybrid",
    "granitemoehybrid",
    2048,
    _read_granite4,
    _written_granite4,
    fields={**_FACTORS, "shared_intermediate_size": ("mlp", 1024)},
    names=_granite4_layouts,
    # `transformers` checks the sizes of its recurrent layers, even if the model does not have any.
    always=lambda config: {
        "mamba_expand": 2,
        "mamba_n_heads": 1,
        "mamba_d_head": 2 * config.embed,
    },
    heads="must divide embed",
    classifier=None,
)

register_families(
    *(*QWEN2, *MISTRAL, *QWEN3, *GEMMA, *GEMMA2, *GEMMA3, *OLMO, *OLMO2, *OLMO3, *PHI3, *SMOLLM3),
    *(*GPT_NEOX, *GRANITE, *GRANITE4),
)

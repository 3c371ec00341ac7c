"""How are the models of the Llama family (`jaxgrow.models.llama`) stored?

========== ========================================================================================
Llama      Llama 2, Llama 3, SmolLM 2
Qwen2      Qwen2, Qwen2.5: biases of queries, keys and values
Qwen3      norms of queries and keys
Mistral    a window in all layers
Gemma      scaled embeddings, GELU; norm scales are stored minus one
Gemma 2    norms before and after sublayers, a window in every other layer, soft-capped scores and
           logits
Gemma 3    norms before and after sublayers, a window in five of six layers, two kinds of rotary
           embeddings, norms of queries and keys, no soft caps (the text model only)
OLMo 2     norms after sublayers, norms over all queries and over all keys
Phi-3      Phi-3, Phi-4: fused kernels, a longer context by "longrope"
Mixtral    a mixture of experts in each layer; Qwen3-MoE has finer experts, whose gates do not have
           to add up to one
SmolLM 3   no rotary embeddings in every fourth layer
OLMo 1     LayerNorm without parameters
Qwen2-MoE  finer experts than Mixtral, and one expert that every token uses
Granite    factors of embeddings, scores, sublayers and logits
gpt-oss    experts with biases and clamped units, attention sinks, a window in every other layer
GPT-NeoX   Pythia: LayerNorm, biases, parallel sublayers, partial rotary embeddings (a quarter of
           each head), queries, keys and values fused head by head
========== ========================================================================================
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from jaxgrow.checkpoints.hf.base import Family, Heads, Stored
from jaxgrow.checkpoints.hf.labels import classes, problem
from jaxgrow.checkpoints.hf.rope import (
    read_heads,
    read_layered_rope,
    read_one_window,
    read_rope,
    read_windows,
    written_kinds,
    written_one_window,
    written_rope,
)
from jaxgrow.checkpoints.io.files import spelt
from jaxgrow.models.llama import LlamaConfig, period

_SILU = ("silu", "swish")

# --- names: kernels are stored as [outputs, inputs] ---


def _names(
    config: LlamaConfig,
    fused: bool = False,
    one: float = 0.0,
    router: str = "",
    experts: tuple[str, ...] = (),
) -> dict[str, Stored]:
    """Return the places of the leaves.

    Args:
      config: the config.
      fused: whether queries, keys and values are one tensor, and gate and up another one.
      one: the number that is subtracted from the norm scales when they are stored.
      router: the name of the router.
      experts: the names of gate, up and down of each expert.
    """
    layer = "model.layers.{layers}."
    names = {
        "token_embedding": Stored(
            "model.embed_tokens.weight", "vocab embed", times=_embedded(config)
        )
    }
    heads = {"query": "heads", "key": "kv_heads", "value": "kv_heads"}
    for part, (ours, of) in enumerate(heads.items()):
        linear, outputs = f"{layer}self_attn.{ours[0]}_proj", f"({of} head_dim)"
        if fused:
            beside = tuple(f"{n} head_dim" for n in heads.values())
            names[f"blocks/attention/{ours}/kernel"] = Stored(
                f"{layer}self_attn.qkv_proj.weight", f"{outputs} embed", part, beside
            )
        else:
            names[f"blocks/attention/{ours}/kernel"] = Stored(
                f"{linear}.weight", f"{outputs} embed"
            )
        if config.qkv_bias:
            names[f"blocks/attention/{ours}/bias"] = Stored(f"{linear}.bias", outputs)
        if config.query_norm != "none" and ours != "value":
            # The architecture has the same eps in all norms. A norm of s times its input with s^2
            # times its eps has the same output, so the kernel is scaled.
            times = (config.eps / config.query_eps) ** 0.5 if config.query_eps else 1.0
            names[f"blocks/attention/{ours}/kernel"] = Stored(
                f"{linear}.weight", f"{outputs} embed", times=times
            )
            over = outputs if config.query_norm == "all" else "head_dim"
            stored = Stored(f"{layer}self_attn.{ours[0]}_norm.weight", over, plus=-one)
            names[f"blocks/attention/{ours}_norm/scale"] = stored
    for part, (ours, theirs, layout) in enumerate(
        (
            ("mlp/gate", "mlp.gate_proj", "mlp embed"),
            ("mlp/up", "mlp.up_proj", "mlp embed"),
            ("mlp/down", "mlp.down_proj", "embed mlp"),
            ("attention/out", "self_attn.o_proj", "embed (heads head_dim)"),
        )
    ):
        names[f"blocks/{ours}/kernel"] = Stored(f"{layer}{theirs}.weight", layout)
        if fused and part < 2:
            stored = Stored(f"{layer}mlp.gate_up_proj.weight", layout, part, ("mlp", "mlp"))
            names[f"blocks/{ours}/kernel"] = stored
        if config.experts and part < 3:
            names[f"blocks/{ours}/kernel"] = Stored(f"{layer}{experts[part]}.weight", layout)
    if config.out_bias:
        names["blocks/attention/out/bias"] = Stored(f"{layer}self_attn.o_proj.bias", "embed")
    if config.experts:
        names["blocks/mlp/router/kernel"] = Stored(f"{layer}{router}.weight", "experts embed")
    if config.shared:
        names |= _shared_expert(layer)
    if not config.norm_scale:
        return names | _head(config, "lm_head")
    for ours, theirs in _NORMS[config.norms].items():
        names[f"blocks/{ours}/scale"] = Stored(f"{layer}{theirs}.weight", "embed", plus=-one)
    # A tied embedding is multiplied by its factor at the input, but not at the output. There the
    # final norm compensates for the factor of the stored embedding.
    times = 1 / _embedded(config) if config.ties else 1.0
    names["final_norm/scale"] = Stored("model.norm.weight", "embed", times=times, plus=-one)
    return names | _head(config, "lm_head")


_NORMS = {
    "before": {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "after": {
        "attention_post_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
    "both": {
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
}


def _shared_expert(layer: str) -> dict[str, Stored]:
    """Return the places of the expert that every token uses, and of its gate."""
    names = {
        "blocks/mlp/shared_gate/kernel": Stored(
            f"{layer}mlp.shared_expert_gate.weight", "gates embed"
        )
    }
    for ours, layout in (
        ("gate", "shared embed"),
        ("up", "shared embed"),
        ("down", "embed shared"),
    ):
        names[f"blocks/mlp/shared/{ours}/kernel"] = Stored(
            f"{layer}mlp.shared_expert.{ours}_proj.weight", layout
        )
    return names


def _granite_names(config: LlamaConfig) -> dict[str, Stored]:
    """Return the places of the leaves of Granite.

    They are as in Llama. The factor of the embeddings is a setting, and not a part of the
    embedding.
    """
    return _names(replace(config, embed_scale=1.0))


def _gpt_oss_names(config: LlamaConfig) -> dict[str, Stored]:
    """Return the places of the leaves of gpt-oss.

    All experts of a layer are one tensor. Gates and units alternate along its last axis.
    """
    names, mlp = (
        _names(config, router="mlp.router", experts=("", "", "")),
        "model.layers.{layers}.mlp.",
    )
    for part, ours in enumerate(("gate", "up")):
        fused = f"{mlp}experts.gate_up_proj"
        names[f"blocks/mlp/{ours}/kernel"] = Stored(fused, "experts embed (mlp 2)", part)
        names[f"blocks/mlp/{ours}/bias"] = Stored(fused + "_bias", "experts (mlp 2)", part)
    names["blocks/mlp/down/kernel"] = Stored(f"{mlp}experts.down_proj", "experts mlp embed")
    names["blocks/mlp/down/bias"] = Stored(f"{mlp}experts.down_proj_bias", "experts embed")
    names["blocks/mlp/router/bias"] = Stored(f"{mlp}router.bias", "experts")
    names["blocks/attention/sinks"] = Stored("model.layers.{layers}.self_attn.sinks", "heads")
    return names


def _embedded(config: LlamaConfig) -> float:
    """Return the factor of the stored embedding relative to the leaf.

    Gemma multiplies the stored embedding by the square root of its width. jaxgrow multiplies the
    leaf by ``embed_scale``, which keeps its initial value when the width grows.
    """
    return config.embed_scale / config.embed**0.5 if config.embed_scale != 1 else 1.0


def _head(config: LlamaConfig, name: str) -> dict[str, Stored]:
    if config.head == "classes":
        return {"classifier/kernel": Stored("score.weight", "classes embed")}
    return {} if config.tied else {"head_kernel": Stored(f"{name}.weight", "vocab embed")}


def _neox_names(config: LlamaConfig) -> dict[str, Stored]:
    layer = "gpt_neox.layers.{layers}."
    names = {"token_embedding": Stored("gpt_neox.embed_in.weight", "vocab embed")}
    for part, ours in enumerate(("query", "key", "value")):
        fused, outputs = f"{layer}attention.query_key_value", "(heads 3 head_dim)"
        if ours != "query":
            outputs = outputs.replace("heads", "kv_heads")
        names[f"blocks/attention/{ours}/kernel"] = Stored(
            f"{fused}.weight", f"{outputs} embed", part
        )
        names[f"blocks/attention/{ours}/bias"] = Stored(f"{fused}.bias", outputs, part)
    for ours, theirs, outputs, inputs in (
        ("attention/out", "attention.dense", "embed", "(heads head_dim)"),
        ("mlp/up", "mlp.dense_h_to_4h", "mlp", "embed"),
        ("mlp/down", "mlp.dense_4h_to_h", "embed", "mlp"),
    ):
        names[f"blocks/{ours}/kernel"] = Stored(f"{layer}{theirs}.weight", f"{outputs} {inputs}")
        names[f"blocks/{ours}/bias"] = Stored(f"{layer}{theirs}.bias", outputs)
    norms = {f"blocks/{ours}": layer + theirs for ours, theirs in _NORMS["before"].items()}
    for ours, theirs in (norms | {"final_norm": "gpt_neox.final_layer_norm"}).items():
        names[f"{ours}/scale"] = Stored(f"{theirs}.weight", "embed")
        names[f"{ours}/bias"] = Stored(f"{theirs}.bias", "embed")
    return names | _head(config, "embed_out")


# --- settings ---


def _llama(
    theirs: Mapping[str, Any],
    key_heads: int | None = None,
    theta: float = 1e4,
    head_dim: int | None = None,
) -> dict[str, Any]:
    """Return the fields of heads and of rotary embeddings that are the same in all layers."""
    return read_heads(theirs, key_heads, head_dim) | read_rope(theirs, theta)


def _biased(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a Llama whose attention may have biases."""
    biased = theirs.get("attention_bias", False)
    return _llama(theirs) | {"qkv_bias": biased, "out_bias": biased}


def _biased_written(config: LlamaConfig) -> dict[str, Any]:
    return written_rope(config) | {"attention_bias": config.out_bias}


def _olmo3(theirs: Mapping[str, Any]) -> dict[str, Any]:
    # `transformers` applies ``rope_theta`` only to the layers with full attention.
    rope = read_layered_rope(theirs, 5e5, None, 5e5)
    return read_heads(theirs) | rope | read_windows(theirs, "sssf", 65536)


def _olmo3_written(config: LlamaConfig) -> dict[str, Any]:
    return written_rope(config) | written_kinds(config)


def _qwen_windows(theirs: Mapping[str, Any]) -> dict[str, Any]:
    if not theirs.get("use_sliding_window"):
        return {"kinds": "f"}
    layers, first = theirs["num_hidden_layers"], theirs.get("max_window_layers", 28)
    return read_windows(theirs, "".join("s" if i >= first else "f" for i in range(layers)), 32768)


def _qwen2(theirs: Mapping[str, Any]) -> dict[str, Any]:
    return _llama(theirs) | _qwen_windows(theirs)


def _qwen3(theirs: Mapping[str, Any]) -> dict[str, Any]:
    return _llama(theirs, head_dim=128) | _qwen_windows(theirs)


def _qwen_written(config: LlamaConfig) -> dict[str, Any]:
    return (
        written_rope(config)
        | written_kinds(config)
        | {"use_sliding_window": "s" in config.layer_kinds}
    )


def _mixtral(theirs: Mapping[str, Any]) -> dict[str, Any]:
    return (
        _llama(theirs, key_heads=8, theta=1e6)
        | read_one_window(theirs, 131072, None)
        | {"gates_normed": True}
    )


def _qwen3_moe(theirs: Mapping[str, Any]) -> dict[str, Any]:
    if theirs.get("mlp_only_layers") or theirs.get("decoder_sparse_step", 1) != 1:
        raise ValueError(
            "mlp_only_layers or decoder_sparse_step make some layers dense, but jaxgrow needs experts in all"
        )
    # The first key belongs to transformers 5, the second to earlier versions.
    experts = theirs.get("num_local_experts", theirs.get("num_experts", 128))
    windows = read_one_window(theirs, 32768) if theirs.get("use_sliding_window") else {"kinds": "f"}
    return _llama(theirs, key_heads=4) | windows | {"experts": experts}


def _qwen3_moe_written(config: LlamaConfig) -> dict[str, Any]:
    windows = {"use_sliding_window": "s" in config.layer_kinds}
    return (
        written_one_window(config)
        | windows
        | {"num_local_experts": config.experts, "num_experts": config.experts}
    )


def _qwen2_moe(theirs: Mapping[str, Any]) -> dict[str, Any]:
    if theirs.get("mlp_only_layers") or theirs.get("decoder_sparse_step", 1) != 1:
        raise ValueError(
            "mlp_only_layers or decoder_sparse_step make some layers dense, but jaxgrow needs experts in all"
        )
    if "sliding_attention" in (theirs.get("layer_types") or ()):
        raise ValueError(
            "layer_types has 'sliding_attention', but jaxgrow supports Qwen2-MoE only with full attention"
        )
    return _llama(theirs, key_heads=16)


def _qwen2_moe_written(config: LlamaConfig) -> dict[str, Any]:
    return written_rope(config) | {"layer_types": ["full_attention"] * config.layers}


_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _gpt_oss(theirs: Mapping[str, Any]) -> dict[str, Any]:
    if not (theirs.get("rope_scaling") or theirs.get("rope_parameters")):
        theirs = {**theirs, "rope_scaling": _GPT_OSS_ROPE}
    biased = theirs.get("attention_bias", True)
    ours = _llama(
        {"max_position_embeddings": 131072, **theirs}, key_heads=8, theta=150000.0, head_dim=64
    )
    windows = read_windows(theirs, "sf", 131072, 128)
    return ours | windows | {"qkv_bias": biased, "out_bias": biased, "gates_normed": True}


def _gpt_oss_written(config: LlamaConfig) -> dict[str, Any]:
    out = _biased_written(config) | written_kinds(config)
    # The default of gpt-oss is a scaling, so the key is always written.
    return out | {"rope_scaling": out["rope_scaling"] or {"rope_type": "default"}}


def _granite(theirs: Mapping[str, Any]) -> dict[str, Any]:
    ours, multiplier = _biased(theirs), theirs.get("attention_multiplier", 1.0)
    if not multiplier > 0:
        raise ValueError(f"attention_multiplier is {multiplier!r}, but has to be greater than 0")
    score_dim = float(multiplier**-2)
    return ours | {
        "score_dim": 0.0 if math.isclose(score_dim, ours["head_dim"], rel_tol=1e-9) else score_dim
    }


def _granite_written(config: LlamaConfig) -> dict[str, Any]:
    multiplier = (config.score_dim or config.head_dim) ** -0.5
    return _biased_written(config) | {"attention_multiplier": float(f"{multiplier:.12g}")}


def _mistral(theirs: Mapping[str, Any]) -> dict[str, Any]:
    return _llama(theirs, key_heads=8) | read_one_window(theirs, 131072)


def _phi3(theirs: Mapping[str, Any]) -> dict[str, Any]:
    rope = read_rope({"max_position_embeddings": 4096, **theirs}, rotary=1.0)
    if rope.get("rope_by", "longrope") != "longrope":
        raise ValueError(f"rope_type is {spelt(rope['rope_by'])}, but Phi-3 supports only longrope")
    return read_heads(theirs) | rope | read_one_window(theirs, 4096, None)


def _phi3_written(config: LlamaConfig) -> dict[str, Any]:
    out: dict[str, Any] = written_one_window(config) | {"partial_rotary_factor": config.rotary}
    if (scaling := out["rope_scaling"]) is not None:
        # transformers 4 accepts only the type and the factors there.
        scaling["type"] = scaling.pop("rope_type")
        out["original_max_position_embeddings"] = scaling.pop("original_max_position_embeddings")
    return out


def _phi3_heads(config: LlamaConfig) -> Heads:
    """Return which sizes the heads may have.

    `transformers` expects the number of longrope factors that follows from the hidden size divided
    by the number of heads, whatever ``head_dim`` is.
    """
    return "divide embed" if config.rope_by == "longrope" else "must divide embed"


def _smollm3(theirs: Mapping[str, Any]) -> dict[str, Any]:
    layers, every = theirs["num_hidden_layers"], theirs.get("no_rope_layer_interval", 4)
    turned = theirs.get("no_rope_layers") or [(i + 1) % every != 0 for i in range(layers)]
    return _llama(theirs, key_heads=4, theta=2e6) | {
        "kinds": period("".join("f" if t else "n" for t in turned))
    }


def _smollm3_written(config: LlamaConfig) -> dict[str, Any]:
    kinds = config.layer_kinds
    return written_rope(config) | {
        "no_rope_layers": [int(kind != "n") for kind in kinds],
        "layer_types": ["full_attention"] * len(kinds),
        "use_sliding_window": False,
    }


def _gemma(theirs: Mapping[str, Any], key_heads: int = 16, theta: float = 1e4) -> dict[str, Any]:
    return _llama(theirs, key_heads, theta, head_dim=256) | {
        "embed_scale": theirs["hidden_size"] ** 0.5
    }


def _gemma2(theirs: Mapping[str, Any]) -> dict[str, Any]:
    caps = {
        "score_cap": _cap(theirs, "attn_logit_softcapping", 50.0),
        "logit_cap": _cap(theirs, "final_logit_softcapping", 30.0),
    }
    ours = _gemma(theirs, 4)
    return ours | caps | _score_dim(theirs, ours["head_dim"]) | read_windows(theirs, "sf", 8192)


def _gemma3(theirs: Mapping[str, Any]) -> dict[str, Any]:
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


def _gemma2_written(config: LlamaConfig) -> dict[str, Any]:
    scale = config.score_dim or config.head_dim
    return (
        written_rope(config)
        | written_kinds(config)
        | {
            "query_pre_attn_scalar": int(scale) if scale == int(scale) else scale,
            "attn_logit_softcapping": config.score_cap or None,
            "final_logit_softcapping": config.logit_cap or None,
        }
    )


def _gemma3_written(config: LlamaConfig) -> dict[str, Any]:
    return _gemma2_written(config) | {"rope_local_base_freq": config.local_theta}


def _neox(theirs: Mapping[str, Any]) -> dict[str, Any]:
    heads = read_heads({**theirs, "num_key_value_heads": None})
    if theirs["hidden_size"] != heads["head_dim"] * theirs["num_attention_heads"]:
        raise ValueError(
            f"head_dim is {heads['head_dim']}, but in GPT-NeoX it is the hidden size divided by the heads"
        )
    # `transformers` does not read the usual keys for this architecture.
    like = {
        **theirs,
        "rope_theta": theirs.get("rotary_emb_base"),
        "partial_rotary_factor": theirs.get("rotary_pct"),
    }
    return (
        heads
        | read_rope(like, rotary=0.25)
        | {"activation": _GELUS[theirs.get("hidden_act", "gelu")]}
    )


_GELUS = {
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def _neox_written(config: LlamaConfig) -> dict[str, Any]:
    rope = written_rope(config)
    return {
        "rotary_pct": config.rotary,
        "rotary_emb_base": config.rope_theta,
        "rope_scaling": rope["rope_scaling"],
        "hidden_act": next(
            (theirs for theirs, ours in _GELUS.items() if ours == config.activation), None
        ),
    }


# --- families ---


def _families(
    model: str,
    model_type: str,
    context: int,
    read: Callable[[Mapping[str, Any]], dict[str, Any]],
    written: Callable[[LlamaConfig], dict[str, Any]] = written_rope,
    *,
    fixed: Mapping[str, Any] | None = None,
    fields: Mapping[str, str] | None = None,
    absent: Mapping[str, Any] | None = None,
    classifier: str | None = None,
    **more: Any,
) -> tuple[Family, Family]:
    """Return the architectures for the prediction of tokens and for the prediction of classes."""
    common: dict[str, Any] = dict(
        model_type=model_type,
        config=LlamaConfig,
        fields={
            "vocab_size": "vocab",
            "max_position_embeddings": "context",
            "num_hidden_layers": "layers",
            "hidden_size": "embed",
            "num_attention_heads": "heads",
            "tie_word_embeddings": "tied",
            **({} if "mlp" in (fields or {}).values() else {"intermediate_size": "mlp"}),
            **({"rms_norm_eps": "eps"} if fields is None else fields),
        },
        absent={"max_position_embeddings": context, "tie_word_embeddings": False}
        | dict(absent or {})
        | (
            {"rms_norm_eps": 1e-6}
            if fields is None and "rms_norm_eps" not in (absent or {})
            else {}
        ),
        unsaid={"pad_token_id": None},
        **{"names": _names, "prefix": "model.", "ignored": ("*.rotary_emb.inv_freq",), **more},
    )
    tokens = Family(
        architecture=f"{model}ForCausalLM",
        fixed={"head": "tokens", **(fixed or {})},
        inferred=read,
        derived=written,
        **common,
    )
    classifying = Family(
        architecture=f"{classifier or model}ForSequenceClassification",
        fixed={"head": "classes", **(fixed or {})},
        inferred=lambda theirs: read(theirs) | classes(theirs),
        derived=lambda config: written(config) | problem(config),  # type: ignore[arg-type]
        **common,
    )
    return tokens, classifying


_UNBIASED = {"hidden_act": _SILU, "attention_bias": (False,)}
_FORWARDS = {"use_bidirectional_attention": (False, None)}
_GELU = {"hidden_activation": ("gelu_pytorch_tanh",), "attention_bias": (False,), **_FORWARDS}
_SHIFTED: dict[str, Any] = dict(
    names=partial(_names, one=1.0),
    folded=("embed_scale", "query_eps"),
    absent={"tie_word_embeddings": True},
)

LLAMA = (
    *_families(
        "Llama",
        "llama",
        2048,
        _biased,
        _biased_written,
        settings={"hidden_act": _SILU, "mlp_bias": (False,)},
        heads="must divide embed",
    ),
    *_families(
        "Qwen2",
        "qwen2",
        32768,
        _qwen2,
        _qwen_written,
        fixed={"qkv_bias": True},
        settings={"hidden_act": _SILU},
        heads="free",
    ),
    *_families(
        "Mistral",
        "mistral",
        131072,
        _mistral,
        written_one_window,
        settings={"hidden_act": _SILU},
        heads="free",
    ),
    *_families(
        "Qwen3",
        "qwen3",
        32768,
        _qwen3,
        _qwen_written,
        folded=("query_eps",),
        fixed={"query_norm": "head"},
        settings=_UNBIASED,
        heads="free",
    ),
    *_families(
        "Mixtral",
        "mixtral",
        131072,
        _mixtral,
        written_one_window,
        fields={
            "rms_norm_eps": "eps",
            "num_experts_per_tok": "active",
            "router_aux_loss_coef": "balance",
        }
        | {"num_local_experts": "experts"},
        absent={
            "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "router_aux_loss_coef": 0.001,
        },
        names=partial(
            _names,
            router="block_sparse_moe.gate",
            experts=tuple(f"block_sparse_moe.experts.{{experts}}.w{i}" for i in (1, 3, 2)),
        ),
        settings={"hidden_act": _SILU},
        mixture=True,
        heads="free",
    ),
    *_families(
        "Qwen3Moe",
        "qwen3_moe",
        32768,
        _qwen3_moe,
        _qwen3_moe_written,
        fixed={"query_norm": "head"},
        fields={
            "rms_norm_eps": "eps",
            "num_experts_per_tok": "active",
            "router_aux_loss_coef": "balance",
        }
        | {"norm_topk_prob": "gates_normed", "moe_intermediate_size": "mlp"},
        absent={"rms_norm_eps": 1e-6, "num_experts_per_tok": 8, "router_aux_loss_coef": 0.001}
        | {"norm_topk_prob": False, "moe_intermediate_size": 768},
        names=partial(
            _names,
            router="mlp.gate",
            experts=tuple(
                f"mlp.experts.{{experts}}.{name}_proj" for name in ("gate", "up", "down")
            ),
        ),
        settings=_UNBIASED,
        mixture=True,
        heads="free",
        folded=("query_eps",),
    ),
    *_families(
        "Gemma",
        "gemma",
        8192,
        _gemma,
        fixed={"activation": "gelu_tanh"},
        # The first files have "gelu" for its tanh approximation. Later files have a second key,
        # which may be null.
        settings={
            "hidden_act": ("gelu_pytorch_tanh", "gelu"),
            "hidden_activation": ("gelu_pytorch_tanh", None),
            "attention_bias": (False,),
            **_FORWARDS,
        },
        heads="free",
        **_SHIFTED,
    ),
    *_families(
        "Gemma2",
        "gemma2",
        8192,
        _gemma2,
        _gemma2_written,
        fixed={"activation": "gelu_tanh", "norms": "both"},
        settings=_GELU,
        heads="must divide embed",
        **_SHIFTED,
    ),
    *_families(
        "Gemma3",
        "gemma3_text",
        131072,
        _gemma3,
        _gemma3_written,
        fixed={"activation": "gelu_tanh", "norms": "both", "query_norm": "head"},
        settings=_GELU,
        heads="must divide embed",
        classifier="Gemma3Text",
        **_SHIFTED,
    ),
    *_families(
        "Olmo",
        "olmo",
        2048,
        _llama,
        fixed={"layer_norm": True, "norm_scale": False, "eps": 1e-5},
        fields={},
        settings={**_UNBIASED, "clip_qkv": (None,)},
        heads="must divide embed",
    ),
    *_families(
        "Qwen2Moe",
        "qwen2_moe",
        32768,
        _qwen2_moe,
        _qwen2_moe_written,
        fields={
            "rms_norm_eps": "eps",
            "num_experts_per_tok": "active",
            "router_aux_loss_coef": "balance",
        }
        | {
            "norm_topk_prob": "gates_normed",
            "moe_intermediate_size": "mlp",
            "num_experts": "experts",
        }
        | {"shared_expert_intermediate_size": "shared", "qkv_bias": "qkv_bias"},
        absent={
            "rms_norm_eps": 1e-6,
            "num_experts_per_tok": 4,
            "router_aux_loss_coef": 0.001,
            "num_experts": 60,
        }
        | {
            "norm_topk_prob": False,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        }
        | {"qkv_bias": True},
        names=partial(
            _names,
            router="mlp.gate",
            experts=tuple(
                f"mlp.experts.{{experts}}.{name}_proj" for name in ("gate", "up", "down")
            ),
        ),
        settings={"hidden_act": _SILU, "use_sliding_window": (False,)},
        mixture=True,
        heads="free",
    ),
    *_families(
        "GptOss",
        "gpt_oss",
        131072,
        _gpt_oss,
        _gpt_oss_written,
        fixed={"sinks": True},
        fields={
            "rms_norm_eps": "eps",
            "num_experts_per_tok": "active",
            "router_aux_loss_coef": "balance",
        }
        | {"num_local_experts": "experts", "swiglu_limit": "clamp"},
        absent={"rms_norm_eps": 1e-5, "num_experts_per_tok": 4, "router_aux_loss_coef": 0.001}
        | {"num_local_experts": 128, "swiglu_limit": 7.0},
        names=_gpt_oss_names,
        settings={"hidden_act": _SILU, "swiglu_alpha": (1.702,)},
        mixture=True,
        heads="free",
    ),
    *_families(
        "Olmo2",
        "olmo2",
        2048,
        _llama,
        fixed={"norms": "after", "query_norm": "all"},
        settings=_UNBIASED,
        absent={"rms_norm_eps": 1e-5},
        heads="must divide embed",
        folded=("query_eps",),
    ),
    *_families(
        "Olmo3",
        "olmo3",
        65536,
        _olmo3,
        _olmo3_written,
        fixed={"norms": "after", "query_norm": "all"},
        settings=_UNBIASED,
        absent={"rms_norm_eps": 1e-5},
        heads="must divide embed",
        folded=("query_eps",),
    ),
    *_families(
        "Phi3",
        "phi3",
        4096,
        _phi3,
        _phi3_written,
        settings={"hidden_act": _SILU},
        absent={"rms_norm_eps": 1e-5},
        names=partial(_names, fused=True),
        heads=_phi3_heads,
    ),
    *_families(
        "SmolLM3",
        "smollm3",
        32768,
        _smollm3,
        _smollm3_written,
        settings={**_UNBIASED, "mlp_bias": (False,), "use_sliding_window": (False,)},
        absent={"tie_word_embeddings": True},
        heads="free",
    ),
    *_families(
        "GPTNeoX",
        "gpt_neox",
        2048,
        _neox,
        _neox_written,
        fixed={"layer_norm": True, "gated": False, "bias": True, "qkv_bias": True},
        fields={"layer_norm_eps": "eps", "use_parallel_residual": "parallel"},
        absent={"layer_norm_eps": 1e-5, "use_parallel_residual": True},
        settings={"hidden_act": tuple(_GELUS), "attention_bias": (True,)},
        names=_neox_names,
        prefix="gpt_neox.",
        modules={"embed_out": "lm_head"},
        ignored=("*.rotary_emb.inv_freq", "*.attention.bias", "*.attention.masked_bias"),
        heads="divide embed",
    ),
)

# `transformers` has no classifier of these families.
GRANITE, _ = _families(
    "Granite",
    "granite",
    2048,
    _granite,
    _granite_written,
    fields={
        "rms_norm_eps": "eps",
        "embedding_multiplier": "embed_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_divisor",
    },
    absent={
        "rms_norm_eps": 1e-6,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
    names=_granite_names,
    settings={"hidden_act": _SILU, "mlp_bias": (False,)},
    heads="must divide embed",
)

"""The names of Llama and its kin (`jaxgrow.models.llama`): a table for each, of what it computes and how it is stored.

========== ==================================================================================================================
Llama      2, 3; SmolLM 2, too
Qwen2      2.5, too: biases of queries, keys, values
Qwen3      norms of queries and keys
Mistral    a window in all layers
Gemma      scaled embeddings, GELU; norms are stored as what is added to one
Gemma 2    norms before and after sublayers, every other layer with a window, capped scores and logits
Gemma 3    .. five of six with a window, rotary positions of two kinds, norms of queries and keys, no caps (text alone)
OLMo 2     norms after sublayers, and of all queries, all keys
Phi-3      Phi-4, too: fused kernels; a longer context by "longrope"
Mixtral    a mixture of experts in each layer; Qwen3-MoE: of finer ones, perhaps with gates that do not add up to one
SmolLM 3   every fourth layer without rotary positions
GPT-NeoX   Pythia: LayerNorm, biases, sublayers in parallel, a quarter of each head is turned; fused head by head
========== ==================================================================================================================
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jaxgrow.interop.family import Family, Stored
from jaxgrow.interop.labels import classes, problem
from jaxgrow.models.llama import LlamaConfig, period

_TYPES = {"full_attention": "f", "sliding_attention": "s"}
_SILU = ("silu", "swish")

# --- names: kernels lie output first ---


def _names(
    config: LlamaConfig, fused: bool = False, one: float = 0.0, router: str = "", experts: tuple[str, ...] = ()
) -> dict[str, Stored]:
    """``fused``: queries, keys and values in one tensor, and gate and up; ``one``: what norms are stored without; ``experts``:
    gate, up and down of each."""
    layer = "model.layers.{layers}."
    names = {"token_embedding": Stored("model.embed_tokens.weight", "vocab embed", times=_embedded(config))}
    heads = {"query": "heads", "key": "kv_heads", "value": "kv_heads"}
    for part, (ours, of) in enumerate(heads.items()):
        linear, outputs = f"{layer}self_attn.{ours[0]}_proj", f"({of} head_dim)"
        if fused:
            beside = tuple(f"{n} head_dim" for n in heads.values())
            names[f"blocks/attention/{ours}/kernel"] = Stored(
                f"{layer}self_attn.qkv_proj.weight", f"{outputs} embed", part, beside
            )
        else:
            names[f"blocks/attention/{ours}/kernel"] = Stored(f"{linear}.weight", f"{outputs} embed")
        if config.qkv_bias:
            names[f"blocks/attention/{ours}/bias"] = Stored(f"{linear}.bias", outputs)
        if config.query_norm != "none" and ours != "value":
            # There is one eps there. A norm gives the same of s times its input under s^2 times its eps.
            times = (config.eps / config.query_eps) ** 0.5 if config.query_eps else 1.0
            names[f"blocks/attention/{ours}/kernel"] = Stored(f"{linear}.weight", f"{outputs} embed", times=times)
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
    if config.experts:
        names["blocks/mlp/router/kernel"] = Stored(f"{layer}{router}.weight", "experts embed")
    for ours, theirs in _NORMS[config.norms].items():
        names[f"blocks/{ours}/scale"] = Stored(f"{layer}{theirs}.weight", "embed", plus=-one)
    # A tied table that is scaled where it is read into is not where it is read out.
    times = 1 / _embedded(config) if config.ties else 1.0
    names["final_norm/scale"] = Stored("model.norm.weight", "embed", times=times, plus=-one)
    return names | _head(config, "lm_head")


_NORMS = {
    "before": {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "after": {"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"},
    "both": {
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
}


def _embedded(config: LlamaConfig) -> float:
    """What a table is stored as a multiple of: a Gemma scales by the root of its width, whatever it had been born with."""
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
        names[f"blocks/attention/{ours}/kernel"] = Stored(f"{fused}.weight", f"{outputs} embed", part)
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


def read_attention(
    theirs: Mapping[str, Any], key_heads: int | None = None, theta: float = 10000.0, head_dim: int | None = None
) -> dict[str, Any]:
    """Heads and rotary positions, which lie at the top (``rope_theta``, ``rope_scaling``) or, since transformers 5, in
    ``rope_parameters``.

    ``key_heads``, ``head_dim``: what it means to leave them out, if not those of the queries, and an equal part of the width.
    """
    heads = theirs["num_attention_heads"]
    rope = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    rope = rope.get("full_attention", rope)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ValueError(
            f"config.json: rope_type is {kind!r}, but only 'default', 'linear' and 'llama3' can be read, and a Phi-3's "
            "'longrope'"
        )
    part = rope.get("partial_rotary_factor") or theirs.get("partial_rotary_factor")
    ours = {
        "head_dim": theirs.get("head_dim") or head_dim or theirs["hidden_size"] // heads,
        "kv_heads": theirs.get("num_key_value_heads", key_heads) or heads,
        "rope_theta": float(rope.get("rope_theta") or theirs.get("rope_theta") or theta),
        "rotary": float(1.0 if part is None else part),
    }
    if kind != "default":
        ours |= {"rope_factor": float(rope["factor"]), "rope_by": kind}
    if kind == "llama3":
        ours["rope_low"] = float(rope["low_freq_factor"])
        ours["rope_high"] = float(rope["high_freq_factor"])
        ours["rope_context"] = rope["original_max_position_embeddings"]
    return ours


def read_local_theta(theirs: Mapping[str, Any]) -> float:
    """Of layers with windows, where ``rope_parameters`` says one of their own; or 0."""
    rope = (theirs.get("rope_parameters") or {}).get("sliding_attention") or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(
            f"config.json: rope_type of sliding_attention is {rope['rope_type']!r}, but only 'default' can be read there"
        )
    return float(rope.get("rope_theta") or 0.0)


def _written(config: LlamaConfig) -> dict[str, Any]:
    """In the form of transformers 4, which 5 reads too."""
    scaling: dict[str, Any] = {"rope_type": config.rope_by, "factor": config.rope_factor}
    if config.rope_by == "llama3":
        scaling["low_freq_factor"] = config.rope_low
        scaling["high_freq_factor"] = config.rope_high
        scaling["original_max_position_embeddings"] = config.rope_context
    return {
        "head_dim": config.head_dim,
        "num_key_value_heads": config.kv_heads,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling if config.rope_factor != 1 else None,
    }


def read_windows(theirs: Mapping[str, Any], kinds: str, positions: int, window: int | None = 4096) -> dict[str, Any]:
    """Kinds of layers, and their window. ``kinds``, ``positions``, ``window``: what it means to leave out the layers' types,
    the positions and the window."""
    window = theirs.get("sliding_window", window)
    types = theirs.get("layer_types")
    if types is not None:
        kinds = "".join(_TYPES.get(kind, "?") for kind in types)
        if "?" in kinds:
            raise ValueError(
                f"config.json: layer_types has {types[kinds.index('?')]!r}, not one of {', '.join(_TYPES)}"
            )
    layers = theirs["num_hidden_layers"]
    kinds = "".join(kinds[i % len(kinds)] for i in range(layers))
    # A window as long as a sequence is none; but local layers may have positions of their own.
    if window is None or (window >= (theirs.get("max_position_embeddings") or positions) and set(kinds) == {"s"}):
        kinds = kinds.replace("s", "f")
    return {"kinds": period(kinds)} | ({"window": window} if "s" in kinds else {})


def written_kinds(config: LlamaConfig) -> dict[str, Any]:
    """The types of layers, and their window."""
    types = {letter: name for name, letter in _TYPES.items()}
    window = {"sliding_window": config.window} if "s" in config.layer_kinds else {}
    return {"layer_types": [types.get(kind, "nope") for kind in config.layer_kinds]} | window


def _qwen_windows(theirs: Mapping[str, Any]) -> dict[str, Any]:
    if not theirs.get("use_sliding_window"):
        return {"kinds": "f"}
    layers, first = theirs["num_hidden_layers"], theirs.get("max_window_layers", 28)
    return read_windows(theirs, "".join("s" if i >= first else "f" for i in range(layers)), 32768)


def _qwen2(theirs: Mapping[str, Any]) -> dict[str, Any]:
    return read_attention(theirs) | _qwen_windows(theirs)


def _qwen3(theirs: Mapping[str, Any]) -> dict[str, Any]:
    return _qwen2(theirs) | read_attention(theirs, head_dim=128)


def _qwen_written(config: LlamaConfig) -> dict[str, Any]:
    return _written(config) | written_kinds(config) | {"use_sliding_window": "s" in config.layer_kinds}


def _mixtral(theirs: Mapping[str, Any]) -> dict[str, Any]:
    return (
        read_attention(theirs, key_heads=8, theta=1e6)
        | read_windows(theirs, "s", 131072, None)
        | {"gates_normed": True}
    )


def _qwen3_moe(theirs: Mapping[str, Any]) -> dict[str, Any]:
    if theirs.get("mlp_only_layers") or theirs.get("decoder_sparse_step", 1) != 1:
        raise ValueError("mlp_only_layers or decoder_sparse_step leave layers dense, but all have experts here")
    experts = theirs.get("num_local_experts", theirs.get("num_experts", 128))  # since transformers 5, and before
    plain = {**theirs, "layer_types": None}  # its windows are of all layers
    windows = read_windows(plain, "s", 32768) if theirs.get("use_sliding_window") else {"kinds": "f"}
    return read_attention(theirs, key_heads=4) | windows | {"experts": experts}


def _qwen3_moe_written(config: LlamaConfig) -> dict[str, Any]:
    windows = {"use_sliding_window": "s" in config.layer_kinds}
    return _one_window(config) | windows | {"num_local_experts": config.experts, "num_experts": config.experts}


def _mistral(theirs: Mapping[str, Any]) -> dict[str, Any]:
    return read_attention(theirs, key_heads=8) | read_windows(theirs, "s", 131072)


def _phi3(theirs: Mapping[str, Any]) -> dict[str, Any]:
    rope, long = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}, {}
    if rope.get("rope_type", rope.get("type")) in ("longrope", "su"):  # as it was called first
        before = theirs.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings", 4096)
        factor = rope.get("factor") or theirs.get("max_position_embeddings", 4096) / before
        long = {
            "rope_by": "longrope",
            "rope_short": tuple(map(float, rope["short_factor"])),
            "rope_long": tuple(map(float, rope["long_factor"])),
            "rope_context": before,
            "rope_scale": float(rope.get("attention_factor") or _long_scale(factor, before)),
        }
        plain = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
        theirs = {**theirs, "rope_parameters": plain, "rope_scaling": None}
    return read_attention(theirs) | read_windows(theirs, "s", 4096, None) | long


def _long_scale(factor: float, before: int) -> float:
    """Of queries and keys in a context that is longer than before by a factor (Ding et al., 2024)."""
    if before < 2:
        raise ValueError(f"config.json: original_max_position_embeddings is {before}, less than 2")
    return math.sqrt(1 + math.log(factor) / math.log(before)) if factor > 1 else 1.0


def _phi3_written(config: LlamaConfig) -> dict[str, Any]:
    out = _one_window(config) | {"partial_rotary_factor": config.rotary}
    if config.rope_by != "longrope":
        return out
    long = {"type": "longrope", "short_factor": list(config.rope_short), "long_factor": list(config.rope_long)}
    if config.rope_scale != _long_scale(config.context / config.rope_context, config.rope_context):
        long["attention_factor"] = config.rope_scale  # transformers 4 takes three keys alone
    return out | {"rope_scaling": long, "original_max_position_embeddings": config.rope_context}


def _one_window(config: LlamaConfig) -> dict[str, Any]:
    return _written(config) | {"sliding_window": config.window if "s" in config.layer_kinds else None}


def _smollm3(theirs: Mapping[str, Any]) -> dict[str, Any]:
    layers, every = theirs["num_hidden_layers"], theirs.get("no_rope_layer_interval", 4)
    turned = theirs.get("no_rope_layers") or [(i + 1) % every != 0 for i in range(layers)]
    return read_attention(theirs, key_heads=4, theta=2e6) | {
        "kinds": period("".join("f" if t else "n" for t in turned))
    }


def _smollm3_written(config: LlamaConfig) -> dict[str, Any]:
    kinds = config.layer_kinds
    return _written(config) | {
        "no_rope_layers": [int(kind != "n") for kind in kinds],
        "layer_types": ["full_attention"] * len(kinds),
        "use_sliding_window": False,
    }


def _gemma(theirs: Mapping[str, Any], key_heads: int = 16, theta: float = 1e4) -> dict[str, Any]:
    return read_attention(theirs, key_heads, theta, head_dim=256) | {"embed_scale": theirs["hidden_size"] ** 0.5}


def _gemma2(theirs: Mapping[str, Any]) -> dict[str, Any]:
    return _capped(theirs, 50.0, 30.0) | read_windows(theirs, "sf", 8192)


def _gemma3(theirs: Mapping[str, Any]) -> dict[str, Any]:
    pattern = "s" * (theirs.get("sliding_window_pattern", 6) - 1) + "f"
    ours = _capped(theirs, None, None, theta=1e6) | read_windows(theirs, pattern, 131072)
    return ours | {"local_theta": read_local_theta(theirs) or float(theirs.get("rope_local_base_freq") or 1e4)}


def _capped(
    theirs: Mapping[str, Any], scores: float | None, logits: float | None, theta: float = 1e4
) -> dict[str, Any]:
    ours = _gemma(theirs, 4, theta)
    scale = theirs.get("query_pre_attn_scalar", 256)
    return ours | {
        "score_dim": float(scale) if scale != ours["head_dim"] else 0.0,
        "score_cap": float(theirs.get("attn_logit_softcapping", scores) or 0.0),
        "logit_cap": float(theirs.get("final_logit_softcapping", logits) or 0.0),
    }


def _gemma2_written(config: LlamaConfig) -> dict[str, Any]:
    scale = config.score_dim or config.head_dim
    return (
        _written(config)
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
    like = dict(theirs)
    like.setdefault("rope_theta", theirs.get("rotary_emb_base", 10000.0))
    like.setdefault("partial_rotary_factor", theirs.get("rotary_pct", 0.25))
    return read_attention(like) | {"kv_heads": theirs["num_attention_heads"]}


def _neox_written(config: LlamaConfig) -> dict[str, Any]:
    return {"rotary_pct": config.rotary, "rotary_emb_base": config.rope_theta}


# --- families ---


def _families(
    model: str,
    model_type: str,
    context: int,
    read: Callable[[Mapping[str, Any]], dict[str, Any]],
    written: Callable[[LlamaConfig], dict[str, Any]] = _written,
    *,
    fixed: Mapping[str, Any] | None = None,
    fields: Mapping[str, str] | None = None,
    absent: Mapping[str, Any] | None = None,
    classifier: str | None = None,
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
            "tie_word_embeddings": "tied",
            **({} if "mlp" in (fields or {}).values() else {"intermediate_size": "mlp"}),
            **(fields or {"rms_norm_eps": "eps"}),
        },
        absent={"max_position_embeddings": context, "tie_word_embeddings": False}
        | dict(absent or {})
        | ({"rms_norm_eps": 1e-6} if fields is None and "rms_norm_eps" not in (absent or {}) else {}),
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
_GELU = {"hidden_activation": ("gelu_pytorch_tanh",), "attention_bias": (False,)}
_SHIFTED: dict[str, Any] = dict(
    names=partial(_names, one=1.0), folded=("embed_scale", "query_eps"), absent={"tie_word_embeddings": True}
)

LLAMA = (
    *_families(
        "Llama", "llama", 2048, read_attention, settings={**_UNBIASED, "mlp_bias": (False,)}, heads="must divide embed"
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
    *_families("Mistral", "mistral", 131072, _mistral, _one_window, settings={"hidden_act": _SILU}, heads="free"),
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
        _one_window,
        fields={"rms_norm_eps": "eps", "num_experts_per_tok": "active", "router_aux_loss_coef": "balance"}
        | {"num_local_experts": "experts"},
        absent={"rms_norm_eps": 1e-5, "num_experts_per_tok": 2, "num_local_experts": 8, "router_aux_loss_coef": 0.001},
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
        fields={"rms_norm_eps": "eps", "num_experts_per_tok": "active", "router_aux_loss_coef": "balance"}
        | {"norm_topk_prob": "gates_normed", "moe_intermediate_size": "mlp"},
        absent={"rms_norm_eps": 1e-6, "num_experts_per_tok": 8, "router_aux_loss_coef": 0.001}
        | {"norm_topk_prob": False, "moe_intermediate_size": 768},
        names=partial(
            _names,
            router="mlp.gate",
            experts=tuple(f"mlp.experts.{{experts}}.{name}_proj" for name in ("gate", "up", "down")),
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
        # Older files have a second key, which may be null.
        settings={"hidden_act": ("gelu_pytorch_tanh",), "hidden_activation": ("gelu_pytorch_tanh", None)},
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
        settings={**_GELU, "use_bidirectional_attention": (False, None)},
        heads="must divide embed",
        classifier="Gemma3Text",
        **_SHIFTED,
    ),
    *_families(
        "Olmo2",
        "olmo2",
        2048,
        read_attention,
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
        heads="must divide embed",
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
        fixed={"layer_norm": True, "gated": False, "bias": True, "qkv_bias": True, "activation": "gelu"},
        fields={"layer_norm_eps": "eps", "use_parallel_residual": "parallel"},
        absent={"layer_norm_eps": 1e-5, "use_parallel_residual": True},
        settings={"hidden_act": ("gelu",), "attention_bias": (True,)},
        names=_neox_names,
        prefix="gpt_neox.",
        ignored=("*.rotary_emb.inv_freq", "*.attention.bias", "*.attention.masked_bias"),
        heads="divide embed",
    ),
)

"""How are decoders with a mixture of experts in each layer stored?

========= =========================================================================================
Mixtral   Mistral with experts
Qwen3-MoE finer experts, whose gates do not have to add up to one
Qwen2-MoE finer experts, and one expert that every token uses
OLMoE     finer experts, norms over all queries and over all keys
gpt-oss   experts with biases and clamped units, attention sinks, a window in every other layer
========= =========================================================================================
"""

from collections.abc import Callable
from functools import partial

from jaxgrow.checkpoints.hf.families.llama import (
    EPS,
    LAYER,
    MLP_KERNELS,
    SILU,
    UNBIASED,
    decoder_families,
    llama_layouts,
    read_llama,
    written_biased,
)
from jaxgrow.checkpoints.hf.registry import register_families
from jaxgrow.checkpoints.hf.rope import written_rope
from jaxgrow.checkpoints.hf.tensor_layout import TensorLayout, linear_layouts
from jaxgrow.checkpoints.io.files import spelt
from jaxgrow.extras.families.windows import (
    read_one_window,
    read_windows,
    written_kinds,
    written_one_window,
)
from jaxgrow.models.llama import LlamaConfig
from jaxgrow.typed import Json

_MIXTURE = {
    "rms_norm_eps": ("eps", 1e-5),
    "num_experts_per_tok": ("active", 4),
    "router_aux_loss_coef": ("balance", 0.001),
}
_FINER = {**_MIXTURE, **EPS, "norm_topk_prob": ("gates_normed", False)}


def _expert_layouts(
    config: LlamaConfig, router: str, experts: tuple[str, ...]
) -> dict[str, TensorLayout]:
    """The router, the experts, which are stored one by one, and the expert that all tokens use."""
    found = {"blocks/mlp/router/kernel": TensorLayout(f"{LAYER}{router}.weight", "experts embed")}
    for (path, of), module in zip(MLP_KERNELS.items(), experts, strict=True):
        found[f"blocks/mlp/{path}/kernel"] = TensorLayout(f"{LAYER}{module}.weight", " ".join(of))
        if config.shared:
            outputs, inputs = (axes.replace("mlp", "shared") for axes in of)
            shared = f"{LAYER}mlp.shared_expert.{path}_proj"
            found |= linear_layouts(
                f"blocks/mlp/shared/{path}", shared, outputs, inputs, bias=False
            )
    if config.shared:
        gate = TensorLayout(f"{LAYER}mlp.shared_expert_gate.weight", "gates embed")
        found["blocks/mlp/shared_gate/kernel"] = gate
    return found


def _layouts_with(router: str, *experts: str) -> Callable[[LlamaConfig], dict[str, TensorLayout]]:
    """Return the function from a config to layouts, as `_expert_layouts` has the arguments."""
    return partial(llama_layouts, mlp=partial(_expert_layouts, router=router, experts=experts))


_FINER_LAYOUTS = _layouts_with(
    "mlp.gate", *(f"mlp.experts.{{experts}}.{name}_proj" for name in ("gate", "up", "down"))
)

# --- Mixtral ---


def _read_mixtral(hf_config: Json) -> Json:
    windows = read_one_window(hf_config, 131072, None)
    return read_llama(hf_config, key_heads=8, theta=1e6) | windows | {"gates_normed": True}


MIXTRAL = decoder_families(
    "Mixtral",
    "mixtral",
    131072,
    _read_mixtral,
    written_one_window,
    fields={**_MIXTURE, "num_experts_per_tok": ("active", 2), "num_local_experts": ("experts", 8)},
    names=_layouts_with(
        "block_sparse_moe.gate",
        *(f"block_sparse_moe.experts.{{experts}}.w{i}" for i in (1, 3, 2)),
    ),
    # transformers 5 has this name for the mixture.
    renamed={".mlp.": ".block_sparse_moe."},
    mixture=True,
)

# --- Qwen and OLMoE ---


def _check_experts_in_all_layers(hf_config: Json) -> None:
    if hf_config.get("mlp_only_layers") or hf_config.get("decoder_sparse_step", 1) != 1:
        raise ValueError(
            f"mlp_only_layers is {spelt(hf_config.get('mlp_only_layers'))} and decoder_sparse_step is "
            f"{spelt(hf_config.get('decoder_sparse_step', 1))}, which makes some layers dense. jaxgrow "
            "supports only models with experts in all layers"
        )


def _read_qwen3_moe(hf_config: Json) -> Json:
    _check_experts_in_all_layers(hf_config)
    windowed = hf_config.get("use_sliding_window")
    windows = read_one_window(hf_config, 32768) if windowed else {"kinds": "f"}
    return read_llama(hf_config, key_heads=4) | windows


def _written_qwen3_moe(config: LlamaConfig) -> Json:
    return written_one_window(config) | {
        "use_sliding_window": "s" in config.layer_kinds,
        # The name of this key in earlier versions than transformers 5.
        "num_experts": config.experts,
    }


def _read_qwen2_moe(hf_config: Json) -> Json:
    _check_experts_in_all_layers(hf_config)
    if "sliding_attention" in (hf_config.get("layer_types") or ()):
        raise ValueError(
            "layer_types has 'sliding_attention', but jaxgrow supports Qwen2-MoE only with full "
            "attention"
        )
    return read_llama(hf_config, key_heads=16)


QWEN3_MOE = decoder_families(
    "Qwen3Moe",
    "qwen3_moe",
    32768,
    _read_qwen3_moe,
    _written_qwen3_moe,
    fixed={"query_norm": "head"},
    fields={
        **_FINER,
        "moe_intermediate_size": ("mlp", 768),
        "num_experts_per_tok": ("active", 8),
        "num_local_experts": ("experts", 128),
    },
    names=_FINER_LAYOUTS,
    settings=UNBIASED,
    mixture=True,
    folded=("query_eps",),
)
QWEN2_MOE = decoder_families(
    "Qwen2Moe",
    "qwen2_moe",
    32768,
    _read_qwen2_moe,
    lambda config: written_rope(config) | {"layer_types": ["full_attention"] * config.layers},
    fields={
        **_FINER,
        "moe_intermediate_size": ("mlp", 1408),
        "num_experts": ("experts", 60),
        "shared_expert_intermediate_size": ("shared", 5632),
        "qkv_bias": ("qkv_bias", True),
    },
    names=_FINER_LAYOUTS,
    settings={"hidden_act": SILU, "use_sliding_window": (False,)},
    mixture=True,
)
OLMOE = decoder_families(
    "Olmoe",
    "olmoe",
    4096,
    read_llama,
    fixed={"query_norm": "all"},
    fields={
        "rms_norm_eps": ("eps", 1e-5),
        "num_experts_per_tok": ("active", 8),
        "router_aux_loss_coef": ("balance", 0.01),
        "norm_topk_prob": ("gates_normed", False),
        "num_experts": ("experts", 64),
    },
    names=_FINER_LAYOUTS,
    settings={**UNBIASED, "clip_qkv": (None,)},
    mixture=True,
    folded=("query_eps",),
    heads="divide embed",
    classifier=None,
)

# --- gpt-oss ---

_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _gpt_oss_layouts(config: LlamaConfig) -> dict[str, TensorLayout]:
    """Return the layouts of gpt-oss.

    All experts of a layer are one tensor. Gates and units alternate along its last axis.
    """
    found = _layouts_with("mlp.router", "", "", "")(config)
    experts = f"{LAYER}mlp.experts."
    for path, name, axes, part in (
        ("gate", "gate_up_proj", ("embed", "(mlp 2)"), 0),
        ("up", "gate_up_proj", ("embed", "(mlp 2)"), 1),
        ("down", "down_proj", ("mlp", "embed"), None),
    ):
        kernel = TensorLayout(experts + name, f"experts {' '.join(axes)}", part)
        found[f"blocks/mlp/{path}/kernel"] = kernel
        bias = TensorLayout(f"{experts}{name}_bias", f"experts {axes[1]}", part)
        found[f"blocks/mlp/{path}/bias"] = bias
    found["blocks/mlp/router/bias"] = TensorLayout(f"{LAYER}mlp.router.bias", "experts")
    found["blocks/attention/sinks"] = TensorLayout(f"{LAYER}self_attn.sinks", "heads")
    return found


def _read_gpt_oss(hf_config: Json) -> Json:
    # An empty object means unscaled frequencies, unlike a missing key.
    if not hf_config.get("rope_scaling") and hf_config.get("rope_parameters") is None:
        hf_config = {**hf_config, "rope_scaling": _GPT_OSS_ROPE}
    limit = hf_config.get("swiglu_limit", 7.0)
    if not limit > 0:
        raise ValueError(f"swiglu_limit is {limit!r}, but has to be greater than 0")
    biased = hf_config.get("attention_bias", True)
    like = {"max_position_embeddings": 131072, **hf_config}
    return {
        **read_llama(like, key_heads=8, theta=150000.0, head_dim=64),
        **read_windows(hf_config, "sf", 128),
        **{"qkv_bias": biased, "out_bias": biased, "gates_normed": True},
    }


def _written_gpt_oss(config: LlamaConfig) -> Json:
    out = written_biased(config) | written_kinds(config)
    # The default of gpt-oss is a scaling, so the key is always written.
    return out | {"rope_scaling": out["rope_scaling"] or {"rope_type": "default"}}


GPT_OSS = decoder_families(
    "GptOss",
    "gpt_oss",
    131072,
    _read_gpt_oss,
    _written_gpt_oss,
    fixed={"sinks": True},
    fields={**_MIXTURE, "num_local_experts": ("experts", 128), "swiglu_limit": ("clamp", 7.0)},
    names=_gpt_oss_layouts,
    settings={"hidden_act": SILU, "swiglu_alpha": (1.702,)},
    mixture=True,
)

register_families(*MIXTRAL, *QWEN3_MOE, *QWEN2_MOE, *GPT_OSS, *OLMOE)

"""Qwen2, Qwen3 and their mixtures of experts.

Qwen2 has biases of queries, keys and values. Qwen3 has norms of queries and keys. Qwen3-MoE has
finer experts than Mixtral, whose gates do not have to add up to one. Qwen2-MoE has also one expert
that every token uses.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxgrow.checkpoints.hf.families.llama.architectures import (
    EPS,
    MIXTURE,
    SILU,
    UNBIASED,
    architectures,
    read_llama,
)
from jaxgrow.checkpoints.hf.families.llama.parts import names
from jaxgrow.checkpoints.hf.rope import (
    read_one_window,
    read_windows,
    written_kinds,
    written_one_window,
    written_rope,
)
from jaxgrow.checkpoints.io.files import spelt
from jaxgrow.models.llama import LlamaConfig


def _read_windows(theirs: Mapping[str, Any]) -> dict[str, Any]:
    if not theirs.get("use_sliding_window"):
        return {"kinds": "f"}
    layers = theirs["num_hidden_layers"]
    first = theirs.get("max_window_layers", 28)
    return read_windows(theirs, "".join("s" if i >= first else "f" for i in range(layers)), 32768)


def _read_qwen2(theirs: Mapping[str, Any]) -> dict[str, Any]:
    return read_llama(theirs) | _read_windows(theirs)


def _read_qwen3(theirs: Mapping[str, Any]) -> dict[str, Any]:
    return read_llama(theirs, head_dim=128) | _read_windows(theirs)


def _written(config: LlamaConfig) -> dict[str, Any]:
    windows = {"use_sliding_window": "s" in config.layer_kinds}
    return written_rope(config) | written_kinds(config) | windows


def _check_experts_in_all_layers(theirs: Mapping[str, Any]) -> None:
    if theirs.get("mlp_only_layers") or theirs.get("decoder_sparse_step", 1) != 1:
        raise ValueError(
            f"mlp_only_layers is {spelt(theirs.get('mlp_only_layers'))} and decoder_sparse_step is "
            f"{spelt(theirs.get('decoder_sparse_step', 1))}, which makes some layers dense. jaxgrow "
            "supports only models with experts in all layers"
        )


def _read_qwen3_moe(theirs: Mapping[str, Any]) -> dict[str, Any]:
    _check_experts_in_all_layers(theirs)
    windows = read_one_window(theirs, 32768) if theirs.get("use_sliding_window") else {"kinds": "f"}
    return read_llama(theirs, key_heads=4) | windows


def _written_qwen3_moe(config: LlamaConfig) -> dict[str, Any]:
    return written_one_window(config) | {
        "use_sliding_window": "s" in config.layer_kinds,
        # The name of this key in earlier versions than transformers 5.
        "num_experts": config.experts,
    }


def _read_qwen2_moe(theirs: Mapping[str, Any]) -> dict[str, Any]:
    _check_experts_in_all_layers(theirs)
    if "sliding_attention" in (theirs.get("layer_types") or ()):
        raise ValueError(
            "layer_types has 'sliding_attention', but jaxgrow supports Qwen2-MoE only with full "
            "attention"
        )
    return read_llama(theirs, key_heads=16)


def _written_qwen2_moe(config: LlamaConfig) -> dict[str, Any]:
    return written_rope(config) | {"layer_types": ["full_attention"] * config.layers}


_MIXTURE = {**MIXTURE, **EPS, "norm_topk_prob": ("gates_normed", False)}
#: The names of finer experts, which OLMoE has as well.
MIXTURE_NAMES = partial(
    names,
    router="mlp.gate",
    experts=tuple(f"mlp.experts.{{experts}}.{name}_proj" for name in ("gate", "up", "down")),
)

QWEN2 = architectures(
    "Qwen2",
    "qwen2",
    32768,
    _read_qwen2,
    _written,
    fixed={"qkv_bias": True},
)
QWEN3 = architectures(
    "Qwen3",
    "qwen3",
    32768,
    _read_qwen3,
    _written,
    folded=("query_eps",),
    fixed={"query_norm": "head"},
    settings=UNBIASED,
)
QWEN3_MOE = architectures(
    "Qwen3Moe",
    "qwen3_moe",
    32768,
    _read_qwen3_moe,
    _written_qwen3_moe,
    fixed={"query_norm": "head"},
    fields={
        **_MIXTURE,
        "moe_intermediate_size": ("mlp", 768),
        "num_experts_per_tok": ("active", 8),
        "num_local_experts": ("experts", 128),
    },
    names=MIXTURE_NAMES,
    settings=UNBIASED,
    mixture=True,
    folded=("query_eps",),
)
QWEN2_MOE = architectures(
    "Qwen2Moe",
    "qwen2_moe",
    32768,
    _read_qwen2_moe,
    _written_qwen2_moe,
    fields={
        **_MIXTURE,
        "moe_intermediate_size": ("mlp", 1408),
        "num_experts": ("experts", 60),
        "shared_expert_intermediate_size": ("shared", 5632),
        "qkv_bias": ("qkv_bias", True),
    },
    names=MIXTURE_NAMES,
    settings={"hidden_act": SILU, "use_sliding_window": (False,)},
    mixture=True,
)

"""gpt-oss: experts with biases and clamped units, attention sinks, a window in every other layer."""

from collections.abc import Mapping
from typing import Any

from jaxgrow.checkpoints.hf.families.llama.architectures import (
    MIXTURE,
    SILU,
    architectures,
    read_llama,
    written_biased,
)
from jaxgrow.checkpoints.hf.families.llama.parts import LAYER, names
from jaxgrow.checkpoints.hf.rope import read_windows, written_kinds
from jaxgrow.checkpoints.hf.tensor_layout import TensorLayout
from jaxgrow.models.llama import LlamaConfig

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _names(config: LlamaConfig) -> dict[str, TensorLayout]:
    """Return the places of the leaves of gpt-oss.

    All experts of a layer are one tensor. Gates and units alternate along its last axis.
    """
    found = names(config, router="mlp.router", experts=("", "", ""))
    mlp = f"{LAYER}mlp."
    for part, ours in enumerate(("gate", "up")):
        fused = f"{mlp}experts.gate_up_proj"
        found[f"blocks/mlp/{ours}/kernel"] = TensorLayout(fused, "experts embed (mlp 2)", part)
        found[f"blocks/mlp/{ours}/bias"] = TensorLayout(fused + "_bias", "experts (mlp 2)", part)
    found["blocks/mlp/down/kernel"] = TensorLayout(f"{mlp}experts.down_proj", "experts mlp embed")
    found["blocks/mlp/down/bias"] = TensorLayout(f"{mlp}experts.down_proj_bias", "experts embed")
    found["blocks/mlp/router/bias"] = TensorLayout(f"{mlp}router.bias", "experts")
    found["blocks/attention/sinks"] = TensorLayout(f"{LAYER}self_attn.sinks", "heads")
    return found


def _read_gpt_oss(theirs: Mapping[str, Any]) -> dict[str, Any]:
    # An empty object means unscaled frequencies, unlike a missing key.
    if not theirs.get("rope_scaling") and theirs.get("rope_parameters") is None:
        theirs = {**theirs, "rope_scaling": _ROPE}
    limit = theirs.get("swiglu_limit", 7.0)
    if not limit > 0:
        raise ValueError(f"swiglu_limit is {limit!r}, but has to be greater than 0")
    biased = theirs.get("attention_bias", True)
    ours = read_llama(
        {"max_position_embeddings": 131072, **theirs}, key_heads=8, theta=150000.0, head_dim=64
    )
    windows = read_windows(theirs, "sf", 131072, 128)
    return ours | windows | {"qkv_bias": biased, "out_bias": biased, "gates_normed": True}


def _written_gpt_oss(config: LlamaConfig) -> dict[str, Any]:
    out = written_biased(config) | written_kinds(config)
    # The default of gpt-oss is a scaling, so the key is always written.
    return out | {"rope_scaling": out["rope_scaling"] or {"rope_type": "default"}}


GPT_OSS = architectures(
    "GptOss",
    "gpt_oss",
    131072,
    _read_gpt_oss,
    _written_gpt_oss,
    fixed={"sinks": True},
    fields={**MIXTURE, "num_local_experts": ("experts", 128), "swiglu_limit": ("clamp", 7.0)},
    names=_names,
    settings={"hidden_act": SILU, "swiglu_alpha": (1.702,)},
    mixture=True,
)

"""OLMo 1, with LayerNorm without parameters; OLMo 2 and 3, with norms after sublayers; OLMoE.

OLMo 2, OLMo 3 and OLMoE also have norms over all queries and over all keys. OLMoE is a mixture of
experts in each layer, with norms before sublayers.
"""

from collections.abc import Mapping
from typing import Any

from jaxgrow.checkpoints.hf.families.llama.architectures import UNBIASED, architectures, read_llama
from jaxgrow.checkpoints.hf.families.llama.qwen import MIXTURE_NAMES
from jaxgrow.checkpoints.hf.rope import (
    read_heads,
    read_layered_rope,
    read_windows,
    written_kinds,
    written_rope,
)
from jaxgrow.models.llama import LlamaConfig


def _read_olmo3(theirs: Mapping[str, Any]) -> dict[str, Any]:
    # `transformers` applies ``rope_theta`` only to the layers with full attention.
    rope = read_layered_rope(theirs, 5e5, None, 5e5)
    return read_heads(theirs) | rope | read_windows(theirs, "sssf", 65536)


def _written_olmo3(config: LlamaConfig) -> dict[str, Any]:
    return written_rope(config) | written_kinds(config)


_NORMED_AFTER: dict[str, Any] = {
    "fixed": {"norms": "after", "query_norm": "all"},
    "settings": UNBIASED,
    "absent": {"rms_norm_eps": 1e-5},
    "heads": "must divide embed",
    "folded": ("query_eps",),
}

OLMO = architectures(
    "Olmo",
    "olmo",
    2048,
    read_llama,
    fixed={"layer_norm": True, "norm_scale": False, "eps": 1e-5},
    fields={},
    settings={**UNBIASED, "clip_qkv": (None,)},
    heads="must divide embed",
)
# `transformers` has no classifier of this family.
OLMOE, _ = architectures(
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
    names=MIXTURE_NAMES,
    settings={**UNBIASED, "clip_qkv": (None,)},
    mixture=True,
    folded=("query_eps",),
    heads="divide embed",
)
OLMO2 = architectures("Olmo2", "olmo2", 2048, read_llama, **_NORMED_AFTER)
OLMO3 = architectures("Olmo3", "olmo3", 65536, _read_olmo3, _written_olmo3, **_NORMED_AFTER)

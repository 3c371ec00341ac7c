"""GPT-NeoX, such as Pythia.

It has LayerNorm, biases, parallel sublayers, and partial rotary embeddings (a quarter of each
head). Queries, keys and values are fused head by head.
"""

from collections.abc import Mapping
from typing import Any

from jaxgrow.checkpoints.hf.base import key_of
from jaxgrow.checkpoints.hf.families.llama.architectures import architectures
from jaxgrow.checkpoints.hf.families.llama.parts import HEADS, NORMS, head
from jaxgrow.checkpoints.hf.rope import read_heads, read_rope, written_rope
from jaxgrow.checkpoints.hf.tensor_layout import TensorLayout, linear_layouts, norm_layouts
from jaxgrow.models.llama import LlamaConfig

_LAYER = "gpt_neox.layers.{layers}."
_GELUS = {
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def _names(config: LlamaConfig) -> dict[str, TensorLayout]:
    found = {"token_embedding": TensorLayout("gpt_neox.embed_in.weight", "vocab embed")}
    for part, (ours, heads) in enumerate(HEADS.items()):
        fused = f"{_LAYER}attention.query_key_value"
        outputs = f"({heads} 3 head_dim)"
        found |= linear_layouts(f"blocks/attention/{ours}", fused, outputs, part=part)
    for ours, theirs, outputs, inputs in (
        ("attention/out", "attention.dense", "embed", "(heads head_dim)"),
        ("mlp/up", "mlp.dense_h_to_4h", "mlp", "embed"),
        ("mlp/down", "mlp.dense_4h_to_h", "embed", "mlp"),
    ):
        found |= linear_layouts(f"blocks/{ours}", f"{_LAYER}{theirs}", outputs, inputs)
    norms = {f"blocks/{ours}": _LAYER + theirs for ours, theirs in NORMS["before"].items()}
    norms["final_norm"] = "gpt_neox.final_layer_norm"
    return found | norm_layouts(norms) | head(config, "embed_out")


def _read_neox(theirs: Mapping[str, Any]) -> dict[str, Any]:
    heads = read_heads({**theirs, "num_key_value_heads": None})
    if theirs["hidden_size"] != heads["head_dim"] * theirs["num_attention_heads"]:
        raise ValueError(
            f"head_dim is {heads['head_dim']}, but in GPT-NeoX it is the hidden size divided by "
            f"the number of heads, {theirs['hidden_size']} / {theirs['num_attention_heads']}"
        )
    # `transformers` does not read the usual keys for this architecture.
    like = {
        **theirs,
        "rope_theta": theirs.get("rotary_emb_base"),
        "partial_rotary_factor": theirs.get("rotary_pct"),
    }
    activation = _GELUS[theirs.get("hidden_act", "gelu")]
    return heads | read_rope(like, rotary=0.25) | {"activation": activation}


def _written_neox(config: LlamaConfig) -> dict[str, Any]:
    return {
        "rotary_pct": config.rotary,
        "rotary_emb_base": config.rope_theta,
        "rope_scaling": written_rope(config)["rope_scaling"],
        "hidden_act": key_of(_GELUS, config.activation),
    }


GPT_NEOX = architectures(
    "GPTNeoX",
    "gpt_neox",
    2048,
    _read_neox,
    _written_neox,
    fixed={"layer_norm": True, "gated": False, "bias": True, "qkv_bias": True},
    fields={"layer_norm_eps": ("eps", 1e-5), "use_parallel_residual": ("parallel", True)},
    settings={"hidden_act": tuple(_GELUS), "attention_bias": (True,)},
    names=_names,
    prefix="gpt_neox.",
    modules={"embed_out": "lm_head"},
    ignored=("*.rotary_emb.inv_freq", "*.attention.bias", "*.attention.masked_bias"),
    heads="divide embed",
)

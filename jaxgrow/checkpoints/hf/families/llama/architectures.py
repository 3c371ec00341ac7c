"""How is an architecture of the Llama family described?

`architectures` builds the two architectures of a model with a head. The other files of this folder
call it once for each model.
"""

from collections.abc import Callable, Mapping
from typing import Any

from jaxgrow.checkpoints.hf.base import Family, with_head
from jaxgrow.checkpoints.hf.families.llama.parts import names
from jaxgrow.checkpoints.hf.rope import read_heads, read_rope, written_rope
from jaxgrow.models.llama import LlamaConfig

SILU = ("silu", "swish")
UNBIASED = {"hidden_act": SILU, "attention_bias": (False,)}
# The keys of ``config.json`` that all models share.
_FIELDS = {
    "vocab_size": "vocab",
    "max_position_embeddings": "context",
    "num_hidden_layers": "layers",
    "hidden_size": "embed",
    "num_attention_heads": "heads",
    "tie_word_embeddings": "tied",
}
# Further keys, their fields, and the values of keys that a file does not have.
EPS = {"rms_norm_eps": ("eps", 1e-6)}
MLP_BIAS = {**EPS, "mlp_bias": ("mlp_bias", False)}
MIXTURE = {
    "rms_norm_eps": ("eps", 1e-5),
    "num_experts_per_tok": ("active", 4),
    "router_aux_loss_coef": ("balance", 0.001),
}


def architectures(
    model: str,
    model_type: str,
    context: int,
    read: Callable[[Mapping[str, Any]], dict[str, Any]],
    written: Callable[[LlamaConfig], dict[str, Any]] = written_rope,
    *,
    fixed: Mapping[str, Any] | None = None,
    fields: Mapping[str, tuple[str, Any]] = EPS,
    absent: Mapping[str, Any] | None = None,
    classifier: str | None = None,
    **more: Any,
) -> tuple[Family, Family]:
    """Return the architectures for the prediction of tokens and for the prediction of classes.

    Args:
      model: the beginning of the names of both architectures.
      model_type: the value of ``model_type``.
      context: the length of the context in files without ``max_position_embeddings``.
      read: a function from a ``config.json`` to fields of the config.
      written: a function from a config to keys of a ``config.json``.
      fixed: the fields that all models of this kind share.
      fields: for keys besides those of all models, the field, and the value if a file does not have
        the key.
      absent: other values of keys that a file does not have.
      classifier: the beginning of the name of the second architecture, if it is not ``model``.
      **more: further fields of `Family`.
    """
    own = {key: field for key, (field, _) in fields.items()}
    common: dict[str, Any] = {
        "model_type": model_type,
        "config": LlamaConfig,
        "fields": {
            **_FIELDS,
            **({} if "mlp" in own.values() else {"intermediate_size": "mlp"}),
            **own,
        },
        "absent": {
            "max_position_embeddings": context,
            "tie_word_embeddings": False,
            **{key: value for key, (_, value) in fields.items()},
            **(absent or {}),
        },
        "unsaid": {"pad_token_id": None},
        "names": names,
        "prefix": "model.",
        "ignored": ("*.rotary_emb.inv_freq",),
        "settings": {"hidden_act": SILU},
        "heads": "free",
        **more,
    }
    tokens = Family(
        architecture=f"{model}ForCausalLM",
        fixed={"head": "tokens", **(fixed or {})},
        inferred=read,
        derived=written,
        **common,
    )
    return tokens, with_head(tokens, f"{classifier or model}ForSequenceClassification", "classes")


def read_llama(
    theirs: Mapping[str, Any],
    key_heads: int | None = None,
    theta: float = 1e4,
    head_dim: int | None = None,
) -> dict[str, Any]:
    """Return the fields of heads and of rotary embeddings that are the same in all layers."""
    return read_heads(theirs, key_heads, head_dim) | read_rope(theirs, theta)


def read_biased(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a Llama whose attention may have biases."""
    biased = theirs.get("attention_bias", False)
    return read_llama(theirs) | {"qkv_bias": biased, "out_bias": biased}


def written_biased(config: LlamaConfig) -> dict[str, Any]:
    """Return the keys of a Llama whose attention may have biases."""
    return written_rope(config) | {"attention_bias": config.out_bias}

"""How is an architecture of the Llama family described?

`architectures` builds the two architectures of a model, and `without_head` the one of its body. The
other files of this folder call the first once for each model.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from jaxgrow.checkpoints.hf.base import Family, Stored
from jaxgrow.checkpoints.hf.families.llama.parts import names
from jaxgrow.checkpoints.hf.labels import classes, problem
from jaxgrow.checkpoints.hf.rope import read_heads, read_rope, written_rope
from jaxgrow.models.llama import LlamaConfig

SILU = ("silu", "swish")
UNBIASED = {"hidden_act": SILU, "attention_bias": (False,)}
#: The fields of an MLP that may have biases, and their values in files that do not have the keys.
MLP_BIAS_FIELDS = {"rms_norm_eps": "eps", "mlp_bias": "mlp_bias"}
MLP_BIAS_ABSENT = {"rms_norm_eps": 1e-6, "mlp_bias": False}
#: The fields of a mixture of experts, and their values in files that do not have the keys.
MIXTURE_FIELDS = {
    "rms_norm_eps": "eps",
    "num_experts_per_tok": "active",
    "router_aux_loss_coef": "balance",
}
MIXTURE_ABSENT = {"rms_norm_eps": 1e-5, "num_experts_per_tok": 4, "router_aux_loss_coef": 0.001}


def architectures(
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
    """Return the architectures for the prediction of tokens and for the prediction of classes.

    Args:
      model: the beginning of the names of both architectures.
      model_type: the value of ``model_type``.
      context: the length of the context in files without ``max_position_embeddings``.
      read: a function from a ``config.json`` to fields of the config.
      written: a function from a config to keys of a ``config.json``.
      fixed: the fields that all models of this kind share.
      fields: the keys that are fields under another name, besides those of all models (default: the
        epsilon of RMSNorm).
      absent: the values of keys that a file does not have, besides those of all models.
      classifier: the beginning of the name of the second architecture, if it is not ``model``.
      **more: further fields of `Family`.
    """
    if fields is None:
        absent = {"rms_norm_eps": 1e-6, **(absent or {})}
        fields = {"rms_norm_eps": "eps"}
    common: dict[str, Any] = {
        "model_type": model_type,
        "config": LlamaConfig,
        "fields": _fields(fields),
        "absent": {
            "max_position_embeddings": context,
            "tie_word_embeddings": False,
            **(absent or {}),
        },
        "unsaid": {"pad_token_id": None},
        "names": names,
        "prefix": "model.",
        "ignored": ("*.rotary_emb.inv_freq",),
        **more,
    }
    tokens = Family(
        architecture=f"{model}ForCausalLM",
        fixed={"head": "tokens", **(fixed or {})},
        inferred=read,
        derived=written,
        **common,
    )
    return tokens, _classifying(tokens, f"{classifier or model}ForSequenceClassification")


def _classifying(tokens: Family, architecture: str) -> Family:
    """The architecture with the same body that predicts classes."""
    return replace(
        tokens,
        architecture=architecture,
        fixed={**tokens.fixed, "head": "classes"},
        inferred=lambda theirs: tokens.inferred(theirs) | classes(theirs),
        derived=lambda config: tokens.derived(config) | problem(config),
    )


def without_head(tokens: Family) -> Family:
    """The architecture with the same body that returns its last hidden states."""

    def names(config: LlamaConfig) -> dict[str, Stored]:
        return {
            path: replace(stored, name=stored.name.removeprefix(tokens.prefix))
            for path, stored in tokens.names(config).items()
        }

    return replace(
        tokens,
        architecture=tokens.architecture.replace("ForCausalLM", "Model"),
        fixed={**tokens.fixed, "head": "states"},
        names=names,
        prefix="",
        stray=tokens.prefix,
        ignored=(*tokens.ignored, "lm_head.*"),
    )


def _fields(own: Mapping[str, str]) -> dict[str, str]:
    """The fields that all models share, and the own ones of a model."""
    found = {
        "vocab_size": "vocab",
        "max_position_embeddings": "context",
        "num_hidden_layers": "layers",
        "hidden_size": "embed",
        "num_attention_heads": "heads",
        "tie_word_embeddings": "tied",
    }
    if "mlp" not in own.values():
        found["intermediate_size"] = "mlp"
    return {**found, **own}


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

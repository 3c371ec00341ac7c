"""How is GPT-2 stored?

Its kernels are stored as in jaxgrow, as [inputs, outputs]. Queries, keys and values are one tensor.
"""

from collections.abc import Mapping
from typing import Any

from jaxgrow.checkpoints.hf.base import Family, Stored
from jaxgrow.checkpoints.hf.labels import classes, problem
from jaxgrow.models.gpt2 import GPT2Config


def _names(config: GPT2Config) -> dict[str, Stored]:
    h = "transformer.h.{layers}."
    names = {
        "token_embedding": Stored("transformer.wte.weight", "vocab embed"),
        "position_embedding": Stored("transformer.wpe.weight", "context embed"),
        "blocks/attention/out/kernel": Stored(h + "attn.c_proj.weight", "(heads head_dim) embed"),
        "blocks/attention/out/bias": Stored(h + "attn.c_proj.bias", "embed"),
        "blocks/mlp/up/kernel": Stored(h + "mlp.c_fc.weight", "embed mlp"),
        "blocks/mlp/up/bias": Stored(h + "mlp.c_fc.bias", "mlp"),
        "blocks/mlp/down/kernel": Stored(h + "mlp.c_proj.weight", "mlp embed"),
        "blocks/mlp/down/bias": Stored(h + "mlp.c_proj.bias", "embed"),
    }
    for i, name in enumerate(("query", "key", "value")):
        names[f"blocks/attention/{name}/kernel"] = Stored(
            h + "attn.c_attn.weight", "embed (3 heads head_dim)", i
        )
        names[f"blocks/attention/{name}/bias"] = Stored(
            h + "attn.c_attn.bias", "(3 heads head_dim)", i
        )
    for ours, theirs in (
        ("blocks/attention_norm", h + "ln_1"),
        ("blocks/mlp_norm", h + "ln_2"),
        ("final_norm", "transformer.ln_f"),
    ):
        names[f"{ours}/scale"] = Stored(f"{theirs}.weight", "embed")
        names[f"{ours}/bias"] = Stored(f"{theirs}.bias", "embed")
    if config.head == "classes":
        names["classifier/kernel"] = Stored("score.weight", "classes embed")
    elif not config.tied:
        names["head_kernel"] = Stored("lm_head.weight", "vocab embed")
    return names


# The names in the first group stand for the same formula.
_ACTIVATIONS = dict.fromkeys(
    ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate"), "gelu_tanh"
)
_ACTIVATIONS |= dict.fromkeys(("gelu", "gelu_python"), "gelu")


def _activation(theirs: Mapping[str, Any]) -> dict[str, Any]:
    return {"activation": _ACTIVATIONS[theirs.get("activation_function", "gelu_new")]}


def _written(config: GPT2Config) -> dict[str, Any]:
    return {"activation_function": "gelu_new" if config.activation == "gelu_tanh" else "gelu"}


_GPT2: dict[str, Any] = dict(
    model_type="gpt2",
    config=GPT2Config,
    fields={
        "vocab_size": "vocab",
        "n_positions": "context",
        "n_layer": "layers",
        "n_embd": "embed",
        "n_head": "heads",
        "n_inner": "mlp",
        "layer_norm_epsilon": "eps",
        "tie_word_embeddings": "tied",
    },
    names=_names,
    settings={
        "activation_function": tuple(_ACTIVATIONS),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        # This changes the precision of the computation, but not the function.
        "reorder_and_upcast_attn": (False, True),
        "add_cross_attention": (False,),
    },
    ignored=("*.attn.bias", "*.attn.masked_bias"),
    absent={
        "n_inner": lambda ours: 4 * ours["embed"],
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
    prefix="transformer.",
)

GPT2LMHeadModel = Family(
    architecture="GPT2LMHeadModel",
    fixed={"head": "tokens"},
    inferred=_activation,
    derived=_written,
    **_GPT2,
)
GPT2ForSequenceClassification = Family(
    architecture="GPT2ForSequenceClassification",
    fixed={"head": "classes"},
    inferred=lambda theirs: _activation(theirs) | classes(theirs),
    derived=lambda config: _written(config) | problem(config),
    **_GPT2,
)

FAMILIES = (GPT2LMHeadModel, GPT2ForSequenceClassification)

"""How is OPT stored?

Its modules are as in GPT-2, with separate queries, keys and values. Kernels are stored as
[outputs, inputs].
"""

from jaxgrow.checkpoints.hf.base import Family, key_of, with_head, without_head
from jaxgrow.checkpoints.hf.families.llama import head_layout
from jaxgrow.checkpoints.hf.registry import register_families
from jaxgrow.checkpoints.hf.tensor_layout import TensorLayout, linear_layouts, norm_layouts
from jaxgrow.models.gpt2 import GPT2Config
from jaxgrow.typed import Json

# The row of the position embedding for the first token.
_FIRST_ROW = 2


def _opt_layouts(config: GPT2Config) -> dict[str, TensorLayout]:
    model = "model.decoder."
    layer = "model.decoder.layers.{layers}."
    names = {
        "token_embedding": TensorLayout(model + "embed_tokens.weight", "vocab embed"),
        "position_embedding": TensorLayout(model + "embed_positions.weight", "context embed"),
    }
    for path, module, outputs, inputs in (
        ("attention/query", "self_attn.q_proj", "(heads head_dim)", "embed"),
        ("attention/key", "self_attn.k_proj", "(heads head_dim)", "embed"),
        ("attention/value", "self_attn.v_proj", "(heads head_dim)", "embed"),
        ("attention/out", "self_attn.out_proj", "embed", "(heads head_dim)"),
        ("mlp/up", "fc1", "mlp", "embed"),
        ("mlp/down", "fc2", "embed", "mlp"),
    ):
        names |= linear_layouts(f"blocks/{path}", layer + module, outputs, inputs)
    names |= norm_layouts(
        {
            "blocks/attention_norm": layer + "self_attn_layer_norm",
            "blocks/mlp_norm": layer + "final_layer_norm",
            "final_norm": model + "final_layer_norm",
        }
    )
    return names | head_layout(config, "lm_head")


_OPT_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def _read_opt(hf_config: Json) -> Json:
    width = hf_config.get("word_embed_proj_dim") or hf_config["hidden_size"]
    if width != hf_config["hidden_size"]:
        raise ValueError(
            f"word_embed_proj_dim is {width}, but hidden_size is {hf_config['hidden_size']}. An OPT that projects its "
            "embeddings is not supported"
        )
    return {
        "context": hf_config.get("max_position_embeddings", 2048) + _FIRST_ROW,
        "activation": _OPT_ACTIVATIONS[hf_config.get("activation_function", "relu")],
    }


def _written_opt(config: GPT2Config) -> Json:
    return {
        "max_position_embeddings": config.context - _FIRST_ROW,
        "activation_function": key_of(_OPT_ACTIVATIONS, config.activation),
        "word_embed_proj_dim": config.embed,
    }


OPTForCausalLM = Family(
    architecture="OPTForCausalLM",
    fixed={"first_position": _FIRST_ROW, "eps": 1e-5, "head": "tokens"},
    inferred=_read_opt,
    derived=_written_opt,
    model_type="opt",
    config=GPT2Config,
    fields={
        "vocab_size": "vocab",
        "num_hidden_layers": "layers",
        "hidden_size": "embed",
        "num_attention_heads": "heads",
        "ffn_dim": "mlp",
        "tie_word_embeddings": "tied",
    },
    absent={"tie_word_embeddings": True},
    names=_opt_layouts,
    settings={
        "activation_function": tuple(_OPT_ACTIVATIONS),
        "do_layer_norm_before": (True,),
        "_remove_final_layer_norm": (False,),
        "enable_bias": (True,),
        "layer_norm_elementwise_affine": (True,),
    },
    prefix="model.",
)

register_families(
    OPTForCausalLM,
    with_head(OPTForCausalLM, "OPTForSequenceClassification", "classes"),
    without_head(OPTForCausalLM),
)

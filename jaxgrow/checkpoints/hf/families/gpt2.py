"""How is GPT-2 stored?

Its kernels are stored as in jaxgrow, as [inputs, outputs]. Queries, keys and values are one tensor.
"""

from jaxgrow.checkpoints.hf.base import Family, with_head, without_head
from jaxgrow.checkpoints.hf.families.llama import head_layout
from jaxgrow.checkpoints.hf.tensor_layout import TensorLayout, norm_layouts
from jaxgrow.models.gpt2 import GPT2Config


def _gpt2_layouts(config: GPT2Config) -> dict[str, TensorLayout]:
    h = "transformer.h.{layers}."
    names = {
        "token_embedding": TensorLayout("transformer.wte.weight", "vocab embed"),
        "position_embedding": TensorLayout("transformer.wpe.weight", "context embed"),
    }
    fused = ("attn.c_attn", "embed", "(3 heads head_dim)")
    for part, (path, (module, inputs, outputs)) in enumerate(
        {
            **{f"attention/{name}": fused for name in ("query", "key", "value")},
            "attention/out": ("attn.c_proj", "(heads head_dim)", "embed"),
            "mlp/up": ("mlp.c_fc", "embed", "mlp"),
            "mlp/down": ("mlp.c_proj", "mlp", "embed"),
        }.items()
    ):
        of = part if part < 3 else None
        names[f"blocks/{path}/kernel"] = TensorLayout(
            f"{h}{module}.weight", f"{inputs} {outputs}", of
        )
        names[f"blocks/{path}/bias"] = TensorLayout(f"{h}{module}.bias", outputs, of)
    norms = {"blocks/attention_norm": h + "ln_1", "blocks/mlp_norm": h + "ln_2"}
    names |= norm_layouts({**norms, "final_norm": "transformer.ln_f"})
    return names | head_layout(config, "lm_head")


# The names in the first group stand for the same formula.
_GPT2_ACTIVATIONS = dict.fromkeys(
    ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate"), "gelu_tanh"
)
_GPT2_ACTIVATIONS |= dict.fromkeys(("gelu", "gelu_python"), "gelu")


GPT2LMHeadModel = Family(
    architecture="GPT2LMHeadModel",
    fixed={"head": "tokens"},
    inferred=lambda hf_config: {
        "activation": _GPT2_ACTIVATIONS[hf_config.get("activation_function", "gelu_new")]
    },
    derived=lambda config: {
        "activation_function": "gelu_new" if config.activation == "gelu_tanh" else "gelu"
    },
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
    names=_gpt2_layouts,
    settings={
        "activation_function": tuple(_GPT2_ACTIVATIONS),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        # This changes the precision of the computation, but not the function.
        "reorder_and_upcast_attn": (False, True),
        "add_cross_attention": (False,),
    },
    ignored=("*.attn.bias", "*.attn.masked_bias"),
    absent={
        "n_inner": lambda fields: 4 * fields["embed"],
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
    prefix="transformer.",
)

FAMILIES = (
    GPT2LMHeadModel,
    with_head(GPT2LMHeadModel, "GPT2ForSequenceClassification", "classes"),
    without_head(GPT2LMHeadModel),
)

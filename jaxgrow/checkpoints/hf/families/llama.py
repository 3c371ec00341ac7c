"""How are Llama and the models that are stored like it stored?

Kernels are stored as [outputs, inputs]. `jaxgrow.extras.families.llama_like` and
`jaxgrow.extras.families.mixtures` have the other models, each as one call of `decoder_families`.
"""

from collections.abc import Callable, Mapping

from jaxgrow.checkpoints.hf.base import Family, with_head, without_head
from jaxgrow.checkpoints.hf.rope import read_heads, read_rope, written_rope
from jaxgrow.checkpoints.hf.tensor_layout import TensorLayout, linear_layouts
from jaxgrow.models.config import TextConfig
from jaxgrow.models.llama import LlamaConfig
from jaxgrow.typed import Json

# --- names and layouts ---

LAYER = "model.layers.{layers}."
#: The number of heads of each projection of attention that has a norm, a bias or rotations.
HEADS = {"query": "heads", "key": "kv_heads", "value": "kv_heads"}
NORMS = {
    "before": {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "after": {
        "attention_post_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
    "both": {
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
}
MLP_KERNELS = {"gate": ("mlp", "embed"), "up": ("mlp", "embed"), "down": ("embed", "mlp")}


def llama_layouts(
    config: LlamaConfig,
    mlp: Callable[[LlamaConfig], dict[str, TensorLayout]] | None = None,
) -> dict[str, TensorLayout]:
    """Return the layouts of the leaves.

    Args:
      config: the config.
      mlp: the layouts of a mixture of experts in place of the MLP.
    """
    found = {"token_embedding": TensorLayout("model.embed_tokens.weight", "vocab embed")}
    found |= _attention_layouts(config) | head_layout(config, "lm_head")
    found |= _mlp_layouts(config) if mlp is None else mlp(config)
    if config.norm_scale:
        for path, module in NORMS[config.norms].items():
            found[f"blocks/{path}/scale"] = TensorLayout(f"{LAYER}{module}.weight", "embed")
        found["final_norm/scale"] = TensorLayout("model.norm.weight", "embed")
    return found


def _attention_layouts(config: LlamaConfig) -> dict[str, TensorLayout]:
    attention, module = "blocks/attention/", f"{LAYER}self_attn."
    out = ("embed", "(heads head_dim)")
    found = linear_layouts(f"{attention}out", f"{module}o_proj", *out, bias=config.out_bias)
    for path, heads in HEADS.items():
        outputs = f"({heads} head_dim)"
        normed = config.query_norm != "none" and path != "value"
        # The architecture has the same eps in all norms. The output of a norm does not change if
        # its input is multiplied by s and its eps by s^2. Therefore a norm with another eps is
        # stored by scaling the kernel before it.
        other_eps = normed and config.query_eps
        times = (config.eps / config.query_eps) ** 0.5 if other_eps else 1.0
        kernel = TensorLayout(f"{module}{path[0]}_proj.weight", f"{outputs} embed", times=times)
        found[f"{attention}{path}/kernel"] = kernel
        if config.qkv_bias:
            found[f"{attention}{path}/bias"] = TensorLayout(f"{module}{path[0]}_proj.bias", outputs)
        if normed:
            over = outputs if config.query_norm == "all" else "head_dim"
            scale = TensorLayout(f"{module}{path[0]}_norm.weight", over)
            found[f"{attention}{path}_norm/scale"] = scale
    return found


def _mlp_layouts(config: LlamaConfig) -> dict[str, TensorLayout]:
    found = {}
    for path, of in MLP_KERNELS.items():
        found |= linear_layouts(
            f"blocks/mlp/{path}", f"{LAYER}mlp.{path}_proj", *of, bias=config.mlp_bias
        )
    return found


def head_layout(config: TextConfig, name: str) -> dict[str, TensorLayout]:
    """Return the layout of the head.

    Args:
      config: the config.
      name: the name of the head that predicts tokens, if it is not tied to the embedding.
    """
    if config.head == "classes":
        return {"classifier/kernel": TensorLayout("score.weight", "classes embed")}
    if config.head == "states" or config.tied:
        return {}
    return {"head_kernel": TensorLayout(f"{name}.weight", "vocab embed")}


# --- settings ---

SILU = ("silu", "swish")
UNBIASED = {"hidden_act": SILU, "attention_bias": (False,)}
# The keys of ``config.json`` that all models share.
_LLAMA_FIELDS = {
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


def read_llama(
    hf_config: Json,
    key_heads: int | None = None,
    theta: float = 1e4,
    head_dim: int | None = None,
) -> Json:
    """Return the fields of heads and of rotary embeddings that are the same in all layers."""
    return read_heads(hf_config, key_heads, head_dim) | read_rope(hf_config, theta)


def read_biased(hf_config: Json) -> Json:
    """Return the fields of a Llama whose attention may have biases."""
    biased = hf_config.get("attention_bias", False)
    return read_llama(hf_config) | {"qkv_bias": biased, "out_bias": biased}


def written_biased(config: LlamaConfig) -> Json:
    """Return the keys of a Llama whose attention may have biases."""
    return written_rope(config) | {"attention_bias": config.out_bias}


def decoder_families(
    model: str,
    model_type: str,
    context: int,
    read: Callable[[Json], Json],
    written: Callable[[LlamaConfig], Json] = written_rope,
    *,
    fixed: Mapping[str, object] | None = None,
    fields: Mapping[str, tuple[str, object]] = EPS,
    absent: Mapping[str, object] | None = None,
    classifier: str | None = "",
    body: str = "",
    **more: object,
) -> tuple[Family, ...]:
    """Return the architectures that predict tokens and classes, and the one without a head.

    Args:
      model: the beginning of the names of the architectures.
      model_type: the value of ``model_type``.
      context: the length of the context in files without ``max_position_embeddings``.
      read: a function from a ``config.json`` to fields of the config.
      written: a function from a config to keys of a ``config.json``.
      fixed: the fields that all models of this kind share.
      fields: for keys besides those of all models, the field, and the value if a file does not have
        the key.
      absent: other values of keys that a file does not have.
      classifier: the name of the architecture that predicts classes, if it does not begin with
        ``model``; None if `transformers` has none.
      body: the name of the architecture without a head, if it is not ``model`` and "Model".
      **more: further fields of `Family`.
    """
    own = {key: field for key, (field, _) in fields.items()}
    mlp = {} if "mlp" in own.values() else {"intermediate_size": "mlp"}
    usual = {"max_position_embeddings": context, "tie_word_embeddings": False}
    common: Json = {
        "model_type": model_type,
        "config": LlamaConfig,
        "fields": {**_LLAMA_FIELDS, **mlp, **own},
        "absent": {**usual, **{key: value for key, (_, value) in fields.items()}, **(absent or {})},
        "unsaid": {"pad_token_id": None},
        "names": llama_layouts,
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
    classes = classifier or f"{model}ForSequenceClassification"
    heads = () if classifier is None else (with_head(tokens, classes, "classes"),)
    return tokens, *heads, without_head(tokens, body)


FAMILIES = decoder_families(
    "Llama", "llama", 2048, read_biased, written_biased, fields=MLP_BIAS, heads="must divide embed"
)

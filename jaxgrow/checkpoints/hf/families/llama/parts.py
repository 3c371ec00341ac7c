"""Under which names are the parts of a layer of the Llama family stored?

Kernels are stored as [outputs, inputs].
"""

from jaxgrow.checkpoints.hf.tensor_layout import TensorLayout, linear_layouts
from jaxgrow.models.llama import LlamaConfig

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
_MLP = {"gate": ("mlp", "embed"), "up": ("mlp", "embed"), "down": ("embed", "mlp")}


def names(
    config: LlamaConfig,
    fused: bool = False,
    one: float = 0.0,
    router: str = "",
    experts: tuple[str, ...] = (),
) -> dict[str, TensorLayout]:
    """Return the places of the leaves.

    Args:
      config: the config.
      fused: whether queries, keys and values are one tensor, and gate and up another one.
      one: the number that is subtracted from the norm scales when they are stored.
      router: the name of the router.
      experts: the names of gate, up and down of each expert.
    """
    embedding = TensorLayout("model.embed_tokens.weight", "vocab embed", times=_embedded(config))
    found = {"token_embedding": embedding}
    for part, ours in enumerate(HEADS):
        found |= _projection(config, part, ours, fused)
        if config.query_norm != "none" and ours != "value":
            found |= _projection_norm(config, ours, one)
    found |= _experts(experts) if config.experts else _mlp(config, fused)
    of = ("embed", "(heads head_dim)")
    found |= linear_layouts(
        "blocks/attention/out", f"{LAYER}self_attn.o_proj", *of, bias=config.out_bias
    )
    if config.experts:
        found |= {
            "blocks/mlp/router/kernel": TensorLayout(f"{LAYER}{router}.weight", "experts embed")
        }
    if config.shared:
        found |= _shared_expert()
    if config.norm_scale:
        found |= _norms(config, one)
    return found | head(config, "lm_head")


def _projection(config: LlamaConfig, part: int, ours: str, fused: bool) -> dict[str, TensorLayout]:
    """The kernel and the bias of queries, keys or values."""
    outputs = f"({HEADS[ours]} head_dim)"
    linear = f"{LAYER}self_attn.{ours[0]}_proj"
    layout = f"{outputs} embed"
    times = _normed(config, ours)
    if fused:
        tensor = f"{LAYER}self_attn.qkv_proj.weight"
        beside = tuple(f"{heads} head_dim" for heads in HEADS.values())
        kernel = TensorLayout(tensor, layout, part, beside, times=times)
    else:
        kernel = TensorLayout(f"{linear}.weight", layout, times=times)
    found = {f"blocks/attention/{ours}/kernel": kernel}
    if config.qkv_bias:
        found[f"blocks/attention/{ours}/bias"] = TensorLayout(f"{linear}.bias", outputs)
    return found


def _normed(config: LlamaConfig, ours: str) -> float:
    """The factor of the kernel of queries or keys whose outputs are normed with another eps.

    The architecture has the same eps in all norms. The output of a norm does not change if its
    input is multiplied by s and its eps by s^2. Therefore a norm with another eps can be stored by
    scaling the kernel before it.
    """
    if config.query_norm == "none" or ours == "value" or not config.query_eps:
        return 1.0
    return (config.eps / config.query_eps) ** 0.5


def _projection_norm(config: LlamaConfig, ours: str, one: float) -> dict[str, TensorLayout]:
    """The norm of queries or keys: over all of them, or over each head."""
    over = f"({HEADS[ours]} head_dim)" if config.query_norm == "all" else "head_dim"
    scale = TensorLayout(f"{LAYER}self_attn.{ours[0]}_norm.weight", over, plus=-one)
    return {f"blocks/attention/{ours}_norm/scale": scale}


def _mlp(config: LlamaConfig, fused: bool) -> dict[str, TensorLayout]:
    found = {}
    for part, (ours, of) in enumerate(_MLP.items()):
        if fused and ours != "down":
            kernel = TensorLayout(
                f"{LAYER}mlp.gate_up_proj.weight", "mlp embed", part, ("mlp", "mlp")
            )
            found[f"blocks/mlp/{ours}/kernel"] = kernel
        else:
            module = f"{LAYER}mlp.{ours}_proj"
            found |= linear_layouts(f"blocks/mlp/{ours}", module, *of, bias=config.mlp_bias)
    return found


def _experts(experts: tuple[str, ...]) -> dict[str, TensorLayout]:
    """The kernels of experts that are stored one by one."""
    return {
        f"blocks/mlp/{ours}/kernel": TensorLayout(f"{LAYER}{theirs}.weight", " ".join(of))
        for (ours, of), theirs in zip(_MLP.items(), experts, strict=True)
    }


def _shared_expert() -> dict[str, TensorLayout]:
    """The expert that every token uses, and its gate."""
    gate = TensorLayout(f"{LAYER}mlp.shared_expert_gate.weight", "gates embed")
    found = {"blocks/mlp/shared_gate/kernel": gate}
    for ours, of in _MLP.items():
        outputs, inputs = (axes.replace("mlp", "shared") for axes in of)
        module = f"{LAYER}mlp.shared_expert.{ours}_proj"
        found |= linear_layouts(f"blocks/mlp/shared/{ours}", module, outputs, inputs, bias=False)
    return found


def _norms(config: LlamaConfig, one: float) -> dict[str, TensorLayout]:
    """The norms around the sublayers, and the final norm."""
    found = {
        f"blocks/{ours}/scale": TensorLayout(f"{LAYER}{theirs}.weight", "embed", plus=-one)
        for ours, theirs in NORMS[config.norms].items()
    }
    # A tied embedding is multiplied by its factor at the input, but not at the output. At the output,
    # the final norm compensates for the factor of the stored embedding.
    times = 1 / _embedded(config) if config.ties else 1.0
    return found | {
        "final_norm/scale": TensorLayout("model.norm.weight", "embed", times=times, plus=-one)
    }


def _embedded(config: LlamaConfig) -> float:
    """Return the factor of the stored embedding relative to the leaf.

    Gemma multiplies the stored embedding by the square root of its width. jaxgrow multiplies the
    leaf by ``embed_scale``, which keeps its initial value when the width grows.
    """
    return config.embed_scale / config.embed**0.5 if config.embed_scale != 1 else 1.0


def head(config: LlamaConfig, name: str) -> dict[str, TensorLayout]:
    """Return the place of the head.

    Args:
      config: the config.
      name: the name of the head that predicts tokens, if it is not tied to the embedding.
    """
    if config.head == "classes":
        return {"classifier/kernel": TensorLayout("score.weight", "classes embed")}
    if config.head == "states":
        return {}
    return {} if config.tied else {"head_kernel": TensorLayout(f"{name}.weight", "vocab embed")}

"""How is ViT stored?

Kernels are stored as [outputs, inputs]. The kernel of the patches is a convolution kernel.
`jaxgrow.extras.families.vision` has ViT without a head, DeiT, and other models like them.
"""

from collections.abc import Mapping
from functools import partial

from jaxgrow.checkpoints.hf.base import Family
from jaxgrow.checkpoints.hf.labels import class_count, numbered_labels
from jaxgrow.checkpoints.hf.tensor_layout import TensorLayout, linear_layouts, norm_layouts
from jaxgrow.models.vit import ViTConfig

_VIT_ATTENTION = {
    "attention/query": ("attention.attention.query", "(heads head_dim)", "embed"),
    "attention/key": ("attention.attention.key", "(heads head_dim)", "embed"),
    "attention/value": ("attention.attention.value", "(heads head_dim)", "embed"),
    "attention/out": ("attention.output.dense", "embed", "(heads head_dim)"),
}
_VIT_LAYER = {"mlp/up": "intermediate.dense", "mlp/down": "output.dense"}
_VIT_LAYER |= {"attention_norm": "layernorm_before", "mlp_norm": "layernorm_after"}
ATTENTION_MODULES = {
    f"attention.attention.{name}": f"attention.{name[0]}_proj" for name in ("query", "key", "value")
}
ATTENTION_MODULES |= {"attention.output.dense": "attention.o_proj"}


def vit_layouts(
    model: str, heads: Mapping[str, str], config: ViTConfig, own: Mapping[str, str] = _VIT_LAYER
) -> dict[str, TensorLayout]:
    """Return the places of the leaves.

    Args:
      model: the prefix of all names.
      heads: a dict from the path of each head to its name.
      config: the config.
      own: the names of the modules in a layer that differ between architectures.
    """
    embeddings = f"{model}embeddings."
    layer = f"{model}encoder.layer.{{layers}}."
    patch = embeddings + "patch_embeddings.projection"
    names = {
        **linear_layouts("patch_embedding", patch, "embed", "channels patch_rows patch_columns"),
        "class_embedding": TensorLayout(embeddings + "cls_token", "1 1 embed"),
        "position_embedding": TensorLayout(embeddings + "position_embeddings", "1 positions embed"),
    }
    if config.distillation != "none":
        names["distillation_embedding"] = TensorLayout(
            embeddings + "distillation_token", "1 1 embed"
        )
    mlp = {"mlp/up": (own["mlp/up"], "mlp", "embed"), "mlp/down": (own["mlp/down"], "embed", "mlp")}
    for path, (module, output, inputs) in (_VIT_ATTENTION | mlp).items():
        names |= linear_layouts(f"blocks/{path}", layer + module, output, inputs)
    norms = {f"blocks/{norm}": layer + own[norm] for norm in ("attention_norm", "mlp_norm")}
    names |= norm_layouts({**norms, "final_norm": f"{model}layernorm"})
    for path, module in heads.items():
        names |= linear_layouts(path, module, "classes")
    if config.pooler == "tanh":
        names |= linear_layouts("pooler", "pooler.dense", "embed", "embed_in")
    return names


VIT_FIELDS = {
    "image_size": "image",
    "patch_size": "patch",
    "num_channels": "channels",
    "num_hidden_layers": "layers",
    "hidden_size": "embed",
    "num_attention_heads": "heads",
    "layer_norm_eps": "eps",
}
VIT_ABSENT = {"image_size": 224, "patch_size": 16, "num_channels": 3, "layer_norm_eps": 1e-12}
VIT_SETTINGS: dict[str, tuple[object, ...]] = {
    "hidden_act": ("gelu", "gelu_python"),
    "qkv_bias": (True,),
}


_VIT_MODULES = {
    "encoder.layer.": "layers.",
    **ATTENTION_MODULES,
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
}


ViTForImageClassification = Family(
    architecture="ViTForImageClassification",
    model_type="vit",
    config=ViTConfig,
    fields=VIT_FIELDS | {"intermediate_size": "mlp"},
    names=partial(vit_layouts, "vit.", {"head": "classifier"}),
    absent=VIT_ABSENT,
    settings=VIT_SETTINGS,
    ignored=("vit.pooler.*",),
    modules=_VIT_MODULES,
    fixed={"distillation": "none", "head": "classes"},
    inferred=class_count,
    derived=numbered_labels,
)
FAMILIES = (ViTForImageClassification,)

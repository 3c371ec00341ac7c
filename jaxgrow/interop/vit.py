"""ViT's and DeiT's names. Their kernels lie output first; the patches' is a convolution's."""

from collections.abc import Mapping
from functools import partial

from jaxgrow.interop.family import Family, Stored
from jaxgrow.interop.labels import classes, labelled
from jaxgrow.models.vit import ViTConfig

_MODULES = {
    "attention/query": ("attention.attention.query", "(heads head_dim)", "embed"),
    "attention/key": ("attention.attention.key", "(heads head_dim)", "embed"),
    "attention/value": ("attention.attention.value", "(heads head_dim)", "embed"),
    "attention/out": ("attention.output.dense", "embed", "(heads head_dim)"),
    "mlp/up": ("intermediate.dense", "mlp", "embed"),
    "mlp/down": ("output.dense", "embed", "mlp"),
}


def _names(model: str, heads: Mapping[str, str], config: ViTConfig) -> dict[str, Stored]:
    embeddings, layer = f"{model}.embeddings.", f"{model}.encoder.layer.{{layers}}."
    patch = embeddings + "patch_embeddings.projection."
    names = {
        "patch_embedding/kernel": Stored(patch + "weight", "embed channels patch_rows patch_columns"),
        "patch_embedding/bias": Stored(patch + "bias", "embed"),
        "class_embedding": Stored(embeddings + "cls_token", "1 1 embed"),
        "position_embedding": Stored(embeddings + "position_embeddings", "1 positions embed"),
    }
    if config.distillation != "none":
        names["distillation_embedding"] = Stored(embeddings + "distillation_token", "1 1 embed")
    for ours, (theirs, output, inputs) in _MODULES.items():
        names[f"blocks/{ours}/kernel"] = Stored(f"{layer}{theirs}.weight", f"{output} {inputs}")
        names[f"blocks/{ours}/bias"] = Stored(f"{layer}{theirs}.bias", output)
    for ours, theirs in (
        ("blocks/attention_norm", layer + "layernorm_before"),
        ("blocks/mlp_norm", layer + "layernorm_after"),
        ("final_norm", f"{model}.layernorm"),
    ):
        names[f"{ours}/scale"] = Stored(f"{theirs}.weight", "embed")
        names[f"{ours}/bias"] = Stored(f"{theirs}.bias", "embed")
    for ours, theirs in heads.items():
        names[f"{ours}/kernel"] = Stored(f"{theirs}.weight", "classes embed")
        names[f"{ours}/bias"] = Stored(f"{theirs}.bias", "classes")
    return names


def _family(architecture: str, model_type: str, distillation: str, heads: Mapping[str, str]) -> Family:
    return Family(
        architecture=architecture,
        model_type=model_type,
        config=ViTConfig,
        fields={
            "image_size": "image",
            "patch_size": "patch",
            "num_channels": "channels",
            "num_hidden_layers": "layers",
            "hidden_size": "embed",
            "num_attention_heads": "heads",
            "intermediate_size": "mlp",
            "layer_norm_eps": "eps",
        },
        names=partial(_names, model_type, heads),
        absent={"image_size": 224, "patch_size": 16, "num_channels": 3, "layer_norm_eps": 1e-12},
        settings={"hidden_act": ("gelu", "gelu_python"), "qkv_bias": (True,)},
        ignored=(f"{model_type}.pooler.*",),
        fixed={"distillation": distillation},
        inferred=classes,
        derived=labelled,
    )


_BOTH = {"head": "cls_classifier", "distillation_head": "distillation_classifier"}

ViTForImageClassification = _family("ViTForImageClassification", "vit", "none", {"head": "classifier"})
DeiTForImageClassification = _family("DeiTForImageClassification", "deit", "token", {"head": "classifier"})
DeiTForImageClassificationWithTeacher = _family("DeiTForImageClassificationWithTeacher", "deit", "head", _BOTH)

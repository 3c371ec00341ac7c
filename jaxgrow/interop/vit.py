"""ViT's, DeiT's and DINOv2's names. Their kernels lie output first; the patches' is a convolution's."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxgrow.interop.family import Family, Stored
from jaxgrow.interop.labels import classes, labelled
from jaxgrow.models.vit import ViTConfig

_MODULES = {
    "attention/query": ("attention.attention.query", "(heads head_dim)", "embed"),
    "attention/key": ("attention.attention.key", "(heads head_dim)", "embed"),
    "attention/value": ("attention.attention.value", "(heads head_dim)", "embed"),
    "attention/out": ("attention.output.dense", "embed", "(heads head_dim)"),
}
_OWN = {"mlp/up": "intermediate.dense", "mlp/down": "output.dense"}
_OWN |= {"attention_norm": "layernorm_before", "mlp_norm": "layernorm_after"}
_DINO = {"mlp/up": "mlp.fc1", "mlp/down": "mlp.fc2", "attention_norm": "norm1", "mlp_norm": "norm2"}


_ATTENTION = {f"attention.attention.{name}": f"attention.{name[0]}_proj" for name in ("query", "key", "value")}
_ATTENTION |= {"attention.output.dense": "attention.o_proj"}


def _names(model: str, heads: Mapping[str, str], config: ViTConfig, own: Mapping[str, str] = _OWN) -> dict[str, Stored]:
    """``heads``: their names; ``own``: of what is called otherwise in a layer."""
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
    mlp = {"mlp/up": (own["mlp/up"], "mlp", "embed"), "mlp/down": (own["mlp/down"], "embed", "mlp")}
    for ours, (theirs, output, inputs) in (_MODULES | mlp).items():
        names[f"blocks/{ours}/kernel"] = Stored(f"{layer}{theirs}.weight", f"{output} {inputs}")
        names[f"blocks/{ours}/bias"] = Stored(f"{layer}{theirs}.bias", output)
    for ours, theirs in (
        ("blocks/attention_norm", layer + own["attention_norm"]),
        ("blocks/mlp_norm", layer + own["mlp_norm"]),
        ("final_norm", f"{model}.layernorm"),
    ):
        names[f"{ours}/scale"] = Stored(f"{theirs}.weight", "embed")
        names[f"{ours}/bias"] = Stored(f"{theirs}.bias", "embed")
    for ours, theirs in heads.items():
        names[f"{ours}/kernel"] = Stored(f"{theirs}.weight", "classes embed")
        names[f"{ours}/bias"] = Stored(f"{theirs}.bias", "classes")
    return names


def _dino_names(config: ViTConfig) -> dict[str, Stored]:
    names, layer = _names("dinov2", {"head": "classifier"}, config, _DINO), "dinov2.encoder.layer.{layers}."
    for part, ours in enumerate(("head", "mean_head")):  # one kernel, of both side by side
        names[f"{ours}/kernel"] = Stored("classifier.weight", "classes (2 embed)", part)
    for sublayer, theirs in (("attention", "layer_scale1"), ("mlp", "layer_scale2")):
        names[f"blocks/{sublayer}_scale"] = Stored(f"{layer}{theirs}.lambda1", "embed")
    if config.gated:
        for part, ours in enumerate(("gate", "up")):
            names[f"blocks/mlp/{ours}/kernel"] = Stored(f"{layer}mlp.weights_in.weight", "(2 mlp) embed", part)
            names[f"blocks/mlp/{ours}/bias"] = Stored(f"{layer}mlp.weights_in.bias", "(2 mlp)", part)
        names["blocks/mlp/down/kernel"] = Stored(f"{layer}mlp.weights_out.weight", "embed mlp")
        names["blocks/mlp/down/bias"] = Stored(f"{layer}mlp.weights_out.bias", "embed")
    return names


def _dino_mlp(embed: int, ratio: float, gated: bool) -> int:
    """The units of an MLP; gated, two thirds of them, and then up to a multiple of 8."""
    size = int(embed * ratio)
    return (int(size * 2 / 3) + 7) // 8 * 8 if gated else size


def _dino(theirs: Mapping[str, Any]) -> dict[str, Any]:
    gated = theirs.get("use_swiglu_ffn", False)
    if theirs.get("layerscale_value") == 0:
        raise ValueError("layerscale_value is 0, but sublayers that begin with a scale of 0 are not computed here")
    return classes(theirs) | {
        "gated": gated,
        "mlp": _dino_mlp(theirs["hidden_size"], theirs.get("mlp_ratio", 4), gated),
    }


def _dino_written(config: ViTConfig) -> dict[str, Any]:
    ratio = max(1, round(config.mlp * (1.5 if config.gated else 1) / config.embed))
    stages = ["stem", *(f"stage{i + 1}" for i in range(config.layers))]
    out = {"stage_names": stages, "out_features": stages[-1:], "out_indices": [config.layers]}
    return labelled(config) | out | {"use_swiglu_ffn": config.gated, "mlp_ratio": ratio}


_FIELDS = {
    "image_size": "image",
    "patch_size": "patch",
    "num_channels": "channels",
    "num_hidden_layers": "layers",
    "hidden_size": "embed",
    "num_attention_heads": "heads",
    "layer_norm_eps": "eps",
}
_ABSENT = {"image_size": 224, "patch_size": 16, "num_channels": 3, "layer_norm_eps": 1e-12}
_SETTINGS: dict[str, tuple[Any, ...]] = {"hidden_act": ("gelu", "gelu_python"), "qkv_bias": (True,)}


def _family(architecture: str, model_type: str, distillation: str, heads: Mapping[str, str]) -> Family:
    return Family(
        architecture=architecture,
        model_type=model_type,
        config=ViTConfig,
        fields=_FIELDS | {"intermediate_size": "mlp"},
        names=partial(_names, model_type, heads),
        absent=_ABSENT,
        settings=_SETTINGS,
        ignored=(f"{model_type}.pooler.*",),
        modules={"encoder.layer.": "layers.", **_ATTENTION, "intermediate.dense": "mlp.fc1", "output.dense": "mlp.fc2"},
        fixed={"distillation": distillation},
        inferred=classes,
        derived=labelled,
    )


_BOTH = {"head": "cls_classifier", "distillation_head": "distillation_classifier"}

ViTForImageClassification = _family("ViTForImageClassification", "vit", "none", {"head": "classifier"})
DeiTForImageClassification = _family("DeiTForImageClassification", "deit", "token", {"head": "classifier"})
DeiTForImageClassificationWithTeacher = _family("DeiTForImageClassificationWithTeacher", "deit", "head", _BOTH)
Dinov2ForImageClassification = Family(
    architecture="Dinov2ForImageClassification",
    model_type="dinov2",
    config=ViTConfig,
    fields=_FIELDS | {"layerscale_value": "layer_scale"},
    names=_dino_names,
    absent=_ABSENT | {"patch_size": 14, "layer_norm_eps": 1e-6, "layerscale_value": 1.0},
    settings=_SETTINGS,
    ignored=("dinov2.embeddings.mask_token",),
    modules=_ATTENTION,
    # Pre-training puts it in the place of hidden patches; a classifier has no use for it.
    always={"use_mask_token": False},
    fixed={"distillation": "none", "mean_head": True},
    inferred=_dino,
    derived=_dino_written,
)

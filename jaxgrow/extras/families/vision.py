"""How are DeiT, DINOv2, the vision towers of CLIP and SigLIP, and a ViT without a head stored?

They have the layers of ViT.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from jaxgrow.checkpoints.hf.base import Family, key_of
from jaxgrow.checkpoints.hf.families.vit import (
    ATTENTION_MODULES,
    VIT_ABSENT,
    VIT_FIELDS,
    VIT_SETTINGS,
    ViTForImageClassification,
    vit_layouts,
)
from jaxgrow.checkpoints.hf.labels import class_count, numbered_labels
from jaxgrow.checkpoints.hf.registry import register_families
from jaxgrow.checkpoints.hf.tensor_layout import TensorLayout, linear_layouts, norm_layouts
from jaxgrow.models.vit import ViTConfig
from jaxgrow.typed import Json

# --- DeiT, and ViT without a head ---


def _deit_family(architecture: str, distillation: str, heads: Mapping[str, str]) -> Family:
    return replace(
        ViTForImageClassification,
        architecture=architecture,
        model_type="deit",
        names=partial(vit_layouts, "deit.", heads),
        ignored=("deit.pooler.*",),
        fixed={"distillation": distillation, "head": "classes"},
    )


DeiTForImageClassification = _deit_family(
    "DeiTForImageClassification", "token", {"head": "classifier"}
)
DeiTForImageClassificationWithTeacher = _deit_family(
    "DeiTForImageClassificationWithTeacher",
    "head",
    {"head": "cls_classifier", "distillation_head": "distillation_classifier"},
)


def _read_pooler(hf_config: Json) -> Json:
    size = hf_config.get("pooler_output_size") or hf_config["hidden_size"]
    if size != hf_config["hidden_size"]:
        raise ValueError(
            f"pooler_output_size is {size}, but hidden_size is {hf_config['hidden_size']}; jaxgrow computes a pooler only if "
            "both are the same"
        )
    return {}


ViTModel = replace(
    ViTForImageClassification,
    architecture="ViTModel",
    names=partial(vit_layouts, "", {}),
    settings=VIT_SETTINGS | {"pooler_act": ("tanh",)},
    fixed={"distillation": "none", "head": "states"},
    inferred=_read_pooler,
    derived=lambda config: {"pooler_output_size": config.embed},
    stray="vit.",
    # config.json does not state whether the model has a pooler.
    seen=lambda config, tensors: replace(
        config, pooler="tanh" if "pooler.dense.weight" in tensors else "none"
    ),
    folded=("pooler",),
    ignored=("classifier.*",),
)

# --- DINOv2 ---

_DINO_MODULES = {
    "mlp/up": "mlp.fc1",
    "mlp/down": "mlp.fc2",
    "attention_norm": "norm1",
    "mlp_norm": "norm2",
}


def _dino_names(body: str, config: ViTConfig) -> dict[str, TensorLayout]:
    """Return the places of the leaves; ``body`` is the prefix of all names outside the head."""
    model, heads = ("", {}) if config.head == "states" else (body, {"head": "classifier"})
    names = vit_layouts(model, heads, config, _DINO_MODULES)
    if config.registers:
        tokens = f"{model}embeddings.register_tokens"
        names["register_embedding"] = TensorLayout(tokens, "1 registers embed")
    if config.mask_token:
        names["mask_embedding"] = TensorLayout(f"{model}embeddings.mask_token", "1 embed")
    layer = model + "encoder.layer.{layers}."
    # The kernels of the two heads are concatenated in one tensor.
    for part, path in enumerate(("head", "mean_head") if heads else ()):
        names[f"{path}/kernel"] = TensorLayout("classifier.weight", "classes (2 embed)", part)
    for sublayer, module in (("attention", "layer_scale1"), ("mlp", "layer_scale2")):
        names[f"blocks/{sublayer}_scale"] = TensorLayout(f"{layer}{module}.lambda1", "embed")
    if config.gated:
        for part, path in enumerate(("gate", "up")):
            names |= linear_layouts(
                f"blocks/mlp/{path}", f"{layer}mlp.weights_in", "(2 mlp)", part=part
            )
        names |= linear_layouts("blocks/mlp/down", f"{layer}mlp.weights_out", "embed", "mlp")
    return names


def _dino_mlp(embed: int, ratio: float, gated: bool) -> int:
    """Return the MLP size. A gated MLP has two thirds of it, rounded up to a multiple of 8."""
    size = int(embed * ratio)
    return (int(size * 2 / 3) + 7) // 8 * 8 if gated else size


def _dino_states(hf_config: Json) -> Json:
    gated = hf_config.get("use_swiglu_ffn", False)
    if hf_config.get("layerscale_value") == 0:
        raise ValueError(
            "layerscale_value is 0, but jaxgrow does not support LayerScale that is initialised with 0"
        )
    return {
        "gated": gated,
        "mlp": _dino_mlp(hf_config["hidden_size"], hf_config.get("mlp_ratio", 4), gated),
    }


def _dino_states_written(config: ViTConfig) -> Json:
    ratio = max(1, round(config.mlp * (1.5 if config.gated else 1) / config.embed))
    stages = ["stem", *(f"stage{i + 1}" for i in range(config.layers))]
    out = {"stage_names": stages, "out_features": stages[-1:], "out_indices": [config.layers]}
    return out | {"use_swiglu_ffn": config.gated, "mlp_ratio": ratio}


def _dinov2(
    model: str,
    body: str,
    fixed: Json,
    ignored: tuple[str, ...] = (),
    **common: Any,
) -> tuple[Family, Family]:
    """Return the architecture of a DINOv2 that predicts classes, and the one without a head.

    Args:
      model: the beginning of the names of both architectures.
      body: the name of the module without the head, and the model type.
      fixed: fields that both architectures share.
      ignored: name patterns of tensors that are not read.
      common: further arguments of `Family`.
    """
    classifier = Family(
        architecture=f"{model}ForImageClassification",
        model_type=body,
        config=ViTConfig,
        names=partial(_dino_names, f"{body}."),
        settings=VIT_SETTINGS,
        modules=ATTENTION_MODULES,
        ignored=ignored,
        fixed={**fixed, "mean_head": True, "head": "classes"},
        inferred=lambda hf_config: class_count(hf_config) | _dino_states(hf_config),
        derived=lambda config: numbered_labels(config) | _dino_states_written(config),
        **common,
    )
    states = replace(
        classifier,
        architecture=f"{model}Model",
        ignored=(*ignored, "classifier.*"),
        fixed={**fixed, "head": "states"},
        inferred=_dino_states,
        derived=_dino_states_written,
        stray=f"{body}.",
    )
    return classifier, states


_DINO_FIELDS = VIT_FIELDS | {"layerscale_value": "layer_scale"}
_DINO_ABSENT = VIT_ABSENT | {"layer_norm_eps": 1e-6, "layerscale_value": 1.0}
Dinov2ForImageClassification, Dinov2Model = _dinov2(
    "Dinov2",
    "dinov2",
    {"distillation": "none"},
    fields=_DINO_FIELDS,
    absent=_DINO_ABSENT | {"patch_size": 14},
    # Pre-training replaces hidden patches by the mask token. A classifier does not need it.
    always=lambda config: {"use_mask_token": False},
    ignored=("*embeddings.mask_token",),
)
Dinov2WithRegistersForImageClassification, Dinov2WithRegistersModel = _dinov2(
    "Dinov2WithRegisters",
    "dinov2_with_registers",
    # `transformers` has no setting to leave out the mask token of this model.
    {"distillation": "none", "mask_token": True},
    fields=_DINO_FIELDS | {"num_register_tokens": "registers"},
    absent=_DINO_ABSENT | {"num_register_tokens": 4},
)

# --- vision towers ---

_TOWER = {
    "attention/query": ("self_attn.q_proj", "(heads head_dim)", "embed"),
    "attention/key": ("self_attn.k_proj", "(heads head_dim)", "embed"),
    "attention/value": ("self_attn.v_proj", "(heads head_dim)", "embed"),
    "attention/out": ("self_attn.out_proj", "embed", "(heads head_dim)"),
    "mlp/up": ("mlp.fc1", "mlp", "embed"),
    "mlp/down": ("mlp.fc2", "embed", "mlp"),
}


def _tower_names(model: str, config: ViTConfig) -> dict[str, TensorLayout]:
    """Return the places of the leaves of CLIP and SigLIP, with the name prefix ``model``."""
    embeddings = f"{model}embeddings."
    layer = f"{model}encoder.layers.{{layers}}."
    patch = TensorLayout(
        embeddings + "patch_embedding.weight", "embed channels patch_rows patch_columns"
    )
    names = {
        "patch_embedding/kernel": patch,
        "position_embedding": TensorLayout(
            embeddings + "position_embedding.weight", "positions embed"
        ),
    }
    if config.patch_bias:
        names["patch_embedding/bias"] = TensorLayout(embeddings + "patch_embedding.bias", "embed")
    if config.class_token:
        names["class_embedding"] = TensorLayout(embeddings + "class_embedding", "embed")
    for path, (module, output, inputs) in _TOWER.items():
        names |= linear_layouts(f"blocks/{path}", layer + module, output, inputs)
    norms = {
        "blocks/attention_norm": layer + "layer_norm1",
        "blocks/mlp_norm": layer + "layer_norm2",
        "final_norm": model + "post_layernorm",
    }
    if config.embedding_norm:
        # Published files have this spelling.
        norms["embedding_norm"] = model + "pre_layrnorm"
    if config.pooler == "attention":
        names |= _attention_pooler(model + "head.")
        norms["pooler/mlp_norm"] = model + "head.layernorm"
    names |= norm_layouts(norms)
    if config.head == "classes":
        names["head/kernel"] = TensorLayout("visual_projection.weight", "classes embed")
    return names


def _attention_pooler(head: str) -> dict[str, TensorLayout]:
    """Return the places of the leaves of the pooler of SigLIP, except its norm.

    Queries, keys and values are one tensor.
    """
    names = {"pooler/probe": TensorLayout(head + "probe", "1 1 embed")}
    for part, path in enumerate(("query", "key", "value")):
        for leaf, end, inputs in (("kernel", "weight", " embed"), ("bias", "bias", "")):
            stored = TensorLayout(
                f"{head}attention.in_proj_{end}", f"(3 heads head_dim){inputs}", part
            )
            names[f"pooler/attention/{path}/{leaf}"] = stored
    for path, module, output, inputs in (
        ("attention/out", "attention.out_proj", "embed", "(heads head_dim)"),
        ("mlp/up", "mlp.fc1", "mlp", "embed"),
        ("mlp/down", "mlp.fc2", "embed", "mlp"),
    ):
        names |= linear_layouts(f"pooler/{path}", head + module, output, inputs)
    return names


_ACTIVATIONS = {
    "quick_gelu": "quick_gelu",
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), "gelu_tanh"),
}


def _read_activation(default: str, hf_config: Json) -> Json:
    return {"activation": _ACTIVATIONS[hf_config.get("hidden_act", default)]}


def _written_activation(config: ViTConfig) -> Json:
    return {"hidden_act": key_of(_ACTIVATIONS, config.activation)}


_CLIP: Json = dict(
    model_type="clip_vision_model",
    config=ViTConfig,
    absent=VIT_ABSENT | {"patch_size": 32, "layer_norm_eps": 1e-5, "projection_dim": 512},
    settings={"hidden_act": tuple(_ACTIVATIONS)},
    inferred=partial(_read_activation, "quick_gelu"),
    derived=_written_activation,
)
_CLIP_FIXED = {"distillation": "none", "embedding_norm": True, "patch_bias": False}

CLIPVisionModel = Family(
    architecture="CLIPVisionModel",
    fields=VIT_FIELDS | {"intermediate_size": "mlp"},
    names=partial(_tower_names, ""),
    fixed=_CLIP_FIXED | {"head": "states"},
    stray="vision_model.",
    ignored=("*.position_ids", "visual_projection.*"),
    **_CLIP,
)
CLIPVisionModelWithProjection = Family(
    architecture="CLIPVisionModelWithProjection",
    fields=VIT_FIELDS | {"intermediate_size": "mlp", "projection_dim": "classes"},
    names=partial(_tower_names, "vision_model."),
    fixed=_CLIP_FIXED | {"head": "classes", "head_bias": False},
    ignored=("*.position_ids",),
    **_CLIP,
)
SiglipVisionModel = Family(
    architecture="SiglipVisionModel",
    model_type="siglip_vision_model",
    config=ViTConfig,
    fields=VIT_FIELDS | {"intermediate_size": "mlp"},
    names=partial(_tower_names, ""),
    absent=VIT_ABSENT | {"layer_norm_eps": 1e-6},
    settings={"hidden_act": ("gelu_pytorch_tanh", *_ACTIVATIONS), "vision_use_head": (True, False)},
    inferred=lambda hf_config: (
        _read_activation("gelu_pytorch_tanh", hf_config)
        | {"pooler": "attention" if hf_config.get("vision_use_head", True) else "none"}
        # Whole patches may cover fewer pixels, such as 378 of the 384 in so400m-patch14-384.
        | {
            "image": (image := hf_config.get("image_size") or 224)
            - image % (hf_config.get("patch_size") or 16)
        }
    ),
    derived=lambda config: (
        _written_activation(config) | {"vision_use_head": config.pooler == "attention"}
    ),
    fixed={"distillation": "none", "head": "states", "class_token": False},
    stray="vision_model.",
    ignored=("*.position_ids",),
)

register_families(
    DeiTForImageClassification,
    DeiTForImageClassificationWithTeacher,
    ViTModel,
    Dinov2ForImageClassification,
    Dinov2WithRegistersForImageClassification,
    Dinov2Model,
    Dinov2WithRegistersModel,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
    SiglipVisionModel,
)

"""How is Swin V2 stored?

``config.json`` has the width and the MLP size of the first stage. They double from stage to stage.
"""

import math
from collections.abc import Mapping
from typing import Any

from jaxgrow.checkpoints.hf.base import Family
from jaxgrow.checkpoints.hf.labels import classes, labelled
from jaxgrow.checkpoints.hf.registry import register
from jaxgrow.checkpoints.hf.tensor_layout import TensorLayout, linear_layouts, norm_layouts
from jaxgrow.checkpoints.io.files import spelt
from jaxgrow.extras.models.swin import SwinConfig

_MODULES = {
    "attention/query": ("attention.self.query", "(heads head_dim)", "embed"),
    "attention/key": ("attention.self.key", "(heads head_dim)", "embed"),
    "attention/value": ("attention.self.value", "(heads head_dim)", "embed"),
    "attention/out": ("attention.output.dense", "embed", "(heads head_dim)"),
    "attention/position_up": (
        "attention.self.continuous_position_bias_mlp.0",
        "position_mlp",
        "coordinates",
    ),
    "attention/position_down": (
        "attention.self.continuous_position_bias_mlp.2",
        "heads",
        "position_mlp",
    ),
    "mlp/up": ("intermediate.dense", "mlp", "embed"),
    "mlp/down": ("output.dense", "embed", "mlp"),
}
_NO_BIAS = ("attention/key", "attention/position_down")


def _names(config: SwinConfig) -> dict[str, TensorLayout]:
    embeddings = "swinv2.embeddings."
    encoder = "swinv2.encoder.layers."
    patch = embeddings + "patch_embeddings.projection"
    names = linear_layouts("patch_embedding", patch, "embed", "channels patch_rows patch_columns")
    norms = {"patch_norm": embeddings + "norm"}
    for s in range(len(config.layers)):
        blocks = f"blocks{s}/"
        layer = f"{encoder}{s}.blocks.{{layers}}."
        if s:
            merging = f"{encoder}{s - 1}.downsample."
            layout = "embed (merged_columns_in merged_rows_in embed_in)"
            names[f"merge{s}/reduction/kernel"] = TensorLayout(merging + "reduction.weight", layout)
            norms[f"merge{s}/norm"] = merging + "norm"
        names[blocks + "attention/log_scale"] = TensorLayout(
            layer + "attention.self.logit_scale", "heads 1 1"
        )
        for ours, (theirs, output, inputs) in _MODULES.items():
            bias = ours not in _NO_BIAS
            names |= linear_layouts(blocks + ours, layer + theirs, output, inputs, bias=bias)
        norms[blocks + "attention_norm"] = layer + "layernorm_before"
        norms[blocks + "mlp_norm"] = layer + "layernorm_after"
    norms["final_norm"] = "swinv2.layernorm"
    return names | norm_layouts(norms) | linear_layouts("head", "classifier", "classes")


def _inferred(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the stages, and the number of classes.

    Raises:
      ValueError: the sizes do not form stages whose heads all have the same size.
    """
    first = theirs.get("embed_dim", 96)
    ratio = theirs.get("mlp_ratio", 4.0)
    depths, heads = (
        _sizes(key, theirs.get(key, default))
        for key, default in (("depths", [2, 2, 6, 2]), ("num_heads", [3, 6, 12, 24]))
    )
    windows = _sizes(
        "pretrained_window_sizes", theirs.get("pretrained_window_sizes", [0] * len(depths)), 0
    )
    # The default list of `transformers` has four entries, whatever the number of stages is.
    windows = windows[: len(depths)]
    embed = _sizes("embed_dim", [first * 2**s for s in range(len(depths))])
    if not isinstance(ratio, int | float) or not 0 < ratio < 1 << 20:
        raise ValueError(f"mlp_ratio is {spelt(ratio)}, but should be a number above 0")
    if (
        len(heads) != len(depths)
        or len({(*divmod(d, h),) for d, h in zip(embed, heads, strict=True)}) > 1
    ):
        raise ValueError(
            f"num_heads {heads} does not divide the widths {embed} into heads of the same size"
        )
    return {
        "layers": depths,
        "embed": embed,
        "heads": heads,
        "head_dim": embed[0] // heads[0],
        "mlp": tuple(int(ratio * d) for d in embed),
        "trained_windows": windows if any(windows) else (),
        **classes(theirs),
    }


def _sizes(key: str, values: Any, least: int = 1) -> tuple[int, ...]:
    """Return a list of sizes as a tuple.

    Raises:
      ValueError: the value is not a list of sizes.
    """
    known = isinstance(values, list | tuple) and len(values) in range(1, 17)
    if not known or not all(type(n) is int and least <= n < 1 << 31 for n in values):
        raise ValueError(f"{key} is {spelt(values)}, but should be a list of sizes")
    return tuple(values)


def _derived(config: SwinConfig) -> dict[str, Any]:
    ratio = config.mlp[0] / config.embed[0]
    # `transformers` rounds the product down.
    if int(ratio * config.embed[0]) < config.mlp[0]:
        ratio = math.nextafter(ratio, math.inf)
    return {
        "embed_dim": config.embed[0],
        "hidden_size": config.embed[-1],
        "depths": config.layers,
        "num_layers": len(config.layers),
        "num_heads": config.heads,
        "mlp_ratio": ratio,
        "pretrained_window_sizes": config.trained_windows or (0,) * len(config.layers),
        **labelled(config),
    }


Swinv2ForImageClassification = Family(
    architecture="Swinv2ForImageClassification",
    model_type="swinv2",
    config=SwinConfig,
    fields={
        "image_size": "image",
        "patch_size": "patch",
        "num_channels": "channels",
        "window_size": "window",
    },
    names=_names,
    absent={"image_size": 224, "patch_size": 4, "num_channels": 3, "window_size": 7},
    settings={
        "hidden_act": ("gelu", "gelu_python"),
        "qkv_bias": (True,),
        "use_absolute_embeddings": (False,),
        # `transformers` uses this value for some norms only.
        "layer_norm_eps": (1e-5,),
    },
    ignored=("*.attention.self.relative_coords_table", "*.attention.self.relative_position_index"),
    fixed={"eps": 1e-5, "position_mlp": 512},
    inferred=_inferred,
    derived=_derived,
    heads="free",
)

FAMILIES = (Swinv2ForImageClassification,)

register(*FAMILIES)

"""How is Swin V2 stored?

``config.json`` has the width and the MLP size of the first stage. They double from stage to stage.
"""

import math

from jaxgrow.checkpoints.hf.base import Family
from jaxgrow.checkpoints.hf.labels import class_count, numbered_labels
from jaxgrow.checkpoints.hf.registry import register_families
from jaxgrow.checkpoints.hf.tensor_layout import TensorLayout, linear_layouts, norm_layouts
from jaxgrow.checkpoints.io.files import spelt
from jaxgrow.extras.models.swin import SwinConfig
from jaxgrow.typed import Json

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


def _swin_layouts(config: SwinConfig) -> dict[str, TensorLayout]:
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
        for path, (module, output, inputs) in _MODULES.items():
            bias = path not in _NO_BIAS
            names |= linear_layouts(blocks + path, layer + module, output, inputs, bias=bias)
        norms[blocks + "attention_norm"] = layer + "layernorm_before"
        norms[blocks + "mlp_norm"] = layer + "layernorm_after"
    norms["final_norm"] = "swinv2.layernorm"
    return names | norm_layouts(norms) | linear_layouts("head", "classifier", "classes")


def _read_swin(hf_config: Json) -> Json:
    """Return the fields of the stages, and the number of classes.

    Raises:
      ValueError: the sizes do not form stages whose heads all have the same size.
    """
    first = hf_config.get("embed_dim", 96)
    ratio = hf_config.get("mlp_ratio", 4.0)
    depths, heads = (
        _stage_sizes(key, hf_config.get(key, default))
        for key, default in (("depths", [2, 2, 6, 2]), ("num_heads", [3, 6, 12, 24]))
    )
    windows = _stage_sizes(
        "pretrained_window_sizes", hf_config.get("pretrained_window_sizes", [0] * len(depths)), 0
    )
    # The default list of `transformers` has four entries, whatever the number of stages is.
    windows = windows[: len(depths)]
    embed = _stage_sizes("embed_dim", [first * 2**s for s in range(len(depths))])
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
        **class_count(hf_config),
    }


def _stage_sizes(key: str, values: object, least: int = 1) -> tuple[int, ...]:
    """Return a list of sizes as a tuple.

    Raises:
      ValueError: the value is not a list of sizes.
    """
    if (
        not isinstance(values, list | tuple)
        or len(values) not in range(1, 17)
        or not all(type(n) is int and least <= n < 1 << 31 for n in values)
    ):
        raise ValueError(f"{key} is {spelt(values)}, but should be a list of sizes")
    return tuple(values)


def _written_swin(config: SwinConfig) -> Json:
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
        **numbered_labels(config),
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
    names=_swin_layouts,
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
    inferred=_read_swin,
    derived=_written_swin,
    heads="free",
)

FAMILIES = (Swinv2ForImageClassification,)

register_families(*FAMILIES)

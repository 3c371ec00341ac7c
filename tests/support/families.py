"""One small config of every model family, and shapes of its parameters and samples."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrow import grow, sizes
from jaxgrow.axes import kind
from jaxgrow.models import (
    BERTConfig,
    CaiTConfig,
    Config,
    DeBERTaConfig,
    EncoderConfig,
    GPT2Config,
    LlamaConfig,
    ModernBERTConfig,
    SwinConfig,
    ViTConfig,
)
from jaxgrow.models.patches import PatchConfig

SIZES = dict(layers=4, embed=8, heads=4, head_dim=2, mlp=12)
TEXT, IMAGES = dict(vocab=256, context=6), dict(image=8, patch=4, channels=1, classes=10)
STAGES = dict(layers=(2, 2), embed=(8, 12), heads=(4, 2), head_dim=2, mlp=(12, 16))
FAMILIES: dict[str, Config] = {
    "GPT-2": GPT2Config(**SIZES, **TEXT),
    "GPT-2, untied": GPT2Config(**SIZES, **TEXT, tied=False),
    "BERT": BERTConfig(**SIZES, **TEXT),
    "BERT, pre-LN": BERTConfig(**SIZES, **TEXT, norm="pre", tied=False),
    "RoBERTa": BERTConfig(**SIZES, vocab=256, context=8, types=1, first_position=2),
    "Llama": LlamaConfig(**SIZES, **TEXT, kv_heads=2),
    "Qwen2": LlamaConfig(**SIZES, **TEXT, kv_heads=2, qkv_bias=True, tied=True),
    "Gemma": LlamaConfig(
        **SIZES,
        **TEXT,
        kv_heads=2,
        norms="both",
        query_norm="all",
        kinds="s",
        window=2,
        score_cap=2.0,
    ),
    "Pythia": LlamaConfig(
        **SIZES,
        **TEXT,
        kv_heads=4,
        layer_norm=True,
        parallel=True,
        gated=False,
        bias=True,
        qkv_bias=True,
    ),
    "ModernBERT": ModernBERTConfig(**SIZES, **TEXT, kv_heads=4, kinds="s", window=2),
    "DeBERTa": DeBERTaConfig(**SIZES, **TEXT, distances=8, farthest=6),
    "ViT": ViTConfig(**SIZES, **IMAGES),
    "DeiT": ViTConfig(**SIZES, **IMAGES, distillation="head"),
    "DINOv2": ViTConfig(**SIZES, **IMAGES, layer_scale=0.5, gated=True, mean_head=True),
    "CaiT": CaiTConfig(**SIZES, **IMAGES),
    "Swin": SwinConfig(**STAGES, **IMAGES | {"patch": 1}, window=3, position_mlp=3),
}
# These configs differ from another family in one part only, such as an untied head.
VARIANTS = (
    "GPT-2, untied",
    "BERT, pre-LN",
    "RoBERTa",
    "Qwen2",
    "Gemma",
    "Pythia",
    "ModernBERT",
    "DeBERTa",
    "DeiT",
    "DINOv2",
)
# Fine-tuning configs differ in the head, which grows as well.
HEADED: dict[str, Config] = {
    "BERT, classes": BERTConfig(**SIZES, **TEXT, head="classes", classes=3),
    "BERT, spans": BERTConfig(**SIZES, **TEXT, head="spans"),
    "GPT-2, classes": GPT2Config(**SIZES, **TEXT, head="classes", classes=3),
    "Qwen2, a number": LlamaConfig(
        **SIZES, **TEXT, kv_heads=2, qkv_bias=True, head="classes", classes=1
    ),
}


@cache
def shapes(config: Config):
    return jax.eval_shape(config.init, jax.random.key(0))


@cache
def parameters(config: Config):
    return jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes(config)), config.axes()


def doubled(config: Config, *axes: str) -> dict[str, int]:
    return {axis: 2 * size for axis, size in config.sizes().items() if kind(axis) in axes}


def halved(config: Config) -> Config:
    large = doubled(config, "layers", "embed", "heads", "kv_heads", "mlp")
    return config.with_sizes({axis: size // 4 for axis, size in large.items()})


def assert_fits(growth, config: Config) -> Config:
    """Check that the grown parameters have the shapes of the config that the growth reports."""
    params, axes = parameters(config)
    large = config.resized(growth)
    expected = shapes(large)
    found = grow(growth, params, axes)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), found) == jax.tree.map(
        lambda x: (x.shape, x.dtype), expected
    )
    assert sizes(expected, axes) == large.sizes()
    return large


def batch(config: Config):
    """Return the shapes of two samples."""
    if isinstance(config, PatchConfig):
        shape = (2, config.image, config.image, config.channels)
        return jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32)
    tokens = jax.ShapeDtypeStruct((2, config.length), jnp.int32)
    if isinstance(config, EncoderConfig):
        positions = jax.ShapeDtypeStruct((2, 1), jnp.int32)
        return {"tokens": tokens, "positions": positions}, positions
    return tokens, tokens

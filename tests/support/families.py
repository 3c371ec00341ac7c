"""The rows of the tests of families: a new family needs a row in `FAMILIES`, and no other.

An architecture of Hugging Face also needs a row in `SETTINGS`.
"""

from functools import cache

import jax
import numpy as np

from jaxgrow import checkpoints, grow, sizes
from jaxgrow.axes import axis_kind
from jaxgrow.extras.models.cait import CaiTConfig
from jaxgrow.extras.models.deberta import DeBERTaConfig
from jaxgrow.extras.models.modernbert import ModernBERTConfig
from jaxgrow.extras.models.swin import SwinConfig
from jaxgrow.models import BERTConfig, Config, GPT2Config, LlamaConfig, ViTConfig

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
    "Gemma": LlamaConfig(**SIZES, **TEXT, kv_heads=2, norms="both", query_norm="all", kinds="s", window=2, score_cap=2.0),
    "Pythia": LlamaConfig(**SIZES, **TEXT, kv_heads=4, layer_norm=True, parallel=True, gated=False, bias=True, qkv_bias=True),
    "ModernBERT": ModernBERTConfig(**SIZES, **TEXT, kv_heads=4, kinds="s", window=2),
    "DeBERTa": DeBERTaConfig(**SIZES, **TEXT, distances=8, farthest=6),
    "ViT": ViTConfig(**SIZES, **IMAGES),
    "DeiT": ViTConfig(**SIZES, **IMAGES, distillation="head"),
    "DINOv2": ViTConfig(**SIZES, **IMAGES, layer_scale=0.5, gated=True, mean_head=True, registers=2),
    "CaiT": CaiTConfig(**SIZES, **IMAGES),
    "Swin": SwinConfig(**STAGES, **IMAGES | {"patch": 1}, window=3, position_mlp=3),
}  # fmt: skip
# These configs differ from another family in one part only, such as an untied head.
VARIANTS = (
    "GPT-2, untied", "BERT, pre-LN", "RoBERTa", "Qwen2", "Gemma", "Pythia", "ModernBERT", "DeBERTa",
    "DeiT", "DINOv2",
)  # fmt: skip
# Fine-tuning configs differ in the head, which grows as well.
HEADED: dict[str, Config] = {
    "BERT, classes": BERTConfig(**SIZES, **TEXT, head="classes", classes=3),
    "BERT, spans": BERTConfig(**SIZES, **TEXT, head="spans"),
    "GPT-2, classes": GPT2Config(**SIZES, **TEXT, head="classes", classes=3),
    "Qwen2, a number": LlamaConfig(
        **SIZES, **TEXT, kv_heads=2, qkv_bias=True, head="classes", classes=1
    ),
}

# --- architectures of Hugging Face ---

ENCODER = dict(num_hidden_layers=2, hidden_size=12, num_attention_heads=2, intermediate_size=20)
_TEXT = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
_TEXT |= dict(vocab_size=11, max_position_embeddings=9)
_BERT = ENCODER | _TEXT
_LLAMA = _BERT | {"num_key_value_heads": 2}
_GROUPED = _LLAMA | {"hidden_size": 16, "num_attention_heads": 4}
_PADDED = _GROUPED | {"pad_token_id": 1}
_GEMMA = _GROUPED | {"head_dim": 6}
_LOCAL = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
# Sequences of length 7 exceed these original context lengths.
_YARN = dict(rope_type="yarn", factor=2.0, original_max_position_embeddings=4, beta_fast=2.0)
_YARN["rope_theta"] = 77.0
_DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 77.0}
_DEFAULT = {"rope_type": "default"}
_LONG = dict(rope_type="longrope", rope_theta=250.0, partial_rotary_factor=0.5)
_FACTORS = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 3.5]}
_MIXED = _PADDED | {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.01}
_MOE = _MIXED | {"num_experts": 4, "moe_intermediate_size": 12}
_QWEN2_MOE = _MOE | {"shared_expert_intermediate_size": 14}
_GRANITE = _GROUPED | dict(embedding_multiplier=3.0, attention_multiplier=0.3)
_GRANITE |= dict(residual_multiplier=0.6, logits_scaling=2.0)
_GRANITE_4 = _GRANITE | dict(shared_intermediate_size=20, num_local_experts=0, mamba_n_heads=1)
_GRANITE_4["layer_types"] = ["full_attention"] * 2
_GPT_OSS = _MIXED | {"num_local_experts": 4, "head_dim": 6}
_OPT = _TEXT | dict(num_hidden_layers=2, hidden_size=12, num_attention_heads=2, ffn_dim=20)
_OPT |= dict(word_embed_proj_dim=12, pad_token_id=1)
_NEOX = _BERT | {"hidden_size": 16}
_GPT2 = {"vocab_size": 11, "n_positions": 9, "n_layer": 2, "n_embd": 12, "n_head": 2}
_GPT2 |= {"bos_token_id": 0, "eos_token_id": 0}
# Of three layers, the first has global attention. The others see two positions on either side.
# Padding has a zero row in the embedding.
_MODERN = _BERT | {"num_hidden_layers": 3, "local_attention": 4, "pad_token_id": 1}
# At a position that attends only to padding, the output is arbitrary.
_MODERN_STATES = _MODERN | {"local_attention": 12}
_ROBERTA = _BERT | {"pad_token_id": 1, "type_vocab_size": 1}
_DISTIL = _TEXT | dict(n_layers=2, dim=12, n_heads=2, hidden_dim=20, pad_token_id=1)
# Sequences are longer than the four distances on each side that have separate positions.
_DEBERTA = _BERT | dict(relative_attention=True, position_buckets=4, norm_rel_ebd="layer_norm")
_DEBERTA |= dict(share_att_key=True, pos_att_type="p2c|c2p", position_biased_input=False)
_DEBERTA["pad_token_id"] = 1
_IMAGES = dict(image_size=8, patch_size=4, num_channels=3, num_labels=5)
_VIT = ENCODER | _IMAGES
_REGISTERS = _IMAGES | dict(num_hidden_layers=2, hidden_size=12, num_attention_heads=2, mlp_ratio=2)
_DINO = _REGISTERS | dict(use_mask_token=False)
_REGISTERS["num_register_tokens"] = 3
_STAGES = _IMAGES | dict(image_size=20, patch_size=2, window_size=6, pretrained_window_sizes=[0, 0])
_STAGES |= dict(depths=[2, 2], embed_dim=8, num_heads=[2, 4], mlp_ratio=1.5)
# Models of `transformers`, for each architecture: the settings other than its defaults. Each model
# type needs a row; an architecture without one has the first settings of its model type.
SETTINGS = {
    "BertForMaskedLM": [_BERT, _BERT | {"tie_word_embeddings": False}],
    "RobertaForMaskedLM": [_ROBERTA],
    "XLMRobertaForMaskedLM": [_ROBERTA],
    "ModernBertForMaskedLM": [_MODERN, _MODERN | {"tie_word_embeddings": False,
        "layer_types": ["sliding_attention"] + ["full_attention"] * 2}],
    "GPT2LMHeadModel": [_GPT2 | more for more in ({}, {"activation_function": "gelu", "n_inner": 20})],
    "LlamaForCausalLM": [_LLAMA | {"num_attention_heads": 4, "head_dim": 6},
        _GROUPED | {"attention_bias": True, "mlp_bias": True, "rope_parameters": _YARN},
        _GROUPED | {"max_position_embeddings": 5, "rope_parameters": _DYNAMIC}],
    "Qwen2ForCausalLM": [_LLAMA | {"tie_word_embeddings": True},
        _LLAMA | {"rope_parameters": _DEFAULT | {"rope_theta": 1e6}}],
    "MistralForCausalLM": [_LLAMA | {"sliding_window": None}, _GROUPED | {"sliding_window": 3}],
    "Qwen3ForCausalLM": [_GEMMA, _GEMMA | {"use_sliding_window": True, **_LOCAL}],
    "MixtralForCausalLM": [_MIXED | {"num_local_experts": n} for n in (4, 2)],
    "Qwen3MoeForCausalLM": [_MOE | {"head_dim": 6, "norm_topk_prob": normed} | more for normed,
        more in ((False, {}), (True, {"use_sliding_window": True, "sliding_window": 3}))],
    "GemmaForCausalLM": [_GEMMA],
    "Gemma2ForCausalLM": [_GEMMA | _LOCAL | {"query_pre_attn_scalar": 9},
        _GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": 1.5}],
    "Gemma3ForCausalLM": [_GEMMA | _LOCAL, _GEMMA | {"query_pre_attn_scalar": 6, "sliding_window": 4,
        "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}}],
    "OlmoForCausalLM": [_GROUPED],
    "Qwen2MoeForCausalLM": [_QWEN2_MOE, _QWEN2_MOE | {"norm_topk_prob": True, "qkv_bias": False}],
    "GptOssForCausalLM": [_GPT_OSS | _LOCAL | {"rope_parameters": _YARN, "swiglu_limit": 0.5},
        _GPT_OSS | {"sliding_window": 3, "attention_bias": False, "rope_parameters": _DEFAULT}],
    "GraniteForCausalLM": [_GRANITE, _GRANITE | {"mlp_bias": True}],
    "GraniteMoeHybridForCausalLM": [_GRANITE_4 | {"position_embedding_type": "rope"}, _GRANITE_4 | {"attention_bias": True}],
    "OlmoeForCausalLM": [_MIXED | {"num_experts": 4, "norm_topk_prob": normed} for normed in (False, True)],
    "OPTForCausalLM": [_OPT, _OPT | {"tie_word_embeddings": False, "activation_function": "gelu"}],
    "Olmo2ForCausalLM": [_GROUPED],
    "Olmo3ForCausalLM": [_GROUPED | _LOCAL, _GROUPED | {"sliding_window": 3, "rope_scaling": _YARN}],
    "Phi3ForCausalLM": [
        _PADDED,
        _PADDED | {"hidden_size": 32, "sliding_window": 3, "rope_parameters": _LONG | _DEFAULT},
        # A sequence of 7 is longer than 4 but not longer than 8. The settings are spelled as in
        # transformers 5 and as in version 4.
        *(
            _PADDED | {"hidden_size": 32, "original_max_position_embeddings": n, "partial_rotary_factor": 0.5}
            | {key: _FACTORS | more}
            for n, key, more in (
                (4, "rope_parameters", _LONG),
                (8, "rope_scaling", {"type": "longrope"}),
                (4, "rope_scaling", {"rope_type": "longrope", "attention_factor": 1.25}),
            )
        ),
    ],
    "SmolLM3ForCausalLM": [_PADDED | {"no_rope_layers": [1, 0]} | more for more in ({}, {"mlp_bias": True})],
    "GPTNeoXForCausalLM": [_NEOX, _NEOX | {"hidden_act": "gelu_fast"},
        _NEOX | {"use_parallel_residual": False, "rope_parameters": _DEFAULT | {"partial_rotary_factor": 1.0}}],
    "ViTForImageClassification": [_VIT],
    "DeiTForImageClassification": [_VIT],
    "Dinov2ForImageClassification": [_DINO, _DINO | {"use_swiglu_ffn": True, "hidden_act": "gelu", "layerscale_value": 0.5}],
    # One stage has several windows, some with padding, and one stage is a single window. The second
    # entry is fine-tuned with larger windows.
    "Swinv2ForImageClassification": [_STAGES, _STAGES | {"pretrained_window_sizes": [4, 2]}],
    "BertForSequenceClassification": [_BERT | {"num_labels": n} for n in (3, 1)],
    "RobertaForSequenceClassification": [_ROBERTA],
    "ModernBertForSequenceClassification": [_MODERN | {"num_labels": 3,
        "classifier_pooling": pooling} for pooling in ("cls", "mean")],
    "GPT2ForSequenceClassification": [_GPT2 | {"pad_token_id": 1, "num_labels": n} for n in (3, 1)],
    "DistilBertForMaskedLM": [_DISTIL, _DISTIL | {"tie_word_embeddings": False}],
    "DebertaV2ForMaskedLM": [_DEBERTA, _DEBERTA | {"tie_word_embeddings": False, "max_relative_positions": 7}],
    "ModernBertForTokenClassification": [_MODERN_STATES | {"num_labels": 3}],
    "ModernBertModel": [_MODERN_STATES],
    "ModernBertForQuestionAnswering": [_MODERN_STATES],
    "CamembertForMaskedLM": [_ROBERTA],
    "Dinov2WithRegistersForImageClassification": [_REGISTERS | {"use_swiglu_ffn": gated} for gated in (False, True)],
    "CLIPVisionModel": [_VIT, _VIT | {"hidden_act": "gelu"}],
    "CLIPVisionModelWithProjection": [_VIT | {"projection_dim": 5}],
    "SiglipVisionModel": [_VIT, _VIT | {"vision_use_head": False}],
}  # fmt: skip
_OF_TYPE = {checkpoints.FAMILIES[a].model_type: SETTINGS[a][0] for a in reversed(SETTINGS)}
_CLASSES = {"pad_token_id": 1, "num_labels": 3}
SETTINGS |= {
    name: [_OF_TYPE[family.model_type] | (_CLASSES if name.endswith("Classification") else {})]
    for name, family in checkpoints.FAMILIES.items()
    if name not in SETTINGS
}
# The architecture of the body of each decoder.
BODIES = {
    tokens.architecture: body.architecture
    for tokens in checkpoints.FAMILIES.values()
    for body in checkpoints.FAMILIES.values()
    if tokens.config.causal and tokens.fixed["head"] == "tokens"
    if (body.model_type, body.fixed.get("head")) == (tokens.model_type, "states")
}


@cache
def shapes(config: Config):
    return jax.eval_shape(config.init, jax.random.key(0))


@cache
def parameters(config: Config):
    return jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes(config)), config.axes()


def doubled(config: Config, *axes: str) -> dict[str, int]:
    return {axis: 2 * size for axis, size in config.sizes().items() if axis_kind(axis) in axes}


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
    return config.batch_shapes(2)

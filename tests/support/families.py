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
_TEXT = dict(vocab_size=11, max_position_embeddings=9, pad_token_id=None, bos_token_id=None, eos_token_id=None)  # fmt: skip
_GROUPED = ENCODER | _TEXT | {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
_GEMMA = _GROUPED | {"head_dim": 6}
_LOCAL = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
# Sequences of length 7 exceed these original context lengths.
_YARN = {
    "rope_type": "yarn",
    "factor": 2.0,
    "original_max_position_embeddings": 4,
    "beta_fast": 2.0,
    "rope_theta": 77.0,
}
_DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 77.0}
_MIXED = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.01, "pad_token_id": 1}
_QWEN2_MOE = (
    _GROUPED
    | _MIXED
    | {"num_experts": 4, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 14}
)
_GRANITE = _GROUPED | {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.6,
    "logits_scaling": 2.0,
}
_GRANITE_4 = _GRANITE | {
    "shared_intermediate_size": 20,
    "num_local_experts": 0,
    "layer_types": ["full_attention"] * 2,
    "mamba_n_heads": 1,
}
_GPT_OSS = _GROUPED | _MIXED | {"num_local_experts": 4, "head_dim": 6}
_OPT = _TEXT | dict(
    num_hidden_layers=2, hidden_size=12, num_attention_heads=2, ffn_dim=20, word_embed_proj_dim=12, pad_token_id=1
)  # fmt: skip
_NEOX = ENCODER | _TEXT | {"num_attention_heads": 2, "hidden_size": 16}
# Of three layers, the first has global attention. The others see two positions on either side.
# Padding has a zero row in the embedding.
_GPT2 = {"vocab_size": 11, "n_positions": 9, "n_layer": 2, "n_embd": 12, "n_head": 2}
_GPT2 |= {"bos_token_id": 0, "eos_token_id": 0}
_MODERN = ENCODER | _TEXT | {"num_hidden_layers": 3, "local_attention": 4, "pad_token_id": 1}
_ROBERTA = ENCODER | _TEXT | {"pad_token_id": 1, "type_vocab_size": 1}
_DISTIL = _TEXT | dict(n_layers=2, dim=12, n_heads=2, hidden_dim=20, pad_token_id=1)
# Sequences are longer than the four distances on each side that have separate positions.
_DEBERTA = (
    ENCODER
    | _TEXT
    | dict(
        relative_attention=True,
        position_buckets=4,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type="p2c|c2p",
        position_biased_input=False,
        pad_token_id=1,
    )
)
_IMAGES = dict(image_size=8, patch_size=4, num_channels=3, num_labels=5)
_DINO = _IMAGES | dict(
    num_hidden_layers=2, hidden_size=12, num_attention_heads=2, mlp_ratio=2, use_mask_token=False
)
_REGISTERS = {k: v for k, v in _DINO.items() if k != "use_mask_token"} | {"num_register_tokens": 3}
_STAGES = dict(image_size=20, patch_size=2, num_channels=3, num_labels=5, window_size=6) | dict(
    pretrained_window_sizes=[0, 0], depths=[2, 2], embed_dim=8, num_heads=[2, 4], mlp_ratio=1.5
)
# Models of `transformers`, for each architecture: the settings other than its defaults.
SETTINGS = {
    "BertForMaskedLM": [ENCODER | _TEXT, ENCODER | _TEXT | {"tie_word_embeddings": False}],
    "RobertaForMaskedLM": [ENCODER | _TEXT | {"pad_token_id": 1, "type_vocab_size": 1}],
    "XLMRobertaForMaskedLM": [ENCODER | _TEXT | {"pad_token_id": 1, "type_vocab_size": 1}],
    "ModernBertForMaskedLM": [
        _MODERN,
        _MODERN | {"tie_word_embeddings": False, "layer_types": ["sliding_attention"] + ["full_attention"] * 2},
    ],
    "GPT2LMHeadModel": [_GPT2 | more for more in ({}, {"activation_function": "gelu", "n_inner": 20})],
    "LlamaForCausalLM": [
        ENCODER | _TEXT | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6},
        _GROUPED | {"attention_bias": True, "mlp_bias": True, "rope_parameters": _YARN},
        _GROUPED | {"max_position_embeddings": 5, "rope_parameters": _DYNAMIC},
    ],
    "Qwen2ForCausalLM": [
        ENCODER | _TEXT | {"num_key_value_heads": 2, "tie_word_embeddings": True},
        ENCODER | _TEXT | {"num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ],
    "MistralForCausalLM": [
        ENCODER | _TEXT | {"num_key_value_heads": 2, "sliding_window": None},
        _GROUPED | {"sliding_window": 3},
    ],
    "Qwen3ForCausalLM": [_GROUPED | {"head_dim": 6}, _GROUPED | {"head_dim": 6, "use_sliding_window": True, **_LOCAL}],
    "MixtralForCausalLM": [_GROUPED | _MIXED | {"num_local_experts": 4}, _GROUPED | _MIXED | {"num_local_experts": 2}],
    "Qwen3MoeForCausalLM": [
        _GROUPED | _MIXED | {"head_dim": 6, "num_experts": 4, "moe_intermediate_size": 12, "norm_topk_prob": normed} | more
        for normed, more in ((False, {}), (True, {"use_sliding_window": True, "sliding_window": 3}))
    ],
    "GemmaForCausalLM": [_GEMMA],
    "Gemma2ForCausalLM": [
        _GEMMA | _LOCAL | {"query_pre_attn_scalar": 9},
        _GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": 1.5},
    ],
    "Gemma3ForCausalLM": [
        _GEMMA | _LOCAL,
        _GEMMA
        | {"query_pre_attn_scalar": 6, "sliding_window": 4}
        | {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}},
    ],
    "OlmoForCausalLM": [_GROUPED],
    "OlmoForSequenceClassification": [_GROUPED | {"pad_token_id": 1}],
    "Qwen2MoeForCausalLM": [_QWEN2_MOE, _QWEN2_MOE | {"norm_topk_prob": True, "qkv_bias": False}],
    "Qwen2MoeForSequenceClassification": [_QWEN2_MOE],
    "GptOssForCausalLM": [
        _GPT_OSS | _LOCAL | {"rope_parameters": _YARN, "swiglu_limit": 0.5},
        _GPT_OSS | {"sliding_window": 3, "attention_bias": False, "rope_parameters": {"rope_type": "default"}},
    ],
    "GptOssForSequenceClassification": [_GPT_OSS | _LOCAL | {"rope_parameters": _YARN}],
    "GraniteForCausalLM": [_GRANITE, _GRANITE | {"mlp_bias": True}],
    "GraniteMoeHybridForCausalLM": [_GRANITE_4 | {"position_embedding_type": "rope"}, _GRANITE_4 | {"attention_bias": True}],
    "OlmoeForCausalLM": [_GROUPED | _MIXED | {"num_experts": 4, "norm_topk_prob": normed} for normed in (False, True)],
    "OPTForCausalLM": [_OPT, _OPT | {"tie_word_embeddings": False, "activation_function": "gelu"}],
    "OPTForSequenceClassification": [_OPT | {"num_labels": 3}],
    "Olmo2ForCausalLM": [_GROUPED],
    "Olmo3ForCausalLM": [_GROUPED | _LOCAL, _GROUPED | {"sliding_window": 3, "rope_scaling": _YARN}],
    "Phi3ForCausalLM": [
        _GROUPED | {"pad_token_id": 1},
        _GROUPED
        | {"pad_token_id": 1, "hidden_size": 32, "sliding_window": 3}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 250.0, "partial_rotary_factor": 0.5}},
        # A sequence of 7 is longer than 4 but not longer than 8. The settings are spelled as in
        # transformers 5 and as in version 4.
        *(
            _GROUPED
            | {"pad_token_id": 1, "hidden_size": 32, "original_max_position_embeddings": n, "partial_rotary_factor": 0.5}
            | {key: {"short_factor": [1.0, 1.5], "long_factor": [2.0, 3.5]} | more}
            for n, key, more in (
                (4, "rope_parameters", {"rope_type": "longrope", "rope_theta": 250.0, "partial_rotary_factor": 0.5}),
                (8, "rope_scaling", {"type": "longrope"}),
                (4, "rope_scaling", {"rope_type": "longrope", "attention_factor": 1.25}),
            )
        ),
    ],
    "SmolLM3ForCausalLM": [
        _GROUPED | {"pad_token_id": 1, "no_rope_layers": [1, 0]},
        _GROUPED | {"pad_token_id": 1, "no_rope_layers": [1, 0], "mlp_bias": True},
    ],
    "GPTNeoXForCausalLM": [
        _NEOX,
        _NEOX | {"hidden_act": "gelu_fast"},
        _NEOX | {"use_parallel_residual": False, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}},
    ],
    "ViTForImageClassification": [ENCODER | _IMAGES],
    "DeiTForImageClassification": [ENCODER | _IMAGES],
    "DeiTForImageClassificationWithTeacher": [ENCODER | _IMAGES],
    "Dinov2ForImageClassification": [_DINO, _DINO | {"use_swiglu_ffn": True, "hidden_act": "gelu", "layerscale_value": 0.5}],
    # One stage has several windows, some with padding, and one stage is a single window. The second
    # entry is fine-tuned with larger windows.
    "Swinv2ForImageClassification": [_STAGES, _STAGES | {"pretrained_window_sizes": [4, 2]}],
    "BertForSequenceClassification": [ENCODER | _TEXT | {"num_labels": n} for n in (3, 1)],
    "RobertaForSequenceClassification": [ENCODER | _TEXT | {"pad_token_id": 1, "type_vocab_size": 1}],
    "XLMRobertaForSequenceClassification": [ENCODER | _TEXT | {"pad_token_id": 1, "type_vocab_size": 1, "num_labels": 5}],
    "ModernBertForSequenceClassification": [
        _MODERN | {"num_labels": 3, "classifier_pooling": pooling} for pooling in ("cls", "mean")
    ],
    "GPT2ForSequenceClassification": [_GPT2 | {"pad_token_id": 1, "num_labels": n} for n in (3, 1)],
    "LlamaForSequenceClassification": [
        ENCODER | _TEXT | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "pad_token_id": 1}
    ],
    "Qwen2ForSequenceClassification": [
        ENCODER | _TEXT | {"num_key_value_heads": 2, "tie_word_embeddings": True, "pad_token_id": 1, "num_labels": 3}
    ],
    "MistralForSequenceClassification": [
        ENCODER | _TEXT | {"num_key_value_heads": 2, "sliding_window": None, "pad_token_id": 1, "num_labels": 3}
    ],
    "Qwen3ForSequenceClassification": [_GROUPED | {"head_dim": 6, "pad_token_id": 1, "num_labels": 3}],
    "MixtralForSequenceClassification": [_GROUPED | _MIXED | {"num_local_experts": 4}],
    "Qwen3MoeForSequenceClassification": [_GROUPED | _MIXED | {"head_dim": 6, "num_experts": 4, "moe_intermediate_size": 12}],
    "GemmaForSequenceClassification": [_GEMMA | {"pad_token_id": 1}],
    "Gemma2ForSequenceClassification": [_GEMMA | _LOCAL | {"pad_token_id": 1, "num_labels": 3}],
    "Gemma3TextForSequenceClassification": [_GEMMA | _LOCAL | {"pad_token_id": 1}],
    "Olmo2ForSequenceClassification": [_GROUPED | {"pad_token_id": 1}],
    "Olmo3ForSequenceClassification": [_GROUPED | _LOCAL | {"pad_token_id": 1}],
    "Phi3ForSequenceClassification": [_GROUPED | {"pad_token_id": 1}],
    "SmolLM3ForSequenceClassification": [_GROUPED | {"pad_token_id": 1, "no_rope_layers": [1, 0]}],
    "GPTNeoXForSequenceClassification": [_NEOX | {"pad_token_id": 1, "num_labels": 3}],
    "DistilBertForMaskedLM": [_DISTIL, _DISTIL | {"tie_word_embeddings": False}],
    "DistilBertForSequenceClassification": [_DISTIL | {"num_labels": 3}],
    "DistilBertForQuestionAnswering": [_DISTIL],
    "DebertaV2ForMaskedLM": [_DEBERTA, _DEBERTA | {"tie_word_embeddings": False, "max_relative_positions": 7}],
    "DebertaV2ForSequenceClassification": [_DEBERTA | {"num_labels": 3}],
    "DebertaV2ForQuestionAnswering": [_DEBERTA],
    "DebertaV2ForTokenClassification": [_DEBERTA | {"num_labels": 3}],
    "DebertaV2Model": [_DEBERTA],
    "BertForTokenClassification": [ENCODER | _TEXT | {"num_labels": 3}],
    "RobertaForTokenClassification": [_ROBERTA | {"num_labels": 3}],
    "XLMRobertaForTokenClassification": [_ROBERTA | {"num_labels": 4}],
    "ModernBertForTokenClassification": [_MODERN | {"local_attention": 12, "num_labels": 3}],
    "DistilBertForTokenClassification": [_DISTIL | {"num_labels": 3}],
    "BertModel": [ENCODER | _TEXT],
    "RobertaModel": [_ROBERTA],
    "XLMRobertaModel": [_ROBERTA],
    "ModernBertModel": [_MODERN | {"local_attention": 12}],
    "DistilBertModel": [_DISTIL],
    "CamembertForMaskedLM": [_ROBERTA],
    "CamembertForSequenceClassification": [_ROBERTA | {"num_labels": 3}],
    "CamembertForQuestionAnswering": [_ROBERTA],
    "CamembertForTokenClassification": [_ROBERTA | {"num_labels": 3}],
    "CamembertModel": [_ROBERTA],
    "XLMRobertaForQuestionAnswering": [_ROBERTA],
    "Dinov2WithRegistersForImageClassification": [_REGISTERS | {"use_swiglu_ffn": gated} for gated in (False, True)],
    "Dinov2WithRegistersModel": [_REGISTERS],
    "LlamaModel": [_GROUPED],
    "MistralModel": [_GROUPED | {"sliding_window": 3}],
    "Qwen2Model": [_GROUPED | {"tie_word_embeddings": True}],
    "Qwen3Model": [_GROUPED | {"head_dim": 6}],
    "ViTModel": [ENCODER | _IMAGES],
    "Dinov2Model": [_DINO],
    "CLIPVisionModel": [ENCODER | _IMAGES, ENCODER | _IMAGES | {"hidden_act": "gelu"}],
    "CLIPVisionModelWithProjection": [ENCODER | _IMAGES | {"projection_dim": 5}],
    "SiglipVisionModel": [ENCODER | _IMAGES, ENCODER | _IMAGES | {"vision_use_head": False}],
    "BertForQuestionAnswering": [ENCODER | _TEXT],
    "RobertaForQuestionAnswering": [ENCODER | _TEXT | {"pad_token_id": 1, "type_vocab_size": 1}],
    # At a position that attends only to padding, the output is arbitrary.
    "ModernBertForQuestionAnswering": [_MODERN | {"local_attention": 12}],
}  # fmt: skip


# The architecture of the body of each decoder.
BODIES = {
    tokens.architecture: body.architecture
    for tokens in checkpoints.FAMILIES.values()
    for body in checkpoints.FAMILIES.values()
    if tokens.config.causal and tokens.fixed["head"] == "tokens"
    if (body.model_type, body.fixed.get("head")) == (tokens.model_type, "states")
}
SETTINGS |= {b: SETTINGS[t][:1] for t, b in BODIES.items() if b not in SETTINGS}


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

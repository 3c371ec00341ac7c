"""Settings are read in the spellings of published ``config.json`` files.

The models have a few hundred numbers. The files of a model's first releases have keys that
`transformers` no longer writes, and lack others. The tolerance of logits is 1e-4, for two
implementations in float32.
"""

import json
from typing import Any

import numpy as np
import pytest

from jaxgrow import checkpoints
from jaxgrow.checkpoints import FAMILIES

torch = pytest.importorskip("torch", reason="pip install -e '.[interop-test]'")
transformers = pytest.importorskip("transformers", reason="pip install -e '.[interop-test]'")
pytestmark = pytest.mark.interop
from transformers_models import answered, assert_alike, given, ours, run  # noqa: E402

_ENCODER = {
    "num_hidden_layers": 2,
    "hidden_size": 12,
    "num_attention_heads": 2,
    "intermediate_size": 20,
}
_TEXT = {"vocab_size": 11, "max_position_embeddings": 9}
_DECODER = (
    _ENCODER | _TEXT | {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
)
_LLAMA = _DECODER | {
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "use_cache": True,
}
_QWEN = _LLAMA | {"max_window_layers": 28, "use_sliding_window": False}
_BIAS = {"attention_bias": False, "attention_dropout": 0.0}
_BERT = (
    _ENCODER
    | _TEXT
    | {"hidden_act": "gelu", "hidden_dropout_prob": 0.1, "position_embedding_type": "absolute"}
)
_DEBERTA = (
    _ENCODER
    | _TEXT
    | {"attention_probs_dropout_prob": 0.1, "hidden_act": "gelu", "hidden_dropout_prob": 0.1}
    | {"initializer_range": 0.02, "layer_norm_eps": 1e-7, "max_relative_positions": -1}
    | {"norm_rel_ebd": "layer_norm", "pos_att_type": "p2c|c2p", "position_biased_input": False}
    | {"position_buckets": 4, "relative_attention": True, "share_att_key": True}
    | {"type_vocab_size": 0}
)
_ROBERTA = _BERT | {
    "pad_token_id": 1,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
    "output_past": True,
}
_GEMMA = (
    _DECODER
    | _BIAS
    | {"head_dim": 6, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "gelu"}
)
_PHI = (
    _LLAMA
    | _BIAS
    | {
        "pad_token_id": 1,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "rope_theta": 250.0,
        "hidden_size": 32,
    }
)
_PHI |= {"auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}}
_IMAGES = {
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 3,
    "id2label": {"0": "cat", "1": "dog"},
    "qkv_bias": True,
}
_IMAGES |= {
    "hidden_act": "gelu",
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-12,
    "label2id": {"cat": 0, "dog": 1},
}
PUBLISHED: list[tuple[str, str, str, dict[str, Any]]] = [
    (
        "bert-base",
        "BertForMaskedLM",
        "bert",
        _BERT | {"gradient_checkpointing": False, "type_vocab_size": 2},
    ),
    ("roberta-base", "RobertaForMaskedLM", "roberta", _ROBERTA),
    ("xlm-roberta-base", "XLMRobertaForMaskedLM", "xlm-roberta", _ROBERTA),
    (
        "ModernBERT-base",
        "ModernBertForMaskedLM",
        "modernbert",
        _ENCODER
        | _TEXT
        | {
            "global_attn_every_n_layers": 3,
            "global_rope_theta": 160000.0,
            "local_rope_theta": 10000.0,
        }
        | {
            "local_attention": 4,
            "classifier_pooling": "mean",
            "decoder_bias": True,
            "mlp_bias": False,
            "norm_bias": False,
        }
        | {
            "norm_eps": 1e-5,
            "layer_norm_eps": 1e-5,
            "position_embedding_type": "absolute",
            "attention_bias": False,
        }
        | {
            "hidden_activation": "gelu",
            "classifier_bias": False,
            "pad_token_id": 1,
            "num_hidden_layers": 3,
        },
    ),
    ("camembert-base", "CamembertForMaskedLM", "camembert", _ROBERTA),
    (
        "gpt2",
        "GPT2LMHeadModel",
        "gpt2",
        {
            "vocab_size": 11,
            "n_positions": 9,
            "n_ctx": 9,
            "n_layer": 2,
            "n_embd": 12,
            "n_head": 2,
            "attn_pdrop": 0.1,
        }
        | {
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "summary_type": "cls_index",
        },
    ),
    (
        "Cerebras-GPT",
        "GPT2LMHeadModel",
        "gpt2",
        {"vocab_size": 11, "n_positions": 9, "n_layer": 2, "n_embd": 12, "n_head": 2, "n_inner": 20}
        | {"activation_function": "gelu", "scale_attn_weights": True},
    ),
    ("Llama 2", "LlamaForCausalLM", "llama", _LLAMA | {"pretraining_tp": 1, "rope_scaling": None}),
    (
        "Llama 3.1",
        "LlamaForCausalLM",
        "llama",
        _LLAMA
        | _BIAS
        | {
            "mlp_bias": False,
            "pretraining_tp": 1,
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
        }
        | {
            "rope_scaling": {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "rope_type": "llama3",
            }
            | {"original_max_position_embeddings": 8}
        },
    ),
    (
        "Qwen2.5",
        "Qwen2ForCausalLM",
        "qwen2",
        _QWEN | {"sliding_window": 9, "rope_theta": 1000000.0},
    ),
    (
        "Qwen2.5, as its card says for long texts",
        "Qwen2ForCausalLM",
        "qwen2",
        _QWEN
        | {"rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 4, "type": "yarn"}},
    ),
    (
        "Qwen3",
        "Qwen3ForCausalLM",
        "qwen3",
        _QWEN | _BIAS | {"head_dim": 6, "sliding_window": None, "rope_theta": 1000000},
    ),
    (
        "Mistral 0.1",
        "MistralForCausalLM",
        "mistral",
        _LLAMA | {"sliding_window": 4, "rope_theta": 10000.0},
    ),
    (
        "Mistral 0.3",
        "MistralForCausalLM",
        "mistral",
        _LLAMA | {"sliding_window": None, "rope_theta": 1000000.0},
    ),
    (
        "Mixtral",
        "MixtralForCausalLM",
        "mixtral",
        _LLAMA
        | {
            "num_experts_per_tok": 2,
            "num_local_experts": 4,
            "router_aux_loss_coef": 0.02,
            "sliding_window": None,
        }
        | {"output_router_logits": False, "rope_theta": 1000000.0},
    ),
    (
        "Qwen3-30B-A3B",
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        _QWEN
        | _BIAS
        | {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": 12,
            "norm_topk_prob": True,
        }
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 6,
            "rope_scaling": None,
            "sliding_window": None,
        },
    ),
    (
        "Qwen3-Coder-30B-A3B",
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        _QWEN
        | _BIAS
        | {"decoder_sparse_step": 1, "head_dim": 6, "mlp_only_layers": [], "norm_topk_prob": True}
        | {"moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2}
        | {"output_router_logits": False, "qkv_bias": False, "rope_scaling": None}
        | {"rope_theta": 1e7, "router_aux_loss_coef": 0.0, "shared_expert_intermediate_size": 0}
        | {"sliding_window": None, "use_qk_norm": True},
    ),
    (
        "OLMoE-1B-7B",
        "OlmoeForCausalLM",
        "olmoe",
        _LLAMA
        | _BIAS
        | {"clip_qkv": None, "norm_topk_prob": False, "num_experts": 4, "num_experts_per_tok": 2}
        | {"num_key_value_heads": 4, "output_router_logits": False, "pad_token_id": 1}
        | {"rope_scaling": None, "rope_theta": 10000.0, "router_aux_loss_coef": 0.01},
    ),
    (
        "gemma-2b",
        "GemmaForCausalLM",
        "gemma",
        _GEMMA | {"hidden_activation": None, "rope_scaling": None},
    ),
    ("gemma-2b, first", "GemmaForCausalLM", "gemma", _GEMMA),
    (
        "gemma-2-9b",
        "Gemma2ForCausalLM",
        "gemma2",
        _GEMMA
        | {
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "cache_implementation": "hybrid",
        }
        | {
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "query_pre_attn_scalar": 256,
        }
        | {"sliding_window": 4, "sliding_window_size": 4},
    ),
    (
        "gemma-3-1b",
        "Gemma3ForCausalLM",
        "gemma3_text",
        _DECODER
        | _BIAS
        | {
            "head_dim": 6,
            "hidden_activation": "gelu_pytorch_tanh",
            "rms_norm_eps": 1e-6,
            "query_pre_attn_scalar": 256,
        }
        | {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "cache_implementation": "hybrid",
        }
        | {
            "rope_local_base_freq": 10000,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window_pattern": 2,
        }
        | {"sliding_window": 4},
    ),
    (
        "gemma-3-270m",
        "Gemma3ForCausalLM",
        "gemma3_text",
        _DECODER
        | _BIAS
        | {"_sliding_window_pattern": 6, "attn_logit_softcapping": None, "head_dim": 6}
        | {"final_logit_softcapping": None, "hidden_activation": "gelu_pytorch_tanh"}
        | {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 256}
        | {"rms_norm_eps": 1e-6, "rope_local_base_freq": 10000.0, "rope_scaling": None}
        | {"rope_theta": 1e6, "sliding_window": 4, "use_bidirectional_attention": False},
    ),
    (
        "translategemma-4b, its text model",
        "Gemma3ForCausalLM",
        "gemma3_text",
        _DECODER
        | _BIAS
        | {"head_dim": 6, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6}
        | {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 256}
        | {"rope_local_base_freq": 10000.0, "rope_theta": 1e6, "sliding_window": 4}
        | {
            "rope_parameters": {
                "full_attention": {"factor": 8.0, "rope_type": "linear"},
                "sliding_attention": {"rope_type": "default"},
            }
        },
    ),
    (
        "OLMo-2",
        "Olmo2ForCausalLM",
        "olmo2",
        _LLAMA | _BIAS | {"rope_scaling": None, "rope_theta": 500000},
    ),
    (
        "OLMo-3",
        "Olmo3ForCausalLM",
        "olmo3",
        _LLAMA
        | _BIAS
        | {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 4,
            "rope_theta": 500000,
        }
        | {
            "rope_scaling": {
                "attention_factor": 1.2,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 8.0,
            }
            | {"original_max_position_embeddings": 4, "rope_type": "yarn"}
        },
    ),
    (
        "Phi-3-mini-4k",
        "Phi3ForCausalLM",
        "phi3",
        _PHI | {"rope_scaling": None, "sliding_window": 4},
    ),
    (
        "Phi-3-mini-128k",
        "Phi3ForCausalLM",
        "phi3",
        _PHI
        | {"original_max_position_embeddings": 4, "sliding_window": 9}
        | {
            "rope_scaling": {
                "long_factor": [1.5, 2, 3, 4],
                "short_factor": [1, 1, 1.5, 2],
                "type": "longrope",
            }
        },
    ),
    (
        "Phi-4-mini",
        "Phi3ForCausalLM",
        "phi3",
        _PHI
        | {
            "original_max_position_embeddings": 4,
            "partial_rotary_factor": 0.75,
            "tie_word_embeddings": True,
        }
        | {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False}
        | {
            "rope_scaling": {
                "long_factor": [1, 2, 3],
                "short_factor": [1, 1, 1.5],
                "type": "longrope",
            }
        },
    ),
    (
        "SmolLM3",
        "SmolLM3ForCausalLM",
        "smollm3",
        _LLAMA
        | _BIAS
        | {
            "layer_types": ["full_attention"] * 2,
            "no_rope_layers": [1, 0],
            "no_rope_layer_interval": 4,
        }
        | {
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": 28,
            "mlp_bias": False,
        }
        | {"rope_scaling": None, "rope_theta": 5000000.0, "pad_token_id": 1},
    ),
    (
        "pythia",
        "GPTNeoXForCausalLM",
        "gpt_neox",
        _ENCODER
        | _TEXT
        | {
            "hidden_size": 16,
            "hidden_act": "gelu",
            "rotary_emb_base": 10000,
            "rotary_pct": 0.25,
            "layer_norm_eps": 1e-5,
        }
        | {"use_parallel_residual": True, "tie_word_embeddings": False},
    ),
    (
        "gpt-neox-20b",
        "GPTNeoXForCausalLM",
        "gpt_neox",
        _ENCODER
        | _TEXT
        | {
            "hidden_size": 16,
            "hidden_act": "gelu_fast",
            "rotary_emb_base": 10000,
            "rotary_pct": 0.25,
        }
        | {
            "attention_probs_dropout_prob": 0,
            "layer_norm_eps": 1e-5,
            "use_parallel_residual": True,
        },
    ),
    (
        "distilbert-base-uncased",
        "DistilBertForMaskedLM",
        "distilbert",
        _TEXT
        | {"activation": "gelu", "dim": 12, "hidden_dim": 20, "n_heads": 2, "n_layers": 2}
        | {"attention_dropout": 0.1, "dropout": 0.1, "qa_dropout": 0.1, "seq_classif_dropout": 0.2}
        | {"pad_token_id": 0, "sinusoidal_pos_embds": False, "tie_weights_": True},
    ),
    (
        "all-MiniLM-L6-v2",
        "BertModel",
        "bert",
        _BERT
        | {
            "gradient_checkpointing": False,
            "layer_norm_eps": 1e-12,
            "pad_token_id": 0,
            "type_vocab_size": 2,
            "use_cache": True,
        },
    ),
    ("deberta-v3-base", "DebertaV2Model", "deberta-v2", _DEBERTA),
    (
        "deberta-v3-base, its token head",
        "DebertaV2ForMaskedLM",
        "deberta-v2",
        _DEBERTA | {"legacy": False},
    ),
    (
        "nli-deberta-v3-base",
        "DebertaV2ForSequenceClassification",
        "deberta-v2",
        _DEBERTA
        | {"pos_att_type": ["p2c", "c2p"], "id2label": {str(i): f"LABEL_{i}" for i in range(3)}}
        | {"label2id": {f"LABEL_{i}": i for i in range(3)}, "pad_token_id": 0}
        | {"pooler_dropout": 0, "pooler_hidden_act": "gelu", "pooler_hidden_size": 12},
    ),
    (
        "OLMo-1B-hf",
        "OlmoForCausalLM",
        "olmo",
        _DECODER
        | {"attention_bias": False, "attention_dropout": 0.0, "clip_qkv": None, "pad_token_id": 1}
        | {"hidden_act": "silu", "num_key_value_heads": 4, "rope_scaling": None}
        | {"rope_theta": 10000.0, "tie_word_embeddings": True},
    ),
    (
        "Qwen1.5-MoE-A2.7B",
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        _QWEN
        | {"decoder_sparse_step": 1, "moe_intermediate_size": 12, "norm_topk_prob": False}
        | {"num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": False}
        | {"rope_theta": 1e6, "router_aux_loss_coef": 0.001, "sliding_window": 32768}
        | {"shared_expert_intermediate_size": 14, "tie_word_embeddings": False},
    ),
    (
        "granite-3.1-2b-base",
        "GraniteForCausalLM",
        "granite",
        _LLAMA
        | {"attention_bias": False, "attention_dropout": 0.1, "attention_multiplier": 0.015625}
        | {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22}
        | {"mlp_bias": False, "rope_scaling": None, "rope_theta": 5e6, "tie_word_embeddings": True},
    ),
    (
        "granite-4.0-micro",
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        _LLAMA
        | {"attention_bias": False, "attention_dropout": 0.0, "attention_multiplier": 0.015625}
        | {"embedding_multiplier": 12, "init_method": "mup", "layer_types": ["attention"] * 2}
        | {"logits_scaling": 8, "mamba_chunk_size": 256, "mamba_conv_bias": True}
        | {"mamba_d_conv": 4, "mamba_d_head": 4, "mamba_d_state": 256, "mamba_expand": 2}
        | {"mamba_n_groups": 1, "mamba_n_heads": 8, "mamba_proj_bias": False}
        | {"normalization_function": "rmsnorm", "num_experts_per_tok": 0, "num_local_experts": 0}
        | {"output_router_logits": False, "position_embedding_type": "rope"}
        | {"residual_multiplier": 0.22, "rope_scaling": None, "rope_theta": 10000000}
        | {"router_aux_loss_coef": 0.01, "shared_intermediate_size": 20}
        | {"tie_word_embeddings": True},
    ),
    (
        "opt-125m",
        "OPTForCausalLM",
        "opt",
        _TEXT
        | {"_remove_final_layer_norm": False, "activation_dropout": 0.0, "hidden_size": 12}
        | {"activation_function": "relu", "attention_dropout": 0.0, "bos_token_id": 2}
        | {"do_layer_norm_before": True, "dropout": 0.1, "eos_token_id": 2, "ffn_dim": 20}
        | {"init_std": 0.02, "layerdrop": 0.0, "num_attention_heads": 2, "num_hidden_layers": 2}
        | {"pad_token_id": 1, "prefix": "</s>", "use_cache": True, "word_embed_proj_dim": 12},
    ),
    (
        "gpt-oss-20b, dequantized",
        "GptOssForCausalLM",
        "gpt_oss",
        _DECODER
        | {"attention_bias": True, "attention_dropout": 0.0, "experts_per_token": 2, "head_dim": 6}
        | {"hidden_act": "silu", "initial_context_length": 4, "num_experts_per_tok": 2}
        | {"layer_types": ["sliding_attention", "full_attention"], "num_local_experts": 4}
        | {"output_router_logits": False, "rms_norm_eps": 1e-5, "rope_theta": 150000}
        | {"router_aux_loss_coef": 0.9, "sliding_window": 3, "swiglu_limit": 7.0}
        | {"tie_word_embeddings": False, "use_cache": True}
        | {
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "original_max_position_embeddings": 4,
                "rope_type": "yarn",
                "truncate": False,
            }
        },
    ),
    (
        "CLIP ViT-H, image encoder of IP-Adapter",
        "CLIPVisionModelWithProjection",
        "clip_vision_model",
        _ENCODER
        | {"attention_dropout": 0.0, "dropout": 0.0, "hidden_act": "gelu", "num_channels": 3}
        | {"image_size": 8, "patch_size": 4, "initializer_factor": 1.0, "projection_dim": 5}
        | {"initializer_range": 0.02, "layer_norm_eps": 1e-5},
    ),
    (
        "SigLIP, image encoder of FLUX Redux",
        "SiglipVisionModel",
        "siglip_vision_model",
        _ENCODER
        | {"attention_dropout": 0.0, "hidden_act": "gelu_pytorch_tanh", "num_channels": 3}
        | {"image_size": 8, "patch_size": 4, "layer_norm_eps": 1e-6},
    ),
    ("vit-base", "ViTForImageClassification", "vit", _ENCODER | _IMAGES),
    ("deit-base-distilled", "DeiTForImageClassificationWithTeacher", "deit", _ENCODER | _IMAGES),
    (
        "dinov2-base-imagenet1k-1-layer",
        "Dinov2ForImageClassification",
        "dinov2",
        {k: v for k, v in (_ENCODER | _IMAGES).items() if k != "intermediate_size"}
        | {
            "apply_layernorm": True,
            "layerscale_value": 1.0,
            "mlp_ratio": 2,
            "reshape_hidden_states": True,
        }
        | {
            "use_swiglu_ffn": False,
            "out_features": ["stage2"],
            "stage_names": ["stem", "stage1", "stage2"],
        },
    ),
    (
        "dinov2-with-registers-base",
        "Dinov2WithRegistersModel",
        "dinov2_with_registers",
        {k: v for k, v in (_ENCODER | _IMAGES).items() if k != "intermediate_size"}
        | {"apply_layernorm": True, "drop_path_rate": 0.0, "interpolate_antialias": True}
        | {"interpolate_offset": 0.0, "layerscale_value": 1.0, "mlp_ratio": 2}
        | {"num_register_tokens": 4, "out_features": ["stage2"], "out_indices": [2]}
        | {"reshape_hidden_states": True, "stage_names": ["stem", "stage1", "stage2"]}
        | {"use_swiglu_ffn": False},
    ),
    (
        "swinv2-tiny",
        "Swinv2ForImageClassification",
        "swinv2",
        _IMAGES
        | {
            "image_size": 20,
            "patch_size": 2,
            "window_size": 5,
            "pretrained_window_sizes": [0, 0, 0, 0],
        }
        | {
            "depths": [2, 2],
            "num_heads": [2, 4],
            "embed_dim": 8,
            "mlp_ratio": 1.5,
            "layer_norm_eps": 1e-5,
        }
        | {
            "path_norm": True,
            "encoder_stride": 32,
            "use_absolute_embeddings": False,
            "drop_path_rate": 0.1,
        },
    ),
]


# One model for each kind of error that these files revealed; the others take a minute.
FAST = (
    "gemma-2b",
    "gpt-neox-20b",
    "Cerebras-GPT",
    "dinov2-base-imagenet1k-1-layer",
    "granite-4.0-micro",
)


@pytest.mark.parametrize(
    ("architecture", "model_type", "said"),
    [
        pytest.param(*row[1:], id=row[0], marks=[] if row[0] in FAST else pytest.mark.slow)
        for row in PUBLISHED
    ],
)
def test_published_spellings_are_computed_grown_and_reloaded(
    tmp_path, architecture, model_type, said
):
    said = {
        "architectures": [architecture],
        "model_type": model_type,
        "transformers_version": "4.40.0",
        **said,
    }
    (tmp_path / "a").mkdir()
    file = tmp_path / "a" / "config.json"
    file.write_text(json.dumps(said))
    model = getattr(transformers, architecture)(
        transformers.AutoConfig.from_pretrained(tmp_path / "a")
    )
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.3, 0.2)
    model.save_pretrained(tmp_path / "a")
    file.write_text(json.dumps(said))
    config = checkpoints.open_checkpoint(tmp_path / "a").config
    np.testing.assert_allclose(
        ours(tmp_path / "a"), answered(model, given(config)), rtol=0, atol=1e-4
    )
    run("convert", tmp_path / "a", tmp_path / "same", "--to", "hf")
    assert json.loads((tmp_path / "same" / "config.json").read_text()) == said | FAMILIES[
        architecture
    ].always(config)
    run(
        "grow",
        tmp_path / "a",
        tmp_path / "b",
        "--method",
        "stack",
        "--layers",
        ",".join("4" for _ in config.depths),
    )
    assert_alike(tmp_path / "b")

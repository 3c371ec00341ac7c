"""Small models of `transformers` of every architecture, and their outputs here and there."""

import json
from pathlib import Path

import numpy as np
import pytest
import tiny

from jaxgrow import checkpoints
from jaxgrow.checkpoints import FAMILIES
from jaxgrow.cli import program

torch = pytest.importorskip("torch", reason="pip install 'jaxgrow[interop-test]'")
transformers = pytest.importorskip("transformers", reason="pip install 'jaxgrow[interop-test]'")

_ENCODER = dict(num_hidden_layers=2, hidden_size=12, num_attention_heads=2, intermediate_size=20)
_TEXT = dict(
    vocab_size=11,
    max_position_embeddings=9,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)
_GROUPED = (
    _ENCODER | _TEXT | {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
)
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
_GPT_OSS = _GROUPED | _MIXED | {"num_local_experts": 4, "head_dim": 6}
_OPT = _TEXT | dict(
    num_hidden_layers=2,
    hidden_size=12,
    num_attention_heads=2,
    ffn_dim=20,
    word_embed_proj_dim=12,
    pad_token_id=1,
)
_NEOX = _ENCODER | _TEXT | {"num_attention_heads": 2, "hidden_size": 16}
# Of three layers, the first has global attention. The others see two positions on either side.
# Padding has a zero row in the embedding.
_MODERN = _ENCODER | _TEXT | {"num_hidden_layers": 3, "local_attention": 4, "pad_token_id": 1}
_ROBERTA = _ENCODER | _TEXT | {"pad_token_id": 1, "type_vocab_size": 1}
_DISTIL = _TEXT | dict(n_layers=2, dim=12, n_heads=2, hidden_dim=20, pad_token_id=1)
# Sequences are longer than the four distances on each side that have separate positions.
_DEBERTA = (
    _ENCODER
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
_DEBERTA_OTHER = _DEBERTA | dict(
    share_att_key=False,
    norm_rel_ebd="none",
    position_buckets=-1,
    max_relative_positions=3,
    pos_att_type=["c2p"],
)
_IMAGES = dict(image_size=8, patch_size=4, num_channels=3, num_labels=5)
_DINO = _IMAGES | dict(
    num_hidden_layers=2, hidden_size=12, num_attention_heads=2, mlp_ratio=2, use_mask_token=False
)
_STAGES = dict(image_size=20, patch_size=2, num_channels=3, num_labels=5, window_size=6) | dict(
    pretrained_window_sizes=[0, 0], depths=[2, 2], embed_dim=8, num_heads=[2, 4], mlp_ratio=1.5
)
# The settings of a model other than the defaults of its architecture.
SETTINGS = {
    "BertForMaskedLM": [_ENCODER | _TEXT, _ENCODER | _TEXT | {"tie_word_embeddings": False}],
    "RobertaForMaskedLM": [_ENCODER | _TEXT | {"pad_token_id": 1, "type_vocab_size": 1}],
    "XLMRobertaForMaskedLM": [_ENCODER | _TEXT | {"pad_token_id": 1, "type_vocab_size": 1}],
    "ModernBertForMaskedLM": [
        _MODERN,
        _MODERN
        | {
            "tie_word_embeddings": False,
            "layer_types": ["sliding_attention"] + ["full_attention"] * 2,
        },
    ],
    "GPT2LMHeadModel": [
        dict(
            vocab_size=11,
            n_positions=9,
            n_layer=2,
            n_embd=12,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
        )
        | more
        for more in ({}, {"activation_function": "gelu", "n_inner": 20})
    ],
    "LlamaForCausalLM": [
        _ENCODER | _TEXT | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6},
        _GROUPED | {"attention_bias": True, "rope_parameters": _YARN},
        _GROUPED | {"max_position_embeddings": 5, "rope_parameters": _DYNAMIC},
    ],
    "Qwen2ForCausalLM": [
        _ENCODER | _TEXT | {"num_key_value_heads": 2, "tie_word_embeddings": True},
        _ENCODER
        | _TEXT
        | {
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ],
    "MistralForCausalLM": [
        _ENCODER | _TEXT | {"num_key_value_heads": 2, "sliding_window": None},
        _GROUPED | {"sliding_window": 3},
    ],
    "Qwen3ForCausalLM": [
        _GROUPED | {"head_dim": 6},
        _GROUPED | {"head_dim": 6, "use_sliding_window": True, **_LOCAL},
    ],
    "MixtralForCausalLM": [
        _GROUPED | _MIXED | {"num_local_experts": 4},
        _GROUPED | _MIXED | {"num_local_experts": 2},
    ],
    "Qwen3MoeForCausalLM": [
        _GROUPED
        | _MIXED
        | {"head_dim": 6, "num_experts": 4, "moe_intermediate_size": 12, "norm_topk_prob": normed}
        | more
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
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
            }
        },
    ],
    "OlmoForCausalLM": [_GROUPED],
    "OlmoForSequenceClassification": [_GROUPED | {"pad_token_id": 1}],
    "Qwen2MoeForCausalLM": [_QWEN2_MOE, _QWEN2_MOE | {"norm_topk_prob": True, "qkv_bias": False}],
    "Qwen2MoeForSequenceClassification": [_QWEN2_MOE],
    "GptOssForCausalLM": [
        _GPT_OSS | _LOCAL | {"rope_parameters": _YARN, "swiglu_limit": 0.5},
        _GPT_OSS
        | {
            "sliding_window": 3,
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default"},
        },
    ],
    "GptOssForSequenceClassification": [_GPT_OSS | _LOCAL | {"rope_parameters": _YARN}],
    "GraniteForCausalLM": [
        _GROUPED
        | {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.6,
            "logits_scaling": 2.0,
        },
    ],
    "OPTForCausalLM": [_OPT, _OPT | {"tie_word_embeddings": False, "activation_function": "gelu"}],
    "OPTForSequenceClassification": [_OPT | {"num_labels": 3}],
    "Olmo2ForCausalLM": [_GROUPED],
    "Olmo3ForCausalLM": [
        _GROUPED | _LOCAL,
        _GROUPED | {"sliding_window": 3, "rope_scaling": _YARN},
    ],
    "Phi3ForCausalLM": [
        _GROUPED | {"pad_token_id": 1},
        _GROUPED
        | {"pad_token_id": 1, "hidden_size": 32, "sliding_window": 3}
        | {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 250.0,
                "partial_rotary_factor": 0.5,
            }
        },
        # A sequence of 7 is longer than 4 but not longer than 8. The settings are spelled as in
        # transformers 5 and as in version 4.
        *(
            _GROUPED
            | {
                "pad_token_id": 1,
                "hidden_size": 32,
                "original_max_position_embeddings": n,
                "partial_rotary_factor": 0.5,
            }
            | {key: {"short_factor": [1.0, 1.5], "long_factor": [2.0, 3.5]} | more}
            for n, key, more in (
                (
                    4,
                    "rope_parameters",
                    {"rope_type": "longrope", "rope_theta": 250.0, "partial_rotary_factor": 0.5},
                ),
                (8, "rope_scaling", {"type": "longrope"}),
                (4, "rope_scaling", {"rope_type": "longrope", "attention_factor": 1.25}),
            )
        ),
    ],
    "SmolLM3ForCausalLM": [_GROUPED | {"pad_token_id": 1, "no_rope_layers": [1, 0]}],
    "GPTNeoXForCausalLM": [
        _NEOX,
        _NEOX | {"hidden_act": "gelu_fast"},
        _NEOX
        | {
            "use_parallel_residual": False,
            "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0},
        },
    ],
    "ViTForImageClassification": [_ENCODER | _IMAGES],
    "DeiTForImageClassification": [_ENCODER | _IMAGES],
    "DeiTForImageClassificationWithTeacher": [_ENCODER | _IMAGES],
    "Dinov2ForImageClassification": [
        _DINO,
        _DINO | {"use_swiglu_ffn": True, "hidden_act": "gelu", "layerscale_value": 0.5},
    ],
    # One stage has several windows, some with padding, and one stage is a single window. The second
    # entry is fine-tuned with larger windows.
    "Swinv2ForImageClassification": [_STAGES, _STAGES | {"pretrained_window_sizes": [4, 2]}],
    "BertForSequenceClassification": [_ENCODER | _TEXT | {"num_labels": n} for n in (3, 1)],
    "RobertaForSequenceClassification": [
        _ENCODER | _TEXT | {"pad_token_id": 1, "type_vocab_size": 1}
    ],
    "XLMRobertaForSequenceClassification": [
        _ENCODER | _TEXT | {"pad_token_id": 1, "type_vocab_size": 1, "num_labels": 5}
    ],
    "ModernBertForSequenceClassification": [
        _MODERN | {"num_labels": 3, "classifier_pooling": pooling} for pooling in ("cls", "mean")
    ],
    "GPT2ForSequenceClassification": [
        dict(
            vocab_size=11,
            n_positions=9,
            n_layer=2,
            n_embd=12,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
        )
        | {"pad_token_id": 1, "num_labels": n}
        for n in (3, 1)
    ],
    "LlamaForSequenceClassification": [
        _ENCODER
        | _TEXT
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "pad_token_id": 1}
    ],
    "Qwen2ForSequenceClassification": [
        _ENCODER
        | _TEXT
        | {
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "pad_token_id": 1,
            "num_labels": 3,
        }
    ],
    "MistralForSequenceClassification": [
        _ENCODER
        | _TEXT
        | {"num_key_value_heads": 2, "sliding_window": None, "pad_token_id": 1, "num_labels": 3}
    ],
    "Qwen3ForSequenceClassification": [
        _GROUPED | {"head_dim": 6, "pad_token_id": 1, "num_labels": 3}
    ],
    "MixtralForSequenceClassification": [_GROUPED | _MIXED | {"num_local_experts": 4}],
    "Qwen3MoeForSequenceClassification": [
        _GROUPED | _MIXED | {"head_dim": 6, "num_experts": 4, "moe_intermediate_size": 12}
    ],
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
    "DebertaV2ForMaskedLM": [
        _DEBERTA,
        _DEBERTA_OTHER | {"tie_word_embeddings": False},
        _DEBERTA_OTHER | {"pos_att_type": ["p2c"]},
    ],
    "DebertaV2ForSequenceClassification": [_DEBERTA | {"num_labels": 3}],
    "DebertaV2ForQuestionAnswering": [_DEBERTA],
    "DebertaV2ForTokenClassification": [_DEBERTA | {"num_labels": 3}],
    "DebertaV2Model": [_DEBERTA],
    "BertForTokenClassification": [_ENCODER | _TEXT | {"num_labels": 3}],
    "RobertaForTokenClassification": [_ROBERTA | {"num_labels": 3}],
    "XLMRobertaForTokenClassification": [_ROBERTA | {"num_labels": 4}],
    "ModernBertForTokenClassification": [_MODERN | {"local_attention": 12, "num_labels": 3}],
    "DistilBertForTokenClassification": [_DISTIL | {"num_labels": 3}],
    "BertModel": [_ENCODER | _TEXT],
    "RobertaModel": [_ROBERTA],
    "XLMRobertaModel": [_ROBERTA],
    "ModernBertModel": [_MODERN | {"local_attention": 12}],
    "DistilBertModel": [_DISTIL],
    "ViTModel": [_ENCODER | _IMAGES],
    "Dinov2Model": [_DINO],
    "CLIPVisionModel": [_ENCODER | _IMAGES, _ENCODER | _IMAGES | {"hidden_act": "gelu"}],
    "CLIPVisionModelWithProjection": [_ENCODER | _IMAGES | {"projection_dim": 5}],
    "SiglipVisionModel": [_ENCODER | _IMAGES, _ENCODER | _IMAGES | {"vision_use_head": False}],
    "BertForQuestionAnswering": [_ENCODER | _TEXT],
    "RobertaForQuestionAnswering": [_ENCODER | _TEXT | {"pad_token_id": 1, "type_vocab_size": 1}],
    # At a position that attends only to padding, the output is arbitrary.
    "ModernBertForQuestionAnswering": [_MODERN | {"local_attention": 12}],
}
LENGTHS = np.array([7, 4, 1])  # of classified texts; the remainder is padding


def made(
    folder: Path, architecture: str, which: int = 0, more: dict | None = None, **options
) -> Path:
    """Save a model with `transformers`, with random weights, norms and biases."""
    settings = SETTINGS[architecture][which] | (more or {})
    config = transformers.AutoConfig.for_model(FAMILIES[architecture].model_type, **settings)
    model = getattr(transformers, architecture)(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(
                torch.randn(p.shape, generator=generator) / 4
                + (p.ndim == 1 and name.endswith("weight"))
            )
    model.save_pretrained(folder, **options)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def given(config) -> np.ndarray:
    if hasattr(config, "image"):
        return (
            np.random.default_rng(0)
            .normal(size=(3, config.image, config.image, 3))
            .astype(np.float32)
        )
    # The tokens exclude 0 and 1, which a RoBERTa treats as padding.
    tokens = np.random.default_rng(0).integers(2, 11, (3, 7))
    return (
        tokens if config.head == "tokens" else np.where(np.arange(7) < LENGTHS[:, None], tokens, 1)
    )


def ours(folder: Path) -> np.ndarray:
    config, params = checkpoints.load(folder)
    x = given(config)
    if isinstance(config.example, dict):
        x = {"tokens": x, "mask": x != 1}
    elif config.predicts == "classes" and x.ndim == 2:
        x = {"tokens": x, "lengths": LENGTHS}
    return np.asarray(tiny.forward(config)(params, x))


def theirs(folder: Path) -> np.ndarray:
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    model, told = getattr(transformers, architecture).from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), (
        told
    )
    return answered(model, given(checkpoints.open_checkpoint(folder).config))


def answered(model, x: np.ndarray) -> np.ndarray:
    """Return the output of a `transformers` model."""
    with torch.no_grad():
        if x.ndim == 4:
            out = model.eval()(torch.tensor(x.transpose(0, 3, 1, 2)))
        else:
            out = model.eval()(torch.tensor(x), attention_mask=torch.tensor(x != 1).long())
        if "image_embeds" in out:
            return out.image_embeds.numpy()
        if "last_hidden_state" in out:
            # CLIP computes the norm after the layers only for the class token.
            of_clip = type(model).__name__ == "CLIPVisionModel"
            states = (
                model.post_layernorm(out.last_hidden_state) if of_clip else out.last_hidden_state
            )
            return states.numpy()
    return (
        torch.stack([out.start_logits, out.end_logits], -1) if "start_logits" in out else out.logits
    ).numpy()


def assert_alike(folder: Path) -> np.ndarray:
    found = ours(folder)
    np.testing.assert_allclose(found, theirs(folder), rtol=0, atol=1e-4)
    assert found.std() > 1e-2
    return found


def assert_kept(after: np.ndarray, before: np.ndarray) -> None:
    """Assert that the outputs are the same, where wider hidden states are copies."""
    copies = after.shape[-1] // before.shape[-1]
    np.testing.assert_allclose(after, np.concatenate([before] * copies, -1), rtol=0, atol=1e-4)


def run(*words: object) -> None:
    assert program.main([str(w) for w in words]) == 0


def to(config, layers: int) -> str:
    """Return the value of ``--layers``."""
    return ",".join([str(layers)] * len(config.depths))

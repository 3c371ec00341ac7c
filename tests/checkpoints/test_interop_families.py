"""Every architecture is saved by `transformers`, grown and written here, and loaded again there.

The tolerance of logits is 1e-4, for two implementations in float32.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import tiny
from checkpoints import change, contents, tensors

from jaxgrow import checkpoints, grow, operators
from jaxgrow.checkpoints import FAMILIES
from jaxgrow.cli import program
from jaxgrow.models import EncoderConfig
from jaxgrow.models.upcycling import as_mixture, routed

torch = pytest.importorskip("torch", reason="pip install -e '.[interop-test]'")
transformers = pytest.importorskip("transformers", reason="pip install -e '.[interop-test]'")
pytestmark = pytest.mark.interop

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
TASKS = ("SequenceClassification", "Answering", "TokenClassification")
LENGTHS = np.array([7, 4, 1])  # of classified texts; the remainder is padding
cases = pytest.mark.parametrize(
    ("architecture", "which"),
    [(a, i) for a, models in SETTINGS.items() for i in range(len(models))],
)


def test_every_architecture_is_here():
    assert SETTINGS.keys() == FAMILIES.keys()


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


@cases
def test_read_grown_written_and_read_by_transformers(tmp_path, architecture, which):
    """Cover widening, which preserves the function, deepening, which does not, and the way back.

    De-coalescing widens the model, and coalescing restores it.
    """
    before = assert_alike(made(tmp_path / "a", architecture, which))
    config = checkpoints.open_checkpoint(tmp_path / "a").config
    heads = config.sizes().get("heads", 0)
    # A model without an axis 'heads' has stages, and 'far' gives each stage these groups.
    groups = ",".join(f"{i}+{i + heads}" for i in range(heads)) or "far"
    run("decoalesce", tmp_path / "a", tmp_path / "wide", "--heads", groups)
    assert_kept(assert_alike(tmp_path / "wide"), before)
    run("grow", tmp_path / "a", tmp_path / "deep", "--method", "stack", "--layers", to(config, 5))
    assert np.abs(assert_alike(tmp_path / "deep") - before).max() > 1e-2
    run("coalesce", tmp_path / "wide", tmp_path / "back", "--heads", groups)
    first, last = tensors(tmp_path / "a"), tensors(tmp_path / "back")
    for name in last.keys() - FAMILIES[architecture].copies(config).keys():
        np.testing.assert_allclose(last[name], first[name], rtol=0, atol=1e-6, err_msg=name)
    assert (tmp_path / "deep" / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("architecture", [a for a in SETTINGS if a.endswith(TASKS)])
def test_fine_tuned_models_keep_outputs_under_hypercloning(tmp_path, architecture):
    before = assert_alike(made(tmp_path / "a", architecture))
    sizes = checkpoints.open_checkpoint(tmp_path / "a").sizes()
    wide = {
        f"--{axis}".replace("_", "-"): 2 * sizes[axis]
        for axis in ("embed", "heads", "kv_heads", "mlp")
        if axis in sizes
    }
    words = [word for pair in wide.items() for word in pair]
    run("grow", tmp_path / "a", tmp_path / "b", "--method", "hypercloning", *words)
    np.testing.assert_allclose(assert_alike(tmp_path / "b"), before, rtol=0, atol=1e-4)


@cases
def test_to_orbax_and_back_to_the_bit(tmp_path, architecture, which):
    made(tmp_path / "a", architecture, which)
    run("convert", tmp_path / "a", tmp_path / "orbax", "--to", "orbax")
    run("convert", tmp_path / "orbax", tmp_path / "b", "--to", "hf")
    run("convert", tmp_path / "a", tmp_path / "c", "--to", "hf")
    before, after, direct = (contents(tmp_path / name) for name in "abc")
    config = checkpoints.open_checkpoint(tmp_path / "a").config
    leaves, names = (
        checkpoints.open_checkpoint(tmp_path / "a").leaves,
        FAMILIES[architecture].names(config),
    )
    sizes = config.sizes()
    stored = {
        n.format(layers=i)
        for p, s in names.items()
        for i in s.layers(leaves[p].layers)
        for n in s.of_experts(sizes)
    }
    first, last = tensors(tmp_path / "a"), tensors(tmp_path / "b")
    assert (
        last.keys() == stored | FAMILIES[architecture].copies(config).keys()
        and stored <= first.keys()
    )
    # Gemma stores norm scales minus one. Adding and subtracting one rounds them to 1.2e-7 in
    # float32 and loses nothing in bfloat16.
    rounded = {
        s.name.format(layers=i)
        for s in FAMILIES[architecture].names(config).values()
        if s.moved
        for i in (0, 1)
    }
    assert rounded or after["model.safetensors"] == direct["model.safetensors"]
    for name in stored:
        np.testing.assert_allclose(
            last[name], first[name], rtol=0, atol=1.2e-7 if name in rounded else 0, err_msg=name
        )
    assert json.loads(after["config.json"]) == json.loads(direct["config.json"])
    assert json.loads(after["config.json"]) == json.loads(before["config.json"])


METHODS = [*operators.DEPTH, *operators.WIDTH]


def grown_and_loaded(folder: Path, architecture: str, which: int, method: str) -> bool:
    """Return whether a method can grow a model.

    The written model must have the same logits here and in `transformers`.
    """
    config = checkpoints.open_checkpoint(made(folder / "a", architecture, which)).config
    if method in operators.DEPTH:
        sizes = {name: 2 * n for name, n in config.sizes().items() if name.startswith("layers")}
    else:
        widths = ("embed", "heads", "kv_heads", "mlp")
        sizes = {name: 2 * n for name, n in config.sizes().items() if name.startswith(widths)}
    options: dict[str, list[str]] = {}
    for name, n in sizes.items():
        options.setdefault("--" + name.partition(".")[0].replace("_", "-"), []).append(str(n))
    words = [word for option, each in options.items() for word in (option, ",".join(each))]
    status = program.main(
        ["grow", str(folder / "a"), str(folder / "b"), "--method", method, *words]
    )
    if status == 0:
        assert_alike(folder / "b")
    return status == 0


@pytest.mark.parametrize(
    ("architecture", "method"), [(a, METHODS[i % len(METHODS)]) for i, a in enumerate(SETTINGS)]
)
def test_every_architecture_is_loaded_when_it_has_grown(tmp_path, architecture, method):
    grown_and_loaded(tmp_path, architecture, 0, method)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("architecture", "which"),
    [(a, i) for a, models in SETTINGS.items() if not a.endswith(TASKS) for i in range(len(models))],
)
def test_every_family_is_loaded_when_it_has_grown_by_any_method(
    tmp_path, architecture, which, method
):
    grown_and_loaded(tmp_path, architecture, which, method)


def test_longrope_needs_one_factor_per_pair_of_head_features(tmp_path, capsys):
    """`transformers` uses the width divided by the number of heads as head size."""
    folder = made(tmp_path / "a", "Phi3ForCausalLM", 2)
    before = assert_alike(folder)
    arguments = [
        "grow",
        str(folder),
        str(tmp_path / "b"),
        "--method",
        "hypercloning",
        "--embed",
        "64",
    ]
    assert program.main(arguments) != 0
    assert "--heads 8 fits" in capsys.readouterr().err
    run(*arguments, "--heads", 8, "--kv-heads", 4)
    np.testing.assert_allclose(assert_alike(tmp_path / "b"), before, rtol=0, atol=1e-4)


@cases
def test_sharded_by_transformers(tmp_path, architecture, which):
    made(tmp_path / "a", architecture, which, max_shard_size="3KB")
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 1
    assert_alike(tmp_path / "a")


@cases
def test_a_model_of_ours_becomes_one_of_theirs(tmp_path, architecture, which):
    """Save without an existing ``config.json``."""
    config, params = checkpoints.load(made(tmp_path / "a", architecture, which))
    # Such models classify by the last token, if the padding token is known.
    decides = config.predicts == "classes" and not isinstance(config, EncoderConfig)
    checkpoints.save(
        tmp_path / "b", config, params, settings={"pad_token_id": 1} if decides else None
    )
    assert checkpoints.load(tmp_path / "b")[0] == config
    np.testing.assert_allclose(
        assert_alike(tmp_path / "b"), ours(tmp_path / "a"), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("architecture", SETTINGS)
def test_report_and_inspect(tmp_path, architecture, capsys):
    config = checkpoints.open_checkpoint(made(tmp_path / "a", architecture)).config
    run("grow", tmp_path / "a", tmp_path / "b", "--method", "llama_pro", "--layers", to(config, 3))
    capsys.readouterr()
    run("report", tmp_path / "a", tmp_path / "b")
    assert "max |a - b|" in (said := capsys.readouterr().out)
    if not config.pre_norm:  # a block that adds nothing still applies its norm
        return
    assert float(said.split("max |a - b| ")[1].split(",")[0]) < 1e-5
    run("inspect", tmp_path / "b")
    assert "blocks/attention/query/kernel" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("architecture", "more"),
    [
        ("LlamaForCausalLM", {"hidden_act": "swish"}),
        ("GPT2LMHeadModel", {"activation_function": "gelu_fast"}),
        ("ViTForImageClassification", {"hidden_act": "gelu_python"}),
        # The windows start at the third of two layers, so no layer has one, or they are as long as
        # any sequence.
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "sliding_window": 2, "max_window_layers": 2},
        ),
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0},
        ),
        ("MistralForCausalLM", {"sliding_window": 9}),
        # The spelling before transformers 5.
        (
            "ModernBertForMaskedLM",
            {"global_attn_every_n_layers": 2, "global_rope_theta": 30.0, "local_rope_theta": 9.0},
        ),
    ],
)
def test_settings_that_mean_what_is_computed(tmp_path, architecture, more):
    made(tmp_path / "a", architecture, more=more)
    assert_alike(tmp_path / "a")
    run("grow", tmp_path / "a", tmp_path / "b", "--method", "stack", "--layers", 4)
    assert_alike(tmp_path / "b")


@pytest.mark.parametrize("method", ["lemon", "fpi"])
def test_what_is_grown_is_loaded_or_refused_with_a_size_that_is(tmp_path, method, capsys):
    """Llama's heads must divide the width; other architectures store a separate head size."""
    for architecture in ("LlamaForCausalLM", "Qwen2ForCausalLM", "MistralForCausalLM"):
        folder = made(tmp_path / architecture, architecture)
        arguments = (
            "grow",
            folder,
            tmp_path / f"wide-{architecture}",
            "--method",
            method,
            "--embed",
        )
        if architecture == "LlamaForCausalLM":
            assert program.main([str(a) for a in (*arguments, 18)]) == 1
            assert (
                "only if its 4 heads divide its hidden size 18; --embed 16 or --embed 20 fits"
                in capsys.readouterr().err
            )
            run(*arguments, 20)
        else:
            run(*arguments, 17)
        wide, before = assert_alike(tmp_path / f"wide-{architecture}"), ours(folder)
        assert (np.abs(wide - before).max() < 1e-4) == (method == "lemon")


def test_a_separate_head_is_kept_only_if_the_config_unties_it(tmp_path, capsys):
    """This follows transformers: version 5 keeps such a head, and version 4 drops it."""
    untied = made(tmp_path / "a", "LlamaForCausalLM")
    expected = theirs(untied)
    change(untied, tie_word_embeddings=True)
    assert program.main(["inspect", str(untied)]) == 1
    assert '"tie_word_embeddings" to false' in capsys.readouterr().err
    change(untied, tie_word_embeddings=False)
    run("grow", untied, tmp_path / "b", "--method", "llama_pro", "--layers", 3)
    np.testing.assert_allclose(theirs(tmp_path / "b"), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "architecture", ["BertForSequenceClassification", "GPT2ForSequenceClassification"]
)
def test_labels_and_problem_type_are_kept_if_the_count_fits(tmp_path, architecture):
    folder = made(tmp_path / "a", architecture)
    labels = {"0": "entailment", "1": "neutral", "2": "contradiction"}
    change(
        folder,
        id2label=labels,
        label2id={name: int(i) for i, name in labels.items()},
        problem_type="regression",
    )
    config, params = checkpoints.load(folder)
    checkpoints.save(tmp_path / "b", config, params, like=folder)
    said = json.loads((tmp_path / "b" / "config.json").read_text())
    assert said["id2label"] == labels and said["problem_type"] == "regression"
    one = dict(params) | {"classifier": {k: v[..., :1] for k, v in params["classifier"].items()}}
    checkpoints.save(tmp_path / "c", config.with_head("classes", 1), one, like=folder)
    said = json.loads((tmp_path / "c" / "config.json").read_text())
    assert said["id2label"] == {"0": "LABEL_0"} and said["problem_type"] == "regression"
    assert_alike(tmp_path / "c")
    checkpoints.save(tmp_path / "d", config, params, like=tmp_path / "c")
    assert (
        json.loads((tmp_path / "d" / "config.json").read_text())["problem_type"]
        == "single_label_classification"
    )


@pytest.mark.parametrize(
    ("before", "head", "after"),
    [
        ("BertForMaskedLM", "classes", "BertForSequenceClassification"),
        ("XLMRobertaForMaskedLM", "classes", "XLMRobertaForSequenceClassification"),
        ("RobertaForMaskedLM", "spans", "RobertaForQuestionAnswering"),
        ("Qwen2ForCausalLM", "classes", "Qwen2ForSequenceClassification"),
        ("GPT2ForSequenceClassification", "tokens", "GPT2LMHeadModel"),
    ],
)
def test_changing_the_head_changes_the_saved_architecture(tmp_path, before, head, after):
    """Other settings that `save` copies, such as the ids of special tokens, stay unchanged."""
    folder = made(tmp_path / "a", before)
    change(folder, pad_token_id=1, their_own="key")
    config = checkpoints.load(folder)[0].with_head(head)
    checkpoints.save(tmp_path / "b", config, tiny.params(config, dtype="float32"), like=folder)
    said = json.loads((tmp_path / "b" / "config.json").read_text())
    assert said["architectures"] == [after] and said["their_own"] == "key"
    assert checkpoints.load(tmp_path / "b")[0] == config
    assert_alike(tmp_path / "b")


def test_a_model_without_padding_classifies_a_single_text(tmp_path):
    """transformers refuses several texts, because it cannot find their ends."""
    config, params = checkpoints.load(made(tmp_path / "a", "GPT2ForSequenceClassification"))
    checkpoints.save(tmp_path / "b", config, params)
    model = transformers.GPT2ForSequenceClassification.from_pretrained(tmp_path / "b").eval()
    text = given(config)[:1]
    with torch.no_grad():
        np.testing.assert_allclose(
            model(torch.tensor(text)).logits, ours(tmp_path / "b")[:1], rtol=0, atol=1e-4
        )
        with pytest.raises(ValueError, match="padding"):
            model(torch.tensor(given(config)))


def test_an_unsupported_head_is_reported_with_its_base_model(tmp_path, capsys):
    folder = made(tmp_path / "a", "BertForSequenceClassification")
    change(folder, architectures=["BertForMultipleChoice"])
    assert program.main(["inspect", str(folder)]) == 1
    assert "another head; load it as BertModel in transformers" in capsys.readouterr().err


def test_a_span_has_two_ends(tmp_path, capsys):
    folder = made(tmp_path / "a", "BertForQuestionAnswering")
    change(folder, id2label={"0": "a", "1": "b", "2": "c"})
    assert program.main(["inspect", str(folder)]) == 1
    assert "head=spans needs classes=2, not 3" in capsys.readouterr().err


def test_the_published_head_of_a_deberta_keeps_its_names(tmp_path):
    """The published files have the head that `transformers` reads only if ``legacy`` is false."""
    before = assert_alike(made(tmp_path / "a", "DebertaV2ForMaskedLM", more={"legacy": False}))
    run("convert", tmp_path / "a", tmp_path / "orbax", "--to", "orbax")
    run("convert", tmp_path / "orbax", tmp_path / "b", "--to", "hf")
    first, last = (contents(tmp_path / name) for name in "ab")
    assert json.loads(first["config.json"]) == json.loads(last["config.json"])
    assert tensors(tmp_path / "a").keys() == tensors(tmp_path / "b").keys()
    assert "lm_predictions.lm_head.dense.weight" in tensors(tmp_path / "b")
    wide = ("--embed", 24, "--heads", 4, "--mlp", 40)
    run("grow", tmp_path / "b", tmp_path / "wide", "--method", "hypercloning", *wide)
    assert_kept(assert_alike(tmp_path / "wide"), before)


def test_bare_models_are_told_what_they_lack(tmp_path, capsys):
    """A GPT-2 with a tied head only lacks the name of its architecture.

    A head other than the stored one would have random weights.
    """
    transformers.GPT2Model(
        transformers.GPT2Config(**SETTINGS["GPT2LMHeadModel"][0], initializer_range=0.3)
    ).save_pretrained(tmp_path / "gpt2")
    made(tmp_path / "llama", "LlamaForCausalLM")
    change(tmp_path / "llama", architectures=["LlamaModel"])
    assert program.main(["inspect", str(tmp_path / "gpt2")]) == 1
    assert 'a model without its head; write ["GPT2LMHeadModel"] there' in capsys.readouterr().err
    change(tmp_path / "gpt2", architectures=["GPT2LMHeadModel"])
    assert_alike(tmp_path / "gpt2")
    assert program.main(["inspect", str(tmp_path / "llama")]) == 1
    said = capsys.readouterr().err
    assert (
        "a model without its head; give the folder of the LlamaForCausalLM from which this model was extracted"
        in said
    )


@pytest.mark.parametrize(
    ("architecture", "prefix"),
    [
        ("BertModel", "bert."),
        ("ViTModel", "vit."),
        ("CLIPVisionModel", "vision_model."),
        ("XLMRobertaModel", "roberta."),
    ],
)
def test_headless_models_are_read_with_or_without_prefix(tmp_path, architecture, prefix):
    """Older versions, and models with a head, use other tensor names.

    ``config.json`` does not indicate which names a file has.
    """
    folder = made(tmp_path / "a", architecture)
    before = assert_alike(folder)
    from safetensors.numpy import save_file

    named = {prefix + name: x for name, x in tensors(folder).items() if "pooler" not in name}
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    np.testing.assert_allclose(ours(folder), before, rtol=0, atol=1e-6)
    run("grow", folder, tmp_path / "b", "--method", "stack", "--layers", 4)
    assert not any("pooler" in name for name in tensors(tmp_path / "b"))


@pytest.mark.parametrize("architecture", ["BertModel", "ViTModel", "SiglipVisionModel"])
def test_the_pooler_grows_with_the_model(tmp_path, architecture):
    """Its output equals the output of `transformers` and is preserved when the model grows."""

    def ours_and_theirs(folder: Path) -> np.ndarray:
        config, params = checkpoints.load(folder)
        x = given(config)
        inputs = x if x.ndim == 4 else {"tokens": x, "mask": x != 1}
        _, kept = config.module.apply({"params": params}, inputs, mutable=["intermediates"])
        model = getattr(transformers, architecture).from_pretrained(folder).eval()
        with torch.no_grad():
            if x.ndim == 4:
                out = model(torch.tensor(x.transpose(0, 3, 1, 2)))
            else:
                out = model(torch.tensor(x), attention_mask=torch.tensor(x != 1).long())
        (found,) = kept["intermediates"]["pooled"]
        np.testing.assert_allclose(found, out.pooler_output.numpy(), rtol=0, atol=1e-4)
        return np.asarray(found)

    before = ours_and_theirs(made(tmp_path / "a", architecture))
    words = ("--embed", 24, "--heads", 4, "--mlp", 40)
    run("grow", tmp_path / "a", tmp_path / "b", "--method", "hypercloning", *words)
    assert_kept(ours_and_theirs(tmp_path / "b"), before)


def test_only_even_copies_preserve_hidden_state_models(tmp_path, capsys):
    """No head compensates for features that have more copies than others."""
    folder = made(tmp_path / "a", "ViTModel")
    for embed, said in ((24, "the function is preserved"), (18, "the function is changed")):
        run(
            "grow",
            folder,
            tmp_path / f"b{embed}",
            "--method",
            "lemon",
            "--embed",
            embed,
            "--heads",
            embed // 6,
        )
        assert said in capsys.readouterr().out
    assert program.main(["report", str(folder), str(tmp_path / "b24")]) == 1
    assert "the hidden states have 12 and 24 features" in capsys.readouterr().err


@pytest.mark.parametrize("published", [False, True])
def test_the_text_model_of_a_multimodal_gemma_grows_alone(tmp_path, published, capsys):
    """Its logits on text equal the full model's; a published ``text_config`` omits defaults."""
    text = SETTINGS["Gemma3ForCausalLM"][0] | {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "pad_token_id": 0,
    }
    vision = _ENCODER | {"num_hidden_layers": 1, "image_size": 8, "patch_size": 4}
    special = {
        "mm_tokens_per_image": 4,
        "image_token_index": 10,
        "boi_token_index": 8,
        "eoi_token_index": 9,
    }
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, **special)
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path / "a")
    if published:
        said = json.loads((tmp_path / "a" / "config.json").read_text())
        for key in ("num_attention_heads", "num_key_value_heads"):
            del said["text_config"][key]
        change(tmp_path / "a", text_config=said["text_config"])
    tokens = np.random.default_rng(0).integers(2, 8, (3, 7))
    with torch.no_grad():
        before = model(
            torch.tensor(tokens), attention_mask=torch.ones(3, 7, dtype=torch.long)
        ).logits.numpy()
    words = ("--method", "hypercloning", "--embed", 32, "--heads", 16, "--kv-heads", 8)
    run("grow", tmp_path / "a", tmp_path / "b", *words)
    assert "Only its text model, a Gemma3ForCausalLM, is read" in capsys.readouterr().out
    config, params = checkpoints.load(tmp_path / "b")
    np.testing.assert_allclose(tiny.forward(config)(params, tokens), before, rtol=0, atol=1e-4)
    assert_alike(tmp_path / "b")


@pytest.mark.parametrize(
    ("model", "tower"),
    [("CLIPModel", "CLIPVisionModelWithProjection"), ("SiglipModel", "SiglipVisionModel")],
)
def test_a_model_of_images_and_texts_is_refused_with_its_tower(tmp_path, model, tower, capsys):
    folder = made(tmp_path / "a", "CLIPVisionModel")
    change(folder, architectures=[model], model_type=model.removesuffix("Model").lower())
    assert program.main(["inspect", str(folder)]) == 1
    assert (
        f"load its vision tower as {tower} in transformers, and save it" in capsys.readouterr().err
    )


def test_a_swin_without_some_layers_and_units_of_its_stages(tmp_path, capsys):
    folder = made(tmp_path / "a", "Swinv2ForImageClassification", more={"depths": [4, 2]})
    np.save(tmp_path / "images.npy", given(checkpoints.open_checkpoint(folder).config))
    assert (
        program.main(
            ["grow", str(folder), str(tmp_path / "b"), "--method", "stack", "--layers", "8"]
        )
        == 1
    )
    assert (
        "this model has 2 stages; give one size per stage, such as --layers 8,8"
        in capsys.readouterr().err
    )
    run(
        "prune",
        folder,
        tmp_path / "b",
        "--layers",
        "2,1",
        "--mlp",
        "6,12",
        "--data",
        tmp_path / "images.npy",
    )
    assert_alike(tmp_path / "b")


def test_a_dinov2_of_fewer_layers_has_no_features_of_others(tmp_path):
    """``config.json`` names the last stage.

    The token for patches that pre-training masks is omitted.
    """
    folder = made(tmp_path / "a", "Dinov2ForImageClassification", more={"use_mask_token": True})
    run("coalesce", folder, tmp_path / "b", "--layers", "0+1")
    assert_alike(tmp_path / "b")
    assert json.loads((tmp_path / "b" / "config.json").read_text())["out_features"] == ["stage1"]


@pytest.mark.parametrize(
    ("architecture", "becomes"),
    [
        ("LlamaForCausalLM", "MixtralForCausalLM"),
        ("MistralForCausalLM", "MixtralForCausalLM"),
        ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
        ("MistralForSequenceClassification", "MixtralForSequenceClassification"),
    ],
)
def test_upcycling_a_dense_model_preserves_its_outputs(tmp_path, architecture, becomes, capsys):
    """Each expert is a copy of the MLP, router noise breaks ties, and the gates add up to one."""
    window = {"sliding_window": 3} if architecture == "MistralForCausalLM" else {}
    before = assert_alike(
        made(tmp_path / "a", architecture, more={"intermediate_size": 24, **window})
    )
    run(
        "grow",
        tmp_path / "a",
        tmp_path / "b",
        "--method",
        "upcycle",
        "--experts",
        8,
        "--active",
        2,
        "--seed",
        3,
    )
    assert "the function is preserved" in capsys.readouterr().out
    said = json.loads((tmp_path / "b" / "config.json").read_text())
    assert said["architectures"] == [becomes] and said["num_experts_per_tok"] == 2
    np.testing.assert_allclose(assert_alike(tmp_path / "b"), before, rtol=0, atol=1e-4)
    one, single = as_mixture(*checkpoints.load(tmp_path / "a"))
    _, params = checkpoints.load(tmp_path / "b")
    expected = routed(
        grow(operators.upcycle(one.sizes(), {"experts": 8}), single, one.axes()), one.axes(), 3
    )
    assert tiny.distance(params, expected) == 0
    assert params["blocks"]["mlp"]["router"]["kernel"].std() == pytest.approx(0.02, rel=0.3)
    if architecture != "LlamaForCausalLM":
        return
    finer = ("--method", "virtual_groups", "--experts", 8, "--mlp", 12, "--active")
    run("grow", tmp_path / "a", tmp_path / "c", *finer, 4)
    np.testing.assert_allclose(assert_alike(tmp_path / "c"), before, rtol=0, atol=1e-4)
    run("grow", tmp_path / "a", tmp_path / "d", *finer, 3)
    assert "the function is changed" in capsys.readouterr().out.splitlines()[-1]
    # With three active experts, the choice between two equal gates is arbitrary.
    assert np.abs(ours(tmp_path / "d") - before).max() > 1e-3


def test_what_no_mixture_stores_is_told(tmp_path, capsys):
    made(tmp_path / "Qwen3ForCausalLM", "Qwen3ForCausalLM", 1)  # a window in every other layer
    for architecture, words, told in (
        (
            "Qwen3ForCausalLM",
            "upcycle --experts 8",
            "Qwen3MoeForCausalLM has no setting for kinds sf (it would be s)",
        ),
        (
            "Qwen2ForCausalLM",
            "upcycle --experts 8",
            "MixtralForCausalLM has no setting for qkv_bias True",
        ),
        (
            "GPT2LMHeadModel",
            "upcycle --experts 8",
            "a dense decoder of the Llama kind, but this GPT2Config",
        ),
        ("MixtralForCausalLM", "upcycle --experts 8", "has 4 experts already"),
        (
            "GPTNeoXForCausalLM",
            "upcycle --experts 8",
            "experts can be made of gated MLPs without biases",
        ),
        ("BertForMaskedLM", "virtual_groups --experts 4 --mlp 4", "but this BERTConfig is none"),
        (
            "Swinv2ForImageClassification",
            "virtual_groups --experts 4 --mlp 4",
            "but this SwinConfig is none",
        ),
        (
            "ModernBertForMaskedLM",
            "virtual_groups --experts 4",
            "no architecture stores a ModernBERTConfig that predicts",
        ),
        (
            "LlamaForCausalLM",
            "upcycle --experts 2 --active 3",
            "--active 3: each token is routed to at least 1 and at most 2 experts",
        ),
        (
            "LlamaForCausalLM",
            "upcycle --experts 8 --active 0",
            "--active 0: each token is routed to at least 1 and at most 8 experts",
        ),
        (
            "LlamaForCausalLM",
            "upcycle --experts 2000000",
            "--experts 2000000: the maximum is 1,048,576",
        ),
        (
            "LlamaForCausalLM",
            "upcycle --experts 8 --noise 10",
            "--noise does not apply to methods that create experts",
        ),
        (
            "LlamaForCausalLM",
            "upcycle",
            "upcycle requires the number of experts, such as --experts 8",
        ),
        (
            "LlamaForCausalLM",
            "stack --layers 4 --experts 8",
            "--experts applies to the methods upcycle and virtual_groups only",
        ),
    ):
        if not (tmp_path / architecture).exists():
            made(tmp_path / architecture, architecture)
        arguments = [
            "grow",
            str(tmp_path / architecture),
            str(tmp_path / "b"),
            "--method",
            *words.split(),
        ]
        assert program.main(arguments) == (
            2 if told.startswith(("--", "upcycle requires")) else 1
        ), words
        assert told in capsys.readouterr().err, words
    assert not (tmp_path / "b").exists()


def test_a_pooler_that_nobody_asks(tmp_path):
    """Some saved ViT folders contain an unused pooler."""
    from safetensors.numpy import save_file

    folder = made(tmp_path / "a", "ViTForImageClassification")
    pooler = {
        "vit.pooler.dense.weight": np.ones((12, 12), np.float32),
        "vit.pooler.dense.bias": np.ones(12, np.float32),
    }
    save_file(tensors(folder) | pooler, folder / "model.safetensors", {"format": "pt"})
    run("grow", folder, tmp_path / "b", "--method", "stack", "--layers", 4)
    assert_alike(tmp_path / "b")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_dtype_that_config_json_says_is_that_of_the_tensors(tmp_path, dtype):
    folder = made(tmp_path / "a", "LlamaForCausalLM")
    run("convert", folder, tmp_path / "half", "--dtype", "float16")
    run("convert", tmp_path / "half", tmp_path / "b", "--dtype", dtype)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "b", dtype="auto")
    assert model.dtype == getattr(torch, dtype)
    np.testing.assert_allclose(ours(tmp_path / "half"), ours(folder), rtol=0, atol=1e-2)


def test_a_gemma_in_bfloat16_comes_back_to_the_bit(tmp_path):
    """Includes the norms: the stored weights minus one are kept in a wider type in jaxgrow."""
    made(tmp_path / "a", "Gemma2ForCausalLM")
    model = transformers.Gemma2ForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "half")
    run("convert", tmp_path / "half", tmp_path / "orbax", "--to", "orbax")
    run("convert", tmp_path / "orbax", tmp_path / "back", "--to", "hf")
    before, after = tensors(tmp_path / "half"), tensors(tmp_path / "back")
    for name in after:
        assert before[name].dtype == after[name].dtype
        np.testing.assert_array_equal(before[name], after[name], err_msg=name)


@pytest.mark.third_party
def test_a_swin_of_timm_has_the_same_logits(tmp_path):
    """timm fuses queries, keys and values, and merges patches at the start of the next stage.

    Windows divide the image here. Otherwise, timm shifts before it pads the windows, and
    `transformers` shifts afterwards.
    """
    timm = pytest.importorskip("timm.models.swin_transformer_v2", reason="pip install timm")
    folder = made(tmp_path / "a", "Swinv2ForImageClassification", more={"window_size": 5})
    options = {
        "img_size": 20,
        "patch_size": 2,
        "window_size": 5,
        "embed_dim": 8,
        "mlp_ratio": 1.5,
        "num_classes": 5,
    }
    model = timm.SwinTransformerV2(
        **options, depths=(2, 2), num_heads=(2, 4), pretrained_window_sizes=(0, 0)
    ).eval()
    named, found = tensors(folder), {}
    for name, tensor in named.items():
        for old, new in TIMM.items():
            name = name.replace(old, new)
        if "downsample" in name:
            name = name.replace("layers.0", "layers.1")
        found[name] = torch.tensor(tensor)
    for block in {name.rpartition("query")[0] for name in found if "query" in name}:
        parts = [found.pop(f"{block}{part}.weight") for part in ("query", "key", "value")]
        found[f"{block}qkv.weight"] = torch.cat(parts)
        for part in "query", "value":
            found[f"{block}{part[0]}_bias"] = found.pop(f"{block}{part}.bias")
    told = model.load_state_dict(found, strict=False)
    assert not told.unexpected_keys and all(
        "relative" in key or "k_bias" in key for key in told.missing_keys
    ), told
    config, params = checkpoints.load(folder)
    with torch.no_grad():
        expected = model(torch.tensor(given(config).transpose(0, 3, 1, 2))).numpy()
    np.testing.assert_allclose(
        tiny.forward(config)(params, given(config)), expected, rtol=0, atol=1e-4
    )


TIMM = {
    "swinv2.embeddings.patch_embeddings.projection": "patch_embed.proj",
    "swinv2.embeddings.norm": "patch_embed.norm",
    "swinv2.encoder.": "",
    "swinv2.layernorm": "norm",
    "classifier": "head.fc",
    "attention.self.continuous_position_bias_mlp": "attn.cpb_mlp",
    "attention.self.": "attn.",
    "attention.output.dense": "attn.proj",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
}


@pytest.mark.parametrize(
    ("architecture", "more"),
    [
        ("ModernBertForMaskedLM", {}),
        ("ModernBertForSequenceClassification", {}),
        ("BertForMaskedLM", {"tie_word_embeddings": False}),
        ("GemmaForCausalLM", {}),
        ("MixtralForCausalLM", {}),
    ],
)
def test_the_size_that_is_told_is_that_of_the_tensors(tmp_path, architecture, more, capsys):
    """Parameters are counted as in `transformers`, and bytes as on disk, also in half precision."""
    folder = made(tmp_path / "a", architecture, more=more)
    model = getattr(transformers, architecture).from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "half")
    capsys.readouterr()
    run(
        "grow",
        tmp_path / "half",
        tmp_path / "b",
        "--method",
        "stack",
        "--layers",
        6,
        "--dry-run",
        "--json",
    )
    dry = json.loads(capsys.readouterr().out)
    run("grow", tmp_path / "half", tmp_path / "b", "--method", "stack", "--layers", 6, "--json")
    wet = json.loads(capsys.readouterr().out)
    stored = tensors(tmp_path / "b")
    assert dry["bytes"] == wet["bytes"] == sum(x.nbytes for x in stored.values())
    grown = getattr(transformers, architecture).from_pretrained(tmp_path / "b")
    unused = {"cls.predictions.bias"} if more else set()  # a separate decoder has another bias
    expected = sum(p.numel() for name, p in grown.named_parameters() if name not in unused)
    assert dry["parameters"] == wet["parameters"] == expected


@pytest.mark.parametrize(
    ("architecture", "more", "kinds"),
    [
        ("Gemma2ForCausalLM", {"num_hidden_layers": 26, "layer_types": None}, "sf" * 7),
        (
            "Gemma3ForCausalLM",
            {"num_hidden_layers": 26, "layer_types": None},
            "sss" + "fssss" + "sfsss",
        ),
        ("ModernBertForMaskedLM", {"num_hidden_layers": 22}, "fss" * 3 + "fs"),
    ],
)
def test_layers_are_paired_with_those_of_their_kind(tmp_path, architecture, more, kinds, capsys):
    folder = made(tmp_path / "a", architecture, more=more)
    arguments = ("coalesce", folder, tmp_path / "b", "--layers")
    for groups in ("far", "adjacent"):
        assert program.main([str(a) for a in (*arguments, groups)]) != 0
        assert (
            "to coalesce layers of one kind, use --layers alike or your own groups"
            in capsys.readouterr().err
        )
    run(*arguments, "alike")
    assert_alike(tmp_path / "b")
    assert checkpoints.open_checkpoint(tmp_path / "b").config.layer_kinds == kinds
    groups = json.loads((tmp_path / "b" / "jaxgrow.json").read_text())["arguments"]["layers"]
    run(
        "decoalesce",
        tmp_path / "b",
        tmp_path / "c",
        "--layers",
        ",".join("+".join(map(str, g)) for g in groups),
    )
    assert_alike(tmp_path / "c")
    first, last = (checkpoints.open_checkpoint(tmp_path / name).config for name in "ac")
    assert last.layer_kinds == first.layer_kinds

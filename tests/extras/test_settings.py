"""Every setting of ``config.json`` has the same meaning as in `transformers`, or is refused."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging.version import Version

from jaxgrow import checkpoints
from jaxgrow.checkpoints import CheckpointError
from jaxgrow.extras.families import misfits

torch = pytest.importorskip("torch", reason="pip install -e '.[interop-test]'")
transformers = pytest.importorskip("transformers", reason="pip install -e '.[interop-test]'")
pytestmark = pytest.mark.interop
from transformers_models import SETTINGS, answered, given, made, ours  # noqa: E402

# Keys that `transformers` reads, or once read, although the config class does not define them.
UNDEFINED = """
is_causal is_decoder add_cross_attention position_embedding_type use_bidirectional_attention
rope_parameters rope_scaling rope_theta partial_rotary_factor original_max_position_embeddings
rotary_pct rotary_emb_base rope_local_base_freq sliding_window sliding_window_pattern
layer_types use_sliding_window max_window_layers no_rope_layers head_dim num_key_value_heads
attention_bias mlp_bias attn_logit_softcapping final_logit_softcapping query_pre_attn_scalar
hidden_act hidden_activation rms_norm_eps layer_norm_eps tie_word_embeddings
""".split()  # noqa: SIM905
# Keys of the saved class, and of the outputs that `transformers` returns besides the logits.
UNCHANGED = {"architectures", "model_type", "dtype", "transformers_version"}
UNCHANGED |= {"return_dict", "output_hidden_states"}
_ROPE = {"rope_theta": 77.0, "factor": 2.0}
_BEFORE = {**_ROPE, "original_max_position_embeddings": 4}
_BETAS = {"beta_fast": 2, "beta_slow": 0.5, "truncate": False}
_LONG, _LINEAR = [2.0, 3.0, 4.0], {"rope_type": "linear", **_ROPE}
_ROPES = (
    {"rope_type": "default", "rope_theta": 77.0},
    {"rope_type": "default", "rope_theta": 77.0, "partial_rotary_factor": 0.5},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "linear", **_BEFORE, "attention_factor": 2.0},
    {"rope_type": "dynamic", **_ROPE},
    {"rope_type": "yarn", **_BEFORE},
    {"rope_type": "yarn", **_BEFORE, "attention_factor": 0.7, **_BETAS},
    {"rope_type": "yarn", **_BEFORE, "mscale": 2.0, "mscale_all_dim": 0.5},
    {"rope_type": "llama3", **_BEFORE, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "llama3", **_ROPE, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0], "long_factor": _LONG, **_BEFORE},
    {"full_attention": _LINEAR, "sliding_attention": {"rope_type": "default"}},
    {"full_attention": {"rope_type": "default"}, "sliding_attention": _LINEAR},
)
_GELUS = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python")
_ACTIVATIONS = ("relu", *_GELUS, "silu", "quick_gelu", None)
_TYPES = ("full_attention", "sliding_attention")
_PARTS = (0.25, 0.5, 1.0, None)
_VALUES: dict[str, tuple[Any, ...]] = {
    "rope_parameters": (*_ROPES, {}, None),
    "rope_scaling": (*_ROPES, {}, None),
    "layer_types": (*([kind] * 2 for kind in _TYPES), list(_TYPES), list(_TYPES[::-1]), None),
    "partial_rotary_factor": _PARTS,
    "rotary_pct": _PARTS,
    "is_causal": (True, False),
    "original_max_position_embeddings": (4, 100, None),
    "classifier_pooling": ("cls", "mean"),
    **dict.fromkeys(("rope_theta", "rotary_emb_base", "rope_local_base_freq"), (77.0, 10, None)),
    **dict.fromkeys(("global_rope_theta", "local_rope_theta"), (77.0, 10)),
    **dict.fromkeys(("sliding_window", "local_attention"), (1, 2, 3, 100, None)),
    "sliding_window_pattern": (1, 2, 3, 100, None),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (0.5, 2, 0.0, None)),
    **dict.fromkeys(("hidden_act", "hidden_activation"), _ACTIVATIONS),
    **dict.fromkeys(("activation_function", "classifier_activation"), _ACTIVATIONS),
}


def values(key: str, value: Any) -> Iterator[Any]:
    """Yield other values of a key."""
    if key in _VALUES:
        other = list(_VALUES[key])
    elif isinstance(value, bool):
        other = [not value, None]
    elif isinstance(value, int):
        other = [value + 1, max(1, value - 1), 2 * value, 0, None]
    elif isinstance(value, float):
        other = [1.5 * value + 0.25, 0.0, None]
    elif isinstance(value, list):
        other = [value[::-1], [3] * len(value), value[:-1], None]
    else:
        other = [True, False, 1, 3, 0.5, None]
    for x in other:
        if x != value or type(x) is not type(value):
            yield x


def changes(said: dict[str, Any], cls: type) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a description of the change and a ``config.json`` that differs in one key."""
    known = {f.name: f.default for f in dataclasses.fields(cls)}
    for key in dict.fromkeys((*said, *known, *UNDEFINED)):
        if key in UNCHANGED:
            continue
        if key in said:
            yield f"without {key}", {k: v for k, v in said.items() if k != key}
        for x in values(key, said.get(key, known.get(key))):
            yield f"{key}: {x}", {**said, key: x}


def compared(
    folder: Path, said: dict[str, Any], weights: dict[str, Any], known: dict[Any, np.ndarray]
) -> float | None:
    """Return the largest distance between our logits and the logits of `transformers`.

    Returns None if one of the two refuses the settings. ``known`` holds our logits by config.
    """
    (folder / "config.json").write_text(json.dumps(said))
    try:
        source = checkpoints.open_checkpoint(folder)
    except CheckpointError:
        return None
    if any("without a head" in note for note in source.notes):
        return None  # `transformers` would draw a head that the files do not have
    config = source.config
    try:
        about = transformers.AutoConfig.from_pretrained(folder)
        model = getattr(transformers, said["architectures"][0])(about)
        model.load_state_dict(weights)
        theirs = answered(model, given(config))
    except Exception:  # any setting that `transformers` does not compute
        return None
    if config not in known:
        known[config] = ours(folder)
    found = known[config]
    if found.shape != theirs.shape:
        return np.inf
    tokens = given(config)
    # At padding that sees only padding, the output is arbitrary.
    seen = tokens != 1 if found.shape[:2] == tokens.shape else ...
    far = np.abs(found - theirs)[seen]
    # Padding that sees no key has an attention output of 0, which a norm with an epsilon of 0 makes
    # NaN in `transformers`. The first text of a classifier has no padding.
    whole = slice(1) if said.get("rms_norm_eps") == 0 and found.ndim == 2 else slice(None)
    return float(far[whole].max())


def weights_of(folder: Path, architecture: str) -> dict[str, Any]:
    return getattr(transformers, architecture).from_pretrained(folder).state_dict()


FOUND = [
    ("LlamaForCausalLM", {"is_causal": False}),
    ("BertForMaskedLM", {"is_causal": True}),
    ("MistralForCausalLM", {"layer_types": ["full_attention"] * 2, "sliding_window": 3}),
    ("MixtralForCausalLM", {"layer_types": ["full_attention"] * 2, "sliding_window": 3}),
    ("Phi3ForCausalLM", {"layer_types": ["full_attention"] * 2, "sliding_window": 3}),
    ("Qwen3ForCausalLM", {"partial_rotary_factor": 0.5}),
    ("Gemma3ForCausalLM", {"attn_logit_softcapping": 0.5}),
    ("LlamaForCausalLM", {"rope_scaling": _ROPES[8], "original_max_position_embeddings": 9}),
    ("LlamaForCausalLM", {"rope_scaling": _ROPES[6]}),
    ("GPTNeoXForCausalLM", {"rope_theta": 77.0}),
    ("GPTNeoXForCausalLM", {"head_dim": 3}),
    ("ModernBertForMaskedLM", {"sliding_window": 1}),
    ("Gemma3ForCausalLM", {"final_logit_softcapping": 0.0}),
    ("Dinov2ForImageClassification", {"layerscale_value": 0.0}),
    pytest.param("GptOssForCausalLM", {"rope_parameters": {}}, marks=pytest.mark.skipif(
        Version(transformers.__version__) < Version("5.20"), reason="earlier versions compute it otherwise")),
    ("GraniteForCausalLM", {"logits_scaling": 0.0}),
    ("GptOssForCausalLM", {"swiglu_limit": 0.0}),
    ("Qwen2ForCausalLM", {"rope_parameters": {"rope_theta": 5.0}, "rope_scaling": _ROPES[3]}),
    ("Olmo3ForCausalLM", {"layer_types": ["sliding_attention"] * 2, "sliding_window": 100, "rope_scaling": _ROPES[5]}),
    ("ModernBertForMaskedLM", {"layer_types": ["sliding_attention"] * 3, "local_attention": 100}),
    ("GPTNeoXForCausalLM", {"rope_parameters": {"rope_theta": 77.0, "partial_rotary_factor": 0.7}}),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "more"), FOUND, ids=str)
def test_settings_that_were_once_computed_otherwise(tmp_path, architecture, more):
    folder = made(tmp_path, architecture)
    said = json.loads((folder / "config.json").read_text())
    far = compared(folder, {**said, **more}, weights_of(folder, architecture), {})
    assert far is None or far < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("architecture", SETTINGS)
def test_every_setting_matches_transformers_or_is_refused(tmp_path, monkeypatch, architecture):
    # Half of the time would be the search for the cause of each refusal.
    monkeypatch.setattr(misfits, "cause_of_misfits", lambda *_: "")
    folder = made(tmp_path, architecture)
    said = json.loads((folder / "config.json").read_text())
    weights = weights_of(folder, architecture)
    cls = type(transformers.AutoConfig.from_pretrained(folder))
    known: dict[Any, np.ndarray] = {}
    found = {what: compared(folder, other, weights, known) for what, other in changes(said, cls)}
    assert {what: far for what, far in found.items() if far is not None and not far < 1e-4} == {}
    assert sum(far is not None for far in found.values()) > 20

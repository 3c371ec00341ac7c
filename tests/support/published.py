"""Small random models in the spelling of public ``config.json`` files, without PyTorch."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tiny

from jaxgrow import checkpoints
from jaxgrow.checkpoints import FAMILIES
from jaxgrow.checkpoints.hf import storage
from jaxgrow.checkpoints.source import leaves_by_path
from jaxgrow.cli import program

SIZES: dict[str, Any] = {
    **dict(vocab_size=11, hidden_size=16, intermediate_size=20, num_hidden_layers=4, head_dim=4),
    **dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16),
}
_SHORT = {"vocab_size": 11, "max_position_embeddings": 16}
_PLAIN = {"head_dim": None}
_LOCAL = {"sliding_window": 3, "query_pre_attn_scalar": 4}
_MIXED = {"num_experts_per_tok": 2, "moe_intermediate_size": 12, "num_experts": 4}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_OWN = {
    "OPTForCausalLM": {"ffn_dim": 20},
    "GPTNeoXForCausalLM": _PLAIN | {"rotary_pct": 0.5},
    "OlmoForCausalLM": _PLAIN,
    "Olmo2ForCausalLM": _PLAIN,
    "Olmo3ForCausalLM": _PLAIN | {"sliding_window": 3},
    "Gemma2ForCausalLM": _LOCAL,
    "Phi3ForCausalLM": _PLAIN | {"pad_token_id": 0},
    "GraniteForCausalLM": _PLAIN,
    "GraniteMoeHybridForCausalLM": _PLAIN | {"layer_types": ["attention"] * 4, "num_local_experts": 0,
        "shared_intermediate_size": 20, "position_embedding_type": "rope"},
    "GptOssForCausalLM": _EXPERTS | {"sliding_window": 3, "rope_scaling": {"rope_type": "default"}},
    "GPT2LMHeadModel": {"vocab_size": 11, "n_positions": 16, "n_layer": 4, "n_embd": 16, "n_head": 4},
    "DistilBertForMaskedLM": _SHORT | {"n_layers": 4, "dim": 16, "n_heads": 4, "hidden_dim": 20},
    "Qwen2ForCausalLM": {"tie_word_embeddings": False, "use_sliding_window": False},
    "Gemma3ForCausalLM": _LOCAL,
    "SmolLM3ForCausalLM": {"use_sliding_window": False},
    "MixtralForCausalLM": _EXPERTS,
    "Qwen3MoeForCausalLM": _MIXED,
    "OlmoeForCausalLM": _PLAIN | {"num_experts": 4, "num_experts_per_tok": 2},
    "Qwen2MoeForCausalLM": _MIXED | {"shared_expert_intermediate_size": 14},
}  # fmt: skip


def published(
    folder: Path, architecture: str, weights: str = "float32", seed: int = 0, **keys: Any
) -> Path:
    """Write a model with random weights.

    ``config.json`` has exactly these keys and those of the sizes; None removes one.
    """
    family = FAMILIES[architecture]
    own = _OWN.get(architecture, {})
    usual = "num_hidden_layers" in family.fields and "n_layers" not in family.fields
    content = (SIZES if usual else {}) | own | keys
    content = {key: value for key, value in content.items() if value is not None}
    content |= {"architectures": [architecture], "model_type": family.model_type}
    config: Any = family.from_hf(content)
    model = checkpoints.Loaded(config, tiny.params(config, seed, weights))
    folder.mkdir(parents=True)
    storage.write_hf_folder(model, family, content, folder)
    return folder


def content(folder: Path) -> dict[str, Any]:
    """Read ``config.json``."""
    return json.loads((folder / "config.json").read_text())


def stored(folder: Path) -> dict[str, np.ndarray]:
    """Read the tensors of a folder with one file."""
    from safetensors.numpy import load_file

    return load_file(folder / "model.safetensors")


def store(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    """Replace the tensors of a folder with one file."""
    from safetensors.numpy import save_file

    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def assert_params(folder: Path, params: Any) -> None:
    """Check that a folder has these parameters."""
    found = leaves_by_path(checkpoints.open_checkpoint(folder).params())
    for path, x in leaves_by_path(params).items():
        np.testing.assert_array_equal(found[path], x, err_msg=path)


def called(capsys, *words: Any) -> Any:
    """Run a command with ``--json`` and return its output."""
    assert program.main([*map(str, words), "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def refused(capsys, *words: Any, status: int = 1) -> str:
    """Run a command that fails, and return its message, which may have several lines."""
    assert program.main([*map(str, words)]) == status
    return capsys.readouterr().err.strip()


def adapter(
    folder: Path,
    named: Callable[[str], str] = lambda name: f"base_model.model.{name}",
    more: dict[str, np.ndarray] | None = None,
    **settings: Any,
) -> Path:
    """Write a LoRA of the queries of four layers."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(2)
    tensors = {}
    for layer in range(4):
        for side, shape in (("A", (2, 16)), ("B", (16, 2))):
            name = f"model.layers.{layer}.self_attn.q_proj.lora_{side}.weight"
            tensors[named(name)] = rng.standard_normal(shape).astype(np.float32)
    folder.mkdir()
    save_file({**tensors, **(more or {})}, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(about | settings))
    return folder

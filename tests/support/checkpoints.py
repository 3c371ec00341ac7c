"""Checkpoints of a GPT-2 with a few hundred parameters, in Hugging Face's format."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tiny

from jaxgrow import checkpoints
from jaxgrow.extras import hf_peft
from jaxgrow.extras.peft import lora
from jaxgrow.models import GPT2Config

CONFIG = GPT2Config(vocab=11, context=7, layers=4, embed=12, heads=4, head_dim=3, mlp=20)


def saved(
    folder: Path, config: GPT2Config = CONFIG, seed: int = 0, dtype: Any = "float32", **options: Any
) -> Path:
    """Save random parameters with a tokenizer and keys that jaxgrow does not know."""
    checkpoints.write(
        checkpoints.Loaded(config, tiny.params(config, seed, dtype)),
        checkpoints.Output(folder, "hf", **options),
    )
    (folder / "tokenizer.json").write_text('{"model": 1}')
    change(folder, their_own={"key": [1, 2]}, n_ctx=7)
    return folder


def lora_folder(folder: Path, config: GPT2Config = CONFIG) -> Path:
    """Save a LoRA of ones in PEFT's format."""
    how = lora.LoRA(2, 2.0, ("blocks/attention/query", "blocks/attention/value"))
    factors = lora.init_lora(how, config.axes(), config.sizes(), jax.random.key(0))
    factors = jax.tree.map(lambda x: np.ones(x.shape, np.float32), factors)
    hf_peft.write_peft(folder, hf_peft.PeftAdapter(config, how, factors))
    return folder


def change(folder: Path, **values: Any) -> None:
    """Set keys of ``config.json``; None removes a key."""
    file = folder / "config.json"
    content = json.loads(file.read_text()) | values
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def tensors(folder: Path) -> dict[str, np.ndarray]:
    """Read the tensors with the public library."""
    from safetensors.numpy import load_file

    return {
        k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()
    }


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()
    }

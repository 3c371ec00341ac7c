"""Phi-3 and Phi-4: fused kernels, and a longer context by "longrope"."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxgrow.checkpoints.hf.base import Heads
from jaxgrow.checkpoints.hf.families.llama.architectures import architectures
from jaxgrow.checkpoints.hf.families.llama.parts import names
from jaxgrow.checkpoints.hf.rope import read_heads, read_one_window, read_rope, written_one_window
from jaxgrow.checkpoints.io.files import spelt
from jaxgrow.models.llama import LlamaConfig


def _read_phi3(theirs: Mapping[str, Any]) -> dict[str, Any]:
    rope = read_rope({"max_position_embeddings": 4096, **theirs}, rotary=1.0)
    if rope.get("rope_by", "longrope") != "longrope":
        raise ValueError(f"rope_type is {spelt(rope['rope_by'])}, but Phi-3 supports only longrope")
    return read_heads(theirs) | rope | read_one_window(theirs, 4096, None)


def _written_phi3(config: LlamaConfig) -> dict[str, Any]:
    out: dict[str, Any] = written_one_window(config) | {"partial_rotary_factor": config.rotary}
    scaling = out["rope_scaling"]
    if scaling is not None:
        # transformers 4 accepts only the type and the factors there.
        scaling["type"] = scaling.pop("rope_type")
        out["original_max_position_embeddings"] = scaling.pop("original_max_position_embeddings")
    return out


def _heads(config: LlamaConfig) -> Heads:
    """Return which sizes the heads may have.

    `transformers` expects the number of longrope factors that follows from the hidden size divided
    by the number of heads, whatever ``head_dim`` is.
    """
    return "divide embed" if config.rope_by == "longrope" else "must divide embed"


PHI3 = architectures(
    "Phi3",
    "phi3",
    4096,
    _read_phi3,
    _written_phi3,
    absent={"rms_norm_eps": 1e-5},
    names=partial(names, fused=True),
    heads=_heads,
)

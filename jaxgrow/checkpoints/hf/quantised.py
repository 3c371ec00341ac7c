"""Is the model in a folder quantised? jaxgrow does not read quantised weights."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxgrow.checkpoints.io.files import QUANTISATION, CheckpointError, spelt
from jaxgrow.checkpoints.io.safetensors import Tensor

_KEYS = ("quantization_config", "compression_config")
# The tensors that hold scales, zero points and packed values, in the formats of GPTQ, AWQ,
# bitsandbytes, compressed-tensors, ModelOpt, FP8, MXFP4 and HQQ.
_PARTS = re.compile(
    r"(^|.*[._])((k|v|q|kv|input|output|weight|prob)_scale(_inv|_2)?|scales|blocks|qweight|qzeros"
    r"|g_idx|SCB|absmax|quant_map|weight_(packed|zero_point|shape|g_idx)|quant_state\..*"
    r"|W_q|quantized_weight)"
)
_PACKED = re.compile(r"F4|F[468]_.*")
_INTEGERS = ("I8", "U8", "I16", "U16", "I32", "U32")


def check_config(folder: Path, foreign: Mapping[str, Any]) -> None:
    """Raise a `CheckpointError` if ``config.json`` or its text model has a quantisation."""
    text = foreign.get("text_config")
    parts = [foreign, text] if isinstance(text, dict) else [foreign]
    if found := [key for part in parts for key in _KEYS if part.get(key) is not None]:
        raise _refused(folder, f"config.json has {found[0]}")


def check_tensors(folder: Path, stored: Mapping[str, Tensor]) -> None:
    """Raise a `CheckpointError` if a tensor has a dtype or a name of quantised models."""
    beside = [f", and the folder has {name}" for name in QUANTISATION if (folder / name).exists()]
    for name, tensor in stored.items():
        whole = name.endswith("weight") and len(tensor.shape) > 1 and tensor.stored in _INTEGERS
        if _PARTS.fullmatch(name) or whole or _PACKED.fullmatch(tensor.stored):
            about = f"tensor {spelt(name)} has dtype {tensor.stored}{''.join(beside[:1])}"
            raise _refused(folder, about)


def _refused(folder: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{folder}: the model is quantised ({why}), and jaxgrow reads only weights that are not. Give the folder of the model "
        "before it was quantised, or dequantize this one in transformers (model.dequantize(), then save_pretrained)"
    )

"""Is the model in a folder quantised or pickled? jaxgrow does not read such weights."""

import re
from collections.abc import Mapping
from pathlib import Path

from jaxgrow.checkpoints.hf.registry import DIAGNOSES
from jaxgrow.checkpoints.io.files import QUANTISATION, listed, spelt
from jaxgrow.checkpoints.io.safetensors import FILE, INDEX, Tensor
from jaxgrow.typed import Json

_KEYS = ("quantization_config", "compression_config", "quantization")
# The tensors that hold scales, zero points and packed values, in the formats of GPTQ, AWQ,
# bitsandbytes, compressed-tensors, ModelOpt, FP8, MXFP4, HQQ, AQLM and torchao.
_QUANTISED_TENSORS = re.compile(
    r"(^|.*[._])((k|v|q|kv|input|output|weight|prob|activation)_scale(_inv|_2|_max|s)?|scales|blocks"
    r"|(q|k|v|kv|input|output)_zero_point|q?zeros|qweight|g_idx|SCB|absmax|quant_map|quant_state\..*"
    r"|weight_(packed|zero_point|shape|g_idx|global_scale)|input_global_scale|W_q|quantized_weight"
    r"|codebooks|codes|(in|out)put_(quantizer|dynamic_scale).*)"
)
_PACKED = re.compile(r"F4|F[468]_.*")
_INTEGERS = ("I8", "U8", "I16", "U16", "I32", "U32")


def quantised_part(folder: Path, hf_config: Json, stored: Mapping[str, Tensor]) -> str:
    """Return the message that a model is quantised, or that its weights are pickled; "": neither.

    Args:
      folder: the folder.
      hf_config: the content of ``config.json``.
      stored: the tensors, as far as they are known.
    """
    parts = [part for part in (hf_config, hf_config.get("text_config")) if isinstance(part, dict)]
    why = [f"config.json has {key}" for part in parts for key in _KEYS if part.get(key) is not None]
    beside = [f", and the folder has {name}" for name in QUANTISATION if (folder / name).exists()]
    for name, tensor in stored.items():
        whole = name.endswith("weight") and len(tensor.shape) > 1 and tensor.stored in _INTEGERS
        if not why and (
            whole or _QUANTISED_TENSORS.fullmatch(name) or _PACKED.fullmatch(tensor.stored)
        ):
            why = [f"tensor {spelt(name)} has dtype {tensor.stored}{''.join(beside[:1])}"]
    if not why:
        return _pickled_part(folder)
    return (
        f"the model is quantised ({why[0]}), and jaxgrow reads only weights that are not. Give the folder of the "
        "model before it was quantised, or dequantize this one in transformers (model.dequantize(), then save_pretrained)"
    )


def _pickled_part(folder: Path) -> str:
    """Return the message that a folder has only pickled weights; "": it has others, or none."""
    files = [file.name for file in folder.iterdir()]
    pickled = sorted(name for name in files if name.endswith((".bin", ".pt", ".pth", ".ckpt")))
    if not pickled or FILE in files or INDEX in files:
        return ""
    return (
        f"it holds {listed(pickled)}. Pickled files may run any code when they are loaded, so jaxgrow does not read them. If "
        "you trust them, convert them with from_pretrained and save_pretrained of transformers"
    )


DIAGNOSES.add("quantised", quantised_part)

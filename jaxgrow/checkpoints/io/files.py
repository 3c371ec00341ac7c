"""Files of checkpoints: which may be trusted to lie in a folder, and JSON, read and written."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LARGEST_JSON = 10 << 20  # bytes: what is read takes thirty times as much memory at most
LARGEST_EXTRA = (
    100 << 20
)  # bytes of a file that is carried over with a checkpoint: a tokenizer's is a few MB
RECORD = "jaxgrow.json"
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")  # of a LoRA, as PEFT names them
_WEIGHTS = (  # of any framework, and what lies beside them
    *(
        ".safetensors",
        ".bin",
        ".pt",
        ".pth",
        ".pkl",
        ".ckpt",
        ".h5",
        ".keras",
        ".msgpack",
        ".npz",
        ".ot",
        ".pdparams",
    ),
    *(
        ".gguf",
        ".ggml",
        ".onnx",
        ".onnx_data",
        ".onnx.data",
        ".tflite",
        ".mlmodel",
        ".pb",
        ".index.json",
    ),
)


class CheckpointError(ValueError):
    """What is wrong with a checkpoint or with what was asked of it: the file, the tensor, the axis, and the way out."""


def spelt(value: Any) -> str:
    """A value as JSON spells it, for messages about a JSON file.

    Example:
      >>> spelt(None), spelt(True), spelt("gelu")
      ('null', 'true', '"gelu"')
    """
    try:
        text = json.dumps(value)
    except RecursionError:
        return "a value with too many levels"
    return text if len(text) <= 100 else f"{text[:100]}.."


def listed(*names: Sequence[str], separator: str = ", ", most: int = 20) -> str:
    """The first ones of each list, and how many more there are."""
    out: list[str] = []
    for some in names:
        out += [*some[:most], *([f"and {len(some) - most:,} more"] if len(some) > most else [])]
    return separator.join(out)


def inside(folder: Path, name: str) -> Path:
    """The regular file ``name`` of ``folder``; a link must stay in it, or in the store of Hugging Face's cache around it.

    Raises:
      CheckpointError: the name leaves the folder, or there is no such file.
    """
    if Path(name).name != name or "\\" in name or "\0" in name or name in (".", ".."):
        raise CheckpointError(
            f"{folder}: {name!r} is no file of the folder itself; only those are read"
        )
    file = folder / name
    if not file.is_file():
        raise CheckpointError(f"{file} is {'no regular file' if file.exists() else 'missing'}")
    real, home = file.resolve(), folder.resolve()
    if home != real.parent and not (
        home.parent.name == "snapshots" and real.parent == home.parent.parent / "blobs"
    ):
        raise CheckpointError(
            f"{file} is a link to {real}, outside the folder; put the file itself there"
        )
    return file


def read_json(file: Path, largest: int = LARGEST_JSON) -> dict[str, Any]:
    """
    Raises:
      CheckpointError: the file holds no JSON object, or numbers that are none (NaN, infinities),
        which JSON does not have.
    """
    if file.stat().st_size > largest:
        raise CheckpointError(f"{file} has more than {largest} bytes: that is no JSON to read")
    try:
        content = json.loads(file.read_bytes(), parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds {type(content).__name__}, not an object")
    return content


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:20]} is no number of JSON's")
    return number


def write_json(file: Path, content: Any) -> None:
    """
    Raises:
      CheckpointError: a number is none (NaN, infinities), or lists lie in lists too deeply.
    """
    try:
        text = json.dumps(content, indent=2, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file.name} cannot be written: {error}") from error
    file.write_text(text + "\n")


def extras(folder: Path) -> list[Path]:
    """What lies beside the weights: a tokenizer, a card, a licence. A LoRA of the model is not among it: it has to grow.

    Raises:
      CheckpointError: one of them is a link that leads out of the folder.
    """
    found = []
    for file in sorted(folder.iterdir()):
        name = file.name
        own = (
            name in (RECORD, "config.json", *ADAPTER)
            or name.startswith(".")
            or name.lower().endswith(_WEIGHTS)
        )
        if not own and file.is_file() and file.stat().st_size <= LARGEST_EXTRA:
            found.append(inside(folder, file.name))
    return found

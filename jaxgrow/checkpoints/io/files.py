"""How are the JSON files of a checkpoint read and written, and which files may be read at all?"""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

from jaxgrow.typed import Json
from jaxgrow.untrusted import CheckedPath, UntrustedError, checked_path, chosen_file

# The largest JSON file in bytes. Its parsed content takes at most thirty times this size in memory.
LARGEST_JSON = 10 << 20
# The largest size in bytes of another file that is copied with a checkpoint. A tokenizer has a few
# MB.
LARGEST_EXTRA = 100 << 20
# The default for the largest size of a weight file in bytes, as in Hugging Face's library.
SHARD = 5_000_000_000
RECORD = "jaxgrow.json"
# The subfolder with the parameters of an Orbax checkpoint.
PARAMS = "params"
# The subfolder in which transformers stores all chat templates of a tokenizer but the default one.
TEMPLATES = "additional_chat_templates"
# The subfolder of a run with the files that its model needs in transformers: the tokenizer or the
# image processor, the model card, and the entries of ``config.json`` about them.
TRANSFORMERS = "transformers"
CARD = "README.md"
PROCESSOR = "preprocessor_config.json"
# Files about the quantisation of a model.
QUANTISATION = (
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    "quantization_config.json",
    "recipe.yaml",
)
# Files about the training or about other weights of a model, which do not fit a new model.
_OF_OTHERS = ("params.json", "trainer_state.json", *QUANTISATION)
# The files of a LoRA, by the names that PEFT gives them.
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
# The endings of the names of weight files of all frameworks, and of the indices of such files.
_WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".pkl", ".ckpt", ".h5", ".keras", ".msgpack"),
    *(".npz", ".ot", ".pdparams", ".gguf", ".ggml", ".onnx", ".onnx_data", ".onnx.data"),
    *(".tflite", ".mlmodel", ".pb", ".index.json"),
)


class CheckpointError(ValueError):
    """A checkpoint, or a request about one, that is not valid.

    The message names the file, the tensor or the axis, and what to do.
    """


def at_step(path: str | Path) -> tuple[Path, int | None]:
    """Split ``RUN@STEP`` into the folder of a run and the step of a checkpoint.

    The name of a folder may itself contain ``@``. Without a step, the step is None.
    """
    folder, _, step = str(path).rpartition("@")
    if not (folder and step.isascii() and step.isdecimal()) or Path(path).is_dir():
        return Path(path), None
    return Path(folder), int(step)


def spelt(value: object) -> str:
    """Return a value as JSON writes it, for messages about a JSON file.

    Example:
      >>> spelt(None), spelt(True), spelt("gelu")
      ('null', 'true', '"gelu"')
    """
    try:
        text = json.dumps(value)
    except RecursionError:
        return "a value with too many levels"
    return text if len(text) <= 100 else f"{text[:100]}..."


_LISTED = 20  # names in a message


def listed(*names: Sequence[str], separator: str = ", ", most: int = _LISTED) -> str:
    """Join the first names of each list, with the number of names that are left out.

    Args:
      names: the lists of names.
      separator: the text between two names.
      most: the number of names of a list that are not left out.
    """
    out: list[str] = []
    for some in names:
        out += some[:most]
        if len(some) > most:
            out.append(f"and {len(some) - most:,} more")
    return separator.join(out)


def inside(folder: Path, name: str, sub: str = "") -> CheckedPath:
    """Return the path of the regular file ``name`` in ``folder``.

    A link is followed only to a file in the folder itself, or in the blob store of the cache of
    Hugging Face to which the folder belongs (`jaxgrow.untrusted.checked_path`).

    Args:
      folder: the folder of a checkpoint.
      name: the name of a file.
      sub: the name of the subfolder that holds the file.

    Raises:
      CheckpointError: the name points outside the folder, or the file does not exist.
    """
    try:
        file = checked_path(folder, f"{sub}/{name}" if sub else name, deep=bool(sub))
    except UntrustedError as error:
        raise CheckpointError(str(error)) from error
    if not file.path.is_file():
        raise CheckpointError(f"{file} is not a regular file")
    return file


def read_json(file: CheckedPath | Path, largest: int = LARGEST_JSON) -> Json:
    """Read a JSON object from a file.

    Args:
      file: the file; a plain path is one that the user named.
      largest: the largest size in bytes that is read.

    Raises:
      CheckpointError: the file holds no JSON object, is too large, or has NaN or infinite numbers,
        which JSON does not allow.
    """
    file = chosen_file(file)
    with file.open() as opened:
        if os.fstat(opened.fileno()).st_size > largest:
            raise CheckpointError(
                f"{file} has more than {largest} bytes, the largest size of a JSON file that is "
                "read"
            )
        text = opened.read()
    try:
        content = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds {type(content).__name__}, not an object")
    return content


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:20]} is not a number in JSON")
    return number


def write_json(file: Path, content: object) -> None:
    """Write a value as JSON.

    Raises:
      CheckpointError: a number is NaN or infinite, or lists are nested too deeply.
    """
    try:
        text = json.dumps(content, indent=2, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file.name} cannot be written: {error}") from error
    file.write_text(text + "\n")


def files_to_copy(folder: Path) -> list[str]:
    """Return the files in a folder that are copied to new checkpoints, such as a tokenizer.

    Weights, configs, hidden files, and files about a training or a quantisation are not among them.
    An adapter is not either, because it has
    to grow with the model. Of the subfolders, only chat templates are copied.

    Returns:
      Paths relative to ``folder``.

    Raises:
      CheckpointError: one of them is a link that leads out of the folder.
    """
    found = []
    for file in sorted(folder.iterdir()):
        name = file.name
        own = (
            name in (RECORD, "config.json", *ADAPTER, *_OF_OTHERS)
            or name.startswith(".")
            or name.lower().endswith(_WEIGHTS)
        )
        if not own and file.is_file() and file.stat().st_size <= LARGEST_EXTRA:
            found.append(inside(folder, name).name)
    for file in sorted((folder / TEMPLATES).glob("*.jinja")):
        if file.is_file() and file.stat().st_size <= LARGEST_EXTRA:
            found.append(f"{TEMPLATES}/{inside(folder, file.name, TEMPLATES).name}")
    return found


def left_out(folder: Path) -> list[str]:
    """Return the names of the subfolders of a checkpoint that `extras` does not copy.

    Hidden folders and the parameters of an Orbax folder are not among them.
    """
    return sorted(
        entry.name
        for entry in folder.iterdir()
        if entry.is_dir()
        and not entry.name.startswith(".")
        and entry.name not in (PARAMS, TEMPLATES)
    )

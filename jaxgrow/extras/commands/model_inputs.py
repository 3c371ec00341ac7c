"""On which inputs do commands evaluate models: random ones, or tokens or images of a file?"""

import io
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np

from jaxgrow.checkpoints import CheckpointError, Source
from jaxgrow.checkpoints.io.files import inside
from jaxgrow.checkpoints.source import Checkpoint
from jaxgrow.extras.limited_process import run_limited
from jaxgrow.untrusted import UntrustedError, chosen_file, file_limits

#: Inputs of a model: tokens, images, or a dict of them.
Inputs: TypeAlias = Any

# The maximum number of samples, and of tokens per sample.
ROWS = 8
LENGTH = 128
# The maximum number of characters that are read from a text file.
_READ = 1 << 20
# A tokenizer of strangers may need any amount of time and memory, so another process runs it.
_TOKENISE = """
from tokenizers import Tokenizer
loaded = Tokenizer.from_file(request["value"]["file"])
loaded.no_truncation()
loaded.encode_special_tokens = True  # the names of special tokens in a text are text
print(json.dumps(loaded.encode(request["value"]["text"], add_special_tokens=False).ids))
"""


def inputs_for_both(first: Checkpoint, second: Source, file: Path | None) -> tuple[Inputs, str]:
    """Prepare inputs that both models accept.

    Args:
      first: a model; its tokenizer is used for text.
      second: the other model.
      file: an input file, as for `inputs_from_file`; None: random inputs.

    Returns:
      ``(inputs, description)``.

    Raises:
      CheckpointError: the models have different inputs or numbers of output features, or the file
        has a token that one of them does not have; or as `inputs_from_file`.
    """
    example, other = (
        jax.tree.map(lambda x: (x.dtype, x.shape[1:]), m.config.example) for m in (first, second)
    )
    if example != other:
        raise CheckpointError(
            f"the inputs of a {type(first.config).__name__} and of a {type(second.config).__name__} "
            "have different types or shapes, so the outputs of the two models cannot be compared"
        )
    widths = [m.sizes()["embed"] for m in (first, second) if m.config.predicts == "states"]
    if len(set(widths)) > 1:
        raise CheckpointError(
            f"the hidden states have {' and '.join(map(str, widths))} features. The two models "
            "have no head, so their outputs cannot be compared"
        )
    vocab = min(m.sizes().get("vocab", 0) for m in (first, second))
    if file is not None:
        length = second.config.length if vocab else LENGTH
        inputs, what = inputs_from_file(first, file, length)
        largest = max(int(x.max()) for x in jax.tree.leaves(inputs)) if vocab else 0
        if largest >= vocab > 0:
            raise CheckpointError(
                f"{file} has the token id {largest}, but the second model has ids from 0 to {vocab - 1}. "
                "Give a .npy file of ids that both models have"
            )
        return inputs, what
    rng = np.random.default_rng(0)
    if not vocab:
        return rng.standard_normal((ROWS, *example[1]), np.float32), f"{ROWS} random images"
    length = min(first.config.length, second.config.length, LENGTH)
    inputs = first.config.inputs_of(rng.integers(0, vocab, (ROWS, length)))
    return inputs, f"{ROWS} x {length} random tokens"


def inputs_from_file(source: Checkpoint, file: Path, length: int = LENGTH) -> tuple[Inputs, str]:
    """Read inputs for a model from a file.

    Args:
      source: the model.
      file: a ``.npy`` file with token ids or images, or any other file with text, which the
        tokenizer of the model tokenises.
      length: maximum number of tokens per sample.

    Returns:
      ``(inputs, description)``.

    Raises:
      CheckpointError: the images have another shape, the model has no tokenizer, or a token id is
        outside its vocabulary.
    """
    vocab = source.sizes().get("vocab")
    if vocab is None:
        images = _first_images(source, file)
        return images, f"the first {len(images)} images of {file}"
    length = min(source.config.length, length, LENGTH)
    most = ROWS * length
    if file.suffix == ".npy":
        ids = np.array(_open_array(file, "token ids").reshape(-1)[:most])
    else:
        ids = _tokenised_text(source, vocab, file)[:most]
    if ids.size == 0 or ids.dtype.kind not in "iu":
        raise CheckpointError(
            f"{file} contains no token ids, but {ids.size} numbers of dtype {ids.dtype}"
        )
    if ids.min() < 0 or ids.max() >= vocab:
        raise CheckpointError(
            f"{file} has token ids from {ids.min()} to {ids.max()}, but the vocabulary has ids "
            f"from 0 to {vocab - 1}"
        )
    length = min(length, len(ids))
    rows = min(ROWS, len(ids) // length)
    inputs = ids[: rows * length].reshape(rows, length).astype(np.int32)
    return source.config.inputs_of(inputs), f"the first {rows} x {length} tokens of {file}"


def _open_array(file: Path, what: str) -> np.ndarray:
    """Open a ``.npy`` file without reading its values; ``what``: its content, for the message."""
    try:
        return np.lib.format.open_memmap(chosen_file(file).path, mode="r")
    except (OSError, UntrustedError):
        raise
    except Exception as error:  # NumPy raises many types of errors for damaged files.
        raise CheckpointError(f"{file} contains no {what}: {error}. Give a .npy file") from error


def _first_images(source: Source, file: Path) -> np.ndarray:
    shape = jax.tree.leaves(source.config.example)[0].shape[1:]
    images = _open_array(file, "images")
    if images.shape[1:] != shape or not images.size or images.dtype.kind != "f":
        raise CheckpointError(
            f"{file} contains {images.dtype} {list(images.shape)}, but the model expects "
            f"normalised images as floats [N, {', '.join(map(str, shape))}]"
        )
    first = np.array(images[:ROWS], np.float32)
    if not np.isfinite(first).all():
        raise CheckpointError(
            f"{file} contains images with NaN or infinite values: remove these images"
        )
    return first


def _tokenised_text(source: Checkpoint, vocab: int, file: Path) -> np.ndarray:
    """Tokenise the beginning of a text with the ``tokenizer.json`` in the folder of the model.

    Without that file, the tokens of a model with a vocabulary of 256 are the bytes of the text in
    UTF-8.

    Raises:
      CheckpointError: the file is missing and the vocabulary has another size, the file is not a
        valid tokenizer, or the package tokenizers is not installed.
    """
    with (
        chosen_file(file).open() as opened,
        io.TextIOWrapper(opened, "utf-8", errors="replace") as lines,
    ):
        text = lines.read(_READ)
    if not os.path.lexists(source.folder / "tokenizer.json"):
        if vocab != 256:
            raise CheckpointError(
                f"there is no tokenizer.json in {source.folder} to tokenise text. Give --data as a "
                ".npy file of token ids"
            )
        return np.frombuffer(text.encode(), np.uint8)
    tokenizer = inside(source.folder, "tokenizer.json")
    if find_spec("tokenizers") is None:
        raise CheckpointError(
            f"reading {tokenizer} requires the package tokenizers: pip install tokenizers. Or give "
            "--data as a .npy file of token ids"
        )
    file_limits().check(str(tokenizer), bytes=tokenizer.path.stat().st_size)
    request = {"file": os.fspath(tokenizer), "text": text}
    try:
        return np.array(run_limited(_TOKENISE, request, str(tokenizer)), np.int64)
    except UntrustedError as error:
        raise CheckpointError(
            f"{tokenizer} is not a valid tokenizer: {error}. Give --data as a .npy file of token ids"
        ) from error

"""What commands run models on: random inputs, token ids of a file, its text, or its images."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxgrow.checkpoints import CheckpointError, Source
from jaxgrow.checkpoints.source import Checkpoint

ROWS, LENGTH = 8, 128  # samples, and tokens of each, at most
_READ = 1 << 20  # characters of a file of text, at most


def of_both(first: Checkpoint, second: Source, file: Path | None) -> tuple[Any, str]:
    """Inputs that both models take, and what they are: random ones, or those of a file, as of `of_data`."""
    example, other = (
        jax.tree.map(lambda x: (x.dtype, x.shape[1:]), m.config.example) for m in (first, second)
    )
    if example != other:
        raise CheckpointError(
            "the two models take different inputs, so there is nothing to compare"
        )
    widths = [m.sizes()["embed"] for m in (first, second) if m.config.predicts == "states"]
    if len(set(widths)) > 1:
        raise CheckpointError(
            f"the hidden states have {' and '.join(map(str, widths))} features: the two models have no head, so their outputs "
            "cannot be compared"
        )
    vocab, other = first.sizes().get("vocab"), second.sizes().get("vocab")
    if vocab != other:
        raise CheckpointError(
            f"the vocabularies differ, {vocab} and {other} tokens: the logits have no common meaning"
        )
    if file is not None:
        return of_data(first, file, second.config.length if vocab is not None else LENGTH)
    rng = np.random.default_rng(0)
    if vocab is None:
        return rng.standard_normal((ROWS, *example[1]), np.float32), f"{ROWS} random images"
    length = min(first.config.length, second.config.length, LENGTH)
    return _named(first, rng.integers(0, vocab, (ROWS, length))), f"{ROWS} x {length} random tokens"


def of_data(source: Checkpoint, file: Path, length: int = LENGTH) -> tuple[Any, str]:
    """Inputs of a file, and what they are: token ids or images of a ``.npy`` file, or the text of
    any other, by the model's tokenizer; of at most ``length`` tokens each.

    Raises:
      CheckpointError: the model takes other images, has no tokenizer, or another vocabulary.
    """
    vocab = source.sizes().get("vocab")
    if vocab is None:
        return _images(source, file)
    length = min(source.config.length, length, LENGTH)

    def text(file: Path, most: int) -> np.ndarray:
        return _tokenised(source, vocab, file)[:most]

    ids = _ids(file, _array if file.suffix == ".npy" else text, vocab, ROWS * length)
    return _rows(source, ids, length, file)


def _images(source: Source, file: Path) -> tuple[np.ndarray, str]:
    example: Any = source.config.example
    shape = example.shape[1:]
    try:
        images = np.lib.format.open_memmap(file, mode="r")
    except OSError:
        raise
    except Exception as error:  # NumPy raises whatever it comes across
        raise CheckpointError(f"{file} holds no images: {error}; give them as .npy") from error
    if images.shape[1:] != shape or not images.size or images.dtype.kind != "f":
        raise CheckpointError(
            f"{file} holds {images.dtype} {list(images.shape)}; the model takes images of floats "
            f"[N, {', '.join(map(str, shape))}], normalised"
        )
    first = np.array(images[:ROWS], np.float32)
    if not np.isfinite(first).all():
        raise CheckpointError(f"{file} holds images with numbers that are not finite")
    return first, f"the first {len(first)} images of {file}"


def _named(source: Source, tokens: np.ndarray) -> Any:
    """As the model's module takes them."""
    return {"tokens": tokens} if isinstance(source.config.example, dict) else tokens


def _rows(source: Source, ids: np.ndarray, length: int, file: Path) -> tuple[Any, str]:
    length = min(length, len(ids))
    rows = min(ROWS, len(ids) // length)
    inputs = _named(source, ids[: rows * length].reshape(rows, length))
    return inputs, f"the first {rows} x {length} tokens of {file}"


def _ids(file: Path, read: Callable[[Path, int], np.ndarray], vocab: int, most: int) -> np.ndarray:
    """The first ids of a file; no more of it is read than they may take."""
    try:
        ids = read(file, most)
    except (OSError, CheckpointError):
        raise
    except Exception as error:  # NumPy raises whatever it comes across
        raise CheckpointError(f"{file} holds no token ids: {error}") from error
    if ids.size == 0 or ids.dtype.kind not in "iu":
        raise CheckpointError(
            f"{file} holds no token ids, but {ids.size} numbers of dtype {ids.dtype}"
        )
    if ids.min() < 0 or ids.max() >= vocab:
        raise CheckpointError(
            f"{file} has ids from {ids.min()} to {ids.max()}; the models know 0 .. {vocab - 1}"
        )
    return ids.astype(np.int32)


def _array(file: Path, most: int) -> np.ndarray:
    return np.array(np.lib.format.open_memmap(file, mode="r").reshape(-1)[:most])


def _tokenised(source: Checkpoint, vocab: int, file: Path) -> np.ndarray:
    """The begin of a text, by the ``tokenizer.json`` beside the model; without one, the bytes of UTF-8."""
    with file.open(encoding="utf-8", errors="replace") as opened:
        text = opened.read(_READ)
    tokenizer = source.folder / "tokenizer.json"
    if not tokenizer.is_file():
        if vocab != 256:
            raise CheckpointError(
                f"there is no tokenizer.json in {source.folder} to make tokens of a text; give --data as a .npy of token ids"
            )
        return np.frombuffer(text.encode(), np.uint8)
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise CheckpointError(
            f"{tokenizer} is read by tokenizers: pip install tokenizers; or give --data as a .npy of token ids"
        ) from None
    try:
        loaded = Tokenizer.from_file(str(tokenizer))
    except Exception as error:  # the library raises nothing else
        raise CheckpointError(
            f"{tokenizer} is no tokenizer: {error}; give --data as a .npy of token ids"
        ) from error
    loaded.no_truncation()
    return np.array(loaded.encode(text, add_special_tokens=False).ids, np.int64)

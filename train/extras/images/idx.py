"""Images in the files of MNIST: MNIST, Fashion-MNIST, KMNIST and others that use its file names."""

import math
from functools import lru_cache
from pathlib import Path

import numpy as np

from train.common.errors import UserError
from train.extras.decoding import read_all, stored_file

_NAMES = {"train": "train", "valid": "t10k"}
_MAGIC = 8  # the third byte of a file of unsigned bytes; the fourth one is the number of axes


def read_idx(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Read the images and the labels of a split.

    Args:
      folder: folder with ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte``, and the same
        files of ``t10k``, which may be compressed.
      split: ``train`` or ``valid``.

    Returns:
      Pixels, uint8 [count, rows, columns, 1], and labels, int32 [count].

    Raises:
      UserError: a file is missing or damaged, or the files do not belong together.
    """
    images, labels = (
        _file(folder, f"{_NAMES[split]}-{what}-idx{axes}-ubyte")
        for what, axes in (("images", 3), ("labels", 1))
    )
    pixels, classes = (_array(file, file.stat().st_mtime_ns) for file in (images, labels))
    if pixels.ndim != 3 or classes.ndim != 1 or len(pixels) != len(classes) or not len(pixels):
        raise UserError(
            f"{images} has the shape {pixels.shape} and {labels} has {classes.shape}, but there "
            "should be images [count, rows, columns] and one label for each; download both again"
        )
    return pixels[..., None], classes.astype(np.int32)


def _file(folder: Path, name: str) -> Path:
    # Some publications write a dot before "idx".
    found = stored_file(folder / name) or stored_file(folder / name.replace("-idx", ".idx"))
    if found is None:
        raise UserError(
            f"there is no {name} in {folder} (plain, .gz, .xz or .zst); data.path should name the "
            "folder of the four files of MNIST or of a dataset in its layout"
        )
    return found


@lru_cache(maxsize=4)  # a run asks for its images several times
def _array(file: Path, changed: int) -> np.ndarray:
    """Return the array of an idx file; ``changed`` is the time of its last change."""
    content = read_all(file)
    axes = content[3] if len(content) >= 4 and content[:3] == bytes([0, 0, _MAGIC]) else 0
    head = content[4 : 4 + 4 * axes]
    shape = tuple(np.frombuffer(head[: len(head) // 4 * 4], ">u4").tolist())
    values = np.frombuffer(content[4 + 4 * axes :], np.uint8)
    # `math.prod` does not overflow, unlike `np.prod`.
    if not axes or len(shape) != axes or len(values) != math.prod(shape):
        raise UserError(
            f"{file} is damaged or is not an idx file of unsigned bytes: it has {len(content):,} "
            f"bytes, and its head gives the shape {shape}; download it again"
        )
    return values.reshape(shape)

"""Create folders of noise images."""

from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("ant", "bee", "cat")


def picture(seed: int, size=(12, 12), mode="RGB") -> Image.Image:
    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, np.uint8))


def tree(folder: Path, count: int = 8, **options) -> Path:
    """Write ``count`` images per class as PNG, which is lossless."""
    for i, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for j in range(count):
            picture(100 * i + j, **options).save(folder / name / f"{j}.png")
    return folder

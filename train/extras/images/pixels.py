"""Image augmentation with Pillow: crops, RandAugment, erasing and mixing.

Random resized crops (Szegedy et al., 2015), RandAugment (Cubuk et al., 2020), random erasing (Zhong
et al., 2020), mixup (Zhang et al., 2018), CutMix (Yun et al., 2019), combined as in DeiT.
"""

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from train.extras.images.augment import Augment
from train.extras.images.processor import MEAN, default_normal

_CUBIC = Image.Resampling.BICUBIC
# The mean magnitude of the operations of RandAugment, from 0 to 10. The standard deviation is 0.5.
MAGNITUDE = 9.0
_TRIES = 10  # attempts to sample a rectangle that fits
Rng: TypeAlias = np.random.Generator
Picture: TypeAlias = tuple[Image.Image, int]  # (image, class)


def normalised_pixels(
    image: Image.Image, mean: Sequence[float] = (), std: Sequence[float] = ()
) -> np.ndarray:
    """Normalise an image, float32 [rows, columns, channels].

    The result is ``(x - mean) / std`` of pixels from 0 to 1, by default with the values of
    `default_normal`.
    """
    x = np.asarray(image, np.float32) / 255
    x = x[..., None] if x.ndim == 2 else x
    if not mean:
        mean, std = default_normal(x.shape[-1])
    return (x - np.asarray(mean, np.float32)) / np.asarray(std, np.float32)


def central_crop(image: Image.Image, size: int) -> Image.Image:
    """Crop a validation image to its central seven eighths, and resize it to ``size`` pixels a side.

    An image that already has this size is unchanged.
    """
    if image.size == (size, size):
        return image
    return ImageOps.fit(image, (size, size), _CUBIC, bleed=1 / 16)


def augmented_sample(
    one: Picture,
    other: Picture | None,
    augment: Augment,
    size: int,
    classes: int,
    rng: Rng,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
) -> tuple[np.ndarray, np.ndarray]:
    """The input and target of one training sample.

    Args:
      one: the image and its class.
      other: the image that it is mixed with; None: no mixing.
      augment: the settings of the augmentation.
      size: pixels per side.
      classes: the number of classes.
      rng: source of all randomness.
      mean: the mean of each channel (`normalised_pixels`).
      std: the standard deviation of each channel (`normalised_pixels`).
    """
    x = changed(one[0], augment, size, rng, mean, std)
    if other is None and not augment.smoothing:
        return x, np.asarray(one[1], np.int32)
    target = smooth_label(one[1], classes, augment.smoothing)
    if other is None:
        return x, target
    share, x = mixed_pixels(x, changed(other[0], augment, size, rng, mean, std), augment, rng)
    return x, share * target + (1 - share) * smooth_label(other[1], classes, augment.smoothing)


def smooth_label(label: int, classes: int, smoothing: float) -> np.ndarray:
    """Label smoothing: ``(1 - s) onehot + s / classes``."""
    target = np.full(classes, smoothing / classes, np.float32)
    target[label] += 1 - smoothing
    return target


def changed(
    image: Image.Image,
    augment: Augment,
    size: int,
    rng: Rng,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
) -> np.ndarray:
    """Augment and normalise one image."""
    image = _cropped(image, augment.crop, size, rng)
    if augment.flip and rng.random() < 0.5:
        image = ImageOps.mirror(image)
    names = list(OPERATIONS)
    for i in rng.integers(len(names), size=augment.randaugment):
        if rng.random() < 0.5:
            level = float(np.clip(rng.normal(MAGNITUDE, 0.5), 0, 10)) / 10
            image = OPERATIONS[names[i]](image, level * (1 if rng.random() < 0.5 else -1))
    x = normalised_pixels(image, mean, std)
    return _erased(x, rng) if rng.random() < augment.erasing else x


# --- rectangles ---


def _rectangle(
    rows: int, columns: int, area: tuple[float, float], aspect: float, rng: Rng
) -> tuple[int, int, int, int] | None:
    """A random rectangle ``(top, left, height, width)``; None if none of the tries fits.

    ``area`` is the range of its fraction of the image, and the ratio of its sides is between
    1/aspect and aspect.
    """
    for _ in range(_TRIES):
        wanted = rows * columns * rng.uniform(*area)
        ratio = math.exp(rng.uniform(-math.log(aspect), math.log(aspect)))
        height = round(math.sqrt(wanted / ratio))
        width = round(math.sqrt(wanted * ratio))
        if 0 < height <= rows and 0 < width <= columns:
            return (
                int(rng.integers(rows - height + 1)),
                int(rng.integers(columns - width + 1)),
                height,
                width,
            )
    return None


def _cropped(image: Image.Image, crop: str, size: int, rng: Rng) -> Image.Image:
    if crop == "resized":
        box = _rectangle(image.height, image.width, (0.08, 1.0), 4 / 3, rng)
        if box is not None:
            top, left, height, width = box
            return image.resize((size, size), _CUBIC, (left, top, left + width, top + height))
    image = central_crop(image, size)
    if crop == "pad":
        pad = max(1, size // 8)
        left, top = rng.integers(2 * pad + 1, size=2)
        return ImageOps.expand(image, pad).crop((left, top, left + size, top + size))
    return image


def _erased(x: np.ndarray, rng: Rng) -> np.ndarray:
    box = _rectangle(x.shape[0], x.shape[1], (0.02, 1 / 3), 1 / 0.3, rng)
    if box is not None:
        top, left, height, width = box
        x = x.copy()
        x[top : top + height, left : left + width] = rng.normal(size=(height, width, x.shape[2]))
    return x


def mixed_pixels(
    one: np.ndarray, other: np.ndarray, augment: Augment, rng: Rng
) -> tuple[float, np.ndarray]:
    """Mix two images by mixup or CutMix: ``(share of one, mixture)``."""
    cut = augment.cutmix > 0 and (not augment.mixup or rng.random() < 0.5)
    alpha = augment.cutmix if cut else augment.mixup
    share = float(rng.beta(alpha, alpha))
    if not cut:
        return share, np.float32(share) * one + np.float32(1 - share) * other
    rows, columns = one.shape[:2]
    height, width = (round(side * math.sqrt(1 - share)) for side in (rows, columns))
    top = int(rng.integers(rows)) - height // 2
    left = int(rng.integers(columns)) - width // 2
    box = np.s_[max(top, 0) : max(top + height, 0), max(left, 0) : max(left + width, 0)]
    x = one.copy()
    x[box] = other[box]
    return 1 - x[box][..., 0].size / (rows * columns), x


# --- RandAugment: operations at a level from -1 to 1; the sign is the direction, if there are two ---


def _affine(image: Image.Image, *matrix: float) -> Image.Image:
    """Take pixel (x, y) of the result from (a x + b y + c, d x + e y + f) of the image.

    Pixels outside the image have the mean colour.
    """
    fill = tuple(int(255 * m) for m in MEAN) if image.mode == "RGB" else 128
    return image.transform(
        image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR, fillcolor=fill
    )


def _rotate(image: Image.Image, level: float) -> Image.Image:
    angle = math.radians(30 * level)
    x = image.width / 2
    y = image.height / 2
    c = math.cos(angle)
    s = math.sin(angle)
    return _affine(image, c, s, x - c * x - s * y, -s, c, y + s * x - c * y)


def _solarize_add(image: Image.Image, level: float) -> Image.Image:
    table = [min(255, v + round(110 * abs(level))) if v < 128 else v for v in range(256)]
    return image.point(table * len(image.getbands()))


def _enhanced(enhance: Callable) -> Callable[[Image.Image, float], Image.Image]:
    return lambda image, level: enhance(image).enhance(1 + 0.9 * level)


OPERATIONS: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    "autocontrast": lambda image, level: ImageOps.autocontrast(image),
    "equalize": lambda image, level: ImageOps.equalize(image),
    "invert": lambda image, level: ImageOps.invert(image),
    "posterize": lambda image, level: ImageOps.posterize(image, max(1, 4 - int(4 * abs(level)))),
    "solarize": lambda image, level: ImageOps.solarize(image, 256 - round(256 * abs(level))),
    "solarize_add": _solarize_add,
    "color": _enhanced(ImageEnhance.Color),
    "contrast": _enhanced(ImageEnhance.Contrast),
    "brightness": _enhanced(ImageEnhance.Brightness),
    "sharpness": _enhanced(ImageEnhance.Sharpness),
    "rotate": _rotate,
    "shear_x": lambda image, level: _affine(image, 1, 0.3 * level, 0, 0, 1, 0),
    "shear_y": lambda image, level: _affine(image, 1, 0, 0, 0.3 * level, 1, 0),
    "translate_x": lambda image, level: _affine(image, 1, 0, 0.45 * level * image.width, 0, 1, 0),
    "translate_y": lambda image, level: _affine(image, 1, 0, 0, 0, 1, 0.45 * level * image.height),
}

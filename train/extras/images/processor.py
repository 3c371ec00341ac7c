"""``preprocessor_config.json``: how `transformers` converts an image to the input of a model."""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxgrow.typed import Json
from train.common.errors import UserError
from train.common.files import read_record
from train.extras.decoding import readable_file

FILE = "preprocessor_config.json"
# The values of ImageNet.
MEAN, STD = (np.array(x, np.float32) for x in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))


class Normal(NamedTuple):
    """The mean and standard deviation of each channel of an image whose values are from 0 to 1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


def default_normal(channels: int) -> Normal:
    """The default normalisation: ImageNet's for colour, or from -1 to 1 for gray."""
    if channels == 1:
        return Normal((0.5,), (0.5,))
    return Normal(tuple(map(float, MEAN)), tuple(map(float, STD)))


def processor_settings(normal: Normal, size: int, shorter: int) -> Json:
    """The content of the file for a model that was validated on images of ``size`` pixels per side.

    `transformers` converts each image to colour, so a gray image has three equal channels. Square
    images are processed as in validation. For other images, `transformers` rounds the longer side
    to an integer number of pixels before it crops the image.

    Args:
      normal: normalisation of the images.
      size: pixels per side of the images that the model reads.
      shorter: pixels of the shorter side to which an image is resized before it is cropped.
    """
    mean, std = (list(part) * (3 // len(part)) for part in normal)
    return {
        "image_processor_type": "BitImageProcessor",
        **{
            "do_convert_rgb": True,
            "do_resize": True,
            "size": {"shortest_edge": shorter},
            "resample": 3,
        },
        **{"do_center_crop": True, "crop_size": {"height": size, "width": size}},
        **{"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True},
        **{"image_mean": mean, "image_std": std},
    }


def normal_in(folder: Path) -> Normal | None:
    """The normalisation of the model in ``folder``; None: the default.

    Raises:
      UserError: the file describes an operation that is not supported.
    """
    file = folder / FILE
    config = folder / "config.json"
    if os.path.lexists(file):
        with readable_file(file, "download it again"):
            return _read(file)
    if (folder / "result.json").is_file() and os.path.lexists(config):
        with readable_file(config, "restore it from a backup"):
            about = read_record(config, "restore it from a backup")
            was = about.get("data", {}).get("Images", {})
            if "mean" in was and "std" in was:
                return Normal(*(tuple(map(float, was[part])) for part in ("mean", "std")))
    return None


def _read(file: Path) -> Normal | None:
    about = read_record(file, "download it again")
    factor = about.get("rescale_factor", 1 / 255)
    if (
        not about.get("do_rescale", True)
        or not isinstance(factor, int | float)
        or not np.isclose(factor, 1 / 255)
    ):
        raise UserError(
            f"{file}: images are not scaled by 1/255 (rescale_factor {factor!r}), which is not supported; scale them in advance"
        )
    if not about.get("do_normalize", True):
        return Normal((0.0,) * 3, (1.0,) * 3)
    found = [about.get(key) for key in ("image_mean", "image_std")]
    if not all(map(_is_numbers, found)):
        raise UserError(
            f"{file}: image_mean and image_std are {json.dumps(found)}, but should be lists of numbers"
        )
    mean, std = (tuple(map(float, part or ())) for part in found)
    usable = len(mean) == len(std) and len(mean) in (1, 3) and np.isfinite(mean + std).all()
    if not usable or not all(x > 0 for x in std):
        raise UserError(
            f"{file}: image_mean {mean} and image_std {std} must have the same length, 1 or 3, "
            "and finite numbers, and image_std must be positive"
        )
    known = default_normal(len(mean))
    return (
        None if np.allclose(mean, known.mean) and np.allclose(std, known.std) else Normal(mean, std)
    )


def _is_numbers(part: Any) -> bool:
    """Whether the value is a list of numbers that is not empty."""
    return isinstance(part, list) and bool(part) and all(isinstance(x, int | float) for x in part)

"""The normalisation of images is read from `preprocessor_config.json` and written to it."""

import json

import numpy as np
import pytest
import runs
from PIL import Image

from jaxgrow import checkpoints
from jaxgrow.models import ViTConfig
from train.common.errors import UserError
from train.extras.images.images import Images, read_images
from train.extras.images.processor import (
    FILE,
    Normal,
    normal_in,
)
from train.extras.labelled.downstream import FineTuning

SIZES = dict(layers=1, embed=8, heads=2, head_dim=4, mlp=8)
VIT = ViTConfig(image=8, patch=4, channels=3, classes=2, **SIZES)
USUAL = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a folder with a model as `transformers` saves it, and with images of one colour."""
    home = tmp_path_factory.mktemp("home")
    checkpoints.save(home / "vit", VIT, runs.fresh(VIT))
    for name in ("a", "b"):
        (home / "images" / name).mkdir(parents=True)
        for i in range(4):
            Image.new("RGB", (8, 8), (255, 0, 51)).save(home / "images" / name / f"{i}.png")
    return home


def given(home, about):
    (home / "vit" / FILE).write_text(json.dumps(about))
    return home / "vit"


@pytest.mark.parametrize("known", [USUAL, HALF], ids=["ImageNet", "from -1 to 1"])
def test_a_downloaded_model_keeps_its_own_normalisation(home, known):
    data = Images("folder", str(home / "images"), cache=str(home / "cache"), valid_fraction=0.25)
    tuned = FineTuning("x", data, 1, 2).of(given(home, known), 1e-3, 0)
    pixels, _ = read_images(tuned.data).valid.sample(0, np.random.default_rng(0))  # type: ignore[arg-type]
    mean, std = (np.array(known[key]) for key in ("image_mean", "image_std"))
    np.testing.assert_allclose(pixels[3, 3], (np.array([1, 0, 0.2]) - mean) / std, atol=1e-6)
    tuned.data.write_inputs(home, VIT, home)
    written = json.loads((home / FILE).read_text())
    assert {key: pytest.approx(written[key]) for key in known} == known


@pytest.mark.parametrize(("about", "says"), [
    ({"rescale_factor": 1 / 127.5}, "rescale_factor 0.00784.* is not supported"),
    ({"do_rescale": False}, "images are not scaled by 1/255"),
    ({"image_mean": None}, "image_mean and image_std are .* should be lists of numbers"),
    ({"image_std": [0.5, 0.0, 0.5]}, "image_std must be positive"),
    ({"image_std": [0.5]}, "must have the same length"),
])  # fmt: skip
def test_a_normalisation_that_is_not_supported_is_refused(home, about, says):
    with pytest.raises(UserError, match=says):
        normal_in(given(home, HALF | about))


def test_images_without_normalisation(home):
    assert normal_in(given(home, {"do_normalize": False})) == Normal((0.0,) * 3, (1.0,) * 3)
    (home / "vit" / FILE).unlink()
    assert normal_in(home / "vit") is None

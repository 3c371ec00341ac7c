"""ViT, DeiT and DINOv2 match transformers in names and function, grow and have the right cost.

The tolerances are 1e-10 in float64 through two layers, and 1e-4 against another implementation in
float32.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest
import tiny
import vision

from jaxgrow.checkpoints import FAMILIES
from jaxgrow.cli.preservation import keeps_function
from jaxgrow.models import ViTConfig
from jaxgrow.models.stack import KeptTokens
from jaxgrow.operators import fpi, hypercloning, lemon, llama_pro

pytestmark = pytest.mark.usefixtures("x64")

EXACT, VISIBLE = 1e-10, 1e-2
DINO = dict(layer_scale=0.5, gated=True, mean_head=True)
SMALL = dict(
    image=10, patch=5, channels=2, classes=11, layers=2, embed=6, heads=3, head_dim=7, mlp=9
)


def config(distillation="none", dtype="float64", **changes) -> ViTConfig:
    return ViTConfig(**SMALL | changes, distillation=distillation, dtype=dtype)


@pytest.mark.parametrize(("size", "millions"), [(192, 5.72), (384, 22.05), (768, 86.57)])
def test_deit_sizes_have_published_parameter_counts(size, millions):
    shapes = tiny.shapes(ViTConfig(embed=size, heads=size // 64, mlp=4 * size))
    assert round(sum(x.size for x in jax.tree.leaves(shapes)) / 1e6, 2) == millions


def test_two_classes_have_no_labels_in_a_checkpoint():
    assert FAMILIES["ViTForImageClassification"].inferred({})["classes"] == 2


@pytest.mark.parametrize(
    "wrong", [np.zeros((2, 10, 9, 2)), np.zeros((2, 10, 10, 3)), np.zeros((2, 10, 10, 2), np.uint8)]
)
def test_what_is_no_image_is_refused(wrong):
    says = r"takes normalised images of floats \[batch, 10, 10, 2\], but got"
    with pytest.raises(ValueError, match=says):
        jax.eval_shape(vision.forward(config()), tiny.params(config()), wrong)


def test_tokens_are_not_dropped():
    small, kept_tokens = config(), KeptTokens(np.zeros((3, 2), np.int32), 0, 1)
    with pytest.raises(ValueError, match="its class token must pass every layer"):
        params, images = tiny.params(small), vision.images(small)
        small.module.apply({"params": params}, images, kept_tokens=kept_tokens)


@pytest.mark.parametrize(
    "own",
    [{"distillation": "head"}, pytest.param(DINO, marks=pytest.mark.extra)],
    ids=["DeiT", "DINOv2"],
)
def test_what_keeps_the_function(own):
    """Spare units keep the mean of the others only without separate LayerScales."""
    small = config(**own, eps=1e-5)
    sizes, units = small.sizes(), {"heads": 5, "mlp": 13}
    ragged, even = (lemon(sizes, {"embed": n, **units}, seed=2) for n in (8, 12))
    wide, deep = hypercloning(sizes, tiny.wider(2)), llama_pro(sizes, {"layers": 3})
    for growth in (wide, deep, even, fpi(sizes, units, seed=1)):
        assert vision.change(growth, small) < EXACT
    kept = vision.change(ragged, small)
    assert kept < EXACT if own != DINO else kept > VISIBLE
    assert keeps_function(even, small, "lemon")
    assert keeps_function(ragged, small, "lemon") == (own != DINO)


def test_dinov2_giant_has_the_published_parameter_count():
    family = FAMILIES["Dinov2ForImageClassification"]
    said = dict(hidden_size=1536, num_hidden_layers=40, num_attention_heads=24, image_size=518)
    found = family.from_hf(said | {"use_swiglu_ffn": True, "num_labels": 1})
    heads = 2 * 1536 + 1
    count = sum(x.size for x in jax.tree.leaves(tiny.shapes(found)))
    assert (count - heads) / 1e6 == pytest.approx(1136.5, abs=0.1)
    assert family.to_hf(found, said)["mlp_ratio"] == 4
    with pytest.raises(ValueError, match=r"no setting for mlp 5000 \(it would be 5120\)"):
        family.to_hf(replace(found, mlp=5000))

"""ViT, DeiT and DINOv2 match transformers in names and function, grow and have the right cost.

The tolerances are 1e-10 in float64 through two layers, and 1e-4 against another implementation in
float32.
"""

import json
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import vision

from jaxgrow import grow, swap
from jaxgrow.axes import LAYERS, is_names, leaves, path
from jaxgrow.checkpoints import FAMILIES
from jaxgrow.cli.preservation import keeps_function
from jaxgrow.models import ViTConfig
from jaxgrow.models.stack import KeptTokens
from jaxgrow.operators import decoalesce, fpi, hypercloning, lemon, ligo, llama_pro, stack

pytestmark = pytest.mark.usefixtures("x64")

EXACT, VISIBLE = 1e-10, 1e-2
KINDS = ("none", "token", "head")
DINO = dict(layer_scale=0.5, gated=True, mean_head=True)
SMALL = dict(
    image=10, patch=5, channels=2, classes=11, layers=2, embed=6, heads=3, head_dim=7, mlp=9
)

either = pytest.mark.parametrize("distillation", KINDS)
ends = pytest.mark.parametrize(
    "distillation", [pytest.param("token", marks=pytest.mark.slow), "none", "head"]
)


def config(distillation="none", dtype="float64", **changes) -> ViTConfig:
    return ViTConfig(**SMALL | changes, distillation=distillation, dtype=dtype)


# --- names ---


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"patch": 3}, "image=10 must be a multiple of patch=3"),
        ({"patch": 0}, "image=10 must be a multiple of patch=0, and patch at least 1"),
        ({"classes": 0}, "classes is 0, less than 1"),
        (
            {"distillation": "head", "mean_head": True},
            "mean_head does not support a distillation token",
        ),
        ({"distillation": "hard"}, "distillation must be 'none', 'token' or 'head', not 'hard'"),
    ],
)
def test_config_errors(wrong, message):
    with pytest.raises(ValueError, match=message):
        ViTConfig(**SMALL | wrong)


@pytest.mark.parametrize(("size", "millions"), [(192, 5.72), (384, 22.05), (768, 86.57)])
def test_deit_sizes_have_published_parameter_counts(size, millions):
    shapes = tiny.shapes(ViTConfig(embed=size, heads=size // 64, mlp=4 * size))
    assert round(sum(x.size for x in jax.tree.leaves(shapes)) / 1e6, 2) == millions


# --- the function ---


def theirs(family, small, folder):
    """Return a transformers model with random weights, and its checkpoint as stored in files."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    from safetensors.numpy import load_file

    values = {key: getattr(small, ours) for key, ours in family.fields.items()}
    hf = {"vit": transformers.ViTConfig, "deit": transformers.DeiTConfig}[family.model_type]
    model = getattr(transformers, family.architecture)(
        hf(**values, num_labels=small.classes)
    ).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape) / 2)
    model.save_pretrained(folder)
    return model, load_file(folder / "model.safetensors")


def ours(family, small, tensors):
    """Convert tensors of transformers to our parameters."""
    stored, known = family.names(small), small.sizes()

    def leaf(key_path, names):
        place = stored[path(key_path)]
        if names[0] != LAYERS:
            return place.to_leaf(tensors[place.name], names, known)
        return np.stack(
            [
                place.to_leaf(tensors[place.name.format(layers=i)], names, known)
                for i in range(small.layers)
            ]
        )

    return jax.tree_util.tree_map_with_path(leaf, tiny.axes(small), is_leaf=is_names)


def back(family, small, params):
    """Convert our parameters to tensors of transformers."""
    stored, found = family.names(small), {}
    for name, x, names in leaves(params, tiny.axes(small)):
        place = stored[name]
        layers = enumerate(x) if names[0] == LAYERS else [("", x)]
        found |= {
            place.name.format(layers=i): place.to_tensor(part, names, small.sizes())
            for i, part in layers
        }
    return found


@pytest.mark.interop
@pytest.mark.parametrize(
    ("architecture", "distillation"),
    [
        ("ViTForImageClassification", "none"),
        ("DeiTForImageClassification", "token"),
        ("DeiTForImageClassificationWithTeacher", "head"),
    ],
)
def test_logits_match_transformers_and_weights_round_trip(architecture, distillation, tmp_path):
    torch = pytest.importorskip("torch")
    family, small = FAMILIES[architecture], config(distillation, "float32", head_dim=2)
    model, tensors = theirs(family, small, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["architectures"], written["model_type"]) == ([architecture], family.model_type)
    assert {**family.inferred(written), **family.fixed} == {
        "classes": small.classes,
        "distillation": distillation,
        "head": "classes",
    }
    assert {key: written[key] for key in family.derived(small)} == family.derived(small)
    assert all(written[key] in values for key, values in family.settings.items())

    params = ours(family, small, tensors)
    with torch.no_grad():
        expected = model(
            torch.from_numpy(vision.images(small).transpose(0, 3, 1, 2))
        ).logits.numpy()
    found = vision.forward(small)(params, vision.images(small))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * expected.std())
    chex.assert_trees_all_equal(back(family, small, params), tensors)


def test_two_classes_have_no_labels_in_a_checkpoint():
    assert FAMILIES["ViTForImageClassification"].inferred({})["classes"] == 2


@pytest.mark.slow  # The fast suite checks GPT-2, and that CaiT saves the right values.
def test_rematerialising_changes_no_gradient():
    small = config()
    plain, remat = (
        vision.gradient(c)(tiny.params(small), vision.images(c))
        for c in (small, replace(small, remat="projections"))
    )
    chex.assert_trees_all_close(remat, plain, rtol=0, atol=EXACT)


@pytest.mark.parametrize(
    "wrong", [np.zeros((2, 10, 9, 2)), np.zeros((2, 10, 10, 3)), np.zeros((2, 10, 10, 2), np.uint8)]
)
def test_what_is_no_image_is_refused(wrong):
    with pytest.raises(
        ValueError, match=r"takes normalised images of floats \[batch, 10, 10, 2\], but got"
    ):
        jax.eval_shape(vision.forward(config()), tiny.params(config()), wrong)


def test_tokens_are_not_dropped():
    small, kept_tokens = config(), KeptTokens(np.zeros((3, 2), np.int32), 0, 1)
    with pytest.raises(ValueError, match="its class token must pass every layer"):
        small.module.apply(
            {"params": tiny.params(small)}, vision.images(small), kept_tokens=kept_tokens
        )


# --- growth ---


@ends
def test_decoalescing_equal_groups_is_exact_and_invertible(distillation):
    large = config(distillation, embed=12, heads=6, mlp=18)
    up = decoalesce(large.sizes(), heads=((0, 3), (1, 5), (2, 4)))
    small, axes = config(distillation), tiny.axes(config(distillation))
    assert small.resized(up) == large
    assert vision.change(up, small) < EXACT
    params = tiny.params(small)
    assert tiny.distance(grow(swap(up), grow(up, params, axes), axes), params) < EXACT


@pytest.mark.parametrize(
    "own",
    [{"distillation": "head"}, pytest.param(DINO, marks=pytest.mark.extra)],
    ids=["DeiT", "DINOv2"],
)
def test_what_keeps_the_function(own):
    """Check the function-preserving growths.

    Spare units with the mean of the others do not keep that mean if each unit has its own
    LayerScale.
    """
    small = config(**own, eps=1e-5)
    ragged, even = (
        lemon(small.sizes(), {"embed": n, "heads": 5, "mlp": 13}, seed=2) for n in (8, 12)
    )
    heads = fpi(small.sizes(), {"heads": 5, "mlp": 13}, seed=1)
    for growth in (
        hypercloning(small.sizes(), tiny.wider(2)),
        llama_pro(small.sizes(), {"layers": 3}),
        even,
        heads,
    ):
        assert vision.change(growth, small) < EXACT
    kept = vision.change(ragged, small)
    assert kept < EXACT if own != DINO else kept > VISIBLE
    assert keeps_function(even, small, "lemon") and keeps_function(ragged, small, "lemon") == (
        own != DINO
    )


def test_what_does_not():
    small, large = config(), config(layers=4, embed=12, heads=6, mlp=18).sizes()
    for growth in (
        decoalesce(large, layers="adjacent"),
        decoalesce(large, heads=((0, 1, 2), (3, 4), (5,))),
        stack(small.sizes(), {"layers": 4}),
    ):
        assert vision.change(growth, small) > VISIBLE


def test_learned_maps_grow_it():
    small, target = config("head"), {"layers": 3, "embed": 8, "heads": 4, "mlp": 10}
    axes = tiny.axes(small)

    def grown(key):
        coefficients = ligo.init_coefficients(ligo.LiGO(), axes, small.sizes(), target, key)
        return grow(
            ligo.learned_growth(coefficients, axes, small.sizes()), tiny.params(small), axes
        )

    params = jax.eval_shape(grown, jax.random.key(0))
    chex.assert_trees_all_equal_shapes(params, tiny.shapes(replace(small, **target)))


# --- dropped and frozen layers, cost ---


@pytest.mark.slow  # `test_cait` checks this for CaiT in the fast suite.
def test_dropped_layers_are_identities():
    with jax.enable_x64(False):
        vision.assert_dropping_is_exact(config("head", "float32"))


def test_dinov2_giant_has_the_published_parameter_count():
    family = FAMILIES["Dinov2ForImageClassification"]
    said = {
        "hidden_size": 1536,
        "num_hidden_layers": 40,
        "num_attention_heads": 24,
        "image_size": 518,
    }
    found = family.from_hf(said | {"use_swiglu_ffn": True, "num_labels": 1})
    heads = 2 * 1536 + 1
    assert (
        sum(x.size for x in jax.tree.leaves(tiny.shapes(found))) - heads
    ) / 1e6 == pytest.approx(1136.5, abs=0.1)
    assert family.to_hf(found, said)["mlp_ratio"] == 4
    with pytest.raises(ValueError, match=r"no setting for mlp 5000 \(it would be 5120\)"):
        family.to_hf(replace(found, mlp=5000))

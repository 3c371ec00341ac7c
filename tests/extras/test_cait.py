"""CaiT has the right parameter names and cost, follows the paper's equations and grows correctly.

The tolerance is 1e-10, for float64 through two layers and two class layers.
"""

from collections import Counter
from dataclasses import replace
from math import erf

import chex
import jax
import numpy as np
import pytest
import tiny
import vision

from jaxgrow.extras.models.cait import CaiTConfig

pytestmark = pytest.mark.usefixtures("x64")

EXACT, VISIBLE = 1e-10, 1e-2
SMALL = dict(image=10, patch=5, channels=3, classes=11, class_layers=4)
SMALL |= dict(layers=2, embed=6, heads=3, head_dim=7, mlp=9)


def config(dtype="float64", **changes) -> CaiTConfig:
    return CaiTConfig(**SMALL | changes, dtype=dtype)


# --- names ---


@pytest.mark.parametrize(("layers", "begins"), [(12, 0.1), (24, 1e-5), (36, 1e-6)])
def test_layer_scale_begins_smaller_in_deeper_models(layers, begins):
    assert config(layers=layers).layer_scale == begins


def test_layer_scale_begins_there_in_layers_and_class_layers():
    small = config("float32")

    def scales(key):
        params = small.init(key)
        return [
            params[part][name]
            for part in ("blocks", "class_blocks")
            for name in ("attention_scale", "mlp_scale")
        ]

    with jax.enable_x64(False):
        for found in jax.jit(scales)(jax.random.key(0)):
            np.testing.assert_array_equal(found, np.float32(0.1))


# --- the function ---


def norm(x, p):
    """Return ``(x - mean) / sqrt(var + 1e-6) * scale + bias`` of each row."""
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * p["scale"][None] + p["bias"][None]


def softmax(x):
    return np.exp(x) / np.exp(x).sum()


def attention(u, z, p, talking):
    """Compute attention query by query, with mixing of the heads before and after the softmax.

    Each head then sums its values with the mixed weights.
    """
    H, _ = p["query"]["bias"].shape
    q, k, v = (
        np.stack([x @ p[n]["kernel"][:, h] + p[n]["bias"][h][None] for h in range(H)])
        for n, x in (("query", u), ("key", z), ("value", z))
    )
    out = np.tile(p["out"]["bias"], (len(u), 1))
    for t in range(len(u)):
        scores = [k[h] @ q[h, t] / np.sqrt(k.shape[-1]) for h in range(H)]
        if talking:
            before, after = p["talk_before"]["kernel"], p["talk_after"]["kernel"]
            weights = [softmax(sum(scores[h] * before[h, g] for h in range(H))) for g in range(H)]
            said = p["talk_after"]["bias"]
            weights = [sum(weights[h] * after[h, g] for h in range(H)) + said[g] for g in range(H)]
        else:
            weights = [softmax(s) for s in scores]
        for h in range(H):
            out[t] += weights[h] @ v[h] @ p["out"]["kernel"][h]
    return out


def mlp(x, p):
    h = x @ p["up"]["kernel"] + p["up"]["bias"][None]
    h = h / 2 * (1 + np.vectorize(erf)(h / np.sqrt(2)))
    return h @ p["down"]["kernel"] + p["down"]["bias"][None]


def logits(params, image, patch):
    """Compute the logits of one image by Sections 2 and 3 of the paper."""
    side = len(image) // patch
    x = []
    for i in range(side):
        for j in range(side):
            pixels = image[i * patch : (i + 1) * patch, j * patch : (j + 1) * patch]
            x.append(np.einsum("pqc,pqcd->d", pixels, params["patch_embedding"]["kernel"]))
    x = np.stack(x) + params["patch_embedding"]["bias"][None] + params["position_embedding"]

    def layer(part, i):
        return jax.tree.map(lambda w: w[i], params[part])

    for i in range(len(params["blocks"]["mlp_scale"])):
        p = layer("blocks", i)
        h = norm(x, p["attention_norm"])
        x = x + p["attention_scale"][None] * attention(h, h, p["attention"], True)
        x = x + p["mlp_scale"][None] * mlp(norm(x, p["mlp_norm"]), p["mlp"])
    u = params["class_embedding"][None]
    for i in range(len(params["class_blocks"]["mlp_scale"])):
        p = layer("class_blocks", i)
        z = norm(np.concatenate([u, x]), p["attention_norm"])
        u = u + p["attention_scale"][None] * attention(z[:1], z, p["attention"], False)
        u = u + p["mlp_scale"][None] * mlp(norm(u, p["mlp_norm"]), p["mlp"])
    return norm(u, params["final_norm"])[0] @ params["head"]["kernel"] + params["head"]["bias"]


def test_logits_are_those_of_the_equations():
    small = config()
    params = tiny.params(small)
    expected = np.stack([logits(params, image, small.patch) for image in vision.images(small)])
    np.testing.assert_allclose(
        vision.forward(small)(params, vision.images(small)), expected, rtol=0, atol=EXACT
    )


def test_rematerialising_is_of_both_stacks():
    plain, remat = (
        Counter(tiny.saved(config("float32", remat=r), vision.images(config())))
        for r in ("products", "projections")
    )
    # These shapes are the scores and the values that they weight.
    attention = {(2, 3, 3, 4, 4): 1, (2, 3, 3, 7, 4): 1}
    of_classes = {(4, 3, 3, 5, 1): 1, (4, 3, 3, 7, 1): 1}
    assert plain - remat == attention | of_classes
    assert remat - plain == {}


# --- growth ---


@pytest.mark.parametrize("shared", [True, False])
def test_learned_maps_grow_it_and_talking_heads_have_own_maps(shared):
    small, target = config(), {"layers": 3, "embed": 8, "heads": 5, "mlp": 10}
    coefficients, params = tiny.learned(small, target, shared)
    width, each = coefficients["width"], () if shared else (2,)
    assert width["heads"]["write"].shape == (*each, 5, 3)
    assert width["query"]["write"].shape == (*each, 5 * 7, 3 * 7)
    assert width["class_blocks/query"]["write"].shape == (5 * 7, 3 * 7)
    assert {
        f"blocks/{part}_{kind}" for part in ("attention", "mlp") for kind in ("norm", "scale")
    } < set(coefficients["depth"])
    assert "blocks" not in coefficients["depth"]  # two LayerScales in one folder are two modules
    chex.assert_trees_all_equal_shapes(params, tiny.shapes(replace(small, **target)))


# --- dropped and frozen layers, dropped patches, cost ---

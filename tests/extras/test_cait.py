"""CaiT has the right parameter names, follows the paper's equations and grows, in float64."""

from collections import Counter
from dataclasses import replace
from functools import partial

import chex
import equations
import jax
import numpy as np
import pytest
import tiny
import vision
from equations import mlp

from jaxgrow.extras.models.cait import CaiTConfig

pytestmark = pytest.mark.usefixtures("x64")

EXACT, VISIBLE = 1e-10, 1e-2
SMALL = dict(image=10, patch=5, channels=3, classes=11, class_layers=4)
SMALL |= dict(layers=2, embed=6, heads=3, head_dim=7, mlp=9)


def config(dtype="float64", **changes) -> CaiTConfig:
    return CaiTConfig(**SMALL | changes, dtype=dtype)


def test_layer_scale_begins_smaller_in_deeper_models():
    """It is the same in layers and class layers."""
    begins = {n: config(layers=n).layer_scale for n in (12, 24, 36)}
    assert begins == {12: 0.1, 24: 1e-5, 36: 1e-6}
    with jax.enable_x64(False):
        params = jax.jit(config("float32").init)(jax.random.key(0))
    for part in ("blocks", "class_blocks"):
        for name in ("attention_scale", "mlp_scale"):
            np.testing.assert_array_equal(params[part][name], np.float32(0.1))


norm = partial(equations.norm, eps=1e-6)


def softmax(x):
    return np.exp(x) / np.exp(x).sum()


def attention(u, z, p, talking):
    """Mix the heads before and after the softmax; each head then sums its values."""
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


def logits(params, image, patch):
    """Compute the logits of one image by Sections 2 and 3 of the paper."""
    side = len(image) // patch
    patches = image.reshape(side, patch, side, patch, -1)
    x = np.einsum("ipjqc,pqcd->ijd", patches, params["patch_embedding"]["kernel"])
    x = x.reshape(side**2, -1) + params["patch_embedding"]["bias"] + params["position_embedding"]

    def layer(part, i):
        return jax.tree.map(lambda w: w[i], params[part])

    for i in range(len(params["blocks"]["mlp_scale"])):
        p = layer("blocks", i)
        h = norm(x, p["attention_norm"])
        x = x + p["attention_scale"] * attention(h, h, p["attention"], True)
        x = x + p["mlp_scale"] * mlp(norm(x, p["mlp_norm"]), p["mlp"])
    u = params["class_embedding"][None]
    for i in range(len(params["class_blocks"]["mlp_scale"])):
        p = layer("class_blocks", i)
        z = norm(np.concatenate([u, x]), p["attention_norm"])
        u = u + p["attention_scale"] * attention(z[:1], z, p["attention"], False)
        u = u + p["mlp_scale"] * mlp(norm(u, p["mlp_norm"]), p["mlp"])
    return equations.linear(norm(u, params["final_norm"])[0], params["head"])


def test_logits_are_those_of_the_equations():
    small = config()
    params = tiny.params(small)
    expected = np.stack([logits(params, image, small.patch) for image in vision.images(small)])
    found = vision.forward(small)(params, vision.images(small))
    np.testing.assert_allclose(found, expected, rtol=0, atol=EXACT)


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


@pytest.mark.parametrize("shared", [True, False])
def test_learned_maps_grow_it_and_talking_heads_have_own_maps(shared):
    small, target = config(), {"layers": 3, "embed": 8, "heads": 5, "mlp": 10}
    coefficients, params = tiny.learned(small, target, shared)
    width, each = coefficients["width"], () if shared else (2,)
    assert width["heads"]["write"].shape == (*each, 5, 3)
    assert width["query"]["write"].shape == (*each, 5 * 7, 3 * 7)
    assert width["class_blocks/query"]["write"].shape == (5 * 7, 3 * 7)
    kinds = [(part, kind) for part in ("attention", "mlp") for kind in ("norm", "scale")]
    assert {f"blocks/{part}_{kind}" for part, kind in kinds} < set(coefficients["depth"])
    assert "blocks" not in coefficients["depth"]  # two LayerScales in one folder are two modules
    chex.assert_trees_all_equal_shapes(params, tiny.shapes(replace(small, **target)))

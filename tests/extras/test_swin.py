"""Swin V2 has the right names and cost, follows its paper's equations and grows by stages.

The tolerance is 1e-10, for float64 through four layers.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import vision
from counting import products
from equations import attention, linear, mlp, norm

from jaxgrow import flops
from jaxgrow.axes import stages
from jaxgrow.extras.freeze import Freeze, hold_frozen
from jaxgrow.extras.models.swin import SwinConfig
from jaxgrow.extras.peft.adapter_flops import adapter_train_flops
from jaxgrow.extras.peft.lora import LoRA
from jaxgrow.layerdrop import KeepMask, LayerDrop
from jaxgrow.models import Adapter
from jaxgrow.models.stack import KeptTokens
from jaxgrow.operators import lemon, llama_pro, new_layers, stack
from train.plan.modifiers import KeepMasks

pytestmark = pytest.mark.usefixtures("x64")

EXACT, VISIBLE = 1e-10, 1e-2
# The windows are 3 x 3, over 8 x 8 and then 4 x 4 patches, so some windows are padded. The position
# biases of the first stage belong to another window size (``trained_windows``).
SMALL = dict(image=16, patch=2, channels=2, classes=7, window=3, position_mlp=5)
SMALL |= dict(head_dim=3, trained_windows=(4, 0))
SMALL |= dict(layers=(2, 2), embed=(6, 10), heads=(3, 2), mlp=(9, 11))


def config(dtype="float64", **changes) -> SwinConfig:
    return SwinConfig(**SMALL | changes, dtype=dtype)


# --- names ---


def test_the_config_knows_its_stages():
    small = config()
    assert (small.depths, small.depth, small.length) == ((2, 2), 4, 64)
    assert stages(small.sizes()) == {"layers.0": slice(0, 2), "layers.1": slice(2, 4)}
    larger = small.with_sizes({"layers.1": 5, "embed.0": 8, "classes": 3})
    assert larger == replace(small, layers=(2, 5), embed=(8, 10), classes=3)


@pytest.mark.parametrize(("wrong", "says"), [
    ({"heads": (3,)}, "one number for each stage, but .*'heads': 1"),
    ({"image": 18}, "image=18 is not a multiple of 4, .* in the last stage: set image=16"),
    ({"layers": (2, 0)}, "layers.1 is 0, less than 1"),
    ({"adapter": Adapter()}, "stages have different widths: leave out adapter"),
])  # fmt: skip
def test_what_is_no_swin(wrong, says):
    with pytest.raises(ValueError, match=says):
        config(**wrong)


def test_windows_grow_with_images_and_positions_keep_units():
    large = SwinConfig(image=192, window=12).for_images(384, 10)
    assert (large.image, large.classes, large.window) == (384, 10, 24)
    assert large.trained_windows == (12, 12, 12, 6)
    assert large.for_images(384, 5) == replace(large, classes=5)


# --- the function ---


def logits(params, image, small):
    """Compute the logits of one image."""
    side, embedding = small.image // small.patch, params["patch_embedding"]
    patches = np.stack(np.split(np.stack(np.split(image, side, 1)), side, 1))
    x = np.einsum("yxpqc,pqcd->yxd", patches, embedding["kernel"]) + embedding["bias"]
    x = norm(x, params["patch_norm"])
    for s, layers in enumerate(small.layers):
        if s:
            p = params[f"merge{s}"]
            kernel = p["reduction"]["kernel"]
            four = [[x[i::2, j::2] @ kernel[i, j] for j in range(2)] for i in range(2)]
            x = norm(sum(map(sum, four)), p["norm"])
        for i in range(layers):
            p = jax.tree.map(lambda w, i=i: w[i], params[f"blocks{s}"])
            window = min(small.window, len(x))
            shift = window // 2 if i % 2 and len(x) > window else 0
            trained = (small.trained_windows[s] if small.trained_windows else 0) or window
            x = x + norm(attention(x, p["attention"], window, trained, shift), p["attention_norm"])
            x = x + norm(mlp(x, p["mlp"]), p["mlp_norm"])
    return linear(norm(x, params["final_norm"]).mean((0, 1)), params["head"])


@pytest.mark.parametrize(
    "changes", [{}, {"window": 4, "trained_windows": ()}], ids=["filled", "whole"]
)
def test_logits_are_those_of_the_equations(changes):
    small = config(**changes)
    params = tiny.params(small)
    # This is more than ln 100, the limit of the scale.
    params["blocks0"]["attention"]["log_scale"][0, 0] = 6.0
    with jax.numpy_rank_promotion("allow"):
        expected = np.stack([logits(params, image, small) for image in vision.images(small)])
    found = vision.forward(small)(params, vision.images(small))
    np.testing.assert_allclose(found, expected, rtol=0, atol=EXACT)


def test_every_sublayer_adds_nothing_at_first():
    """Check that the norm scales after the sublayers start at zero, as in the authors' code."""
    with jax.enable_x64(False):
        params = jax.jit(config("float32").init)(jax.random.key(0))
    for part in ("blocks0", "blocks1"):
        assert not any(
            np.any(params[part][f"{n}_norm"][x])
            for n in ("attention", "mlp")
            for x in ("scale", "bias")
        )


# --- growth ---


def test_layers_of_stages_are_counted_from_the_input_on():
    growth = stack(config().sizes(), {"layers.1": 4})
    assert new_layers(growth) == (4, 5)
    assert new_layers(llama_pro(config().sizes(), {"layers.0": 3})) == (2,)
    with pytest.raises(ValueError, match=r"axis 'layers': stack grows layers\.0, layers\.1"):
        stack(config().sizes(), {"layers": 4})
    message = r"axis 'layers\.0': llama_pro can at most double the 2 layers, but 5 were requested"
    with pytest.raises(ValueError, match=message):
        llama_pro(config().sizes(), {"layers.0": 5})


def test_a_ragged_lemon_of_stages_has_one_eps():
    with pytest.raises(ValueError, match="lemon would multiply the eps that all norms share"):
        lemon(config().sizes(), {"embed.0": 8})


# --- dropped and frozen layers, cost ---


SOME = np.array([True, False, True, False, True, True])
SCALE = np.array([1.5, 2, 1, 1.25, 2, 1], np.float32)
BY_GATES = KeepMask(SOME, SCALE, "sublayer")
BY_INDEX = KeepMask((np.array([0, 2], np.int32), np.array([1, 2], np.int32)), SCALE, "sublayer")


def dropping():
    """Return a model whose widths, powers of two, have exact reciprocals in the norms."""
    small = config("float32", embed=(8, 16), layers=(3, 3), image=8)
    return small, tiny.params(small, dtype="float32")


def test_both_executions_drop_layers_of_all_stages_bitwise():
    with jax.enable_x64(False):
        small, params = dropping()
        images = vision.images(small)
        run = jax.jit(lambda p, mask: small.module.apply({"params": p}, images, keep_mask=mask))
        dense = run(params, None)
        some = run(params, BY_GATES)
        np.testing.assert_array_equal(some, run(params, BY_INDEX))
        every = KeepMask(np.ones(6, bool), np.ones(6, np.float32), "sublayer")
        np.testing.assert_array_equal(dense, run(params, every))
        assert np.abs(some - dense).max() > VISIBLE


def test_indices_are_given_for_each_stage():
    small = config()

    def run(p):
        mask = KeepMask(np.array([0, 1, 3], np.int32))
        return small.module.apply({"params": p}, vision.images(small), keep_mask=mask)

    message = "number of layers that a stage keeps is static: give a tuple"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(run, tiny.shapes(small))


def test_stage_masks_keep_equal_counts_and_weigh_costs():
    drop = LayerDrop(theta=0.5, time="constant", depth="uniform", execution="gather")
    weights = np.array([1.5] * 4 + [5 / 7] * 7)
    draw, kept = KeepMasks(drop, (4, 7), 400, 3, 0, None, weights), np.zeros(11)
    for step in range(400):
        _, given, ran = draw(step)
        (micro, first), (_, second) = (x.shape for x in given.layers)
        assert (micro, first) == (3, 2) and second in (3, 4)
        assert ran == pytest.approx(1.5 * first + 5 / 7 * second)
        for begin, x in zip((0, 4), given.layers, strict=True):
            np.add.at(kept, begin + x.reshape(-1), 1 / 1200)
    # The mean is taken over 1200 keep masks.
    np.testing.assert_allclose(kept, 0.5, atol=0.06)


def biases(small: SwinConfig, up: int, down: int, first: int = 0) -> float:
    """Return FLOPs of the position biases, for ``up`` and ``down`` products with each kernel."""
    units, layers = small.position_mlp, []
    for n, grid, heads in zip(small.layers, small.grids, small.heads, strict=True):
        layers += [(2 * grid.window - 1) ** 2 * (up * 4 * units + down * 2 * units * heads)] * n
    return sum(layers[first:])


def step(small: SwinConfig, frozen: int):
    shape = jax.ShapeDtypeStruct(vision.images(small).shape, jnp.float32)

    def run(p, x):
        return small.module.apply({"params": p}, x, frozen=frozen)

    def loss(p, x):
        return -jax.nn.log_softmax(run(p, x))[..., 0].mean()

    given = tiny.shapes(small), shape
    return [products(jax.make_jaxpr(f)(*given).jaxpr) for f in (run, jax.value_and_grad(loss))]


def test_every_matrix_product_of_the_program_is_counted():
    small = config("float32", layers=(1, 2))
    forward, train = step(small, 0)
    positions = vision.BATCH * small.length
    counted = flops.forward_flops(small, positions), flops.train_flops(small, positions)
    assert counted[0] + biases(small, 1, 1) == pytest.approx(forward, rel=1e-12)
    assert counted[1] + biases(small, 2, 3) == pytest.approx(train, rel=1e-12)
    weights = flops.layer_weights(small)
    assert weights.mean() == pytest.approx(1) and len(set(weights)) == 2


@pytest.mark.parametrize("frozen", [2, 3])
def test_no_backward_product_is_computed_below_frozen_layers(frozen):
    small = config("float32", layers=(2, 1))
    _, train = step(small, frozen)
    counted = flops.train_flops(small, vision.BATCH * small.length, frozen=frozen)
    found = counted + biases(small, 1, 1) + biases(small, 1, 2, frozen)
    assert found == pytest.approx(train, rel=1e-12)


def test_modules_between_stages_freeze_with_the_next_layer():
    small = config()
    axes, known = tiny.axes(small), small.sizes()
    assert Freeze((0, 1, 2)).bottom(axes, known) == 3
    assert Freeze((0, 1, 2), ("patch_*",), below=False).bottom(axes, known) == 2
    assert Freeze((0, 1, 2), ("patch_*", "merge1/*"), below=False).bottom(axes, known) == 3
    params = tiny.params(small)
    after = jax.tree.map(lambda x: x + 1, params)
    for layers, merged in (((0, 1), False), ((0, 1, 2), True)):
        held = hold_frozen(params, after, Freeze(layers).mask(4), params, axes, below=True)
        still = {name: (x == y) for name, x, y in tiny.pairs(params, held)}
        assert still["patch_norm/scale"].all() and still["merge1/norm/scale"].all() == merged
        assert [x.all() for s in range(2) for x in still[f"blocks{s}/mlp/up/bias"]] == [
            i in layers for i in range(4)
        ]


def test_what_stages_do_not_support_is_refused():
    small = config()
    message = "a SwinConfig has stages with different numbers of positions"
    with pytest.raises(ValueError, match=message):
        adapter_train_flops(LoRA(), small, 64)
    params, kept_tokens = tiny.params(small), KeptTokens(np.zeros((3, 2), np.int32), 0, 1)
    with pytest.raises(ValueError, match="windows need all of their patches"):
        small.module.apply({"params": params}, vision.images(small), kept_tokens=kept_tokens)

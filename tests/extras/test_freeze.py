"""Frozen parameters stay bitwise identical.

No backward pass runs below the first trained layer.
"""

from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial

import chex
import jax
import numpy as np
import pytest
import runs
import tiny

from jaxgrow import grow, operators
from jaxgrow.axes import BELOW, has_mark, leaves
from jaxgrow.extras.freeze import Freeze, hold_frozen
from jaxgrow.extras.models.cait import CaiTConfig
from jaxgrow.models import BERTConfig, LlamaConfig, ViTConfig
from train import pretrain
from train.data.windows import next_tokens
from train.extras.modifiers import FreezeParts
from train.extras.run_params import load_params
from train.plan.methods import GrowTo, TrainStage
from train.plan.training import Train
from train.state.mesh import replicated_sharding
from train.state.model import loss
from train.state.optim import Optim, transformation
from train.step.parallel import mapped
from train.step.step import StepInputs, train_step

LARGE = runs.LARGE
TX = transformation(Optim())
TOKENS = np.random.default_rng(0).integers(0, 256, (8, 9)).astype(np.int32)
BATCH = next_tokens(TOKENS)
BOTTOM = Freeze((0, 1))


def moved(before, after):
    """Return ``{path: whether it changed}``, with one value per layer for the blocks."""
    found = {}
    for name, a, b in tiny.pairs(before, after):
        layers = [bool((x != y).any()) for x, y in zip(a, b, strict=True)]
        found[name] = layers if "blocks/" in name else any(layers)
    return found


def of_adam(before, after):
    """Return the pairs of parameters and of both moments."""
    (params, opt), (new, new_opt) = before, after
    return (params, new), (opt[1].mu, new_opt[1].mu), (opt[1].nu, new_opt[1].nu)


# --- frozen parameters ---


@pytest.mark.parametrize(("layers", "paths", "bottom"), [
    ((0, 1), None, 2),
    ((1, 0, 3), None, 2),
    ((1, 2), None, 0),
    ((), None, 0),
    ((0, 1), ("token_embedding", "position*"), 2),
    ((0, 1), ("*",), 2),
    # A trained embedding needs every backward pass.
    *(((0, 1), paths, 0) for paths in ((), ("token_embedding",), ("position_embedding",), ("blocks/*",))),
])  # fmt: skip
def test_the_frozen_bottom_is_contiguous(layers, paths, bottom):
    freeze = Freeze(layers) if paths is None else Freeze(layers, paths, below=False)
    assert freeze.bottom(LARGE.axes()) == bottom


def test_what_is_below_the_layers_depends_on_the_family():
    tables = ("token_embedding", "position_embedding")
    sizes = dict(layers=2, embed=4, heads=2, head_dim=2, mlp=8)
    bert = BERTConfig(vocab=8, context=4, **sizes)
    # The token types and a norm are trained.
    assert Freeze((0, 1), tables, below=False).bottom(bert.axes()) == 0
    below = (*tables, "type_embedding", "embedding_norm/*")
    assert Freeze((0, 1), below, below=False).bottom(bert.axes()) == 2
    llama = LlamaConfig(vocab=8, context=4, **sizes, kv_heads=1)
    assert Freeze((0, 1), ("token_embedding",), below=False).bottom(llama.axes()) == 2
    vit = dict(image=4, patch=2, channels=1, classes=3, **sizes)
    for config in (ViTConfig(**vit), CaiTConfig(**vit)):
        shapes = jax.eval_shape(config.init, jax.random.key(0))
        every = leaves(shapes, config.axes())
        found = {path for path, _, names in every if has_mark(names, BELOW)}
        # In CaiT, the class token comes after the layers.
        tokens = {"class_embedding"} if isinstance(config, ViTConfig) else set()
        patches = {"patch_embedding/kernel", "patch_embedding/bias", "position_embedding"}
        assert found == patches | tokens


def test_the_mask_by_hand_and_of_layers_that_the_model_lacks():
    assert Freeze((2, 0)).mask(4).tolist() == [True, False, True, False]
    says = r"freeze selects the layers \[4, -1\], but the model has the layers 0 to 3"
    with pytest.raises(ValueError, match=says):
        Freeze((4, 0, -1)).mask(4)
    with pytest.raises(ValueError, match=says):
        Train("large", 8, Optim(), LARGE, (FreezeParts(Freeze((4, 0, -1))),))


@pytest.mark.parametrize(
    "paths", [(), ("*embedding",), ("final_norm/*", "blocks/attention/*/bias")]
)
def test_frozen_parameters_and_moments_stay_bitwise(paths):
    model = runs.trained(LARGE, TX)
    before = model.params, model.opt
    after, mask = jax.tree.map(lambda x: x + 1, before), [True, False, False, True]
    held = hold_frozen(before, after, mask, model.params, LARGE.axes(), paths)
    for tree, new in of_adam(before, held):
        for name, layers in moved(tree, new).items():
            if any(fnmatchcase(name, p) for p in paths):
                assert not np.any(layers), name
            elif name.startswith("blocks/"):
                assert layers == [False, True, True, False], name
            else:
                assert layers, name
    assert int(held[1][1].count) == int(held[1][2].count) == 6


# --- the training step ---


@pytest.fixture(scope="module")
def step():
    return mapped(
        partial(train_step, TX, 1, (FreezeParts(BOTTOM),)), "mesh", runs.mesh(), donate=True
    )


def test_a_step_moves_no_frozen_layer_or_tied_embedding(step):
    before = runs.trained(LARGE, TX)
    after = jax.device_put(before, replicated_sharding(runs.mesh()))
    for number in range(2):
        given = StepInputs(np.float32(0.1), np.uint32(number), given=(None,))
        after, metrics = step(after, BATCH, given)
    after = jax.device_get(after)
    for tree, new in of_adam((before.params, before.opt), (after.params, after.opt)):
        for name, layers in moved(tree, new).items():
            of_layers = [False, False, True, True]
            below = name.endswith("embedding")
            assert layers == (of_layers if name.startswith("blocks/") else not below), name
    assert after.opt[1].count == after.opt[2].count == 7
    assert float(metrics["grad_norm"]) > 0


def test_the_norm_of_the_gradients_is_that_of_the_trained_parameters():
    """Layers above a trained one have gradients, but they must not change the clipping."""
    model = runs.trained(LARGE, TX)
    freeze = Freeze((1,), ("token_embedding",), below=False)
    step = mapped(partial(train_step, TX, 1, (FreezeParts(freeze),)), "mesh", runs.mesh())
    placed = jax.device_put(model, replicated_sharding(runs.mesh()))
    _, metrics = step(placed, BATCH, StepInputs(np.float32(0.1), given=(None,)))
    gradient = jax.grad(lambda params: loss(replace(model, params=params), BATCH))
    grads = jax.jit(gradient)(model.params)
    squares = 0.0
    for name, x, _ in leaves(grads, LARGE.axes()):
        trained = np.asarray(x)[[0, 2, 3]] if name.startswith("blocks/") else np.asarray(x)
        if name != "token_embedding":
            squares += float(np.square(trained).sum())
    assert float(metrics["grad_norm"]) == pytest.approx(squares**0.5, rel=1e-4)


def test_frozen_layers_have_zero_gradients_only():
    config = replace(LARGE, tied=False)

    @jax.jit
    def gradients(params):
        def loss(params, frozen):
            logits = config.module.apply({"params": params}, TOKENS[:, :-1], frozen=frozen)
            return jax.nn.log_softmax(logits)[..., 0].mean(), logits

        return {frozen: jax.grad(loss, has_aux=True)(params, frozen) for frozen in (0, 2)}

    found = gradients(runs.trained(config, TX).params)
    dense, logits = found.pop(0)
    for frozen, (grads, same) in found.items():
        # The results differ by float32 rounding, because they use one or two scans.
        chex.assert_trees_all_close(same, logits, rtol=1e-5, atol=1e-6)
        for name, a, b in tiny.pairs(dense, grads):
            assert a.any(), name
            layers = frozen if name.startswith("blocks/") else 0
            layers = len(b) if name.endswith("_embedding") else layers
            assert not b[:layers].any(), name
            np.testing.assert_allclose(b[layers:], a[layers:], rtol=1e-4, atol=1e-7, err_msg=name)


# --- plans ---


def test_layers_that_were_added_train_alone(small_run, by="llama_pro"):
    """LLaMA Pro trains only the added half of the layers."""
    wide = operators.hypercloning(runs.SMALL.sizes(), {"embed": 8, "heads": 2, "mlp": 16})
    deep = getattr(operators, by)(runs.SMALL.sizes(), {"layers": 4})
    axes = runs.SMALL.axes()
    grown = grow(deep, grow(wide, load_params(small_run), axes), axes)
    new = operators.new_layers(deep)
    assert new == (1, 3)
    stage = TrainStage(0.25, modifiers=(FreezeParts(Freeze((0, 2))),))
    e = runs.growing(small_run.parent, GrowTo((stage,), ("hypercloning", by)), name=by)
    result = pretrain.run_experiment(e, small_run.parent / by)
    for name, layers in moved(grown, load_params(small_run.parent / by)).items():
        of_layers, below = [i in new for i in range(4)], name.endswith("embedding")
        assert layers == (of_layers if name.startswith("blocks/") else not below), name
    tokens, plain = 2 * e.batch * LARGE.context, replace(e.plan[-1], modifiers=())
    assert result["phases"][-1]["flops"] == e.plan[-1].flops(tokens) < plain.flops(tokens)

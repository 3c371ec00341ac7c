"""Muon updates the matrices that axis names select, at the right cost, and its momentum grows."""

from dataclasses import replace
from math import prod

import chex
import jax
import numpy as np
import optax
import pytest
import runs
import tiny
from counting import products
from runs import MODEL

from jaxgrow import flops, grow, grow_optimizer, operators
from jaxgrow.axes import is_names, path
from jaxgrow.extras.models.cait import CaiTConfig
from jaxgrow.models import BERTConfig, Config, LlamaConfig, ViTConfig
from jaxgrow.optim import muon
from train.extras.modifiers import Rewarm
from train.plan.methods import Growing, GrowTo, Scratch, TrainStage
from train.plan.training import Train
from train.run.trainer import run_experiment
from train.state.mesh import Mesh
from train.state.optim import Optim, transformation

OPTIM = Optim(name="muon", peak_lr=1e-2, warmup=1)
WIDTHS = {"embed": 8, "heads": 2, "head_dim": 4, "mlp": 16}
IMAGES = WIDTHS | {"image": 8, "patch": 4, "channels": 1, "classes": 3}
TEXT = WIDTHS | {"vocab": 16, "context": 8, "layers": 3}
# The values are (matrices, rows, columns), counted by hand.
FAMILIES: dict[str, tuple[Config, dict[str, tuple[int, int, int]]]] = {
    "gpt2": (MODEL, {}),
    "llama": (
        LlamaConfig(**TEXT, kv_heads=1),
        {"attention/key": (3, 8, 4), "attention/value": (3, 8, 4), "mlp/gate": (3, 8, 16)},
    ),
    "bert": (BERTConfig(**TEXT, types=1), {"attention/query": (3, 8, 8), "mlp/down": (3, 16, 8)}),
    "vit": (ViTConfig(**IMAGES, layers=3), {"attention/out": (3, 8, 8), "mlp/up": (3, 8, 16)}),
    "cait": (CaiTConfig(**IMAGES, layers=3, class_layers=2), {}),
}


def by_path(tree, is_leaf=None):
    return {path(p): x for p, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf)}


def matrices(config: Config) -> dict[str, tuple[int, int, int]]:
    """Return the number of matrices, rows and columns of each leaf that Muon updates."""
    names = by_path(config.axes(), is_names)
    shapes = {leaf: x.shape for leaf, x in by_path(tiny.shapes(config)).items()}
    assert names.keys() == shapes.keys()
    found = {}
    for leaf, at in muon.dimension_numbers(config.axes()).items():
        rows, columns = (
            prod(shapes[leaf][i] for i in side) for side in (at.reduction_axis, at.output_axis)
        )
        found[leaf] = (prod(shapes[leaf]) // (rows * columns), rows, columns)
    return found


@pytest.mark.parametrize(("config", "expected"), FAMILIES.values(), ids=FAMILIES)
def test_layer_kernels_use_muon_and_all_other_leaves_adam(config, expected):
    found = matrices(config)
    assert all("kernel" in leaf and "blocks" in leaf for leaf in found)
    leaves = by_path(tiny.shapes(config))
    kernels = {leaf for leaf in leaves if "blocks" in leaf and leaf.endswith("kernel")}
    # This selection by name holds for our families; other models use other kernel names.
    assert found.keys() == kernels
    for end, sizes in expected.items():
        assert found[f"blocks/{end}/kernel"] == sizes


def stepped(tx, params, axes, steps=3, seed=0):
    rng = np.random.default_rng(seed)
    update = jax.jit(lambda g, s: tx.update(g, s, params, axes=axes))
    state = jax.jit(tx.init)(params)
    for _ in range(steps):
        grads = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), params)
        updates, state = update(grads, state)
    return updates, state


def test_kernels_with_outputs_first_have_the_same_update():
    """The order [outputs, inputs] of stacked PyTorch and Equinox layers."""
    x = np.random.default_rng(0).normal(size=(2, 4, 6)).astype(np.float32)
    rows, columns = (
        muon.scale_by_muon_and_adam(muon.dimension_numbers({"w": names})) for names in
        (("layers", "embed.in", "mlp"), ("layers", "mlp", "embed.in"))
    )  # fmt: skip
    expected, _ = rows.update({"w": x}, rows.init({"w": x}))
    turned = {"w": x.swapaxes(1, 2)}
    found, _ = columns.update(turned, columns.init(turned))
    np.testing.assert_allclose(found["w"].swapaxes(1, 2), expected["w"], rtol=1e-5, atol=1e-6)


def test_updates_match_optax_muon_and_adam():
    config = tiny.config(dtype="float32")
    params, axes = tiny.params(config, dtype="float32"), tiny.axes(config)
    optim = replace(OPTIM, clip=1e9, weight_decay=0.0, muon_momentum=0.8, muon_rms=0.3)
    ours, _ = stepped(transformation(optim, axes), params, axes)
    adam, _ = stepped(transformation(replace(optim, name="adamw")), params, axes)
    at = muon.dimension_numbers(axes)
    assert len(at) == 6
    parts = [by_path(tree) for tree in (ours, adam, params)]
    flat = {leaf: tuple(part[leaf] for part in parts) for leaf in parts[0]}
    for leaf, (update, adams, _) in flat.items():
        if leaf not in at:
            np.testing.assert_array_equal(update, adams)
    # Pass the same gradients through the Muon of optax, one matrix at a time.
    alone = {
        f"{leaf} {layer}": x[layer].reshape(prod(x.shape[i] for i in at[leaf].reduction_axis), -1)
        for leaf, (_, _, x) in flat.items() if leaf in at for layer in range(len(x))
    }  # fmt: skip
    peer = optax.contrib.muon(1.0, beta=0.8, consistent_rms=0.3)
    rng, state, update = np.random.default_rng(0), jax.jit(peer.init)(alone), jax.jit(peer.update)
    for _ in range(3):
        grads = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), params)
        by_leaf = by_path(grads)
        cut = {
            name: by_leaf[name[:-2]][int(name[-1])].reshape(x.shape) for name, x in alone.items()
        }
        updates, state = update(cut, state, alone)
    for name, update in updates.items():
        mine = flat[name[:-2]][0][int(name[-1])].reshape(update.shape)
        np.testing.assert_allclose(mine, -update, atol=1e-5)


@pytest.mark.parametrize("config", [c for c, _ in FAMILIES.values()], ids=FAMILIES)
def test_every_product_of_an_update_is_counted(config):
    params, axes = jax.eval_shape(config.init, jax.random.key(0)), config.axes()
    tx = transformation(OPTIM, axes)
    state = jax.eval_shape(tx.init, params)
    program = jax.make_jaxpr(lambda g, s, p: tx.update(g, s, p, axes=axes))(params, state, params)
    assert products(program.jaxpr) == muon.muon_flops(axes, config.sizes()) > 0


def test_grown_momentum_gives_an_orthogonal_next_update():
    """The momentum of the grown model is the growth of the momentum by the dual map."""
    config = tiny.config(dtype="float32")
    params, axes = tiny.params(config, dtype="float32"), tiny.axes(config)
    tx = transformation(replace(OPTIM, clip=1e9), axes)
    growth = operators.hypercloning(tiny.WIDTHS, tiny.wider(2))
    large, tokens = config.resized(growth), tiny.tokens()

    def moved(config, params):
        gradient = tiny.gradient(config)(params, tokens)
        update = jax.jit(lambda g, p: tx.update(g, tx.init(p), p, axes=axes)[1])
        return jax.device_get(update(gradient, params))

    grown = grow_optimizer(tx, moved(config, params), growth, params, axes, "exact")
    chex.assert_trees_all_close(grown, moved(large, grow(growth, params, axes)), atol=2e-6)


def test_growing_during_a_run_counts_every_update_in_the_ledger(tmp_path):
    to = GrowTo((TrainStage(0.5, warmup=0),), by=runs.DOUBLED, moments="exact")
    method = Growing(runs.SMALL, TrainStage(0.5), (to,))
    experiment = runs.experiment(tmp_path, steps=4, optim=OPTIM, model=runs.LARGE, method=method)
    result = run_experiment(experiment, tmp_path / "run")
    assert np.isfinite(result["val_loss"]) and result["steps"] == 4
    steps = [2 * step(config, experiment.batch) for config in (runs.SMALL, runs.LARGE)]
    trained = [phase["flops"] for phase in result["phases"] if phase["steps"]]
    planned = [p.cost(experiment.batch) for p in experiment.plan if p.cost(1)]
    assert trained == planned == steps


@pytest.mark.slow
def test_a_run_that_was_killed_ends_with_the_same_bits(tmp_path):
    """Check that a checkpoint restores the empty entries of the optimizer state."""
    experiment = runs.experiment(tmp_path, steps=4, optim=OPTIM, checkpoint_every=2)
    run_experiment(experiment, tmp_path / "whole")
    runs.stopped(experiment, tmp_path / "stopped", 2)
    runs.assert_same_end(tmp_path / "stopped", tmp_path / "whole")


@pytest.mark.slow
def test_a_model_in_parts_takes_the_same_steps(tmp_path):
    whole = runs.experiment(tmp_path, steps=3, optim=OPTIM, log_every=1)
    parts = replace(whole, mesh=Mesh(fsdp=2, tensor=2))
    losses = []
    for name, experiment in (("whole", whole), ("parts", parts)):
        run_experiment(experiment, tmp_path / name)
        losses.append([line["loss"] for line in runs.log(tmp_path / name) if "loss" in line])
    np.testing.assert_allclose(*losses, rtol=1e-5)


def step(config, samples):
    return flops.train_flops(config, samples * config.context) + muon.muon_flops(
        config.axes(), config.sizes()
    )


def test_what_goes_by_adams_clock_is_refused():
    with pytest.raises(ValueError, match="not muon"):
        Train("large", 8, replace(OPTIM, warmup=0), runs.LARGE, modifiers=(Rewarm(),))
    with pytest.raises(ValueError, match="name must be 'adamw', 'muon' or 'sgd', not 'lion'"):
        replace(OPTIM, name="lion")
    assert Scratch().plan(MODEL, OPTIM, 1)[0].fixed_flops() > 0

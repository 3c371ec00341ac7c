"""Fine-tuning by a LoRA: what stands still does to the bit, what trains is small, and the run ends in a plain model."""

from dataclasses import replace

import jax
import numpy as np
import pytest
import runs
from finetunings import FAMILIES, checkpoint, cola, tuning

from jaxgrow import flops, lora
from jaxgrow.drop import LayerDrop
from jaxgrow.freeze import Freeze
from jaxgrow.interop import load
from jaxgrow.lora import LoRA
from train import finetune as command
from train.errors import UserError
from train.loop.memory import state
from train.loop.trainer import run
from train.plan import adapting
from train.plan.adapting import Adapt
from train.plan.methods import FineTune
from train.plan.plan import shapes
from train.state.heads import split
from train.state.mesh import Mesh

OWN = LoRA(rank=4, alpha=16.0, targets=("*/attention/*", "*/mlp/*"))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    for name in ("gpt2", "bert"):
        checkpoint(home / name, FAMILIES[name])
    cola(home / "cola")
    return home


def few(home, steps=6, **changes):
    """A run of a few steps."""
    experiment = tuning(home / "cola", lora=OWN).of(home / "gpt2", 1e-2, 0)
    return replace(experiment, **{"steps": steps, "checkpoint_every": 2, "eval_every": steps} | changes)


@pytest.fixture(scope="module")
def whole(home, tmp_path_factory):
    """The folder of a run that was never stopped."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(few(home), folder)
    return folder


def test_a_task_is_learned(home):
    found = command.finetune(tuning(home / "cola", lora=OWN, epochs=6), home / "gpt2", home / "runs")
    assert found[1e-2][0]["dev"]["matthews"] > 0.9


def test_the_model_at_the_end_is_the_base_to_the_bit_with_the_lora_merged_into_it(home, whole):
    _, before = load(home / "gpt2")
    config, after = load(whole)
    saved = adapting.load(whole / "lora.npz")
    assert (saved.config, saved.lora) == (config, OWN)
    assert max(np.abs(b).max() for b in jax.tree.leaves(saved.params)) > 0
    body, head = split(after)
    assert list(head) == ["classifier"]
    merged = lora.merge(split(before)[0], saved.params, OWN)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7), body, merged)
    for name in ("token_embedding", "position_embedding", "final_norm"):
        jax.tree.map(np.testing.assert_array_equal, body[name], before[name])


def test_a_run_that_was_stopped_goes_on(home, whole, tmp_path):
    runs.killed(few(home), tmp_path / "killed", at=4)
    run(few(home), tmp_path / "killed")
    runs.assert_same_end(tmp_path / "killed", whole)


def test_devices_that_share_the_model_train_the_same(home, whole, tmp_path):
    run(few(home, mesh=Mesh(data=2, fsdp=2)), tmp_path / "shared")
    runs.assert_close(tmp_path / "shared", whole)


def test_only_the_lora_and_the_head_have_gradients_and_moments(home):
    experiment = few(home)
    held = shapes(experiment.plan, 2, experiment.tx)
    (model,) = held.values()
    assert model.params.keys() == {"blocks", "classifier"}
    assert jax.tree.leaves(model.params["blocks"]) != []
    count = sum(x.size for x in jax.tree.leaves(model.params))
    assert 2 * count <= sum(x.size for x in jax.tree.leaves(model.opt)) <= 2 * count + 100
    plain = replace(experiment, method=replace(experiment.method, lora=None))
    mesh = experiment.mesh.over(jax.devices())
    assert state(experiment, mesh) < state(plain, mesh)


def test_its_steps_cost_what_their_products_do(home):
    experiment = few(home)
    phase = next(p for p in experiment.plan if isinstance(p, Adapt))
    each = flops.train(phase.config, 16 * 14, 14, adapter=OWN)
    assert phase.cost(16) == pytest.approx(experiment.steps * each)


def test_layers_are_dropped_from_it_too(home, tmp_path):
    """A layer that never runs keeps its factors, where it is told to: ``b`` is zero, as at birth."""
    drop = LayerDrop(theta=0.5, time="constant", depth="prefix", scale="none", dropped="freeze")
    experiment = few(home, 2)
    run(replace(experiment, method=replace(experiment.method, drop=drop)), tmp_path / "run")
    b = adapting.load(tmp_path / "run" / "lora.npz").params["blocks"]["mlp"]["up"]["b"]
    assert b[0].any()
    assert not b[1].any()


def test_what_does_not_go_together_is_refused(home, tmp_path):
    with pytest.raises(ValueError, match="leave out freeze, or lora"):
        FineTune("model", lora=OWN, freeze=Freeze())
    bad = few(home, method=FineTune(str(home / "gpt2"), lora=LoRA(targets=("*",))))
    with pytest.raises(ValueError, match="the LoRA is for classifier, but a head trains as it is"):
        _ = bad.plan
    with pytest.raises(UserError, match="there is no LoRA in"):
        adapting.load(tmp_path / "none.npz")

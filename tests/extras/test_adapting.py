"""Adapter fine-tuning trains few parameters and exports a model; the others stay bitwise equal."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import chex
import jax
import numpy as np
import pytest
import runs
from finetunings import FAMILIES, OPTIM, tuning

from jaxgrow.checkpoints import load, orbax
from jaxgrow.extras.peft import adapters, lora
from jaxgrow.extras.peft.adapter_flops import adapter_train_flops
from jaxgrow.extras.peft.lora import LoRA
from jaxgrow.layerdrop import LayerDrop
from jaxgrow.models import Adapter
from train.common.errors import UserError
from train.config.overrides import with_overrides
from train.extras.adapting import Adapt, SavedAdapter, adapter_for, load_adaptation, save_adaptation
from train.extras.aot.memory import held_bytes
from train.extras.fine_tune import FineTune
from train.extras.labelled.supervised import score_model
from train.extras.labelled.tuning import tune_model
from train.plan.lifetimes import shapes
from train.run.trainer import run_experiment
from train.state.model import TrainState, fresh_head, split_head
from train.state.optim import transformation

OWN = LoRA(rank=4, alpha=16.0, targets=("*/attention/*", "*/mlp/*"))
BOTTLENECK = Adapter(size=4, at=("mlp",))


def few(home, steps=6, folder="gpt2", **changes):
    """Return a run of a few steps."""
    experiment = tuning(home / "cola", **{"lora": OWN} | changes).of(home / folder, 1e-2, 0)
    return replace(experiment, steps=steps, checkpoint_every=2, eval_every=steps)


def adapting(home, folder="gpt2", **changes):
    return few(home, 4, folder, **{"lora": None, "adapter": BOTTLENECK} | changes)


@pytest.fixture(scope="module")
def whole(home, tmp_path_factory):
    """Return the folder of a run that was never stopped."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run_experiment(few(home), folder)
    return folder


def test_a_task_is_learned(home):
    found = tune_model(tuning(home / "cola", lora=OWN, epochs=2), home / "gpt2", home / "runs")
    assert found[1e-2][0]["dev"]["matthews"] > 0.9


def test_merged_lora_gives_the_base_model_plus_the_lora_bitwise(home, whole):
    _, before = load(home / "gpt2")
    config, after = load(whole)
    saved = load_adaptation(whole / "lora.npz")
    assert (saved.config, saved.adapter) == (config, OWN)
    assert any(b.any() for b in jax.tree.leaves(saved.params))
    body, head = split_head(after)
    assert list(head) == ["classifier"]
    merged = lora.merge_lora(split_head(before)[0], saved.params, OWN)
    chex.assert_trees_all_close(body, merged, rtol=1e-6, atol=1e-7)
    for name in ("token_embedding", "position_embedding", "final_norm"):
        chex.assert_trees_all_equal(body[name], before[name])


def test_a_run_that_was_stopped_goes_on(home, whole, tmp_path):
    runs.killed(few(home), tmp_path / "killed", at=4)
    run_experiment(few(home), tmp_path / "killed")
    runs.assert_same_end(tmp_path / "killed", whole)


def test_only_the_lora_and_the_head_have_gradients_and_moments(home):
    experiment = few(home)
    (model,) = shapes(experiment.plan, 2, experiment.tx).values()
    assert model.params.keys() == {"blocks", "classifier"}
    assert jax.tree.leaves(model.params["blocks"]) != []
    count = sum(x.size for x in jax.tree.leaves(model.params))
    assert 2 * count <= sum(x.size for x in jax.tree.leaves(model.opt)) <= 2 * count + 100
    plain = replace(experiment, method=replace(experiment.method, lora=None))
    mesh = experiment.mesh.over(jax.devices())
    held, most = (held_bytes(e.plan, e.tx, mesh) for e in (experiment, plain))
    assert held < most
    phase = next(p for p in experiment.plan if isinstance(p, Adapt))
    each = adapter_train_flops(OWN, phase.config, 16 * 14, 14)
    assert phase.cost(16) == pytest.approx(experiment.steps * each)


@pytest.mark.slow  # without an adapter: `test_drop_training`
def test_layers_are_dropped_from_it_too(home, tmp_path):
    """With ``dropped="freeze"``, a layer that never runs keeps its factors: ``b`` stays zero."""
    drop = LayerDrop(theta=0.5, time="constant", depth="prefix", scale="none", dropped="freeze")
    experiment = few(home, 2)
    dropping = replace(experiment.method, drop=drop)
    run_experiment(replace(experiment, method=dropping), tmp_path / "run")
    b = load_adaptation(tmp_path / "run" / "lora.npz").params["blocks"]["mlp"]["up"]["b"]
    assert b[0].any() and not b[1].any()


@pytest.fixture(scope="module")
def adapted(home):
    run_experiment(adapting(home), home / "adapted")
    return home / "adapted"


def test_a_model_with_an_adapter_is_a_model(home, adapted):
    _, before = load(home / "gpt2")
    config, after = load(adapted)
    saved = load_adaptation(adapted / "adapter.npz")
    assert config.adapter == saved.adapter == BOTTLENECK
    body, own = adapters.detach_adapters(after)
    chex.assert_trees_all_equal(split_head(body)[0], split_head(before)[0])
    chex.assert_trees_all_equal(own, saved.params)
    assert all(x.any() for x in jax.tree.leaves(own))
    assert "matthews" in score_model(adapted, adapting(home).data)["dev"]
    orbax.export_model(home / "copy", config, after)
    assert load(home / "copy")[0].adapter == BOTTLENECK


def test_only_adapter_and_head_have_gradients_and_moments(home):
    experiment = adapting(home)
    *_, phase, _ = experiment.plan
    (model,) = shapes(experiment.plan, 2, experiment.tx).values()
    assert {*model.params} == {"blocks", "classifier"}
    assert {*model.params["blocks"]} == {*model.opt[1].mu["blocks"]} == {"mlp_adapter"}
    each = adapter_train_flops(BOTTLENECK, phase.config, 16 * 14, 14)
    assert phase.cost(16) == pytest.approx(4 * each)


def test_what_was_trained_is_trained_on(home, adapted, whole):
    """Continue from the folder of an adapted model, or from the adapter file under another head."""
    tx, key = transformation(OPTIM), jax.random.key(0)

    def assert_start(experiment, file):
        imported, phase, _ = experiment.plan
        params = split_head(load(Path(imported.folder))[1])[0] | fresh_head(phase.config, key)
        large = SimpleNamespace(parametrisation=None)
        given = phase.given(SimpleNamespace(models={"large": large})) if phase.saved else (None,)
        models = {"large": TrainState(params, None, phase.config)}
        found = phase.start(models, tx, key, *given).params
        chex.assert_trees_all_equal(split_head(found)[0], load_adaptation(file).params)

    file, other = adapted / "adapter.npz", whole / "lora.npz"
    assert_start(adapting(home, "adapted"), file)
    assert_start(adapting(home, adapter=None, saved=str(file)), file)
    low = adapting(home, adapter=None, saved=str(other))
    assert low.method.lora == OWN
    assert_start(low, other)


def test_adapters_of_another_model_are_refused(home, tmp_path, adapted):
    with pytest.raises(UserError, match=r"no file .*none\.npz with adapter; a run that trains one"):
        load_adaptation(tmp_path / "none.npz")
    save_adaptation(tmp_path / "lora.npz", SavedAdapter(FAMILIES["gpt2"], OWN, {"a": np.ones(3)}))
    with pytest.raises(UserError, match="is for another model: a GPT2Config cannot become a Llama"):
        adapter_for(str(tmp_path / "lora.npz"), FAMILIES["llama"])
    file = str(adapted / "adapter.npz")
    message = r"with layers 2, but this model has layers 4; grow the adapter"
    with pytest.raises(UserError, match=message):
        adapter_for(file, replace(load(home / "gpt2")[0], layers=4))


def test_settings_that_do_not_go_together_are_refused(home, adapted):
    with pytest.raises(UserError, match="the targets of the LoRA include classifier, but heads"):
        few(home, lora=LoRA(targets=("*",)))
    file = str(adapted / "adapter.npz")
    with pytest.raises(ValueError, match="leave out lora and adapter"):
        adapting(home, saved=file)
    message = "the model already has an adapter: to train it further, set adapter=Adapter"
    with pytest.raises(UserError, match=message):
        _ = adapting(home, "adapted", adapter=Adapter(5)).plan
    with pytest.raises(UserError, match="and leave saved empty"):
        _ = adapting(home, "adapted", adapter=None, saved=file).plan


def test_fields_of_what_is_not_there_yet_are_set(home):
    tuned = with_overrides(tuning(home / "cola"), ["lora.rank=4", "lora.alpha=2"])
    assert tuned.lora == LoRA(rank=4, alpha=2.0)
    tuned = with_overrides(tuning(home / "cola"), ["adapter.at=('mlp',)"])
    assert tuned.adapter == Adapter(at=("mlp",))
    with pytest.raises(UserError, match="leave out adapter, or lora"):
        with_overrides(FineTune("model"), ["lora.rank=4", "adapter.size=4"])

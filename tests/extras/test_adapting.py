"""Adapter fine-tuning freezes the base model, trains few parameters and exports a model.

The frozen parameters stay bitwise identical.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import runs
from finetunings import FAMILIES, OPTIM, tuning

from jaxgrow import flops, grow
from jaxgrow.checkpoints import load, orbax
from jaxgrow.extras.freeze import Freeze
from jaxgrow.extras.peft import adapters, lora
from jaxgrow.extras.peft.adapter_flops import adapter_train_flops
from jaxgrow.extras.peft.lora import LoRA
from jaxgrow.layerdrop import LayerDrop
from jaxgrow.models import Adapter
from jaxgrow.operators import stack
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


def few(home, steps=6, **changes):
    """A run of a few steps."""
    experiment = tuning(home / "cola", lora=OWN).of(home / "gpt2", 1e-2, 0)
    return replace(
        experiment, **{"steps": steps, "checkpoint_every": 2, "eval_every": steps} | changes
    )


@pytest.fixture(scope="module")
def whole(home, tmp_path_factory):
    """The folder of a run that was never stopped."""
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
    assert max(np.abs(b).max() for b in jax.tree.leaves(saved.params)) > 0
    body, head = split_head(after)
    assert list(head) == ["classifier"]
    merged = lora.merge_lora(split_head(before)[0], saved.params, OWN)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7), body, merged)
    for name in ("token_embedding", "position_embedding", "final_norm"):
        jax.tree.map(np.testing.assert_array_equal, body[name], before[name])


def test_a_run_that_was_stopped_goes_on(home, whole, tmp_path):
    runs.killed(few(home), tmp_path / "killed", at=4)
    run_experiment(few(home), tmp_path / "killed")
    runs.assert_same_end(tmp_path / "killed", whole)


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
    held, most = (held_bytes(e.plan, e.tx, mesh) for e in (experiment, plain))
    assert held < most


def test_its_steps_cost_what_their_products_do(home):
    experiment = few(home)
    phase = next(p for p in experiment.plan if isinstance(p, Adapt))
    each = adapter_train_flops(OWN, phase.config, 16 * 14, 14)
    assert phase.cost(16) == pytest.approx(experiment.steps * each)


@pytest.mark.slow  # without an adapter: `test_drop_training`
def test_layers_are_dropped_from_it_too(home, tmp_path):
    """With ``dropped="freeze"``, a layer that never runs keeps its factors: ``b`` stays zero."""
    drop = LayerDrop(theta=0.5, time="constant", depth="prefix", scale="none", dropped="freeze")
    experiment = few(home, 2)
    run_experiment(
        replace(experiment, method=replace(experiment.method, drop=drop)), tmp_path / "run"
    )
    b = load_adaptation(tmp_path / "run" / "lora.npz").params["blocks"]["mlp"]["up"]["b"]
    assert b[0].any()
    assert not b[1].any()


def test_what_does_not_go_together_is_refused(home, tmp_path):
    with pytest.raises(ValueError, match="leave out freeze, or lora"):
        FineTune("model", lora=OWN, freeze=Freeze())
    bad = few(home, method=FineTune(str(home / "gpt2"), lora=LoRA(targets=("*",))))
    message = "the targets of the LoRA include classifier, but heads are trained"
    with pytest.raises(ValueError, match=message):
        _ = bad.plan
    message = r"there is no file .*none\.npz with adapter; a run that trains one writes lora.npz"
    with pytest.raises(UserError, match=message):
        load_adaptation(tmp_path / "none.npz")


# --- bottleneck adapters ---

BOTTLENECK = Adapter(size=4, at=("mlp",))


def adapting(home, folder="gpt2", steps=4, **changes):
    experiment = tuning(home / "cola", **{"adapter": BOTTLENECK, **changes}).of(
        home / folder, 1e-2, 0
    )
    return replace(experiment, steps=steps, checkpoint_every=2, eval_every=steps)


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
    jax.tree.map(np.testing.assert_array_equal, split_head(body)[0], split_head(before)[0])
    jax.tree.map(np.testing.assert_array_equal, own, saved.params)
    assert all(x.any() for x in jax.tree.leaves(own))
    assert "matthews" in score_model(adapted, adapting(home).data)["dev"]
    growth = stack(config.sizes(), {"layers": 4})
    large = grow(growth, after, config.axes())
    orbax.export_model(home / "deep", config.resized(growth), large)
    assert load(home / "deep")[0].adapter == BOTTLENECK


def test_only_adapter_and_head_have_gradients_and_moments(home):
    experiment = adapting(home)
    *_, phase, _ = experiment.plan
    (model,) = shapes(experiment.plan, 2, experiment.tx).values()
    assert {*model.params} == {"blocks", "classifier"}
    assert {*model.params["blocks"]} == {"mlp_adapter"}
    assert model.params["blocks"].keys() == model.opt[1].mu["blocks"].keys()
    config = phase.config
    assert phase.cost(16) == pytest.approx(4 * adapter_train_flops(BOTTLENECK, config, 16 * 14, 14))
    assert phase.cost(16) < 4 * flops.train_flops(replace(config, adapter=BOTTLENECK), 16 * 14, 14)


def test_what_was_trained_is_trained_on(home, adapted, whole):
    """Continue from the folder of an adapted model, or from the adapter file under another head."""
    tx = transformation(OPTIM)

    def start(experiment, saved=None):
        imported, phase, _ = experiment.plan
        _, params = load(Path(imported.folder))
        model = TrainState(
            split_head(params)[0] | fresh_head(phase.config, jax.random.key(0)), None, phase.config
        )
        return phase.start({"large": model}, tx, jax.random.key(0), saved)

    kept = load_adaptation(adapted / "adapter.npz")
    on = start(adapting(home, "adapted"))
    from_file = adapting(home, adapter=None, saved=str(adapted / "adapter.npz"))
    given = from_file.plan[1].given(
        SimpleNamespace(models={"large": SimpleNamespace(parametrisation=None)})
    )
    for model in (on, start(from_file, *given)):
        jax.tree.map(np.testing.assert_array_equal, split_head(model.params)[0], kept.params)
    low = adapting(home, adapter=None, saved=str(whole / "lora.npz"))
    assert low.method.lora == OWN
    given = low.plan[1].given(
        SimpleNamespace(models={"large": SimpleNamespace(parametrisation=None)})
    )
    jax.tree.map(
        np.testing.assert_array_equal,
        split_head(start(low, *given).params)[0],
        load_adaptation(whole / "lora.npz").params,
    )


def test_adapters_of_another_family_are_refused(tmp_path):
    save_adaptation(tmp_path / "lora.npz", SavedAdapter(FAMILIES["gpt2"], OWN, {"a": np.ones(3)}))
    with pytest.raises(UserError, match="is for another model: a GPT2Config cannot become a Llama"):
        adapter_for(str(tmp_path / "lora.npz"), FAMILIES["llama"])


def test_adapters_that_do_not_fit_are_refused(home, adapted):
    file = str(adapted / "adapter.npz")
    message = (
        r"adapter.npz is for a model with layers 2, but this model has layers 4; grow the adapter"
    )
    with pytest.raises(UserError, match=message):
        adapter_for(file, replace(load(home / "gpt2")[0], layers=4))
    with pytest.raises(ValueError, match="leave out lora and adapter"):
        adapting(home, saved=file)
    with pytest.raises(ValueError, match="leave out adapter, or lora"):
        FineTune("model", lora=OWN, adapter=BOTTLENECK)
    message = "the model already has an adapter: to train it further, set adapter=Adapter"
    with pytest.raises(UserError, match=message):
        _ = adapting(home, "adapted", adapter=Adapter(5)).plan
    with pytest.raises(UserError, match="and leave saved empty"):
        _ = adapting(home, "adapted", adapter=None, saved=file).plan


def test_fields_of_what_is_not_there_yet_are_set(home):
    tuned = with_overrides(tuning(home / "cola"), ["lora.rank=4", "lora.alpha=2"])
    assert tuned.lora == LoRA(rank=4, alpha=2.0)
    assert with_overrides(tuning(home / "cola"), ["adapter.at=('mlp',)"]).adapter == Adapter(
        at=("mlp",)
    )
    with pytest.raises(UserError, match="leave out adapter, or lora"):
        with_overrides(FineTune("model"), ["lora.rank=4", "adapter.size=4"])

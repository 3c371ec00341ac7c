"""Settings of the execution may change while a run is stopped; those of the objective may not."""

import json
import shutil
from dataclasses import replace

import chex
import pytest
import runs
from cases import cases

from train import pretrain
from train.analysis.runs import refuse_unlike
from train.common.errors import UserError
from train.config.experiment import experiment_json
from train.config.overrides import with_overrides
from train.config.resuming import class_of
from train.extras.run_params import load_params

# Gradients are summed in another order, in float32.
ROUNDING = 1e-5


def test_remat_and_attention_change_no_bit_of_a_resumed_run(tmp_path, whole_run):
    runs.killed(whole_run[0], tmp_path / "run", 4)
    changed = replace(whole_run[0].model, remat="full", attention="xla")
    pretrain.run_experiment(replace(whole_run[0], model=changed, eval_every=3), tmp_path / "run")
    chex.assert_trees_all_equal(load_params(tmp_path / "run"), load_params(whole_run[1]))


# For each setting of the execution a value that changes it, here on 8 devices.
EXECUTED = {"accumulate": 2, "parallel": "pmap", "mesh.data": 4, "mesh.fsdp": 2, "mesh.tensor": 2}
EXECUTED |= {"mesh.context": 2, "mesh.gradients": "layer", "model.remat": "full"}
EXECUTED |= {"model.attention": "xla", "model.scan_layers": False, "on_nan": "skip"}
EXECUTED |= {"data.cache": "other"}
FAST = ("mesh.fsdp", "on_nan")
UNTRIED = {
    "mesh.expert": "the model has no experts",
    "mesh.replica": "it needs several hosts",
    "most_skipped": "it only matters after steps that are not finite",
    "model.head_positions": "it is for longer contexts",
}


def test_every_setting_of_the_execution_is_tried(whole_run):
    there = experiment_json(whole_run[0])
    own = {name for name, _ in runs.setting_values(there) if class_of(name, there) == "execution"}
    assert {name.replace("data.Data", "data") for name in own} == EXECUTED.keys() | UNTRIED.keys()


@pytest.mark.parametrize("setting", cases(EXECUTED.keys(), FAST, ()))
def test_a_run_resumed_with_another_execution_ends_alike(tmp_path, whole_run, setting):
    value = EXECUTED[setting]
    value = str(tmp_path / value) if setting == "data.cache" else value
    rest = shutil.ignore_patterns("8", "result.json")
    shutil.copytree(whole_run[1], tmp_path / "run", ignore=rest)
    other = with_overrides(whole_run[0], [f"{setting}={value}"])
    result = pretrain.run_experiment(other, tmp_path / "run")
    (change,) = result["changes"]
    assert (change["step"], change["after"]) == (6, value)
    found, expected = (load_params(folder) for folder in (tmp_path / "run", whole_run[1]))
    chex.assert_trees_all_close(found, expected, atol=ROUNDING)


def test_runs_whose_evaluation_changed_are_not_compared(tmp_path, whole_run):
    config = json.loads((whole_run[1] / "config.json").read_text())
    change = {"step": 4, "setting": "eval_batches", "before": 2, "after": 1}
    refuse_unlike([("one", config), ("two", config)])
    with pytest.raises(UserError, match="eval_batches of two changed at step 4"):
        refuse_unlike([("one", config), ("two", config | {"changes": [change]})])

"""Training continues from a Hugging Face model, a model grown on disk, or a run.

The model may be unsharded or sharded over any mesh.
"""

import json
import shutil
from dataclasses import replace

import chex
import jax
import numpy as np
import pytest
import runs
from checkpoints import CONFIG, saved

from jaxgrow import checkpoints
from jaxgrow.cli.program import main
from train import pretrain
from train.common.errors import UserError
from train.extras.run_params import load_params
from train.plan.methods import Continue, Scratch
from train.state.mesh import Mesh
from train.store.workdir import imported_model

MODEL = replace(CONFIG, vocab=256, context=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write a Hugging Face folder in bfloat16."""
    return saved(tmp_path_factory.mktemp("theirs") / "gpt", MODEL, dtype="bfloat16")


def test_a_hugging_face_model_grown_on_disk_is_trained_on(folder, tmp_path, capsys):
    grown = tmp_path / "grown"
    assert main(["grow", str(folder), str(grown), "--method", "stack", "--layers", "8"]) == 0
    config, params = checkpoints.load(grown)
    same = {"model": config, "steps": 2, "mesh": Mesh(2, 2)}
    e = runs.experiment(tmp_path, method=Continue(str(grown)), **same)
    result = pretrain.run_experiment(e, tmp_path / "run")
    says = f"{grown} was not trained by jaxgrow: the cost of its model is unknown and therefore not counted"
    assert says in capsys.readouterr().err
    phases = [(p["kind"], p["flops"] > 0) for p in result["phases"]]
    assert phases == [("import", False), ("train", True)]
    first = runs.log(tmp_path / "run")[0]
    assert first["phase"] == "import large" and first["step"] == 0
    trained = load_params(tmp_path / "run")
    assert {x.dtype.name for x in jax.tree.leaves(trained)} == {"float32"}
    # 2 steps with learning rates up to 1e-2
    chex.assert_trees_all_close(trained, jax.tree.map(np.float32, params), rtol=0, atol=0.05)
    # A model trained this way can be a source again, and its cost is included.
    again = replace(e, method=Continue("run"), name="again")
    assert pretrain.run_experiment(again, tmp_path / "again")["flops"] > result["flops"]


def test_it_begins_with_their_numbers_on_every_mesh(folder):
    config, params = checkpoints.load(folder)
    for mesh in (Mesh(), Mesh(1, 2, 2)):
        model, result = imported_model(folder, config, mesh.over(jax.devices()))
        chex.assert_trees_all_equal(jax.device_get(model.params), jax.tree.map(np.float32, params))
        assert result is None


def test_what_is_no_model_or_another_one_is_told(folder, tmp_path):
    e = runs.experiment(tmp_path, name="begun", method=Scratch(), checkpoint_every=2)
    runs.killed(e, tmp_path / "begun", 2)
    for name in ("empty", "lost"):
        (tmp_path / name).mkdir()
    (tmp_path / "lost" / "metrics.jsonl").write_text("a line")
    neither = r"there is neither a finished run nor another model in .*"
    for name, says in (
        ("nowhere", neither + "nowhere; run its config first"),
        ("empty", r"empty is neither a finished run nor a Hugging Face folder"),
        # An unfinished run is read from its newest checkpoint.
        ("begun", r"begun does not have the expected config"),
        ("lost", neither + "lost"),
    ):
        with pytest.raises(UserError, match=says):
            other = runs.experiment(tmp_path, model=MODEL, method=Continue(name))
            pretrain.run_experiment(other, tmp_path / "run")
    wider = replace(MODEL, mlp=2 * MODEL.mlp)
    says = rf"does not have the expected config .values there and here: mlp: {MODEL.mlp} and"
    with pytest.raises(UserError, match=says):
        imported_model(folder, wider, runs.mesh())


def test_a_run_whose_source_has_changed_is_refused(tmp_path):
    """Check that neither an old result nor a mixture of two models is taken for the new one."""
    source = saved(tmp_path / "gpt", MODEL)
    e = runs.experiment(tmp_path, model=MODEL, method=Continue("gpt"), steps=2)
    first = pretrain.run_experiment(e, tmp_path / "run")
    assert pretrain.run_experiment(e, tmp_path / "run") == first  # the control: the same model
    config, params = checkpoints.load(source)
    checkpoints.save(source, config, jax.tree.map(lambda x: x + 1, params), overwrite=True)
    with pytest.raises(UserError, match="started from another model in gpt: its fingerprint was"):
        pretrain.run_experiment(e, tmp_path / "run")
    shutil.rmtree(source)  # a finished run does not need its source
    assert pretrain.run_experiment(e, tmp_path / "run") == first


def test_a_continued_run_reads_the_samples_after_those_of_its_source(tmp_path, monkeypatch, capsys):
    first = runs.experiment(tmp_path, steps=4)
    drawn = runs.recorded_inputs(monkeypatch)
    pretrain.run_experiment(first, tmp_path / "first")
    order = json.loads((tmp_path / "first" / "result.json").read_text())["order"]
    assert order == {"seed": 0, "first": 0, "samples": 225, "last": 32}
    second = replace(first, method=Continue("first"), batch=4, seed=5)
    pretrain.run_experiment(second, tmp_path / "second")
    assert "the data go on at sample 32 in the order of seed 0, where" in capsys.readouterr().err
    # A third run goes on after the second one.
    third = replace(first, method=Continue("second"), steps=1)
    pretrain.run_experiment(third, tmp_path / "third")
    assert "go on at sample 48 in the order of seed 0" in capsys.readouterr().err
    # The runs together read what a single run reads.
    parts = np.concatenate(drawn)
    drawn.clear()
    pretrain.run_experiment(replace(first, steps=7), tmp_path / "whole")
    np.testing.assert_array_equal(np.concatenate(drawn), parts)

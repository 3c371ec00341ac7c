"""Commands read the newest checkpoint of a run that has not finished, and say which one that is."""

import json
import shutil
from dataclasses import replace

import chex
import jax
import numpy as np
import pytest
import runs

from jaxgrow.checkpoints import CheckpointError, open_checkpoint
from jaxgrow.cli.program import main
from train import generate, pretrain
from train.common.errors import UserError
from train.extras.run_params import load_params
from train.plan.methods import Continue, Growing, GrowTo, Learned, TrainStage
from train.state.mesh import Mesh


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """Return an experiment and the folder of its run, which was killed after step 6 of 8."""
    folder = tmp_path_factory.mktemp("half")
    experiment = runs.experiment(folder, checkpoint_every=2)
    runs.killed(experiment, folder / "run", 6)
    return experiment, folder / "run"


def test_the_newest_checkpoint_is_the_model(half):
    source = open_checkpoint(half[1])
    wanted = load_params(half[1], "large", 6)
    chex.assert_trees_all_equal(source.params(), wanted)
    mesh = Mesh().over(jax.devices())
    chex.assert_trees_all_equal(jax.device_get(source.shard(mesh)), wanted)
    assert source.config == half[0].model
    assert source.notes == (
        f"{half[1]} has not finished: the model is 'large' of checkpoint 6, at step 6 of train large",
    )
    np.testing.assert_array_equal(
        source.read("blocks/mlp/up/kernel", 1), wanted["blocks"]["mlp"]["up"]["kernel"][1]
    )
    assert open_checkpoint(half[1]).fingerprint() == source.fingerprint()


def test_jaxgrow_reads_it_and_says_the_step(tmp_path, capsys, half):
    main(["inspect", str(half[1])])
    assert "checkpoint 6, at step 6 of train large" in capsys.readouterr().out
    main(["convert", str(half[1]), str(tmp_path / "hf"), "--to", "hf"])
    assert "checkpoint 6, at step 6 of train large" in capsys.readouterr().out
    written = open_checkpoint(tmp_path / "hf")
    chex.assert_trees_all_close(written.params(), load_params(half[1], "large", 6))
    main(["grow", str(half[1]), str(tmp_path / "grown"), "--method", "stack", "--layers", "4"])
    assert open_checkpoint(tmp_path / "grown").config.layers == 4


def test_a_step_chooses_a_checkpoint(tmp_path, capsys, half, whole_run):
    assert main(["convert", f"{half[1]}@4", str(tmp_path / "hf")]) == 0
    assert (
        "the model is 'large' of checkpoint 4, at step 4 of train large" in capsys.readouterr().out
    )
    written = open_checkpoint(tmp_path / "hf")
    chex.assert_trees_all_close(written.params(), load_params(half[1], "large", 4))
    assert main(["report", f"{half[1]}@4", str(tmp_path / "hf")]) == 0
    assert (
        main(["interpolate", f"{half[1]}@4", str(half[1]), str(tmp_path / "mean"), "--alpha", ".5"])
        == 0
    )
    assert main(["inspect", f"{whole_run[1]}@4"]) == 0  # of a finished run
    assert "checkpoint 4, at step 4 of train large" in capsys.readouterr().out
    assert main(["inspect", f"{half[1]}@5"]) == 1
    said = capsys.readouterr().err
    assert "does not have checkpoint 5, only" in said and said.rstrip().endswith(
        f"such as {half[1]}@6"
    )
    assert main(["inspect", f"{tmp_path / 'hf'}@5"]) == 1
    assert "Give the folder alone" in capsys.readouterr().err


def test_a_run_that_was_killed_early_twice_starts_again(tmp_path, monkeypatch):
    experiment = runs.experiment(tmp_path)

    def die(*given, **named):
        raise runs.Killed

    with monkeypatch.context() as patch:
        patch.setattr("train.run.trainer.Recorder", die)
        for _ in range(2):
            with pytest.raises(runs.Killed):
                pretrain.run_experiment(experiment, tmp_path / "run")
    assert (tmp_path / "run/tokenizer.json").is_file()
    assert pretrain.run_experiment(experiment, tmp_path / "run")["steps"] == 8
    (tmp_path / "other").mkdir()
    (tmp_path / "other/tokenizer.json").write_text(json.dumps({}))
    with pytest.raises(UserError, match=r"contains tokenizer\.json, which a run would replace"):
        pretrain.run_experiment(experiment, tmp_path / "other")


def test_an_unfinished_run_is_written_with_its_tokenizer(tmp_path, half):
    runs.export(half[1], tmp_path / "hf")
    names = {path.name for path in (tmp_path / "hf").iterdir()}
    assert {"model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    assert "README.md" not in names  # the model card is written at the end


def test_the_files_of_a_run_follow_its_model_through_orbax(tmp_path):
    pretrain.run_experiment(runs.experiment(tmp_path), tmp_path / "run")
    runs.export(tmp_path / "run", tmp_path / "hf")
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "orb"), "--to", "orbax"]) == 0
    assert main(["convert", str(tmp_path / "orb"), str(tmp_path / "back"), "--to", "hf"]) == 0
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "README.md"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()
    grown = ["grow", str(tmp_path / "run"), str(tmp_path / "deep"), "--method", "stack"]
    assert main([*grown, "--layers", "4", "--to", "hf"]) == 0
    assert (tmp_path / "deep/tokenizer.json").is_file()
    card = (tmp_path / "deep/README.md").read_text()  # not that of the run, which is another model
    assert "base_model: run" in card and "Evaluation" not in card


def test_a_damaged_checkpoint_is_not_read(tmp_path, half):
    shutil.copytree(half[1], tmp_path / "run")
    (tmp_path / "run/checkpoints/6/log").write_text("other")
    assert "checkpoint 4" in open_checkpoint(tmp_path / "run").notes[0]
    (tmp_path / "run/checkpoints/4/log").write_text("other")
    with pytest.raises(CheckpointError, match=r"does not have an intact checkpoint \(6: .*; 4: "):
        open_checkpoint(tmp_path / "run")


def test_commands_of_train_read_it_and_say_the_step(tmp_path, capsys, monkeypatch, half):
    monkeypatch.setattr("sys.argv", ["generate", str(half[1]), "--prompt", "ab", "--max-new", "2"])
    generate.main()
    assert "checkpoint 6, at step 6 of train large" in capsys.readouterr().err
    shutil.copytree(half[1], tmp_path / "first")
    going = replace(half[0], name="second", method=Continue("first"))
    result = pretrain.run_experiment(going, tmp_path / "second")
    assert "checkpoint 6, at step 6 of train large" in capsys.readouterr().err
    assert result["steps"] == 6 + 8  # the cost so far is counted
    arguments = ["generate", f"{half[1]}@4", "--prompt", "ab", "--max-new", "2"]
    monkeypatch.setattr("sys.argv", arguments)
    generate.main()
    assert "checkpoint 4, at step 4 of train large" in capsys.readouterr().err
    going = replace(going, name="third", method=Continue("first@4"))
    assert pretrain.run_experiment(going, tmp_path / "third")["steps"] == 4 + 8


def test_of_a_growth_the_small_model_is_read_and_maps_are_not_a_model(tmp_path):
    to = GrowTo((TrainStage(0.5),), by=Learned(steps=4))
    experiment = runs.experiment(
        tmp_path, method=Growing(runs.SMALL, TrainStage(0.25), (to,)), checkpoint_every=1
    )
    runs.killed(experiment, tmp_path / "run", 1)
    assert open_checkpoint(tmp_path / "run").config == runs.SMALL
    runs.killed(experiment, tmp_path / "run", 4)
    with pytest.raises(CheckpointError, match=r"no complete model.*Continue the run"):
        open_checkpoint(tmp_path / "run")
    pretrain.run_experiment(experiment, tmp_path / "run")
    assert open_checkpoint(tmp_path / "run").notes == ()

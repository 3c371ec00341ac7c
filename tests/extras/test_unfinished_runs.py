"""Commands read the newest checkpoint of a run that has not finished, and say which one that is."""

import shutil
from dataclasses import replace

import pytest
import runs

from jaxgrow.checkpoints import CheckpointError, open_checkpoint
from jaxgrow.cli.program import main
from train import generate, pretrain
from train.plan.methods import Continue, Growing, GrowTo, Learned, TrainStage


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """Return an experiment and the folder of its run, which was killed after step 6 of 8."""
    folder = tmp_path_factory.mktemp("half")
    experiment = runs.experiment(folder, checkpoint_every=2)
    runs.killed(experiment, folder / "run", 6)
    return experiment, folder / "run"


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
    with pytest.raises(CheckpointError, match=r"no intact checkpoint in .* \(6: .*; 4: "):
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

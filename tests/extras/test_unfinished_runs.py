"""Commands read the newest checkpoint of a run that has not finished, and say which one that is."""

import shutil
from dataclasses import replace

import chex
import jax
import numpy as np
import pytest
import runs
from published import refused

from jaxgrow.checkpoints import CheckpointError, open_checkpoint
from jaxgrow.cli.program import main
from train import generate, pretrain
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
    note = "has not finished: the model is 'large' of checkpoint 6, at step 6 of train large"
    assert source.notes == (f"{half[1]} {note}",)
    kernel = wanted["blocks"]["mlp"]["up"]["kernel"]
    np.testing.assert_array_equal(source.read("blocks/mlp/up/kernel", 1), kernel[1])
    assert open_checkpoint(half[1]).fingerprint() == source.fingerprint()


def ran(capsys, *words):
    """Run a command of jaxgrow that succeeds, and return what it prints."""
    assert main([*map(str, words)]) == 0
    return capsys.readouterr().out


def test_jaxgrow_reads_it_and_says_the_step(tmp_path, capsys, half, whole_run):
    run = half[1]
    assert "checkpoint 6, at step 6 of train large" in ran(capsys, "inspect", run)
    ran(capsys, "grow", run, tmp_path / "grown", "--method", "stack", "--layers", 4)
    assert open_checkpoint(tmp_path / "grown").config.layers == 4
    for step, source in ((6, run), (4, f"{run}@4")):
        said = ran(capsys, "convert", source, tmp_path / f"hf{step}", "--to", "hf")
        assert f"the model is 'large' of checkpoint {step}, at step {step} of train large" in said
        written = open_checkpoint(tmp_path / f"hf{step}")
        chex.assert_trees_all_close(written.params(), load_params(run, "large", step))
    ran(capsys, "report", f"{run}@4", tmp_path / "hf4")
    ran(capsys, "interpolate", f"{run}@4", run, tmp_path / "mean", "--alpha", ".5")
    said = ran(capsys, "inspect", f"{whole_run[1]}@4")  # of a finished run
    assert "checkpoint 4, at step 4 of train large" in said
    error = refused(capsys, "inspect", f"{run}@5")
    assert "does not have checkpoint 5, only" in error and error.endswith(f"such as {run}@6")
    assert "Give the folder alone" in refused(capsys, "inspect", f"{tmp_path / 'hf4'}@5")


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


def test_an_unfinished_run_is_written_with_its_tokenizer(tmp_path, half):
    runs.export(half[1], tmp_path / "hf")
    names = {path.name for path in (tmp_path / "hf").iterdir()}
    assert {"model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    assert "README.md" not in names  # the model card is written at the end


def test_the_files_of_a_run_follow_its_model_through_orbax(tmp_path, capsys):
    pretrain.run_experiment(runs.experiment(tmp_path), tmp_path / "run")
    runs.export(tmp_path / "run", tmp_path / "hf")
    ran(capsys, "convert", tmp_path / "run", tmp_path / "orb", "--to", "orbax")
    ran(capsys, "convert", tmp_path / "orb", tmp_path / "back", "--to", "hf")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "README.md"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()
    deeper = ("--method", "stack", "--layers", 4, "--to", "hf")
    ran(capsys, "grow", tmp_path / "run", tmp_path / "deep", *deeper)
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
    shutil.copytree(half[1], tmp_path / "first")
    for step, at in ((6, ""), (4, "@4")):
        note = f"checkpoint {step}, at step {step} of train large"
        words = ["generate", f"{half[1]}{at}", "--prompt", "ab", "--max-new", "2"]
        monkeypatch.setattr("sys.argv", words)
        generate.main()
        assert note in capsys.readouterr().err
        going = replace(half[0], name=f"from{step}", method=Continue(f"first{at}"))
        result = pretrain.run_experiment(going, tmp_path / going.name)
        assert note in capsys.readouterr().err
        assert result["steps"] == step + 8  # the cost so far is counted


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

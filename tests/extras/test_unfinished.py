"""Commands read the newest checkpoint of a run that has not finished, and say which one that is."""

import json

import chex
import jax
import numpy as np
import pytest
import runs

from jaxgrow.checkpoints import open_checkpoint
from jaxgrow.cli.program import main
from train import pretrain
from train.common.errors import UserError
from train.state.mesh import Mesh
from train.store.workdir import load_params


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
    assert "there is no checkpoint 5 in" in said and said.rstrip().endswith(f"such as {half[1]}@6")
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

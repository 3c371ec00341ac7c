"""``epochs`` in place of ``steps``: the number of steps follows from the corpus of the run."""

import json
import sys
from dataclasses import replace

import pytest
import runs

from train import compare, preflight, pretrain, show, sweep
from train.common.errors import UserError, exits_cleanly
from train.config.experiment import load_experiment, with_steps
from train.run.trainer import run_experiment
from train.store.workdir import Workdir


def command(monkeypatch, of, *arguments):
    """Run the command ``python -m train.NAME``, and return its exit status."""
    monkeypatch.setattr(sys, "argv", [of.__name__.rpartition(".")[2], *map(str, arguments)])
    try:
        exits_cleanly(of.main)
    except SystemExit as stopped:
        return stopped.code
    return 0


def by_epochs(folder, epochs=2.0, **changes):
    return runs.experiment(folder, steps=0, epochs=epochs, **changes)


def test_the_steps_follow_from_the_corpus(tmp_path):
    experiment = by_epochs(tmp_path)
    for files in (8, 16):
        runs.corpus(tmp_path, files)
        samples = len(experiment.data.sources(experiment.model)[0])
        found = with_steps(experiment)
        assert (found.steps, found.epochs) == (round(2 * samples / experiment.batch), None)
    assert with_steps(found) == found
    assert with_steps(replace(experiment, epochs=1e-6)).steps == 1


def test_a_warm_up_longer_than_the_epochs_is_said(tmp_path, capsys):
    config = runs.script(tmp_path, by_epochs(tmp_path))
    load_experiment(config)
    assert capsys.readouterr().err == ""
    load_experiment(config, ["epochs=0.02", "optim.warmup=100"])
    assert "but a warm-up of 100 steps" in capsys.readouterr().err


def test_an_override_of_one_replaces_the_other(tmp_path):
    of_steps = runs.script(tmp_path, runs.experiment(tmp_path, name="steps"))
    of_epochs = runs.script(tmp_path, by_epochs(tmp_path, name="epochs"))
    expected = with_steps(by_epochs(tmp_path)).steps
    for text, overrides, steps in (
        (of_steps, ["epochs=2"], expected),
        (of_epochs, [], expected),
        (of_epochs, ["epochs=3", "steps=5"], 5),
        (f"{of_steps}:epochs=2", ["steps=5"], expected),
    ):
        assert load_experiment(text, overrides).steps == steps
    for value, says in (("0", "0.0"), ("1e999", "inf")):
        with pytest.raises(UserError, match=f"epochs must be positive and finite, but is {says}"):
            load_experiment(of_epochs, [f"epochs={value}"])


def test_a_run_of_epochs_is_the_run_of_its_steps(tmp_path):
    experiment = by_epochs(tmp_path, epochs=0.2)
    result = run_experiment(experiment, tmp_path / "run")
    recorded = Workdir(tmp_path / "run").config
    assert (recorded["steps"], recorded["epochs"]) == (with_steps(experiment).steps, None)
    assert run_experiment(with_steps(experiment), tmp_path / "run") == result


def test_sweeps_and_comparisons_shorten_epochs(tmp_path, monkeypatch):
    config = runs.script(tmp_path, by_epochs(tmp_path, epochs=0.4, eval_batches=1))
    steps = load_experiment(config).steps
    asked = ["--set", "optim.peak_lr=1e-3,2e-3", "--frontier", "0.5", "--workdir", tmp_path / "s"]
    assert command(monkeypatch, sweep, config, *asked) == 0
    found = [json.loads(f.read_text())["steps"] for f in tmp_path.glob("s/*-seed0/config.json")]
    assert found == [round(steps / 2)] * 2
    asked = [f"{config}:name=other:epochs=0.2", "--frontier", "0.5", "--workdir", tmp_path / "c"]
    assert command(monkeypatch, compare, config, *asked) == 0
    folders = ("tiny-seed0", "other-seed0", "tiny-x0.5-seed0")
    found = [json.loads((tmp_path / "c" / f / "config.json").read_text())["steps"] for f in folders]
    assert found == [steps, load_experiment(config, ["epochs=0.2"]).steps, round(steps / 2)]


@pytest.mark.parametrize("of", [pretrain, compare, sweep])
def test_without_the_corpus_the_way_out_is_a_number_of_steps(tmp_path, monkeypatch, capsys, of):
    config = runs.script(tmp_path, by_epochs(tmp_path))
    asked = ["data.path=/absent", *(["optim.warmup=1,2"] if of is sweep else [])]
    assert command(monkeypatch, of, config, *(x for one in asked for x in ("--set", one))) == 2
    said = capsys.readouterr().err
    assert "epochs=2 and the size of the corpus, which cannot be read: there is no corpus" in said
    assert "CONFIG:steps=100_000" in said and said.count("\n") == 1
    assert load_experiment(f"{config}:steps=100_000", ["data.path=/absent"]).steps == 100_000


def test_commands_that_do_not_train_leave_the_corpus_alone(tmp_path, monkeypatch, capsys):
    config = runs.script(tmp_path, by_epochs(tmp_path))
    monkeypatch.setattr("train.data.text.Data.sources", None)
    assert command(monkeypatch, pretrain, config, "--show") == 0
    assert "2.0" in capsys.readouterr().out
    for of, *asked in ((preflight, "--on", "cpu:1"), (show, "--out", tmp_path / "plan.svg")):
        assert command(monkeypatch, of, config, *asked) == 2
        said = capsys.readouterr().err
        assert "no corpus was read here: give the number of steps" in said
    assert command(monkeypatch, show, f"{config}:steps=100_000", "--out", tmp_path / "p.svg") == 0

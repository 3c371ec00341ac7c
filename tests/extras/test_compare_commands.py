"""The command ``train.compare`` with scores, with diverged runs, and what it says."""

import json
import sys
from dataclasses import replace

import pytest
import runs
from advice import command
from synthetic import made, tables, two_seeds

from train import compare
from train.analysis import comparing
from train.analysis.savings import Comparison
from train.common.errors import UserError
from train.extras.comparison_report import markdown_report
from train.plan.methods import GrowTo, TrainStage
from train.plan.recipes import deepened
from train.run import trainer
from train.step import programs


def test_the_report_is_written_if_a_score_fails(tmp_path, monkeypatch):
    def fails(*_):
        raise UserError("no score")

    finished = Comparison([[made(tmp_path, "base", [("train large", 4, 1.0, 2.0)])]], [])
    written = []
    monkeypatch.setattr(compare, "run_comparison", lambda *_: finished)
    monkeypatch.setattr(compare, "SCORERS", {"evaluate": lambda arguments: fails})
    monkeypatch.setattr(compare, "REPORTS", {"markdown": lambda *about: written.append(about)})
    script = runs.script(tmp_path, runs.experiment(tmp_path))
    with pytest.raises(UserError, match="no score"):
        command("train.compare", script, "--workdir", tmp_path, "--evaluate", "blimp")
    assert written == [(finished, tmp_path)]


def test_what_models_can_do_is_a_table_of_its_own(tmp_path):
    comparison = two_seeds(tmp_path)
    scores = {"sst2, accuracy": [[0.5], [0.75], [0.25]]}
    _, rows, *_ = tables(markdown_report(replace(comparison, scores=scores)))
    assert [row["sst2, accuracy"] for row in rows.values()] == ["0.5000", "0.7500", "0.2500"]
    main = tables(markdown_report(comparison))[0]
    assert {row["loss"] for row in rows.values()} == {row["loss"] for row in main.values()}


def test_a_run_that_diverges_does_not_end_the_others(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "runs"
    scratch = runs.script(tmp_path, runs.experiment(tmp_path, name="scratch"))
    to, source = GrowTo((TrainStage(1.0),), by=runs.DOUBLED), "wild-seed{seed}"
    of_wild = runs.script(tmp_path, runs.growing(tmp_path, to, source=source, name="of_wild"))
    wild = runs.script(tmp_path, runs.experiment(tmp_path, name="wild", model=runs.SMALL))
    configs = [scratch, f"{wild}:optim.peak_lr=1e38", of_wild, f"{scratch}:steps=4:name=short"]
    monkeypatch.setattr(sys, "argv", ["compare", *configs, "--workdir", str(folder)])
    compare.main()
    said = capsys.readouterr()
    assert "wild-seed0 diverged: " in said.err
    assert "of_wild-seed0 diverged: the run wild-seed0 that it grows from" in said.err
    found = json.loads((folder / "compare.json").read_text())
    assert [row["run"] for row in found["rows"]] == ["scratch", "short"]
    assert found["diverged"] == {"wild": [0], "of_wild": [0]}
    assert tables(said.out)[0]["wild"]["loss"] == "diverged: seed 0"


def test_the_screen_of_the_first_command(tmp_path, capsys, monkeypatch):
    """The first line says what runs and for how long, and phases have names for people."""
    monkeypatch.setattr(programs, "_USED", {})
    trainer._say_once.cache_clear()
    base = runs.experiment(tmp_path, name="base", steps=40)
    method = deepened(base.model, 1, 0.5, TrainStage(0.5, warmup=0))
    half = replace(base, name="half", method=method)
    short = comparing.shortened_experiment(base, half.cost / base.cost)
    comparing.run_comparison([base, half], [short], [0], tmp_path)
    first, *lines = capsys.readouterr().err.splitlines()
    titles = ["from scratch", "half of the layers first", "from scratch at the same cost"]
    assert first == f"3 runs, about 1 minute: {'; '.join(titles)}"
    for number, title in enumerate(titles, 1):
        assert f"run {number} of 3: {title}" in lines
    assert sum(line.startswith("data: ") for line in lines) == 1
    assert "small model: compiling .." in lines and "train large" not in "\n".join(lines)
    comparing.run_comparison([base, half], [short], [0], tmp_path)  # it has finished
    assert capsys.readouterr().err.startswith("3 runs, less than a minute: ")

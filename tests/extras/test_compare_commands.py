"""The command ``train.compare`` with scores, with diverged runs, and what it says."""

import json
import sys
from dataclasses import replace

import pytest
import runs
from synthetic import (
    made,
    tables,
    two_seeds,
)

from train import compare
from train.analysis import comparing
from train.analysis.savings import Comparison
from train.common.errors import UserError, exits_cleanly
from train.extras.comparison_report import markdown_report
from train.plan.methods import GrowTo, TrainStage
from train.plan.recipes import deepened
from train.run import trainer
from train.step import programs


@pytest.fixture
def comparison(tmp_path):
    return two_seeds(tmp_path)


def called(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["compare", *map(str, arguments)])
    exits_cleanly(compare.main)


def test_the_report_is_written_if_a_score_fails(tmp_path, monkeypatch):
    def fails(*_):
        raise UserError("no score")

    finished = Comparison([[made(tmp_path, "base", [("train large", 4, 1.0, 2.0)])]], [])
    written = []
    monkeypatch.setattr(compare, "run_comparison", lambda *_: finished)
    monkeypatch.setattr(compare, "SCORERS", {"evaluate": lambda arguments: fails})
    monkeypatch.setattr(compare, "REPORTS", {"markdown": lambda *about: written.append(about)})
    script = runs.script(tmp_path, runs.experiment(tmp_path))
    arguments = ["compare", script, "--workdir", str(tmp_path), "--evaluate", "blimp"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(UserError, match="no score"):
        compare.main()
    assert written == [(finished, tmp_path)]


def test_what_models_can_do_is_a_table_of_its_own(comparison, tmp_path):
    scores = {
        "sst2, accuracy": [[0.5], [0.75], [0.25]][: len(comparison.runs) + len(comparison.frontier)]
    }
    _, rows, *_ = tables(markdown_report(replace(comparison, scores=scores)))
    assert [row["sst2, accuracy"] for row in rows.values()] == [
        f"{x:.4f}" for (x,) in scores["sst2, accuracy"]
    ]
    assert {row["loss"] for row in rows.values()} == {
        row["loss"] for row in tables(markdown_report(comparison))[0].values()
    }


def test_a_run_that_diverges_does_not_end_the_others(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "runs"
    scratch = runs.script(tmp_path, runs.experiment(tmp_path, name="scratch"))
    of_wild = runs.growing(
        tmp_path,
        GrowTo((TrainStage(1.0),), by=runs.DOUBLED),
        source="wild-seed{seed}",
        name="of_wild",
    )
    wild = f"{runs.script(tmp_path, runs.experiment(tmp_path, name='wild', model=runs.SMALL))}:optim.peak_lr=1e38"
    options = [
        scratch,
        wild,
        runs.script(tmp_path, of_wild),
        f"{scratch}:steps=4:name=short",
        "--workdir",
        folder,
    ]
    called(monkeypatch, *options)
    said = capsys.readouterr()
    assert (
        "wild-seed0 diverged: " in said.err
        and "of_wild-seed0 diverged: the run wild-seed0 that it grows from" in said.err
    )
    found = json.loads((folder / "compare.json").read_text())
    assert [row["run"] for row in found["rows"]] == ["scratch", "short"]
    assert found["diverged"] == {"wild": [0], "of_wild": [0]}
    assert tables(said.out)[0]["wild"]["loss"] == "diverged: seed 0"


def test_the_screen_of_the_first_command(tmp_path, capsys, monkeypatch):
    """The first line says what runs and for how long, and phases have names for people."""
    monkeypatch.setattr(programs, "_USED", {})
    trainer._say_once.cache_clear()
    base = runs.experiment(tmp_path, name="base", steps=40)
    half = replace(
        base, name="half", method=deepened(base.model, 1, 0.5, TrainStage(0.5, warmup=0))
    )
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

"""Races: one checkpoint, several operators, some steps of each."""

import json
import sys
from dataclasses import replace

import pytest
import runs

from train import race
from train.errors import exits_cleanly
from train.methods import Scratch
from train.pretrain import run
from train.report import Run

SMALL = replace(runs.MODEL, layers=1)


@pytest.fixture(autouse=True, scope="module")
def quick():
    with runs.quick():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With a finished run of the small model in ``small``, and the large model's config in ``large.py``."""
    here = tmp_path_factory.mktemp("race")
    run(runs.experiment(here, name="small", model=SMALL), here / "small")
    runs.script(here, runs.experiment(here, name="large", method=Scratch()))
    return here


def raced(folder, monkeypatch, *options):
    arguments = ["race", str(folder / "large.py"), str(folder / "small"), "--workdir", str(folder / "race"), *options]
    monkeypatch.setattr(sys, "argv", arguments)
    exits_cleanly(race.main)


def test_a_race_grows_one_checkpoint_by_each_operator_and_trains_it(folder, monkeypatch, capsys):
    raced(folder, monkeypatch, "--by", "stack,llama_pro,mslt", "--steps", "20", "--seeds", "0,1")
    text = (folder / "race" / "race.md").read_text()
    assert text in capsys.readouterr().out
    found = json.loads((folder / "race" / "race.json").read_text())
    assert {row["by"] for row in found} == {"stack", "llama_pro", "mslt"}
    ends = [sum(row["loss"][-1]) for row in found]
    assert ends == sorted(ends)  # the best one first
    small = Run("small", 0, folder / "small")
    for row in found:
        assert row["steps"] == [0, 5, 10, 20]
        assert all(len(losses) == 2 for losses in row["loss"])
        if row["by"] == "llama_pro":  # keeps the function: the race begins where the small model ended
            assert row["loss"][0] == pytest.approx([small.loss] * 2, abs=1e-5)  # float32, other programs
        finished = Run("", 0, folder / "race" / f"race_{row['by']}-seed0")
        assert finished.loss == row["loss"][-1][0]
        assert finished.result["flops"] > row["flops"] > 0  # without the small model's cost
    assert (folder / "race" / "race.png").stat().st_size > 1000
    assert "Rank correlation" in text


def test_rank_correlation_by_hand():
    assert race.rank_correlation([1.0, 2.0, 3.0], [10.0, 20.0, 30.0]) == pytest.approx(1)
    assert race.rank_correlation([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(-1)
    assert race.rank_correlation([1.0, 2.0, 3.0], [1.0, 3.0, 2.0]) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--by", "stak"), "race: stak: there is no operator 'stak'"),
        (("--by", "hypercloning"), "race: hypercloning: axis 'layers': hypercloning grows embed, heads, mlp"),
        (("--steps", "3"), "--steps must be at least 20, but is 3"),
        (("--by", ""), "a race needs at least one operator"),
    ],
)
def test_bad_input(folder, monkeypatch, capsys, options, says):
    with pytest.raises(SystemExit):
        raced(folder, monkeypatch, *options)
    assert says in capsys.readouterr().err


def test_a_race_needs_a_run_of_the_small_model(folder, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", ["race", str(folder / "large.py"), str(folder / "nothing"), "--workdir", str(folder / "none")]
    )
    with pytest.raises(SystemExit):
        exits_cleanly(race.main)
    assert "give the work directory of the small model's run" in capsys.readouterr().err

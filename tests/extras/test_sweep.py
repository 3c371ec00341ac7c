"""Sweeps run all combinations, list the best first, and warn if the best value is at the edge."""

import json
import re
import sys

import pytest
import runs
from synthetic import SCRATCH, made

from train import sweep
from train.common.errors import exits_cleanly
from train.extras.advice.settings import Tried, edge_warnings, settings_table
from train.extras.arguments import listed_values
from train.step import inputs, programs
from train.sweep import _halved, all_combinations, run_name


def swept(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["sweep", *map(str, arguments)])
    exits_cleanly(sweep.main)


def test_every_combination_is_run_once_and_the_best_is_told(tmp_path, monkeypatch, capsys):
    rate = inputs.learning_rate
    # At 0.04 the last update is infinite, so that run diverges. The sweep continues.
    monkeypatch.setattr(
        inputs,
        "learning_rate",
        lambda o, n, i: 3e38 if o.peak_lr == 0.04 and i == n - 1 else rate(o, n, i),
    )
    script, folder = (
        runs.script(tmp_path, runs.experiment(tmp_path, eval_every=8, checkpoint_every=8)),
        tmp_path / "sweep",
    )
    rates, warmups = ["1e-5", "0.02", "0.04"], ["1", "3"]
    options = (
        f"--set optim.peak_lr={','.join(rates)} --set optim.warmup={','.join(warmups)}".split()
    )
    options += f"--set eval_batches=1 --frontier 0.5 --seeds 0,1 --workdir {folder}".split()
    swept(monkeypatch, script, *options)
    text = (folder / "tiny-x0.5.md").read_text()
    assert text in capsys.readouterr().out
    rows = [
        [c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines() if line[:1] == "|"
    ][2:]
    assert {tuple(row[:2]) for row in rows} == {(r, w) for r in rates for w in warmups}
    found = json.loads((folder / "tiny-x0.5.json").read_text())
    assert [tuple(f["settings"].values()) for f in found] == [tuple(row[:2]) for row in rows]
    means = [sum(f["loss"]) / 2 for f in found[:4]]
    assert means == sorted(means) and [f["loss"] for f in found[4:]] == [[None, None]] * 2
    assert [row[2] == "diverged" for row in rows] == [False] * 4 + [True] * 2
    assert [row[-1] for row in rows] == ["best"] + [""] * 5 and rows[0][
        0
    ] == "0.02"  # 1e-5 learns nothing in 4 steps
    ended = [json.loads(p.read_text()) for p in folder.glob("*/result.json")]
    assert len(ended) == 8 and all(r["steps"] == 4 for r in ended)
    assert f"All 8 completed runs: {sum(r['flops'] for r in ended):.3g} FLOPs" in text
    assert "WARNING: the best optim.warmup" in text  # with two values, both are edges
    assert "optim.peak_lr, 0.02, is" not in text
    # a single value has no edge
    assert "eval_batches" not in text + "".join(p.name for p in folder.iterdir())

    # finished runs are not repeated; diverged runs would be
    monkeypatch.setattr(programs, "step", None)
    with pytest.raises(TypeError):
        swept(monkeypatch, script, *options)


def test_the_better_half_goes_on_and_all_is_told(tmp_path, monkeypatch, capsys):
    script = runs.script(tmp_path, runs.experiment(tmp_path, eval_every=8, checkpoint_every=8))
    rates, folder = ["1e-5", "0.005", "0.02", "0.03"], tmp_path / "sweep"
    options = f"--set optim.peak_lr={','.join(rates)} --halving 0.25,0.5 --workdir {folder}".split()
    swept(monkeypatch, script, *options)
    found = json.loads((folder / "tiny.json").read_text())
    assert [f.get("of the steps") for f in found] == [None, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25]
    tried = [f["settings"]["optim.peak_lr"] for f in found]
    assert (
        set(tried[3:]) == set(rates) and set(tried[1:3]) == set(tried[3:5]) and tried[0] == tried[1]
    )
    steps = {json.loads(p.read_text())["steps"] for p in folder.glob("*/result.json")}
    assert steps == {2, 4, 8} and len(list(folder.glob("*/result.json"))) == 7
    assert (
        "| of the steps |" in (text := capsys.readouterr().out) and "All 7 completed runs" in text
    )

    monkeypatch.setattr(programs, "step", None)  # finished runs are not repeated
    swept(monkeypatch, script, *options)


def test_the_loss_of_the_average_decides(tmp_path, monkeypatch, capsys):
    """The last weights do not depend on the average, so their loss cannot rank it."""
    script = runs.script(tmp_path, runs.experiment(tmp_path, eval_every=8, checkpoint_every=8))
    options = f"--set optim.ema=0,0.5,0.99 --workdir {tmp_path / 'sweep'}".split()
    swept(monkeypatch, script, *options)
    found = json.loads((tmp_path / "sweep" / "tiny.json").read_text())
    averages = {f["settings"]["optim.ema"]: f.get("val_loss_ema", f["loss"])[0] for f in found}
    assert [f["settings"]["optim.ema"] for f in found] == sorted(averages, key=averages.get)
    assert len({f["loss"][0] for f in found}) == 1 < len(set(averages.values()))
    text = capsys.readouterr().out
    for ema, loss in averages.items():
        if ema != "0":
            assert re.search(rf"\| {ema} +\| [\d.]+ +\| {loss:.4f} ", text)
    assert re.search(r"\| 0 +\| [\d.]+ +\|  +\|", text)


def test_halving_keeps_the_settings_with_the_best_averages_of_all_seeds(tmp_path, monkeypatch):
    """A setting with a seed that diverged is the worst, although its other seed is the best."""
    losses = {"a": (3.0, 1.0), "b": (2.0, 2.5), "c": (1.0, 3.0), "d": (0.5, 0.5)}

    def attempt(experiment, seed, workdir, diverged):
        setting = experiment.name[-1]
        loss, average = losses[setting]
        name = f"{experiment.name}-{experiment.steps}"
        run = made(tmp_path, name, SCRATCH, seed, val_loss=loss, val_loss_ema=average)
        return None if setting == "d" and seed else run

    monkeypatch.setattr(sweep, "attempt_run", attempt)
    every = [({"x": name}, runs.experiment(tmp_path, steps=8)) for name in losses]
    tried = _halved(every, [0.5], [0, 1], tmp_path)
    assert [(t.settings["x"], t.fraction) for t in tried] == [
        *(("a", None), ("b", None)),
        *(("a", 0.5), ("b", 0.5), ("c", 0.5), ("d", 0.5)),
    ]
    *_, worst = settings_table(tried, {"x": list(losses)}).split("\n\n")[0].splitlines()
    assert worst.replace("|", " ").split()[:4] == ["d", "0.5", "diverged", "diverged"]


@pytest.mark.parametrize(("best", "says"), [
    ({"lr": "1e-2", "by": "b"}, []),
    ({"lr": "2e-2", "by": "a"}, ["WARNING: the best lr, 2e-2, is the highest value tried: also sweep values above it"]),
    ({"lr": "5e-3", "by": "b"}, ["WARNING: the best lr, 5e-3, is the lowest value tried: also sweep values below it"]),
])  # fmt: skip
def test_the_edge_of_a_sweep(best, says):
    assert (
        edge_warnings(
            {**best, "one": "3"}, {"lr": ["2e-2", "1e-2", "5e-3"], "by": ["a", "b"], "one": ["3"]}
        )
        == says
    )


def test_a_sweep_without_a_run_that_ended_says_so():
    whole, short = Tried({"lr": "1"}, [None]), Tried({"lr": "1"}, [None], 0.5)
    assert settings_table([whole], {"lr": ["1"]}).endswith("WARNING: every run diverged\n")
    assert settings_table([whole, short], {"lr": ["1"]}).endswith(
        "WARNING: every run of all steps diverged\n"
    )


def test_tuples_are_swept_in_brackets():
    assert listed_values(["model.layers=(1, 2),(2,2)", "steps=4"]) == {
        "model.layers": ["(1, 2)", "(2,2)"],
        "steps": ["4"],
    }
    assert listed_values(["data.path=a,b,"]) == {"data.path": ["a", "b"]}


def test_every_combination_of_tuples_is_an_experiment():
    made = all_combinations(
        "configs/cifar10.py:swin_scratch",
        listed_values(["model.layers=(1,2),(2,2)", "steps=4"]),
        None,
    )
    assert [settings for settings, _ in made] == [
        {"model.layers": "(1,2)"},
        {"model.layers": "(2,2)"},
    ]
    assert [e.model.layers for _, e in made] == [(1, 2), (2, 2)] and {e.steps for _, e in made} == {
        4
    }


def test_all_values_of_a_setting_that_is_given_twice_are_swept():
    assert listed_values(["a=1,2", "b=x", "a=3,2"]) == {"a": ["1", "2", "3"], "b": ["x"]}


def test_names_of_runs_fit_into_a_folder():
    assert run_name("tiny", {}) == "tiny" and run_name("tiny", {"a.b": "x/y"}) == "tiny-a.b=x_y"
    long = [run_name("tiny", {"data.path": f"{'long/' * 60}{i}", "steps": "4"}) for i in range(2)]
    assert len(set(long)) == 2 and all(
        len(name.encode()) <= 200 and "/" not in name for name in long
    )
    assert (
        run_name("é" * 120, {}) == run_name("é" * 120, {})
        and len(run_name("é" * 120, {}).encode()) <= 200
    )


@pytest.mark.parametrize(("options", "says"), [
    ((), "a sweep needs --set with a field and values"),
    (("--set", "optim.peak_lr=1e-2,fast"), "--set optim.peak_lr: expected float, but got 'fast'"),
    (("--set", "optim.warmup=1", "--halving", "0.5,1"), "fractions between 0 and 1, not 1"),
    (("--set", "batch=4,8"), "not evaluated in the same way: eval_batches * batch: 8 and 16"),
    (("--set", "seed=0,1"), "sets seed=1, but --seeds determines the seeds of all runs"),
])  # fmt: skip
def test_what_cannot_be_swept_is_refused_before_anything_runs(
    tmp_path, monkeypatch, capsys, options, says
):
    script = runs.script(tmp_path, runs.experiment(tmp_path))
    with pytest.raises(SystemExit):
        swept(monkeypatch, script, *options, "--workdir", tmp_path / "sweep")
    assert says in capsys.readouterr().err
    assert not (tmp_path / "sweep").exists()

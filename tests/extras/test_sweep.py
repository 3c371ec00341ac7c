"""Sweeps run all combinations, list the best first, and warn if the best value is at the edge."""

import json
import re

import pytest
import runs
from advice import command, refused
from synthetic import SCRATCH, made

from train import sweep
from train.extras.advice.settings import Tried, edge_warnings, settings_table
from train.extras.arguments import listed_values
from train.step import inputs, programs
from train.sweep import _halved, all_combinations, run_name


def swept(tmp_path, options, **changes):
    """Sweep a run of 8 steps; return the printed text and the written results."""
    script = runs.script(tmp_path, runs.experiment(tmp_path, eval_every=8, **changes))
    said = command("train.sweep", script, "--workdir", tmp_path / "sweep", *options.split())
    (file,) = (tmp_path / "sweep").glob("*.json")
    return said, json.loads(file.read_text())


def results(tmp_path):
    return [json.loads(path.read_text()) for path in tmp_path.glob("sweep/*/result.json")]


def test_every_combination_is_run_once_and_the_best_is_told(tmp_path, monkeypatch):
    rate = inputs.learning_rate

    # At 0.04 the last update is infinite, so that run diverges. The sweep continues.
    def rising(optim, steps, step):
        return 3e38 if optim.peak_lr == 0.04 and step == steps - 1 else rate(optim, steps, step)

    monkeypatch.setattr(inputs, "learning_rate", rising)
    rates, warmups = ["1e-5", "0.02", "0.04"], ["1", "3"]
    options = f"--set optim.peak_lr={','.join(rates)} optim.warmup={','.join(warmups)}"
    options += " --set eval_batches=1 --frontier 0.5 --seeds 0,1"
    said, found = swept(tmp_path, options)
    text = (tmp_path / "sweep" / "tiny-x0.5.md").read_text()
    assert text in said
    rows = [line for line in text.splitlines() if line[:1] == "|"][2:]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in rows]
    assert {tuple(row[:2]) for row in rows} == {(r, w) for r in rates for w in warmups}
    assert [tuple(f["settings"].values()) for f in found] == [tuple(row[:2]) for row in rows]
    means = [sum(f["loss"]) / 2 for f in found[:4]]
    assert means == sorted(means) and [f["loss"] for f in found[4:]] == [[None, None]] * 2
    assert [row[2] == "diverged" for row in rows] == [False] * 4 + [True] * 2
    assert [row[-1] for row in rows] == ["best"] + [""] * 5
    assert rows[0][0] == "0.02"  # 1e-5 learns nothing in 4 steps
    ended = results(tmp_path)
    assert len(ended) == 8 and all(r["steps"] == 4 for r in ended)
    assert f"All 8 completed runs: {sum(r['flops'] for r in ended):.3g} FLOPs" in text
    assert "WARNING: the best optim.warmup" in text  # with two values, both are edges
    assert "optim.peak_lr, 0.02, is" not in text
    # a single value has no edge
    assert "eval_batches" not in text + "".join(p.name for p in (tmp_path / "sweep").iterdir())

    # finished runs are not repeated; diverged runs would be
    monkeypatch.setattr(programs, "step", None)
    with pytest.raises(TypeError):
        swept(tmp_path, options)


def test_the_better_half_goes_on_and_all_is_told(tmp_path, monkeypatch):
    rates = ["1e-5", "0.005", "0.02", "0.03"]
    options = f"--set optim.peak_lr={','.join(rates)} --halving 0.25,0.5"
    said, found = swept(tmp_path, options)
    assert [f.get("of the steps") for f in found] == [None, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25]
    tried = [f["settings"]["optim.peak_lr"] for f in found]
    assert {*tried[3:]} == {*rates} and {*tried[1:3]} == {*tried[3:5]} and tried[0] == tried[1]
    assert sorted(r["steps"] for r in results(tmp_path)) == [2] * 4 + [4] * 2 + [8]
    assert "| of the steps |" in said and "All 7 completed runs" in said
    monkeypatch.setattr(programs, "step", None)  # finished runs are not repeated
    swept(tmp_path, options)


def test_the_loss_of_the_average_decides(tmp_path):
    """The last weights do not depend on the average, so their loss cannot rank it."""
    text, found = swept(tmp_path, "--set optim.ema=0,0.5,0.99")
    averages = {f["settings"]["optim.ema"]: f.get("val_loss_ema", f["loss"])[0] for f in found}
    assert [f["settings"]["optim.ema"] for f in found] == sorted(averages, key=averages.get)
    assert len({f["loss"][0] for f in found}) == 1 < len(set(averages.values()))
    for ema in ("0.5", "0.99"):
        assert re.search(rf"\| {ema} +\| [\d.]+ +\| {averages[ema]:.4f} ", text)
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
    order = [("a", None), ("b", None), *((name, 0.5) for name in "abcd")]
    assert [(t.settings["x"], t.fraction) for t in tried] == order
    *_, worst = settings_table(tried, {"x": list(losses)}).split("\n\n")[0].splitlines()
    assert worst.replace("|", " ").split()[:4] == ["d", "0.5", "diverged", "diverged"]


@pytest.mark.parametrize(("lr", "by", "says"), [
    ("1e-2", "b", []),
    ("2e-2", "a", ["WARNING: the best lr, 2e-2, is the highest value tried: also sweep values above it"]),
    ("5e-3", "b", ["WARNING: the best lr, 5e-3, is the lowest value tried: also sweep values below it"]),
])  # fmt: skip
def test_the_edge_of_a_sweep(lr, by, says):
    listed = {"lr": ["2e-2", "1e-2", "5e-3"], "by": ["a", "b"], "one": ["3"]}
    assert edge_warnings({"lr": lr, "by": by, "one": "3"}, listed) == says


def test_nothing_below_zero_is_advised():
    """``optim.ema``, ``optim.weight_decay`` and others refuse negative values."""
    assert edge_warnings({"ema": "0"}, {"ema": ["0", "0.9"]}) == []
    (says,) = edge_warnings({"ema": "0.9"}, {"ema": ["0", "0.9"]})
    assert "highest" in says


def test_a_sweep_without_a_run_that_ended_says_so():
    whole, short = Tried({"lr": "1"}, [None]), Tried({"lr": "1"}, [None], 0.5)
    for tried, what in (([whole], "every run"), ([whole, short], "every run of all steps")):
        assert settings_table(tried, {"lr": ["1"]}).endswith(f"WARNING: {what} diverged\n")


def test_the_values_of_a_setting_are_listed():
    """Tuples are in brackets, and the values of a setting that is given twice are combined."""
    sizes = listed_values(["model.layers=(1, 2),(2,2)", "steps=4"])
    assert sizes == {"model.layers": ["(1, 2)", "(2,2)"], "steps": ["4"]}
    assert listed_values(["data.path=a,b,"]) == {"data.path": ["a", "b"]}
    assert listed_values(["a=1,2", "b=x", "a=3,2"]) == {"a": ["1", "2", "3"], "b": ["x"]}


def test_every_combination_of_tuples_is_an_experiment():
    listed = listed_values(["model.layers=(1,2),(2,2)", "steps=4"])
    made = all_combinations("configs/cifar10.py:swin_scratch", listed, None)
    assert [settings["model.layers"] for settings, _ in made] == ["(1,2)", "(2,2)"]
    assert [(e.model.layers, e.steps) for _, e in made] == [((1, 2), 4), ((2, 2), 4)]


def test_names_of_runs_fit_into_a_folder():
    assert run_name("tiny", {}) == "tiny" and run_name("tiny", {"a.b": "x/y"}) == "tiny-a.b=x_y"
    long = [run_name("tiny", {"data.path": f"{'long/' * 60}{i}", "steps": "4"}) for i in range(2)]
    assert len({*long}) == 2 and not any("/" in name for name in long)
    assert all(len(name.encode()) <= 200 for name in [*long, run_name("é" * 120, {})])


@pytest.mark.parametrize(("options", "says"), [
    ("optim.peak_lr=1e-2,fast", "--set optim.peak_lr: expected float, but got 'fast'"),
    ("optim.warmup=1 --halving 0.5,1", "fractions between 0 and 1, not 1"),
    ("batch=4,8", "not evaluated in the same way: eval_batches * batch: 8 and 16"),
    ("batch=4,8 eval_batches=4,2", "a sweep takes one batch, so sweep the settings of each batch in another --workdir"),
    ("mesh.fsdp=4,3", "tiny-mesh.fsdp=3: a mesh of data=any x fsdp=3 x tensor=1 does not fit 4 devices"),
    ("seed=0,1", "sets seed=1, but --seeds determines the seeds of all runs"),
])  # fmt: skip
def test_what_cannot_be_swept_is_refused_before_anything_runs(tmp_path, options, says):
    assert says in refused(lambda: swept(tmp_path, f"--set {options}"))
    assert not (tmp_path / "sweep").exists()

"""A budget in seconds becomes a number of steps, which is measured once and then kept."""

import json
import sys
from dataclasses import replace

import pytest
import runs

from jaxgrow.layerdrop import LayerDrop, Sensitivity
from train import compare, pretrain, show
from train.common.errors import UserError, exits_cleanly
from train.config.experiment import load_experiment
from train.extras import timing
from train.plan.methods import Growing, GrowTo, Learned, Scratch, TrainStage
from train.plan.modifiers import DropLayers
from train.plan.training import Train

SBLD = Scratch((DropLayers(LayerDrop(sensitivity=Sensitivity(after=0.25, batches=2))),))


def timed(folder, seconds=0.4, **changes):
    return runs.experiment(folder, steps=0, seconds=seconds, **changes)


@pytest.fixture
def speeds(monkeypatch):
    """Replace the rehearsal: the steps of stage i take ``speeds[i]`` seconds."""
    found: list[float] = [0.05]
    monkeypatch.setattr(timing, "_rehearsed", lambda experiment, count: [*found])
    return found


def compared(*arguments: str) -> int:
    """Run the command and return its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["compare", *arguments])
        try:
            exits_cleanly(compare.main)
        except SystemExit as stopped:
            return int(stopped.code or 0)
    return 0


def lengths(experiment) -> list[int]:
    return [p.end - p.begin for p in experiment.plan if isinstance(p, Train)]


def test_each_stage_has_its_fraction_of_the_time(tmp_path, speeds):
    speeds[:] = [0.01, 0.04]
    grown = runs.growing(
        tmp_path,
        GrowTo((TrainStage(0.5),), by=runs.DOUBLED),
        source=TrainStage(0.25),
        steps=0,
        seconds=6.0,
    )
    found = timing.timed_steps(grown, tmp_path / "run")
    # a third of 6 seconds, and two thirds
    assert lengths(found) == [200, 100] and (found.steps, found.seconds) == (300, None)
    assert found.method != grown.method and lengths(replace(found, steps=30)) == [20, 10]


def test_a_training_without_stages_has_all_of_the_time(tmp_path, speeds):
    assert timing.timed_steps(timed(tmp_path), tmp_path / "run").steps == 8
    assert timing.timed_steps(timed(tmp_path, 1e-9), tmp_path / "run").steps == 1
    assert timing.timed_steps(timed(tmp_path, 0.8, method=SBLD), tmp_path / "b").steps == 16


def test_the_measurement_is_kept(tmp_path, speeds, monkeypatch):
    first = timing.timed_steps(timed(tmp_path), tmp_path / "run")
    monkeypatch.setattr(timing, "_rehearsed", None)
    other = timed(tmp_path, seed=1, eval_every=2, accumulate=2)
    assert timing.timed_steps(other, tmp_path / "run").steps == first.steps
    assert timing.timed_steps(timed(tmp_path, 0.8), tmp_path / "run").steps == 16
    with pytest.raises(UserError, match=r"times of another config .*batch: 8 and 16.*--workdir"):
        timing.timed_steps(timed(tmp_path, batch=16), tmp_path / "run")


@pytest.mark.parametrize("seconds", [[0.0], [-1.0], [1e-300], [0.1] * 5, "ab", None])
def test_a_damaged_measurement_is_refused(tmp_path, speeds, seconds):
    timing.timed_steps(timed(tmp_path), tmp_path)
    path = tmp_path / "tiny-seconds.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"seconds": seconds}))
    with pytest.raises(UserError, match=r"is damaged: .*delete it"):
        timing.timed_steps(timed(tmp_path), tmp_path)


def test_a_phase_with_its_own_steps_is_refused(tmp_path, speeds):
    ligo = runs.growing(
        tmp_path, GrowTo(by=Learned(steps=7)), source=TrainStage(0.5), steps=0, seconds=3.0
    )
    with pytest.raises(UserError, match=r"learn maps always has 7 steps.*CONFIG:steps=1000"):
        timing.timed_steps(ligo, tmp_path / "run")


def test_the_length_is_given_once(tmp_path, capsys):
    config = runs.script(tmp_path, runs.experiment(tmp_path))
    loaded = load_experiment(config, ["seconds=2"])
    assert (loaded.steps, loaded.epochs, loaded.seconds) == (0, None, 2.0)
    assert load_experiment(config, ["seconds=2", "steps=3"]).seconds is None
    with pytest.raises(ValueError, match=r"steps=8 and seconds=2.0 both .* \(steps=0, or seconds="):
        runs.experiment(tmp_path, seconds=2.0)
    with pytest.raises(ValueError, match=r"epochs=1.0 and seconds=2.0 both set the length"):
        timed(tmp_path, 2.0, epochs=1.0)
    with pytest.raises(ValueError, match="seconds must be positive and finite, but is 0"):
        timed(tmp_path, 0)
    with pytest.raises(UserError, match=r"seconds=0.4 and the speed of the machine"):
        _ = timed(tmp_path).plan
    assert not show._has_steps(f"{config}:seconds=2.0")
    assert f"seconds=2.0 and the speed of the machine: show {config}" in capsys.readouterr().out
    assert compared(config, "--seconds", "2", "--set", "steps=3") == 2
    assert "--seconds 2 and --set steps=3 both set the length" in capsys.readouterr().err


@pytest.mark.parametrize(
    "method",
    [
        Growing(replace(runs.MODEL, layers=1), TrainStage(0.5), (GrowTo((TrainStage(0.5),)),)),
        Growing(runs.SMALL, "none-seed{seed}", (GrowTo((TrainStage(0.5),), by=runs.DOUBLED),)),
        SBLD,
    ],
    ids=["grown", "imported", "sensitivities"],
)
def test_steps_are_measured_and_leave_no_files(tmp_path, method, monkeypatch):
    """A rehearsal needs neither the model that the run starts from nor a second set of programs."""
    experiment = timed(tmp_path, 0.2, method=method)
    if "none" in str(method):
        experiment = replace(experiment, model=runs.LARGE)
    monkeypatch.setattr(timing, "STEPS", 8)
    found = timing.timed_steps(experiment, tmp_path / "run")
    assert found.steps >= len(lengths(found)) and found.seconds is None
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["tiny-seconds.json"]
    kept = json.loads((tmp_path / "run" / "tiny-seconds.json").read_text())["seconds"]
    stages = [x for x in (experiment.method.__dict__.get("source"),) if isinstance(x, TrainStage)]
    assert len(kept) == 1 + len(stages) and all(0 < t < 10 for t in kept)


def test_a_resumed_run_has_the_same_steps_and_continues_its_clock(tmp_path, monkeypatch, capsys):
    method = Growing(replace(runs.MODEL, layers=1), TrainStage(0.5), (GrowTo((TrainStage(0.5),)),))
    experiment = timed(tmp_path, 0.8, method=method, checkpoint_every=1)
    monkeypatch.setattr(timing, "_rehearsed", lambda *about: [0.1, 0.2])
    pretrain.run_experiment(experiment, tmp_path / "whole")
    monkeypatch.setattr(timing, "_rehearsed", lambda *about: [0.1, 0.2])
    runs.killed(experiment, tmp_path / "run", 3)
    monkeypatch.setattr(timing, "_rehearsed", None)
    result = pretrain.run_experiment(experiment, tmp_path / "run")
    runs.assert_same_end(tmp_path / "run", tmp_path / "whole")
    assert [p["steps"] for p in result["phases"] if p["steps"]] == [4, 2]
    seconds = [line["seconds"] for line in json_lines(tmp_path / "run")]
    assert seconds == sorted(seconds) and result["seconds"] >= seconds[-1]
    steps = "0.8 s of training are 4 steps of 100 ms, 2 steps of 200 ms"
    assert f"tiny: {steps}\n" in capsys.readouterr().err
    pretrain.run_experiment(experiment, tmp_path / "run")  # it has finished


def json_lines(folder):
    return map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())


def test_all_configs_of_a_comparison_have_the_same_time(tmp_path, speeds, monkeypatch, capsys):
    base = runs.experiment(tmp_path, name="base", eval_batches=1)
    config = runs.script(tmp_path, base)
    monkeypatch.setattr(timing, "_rehearsed", lambda e, count: [0.05 if "other" in e.name else 0.1])
    asked = [config, f"{config}:name=other", f"{config}:name=less:seconds=0.4"]
    more = ["--seconds", "0.8", "--frontier", "0.5", "--workdir", str(tmp_path / "runs")]
    for _ in range(2):  # the second time, all runs have finished
        assert compared(*asked, *more) == 0
        monkeypatch.setattr(timing, "_rehearsed", None)
    folders = ("base", "other", "less", "base-x0.5")
    results = [json.loads((tmp_path / f"runs/{f}-seed0/result.json").read_text()) for f in folders]
    assert [result["steps"] for result in results] == [8, 16, 4, 4]
    report = " ".join((tmp_path / "runs" / "compare.md").read_text().split())
    assert "base: 0.8 s of training were planned. other: 0.8 s" in report.replace("  ", " ")

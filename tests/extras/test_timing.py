"""A budget in seconds becomes a number of steps, which is measured once and then kept."""

import itertools
import json
import signal
import sys
from dataclasses import replace

import pytest
import runs
from handlers import python_handlers

from jaxgrow.layerdrop import LayerDrop, Sensitivity
from train import compare, pretrain, show
from train.common.errors import Preempted, UserError, exits_cleanly
from train.config.experiment import load_experiment
from train.extras import timing
from train.plan.methods import Growing, GrowTo, Learned, Scratch, TrainStage
from train.plan.modifiers import DropLayers
from train.plan.training import Train
from train.step import inputs

SBLD = Scratch((DropLayers(LayerDrop(sensitivity=Sensitivity(after=0.25, batches=2))),))
SHALLOW, NARROW = replace(runs.MODEL, layers=1), replace(runs.MODEL, mlp=8)
HALF = Growing(SHALLOW, TrainStage(0.5), (GrowTo((TrainStage(0.5),)),))
LIGO = replace(HALF, to=(GrowTo((TrainStage(0.5),), by=Learned(steps=9, warmup=0)),))


def timed(folder, seconds=0.4, **changes):
    return runs.experiment(folder, steps=0, seconds=seconds, **changes)


@pytest.fixture
def speeds(monkeypatch):
    """Replace the rehearsal: the steps of stage i take ``speeds[i]`` seconds; []: it may not run."""
    found: list[float] = [0.05]

    def rehearsed(experiment, count):
        assert found, "the steps are measured again"
        return [*found]

    monkeypatch.setattr(timing, "_rehearsed", rehearsed)
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
    to = GrowTo((TrainStage(0.5),), by=runs.DOUBLED)
    grown = runs.growing(tmp_path, to, source=TrainStage(0.25), steps=0, seconds=6.0)
    found = timing.timed_steps(grown, tmp_path / "run")
    # a third of 6 seconds, and two thirds
    assert lengths(found) == [200, 100] and (found.steps, found.seconds) == (300, None)
    assert found.method != grown.method and lengths(replace(found, steps=30)) == [20, 10]


def test_a_training_without_stages_has_all_of_the_time(tmp_path, speeds):
    assert timing.timed_steps(timed(tmp_path), tmp_path / "run").steps == 8
    assert timing.timed_steps(timed(tmp_path, 1e-9), tmp_path / "run").steps == 1
    assert timing.timed_steps(timed(tmp_path, 0.8, method=SBLD), tmp_path / "b").steps == 16


def test_the_measurement_is_kept(tmp_path, speeds):
    first = timing.timed_steps(timed(tmp_path), tmp_path / "run")
    speeds.clear()
    other = timed(tmp_path, seed=1, eval_every=2, accumulate=2)
    assert timing.timed_steps(other, tmp_path / "run").steps == first.steps
    assert timing.timed_steps(timed(tmp_path, 0.8), tmp_path / "run").steps == 16
    with pytest.raises(UserError, match=r"times of another config .*batch: 8 and 16.*--workdir"):
        timing.timed_steps(timed(tmp_path, batch=16), tmp_path / "run")


def test_a_damaged_measurement_is_refused(tmp_path, speeds):
    timing.timed_steps(timed(tmp_path), tmp_path)
    path = tmp_path / "tiny-seconds.json"
    about = json.loads(path.read_text())
    for seconds in ([0.0], [-1.0], [1e-300], [0.1] * 5, "ab", None):
        path.write_text(json.dumps(about | {"seconds": seconds}))
        with pytest.raises(UserError, match=r"is damaged: .*delete it"):
            timing.timed_steps(timed(tmp_path), tmp_path)


def ligo(folder, seconds, steps=7, **changes):
    to = GrowTo((TrainStage(0.25),), by=Learned(steps=steps, warmup=0))
    return runs.growing(folder, to, source=TrainStage(0.5), steps=0, seconds=seconds, **changes)


def test_phases_with_a_fixed_number_of_steps_keep_it(tmp_path, speeds, capsys):
    """The maps of LiGO take 0.7 s. The small model has two thirds of the rest, 1.6 of 2.4 s."""
    speeds[:] = [0.01, 0.04, 0.1]
    found = timing.timed_steps(ligo(tmp_path, 3.1), tmp_path / "run")
    assert lengths(found) == [160, 7, 20]
    said = "3.1 s of training are 160 steps of 10 ms, 20 steps of 40 ms, 7 steps of 100 ms"
    assert said in capsys.readouterr().err
    message = r"fixed number of steps take 0\.7 s, but seconds=0\.7: give"
    with pytest.raises(UserError, match=message):
        timing.timed_steps(ligo(tmp_path, 0.7), tmp_path / "run")
    assert lengths(timing.timed_steps(ligo(tmp_path, 0.71), tmp_path / "run")) == [1, 7, 1]
    # With 1,000 steps in each stage, this fraction ends in the maps, and with 2,000 in the small model.
    ramped = timing.timed_steps(ligo(tmp_path, 3.1, ramp=(0.49875,)), tmp_path / "ramped")
    assert ramped.steps == found.steps
    speeds[:] = [0.01, 0.04]  # a single step is not measured
    short = timing.timed_steps(ligo(tmp_path, 3.0, steps=1), tmp_path / "one")
    assert lengths(short) == [200, 1, 25]


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


def test_a_setting_without_an_effect_is_refused(tmp_path):
    """The number of steps is not known yet, but the schedules of the plan are."""
    config = runs.script(tmp_path, runs.experiment(tmp_path))
    for length in ("steps=9", "seconds=2"):
        assert load_experiment(config, [length, "optim.floor=0.1"]).optim.floor == 0.1
        with pytest.raises(UserError, match=r"optim.decay=0.3 has no effect in this plan"):
            load_experiment(config, [length, "optim.decay=0.3"])


MEASURED = {
    "imported": Growing(runs.SMALL, "none-seed{seed}", (GrowTo((TrainStage(0.5),), runs.DOUBLED),)),
    "sensitivities": SBLD,
    "LiGO": LIGO,
    "V-cycle": runs.VCYCLE,
}


@pytest.mark.parametrize("method", MEASURED.values(), ids=MEASURED)
def test_steps_are_measured_and_leave_no_files(tmp_path, method, monkeypatch):
    """A rehearsal needs neither the model that the run starts from nor a second set of programs."""
    experiment = timed(tmp_path, 5.0, method=method)  # enough for the fixed steps on a busy machine
    if "none" in str(method):
        experiment = replace(experiment, model=runs.LARGE)
    monkeypatch.setattr(timing, "STEPS", 8)
    monkeypatch.setattr(timing, "PART", 0.0)  # without a second, longer rehearsal
    found = timing.timed_steps(experiment, tmp_path / "run")
    assert found.steps >= len(lengths(found)) and found.seconds is None
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["tiny-seconds.json"]
    kept = json.loads((tmp_path / "run" / "tiny-seconds.json").read_text())["seconds"]
    stages = max(1, len(timing._stage_fractions(experiment)))
    assert len(kept) == stages + (method is LIGO)
    assert all(0 < t < 10 for t in kept)


def test_a_resumed_run_has_the_same_steps_and_continues_its_clock(tmp_path, speeds, capsys):
    experiment = timed(tmp_path, 0.8, method=HALF, checkpoint_every=1)
    speeds[:] = [0.1, 0.2]
    pretrain.run_experiment(experiment, tmp_path / "whole")
    runs.killed(experiment, tmp_path / "run", 3)
    speeds.clear()
    result = pretrain.run_experiment(experiment, tmp_path / "run")
    runs.assert_same_end(tmp_path / "run", tmp_path / "whole")
    assert [p["steps"] for p in result["phases"] if p["steps"]] == [4, 2]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    seconds = [json.loads(line)["seconds"] for line in lines]
    assert seconds == sorted(seconds) and result["seconds"] >= seconds[-1]
    steps = "0.8 s of training are 4 steps of 100 ms, 2 steps of 200 ms"
    assert f"tiny: {steps}\n" in capsys.readouterr().err
    pretrain.run_experiment(experiment, tmp_path / "run")  # it has finished


LEARNED = GrowTo((TrainStage(0.3),), by=Learned(steps=2, warmup=0), config=NARROW)
WIDER = GrowTo((TrainStage(0.3),), by=("net2net",))
TWO = Growing(replace(NARROW, layers=1), TrainStage(0.3), (LEARNED, WIDER))


@pytest.mark.parametrize("method", [runs.VCYCLE, TWO], ids=["V-cycle", "LiGO and another growth"])
@pytest.mark.parametrize("call", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_a_growth_resumes_after_sigterm_with_the_same_steps(
    tmp_path, monkeypatch, speeds, method, call
):
    """The measurement would be another one now, but the run keeps the first one."""
    experiment = timed(tmp_path, 0.9, method=method, checkpoint_every=99)
    parts = len(timing._stage_fractions(experiment)) + len(timing._fixed_steps(experiment))
    speeds[:] = [0.1, 0.12, 0.08, 0.05][:parts]
    whole = pretrain.run_experiment(experiment, tmp_path / "whole")
    rate, calls = inputs.learning_rate, itertools.count(1)

    def interrupted(*arguments):
        if next(calls) == call:
            signal.raise_signal(signal.SIGTERM)
        return rate(*arguments)

    with monkeypatch.context() as patch, python_handlers():
        patch.setattr(inputs, "learning_rate", interrupted)
        with pytest.raises(Preempted, match="stopped by SIGTERM; saved a checkpoint"):
            pretrain.run_experiment(experiment, tmp_path / "run")
    speeds[:] = [1.0] * parts
    result = pretrain.run_experiment(experiment, tmp_path / "run")
    runs.assert_same_end(tmp_path / "run", tmp_path / "whole")
    assert [p["steps"] for p in result["phases"]] == [p["steps"] for p in whole["phases"]]
    assert len(result["growths"]) == (2 if method is TWO else 1)


def test_a_run_prints_the_planned_and_the_used_seconds(tmp_path, speeds, monkeypatch, capsys):
    config = runs.script(tmp_path, runs.experiment(tmp_path))
    folder = tmp_path / "run"
    command = ["pretrain", config, "--set", "seconds=0.4", "--workdir", str(folder)]
    monkeypatch.setattr(sys, "argv", command)
    for _ in range(2):  # the second time, the run has finished
        pretrain.main()
        said = capsys.readouterr().err
        result = json.loads((folder / "result.json").read_text())
        spent, compiling = result["seconds"], result["compile_seconds"]
        used = f"{spent - compiling:.1f} s were used, without {compiling:.1f} s of compilation\n"
        assert f"tiny: 0.4 s of training were planned, and {used}" in said
    monkeypatch.setattr(sys, "argv", ["pretrain", config, "--workdir", str(tmp_path / "steps")])
    pretrain.main()
    assert "planned" not in capsys.readouterr().err


def test_all_configs_of_a_comparison_have_the_same_time(tmp_path, monkeypatch):
    config = runs.script(tmp_path, runs.experiment(tmp_path, name="base", eval_batches=1))
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

"""Shorter runs from scratch start where their learning rate leaves that of the baseline."""

import shutil
from dataclasses import replace

import pytest
import runs

from jaxgrow.layerdrop import LayerDrop
from train.analysis.comparing import run_comparison, shortened_experiment
from train.analysis.runs import Run
from train.extras.sharing import branch_run, shared_steps
from train.plan.methods import Scratch
from train.plan.modifiers import DropLayers
from train.run import trainer
from train.state.optim import Optim, learning_rate
from train.step import programs
from train.store.workdir import Workdir

WSD = Optim(peak_lr=1e-2, warmup=2, schedule="wsd", decay=0.5)


@pytest.fixture
def baseline(tmp_path):
    """16 steps. With 8 steps, the decay begins after step 6, and with 12 steps, after step 8."""
    return runs.experiment(tmp_path, name="scratch", steps=16, optim=WSD)


@pytest.fixture
def executed(monkeypatch):
    """Collect a 1 for every training step that is executed."""
    made, steps = programs.step, []

    def counting(*arguments):
        step = made(*arguments)
        return lambda *inputs: steps.append(1) or step(*inputs)

    monkeypatch.setattr(programs, "step", counting)
    return steps


def kept(run: Run) -> set[str]:
    return {path.name for path in Workdir(run.folder).checkpoints.iterdir()}


def test_only_steps_after_the_common_ones_are_executed_and_the_result_is_the_same(
    baseline, tmp_path, executed, capsys
):
    shorter = [shortened_experiment(baseline, 0.5), shortened_experiment(baseline, 0.75)]
    found = run_comparison([baseline], shorter, [0, 1], tmp_path / "runs")
    said = capsys.readouterr().err
    assert "scratch-x0.75-seed1 shares its first 8 steps with scratch-seed1" in said
    assert len(executed) == 2 * (16 + (8 - 6) + (12 - 8))
    assert [kept(run) for run in found.runs[0]] == [{"16"}] * 2  # the others have moved
    for experiment, (_, run) in zip(shorter, found.frontier, strict=True):
        alone = tmp_path / "alone" / experiment.name
        result = trainer.run_experiment(replace(experiment, seed=1), alone)
        runs.assert_same_end(alone, run.folder)
        assert all(result[name] == run.result[name] for name in ("flops", "tokens"))


def test_a_baseline_without_the_checkpoint_is_no_obstacle(baseline, tmp_path, executed):
    run_comparison([baseline], [], [0], tmp_path / "runs")
    run_comparison([baseline], [shortened_experiment(baseline, 0.5)], [0], tmp_path / "runs")
    assert len(executed) == 16 + 8


def test_a_killed_start_is_repeated(baseline, tmp_path, executed):
    """Check a start that was killed before its last action, with TensorBoard's files deleted."""
    short = shortened_experiment(baseline, 0.5)
    run_comparison([baseline], [short], [0], tmp_path / "runs")
    long, folder = Workdir(tmp_path / "runs/scratch-seed0"), tmp_path / "runs/scratch-x0.5-seed0"
    result = Workdir(folder).result
    (folder / "checkpoints/6").rename(long.checkpoints / "6")
    shutil.rmtree(long.board)
    shutil.rmtree(folder)
    branch_run(Workdir(folder), long, 6, short)
    (folder / "checkpoints/6").rename(long.checkpoints / "6")
    assert Workdir(folder).begun
    executed.clear()
    (again,) = run_comparison([baseline], [short], [0], tmp_path / "runs").frontier[0]
    assert len(executed) == 8 and again.result["val_loss"] == result["val_loss"]


def test_a_run_that_has_begun_is_not_replaced(baseline, tmp_path):
    short = shortened_experiment(baseline, 0.5)
    folder = tmp_path / "runs" / "scratch-x0.5-seed0"
    before = trainer.run_experiment(short, folder)
    run_comparison([baseline], [short], [0], tmp_path / "runs")
    assert Workdir(folder).result == before


@pytest.mark.parametrize("schedule", ["wsd", "cosine", "linear"])
def test_common_steps_have_equal_learning_rates(baseline, schedule):
    long = replace(baseline, optim=replace(WSD, schedule=schedule))
    short = shortened_experiment(long, 0.75)
    common = shared_steps(long, short)
    rates = [[learning_rate(long.optim, e.steps, s) for s in range(12)] for e in (long, short)]
    assert rates[0][:common] == rates[1][:common] and rates[0][common] != rates[1][common]
    assert common == {"wsd": 8, "cosine": 3, "linear": 3}[schedule]


def test_runs_that_differ_otherwise_or_whose_stages_depend_on_the_steps_share_nothing(baseline):
    short = shortened_experiment(baseline, 0.75)
    assert shared_steps(baseline, short) == 8
    for name, value in (("optim", replace(WSD, peak_lr=2e-2)), ("eval_every", 2), ("batch", 16)):
        assert shared_steps(baseline, replace(short, **{name: value})) == 0
    assert shared_steps(baseline, replace(short, seed=1)) == 0
    for method in (runs.VCYCLE, Scratch(modifiers=(DropLayers(LayerDrop(theta=0.5)),))):
        assert shared_steps(baseline, replace(short, method=method)) == 0
        long = replace(baseline, method=method)
        assert shared_steps(long, shortened_experiment(long, 0.75)) == 0

"""``--from RUN[@STEP]`` starts a new run from a checkpoint of another run."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import chex
import pytest
import runs

from train import pretrain
from train.common.errors import Diverged, UserError
from train.config.experiment import experiment_json
from train.data.text import Data
from train.extras.branching import Origin, parsed_origin
from train.extras.run_params import load_params
from train.plan.methods import Growing, GrowTo, Scratch, TrainStage
from train.state.mesh import Mesh
from train.step import inputs
from train.store.checkpoint import Checkpoints
from train.store.workdir import Workdir


def branch(experiment, folder, run, step=None):
    start = f"{run}@{step}" if step else str(run)
    return pretrain.run_experiment(experiment, folder, start=start)


@pytest.mark.parametrize("changes", [
    {"mesh": Mesh(fsdp=2), "accumulate": 2},
    pytest.param({"parallel": "pmap"}, marks=pytest.mark.slow),
])  # fmt: skip
def test_other_devices_go_on_with_the_same_steps(tmp_path, whole_run, changes):
    branch(replace(whole_run[0], **changes), tmp_path / "new", whole_run[1], 4)
    runs.assert_close(tmp_path / "new", whole_run[1])


def test_a_run_that_ends_at_its_start_is_validated(tmp_path, whole_run):
    result = branch(replace(whole_run[0], steps=6), tmp_path / "new", whole_run[1], 6)
    (line,) = (x for x in runs.log(tmp_path / "new") if x["step"] == 6 and "val_loss" in x)
    assert result["steps"] == 6 and result["val_loss"] == line["val_loss"]
    assert (tmp_path / "new/transformers/README.md").is_file()


def test_the_position_in_the_data_is_one_of_samples(tmp_path, monkeypatch, whole_run):
    taken = []
    real = Checkpoints.save

    def watching(self, step, models, data, record):
        taken.append((step, data.get_state()["next_index"]))
        real(self, step, models, data, record)

    monkeypatch.setattr(Checkpoints, "save", watching)
    branch(replace(whole_run[0], batch=16), tmp_path / "same", whole_run[1], 6)
    branch(replace(whole_run[0], seed=1), tmp_path / "seed", whole_run[1], 6)
    assert taken == [(6, 48), (8, 80), (6, 0), (8, 16)]


def test_other_data_start_from_the_beginning_and_a_line_says_so(tmp_path, capsys, whole_run):
    data = Data("text", str(runs.corpus(tmp_path, 9)), valid_fraction=0.25, cache=str(tmp_path))
    branch(replace(whole_run[0], data=data), tmp_path / "new", whole_run[1], 4)
    said = capsys.readouterr().err
    assert f"starting from checkpoint 4 of {whole_run[1]}, step 4 of train large" in said
    assert "the data start from the beginning, because the corpus differs from" in said


KILLING = """
import os, signal, sys
from train import pretrain
from train.run import trainer
from train.store.checkpoint import Checkpoints
from train.extras import branching
where = sys.argv.pop(1)
def die(*given, **named): os.kill(os.getpid(), signal.SIGKILL)
if where == "log": branching.Origin.copy_log = die
if where == "recorder": trainer.Recorder = die
if where == "checkpoint":
    save = Checkpoints.save
    def saving(self, step, *rest):
        save(self, step, *rest)
        if step == 6: self.wait(), die()
    Checkpoints.save = saving
pretrain.main()
"""


@pytest.mark.parametrize(
    "where", ["log", "checkpoint", pytest.param("recorder", marks=pytest.mark.slow)]
)
def test_after_a_kill_the_same_command_resumes(tmp_path, whole_run, where):
    config = runs.script(tmp_path, whole_run[0])
    given = [config, "--workdir", str(tmp_path / "new"), "--from", f"{whole_run[1]}@4"]
    died = subprocess.run([sys.executable, "-c", KILLING, where, *given], env=os.environ)
    assert died.returncode == -signal.SIGKILL
    # the newest checkpoint of the source may be another one by now, but the step is recorded
    start = str(whole_run[1]) if where == "checkpoint" else f"{whole_run[1]}@4"
    pretrain.run_experiment(whole_run[0], tmp_path / "new", start=start)
    runs.assert_same_end(tmp_path / "new", whole_run[1])


def test_a_grown_run_goes_on_as_a_plain_one(tmp_path):
    method = Growing(runs.SMALL, TrainStage(0.5), (GrowTo((TrainStage(0.5),), by=runs.DOUBLED),))
    grown = runs.experiment(tmp_path, method=method)
    first = pretrain.run_experiment(grown, tmp_path / "grown")
    plain = replace(grown, method=Scratch(), steps=6)
    result = branch(plain, tmp_path / "new", tmp_path / "grown")
    assert result["flops"] > first["flops"]
    assert [p["phase"] for p in result["phases"]] == [p["phase"] for p in first["phases"]]
    runs.killed(replace(grown, checkpoint_every=1), tmp_path / "half", 2)
    with pytest.raises(UserError, match="is in the phase 'train small', but the config has only"):
        branch(plain, tmp_path / "other", tmp_path / "half")
    branch(grown, tmp_path / "again", tmp_path / "half")
    chex.assert_trees_all_equal(load_params(tmp_path / "again"), load_params(tmp_path / "grown"))


def test_after_a_divergence_the_advice_works(tmp_path, monkeypatch):
    real = inputs.learning_rate

    def rate(optim, steps, i):
        return 3e38 if i == 5 and optim.peak_lr == 1e-2 else real(optim, steps, i)

    monkeypatch.setattr(inputs, "learning_rate", rate)
    one = runs.experiment(tmp_path, checkpoint_every=2, log_every=1)
    with pytest.raises(Diverged) as error:
        pretrain.run_experiment(one, tmp_path / "run")
    words = str(error.value).split()
    start = words[words.index("--from") + 1].rstrip(",")
    lower = replace(one, optim=replace(one.optim, peak_lr=1e-3))
    assert pretrain.run_experiment(lower, tmp_path / "new", start=start)["steps"] == 8
    assert experiment_json(lower)["optim"]["peak_lr"] == 1e-3


def test_at_signs_in_folders(tmp_path):
    (tmp_path / "a@3").mkdir()
    assert parsed_origin(f"{tmp_path}/a@3") == Origin(tmp_path / "a@3")
    assert parsed_origin(f"{tmp_path}/a@3@4") == Origin(tmp_path / "a@3", 4)
    assert parsed_origin(f"{tmp_path}/b@4") == Origin(tmp_path / "b", 4)


@pytest.mark.parametrize("step", [2, None])
def test_the_same_config_continues_bitwise(tmp_path, whole_run, step):
    result = branch(whole_run[0], tmp_path / "new", whole_run[1], step)
    runs.assert_same_end(tmp_path / "new", whole_run[1])
    assert result["from"] == {"run": str(whole_run[1]), "step": step or 8}
    old = json.loads((whole_run[1] / "result.json").read_text())
    for unit in ("flops", "tokens", "steps"):
        assert result[unit] == old[unit]
    assert result["seconds"] > 0


def test_a_longer_run_of_another_schedule_and_batch_counts_the_cost_so_far(tmp_path, whole_run):
    optim = replace(whole_run[0].optim, peak_lr=5e-3, schedule="linear")
    longer = replace(whole_run[0], steps=12, batch=16, optim=optim)
    result = branch(longer, tmp_path / "new", whole_run[1])
    assert result["steps"] == 12 and result["tokens"] == (8 * 8 + 4 * 16) * 8
    lines = [line for line in runs.log(tmp_path / "new") if "lr" in line]
    assert [line["step"] for line in lines] == [2, 4, 6, 8, 10, 12]
    assert lines[3] == [line for line in runs.log(whole_run[1]) if "lr" in line][3]
    assert lines[4]["lr"] == pytest.approx(inputs.learning_rate(optim, 12, 9))
    # the samples that the first run has seen do not come again
    position = Checkpoints(Workdir(tmp_path / "new").checkpoints)
    assert "12" in {path.name for path in position.folder.iterdir()}


def test_a_begun_run_keeps_its_start(tmp_path, whole_run):
    begun = tmp_path / "new"
    branch(whole_run[0], begun, whole_run[1], 4)
    (begun / "result.json").unlink()
    for wrong in (f"{whole_run[1]}@2", str(tmp_path)):
        says = f"has begun with --from {whole_run[1]}@4: give the same"
        with pytest.raises(UserError, match=says):
            pretrain.run_experiment(whole_run[0], begun, start=wrong)
    pretrain.run_experiment(whole_run[0], begun)  # without --from
    runs.assert_same_end(begun, whole_run[1])
    (begun / "result.json").unlink()
    says = "is also the folder of the new run: give another --workdir"
    with pytest.raises(UserError, match=says):
        pretrain.run_experiment(whole_run[0], begun, start=f"{begun}@4")
    runs.killed(whole_run[0], tmp_path / "plain", 2)
    with pytest.raises(UserError, match="has begun without --from"):
        branch(whole_run[0], tmp_path / "plain", whole_run[1], 4)


def test_a_checkpoint_that_does_not_exist_or_fit(tmp_path, whole_run):
    one, run = whole_run
    for experiment, step, says in (
        (one, 3, r"no checkpoint of step 3 in .*, only of 2, 4, 6, 8: give one of"),
        (replace(one, steps=4), 6, "at step 6 of train large, but this phase has only 4 steps here"),
        (replace(one, model=replace(one.model, mlp=8)), 4, r"blocks/mlp/.*: .*16.* and .*8"),
        (replace(one, optim=replace(one.optim, name="sgd")), 4, "set optim.name as in that run"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=says):
            branch(experiment, tmp_path / "new", run, step)
    with pytest.raises(UserError, match=r"there is no checkpoint in .*: give the folder of a run"):
        branch(one, tmp_path / "new", tmp_path)
    pretrain.run_experiment(one, tmp_path / "new", start=f"{run}@4")  # the folder is still unused

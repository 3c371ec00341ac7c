"""``--from RUN[@STEP]`` starts a new run from a checkpoint of another run."""

import json
from dataclasses import replace

import pytest
import runs

from train import pretrain
from train.common.errors import UserError
from train.step import inputs
from train.store.checkpoint import Checkpoints
from train.store.workdir import Workdir


def branch(experiment, folder, run, step=None):
    start = f"{run}@{step}" if step else str(run)
    return pretrain.run_experiment(experiment, folder, start=start)


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
        with pytest.raises(
            UserError, match=f"has begun with --from {whole_run[1]}@4: give the same"
        ):
            pretrain.run_experiment(whole_run[0], begun, start=wrong)
    pretrain.run_experiment(whole_run[0], begun)  # without --from
    runs.assert_same_end(begun, whole_run[1])
    (begun / "result.json").unlink()
    with pytest.raises(
        UserError, match="is also the folder of the new run: give another --workdir"
    ):
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

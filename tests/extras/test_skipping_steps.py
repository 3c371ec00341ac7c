"""Steps that are not finite are left out in every way of running, and too many of them end a run."""

from dataclasses import replace

import chex
import numpy as np
import pytest
import runs

from train import pretrain
from train.common.errors import Diverged
from train.extras.run_params import load_params
from train.state.mesh import Mesh

BAD = (3, 4, 6)  # steps whose gradients are not finite


def experiment(folder, **changes):
    return runs.experiment(folder, **{"on_nan": "skip", "log_every": 1} | changes)


def test_without_bad_steps_nothing_changes(tmp_path):
    pretrain.run_experiment(experiment(tmp_path), tmp_path / "run")
    pretrain.run_experiment(experiment(tmp_path, on_nan="stop"), tmp_path / "plain")
    chex.assert_trees_all_equal(load_params(tmp_path / "run"), load_params(tmp_path / "plain"))


def test_one_entry_that_is_not_finite_is_enough(tmp_path, poisoned):
    for step, value, entry in ((2, np.inf, False), (4, -np.inf, True), (6, np.nan, True)):
        poisoned(step, value=value, entry=entry)
    result = pretrain.run_experiment(experiment(tmp_path), tmp_path / "run")
    assert result["phases"][0]["skipped"] == 3


def test_every_way_of_running_skips_the_same_steps(tmp_path, poisoned):
    poisoned(*BAD)
    pretrain.run_experiment(experiment(tmp_path), tmp_path / "one")
    for i, changes in enumerate(({"parallel": "pmap"}, {"mesh": Mesh(fsdp=2), "accumulate": 2})):
        pretrain.run_experiment(experiment(tmp_path, **changes), tmp_path / str(i))
        runs.assert_close(tmp_path / "one", tmp_path / str(i))
    # A resumed run counts on.
    often = experiment(tmp_path, checkpoint_every=1)
    runs.killed(often, tmp_path / "run", 3)
    pretrain.run_experiment(often, tmp_path / "run")
    runs.assert_same_end(tmp_path / "run", tmp_path / "one")
    few = replace(often, most_skipped=1)
    runs.killed(few, tmp_path / "few", 3)
    with pytest.raises(Diverged, match="2 steps in a row, up to step 4"):
        pretrain.run_experiment(few, tmp_path / "few")


def test_too_many_in_a_row_end_the_run_even_between_log_lines(tmp_path, poisoned):
    poisoned(2, 4, 5, 6)
    few = experiment(tmp_path, most_skipped=2, log_every=8, checkpoint_every=3)
    says = r"3 steps in a row, up to step 6 of train large.*--from .*@3"
    with pytest.raises(Diverged, match=says):
        pretrain.run_experiment(few, tmp_path / "run")
    enough = replace(few, most_skipped=3)
    assert pretrain.run_experiment(enough, tmp_path / "run")["phases"][0]["skipped"] == 4

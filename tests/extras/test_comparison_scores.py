"""The scores that a comparison adds to its runs: tasks, and fine-tuning."""

import json
from argparse import Namespace

import pytest

from train.analysis.comparing import SCORERS
from train.analysis.runs import Run
from train.common.errors import UserError
from train.extras import comparison_scores
from train.extras.comparison_scores import task_scores


def test_finished_runs_are_judged(small_run, tmp_path, monkeypatch):
    (tmp_path / "ptb.test.txt").write_text("abcd efgh\n" * 8)
    run = Run("small", 0, small_run)
    scores = task_scores([[run], [run, run]], ["ptb"], tmp_path)
    [[a], [b, c]] = scores["ptb, bits per byte"]
    assert a == b == c  # a run and the same run again
    # A cached score is not computed again.
    monkeypatch.setattr(comparison_scores, "evaluate_tasks", None)
    assert task_scores([[run]], ["ptb"], tmp_path) == {"ptb, bits per byte": [[a]]}
    (tmp_path / "ptb.test.txt").write_text("abcd\n" * 8)
    with pytest.raises(TypeError):  # The cache does not apply to other files.
        task_scores([[run]], ["ptb"], tmp_path)


@pytest.mark.parametrize("task", ["stsb", "sst2"])
def test_a_task_of_fine_tuned_models_is_refused_before_the_runs(task, tmp_path):
    """The error was that stsb is no task, and that the files of sst2 are missing."""
    (tmp_path / "ptb.test.txt").write_text("abcd\n")
    SCORERS["evaluate"](Namespace(evaluate=["ptb"], data=tmp_path))  # a control
    with pytest.raises(UserError, match=f"give --finetune configs/finetune.py:{task} instead"):
        SCORERS["evaluate"](Namespace(evaluate=["ptb", task], data=tmp_path))


@pytest.mark.interop
@pytest.mark.filterwarnings("default")  # The harness emits its own warnings.
def test_finished_runs_are_judged_by_tasks_of_the_harness(small_run, tmp_path):
    pytest.importorskip("lm_eval")
    run = Run("small", 0, small_run)
    question = {"goal": "a", "sol1": "b", "sol2": "ccc"}
    (tmp_path / "valid.jsonl").write_text(json.dumps(question) + "\n")
    (labels := tmp_path / "valid-labels.lst").write_text("0\n")
    right = task_scores([[run]], ["piqa"], tmp_path)["piqa, acc"][0][0]
    labels.write_text("1\n")  # The labels are a separate file beside the questions.
    assert task_scores([[run]], ["piqa"], tmp_path) == {"piqa, acc": [[1 - right]]}

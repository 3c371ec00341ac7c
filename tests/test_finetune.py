"""Fine-tuning: all that a checkpoint knows is kept but its head, a task is learned, and its own metric judges."""

import json
import sys
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
import runs
from finetunings import FAMILIES, OPTIM, checkpoint, cola, squad, tuning

from jaxgrow import flops
from jaxgrow.interop import load, orbax, save
from jaxgrow.models import ViTConfig
from train import finetune as command
from train.data.labelled.task import Labelled
from train.errors import UserError
from train.export import export
from train.finetuning import FineTuning
from train.loop.trainer import run
from train.plan.training import Train
from train.run.workdir import Workdir
from train.tasks.supervised import score


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with checkpoints of all families, and data."""
    home = tmp_path_factory.mktemp("home")
    for name, config in FAMILIES.items():
        checkpoint(home / name, config)
    cola(home / "cola")
    cola(home / "shuffled", shuffled=True)
    return home


@pytest.fixture(scope="module")
def learned(home):
    """Fine-tuned: the folder of a GPT-2's run, and what it scores."""
    found = command.finetune(tuning(home / "cola"), home / "gpt2", home / "runs")
    return home / "runs" / "cola-gpt2-lr0.01-seed0", found[1e-2][0]


# --- it learns ---


def test_a_task_is_learned_and_judged_by_its_own_metric(learned):
    _, scores = learned
    assert list(scores) == ["dev"]
    assert list(scores["dev"]) == ["matthews"]
    assert scores["dev"]["matthews"] > 0.9


def test_labels_that_say_nothing_teach_nothing(home):
    found = command.finetune(tuning(home / "shuffled", name="shuffled"), home / "gpt2", home / "runs")
    assert abs(found[1e-2][0]["dev"]["matthews"]) < 0.25


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_every_family_fine_tunes(home, family):
    found = command.finetune(tuning(home / "cola"), home / family, home / "runs")
    assert found[1e-2][0]["dev"]["matthews"] > 0.5


def test_a_bert_finds_spans(home):
    data = Labelled("squad1", str(squad(home / "squad")), length=16, stride=8)
    spans = FineTuning("squad1", data, epochs=20, batch=16, rates=(1e-2,), optim=OPTIM)
    scores = command.finetune(spans, home / "bert", home / "runs")[1e-2][0]["dev"]
    assert scores["exact_match"] > 0.5
    assert scores["f1"] >= scores["exact_match"]


# --- what is kept, and what is new ---


def test_all_but_the_head_is_the_checkpoints(home, tmp_path):
    experiment = replace(tuning(home / "cola").of(home / "bert", 1e-30, 0), steps=1)
    run(experiment, tmp_path / "run")
    _, before = load(home / "bert")
    config, after = load(tmp_path / "run")
    assert config == FAMILIES["bert"].with_head("classes", 2)
    assert after.keys() - before.keys() == {"pooler", "classifier"}
    assert before.keys() - after.keys() == {"transform", "head_norm", "head_bias"}
    for name in before.keys() & after.keys():
        jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=1e-29), before[name], after[name])


def test_heads_differ_by_seed_and_repeat_to_the_bit(home, tmp_path):
    ended = {}
    for name, seed in (("a", 0), ("again", 0), ("other", 1)):
        run(replace(tuning(home / "cola").of(home / "gpt2", 1e-3, seed), steps=2), tmp_path / name)
        ended[name] = load(tmp_path / name)[1]
    jax.tree.map(np.testing.assert_array_equal, ended["a"], ended["again"])
    assert not np.array_equal(ended["a"]["classifier"]["kernel"], ended["other"]["classifier"]["kernel"])


def test_samples_cost_what_they_are_long(home):
    experiment = tuning(home / "cola").of(home / "gpt2", 1e-3, 0)
    phase = next(p for p in experiment.plan if isinstance(p, Train))
    assert (phase.length, phase.config.length) == (14, 16)
    assert phase.cost(16) == pytest.approx(experiment.steps * flops.train(phase.config, 16 * 14, 14))


def test_a_run_that_was_stopped_goes_on(home, tmp_path):
    experiment = replace(tuning(home / "cola").of(home / "gpt2", 1e-2, 0), steps=6, checkpoint_every=2, eval_every=6)
    run(experiment, tmp_path / "whole")
    runs.killed(experiment, tmp_path / "killed", at=4)
    run(experiment, tmp_path / "killed")
    runs.assert_same_end(tmp_path / "killed", tmp_path / "whole")


def test_scores_are_kept_with_the_run(learned, home):
    folder, scores = learned
    assert Workdir(folder).scores == scores
    experiment = tuning(home / "cola").of(home / "gpt2", 1e-2, 0)
    assert score(folder, experiment.data) == scores


# --- the command ---


def test_the_command_tells_each_rate_and_the_best(home, tmp_path, monkeypatch, capsys):
    config = tmp_path / "mine.py"
    config.write_text(
        "from train.finetuning import FineTuning\nfrom train.data.labelled.task import Labelled\n\n"
        "def toy() -> FineTuning:\n"
        f"    return FineTuning('toy', Labelled('cola', {str(home / 'cola')!r}, length=14), batch=16)\n"
    )
    arguments = ["finetune", f"{config}:toy", "--model", str(home / "gpt2"), "--lr", "1e-2", "--seeds", "0,1"]
    arguments += [
        "--workdir",
        str(tmp_path),
        "--set",
        "epochs=4",
        "--set",
        "optim.weight_decay=0",
        "--set",
        "optim.b2=0.99",
    ]
    monkeypatch.setattr(sys, "argv", arguments)
    command.main()
    said, found = capsys.readouterr().out, json.loads((tmp_path / "toy-gpt2.json").read_text())
    assert found["best"] == 1e-2
    assert "| 0.01 (best) |" in said
    assert "±" in said
    assert [len(of) for of in found["rates"].values()] == [2]


def test_the_best_rate_is_that_of_the_best_mean_of_the_tasks_own_metric():
    def scores(f1, accuracy):
        return {"matched": {"f1": f1, "accuracy": accuracy}, "mismatched": {"f1": 1 - f1, "accuracy": 1.0}}

    found = {1e-5: [scores(0.9, 0.1), scores(0.1, 0.1)], 2e-5: [scores(0.6, 0.0), scores(0.6, 0.0)]}
    assert command.best(found) == 2e-5


def test_a_fine_tuned_run_is_exported_with_its_labels(learned, tmp_path):
    folder, _ = learned
    export(folder, tmp_path / "hf")
    foreign = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert foreign["architectures"] == ["GPT2ForSequenceClassification"]
    assert foreign["id2label"] == {"0": "unacceptable", "1": "acceptable"}
    assert foreign["pad_token_id"] == 0xC1
    assert "matthews, dev" in (tmp_path / "hf" / "README.md").read_text()
    jax.tree.map(np.testing.assert_array_equal, load(folder)[1], load(tmp_path / "hf")[1])


@pytest.mark.parametrize(
    "change, says",
    [
        ({"data": Labelled("cola", "nowhere")}, "nowhere"),
        ({"batch": 4096}, "less than one batch of 4096"),
        ({"data": Labelled("squad1", "nowhere")}, "squad1 is for a BERT"),
    ],
)
def test_what_cannot_be_learned_is_said_in_one_line(home, tmp_path, change, says):
    with pytest.raises(UserError, match=says):
        command.finetune(tuning(home / "cola", **change), home / "gpt2", tmp_path)


def test_models_of_something_else_are_refused(home, tmp_path):
    vit = ViTConfig(image=8, patch=4, channels=1, classes=3, layers=1, embed=8, heads=1, head_dim=8, mlp=8)
    orbax.export(tmp_path / "vit", vit, jax.jit(vit.init)(jax.random.key(0)))
    with pytest.raises(UserError, match="is a ViTConfig, but cola is a task of text"):
        tuning(home / "cola").of(tmp_path / "vit", 1e-3, 0)
    with pytest.raises(UserError, match=r"the model in .* predicts tokens: fine-tune it first"):
        score(home / "gpt2", Labelled("cola", str(home / "cola"), length=14))
    save(tmp_path / "bare", FAMILIES["gpt2"], load(home / "gpt2")[1])
    with pytest.raises(UserError, match=r"there is no tokenizer.json in .*bare"):
        tuning(home / "cola").of(tmp_path / "bare", 1e-3, 0)

"""Fine-tuning keeps the body of a checkpoint, replaces its head, and learns a task.

The metric of the task scores the result.
"""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import chex
import jax
import numpy as np
import pytest
import runs
from advice import command as jaxgrow
from advice import part
from finetunings import FAMILIES, OPTIM, checkpoint, cola, pieces, spans, tuning
from tokenizers import Tokenizer

from jaxgrow import checkpoints, flops, operators
from jaxgrow.checkpoints import load, orbax, save
from jaxgrow.extras.freeze import Freeze
from jaxgrow.extras.models.image_sizes import resized_positions
from jaxgrow.extras.peft.lora import LoRA
from jaxgrow.layerdrop import LayerDrop, Sensitivity
from jaxgrow.models import Adapter, ViTConfig
from train import finetune as command
from train.common.errors import UserError
from train.extras.evaluation.tasks import evaluate_tasks
from train.extras.images.images import Images
from train.extras.labelled import glue
from train.extras.labelled.downstream import FineTuning
from train.extras.labelled.supervised import model_outputs, score_model
from train.extras.labelled.task import Labelled
from train.extras.labelled.tuning import best_rate, tune_model
from train.extras.tokenizers.loading import load_tokenizer
from train.plan.training import Train
from train.run.run_data import RunData
from train.run.trainer import run_experiment
from train.state.optim import Optim
from train.store.workdir import Workdir

WIDTHS = dict(layers=1, embed=8, heads=1, head_dim=8, mlp=8)
VIT = ViTConfig(image=8, patch=4, channels=1, classes=3, **WIDTHS)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a folder with checkpoints of two model families, and data."""
    home = tmp_path_factory.mktemp("home")
    for name in ("gpt2", "bert"):
        checkpoint(home / name, FAMILIES[name])
    cola(home / "cola")
    return home


@pytest.fixture(scope="module")
def learned(home):
    """Fine-tune a GPT-2; return the folder of the run and its scores."""
    found = tune_model(tuning(home / "cola"), home / "gpt2", home / "runs")
    return home / "runs" / "cola-gpt2-lr0.01-seed0", found[1e-2][0]


@pytest.fixture(scope="module")
def exported(learned, home):
    """Return the folder of the fine-tuned GPT-2 for `transformers`."""
    runs.export(learned[0], home / "hf")
    return home / "hf"


def examples_of(home):
    experiment = tuning(home / "cola").of(home / "gpt2", 1e-2, 0)
    return experiment.data.prepared(experiment.model).valid["dev"]


# --- learning ---


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"tied": True}),
        ("gpt2", {"tied": False}),
        ("bert", {"masked": 0.3}),
        ("bert", {"head": "states", "pooler": True}),
    ],
)
def test_a_model_may_have_settings_that_the_new_head_does_not_use(home, family, settings):
    folder = checkpoint(home / "-".join((family, *settings)), replace(FAMILIES[family], **settings))
    model = tuning(home / "cola").of(folder, 1e-2, 0).model
    assert model.head == "classes" and not getattr(model, "pooler", False)


def test_a_vit_without_a_head_learns_classes(tmp_path):
    tower = replace(VIT, head="states", pooler="tanh", classes=1000)
    orbax.export_model(tmp_path / "vit", tower, runs.fresh(tower))
    digits = FineTuning("digits", Images("digits"), 1, 128, (1e-2,), optim=OPTIM)
    tune_model(digits, tmp_path / "vit", tmp_path)
    config, params = load(tmp_path / "digits-vit-lr0.01-seed0")
    assert (config.head, config.pooler) == ("classes", "none")
    assert params["head"]["kernel"].shape == (8, 10) and "pooler" not in params


def test_a_tower_without_a_class_token_is_refused_with_a_way_out(tmp_path):
    tower = replace(VIT, head="states", class_token=False)
    orbax.export_model(tmp_path / "siglip", tower, runs.fresh(tower))
    clip = replace(tower, class_token=True, embedding_norm=True, patch_bias=False)
    orbax.export_model(tmp_path / "clip", clip, runs.fresh(clip))
    digits = FineTuning("digits", Images("digits"), 1, 128, (1e-2,), optim=OPTIM)
    with pytest.raises(UserError, match="take a model with a class token, such as a CLIP"):
        digits.of(tmp_path / "siglip", 1e-2, 0)
    assert digits.of(tmp_path / "clip", 1e-2, 0).model.head == "classes"  # the advice


def test_a_tokenizer_with_more_tokens_than_its_model_has_a_way_out(home, tmp_path):
    checkpoints.save(tmp_path / "few", FAMILIES["gpt2"], runs.fresh(FAMILIES["gpt2"]))
    (tmp_path / "text").mkdir()
    shutil.copy(pieces(tmp_path / "text", "gpt2"), tmp_path / "few")
    with pytest.raises(UserError, match="the largest id of the tokenizer is 299") as refused:
        tuning(home / "cola").of(tmp_path / "few", 1e-2, 0)
    words = part("run jaxgrow (grow .*)", str(refused.value))
    new = str(tmp_path / "new")
    jaxgrow(*words.replace("MODEL", str(tmp_path / "few")).replace("NEW", new).split())
    assert tuning(home / "cola").of(tmp_path / "new", 1e-2, 0).model.vocab == 300


def test_a_task_is_learned_and_judged_by_its_own_metric(learned):
    _, scores = learned
    assert scores.keys() == {"dev"} and scores["dev"].keys() == {"matthews"}
    assert scores["dev"]["matthews"] > 0.9


def test_a_bert_finds_spans(home):
    scores = tune_model(spans(home), home / "bert", home / "runs")[1e-2][0]["dev"]
    assert scores["exact_match"] > 0.5
    assert scores["f1"] >= scores["exact_match"]


@pytest.mark.slow
def test_a_vit_learns_other_images_of_another_size(home, tmp_path):
    small = replace(VIT, image=16, classes=7, embed=16, heads=2, mlp=32)
    orbax.export_model(tmp_path / "vit", small, runs.fresh(small))
    digits = FineTuning("digits", Images("digits"), 2, 64, (1e-2,), optim=OPTIM)
    scores = tune_model(digits, tmp_path / "vit", tmp_path)[1e-2][0]
    assert scores["valid"]["accuracy"] > 0.5  # The chance level is 0.1.
    config, _ = load(run := tmp_path / "digits-vit-lr0.01-seed0")
    runs.export(run, tmp_path / "hf")
    about = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert about["id2label"] == {str(i): str(i) for i in range(10)}
    assert (config.image, config.classes, config.positions) == (8, 10, 5)


def test_positions_of_another_resolution_are_interpolated():
    old, new = (ViTConfig(image=side, patch=4, classes=2, layers=1, embed=3) for side in (32, 64))
    grid = np.stack([*np.mgrid[:8, :8].reshape(2, -1), np.ones(64)], 1)
    places = np.concatenate([[[7.0, 8.0, 9.0]], grid]).astype(np.float32)
    found = np.asarray(resized_positions(places, old, new))
    # the class token keeps its position embedding
    np.testing.assert_array_equal(found[0], places[0])
    np.testing.assert_allclose(found[1:, 2], 1, atol=1e-6)
    # Away from the borders, a slope of one becomes a slope of one half.
    inside = found[1:].reshape(16, 16, 3)[4:12, 4:12]
    for axis in (0, 1):
        np.testing.assert_allclose(np.diff(inside[..., axis], axis=axis), 0.5, atol=1e-5)
    np.testing.assert_array_equal(resized_positions(places, old, old), places)


# --- kept and new parameters ---


@pytest.mark.parametrize("head", ["spans", pytest.param("classes", marks=pytest.mark.slow)])
def test_all_but_the_head_is_the_checkpoints(home, tmp_path, head):
    task = spans(home) if head == "spans" else tuning(home / "cola")
    experiment = replace(task.of(home / "bert", 1e-30, 0), steps=1)
    run_experiment(experiment, tmp_path / "run")
    _, before = load(home / "bert")
    config, after = load(tmp_path / "run")
    assert config == FAMILIES["bert"].with_head(head, 2)
    new = {"classifier"} if head == "spans" else {"pooler", "classifier"}
    assert after.keys() - before.keys() == new
    assert before.keys() - after.keys() == {"transform", "head_norm", "head_bias"}
    for name in before.keys() & after.keys():
        chex.assert_trees_all_close(before[name], after[name], rtol=0, atol=1e-29)


def test_heads_differ_by_seed_and_repeat_to_the_bit(home, tmp_path):
    ended = {}
    for name, seed in (("a", 0), ("again", 0), ("other", 1)):
        experiment = replace(tuning(home / "cola").of(home / "gpt2", 1e-3, seed), steps=2)
        run_experiment(experiment, tmp_path / name)
        ended[name] = load(tmp_path / name)[1]
    chex.assert_trees_all_equal(ended["a"], ended["again"])
    one, other = (ended[name]["classifier"]["kernel"] for name in ("a", "other"))
    assert not np.array_equal(one, other)


@pytest.mark.slow
def test_what_was_fine_tuned_and_grown_goes_on_with_its_head(learned, home, tmp_path):
    growth = operators.llama_pro(FAMILIES["gpt2"].sizes(), {"layers": 4})
    checkpoints.transform(learned[0], checkpoints.Output(tmp_path / "deep", "orbax"), growth)
    load_tokenizer("bytes").save(str(tmp_path / "deep" / "tokenizer.json"))
    old = Freeze(layers=tuple(sorted({0, 1, 2, 3} - {*operators.new_layers(growth)})))
    experiment = replace(tuning(home / "cola", freeze=old).of(tmp_path / "deep", 1e-30, 0), steps=1)
    assert experiment.method.new_head is False
    run_experiment(experiment, tmp_path / "run")
    # At first, the added layers of LLaMA Pro have no effect.
    assert score_model(tmp_path / "run", experiment.data) == learned[1]


def test_samples_cost_what_they_are_long(home):
    experiment = tuning(home / "cola").of(home / "gpt2", 1e-3, 0)
    phase = next(p for p in experiment.plan if isinstance(p, Train))
    assert (phase.length, phase.config.length) == (14, 16)
    each = flops.train_flops(phase.config, 16 * 14, 14)
    assert phase.cost(16) == pytest.approx(experiment.steps * each)


def test_sensitivities_have_validation_examples_of_their_own(home):
    """Of 128 examples, 2 micro-batches of 8 measure sensitivities, and 7 batches of 16 evaluate."""
    drop = LayerDrop(sensitivity=Sensitivity(batches=2))
    e = tuning(home / "cola", drop=drop, accumulate=2).of(home / "gpt2", 1e-2, 0)
    data = RunData(e, runs.mesh(), Workdir(home / "run"))
    assert jax.tree.leaves(data.probe)[0].shape[:2] == (2, 8)
    assert len(data.validation[""]) == e.eval_batches == 7
    assert tuning(home / "cola").of(home / "gpt2", 1e-2, 0).eval_batches == 8


def test_scores_are_kept_with_the_run(learned, home):
    folder, scores = learned
    assert Workdir(folder).scores == scores
    experiment = tuning(home / "cola").of(home / "gpt2", 1e-2, 0)
    assert score_model(folder, experiment.data) == scores
    # This call does not use the sequence length of the run.
    found = evaluate_tasks(folder, ["cola"], home)["cola"]
    assert found == {"matthews, dev": scores["dev"]["matthews"]}


# --- the command ---


def toy_command(home: Path, folder: Path) -> list[str]:
    """Write a fine-tuning of one epoch and return the command that runs it."""
    config = folder / "mine.py"
    config.write_text(
        "from train.extras.labelled.downstream import FineTuning\n"
        "from train.extras.labelled.task import Labelled\n\n"
        "def toy() -> FineTuning:\n"
        f"    data = Labelled('cola', {str(home / 'cola')!r}, length=14)\n"
        "    return FineTuning('toy', data, batch=16, epochs=1)\n"
    )
    return f"finetune {config}:toy --model {home}/gpt2 --workdir {folder}".split()


def test_the_command_tells_each_rate_and_the_best(home, tmp_path, monkeypatch, capsys):
    arguments = [*toy_command(home, tmp_path), "--lr", "1e-2", "--seeds", "0,1"]
    arguments += ["--set", "optim.weight_decay=0", "--set", "optim.b2=0.99"]
    monkeypatch.setattr(sys, "argv", arguments)
    command.main()
    said, found = capsys.readouterr().out, json.loads((tmp_path / "toy-gpt2.json").read_text())
    # A single learning rate is not a search.
    assert "| 0.01  " in said and "(best)" not in said and "best" not in found
    assert "±" in said
    assert [len(of) for of in found["rates"].values()] == [2]


def test_a_learning_rate_that_diverges_does_not_end_the_others(home, tmp_path, monkeypatch, capsys):
    arguments = toy_command(home, tmp_path)
    monkeypatch.setattr(sys, "argv", [*arguments, "--lr", "1e30,1e-2"])
    command.main()
    said = capsys.readouterr()
    assert "toy with learning rate 1e+30 diverged" in said.err
    assert "Diverged: 1e+30." in said.out and "| 0.01  " in said.out
    monkeypatch.setattr(sys, "argv", [*arguments, "--lr", "1e30"])
    with pytest.raises(UserError, match="diverged with every learning rate"):
        command.main()


@pytest.mark.parametrize(("option", "value", "says"), [
    ("--seeds", "0,0", "--seeds names 0 more than once"),
    ("--lr", "1e-3,0.001", "rates must be different"),
    ("--lr", "0", "learning_rates must be positive"),
    ("--lr", "inf", "learning_rates must be positive"),
])  # fmt: skip
def test_repeated_and_impossible_settings_are_refused(tmp_path, monkeypatch, option, value, says):
    arguments = ["finetune", "configs/finetune.py:sst2", "--model", str(tmp_path), option, value]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(UserError, match=says):
        command.main()


def test_the_best_learning_rate_has_the_best_mean_metric():
    def scores(f1, accuracy):
        other = {"f1": 1 - f1, "accuracy": 1.0}
        return {"matched": {"f1": f1, "accuracy": accuracy}, "mismatched": other}

    def table(found):
        return command.tuning_table(tuning(Path("x"), seeds=(0, 1)), Path("m"), found)

    found = {1e-5: [scores(0.9, 0.1), scores(0.1, 0.1)], 2e-5: [scores(0.6, 0.0), scores(0.6, 0.0)]}
    assert best_rate(found) == 2e-5
    assert "| 2e-05 (best)  |" in table(found)
    assert "is the largest that was tried" in table(found)
    assert "that was tried" not in table(found | {3e-5: found[1e-5]})


def test_a_fine_tuned_run_is_exported_with_its_labels(learned, exported):
    foreign = json.loads((exported / "config.json").read_text())
    assert foreign["architectures"] == ["GPT2ForSequenceClassification"]
    assert foreign["id2label"] == {"0": "unacceptable", "1": "acceptable"}
    assert foreign["pad_token_id"] == 0xC1
    chex.assert_trees_all_equal(load(learned[0])[1], load(exported)[1])


def test_an_export_is_evaluated_with_texts_of_the_same_length(learned, exported, home, monkeypatch):
    monkeypatch.setattr(
        "train.extras.evaluation.tasks.score_model",
        lambda _, data: {"dev": {"length": data.length}},
    )
    for folder in (learned[0], exported):
        found = evaluate_tasks(folder, ["cola"], home / "cola")
        assert found == {"cola": {"length, dev": 14}}


def test_a_model_card_has_one_score_no_folder_and_the_source(learned, exported, home):
    said = (exported / "README.md").read_text()
    [(metric, value)] = learned[1]["dev"].items()
    assert said.count(f"* {metric}, dev: {value:.4f}") == 1
    assert "* accuracy" not in said
    assert '\nbase_model: "gpt2"\n---\n' in said
    assert str(home) not in said and "/tmp" not in said


def test_the_exported_tokenizer_frames_texts_as_in_training(exported, home):
    own = Tokenizer.from_file(str(exported / "tokenizer.json"))
    files = ("config.json", "tokenizer_config.json")
    model, about = (json.loads((exported / name).read_text()) for name in files)
    examples = examples_of(home)
    texts = glue.glue_rows(glue.TASKS["cola"], home / "cola")["dev"].texts[0]
    for i, text in enumerate(texts):
        sample = examples.sample(i, np.random.default_rng(0))[0]
        n = int(sample["lengths"])
        assert own.encode(text).ids == sample["tokens"][:n].tolist()
        assert set(sample["tokens"][n:].tolist()) <= {model["pad_token_id"]}
    assert own.encode("a").ids[-1] == own.token_to_id(about["eos_token"]) == model["eos_token_id"]
    assert own.token_to_id(about["pad_token"]) == model["pad_token_id"]


@pytest.mark.interop
def test_transformers_gives_the_logits_of_what_was_fine_tuned(learned, exported, home):
    torch, hf = pytest.importorskip("torch"), pytest.importorskip("transformers")
    theirs = hf.AutoModelForSequenceClassification.from_pretrained(exported).eval()
    examples, rng = examples_of(home), np.random.default_rng(0)
    tokens = np.stack([examples.sample(i, rng)[0]["tokens"] for i in range(len(examples))])
    with torch.no_grad():
        logits = theirs(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    found = model_outputs(*load(learned[0]), examples, runs.mesh())
    np.testing.assert_allclose(found, logits, atol=1e-4)


@pytest.mark.parametrize("change, says", [
    ({"data": Labelled("cola", "nowhere")}, "nowhere"),
    ({"dropout": 1.0}, "dropout must be between 0 and 1, but is 1.0"),
    ({"freeze": Freeze((7,))}, r"freeze selects the layers \[7\], but the model has"),
    ({"lora": LoRA(2, targets=("*/nowhere",))}, r"the targets \['\*/nowhere'\] of the LoRA"),
    ({"lora": LoRA(2), "freeze": Freeze((0,))}, "leave out freeze, or lora"),
    ({"optim": Optim(schedule="linear", decay=0.5)}, "optim.decay=0.5 has no effect in this plan: set optim.schedule"),
])  # fmt: skip
def test_what_cannot_be_learned_is_said_in_one_line(home, tmp_path, change, says):
    with pytest.raises(UserError, match=says):
        tune_model(tuning(home / "cola", **change), home / "gpt2", tmp_path)


@pytest.mark.parametrize("change, says", [
    ({"lora": LoRA(2), "adapter": Adapter(4)}, "a LoRA or an adapter, not both"),
    ({"optim": Optim(peak_lr=1e-3)}, "optim.peak_lr=0.001 has no effect .* set learning_rates"),
    ({"optim": Optim(warmup=5)}, "optim.warmup=5 has no effect on a fine-tuning: set warmup"),
    ({"batch": 0}, "batch must be at least 1, but is 0"),
    ({"epochs": float("inf")}, "epochs must be positive and finite"),
])  # fmt: skip
def test_settings_that_no_model_can_have_are_refused(change, says):
    with pytest.raises(ValueError, match=says):
        tuning(Path("cola"), **change)


def test_models_of_something_else_are_refused(home, tmp_path):
    vit = replace(VIT, image=9, patch=3)
    orbax.export_model(tmp_path / "vit", vit, runs.fresh(vit))
    with pytest.raises(UserError, match=r"image=8 must be a multiple of patch=3"):
        FineTuning("digits", Images()).of(tmp_path / "vit", 1e-3, 0)
    with pytest.raises(UserError, match="a ViTConfig cannot take Labelled"):
        tuning(home / "cola").of(tmp_path / "vit", 1e-3, 0)
    with pytest.raises(UserError, match=r"the model in .* predicts tokens: fine-tune it first"):
        score_model(home / "gpt2", Labelled("cola", str(home / "cola"), length=14))
    save(tmp_path / "bare", FAMILIES["gpt2"], load(home / "gpt2")[1])
    with pytest.raises(UserError, match=r"there is no tokenizer.json in .*bare"):
        tuning(home / "cola").of(tmp_path / "bare", 1e-3, 0)

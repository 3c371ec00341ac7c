"""Exported runs reproduce their scores in `transformers` pipelines on raw text and images."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import runs
from cases import cases
from finetunings import (
    CLASSIFIERS,
    FAMILIES,
    OPTIM,
    SIZES,
    checkpoint,
    cola,
    pieces,
    spans,
    squad,
    tuning,
)
from PIL import Image
from tokenizers import Tokenizer, processors

from jaxgrow import checkpoints, operators
from jaxgrow.checkpoints import orbax
from jaxgrow.extras.models.swin import SwinConfig
from jaxgrow.models import BERTConfig, TextConfig, ViTConfig
from train.extras.images.images import Images, read_images
from train.extras.labelled import glue, metrics
from train.extras.labelled.downstream import FineTuning
from train.extras.labelled.squad import TASKS, squad_questions
from train.extras.labelled.task import Labelled
from train.extras.labelled.tuning import tune_model
from train.extras.tokenizers.loading import load_tokenizer

hf, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
pytestmark = pytest.mark.interop
VISION = dict(patch=4, channels=3, classes=7, mlp=32)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    cola(home / "cola")
    return home


def pipeline(task: str, folder: Path, **more):
    return hf.pipeline(task, model=str(folder), device="cpu", **more)


def exported(tune: FineTuning, home: Path, model: str) -> tuple[Path, dict[str, float]]:
    """Return the folder of the export and the scores that the run reported."""
    (rate,) = tune.learning_rates
    [scores] = tune_model(tune, home / model, home / "runs")[rate]
    folder = home / f"hf-{tune.name}-{model}"
    runs.export(home / "runs" / f"{tune.name}-{model}-lr{rate:g}-seed0", folder)
    return folder, next(iter(scores.values()))


@pytest.mark.parametrize("family", [*FAMILIES, pytest.param("deberta", marks=pytest.mark.slow)])
def test_raw_texts_are_classified_as_the_run_reported(home, family):
    config = CLASSIFIERS[family]
    if family == "modernbert":  # saved only if the number of layers is a multiple of the period
        config = replace(config, layers=3)
    checkpoint(home / family, config)
    folder, reported = exported(tuning(home / "cola"), home, family)
    rows = glue.glue_rows(glue.TASKS["cola"], home / "cola")["dev"]
    assert reported["matthews"] > 0.5
    classify = pipeline("text-classification", folder, truncation=True)
    for batch in (1, 16):
        said = classify(rows.texts[0], batch_size=batch)
        found = np.array([["unacceptable", "acceptable"].index(one["label"]) for one in said])
        expected = pytest.approx(reported["matthews"], abs=1e-12)
        assert metrics.matthews(found, rows.labels) == expected
    assert classify.tokenizer.pad_token_id == classify.model.config.pad_token_id


# The model and the special tokens of its tokenizer; None: the tokens are bytes.
PAIRED = {
    "bert": (CLASSIFIERS["bert"], None),
    "gpt2 pieces": (CLASSIFIERS["gpt2"], "gpt2"),
    "gpt2": (CLASSIFIERS["gpt2"], None),
    "llama pieces": (CLASSIFIERS["llama"], "llama"),
    "bert pieces": (CLASSIFIERS["bert"], "bert"),
    "roberta pieces": (BERTConfig(**SIZES | {"context": 18}, types=1, first_position=2), "modernbert"),
    "modernbert pieces": (replace(CLASSIFIERS["modernbert"], layers=3), "modernbert"),
    "deberta pieces": (CLASSIFIERS["deberta"], "bert"),
}  # fmt: skip
FAST = ("bert", "gpt2 pieces")
VERDICTS = ("contradiction", "neutral", "entailment")


def premises(file: Path, count: int) -> list[dict[str, str]]:
    """Write pairs, some of them too long, as a CSV file. The second text determines the label."""
    rng, rows = np.random.default_rng(count), []
    for label in rng.integers(0, 3, count):
        first = "".join(rng.choice([*"abcd "], rng.integers(1, 30)))
        second = "".join(rng.choice([*(4 * "abd"[label]), *" c"], 5))
        rows.append({"premise": first, "hypothesis": second, "verdict": VERDICTS[label]})
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return rows


def pair_model(folder: Path, name: str) -> TextConfig:
    """Save the model of a row of `PAIRED` with its tokenizer, and return its config."""
    config, special = PAIRED[name]
    config = config if special is None else replace(config, vocab=300)
    checkpoint(folder, config)
    if special is not None:
        tokenizer = Tokenizer.from_file(pieces(folder, special))
        if special == "llama":  # published files add this token before both texts
            tokenizer.post_processor = processors.TemplateProcessing(
                single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 0)]
            )
        tokenizer.save(str(folder / "tokenizer.json"))
    return config


@pytest.mark.parametrize("name", cases(PAIRED.keys(), FAST, []))
def test_pairs_of_texts_are_classified_as_the_run_reported(tmp_path, name):
    config = pair_model(tmp_path / "model", name)
    premises(tmp_path / "train.csv", 1024)
    rows = premises(tmp_path / "valid.csv", 128)
    train, valid = (str(tmp_path / f"{part}.csv") for part in ("train", "valid"))
    columns = dict(text=("premise", "hypothesis"), label="verdict")
    data = Labelled("table", train, **columns, valid_path=valid, length=16)
    tune = tuning(tmp_path, name="pairs", data=data, epochs=2)
    folder, reported = exported(tune, tmp_path, "model")
    classify = pipeline("text-classification", folder)
    inputs = [{"text": row["premise"], "text_pair": row["hypothesis"]} for row in rows]
    for batch in (1, 16):
        said = classify(inputs, batch_size=batch, truncation=True)
        right = [one["label"] == row["verdict"] for one, row in zip(said, rows, strict=True)]
        assert np.mean(right) == pytest.approx(reported["accuracy"], abs=1e-12)
    assert reported["accuracy"] > 0.6
    # The run and the pipeline read the same tokens, so the scores are equal for this reason.
    encoder = str(tmp_path / "model" / "tokenizer.json") if PAIRED[name][1] else "bytes"
    valid = Labelled.prepared(replace(data, tokenizer=encoder), config).valid["valid"]
    for i, row in enumerate(rows):
        sample = valid.sample(i, np.random.default_rng(0))[0]
        theirs = classify.tokenizer(row["premise"], row["hypothesis"], truncation=True)
        length = len(theirs["input_ids"])
        assert sample["tokens"][:length].tolist() == theirs["input_ids"]
        assert length == (sample["lengths"] if config.causal else sample["mask"].sum())
        if "token_type_ids" in theirs:
            assert sample["types"][:length].tolist() == theirs["token_type_ids"]


def test_pairs_and_numbers(home):
    checkpoint(home / "bert", FAMILIES["bert"])
    rng, rows = np.random.default_rng(0), []
    for _ in range(320):
        a, b = ("".join(rng.choice([*"abc"], n)) for n in (4, 3))
        rows.append({"a": a, "b": b, "score": a.count("a") / 2})
    path = home / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = dict(text=("a", "b"), label="score", number=True)
    data = Labelled("table", str(path), **columns, length=12, valid_path=str(path))
    folder, reported = exported(tuning(home, name="pairs", data=data, epochs=4), home, "bert")
    inputs = [{"text": row["a"], "text_pair": row["b"]} for row in rows]
    said = pipeline("text-classification", folder)(inputs, function_to_apply="none")
    found = np.array([one["score"] for one in said])
    expected = metrics.pearson(found, np.array([row["score"] for row in rows]))
    assert reported["pearson"] == pytest.approx(expected, abs=1e-4)


def test_tags_of_a_grown_model_are_those_of_its_source(tmp_path):
    """No run trains tags, so a growth that preserves the function replaces the run."""
    labels = dict(enumerate(("O", "B-NAME", "I-NAME")))
    sizes = dict(vocab_size=256, hidden_size=16, num_attention_heads=2, intermediate_size=32)
    sizes |= dict(num_hidden_layers=1, max_position_embeddings=24)
    about = hf.BertConfig(**sizes, initializer_range=1.0, id2label=labels)
    torch.manual_seed(0)
    hf.BertForTokenClassification(about).save_pretrained(tmp_path / "small")
    load_tokenizer("bytes").save(str(tmp_path / "small" / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 24}
    (tmp_path / "small" / "tokenizer_config.json").write_text(json.dumps(settings))
    config = checkpoints.open_checkpoint(tmp_path / "small").config
    growth = operators.hypercloning(config.sizes(), {"embed": 32, "heads": 4, "mlp": 64})
    checkpoints.transform(tmp_path / "small", tmp_path / "large", growth)
    small, large = (pipeline("token-classification", tmp_path / n) for n in ("small", "large"))
    assert large.model.config.hidden_size == 32
    text = "Ada met Bob and Eve"
    tags = [[(one["word"], one["entity"]) for one in tag(text)] for tag in (small, large)]
    assert tags[0] == tags[1] and len({entity for _, entity in tags[0]}) == 2
    scores = [[one["score"] for one in tag(text)] for tag in (small, large)]
    np.testing.assert_allclose(scores[1], scores[0], atol=1e-5)


def test_spans_of_raw_questions_are_those_of_the_run(home):
    """Use the tokenizer and model, because `transformers` 5 has no pipeline for spans."""
    checkpoint(home / "bert", FAMILIES["bert"])
    squad(home / "squad")
    folder, reported = exported(spans(home), home, "bert")
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    model = hf.AutoModelForQuestionAnswering.from_pretrained(folder)
    exact = []
    for q in squad_questions(TASKS["squad1"], home / "squad")["dev"]:
        encoded = tokenizer(q.text, q.context, return_tensors="pt", return_offsets_mapping=True)
        offsets = encoded.pop("offset_mapping")[0].tolist()
        inside = [i for i, part in enumerate(encoded.sequence_ids()) if part == 1]
        with torch.no_grad():
            begins, ends = (x[0].tolist() for x in model(**encoded)[:2])
        scored = [(begins[i] + ends[j], i, j) for i in inside for j in inside if i <= j]
        _, i, j = max(scored)
        exact.append(metrics.exact_match(q.context[offsets[i][0] : offsets[j][1]], q.answers))
    assert np.mean(exact) == pytest.approx(reported["exact_match"])


def pictures(folder: Path) -> Path:
    """Create noisy red and green squares."""
    for label, colour in enumerate(("red", "green")):
        (folder / colour).mkdir(parents=True)
        for i in range(60):
            rng = np.random.default_rng([label, i])
            pixels = rng.integers(0, 160, (16, 16, 3))
            pixels[..., label] += 20
            Image.fromarray(pixels.astype(np.uint8)).save(folder / colour / f"{i}.png")
    return folder


MODELS = {
    "vit": ViTConfig(**VISION, image=16, layers=1, embed=16, heads=2, head_dim=8),
    "gray": ViTConfig(**VISION | {"channels": 1}, image=8, layers=1, embed=16, heads=2, head_dim=8),
    "swin": SwinConfig(**VISION | {"mlp": (32,)}, image=16, layers=(1,), embed=(16,), heads=(2,), head_dim=8, window=2),
}  # fmt: skip


@pytest.mark.parametrize("family", MODELS)
def test_raw_images_are_classified_as_the_run_reported(home, family, tmp_path):
    data, batch = Images("digits"), 64
    if family != "gray":
        path, cache = pictures(tmp_path / "colours"), str(tmp_path / "cache")
        data, batch = Images("folder", str(path), cache=cache, valid_fraction=0.5), 16
    orbax.export_model(home / family, MODELS[family], runs.fresh(MODELS[family]))
    tune = FineTuning("images", data, 1, batch, (1e-2,), optim=OPTIM)
    folder, reported = exported(tune, home, family)
    valid = read_images(data).valid
    raw = [valid.kept.store[int(i)][0] for i in valid.chosen]
    said = pipeline("image-classification", folder)(raw, top_k=1)
    right = [one["label"] == valid.kept.classes[valid.label(i)] for i, [one] in enumerate(said)]
    assert np.mean(right) == pytest.approx(reported["accuracy"])
    if family != "gray":
        about = json.loads((folder / "preprocessor_config.json").read_text())
        assert about["image_mean"] == pytest.approx([0.485, 0.456, 0.406])

"""Metrics, published files, model inputs and recovered answers of the tasks are correct."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds
import tiny
from finetunings import SPECIAL
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from labelled import BERT, COMPRESS, GPT2, ROWS, SIZES, saved
from prepared import prepare
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from jaxgrow import checkpoints
from jaxgrow.models import BERTConfig, LlamaConfig
from train.common.errors import UserError
from train.data.text import Data
from train.extras.labelled import glue, metrics, squad
from train.extras.labelled.encoding import Encoder, pair_lengths
from train.extras.labelled.task import NAMES, Labelled, Prepared
from train.extras.text.reading import read_tokens

ROBERTA = BERTConfig(**SIZES, context=514, types=1, first_position=2)
LLAMA = LlamaConfig(**SIZES, context=512, kv_heads=1)


# --- metrics ---

binary = st.integers(0, 40).flatmap(
    lambda n: st.tuples(*[arrays(np.int64, n + 1, elements=st.integers(0, 1))] * 2)
)
numbers = st.integers(2, 40).flatmap(
    lambda n: st.tuples(*[arrays(np.int64, n, elements=st.integers(-9, 9))] * 2)
)


@given(binary)
def test_of_classes_as_scikit_learn(pair):
    sklearn = pytest.importorskip("sklearn.metrics")
    said, labels = pair
    both = len({*said, *labels}) > 1  # the reference warns if there is only one class
    for found, expected in (
        (metrics.accuracy, sklearn.accuracy_score(labels, said)),
        (metrics.f1_score, sklearn.f1_score(labels, said, zero_division=0)),
        (metrics.matthews, sklearn.matthews_corrcoef(labels, said) if both else 0),
    ):
        assert found(said, labels) == pytest.approx(expected, abs=1e-12)


@given(numbers, st.sampled_from([1e-200, 1.0, 1e200]))
def test_correlations_as_scipy(pair, scale):
    stats = pytest.importorskip("scipy.stats")
    a, b = pair[0] * scale, pair[1].astype(np.float32)
    constant = np.ptp(a) == 0 or np.ptp(b) == 0
    for found, theirs in ((metrics.pearson, stats.pearsonr), (metrics.spearman, stats.spearmanr)):
        expected = 0 if constant else theirs(*pair).statistic
        assert found(a, b) == (0 if constant else pytest.approx(expected, abs=1e-9))


@pytest.mark.parametrize(("said", "golds", "exact", "f1"), [
    ("The  Cat.", ["a cat"], 1, 1),
    ("cat sat", ["the cat", "dog"], 0, 2 / 3),
    ("an-other", ["another"], 1, 1),  # punctuation is removed before articles
    ("theatre", ["atre"], 0, 0),
    ("cat cat", ["cat"], 0, 2 / 3),
    ("", [], 1, 1),
    ("cat", [], 0, 0),
    ("", ["cat"], 0, 0),
    ("the", ["A"], 1, 1),
    ("ÄPFEL", ["äpfel"], 1, 1),
    ("1 000", ["1,000", "1 000 km"], 0, 4 / 5),
    ("dog", ["cat", "the dog!"], 1, 1),
])  # fmt: skip
def test_answers_by_hand(said, golds, exact, f1):
    assert metrics.exact_match(said, golds) == exact
    assert metrics.answer_f1(said, golds) == pytest.approx(f1)


words = st.lists(
    st.sampled_from(["the", "a", "cat", "Cat,", "-", "an", "ä", " ", "\n", "dog's", "No."]),
    max_size=6,
)


@pytest.mark.interop
@given(words.map(" ".join), words.map(" ".join))
def test_answers_as_the_official_script(said, gold):
    """Compare with the copy of the script in `transformers`, in versions that contain it."""
    theirs = pytest.importorskip("transformers.data.metrics.squad_metrics")
    assert metrics.normalised_answer(said) == theirs.normalize_answer(said)
    golds = [gold] if theirs.normalize_answer(gold) else [""]
    assert metrics.exact_match(said, [gold]) == theirs.compute_exact(golds[0], said)
    assert metrics.answer_f1(said, [gold]) == pytest.approx(theirs.compute_f1(golds[0], said))


# --- tokenizers ---


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict[str, str]:
    """Train BERT's WordPiece, RoBERTa's BPE, one with an end of text, and one without special tokens."""
    folder, names = tmp_path_factory.mktemp("tokenizers"), ("bert", "roberta", "gpt2", "none")
    text = ["the cat sat on the mat, said a dog", "who sat where? ä € 😀", *map(str, range(20))]
    made = {name: Tokenizer(models.BPE()) for name in names}
    made["bert"] = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made["bert"].pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = {"roberta": SPECIAL["modernbert"], "gpt2": ["<|endoftext|>"], "none": []}
    for name, tokens in special.items():
        made[name].pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made[name].decoder = decoders.ByteLevel()
        how = dict(vocab_size=330, special_tokens=tokens, show_progress=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(**how, initial_alphabet=alphabet)
        made[name].train_from_iterator(text, trainer)
    how = dict(vocab_size=150, special_tokens=SPECIAL["bert"], show_progress=False)
    made["bert"].train_from_iterator(text, trainers.WordPieceTrainer(**how))
    made["bert"].post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made["roberta"].post_processor = processors.RobertaProcessing(
        ("</s>", 2), ("<s>", 0), add_prefix_space=False
    )
    for name, tokenizer in made.items():
        tokenizer.save(str(folder / f"{name}.json"))
    return {name: str(folder / f"{name}.json") for name in made} | {"bytes": "bytes"}


# --- GLUE's files ---

LABELS = {"stsb": [4.25, 0], "mnli": [0, 2], "qnli": [0, 1], "rte": [0, 1]}


@pytest.mark.parametrize("name", ROWS)
def test_published_files(tmp_path, name):
    about = glue.TASKS[name]
    found = glue.glue_rows(about, Path(saved(tmp_path / about.title, name)).parent)
    assert list(found) == [*about.files[0]]
    assert found["train"].labels.dtype == (np.float32 if name == "stsb" else np.int32)
    for rows in found.values():
        np.testing.assert_allclose(rows.labels, LABELS.get(name, [1, 0]))
        texts = [text for part in zip(*rows.texts, strict=True) for text in part]
        line = ROWS[name][0].split("\t")
        assert texts[0] in line and len(texts) == 2 * len(rows.texts) and texts[0] != texts[-1]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_files_of_other_systems_hold_the_same(tmp_path, suffix):
    rows = ["a \u2028\x0b\x85 line\t1", 'unclosed " quote\t0']
    plain = read(BERT, "sst2", tmp_path / "a", rows)
    folder = saved(tmp_path / "b", "sst2", rows, suffix, "\r\n")
    other = Labelled("sst2", folder).prepared(BERT)
    assert len(plain.train) == 2 and plain.identity == other.identity


@pytest.mark.parametrize(("name", "rows", "message"), [
    ("sst2", ["good\t1", "bad"], r"train.tsv, line 3 has 1 columns, but SST-2 has at least 2"),
    ("sst2", ["good\t2"], r"train.tsv, line 2: the label '2' is not one of 0, 1"),
    ("mnli", [ROWS["mnli"][0][:-10] + "-"], r"the label '-' is not one of entailment, neutral, contradiction"),
    ("stsb", [ROWS["stsb"][0][:-5] + "good"], r"line 2: the label 'good' is not a number"),
    ("stsb", [ROWS["stsb"][0][:-5] + "nan"], r"the label 'nan' is not a number"),
    ("stsb", [ROWS["stsb"][0][:-5] + "1e39"], r"the label '1e39' is not a number"),
    ("cola", ["one sentence"], r"train.tsv, line 1 has 1 columns, but CoLA has at least 4"),
    ("cola", [], "train.tsv has no rows"),
    ("rte", [], "train.tsv has no rows"),
    ("qqp", ["5\t1\t2\tWho", *ROWS["qqp"]], "line 2 has 4 columns, but QQP has at least 6"),
])  # fmt: skip
def test_rows_that_are_no_examples_are_named(tmp_path, name, rows, message):
    with pytest.raises(UserError, match=message) as error:
        glue.glue_rows(glue.TASKS[name], Path(saved(tmp_path, name, rows)))
    assert "\n" not in str(error.value)


def test_the_few_torn_rows_of_the_published_qqp_are_left_out(tmp_path):
    folder = Path(saved(tmp_path, "qqp", [*ROWS["qqp"] * 100, "7\t1\t2\tWho"]))
    assert len(glue.glue_rows(glue.TASKS["qqp"], folder)["train"].labels) == 200


def test_files_that_lack_or_are_others(tmp_path):
    def refused(name, message):
        with pytest.raises(UserError, match=message):
            glue.glue_rows(glue.TASKS[name], tmp_path)

    saved(tmp_path, "cola")
    (tmp_path / "dev.tsv").unlink()
    refused("cola", r"train.tsv is there, but no dev.tsv in")
    saved(tmp_path, "sst2")
    message = r"train.tsv has no column 'sentence1' in its first line, only 'sentence', 'label'"
    refused("rte", message)
    (tmp_path / "train.tsv").unlink()
    (tmp_path / "train.tsv.xz").write_bytes(b"no xz")
    refused("sst2", r"cannot read .*train.tsv.xz")


@pytest.mark.parametrize(("values", "message"), [
    ({"task": "colla"}, "there is no task 'colla', only cola, .*, squad2"),
    ({"length": 0}, "length must be at least 1, but is 0"),
    ({"examples": 0}, "examples must be at least 1"),
    ({"labels": ("good",)}, r"labels must name at least two classes, .* \('good',\)"),
    ({"labels": ("good", "bad", "good")}, "labels must name at least two classes, each"),
    ({"labels": ("1", "2"), "number": True}, "number=true is for labels that are numbers"),
])  # fmt: skip
def test_settings_that_mean_nothing(values, message):
    with pytest.raises(ValueError, match=message):
        Labelled(**{"task": "cola", "path": "x"} | values)


# --- tensorflow-datasets ---


def test_tensorflow_datasets_are_read(tmp_path, monkeypatch):
    features = dict.fromkeys(("sentence", "premise", "hypothesis"), tfds.features.Text())
    features |= {"label": tfds.features.ClassLabel(num_classes=3)}
    row = {"sentence": "ä", "premise": "{}?", "hypothesis": "{}!"}
    rows = [{k: v.format(i) for k, v in row.items()} | {"label": i} for i in range(3)]
    names = ("train", "validation", "validation_matched", "validation_mismatched")
    builder = prepare(tmp_path, "tiny", features, dict.fromkeys(names, rows))
    asked = []
    monkeypatch.setattr(glue, "prepared_dataset", lambda n, _: (asked.append(n), builder)[1])
    found = Labelled("mnli", str(tmp_path), source="tfds").prepared(BERT)
    assert asked == ["glue/mnli"] and list(found.valid) == ["matched", "mismatched"]
    assert sorted(found.train.targets) == [0, 1, 2]
    first = bytes(found.train.sample(0, None)[0]["tokens"].astype(np.uint8))
    assert first.startswith(b"\xc0%d?\x00%d!\x00\xc1" % ((found.train.targets[0],) * 2))
    messages = {"cola": "label 2 is not", "rte": "glue/rte has no feature 'sentence1', only"}
    for task, message in messages.items():
        with pytest.raises(UserError, match=message):
            Labelled(task, str(tmp_path), source="tfds").prepared(BERT)


def test_squad_of_tensorflow_datasets_is_read_as_its_files_are(tmp_path, monkeypatch):
    text = tfds.features.Text()
    answers = tfds.features.Sequence({"text": text, "answer_start": np.int32})
    features = dict.fromkeys(("id", "title", "context", "question"), text) | {"answers": answers}
    row = {"title": "", "context": "a ä cat"}
    given = ({"text": ["ä", "ä cat"], "answer_start": [2, 2]}, {"text": [], "answer_start": []})
    rows = [row | {"id": f"{i}", "question": f"q{i}", "answers": a} for i, a in enumerate(given)]
    builder = prepare(tmp_path, "tiny", features, {"train": rows, "validation": rows})
    monkeypatch.setattr(squad, "prepared_dataset", lambda *_: builder)
    questions = squad.squad_of_tfds(squad.TASKS["squad2"], str(tmp_path))
    assert questions.keys() == {"train", "dev"}
    answered, not_answered = sorted(questions["dev"])
    assert answered == squad.Question("q0", "a ä cat", ("ä", "ä cat"), 2)
    assert not_answered == squad.Question("q1", "a ä cat", (), 0)
    with pytest.raises(UserError, match="question 1 has no answer, as in version 2"):
        Labelled("squad1", str(tmp_path), source="tfds").prepared(BERT)


# --- model inputs ---


def read(model, task: str, folder: Path, rows=None, **settings) -> Prepared:
    """Return a task whose files have these rows."""
    return Labelled(task, saved(folder, task, rows), **settings).prepared(model)


def said(prepared: Prepared, tokenizer: str, i: int = 0) -> list[str]:
    """Return the tokens of a sample without padding."""
    inputs = prepared.train.sample(i, None)[0]
    shown = slice(inputs["lengths"]) if "lengths" in inputs else inputs["mask"]
    kept = inputs["tokens"][shown]
    if tokenizer == "bytes":
        return [chr(t) for t in kept]
    return [Tokenizer.from_file(tokenizer).id_to_token(int(t)) for t in kept]


@pytest.mark.parametrize(("model", "tokenizer", "frame"), [
    (BERT, "bert", ("[CLS]", "[SEP]", "[SEP]")),
    (ROBERTA, "roberta", ("<s>", "</s></s>", "</s>")),
    (BERT, "bytes", ("\xc0", "\x00", "\x00")),
    (GPT2, "gpt2", ("", "<|endoftext|>", "<|endoftext|>")),
    (LLAMA, "roberta", ("<s>", "</s>", "</s>")),
    (GPT2, "bytes", ("", "\x00", "\x00")),
], ids=lambda x: x if isinstance(x, str) else type(x).__name__)  # fmt: skip
def test_frames(tmp_path, tokenizers, model, tokenizer, frame):
    name, (begin, between, end) = tokenizers[tokenizer], frame
    rows = ["0\tcat sat\tdog\tentailment"]
    made = read(model, "rte", tmp_path, rows, tokenizer=name, length=40)
    found = "".join(said(made, name)).replace("Ġ", " ").replace(" ", "")
    assert found == f"{begin}catsat{between}dog{end}"
    inputs, target = made.train.sample(0, None)
    assert target.dtype == np.int32 and target.shape == () and target == 0
    assert all(x.dtype == (bool if k == "mask" else np.int32) for k, x in inputs.items())
    if isinstance(model, BERTConfig):
        assert inputs.keys() == {"tokens", "types", "mask"}
        assert {x.shape for x in inputs.values()} == {(40,)}
        dog = 3 if tokenizer == "bytes" else len(Encoder(name, model).tokens(["dog"])[0])
        assert inputs["types"].sum() == (dog + 1 if model.types > 1 else 0)
        assert (inputs["types"] <= inputs["mask"]).all()
        assert set(inputs["tokens"][~inputs["mask"]]) == {made.pad}
    else:
        assert inputs.keys() == {"tokens", "lengths"} and inputs["lengths"].shape == ()
        last = inputs["tokens"][inputs["lengths"] - 1]
        assert last != made.pad and set(inputs["tokens"][inputs["lengths"] :]) == {made.pad}


@pytest.mark.parametrize(("model", "tokenizer", "says"), [
    (GPT2, "none", r"a GPT2Config reads texts that are marked by <\|endoftext\|>.* none"),
    (BERT, "gpt2", r"texts that are marked by \[CLS\], \[SEP\] and \[PAD\]"),
])  # fmt: skip
def test_a_tokenizer_that_marks_no_texts_is_refused(tmp_path, tokenizers, model, tokenizer, says):
    with pytest.raises(UserError, match=says):
        read(model, "sst2", tmp_path, tokenizer=tokenizers[tokenizer])


@given(st.integers(0, 9), st.integers(0, 9), st.integers(2, 12))
def test_the_longer_text_is_shortened_as_by_tokenizers(a, b, room):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(room, strategy="longest_first")
    ids = tokenizer.encode("a " * a, "b " * b).ids
    found = pair_lengths(np.array(a), np.array(b), room)
    assert [*map(int, found)] == [ids.count(0), ids.count(1)]


@pytest.mark.parametrize(("tokenizer", "model"), [("bert", BERT), ("roberta", ROBERTA)])
@pytest.mark.parametrize("length", [7, 64])
def test_pairs_are_framed_as_their_tokenizer_does(tmp_path, tokenizers, tokenizer, model, length):
    pairs = [("the cat sat on the mat", "a dog"), ("who?", "said a dog 12 ä € 😀 " * 4)]
    pairs += [("sat " * 30, "cat " * 30), ("a", "b")]
    rows = [f"{i}\t{a}\t{b}\tentailment" for i, (a, b) in enumerate(pairs)]
    made = read(model, "rte", tmp_path, rows, tokenizer=tokenizers[tokenizer], length=length)
    theirs = Tokenizer.from_file(tokenizers[tokenizer])
    theirs.enable_truncation(length, strategy="longest_first")
    theirs.enable_padding(length=length, pad_id=made.pad)
    for i, (a, b) in enumerate(pairs):
        inputs, expected = made.train.sample(i, None)[0], theirs.encode(a, b)
        assert inputs["tokens"].tolist() == expected.ids
        assert inputs["mask"].tolist() == expected.attention_mask
        if tokenizer == "bert":
            assert inputs["types"].tolist() == expected.type_ids


def test_a_text_that_is_too_long_still_ends(tmp_path):
    made = read(GPT2, "sst2", tmp_path, ["abcdefghij\t1"], length=6)
    assert said(made, "bytes") == list("abcde\x00")
    made = read(BERT, "rte", tmp_path, ["0\tabcdefghij\txy\tentailment"], length=8)
    assert said(made, "bytes") == list("\xc0abc\x00xy\x00")


def test_identity_depends_on_content(tmp_path, tokenizers):
    rows, gpt2 = [f"text {i}\t{i % 2}" for i in range(20)], tokenizers["gpt2"]

    def of(folder: str, rows=rows, **settings) -> Prepared:
        return read(GPT2, "sst2", tmp_path / folder, rows, tokenizer=gpt2, **settings)

    made = of("a")
    assert made.identity == of("b").identity
    for name in "01":
        (tmp_path / "a" / f"{name}.txt").write_text("the cat sat")
    cache = str(tmp_path / "cache")
    corpus = Data("text", str(tmp_path / "a"), tokenizer=gpt2, cache=cache, valid_fraction=0.5)
    text = read_tokens(corpus).identity
    assert made.identity.keys() == {"name", "tokenizer", "train", "valid"} <= {*text}
    assert made.identity["tokenizer"] == text["tokenizer"]
    json.dumps(made.identity)
    few, more = (of("a", examples=n) for n in (4, 8))
    assert len(few.train) == 4 and len(more.train) == 8 and len(few.valid["dev"]) == 20
    assert few.identity["valid"] == made.identity["valid"]
    assert few.identity["train"] != made.identity["train"]
    for i in range(4):
        one, other = (x.train.sample(i, None)[0]["tokens"] for x in (few, more))
        np.testing.assert_array_equal(one, other)
    changed = of("c", [*rows[:-1], "text 19\t0"])
    assert changed.identity["train"] != made.identity["train"]


@pytest.mark.parametrize("name", ROWS)
def test_scores_of_right_and_wrong_outputs(tmp_path, name):
    made = read(GPT2, name, tmp_path)
    assert list(made.valid) == [*glue.TASKS[name].files[0]][1:] and made.head == "classes"
    for split, examples in made.valid.items():
        targets = np.array([examples.sample(i, None)[1] for i in range(len(examples))])
        right = targets[:, None] if made.classes == 1 else np.eye(made.classes)[targets]
        assert list(made.score(split, right)) == list(glue.TASKS[name].metrics)
        assert all(value == pytest.approx(1) for value in made.score(split, right).values())
        assert next(iter(made.score(split, -right).values())) <= 0
        with pytest.raises(ValueError, match=f"outputs for {split} are"):
            made.score(split, right[:1])


@pytest.mark.parametrize("model", [ROBERTA, GPT2], ids=["RoBERTa", "GPT-2"])
@pytest.mark.parametrize("name", ["mnli", "stsb"])
def test_what_is_saved_says_its_labels_and_its_padding(tmp_path, model, name):
    made = read(model, name, tmp_path / "files", length=48)
    config = model.with_head(made.head, made.classes)
    weights = tiny.params(config, dtype="float32")
    checkpoints.save(tmp_path / "a", config, weights, settings=made.settings)
    said = json.loads((tmp_path / "a" / "config.json").read_text())
    if name == "mnli":
        assert said["id2label"] == {"0": "entailment", "1": "neutral", "2": "contradiction"}
        assert said["label2id"]["contradiction"] == 2
        assert said["problem_type"] == "single_label_classification"
    else:
        assert len(said["id2label"]) == 1 and said["problem_type"] == "regression"
    assert said.get("pad_token_id") == (1 if model == ROBERTA else made.pad)
    assert checkpoints.load(tmp_path / "a")[0] == config


# --- SQuAD ---

LONG = "ein langer Text: " + " ".join(f"Wort{i} ä{i}" for i in range(120))
CONTEXTS = {
    "The cat sat. The cat ran. 😀 The cat, the Käse und € 5,000.": ["cat", "Käse", "€ 5,000", "The cat ran", "😀"],
    LONG: ["Wort0", "ä57 Wort58", "Wort119 ä119", "ein"],
    "cat " * 40 + "dog " + "cat " * 40: ["dog", "cat dog cat"],
    "x": ["x"],
}  # fmt: skip


def squad_file(folder: Path, name: str, contexts=CONTEXTS, **more) -> None:
    """Write a SQuAD file with one question per answer; ``more`` adds fields to each question."""
    folder.mkdir(exist_ok=True)
    articles = []
    for context, found in contexts.items():
        asked = []
        for i, text in enumerate(found):
            answer = {"text": text, "answer_start": context.rindex(text)}
            question = {"id": f"{len(articles)}-{i}", "question": f"who sat {'where ' * 30 * i}?"}
            asked.append(question | {"answers": [answer]} | more)
        articles.append({"title": "t", "paragraphs": [{"context": context, "qas": asked}]})
    (folder / name).write_text(json.dumps({"version": "1.1", "data": articles}))


def right_outputs(made: Prepared) -> np.ndarray:
    """Return logits that predict the targets; they are zero if the answer is not in the window."""
    examples = made.valid["dev"]
    outputs = np.zeros((len(examples), examples.length, 2), np.float32)
    for i in range(len(examples)):
        for side, place in enumerate(examples.sample(i, None)[1]):
            outputs[i, place, side] = 9 if place else 0
    return outputs


def both(folder: Path, contexts=CONTEXTS) -> str:
    for name in ("train", "dev"):
        squad_file(folder, f"{name}-v1.1.json", contexts)
    return str(folder)


@pytest.mark.parametrize(("tokenizer", "model", "length", "stride"), [
    ("bytes", BERT, 300, 20),
    ("roberta", ROBERTA, 90, 30),
    ("bert", BERT, 64, 128),
    ("bert", BERT, 512, 128),
])  # fmt: skip
def test_answers_are_found_back_in_any_window(
    tmp_path, tokenizers, tokenizer, model, length, stride
):
    how = dict(tokenizer=tokenizers[tokenizer], length=length, stride=stride)
    made = Labelled("squad1", both(tmp_path), **how).prepared(model)
    assert (made.head, made.classes) == ("spans", 2)
    assert made.score("dev", right_outputs(made)) == {"f1": 1, "exact_match": 1}
    assert made.score("dev", np.zeros((len(made.valid["dev"]), length, 2)))["f1"] < 1


@given(st.integers(0, 50), st.integers(1, 20), st.integers(1, 40))
def test_windows_cover_every_token(tokens, room, stride):
    begins = squad._window_begins(tokens, room, stride)
    assert {t for b in begins for t in range(b, min(b + room, tokens))} == set(range(tokens))
    assert len(begins) == 1 or begins[-2] + room < tokens
    assert all(b - a <= stride for a, b in pairwise(begins))


def test_windows_by_hand(tmp_path):
    folder = both(tmp_path, {"abcdefghij": ["cd", "j"]})
    made = Labelled("squad1", folder, length=11, stride=3).prepared(BERT)
    found = ["".join(said(made, "bytes", i)) for i in range(len(made.train))]
    assert found == [f"\xc0who \x00{part}\x00" for part in ("abcd", "defg", "ghij") * 2]
    answers = [made.train.sample(i, None)[1].tolist() for i in range(len(found))]
    assert answers == [[8, 9], [0, 0], [0, 0], [0, 0], [0, 0], [9, 9]]
    assert made.train.sample(0, None)[0]["types"].tolist() == [0] * 6 + [1] * 5


def test_the_best_span_is_ordered_and_short(tmp_path, tokenizers):
    context = "cat " * 40 + "dog"
    both(tmp_path, {context: ["dog"]})
    questions = squad.squad_questions(squad.TASKS["squad1"], tmp_path)["dev"]
    read = squad.question_windows(questions, Encoder(tokenizers["bert"], BERT), 512, 128)
    logits = np.random.default_rng(0).normal(size=(1, 512, 2))
    first, held = int(read.texts.second[0]), int(read.held[0])
    # the first token and the tokens around the context
    logits[0, [0, first - 1, first + held], :] = 99
    logits[0, first + held - 1, 0] = 50  # this begin comes after every good end
    logits[0, first, 0] = logits[0, first + held - 1, 1] = 20  # too far apart
    expected = max(
        (logits[0, i, 0] + logits[0, j, 1], i - first, j - first)
        for i in range(first, first + held)
        for j in range(i, min(i + squad.ANSWER, first + held))
    )
    begin, end = read.spans[0][expected[1], 0], read.spans[0][expected[2], 1]
    best = squad.best_answers(read, questions, logits)
    assert best.at(None) == [context[begin:end]]
    assert best.at(0.0) == [""]  # the first token has a higher score


def test_version_2_knows_questions_without_an_answer(tmp_path):
    contexts = {"the cat sat": ["cat"], "a dog": ["dog"]}
    for name in ("train-v2.0.json", "dev-v2.0.json"):
        squad_file(tmp_path, name, contexts, is_impossible=False)
        content = json.loads((tmp_path / name).read_text())
        none = {"is_impossible": True, "answers": [], "plausible_answers": []}
        content["data"][1]["paragraphs"][0]["qas"][0] |= none
        (tmp_path / name).write_text(json.dumps(content))
    made = Labelled("squad2", str(tmp_path), length=40).prepared(BERT)
    outputs = right_outputs(made)
    outputs[1, 0] = 1  # no answer
    both = ("f1", "exact_match")
    names = [f"{part}{name}" for part in ("", "answer_", "no_answer_") for name in both]
    found = made.score("dev", outputs)
    assert {name: found[name] for name in names} == dict.fromkeys(names, 1.0)
    outputs[:, 0] = 99
    found = made.score("dev", outputs)
    assert [found[name] for name in names] == [0.5, 0.5, 0, 0, 1, 1]
    # the margins differ, so a threshold separates the questions
    assert (found["best_f1"], found["best_exact_match"]) == (1.0, 1.0)
    best = {f"best_{name}{more}" for name in both for more in ("", "_threshold")}
    assert found.keys() - names == best


@given(st.integers(0, 2**32 - 1), st.integers(1, 12))
def test_the_best_threshold_is_found_as_by_trying_all(seed, count):
    rng = np.random.default_rng(seed)
    golds = [("a b",) if rng.random() < 0.6 else () for _ in range(count)]
    questions = [squad.Question("?", "a b c", gold, 0) for gold in golds]
    texts = [str(rng.choice(["a b", "a", "c", ""])) for _ in range(count)]
    found = squad.Answers(texts, rng.integers(-3, 3, count).astype(float))

    def scores(threshold):
        return squad.score_answers(squad.TASKS["squad2"], questions, found.at(threshold))

    tried = [scores(t) for t in (-9.0, *np.unique(found.silence))]
    best = squad.answer_thresholds(questions, found)
    for name in ("f1", "exact_match"):
        assert best[f"best_{name}"] == pytest.approx(max(each[name] for each in tried))
        at = scores(best[f"best_{name}_threshold"])
        assert at[name] == pytest.approx(best[f"best_{name}"])


ASKED = '{"data": [{"paragraphs": [{"context": "a b", "qas": [{"id": "7", "question": "?", "answers": '  # fmt: skip


@pytest.mark.parametrize(("content", "message"), [
    ("{", "is not SQuAD's JSON"),
    ("[1]", "is not SQuAD's JSON"),
    ('{"data": {}}', "its data is not a list"),
    ('{"data": []}', "has no questions for train"),
    ('{"data": [{"title": "t"}]}', r"is not as in SQuAD \(KeyError: 'paragraphs'\)"),
    (ASKED + "3}]}]}]}", "question 7"),
    (ASKED + '[{"text": "b", "answer_start": 0}]}]}]}]}', "question 7: its answer 'b' is not at character 0 of its text"),
])  # fmt: skip
def test_files_that_are_not_squads(tmp_path, content, message):
    both(tmp_path)
    (tmp_path / "train-v1.1.json").write_text(content)
    with pytest.raises(UserError, match=message) as error:
        squad.squad_questions(squad.TASKS["squad1"], tmp_path)
    assert "\n" not in str(error.value)


def test_squad_needs_bidirectional_models():
    with pytest.raises(UserError, match=r"squad1 needs a BERT, .* the model is a GPT2Config"):
        Labelled("squad1", "x").prepared(GPT2)


def test_halves_of_characters_are_read(tmp_path):
    folder = both(tmp_path, {"a \ud83d b": ["b"]})
    made = Labelled("squad1", folder, length=40).prepared(BERT)
    assert made.score("dev", right_outputs(made))["exact_match"] == 1


def test_squad_without_a_dev_file_splits_articles(tmp_path):
    contexts = {f"text {i} a b": ["a", "b"] for i in range(20)}
    squad_file(tmp_path, "train-v1.1.rebuilt.json", contexts)
    questions = squad.squad_questions(squad.TASKS["squad1"], tmp_path)
    train, dev = ({q.context for q in questions[split]} for split in ("train", "dev"))
    assert (len(train), len(dev)) == (18, 2) and not train & dev


def test_every_task_is_here():
    assert {*ROWS, *squad.TASKS} == {*NAMES}

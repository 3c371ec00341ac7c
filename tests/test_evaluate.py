"""Evaluation without training: every token is scored once, as by a pass through all of it, and tasks count as they say."""

import json
import math
import sys
from functools import partial

import jax
import numpy as np
import pytest
import runs
import tensorflow_datasets as tfds

from jaxgrow.models import BERTConfig, GPT2Config, LlamaConfig
from train import evaluate as command
from train.data.text import begin_of_text, end_of_text, tokenizer, tokenizer_of
from train.errors import UserError
from train.run.workdir import Workdir
from train.state.mesh import Mesh
from train.state.opened import TextModel, opened
from train.tasks.scoring import Request, Scorer
from train.tasks.zero_shot import TASKS, evaluate

SIZES = dict(vocab=256, context=16, layers=2, embed=16, heads=2, head_dim=8, mlp=32)
TEXT = "In the beginning was the wörd, and the word was with a blank.\n Ende "


def scorer(config, seed=0):
    params = jax.tree.map(lambda x: 8 * x, runs.fresh(config, seed))  # so that it has opinions
    return Scorer(TextModel(config, params, tokenizer("bytes"), Mesh().over(jax.devices())))


@pytest.fixture(scope="module")
def gpt():
    return scorer(GPT2Config(**SIZES))


@pytest.fixture(scope="module")
def bert():
    return scorer(BERTConfig(**SIZES))


@partial(jax.jit, static_argnums=0)
def apply(config, params, inputs):
    return config.module.apply({"params": params}, inputs)


def logits_of(scorer, tokens):
    """Of the next token at each place, from one pass; padded, so that one program does for all."""
    padded = np.zeros((1, 16), np.int32)
    padded[0, : len(tokens)] = tokens
    return apply(scorer.config, scorer.model.params, padded)[0, : len(tokens)]


def losses(scorer, tokens):
    """Of the tokens after the first, from all logits of one pass; and whether each is the likeliest."""
    tokens = np.asarray(tokens)
    logits = logits_of(scorer, tokens[:-1])
    log_p = np.asarray(jax.nn.log_softmax(logits), np.float64)
    return -log_p[np.arange(len(tokens) - 1), tokens[1:]], np.asarray(logits.argmax(-1)) == tokens[1:]


# --- tokens ---


def test_the_tokenizer_of_bytes_gives_the_bytes_that_models_were_trained_on():
    of_bytes, text = tokenizer("bytes"), "Hëllo \u0100\x7f\u00ad \n\t 日本 \U0001f600  z"
    assert of_bytes.encode(text).ids == list(text.encode())
    assert of_bytes.decode(list(text.encode())) == text
    assert of_bytes.get_vocab_size() == 256
    assert begin_of_text(of_bytes) == end_of_text(of_bytes) == 0


@pytest.mark.parametrize("stride", [None, 16, 5, 1])
def test_windows_score_every_token_once_with_the_context_that_a_stride_leaves(gpt, stride):
    requests, tokens = gpt.windows(TEXT, stride), [0, *TEXT.encode()]
    scored = [request.tokens[request.begin : request.end] for request in requests]
    np.testing.assert_array_equal(np.concatenate(scored), tokens[1:])
    assert all(len(request.tokens) <= 17 for request in requests)
    assert all(request.begin > 16 - (stride or 16) for request in requests[1:-1])


def test_scores_are_those_of_one_pass_whatever_is_scored_together(gpt):
    requests = [*gpt.windows(TEXT), *gpt.windows(TEXT, 3), gpt.continuation("In the", " beginning"), *gpt.windows("a")]
    for request, score in zip(requests, gpt(requests), strict=True):
        loss, right = losses(gpt, request.tokens)
        assert score.loss == pytest.approx(loss[request.begin - 1 : request.end - 1].sum(), rel=1e-5)
        assert score.greedy == right[request.begin - 1 : request.end - 1].all()


def test_what_is_likeliest_is_greedy(gpt):
    tokens = [0, 5]
    for _ in range(4):
        tokens.append(int(logits_of(gpt, tokens)[-1].argmax()))
    other = [*tokens[:-1], (tokens[-1] + 1) % 256]
    likeliest, less = gpt([Request(np.array(t, np.int32), 2, 6) for t in (tokens, other)])
    assert likeliest.greedy and not less.greedy
    assert likeliest.loss < less.loss


def test_a_masked_model_hides_each_token_in_turn(bert):
    request = bert.continuation("ab", " cd")
    assert request.tokens.tolist() == [0, *b"ab cd", 0]
    expected = 0.0
    for place in range(request.begin, request.end):
        hidden = request.tokens.copy()
        hidden[place] = 255
        logits = apply(bert.config, bert.model.params, {"tokens": hidden[None]})
        expected -= float(jax.nn.log_softmax(logits[0, place])[request.tokens[place]])
    [score] = bert([request])
    assert (request.begin, request.end) == (3, 6)
    assert score.loss == pytest.approx(expected, rel=1e-5)


def test_a_continuation_is_tokenised_with_its_context():
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {c: i for i, c in enumerate(["Ġ", "a", "b", "Ġb", "<s>", "</s>"])}
    merging = Tokenizer(models.BPE(vocab, [("Ġ", "b")]))
    merging.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    scores = Scorer(TextModel(LlamaConfig(**SIZES, kv_heads=1), {}, merging, Mesh().over(jax.devices())))
    for context, continuation in (("a", " b"), ("a ", "b")):  # the blank is the continuation's, either way
        request = scores.continuation(context, continuation)
        assert request.tokens.tolist() == [4, 1, 3]  # begins with what only begins texts
        assert (request.begin, request.end) == (2, 3)


def test_of_what_is_too_long_the_end_is_scored(gpt, bert):
    request = gpt.continuation("x" * 100, "the end")
    assert bytes(request.tokens.tolist()).decode() == "xxxxxxxxxxthe end"
    assert (request.begin, request.end) == (10, 17)
    masked = bert.continuation("x" * 100, "the end")
    assert len(masked.tokens) == 16
    assert (masked.begin, masked.end) == (8, 15)


def test_texts_of_all_lengths_share_a_few_programs(gpt, monkeypatch):
    from train.tasks import scoring

    shapes = set()

    def seen(config, params, inputs, targets):
        shapes.add(targets.shape)
        return np.zeros(targets.shape), np.ones(targets.shape, bool)

    monkeypatch.setattr(scoring, "_program", seen)
    gpt([gpt.continuation("", "x" * n) for n in range(1, 17) for _ in range(3)])
    assert len(shapes) == 1
    assert next(iter(shapes))[0] % len(jax.devices()) == 0


# --- tasks ---


def lines(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_perplexities_of_a_text(gpt, tmp_path):
    (tmp_path / "wiki.test.raw").write_text(TEXT)
    (tmp_path / "mine.txt").write_text("other text")
    found = evaluate(gpt, ["wikitext2", str(tmp_path / "mine.txt"), "bits_per_byte"], tmp_path)
    nats = sum(score.loss for score in gpt(gpt.windows(TEXT)))
    result, size = found["wikitext2"], len(TEXT.encode())
    assert (result["tokens"], result["words"], result["bytes"]) == (size, 14, size)
    assert result["perplexity"] == pytest.approx(math.exp(nats / size))
    assert math.log(result["perplexity_by_word"]) == pytest.approx(nats / 14)
    assert result["bits_per_byte"] == pytest.approx(nats / size / math.log(2))
    assert found["bits_per_byte"]["bytes"] == found[str(tmp_path / "mine.txt")]["bytes"] == 10


def test_the_last_word(gpt, tmp_path):
    lines(tmp_path / "lambada" / "lambada_test.jsonl", [{"text": "one two three"}, {"text": "a b c"}])
    result = evaluate(gpt, ["lambada"], tmp_path)["lambada"]
    scores = gpt([gpt.continuation("one two", " three"), gpt.continuation("a b", " c")])
    assert result["perplexity"] == pytest.approx(math.exp((scores[0].loss + scores[1].loss) / 2))
    assert result["accuracy"] == np.mean([s.greedy for s in scores])
    assert result["questions"] == 2


@pytest.mark.parametrize("kind", ["gpt", "bert"])
def test_minimal_pairs(kind, request, tmp_path):
    judge = request.getfixturevalue(kind)
    pairs = [("the cat is", "the cat are"), ("they are", "they is"), ("she ran", "her ran")]
    scores = judge([judge.continuation("", s) for pair in pairs for s in pair])
    right = [scores[2 * i].loss < scores[2 * i + 1].loss for i in range(3)]
    for name, of in (("agreement", pairs[:2]), ("case", pairs[2:])):
        lines(tmp_path / "blimp" / f"{name}.jsonl", [{"sentence_good": a, "sentence_bad": b} for a, b in of])
    result = evaluate(judge, ["blimp"], tmp_path)["blimp"]
    assert result["by"] == {"agreement": np.mean(right[:2]), "case": float(right[2])}
    assert result["accuracy"] == np.mean(list(result["by"].values()))
    # The control: with each pair the other way round, what was right is wrong.
    for name, of in (("agreement", pairs[:2]), ("case", pairs[2:])):
        lines(tmp_path / "blimp" / f"{name}.jsonl", [{"sentence_good": b, "sentence_bad": a} for a, b in of])
    turned = evaluate(judge, ["blimp"], tmp_path)["blimp"]
    assert turned["by"] == {name: 1 - share for name, share in result["by"].items()}


ARC = {"stem": "Why?", "choices": [{"text": "so", "label": "A"}, {"text": "because", "label": "B"}]}
SWAG = {"activity_label": "Run", "ctx_a": "A man [x] runs.", "ctx_b": "he"}
QUESTIONS = {  # task -> file, records, the texts that are compared, which is right
    "piqa": ("valid.jsonl", {"goal": "Open", "sol1": "pull", "sol2": "push", "label": 1}, "Question: Open\nAnswer:"),
    "hellaswag": (
        "hellaswag_val.jsonl",
        SWAG | {"endings": ["stops", "flies [title] up"], "label": 1},
        "Run: A man runs. He",
    ),
    "arc_easy": ("ARC-Easy-Test.jsonl", {"question": ARC, "answerKey": "B"}, "Question: Why?\nAnswer:"),
}
ENDINGS = {"piqa": (" pull", " push"), "hellaswag": (" stops", " flies. up"), "arc_easy": (" so", " because")}


@pytest.mark.parametrize("task", QUESTIONS)
def test_multiple_choice(gpt, task, tmp_path):
    name, record, context = QUESTIONS[task]
    lines(tmp_path / name, [record])
    read = list(TASKS[task].read(tmp_path / name))
    assert [q[:3] for q in read] == [(context, ENDINGS[task], 1)]
    a, b = (score.loss for score in gpt([gpt.continuation(context, ending) for ending in ENDINGS[task]]))
    result = evaluate(gpt, [task], tmp_path)[task]
    assert result["accuracy"] == float(b < a)
    first, second = (len(ending) - 1 for ending in ENDINGS[task])
    assert result["accuracy_normalised"] == float(b / second < a / first)


TEXTS = tfds.features.Text
CHOICES = {"text": TEXTS(), "label": tfds.features.ClassLabel(names=["A", "B"])}
SETS = {  # task -> folder, name, split, features, a record; as tensorflow-datasets has them
    "lambada": ("", "lambada", "test", {"passage": TEXTS()}, {"passage": "one two three"}),
    "blimp": (
        "agreement",
        "blimp",
        "train",
        {name: TEXTS() for name in ("sentence_good", "sentence_bad", "UID")},
        {"sentence_good": "they are", "sentence_bad": "they is", "UID": "agreement"},
    ),
    "piqa": (
        "",
        "piqa",
        "validation",
        {"goal": TEXTS(), "sol1": TEXTS(), "sol2": TEXTS(), "label": np.int64},
        QUESTIONS["piqa"][1],
    ),
    "arc_easy": (
        "ARC-Easy",
        "ai2_arc",
        "test",
        {"question": TEXTS(), "choices": tfds.features.Sequence(CHOICES), "answerKey": CHOICES["label"]},
        {"question": "Why?", "choices": {"text": ["so", "because"], "label": ["A", "B"]}, "answerKey": "B"},
    ),
}


@pytest.mark.parametrize("task", SETS)
def test_sets_of_tensorflow_datasets_are_read_as_their_files_are(gpt, task, tmp_path):
    folder, name, split, features, record = SETS[task]

    class Written(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")
        BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=folder)] if folder else []

        def _info(self):
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

        def _split_generators(self, dl_manager):
            return {split: enumerate([record] * 3)}

        def _generate_examples(self):
            raise NotImplementedError

    Written.name = name
    Written(data_dir=tmp_path / "tfds", file_format="array_record").download_and_prepare()
    published = {"lambada": {"text": "one two three"}, "arc_easy": QUESTIONS["arc_easy"][1]}.get(task, record)
    file = QUESTIONS[task][0] if task in QUESTIONS else "agreement.jsonl"
    lines(tmp_path / "files" / file, [published] * 3)
    theirs, ours = (evaluate(gpt, [task], tmp_path / where)[task] for where in ("tfds", "files"))
    assert theirs.pop("files") != ours.pop("files") and theirs == ours and ours["questions"] == 3


@pytest.mark.parametrize(
    "task, name, content, says",
    [
        ("sudoku", None, None, "there is no task 'sudoku'"),
        ("ptb", None, None, "ptb needs ptb.test.txt or ptb.valid.txt, perhaps compressed, in"),
        ("ptb", "ptb.test.txt", "", "there is no text in"),
        ("lambada", "x.jsonl", "{", "line 1 is no JSON"),
        ("lambada", "x.jsonl", '{"txt": "a b"}', "line 1: text is missing; there are txt"),
        ("lambada", "x.jsonl", '{"text": "one"}', "line 1 is one word"),
        (
            "piqa",
            "valid.jsonl",
            '{"goal": "a", "sol1": "b", "sol2": "c", "label": 2}',
            "the label is 2, but there are 2",
        ),
        ("blimp", "x.jsonl", "", "has no questions"),
    ],
)
def test_bad_tasks_are_refused_in_one_line(gpt, tmp_path, task, name, content, says):
    if name:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=says):
        evaluate(gpt, [task], tmp_path)


def test_a_masked_model_has_no_perplexity_of_a_text(bert, tmp_path):
    (tmp_path / "ptb.test.txt").write_text(TEXT)
    with pytest.raises(UserError, match="a masked model has no perplexity of running text"):
        evaluate(bert, ["ptb"], tmp_path)


# --- the command ---


def test_a_finished_run_is_judged_by_its_own_tokenizer(small_run, tmp_path, monkeypatch, capsys):
    (tmp_path / "ptb.test.txt").write_text(TEXT)
    out = tmp_path / "found.json"
    arguments = ["evaluate", str(small_run), "--tasks", "ptb", "--data", str(tmp_path), "--json", str(out)]
    monkeypatch.setattr(sys, "argv", arguments)
    command.main()
    said, found = capsys.readouterr().out, json.loads(out.read_text())["tasks"]["ptb"]
    assert f"{found['bits_per_byte']:.4f}" in said
    assert tokenizer_of(Workdir(small_run).folder).get_vocab_size() == 256
    model = opened(small_run)
    mine = Scorer(model)
    assert found["perplexity"] == pytest.approx(
        math.exp(sum(s.loss for s in mine(mine.windows(TEXT))) / len(TEXT.encode()))
    )


def test_what_cannot_be_judged_is_said(small_run, tmp_path):
    with pytest.raises(UserError, match="there is no folder"):
        opened(tmp_path / "none")
    with pytest.raises(UserError, match=r"no tokenizer at .*nowhere"):
        opened(small_run, str(tmp_path / "nowhere"))


# --- beside transformers ---


@pytest.mark.parametrize("stride", [None, 7])
def test_perplexity_is_that_of_transformers(tmp_path, stride):
    torch, hf = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = hf.GPT2Config(vocab_size=256, n_positions=16, n_embd=16, n_layer=2, n_head=2, initializer_range=0.3)
    torch.manual_seed(0)
    theirs = hf.GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(tmp_path / "gpt")
    (tmp_path / "ptb.test.txt").write_text(TEXT)
    tokens, done, nats = torch.tensor([[0, *TEXT.encode()]]), 1, 0.0
    while done < tokens.shape[1]:  # as their guide to perplexity does, with one token more of context
        end = min(tokens.shape[1], 17 if done == 1 else done + (stride or 16))
        window = tokens[:, max(0, end - 17) : end]
        with torch.no_grad():
            log_p = theirs(window[:, :-1]).logits.log_softmax(-1).gather(2, window[:, 1:, None])
        nats -= float(log_p[0, done - end :].sum())
        done = end
    ours = evaluate(Scorer(opened(tmp_path / "gpt", "bytes")), ["ptb"], tmp_path, stride)["ptb"]
    assert math.log(ours["perplexity"]) == pytest.approx(nats / (tokens.shape[1] - 1), rel=1e-4)

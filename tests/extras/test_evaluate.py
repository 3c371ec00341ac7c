"""Evaluation without training scores every token once, and tasks follow their own definitions.

The scores of tokens equal a single pass over the full text.
"""

import json
import math
import sys
from functools import partial

import jax
import numpy as np
import pytest
import runs
import tensorflow_datasets as tfds
from limits import using_limits
from prepared import prepare

from jaxgrow.models import BERTConfig, GPT2Config, LlamaConfig
from train import evaluate as command
from train.common.errors import UserError
from train.extras.evaluation.benchmarks import _manager
from train.extras.evaluation.perplexity import files_of, text_perplexity
from train.extras.evaluation.published import PUBLISHED
from train.extras.evaluation.scoring import Request, Scorer
from train.extras.evaluation.tasks import evaluate_tasks
from train.extras.pretrained import TextModel, open_text_model
from train.extras.tokenizers.loading import load_tokenizer, tokenizer_of
from train.extras.tokenizers.special import special_tokens
from train.state.mesh import Mesh
from train.store.workdir import Workdir

SIZES = dict(vocab=256, context=16, layers=2, embed=16, heads=2, head_dim=8, mlp=32)
TEXT = "In the beginning was the wörd, and the word was with a blank.\n Ende "


def scorer(config):
    # Larger weights make the predictions distinct.
    params = jax.tree.map(lambda x: 8 * x, runs.fresh(config))
    return Scorer(TextModel(config, params, load_tokenizer("bytes"), Mesh().over(jax.devices())))


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
    """Return the next-token logits of one forward pass, padded to share one program."""
    padded = np.zeros((1, 16), np.int32)
    padded[0, : len(tokens)] = tokens
    return apply(scorer.config, scorer.model.params, padded)[0, : len(tokens)]


def losses(scorer, tokens):
    """Return the loss of each token after the first, and whether it is the most likely one."""
    logits, targets = logits_of(scorer, tokens[:-1]), np.asarray(tokens[1:])
    log_p = np.asarray(jax.nn.log_softmax(logits), np.float64)
    return -log_p[np.arange(len(targets)), targets], np.asarray(logits.argmax(-1)) == targets


def test_the_byte_tokenizer_gives_the_trained_bytes():
    of_bytes, text = load_tokenizer("bytes"), "Hëllo \u0100\x7f\u00ad \n\t 日本 \U0001f600  z"
    assert of_bytes.encode(text).ids == list(text.encode())
    assert of_bytes.decode(list(text.encode())) == text
    assert of_bytes.get_vocab_size() == 256
    assert special_tokens(of_bytes, None).end == 0


@pytest.mark.parametrize("stride", [None, 5, 1])
def test_windows_score_every_token_once(gpt, stride):
    requests, tokens = gpt.windows(TEXT, stride), [0, *TEXT.encode()]
    scored = [request.tokens[request.begin : request.end] for request in requests]
    np.testing.assert_array_equal(np.concatenate(scored), tokens[1:])
    assert all(len(request.tokens) <= 17 for request in requests)
    assert all(request.begin > 16 - (stride or 16) for request in requests[1:-1])


def test_scores_do_not_depend_on_batching(gpt):
    after = gpt.after([*b"In the"], [*b" beginning"])
    requests = [*gpt.windows(TEXT), *gpt.windows(TEXT, 3), after, *gpt.windows("a")]
    for request, score in zip(requests, gpt(requests), strict=True):
        loss, right = (x[request.begin - 1 : request.end - 1] for x in losses(gpt, request.tokens))
        assert score.loss == pytest.approx(loss.sum(), rel=1e-5)
        assert score.greedy == right.all()


@pytest.mark.parametrize("more", [
    {"rope_by": "longrope", "rope_short": (1.0,) * 4, "rope_long": (2.0, 3.0, 5.0, 9.0), "rope_context": 16},
    {"experts": 4, "capacity": 1.0},
], ids=["longrope", "experts with a capacity"])  # fmt: skip
def test_scores_of_a_short_text_do_not_depend_on_a_long_one(more):
    """Padding to the long text would change positions, or would fill the experts."""
    llama = scorer(LlamaConfig(**SIZES | {"context": 48}, kv_heads=2, **more))
    texts = (b"In the", b" begin"), (TEXT.encode()[:30], b"!")
    requests = [llama.after([*context], [*then]) for context, then in texts]
    alone = [llama([request])[0].loss for request in requests]
    assert [score.loss for score in llama(requests)] == pytest.approx(alone, rel=1e-5)


def test_what_is_likeliest_is_greedy(gpt):
    tokens = [0, 5]
    for _ in range(4):
        tokens.append(int(logits_of(gpt, tokens)[-1].argmax()))
    other = [*tokens[:-1], (tokens[-1] + 1) % 256]
    likeliest, less = gpt([Request(np.array(t, np.int32), 2, 6) for t in (tokens, other)])
    assert likeliest.greedy and not less.greedy
    assert likeliest.loss < less.loss


def test_a_masked_model_hides_each_token_in_turn(bert):
    request = bert.after([*b"ab"], [*b" cd"])
    assert (request.tokens.tolist(), request.begin, request.end) == ([0, *b"ab cd", 0], 3, 6)
    expected = 0.0
    for place in range(request.begin, request.end):
        hidden = request.tokens.copy()
        hidden[place] = 255
        logits = apply(bert.config, bert.model.params, {"tokens": hidden[None]})
        expected -= float(jax.nn.log_softmax(logits[0, place])[request.tokens[place]])
    assert bert([request])[0].loss == pytest.approx(expected, rel=1e-5)


def test_of_what_is_too_long_the_end_is_scored(gpt, bert):
    request = gpt.after([*b"x"] * 100, [*b"the end"])
    assert bytes(request.tokens.tolist()).decode() == "xxxxxxxxxxthe end"
    assert (request.begin, request.end) == (10, 17)
    masked = bert.after([*b"x"] * 100, [*b"the end"])
    assert (len(masked.tokens), masked.begin, masked.end) == (16, 8, 15)


def test_texts_of_all_lengths_share_a_few_programs(gpt, monkeypatch):
    from train.extras.evaluation import scoring

    shapes = set()

    def seen(config, params, inputs, targets):
        shapes.add(targets.shape)
        return np.zeros(targets.shape), np.ones(targets.shape, bool)

    monkeypatch.setattr(scoring, "_loss_program", seen)
    gpt([gpt.after([0], [*b"x"] * n) for n in range(1, 17) for _ in range(3)])
    assert len(shapes) == 1
    assert next(iter(shapes))[0] % len(jax.devices()) == 0


def test_perplexities_of_a_text(gpt, tmp_path):
    (tmp_path / "wiki.test.raw").write_text(TEXT)
    mine = tmp_path / "mine.txt"
    mine.write_text("other text", "utf-8-sig")  # a byte-order mark is not part of the text
    nats = sum(score.loss for score in gpt(gpt.windows(TEXT)))
    result, size = text_perplexity(gpt, files_of("wikitext2", tmp_path)), len(TEXT.encode())
    assert (result["tokens"], result["words"], result["bytes"]) == (size, 14, size)
    assert result["perplexity"] == pytest.approx(math.exp(nats / size))
    assert math.log(result["perplexity_by_word"]) == pytest.approx(nats / 14)
    assert result["bits_per_byte"] == pytest.approx(nats / size / math.log(2))
    assert [mine] == files_of("bits_per_byte", tmp_path) == files_of(str(mine), tmp_path)
    ours = text_perplexity(gpt, [mine])
    assert (ours["bytes"], ours["tokens"]) == (10, 10)


def test_texts_strides_and_models_without_a_perplexity_are_refused(gpt, bert, tmp_path):
    message = r"ptb needs ptb.test.txt or ptb.valid.txt, perhaps compressed, in .*nothing is down"
    with pytest.raises(UserError, match=message):
        files_of("ptb", tmp_path)
    (tmp_path / "ptb.test.txt").write_text("")
    files = files_of("ptb", tmp_path)
    for model, stride, says in (
        (gpt, None, "there is no text in"),
        (gpt, 0, "--stride is 0, not between 1 and the context of 16 tokens"),
        (gpt, 17, "--stride is 17, not between 1 and the context of 16 tokens"),
        (bert, None, "a masked model has no perplexity of running text"),
    ):
        with pytest.raises(UserError, match=says):
            text_perplexity(model, files, stride)


OF_THE_HUB = {"choices": {"text": ["so", "because"], "label": ["A", "B"]}, "answerKey": "B"}
OF_THE_HUB |= {"question": "Why?"}
PIQA = {"goal": "Open", "sol1": "pull", "sol2": "push", "label": 1}
PAIR = {"sentence_good": "they are", "sentence_bad": "they is"}
TEXTS = tfds.features.Text
CHOICES = {"text": TEXTS(), "label": tfds.features.ClassLabel(names=["A", "B"])}
# dataset -> (folder, name, split, features, a record in the format of tensorflow-datasets), then
# the record in the format of the Hugging Face hub
SIDES = {name: TEXTS() for name in ("goal", "sol1", "sol2")} | {"label": np.int64}
ASKED = {"question": TEXTS(), "choices": tfds.features.Sequence(CHOICES)}
ASKED |= {"answerKey": CHOICES["label"]}
NUMBERED = {"choices": {"text": ["so", "because"], "label": ["0", "1"]}, "answerKey": "1"}
ONE = ({"passage": "one two three"}, {"text": "one two three"})
PAIRED = {name: TEXTS() for name in (*PAIR, "UID")}
SETS = {
    "EleutherAI/lambada_openai": ("", "lambada", "test", {"passage": TEXTS()}, *ONE),
    "nyu-mll/blimp": ("agreement", "blimp", "train", PAIRED, PAIR | {"UID": "agreement"}, PAIR),
    "baber/piqa": ("", "piqa", "validation", SIDES, PIQA, PIQA),
    # the choices are in the same order
    "allenai/ai2_arc": ("ARC-Easy", "ai2_arc", "test", ASKED, OF_THE_HUB, OF_THE_HUB | NUMBERED),
}


@pytest.mark.parametrize("dataset", SETS)
def test_tfds_sets_have_the_columns_of_the_hub(dataset, tmp_path):
    folder, name, split, features, record, expected = SETS[dataset]
    prepare(tmp_path, name, features, {split: [record] * 3}, folder)
    patterns = [p.format(name=folder) for p in PUBLISHED[dataset].splits[split]]
    [file] = [file for pattern in patterns for file in tmp_path.glob(pattern)]
    assert list(PUBLISHED[dataset].read(file)) == [expected] * 3


def test_a_finished_run_is_judged_by_its_own_tokenizer(small_run, tmp_path, monkeypatch, capsys):
    (tmp_path / "ptb.test.txt").write_text(TEXT)
    out = tmp_path / "new" / "found.json"
    arguments = f"evaluate {small_run} --tasks ptb --data {tmp_path} --json {out}".split()
    monkeypatch.setattr(sys, "argv", arguments)
    command.main()
    said, found = capsys.readouterr().out, json.loads(out.read_text())["tasks"]["ptb"]
    assert f"{found['bits_per_byte']:.4f}" in said
    assert tokenizer_of(Workdir(small_run).folder).get_vocab_size() == 256
    mine = Scorer(open_text_model(small_run))
    nats = sum(score.loss for score in mine(mine.windows(TEXT)))
    assert found["perplexity"] == pytest.approx(math.exp(nats / len(TEXT.encode())))


def test_tasks_of_the_harness_need_it(small_run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    _manager.cache_clear()
    message = r"need lm-eval, which is not installed: run pip install -e '.\[eval\]'"
    with pytest.raises(UserError, match=message):
        evaluate_tasks(small_run, ["piqa"], tmp_path)


@pytest.mark.interop
@pytest.mark.parametrize("stride", [None, 7])
def test_perplexity_is_that_of_transformers(tmp_path, stride):
    torch, hf = pytest.importorskip("torch"), pytest.importorskip("transformers")
    sizes = dict(vocab_size=256, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    config = hf.GPT2Config(**sizes, initializer_range=0.3)
    torch.manual_seed(0)
    theirs = hf.GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(tmp_path / "gpt")
    (tmp_path / "ptb.test.txt").write_text(TEXT)
    tokens, done, nats = torch.tensor([[0, *TEXT.encode()]]), 1, 0.0
    # as in the perplexity guide of `transformers`, with one more token of context
    while done < tokens.shape[1]:
        end = min(tokens.shape[1], 17 if done == 1 else done + (stride or 16))
        window = tokens[:, max(0, end - 17) : end]
        with torch.no_grad():
            log_p = theirs(window[:, :-1]).logits.log_softmax(-1).gather(2, window[:, 1:, None])
        nats -= float(log_p[0, done - end :].sum())
        done = end
    mine = Scorer(open_text_model(tmp_path / "gpt", "bytes"))
    ours = text_perplexity(mine, [tmp_path / "ptb.test.txt"], stride)
    assert math.log(ours["perplexity"]) == pytest.approx(nats / (tokens.shape[1] - 1), rel=1e-4)


def test_an_option_that_no_task_uses_is_refused(monkeypatch, tmp_path):
    (tmp_path / "a.txt").write_text("a")
    monkeypatch.chdir(tmp_path)
    for options, says in (
        (
            "a.txt --data files",
            "--data files has no effect without a task with a name, such as wikitext2: name one with --tasks",
        ),
        ("wikitext2 --few-shot 2", "--few-shot 2 has no effect on wikitext2: it is for"),
        ("wikitext2 --limit 2", "leave out --limit"),
        ("piqa,sst2 --stride 4", "--stride 4 has no effect on piqa, sst2: it is for the"),
    ):
        monkeypatch.setattr(sys, "argv", ["evaluate", "model", "--tasks", *options.split()])
        with pytest.raises(UserError, match=says):
            command.main()


def test_the_memory_of_the_tokenizer_does_not_grow_with_the_text(gpt):
    """The control encodes the same text in one call."""
    text = TEXT * 30_000
    with using_limits(bytes=150 << 20):
        with pytest.raises(UserError, match="needs too much memory"):
            gpt.model.texts.encode_one(text)
        np.testing.assert_array_equal(gpt.encode(text), [*text.encode()])

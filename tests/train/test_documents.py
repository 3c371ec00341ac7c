"""Are documents plain text, framed as the files of their tokenizer say, with all of its ids?"""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from jaxgrow.models import GPT2Config
from train.common.errors import UserError
from train.config.overrides import overridden
from train.data.batches import report, sources
from train.data.labelled.encoding import Encoder
from train.data.special import control_tokens, largest_vocab
from train.data.text import Data, tokenizer, tokens
from train.engine.state.pretrained import fits

DOCUMENTS = ["a cat", "the <s> and </s> of <|endoftext|>", "", "</s></s>", "<s>a</s>"]
NAMES = ("<s>", "</s>", "<|endoftext|>")


def byte_level(special: bool = True) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {name: i for i, name in enumerate([*NAMES, *alphabet])}
    out = Tokenizer(models.BPE(vocab, []))
    out.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    out.decoder = decoders.ByteLevel()
    if special:
        out.add_special_tokens([AddedToken(name, special=True) for name in NAMES])
    else:
        out.add_tokens([AddedToken(name, special=False) for name in NAMES])
    return out


def unigram() -> Tokenizer:
    """A model that finds the names of special tokens among its own pieces."""
    pieces = [("<unk>", 0.0), *((name, 0.0) for name in NAMES), ("\u2581", -2.0)]
    pieces += [(c, -5.0) for c in "abcdefghijklmnopqrstuvwxyz</|>"]
    out = Tokenizer(models.Unigram(pieces, 0))
    out.pre_tokenizer = pre_tokenizers.Metaspace()
    out.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", *NAMES)])
    return out


@pytest.fixture
def corpus(tmp_path):
    """Write documents and a tokenizer; return the settings of the corpus."""

    def made(own: Tokenizer, documents=DOCUMENTS, config=None, **changes) -> Data:
        home = tmp_path / "corpus"
        home.mkdir(exist_ok=True)
        lines = [json.dumps({"text": document}) for document in documents]
        (home / "a.jsonl").write_text("\n".join(lines))
        (tmp_path / "own").mkdir(exist_ok=True)
        own.save(str(tmp_path / "own" / "tokenizer.json"))
        about = {"eos_token": "</s>"} if config is None else config
        (tmp_path / "own" / "tokenizer_config.json").write_text(json.dumps(about))
        data = Data(
            source="text",
            path=str(home),
            valid_fraction=0.5,
            tokenizer=str(tmp_path / "own" / "tokenizer.json"),
            cache=str(tmp_path / "cache"),
        )
        return replace(data, **changes)

    return made


def sized(vocab: int) -> GPT2Config:
    return GPT2Config(vocab=vocab, context=128, layers=1, embed=8, heads=1, head_dim=8, mlp=8)


def counted(data: Data) -> Counter:
    found = tokens(data)
    return Counter(np.concatenate([found.train, found.valid]).tolist())


@pytest.mark.parametrize("make", [byte_level, lambda: byte_level(False), unigram])
def test_the_names_of_special_tokens_in_a_document_are_text(corpus, make):
    data = corpus(make())
    own = tokenizer(data.tokenizer)
    found = counted(data)
    assert found[own.token_to_id("</s>")] == 4  # one for each document with text
    assert not found[own.token_to_id("<s>")] and not found[own.token_to_id("<|endoftext|>")]
    [label] = Encoder(data.tokenizer, sized(300)).tokens(["x</s>y<s>"])
    assert not {own.token_to_id(name) for name in NAMES} & {*label.tolist()}


def test_only_a_chat_template_makes_control_tokens(corpus):
    own = tokenizer(corpus(byte_level()).tokenizer)
    assert 1 not in own.encode("a</s>").ids
    with control_tokens(own):
        assert own.encode("a</s>").ids[-1] == 1
    assert 1 not in own.encode("a</s>").ids


def framed(own: Tokenizer, single: str) -> Tokenizer:
    named = [(name, own.token_to_id(name)) for name in NAMES if name in single]
    own.post_processor = processors.TemplateProcessing(single=single, special_tokens=named)
    return own


@pytest.mark.parametrize(
    ("own", "config", "bos", "expected"),
    [
        (byte_level(), {"eos_token": "</s>"}, "auto", ".. </s>"),
        (framed(byte_level(), "<s> $A"), {"eos_token": "</s>"}, "auto", "<s> .. </s>"),
        (framed(byte_level(), "<s> $A </s>"), {"eos_token": "</s>"}, "auto", "<s> .. </s>"),
        (framed(byte_level(), "<s> $A"), {"eos_token": "</s>"}, False, ".. </s>"),
        (
            byte_level(),
            {"eos_token": "</s>", "bos_token": "<s>", "add_bos_token": True},
            "auto",
            "<s> .. </s>",
        ),
        (byte_level(), {"eos_token": "</s>", "bos_token": "<s>"}, True, "<s> .. </s>"),
    ],
)
def test_documents_are_framed_as_the_files_of_the_tokenizer_say(corpus, own, config, bos, expected):
    data = corpus(own, config=config, bos=bos)
    found = counted(data)
    assert (found[0], found[1]) == (4 if expected.startswith("<s>") else 0, 4)
    assert f"4 documents, each: {expected}, " in report(data)[0]
    assert tokens(data).identity["frame"] == expected


def test_a_long_document_has_one_frame(corpus, monkeypatch):
    monkeypatch.setattr("train.data.formats.PIECE", 7)
    data = corpus(framed(byte_level(), "<s> $A"), ["a long document with words"] * 3)
    assert (counted(data)[0], counted(data)[1]) == (3, 3)


def test_a_begin_token_that_does_not_exist_is_refused(corpus):
    data = corpus(byte_level(), config={"eos_token": None, "bos_token": None}, bos=True)
    with pytest.raises(UserError, match="no token that begins texts"):
        tokens(data)
    assert tokens(overridden(data, ["bos=auto"])).train.size
    with pytest.raises(ValueError, match=r"set data\.bos=auto"):
        Data(bos=True)


def holes() -> Tokenizer:
    """A tokenizer of 259 tokens, whose largest id is 69,999."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {name: i for i, name in enumerate(NAMES)}
    vocab |= {c: 70_000 - 256 + i for i, c in enumerate(alphabet)}
    out = Tokenizer(models.BPE(vocab, []))
    out.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    out.add_special_tokens([AddedToken(name, special=True) for name in NAMES])
    return out


def test_the_largest_id_counts_and_not_the_number_of_tokens(corpus):
    data = corpus(holes())
    own = tokenizer(data.tokenizer)
    assert (own.get_vocab_size(), largest_vocab(own)) == (259, 70_000)
    found = tokens(data)
    assert found.train.dtype == np.uint32 and found.vocab == 70_000
    small, large = map(sized, (300, 70_000))
    with pytest.raises(UserError, match=r"raise model\.vocab to 70000"):
        sources(data, small)
    with pytest.raises(UserError, match=r"raise model\.vocab to 70000"):
        Encoder(data.tokenizer, small)
    with pytest.raises(UserError, match="largest id of the tokenizer is 69999"):
        fits(own, small)
    fits(own, large)
    assert sources(data, large)[0].sample(0, np.random.default_rng(0))[0].max() < 70_000
    assert Encoder(data.tokenizer, large).tokens(["a"])[0].dtype == np.uint32

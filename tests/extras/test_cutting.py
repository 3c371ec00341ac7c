"""Do the pieces of a long document have the tokens of the whole document?"""

import json
import random
from functools import cache, partial

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from train.data.text import Data
from train.extras.text import formats
from train.extras.text.reading import read_tokens
from train.extras.tokenizers import cutting
from train.extras.tokenizers.cutting import TextEncoder, cut_document

WORDS = ["the", "cat", "while", "1234567", "dogs,", "8", "naïve", "cafés", "ran;", "they're"]
WORDS += ["北京很大", "(fast)!"]


@cache
def long_text(size: int = 40_000) -> str:
    draw = random.Random(0)
    spaces = [" "] * 12 + ["  ", "\n", "\n\n", "\r\n", "\t", "   \n  ", ". ", "", ""]
    out = "\n\n"
    while len(out) < size:
        out += draw.choice(WORDS) + draw.choice(spaces)
    return out + " " * 900 + "x" * 900 + "1" * 900 + " the end  "


def trained(model, trainer, normalizer=None, before=None) -> Tokenizer:
    out = Tokenizer(model)
    if normalizer is not None:
        out.normalizer = normalizer
    if before is not None:
        out.pre_tokenizer = before
    out.train_from_iterator([long_text()[:8000]], trainer)
    return out


def bpe(**parts) -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, show_progress=False, initial_alphabet=alphabet, special_tokens=["</s>"]
    )
    return trained(models.BPE(), trainer, **parts)


def llama() -> Tokenizer:
    """A BPE of the whole text, with a space before each text, as in Llama 2."""
    text = long_text()[:8000].replace(" ", "\u2581")
    trainer = trainers.BpeTrainer(
        vocab_size=400, show_progress=False, initial_alphabet=sorted({*text})
    )
    own = trained(models.BPE(), trainer, before=pre_tokenizers.Metaspace())
    steps = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    about = json.loads(own.to_str()) | {"pre_tokenizer": None}
    own = Tokenizer.from_str(json.dumps(about))
    own.normalizer = normalizers.Sequence(steps)
    return own


def gemma() -> Tokenizer:
    own = llama()
    own.normalizer = normalizers.Replace(" ", "\u2581")
    return own


LLAMA3 = r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UNIGRAM = trainers.UnigramTrainer(
    vocab_size=300, show_progress=False, unk_token="<unk>", special_tokens=["<unk>", "</s>"]
)
WORDPIECE = trainers.WordPieceTrainer(
    vocab_size=300, show_progress=False, special_tokens=["[UNK]", "[SEP]"]
)
BYTES = partial(pre_tokenizers.ByteLevel, add_prefix_space=False)
SPLIT = [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), BYTES(use_regex=False)]
WORDS_FIRST = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
MADE = {
    "gpt-2": lambda: bpe(before=BYTES()),
    "roberta": lambda: bpe(before=pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "llama 3": lambda: bpe(before=pre_tokenizers.Sequence(SPLIT)),
    "llama 2": llama,
    "gemma": gemma,
    "bert": lambda: trained(models.WordPiece(unk_token="[UNK]"), WORDPIECE, normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer()),
    "t5": lambda: trained(models.Unigram(), UNIGRAM, before=pre_tokenizers.Metaspace()),
    "xlm": lambda: trained(models.Unigram(), UNIGRAM, normalizers.NFKC(), pre_tokenizers.Sequence(WORDS_FIRST)),
}  # fmt: skip


@pytest.mark.parametrize("name", MADE)
def test_the_pieces_have_the_tokens_of_the_whole_document(name, monkeypatch):
    monkeypatch.setattr("train.extras.text.corpus.PIECE", 1000)
    text, own = long_text(), MADE[name]()
    encode = TextEncoder(own)
    # The edges of the reader are arbitrary.
    pieces = list(cut_document(formats.cut_pieces(text), lambda: encode))
    assert "".join(pieces) == text and 10 < len(pieces) < 42
    begins = [True] + [False] * (len(pieces) - 1)
    found = [i for ids in encode(pieces, begins) for i in ids]
    assert found == own.encode(text, add_special_tokens=False).ids


def test_a_text_without_boundaries_is_cut_at_last(monkeypatch):
    monkeypatch.setattr("train.extras.text.corpus.PIECE", 1000)
    monkeypatch.setattr(cutting, "LONGEST", 5000)
    encode = TextEncoder(MADE["gpt-2"]())
    pieces = list(cut_document(formats.cut_pieces("x" * 20_000), lambda: encode))
    assert "".join(pieces) == "x" * 20_000 and max(map(len, pieces)) < 7000


def test_a_short_document_needs_no_tokenizer():
    assert list(cut_document(["ab", "c"], lambda: pytest.fail("it is short"))) == ["abc"]


@pytest.mark.parametrize("name", ["roberta", "llama 2"])
def test_a_corpus_has_the_tokens_of_its_documents(name, tmp_path, monkeypatch):
    monkeypatch.setattr("train.extras.text.corpus.PIECE", 1000)
    own = MADE[name]()
    own.add_special_tokens([AddedToken("</s>", special=True)])
    own.save(str(tmp_path / "tokenizer.json"))
    for name in ("train.txt", "valid.txt"):
        (tmp_path / name).write_text(long_text(), newline="")
    train, valid, file = (str(tmp_path / n) for n in ("train.txt", "valid.txt", "tokenizer.json"))
    data = Data("text", train, valid, tokenizer=file, cache=str(tmp_path / "cache"))
    found = read_tokens(data)
    own.encode_special_tokens = True
    whole = own.encode(long_text(), add_special_tokens=False).ids
    for part in (found.train, found.valid):
        np.testing.assert_array_equal(part, [*whole, own.token_to_id("</s>")])

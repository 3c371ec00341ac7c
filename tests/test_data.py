"""Corpora: every source becomes the same two files of tokens, once."""

import gzip
import lzma
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import runs
import tensorflow_datasets as tfds
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from train.data import tokens
from train.errors import UserError


@pytest.fixture
def text(tmp_path):
    """Settings that read a folder of 8 files; every 4th is held out."""
    return runs.experiment(tmp_path).data


# --- text to tokens ---


def test_bytes_of_a_folder_in_order_each_document_ended_by_zero(text):
    files = [Path(text.path, f"{i}.txt").read_bytes() + b"\0" for i in range(8)]
    found = tokens(text)
    assert found.train.tobytes() == b"".join(f for i, f in enumerate(files) if i % 4 != 3)
    assert found.valid.tobytes() == files[3] + files[7]
    assert found.vocab == 256


def test_compressed_files_and_other_files(tmp_path, text):
    folder = tmp_path / "mixed"
    (folder / "deeper").mkdir(parents=True)
    (folder / "0.txt").write_text("plain ä")
    (folder / "deeper" / "1.xz").write_bytes(lzma.compress(b"from xz"))
    (folder / "deeper" / "2.gz").write_bytes(gzip.compress(b"from gz"))
    (folder / "3.txt").write_bytes(b"no \xff utf-8")
    (folder / "notes.pdf").write_bytes(b"left out")
    found = tokens(replace(text, path=str(folder), valid_path=str(folder / "0.txt")))
    whole = "plain ä\0no \N{REPLACEMENT CHARACTER} utf-8\0from xz\0from gz\0"
    assert found.train.tobytes().decode() == whole
    assert found.valid.tobytes().decode() == "plain ä\0"


def test_one_long_file_is_held_out_in_pieces(tmp_path, text):
    (tmp_path / "long.txt").write_text("".join(str(i % 10) * (1 << 16) for i in range(8)))
    found = tokens(replace(text, path=str(tmp_path / "long.txt")))
    assert bytes(found.train[:: 1 << 16]) == b"012456" and bytes(found.valid[:: 1 << 16]) == b"37\0"


def test_the_standard_library_is_a_corpus(text, monkeypatch, tmp_path):
    library = tmp_path / "lib"
    for name in ("a.py", "json/b.py", "test/c.py", "site-packages/d.py", "json/tests/e.py", "f.txt"):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text(name)
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(library))
    found = tokens(replace(text, source="stdlib", valid_fraction=0.5))
    assert (found.train.tobytes(), found.valid.tobytes()) == (b"a.py\0", b"json/b.py\0")


# --- the cache ---


def test_the_cache_is_used_and_rebuilt_when_the_text_changes(text, monkeypatch):
    before = bytes(tokens(text).train)
    with monkeypatch.context() as patch:
        patch.setattr("train.data._tokenise", None)  # would fail if it was called
        assert bytes(tokens(text).train) == before
    file = Path(text.path, "0.txt")
    file.write_text(file.read_text().upper())  # as many bytes
    os.utime(file, ns=(0, 0))
    assert bytes(tokens(text).train)[:300] == before[:300].upper()


def test_a_tokenisation_that_fails_leaves_nothing_behind(text, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("train.data._bytes", full)
        with pytest.raises(OSError, match="No space left"):
            tokens(text)
    assert list(Path(text.cache).iterdir()) == []
    assert len(tokens(text).train) == 6 * 301


# --- tokenizers ---


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A byte-level BPE tokenizer with 300 tokens, as ``tokenizer.json`` and as ``vocab.json`` with ``merges.txt``."""
    folder = tmp_path_factory.mktemp("tokenizer")
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    lines = ["the cat sat on the mat", "the dog sat on the cat", "a mat, a cat, a dog"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    made.train_from_iterator(lines, trainer)
    made.save(str(folder / "tokenizer.json"))
    made.model.save(str(folder))
    return folder


def test_a_tokenizer_file_and_its_vocabulary_with_merges_agree(tmp_path, text, tokenizer):
    (tmp_path / "cats.txt").write_text("the cat sat")
    data = replace(text, path=str(tmp_path / "cats.txt"), valid_path=str(tmp_path / "cats.txt"))
    file, folder = (tokens(replace(data, tokenizer=str(t))) for t in (tokenizer / "tokenizer.json", tokenizer))
    made = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    assert file.vocab == folder.vocab == made.get_vocab_size() > 256
    assert file.train.dtype == np.uint16
    assert file.train.tolist() == folder.train.tolist()
    assert len(file.train) < len("the cat sat")  # merged
    assert made.decode(file.train[:-1].tolist()) == "the cat sat"
    assert file.train[-1] == made.token_to_id("<|endoftext|>")


def test_a_tokenizer_that_truncates_and_pads_does_neither_to_a_corpus(tmp_path, text, tokenizer):
    made = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    made.enable_truncation(5)
    made.enable_padding(length=900)
    made.save(str(tmp_path / "short.json"))
    whole, short = (replace(text, tokenizer=str(t)) for t in (tokenizer / "tokenizer.json", tmp_path / "short.json"))
    assert tokens(whole).train.tolist() == tokens(short).train.tolist()


def test_an_absent_tokenizer_is_named(text, tmp_path):
    (tmp_path / "vocab.json").write_text("{}")
    for name in (tmp_path / "absent.json", tmp_path):
        with pytest.raises(
            UserError, match=f"no tokenizer at {name} .*tokenizer.json, or a folder of vocab.json and merges"
        ):
            tokens(replace(text, tokenizer=str(name)))


# --- tensorflow-datasets ---


class TinyDocs(tfds.core.GeneratorBasedBuilder):
    """A corpus of 6 documents and 2 to validate on, written without TensorFlow."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = tfds.features.FeaturesDict({"text": tfds.features.Text(), "title": tfds.features.Text()})
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples("train", 6), "validation": self._generate_examples("valid", 2)}

    def _generate_examples(self, name, count):
        for i in range(count):
            yield i, {"text": f"{name} {i} ä", "title": str(i)}


@pytest.fixture
def docs(text, tmp_path):
    return replace(text, source="tfds", name="tiny_docs", path=str(tmp_path / "tfds"))


def test_a_tfds_corpus_is_prepared_and_read_without_tensorflow(docs):
    found = tokens(docs)
    documents = found.train.tobytes().decode().split("\0")
    assert sorted(documents) == ["", *(f"train {i} ä" for i in range(6))]
    assert sorted(found.valid.tobytes().decode().split("\0")) == ["", "valid 0 ä", "valid 1 ä"]
    other = tokens(replace(docs, field="title"))
    assert sorted(other.train.tobytes().decode().split("\0")) == ["", *map(str, range(6))]


def test_a_feature_that_a_tfds_corpus_lacks_is_refused_with_those_it_has(docs):
    with pytest.raises(UserError, match=r"tiny_docs has no feature 'body', only .*text.*title.*; set data.field"):
        tokens(replace(docs, field="body"))


def test_an_unknown_tfds_corpus_is_refused(docs):
    with pytest.raises(UserError, match="tensorflow-datasets cannot prepare 'no_such_docs'"):
        tokens(replace(docs, name="no_such_docs"))


# --- hold-out ---


def test_training_and_validation_share_no_document(text):
    train, valid = (set(bytes(getattr(tokens(text), part)).split(b"\0")) - {b""} for part in ("train", "valid"))
    assert len(train) == 6 and len(valid) == 2 and not train & valid

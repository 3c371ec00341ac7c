"""Corpora: every source gives the same windows for the same seed, shared out among processes, resumable."""

import gzip
import json
import lzma
import os
from dataclasses import replace
from pathlib import Path

import grain
import jax
import numpy as np
import pytest
import runs
import tensorflow_datasets as tfds
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from train.data import Windows, batches, tokens, validation
from train.errors import UserError

NUMBERS = np.arange(101)  # 25 windows of 4 + 1 tokens


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


# --- windows ---


def test_windows_predict_every_token_once():
    windows = Windows(NUMBERS, 4)
    assert len(windows) == 25
    assert [w.tolist() for w in (windows[0], windows[24])] == [[0, 1, 2, 3, 4], [96, 97, 98, 99, 100]]
    assert np.concatenate([windows[i][1:] for i in range(25)]).tolist() == list(range(1, 101))
    assert [len(Windows(np.arange(n), 4)) for n in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]


def firsts(stream, count: int) -> list[int]:
    return [int(row[0]) for _ in range(count) for row in next(stream)]


def test_every_window_once_an_epoch_in_another_order_each_time():
    seen = np.reshape(firsts(batches(NUMBERS, 4, 5, seed=1), 15), (3, 25))
    for epoch in seen:
        assert sorted(epoch) == list(range(0, 100, 4))
    assert len({tuple(epoch) for epoch in seen}) == 3


def test_the_seed_decides_the_order():
    first, again, other = (firsts(batches(NUMBERS, 4, 5, seed=s), 5) for s in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("processes", [2, 5])
def test_processes_share_out_the_batches_of_one(monkeypatch, processes):
    whole = np.reshape(firsts(batches(NUMBERS, 4, 10, seed=1), 5), (5, 10))
    parts = []
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    for index in range(processes):
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        parts.append(np.reshape(firsts(batches(NUMBERS, 4, 10 // processes, seed=1), 5), (5, -1)))
    for step in range(5):
        assert sorted(np.concatenate([p[step] for p in parts])) == sorted(whole[step])


@pytest.mark.parametrize("done", [0, 1, 4, 7])  # batches; an epoch is 5
def test_a_stream_goes_on_where_its_state_was_taken(done):
    stream, again = (batches(NUMBERS, 4, 5, seed=1) for _ in range(2))
    firsts(stream, done)
    again.set_state(json.loads(json.dumps(stream.get_state())))
    assert firsts(stream, 8) == firsts(again, 8)


def test_a_training_text_smaller_than_a_batch_is_refused():
    with pytest.raises(UserError, match="25 windows of 4 tokens, less than one batch of 26"):
        batches(NUMBERS, 4, 26, seed=1)


def test_validation_is_the_same_batches_spread_over_the_text():
    first, again = (validation(NUMBERS, 4, batch=3, count=4) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    starts = np.ravel(first)[::5]
    assert len(first) == 4 and len(set(starts)) == 12 and starts[0] == 0 and starts[-1] == 96
    assert len(validation(NUMBERS, 4, batch=3, count=100)) == 8  # as many as there are


def test_processes_share_out_validation(monkeypatch):
    whole = validation(NUMBERS, 4, batch=6, count=3)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    parts = []
    for index in range(2):
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        parts.append(validation(NUMBERS, 4, batch=6, count=3))
    np.testing.assert_array_equal(whole, np.concatenate(parts, axis=1))


def test_a_validation_text_smaller_than_a_batch_is_refused_with_the_way_out():
    with pytest.raises(UserError, match=r"less than one batch of 26; raise data.valid_fraction, or lower batch"):
        validation(NUMBERS, 4, batch=26, count=1)


def test_training_and_validation_share_no_document(text):
    train, valid = (set(bytes(getattr(tokens(text), part)).split(b"\0")) - {b""} for part in ("train", "valid"))
    assert len(train) == 6 and len(valid) == 2 and not train & valid


@pytest.mark.parametrize("seed", [0, 2**32 - 1])
def test_grain_takes_every_seed_that_an_experiment_may_have(seed):
    assert isinstance(batches(NUMBERS, 4, 5, seed), grain.DatasetIterator)

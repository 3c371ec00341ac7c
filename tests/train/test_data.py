"""Corpora: every data source is converted once, to the same two token files."""

import gzip
import lzma
import math
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import runs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import train.extras.text.corpus
from jaxgrow.checkpoints.io.checksums import seal
from train.common import files
from train.common.errors import UserError
from train.extras.cache import SUMS, cached_folder
from train.extras.splitting import exact_fraction, held_out
from train.extras.text import corpora as corpus
from train.extras.text import formats, tokenise
from train.extras.text.reading import read_tokens
from train.extras.tokenizers import tokenizer as tokenizers
from train.extras.tokenizers.cutting import TextEncoder, cut_document
from train.extras.tokenizers.loading import load_tokenizer as loaded_tokenizer


@pytest.fixture
def text(tmp_path):
    """Return settings that read a folder of 8 files and use every 4th for validation."""
    return runs.experiment(tmp_path).data


# --- text to tokens ---


def test_bytes_of_a_folder_in_order_each_document_ended_by_zero(text):
    files = [Path(text.path, f"{i}.txt").read_bytes() + b"\0" for i in range(8)]
    found = read_tokens(text)
    assert found.train.tobytes() == b"".join(f for i, f in enumerate(files) if i % 4 != 3)
    assert found.valid.tobytes() == files[3] + files[7]
    assert found.vocab == 256


def test_validation_files_below_the_training_folder_are_not_trained_on(tmp_path, text):
    folder = tmp_path / "both"
    (folder / "valid").mkdir(parents=True)
    for name in ("0.txt", "valid/1.txt", "valid/2.txt"):
        (folder / name).write_text(name)
    (tmp_path / "link").symlink_to(folder / "valid")
    for valid in (folder / "valid", tmp_path / "link"):
        found = read_tokens(replace(text, path=str(folder), valid_path=str(valid)))
        assert found.train.tobytes() == b"0.txt\0"
        assert found.valid.tobytes() == b"valid/1.txt\0valid/2.txt\0"
        # A cache of all files has another key.
        assert corpus.text_corpus(str(folder), str(valid), "text").key[1] == corpus.files_key(
            [folder / "0.txt"]
        )
    with pytest.raises(UserError, match=r"every file of data.path=.* is also a validation file"):
        read_tokens(replace(text, path=str(folder / "valid"), valid_path=str(folder)))
    same = read_tokens(replace(text, path=str(folder), valid_path=str(folder)))  # asked for
    assert same.train.tobytes() == same.valid.tobytes()


@pytest.mark.parametrize(("fraction", "share"), [(0.25, 25), (0.35, 35), (0.4, 40), (0.02, 2)])
def test_the_held_out_part_has_the_size_that_was_asked_for(fraction, share):
    held = [n for n in range(1, 101) if held_out(n, exact_fraction(fraction))]
    assert len(held) == share
    if fraction in (0.25, 0.02):  # every k-th
        assert held == list(range(round(1 / fraction), 101, round(1 / fraction)))
    gaps = np.diff(held)
    assert gaps.max() - gaps.min() <= 1  # evenly spaced


def test_nothing_is_multiplied_by_a_fraction_for_each_document(monkeypatch):
    """A product with a `Fraction` takes a hundred times as long as one of integers."""
    fractions = [exact_fraction(fraction) for fraction in (0.02, 0.3333, 0.5)]
    expected = []
    for f in fractions:
        expected.append([n for n in range(500) if math.floor(n * f) > math.floor((n - 1) * f)])
    for name in ("__mul__", "__rmul__", "__floor__"):
        monkeypatch.setattr(Fraction, name, None)
    assert [[n for n in range(500) if held_out(n, f)] for f in fractions] == expected


def test_one_long_file_is_held_out_in_pieces(tmp_path, text):
    (tmp_path / "long.txt").write_text("".join(str(i % 10) * (1 << 16) for i in range(8)))
    found = read_tokens(replace(text, path=str(tmp_path / "long.txt")))
    assert bytes(found.train[:: 1 << 16]) == b"012456" and bytes(found.valid[:: 1 << 16]) == b"37\0"


def test_the_standard_library_is_a_corpus(text, monkeypatch, tmp_path):
    library = tmp_path / "lib"
    others = ("test/c.py", "site-packages/d.py", "json/tests/e.py", "f.txt")
    for name in ("a.py", "json/b.py", *others):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text(name)
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(library))
    found = read_tokens(replace(text, source="stdlib", valid_fraction=0.5))
    assert (found.train.tobytes(), found.valid.tobytes()) == (b"a.py\0", b"json/b.py\0")


def as_it_always_was(
    files: list[bytes],
    encode: Callable[[str], list[int]],
    end: list[int],
    piece: int,
    every: int,
    cut: Callable = iter,
):
    """Return ``(train, valid)`` of a reference implementation that reads complete files.

    It reads one file after the other and cuts it into pieces. Every ``every``-th piece belongs
    to the validation set.
    """
    parts, count = [[], []], 0
    for file in files:
        text = file.decode("utf-8", errors="replace")
        pieces = list(cut(text[i : i + piece] for i in range(0, len(text), piece)))
        for i, one in enumerate(pieces):
            count += 1
            parts[count % every == 0] += encode(one) + (end if i == len(pieces) - 1 else [])
    return parts


def awkward(folder: Path) -> list[bytes]:
    """Write awkward files and return their contents in the order of the file names.

    They contain characters of one to four bytes, line ends of all kinds, invalid UTF-8, or
    nothing.
    """
    some = "a cat, the \r\n dog\rsat ä € 😀 \ufeff\n"
    files = [
        b"",
        *((some * n).encode() for n in (1, 40, 3)),
        b"the \xff\xe2\x82 cat \xf0\x9f",
        *[b"cat"] * 20,
        b"",
    ]
    files += [("😀" * n).encode()[: 4 * n - 1] for n in range(1, 8)] + [(some * 2000).encode()]
    folder.mkdir()
    for i, content in enumerate(files):
        (folder / f"{i:02}.gz").write_bytes(gzip.compress(content))
    return files


@pytest.fixture
def small_pieces(monkeypatch):
    for module, name, value in (
        (train.extras.text.corpus, "PIECE", 7),
        (tokenise, "BATCH", 50),
        (tokenise, "SHARD_BATCHES", 3),
    ):
        monkeypatch.setattr(module, name, value)


def test_bytes_are_what_whole_files_gave(tmp_path, text, small_pieces):
    files = awkward(tmp_path / "awkward")
    found = read_tokens(replace(text, path=str(tmp_path / "awkward"), valid_fraction=0.2))
    train, valid = as_it_always_was(files, lambda s: list(s.encode()), [0], 7, every=5)
    assert (found.train.tolist(), found.valid.tolist()) == (train, valid)


@pytest.mark.parametrize("processes", [False, True])
def test_a_tokenizer_gives_what_it_gave_file_by_file(
    tmp_path, text, small_pieces, tokenizer, monkeypatch, processes
):
    files, known = (
        awkward(tmp_path / "awkward"),
        Tokenizer.from_file(str(tokenizer / "tokenizer.json")),
    )
    monkeypatch.setattr("train.extras.text.tokenise.core_count", lambda: 1 + processes)
    found = read_tokens(
        replace(text, path=str(tmp_path / "awkward"), tokenizer=str(tokenizer), valid_fraction=0.2)
    )
    ends = [known.token_to_id("<|endoftext|>")]
    whole = partial(cut_document, encoder=lambda: TextEncoder(known))
    train, valid = as_it_always_was(
        files, lambda s: known.encode(s).ids, ends, 7, every=5, cut=whole
    )
    assert (found.train.tolist(), found.valid.tolist()) == (train, valid)


# --- changes are reported ---


@pytest.fixture
def odd(tmp_path, text):
    """Read files ``name -> bytes`` from a folder; return the tokens, summary and warnings."""

    def read(files: dict[str, bytes], **changes):
        folder = tmp_path / "odd"
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        found = read_tokens(replace(text, path=str(folder), valid_fraction=0.5, **changes))
        return found, found.report[0], found.report[1:]

    return read


def test_one_line_says_what_was_read_also_from_the_cache(odd, text):
    files = {
        "a.txt": b"one",
        "b.jsonl": b'{"text": "t\xc3\xa4"}\n{"text": ""}\n{"text": "x"}\n',
        "c.pdf": b"",
        "d.csv.bak": b"",
    }
    line = "data: 2 files, 3 documents, 7 bytes, 6 training and 4 validation tokens, "
    for _ in range(2):
        assert odd(files)[1:] == (line + "2 skipped files (2 of another format)", [])
    # The report is new, although the tokens are the same.
    assert odd({"e.pdf": b""})[1] == line + "3 skipped files (3 of another format)"
    assert read_tokens(text).report == [
        "data: 8 files, 8 documents, 2,400 bytes, 1,806 training and 602 validation tokens"
    ]


def test_hidden_files_and_symlinks_are_skipped_and_counted(odd, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "c.txt").write_text("not read")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "odd" / "gone.txt").symlink_to(tmp_path / "absent")
    (tmp_path / "odd" / "file.txt").symlink_to(tmp_path / "elsewhere" / "c.txt")
    found, summary, warnings = odd(
        {"._a.txt": b"no", ".d.txt": b"no", ".git/e.txt": b"no", "a.txt": b"a", "b.txt": b"b"}
    )
    assert (found.train.tobytes(), found.valid.tobytes()) == (b"a\0", b"b\0")
    assert summary.endswith(
        "6 skipped files (1 broken link or not a file, 3 hidden, 1 link out of the folder, 1 symlinked folder)"
    )
    assert [w.partition(";")[0] for w in warnings] == [
        f"WARNING: symlinked folders are not read, such as {tmp_path}/odd/link",
        f"WARNING: links out of the folder are not read, such as {tmp_path}/odd/file.txt",
    ]


@pytest.mark.parametrize(
    "compress", [bytes, gzip.compress, lzma.compress], ids=["plain", "gz", "xz"]
)
def test_utf_16_is_refused(odd, compress):
    name = {bytes: "a.txt", gzip.compress: "a.txt.gz", lzma.compress: "a.txt.xz"}[compress]
    with pytest.raises(
        UserError,
        match=f"{name} is UTF-16, not UTF-8; convert it, for example with iconv -f UTF-16 -t UTF-8",
    ):
        odd({name: compress("a text".encode("utf-16")), "b.txt": b"b"})


def test_latin_1_and_nul_are_replaced_counted_and_named(odd, tmp_path):
    found, summary, warnings = odd(
        {"a.txt": b"a", "b.txt": b"b\0b\0", "c.txt": "für".encode("latin1")}
    )
    assert found.train.tobytes().decode() == "a\0f\ufffdr\0"
    assert found.valid.tobytes().decode() == "b\ufffdb\ufffd\0"  # NUL separates documents.
    assert "3 documents" in summary and "3 replaced characters" in summary
    assert len(warnings) == 1
    assert (
        warnings[0].startswith("WARNING: 3 characters are U+FFFD")
        and f"is in {tmp_path}/odd/b.txt:" in warnings[0]
    )


def test_byte_order_marks_are_removed(odd, tmp_path):
    mark = b"\xef\xbb\xbf"
    files = {
        "a.txt": mark + b"a" + mark,
        "b.txt": b"b",
        "c.jsonl": mark + b'{"text": "c"}\n{"text": "d"}',
        "e.txt": mark,
    }
    found, summary, _ = odd(files)
    assert found.train.tobytes() == b"a" + mark + b"\0c\0"
    assert found.valid.tobytes() == b"b\0d\0"
    assert "4 files, 4 documents" in summary


def test_a_tokenizer_that_cannot_end_documents_is_a_warning(odd, tmp_path, tokenizer):
    Tokenizer(models.BPE({"a": 0, "b": 1}, [])).save(str(tmp_path / "endless.json"))
    found, _, warnings = odd(
        {"a.txt": b"a", "b.txt": b"b", "c.txt": b"a"}, tokenizer=str(tmp_path / "endless.json")
    )
    assert found.train.tolist() == [0, 0]
    assert len(warnings) == 1
    assert "has no token that ends a document (<|endoftext|>, " in warnings[0]
    assert odd({}, tokenizer=str(tokenizer))[2] == []


def test_a_tokenisation_that_was_killed_counts_everything(odd, encoded, small_pieces, monkeypatch):
    files = {f"{i:02}.txt": b"a \xff cat" * 9 for i in range(20)}
    whole = odd(files)[1:]
    encode, calls = tokenizers._bytes, iter(range(20))

    def killed(pieces, begins):
        if next(calls) == 19:
            raise KeyboardInterrupt
        return encode(pieces, begins)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tokenizers, "_bytes", killed)
        odd({"99.txt": b"other"})
    assert "21 files, 21 documents" in odd({})[1] and "180 replaced characters" in odd({})[1]
    assert "20 files, 20 documents" in whole[0]


# --- cost ---


@pytest.fixture
def encoded(monkeypatch) -> list[list[str]]:
    """Record the pieces of text that each following call encodes."""
    calls: list[list[str]] = []
    monkeypatch.setattr(
        "train.extras.tokenizers.tokenizer._bytes",
        lambda pieces, begins: calls.append(pieces) or ([[1] * len(p) for p in pieces], ((), (0,))),
    )
    return calls


def test_memory_holds_one_batch_of_documents(tmp_path, text, encoded, small_pieces, monkeypatch):
    """The memory use depends neither on the size of a file nor on the number of files."""
    read, ahead = [0], []
    pieces = formats.text_pieces

    def reading(path):
        for piece in pieces(path):
            read[0] += len(piece)
            ahead.append(read[0] - sum(len(p) for call in encoded for p in call))
            yield piece

    monkeypatch.setattr(formats, "text_pieces", reading)
    (tmp_path / "large.txt").write_text("a" * 5000)
    read_tokens(replace(text, path=str(tmp_path / "large.txt")))
    assert max(ahead) <= 50 + 2 * 7
    many = tmp_path / "many"
    many.mkdir()
    for i in range(100):
        (many / f"{i}.txt").write_text("cat")
    encoded.clear()
    read_tokens(replace(text, path=str(many)))
    assert [len(call) for call in encoded] == [17] * 5 + [15]  # about 50 characters per call


def test_a_killed_tokenisation_resumes_at_its_last_shard(text, encoded, small_pieces, monkeypatch):
    whole = read_tokens(text)
    expected = [part.tolist() for part in (whole.train, whole.valid, *whole.begins)]
    everything = len(encoded)
    encoded.clear()
    text = replace(text, cache=text.cache + "-other")

    class Killed(BaseException):
        pass

    def dies(pieces, begins):
        if len(encoded) == 10:
            raise Killed
        encoded.append(pieces)
        return [[1] * len(p) for p in pieces], ((), (0,))

    with monkeypatch.context() as patch:
        patch.setattr("train.extras.tokenizers.tokenizer._bytes", dies)
        with pytest.raises(Killed):
            read_tokens(text)
    encoded.clear()
    again = read_tokens(text)
    found = [part.tolist() for part in (again.train, again.valid, *again.begins)]
    assert found == expected
    assert len(encoded) == everything - 9  # three shards of three batches are reused
    names = {"train", "valid", "train.begins", "valid.begins", "about.json", "SUMS"}
    assert {p.name for p in Path(text.cache).glob("*/*")} == names


def test_tokens_of_a_text_that_changes_while_it_is_read_are_deleted(
    text, small_pieces, monkeypatch
):
    encode = tokenizers._bytes

    def changes(pieces, begins):
        Path(text.path, "7.txt").touch()
        return encode(pieces, begins)

    with monkeypatch.context() as patch:
        patch.setattr(tokenizers, "_bytes", changes)
        with pytest.raises(UserError, match="changed while it was read"):
            read_tokens(text)
    assert not [*Path(text.cache).iterdir()]


# --- the cache ---


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_who_may_read_the_cache_is_for_the_umask_to_say(text, umask):
    for file in Path(text.path).iterdir():
        file.chmod(0o666)  # the cache of a private text is private
    before = os.umask(umask)
    try:
        read_tokens(text)
    finally:
        os.umask(before)
    (folder,) = Path(text.cache).iterdir()
    assert folder.stat().st_mode & 0o777 == 0o777 & ~umask
    assert {p.stat().st_mode & 0o777 for p in folder.iterdir()} == {0o666 & ~umask}


def test_who_wants_what_another_makes_waits_for_it(tmp_path):
    begun, go, count = threading.Event(), threading.Event(), []

    def make(work):
        count.append(work)
        begun.set()
        go.wait()
        (work / "file").write_text("whole")

    threads = [
        threading.Thread(target=cached_folder, args=(tmp_path / "made", make)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    begun.wait()
    assert not (tmp_path / "made").exists()
    go.set()
    for thread in threads:
        thread.join()
    assert len(count) == 1 and sorted(p.name for p in tmp_path.glob("**/*")) == [
        "SUMS",
        "file",
        "made",
    ]


def test_what_came_to_be_between_the_look_and_the_lock_is_kept(tmp_path, monkeypatch):
    folder, lock = tmp_path / "made", files.fcntl.flock

    def late(*arguments):
        folder.mkdir()
        (folder / "file").write_text("another's")
        seal(folder, SUMS)
        lock(*arguments)

    monkeypatch.setattr(files.fcntl, "flock", late)
    assert cached_folder(folder, lambda _: pytest.fail("it is there")) == folder
    assert sorted(p.name for p in tmp_path.glob("**/*")) == ["SUMS", "file", "made"]


def test_who_waits_for_one_that_fails_makes_it(tmp_path):
    begun, go = threading.Event(), threading.Event()

    def fails(work):
        begun.set()
        go.wait()
        raise OSError(28, "No space left on device")

    def first():
        with pytest.raises(OSError, match="No space"):
            cached_folder(tmp_path / "made", fails)

    threads = [threading.Thread(target=first)]
    threads.append(
        threading.Thread(
            target=cached_folder, args=(tmp_path / "made", lambda work: (work / "file").touch())
        )
    )
    threads[0].start()
    begun.wait()
    threads[1].start()
    go.set()
    for thread in threads:
        thread.join()
    assert sorted(p.name for p in tmp_path.glob("**/*")) == ["SUMS", "file", "made"]


def test_the_cache_is_used_and_rebuilt_when_the_text_changes(text):
    def written():
        return {file: file.stat().st_ino for file in Path(text.cache).rglob("*")}

    before = bytes(read_tokens(text).train)
    files = written()
    assert bytes(read_tokens(text).train) == before
    assert files == written()
    file = Path(text.path, "0.txt")
    file.write_text(file.read_text().upper())  # the same number of bytes
    os.utime(file, ns=(0, 0))
    assert bytes(read_tokens(text).train)[:300] == before[:300].upper()


def test_a_tokenisation_that_fails_leaves_nothing_behind(text, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("train.extras.tokenizers.tokenizer._bytes", full)
        with pytest.raises(OSError, match="No space left"):
            read_tokens(text)
    assert list(Path(text.cache).iterdir()) == []
    assert len(read_tokens(text).train) == 6 * 301


# --- tokenizers ---


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Write a byte-level BPE tokenizer with 300 tokens in two formats.

    The formats are ``tokenizer.json``, and ``vocab.json`` with ``merges.txt``.
    """
    folder = tmp_path_factory.mktemp("tokenizer")
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    lines = ["the cat sat on the mat", "the dog sat on the cat", "a mat, a cat, a dog"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=alphabet,
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    made.train_from_iterator(lines, trainer)
    made.save(str(folder / "tokenizer.json"))
    made.model.save(str(folder))
    return folder


def test_a_tokenizer_file_and_its_vocabulary_with_merges_agree(tmp_path, text, tokenizer):
    (tmp_path / "cats.txt").write_text("the cat sat")
    data = replace(text, path=str(tmp_path / "cats.txt"), valid_path=str(tmp_path / "cats.txt"))
    file, folder = (
        read_tokens(replace(data, tokenizer=str(t)))
        for t in (tokenizer / "tokenizer.json", tokenizer)
    )
    made = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    assert file.vocab == folder.vocab == made.get_vocab_size() > 256
    assert file.train.dtype == np.uint16
    assert file.train.tolist() == folder.train.tolist()
    assert len(file.train) < len("the cat sat")  # The tokenizer merges characters.
    assert made.decode(file.train[:-1].tolist()) == "the cat sat"
    assert file.train[-1] == made.token_to_id("<|endoftext|>")


def test_a_vocabulary_with_merges_decodes_what_it_encodes(tokenizer):
    made = loaded_tokenizer(str(tokenizer))
    for text in ("Once upon a time", " two  spaces\n", "ä € 😀"):
        assert made.decode(made.encode(text).ids) == text


def test_a_corpus_is_never_truncated_or_padded(tmp_path, text, tokenizer):
    made = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    made.enable_truncation(5)
    made.enable_padding(length=900)
    made.save(str(tmp_path / "short.json"))
    whole, short = (
        replace(text, tokenizer=str(t))
        for t in (tokenizer / "tokenizer.json", tmp_path / "short.json")
    )
    assert read_tokens(whole).train.tolist() == read_tokens(short).train.tolist()


def test_an_absent_tokenizer_is_named(text, tmp_path):
    (tmp_path / "vocab.json").write_text("{}")
    for name in (tmp_path / "absent.json", tmp_path):
        with pytest.raises(
            UserError,
            match=f"no tokenizer at {name} .*tokenizer.json, or a folder of vocab.json and merges",
        ):
            read_tokens(replace(text, tokenizer=str(name)))


# --- files that are not text ---


@pytest.mark.parametrize(
    "name", ["docs.json", "docs.parquet.gz", "docs.tar.xz", "docs.tar.gz", "docs.zip", "docs"]
)
def test_formats_read_as_raw_bytes_are_refused(tmp_path, text, name):
    (tmp_path / "folder").mkdir()
    path = tmp_path / "folder" / name
    path.write_bytes(gzip.compress(b'{"text": "a"}') if name.endswith(".gz") else b'{"text": "a"}')
    with pytest.raises(
        UserError,
        match=rf"{path} does not have a supported format: .txt, .jsonl .*, .parquet and .arrow files are read",
    ):
        read_tokens(replace(text, path=str(path)))
    with pytest.raises(
        UserError, match=rf"there are no .txt, .* files, only {name.removeprefix('docs') or name}"
    ):
        read_tokens(replace(text, path=str(tmp_path / "folder")))


@pytest.mark.parametrize("compress", [gzip.compress, lzma.compress])
def test_a_compressed_file_with_one_wrong_byte_is_named(tmp_path, text, compress):
    suffix = {gzip.compress: "gz", lzma.compress: "xz"}[compress]
    path, whole = tmp_path / f"broken.{suffix}", compress(os.urandom(100).hex().encode() * 20)
    for place in range(len(whole) // 8, len(whole), len(whole) // 8):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        with pytest.raises(UserError, match=f"cannot read {path}: "):
            read_tokens(replace(text, path=str(path)))

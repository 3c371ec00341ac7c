"""Corpora: every data source is converted once, to the same two token files."""

import gzip
import lzma
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

    def read(path, valid):
        return read_tokens(replace(text, path=str(path), valid_path=str(valid)))

    for valid in (folder / "valid", tmp_path / "link"):
        found = read(folder, valid)
        assert found.train.tobytes() == b"0.txt\0"
        assert found.valid.tobytes() == b"valid/1.txt\0valid/2.txt\0"
        # A cache of all files has another key.
        key = corpus.text_corpus(str(folder), str(valid), "text").key[1]
        assert key == corpus.files_key([folder / "0.txt"])
    with pytest.raises(UserError, match=r"every file of data.path=.* is also a validation file"):
        read(folder / "valid", folder)
    same = read(folder, folder)  # asked for
    assert same.train.tobytes() == same.valid.tobytes()


@pytest.mark.parametrize(("fraction", "share"), [(0.25, 25), (0.35, 35), (0.4, 40), (0.02, 2)])
def test_the_held_out_part_has_the_size_that_was_asked_for(fraction, share, monkeypatch):
    exact = exact_fraction(fraction)
    # A product with a `Fraction` takes a hundred times as long as one of integers.
    for name in ("__mul__", "__rmul__", "__floor__"):
        monkeypatch.setattr(Fraction, name, None)
    held = [n for n in range(1, 101) if held_out(n, exact)]
    assert len(held) == share
    if fraction in (0.25, 0.02):  # every k-th
        assert held == list(range(round(1 / fraction), 101, round(1 / fraction)))
    gaps = np.diff(held)
    assert gaps.max() - gaps.min() <= 1  # evenly spaced


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
    files: list[bytes], encode: Callable[[str], list[int]], end: list[int], cut: Callable = iter
):
    """Return ``(train, valid)`` of a reference implementation that reads complete files.

    It cuts one file after the other into pieces of 7. Every fifth piece is a validation piece.
    """
    parts, count = [[], []], 0
    for file in files:
        text = file.decode("utf-8", errors="replace")
        pieces = list(cut(text[i : i + 7] for i in range(0, len(text), 7)))
        for i, one in enumerate(pieces):
            count += 1
            parts[count % 5 == 0] += encode(one) + (end if i == len(pieces) - 1 else [])
    return parts


@pytest.fixture
def awkward(tmp_path) -> tuple[str, list[bytes]]:
    """Return a folder of awkward files, and their contents in the order of the file names.

    They contain characters of one to four bytes, line ends of all kinds, invalid UTF-8, or
    nothing.
    """
    some = "a cat, the \r\n dog\rsat ä € 😀 \ufeff\n"
    files = [b"", *((some * n).encode() for n in (1, 40, 3))]
    files += [b"the \xff\xe2\x82 cat \xf0\x9f", *[b"cat"] * 20, b""]
    files += [("😀" * n).encode()[: 4 * n - 1] for n in range(1, 8)] + [(some * 2000).encode()]
    (tmp_path / "awkward").mkdir()
    for i, content in enumerate(files):
        (tmp_path / "awkward" / f"{i:02}.gz").write_bytes(gzip.compress(content))
    return str(tmp_path / "awkward"), files


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(train.extras.text.corpus, "PIECE", 7)
    monkeypatch.setattr(tokenise, "BATCH", 50)
    monkeypatch.setattr(tokenise, "SHARD_BATCHES", 3)


def test_bytes_are_what_whole_files_gave(text, small_pieces, awkward):
    found = read_tokens(replace(text, path=awkward[0], valid_fraction=0.2))
    train, valid = as_it_always_was(awkward[1], lambda s: list(s.encode()), [0])
    assert (found.train.tolist(), found.valid.tolist()) == (train, valid)


@pytest.mark.parametrize("processes", [False, True])
def test_a_tokenizer_gives_what_it_gave_file_by_file(
    text, small_pieces, tokenizer, monkeypatch, awkward, processes
):
    known = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    monkeypatch.setattr("train.extras.text.tokenise.core_count", lambda: 1 + processes)
    settings = {"path": awkward[0], "tokenizer": str(tokenizer), "valid_fraction": 0.2}
    found = read_tokens(replace(text, **settings))
    ends = [known.token_to_id("<|endoftext|>")]
    whole = partial(cut_document, encoder=lambda: TextEncoder(known))
    train, valid = as_it_always_was(awkward[1], lambda s: known.encode(s).ids, ends, cut=whole)
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
    lines = b'{"text": "t\xc3\xa4"}\n{"text": ""}\n{"text": "x"}\n'
    files = {"a.txt": b"one", "b.jsonl": lines, "c.pdf": b"", "d.csv.bak": b""}
    line = "data: 2 files, 3 documents, 7 bytes, 6 training and 4 validation tokens, "
    for _ in range(2):
        assert odd(files)[1:] == (line + "2 skipped files (2 of another format)", [])
    # The report is new, although the tokens are the same.
    assert odd({"e.pdf": b""})[1] == line + "3 skipped files (3 of another format)"
    assert read_tokens(text).report == [
        "data: 8 files, 8 documents, 2,400 bytes, 1,806 training and 602 validation tokens"
    ]


def test_hidden_files_and_symlinks_are_skipped_and_counted(odd, tmp_path):
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "odd"
    for made in (elsewhere, folder):
        made.mkdir()
    (elsewhere / "c.txt").write_text("not read")
    (folder / "link").symlink_to(elsewhere)
    (folder / "gone.txt").symlink_to(tmp_path / "absent")
    (folder / "file.txt").symlink_to(elsewhere / "c.txt")
    hidden = dict.fromkeys(("._a.txt", ".d.txt", ".git/e.txt"), b"no")
    found, summary, warnings = odd(hidden | {"a.txt": b"a", "b.txt": b"b"})
    assert (found.train.tobytes(), found.valid.tobytes()) == (b"a\0", b"b\0")
    assert summary.endswith(
        "6 skipped files (1 broken link or not a file, 3 hidden, 1 link out of the folder, 1 symlinked folder)"
    )
    assert [w.partition(";")[0] for w in warnings] == [
        f"WARNING: symlinked folders are not read, such as {folder}/link",
        f"WARNING: links out of the folder are not read, such as {folder}/file.txt",
    ]


@pytest.mark.parametrize(
    ("name", "compress"),
    [("a.txt", bytes), ("a.txt.gz", gzip.compress), ("a.txt.xz", lzma.compress)],
)
def test_utf_16_is_refused(odd, name, compress):
    says = f"{name} is UTF-16, not UTF-8; convert it, for example with iconv -f UTF-16 -t UTF-8"
    with pytest.raises(UserError, match=says):
        odd({name: compress("a text".encode("utf-16")), "b.txt": b"b"})


def test_latin_1_and_nul_are_replaced_counted_and_named(odd, tmp_path):
    files = {"a.txt": b"a", "b.txt": b"b\0b\0", "c.txt": "für".encode("latin1")}
    found, summary, (warning,) = odd(files)
    assert found.train.tobytes().decode() == "a\0f\ufffdr\0"
    assert found.valid.tobytes().decode() == "b\ufffdb\ufffd\0"  # NUL separates documents.
    assert "3 documents" in summary and "3 replaced characters" in summary
    assert warning.startswith("WARNING: 3 characters are U+FFFD")
    assert f"is in {tmp_path}/odd/b.txt:" in warning


def test_byte_order_marks_are_removed(odd):
    mark = b"\xef\xbb\xbf"
    lines = mark + b'{"text": "c"}\n{"text": "d"}'
    files = {"a.txt": mark + b"a" + mark, "b.txt": b"b", "c.jsonl": lines, "e.txt": mark}
    found, summary, _ = odd(files)
    assert found.train.tobytes() == b"a" + mark + b"\0c\0"
    assert found.valid.tobytes() == b"b\0d\0" and "4 files, 4 documents" in summary


def test_a_tokenizer_that_cannot_end_documents_is_a_warning(odd, tmp_path, tokenizer):
    endless = str(tmp_path / "endless.json")
    Tokenizer(models.BPE({"a": 0, "b": 1}, [])).save(endless)
    files = {"a.txt": b"a", "b.txt": b"b", "c.txt": b"a"}
    found, _, (warning,) = odd(files, tokenizer=endless)
    assert found.train.tolist() == [0, 0]
    assert "has no token that ends a document (<|endoftext|>, " in warning
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

    def encode(pieces, begins):
        calls.append(pieces)
        return [[1] * len(p) for p in pieces], ((), (0,))

    monkeypatch.setattr(tokenizers, "_bytes", encode)
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
    def values(corpus):
        return [part.tolist() for part in (corpus.train, corpus.valid, *corpus.begins)]

    expected, everything = values(read_tokens(text)), len(encoded)
    encoded.clear()
    text, encode = replace(text, cache=text.cache + "-other"), tokenizers._bytes

    def dies(*given):
        if len(encoded) == 10:
            raise runs.Killed
        return encode(*given)

    with monkeypatch.context() as patch, pytest.raises(runs.Killed):
        patch.setattr(tokenizers, "_bytes", dies)
        read_tokens(text)
    encoded.clear()
    assert values(read_tokens(text)) == expected
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

    monkeypatch.setattr(tokenizers, "_bytes", changes)
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


MADE = ["SUMS", "file", "made"]  # the names below a folder after the cache has been made


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.glob("**/*"))


def test_who_wants_what_another_makes_waits_for_it(tmp_path):
    begun, go, count = threading.Event(), threading.Event(), []

    def make(work):
        count.append(work)
        begun.set()
        go.wait()
        (work / "file").write_text("whole")

    make_it = partial(threading.Thread, target=cached_folder, args=(tmp_path / "made", make))
    threads = [make_it() for _ in range(4)]
    for thread in threads:
        thread.start()
    begun.wait()
    assert not (tmp_path / "made").exists()
    go.set()
    for thread in threads:
        thread.join()
    assert len(count) == 1 and names(tmp_path) == MADE


def test_what_came_to_be_between_the_look_and_the_lock_is_kept(tmp_path, monkeypatch):
    folder, lock = tmp_path / "made", files.fcntl.flock

    def late(*arguments):
        folder.mkdir()
        (folder / "file").write_text("another's")
        seal(folder, SUMS)
        lock(*arguments)

    monkeypatch.setattr(files.fcntl, "flock", late)
    assert cached_folder(folder, lambda _: pytest.fail("it is there")) == folder
    assert names(tmp_path) == MADE


def test_who_waits_for_one_that_fails_makes_it(tmp_path):
    begun, go = threading.Event(), threading.Event()

    def fails(work):
        begun.set()
        go.wait()
        raise OSError(28, "No space left on device")

    def first():
        with pytest.raises(OSError, match="No space"):
            cached_folder(tmp_path / "made", fails)

    def second():
        cached_folder(tmp_path / "made", lambda work: (work / "file").touch())

    threads = [threading.Thread(target=target) for target in (first, second)]
    threads[0].start()
    begun.wait()
    threads[1].start()
    go.set()
    for thread in threads:
        thread.join()
    assert names(tmp_path) == MADE


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

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(tokenizers, "_bytes", full)
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
    options = {"special_tokens": ["<|endoftext|>"], "show_progress": False}
    options["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=300, **options))
    made.save(str(folder / "tokenizer.json"))
    made.model.save(str(folder))
    return folder


def test_a_tokenizer_file_and_its_vocabulary_with_merges_agree(tmp_path, text, tokenizer):
    cats = tmp_path / "cats.txt"
    cats.write_text("the cat sat")
    data = replace(text, path=str(cats), valid_path=str(cats))
    path = tokenizer / "tokenizer.json"
    file, folder = (read_tokens(replace(data, tokenizer=str(t))) for t in (path, tokenizer))
    made = Tokenizer.from_file(str(path))
    assert file.vocab == folder.vocab == made.get_vocab_size() > 256
    assert file.train.dtype == np.uint16
    assert file.train.tolist() == folder.train.tolist()
    assert len(file.train) < len("the cat sat")  # The tokenizer merges characters.
    assert made.decode(file.train[:-1].tolist()) == "the cat sat"
    assert file.train[-1] == made.token_to_id("<|endoftext|>")
    both = loaded_tokenizer(str(tokenizer))
    for some in ("Once upon a time", " two  spaces\n", "ä € 😀"):
        assert both.decode(both.encode(some).ids) == some


def test_a_corpus_is_never_truncated_or_padded(tmp_path, text, tokenizer):
    path, short = str(tokenizer / "tokenizer.json"), str(tmp_path / "short.json")
    made = Tokenizer.from_file(path)
    made.enable_truncation(5)
    made.enable_padding(length=900)
    made.save(short)
    one, two = (read_tokens(replace(text, tokenizer=t)) for t in (path, short))
    assert one.train.tolist() == two.train.tolist()


def test_an_absent_tokenizer_is_named(text, tmp_path):
    (tmp_path / "vocab.json").write_text("{}")
    for name in (tmp_path / "absent.json", tmp_path):
        says = f"no tokenizer at {name} .*tokenizer.json, or a folder of vocab.json and merges"
        with pytest.raises(UserError, match=says):
            read_tokens(replace(text, tokenizer=str(name)))


# --- files that are not text ---


@pytest.mark.parametrize("ending", [".json", ".parquet.gz", ".tar.xz", ".tar.gz", ".zip", ""])
def test_formats_read_as_raw_bytes_are_refused(tmp_path, text, ending):
    (tmp_path / "folder").mkdir()
    path, line = tmp_path / "folder" / f"docs{ending}", b'{"text": "a"}'
    path.write_bytes(gzip.compress(line) if ending.endswith(".gz") else line)
    for at, says in (
        (path, rf"{path} does not have a supported format: .txt, .jsonl .*, .parquet and .arrow files are read"),
        (path.parent, rf"there are no .txt, .* files, only {ending or 'docs'}"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=says):
            read_tokens(replace(text, path=str(at)))


@pytest.mark.parametrize(("suffix", "compress"), [("gz", gzip.compress), ("xz", lzma.compress)])
def test_a_compressed_file_with_one_wrong_byte_is_named(tmp_path, text, suffix, compress):
    path, whole = tmp_path / f"broken.{suffix}", compress(os.urandom(100).hex().encode() * 20)
    for place in range(len(whole) // 8, len(whole), len(whole) // 8):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        with pytest.raises(UserError, match=f"cannot read {path}: "):
            read_tokens(replace(text, path=str(path)))

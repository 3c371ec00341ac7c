"""Corpora, tables and images of an attacker end in one line, within the limits."""

import bz2
import gzip
import io
import json
import lzma
import os
import resource
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from cases import cases
from limits import using_limits
from PIL import Image
from pyarrow import parquet

from jaxgrow.checkpoints.io.checksums import seal
from jaxgrow.untrusted import UntrustedError
from train.common.errors import UserError
from train.data.text import Data
from train.extras import cache
from train.extras.images import idx
from train.extras.images.images import Images, read_images
from train.extras.labelled import table
from train.extras.text import formats
from train.extras.text.corpora import dataset_shards, dataset_splits, text_corpus
from train.extras.text.reading import read_tokens
from train.extras.text.tfds import checked_info
from train.extras.tokenizers.loading import _byte_tokenizer

ROOT = Path(__file__).parents[2]
ZIPPED = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}


def read(path: Path, field: str = "text") -> str:
    return "".join(piece for document in formats.read_documents(path, field) for piece in document)


def saved(folder: Path, names: list | None = None) -> Path:
    """A folder as Hugging Face `datasets` saves it, whose state names these files."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = pa.table({"text": [f"document {i}" for i in range(100)], "label": list(range(100))})
    with pa.ipc.new_stream(str(folder / "data-0.arrow"), rows.schema) as out:
        out.write_table(rows)
    files = [{"filename": name} for name in names or ["data-0.arrow"]]
    (folder / "state.json").write_text(json.dumps({"_data_files": files}))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))
    return folder


# --- Arrow and Parquet ---


@pytest.mark.parametrize("offset", [-1, 1 << 20, 1 << 30, -(1 << 31)])
def test_patched_offsets_of_arrow_are_an_error(tmp_path, offset):
    file = saved(tmp_path / "d") / "data-0.arrow"
    content = file.read_bytes()
    # The offsets of the texts: 0, 10, 20 ..
    at = content.index(b"".join(n.to_bytes(4, "little") for n in (0, 10, 20)))
    for place in (at, at + 4, at + 4 * 50, at + 4 * 100):
        changed = bytearray(content)
        changed[place : place + 4] = offset.to_bytes(4, "little", signed=True)
        file.write_bytes(changed)
        for use in (lambda: read(file), lambda: [*table.file_rows(tmp_path / "d")]):
            with pytest.raises(UserError, match=f"cannot read {file}: "):
                use()


@pytest.mark.parametrize("sparser", [10, pytest.param(1, marks=pytest.mark.slow)])
def test_any_changed_byte_of_arrow_never_ends_the_process(tmp_path, sparser):
    file = saved(tmp_path / "d") / "data-0.arrow"
    content = file.read_bytes()
    # The schema is at the beginning, and damages the most.
    for place in (*range(0, 400, 7 * sparser), *range(400, len(content), 41 * sparser)):
        changed = bytearray(content)
        changed[place] ^= 0x80
        file.write_bytes(changed)
        for use in (lambda: read(file), lambda: [*table.file_rows(tmp_path / "d")]):
            try:
                use()
            except UserError as error:
                assert "\n" not in str(error)


def bomb(path: Path, texts: list[str], **how) -> Path:
    parquet.write_table(pa.table({"text": texts}), path, compression="zstd", **how)
    return path


@pytest.mark.parametrize("repeated", [1 << 19, 60 << 20], ids=["dictionary", "pages"])
def test_a_small_parquet_with_gigabytes_of_text_is_refused(tmp_path, repeated):
    count = (240 << 20) // repeated
    path = bomb(tmp_path / "bomb.parquet", ["x" * repeated] * count)
    assert path.stat().st_size < 200_000
    with using_limits(bytes=100 << 20):
        for use in (lambda: read(path), lambda: [*formats.table_records(path)]):
            with pytest.raises(UserError, match=r"bomb\.parquet.*--limits bytes="):
                use()


def test_the_sizes_that_a_parquet_declares_are_not_believed(tmp_path):
    """The index of a file says that a page is small; the page has 300 MB."""
    path = tmp_path / "lie.parquet"
    bomb(path, ["x" * (1 << 20)] * 300, use_dictionary=False)
    size = parquet.ParquetFile(path).metadata.row_group(0).column(0).total_uncompressed_size
    content = path.read_bytes()
    written, small = (
        b"".join((2 * n >> 7 * i & 127 | (i < 4) << 7).to_bytes(1, "little") for i in range(5))
        for n in (size, 1000)
    )
    index = content.rindex(b"schema") - 100
    path.write_bytes(content[:index] + content[index:].replace(written, small))
    assert parquet.ParquetFile(path).metadata.row_group(0).column(0).total_uncompressed_size == 1000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with using_limits(bytes=150 << 20):
        for use in (lambda: read(path), lambda: [*formats.table_records(path)]):
            with pytest.raises(UserError, match=r"lie\.parquet.*--limits bytes="):
                use()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_compressed_arrow_is_refused_before_it_is_decompressed(tmp_path, codec):
    path = saved(tmp_path / "d") / "data-0.arrow"
    rows = pa.table({"text": ["x" * (1 << 20)] * 120, "label": ["a"] * 120})
    how = pa.ipc.IpcWriteOptions(compression=codec)
    for dictionary in (False, True):
        if dictionary:
            rows = pa.table({"text": rows["text"].dictionary_encode(), "label": rows["label"]})
        with pa.ipc.new_stream(str(path), rows.schema, options=how) as out:
            out.write_table(rows)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with using_limits(bytes=100 << 20):
            for use in (lambda: read(path), lambda: [*table.file_rows(tmp_path / "d")]):
                with pytest.raises(UserError, match=r"data-0\.arrow.*--limits bytes="):
                    use()
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


def test_compressed_arrow_is_read(tmp_path):
    expected = [{"text": f"{i} " * 99, "n": [i], "d": "ab"[i % 2]} for i in range(500)]
    rows = pa.Table.from_pylist(expected)
    rows = rows.set_column(2, "d", rows["d"].dictionary_encode())
    for codec in (None, "zstd", "lz4"):
        how = pa.ipc.IpcWriteOptions(compression=codec)
        with pa.ipc.new_stream(str(tmp_path / "a.arrow"), rows.schema, options=how) as out:
            out.write_table(rows, 100)
        assert [row for _, row in formats.table_records(tmp_path / "a.arrow")] == expected


def test_rows_without_bytes_are_counted(tmp_path):
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"text": pa.nulls(2_000_000, pa.string())}), path)
    with using_limits(entries=1_000_000), pytest.raises(UserError, match="--limits entries="):
        list(formats.table_records(path))


# --- long lines ---

ALONE = """
import resource, sys
from pathlib import Path
from train.extras.text import formats
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    for document in formats.read_documents(Path(sys.argv[1]), "text"):
        for piece in document:
            pass
except Exception as error:
    print(type(error).__name__, error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("suffix", cases([".jsonl.xz", ".csv.gz", ".txt.gz"], [".jsonl.xz"], []))
def test_memory_does_not_grow_with_a_line(tmp_path, suffix):
    path = tmp_path / f"line{suffix}"
    head = {".jsonl": b'{"text": "', ".csv": b"text\n", ".txt": b""}[suffix[: suffix.rindex(".")]]
    fastest = partial(lzma.open, preset=0)
    with {".gz": gzip.open, ".xz": fastest}[path.suffix](path, "wb") as file:
        file.write(head)
        for _ in range(300):
            file.write(b"a" * (1 << 20))
    ran = subprocess.run(
        [sys.executable, "-c", ALONE, str(path)], capture_output=True, text=True, cwd=ROOT
    )
    *error, kilobytes = ran.stdout.splitlines()
    assert int(kilobytes) < 200_000, ran.stdout
    assert suffix == ".txt.gz" or "UserError" in error[0], ran.stderr


@pytest.mark.parametrize("zipped", ZIPPED)
def test_what_is_held_in_memory_has_a_limit(tmp_path, zipped):
    path = tmp_path / f"a.tsv{zipped}"
    path.write_bytes(ZIPPED[zipped](b"text\tlabel\n" + b"a" * (9 << 20)))
    with using_limits(bytes=8 << 20), pytest.raises(UserError, match="--limits bytes="):
        formats.read_text(path)
    assert len(formats.read_text(path)) > 9 << 20


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz", ".zst"])
@pytest.mark.parametrize("tokenizer", ["bytes", "tokenizer.json"])
def test_a_long_line_is_cut_and_has_the_tokens_of_the_whole_text(tmp_path, suffix, tokenizer):
    line = "".join(f"word {i} " for i in range(40_000))
    compress = {".zst": lambda content: pa.compress(content, "zstd", asbytes=True)} | ZIPPED
    for name in "ab":
        (tmp_path / f"{name}.txt{suffix}").write_bytes(compress.get(suffix, bytes)(line.encode()))
    if tokenizer != "bytes":
        _byte_tokenizer().save(str(tmp_path / tokenizer))
        tokenizer = str(tmp_path / tokenizer)
    data = Data("text", *(f"{tmp_path}/{name}.txt{suffix}" for name in "ab"), cache=str(tmp_path))
    with using_limits(record=1 << 14):
        found = read_tokens(replace(data, tokenizer=tokenizer))
    assert found.train.tobytes() == line.encode() + b"\0" == found.valid.tobytes()


def test_a_record_that_is_a_long_line_is_an_error_with_a_way_out(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "a" * 20_000}))
    with using_limits(record=1 << 14), pytest.raises(UserError, match="--limits record=32770"):
        read(path)
    with using_limits(record=32770):
        assert read(path) == "a" * 20_000


def test_a_dictionary_of_xz_has_a_limit(tmp_path):
    path = tmp_path / "a.txt.xz"
    large = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 28}]
    # Only the second stream has a large dictionary.
    path.write_bytes(lzma.compress(b"a") + lzma.compress(b"b", filters=large))
    assert read(path) == "ab"
    with using_limits(bytes=1 << 27), pytest.raises(UserError, match=r"--limits bytes=\d+"):
        read(path)


@pytest.mark.parametrize("zipped", [".gz", ".xz"])
def test_zeros_between_streams_are_skipped_at_once(tmp_path, zipped):
    path = tmp_path / f"a.txt{zipped}"
    compress = ZIPPED[zipped]
    path.write_bytes(compress(b"a") + bytes(200 << 20) + compress(b"b") + bytes(64))
    began = time.process_time()
    assert read(path) == "ab"
    assert time.process_time() - began < 10
    path.write_bytes(compress(b"a" * 99)[:-4])
    with pytest.raises(UserError, match="ended before its end"):
        read(path)


def test_a_stream_is_refused_when_it_decompresses_to_too_much(tmp_path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"a\n" * (6 << 20)))
    with using_limits(bytes=8 << 20), pytest.raises(UserError, match="decompresses to too much"):
        read(path)


# --- names ---


@pytest.mark.parametrize(
    "name", ["../x.arrow", "/etc/passwd", "..", "a/../../x.arrow", "", "\0", 3, None, ["a"]]
)
def test_names_in_a_state_stay_in_the_folder(tmp_path, name):
    saved(tmp_path)
    with pytest.raises(UserError):
        dataset_shards(saved(tmp_path / "d", [name]))


def test_a_link_in_a_saved_folder_leads_nowhere_else(tmp_path):
    outside = saved(tmp_path / "other") / "data-0.arrow"
    folder = saved(tmp_path / "d")
    (folder / "data-0.arrow").unlink()
    (folder / "data-0.arrow").symlink_to(outside)
    with pytest.raises(UserError, match="outside the folder"):
        dataset_shards(folder)


@pytest.mark.parametrize(
    "content",
    ['{"splits": ["../d"]}', '{"splits": "train"}', '{"splits": [3]}', "[]", "[" * 9999, "\udcff"],
)
def test_names_of_splits_stay_in_the_folder(tmp_path, content):
    (tmp_path / "dataset_dict.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(UserError):
        dataset_splits(tmp_path)


def test_a_pattern_does_not_lead_through_linked_folders(tmp_path):
    (tmp_path / "data" / "own").mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    for folder in (tmp_path / "data" / "own", tmp_path / "secret"):
        (folder / "a.txt").write_text(folder.name)
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "secret")
    found = text_corpus(str(tmp_path / "data" / "*" / "*.txt"), None, "text")
    assert [*map("".join, found.train)] == ["own"]
    assert found.skipped == {"symlinked folder": 1}


def test_a_fifo_or_a_device_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "a.txt")
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "b.txt").write_text("text")
    found = text_corpus(str(tmp_path), None, "text")
    assert found.skipped.keys() == {"broken link or not a file", "symlinked folder"}
    for name in ("a.txt", "zero.txt", "a.parquet", "a.arrow", "a.jsonl.gz"):
        if not (tmp_path / name).exists():
            os.mkfifo(tmp_path / name)
        with pytest.raises(UserError, match="is not a regular file"):
            read(tmp_path / name)


def test_folders_may_be_deep(tmp_path):
    here = os.getcwd()
    os.chdir(tmp_path)
    try:
        for _ in range(1500):
            os.mkdir("d")
            os.chdir("d")
    finally:
        os.chdir(here)
    try:
        with pytest.raises(UserError):
            text_corpus(str(tmp_path), None, "text")
    finally:  # pytest cannot delete it
        subprocess.run(["rm", "-rf", str(tmp_path / "d")], check=True)


# --- other formats ---


def test_a_head_of_idx_may_declare_anything(tmp_path):
    for axes, shape in ((3, (1 << 31, 1 << 31, 4)), (255, (0,)), (3, (1 << 31, 1, 1)), (0, ())):
        head = bytes([0, 0, 8, axes]) + b"".join(n.to_bytes(4, "big") for n in shape) + b"abc"
        for name in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"):
            (tmp_path / name).write_bytes(head)
        idx._array.cache_clear()
        with pytest.raises(UserError, match="is damaged or is not an idx file"):
            idx.read_idx(tmp_path, "train")


INFO = {"name": "d", "version": "1.0.0", "splits": [{"name": "train", "shardLengths": ["1"]}]}


@pytest.mark.parametrize("change", [
    {"name": "../../outside"},
    {"version": ".."},
    {"configName": "a/b"},
    {"splits": [{"name": "train", "filepathTemplate": "../{DATASET}-{SPLIT}"}]},
    {"splits": [3]},
    {"splits": {"a": 1}},
])  # fmt: skip
def test_the_description_of_a_prepared_dataset_names_no_other_file(tmp_path, change):
    (tmp_path / "dataset_info.json").write_text(json.dumps(INFO))
    (tmp_path / "features.json").write_text("{}")
    checked_info(tmp_path)
    (tmp_path / "dataset_info.json").write_text(json.dumps(INFO | change))
    with pytest.raises(UserError):
        checked_info(tmp_path)


def test_no_module_is_imported_by_the_name_of_a_feature(tmp_path):
    (tmp_path / "dataset_info.json").write_text(json.dumps(INFO))
    inner = {"features": {"a": {"pythonClassName": "evil.Feature"}}}
    (tmp_path / "features.json").write_text(json.dumps({"featuresDict": inner}))
    with pytest.raises(UserError, match="importing it could run code"):
        checked_info(tmp_path)


# --- the README of a dataset ---


@pytest.mark.parametrize("front", [
    # Each alias repeats everything before it.
    "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10) if i else 1}]" for i in range(12)) + "\nconfigs: [*a11]",
    "x: &x [" + "1," * 4000 + "1]\ny: &y [" + "{split: train, path: *x}," * 4000 + "*x]\nconfigs: [*y]",
    "configs: &a [*a]",
])  # fmt: skip
def test_aliases_in_a_readme_do_not_fill_the_memory(tmp_path, front):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "README.md").write_text(f"---\n{front}\n---\n")
    with (
        using_limits(record=1 << 20, bytes=300 << 20),
        pytest.raises(UserError, match=r"README\.md"),
    ):
        text_corpus(str(tmp_path), None, "text")


def test_the_patterns_of_a_readme_times_the_files_have_a_limit(tmp_path):
    paths = ", ".join(f'"{i}*"' for i in range(1000))
    front = f"configs: [{{data_files: [{{split: train, path: [{paths}]}}]}}]"
    (tmp_path / "README.md").write_text(f"---\n{front}\n---\n")
    for i in range(30):
        (tmp_path / f"{i}.txt").write_text("a")
    assert text_corpus(str(tmp_path), None, "text")
    with using_limits(entries=20_000), pytest.raises(UserError, match="--limits entries="):
        text_corpus(str(tmp_path), None, "text")


# --- the cache ---


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "a.txt").write_text("a text " * 100)
    (tmp_path / "b.txt").write_text("b text " * 100)
    return Data("text", str(tmp_path), valid_fraction=0.5, cache=str(tmp_path / ".cache"))


@pytest.mark.parametrize("name", ["train", "valid", "about.json"])
def test_changed_bytes_of_the_cache_are_made_again_with_a_note(corpus, capfd, name):
    before = read_tokens(corpus)
    expected = (before.train.tobytes(), before.valid.tobytes(), before.identity)
    (folder,) = Path(corpus.cache).iterdir()
    content = bytearray((folder / name).read_bytes())
    content[0] ^= 1
    (folder / name).write_bytes(content)
    after = read_tokens(corpus)
    assert (after.train.tobytes(), after.valid.tobytes(), after.identity) == expected
    assert f"is damaged ({name} has changed): it is made again" in capfd.readouterr().err
    assert [p.name.partition("-")[0] for p in Path(corpus.cache).iterdir()].count("damaged") == 1


def test_a_changed_corpus_is_read_again_with_a_note(corpus, capfd):
    read_tokens(corpus)
    assert "changed" not in capfd.readouterr().err
    os.utime(Path(corpus.path) / "a.txt", ns=(0, 0))
    read_tokens(corpus)
    assert "the data have changed since they were cached" in capfd.readouterr().err
    read_tokens(corpus)
    assert "changed" not in capfd.readouterr().err


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644])
def test_the_cache_of_a_private_text_is_private(corpus, mode):
    (Path(corpus.path) / "b.txt").chmod(mode)
    read_tokens(corpus)
    (folder,) = Path(corpus.cache).iterdir()
    assert folder.stat().st_mode & 0o077 == {0o600: 0, 0o640: 0o050, 0o644: 0o055}[mode]


@pytest.mark.parametrize("change", [
    {"tokens": "x"},
    {"tokens": [-1, 5]},
    {"tokens": [1]},
    {"tokens": None},
    {"read": 3},
    {"read": {}},
])  # fmt: skip
def test_a_wrong_description_in_a_cache_of_others_is_one_line(corpus, change):
    read_tokens(corpus)
    (folder,) = Path(corpus.cache).iterdir()
    about = json.loads((folder / "about.json").read_text())
    (folder / "about.json").write_text(json.dumps(about | change))
    (folder / "SUMS").unlink()
    seal(folder, cache.SUMS)
    with pytest.raises(UserError, match="is damaged") as error:
        read_tokens(corpus)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["lock", "link", "hard link", "folder"])
def test_no_link_in_the_cache_is_written_through(corpus, tmp_path, kind):
    read_tokens(corpus)
    (folder,) = Path(corpus.cache).iterdir()
    folder.rename(tmp_path / ".moved")
    work = folder.with_name(f".unfinished-{folder.name}")
    victim = tmp_path / ".victim"
    victim.mkdir()
    (victim / "train").write_text("precious")
    if kind == "folder":
        work.symlink_to(victim)
    else:
        (work / "new").mkdir(parents=True)
    if kind == "lock":
        folder.with_name(f".lock-{folder.name}").symlink_to(victim / "train")
    if kind == "link":
        (work / "new" / "train").symlink_to(victim / "train")
    if kind == "hard link":
        (work / "new" / "train").hardlink_to(victim / "train")
    with pytest.raises(UntrustedError if kind == "lock" else UserError, match="link"):
        read_tokens(corpus)
    assert (victim / "train").read_text() == "precious"


# --- images ---


def pictures(folder: Path) -> Path:
    for name in ("ant", "bee"):
        (folder / name).mkdir(parents=True)
        for i in range(4):
            Image.new("RGB", (8, 8), (i, 0, 0)).save(folder / name / f"{i}.png")
    return folder


def seen(path: Path, **more) -> Any:
    cache = path.parent / ".cache"
    return read_images(Images("folder", str(path), cache=str(cache), **more))


@pytest.mark.parametrize("kind", ["EPS", "GIF", "TIFF", "BMP", "WEBP", "PPM", "ICNS", "PCX"])
def test_only_png_and_jpeg_are_decoded(tmp_path, kind, monkeypatch):
    path = pictures(tmp_path / "tree")
    Image.new("RGB", (64, 64)).save(path / "ant" / "0.png", kind)
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(UserError, match=r"cannot read ant/0.png in .*cannot identify"):
        seen(path)


def scans(size: int, count: int) -> bytes:
    """A progressive JPEG of gray pixels, whose last scan is repeated."""
    out = io.BytesIO()
    Image.new("L", (size, size), 128).save(out, "JPEG", progressive=True)
    content = out.getvalue()
    last, end = content.rindex(b"\xff\xda"), content.rindex(b"\xff\xd9")
    return content[:end] + content[last:end] * count + content[end:]


def as_png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


@pytest.mark.parametrize(("content", "seconds", "says"), [
    (lambda: as_png(Image.new("1", (9500, 9500))), 10, r"cannot read ant/0\.\w+ in .*decompression bomb"),
    (lambda: scans(3000, 200), 10, r"ant/0\.\w+ in .*, with \d+ scans of .*--limits seconds=100"),
    (lambda: scans(500, 3000), 0.01, "takes more than 0"),
    (lambda: scans(64, 50), 10, ""),
], ids=["bomb", "scans", "time", "control"])  # fmt: skip
def test_an_image_that_needs_too_much_is_an_error(tmp_path, content, seconds, says):
    path = pictures(tmp_path / "tree")
    (path / "ant" / "0.jpg").write_bytes(content())
    with using_limits(seconds=seconds):
        if not says:
            assert len(seen(path, size=8).train) > 0
            return
        with pytest.raises(UserError, match=says):
            seen(path, size=8)


def test_small_files_of_large_images_do_not_fill_the_disk(tmp_path):
    path = pictures(tmp_path / "tree")
    for file in path.rglob("*.png"):
        Image.new("1", (1000, 1000)).save(file)
    with using_limits(bytes=1e7), pytest.raises(UntrustedError, match="the limit is 10,000,000"):
        seen(path)
    assert not [*tmp_path.rglob("pixels.npy")]


def as_tar(path: Path, out: Path, how: str, *members: tarfile.TarInfo) -> Path:
    with tarfile.open(out, how) as archive:
        archive.add(path, "tree")
        for member in members:
            archive.addfile(member)
    return out


def member(name: str, **fields: Any) -> tarfile.TarInfo:
    about = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(about, field, value)
    return about


@pytest.mark.parametrize("about", [
    member("tree/ant/x.png", type=tarfile.SYMTYPE, linkname="../../../../etc/passwd"),
    member("tree/ant/x.png", type=tarfile.LNKTYPE, linkname="tree/ant/y.png"),
    member("tree/ant/x.png", type=tarfile.SYMTYPE, linkname="x.png"),
    member("tree/ant/x.png", type=tarfile.CHRTYPE, devmajor=1, devminor=5),
    member("tree/ant/x.png", type=tarfile.FIFOTYPE),
    member("tree/ant/x.png", type=tarfile.DIRTYPE),
], ids=["link out", "lost link", "loop", "device", "FIFO", "folder"])  # fmt: skip
def test_members_of_a_tar_are_files(tmp_path, about):
    path = as_tar(pictures(tmp_path / "tree"), tmp_path / "a.tar", "w", about)
    with pytest.raises(UserError, match="cannot read "):
        seen(path)


def sparse(size: int) -> bytes:
    """A member of a tar with ``size`` bytes, none of which is stored."""
    about = member("tree/ant/x.png", type=tarfile.GNUTYPE_SPARSE, size=0)
    header = bytearray(about.tobuf(tarfile.GNU_FORMAT))
    header[386:410] = b"%011o\0%011o\0" % (size, 0)
    header[483:495] = b"%011o\0" % size
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


@pytest.mark.parametrize("size", [65 << 20, 1 << 32])
def test_sparse_members_are_refused(tmp_path, size):
    path = as_tar(pictures(tmp_path / "tree"), tmp_path / "a.tar", "w")
    content = path.read_bytes().rstrip(b"\0")
    content += b"\0" * (-len(content) % 512) + sparse(size) + b"\0" * 1024
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"x.png in .* --limits record="):
        seen(path)


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz"])
def test_a_compressed_tar_that_is_too_large_is_refused(tmp_path, kind):
    large = member("tree/zeros", size=6 << 20)
    path = tmp_path / f"a.tar.{kind}"
    with tarfile.open(path, f"w:{kind}") as archive:
        archive.addfile(large, io.BytesIO(bytes(6 << 20)))
        archive.add(pictures(tmp_path / "tree"), "tree")
    assert len(seen(path).train)
    shutil.rmtree(tmp_path / ".cache")
    with using_limits(bytes=1 << 20), pytest.raises(UserError, match="decompresses to too much"):
        seen(path)


def zipped(path: Path, out: Path, **extra: bytes) -> Path:
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(path.rglob("*.png")):
            archive.write(file, file.relative_to(path.parent))
        for name, content in extra.items():
            archive.writestr(f"tree/ant/{name}.png", content)
    return out


def test_members_of_a_zip_have_limits(tmp_path):
    path = zipped(pictures(tmp_path / "tree"), tmp_path / "a.zip", x=bytes(70 << 20))
    with pytest.raises(UserError, match=r"x.png in .* --limits record="):
        seen(path)


@pytest.mark.parametrize(("place", "value"), [(8, 1), (10, 99)], ids=["encrypted", "method"])
def test_encryption_and_methods_of_a_zip_are_one_line(tmp_path, place, value):
    path = zipped(pictures(tmp_path / "tree"), tmp_path / "a.zip")
    content = bytearray(path.read_bytes())
    at = content.index(b"PK\1\2")
    content[at + place] |= value
    content[place - 2] |= value
    path.write_bytes(content)
    with pytest.raises(UserError, match="cannot read ") as error:
        seen(path)
    assert "\n" not in str(error.value)

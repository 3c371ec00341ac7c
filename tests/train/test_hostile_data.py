"""Corpora, tables and images of an attacker end in one line, within the limits."""

import bz2
import gzip
import json
import lzma
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from jaxgrow.untrusted import using_limits
from train.common.errors import UserError
from train.data import formats, idx
from train.data.corpus import shards, splits, text
from train.data.labelled import table
from train.data.tfds import checked_info

ROOT = Path(__file__).parents[2]
ZIPPED = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}


def read(path: Path, field: str = "text") -> str:
    return "".join(piece for document in formats.documents(path, field) for piece in document)


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
        for use in (lambda: read(file), lambda: [*table.rows(tmp_path / "d")]):
            with pytest.raises(UserError, match=f"cannot read {file}: "):
                use()


def test_any_changed_byte_of_arrow_never_ends_the_process(tmp_path):
    file = saved(tmp_path / "d") / "data-0.arrow"
    content = file.read_bytes()
    for place in range(0, len(content), 7):
        changed = bytearray(content)
        changed[place] ^= 0x80
        file.write_bytes(changed)
        for use in (lambda: read(file), lambda: [*table.rows(tmp_path / "d")]):
            try:
                use()
            except UserError as error:
                assert "\n" not in str(error)


def bomb(path: Path, texts: list[str], **how) -> Path:
    parquet.write_table(pa.table({"text": texts}), path, compression="zstd", **how)
    return path


@pytest.mark.parametrize("repeated", [1 << 19, 60 << 20], ids=["dictionary", "pages"])
def test_a_small_parquet_with_gigabytes_of_text_is_refused(tmp_path, repeated):
    count = (600 << 20) // repeated
    path = bomb(tmp_path / "bomb.parquet", ["x" * repeated] * count)
    assert path.stat().st_size < 200_000
    with using_limits(bytes=100 << 20):
        for use in (lambda: read(path), lambda: [*formats.records(path)]):
            with pytest.raises(UserError, match=r"bomb\.parquet.*--limits bytes="):
                use()


def test_rows_without_bytes_are_counted(tmp_path):
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"text": pa.nulls(2_000_000, pa.string())}), path)
    with using_limits(entries=1_000_000), pytest.raises(UserError, match="--limits entries="):
        list(formats.records(path))


# --- long lines ---

ALONE = """
import resource, sys
from pathlib import Path
from train.data import formats
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    for document in formats.documents(Path(sys.argv[1]), "text"):
        for piece in document:
            pass
except Exception as error:
    print(type(error).__name__, error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".csv.gz", ".txt.gz", ".jsonl.xz"])
def test_memory_does_not_grow_with_a_line(tmp_path, suffix):
    path = tmp_path / f"line{suffix}"
    head = {".jsonl": b'{"text": "', ".csv": b"text\n", ".txt": b""}[suffix[: suffix.rindex(".")]]
    compress = {".gz": gzip.open, ".xz": lzma.open}[path.suffix]
    with compress(path, "wb") as file:
        file.write(head)
        for _ in range(600):
            file.write(b"a" * (1 << 20))
    ran = subprocess.run(
        [sys.executable, "-c", ALONE, str(path)], capture_output=True, text=True, cwd=ROOT
    )
    *error, kilobytes = ran.stdout.splitlines()
    assert int(kilobytes) < 400_000, ran.stdout
    assert suffix == ".txt.gz" or "UserError" in error[0], ran.stderr


@pytest.mark.parametrize("zipped", ZIPPED)
def test_what_is_held_in_memory_has_a_limit(tmp_path, zipped):
    path = tmp_path / f"a.tsv{zipped}"
    path.write_bytes(ZIPPED[zipped](b"text\tlabel\n" + b"a" * (9 << 20)))
    with using_limits(bytes=8 << 20), pytest.raises(UserError, match="--limits bytes="):
        formats.read_text(path)
    assert len(formats.read_text(path)) > 9 << 20


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
        shards(saved(tmp_path / "d", [name]))


def test_a_link_in_a_saved_folder_leads_nowhere_else(tmp_path):
    outside = saved(tmp_path / "other") / "data-0.arrow"
    folder = saved(tmp_path / "d")
    (folder / "data-0.arrow").unlink()
    (folder / "data-0.arrow").symlink_to(outside)
    with pytest.raises(UserError, match="outside the folder"):
        shards(folder)


@pytest.mark.parametrize(
    "content",
    ['{"splits": ["../d"]}', '{"splits": "train"}', '{"splits": [3]}', "[]", "[" * 9999, "\udcff"],
)
def test_names_of_splits_stay_in_the_folder(tmp_path, content):
    (tmp_path / "dataset_dict.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(UserError):
        splits(tmp_path)


def test_a_fifo_or_a_device_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "a.txt")
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "b.txt").write_text("text")
    found = text(str(tmp_path), None, "text")
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
            text(str(tmp_path), None, "text")
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
            idx.read(tmp_path, "train")


INFO = {"name": "d", "version": "1.0.0", "splits": [{"name": "train", "shardLengths": ["1"]}]}


@pytest.mark.parametrize(
    "change",
    [
        {"name": "../../outside"},
        {"version": ".."},
        {"configName": "a/b"},
        {"splits": [{"name": "train", "filepathTemplate": "../{DATASET}-{SPLIT}"}]},
        {"splits": [3]},
        {"splits": {"a": 1}},
    ],
)
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

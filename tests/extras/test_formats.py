"""The same documents give the same corpus in every file format, and errors name the faulty file."""

import csv
import gzip
import json
import lzma
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from train.common.errors import UserError
from train.data.text import Data
from train.extras.text import corpus, formats, tables, tokenise
from train.extras.text.corpora import corpus_files
from train.extras.text.reading import read_tokens

DOCUMENTS = ["the cat\r\n sat", "ä € 😀 \ufeff\n" * 5, None, "dog", "", " "]
DOCUMENTS += [f"{i} 'quoted\\\" \t" * i for i in range(9)]


def zstd(content: bytes) -> bytes:
    return pa.compress(content, codec="zstd", asbytes=True)


COMPRESS = {"gz": gzip.compress, "xz": lzma.compress, "zst": zstd}


def lines(documents: list[Any]) -> bytes:
    rows = (json.dumps({"id": i, "body": d}) + "\n" for i, d in enumerate(documents))
    return "".join(rows).encode()


def table(documents: list[Any], kind: Any = None) -> pa.Table:
    body = pa.array(documents, kind or pa.string())
    return pa.table({"id": list(range(len(documents))), "body": body})


def stream(path: Path, table: pa.Table) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)


# --- one corpus, in every format ---


def as_text(path: Path, documents: list[Any], compress=bytes, suffix: str = "txt") -> Path:
    path.mkdir()
    for i, document in enumerate(documents):
        (path / f"{i:02}.{suffix}").write_bytes(compress((document or "").encode()))
    return path


def as_lines(path: Path, documents: list[Any], suffix: str = "") -> Path:
    path = Path(f"{path}.jsonl{suffix}")
    path.write_bytes(COMPRESS.get(suffix[1:], bytes)(lines(documents)))
    return path


def as_parquet(path: Path, documents: list[Any], kind: Any = None) -> Path:
    path.mkdir()
    for name, part in (("0", documents[:4]), ("1", documents[4:])):
        pq.write_table(table(part, kind), path / f"{name}.parquet", row_group_size=3)
    return path


def as_dataset(path: Path, documents: list[Any]) -> Path:
    """Write a dataset as ``save_to_disk`` of Hugging Face `datasets` does, and a cache of ``map``."""
    path.mkdir()
    names = [f"data-{i:05}-of-00002.arrow" for i in range(2)]
    for name, part in zip(names, (documents[:9], documents[9:]), strict=True):
        stream(path / name, table(part))
    stream(path / "cache-1f.arrow", table(["of another"]))
    state = {"_data_files": [{"filename": n} for n in names], "_split": None}
    (path / "state.json").write_text(json.dumps(state))
    (path / "dataset_info.json").write_text(json.dumps({"features": {}}))
    return path


WRITTEN = {
    "text": as_text,
    **{f"text.{c}": lambda p, d, c=c: as_text(p, d, COMPRESS[c], f"txt.{c}") for c in COMPRESS},
    **{c: lambda p, d, c=c: as_text(p, d, COMPRESS[c], c) for c in COMPRESS},
    "jsonl": as_lines,
    **{f"jsonl.{c}": lambda p, d, c=c: as_lines(p, d, f".{c}") for c in COMPRESS},
    "json.gz": lambda p, d: as_lines(p, d, ".gz").rename(f"{p}.json.gz"),
    "parquet": as_parquet,
    "parquet of large strings": lambda p, d: as_parquet(p, d, pa.large_string()),
    "datasets": as_dataset,
}


@pytest.fixture
def settings(tmp_path) -> Callable[..., Data]:
    def of(path: Path, **other: Any) -> Data:
        given = {"path": str(path), "field": "body", "valid_fraction": 0.2}
        return Data("text", cache=str(tmp_path / "cache"), **given | other)

    return of


def test_the_same_documents_are_the_same_corpus_in_every_format(tmp_path, settings, monkeypatch):
    for module, name, size in ((corpus, "PIECE", 7), (tables, "_ROWS", 2), (tokenise, "BATCH", 50)):
        monkeypatch.setattr(module, name, size)
    written = {name: write(tmp_path / name, DOCUMENTS) for name, write in WRITTEN.items()}
    found = {name: read_tokens(settings(path)) for name, path in written.items()}
    whole = [part.tobytes().decode() for part in (found["text"].train, found["text"].valid)]
    assert sum(map(len, whole)) == sum(len(d) + 1 for d in DOCUMENTS if d)
    for name, tokens in found.items():
        assert tokens.identity == found["text"].identity | {"name": tokens.identity["name"]}, name


def as_csv(path: Path, documents: list[Any]) -> Path:
    path = Path(f"{path}.csv")
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        rows = csv.writer(file)
        rows.writerows([["id", "body"], *([i, document] for i, document in enumerate(documents))])
    return path


def test_markdown_python_and_csv_are_read_if_named(tmp_path, settings):
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    (mixed / "a.txt").write_text("the text " * 9)
    rows = as_csv(mixed / "rows", ['the\r\n, "cat"', "", "x" * 200_000, "dog"])
    for name in ("notes.md", "code.py"):
        (mixed / name).write_bytes(b"import this\r\n" * 9)
    (tmp_path / "code.txt").write_bytes(b"import this\r\n" * 9)
    assert list(corpus_files(mixed)) == [mixed / "a.txt"]
    source = formats.text_pieces(tmp_path / "code.txt")
    assert "".join(source) == "import this\r\n" * 9
    for name in ("notes.md", "code.py"):
        [document] = formats.read_documents(mixed / name, "body")
        assert "".join(document) == "import this\r\n" * 9
    found = ["".join(document) for document in formats.read_documents(rows, "body")]
    assert found == ['the\r\n, "cat"', "", "x" * 200_000, "dog"]
    (mixed / "a.txt").unlink()
    says = r"only .csv, .md, .py; .md, .py, .csv files are read if data.path names the file"
    with pytest.raises(UserError, match=says):
        read_tokens(settings(mixed))
    says = r"rows.csv, line 3 has no field 'text', only id, body; set data.field"
    with pytest.raises(UserError, match=says):
        list(formats.read_documents(rows, "text"))
    rows.write_text("id,body\n1,a\n2,b,c\n")
    says = r"rows.csv, line 3 has 3 cells, but the first line names 2 columns"
    with pytest.raises(UserError, match=says):
        list(formats.read_documents(rows, "body"))


def test_a_folder_of_formats_is_read_in_name_order(tmp_path, settings):
    (tmp_path / "b.txt").write_text("second")
    as_lines(tmp_path / "a", ["first"])
    as_dataset(tmp_path / "c", ["third", None, "fourth"])
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "valid.txt").write_text("not trained on")
    (tmp_path / "d.pdf").write_bytes(b"left out")
    data = settings(tmp_path, valid_path=str(tmp_path / "e" / "valid.txt"))
    assert read_tokens(data).train.tobytes() == b"first\0second\0third\0fourth\0"


def test_files_are_found_in_the_order_that_runs_began_with(tmp_path):
    names = ("b/1.txt", "b.txt", "a/c/2.xz", "a/c.txt", "a c.txt", "A.txt", "a/é.txt", "a/c/d/3.gz")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "gone.txt").symlink_to(tmp_path / "absent")
    (tmp_path / "link.txt").symlink_to(tmp_path / "b.txt")
    assert list(corpus_files(tmp_path)) == sorted(p for p in tmp_path.rglob("*") if p.is_file())


def test_what_is_no_unicode_is_replaced(tmp_path, settings):
    path = tmp_path / "a.jsonl"
    path.write_bytes(rb'{"body": "\ud83d\ude00 \ud83d \u00e4"}' + b'\n\n{"body": "a\xff"}')
    expected = "😀 \ufffd ä\0a\ufffd\0"
    assert read_tokens(settings(path, valid_path=str(path))).train.tobytes().decode() == expected


def test_another_field_is_another_corpus(tmp_path, settings):
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "a", "title": "b"}')
    data = settings(path, valid_path=str(path))
    found = [read_tokens(replace(data, field=field)).train.tobytes() for field in ("body", "title")]
    assert found == [b"a\0", b"b\0"]


# --- DatasetDict ---


def as_splits(path: Path, *names: str, lost: str = "") -> Path:
    """Write a `DatasetDict` whose splits contain their own name as document, twice."""
    path.mkdir()
    (path / "dataset_dict.json").write_text(json.dumps({"splits": names}))
    for name in {*names} - {lost}:
        as_dataset(path / name, [name] * 2)
    return path


@pytest.mark.parametrize(("names", "judge"), [
    (["test", "train", "validation"], b"validation\0"), (["test", "train"], b"test\0"),
])  # fmt: skip
def test_a_dataset_dict_brings_what_judges(tmp_path, settings, names, judge):
    path, own = as_splits(tmp_path / "d", *names), tmp_path / "own.txt"
    found = read_tokens(settings(path))
    assert (found.train.tobytes(), found.valid.tobytes()) == (b"train\0" * 2, judge * 2)
    own.write_text("own")
    assert read_tokens(settings(path, valid_path=str(own))).valid.tobytes() == b"own\0"


def test_of_a_dataset_dict_without_it_some_is_held_out(tmp_path, settings):
    found = read_tokens(settings(as_splits(tmp_path / "d", "train"), valid_fraction=0.5))
    assert (found.train.tobytes(), found.valid.tobytes()) == (b"train\0", b"train\0")


# --- faulty files ---


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def without(path: Path, name: str) -> Path:
    (path / name).unlink()
    return path


WRONG: dict[str, tuple[Callable[[Path], Path], str]] = {
    "no such field": (lambda p: written(p / "a.jsonl", b'{"body": "a"}\n{"text": "b", "id": 1}\n'),
     "{}/a.jsonl, line 2 has no field 'body', only text, id; set data.field"),
    "no field at all": (lambda p: written(p / "a.jsonl", b"{}"), "{}/a.jsonl, line 1 has no field 'body', only none;"),
    "a damaged line": (lambda p: written(p / "a.jsonl.gz", gzip.compress(b'{"body": "a"}\n\n{"body": "b\n')),
     "{}/a.jsonl.gz, line 3 is not JSON (Invalid control character at); correct or delete the line"),
    "100,000 brackets": (lambda p: written(p / "a.jsonl", b"[" * 100_000), "{}/a.jsonl, line 1 is not JSON ("),
    "a quote that is not closed": (lambda p: written(p / "a.csv", b'id,body\n1,"a\nb"\n\n2,"c\n3,d\n'),
     "{}/a.csv, line 5: unexpected end of data; correct the quotes of the row"),
    "one array": (lambda p: written(p / "a.jsonl", b'[{"body": "a"}]'),
     "{}/a.jsonl, line 1 is a list, but should be a JSON object"),
    "a number": (lambda p: written(p / "a.jsonl", b'{"body": "a"}\n{"body": 0}'),
     "{}/a.jsonl, line 2: field 'body' is not text, but 0; set data.field"),
    "no such column": (lambda p: (as_lines(p / "a", ["a"]) and written_table(p / "b.parquet", {"text": ["a"], "id": [1]})),
     "{}/b.parquet, row 1 has no field 'body', only text, id; set data.field"),
    "a column of numbers": (lambda p: written_table(p / "a.parquet", {"body": [1]}),
     "{}/a.parquet, row 1: field 'body' is not text, but 1; set data.field"),
    "a dataset without that column": (lambda p: as_columns(as_dataset(p / "d", ["a"]), {"text": ["a"]}),
     "{}/d/data-00001-of-00002.arrow, row 1 has no field 'body', only text; set data.field"),
    "no Parquet": (lambda p: written(p / "a.parquet", b"no Parquet at all"), "cannot read {}/a.parquet: "),
    "an empty Parquet file": (lambda p: written(p / "a.parquet", b""), "cannot read {}/a.parquet: "),
    "an empty file of lines": (lambda p: written(p / "a.jsonl", b""), "the train text of the corpus is empty"),
    "blank lines": (lambda p: written(p / "a.jsonl", b"\n \n"), "the train text of the corpus is empty"),
    "nulls alone": (lambda p: as_lines(p / "a", [None, ""]), "the train text of the corpus is empty"),
    "no rows": (lambda p: as_parquet(p / "a", []), "the train text of the corpus is empty"),
    "a lost shard": (lambda p: without(as_dataset(p / "d", ["a"]), "data-00001-of-00002.arrow"),
     "{}/d lacks 1 of 2 files that its state.json names, such as data-00001-of-00002.arrow"),
    "a damaged state": (lambda p: written(as_dataset(p / "d", ["a"]) / "state.json", b"{}").parent,
     "{}/d/state.json has no list '_data_files'; save the dataset again with save_to_disk"),
    "no training split": (lambda p: as_splits(p / "d", "en", "de"),
     "{}/d has no split 'train', only en, de; name the folder of one in data.path"),
    "a lost split": (lambda p: as_splits(p / "d", "train", "test", lost="test"),
     "there is no corpus at {}/d/test; set data.path to a file or a folder of text"),
    "splits within a folder": (lambda p: as_splits(p / "d", "train", "test").parent,
     "{}/d holds the splits train, test; name the folder of one"),
    "another suffix": (
        lambda p: written(p / "a.json", b'{"body": "a"}'),
        "{}/a.json does not have a supported format: .txt, .jsonl (both also .gz, .xz or .zst), .json.gz, .parquet and "
        ".arrow files are read, and .md, .py, .csv files; rename a .json with one object per line to .jsonl",
    ),
}  # fmt: skip


def written_table(path: Path, columns: dict[str, list[Any]]) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def as_columns(path: Path, columns: dict[str, list[Any]]) -> Path:
    stream(path / "data-00001-of-00002.arrow", pa.table(columns))
    return path


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_line_that_names_where(tmp_path, settings, case):
    make, says = WRONG[case]
    with pytest.raises(UserError) as refused:
        read_tokens(settings(make(tmp_path)))
    assert str(refused.value).startswith(says.replace("{}", str(tmp_path)))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.xz", "a.zst", "a.parquet", "a.arrow"])
def test_a_file_that_was_cut_off_is_named(tmp_path, settings, name):
    """A file that is cut off at any place is an error; its readable part is not used."""
    path, documents = tmp_path / name, [f"{i * i} cats" for i in range(300)]
    if name == "a.parquet":
        pq.write_table(table(documents), path)
    elif name == "a.arrow":
        stream(path, table(documents))
    else:
        path.write_bytes(COMPRESS[name.rpartition(".")[2]](lines(documents)))
    whole = path.read_bytes()
    for kept in range(1, len(whole), len(whole) // 7):
        path.write_bytes(whole[:kept])
        with pytest.raises(UserError, match=f"cannot read {path}: "):
            read_tokens(settings(path))

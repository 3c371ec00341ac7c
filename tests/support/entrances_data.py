"""The entrances of `train/data/`: which of them are attacked, and why are the others safe?

`entrances` describes the table.
"""

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from entrances import NAMES, Row, Subject, attacked, ours
from pictures import tree
from pyarrow import parquet

from train.extras.images.images import Images, read_images
from train.extras.images.processor import normal_in
from train.extras.labelled import glue, squad, table
from train.extras.labelled.task import Labelled
from train.extras.text import corpora as corpus
from train.extras.text import formats
from train.extras.text.tfds import dataset_records
from train.extras.text.token_files import FIELD, checked_ids, token_formats
from train.extras.tokenizers import loading as tokenizers
from train.extras.tokenizers.loading import _byte_tokenizer
from train.extras.tokenizers.special import copy_special_files, special_tokens

_PARENT = {"link of the parent": "the user names this folder"}
_NAMED = _PARENT | {"link": "the user names this file"}
_BY_REGULAR = "the checked name is opened by `read_regular`"
_CACHE = "the folder of the cache, whose entries `cache._check_own` checked"


def _saved(folder: Path) -> Path:
    """The state of a folder as Hugging Face `datasets` saves it."""
    data = folder / "data"
    data.mkdir()
    rows = pa.table({"text": ["a text", "another"], "label": [0, 1]})
    with pa.ipc.new_stream(str(data / "a.arrow"), rows.schema) as out:
        out.write_table(rows)
    (data / "dataset_info.json").write_text('{"features": {}}')
    (data / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')
    return data / "state.json"


def _name_shard(folder: Path, name: str) -> None:
    state = {"_data_files": [{"filename": name}]}
    (folder / "data" / "state.json").write_text(json.dumps(state))


def _parquet(folder: Path) -> Path:
    (folder / "data").mkdir()
    file = folder / "data" / "a.parquet"
    parquet.write_table(pa.table({"text": ["a text", "another"]}), file)
    return file


def _beside(folder: Path) -> Path:
    """The settings beside a tokenizer."""
    (folder / "model").mkdir()
    (folder / "model" / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    return folder / "model" / "tokenizer_config.json"


def _written(name: str, content: str | bytes) -> Callable[[Path], Path]:
    """A function that makes a folder with one file."""

    def make(folder: Path) -> Path:
        file = folder / "data" / name
        file.parent.mkdir()
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        return file

    return make


def _table(name: str) -> Callable[[Path], Any]:
    def use(folder: Path) -> Any:
        return table.read_labelled_table(Labelled("table", str(folder / "data" / name)))

    return use


def _glue(folder: Path) -> Path:
    (folder / "data").mkdir()
    for split in ("train", "dev"):
        (folder / "data" / f"{split}.tsv").write_text(
            "a\t1\t\tA sentence.\nb\t0\t*\tAnother one.\n"
        )
    return folder / "data" / "train.tsv"


def _read_glue(folder: Path) -> Any:
    task = glue.TASKS["cola"]
    file = folder / "data" / "train.tsv"
    return glue.is_unnamed(task, file), glue.glue_rows(task, folder / "data")


def _squad(folder: Path) -> Path:
    (folder / "data").mkdir()
    question = {"id": "1", "question": "Who?", "answers": [{"text": "Ada", "answer_start": 0}]}
    articles = [{"paragraphs": [{"context": "Ada wrote.", "qas": [question]}]}]
    for split in ("train", "dev"):
        (folder / "data" / f"{split}-v1.1.json").write_text(json.dumps({"data": articles}))
    return folder / "data" / "train-v1.1.json"


def _npy(folder: Path) -> Path:
    (folder / "data").mkdir()
    np.save(folder / "data" / "a.npy", np.arange(100, dtype=np.uint16))
    return folder / "data" / "a.npy"


def _raw(folder: Path) -> Path:
    """The format of llm.c."""
    head = np.zeros(256, "<i4")
    head[:3] = 20240520, 1, 100
    return _written("a.bin", head.tobytes() + np.arange(100, dtype="<u2").tobytes())(folder)


def _read_ids(folder: Path) -> int:
    """The number of token ids in a folder, whose largest is known."""
    found = corpus.text_corpus(str(folder / "data"), None, FIELD, formats=token_formats("uint16"))
    pieces = [piece for document in found.train for piece in document]
    checked_ids(np.concatenate([np.asarray(piece).reshape(-1) for piece in pieces]), 100, "it")
    return len(pieces)


def _readme(folder: Path) -> Path:
    file = _written("a.txt", "a text")(folder)
    (file.parent / "b.txt").write_text("another")
    _name_split(folder, "b.txt")
    return file.parent / "README.md"


def _name_split(folder: Path, name: str) -> None:
    files = [{"split": "train", "path": "a.txt"}, {"split": "test", "path": name}]
    front = json.dumps([{"data_files": files}])
    content = f"---\nconfigs: {front}\n---\nAbout the data.\n"
    (folder / "data" / "README.md").write_text(content)


def _splits(folder: Path) -> Path:
    for split in ("train", "validation"):
        _saved(folder)
        (folder / "data").rename(folder / split)
    (folder / "data").mkdir()
    for split in ("train", "validation"):
        (folder / split).rename(folder / "data" / split)
    _name_folder(folder, "validation")
    return folder / "data" / "dataset_dict.json"


def _name_folder(folder: Path, name: str) -> None:
    (folder / "data" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", name]}))


def _read_text(folder: Path) -> Any:
    found = corpus.text_corpus(str(folder / "data"), None, "text")
    parts = (found.train, found.valid or ())
    return ["".join(document) for part in parts for document in part]


SUBJECTS: dict[str, Subject] = {
    "state of a dataset": Subject(_saved, lambda folder: list(table.file_rows(folder / "data")), _name_shard, _PARENT),
    "Parquet": Subject(_parquet, lambda folder: list(formats.table_records(folder / "data" / "a.parquet")), None, _NAMED),
    "settings of a tokenizer": Subject(_beside, lambda folder: special_tokens(_byte_tokenizer(), folder / "model"), None,
        {**_PARENT, "missing": "the file is optional"}),
}  # fmt: skip


def _run(folder: Path) -> Path:
    normal = {"mean": [0.5], "std": [0.5]}
    file = _written("config.json", json.dumps({"data": {"Images": normal}}))(folder)
    (file.parent / "result.json").write_text("{}")
    return file


def _copied(folder: Path) -> None:
    (folder.parent / "out").mkdir()
    copy_special_files(folder / "data", folder.parent / "out")


def _tokenizer(folder: Path) -> Path:
    file = folder / "tokenizer.json"
    _byte_tokenizer().save(str(file))
    return file


def _vocab(folder: Path) -> Path:
    vocab = {name: i for i, name in enumerate(("a", "b", "c", "ab", "abc"))}
    file = _written("vocab.json", json.dumps(vocab))(folder)
    (file.parent / "merges.txt").write_text("#version: 0.2\na b\nab c\n")
    return file


def _read_vocab(folder: Path) -> Any:
    return tokenizers.load_tokenizer(str(folder / "data"))


def _archive(kind: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        tree(folder / "data", 1)
        return Path(shutil.make_archive(str(folder / "a"), kind, folder / "data"))

    return make


def _read_images(name: str) -> Callable[[Path], Any]:
    def use(folder: Path) -> Any:
        cache = str(folder.parent / "out" / "cache")
        return read_images(Images("folder", str(folder / name), cache=cache))

    return use


def _tfds(folder: Path) -> Path:
    import tensorflow_datasets as tfds
    from prepared import prepare

    features, rows = {"text": tfds.features.Text()}, [{"text": "a text"}]
    builder = prepare(folder / "data", "docs", features, {"train": rows})
    return Path(builder.data_dir) / "dataset_info.json"


def _name_set(folder: Path, name: str) -> None:
    file = folder / "data" / "docs" / "1.0.0" / "dataset_info.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"name": name}))


SUBJECTS |= {
    "processor of images": Subject(_written("preprocessor_config.json", '{"image_mean": [0.5], "image_std": [0.25]}'),
        lambda folder: normal_in(folder / "data"), None, {**_PARENT, "missing": "the file is optional"}),
    "config of a run": Subject(_run, lambda folder: normal_in(folder / "data"), None,
        {**_PARENT, "missing": "the model cannot be loaded without it"}),
    "settings to copy": Subject(_written("generation_config.json", '{"eos_token_id": 1}'), _copied, None,
        {**_PARENT, "missing": "the file is optional"}),
    "tokenizer": Subject(_tokenizer, lambda folder: tokenizers.load_tokenizer(str(folder / "tokenizer.json")), None, _NAMED),
    "vocabulary": Subject(_vocab, _read_vocab, None, _PARENT),
    "merges": Subject(lambda folder: _vocab(folder).with_name("merges.txt"), _read_vocab, None,
        {**_PARENT, "truncated": "any number of merges is valid"}),
    "images": Subject(lambda folder: tree(folder / "data", 1) / "ant" / "0.png", _read_images("data"), None,
        {"missing": "a folder has no list of its images"}),
    "tar of images": Subject(_archive("tar"), _read_images("a.tar"), None,
        {**_NAMED, "too large": "nothing is read after the end of the archive"}),
    "zip of images": Subject(_archive("zip"), _read_images("a.zip"), None, _NAMED),
    "prepared dataset": Subject(_tfds,
        lambda folder: list(dataset_records(next((folder / "data").glob("docs/1.0.0/*.array_record*")))), _name_set,
        _PARENT, needs="tensorflow_datasets"),
    "CSV": Subject(_written("a.csv", 'text,label\na text,0\nanother,1\n"one\nmore",0\n'), _table("a.csv"), None, _NAMED),
    "compressed TSV": Subject(_written("a.tsv.gz", gzip.compress(b"text\tlabel\na text\t0\nanother\t1\n", mtime=0)),
        _table("a.tsv.gz"), None, _NAMED),
    "JSON lines": Subject(_written("a.jsonl", '{"text": "a", "label": 0}\n{"text": "b", "label": 1}\n'), _table("a.jsonl"),
        None, _NAMED),
    "GLUE": Subject(_glue, _read_glue, None, _NAMED),
    "SQuAD": Subject(_squad, lambda folder: squad.squad_questions(squad.TASKS["squad1"], folder / "data"), None, _NAMED),
    "array of token ids": Subject(_npy, _read_ids, None, _PARENT),
    "raw token ids": Subject(_raw, _read_ids, None, _PARENT),
    "README of a dataset": Subject(_readme, _read_text, _name_split,
        {**_PARENT, **dict.fromkeys(("missing", "wrong type", "nested", "pickle"), "no list of splits"),
        "too large": "only its first part is read", **dict.fromkeys(NAMES,
        "a pattern that only selects among the files of the folder")}),
    "splits of a dataset": Subject(_splits, _read_text, _name_folder,
        {**_PARENT, "missing": "the folders are then read by their names",
        **dict.fromkeys(("escape", "surrogate"), "a split of another name is not read")}),
}  # fmt: skip

ROWS: dict[str, dict[str, Row]] = {
    "train/extras/text/tfds.py": {"dataset_records checked_info": attacked("prepared dataset")},
    "train/extras/labelled/encoding.py": {
        "write_framing": ours("it writes a file with a random name, which it creates, and renames it")},
    "train/extras/tokenizers/loading.py": {
        "save_tokenizer": ours("it writes a file with a random name, which it creates, and renames it"),
        "load_tokenizer": attacked("tokenizer", "vocabulary", "merges")},
    "train/extras/images/images.py": {"_mapped_images _decode _new_array": ours(_CACHE),
        "_folder_images _opened": attacked("images", "tar of images", "zip of images"),
        "_Records.__getitem__": ours("the bytes of an image are in memory; no file is opened"),
        "_in_folder": attacked("images"), "_in_tar": attacked("tar of images"),
        "_is_zip": attacked("tar of images", "zip of images"), "_in_zip": attacked("zip of images")},
    "train/extras/labelled/glue.py": {"is_unnamed rows_of": attacked("GLUE")},
    "train/extras/labelled/squad.py": {"_articles": attacked("SQuAD")},
    "train/extras/text/named_splits.py": {"_readme_front_matter": attacked("README of a dataset")},
    "train/extras/images/processor.py": {"normal_in": attacked("processor of images", "config of a run"),
        "_read": attacked("processor of images")},
    "train/extras/tokenizers/special.py": {"copy_special_files": attacked("settings to copy"),
        "_template": ours(_BY_REGULAR)},
    "train/extras/text/reading.py": {"read_tokens _make _mapped_tokens": ours(_CACHE)},
    "train/extras/cache.py": {"block_digest": ours("a file of a cache, whose name `damage` has checked"),
        "cached_folder _working_folder": ours(_CACHE)},
    "train/extras/text/tokenise.py": {"tokenise_corpus": ours(_CACHE)},
    "train/extras/text/corpus.py": {"stdlib_corpus": ours("the source files of Python itself")},
    "train/extras/text/corpora.py": {"dataset_shards": attacked("state of a dataset"),
        "dataset_splits": attacked("splits of a dataset")},
    "train/extras/decoding.py": {"in_folder json_object read_regular": attacked("state of a dataset",
        "settings of a tokenizer"), "open_data": attacked("CSV", "compressed TSV", "JSON lines", "GLUE", "SQuAD")},
    "train/extras/text/formats.py": {"_lines": attacked("CSV", "JSON lines")},
    "train/extras/text/tables.py": {"table_rows": attacked("Parquet", "state of a dataset")},
    "train/extras/text/token_files.py": {"_npy": attacked("array of token ids"), "_raw": attacked("raw token ids")},
    "train/extras/bounded_child.py": {
        "_try_tokenizer": ours("the files that `bounded.check_tokenizer` checked; the process has limits"),
        "_yaml_as_json": ours("the text that `named_splits` has read; the process has limits"),
        "_table": ours("the file that `tables.table_rows` checked; the process has limits")},
    "train/extras/bounded.py": {"check_tokenizer": attacked("tokenizer", "vocabulary", "merges")},
}  # fmt: skip

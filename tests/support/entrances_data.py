"""The entrances of `train/data/`: which of them are attacked, and why are the others safe?

`entrances` describes the table.
"""

import json
from pathlib import Path

import pyarrow as pa
from entrances import Row, Subject, attacked, ours, todo
from pyarrow import parquet

from train.data import formats
from train.data.labelled import table
from train.data.special import special_tokens
from train.data.text import _byte_tokenizer

_NAMED = {
    "link": "the user names this file",
    "link of the parent": "the user names this folder",
}


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


SUBJECTS: dict[str, Subject] = {
    "state of a dataset": Subject(
        _saved,
        lambda folder: list(table.rows(folder / "data")),
        _name_shard,
        {"link of the parent": _NAMED["link of the parent"]},
    ),
    "Parquet": Subject(
        _parquet,
        lambda folder: list(formats.records(folder / "data" / "a.parquet")),
        None,
        _NAMED,
    ),
    "settings of a tokenizer": Subject(
        _beside,
        lambda folder: special_tokens(_byte_tokenizer(), folder / "model"),
        None,
        {"missing": "the file is optional", "link of the parent": _NAMED["link of the parent"]},
    ),
}

ROWS: dict[str, Row] = {
    "train/data/formats.py::_of_tfds": todo("no subject yet"),
    "train/data/images.py::_mapped": todo("no subject yet"),
    "train/data/images.py::_folder": todo("no subject yet"),
    "train/data/images.py::_contents": todo("no subject yet"),
    "train/data/images.py::_decode": ours(
        "the working folder of the cache, whose entries `cache._check_own` checked"
    ),
    "train/data/images.py::_write_pixels": ours(
        "the working folder of the cache, whose entries `cache._check_own` checked"
    ),
    "train/data/images.py::_narrow": ours(
        "the working folder of the cache, whose entries `cache._check_own` checked"
    ),
    "train/data/images.py::_opened": todo("no subject yet"),
    "train/data/labelled/glue.py::is_unnamed": todo("no subject yet"),
    "train/data/labelled/glue.py::rows_of": todo("no subject yet"),
    "train/data/labelled/squad.py::_articles": todo("no subject yet"),
    "train/data/labelled/table.py::_lines": todo("no subject yet"),
    "train/data/labelled/table.py::_objects": todo("no subject yet"),
    "train/data/named_splits.py::_front_matter": todo("no subject yet"),
    "train/data/processor.py::normal_in": todo("no subject yet"),
    "train/data/processor.py::_read": todo("no subject yet"),
    "train/data/special.py::copied": todo("no subject yet"),
    "train/data/text.py::tokens": todo("no subject yet"),
    "train/data/text.py::_mapped": todo("no subject yet"),
    "train/data/text.py::_make": ours(
        "the working folder of the cache, whose entries `cache._check_own` checked"
    ),
    "train/data/text.py::tokenizer": todo("no subject yet"),
    "train/data/tokenise.py::tokenise": ours(
        "the working folder of the cache, whose entries `cache._check_own` checked"
    ),
    "train/data/corpus.py::shards": attacked("state of a dataset"),
    "train/data/corpus.py::splits": todo("no subject yet"),
    "train/data/decoding.py::<module>": todo("no subject yet"),
    "train/data/decoding.py::in_folder": attacked("state of a dataset", "settings of a tokenizer"),
    "train/data/decoding.py::json_object": attacked(
        "state of a dataset", "settings of a tokenizer"
    ),
    "train/data/decoding.py::opened": todo("no subject yet"),
    "train/data/decoding.py::read_regular": attacked(
        "state of a dataset", "settings of a tokenizer"
    ),
    "train/data/formats.py::_parquet_batches": attacked("Parquet"),
    "train/data/formats.py::_stream": attacked("state of a dataset"),
    "train/data/token_files.py::_npy": todo("no subject yet"),
    "train/data/token_files.py::_raw": todo("no subject yet"),
    "train/data/tfds.py::checked_info": todo("no subject yet"),
    "train/data/cache.py::_make": ours(
        "the working folder of the cache, whose entries `cache._check_own` checked"
    ),
    "train/data/cache.py::_remove": ours(
        "the working folder of the cache, whose entries `cache._check_own` checked"
    ),
    "train/data/images.py::_Records.__getitem__": todo("no subject yet"),
    "train/data/images.py::_in_tar": todo("no subject yet"),
    "train/data/images.py::_in_zip": todo("no subject yet"),
    "train/data/bounded_child.py::_tried": todo("no subject yet"),
    "train/data/trial.py::check_tokenizer": todo("no subject yet"),
}

# The number of rows that still need a subject.
OPEN = 28

"""Which columns hold text or token ids, and are token ids read as they are?"""

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from limits import using_limits

from jaxgrow.models import GPT2Config
from train.common.errors import UserError
from train.data.text import Data
from train.extras.text import formats
from train.extras.text.mixing import training_text
from train.extras.text.reading import read_tokens

TEXTS = ["one", None, "zwei ä", "three"]


@pytest.fixture
def read(tmp_path):
    """Read a file as a corpus with its own validation text."""
    (tmp_path / "own.npy").write_bytes(b"")
    np.save(tmp_path / "own.npy", np.array([1], np.int64))
    (tmp_path / "own.txt").write_text("own")

    def made(path, source: Any = "text", **changes):
        own = tmp_path / ("own.txt" if source == "text" else "own.npy")
        cache = str(tmp_path / "cache")
        return read_tokens(Data(source, str(path), str(own), cache=cache, **changes)).train

    return made


def written(path, column, name="text"):
    table = pa.table({"id": [0] * len(column), name: column})
    if path.suffix == ".parquet":
        pq.write_table(table, path)
        return path
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    return path


RAW = [None if t is None else t.encode() for t in TEXTS]
COLUMNS = {
    "dictionary": (pa.array(TEXTS).dictionary_encode(), "text"),
    "dictionary of bytes": (pa.array(RAW).dictionary_encode(), "text"),
    "binary": (pa.array(RAW, pa.binary()), "text"),
    "large binary": (pa.array(RAW, pa.large_binary()), "text"),
    "large string": (pa.array(TEXTS, pa.large_string()), "text"),
    "list": (pa.array([["one"], None, ["zwei ä"], ["three", None]]), "text"),
    "record": (pa.array([t and {"a": {"b": t}} for t in TEXTS]), "text.a.b"),
    "a name with dots": (pa.array([t and {"a.b": t} for t in TEXTS]), "text.a.b"),
    "messages": (pa.array([t and [{"role": "user", "content": t}] for t in TEXTS]), "text.content"),
    "nested dictionary": (pa.StructArray.from_arrays([pa.array(TEXTS).dictionary_encode()], ["a"]), "text.a"),
}  # fmt: skip


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize("name", COLUMNS)
def test_columns_of_text_are_read(read, tmp_path, name, suffix):
    column, field = COLUMNS[name]
    found = read(written(tmp_path / f"a.{suffix}", column), field=field)
    assert found.tobytes().decode() == "one\0zwei ä\0three\0"


def test_the_texts_of_a_list_are_lines_of_one_document(read, tmp_path):
    path = written(tmp_path / "a.parquet", pa.array([["a", "", "b"], ["c"]]))
    assert read(path).tobytes() == b"a\nb\0c\0"
    lines = '{"m": [{"t": "a"}, {"t": "b"}]}\n{"m.t": "c"}\n{"m": {"t": null}}\n'
    (tmp_path / "a.jsonl").write_text(lines)
    assert read(tmp_path / "a.jsonl", field="m.t").tobytes() == b"a\nb\0c\0"


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize("nest", ["list", "record", "binary"])
def test_strings_that_are_not_utf_8_are_replaced(read, tmp_path, nest, suffix):
    texts = pa.array([b"a\xff", b"b"])
    column: Any = {
        "binary": pa.ListArray.from_arrays([0, 1, 2], texts),
        "list": pa.ListArray.from_arrays([0, 1, 2], texts.view(pa.string())),
        "record": pa.StructArray.from_arrays([texts.view(pa.string())], ["a"]),
    }[nest]
    path = written(tmp_path / f"a.{suffix}", column)
    found = read(path, field="text.a" if nest == "record" else "text")
    assert found.tobytes().decode() == "a\N{REPLACEMENT CHARACTER}\0b\0"


def test_the_advice_for_another_field_works(read, tmp_path):
    path = written(tmp_path / "a.parquet", pa.array([[1, 2]]), "ids")
    with pytest.raises(UserError, match=r"set data\.field, or data\.source=tokens if it has token"):
        read(path, field="ids")
    assert read(path, "tokens", field="ids").tolist() == [1, 2]
    path = written(tmp_path / "b.parquet", pa.array([{"b": "x"}]))
    with pytest.raises(UserError, match=r"a field of text: text\.b, or"):
        read(path)
    assert read(path, field="text.b").tobytes() == b"x\0"


IDS = [3, 1, 255, 0, 7]


@pytest.mark.parametrize("kind", [np.int32, np.uint8, np.int64])
def test_token_ids_are_read_as_they_are(read, tmp_path, kind):
    np.save(tmp_path / "a.npy", np.array(IDS, kind))
    assert read(tmp_path / "a.npy", "tokens").tolist() == IDS
    np.array(IDS, kind).tofile(tmp_path / "a.bin")
    name = np.dtype(kind).name
    assert read(tmp_path / "a.bin", "tokens", ids=name).tolist() == IDS
    for suffix in ("parquet", "arrow"):
        column = pa.array([IDS[:2], None, [], IDS[2:]], pa.list_(pa.from_numpy_dtype(kind)))
        path = written(tmp_path / f"a.{suffix}", column, "input_ids")
        assert read(path, "tokens").tolist() == IDS
    lines = [json.dumps({"input_ids": part}) for part in (IDS[:1], [], None, IDS[1:])]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert read(tmp_path / "a.jsonl", "tokens").tolist() == IDS


def test_the_files_of_nanogpt_and_of_llm_c(tmp_path):
    home = tmp_path / "bin"
    home.mkdir()
    ids = np.arange(1000, dtype=np.uint16)
    ids.tofile(home / "train.bin")
    ids[:10].tofile(home / "val.bin")
    data = Data("tokens", str(home), cache=str(tmp_path / "cache"), tokenizer="none")
    found = read_tokens(data)
    assert found.train.tolist() == ids.tolist() and found.valid.tolist() == list(range(10))
    assert found.vocab == 1000
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 1000
    (home / "train.bin").write_bytes(header.tobytes() + ids.tobytes())
    assert read_tokens(data).train.tolist() == ids.tolist()
    # Without its end, the header would be read as tokens.
    (home / "train.bin").write_bytes(header.tobytes() + ids[:400].tobytes())
    with pytest.raises(UserError, match=r"names 1,000 token ids, but the file has 400"):
        read_tokens(data)


def test_a_second_array_in_a_file_is_not_ignored(read, tmp_path):
    with open(tmp_path / "a.npy", "wb") as file:
        np.save(file, np.arange(3))
        np.save(file, np.arange(4))
    with pytest.raises(UserError, match="but its array ends after 152; save one array"):
        read(tmp_path / "a.npy", "tokens")


def test_ids_outside_the_vocabulary_are_refused(read, tmp_path):
    np.save(tmp_path / "a.npy", np.array([1, 256]))
    with pytest.raises(UserError, match=r"token id 256, but .*=bytes are from 0 to 255.*=none"):
        read(tmp_path / "a.npy", "tokens")
    assert read(tmp_path / "a.npy", "tokens", tokenizer="none").tolist() == [1, 256]
    np.save(tmp_path / "a.npy", np.array([1, -1]))
    with pytest.raises(UserError, match="token id -1"):
        read(tmp_path / "a.npy", "tokens", tokenizer="none")


def test_the_model_needs_a_vocabulary_for_all_ids(tmp_path):
    np.save(tmp_path / "train.npy", np.arange(300))
    np.save(tmp_path / "valid.npy", np.arange(30))
    data = Data("tokens", str(tmp_path), cache=str(tmp_path / "cache"), tokenizer="none")
    sizes: Any = dict(context=8, layers=1, embed=8, heads=1, head_dim=8, mlp=8)
    with pytest.raises(UserError, match=r"largest id of the tokens is 299.*model\.vocab to 300"):
        data.sources(GPT2Config(vocab=256, **sizes))
    assert len(data.sources(GPT2Config(vocab=300, **sizes))[0]) == 37
    with pytest.raises(UserError, match="has no text"):
        next(training_text(data))


@pytest.mark.parametrize(("name", "content", "says"), [
    ("a.bin", b"\0\1\2", "not a multiple of the 2 bytes of uint16; set data.ids"),
    ("a.npy", b"\0\1\2", "save it again with numpy.save"),
    ("a.jsonl", b'{"input_ids": ["a"]}', "line 1: field 'input_ids' is not a list of token ids"),
    ("a.jsonl", b'{"input_ids": [1.5]}', "line 1: field 'input_ids' is not a list of token ids"),
    ("a.jsonl", b'{"text": "a"}', "line 1 has no field 'input_ids', only text; set data.field"),
    ("a.txt", b"a", "does not have a supported format: .npy, .bin"),
])  # fmt: skip
def test_files_without_token_ids_are_named(read, tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as refused:
        read(tmp_path / name, "tokens")
    assert says in str(refused.value) and str(tmp_path / name) in str(refused.value)


def test_settings_without_effect_are_refused():
    settings: Any
    for settings in ({"ids": "int32"}, {"tokenizer": "none"}):
        with pytest.raises(ValueError, match=r"data\.source=tokens"):
            Data(**settings)
    with pytest.raises(ValueError, match=r"no effect on data\.source=tokens"):
        Data("tokens", "a", bos=False)


@pytest.mark.slow
def test_a_row_group_need_not_fit_into_memory(tmp_path):
    """A writer may put a complete file into one row group. By default, readers load it at once."""
    count = 100_000
    one = pa.table({"body": [f"{i:02000}" for i in range(count)]})
    small_pages = {"use_dictionary": False, "write_batch_size": 8, "data_page_size": 1 << 14}
    pq.write_table(one, tmp_path / "a.parquet", count, compression="none", **small_pages)
    with using_limits(bytes=100 << 20):
        assert sum(1 for _ in formats.read_documents(tmp_path / "a.parquet", "body")) == count

"""Damaged safetensors files give our error or the tensors, and use little memory."""

import io
import json
import resource
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from jaxgrow.checkpoints.io.files import CheckpointError
from jaxgrow.checkpoints.io.safetensors import DTYPES, read_header, read_tensors

NUMBERS = {"a": np.arange(6, dtype="f4").reshape(2, 3), "b": np.ones(4, "f2"), "c": np.zeros(0)}
WHOLE = save(NUMBERS)
LENGTH = int.from_bytes(WHOLE[:8], "little")
FOLDER = tempfile.TemporaryDirectory(prefix="jaxgrow-fuzz-")
MANY = settings(max_examples=150)


def packed(head: bytes, data: bytes = WHOLE[8 + LENGTH :], length: int | None = None) -> bytes:
    return (len(head) if length is None else length).to_bytes(8, "little") + head + data


def read(content: bytes) -> dict[str, np.ndarray] | None:
    """Return the tensors of a file, or None if it was refused.

    Any error other than `CheckpointError` is a failure, and so is the use of 200 MB of memory.
    """
    file = Path(FOLDER.name) / "model.safetensors"
    file.write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        known = read_header(file).items()
        return {n: t.read() for n, t in known if t.stored in DTYPES and len(t.shape) <= 32}
    except CheckpointError as error:
        assert "model.safetensors" in str(error)
        return None
    finally:
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB


def test_the_whole_file_is_read():
    found = read(WHOLE)
    assert found is not None
    assert found.keys() == NUMBERS.keys()
    for name, x in NUMBERS.items():
        np.testing.assert_array_equal(found[name], x)


def test_a_tensor_is_read_completely_although_the_system_returns_less_at_once(monkeypatch):
    """Linux reads at most 2 GiB at once, and embeddings of large models are larger than that."""

    class Short(io.FileIO):
        def readinto(self, buffer):
            return super().readinto(memoryview(buffer)[:5])

    opened = Path.open

    def short(path, mode="r", buffering=-1, **options):
        return Short(path) if buffering == 0 else opened(path, mode, buffering, **options)

    monkeypatch.setattr(Path, "open", short)
    test_the_whole_file_is_read()


@MANY
@given(st.integers(0, len(WHOLE) - 1), st.integers(0, 255))
def test_any_byte_may_be_another(place, byte):
    content = bytearray(WHOLE)
    content[place] = byte
    read(bytes(content))


@given(st.integers(0, len(WHOLE) - 1))
def test_no_part_of_a_file_is_taken_for_the_whole(size):
    assert read(WHOLE[:size]) is None


@given(st.binary(min_size=1, max_size=64))
def test_nothing_may_follow(more):
    assert read(WHOLE + more) is None


@MANY
@given(st.binary(max_size=200), st.one_of(st.none(), st.integers(0, 2**64 - 1)))
@example(b"", 2**64 - 1)
@example(b"{}", 100_000_001)
@example(b"[" * 200, None)
def test_any_bytes(head, length):
    read(packed(head, length=length))


WORDS = ["dtype", "shape", "data_offsets", "a", "__metadata__"]
DTYPE_NAMES = ["F32", "F16", "BF16", "F64", "I8", "U64", "BOOL", "F8_E4M3", "F4", "C64"]
LIMITS = st.sampled_from([2**31, 2**32, 2**63 - 1, 2**64 - 1])
NATURALS = st.one_of(st.integers(0, 32), st.integers(-1, 2**65), LIMITS)
STRINGS = st.sampled_from(["F32", "I8", "F4", "Q9", "", "\0"])
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NATURALS, st.floats(), STRINGS),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4)
    ),
    max_leaves=8,
)
OFFSETS = st.tuples(NATURALS, NATURALS) | st.tuples(st.integers(0, 32), st.integers(0, 32)) | JSON
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(DTYPE_NAMES) | JSON,
        "shape": st.lists(NATURALS, max_size=4) | JSON,
        "data_offsets": OFFSETS,
    }
)


@MANY
@given(JSON)
def test_any_json(content):
    read(packed(json.dumps(content).encode()))


@MANY
@given(st.lists(st.tuples(st.sampled_from("aabcd"), ENTRY), max_size=4))
def test_any_entries_also_under_one_name(entries):
    """Offsets overlap, go backwards or exceed the file; sizes overflow; names are repeated."""
    head = "{" + ",".join(f'"{name}":{json.dumps(entry)}' for name, entry in entries) + "}"
    read(packed(head.encode()))


@pytest.mark.parametrize("bracket", ["[", '{"a":'])
def test_deep_json(bracket):
    assert read(packed((bracket * 1_000_000).encode())) is None


@pytest.mark.parametrize("change", [
    *({"data_offsets": [0, 23]}, {"data_offsets": [4, 28]}, {"data_offsets": [24, 0]}),
    *({"shape": [2, 4]}, {"shape": [2**40, 2**40]}, {"more": 1, "shape": None}),
    *({"dtype": "F64"}, {"dtype": "F33"}),
])  # fmt: skip
def test_an_entry_that_does_not_fit_is_refused(change):
    entries: dict[str, Any] = json.loads(WHOLE[8 : 8 + LENGTH])
    entries["a"] |= change
    assert read(packed(json.dumps(entries).encode())) is None


@MANY
@given(JSON)
def test_any_index(content):
    folder = Path(FOLDER.name) / "sharded"
    folder.mkdir(exist_ok=True)
    (folder / "x.safetensors").write_bytes(WHOLE)
    for index in (content, {"weight_map": content}, {"weight_map": {"a": content}}):
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        try:
            assert read_tensors(folder).keys() <= NUMBERS.keys()
        except CheckpointError as error:
            assert str(folder) in str(error)

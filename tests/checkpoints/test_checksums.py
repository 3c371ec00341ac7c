"""The checksums of a folder detect every kind of damage that a disk can do to its files."""

import hashlib
import os
import shutil
import threading

import numpy as np
import pytest

from jaxgrow.checkpoints.io.checksums import damage, seal
from train.extras.cache import block_digest

CONTENT = {
    "_METADATA": b'{"a": [1, 2]}',
    "d/0f": bytes(range(0, 256, 5)),
    "d/manifest": b"",
    "data/process_0.json": b"3\n",
}


@pytest.fixture
def folder(tmp_path):
    for name, content in CONTENT.items():
        (tmp_path / "a" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "a" / name).write_bytes(content)
    seal(tmp_path / "a")
    return tmp_path / "a"


def test_an_intact_folder_passes_after_a_move_and_hidden_files(folder, tmp_path):
    assert damage(folder) is None
    shutil.move(folder, tmp_path / "b")
    (tmp_path / "b" / "d" / ".nfs0001").write_bytes(b"what a network file system leaves")
    assert damage(tmp_path / "b") is None


def test_the_checksums_are_those_that_sha256sum_reads(folder):
    lines = [f"{hashlib.sha256(x).hexdigest()}  {name}" for name, x in sorted(CONTENT.items())]
    assert (folder / "SHA256SUMS").read_text().splitlines() == lines


def test_every_flipped_bit_of_every_file_is_detected(folder):
    for name in [*CONTENT, "SHA256SUMS"]:
        content = (folder / name).read_bytes()
        for at in range(len(content)):
            changed = bytearray(content)
            changed[at] ^= 1 << at % 8
            (folder / name).write_bytes(changed)
            found = damage(folder)
            assert found and (name in found or name == "SHA256SUMS"), (name, at)
        (folder / name).write_bytes(content)
    assert damage(folder) is None


def test_every_cut_of_every_file_is_found(folder):
    for name in [*CONTENT, "SHA256SUMS"]:
        content = (folder / name).read_bytes()
        for size in range(len(content)):
            os.truncate(folder / name, size)
            assert damage(folder), (name, size)
            (folder / name).write_bytes(content)


def test_a_file_that_is_lost_longer_or_new_is_named(folder):
    for name, content in CONTENT.items():
        (folder / name).unlink()
        assert damage(folder) == f"{name} is missing"
        (folder / name).write_bytes(content + b"\0")
        assert damage(folder) == f"{name} has changed"
        (folder / name).write_bytes(content)
    (folder / "d" / "new").touch()
    assert damage(folder) == "d/new is not in SHA256SUMS"
    for name in CONTENT:
        (folder / name).unlink()
    first = ", ".join(f"{name} is missing" for name in ("_METADATA", "d/0f", "d/manifest"))
    assert damage(folder) == f"{first} and 2 more"
    (folder / "SHA256SUMS").unlink()
    assert damage(folder) == "it has no SHA256SUMS. The file was lost"


def test_files_are_read_in_parallel(folder, monkeypatch):
    together = threading.Barrier(len(CONTENT), timeout=10)
    digest = hashlib.file_digest

    def waiting(*arguments):
        together.wait()
        return digest(*arguments)

    monkeypatch.setattr("hashlib.file_digest", waiting)
    assert damage(folder) is None
    seal(folder)
    assert damage(folder) is None


def test_what_the_disk_can_no_longer_read_is_damaged(folder, monkeypatch):
    def broken(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("hashlib.file_digest", broken)
    assert "d/0f cannot be read: Input/output error" in (damage(folder) or "")


@pytest.mark.parametrize("size", [0, 1, 7, 8, 1 << 17, (1 << 17) + 1, (8 << 20) + 3])
def test_a_digest_by_blocks_changes_with_each_word_and_the_size(tmp_path, size):
    file = tmp_path / "a"
    content = np.random.default_rng(0).bytes(size)
    file.write_bytes(content)
    digest = block_digest(file)
    assert digest == block_digest(file)
    for place in {0, size // 2, size - 1} if size else ():
        changed = bytearray(content)
        changed[place] ^= 1
        file.write_bytes(changed)
        assert block_digest(file) != digest
    for other in (content + b"\0", content[:-1] if size else b"a", content[8:] + content[:8]):
        file.write_bytes(other)
        assert (block_digest(file) == digest) == (other == content)

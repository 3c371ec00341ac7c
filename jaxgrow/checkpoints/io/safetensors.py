"""How are safetensors files read and written without having all tensors in memory?

The `safetensors` library checks the headers. It reads by memory-mapping files, whose pages count as
used memory, and it writes only when given all tensors at once. Therefore this module reads and
writes the bytes itself.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxgrow.checkpoints.io.files import (
    SHARD,
    CheckpointError,
    inside,
    read_json,
    write_json,
)
from jaxgrow.typed import Json
from jaxgrow.untrusted import CheckedPath, chosen_file

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(jnp.bfloat16),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
# The largest header, or index, in bytes. The safetensors library has the same limit.
LARGEST_HEADER = 100 << 20
# Bytes are copied in chunks that stay in the CPU cache between reading and writing.
_CHUNK = 1 << 20
FILE = "model.safetensors"
INDEX = FILE + ".index.json"


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file. Its values are not read yet.

    Args:
      file: the file.
      name: the name of the tensor.
      stored: its dtype, as the format names it.
      shape: its shape.
      begin: the offset of its first byte in the file.
      size: its size in bytes.
    """

    file: CheckedPath
    name: str
    stored: str
    shape: tuple[int, ...]
    begin: int
    size: int

    @property
    def dtype(self) -> np.dtype:
        """The dtype as NumPy has it.

        Raises:
          CheckpointError: the dtype is not one of `DTYPES`.
        """
        if self.stored not in DTYPES:
            raise CheckpointError(
                f"{self.file}: tensor {self.name!r} has dtype {self.stored}; convert it to one of {', '.join(DTYPES)}"
            )
        return DTYPES[self.stored]

    def read(self) -> np.ndarray:
        out = np.empty(self.shape, self.dtype)
        with self._at() as file:
            self._fill(out.reshape(-1).view(np.uint8).data, file)
        return out

    def sample(self, size: int = 2048) -> bytes:
        """Return the first and the last ``size`` bytes."""
        with self._at() as file:
            first = file.read(min(size, self.size))
            file.seek(self.begin + max(0, self.size - size))
            return first + file.read(min(size, self.size))

    def equals(self, other: "Tensor") -> bool:
        """Whether another tensor has the same dtype, shape and bytes."""
        if (self.stored, self.shape) != (other.stored, other.shape):
            return False
        with self._at() as one, other._at() as two:
            chunks = (min(_CHUNK, self.size - begin) for begin in range(0, self.size, _CHUNK))
            return all(one.read(size) == two.read(size) for size in chunks)

    def copy(self, out: BinaryIO) -> None:
        """Copy the bytes of the tensor to a file that is open for writing."""
        buffer = memoryview(bytearray(min(_CHUNK, self.size)))
        with self._at() as file:
            for begin in range(0, self.size, _CHUNK):
                chunk = buffer[: self.size - begin]
                self._fill(chunk, file)
                out.write(chunk)

    def _fill(self, buffer: memoryview, file: Any) -> None:
        """Fill the buffer with bytes of the file."""
        while buffer:
            # Linux reads at most 2 GiB at once.
            count = file.readinto(buffer)
            if not count:
                raise self._cut()
            buffer = buffer[count:]

    def _at(self) -> Any:
        file = self.file.open(buffering=0)
        file.seek(self.begin)
        return file

    def _cut(self) -> CheckpointError:
        return CheckpointError(
            f"{self.file} ends within tensor {self.name!r}: it became shorter while it was read"
        )


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a folder by name.

    They are in ``model.safetensors``, or in the shards that ``model.safetensors.index.json`` lists.
    The index decides which tensor is read from which shard. The result does not have the tensors
    that are missing in their shard, or whose shard is missing.

    Raises:
      CheckpointError: the folder does not have these files, or they are damaged.
    """
    if os.path.lexists(folder / FILE):
        return read_header(inside(folder, FILE))
    if not os.path.lexists(folder / INDEX):
        raise CheckpointError(f"{folder} has neither {FILE} nor {INDEX}")
    where = indexed_files(folder)
    found: dict[str, Tensor] = {}
    # `inside` refuses a name that leads out of the folder, also if that file does not exist.
    for file in sorted({*where.values()}.difference(absent_files(folder, where))):
        for name, tensor in read_header(inside(folder, file)).items():
            if where.get(name) == file:
                found[name] = tensor
    return found


def indexed_files(folder: Path) -> dict[str, str]:
    """Return the file of each tensor that the index names. A tensor in another file is not read.

    The result is empty if there is one file, because then the index is not read.
    """
    if os.path.lexists(folder / FILE):
        return {}
    index = inside(folder, INDEX)
    where = read_json(index, LARGEST_HEADER).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
        raise CheckpointError(f"{index} has no weight_map from tensors to files. Download it again")
    if wrong := [name for name in where.values() if not name.endswith(".safetensors")]:
        raise CheckpointError(
            f"{index} names {wrong[0]!r}, which is not a .safetensors file. Download the index again"
        )
    return where


def absent_files(folder: Path, where: Mapping[str, str]) -> list[str]:
    """Return the names of missing files in the folder, of those that `indexed_files` found."""
    named = (name for name in {*where.values()} if name == Path(name).name)
    return sorted(name for name in named if not os.path.lexists(folder / name))


def read_header(file: CheckedPath | Path) -> dict[str, Tensor]:
    """Return the tensors of one file by name.

    Args:
      file: the file; a plain path is one that the user named.

    Raises:
      CheckpointError: the file is truncated, or its header is damaged.
    """
    file = chosen_file(file)
    try:
        with safe_open(os.fspath(file), framework="np"):
            # The library checks that the header is complete and has at most 100 MB, that each
            # tensor has the size of its shape and dtype, and that the tensors cover the file without
            # gaps and overlaps.
            pass
        with file.open() as raw:
            length = int.from_bytes(raw.read(8), "little")
            entries = json.loads(raw.read(length))
    except (SafetensorError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file} is not a complete safetensors file: {error}. Download it again"
        ) from error
    found = {}
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        found[name] = Tensor(
            file, name, entry["dtype"], tuple(entry["shape"]), 8 + length + first, last - first
        )
    return found


@dataclass(frozen=True)
class Planned:
    """A tensor to be written.

    Args:
      name: its name.
      dtype: its dtype.
      shape: its shape.
      content: a function that returns the values. A `Tensor` on disk is copied without conversion.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    content: Callable[[], Tensor | np.ndarray]

    @property
    def size(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_tensors(
    folder: Path,
    planned: Iterable[Planned],
    shard: int = SHARD,
    done: Callable[[int], object] = lambda n: None,
) -> None:
    """Write ``model.safetensors``, or shards and their index, with one tensor in memory at a time.

    Args:
      folder: a folder that exists.
      planned: the tensors to write.
      shard: the largest size of a file in bytes.
      done: a function that is called with the size in bytes of each tensor that has been written.
    """
    files = _shards(planned, shard)
    names = (
        [FILE]
        if len(files) == 1
        else [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    )
    total = 0
    weight_map: dict[str, str] = {}
    for name, content in zip(names, files, strict=True):
        write_file(folder / name, content, done)
        total += sum(p.size for p in content)
        weight_map |= {p.name: name for p in content}
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / INDEX, index)


def _shards(planned: Iterable[Planned], shard: int) -> list[list[Planned]]:
    files: list[list[Planned]] = [[]]
    size = 0
    for p in planned:
        if files[-1] and size + p.size > shard:
            files.append([])
            size = 0
        files[-1].append(p)
        size += p.size
    return files


def write_file(
    path: Path, planned: Sequence[Planned], done: Callable[[int], object] = lambda n: None
) -> None:
    """Write one safetensors file.

    Args:
      path: the new file.
      planned: the tensors to write.
      done: as for `write_tensors`.

    Raises:
      CheckpointError: the dtype of a tensor is not one of `DTYPES`.
    """
    # Tensors of wide dtypes come first, so that every tensor is aligned to its dtype.
    planned = sorted(planned, key=lambda p: -p.dtype.itemsize)
    # transformers does not load files without this entry.
    entries: Json = {"__metadata__": {"format": "pt"}}
    end = 0
    for p in planned:
        if p.dtype not in NAMES:
            raise CheckpointError(
                f"tensor {p.name!r} has dtype {p.dtype}, which is not written; convert it to one of "
                f"{', '.join(dtype.name for dtype in NAMES)}"
            )
        begin = end
        end += p.size
        entries[p.name] = {"dtype": NAMES[p.dtype], "shape": p.shape, "data_offsets": [begin, end]}
    head = json.dumps(entries, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as out:
        out.write(len(head).to_bytes(8, "little") + head)
        for p in planned:
            content = p.content()
            if isinstance(content, Tensor):
                content.copy(out)
            else:
                assert (content.shape, content.dtype) == (p.shape, p.dtype), p
                out.write(np.ascontiguousarray(content).reshape(-1).view(np.uint8).data)
            done(p.size)

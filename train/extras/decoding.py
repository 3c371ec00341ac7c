"""How is a data file opened that is not trusted?

Only regular files are opened. A decoder gets as much as `jaxgrow.untrusted.file_limits` allows, and
every error of a decoder becomes one line.
"""

import bz2
import codecs
import io
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxgrow.typed import Json
from jaxgrow.untrusted import UntrustedError, checked_path, file_limits, open_regular
from train.common.errors import UserError, is_full_disk
from train.common.files import parsed_json

ENDINGS = ("", ".gz", ".xz", ".zst")  # of a file that may be compressed
_BUFFER = 1 << 17
_DICTIONARY = 128 << 20  # bytes that any .xz file may need to be decompressed


@contextmanager
def readable_file(name: object, way_out: str = "") -> Iterator[None]:
    """Turn each error of a decoder into one line that names the file.

    Args:
      name: the file, or its place in words.
      way_out: the end of the message.

    Raises:
      UserError: the block failed. A panic of a library in Rust is not an `Exception`, but fails as
        well.
    """
    try:
        yield
    except UserError:
        raise
    except UntrustedError as error:
        raise UserError(str(error)) from error
    except BaseException as error:
        panic = type(error).__name__ == "PanicException"
        if is_full_disk(error) or not (isinstance(error, Exception) or panic):
            raise
        plain = isinstance(error, OSError) or not type(error).__module__.startswith("builtins")
        what = f"{error}" if plain and f"{error}" else f"{type(error).__name__}: {error}"
        end = f"; {way_out}" if way_out else ""
        raise UserError(f"cannot read {name}: {' '.join(what.split())[:500]}{end}") from error


def in_folder(folder: Path, file: Path) -> Path:
    """The real path of a file that was found in a folder, if it has no link out of the folder.

    Raises:
      UntrustedError: a link leads out of the folder.
    """
    return checked_path(folder, file.relative_to(folder).as_posix(), deep=True).path


def stored_file(file: Path) -> Path | None:
    """Return the file as it is or compressed; None if there is neither."""
    files = (file.with_name(file.name + ending) for ending in ENDINGS)
    return next((f for f in files if f.is_file()), None)


@contextmanager
def open_data(path: Path) -> Iterator[Any]:
    """Open a regular file, or the decompressed content of a ``.gz``, ``.xz``, ``.bz2`` or ``.zst``.

    Raises:
      UntrustedError: the path is a folder, a device or a FIFO. While it is read: it decompresses to
        too much.
      UserError: the text is UTF-16.
    """
    with open_regular(path.resolve()) as raw:
        decode = COMPRESSED.get(path.suffix)
        file: Any = raw if decode is None else decompress_stream(raw, decode, path)
        with file:
            if file.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                raise UserError(
                    f"{path} is UTF-16, not UTF-8; convert it, for example with iconv -f UTF-16 -t UTF-8"
                )
            yield file


def decompress_stream(raw: Any, decode: Callable[[Any], Any], path: Path) -> io.BufferedReader:
    """The decompressed content of an open file, which is counted while it is read."""
    return io.BufferedReader(_Counted(decode(raw), path, os.fstat(raw.fileno()).st_size), _BUFFER)


def limited_lines(file: Any, path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the place, in words, and the content of each line of bytes or text.

    Raises:
      UntrustedError: a line is too long. A decoder needs a whole line in memory.
    """
    longest = file_limits().record
    n = 0
    while line := file.readline(longest + 1):
        n += 1
        if len(line) > longest:
            file_limits().check(f"{path}, line {n}, or its first part,", record=len(line))
        yield f"{path}, line {n}", line


def read_regular(path: Path) -> bytes:
    """The bytes of a small regular file, as they are stored.

    Raises:
      UntrustedError: it is not a regular file, or it is larger than a record may be.
    """
    with open_regular(path) as file:
        file_limits().check(str(path), record=os.fstat(file.fileno()).st_size)
        return file.read()


def read_all(path: Path) -> bytes:
    """The decompressed content of a file that is held in memory.

    Raises:
      UserError: the file cannot be read or decompressed, or it is too large.
    """
    with readable_file(path):
        file_limits().check(str(path), bytes=path.stat().st_size)
        with open_data(path) as file:
            content = file.read(file_limits().bytes + 1)
        file_limits().check(f"{path}, or its first part,", bytes=len(content))
        return content


def json_object(path: Path, way_out: str) -> Json:
    """The JSON object in a small file, which may come from others.

    Raises:
      UserError: the file is missing or damaged, or does not hold a JSON object.
    """
    with readable_file(path, way_out):
        try:
            return parsed_json(read_regular(path))
        except UntrustedError:
            raise
        except ValueError as error:
            raise UserError(f"{path} is damaged: {error}; {way_out}") from error


class _Counted(io.RawIOBase):
    """A decompressed stream, which ends with an error when it becomes too large for its file."""

    def __init__(self, stream: Any, path: Path, size: int):
        super().__init__()
        self._stream = stream
        self._path = path
        self._size = size
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._stream.read(len(buffer))
        buffer[: len(content)] = content
        self._moved(self._place + len(content))
        return len(content)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END:
            raise OSError("the size of a compressed file is not known")
        target = offset + (self._place if whence == io.SEEK_CUR else 0)
        while target > self._place and (
            content := self._stream.read(min(_BUFFER, target - self._place))
        ):
            self._moved(self._place + len(content))
        if target < self._place:
            self._stream.seek(target)
            self._place = target
        return self._place

    def tell(self) -> int:
        return self._place

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()

    def _moved(self, place: int) -> None:
        file_limits().check_expansion(str(self._path), place, self._size)
        self._place = place


class _Streams:
    """The decompressed content of streams that follow each other, perhaps with zeros between them.

    Args:
      raw: the open file.
      start: creates the decompressor of a stream.
    """

    def __init__(self, raw: Any, start: Callable[[], Any]):
        self._raw = raw
        self._start = start
        self._decoder: Any = start()
        self._rest = b""

    def read(self, size: int) -> bytes:
        while True:
            if self._decoder.eof:
                self._rest = self._decoder.unused_data
                # `gzip` skips such zeros one by one.
                while not (rest := self._rest.lstrip(b"\0")):
                    if not (content := self._raw.read(_BUFFER)):
                        return b""
                    self._rest = content
                self._rest, self._decoder = rest, self._start()
            data, self._rest = self._rest, b""
            ended = not data and self._decoder.needs_input and not (data := self._raw.read(_BUFFER))
            try:
                content = self._decoder.decompress(data, size)
            except (lzma.LZMAError, MemoryError) as error:
                if isinstance(error, MemoryError) or "limit" in str(error):
                    raise lzma.LZMAError(
                        f"it needs more than {file_limits().bytes:,} bytes of memory; if you trust the file, use "
                        f"--limits bytes={8 * file_limits().bytes}"
                    ) from error
                raise
            if content:
                return content
            if ended and not self._decoder.eof:
                raise EOFError("the compressed file ended before its end was marked")

    def seek(self, target: int) -> None:
        self._raw.seek(0)
        self._decoder, self._rest = self._start(), b""
        while target and (content := self.read(min(target, _BUFFER))):
            target -= len(content)

    def close(self) -> None:
        self._decoder = None


class _Gzip:
    """A decompressor of one stream, like those of `bz2` and `lzma`."""

    def __init__(self):
        self._decoder = zlib.decompressobj(31)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    @property
    def needs_input(self) -> bool:
        return not self._decoder.unconsumed_tail

    def decompress(self, data: bytes, size: int) -> bytes:
        return self._decoder.decompress(self._decoder.unconsumed_tail + data, size)


def _xz() -> Any:
    return lzma.LZMADecompressor(memlimit=max(_DICTIONARY, file_limits().bytes))


def _zstd(raw: Any) -> Any:
    import pyarrow as pa

    return pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd")


# File suffix -> function that decompresses an open file.
COMPRESSED: dict[str, Callable[[Any], Any]] = {
    ".gz": lambda raw: _Streams(raw, _Gzip),
    ".xz": lambda raw: _Streams(raw, _xz),
    ".bz2": bz2.BZ2File,
    ".zst": _zstd,
}
# The first bytes of compressed files.
MAGIC = {b"\x1f\x8b": ".gz", b"\xfd7zXZ": ".xz", b"BZh": ".bz2", b"\x28\xb5\x2f\xfd": ".zst"}

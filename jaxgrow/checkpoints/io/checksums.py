"""How are changed or lost files detected? A folder stores the SHA-256 of each of its files.

The checksums are in the file ``SHA256SUMS``, which ``sha256sum -c SHA256SUMS`` verifies as well.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from jaxgrow.untrusted import CheckedPath, UntrustedError, checked_path, chosen_file

NAME = "SHA256SUMS"
_LARGEST = 100 << 20  # bytes of this file
_THREADS = 8
A = TypeVar("A")
B = TypeVar("B")


class Sums(NamedTuple):
    """A kind of checksums: the file that has them, and the function that computes one."""

    name: str
    digest: Callable[[CheckedPath | Path], str]


def seal(folder: Path, sums: "Sums | None" = None) -> None:
    """Write the checksums of all files of a folder into its ``SHA256SUMS``, or a file of ``sums``."""
    kind = sums or Sums(NAME, sha256)
    with (folder / kind.name).open("wb") as out:
        names = sorted(_summed_files(folder) - {kind.name})
        digests = _in_parallel(kind.digest, [folder / name for name in names])
        out.write(_sums_text(dict(zip(names, digests, strict=True))))
        out.flush()
        os.fsync(out.fileno())


def damage(folder: Path, sums: "Sums | None" = None) -> str | None:
    """Describe how a folder differs from its checksums, or return None if it does not.

    Every file is read completely. Hidden files that were added later are ignored.

    Args:
      folder: the folder.
      sums: the kind of its checksums; None: SHA-256.
    """
    kind = sums or Sums(NAME, sha256)
    if not (folder / kind.name).is_file():
        return f"it has no {kind.name}. The file was lost"
    try:
        with checked_path(folder, kind.name).open() as file:
            content = file.read(_LARGEST)
    except UntrustedError as error:
        return str(error)
    lines = (line.partition("  ") for line in content.decode(errors="replace").splitlines())
    sealed = {name: digest for digest, _, name in lines}
    there = _summed_files(folder) - {kind.name}
    # Without this line, an emptied folder would equal its emptied checksums.
    wrong = [] if sealed and content == _sums_text(sealed) else [f"{kind.name} has changed"]
    wrong += [
        f"{name} is not in {kind.name}"
        for name in there - sealed.keys()
        if not Path(name).name.startswith(".")
    ]

    def difference(name: str) -> str | None:
        if name not in there:
            return f"{name} is missing"
        try:
            file = checked_path(folder, name, deep=True)
            return f"{name} has changed" if kind.digest(file) != sealed[name] else None
        except UntrustedError as error:
            return str(error)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"

    wrong += [text for text in _in_parallel(difference, list(sealed)) if text is not None]
    if not wrong:
        return None
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return ", ".join(sorted(wrong)[:3]) + more


def _summed_files(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


def _sums_text(sealed: dict[str, str]) -> bytes:
    return "".join(f"{digest}  {name}\n" for name, digest in sealed.items()).encode()


def _in_parallel(function: Callable[[A], B], each: Sequence[A]) -> list[B]:
    # `hashlib` and reads release the lock of the interpreter. A large checkpoint has many files, and
    # a run waits for their checksums before it continues.
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(function, each))


def sha256(path: CheckedPath | Path) -> str:
    """Return the SHA-256 of the content of a file, in hexadecimal."""
    with chosen_file(path).open() as file:
        return hashlib.file_digest(cast(Any, file), "sha256").hexdigest()


# Words and bytes in a block of `block_digest`, and bytes that a thread reads at once.
_BLOCK = 1 << 14
_BYTES = 8 * _BLOCK
_PART = 64 * _BYTES


def block_digest(path: CheckedPath | Path) -> str:
    """Return a digest of a file that is computed about as fast as the file is read.

    It detects damage: the sum of the words of a block, times odd weights and modulo 2^64, changes
    with each word. Unlike `sha256`, it does not tell whether two files have the same content.
    """
    weights = np.frombuffer(hashlib.shake_128(b"weights").digest(_BYTES), "<u8") | 1
    with chosen_file(path).open(buffering=0) as file:
        size = os.fstat(file.fileno()).st_size

        def part(begin: int) -> bytes:
            content = b""
            while more := os.pread(file.fileno(), _PART - len(content), begin + len(content)):
                content += more
            words = np.frombuffer(content.ljust(-(-len(content) // _BYTES) * _BYTES, b"\0"), "<u8")
            return (words.reshape(-1, _BLOCK) @ weights).tobytes()

        parts = _in_parallel(part, range(0, size, _PART))
    return hashlib.sha256(b"".join(parts) + size.to_bytes(8, "little")).hexdigest()

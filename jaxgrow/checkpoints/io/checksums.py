"""How are changed or lost files detected? A folder stores the SHA-256 of each of its files.

The checksums are in the file ``SHA256SUMS``, which ``sha256sum -c SHA256SUMS`` verifies as well.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

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


def sha256(path: CheckedPath | Path) -> str:
    """Return the SHA-256 of the content of a file, in hexadecimal."""
    with chosen_file(path).open() as file:
        return hashlib.file_digest(cast(Any, file), "sha256").hexdigest()


SHA256 = Sums(NAME, sha256)


def seal(folder: Path, kind: Sums = SHA256) -> None:
    """Write the checksums of all files of a folder into its file of this kind."""
    with (folder / kind.name).open("wb") as out:
        names = sorted(_summed_files(folder) - {kind.name})
        digests = in_parallel(kind.digest, [folder / name for name in names])
        out.write(_sums_text(dict(zip(names, digests, strict=True))))
        out.flush()
        os.fsync(out.fileno())


def damage(folder: Path, kind: Sums = SHA256) -> str | None:
    """Describe how a folder differs from its checksums, or return None if it does not.

    Every file is read completely. Hidden files that were added later are ignored.

    Args:
      folder: the folder.
      kind: the kind of its checksums.
    """
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

    wrong += [text for text in in_parallel(difference, list(sealed)) if text is not None]
    if not wrong:
        return None
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return ", ".join(sorted(wrong)[:3]) + more


def _summed_files(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


def _sums_text(sealed: dict[str, str]) -> bytes:
    return "".join(f"{digest}  {name}\n" for name, digest in sealed.items()).encode()


def in_parallel(function: Callable[[A], B], each: Sequence[A]) -> list[B]:
    """Apply a function that reads files in several threads."""
    # `hashlib` and reads release the lock of the interpreter. A large checkpoint has many files, and
    # a run waits for their checksums before it continues.
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(function, each))

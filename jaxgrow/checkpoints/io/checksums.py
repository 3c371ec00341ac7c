"""How are changed or lost files detected? A folder stores the SHA-256 of each of its files.

The checksums are in the file ``SHA256SUMS``, which ``sha256sum -c SHA256SUMS`` verifies as well.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, cast

from jaxgrow.untrusted import CheckedPath, UntrustedError, checked, chosen_file

NAME = "SHA256SUMS"
_LARGEST = 100 << 20  # bytes of this file
_THREADS = 8
A = TypeVar("A")
B = TypeVar("B")


def seal(folder: Path) -> None:
    """Write the checksums of all files of a folder into its ``SHA256SUMS``."""
    with (folder / NAME).open("wb") as out:
        names = sorted(_files(folder))
        digests = _in_parallel(sha256, [folder / name for name in names])
        out.write(_text(dict(zip(names, digests, strict=True))))
        out.flush()
        os.fsync(out.fileno())


def damage(folder: Path) -> str | None:
    """Describe how a folder differs from its checksums, or return None if it does not.

    Every file is read completely. Hidden files that were added later are ignored.

    Args:
      folder: the folder.
    """
    if not (folder / NAME).is_file():
        return f"it has no {NAME}. The file was lost, or the folder was saved by an older version"
    try:
        with checked(folder, NAME).open() as file:
            content = file.read(_LARGEST)
    except UntrustedError as error:
        return str(error)
    lines = content.decode(errors="replace").splitlines()
    sealed: dict[str, str] = {}
    for line in lines:
        digest, _, name = line.partition("  ")
        sealed[name] = digest
    there = _files(folder)
    # Without this line, an emptied folder would equal its emptied checksums.
    wrong = [] if sealed and content == _text(sealed) else [f"{NAME} has changed"]
    wrong += [
        f"{name} is not in {NAME}"
        for name in there - sealed.keys()
        if not Path(name).name.startswith(".")
    ]

    def difference(name: str) -> str | None:
        if name not in there:
            return f"{name} is missing"
        try:
            file = checked(folder, name, deep=True)
            return f"{name} has changed" if sha256(file) != sealed[name] else None
        except UntrustedError as error:
            return str(error)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"

    wrong += [text for text in _in_parallel(difference, list(sealed)) if text is not None]
    if not wrong:
        return None
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return ", ".join(sorted(wrong)[:3]) + more


def _files(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} - {NAME}


def _text(sealed: dict[str, str]) -> bytes:
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

"""How are changed or lost files detected? A folder stores the SHA-256 of each of its files.

The checksums are in the file ``SHA256SUMS``, which ``sha256sum -c SHA256SUMS`` verifies as well.
"""

import hashlib
import os
from pathlib import Path

NAME = "SHA256SUMS"


def seal(folder: Path) -> None:
    """Write the checksums of all files of a folder into its ``SHA256SUMS``."""
    with (folder / NAME).open("wb") as out:
        out.write(_text({name: sha256(folder / name) for name in sorted(_files(folder))}))
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
    content = (folder / NAME).read_bytes()
    lines = content.decode(errors="replace").splitlines()
    sealed: dict[str, str] = {}
    for line in lines:
        digest, _, name = line.partition("  ")
        sealed[name] = digest
    there = _files(folder)
    wrong = [] if content == _text(sealed) else [f"{NAME} has changed"]
    wrong += [
        f"{name} is not in {NAME}"
        for name in there - sealed.keys()
        if not Path(name).name.startswith(".")
    ]
    for name, digest in sealed.items():
        try:
            if name not in there:
                wrong.append(f"{name} is missing")
            elif sha256(folder / name) != digest:
                wrong.append(f"{name} has changed")
        except OSError as error:
            wrong.append(f"{name} cannot be read: {error.strerror}")
    if not wrong:
        return None
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return ", ".join(sorted(wrong)[:3]) + more


def _files(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} - {NAME}


def _text(sealed: dict[str, str]) -> bytes:
    return "".join(f"{digest}  {name}\n" for name, digest in sealed.items()).encode()


def sha256(path: Path) -> str:
    """Return the SHA-256 of the content of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""SHA-256 of every file of a folder, in its ``SHA256SUMS``: what a disk changed or lost afterwards is found.

``sha256sum -c SHA256SUMS`` reads it, too.
"""

import hashlib
import os
from pathlib import Path

NAME = "SHA256SUMS"


def seal(folder: Path) -> None:
    """Writes the checksums of all that is in ``folder``."""
    with (folder / NAME).open("wb") as out:
        out.write(_text({name: _digest(folder / name) for name in sorted(_files(folder))}))
        out.flush()
        os.fsync(out.fileno())


def damage(folder: Path) -> str | None:
    """What in ``folder`` is not as it was sealed, or None. Every byte is read, but for hidden files that came later."""
    if not (folder / NAME).is_file():
        return f"it has no {NAME}: lost, or saved by a version that wrote none"
    content = (folder / NAME).read_bytes()
    lines = content.decode(errors="replace").splitlines()
    sealed = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
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
            elif _digest(folder / name) != digest:
                wrong.append(f"{name} has changed")
        except OSError as error:  # a disk that can no longer read it
            wrong.append(f"{name} cannot be read: {error.strerror}")
    return (
        ", ".join(sorted(wrong)[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        or None
    )


def _files(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} - {NAME}


def _text(sealed: dict[str, str]) -> bytes:
    return "".join(f"{digest}  {name}\n" for name, digest in sealed.items()).encode()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
